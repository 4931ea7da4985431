"""Several hosts on one PostgreSQL server that become multi-tenant at the same time."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import trio
from support.daemon import Daemon, Place
from support.postgres import PostgresServer, running_server
from support.single_tenant import deliver
from support.waiting import PATIENCE_SECONDS, wait_until

from sdk_trio.config import Settings
from sdk_trio.storage.open import open_store

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")

# The step writes down who has done which batch, and stands at the third one while "hold" exists.
APPLICATION = """
from pathlib import Path
import trio
from sdk_trio.base import term
from sdk_trio.tenants.upgrade import HostUpgrade, StepBatch
from sdk_trio.webhooks import HandlerRegistry

term.TERM_SECONDS, term.RENEW_SECONDS, term.MARGIN_SECONDS, term.ASK_SECONDS = 4, 0.2, 0.8, 0.1
handlers = HandlerRegistry()


class Orders:
    name = "orders"

    async def count(self):
        return 6

    async def run_batch(self, tenant, position):
        number = int(position or 0)
        Path(f"batch-{number}").touch()
        while number == 2 and Path("hold").exists():
            await trio.sleep(0.01)
        return StepBatch(1, str(number + 1), last=number == 5)


upgrade = HostUpgrade(steps=[Orders()])
"""


@pytest.fixture
def server() -> PostgresServer:
    return running_server()


@pytest.fixture
def hosts(tmp_path: Path, server: PostgresServer) -> tuple[Place, Place]:
    """Two hosts with disks of their own; the store holds what a single tenant has left."""
    dsn = server.fresh()
    places = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "app.py").write_text(APPLICATION)
        place = Place(tmp_path / name)
        place.environ.update(
            SDK_POSTGRES_DSN=dsn,
            SDK__STORAGE__BACKEND="Postgres",
            SDK__MULTITENANT__ENABLED="true",
        )
        places.append(place)
    return places[0], places[1]


async def fill() -> None:
    settings = Settings.from_mapping(
        {"Storage:Backend": "Postgres"}, standalone=True, receiver=False
    )
    async with open_store(settings, owner="test") as store:
        await deliver(store, 20)


@contextmanager
def starting(place: Place) -> Iterator[Daemon]:
    """A daemon that has not started yet."""
    log = place.directory / "log"
    words = ("run", "--standalone", "--app", "app:handlers", "--upgrade-host", "app:upgrade")
    with log.open("w") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "sdk_trio", *words],
            cwd=place.directory,
            env=place.environ,
            stdout=err,
            stderr=err,
        )
    try:
        yield Daemon(process, log)
    finally:
        process.kill()
        process.wait(PATIENCE_SECONDS)


def batches(place: Place) -> list[int]:
    return sorted(int(file.name.removeprefix("batch-")) for file in place.directory.glob("batch-*"))


def stored(server: PostgresServer, place: Place) -> tuple[object, ...]:
    """The marker, the number of tenants, and that of deliveries without one."""
    (row,) = server.execute(
        "SELECT state, step, position, finished_at, (SELECT count(*) FROM sdk_trio.tenant), "
        "(SELECT count(*) FROM sdk_trio.arrival WHERE tenant_id IS NULL) FROM sdk_trio.upgrade",
        place.environ["SDK_POSTGRES_DSN"].rpartition("=")[2],
    )
    return row


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_host_that_dies_in_the_upgrade_is_followed_by_another(
    hosts: tuple[Place, Place],
    server: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
    how: signal.Signals,
) -> None:
    one, two = hosts
    monkeypatch.setenv("SDK_POSTGRES_DSN", one.environ["SDK_POSTGRES_DSN"])
    trio.run(fill)
    hold = one.directory / "hold"
    hold.touch()
    with ExitStack() as stack:
        first = stack.enter_context(starting(one))
        wait_until((one.directory / "batch-2").exists)
        second = stack.enter_context(starting(two))
        second.wait_for("upgrade.waiting")
        # While it waits it takes nothing, and does nothing of the upgrade.
        (address,) = second.wait_for("admin.started")["admin"]
        assert httpx.get(f"{address}/readyz", timeout=30).status_code == 503
        assert not second.logged("runtime.started")
        assert batches(two) == []
        first.process.send_signal(how)
        second.wait_for("runtime.started")
        # It continues at the batch whose end was not stored, and repeats no earlier one.
        assert batches(two) == [2, 3, 4, 5]
        done = stored(server, two)
        assert (done[0], done[4], done[5]) == ("done", 1, 0)
        if how is signal.SIGSTOP:
            hold.unlink()
            first.process.send_signal(signal.SIGCONT)
            first.wait_for("runtime.started")
            assert first.logged("upgrade.lease_lost")
            assert batches(one) == [0, 1, 2]
            assert stored(server, two) == done
            assert not first.logged("upgrade.finished")
