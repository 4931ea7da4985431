"""The command line: ``sdk-trio`` and ``python -m sdk_trio``.

Every command of ``cli.commands`` is imported when it is chosen, so that ``--help`` is fast.
"""

from .runner import main

__all__ = ["main"]
