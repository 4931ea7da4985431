"""Handlers that change the state of the process: its standard streams, and its number by a fork."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon import Daemon, Place
from support.deliveries import SECRET
from support.ports import free_port
from support.waiting import wait_until

from sdk_trio.testing import sign_delivery

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks and HUP")

APPLICATION = """
import os, sys, sdk_trio
from sdk_trio.events import OrderPaidEvent

handlers = sdk_trio.HandlerRegistry()


@handlers.on(OrderPaidEvent, enqueue=True)
async def handle(event):
    if event.webhook_id == "none":
        sys.stdout = sys.stderr = None
    if event.webhook_id == "closed":
        sys.stdout.close()
        sys.stderr.close()
    if event.webhook_id == "fork":
        os.fork()
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "app.py").write_text(APPLICATION)
    return Place(tmp_path)


def deliver(daemon: Daemon, webhook_id: str) -> int:
    import httpx

    signed = sign_delivery("order.paid", secret=SECRET, webhook_id=webhook_id)
    url = f"{daemon.receiver}/hooks/sdk"
    return httpx.post(url, content=signed.body, headers=signed.headers, timeout=60).status_code


def handled(daemon: Daemon, webhook_id: str) -> None:
    assert deliver(daemon, webhook_id) == 200
    wait_until(
        lambda: any(line["webhook_id"] == webhook_id for line in daemon.logged("webhook.handled")),
        daemon.log.read_text,
    )


@pytest.mark.parametrize("change", ["none", "closed"])
def test_a_handler_that_takes_the_standard_streams_away_spoils_neither_reload_nor_stop(
    place: Place, change: str
) -> None:
    # A real start: the streams are those of an interpreter.
    place.environ["PYTHONUNBUFFERED"] = "1"
    with place.daemon("--app", "app:handlers") as daemon:
        handled(daemon, change)
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_for("runtime.reloaded")
        handled(daemon, "after")
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(60) == 0
        assert "Traceback" not in daemon.log.read_text()


def test_a_forked_child_that_returns_into_the_loop_ends_and_takes_no_delivery(
    place: Place,
) -> None:
    with place.daemon("--app", "app:handlers") as daemon:
        handled(daemon, "fork")
        (ended,) = [daemon.wait_for("runtime.forked_child")]
        assert ended["parent"] == daemon.process.pid
        assert "os.fork()" in ended["hint"]
        for number in range(20):
            handled(daemon, f"after-{number}")
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(60) == 0
        assert len(daemon.logged("runtime.forked_child")) == 1
        assert len(daemon.logged("runtime.stopped")) == 1


@contextlib.contextmanager
def started(place: Place, *before: str) -> Iterator[Daemon]:
    """Start the program at once, and return before it has begun."""
    words = [*before, sys.executable, "-m", "sdk_trio", "run", "--standalone"]
    log = place.directory / "log"
    with log.open("w") as err:
        process = subprocess.Popen(
            [*words, "--app", "app:handlers"],
            cwd=place.directory,
            env=place.environ,
            stdout=err,
            stderr=err,
        )
    try:
        yield Daemon(process, log)
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(shutil.which("env") is None, reason="it needs env of the GNU coreutils")
def test_a_start_that_ignores_hup_survives_one_in_its_first_instant_and_reloads_later(
    place: Place,
) -> None:
    with started(place, "env", "--ignore-signal=HUP") as daemon:
        ignored = 1 << (signal.SIGHUP - 1)
        status = Path(f"/proc/{daemon.process.pid}/status")

        def ignores() -> bool:
            (line,) = [line for line in status.read_text().splitlines() if "SigIgn" in line]
            return bool(int(line.split()[1], 16) & ignored)

        wait_until(ignores)
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_for("runtime.started")
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_for("runtime.reloaded")


@pytest.mark.skipif(sys.platform != "linux", reason="it finds children in /proc")
def test_a_hup_in_the_first_instant_of_a_process_of_several_does_not_end_it(place: Place) -> None:
    place.environ["SDK__SERVER__PROCESSES"] = "2"
    place.environ["SDK__SERVER__BIND"] = f"127.0.0.1:{free_port()}"

    def children(daemon: Daemon) -> set[int]:
        pid = daemon.process.pid
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return {int(child) for child in found.split()}

    with place.daemon("--app", "app:handlers") as daemon:
        for _ in range(3):
            before = children(daemon)
            os.kill(min(before), signal.SIGKILL)
            # As soon as it is there; the helper that waits between two questions is too slow.
            deadline = time.monotonic() + 60
            while not (new := children(daemon) - before):
                assert time.monotonic() < deadline, daemon.log.read_text()
            (successor,) = new
            os.kill(successor, signal.SIGHUP)
            wait_until(
                lambda pid=successor: any(
                    line["pid"] == pid for line in daemon.logged("process.started")
                ),
                daemon.log.read_text,
            )
        assert {line["ended"] for line in daemon.logged("process.ended")} == {"by SIGKILL"}
