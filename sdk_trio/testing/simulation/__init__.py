"""Deterministic simulation: the real runtime in virtual worlds, which a seed decides.

:func:`simulate` is the entrance. ``plan`` decides what happens; ``world`` carries it out with
``host``, ``sender``, ``disk``, ``machine``, ``threads``, ``virtual`` and ``scheduler``; ``audit``
judges; ``stories`` shrinks and tells a failure.
"""
