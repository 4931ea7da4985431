"""``Server:Processes``: a process that is stopped while it holds the store's write lock."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.disk_faults import DiskFaults, hanging, slow
from support.supervised import Daemon, running
from support.waiting import wait_until

from sdk_trio.base.file_locks import lock_holder
from sdk_trio.storage.engines.sqlite import WRITE_LOCK_NAME

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc/locks")

#: Longer than a process may be silent before it is killed, in seconds.
PAUSE_SECONDS = 8.0


@pytest.fixture
def faults(tmp_path: Path) -> DiskFaults:
    return DiskFaults(tmp_path)


@pytest.fixture
def daemon(tmp_path: Path, faults: DiskFaults) -> Iterator[Daemon]:
    found = Daemon(tmp_path, environment=dict(faults.environment))
    found.settings |= {"Server:Processes": "2", "Admin:Enabled": "true"}
    with running(found):
        yield found


@pytest.fixture
def accepted(daemon: Daemon) -> Iterator[list[str]]:
    """The ids that were answered 200, while senders deliver."""
    over = threading.Event()
    found: list[str] = []

    def send(sender: int) -> None:
        number = 0
        while not over.is_set():
            number += 1
            webhook_id = f"sent-{sender}-{number}"
            if daemon.deliver(webhook_id) == 200:
                found.append(webhook_id)

    threads = [threading.Thread(target=send, args=(sender,)) for sender in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        over.set()
        for thread in threads:
            thread.join()


def workers(daemon: Daemon) -> list[int]:
    return [entry["pid"] for entry in daemon.logged("process.started")]


def holder(daemon: Daemon) -> int | None:
    """The process that receives and holds the write lock now."""
    found = lock_holder(os.stat(daemon.directory / "data" / WRITE_LOCK_NAME).st_ino)
    return found if found in workers(daemon) else None


def more(accepted: list[str], daemon: Daemon) -> None:
    """Wait until further deliveries are accepted."""
    wanted = len(accepted) + 20
    wait_until(lambda: len(accepted) >= wanted, daemon.log)


def processes_check(daemon: Daemon) -> dict[str, Any]:
    answer = httpx.get(f"http://127.0.0.1:{daemon.admin_port}/healthz", timeout=30).json()
    return next(check for check in answer["checks"] if check["name"] == "processes")


def test_a_stopped_process_that_holds_the_write_lock_is_killed_and_the_others_go_on(
    daemon: Daemon, faults: DiskFaults, accepted: list[str]
) -> None:
    faults.set(slow("sync", daemon.directory / "data", 100))
    more(accepted, daemon)

    def stopped_holder() -> int | None:
        pid = holder(daemon)
        if pid is not None:
            os.kill(pid, signal.SIGSTOP)
            if holder(daemon) == pid:
                return pid
            os.kill(pid, signal.SIGCONT)
        return None

    stopped = wait_until(stopped_holder, daemon.log)
    wait_until(lambda: daemon.logged("process.killed"), daemon.log)
    (killed,) = daemon.logged("process.killed")
    assert killed["pid"] == stopped
    assert "write lock" in killed["hint"]
    faults.clear()
    more(accepted, daemon)
    # Also the events that the killed process had accepted.
    wait_until(lambda: all(daemon.runs(webhook_id, "ended") for webhook_id in accepted), daemon.log)


def test_a_pause_of_all_processes_kills_none(
    daemon: Daemon, faults: DiskFaults, accepted: list[str]
) -> None:
    faults.set(slow("sync", daemon.directory / "data", 100))
    more(accepted, daemon)
    assert daemon.process is not None
    everyone = [daemon.process.pid, *workers(daemon)]
    for pid in everyone:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(PAUSE_SECONDS)
    for pid in everyone:
        os.kill(pid, signal.SIGCONT)
    faults.clear()
    more(accepted, daemon)
    assert not daemon.logged("process.killed")
    assert not daemon.logged("process.silent")
    assert not daemon.logged("process.ended")


def test_processes_whose_store_hangs_are_not_ready_and_are_again_without_deliveries(
    daemon: Daemon, faults: DiskFaults
) -> None:
    assert daemon.deliver("first") == 200
    assert processes_check(daemon)["ok"]
    faults.set(hanging("sync", daemon.directory / "data"))

    def deliver_to_both() -> bool:
        threads = [
            threading.Thread(target=daemon.deliver, args=(f"hanging-{number}-{time.time_ns()}",))
            for number in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return not processes_check(daemon)["ok"]

    wait_until(deliver_to_both, daemon.log)
    assert processes_check(daemon)["detail"] == "0 of 2 serve"
    faults.clear()
    wait_until(lambda: processes_check(daemon)["detail"] == "2 of 2 serve", daemon.log)
