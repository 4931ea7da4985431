"""The seams that a simulation replaces: time, threads, sockets and files of the data directory."""

import ast
import os
import socket
import threading
import time
from pathlib import Path

import apsw
import pytest
import trio
from support.imports import modules

import sdk_trio
from sdk_trio.base import clock, executor, opener


def test_a_replaced_clock_is_asked_until_the_end_of_the_block():
    slept = []
    with clock.use(clock.Clock(lambda: 1.0, lambda: 2.0, slept.append)):
        clock.sleep(3.0)
        assert (clock.wall(), clock.monotonic(), slept) == (1.0, 2.0, [3.0])
        assert clock.current().wall() == 1.0
    assert clock.current() == (time.time, time.monotonic, time.sleep)


async def test_a_worker_runs_jobs_in_order_in_one_thread_and_delivers_to_the_loop():
    loop, delivered, ran = threading.get_ident(), [], []
    ended = trio.Event()
    worker = executor.start_worker("test")

    def fail():
        raise ValueError("no")

    def deliver(result):
        delivered.append((threading.get_ident(), result))
        if len(delivered) == 3:
            ended.set()

    for job in (lambda: ran.append(threading.current_thread()), fail, lambda: 7):
        worker.post(job, deliver)
    worker.close()
    await ended.wait()
    assert {thread for thread, _ in delivered} == {loop}
    assert isinstance(delivered[1][1].error, ValueError)
    assert delivered[2][1].unwrap() == 7
    assert ran[0].name == "test"
    ran[0].join()


async def test_a_job_in_a_thread_delivers_its_failure_to_the_loop():
    ended, results = trio.Event(), []

    def deliver(result):
        results.append(result)
        ended.set()

    executor.start_in_thread(lambda: 1 // 0, deliver, name="test")
    await ended.wait()
    with pytest.raises(ZeroDivisionError):
        results[0].unwrap()


def test_a_result_that_comes_after_the_loop_has_ended_is_dropped():
    released, worker_thread = threading.Event(), []

    async def begin():
        worker = executor.start_worker("test")
        worker.post(lambda: worker_thread.append(threading.current_thread()), print)
        worker.post(released.wait, lambda _: pytest.fail("delivered"))
        worker.close()
        while not worker_thread:
            await trio.lowlevel.checkpoint()

    trio.run(begin)
    released.set()
    worker_thread[0].join()


class _Inline(executor.Executor):
    """Runs calls in the thread of the loop, as a simulation does."""

    async def run(self, function, *arguments, **_):
        await trio.lowlevel.checkpoint()
        return function(*arguments)


async def test_a_replaced_executor_runs_the_calls_until_the_end_of_the_block():
    loop = threading.get_ident()
    with executor.use(_Inline()):
        assert await executor.run_in_thread(threading.get_ident) == loop
    assert await executor.run_in_thread(threading.get_ident) != loop


class _Recorder(opener.Opener):
    def __init__(self):
        self.opened = []

    def file(self, path, flags, mode):
        self.opened.append(("file", os.fspath(path)))
        return super().file(path, flags, mode)

    def database(self, path, flags):
        self.opened.append(("database", path))
        return super().database(path, flags)

    def socket(self, family, kind, protocol):
        self.opened.append(("socket", family))
        return super().socket(family, kind, protocol)

    async def dial_tcp(self, host, port, next_address):
        raise OSError("no network")


async def test_a_replaced_opener_opens_everything_until_the_end_of_the_block(tmp_path):
    recorder = _Recorder()
    file, database = tmp_path / "file", tmp_path / "database"
    with opener.use(recorder):
        with open(file, "x", opener=opener.open_file) as opened:
            opener.sync_file(opened.fileno())
        flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
        opener.open_database(database, flags=flags).close()
        opener.open_socket(socket.AF_INET).close()
        with pytest.raises(OSError, match="no network"):
            await opener.dial_tcp("localhost", 1)
    assert recorder.opened == [
        ("file", str(file)),
        ("database", str(database)),
        ("socket", socket.AF_INET),
    ]
    os.close(opener.open_file(file, os.O_RDONLY))
    assert len(recorder.opened) == 3
    assert file.stat().st_mode & 0o777 == 0o600


#: Calls that only ``sdk_trio.base`` may make, and its module that makes them.
SEAMS = {
    "clock": {
        "time.time",
        "time.time_ns",
        "time.monotonic",
        "time.monotonic_ns",
        "time.perf_counter",
        "time.perf_counter_ns",
        "time.sleep",
        "datetime.now",
        "datetime.utcnow",
    },
    "executor": {
        "trio.to_thread.run_sync",
        "trio.from_thread.run",
        "trio.from_thread.run_sync",
        "trio.from_thread.check_cancelled",
        "trio.lowlevel.start_thread_soon",
        "trio.Path",
        "trio.open_file",
        "threading.Thread",
        "threading.Timer",
    },
    "opener": {
        "apsw.Connection",
        "os.open",
        "os.fsync",
        "socket.create_connection",
        "socket.create_server",
        "socket.getaddrinfo",
        "socket.socket",
        "socket.socketpair",
        "trio.open_ssl_over_tcp_stream",
        "trio.open_tcp_listeners",
        "trio.open_tcp_stream",
        "trio.open_unix_socket",
        "trio.serve_tcp",
        "trio.socket.getaddrinfo",
        "trio.socket.socket",
    },
}

#: Modules, or packages, that do such a thing themselves; a simulation replaces none of it.
EXCEPTIONS = {
    "sdk_trio.__main__": "the process, before it runs anything",
    "sdk_trio.asgi": "the thread of a runtime beside an asyncio loop: two loops cannot be one",
    "sdk_trio.base.log_output": "logs of a process; its thread must work without any event loop",
    "sdk_trio.cli": "commands of a person, and the end of the process",
    "sdk_trio.client.portal": "the thread of the event loop behind a blocking client",
    "sdk_trio.replication.child": "a thread that lives as long as another program",
    "sdk_trio.replication.manifest": "compares with the times of files, which are the kernel's",
    "sdk_trio.replication.watch": "compares with the times of files, which are the kernel's",
    "sdk_trio.runtime.worker_process": "the channel between two processes",
    "sdk_trio.testing.simulation.threads": "threads that run one at a time",
}


#: Classes among them: to name one in an annotation opens nothing.
CLASSES = {"apsw.Connection", "socket.socket", "threading.Thread"}


def _named(tree):
    """Yield the dotted names in a module and their lines: what was imported, by its full name."""
    homes = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            homes |= {name.asname or name.name: name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            homes |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
    called = {
        node.func
        for node in ast.walk(tree)
        # A socket made from a descriptor was opened elsewhere.
        if isinstance(node, ast.Call) and not any(each.arg == "fileno" for each in node.keywords)
    }
    for node in ast.walk(tree):
        after = ""
        place = node
        while isinstance(place, ast.Attribute):
            after, place = f".{place.attr}{after}", place.value
        if isinstance(place, ast.Name):
            name = homes.get(place.id, place.id) + after
            if name not in CLASSES or node in called:
                yield name.replace("datetime.datetime.", "datetime."), node.lineno


def _is_excepted(module):
    return any(module == name or module.startswith(f"{name}.") for name in EXCEPTIONS)


FILES = modules(Path(sdk_trio.__file__).parent)


@pytest.mark.parametrize("exception", EXCEPTIONS)
def test_an_exception_is_needed(exception):
    inside = [name for name in FILES if f"{name}.".startswith(f"{exception}.")]
    assert any(_uses(name) for name in inside), "take it out of EXCEPTIONS: it uses the seams"


def _uses(module):
    tree = ast.parse(FILES[module].read_text(encoding="utf-8"))
    return [
        (seam, f"{module}:{line} {name}")
        for name, line in _named(tree)
        for seam, names in SEAMS.items()
        if name in names and module != f"sdk_trio.base.{seam}"
    ]


@pytest.mark.parametrize("module", [name for name in FILES if not _is_excepted(name)])
def test_time_threads_sockets_and_files_come_from_the_seams(module):
    uses = [f"{use}: use sdk_trio.base.{seam}" for seam, use in _uses(module)]
    assert not uses, f"a simulation could not replace these: {uses}"
