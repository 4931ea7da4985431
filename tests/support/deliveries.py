"""Settings, arrivals and inboxes for tests of the receiver's inner parts."""

import itertools
from typing import Any

import attrs
import trio

from sdk_trio.config import Secret, Settings
from sdk_trio.events import decode_envelope
from sdk_trio.records.deliveries import NewDelivery
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.memory.inbox import MemoryInbox
from sdk_trio.webhooks.arrival import VerifiedDelivery
from sdk_trio.webhooks.counters import Counters
from sdk_trio.webhooks.queue import WorkerPool
from sdk_trio.webhooks.registry import HandlerRegistry
from sdk_trio.webhooks.run import DeliveryRunner
from sdk_trio.webhooks.services import Services

#: A test value: published ones are refused in Production.
SECRET = "whsec_z6fMa4YWa088j5EP9gJ8LDaGxrBzHpIg"  # a test value

#: Keys of :func:`settings` that practically prevent unrequested retries: the wait is random between
#: 0 and a day.
UNRETRIED = {
    "Webhooks__Queue__RetryBaseSeconds": 86_400,
    "Webhooks__Queue__RetryCapSeconds": 86_400,
}

_numbers = itertools.count(1)


def settings(**keys: Any) -> Settings:
    """Settings of a receiver in memory; keys as ``Webhooks__Queue__Capacity=2``."""
    mapping: dict[str, Any] = {
        "Environment": "Development",
        "Server:Bind": ["127.0.0.1:0"],
        "Admin:Enabled": False,
        "Admin:Bind": "127.0.0.1:0",
        "Storage:Backend": "Memory",
        "Webhooks:RequireHttps": False,
        "Webhooks:Secret": Secret(SECRET, made_for_tests=True),
    }
    mapping.update({name.replace("__", ":"): value for name, value in keys.items()})
    return Settings.from_mapping(mapping, standalone=True)


def memory_inbox(*, shares: Any = None, **changes: Any) -> MemoryInbox:
    """Return an inbox with the default retentions; its owner is ``here``."""
    values = {
        "owner": "here",
        "lease_seconds": 75.0,
        "dedup_seconds": 168 * 3600.0,
        "payload_seconds": 30 * 86_400.0,
    }
    return MemoryInbox(LeaseTerms(**values | changes), shares=shares)


def arrival(
    event_type: str = "order.paid",
    *,
    webhook_id: str | None = None,
    subject: str = "s1",
    ordered: bool = False,
    now: float = 0.0,
) -> VerifiedDelivery:
    """Return a verified delivery of ``event_type``, as the receiver passes it on."""
    body = b'{"type":"%b","data":{"id":"%b"}}' % (event_type.encode(), subject.encode())
    delivery = NewDelivery(
        webhook_id=webhook_id or f"msg_{next(_numbers)}",
        type=event_type,
        raw=body,
        timestamp=int(now),
        received_at=now,
        subject=subject,
        ordered=ordered,
    )
    return VerifiedDelivery(delivery, decode_envelope(body))


@attrs.define
class Bench:
    """A runner and a queue over one inbox, on the clock of the test's event loop."""

    inbox: Any
    runner: DeliveryRunner
    queue: WorkerPool
    counters: Counters

    @classmethod
    def of(
        cls,
        handlers: HandlerRegistry,
        inbox: Any = None,
        *,
        clock: Any = trio.current_time,
        after_crash: bool = False,
        **keys: Any,
    ) -> "Bench":
        options = settings(**keys)
        inbox = memory_inbox() if inbox is None else inbox
        counters = Counters()
        runner = DeliveryRunner(
            options,
            handlers.bind(Services(options, inbox)),
            inbox,
            counters,
            clock=clock,
            jitter=lambda: 0.5,
        )
        queue = WorkerPool(options, runner, inbox, counters, clock=clock, after_crash=after_crash)
        return cls(inbox, runner, queue, counters)

    def handler(self, event_type: str = "order.paid") -> Any:
        return self.runner.handlers.find(event_type)
