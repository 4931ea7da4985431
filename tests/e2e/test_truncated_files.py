"""Another program truncates files of the store under the daemon."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from support.supervised import Daemon, running
from support.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="open files cannot be truncated")


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    return Daemon(tmp_path)


def test_a_truncated_claims_file_does_not_end_the_process(daemon: Daemon) -> None:
    claims = daemon.directory / "data" / "inbox.claims"
    with running(daemon):
        assert daemon.deliver("first", inline=True) == 200
        assert claims.stat().st_size > 0
        os.truncate(claims, 0)
        for number in range(20):
            assert daemon.deliver(f"inline-{number}", inline=True) == 200
        assert daemon.runs("inline-19", "ended") == 1
        daemon.signal(signal.SIGTERM)
        assert daemon.ended() == 0


def test_a_truncated_index_ends_the_process_and_is_named_in_the_log(daemon: Daemon) -> None:
    index = daemon.directory / "data" / "inbox.db-shm"
    with running(daemon):
        assert daemon.deliver("first") == 200
        daemon.wait_for_state("first", "done")
        os.truncate(index, 0)
        # It dies at its next use of the index: nothing of it can be asked before.
        sender = threading.Thread(target=daemon.deliver, args=("second",))
        sender.start()
        assert daemon.ended() == -signal.SIGBUS
        sender.join()
        assert "Fatal Python error: Bus error" in daemon.log()
        assert daemon.start(), daemon.log()
        (found,) = daemon.logged("store.index_truncated")
        assert found["file"] == str(index)
        assert "data directory" in found["hint"]
        assert daemon.state("first") == "done"
        assert daemon.deliver("second") == 200
        daemon.wait_for_state("second", "done")


def test_the_supervisor_names_the_cause_of_a_bus_error(daemon: Daemon) -> None:
    daemon.settings["Server:Processes"] = "2"
    with running(daemon):
        first = daemon.logged("process.started")[0]["pid"]
        os.kill(first, signal.SIGBUS)
        wait_until(lambda: daemon.logged("process.ended"), daemon.log)
        (ended,) = daemon.logged("process.ended")
        assert ended["ended"] == "by SIGBUS"
        assert "truncated" in ended["hint"]
