"""The machine loses its power: every acknowledged event is on the disk, also the last one.

A claim of an inline run is not synced: it was not acknowledged, so its sender delivers it again.
"""

import threading
from functools import partial

import httpx
import pytest
from power_cuts import power_cuts
from support.deliveries import SECRET
from support.power_cut import PowerCut
from support.supervised import SIGKILL, Daemon, running
from support.tables import STATE_OF_EACH
from support.waiting import wait_until

from sdk_trio.testing import sign_delivery

ASIDE = "aside-long"


@pytest.fixture
def daemon(tmp_path):
    return Daemon(tmp_path)


@pytest.fixture
def power(daemon):
    power = PowerCut(daemon.directory / "data", daemon.directory / "kept")
    daemon.environment |= power.environment
    return power


def deliver(daemon, type_, webhook_id, **fields):
    signed = sign_delivery(type_, fields or None, secret=SECRET, webhook_id=webhook_id)
    answer = httpx.post(daemon.url, headers=signed.headers, content=signed.body, timeout=60)
    return answer.status_code


ACKNOWLEDGED = {
    "inline": lambda daemon: deliver(daemon, "order.created", "inline-2"),
    "queued": lambda daemon: deliver(daemon, "order.paid", "queued-1"),
    "parked": lambda daemon: deliver(daemon, "benefit.created", "parked-1"),
    "other-body": lambda daemon: deliver(
        daemon, "order.created", "inline-1", metadata={"is": "another"}
    ),
}


@pytest.mark.parametrize("last", ACKNOWLEDGED)
def test_the_last_acknowledged_event_survives_a_power_cut_and_a_claim_need_not(daemon, power, last):
    daemon.environment["ASIDE"] = "600"
    with running(daemon):
        assert deliver(daemon, "order.created", "inline-1") == 200
        assert ACKNOWLEDGED[last](daemon) == 200
        # It begins after that and still runs at the power cut: its claim is on no disk.
        sender = threading.Thread(target=daemon.deliver, args=(ASIDE,), kwargs={"inline": True})
        sender.start()
        wait_until(lambda: daemon.runs(ASIDE), daemon.log)
        wait_until(lambda: daemon.state(ASIDE) == "running", daemon.log)
        daemon.signal(SIGKILL)
        daemon.ended()
        sender.join()
        assert power.left("PRAGMA integrity_check") == [("ok",)]
        states = dict(power.left(STATE_OF_EACH))
        assert states["inline-1"] == "done"
        assert last != "inline" or states["inline-2"] == "done"
        assert last not in ("queued", "parked") or f"{last}-1" in states
        kept = power.left("SELECT raw FROM evidence")
        assert [b"another" in raw for (raw,) in kept] == [True] * (last == "other-body")
        power.happen()
        daemon.environment["ASIDE"] = "0"
        assert daemon.start(), daemon.log()
        for webhook_id in ("inline-1", ASIDE):
            # It is 503 until the events that may have ended the process were claimed.
            again = partial(daemon.deliver, webhook_id, inline=True)
            wait_until(lambda again=again: again() == 200, daemon.log)
            daemon.wait_for_state(webhook_id, "done")
        assert daemon.runs("inline-1") == 1
        assert daemon.runs(ASIDE, "ended") == 1


@pytest.mark.parametrize("processes", [1, 2])
def test_syncs_that_failed_before_a_power_cut_lose_nothing_that_was_acknowledged(
    tmp_path, processes
):
    """A short form of ``python tests/power_cuts.py --failed-syncs``."""
    report = power_cuts(
        tmp_path, moments=16, failed_syncs=True, seconds=5, seed=3, processes=processes
    )
    table = "\n".join(f"{name}: {value}" for name, value in report.rows())
    assert not report.broken, table
    # The test is effective: some syncs did fail.
    assert report.failed_syncs, table
    assert report.acknowledged, table
    assert report.moments == 16, table
