"""Stalls of the store and of processes under load: events answered 200 run, without a restart.

These are the short forms of ``tests/stalls.py``, which measures as well.
"""

from pathlib import Path

import pytest
from stalls import Options, experiment

# Longer than the time limit of a store's callers: abandoned calls may leave leases without runs.
SECONDS = 6.0


# Once, or twice if a second stall meets the consequences of the first one.
@pytest.mark.parametrize(
    ("store", "processes", "kind", "times"),
    [
        ("sqlite", 1, "fsync", 1),
        ("sqlite", 2, "fsync", 2),
        ("sqlite", 1, "sigstop", 1),
        ("postgres", 1, "lock", 1),
        ("postgres", 2, "lock", 2),
        ("postgres", 2, "backends", 1),
        ("postgres", 1, "blackhole", 1),
        ("postgres", 1, "pgbouncer", 1),
    ],
)
async def test_acknowledged_events_run_after_a_stall(
    tmp_path: Path, store: str, processes: int, kind: str, times: int
) -> None:
    options = Options(store=store, processes=processes, kind=kind, seconds=[SECONDS], times=times)
    report = await experiment(tmp_path, options)
    assert report.account.acknowledged > 0
    assert report.account.lost == []
    assert report.account.overlapping == []
    assert report.account.out_of_order == []


@pytest.mark.parametrize(("store", "kind"), [("sqlite", "worker"), ("postgres", "sigstop")])
async def test_events_of_a_stopped_process_run_in_another_one(
    tmp_path: Path, store: str, kind: str
) -> None:
    """It is paused for longer than its leases, which are shorter than usual here."""
    options = Options(store=store, processes=2, kind=kind, seconds=[8.0], times=1, lease=3.0)
    report = await experiment(tmp_path, options)
    assert report.account.lost == []
