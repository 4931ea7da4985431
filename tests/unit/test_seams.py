"""The seams that a simulation replaces: time, threads, sockets and files of the data directory."""

import os
import socket
import threading
import time

import apsw
import pytest
import trio

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
