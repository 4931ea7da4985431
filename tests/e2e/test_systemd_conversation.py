"""The daemon's messages to the service manager, and their times: recorded on a real socket."""

import re
import signal

import pytest
import trio
from support.deliveries import SECRET
from support.senders import Senders
from support.service_manager import service_manager
from support.waiting import until
from support.wire import Wire

from sdk_trio.testing import sign_delivery


@pytest.mark.parametrize("abstract", [False, True])
async def test_ready_reloading_ready_stopping(tmp_path, abstract):
    with service_manager(tmp_path, abstract=abstract) as manager:
        daemon = manager.start()
        place = await manager.said("READY=1")
        assert await Senders(await manager.url())._attempt("a") == 200  # ready means: it serves
        daemon.send_signal(signal.SIGHUP)
        await manager.said("RELOADING=1", after=place)
        place = await manager.said("READY=1", after=place)
        (tmp_path / "credentials" / "Sdk__Webhooks__Secrets__0").write_text("")
        daemon.send_signal(signal.SIGHUP)
        # A reload that failed has ended as well.
        place = await manager.said("RELOADING=1", after=place)
        place = await manager.said("READY=1", after=place)
        await manager.wait_for("runtime.reload_failed")
        assert await manager.stop(daemon) == 0
        await manager.said("STOPPING=1", after=place)
    ready = next(message for message in manager.messages if "READY=1" in message)
    assert re.fullmatch(r"READY=1\nSTATUS=serving on http://127\.0\.0\.1:\d+", ready)
    reloading = [message for message in manager.messages if message.startswith("RELOADING")]
    assert all(re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=\d+", text) for text in reloading)
    assert not any("WATCHDOG" in message for message in manager.messages)


async def test_a_long_drain_requests_time_and_reports_the_remaining_work(tmp_path):
    with service_manager(tmp_path) as manager:
        daemon = manager.start()
        await deliver(await manager.url(), "order.paid", "600")
        # One that no worker has yet would stay in the store, and be no reason to wait.
        await until((tmp_path / "running").exists)
        daemon.send_signal(signal.SIGTERM)
        place = await manager.said("STOPPING=1\nSTATUS=stopping: SIGTERM")
        for _ in range(2):
            place = await manager.said("EXTEND_TIMEOUT_USEC=15000000", after=place)
            assert "; 1 events left" in manager.messages[place - 1]
        daemon.send_signal(signal.SIGINT)  # the second signal waits for nothing
        assert await manager.ended(daemon) == 128 + signal.SIGINT


async def test_the_watchdog_is_fed_until_the_loop_is_blocked(tmp_path):
    with service_manager(tmp_path) as manager:
        manager.environment["WATCHDOG_USEC"] = "400000"
        daemon = manager.start()
        url = await manager.url()
        place = 0
        for _ in range(3):
            place = await manager.said("WATCHDOG=1", after=place)
        (tmp_path / "hold").touch()
        with await Wire.connect(url) as wire:
            await wire.send(request("order.created", "0"))
            await until((tmp_path / "blocked").exists)
            manager.listen()  # a datagram has come when it was sent
            fed = len(manager.messages)
            await trio.sleep(1)
            manager.listen()
            assert len(manager.messages) == fed
            (tmp_path / "hold").unlink()
            await wire.answer()
        await manager.said("WATCHDOG=1", after=fed)
        assert await manager.stop(daemon) == 0


async def test_children_do_not_believe_that_they_are_meant(tmp_path):
    with service_manager(tmp_path) as manager:
        (tmp_path / "application.py").write_text(
            "import os, json, sdk_trio\n"
            "from sdk_trio.runtime.systemd import VARIABLES\n"
            "print('left:', [name for name in VARIABLES if name in os.environ], flush=True)\n"
            "handlers = sdk_trio.HandlerRegistry()\n"
        )
        manager.environment["WATCHDOG_USEC"] = "400000"
        daemon = manager.start()
        await manager.said("READY=1")
        assert "left: []" in (tmp_path / "log").read_text()
        assert await manager.stop(daemon) == 0


def request(event, seconds):
    from support.wire import request as bytes_of

    return bytes_of(sign_delivery(event, {"metadata": {"seconds": seconds}}, secret=SECRET))


async def deliver(url, event, seconds):
    with await Wire.connect(url) as wire:
        await wire.send(request(event, seconds))
        assert (await wire.answer()).status == 200
