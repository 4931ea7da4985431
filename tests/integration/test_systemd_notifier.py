"""Signs of life and requests for time, on a real socket."""

import contextlib
import socket
import sys
import threading
from functools import partial

import pytest
import trio
from support.single_tenant import CountingStep, host_settings
from support.waiting import until

from sdk_trio.cli.run import serve
from sdk_trio.errors import StoreUnavailableError
from sdk_trio.runtime import Runtime, systemd
from sdk_trio.runtime.systemd import ServiceEnvironment, SystemdNotifier
from sdk_trio.tenants.upgrade import HostUpgrade, Quiescence

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a service manager's socket")


class Manager:
    """The other end."""

    def __init__(self, path):
        self.address = str(path)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.address)
        self.socket.setblocking(False)
        self.heard = []

    def listen(self):
        with contextlib.suppress(BlockingIOError):
            while True:
                self.heard.append(self.socket.recv(65536).decode())
        return self.heard

    async def hears(self, count):
        await until(lambda: len(self.listen()) >= count)
        return self.heard


@pytest.fixture
def manager(tmp_path):
    manager = Manager(tmp_path / "notify")
    yield manager
    manager.socket.close()


async def answers():
    await trio.lowlevel.checkpoint()


async def fails():
    await trio.lowlevel.checkpoint()
    raise StoreUnavailableError("the disk is full")


@pytest.mark.parametrize("alive", [answers, fails])
async def test_a_store_that_answers_is_alive_even_if_it_answers_with_an_error(manager, alive):
    with contextlib.closing(SystemdNotifier(manager.address)) as notifier:
        async with trio.open_nursery() as nursery:
            began = trio.current_time()
            nursery.start_soon(notifier.keep_watchdog, 0.2, alive)
            assert set(await manager.hears(4)) == {"WATCHDOG=1"}
            # Twice in each interval: three halves of it between the first and the fourth.
            assert trio.current_time() - began >= 0.3
            nursery.cancel_scope.cancel()


async def test_a_store_that_never_answers_is_not_alive_until_it_answers(manager, caplog):
    silent = True

    async def alive():
        if silent:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()

    with contextlib.closing(SystemdNotifier(manager.address)) as notifier:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(notifier.keep_watchdog, 0.1, alive)
            await until(lambda: "runtime.store_silent" in caplog.text)
            await trio.sleep(0.2)
            assert manager.listen() == []
            assert caplog.text.count("runtime.store_silent") == 1
            silent = False
            await manager.hears(1)
            nursery.cancel_scope.cancel()


async def test_it_asks_for_time_for_as_long_as_it_may(manager, autojump_clock):
    with contextlib.closing(SystemdNotifier(manager.address)) as notifier:
        await notifier.extend(lambda: "starting", at_most=2.5)
    assert manager.listen() == ["EXTEND_TIMEOUT_USEC=15000000\nSTATUS=starting"] * 3


def test_a_long_upgrade_at_the_start_asks_for_time_until_it_is_ready(
    tmp_path, manager, monkeypatch
):
    monkeypatch.setattr(systemd, "REPORT_SECONDS", 0.05)

    async def takes_time():
        await until(lambda: len(manager.heard) >= 5)

    step = CountingStep(before=lambda _: takes_time())
    settings = host_settings(tmp_path)
    quiet = Quiescence()
    quiet.signal("test")
    runtime = Runtime(
        settings, standalone=True, host_upgrade=HostUpgrade(steps=(step,)), quiescence=quiet
    )

    @contextlib.contextmanager
    def announce(started):
        runtime.shut_down("the test has seen enough")
        yield

    def read():
        while not manager.heard or "STOPPING" not in manager.heard[-1]:
            manager.heard.append(manager.socket.recv(65536).decode())

    manager.socket.settimeout(20)
    reader = threading.Thread(target=read)
    reader.start()
    environment = ServiceEnvironment(notify_socket=manager.address)
    assert serve(runtime, announce, manager=environment) == 1
    reader.join()
    heard = manager.heard
    ready = next(place for place, text in enumerate(heard) if text.startswith("READY=1"))
    assert ready >= 5
    assert set(heard[:ready]) == {"EXTEND_TIMEOUT_USEC=15000000\nSTATUS=starting"}


async def test_messages_that_must_not_be_lost_wait_for_the_manager_s_queue(manager, monkeypatch):
    with contextlib.closing(SystemdNotifier(manager.address)) as notifier:
        async with trio.open_nursery() as nursery:
            for _ in range(30):
                nursery.start_soon(notifier.ready, "full")
            await trio.sleep(0.1)
            assert len(await manager.hears(30)) == 30
        monkeypatch.setattr(systemd, "PATIENCE_SECONDS", 0.1)
        with trio.fail_after(60):
            for _ in range(30):
                await notifier.ready("unread")


async def test_a_manager_that_is_gone_stops_nothing(manager, caplog):
    with contextlib.closing(SystemdNotifier(manager.address)) as notifier, trio.fail_after(60):
        manager.socket.close()
        await notifier.ready("still here")
        await notifier.stopping("still here")
    assert caplog.text.count("runtime.notify_failed") == 1


async def test_without_a_manager_nothing_is_said_or_waited_for():
    notifier = SystemdNotifier(None)
    with trio.fail_after(60):
        await notifier.reloading()
        await notifier.ready("unheard")
        await notifier.keep_watchdog(0.01, partial(trio.sleep, 60))
        await notifier.extend(lambda: "unheard")
