"""Writing lines to a reader that is slow, hangs, or is gone, and which lines are dropped."""

import fcntl
import io
import json
import logging
import os
import pty
import select
import socket
import subprocess
import sys
import termios
import threading

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.waiting import wait_until

from sdk_trio.base import log_output
from sdk_trio.base.log_output import WRITE_BYTES, LogOutput, dropped_in_all

NET = 30.0


def dropped_line(dropped):
    return f"dropped {json.dumps(dict(sorted(dropped.items())))}\n"


class Pipe:
    """A pipe of one page that the test reads on request."""

    def __init__(self, **options):
        self.read_end, self.write_end = os.pipe()
        fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, 4096)
        self.stream = os.fdopen(self.write_end, "w")
        self.output = LogOutput(self.stream, dropped_line, **options)

    def fill(self):
        """Write Infos until one has to wait; return the written lines."""
        lines = []
        while not self.output._size:
            lines.append(f"fill {len(lines)} {'x' * 100}\n")
            self.output.write(logging.INFO, lines[-1])
        return lines

    def read_all(self):
        """Read until nothing is left to be written."""
        found = b""
        while True:
            # In this order: lines that leave the buffer after the first check are found by the
            # second. With the lock: the thread takes the number of dropped lines and makes a line
            # of it.
            with self.output._lock:
                over = not self.output._size and not self.output._dropped
            if select.select([self.read_end], [], [], 0.0 if over else 0.001)[0]:
                found += os.read(self.read_end, 65536)
            elif over:
                return found.decode().splitlines(keepends=True)

    def close(self):
        self.output.close()
        self.stream.close()
        os.close(self.read_end)


@pytest.fixture
def pipe():
    found = Pipe(most_bytes=2000)
    yield found
    found.read_all()
    found.close()


def test_a_hanging_reader_delays_no_task_and_gets_all_lines_in_order(pipe):
    lines = pipe.fill()
    lines += [f"later {number}\n" for number in range(20)]
    for line in lines[-20:]:
        pipe.output.write(logging.INFO, line)
    assert pipe.read_all() == lines
    pipe.output.write(logging.INFO, "at once\n")
    assert pipe.read_all() == ["at once\n"]


def test_lines_that_do_not_fit_are_dropped_and_counted(pipe):
    before = dropped_in_all["info"]
    lines = pipe.fill()
    for number in range(100):
        lines.append(f"{number} {'y' * 90}\n")
        pipe.output.write(logging.INFO, lines[-1])
    found = pipe.read_all()
    kept = found[:-1]
    assert kept == lines[: len(kept)]
    missing = len(lines) - len(kept)
    assert missing > 50
    assert found[-1] == dropped_line({"info": missing})
    assert dropped_in_all["info"] - before == missing


def test_an_error_takes_the_place_of_infos():
    # Several times what the thread may have taken out already, which nothing replaces.
    pipe = Pipe(most_bytes=5 * WRITE_BYTES)
    pipe.fill()
    for number in range(400):
        pipe.output.write(logging.INFO, f"{number} {'y' * 90}\n")
    errors = [f"error {number} {'z' * 90}\n" for number in range(10)]
    for line in errors:
        pipe.output.write(logging.ERROR, line)
    found = pipe.read_all()
    pipe.close()
    assert [line for line in found if line.startswith("error")] == errors


def test_errors_are_dropped_last_and_reported(pipe):
    pipe.fill()
    for number in range(200):
        pipe.output.write(logging.ERROR, f"error {number} {'z' * 90}\n")
    found = pipe.read_all()
    marks = [json.loads(line.removeprefix("dropped ")) for line in found if line[0] == "d"]
    errors = [line for line in found if line.startswith("error")]
    assert errors
    assert sum(mark.get("error", 0) for mark in marks) == 200 - len(errors)
    assert not any(line[0] in "0123456789" for line in found)


def test_a_line_that_is_longer_than_a_write_arrives_whole(pipe):
    long = "l" * 9000 + "\n"
    pipe.output._most = 20_000
    pipe.output.write(logging.INFO, long)
    pipe.output.write(logging.INFO, "next\n")
    assert pipe.read_all() == [long, "next\n"]


def test_flush_waits_for_a_reader_and_not_forever(pipe):
    pipe.fill()
    assert not pipe.output.flush(0.01)
    reading = threading.Thread(target=pipe.read_all)
    reading.start()
    assert pipe.output.flush(NET)
    reading.join(NET)


def test_a_closed_pipe_is_not_an_error():
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w") as stream:
        output = LogOutput(stream, dropped_line)
        os.close(read_end)
        for _ in range(3):
            output.write(logging.ERROR, "no one\n")
        wait_until(lambda: output._failing)
        assert not output.flush(NET)
        output.close()


def test_a_disk_that_was_full_gets_what_waited(tmp_path, monkeypatch):
    monkeypatch.setattr(log_output, "RETRY_SECONDS", 0.01)
    full = True
    write = os.write

    def no_space(descriptor, data):
        if full and descriptor == stream.fileno():
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    with (tmp_path / "log").open("w") as stream:
        output = LogOutput(stream, dropped_line)
        monkeypatch.setattr(os, "write", no_space)
        output.write(logging.ERROR, "first\n")
        output.write(logging.INFO, "second\n")
        wait_until(lambda: output._failing)
        full = False
        wait_until(lambda: output.flush(NET))
        output.close()
    assert (tmp_path / "log").read_text() == "first\nsecond\n"


def test_the_descriptor_of_others_stays_one_that_blocks(pipe):
    assert os.get_blocking(pipe.write_end)
    pipe.fill()
    assert os.get_blocking(pipe.write_end)


def test_a_socket_such_as_the_journals_does_not_block():
    reader, writer = socket.socketpair()
    with reader, writer.makefile("w") as stream, writer:
        output = LogOutput(stream, dropped_line)
        count = 0
        while not output._size:
            output.write(logging.INFO, f"{count} {'x' * 1000}\n")
            count += 1
        assert writer.gettimeout() is None
        found = b""
        while found.count(b"\n") < count:
            found += reader.recv(65536)
        assert [line.split()[0] for line in found.splitlines()] == [
            str(number).encode() for number in range(count)
        ]
        output.close()


def test_a_terminal_that_is_stopped_does_not_block():
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:
        output = LogOutput(stream, dropped_line)
        termios.tcflow(slave, termios.TCOOFF)  # as ^S does
        output.write(logging.INFO, "stopped\n")
        assert not output.flush(0.01)
        termios.tcflow(slave, termios.TCOON)
        assert output.flush(NET)
        assert os.read(master, 100) == b"stopped\r\n"
        output.close()
    os.close(master)


def test_if_nothing_else_works_a_thread_writes(monkeypatch):
    monkeypatch.setattr(log_output.sys, "platform", "another")
    pipe = Pipe()
    lines = [f"{number} {'x' * 100}\n" for number in range(100)]
    for line in lines:
        pipe.output.write(logging.INFO, line)
    assert pipe.read_all() == lines
    pipe.close()


def test_a_pipe_of_another_user_is_written_to_by_a_thread(monkeypatch):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refused)
        pipe = Pipe()
    pipe.output.write(logging.INFO, "a line\n")
    assert pipe.read_all() == ["a line\n"]
    pipe.close()


def test_lines_of_a_turn_leave_together_and_a_warning_takes_them_along(tmp_path):
    file = tmp_path / "log"
    with file.open("w") as stream:
        output = LogOutput(stream, dropped_line)
        output.begin_batching()
        output.write(logging.INFO, "one\n")
        assert file.read_text() == ""
        output.write(logging.WARNING, "two\n")
        assert file.read_text() == "one\ntwo\n"
        output.write(logging.INFO, "three\n")
        output.write_batch()
        assert file.read_text() == "one\ntwo\nthree\n"
        output.write(logging.INFO, "four\n")
        thread = threading.Thread(target=output.write, args=(logging.INFO, "of a thread\n"))
        thread.start()
        thread.join()
        assert file.read_text().endswith("three\nfour\nof a thread\n")
        for _ in range(log_output.BATCH_LINES):
            output.write(logging.INFO, "many\n")
        assert file.read_text().count("many") == log_output.BATCH_LINES
        output.write(logging.INFO, "last\n")
        output.end_batching()
        assert file.read_text().endswith("last\n")


def test_a_stream_without_a_descriptor_that_fails_is_counted():
    stream = io.StringIO()
    output = LogOutput(stream, dropped_line)
    output.write(logging.INFO, "a line\n")
    assert stream.getvalue() == "a line\n"
    stream.close()
    before = dropped_in_all["info"]
    output.write(logging.INFO, "a line\n")
    assert dropped_in_all["info"] == before + 1


def test_threads_keep_their_lines_whole_and_in_their_order(pipe):
    pipe.output._most = 1 << 20
    reading = []
    reader = threading.Thread(target=lambda: reading.extend(iter_lines(pipe.read_end, 2000)))
    reader.start()

    def write(name):
        for number in range(500):
            pipe.output.write(logging.INFO, f"{name} {number}\n")

    pipe.output.begin_batching()
    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for number in range(500):
        pipe.output.write(logging.INFO, f"loop {number}\n")
        if number % 7 == 0:
            pipe.output.write_batch()
    pipe.output.end_batching()
    for thread in threads:
        thread.join(NET)
    reader.join(NET)
    for name in ("a", "b", "c", "loop"):
        assert [line for line in reading if line.startswith(f"{name} ")] == [
            f"{name} {number}" for number in range(500)
        ]


def iter_lines(descriptor, count):
    found = b""
    while found.count(b"\n") < count:
        found += os.read(descriptor, 65536)
    return found.decode().splitlines()


FORK = """
import os, sys
from sdk_trio.base import logs
logs.configure()
log = logs.get_logger("webhooks")
logs.begin_batching()
log.info("before")
child = os.fork()
log.info("child" if child == 0 else "parent")
if child:
    os.waitpid(child, 0)
"""


def test_a_forked_child_repeats_nothing_and_loses_nothing():
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0
    events = [json.loads(line)["event"] for line in ended.stderr.splitlines()]
    assert sorted(events) == ["before", "child", "parent"]
    assert events[0] == "before"


FORK_BESIDE_A_WAIT = """
import fcntl, os, select
from pathlib import Path
from sdk_trio.base import logs

def let_the_thread_wait():
    asleep = 0
    while asleep < 100 and (thread := output._thread):
        state = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
        asleep = asleep + 1 if state.rpartition(")")[2].split()[0] == "S" else 0

reading, writing = os.pipe()
read_end, write_end = os.pipe()
fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
logs.configure(format="Json", stream=os.fdopen(writing, "w"))
log = logs.get_logger("webhooks")
output = logs._installed.handler.output
while not output._size:
    log.info("fill", text="x" * 100)
let_the_thread_wait()
child = os.fork()
if child == 0:
    os.close(reading)
    log.info("child")
    try:
        let_the_thread_wait()
    finally:
        os.write(write_end, b".")
    output.flush(30)
    os._exit(0)
os.read(read_end, 1)
found = b""
ended = False
# The bytes may be read before the thread has counted them as written.
while not ended or output._size or select.select([reading], [], [], 0)[0]:
    ended = ended or bool(os.waitpid(child, os.WNOHANG)[0])
    if select.select([reading], [], [], 0.01)[0]:
        found += os.read(reading, 65536)
print(found.decode(), end="")
"""


def test_a_child_that_is_forked_while_a_line_waits_gets_its_own_lines_out():
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK_BESIDE_A_WAIT],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stderr == ""
    events = [json.loads(line)["event"] for line in ended.stdout.splitlines()]
    assert events.count("child") == 1
    assert set(events) == {"fill", "child"}


EXIT = """
import sys
from sdk_trio.base import logs
logs.configure()
log = logs.get_logger("webhooks")
logs.begin_batching()
for number in range(3000):
    log.info("line", number=number)
{end}
"""


@pytest.mark.parametrize(
    "end", ["", "raise ValueError", "import os; logs.flush(1.0); os._exit(0)", "sys.exit(3)"]
)
def test_the_end_of_a_program_waits_for_its_lines(end):
    with subprocess.Popen(
        [sys.executable, "-c", EXIT.format(end=end)], stderr=subprocess.PIPE, text=True
    ) as process:
        # The traceback is written in pieces, and other lines may come between them.
        lines = [line[line.index("{") :] for line in process.stderr if "{" in line]
    assert [json.loads(line)["number"] for line in lines] == list(range(3000))


class Lines(RuleBasedStateMachine):
    """Any sequence of lines and reads: their order is kept, and all missing lines are counted."""

    @initialize()
    def begin(self):
        self.pipe = Pipe(most_bytes=1500)
        self.written = []
        self.found = []

    @rule(level=st.sampled_from([10, 20, 30, 40]), size=st.integers(1, 900))
    def write(self, level, size):
        line = f"{len(self.written)} {level} {'x' * size}\n"
        self.written.append(line)
        self.pipe.output.write(level, line)
        waiting = list(self.pipe.output._waiting)
        assert sum(len(line) for _, line in waiting) <= 1500 + 200

    @precondition(lambda self: self.written)
    @rule()
    def read(self):
        self.found += self.pipe.read_all()

    def teardown(self):
        if not hasattr(self, "pipe"):
            return
        self.found += self.pipe.read_all()
        marks = [json.loads(x.removeprefix("dropped ")) for x in self.found if x[0] == "d"]
        kept = [line for line in self.found if line[0] != "d"]
        numbers = [int(line.split()[0]) for line in kept]
        assert numbers == sorted(set(numbers))
        assert all(self.written[int(line.split()[0])] == line for line in kept)
        names = {"10": "debug", "20": "info", "30": "warning", "40": "error"}
        for level, name in names.items():
            missing = sum(x.split()[1] == level for x in self.written)
            missing -= sum(x.split()[1] == level for x in kept)
            assert missing == sum(mark.get(name, 0) for mark in marks)
        self.pipe.close()


TestLines = Lines.TestCase


def test_a_turn_of_many_lines_is_one_write_to_a_file(tmp_path, monkeypatch):
    sizes = []

    def write(descriptor, data):
        sizes.append(len(data))
        return written(descriptor, data)

    written = os.write
    line = "x" * 199 + "\n"
    with (tmp_path / "log").open("w") as stream:
        output = LogOutput(stream, dropped_line)
        output.begin_batching()
        monkeypatch.setattr(os, "write", write)
        for _ in range(100):
            output.write(logging.INFO, line)
        output.write_batch()
        monkeypatch.undo()
        output.close()
    assert sizes == [20_000]
    assert (tmp_path / "log").read_text() == 100 * line
