"""Settings of the whole suite."""

import atexit
import contextlib
import gc
import logging
import os
import shutil
import tempfile
from pathlib import Path

import certifi
import pytest
from hypothesis import HealthCheck, settings
from support import reaper
from support.command_line import CommandLine, clear_environment
from support.postgres import (
    CLUSTERS,
    PostgresServer,
    release_databases,
    remove_server,
    running_server,
)

from sdk_trio.base.logs import Outage

# The machine that runs this is shared and slow at times: an example may take long, a hang is
# caught by faulthandler_timeout and by fail_after in the tests.
settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
# `make check` tries fewer examples, `make test` all of them.
settings.register_profile("check", settings.get_profile("default"), max_examples=20)
settings.load_profile("default")

# Before pytest-xdist starts its processes, so that they end with this one, too.
reaper.begin()

# They share it.
if CLUSTERS not in os.environ:
    os.environ[CLUSTERS] = tempfile.mkdtemp(prefix="sdk-clusters-")
    atexit.register(shutil.rmtree, os.environ[CLUSTERS], ignore_errors=True)

REQUIRE_ALL = "SDK_TEST_REQUIRE_ALL"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Give the processes of pytest-xdist directories with short names.

    Many tests put a Unix socket into theirs, and its path may have no more than 103 bytes.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None:
        config.option.basetemp = str(Path(config.option.basetemp).with_name(worker))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect the tests without the garbage collector, which later leaves them out.

    They stay until the end, and each full collection would look at millions of objects in vain.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """With SDK_TEST_REQUIRE_ALL=1 a skipped test is a failed one: its part must be installed.

    The one exception carries the marker ``may_skip``: the specification lies outside the
    repository, and its comparison is only possible beside it.
    """
    report = yield
    return report if item.get_closest_marker("may_skip") else _required(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """The same for a file that skips itself as a whole."""
    return _required((yield))


def _required(report):
    if report.skipped and os.environ.get(REQUIRE_ALL):
        report.outcome = "failed"
        report.longrepr = f"{REQUIRE_ALL} is set, and this was skipped: {report.longrepr}"
    return report


@pytest.fixture(autouse=True)
def the_log_of_each_test():
    """Restore the log: a command that a test ran in this process configures it.

    Otherwise the tests that happen to come later in the same process log every delivery.
    """
    root = logging.getLogger("sdk_trio")
    before = root.handlers[:], root.level, root.propagate
    yield
    root.handlers[:], level, root.propagate = before
    root.setLevel(level)
    # A test may end while its store is unavailable. The next outage, of another test, is logged at
    # once.
    Outage.ended += 1


@pytest.fixture(scope="session", autouse=True)
def the_server_of_the_session():
    """End the PostgreSQL server that a test of this process has started."""
    yield
    remove_server()


@pytest.fixture(autouse=True)
def the_databases_of_each_test():
    """Let the next test use the PostgreSQL databases of this one, without their content."""
    yield
    release_databases()


@pytest.fixture(scope="session", autouse=True)
def one_authority(tmp_path_factory):
    """Let each TLS context read one authority instead of all of certifi's or the system's.

    Those take 30 ms, in each client of httpx and of the package. No test reaches a server that one
    of them has certified. Programs that tests start inherit the variable.
    """
    everyone = Path(certifi.where()).read_text(encoding="utf-8")
    text, end, _ = everyone.partition("END CERTIFICATE-----")
    file = tmp_path_factory.mktemp("authorities") / "one.pem"
    file.write_text(text + end, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(file))
        patch.delenv("SSL_CERT_DIR", raising=False)
        yield


@pytest.fixture
def standby():
    """A PostgreSQL server that follows a server of its own, its ``primary``, asynchronously."""
    with contextlib.ExitStack() as stack:
        primary = PostgresServer(running_server().programs)
        stack.callback(primary.remove)
        primary.start()
        standby = PostgresServer(primary.programs, primary=primary)
        stack.callback(standby.remove)
        standby.start()
        yield standby


@pytest.fixture
def command_line(tmp_path, monkeypatch, capsys):
    """The command line in a separate directory, without this machine's environment."""
    clear_environment(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return CommandLine(tmp_path, capsys)


@pytest.fixture(params=["Memory", "Sqlite"])
def store(request, tmp_path, monkeypatch):
    """Settings of each store in turn, as the keys that a runtime's helpers take.

    A file whose tests are worth a server too asks for "Postgres" by indirect parameters.
    """
    if request.param == "Postgres":
        monkeypatch.setenv("SDK_POSTGRES_DSN", running_server().fresh())
    return {"Storage__Backend": request.param, "Storage__Path": str(tmp_path / "data")}
