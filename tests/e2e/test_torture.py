"""A small sample of the long run (tests/torture.py): kills and disk faults under load."""

import random

from torture import FAULTS, schedule, torture


async def test_kills_and_disk_faults_lose_nothing_and_keep_the_order(tmp_path):
    report = await torture(tmp_path, kills=6, faults=8, seed=3, rate=80, seconds=600)
    table = "\n".join(f"{name}: {value}" for name, value in report.rows())
    assert not report.account.broken, table
    assert not report.innocent_dead, table
    # It has proved something: there were kills, faults that were felt, and events of every kind.
    assert report.kills == 6, table
    assert sum(felt for _, felt in report.felt.values()) >= 4, table
    assert report.account.states.keys() == {"done", "dead", "parked"}, table
    assert report.own_ends.get(0) == 1, table  # the last one, after its drain


def test_the_schedule_has_the_requested_faults_and_follows_from_the_seed():
    for kills, faults in [(6, 6), (0, 3), (5, 0), (40, 25)]:
        steps = schedule(kills, faults, random.Random(1))
        assert sum(step.kill_after is not None for step in steps) == kills
        assert sum(step.fault is not None for step in steps) == faults
        assert steps == schedule(kills, faults, random.Random(1))
    assert {step.fault for step in schedule(0, 50, random.Random(2))} == set(FAULTS)
