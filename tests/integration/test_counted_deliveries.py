"""The system calls and the bytecode of one delivery, counted in a server of its own.

Deliveries come one after the other, each when all threads of the server sleep again. Calls that
depend on how the machine schedules threads are left out. The limits are slightly above the current
numbers. When a number falls, lower its limit; when it has to rise, state the reason in the commit.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.programs import program
from support.waiting import PATIENCE_SECONDS

COUNTED = Path(__file__).parents[2] / "benchmarks" / "counted.py"
#: Waits for another thread and for the loop, and growth of memory.
SCHEDULED = {"futex", "epoll_wait", "mprotect", "mmap", "munmap", "brk", "sched_yield"}


@pytest.mark.parametrize(
    ("way", "most", "syncs", "steps"),
    [
        ("inline", 30, 1, 7750),
        ("enqueued", 33, 1, 9450),
        ("inline:fresh", 38, 1, 11250),
        ("enqueued:fresh", 41, 1, 12150),
        ("memory", 4, 0, 4050),
        ("memory:fresh", 13, 0, 7550),
    ],
)
def test_a_delivery_costs_no_more_calls_and_steps_than_it_did(way, most, syncs, steps, tmp_path):
    program("strace")
    command = [sys.executable, str(COUNTED), way, "--cheap", "--deliveries", "40"]
    ran = subprocess.run(
        [*command, "--directory", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    counted = json.loads(ran.stdout)[way]
    calls = counted["calls"]
    own = {name: number for name, number in calls.items() if name not in SCHEDULED}
    assert sum(own.values()) <= most, own
    assert calls.get("fdatasync", 0) + calls.get("fsync", 0) <= syncs + 0.2, own
    assert counted["steps"] <= steps
