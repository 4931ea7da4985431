"""Run flake8-async with less work.

    python tests/async_rules.py [OPTION ...] FILE ...

The positions of a file's nodes are found once, not once for each rule, and there is no search for
garbage, which its trees do not make. Options, output and exit status are those of ``flake8-async``.
There is no ``--autofix``, after which each rule has another tree.
"""

import gc
import sys
from collections.abc import Iterator

import libcst
from flake8_async import main, runner
from flake8_async.base import Error
from flake8_async.visitors.visitors import Visitor300


def run(self: runner.Flake8AsyncRunner_cst) -> Iterator[Error]:
    """Let all rules visit the same tree, which none of them changes."""
    assert not self.options.autofix_codes, "there is no --autofix: use flake8-async"
    wrapper = libcst.MetadataWrapper(self.module, unsafe_skip_copy=True)
    for visitor in (*self.utility_visitors, *self.visitors):
        # The rule on tasks of asyncio (300) finds none in a file that does not import it.
        if not isinstance(visitor, Visitor300) or _imports_asyncio(self):
            wrapper.visit(visitor)
    yield from self.state.problems
    self.noqas = self.state.noqas


def _imports_asyncio(self: runner.Flake8AsyncRunner_cst) -> bool:
    return any(name.partition(".")[0] == "asyncio" for name in self.state.imports.values())


if __name__ == "__main__":
    gc.disable()
    runner.Flake8AsyncRunner_cst.run = run
    sys.exit(main())
