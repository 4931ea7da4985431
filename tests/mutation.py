"""Change the code that decides what is authentic, one small change at a time: a test must fail.

    python tests/mutation.py [--modules signature verdict] [--properties] [--match TEXT] [--list]

Every mutant runs the tests of signatures and verdicts up to the first failure, in a process forked
from this one: nothing is imported twice, and most mutants do not even collect the tests. A mutant
is killed if a test fails, if it cannot be imported, or if it exceeds its time. Survivors are
printed, and the exit status is 1, unless mutants.toml lists them with the reason why they are
equivalent to the original. ``--properties`` runs only the property tests, to show what they detect
without examples.
"""

import argparse
import ast
import contextlib
import copy
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import BuiltinMethodType, CodeType, FunctionType, ModuleType

import _pytest.main
import attrs
import hypothesis
import hypothesis.configuration
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "sdk_trio.webhooks"
MODULES = ("signature", "verdict")

PROPERTIES = (
    "test_verdict_model",
    "test_verdict_properties",
    "test_signature_properties",
    "test_signature_sizes",
)
EXAMPLES = ("test_verdict_details", "test_signature", "test_verdict")
#: What is quick and fails for most mutants comes first.
TESTS = (*EXAMPLES, *PROPERTIES, "test_signature_interoperation")

#: Many times what the whole set of tests takes; so it detects a mutant that loops forever.
SECONDS = 180

#: Mutants that behave as the original does, grouped by the reason. A mutant is named by its place
#: and by the changed text as ``ast.unparse`` writes it, so that lines may move.
EQUIVALENT = Path(__file__).with_name("mutants.toml")

#: What the constants of a module are; a bound method of a compiled expression among them.
CONSTANTS = (int, str, bytes, dict, frozenset, BuiltinMethodType)

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq, ast.LtE, ast.GtE),
    ast.NotEq: (ast.Eq, ast.Lt, ast.Gt),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}
METHODS = {
    "startswith": "endswith",
    "lower": "upper",
    "islower": "isascii",
    "isdigit": "isalnum",
    "ljust": "rjust",
    "fullmatch": "match",
    "append": "count",
}


@attrs.frozen
class Mutant:
    """One change: ``key`` names it without line numbers, ``source`` is the whole module."""

    module: str
    key: str
    source: str


def mutants(module: str) -> Iterator[Mutant]:
    """Yield every mutant of a module, in the order of its text."""
    before = _unchanged(module)
    tree = ast.parse(before)
    for place, node, parent, field, index in _spots(tree, module):
        for replacement in _alternatives(node):
            _put(parent, field, index, replacement)
            after = ast.unparse(ast.fix_missing_locations(tree))
            _put(parent, field, index, node)
            if after != before:
                yield Mutant(module, f"{place}: {_difference(before, after)}", after)


def _unchanged(module: str) -> str:
    file = ROOT / PACKAGE.replace(".", "/") / f"{module}.py"
    return ast.unparse(ast.parse(file.read_text(encoding="utf-8")))


def _put(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def _difference(before: str, after: str) -> str:
    old, new = before.splitlines(), after.splitlines()
    while old and new and old[0] == new[0]:
        del old[0], new[0]
    while old and new and old[-1] == new[-1]:
        del old[-1], new[-1]
    return " => ".join(" ".join(line.strip() for line in lines) for lines in (old, new))


Spot = tuple[str, ast.AST, ast.AST, str, int | None]


def _spots(node: ast.AST, place: str) -> Iterator[Spot]:
    """Yield every node that runs, with where it hangs; annotations and docstrings do not run."""
    for field, value in ast.iter_fields(node):
        if field in {"annotation", "returns", "decorator_list", "ctx", "type_params", "names"}:
            continue
        children = value if isinstance(value, list) else [value]
        for index, child in enumerate(children):
            if not isinstance(child, ast.AST) or _is_docstring(child):
                continue
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            named = isinstance(child, ast.FunctionDef | ast.ClassDef)
            inner = f"{place}.{child.name}" if named else place
            yield inner, child, node, field, index if isinstance(value, list) else None
            yield from _spots(child, inner)


def _is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _alternatives(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the possible replacements of a node."""
    match node:
        case ast.Constant(value=value):
            yield from (ast.Constant(other) for other in _other_values(value))
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            for number, operator in enumerate(ops):
                for other in COMPARISONS[type(operator)]:
                    swapped = [*ops[:number], other(), *ops[number + 1 :]]
                    yield ast.Compare(left, swapped, comparators)
        case ast.BoolOp(op=operator, values=values):
            yield ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)
            for number in range(len(values)):
                rest = [*values[:number], *values[number + 1 :]]
                yield rest[0] if len(rest) == 1 else ast.BoolOp(operator, rest)
        case ast.UnaryOp(operand=operand):
            yield operand
        case ast.BinOp(left=left, op=operator, right=right):
            if type(operator) in OPERATORS:
                yield ast.BinOp(left, OPERATORS[type(operator)](), right)
            yield left
            yield right
        case ast.IfExp(body=body, orelse=otherwise):
            yield body
            yield otherwise
        case ast.Slice(lower=lower, upper=upper):
            yield ast.Slice(None, upper)
            yield ast.Slice(lower, None)
            for change in (ast.Add(), ast.Sub()):
                if lower is not None:
                    yield ast.Slice(ast.BinOp(lower, change, ast.Constant(1)), upper)
                if upper is not None:
                    yield ast.Slice(lower, ast.BinOp(upper, change, ast.Constant(1)))
        case ast.Call():
            yield from _other_calls(node)
        case ast.stmt():
            yield from _other_statements(node)
        case ast.comprehension(ifs=conditions, iter=iterated):
            for number in range(len(conditions)):
                rest = [*conditions[:number], *conditions[number + 1 :]]
                yield ast.comprehension(node.target, iterated, rest, 0)
            for parts in _parts_of(iterated)[:2]:
                yield ast.comprehension(node.target, parts, conditions, 0)
        case ast.ExceptHandler():
            yield ast.ExceptHandler(node.type, node.name, [ast.Raise()])


def _other_values(value: object) -> Sequence[object]:
    match value:
        case bool():
            return (not value,)
        case int():
            return (value + 1, value - 1)
        case str():
            return (f"X{value}",)
        case bytes():
            return (b"X" + value, value[1:]) if value else (b"X",)
    return ()


def _other_calls(node: ast.Call) -> Iterator[ast.expr]:
    if isinstance(node.func, ast.Attribute):
        if node.func.attr in METHODS:
            swapped = ast.Attribute(node.func.value, METHODS[node.func.attr], ast.Load())
            yield ast.Call(swapped, node.args, node.keywords)
        yield node.func.value  # the call left out: value.lower() is value
    for number in range(len(node.keywords)):
        rest = [*node.keywords[:number], *node.keywords[number + 1 :]]
        yield ast.Call(node.func, node.args, rest)


def _other_statements(node: ast.stmt) -> Iterator[ast.stmt]:
    match node:
        case ast.If(test=test, body=body, orelse=otherwise):
            for condition in (ast.Constant(True), ast.Constant(False)):
                yield ast.If(condition, body, otherwise)
            yield ast.If(ast.UnaryOp(ast.Not(), test), body, otherwise)
        case ast.For(iter=iterated):
            for parts in _parts_of(iterated):
                changed = copy.copy(node)
                changed.iter = parts
                yield changed
        case ast.Return(value=value) if value is not None:
            nothing = isinstance(value, ast.Constant) and value.value is None
            yield ast.Return(ast.Constant(True if nothing else None))
            yield ast.Pass()
        case ast.Continue():
            yield ast.Break()
            yield ast.Pass()
        case ast.Break():
            yield ast.Continue()
            yield ast.Pass()
        case ast.Expr() | ast.Raise() | ast.AugAssign() | ast.Assign():
            yield ast.Pass()
        case ast.AnnAssign(value=value) if value is not None and node.simple:
            yield ast.AnnAssign(node.target, node.annotation, None, 1)


def _parts_of(iterated: ast.expr) -> list[ast.expr]:
    """Return loops that leave out the first or the last turn, or go the other way round."""
    one_less = ast.UnaryOp(ast.USub(), ast.Constant(1))
    parts = (ast.Slice(ast.Constant(1)), ast.Slice(None, one_less), ast.Slice(None, None, one_less))
    whole = ast.Call(ast.Name("list", ast.Load()), [iterated], [])
    return [ast.Subscript(whole, part, ast.Load()) for part in parts]


# -- running -------------------------------------------------------------------------------------


@attrs.define
class _Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the mutant to each import of the module."""

    mutant: Mutant

    def find_spec(
        self, fullname: str, path: object, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != f"{PACKAGE}.{self.mutant.module}":
            return None
        return importlib.util.spec_from_loader(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        exec(_compiled(self.mutant.source), module.__dict__)


def _in_a_child(run: Callable[[], bool]) -> bool:
    """Return what ``run`` returns in a child process; False if it raises or outlasts its time."""
    child = os.fork()
    if child == 0:
        passed = False
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            passed = run()
        finally:
            os._exit(0 if passed else 1)
    started = time.monotonic()
    while time.monotonic() - started < SECONDS:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.002)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


def _test(tests: Sequence[str], plugins: Sequence[object] = ()) -> int:
    # Assertions as they are: what a failure looks like does not matter, and it is quicker.
    options = ["-x", "-s", "--assert=plain", "-o", "addopts=--import-mode=importlib"]
    # The last but one collects all garbage, every time; the last one takes long to import.
    for name in ("terminal", "cacheprovider", "unraisableexception", "schemathesis"):
        options += ["-p", f"no:{name}"]
    options += ["--hypothesis-profile=mutation", "--hypothesis-seed=1"]
    files = [str(ROOT / "tests" / "unit" / f"{name}.py") for name in tests]
    return int(pytest.main([*options, *files], list(plugins)))


@attrs.define
class _Loop:
    """Runs the collected tests once for each mutant of a function's code or a module's constant.

    The tests are collected against the unchanged modules; a child process then exchanges code and
    constants and runs them. So nothing is imported or collected again. The test that killed a
    mutant comes first for the next one, which is much like it.
    """

    mutants: Sequence[tuple[Mutant, CodeType]]
    survived: Callable[[Mutant, bool], None]
    killer: Path
    unchanged: bool = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.freeze()
        self.unchanged = _in_a_child(partial(self._passes, session))
        for mutant, code in self.mutants if self.unchanged else ():
            module = importlib.import_module(f"{PACKAGE}.{mutant.module}")
            alive = _in_a_child(partial(self._tried, session, module, code))
            self.survived(mutant, alive)
            if not alive and self.killer.exists():
                name = self.killer.read_text()
                session.items.sort(key=lambda item: item.nodeid != name)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.killer.write_text(report.nodeid)

    def _tried(self, session: pytest.Session, module: ModuleType, code: CodeType) -> bool:
        fresh = ModuleType(module.__name__)
        fresh.__package__ = module.__package__
        sys.modules[module.__name__] = fresh
        exec(code, fresh.__dict__)
        sys.modules[module.__name__] = module
        for name, value in list(vars(module).items()):
            if isinstance(value, CONSTANTS) and not name.startswith("__"):
                delattr(module, name)
                if hasattr(fresh, name):
                    setattr(module, name, getattr(fresh, name))
        changed = dict(_functions_in(code))
        for function in _functions_of(module):
            function.__code__ = changed.get(function.__qualname__, function.__code__)
        return self._passes(session)

    def _passes(self, session: pytest.Session) -> bool:
        with contextlib.suppress(session.Failed):
            _pytest.main.pytest_runtestloop(session)
        return session.testsfailed == 0


def _compiled(source: str) -> CodeType:
    return compile(source, "<mutant>", "exec")


def _functions_in(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """Yield functions and methods by their qualified names, those within functions left out."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if _is_function(constant):
                yield constant.co_qualname, constant
            else:
                yield from _functions_in(constant)


def _is_function(code: CodeType) -> bool:
    """Whether it is the code of a function with a name: no class, and no generator expression."""
    return bool(code.co_flags & inspect.CO_OPTIMIZED) and not code.co_name.startswith("<")


def _functions_of(module: ModuleType) -> Iterator[FunctionType]:
    owners = [module, *(value for value in vars(module).values() if isinstance(value, type))]
    for owner in owners:
        for value in vars(owner).values():
            bare = value.fget if isinstance(value, property) else value
            bare = getattr(bare, "__func__", bare)
            if isinstance(bare, FunctionType) and bare.__module__ == module.__name__:
                yield bare


def _skeleton(code: CodeType) -> object:
    """Everything that runs when the module is imported, without the bodies of its functions."""
    constants = [
        one
        if not isinstance(one, CodeType)
        else one.co_qualname
        if _is_function(one)
        else _skeleton(one)
        for one in code.co_consts
    ]
    return code.co_code, code.co_names, repr(constants)


def _imported_again(mutant: Mutant, tests: Sequence[str]) -> bool:
    sys.meta_path.insert(0, _Instead(mutant))
    return _test(tests) == 0


def _prepare(directory: Path) -> None:
    """Import beforehand what every child needs; never a module that has mutants."""
    os.chdir(ROOT)
    for name in ("cryptography.hazmat.primitives.asymmetric.ed25519", "svix.webhooks"):
        importlib.import_module(name)
    for name in ("sdk_trio.config", "sdk_trio.errors", "pytest_trio", "hypothesis.strategies"):
        importlib.import_module(name)
    # What one mutant failed on is nothing to begin the next one with.
    hypothesis.configuration.set_hypothesis_home_dir(directory)
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutation", deadline=None, database=None, phases=phases)
    loaded = [name for name in sys.modules if name.startswith(f"{PACKAGE}.")]
    assert not loaded, f"already imported, so no mutant would run: {loaded}"


def main() -> int:
    options = _parser().parse_args()
    chosen = [
        mutant
        for module in options.modules
        for mutant in mutants(module)
        if options.match in mutant.key
    ]
    if options.list:
        print(*(mutant.key for mutant in chosen), sep="\n")
        return 0
    tests = PROPERTIES if options.properties else TESTS
    reasons = _reasons()
    survivors: list[Mutant] = []
    started = time.monotonic()

    def survived(mutant: Mutant, alive: bool) -> None:
        if alive:
            survivors.append(mutant)
            if mutant.key not in reasons:
                print("SURVIVED", mutant.key, flush=True)

    with tempfile.TemporaryDirectory() as directory:
        _prepare(Path(directory))
        skeletons = {module: _skeleton(_compiled(_unchanged(module))) for module in MODULES}
        quick: list[tuple[Mutant, CodeType]] = []
        # First what has to be imported again: the others leave the modules here.
        for mutant in chosen:
            try:
                code = _compiled(mutant.source)
            except SyntaxError:
                continue
            constant = mutant.key.startswith("signature: ")
            if constant or _skeleton(code) == skeletons[mutant.module]:
                quick.append((mutant, code))
            else:
                survived(mutant, _in_a_child(partial(_imported_again, mutant, tests)))
        loop = _Loop(quick, survived, Path(directory) / "killer")
        _test(tests, [loop])
    if not loop.unchanged:
        print("the tests fail without any change: run them")
        return 2
    seconds = time.monotonic() - started
    alive = [mutant for mutant in survivors if mutant.key not in reasons]
    print(f"{len(chosen)} mutants, {len(chosen) - len(survivors)} killed, ", end="")
    print(f"{len(survivors) - len(alive)} equivalent, {len(alive)} survived, {seconds:.0f} s")
    stale = _stale(reasons, chosen, survivors) if not options.properties else []
    print(*(f"no longer an equivalent mutant: {key}" for key in stale), sep="\n", end="")
    return 1 if alive or stale else 0


def _reasons() -> dict[str, str]:
    """Return the reason of each mutant that is known to be equivalent."""
    groups = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8"))["equivalent"]
    return {key: group["reason"] for group in groups for key in group["mutants"]}


def _stale(
    reasons: Mapping[str, str], chosen: Sequence[Mutant], survivors: Sequence[Mutant]
) -> list[str]:
    """Return what is called equivalent and was killed, or is made no more."""
    made = {mutant.key for mutant in chosen}
    unmade = reasons.keys() - made
    if unmade:
        unmade -= {mutant.key for module in MODULES for mutant in mutants(module)}
    killed = made & reasons.keys() - {mutant.key for mutant in survivors}
    return sorted(unmade | killed)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--modules", nargs="+", default=MODULES, choices=MODULES)
    made.add_argument("--properties", action="store_true", help="run the property tests alone")
    made.add_argument("--match", default="", help="only mutants whose key holds this text")
    made.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    return made


if __name__ == "__main__":
    sys.exit(main())
