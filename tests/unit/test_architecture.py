"""Rules of the package: exports, imports, the tree of exceptions, docstrings, comments."""

import ast
import collections
import functools
import graphlib
import importlib
import inspect
import pkgutil
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest
from support.imports import Import, imports_of, modules

import sdk_trio
from sdk_trio import errors

PACKAGE = Path(sdk_trio.__file__).parent


def _modules():
    for module in pkgutil.walk_packages([str(PACKAGE)], "sdk_trio."):
        if not module.name.endswith("__main__"):
            yield module.name


@pytest.mark.parametrize("name", ["sdk_trio", *_modules()])
def test_every_exported_name_exists(name):
    module = importlib.import_module(name)
    offered = getattr(module, "__all__", [])
    twice = [public for public, times in collections.Counter(offered).items() if times > 1]
    assert not twice, f"list these only once in {name}.__all__: {twice}"
    missing = [public for public in offered if getattr(module, public, None) is None]
    assert not missing, (
        f"{name}.__all__ has names that do not exist; import or remove them: {missing}"
    )


def test_the_public_names_are_listed_and_others_raise():
    assert set(sdk_trio.__all__) <= set(dir(sdk_trio))
    with pytest.raises(AttributeError, match="no_such_name"):
        sdk_trio.no_such_name  # noqa: B018 - the access itself is tested


def test_the_package_has_the_version_of_its_metadata():
    assert sdk_trio.__version__ == metadata.version("sdk-trio")


def _errors():
    return [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, Exception) and kind.__module__ == errors.__name__
    ]


@pytest.mark.parametrize("kind", _errors(), ids=lambda kind: kind.__name__)
def test_the_tree_of_exceptions_shows_each_below_its_parent(kind):
    lines = inspect.getdoc(errors).splitlines()
    depths = {}
    for line in lines:
        bare = line.lstrip(" │├└─")
        if bare.partition(" ")[0].isidentifier():
            depths.setdefault(bare.partition(" ")[0], (len(line) - len(bare), lines.index(line)))
    draw = f"draw {kind.__name__} below {kind.__mro__[1].__name__} in sdk_trio/errors.py"
    assert kind.__name__ in depths, draw
    if kind is not errors.SdkError:
        depth, place = depths[kind.__name__]
        above = [
            (line_place, name)
            for name, (its_depth, line_place) in depths.items()
            if its_depth < depth and line_place < place and hasattr(errors, name)
        ]
        assert max(above)[1] == kind.__mro__[1].__name__, draw
    assert kind.exit_code in (1, 2, 69, 78), "give it one of the exit codes that docs/ explain"


FILES = modules(PACKAGE)


class Facts(NamedTuple):
    """What the rules need to know of one module's syntax tree, which takes long to make."""

    imports: list[Import]
    classes: list[str]
    docstrings: list[tuple[str, str]]
    broad_excepts: list[int]
    names: set[str]


@functools.cache
def facts():
    """Return the facts of each module; its tree is not kept, because it is large."""
    found = {}
    for module, path in FILES.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found[module] = Facts(
            list(imports_of(tree, module, FILES)),
            [node.name for node in tree.body if isinstance(node, ast.ClassDef)],
            list(_docstrings(tree, module)),
            list(_broad_excepts(tree)),
            set(_defined_names(tree)),
        )
    return found


def imports_of_the_package():
    return [each for module in facts().values() for each in module.imports]


#: Modules with imports inside functions, and the parts that they load only if needed. All other
#: imports are at the top of their file.
LAZY_IMPORTS = {
    "sdk_trio.__main__": "the command line, after the help has been printed",
    "sdk_trio.cli.doctor.store": "PostgreSQL, an extra",
    "sdk_trio.cli.settings": "the store and tenants, for config check",
    "sdk_trio.cli.storage": "PostgreSQL, an extra",
    "sdk_trio.admin.app": "the feed, for the first listener",
    "sdk_trio.admin.console": "messages, where there are any",
    "sdk_trio.cli.doctor.run": "the checks of the network, which need the client",
    "sdk_trio.cli.alerts": "channels, where a message is sent",
    "sdk_trio.cli.notifications": "channels, where a message is sent",
    "sdk_trio.cli.run": "the upgrade from a single tenant",
    "sdk_trio.cli.main": "the settings, where a command reads them",
    "sdk_trio.cli.trigger": "credentials, where a tenant is named",
    "sdk_trio.config.load": "logs, where a source says something",
    "sdk_trio.cli.sign": "the store, where a secret is looked for beside it",
    "sdk_trio.client.pipeline": "tracing, an extra",
    "sdk_trio.net.http3_origins": "HTTP/3, an extra",
    "sdk_trio.runtime.console": "views, when a request needs them",
    "sdk_trio.runtime.preflight": "tenants, ssl",
    "sdk_trio.runtime.leader": "client, replication, leadership",
    "sdk_trio.runtime.state": "client, admin address, replication",
    "sdk_trio.runtime.wiring": "client, admin address, notifications, simulator",
    "sdk_trio.server.serve": "hypercorn",
    "sdk_trio.storage.memory.inbox": "tenants",
    "sdk_trio.storage.open": "the backends",
    "sdk_trio.storage.locations": "PostgreSQL, an extra",
    "sdk_trio.storage.inbox": "tenants, messages and the upgrade",
    "sdk_trio.testing.pytest_plugin": "pytest loads the plug-in in every project",
    "sdk_trio.webhooks.receiver": "tenants, the upgrade, tracing",
}

#: Each channel has its own file, even a short one.
ONE_EACH = "sdk_trio.notifications.channels."

#: Files of fewer than 80 lines with a single importer, and the reason for each.
SMALL = {
    "sdk_trio.admin.console_page": "the page itself, beside the console's API",
    "sdk_trio.client.layers.tracing": "an extra's door",
    "sdk_trio.runtime.forks": "a hook of the process; the runtime only switches it on",
    "sdk_trio.testing.notifications": "one subject of the kit, loaded when it is used",
}

#: Decisions in files with side effects. Modules of decisions only are in the import contract in
#: pyproject.toml instead.
DECISIONS = {
    "sdk_trio.client.layers.admission": "LimitPolicy RateLimiter",
    "sdk_trio.client.layers.breaker": "outcome_of_status",
    "sdk_trio.client.layers.retry": "RetryPolicy RetryBudget may_retry_status may_retry_failure",
    "sdk_trio.client.pages": "Page read_page with_page start_page",
    "sdk_trio.client.pipeline": "ClientConfig plan_of join_base origin_of token_problem",
    "sdk_trio.notifications.pump": "Pace",
    "sdk_trio.notifications.send": "RetrySchedule ending_of interrupted classify_response",
    "sdk_trio.replication.manifest": "render_manifest replica_path replica_url child_environment",
    "sdk_trio.replication.plan": "live_change difference with_control_socket",
    "sdk_trio.replication.replica": "parse_files parse_plan why_impossible find_gap",
    "sdk_trio.replication.verification": "VerificationState state_from_text",
    "sdk_trio.replication.watch": "Debounce",
    "sdk_trio.runtime.reload": "plan_reload",
    "sdk_trio.runtime.systemd": "read_environment with_inherited_sockets",
    "sdk_trio.tenants.service": "in_status audit_of refused outbox_of",
    "sdk_trio.tenants.upgrade": "choose_tenant step_names remaining_steps begin enter leave finish",
}

#: Modules for waiting, time, randomness and the machine.
WORLD = {"apsw", "httpx", "hypercorn", "os", "random", "socket", "time", "trio"}

#: With more remarks than this, the rule or the code is wrong.
MOST_REMARKS = 60


def test_imports_are_not_circular():
    needs = {name: set() for name in FILES}
    for importer, imported, _ in imports_of_the_package():
        # The package itself imports nothing until a name is used.
        if importer not in {"sdk_trio", imported}:
            needs[importer].add(imported)
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as circle:
        pytest.fail(
            "these modules import each other; move what both need into one below them, or hand it "
            "over as an argument: " + " -> ".join(reversed(circle.args[1]))
        )


def test_imports_inside_functions_are_listed():
    inside = collections.defaultdict(list)
    for each in imports_of_the_package():
        if each.inside:
            inside[each.importer].append(each.imported)
    new = {importer: names for importer, names in inside.items() if importer not in LAZY_IMPORTS}
    assert not new, (
        "move these imports to the top of their files; if most starts do without what they load, "
        f"add the module to LAZY_IMPORTS with that reason: {new}"
    )
    closed = set(LAZY_IMPORTS) - set(inside)
    assert not closed, f"take out of LAZY_IMPORTS what imports nothing inside a function: {closed}"


@pytest.mark.parametrize("module", DECISIONS)
def test_a_decision_takes_clock_randomness_and_environment_as_arguments(module):
    body = ast.parse(FILES[module].read_text(encoding="utf-8")).body
    found = {node.name: node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    gone = [name for name in DECISIONS[module].split() if name not in found]
    assert not gone, f"name in DECISIONS what {module} has now: {gone}"
    for name in DECISIONS[module].split():
        # A name that is read, not the ``time`` of an attribute or of an argument.
        used = {each.id for each in ast.walk(found[name]) if isinstance(each, ast.Name)} & WORLD
        assert not used, f"{module}.{name} uses {used}: give it the value as an argument"


def test_small_files_have_a_reason():
    importers = collections.defaultdict(set)
    for importer, imported, _ in imports_of_the_package():
        importers[imported].add(importer)
    small = {
        name: next(iter(importers[name]))
        for name, path in FILES.items()
        if path.name != "__init__.py"
        and not name.startswith(ONE_EACH)
        and len(importers[name]) == 1
        and len(path.read_text(encoding="utf-8").splitlines()) < 80
    }
    new = {name: importer for name, importer in small.items() if name not in SMALL}
    assert not new, (
        "merge each of these files into the one that alone imports it, with which it is read "
        f"anyway, or say in SMALL why it is a file: {new}"
    )
    gone = set(SMALL) - set(small)
    assert not gone, f"take out of SMALL what is not small, or has several importers: {gone}"


def test_a_class_name_is_unique():
    places = collections.defaultdict(list)
    for module, known in facts().items():
        for kind in known.classes:
            if not kind.startswith("_"):
                places[kind].append(module)
    twice = {kind: where for kind, where in places.items() if len(where) > 1}
    assert not twice, f"rename all but one of each, so that a search finds one thing: {twice}"


def _docstrings(tree, module):
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield f"{module}.{getattr(node, 'name', '')}", text


def test_a_docstring_begins_with_a_verb_or_a_noun():
    headless = re.compile(r"(What|Who|Whom|Whose|Those who|That which|Where|How)\b")
    texts = [each for module in facts().values() for each in module.docstrings]
    found = [place for place, text in texts if headless.match(text)]
    assert not found, f'begin with a verb or a noun, such as "Return ..." or "The ...": {found}'


def _comments():
    """Yield the place and the first line of each block of whole-line comments."""
    for path in FILES.values():
        before = ""
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if line.lstrip().startswith("#") and not before.lstrip().startswith("#"):
                yield f"{path.relative_to(PACKAGE)}:{number}", line.strip()
            before = line


def test_a_comment_begins_as_a_docstring_does():
    headless = re.compile(r"#:? (What|Who|Whom|Whose|Those who|That which|Where|How)\b")
    found = [f"{place}: {line}" for place, line in _comments() if headless.match(line)]
    assert not found, f'write a sentence with a subject, such as "The seconds that ...": {found}'


def test_remarks_to_the_linter_are_few_and_say_why():
    remarks = [
        (f"{path.relative_to(PACKAGE)}:{number}", line)
        for path in FILES.values()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "# noqa" in line
    ]
    bare = [place for place, line in remarks if not re.search(r"# noqa: [A-Z0-9, ]+ - \w", line)]
    assert not bare, f"say why, as in `# noqa: B018 - the access is tested`: {bare}"
    assert len(remarks) <= MOST_REMARKS, (
        "write it so that the linter is content, or set the rule aside for the whole file in "
        f"pyproject.toml, if it does not serve there: {len(remarks)} remarks"
    )


def _name(node):
    return getattr(node, "attr", None) or getattr(node, "id", None)


def _broad_excepts(tree):
    """Yield the lines that catch everything without raising again."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            last = node.body[-1]
            # A handler that cleans up and raises again hides nothing.
            cleans = isinstance(last, ast.Raise) and last.exc is None
            caught = [] if cleans else [node.type]
        elif isinstance(node, ast.Call) and _name(node.func) == "suppress":
            caught = node.args
        else:
            continue
        kinds = {
            each.id for kind in caught for each in ast.walk(kind) if isinstance(each, ast.Name)
        }
        if kinds & {"Exception", "BaseException"}:
            yield node.lineno


def test_an_except_for_everything_says_why():
    silent = []
    for module, known in facts().items():
        path = FILES[module]
        lines = path.read_text(encoding="utf-8").splitlines()
        silent += [
            f"{path.relative_to(PACKAGE)}:{number}"
            for number in known.broad_excepts
            if not any("#" in line for line in lines[number - 2 : number + 1])
        ]
    assert not silent, f"name the classes, or say beside it why it is any of them: {silent}"


def _defined_names(tree):
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                yield name
            case ast.AsyncFunctionDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def test_references_in_docstrings_exist():
    files = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    known = set().union(*(module.names for module in facts().values()))
    role = re.compile(r":(?:class|func|meth|attr|data|exc):`~?([\w.]+)`")
    stale = [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path, text in files.items()
        for name in role.findall(text)
        # Names of the standard library include their module.
        if name.rpartition(".")[2] not in known
        and name.partition(".")[0] not in sys.stdlib_module_names
    ]
    assert not stale, f"name what these texts mean as it is called now: {stale}"
