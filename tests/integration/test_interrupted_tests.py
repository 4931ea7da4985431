"""A test process that is interrupted leaves nothing running, however it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import reaper
from support.daemon import clean_environment
from support.postgres import binaries
from support.waiting import wait_until

TESTS = Path(__file__).parents[1]

INNER = '''
import os
import subprocess
import sys
import time
from pathlib import Path

from support.daemon import Place
from support.postgres import binaries, running_server

PARENT = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_that_is_interrupted(tmp_path):
    pids = [os.getpid()]
    if binaries():
        server = running_server()
        pids.append(server.pid)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, start_new_session=True
    )
    pids += [parent.pid, int(parent.stdout.readline())]
    place = Place(tmp_path)
    with place.daemon() as daemon:
        pids.append(daemon.process.pid)
        Path({file!r}).write_text(" ".join(map(str, pids)))
        time.sleep(600)
'''


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("pytest", signal.SIGKILL),
        ("pytest", signal.SIGTERM),
        ("pytest", signal.SIGINT),
        ("controller", signal.SIGKILL),
        ("worker", signal.SIGKILL),
    ],
)
def test_nothing_is_left_of_an_interrupted_run(
    tmp_path: Path, victim: str, number: signal.Signals
) -> None:
    started = tmp_path / "pids"
    file = tmp_path / "test_inner.py"
    file.write_text(INNER.format(file=str(started)))
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(TESTS.parent / "pyproject.toml")]
    command += ["-p", "conftest", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "inner")]
    command += [] if victim == "pytest" else ["-n", "1", "--max-worker-restart", "0"]
    environ = {n: v for n, v in clean_environment().items() if not n.startswith("PYTEST_")}
    with (tmp_path / "log").open("wb") as log:
        run = subprocess.Popen(
            [*command, str(file)],
            env={**environ, "PYTHONPATH": str(TESTS)},
            cwd=TESTS.parent,
            stdout=log,
            stderr=log,
        )

    def has_started() -> bool:
        assert run.poll() is None, (tmp_path / "log").read_text()
        return started.exists() and started.read_text() != ""

    wait_until(has_started)
    named = [int(pid) for pid in started.read_text().split()]
    assert len(named) == (5 if binaries() else 4)
    everything = reaper.descendants({run.pid, *named})
    assert everything >= {*named}
    os.kill(named[0] if victim == "worker" else run.pid, number)
    run.wait(60)
    wait_until(lambda: not _alive(everything), lambda: _alive(everything))


def _alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if pid in reaper.descendants({pid})}
