"""Deterministic simulation: the real runtime in virtual worlds, which a seed determines.

Start reading at :func:`simulate`. ``plan`` decides what happens; ``world`` carries it out with
``host``, ``sender``, ``disk``, ``machine``, ``threads``, ``virtual`` and ``scheduler``; ``audit``
judges; ``stories`` shrinks a failure and describes it.
"""
