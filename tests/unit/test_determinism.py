"""No module gets a source of chance, or an order by chance, that a simulation does not control."""

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from support.imports import modules

import sdk_trio

FILES = modules(Path(sdk_trio.__file__).parent)

#: Names that a simulation replaces in their own module. A copy of the name would escape it.
REPLACED = {
    "os": {"getpid", "urandom"},
    "random": {"betavariate", "choice", "expovariate", "randint", "random", "shuffle", "uniform"},
    "time": {"monotonic", "monotonic_ns", "perf_counter", "sleep", "time", "time_ns"},
    "trio": {"sleep", "sleep_until"},
    "uuid": {"uuid4"},
}

#: Calls whose result no seed decides.
UNCONTROLLED = {
    "asyncio.run",
    "multiprocessing.Process",
    "os.getrandom",
    "os.times",
    "random.SystemRandom",
    "select.select",
    "time.clock_gettime",
    "time.localtime",
    "time.process_time",
    "time.thread_time",
    "uuid.uuid1",
    "uuid.uuid6",
    "uuid.uuid7",
}

#: Built-in functions whose result differs from process to process.
BY_PROCESS = {"hash", "id"}

#: Functions whose result does not depend on the order of their argument.
ORDERLESS = {"all", "any", "frozenset", "len", "max", "min", "set", "sorted", "sum", "discard"}

#: Uses after which equal seeds are equal nevertheless: the module, the use, and the reason.
ALLOWED = {
    ("sdk_trio.admin.feed", "order of self._listeners"): "each listener gets the same",
    ("sdk_trio.base.foreign_errors", "id()"): "only shows whether an exception was seen",
    ("sdk_trio.cli.run", "order of faulty"): "becomes a part of a set",
    ("sdk_trio.cli.shutdown", "select.select()"): "the process, before it runs anything",
    ("sdk_trio.cli.tenant_credentials", "order of set(tenant.credentials.sources)"): "counts them",
    ("sdk_trio.cli.tenant_import", "order of set(tenant.credentials.sources)"): "counts them",
    ("sdk_trio.client.layers", "order of self._scopes"): "Trio orders the tasks that it wakes",
    ("sdk_trio.client.layers.admission", "order of self._waiting"): "changes each by itself",
    ("sdk_trio.client.portal", "order of self._jobs"): "wakes threads, which are not simulated",
    ("sdk_trio.config.secret", "hash()"): "the hash of an object, for dictionaries",
    ("sdk_trio.config.sources", "order of places"): "becomes a mapping that is looked up",
    ("sdk_trio.config.table", "order of paths"): "becomes a mapping that is looked up",
    ("sdk_trio.runtime.systemd", "time.clock_gettime()"): "a message to systemd",
    ("sdk_trio.server.head", "hash()"): "compares lines in one process; the lines decide",
    ("sdk_trio.storage.locations", "order of _WRITTEN_BY_STARTS"): "deletes from each table",
    ("sdk_trio.storage.engines.postgres_connection", "order of self._connections"): (
        "PostgreSQL is not simulated"
    ),
    ("sdk_trio.storage.memory.inbox", "order of named"): "the caller asks about each by itself",
    ("sdk_trio.storage.memory.rows", "hash()"): "compares two bodies in one process",
    ("sdk_trio.storage.memory.rows", "order of _RECORDED"): "becomes a record's fields",
    ("sdk_trio.storage.postgres_inbox", "order of self._in_use"): "PostgreSQL is not simulated",
    ("sdk_trio.storage.readers", "order of self._readings"): "Trio orders the tasks that it starts",
    ("sdk_trio.storage.known_keys", "hash()"): "a filter: a collision of 64 bits costs one query",
    ("sdk_trio.tenants.feed", "order of self._flags"): "Trio orders the tasks that it wakes",
    ("sdk_trio.webhooks.markers", "order of packages"): "looks for one that was imported",
}


def _is_set(node: ast.expr | None) -> bool:
    """Return whether an expression, or an annotation, is that of a set."""
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.Call | ast.Subscript):
        made = node.func if isinstance(node, ast.Call) else node.value
        return isinstance(made, ast.Name) and made.id in {"set", "frozenset", "AbstractSet"}
    return False


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return ""


def _sets(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names that are annotated as sets, or get one."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.AnnAssign) and _is_set(node.annotation):
            names.add(_name(node.target))
        elif isinstance(node, ast.Assign) and _is_set(node.value):
            names |= {_name(target) for target in node.targets}
        elif isinstance(node, ast.arg) and _is_set(node.annotation):
            names.add(node.arg)
    return names - {""}


def _scopes(tree: ast.Module) -> Iterator[tuple[ast.AST, set[str]]]:
    """Yield each function and the rest of the module, with the names of sets in it."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    attributes = {name for name in _sets(ast.walk(tree)) if "." in name}
    constants = _sets(tree.body)
    yield (
        ast.Module(
            [
                node
                for node in tree.body
                if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            ],
            [],
        ),
        constants,
    )
    for node in ast.walk(tree):
        if isinstance(node, functions):
            yield node, attributes | constants | _sets(ast.walk(node))


def _iterated(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions of a module whose order decides something."""
    orderless: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func).rpartition(".")[2] in ORDERLESS:
            orderless |= set(node.args)
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.AsyncFor):
            yield node.iter
        elif isinstance(node, ast.ListComp | ast.GeneratorExp | ast.DictComp):
            if node not in orderless:
                yield from (each.iter for each in node.generators)
        elif isinstance(node, ast.Starred) and isinstance(node.ctx, ast.Load):
            yield node.value
        elif isinstance(node, ast.Call) and _name(node.func) in {"iter", "list", "tuple", "next"}:
            yield from node.args[:1] if node not in orderless else ()
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "pop" and not node.args and not node.keywords:
                yield node.func.value
            elif node.func.attr == "join":
                yield from node.args


@functools.cache
def _finds(module: str) -> list[tuple[str, int]]:
    """Return the sources of chance in a module: a name for :data:`ALLOWED`, and the line."""
    return list(_finds_in(ast.parse(FILES[module].read_text(encoding="utf-8"))))


def _finds_in(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module in REPLACED:
            for name in {each.name for each in node.names} & REPLACED[node.module]:
                yield f"from {node.module} import {name}", node.lineno
        elif isinstance(node, ast.Call):
            called = _name(node.func)
            if called in UNCONTROLLED or called in BY_PROCESS:
                yield f"{called}()", node.lineno
    for scope, sets in _scopes(tree):
        for iterated in _iterated(scope):
            if _is_set(iterated) or _name(iterated) in sets:
                yield f"order of {ast.unparse(iterated)}", iterated.lineno


@pytest.mark.parametrize("module", FILES)
def test_no_module_has_a_source_of_chance_of_its_own(module):
    found = [
        f"{module}:{line} {name}" for name, line in _finds(module) if (module, name) not in ALLOWED
    ]
    assert not found, (
        f"equal seeds of a simulation could differ by {found}; sort, use base, or give a reason"
    )


def test_each_exception_is_needed():
    found = {(module, name) for module in FILES for name, _ in _finds(module)}
    assert ALLOWED.keys() <= found


def test_sources_of_chance_are_found(tmp_path, monkeypatch):
    source = """
from random import random
import uuid


class Queue:
    def __init__(self):
        self._waiting: set[str] = set()

    def take(self, names: frozenset[str]) -> list[str]:
        first = self._waiting.pop()
        key = hash(first) + id(first) + uuid.uuid1().int
        ordered = sorted(names) + [len(name) for name in sorted(self._waiting)]
        return [first, *names, ", ".join(self._waiting), *(name for name in {"a", "b"})]
"""
    file = tmp_path / "planted.py"
    file.write_text(source)
    monkeypatch.setitem(FILES, "planted", file)
    assert {name for name, _ in _finds("planted")} == {
        "from random import random",
        "hash()",
        "id()",
        "uuid.uuid1()",
        "order of names",
        "order of self._waiting",
        "order of {'a', 'b'}",
    }
