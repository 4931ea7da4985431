"""A receiver and a sending upstream, for outages in which the upstream skips events."""

import tempfile
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import trio

import sdk_trio
from sdk_trio.client.client import UpstreamDeliveries
from sdk_trio.reconcile.gap_watch import GapWatch
from sdk_trio.reconcile.reconciler import Reconciler
from sdk_trio.records.synthetic import is_synthetic
from sdk_trio.testing import SendingUpstream
from support.deliveries import SECRET
from support.waiting import until

#: Types that the tests' handlers take.
TYPES = (
    sdk_trio.events.OrderCreatedEvent,
    sdk_trio.events.OrderPaidEvent,
    sdk_trio.events.OrderUpdatedEvent,
    sdk_trio.events.OrderRefundedEvent,
    sdk_trio.events.SubscriptionActiveEvent,
    sdk_trio.events.SubscriptionUpdatedEvent,
    sdk_trio.events.SubscriptionRevokedEvent,
)


def at(seconds):
    """Return a time of the upstream."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def order(name, *, created, modified=None, status="paid", organization="org_1"):
    """Return a record of an order; times are Unix seconds."""
    return {
        "id": name,
        "created_at": at(created),
        "modified_at": None if modified is None else at(modified),
        "status": status,
        "customer": {"id": "cus_1", "organization_id": organization},
    }


def subscription(name, *, created, modified, **fields):
    """Return a record of a subscription; times are Unix seconds."""
    times = {key: at(value) if isinstance(value, float) else value for key, value in fields.items()}
    return {
        "id": name,
        "created_at": at(created),
        "modified_at": at(modified),
        "status": "active",
        "started_at": at(created),
        **times,
    }


class Clock:
    """The time of the receiver and the upstream, which a test moves."""

    def __init__(self):
        self.ahead = timedelta()

    def __call__(self):
        return datetime.now(UTC).timestamp() + self.ahead.total_seconds()

    def move(self, **span):
        self.ahead += timedelta(**span)


class Shop:
    """A receiver that notes what its handlers got, and starts and stops.

    ``got`` has type, subject, ``modified_at``, whether it is synthetic, and the key.
    """

    def __init__(self, upstream, clock, **keys):
        self.upstream = upstream
        self.clock = clock
        self.got = []
        self.runtime = None
        self.handle = None
        self._keys = keys

    @property
    def settings(self):
        mapping = {
            "Environment": "Development",
            "Mode": "Custom",
            "CustomBaseUrl": "https://upstream.example",
            "AccessToken": next(iter(self.upstream.organizations)),
            "MaxRetries": 0,
            "Server:Bind": ["127.0.0.1:0"],
            "Admin:Enabled": False,
            "Webhooks:RequireHttps": False,
            "Webhooks:Secret": SECRET,
            **{name.replace("__", ":"): value for name, value in self._keys.items()},
        }
        return sdk_trio.Settings.from_mapping(mapping)

    def handlers(self):
        handlers = sdk_trio.HandlerRegistry()
        for event_class in TYPES:

            @handlers.on(event_class, enqueue=True)
            async def note(event):
                if self.handle is not None:
                    await self.handle(event)
                modified = event.json["data"].get("modified_at")
                self.got.append((event.type, event.data.id, modified, event.synthetic, event.key))

        return handlers

    @asynccontextmanager
    async def running(self):
        """Run the receiver for the length of the block; the upstream delivers to it."""
        owner = self.upstream.organization
        async with trio.open_nursery() as nursery:
            client = self.upstream.client_for(self.settings)
            self.runtime = sdk_trio.Runtime(
                self.settings,
                self.handlers(),
                client=client,
                clock=self.clock,
                client_factory=self.upstream.client_for,
            )
            started = await nursery.start(self.runtime.run)
            owner.target = f"{started.webhook_url}/hooks/sdk"
            yield self
            owner.target = None
            self.runtime.shut_down("the test ended")

    def watch(self, **arguments):
        """Return a gap watch, as after a restart."""
        runtime = self.runtime
        upstream = UpstreamDeliveries(runtime.client)
        reconciler = Reconciler(
            upstream, runtime.receiver.store, self.settings, clock=self.clock, ask_seconds=0.0
        )

        @asynccontextmanager
        async def open_upstream(tenant):
            if tenant is None:
                yield upstream
                return
            async with runtime.receiver.tenancy.clients.lease(tenant) as client:
                yield UpstreamDeliveries(client)

        tenants = None
        if self.settings.multi_tenant.enabled:
            tenants = runtime.receiver.tenancy.service
        return GapWatch(
            runtime.receiver.store,
            self.settings,
            open_upstream,
            **{
                "tenants": tenants,
                "clock": self.clock,
                "is_ready": lambda: runtime.ready,
                "wake": runtime.wake,
                "deliveries_first": reconciler.reconcile_and_wait,
                "page_seconds": 0.0,
                "settle_seconds": 0.0,
                **arguments,
            },
        )

    async def catch_up(self, **arguments):
        """Check the host's endpoint and catch up; return the finished run, None without a gap."""
        watch = self.watch(**arguments)
        endpoints = await watch.check(None)
        finished = await watch.catch_up(None, endpoints) if endpoints else None
        await self.idle()
        return finished

    async def idle(self):
        """Wait until no event waits or runs."""
        store = self.runtime.receiver.store
        while True:
            counts = await store.counts()
            if not any(counts[state] for state in ("received", "running", "retrying")):
                return
            await trio.sleep(0.01)

    def states(self, event_type, *, synthetic=None):
        """Return subject and ``modified_at`` of the events that the handlers of a type got,
        sorted."""
        return sorted(
            (subject, modified or "")
            for kind, subject, modified, made, _ in self.got
            if kind == event_type and synthetic in (None, made)
        )


@asynccontextmanager
async def shop(**keys):
    """Run a sending upstream whose waits are compressed, and return a shop that is not running."""
    clock = Clock()
    upstream = SendingUpstream(secret=SECRET, pace=0.0001, clock=clock)
    # On disk, since a store in memory forgets the bodies of handled events.
    with tempfile.TemporaryDirectory() as path, trio.fail_after(120):
        keys = {"Storage__Path": path, **keys}
        async with trio.open_nursery() as nursery:
            await nursery.start(upstream.run)
            yield Shop(upstream, clock, **keys)
            nursery.cancel_scope.cancel()


async def disable(place):
    """Let the upstream fail ten events, so that it disables the endpoint."""
    owner, now = place.upstream.organization, place.clock()
    for number in range(10):
        record = order(f"ord_lost_{number}", created=now, modified=now)
        place.upstream.change("orders", record, "order.updated")
    await until(lambda: not owner.enabled)


__all__ = [
    "Clock",
    "Shop",
    "at",
    "disable",
    "is_synthetic",
    "order",
    "shop",
    "subscription",
]
