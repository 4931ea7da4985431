"""An inline run that does not wait for its claim: the state after failures of process or disk.

docs/adr/0047-unawaited-claims.md names the points; each is one test here, or one of
test_process_deaths (the first moment of the handler) and test_power_cut (a handler at work).
"""

import threading

import pytest
from support.disk_faults import DiskFaults, broken, hanging
from support.power_cut import PowerCut
from support.supervised import SIGKILL, Daemon, running
from support.unawaited import SEEN_SECONDS, claims_of, wait_until_unawaited
from support.waiting import wait_until


@pytest.fixture
def faults(tmp_path):
    return DiskFaults(tmp_path)


@pytest.fixture
def daemon(tmp_path, faults):
    return Daemon(tmp_path, environment={"ASIDE": SEEN_SECONDS, **faults.environment})


@pytest.fixture
def power(daemon, faults):
    power = PowerCut(daemon.directory / "data", daemon.directory / "kept")
    preloaded = f"{power.environment['LD_PRELOAD']}:{faults.environment['LD_PRELOAD']}"
    daemon.environment |= power.environment | {"LD_PRELOAD": preloaded}
    return power


def die_with(daemon, webhook_id, faults, fault):
    """Deliver, and kill the daemon when the handler has ended and the fault holds up the commit."""
    faults.set(fault)
    sender = threading.Thread(target=daemon.deliver, args=(webhook_id,), kwargs={"inline": True})
    sender.start()
    wait_until(lambda: daemon.runs(webhook_id, "ended"), daemon.log)
    if fault.operation == "sync":
        # The commit is in the file, as another process sees it there; the sync holds it up.
        log = daemon.directory / "data" / "inbox.db-wal"
        wait_until(lambda: webhook_id.encode() in log.read_bytes(), daemon.log)
    daemon.signal(SIGKILL)
    daemon.ended()
    sender.join()
    faults.clear()


def test_a_kill_between_the_end_of_the_run_and_its_commit_is_counted(daemon, faults):
    with running(daemon):
        wait_until_unawaited(daemon)
        die_with(
            daemon,
            "unanswered-1",
            faults,
            hanging("write", daemon.directory / "data" / "inbox.db-wal"),
        )
        assert daemon.state("aside-1-0") == "done"
        assert daemon.state("unanswered-1") is None
        assert b"unanswered-1" in claims_of(daemon)
        assert daemon.start(), daemon.log()
        assert daemon.logged("store.run_ended_process")[0]["key"] == "unanswered-1"
        # It was not answered, so it is delivered again, and its first run counts as an attempt.
        assert daemon.deliver("unanswered-1", inline=True) == 200
        record = daemon.wait_for_state("unanswered-1", "done")
        assert (record["attempts"], record["process_ends"]) == (2, 1)
        assert daemon.runs("unanswered-1") == 2
        assert b"unanswered-1" not in claims_of(daemon)


def test_an_end_is_counted_once_however_often_the_process_starts_before_the_redelivery(
    daemon, faults
):
    """Counted at each start, an event would be given up after one crash and a few deployments."""
    with running(daemon):
        wait_until_unawaited(daemon)
        log = daemon.directory / "data" / "inbox.db-wal"
        die_with(daemon, "unanswered-1", faults, hanging("write", log))
        for _ in range(5):
            assert daemon.start(), daemon.log()
            daemon.signal(SIGKILL)
            daemon.ended()
        assert daemon.start(), daemon.log()
        assert daemon.deliver("unanswered-1", inline=True) == 200
        record = daemon.wait_for_state("unanswered-1", "done")
        assert (record["attempts"], record["process_ends"]) == (2, 1)
        assert daemon.runs("unanswered-1") == 2


def test_a_kill_between_write_and_sync_leaves_the_run_recorded(daemon, faults):
    """Written data is in the page cache, which only a crash of the machine loses."""
    with running(daemon):
        wait_until_unawaited(daemon)
        die_with(
            daemon,
            "unanswered-1",
            faults,
            hanging("sync", daemon.directory / "data" / "inbox.db-wal"),
        )
        assert daemon.start(), daemon.log()
        assert daemon.logged("store.run_ended_process") == []
        assert daemon.deliver("unanswered-1", inline=True) == 200
        assert daemon.state("unanswered-1") == "done"
        assert daemon.runs("unanswered-1") == 1


def test_a_power_cut_between_write_and_sync_leaves_nothing(daemon, faults, power):
    with running(daemon):
        wait_until_unawaited(daemon)
        die_with(
            daemon,
            "unanswered-1",
            faults,
            hanging("sync", daemon.directory / "data" / "inbox.db-wal"),
        )
        assert power.left("SELECT * FROM arrival WHERE delivery_key = 'unanswered-1'") == []
        power.happen()
        assert daemon.start(), daemon.log()
        # The claims file is gone with the other unsynced data, and that is logged.
        assert daemon.logged("store.claims_lost")[0]["found"] == "nothing"
        assert daemon.deliver("unanswered-1", inline=True) == 200
        assert daemon.wait_for_state("unanswered-1", "done")["attempts"] == 1


@pytest.mark.parametrize("cut", [False, True], ids=["kill", "power-cut"])
def test_an_end_between_sync_and_answer_leaves_the_run_done(daemon, power, cut):
    with running(daemon):
        wait_until_unawaited(daemon)
        power.kill_after_sync(True)
        assert daemon.deliver("unanswered-1", inline=True) is None
        daemon.ended()
        power.kill_after_sync(False)
        if cut:
            power.happen()
        assert daemon.start(), daemon.log()
        assert daemon.state("unanswered-1") == "done"
        assert daemon.logged("store.run_ended_process") == []
        assert daemon.deliver("unanswered-1", inline=True) == 200
        assert daemon.runs("unanswered-1") == 1


def test_a_disk_that_fails_makes_the_sender_deliver_again_and_later_runs_wait(daemon, faults):
    with running(daemon):
        wait_until_unawaited(daemon)
        faults.set(broken("write", daemon.directory / "data" / "inbox.db"))
        assert daemon.deliver("unanswered-1", inline=True) == 503
        assert daemon.runs("unanswered-1", "ended") == 1, "it ran before anything failed"
        # From here on a claim is waited for, so that nothing runs that cannot be recorded.
        assert daemon.deliver("unanswered-2", inline=True) == 503
        assert daemon.runs("unanswered-2") == 0
        faults.clear()
        for webhook_id in ("unanswered-1", "unanswered-2"):
            assert daemon.deliver(webhook_id, inline=True) == 200
            daemon.wait_for_state(webhook_id, "done")
        wait_until_unawaited(daemon)


@pytest.mark.parametrize("found", ["nothing", "damaged"])
def test_a_lost_claims_file_is_reported_and_created_again(daemon, found):
    with running(daemon):
        wait_until_unawaited(daemon)
        daemon.signal(SIGKILL)
        daemon.ended()
        file = daemon.directory / "data" / "inbox.claims"
        if found == "nothing":
            file.unlink()
        else:
            file.write_bytes(b"something else")
        assert daemon.start(), daemon.log()
        assert [line["found"] for line in daemon.logged("store.claims_lost")] == [found]
        wait_until_unawaited(daemon)


def test_without_a_claims_file_every_claim_is_waited_for(daemon):
    (daemon.directory / "data").mkdir(mode=0o700)
    (daemon.directory / "data" / "inbox.claims").mkdir(mode=0o700)
    with running(daemon):
        assert daemon.logged("store.claims_unused")
        for number in range(3):
            assert daemon.deliver(f"fine-{number}", inline=True) == 200
        daemon.deliver("exit-now", inline=True)
        daemon.supervise("exit-now")
        assert daemon.wait_for_state("exit-now", "dead")
        assert daemon.runs("exit-now") == 5
