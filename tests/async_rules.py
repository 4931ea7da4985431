"""Run flake8-async with less work.

    python tests/async_rules.py [OPTION ...] FILE ...

The positions of a file's nodes are found once, not once for each rule. A rule visits only the parts
of a tree that have nodes of its kinds. There is no search for garbage, which the trees do not make.
Options, output and exit status are those of ``flake8-async``.
There is no ``--autofix``, after which each rule has another tree.
"""

import functools
import gc
import itertools
import re
import sys
from collections.abc import Iterator
from typing import Any

import libcst
from flake8_async import main, runner
from flake8_async.base import Error
from flake8_async.visitors.flake8asyncvisitor import Flake8AsyncVisitor_cst as Rule
from flake8_async.visitors.visitors import Visitor300

_visit = libcst.CSTNode.visit
_numbers = itertools.count()
#: The kinds in each node of the file by its id, with the node, so that no other gets the id.
_known: dict[int, tuple[int, libcst.CSTNode]] = {}


def run(self: runner.Flake8AsyncRunner_cst) -> Iterator[Error]:
    """Let all rules visit the same tree, which none of them changes."""
    assert not self.options.autofix_codes, "there is no --autofix: use flake8-async"
    wrapper = libcst.MetadataWrapper(self.module, unsafe_skip_copy=True)
    for visitor in (*self.utility_visitors, *self.visitors):
        # The rule on tasks of asyncio (300) finds none in a file that does not import it.
        if not isinstance(visitor, Visitor300) or _imports_asyncio(self):
            wrapper.visit(visitor)
    _known.clear()
    yield from self.state.problems
    self.noqas = self.state.noqas


def _imports_asyncio(self: runner.Flake8AsyncRunner_cst) -> bool:
    return any(name.partition(".")[0] == "asyncio" for name in self.state.imports.values())


def visit(self: libcst.CSTNode, visitor: Any) -> Any:
    """Visit a node, unless the visitor is a rule that has no method for anything in it."""
    if isinstance(visitor, Rule) and not _kinds_in(self) & _kinds_of(type(visitor)):
        return self
    return _visit(self, visitor)


@functools.cache
def _bit(kind: str) -> int:
    return 1 << next(_numbers)


def _kinds_in(node: libcst.CSTNode) -> int:
    """Return a bit for each kind of node in this part of a tree."""
    if id(node) not in _known:
        bits = _bit(type(node).__name__)
        for field in type(node).__dataclass_fields__:
            value = getattr(node, field)
            for each in value if isinstance(value, list | tuple) else (value,):
                if isinstance(each, libcst.CSTNode):
                    bits |= _kinds_in(each)
        _known[id(node)] = bits, node
    return _known[id(node)][0]


@functools.cache
def _kinds_of(rule: type[Rule]) -> int:
    """Return the bits of the kinds for which a rule has a method; those of its base do nothing."""
    bits = 0
    for name in dir(rule):
        found = re.fullmatch(r"(?:visit|leave)_([A-Z]\w*?)(?:_[a-z]\w*)?", name)
        if found and not getattr(getattr(rule, name), "_is_no_op", False):
            bits |= _bit(found[1])
    return bits


if __name__ == "__main__":
    gc.disable()
    libcst.CSTNode.visit = visit
    runner.Flake8AsyncRunner_cst.run = run
    sys.exit(main())
