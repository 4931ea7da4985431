"""The upgrade killed with -9: at any moment, the next run has the same result."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KILLER = Path(__file__).resolve().parents[1] / "support" / "upgrade_killer.py"

#: ``all`` kills before every line of code that the upgrade executes, and at 300 random moments.
SIZE = "SDK_TEST_UPGRADE_KILLS"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the runs are forked")
def test_killed_anywhere_the_next_run_comes_to_the_same_end_and_no_row_is_lost_or_there_twice(
    tmp_path,
):
    everywhere = os.environ.get(SIZE) == "all"
    lines, times = (0, 300) if everywhere else (30, 8)
    finished = subprocess.run(
        [sys.executable, KILLER, tmp_path, str(lines), str(times), "7"],
        capture_output=True,
        text=True,
        timeout=3600 if everywhere else 300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    report = json.loads(finished.stdout)
    # A random moment may lie after the end, and so may the last of the lines.
    assert report["killed"] >= 25, report
    # Killed before anything was written, in the middle of every step, and after the end.
    assert {place.partition(":")[0] for place in report["places"]} >= {
        "pending",
        "running deliveries",
        "running host",
    }, report
