"""TERM ends a daemon in bounded time, whatever handlers do; early signals are not lost."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.disk_faults import DiskFaults, hanging
from support.supervised import Daemon, running
from support.waiting import PATIENCE_SECONDS, wait_until

DRAIN = 1


@pytest.fixture
def daemon(tmp_path):
    return Daemon(tmp_path, {"Webhooks:GracefulDrainTimeoutSeconds": str(DRAIN)})


needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="there is no /proc")


def is_set(process, mask, number):
    """Whether a signal is in one of the masks that Linux keeps of a process."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    (bits,) = [line.split()[1] for line in lines if line.startswith(f"{mask}:")] or ["0"]
    return int(bits, 16) >> (number - 1) & 1


# The three that do not block the loop are tested together, because each end takes the whole limit.
@pytest.mark.parametrize("kinds", [["thread", "shield", "swallow"], ["block"]], ids="-".join)
def test_uncancellable_runs_are_named_abandoned_and_run_again(daemon, kinds):
    ids = [f"{kind}-late" for kind in kinds]
    with running(daemon):
        for webhook_id in ids:
            assert daemon.deliver(webhook_id) == 200
            wait_until(lambda name=webhook_id: daemon.runs(name), daemon.log)
            daemon.wait_for_state(webhook_id, "running")
        daemon.signal(signal.SIGTERM)
        assert daemon.ended() == 1
        (left,) = daemon.logged("runtime.left_behind")
        named = sorted((run["handler"], run["webhook_id"]) for run in left["runs"])
        assert named == sorted(("queued", webhook_id) for webhook_id in ids)
        if kinds != ["block"]:  # a blocked loop cannot write to the store
            (report,) = daemon.logged("runtime.stopped")
            assert (report["persisted"], sorted(report["ids"])) == (len(ids), sorted(ids))
            for webhook_id in ids:
                record = daemon.record(webhook_id)
                assert (record["state"], record["attempts"]) == ("received", 0)
        daemon.start()
        for webhook_id in ids:
            wait_until(lambda name=webhook_id: daemon.runs(name) == 2, daemon.log)
            assert daemon.record(webhook_id)["process_ends"] == (kinds == ["block"])


def test_a_handler_that_keeps_the_interpreter_for_itself_does_not_outlive_the_end(daemon):
    """No thread runs beside a long match of a regular expression, nor does the loop."""
    with running(daemon):
        daemon.deliver("match-late")
        daemon.wait_for_state("match-late", "running")
        wait_until(lambda: daemon.runs("match", "inside"), daemon.log)
        daemon.signal(signal.SIGTERM)
        assert daemon.ended() == 1
        (held,) = daemon.logged("runtime.blocked_by_handler")
        assert (held["handler"], held["webhook_id"]) == ("queued", "match-late")
        assert "application.py" in held["place"]
        daemon.start()
        wait_until(lambda: daemon.runs("match-late") == 2, daemon.log)
        assert daemon.record("match-late")["process_ends"] == 1


def test_an_inline_handler_in_a_thread_is_left_behind_as_well(daemon):
    with running(daemon):
        sender = threading.Thread(
            target=daemon.deliver, args=("thread-1",), kwargs={"inline": True}
        )
        sender.start()
        wait_until(lambda: daemon.runs("thread-1"), daemon.log)
        daemon.signal(signal.SIGTERM)
        assert daemon.ended() == 1
        sender.join()
        record = daemon.record("thread-1")
        assert (record["state"], record["attempts"]) == ("received", 0)
        (left,) = daemon.logged("runtime.left_behind")
        assert "inline events when the sender delivers them again" in left["hint"]
        daemon.start()
        repeated = threading.Thread(
            target=daemon.deliver, args=("thread-1",), kwargs={"inline": True}
        )
        repeated.start()
        wait_until(lambda: daemon.runs("thread-1") == 2, daemon.log)
    repeated.join()


def test_plain_functions_in_their_threads_are_named_left_behind_and_run_again(daemon):
    daemon.settings["Webhooks:InlineTimeoutSeconds"] = "0.3"
    sent = {"queued-1": ("order.updated", 200), "inline-1": ("order.refunded", 503)}
    with running(daemon):
        for _ in range(2):  # a redelivery is answered, and does not run beside the first one
            for webhook_id, (event_type, status) in sent.items():
                assert daemon.deliver(webhook_id, event_type=event_type) == status
                wait_until(lambda name=webhook_id: daemon.runs(name), daemon.log)
        daemon.signal(signal.SIGTERM)
        assert daemon.ended() == 1
        (left,) = daemon.logged("runtime.left_behind")
        assert {(run["handler"], run["webhook_id"]) for run in left["runs"]} == {
            ("plain", webhook_id) for webhook_id in sent
        }
        reported = {line["webhook_id"] for line in daemon.logged("webhook.still_running")}
        assert reported == set(sent)
        (report,) = daemon.logged("runtime.stopped")
        assert (report["persisted"], set(report["ids"])) == (2, set(sent))
        for webhook_id in sent:
            assert daemon.runs(webhook_id) == 1
            record = daemon.record(webhook_id)
            assert (record["state"], record["attempts"]) == ("received", 0)
        daemon.environment["PLAIN"] = "0"
        del daemon.settings["Webhooks:InlineTimeoutSeconds"]
        daemon.start()
        # The sender of the inline event was never answered 200, so it delivers again.
        assert daemon.deliver("inline-1", event_type="order.refunded") == 200
        for webhook_id in sent:
            daemon.wait_for_state(webhook_id, "done")
            assert daemon.runs(webhook_id) == 2
            assert daemon.record(webhook_id)["process_ends"] == 0


@needs_proc
@pytest.mark.parametrize("kind", ["thread", "shield", "swallow", "block"])
def test_a_second_signal_ends_it_at_once_whatever_runs(daemon, kind):
    daemon.settings["Webhooks:GracefulDrainTimeoutSeconds"] = "600"
    with running(daemon):
        daemon.deliver(f"{kind}-1")
        wait_until(lambda: daemon.runs(f"{kind}-1"), daemon.log)
        daemon.signal(signal.SIGTERM)
        # Two signals of which the first has not arrived are one.
        if kind == "block":  # a blocked loop cannot log that it got the signal
            wait_until(lambda: not is_set(daemon.process, "ShdPnd", signal.SIGTERM), daemon.log)
        else:
            wait_until(lambda: daemon.logged("runtime.draining"), daemon.log)
        daemon.signal(signal.SIGTERM)
        assert daemon.ended() == 128 + signal.SIGTERM
        assert daemon.logged("runtime.left_behind")


def test_a_handler_that_obeys_the_cancellation_leaves_no_thread_behind(daemon):
    with running(daemon):
        daemon.environment["ASIDE"] = "600"
    daemon.start()
    daemon.deliver("aside-1")
    wait_until(lambda: daemon.runs("aside-1"), daemon.log)
    daemon.signal(signal.SIGTERM)
    assert daemon.ended() == 0
    assert not daemon.logged("runtime.left_behind")
    assert daemon.state("aside-1") == "received"


def test_a_handler_that_raises_because_it_is_cancelled_has_lost_no_attempt(daemon):
    with running(daemon):
        daemon.deliver("complain-1")
        wait_until(lambda: daemon.runs("complain-1"), daemon.log)
        daemon.signal(signal.SIGTERM)
        assert daemon.ended() == 0
        record = daemon.record("complain-1")
        assert (record["state"], record["attempts"]) == ("received", 0)


def test_a_thread_of_the_application_does_not_keep_the_process(daemon):
    with running(daemon):
        daemon.deliver("lingering-1")
        daemon.wait_for_state("lingering-1", "done")
        daemon.signal(signal.SIGTERM)
        assert daemon.ended() == 0
        (left,) = daemon.logged("runtime.threads_left")
        assert left["threads"] == ["lingering"]


def test_a_disk_that_hangs_does_not_keep_the_process(daemon, tmp_path):
    faults = DiskFaults(tmp_path)
    daemon.environment |= faults.environment
    with running(daemon):
        daemon.deliver("fine-1")
        daemon.wait_for_state("fine-1", "done")
        faults.set(hanging("sync", tmp_path / "data"))
        threading.Thread(target=daemon.deliver, args=("fine-2",), daemon=True).start()
        wait_until(lambda: "store." in daemon.log(), daemon.log)
        daemon.signal(signal.SIGTERM)
        # The store gives up by itself (69), or the process goes without it (1).
        assert daemon.ended() in (69, 1)


def wait_until_taken(process, number):
    """Wait until the process has a handler of its own for a signal."""
    wait_until(lambda: is_set(process, "SigCgt", number), lambda: "the signal was never taken")


@needs_proc
def test_hup_in_the_first_moment_of_a_start_is_a_reload_and_no_end(daemon):
    with daemon:
        process = daemon.begin()
        wait_until_taken(process, signal.SIGHUP)
        for _ in range(3):
            process.send_signal(signal.SIGHUP)
        wait_until(
            lambda: process.poll() is not None or '"runtime.reloaded"' in daemon.log(), daemon.log
        )
        assert process.poll() is None, daemon.log()
        process.send_signal(signal.SIGTERM)
        assert daemon.ended() == 0


#: A program whose forked child has all of its descriptors, and would outlive it.
FORKS = """
import os, signal, time
from sdk_trio.cli.shutdown import BoundedShutdown

with BoundedShutdown(None, ()):
    child = os.fork()
    if not child:
        time.sleep(600)
        os._exit(0)
os.kill(child, signal.SIGKILL)
"""


def test_the_end_does_not_wait_for_a_child_that_was_forked():
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=PATIENCE_SECONDS)


@needs_proc
def test_int_in_the_first_moment_of_a_start_leaves_no_traceback(daemon):
    with daemon:
        process = daemon.begin()
        wait_until_taken(process, signal.SIGHUP)
        process.send_signal(signal.SIGINT)
        status = daemon.ended()
        # On a busy machine it may serve by now; then the signal is a request to stop.
        assert status == (0 if '"runtime.started"' in daemon.log() else 130)
        assert "Traceback" not in daemon.log()


#: Python prints and ignores exceptions raised while an object is finalised.
FINALISED = """
import pathlib, time

class Late:
    def __del__(self):
        pathlib.Path("finalising").touch()
        time.sleep(60)

Late()
from application import handlers
"""


def test_int_is_not_lost_in_what_an_import_of_the_application_finalises(daemon, tmp_path):
    (tmp_path / "late.py").write_text(FINALISED)
    daemon.application = "late:handlers"
    with daemon:
        process = daemon.begin()
        wait_until((tmp_path / "finalising").exists, daemon.log)
        process.send_signal(signal.SIGINT)
        assert daemon.ended() == 130


def test_retries_of_a_machine_that_booted_two_hours_fast_are_due_when_its_clock_is_right(daemon):
    """The store holds times of the wrong clock; the next start finds them too far ahead."""
    with running(daemon):
        daemon.deliver("fine-1")
        daemon.wait_for_state("fine-1", "done")
        daemon.signal(signal.SIGKILL)
        daemon.ended()
        daemon.change(
            "INSERT INTO work (sequence, state, queued, attempts, started_at, failed_at, "
            "next_attempt_at) "
            "SELECT sequence, 'retrying', 1, 1, :fast, :fast, :fast + 3 FROM arrival",
            fast=time.time() + 7200,
        )
        daemon.change("DELETE FROM ended")
        daemon.start()
        daemon.wait_for_state("fine-1", "done")
        assert daemon.runs("fine-1") == 2
