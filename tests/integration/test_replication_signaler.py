"""A replicator is sent SIGHUP only if it is one that survives it; all processes are real."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
import trio
from support.programs import program
from support.waiting import wait_until

from sdk_trio.replication.manifest import TenantDatabaseFile
from sdk_trio.replication.running_replicator import (
    Signaler,
    SignalRefusal,
    parse_pid,
    refusal_to_signal,
    send_hangup,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX processes")

#: Writes its readiness, and afterwards a line for each SIGHUP, to the file it is given.
OBEDIENT = """
import signal, sys, time
out = open(sys.argv[1], "a", buffering=1)
signal.signal(signal.SIGHUP, lambda *_: out.write("reloaded\\n"))
out.write("ready\\n")
while True: time.sleep(0.05)
"""
IGNORING = OBEDIENT.replace("lambda *_: out.write('reloaded\\n')", "signal.SIG_IGN").replace(
    'lambda *_: out.write("reloaded\\n")', "signal.SIG_IGN"
)
UNPREPARED = "import sys, time; open(sys.argv[1], 'a').write('ready\\n'); time.sleep(600)"

OTHER_USER = 65534
DATABASES = [TenantDatabaseFile("t", "/t.db")]


def wait_for(file: Path, text: str, process: "subprocess.Popen[Any] | None" = None) -> None:
    def written() -> bool:
        assert process is None or process.poll() is None
        return file.exists() and text in file.read_text()

    wait_until(written, lambda: f"no {text!r} in {file}")


class Started:
    def __init__(self, tmp_path: Path) -> None:
        self.directory = tmp_path
        self.processes: list[subprocess.Popen[Any]] = []

    def __call__(self, code: str) -> tuple[subprocess.Popen[Any], Path]:
        out = self.directory / f"out{len(self.processes)}"
        process = subprocess.Popen([sys.executable, "-c", code, str(out)])
        self.processes.append(process)
        wait_for(out, "ready", process)
        return process, out


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Started]:
    started = Started(tmp_path)
    yield started
    for process in started.processes:
        process.kill()
        process.wait()


@pytest.fixture
def pid_file(tmp_path: Path) -> Path:
    return tmp_path / "replicator.pid"


def reason(outcome: int | SignalRefusal) -> str:
    assert isinstance(outcome, SignalRefusal), outcome
    return outcome.reason


def test_a_replicator_that_handles_the_signal_gets_it(start: Started, pid_file: Path) -> None:
    process, out = start(OBEDIENT)
    pid_file.write_text(f"{process.pid}\n")
    assert send_hangup(pid_file) == process.pid
    wait_for(out, "reloaded", process)


def test_the_bare_replicator_is_not_sent_what_would_end_it(tmp_path: Path, pid_file: Path) -> None:
    manifest = tmp_path / "litestream.yml"
    manifest.write_text('dbs: []\naddr: ""\n')
    renamed = tmp_path / "replica-daemon"
    renamed.symlink_to(program("litestream"))
    copied = tmp_path / "copy-of-it"
    os.link(program("litestream"), copied) if _same_device(tmp_path) else copied.write_bytes(
        Path(program("litestream")).read_bytes()
    )
    copied.chmod(0o755)
    for binary in (program("litestream"), str(renamed), str(copied)):
        process = subprocess.Popen(
            [binary, "replicate", "-config", str(manifest)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            assert process.stdout is not None
            process.stdout.readline()  # it runs
            pid_file.write_text(str(process.pid))
            assert reason(send_hangup(pid_file)) == "bare"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.3)
        finally:
            process.kill()
            process.communicate()


def _same_device(directory: Path) -> bool:
    return Path(program("litestream")).stat().st_dev == directory.stat().st_dev


@pytest.mark.parametrize(("code", "expected"), [(UNPREPARED, "unprepared"), (IGNORING, "deaf")])
def test_a_process_that_would_die_or_not_hear_is_left_alone(
    start: Started, pid_file: Path, code: str, expected: str
) -> None:
    process, out = start(code)
    pid_file.write_text(str(process.pid))
    assert reason(send_hangup(pid_file)) == expected
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    assert out.read_text() == "ready\n"


def test_a_process_that_has_ended_is_stale(start: Started, pid_file: Path) -> None:
    process, _ = start(OBEDIENT)
    pid_file.write_text(str(process.pid))
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert reason(send_hangup(pid_file)) == "stale"  # not waited for yet: a zombie
    process.wait()
    assert reason(send_hangup(pid_file)) == "stale"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_process_is_not_ours_to_signal(start: Started, pid_file: Path) -> None:
    process, out = start(OBEDIENT)
    pid_file.write_text(str(process.pid))
    pid_file.chmod(0o644)
    for directory in pid_file.parents:
        if directory.is_relative_to(gettempdir()) and directory != Path(gettempdir()):
            directory.chmod(directory.stat().st_mode | 0o055)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(OTHER_USER)
            os.setuid(OTHER_USER)
            os.write(write, reason(send_hangup(pid_file)).encode())
        except BaseException as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as answer:
        assert answer.read() == b"not_permitted"
    os.waitpid(child, 0)
    assert process.poll() is None
    assert out.read_text() == "ready\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"litestream", "garbage"),
        (b"12 34", "garbage"),
        (b"12.5", "garbage"),
        (b"+12", "garbage"),
        (b"0x1f", "garbage"),
        (b"1_0", "garbage"),
        ("١٢".encode(), "garbage"),
        (b"\0\0\0\0", "garbage"),
        (b"9" * 100, "garbage"),
        (b"0", "not_positive"),
        (b"-1", "not_positive"),
        (b"-4242", "not_positive"),
        (b"1", "own"),
        pytest.param(str(os.getpid()).encode(), "own", id="this process-own"),
        (b"9" * 30, "stale"),
        (b"2147483647", "stale"),
    ],
)
def test_a_process_that_is_not_the_replicator_is_refused(
    pid_file: Path, content: bytes, expected: str
) -> None:
    pid_file.write_bytes(content)
    assert reason(send_hangup(pid_file)) == expected


def test_a_pid_may_have_white_space_around_it() -> None:
    assert parse_pid(b" 4242\r\n") == 4242


def test_a_pid_file_that_is_none_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    assert reason(send_hangup(tmp_path / "missing")) == "missing"
    assert reason(send_hangup(tmp_path)) == "unreadable"
    os.mkfifo(tmp_path / "pipe")
    assert reason(send_hangup(tmp_path / "pipe")) == "unreadable"
    everybodys = tmp_path / "everybodys"
    everybodys.write_text("4242")
    everybodys.chmod(0o666)
    assert reason(send_hangup(everybodys)) == "unsafe"


def test_without_proc_the_name_is_asked_for(start: Started, tmp_path: Path) -> None:
    process, _ = start(OBEDIENT)
    assert refusal_to_signal(process.pid, proc=tmp_path) is None
    sleeper = tmp_path / "litestream"
    sleeper.symlink_to("/bin/sleep")
    named = subprocess.Popen([str(sleeper), "600"])
    start.processes.append(named)
    wait_until(lambda: refusal_to_signal(named.pid, proc=tmp_path) is not None)


async def test_a_warning_says_why_once_until_something_is_different(
    start: Started, pid_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    signaler = Signaler(pid_file)
    with trio.fail_after(60):
        assert not await signaler.reload(DATABASES)
        assert not await signaler.reload(DATABASES)
        assert not await signaler.reload([])
        pid_file.write_text("no number")
        assert not await signaler.reload([])
        process, out = start(OBEDIENT)
        pid_file.write_text(str(process.pid))
        assert await signaler.reload([])
    wait_for(out, "reloaded", process)
    fields = [record.sdk for record in caplog.records if record.levelname == "WARNING"]
    assert [(name, f["reason"]) for name, f in fields] == [
        ("replication.not_signalled", "missing"),
        ("replication.not_signalled", "missing"),
        ("replication.not_signalled", "garbage"),
    ]
    json.dumps(fields)


async def test_windows_has_no_such_signal(
    start: Started, pid_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process, out = start(OBEDIENT)
    pid_file.write_text(str(process.pid))
    with trio.fail_after(60):
        assert await Signaler(pid_file, platform="win32").reload(DATABASES)
    ((name, fields),) = [r.sdk for r in caplog.records if r.levelname == "WARNING"]
    assert (name, fields["reason"]) == ("replication.not_signalled", "windows")
    assert signal.SIGHUP in signal.Signals
    assert out.read_text() == "ready\n"
