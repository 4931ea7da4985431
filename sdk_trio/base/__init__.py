"""Mechanisms shared by several packages; nothing here depends on webhooks.

:func:`importing` gives a package lazy attributes, imported on first use (PEP 562).
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def importing(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module ``__getattr__`` for ``package``.

    ``homes`` maps each name to the submodule that defines it. Each name is imported once and is
    then an ordinary attribute of the package.
    """

    def look_up(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{home}"), name)
        setattr(import_module(package), name, value)
        return value

    return look_up
