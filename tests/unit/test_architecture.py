"""The rules of the layout that no linter knows: what a file may import, and how long it may be."""

import ast
import importlib
import inspect
import pkgutil
import tomllib
from pathlib import Path

import pytest

import sdk_trio
from sdk_trio import errors

PACKAGE = Path(sdk_trio.__file__).parent
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}

#: A pure file gets clock, randomness and environment as arguments, and does no I/O.
IMPURE = {
    "apsw",
    "filelock",
    "httpx",
    "hypercorn",
    "os",
    "random",
    "secrets",
    "select",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "time",
    "trio",
}

#: Files whose name says that they act.
AGENT_ENDINGS = ("er", "or", "service", "client", "app", "store")

#: Folders whose files are named after what users type or import.
AGENT_FOLDERS = ("cli/", "testing/")

#: Files that act although their name is a noun, each with the reason.
_CONNECTION = "a connection or its bytes, named after the protocol; architecture.md does so too"
_KEPT = "a store, named after what it keeps"
_ITERATION = "what `async for` runs over, named after what it gives"

ACTING_NOUNS = {
    "client/transport.py": "named so by architecture.md and by httpx",
    "client/pipeline.py": "the order of the layers, each of which acts",
    "client/resources.py": "the methods that send a call",
    **{f"client/{name}.py": _CONNECTION for name in ("http1", "http2", "http2_protocol", "http3")},
    **{f"client/{name}.py": _CONNECTION for name in ("http3_origins", "lanes", "pool", "wire")},
    "client/uploads.py": _CONNECTION,
    **{f"client/{name}.py": _ITERATION for name in ("export", "listing")},
    "storage/memory_notifications.py": _KEPT,
    "storage/memory_tenants.py": _KEPT,
    "storage/memory_upgrade.py": _KEPT,
    "storage/sqlite_tenant_rows.py": _KEPT,
    "storage/sqlite_upgrade.py": _KEPT,
    "tenants/client_pool.py": "holds connections, named after what it is",
    "tenants/feed.py": _ITERATION,
    "tenants/tenancy.py": "holds the parts of the tenants together for as long as they run",
    "webhooks/companion.py": "says how a task is started that runs beside the queue",
    "webhooks/tenant_keys.py": "looks a tenant up before its keys can be tried",
    "logs.py": "asks the environment whether colours are wanted",
    "tracing.py": "asks the environment whether an SDK is configured",
    "runtime/exchange.py": "one request and its answer on a connection",
    **{f"runtime/{name}.py": _CONNECTION for name in ("http2", "http2_stream")},
    "runtime/fast_path.py": "a connection; named so by the setting that switches it",
    "runtime/tls_socket.py": "a connection, named after what it is",
    "runtime/runtime.py": "holds the nursery of everything",
    "storage/__init__.py": "opens the store that the settings name",
    "storage/data_directory.py": "creates and locks the directory",
}

MAX_LINES = 450

#: Longer files, each with the reason.
LONG_FILES = {
    "client/http2.py": "one connection: reader, writer and streams share every field of it",
    "events/samples.py": "a table with an entry for every event type",
    "tenants/service.py": "every operation on a tenant, each described for its callers",
}


def is_agent(name):
    return Path(name).stem.endswith(AGENT_ENDINGS) or name.startswith(AGENT_FOLDERS)


def imported(path):
    """The first parts of the names of all modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize(
    "name", [name for name in FILES if not is_agent(name) and name not in ACTING_NOUNS]
)
def test_a_noun_is_pure(name):
    impure = imported(FILES[name]) & IMPURE
    assert not impure, f"{name} imports {impure}; pass it in, or name the file after what it does"


@pytest.mark.parametrize("name", ACTING_NOUNS)
def test_an_exception_from_the_rule_is_needed(name):
    assert imported(FILES[name]) & IMPURE
    assert not is_agent(name)


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_short_enough_to_be_read(name):
    lines = len(FILES[name].read_text(encoding="utf-8").splitlines())
    assert (lines > MAX_LINES) == (name in LONG_FILES), f"{name} has {lines} lines"


def _modules():
    for module in pkgutil.walk_packages([str(PACKAGE)], "sdk_trio."):
        if not module.name.endswith("__main__"):
            yield module.name


@pytest.mark.parametrize("name", ["sdk_trio", *_modules()])
def test_every_name_that_a_module_offers_is_there(name):
    module = importlib.import_module(name)
    offered = getattr(module, "__all__", [])
    assert len(set(offered)) == len(offered)
    for public in offered:
        assert getattr(module, public) is not None


def test_the_public_names_can_be_listed_and_others_are_refused():
    assert set(sdk_trio.__all__) <= set(dir(sdk_trio))
    with pytest.raises(AttributeError, match="no_such_name"):
        sdk_trio.no_such_name  # noqa: B018 - the access itself is tested


def test_the_version_is_that_of_the_project():
    project = PACKAGE.parent / "pyproject.toml"
    if not project.exists():
        pytest.skip("an installed package has no project file")
    declared = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]
    assert sdk_trio.__version__ == declared


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
    assert kind.__name__ in depths
    if kind is not errors.SdkError:
        depth, place = depths[kind.__name__]
        above = [
            (line_place, name)
            for name, (its_depth, line_place) in depths.items()
            if its_depth < depth and line_place < place and hasattr(errors, name)
        ]
        assert max(above)[1] == kind.__mro__[1].__name__
    assert kind.exit_code in (1, 2, 69, 78)
