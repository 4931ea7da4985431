"""A daemon whose disk hangs: senders are answered before they leave, and TERM ends it."""

import contextlib
from pathlib import Path

import httpx
import pytest
import trio
from support.disk_faults import DiskFaults, full, hanging
from support.senders import Senders
from support.service_manager import ServiceManager, service_manager
from support.waiting import until
from support.wire import Wire

from sdk_trio.storage.commit import ANSWER_SECONDS
from sdk_trio.testing import sign_delivery

#: The timeout of a sender, in seconds.
SENDER_LEAVES = 8.0

APPLICATION = """
import os, trio, sdk_trio
from sdk_trio.events import CustomerCreatedEvent, OrderCreatedEvent, OrderPaidEvent

handlers = sdk_trio.HandlerRegistry()
log = os.open(os.environ["HANDLED"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

@handlers.on(OrderPaidEvent, enqueue=True)
async def queued(event):
    os.write(log, event.webhook_id.encode() + b"\\n")

@handlers.on(OrderCreatedEvent)
async def inline(event):
    os.write(log, event.webhook_id.encode() + b"\\n")
"""


async def deliver(manager: ServiceManager, type_: str, webhook_id: str) -> int:
    """Deliver, and return the status of the answer."""
    url = await manager.url()
    secret = Senders(url).secret
    signed = sign_delivery(type_, secret=secret, webhook_id=webhook_id)
    with trio.fail_after(60):
        with await Wire.connect(url) as wire:
            answer = await wire.post(signed)
    assert answer.status == 200 or b"retry-after" in repr(answer).lower().encode(), answer
    return int(answer.status)


def prepare(manager: ServiceManager, faults: DiskFaults) -> None:
    (manager.directory / "application.py").write_text(APPLICATION)
    manager.environment |= faults.environment
    manager.settings |= {
        "Admin:Enabled": "true",
        "Admin:Bind": "127.0.0.1:0",
        "Webhooks:GracefulDrainTimeoutSeconds": "2",
    }


async def test_a_disk_that_hangs_gets_senders_an_answer_and_loses_nothing(tmp_path: Path) -> None:
    with service_manager(tmp_path) as manager:
        faults = DiskFaults(tmp_path)
        prepare(manager, faults)
        daemon = manager.start()
        assert await deliver(manager, "order.paid", "before") == 200
        await manager.wait_for("webhook.handled")
        faults.set(hanging("sync", tmp_path / "state"))
        kinds = {"queued": "order.paid", "inline": "order.created", "parked": "benefit.created"}
        answers: dict[str, int] = {}

        async def deliver_kind(kind: str) -> None:
            answers[kind] = await deliver(manager, kinds[kind], kind)

        async with trio.open_nursery() as nursery:
            for kind in kinds:
                nursery.start_soon(deliver_kind, kind)
        assert set(answers.values()) == {503}
        # The disk still hangs, so the answers are due to the store's time limit.
        assert ANSWER_SECONDS < SENDER_LEAVES
        # A disk that is known to hang is not waited for again.
        assert await deliver(manager, "order.paid", "later") == 503
        assert len(manager.logged("store.stalled")) == 1
        admin = manager.logged("admin.started")[0]["admin"][0]
        async with httpx.AsyncClient(base_url=admin, timeout=60) as client:
            assert (await client.get("/readyz")).status_code == 503
        faults.clear()
        await manager.wait_for("store.answers")
        for kind, type_ in (*kinds.items(), ("later", "order.paid")):
            assert await deliver(manager, type_, kind) == 200
        await until(lambda: len(manager.handled()) >= 4)
        assert await manager.stop(daemon) == 0
        assert sorted(manager.handled()) == ["before", "inline", "later", "queued"]


async def test_term_ends_a_daemon_whose_disk_hangs(tmp_path: Path) -> None:
    with service_manager(tmp_path) as manager:
        faults = DiskFaults(tmp_path)
        prepare(manager, faults)
        daemon = manager.start()
        assert await deliver(manager, "order.paid", "before") == 200
        faults.set(hanging("sync", tmp_path / "state"))

        async def deliver_until_the_end(webhook_id: str) -> None:
            # A delivery that begins after TERM finds no listener.
            with contextlib.suppress(OSError):
                assert await deliver(manager, "order.paid", webhook_id) == 503

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(deliver_until_the_end, f"hanging-{number}")
            await until(lambda: faults.has_hung)
            # The disk still hangs: only the limits of the drain and of the grace period end it.
            await manager.stop(daemon)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("file", ["inbox.db", "inbox.db-shm"])
async def test_a_full_disk_at_the_start_is_named_as_the_cause(tmp_path: Path, file: str) -> None:
    with service_manager(tmp_path) as manager:
        faults = DiskFaults(tmp_path)
        prepare(manager, faults)
        faults.set(full(tmp_path / "state" / file))
        daemon = manager.start()
        assert await manager.ended(daemon) == 69
        said = (tmp_path / "log").read_text()
        assert "is full" in said, said
        assert str(tmp_path / "state" / "inbox.db") in said
