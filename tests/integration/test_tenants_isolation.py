"""No sender influences another sender's deliveries, by any ids, subjects or bodies."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from support.keyed import ByKey
from support.loop import Loop, together
from support.postgres import open_inbox
from support.stores import open_file
from support.waiting import until

from sdk_trio import HandlerRegistry, KeyFile, TenantCredentials
from sdk_trio.config import Secret
from sdk_trio.events import OrderCreatedEvent, OrderPaidEvent
from sdk_trio.records.deliveries import (
    Dead,
    DeliveryRecord,
    DeliveryState,
    Done,
    NewDelivery,
    Parked,
    Retry,
    key_of,
)
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.memory.inbox import MemoryInbox
from sdk_trio.storage.ports import Inbox
from sdk_trio.testing import running_app, settings_for_tests, sign_delivery
from sdk_trio.testing.application import AppUnderTest
from sdk_trio.webhooks.signature import new_secret
from sdk_trio.webhooks.signed_request import Posted, own_url, post

TERMS = {"lease_seconds": 10.0, "dedup_seconds": 100.0, "payload_seconds": 40.0}
SENDERS = ("", "tenant-a", "tenant-b")
IDS = ("m1", "m2")
BODIES = (
    b'{"type":"t","data":{"id":"s"}}',
    b'{"type":"t","data":{"id":"s"},"data":{"id":"other"}}',
    b'{"type":"t","type":"u","data":{"id":"s"}}',
)

senders = st.sampled_from(SENDERS)
ids = st.sampled_from(IDS)
DELIVERY: dict[str, st.SearchStrategy[Any]] = {
    "sender": senders,
    "id_": ids,
    "verb": st.sampled_from(("accept", "accept", "claim", "park", "keep_other")),
    "body": st.sampled_from(BODIES),
    "ordered": st.booleans(),
    "leased": st.booleans(),
}


class IsolationMachine(RuleBasedStateMachine):
    """The host and two tenants on one store; each also has a store of its own.

    The store's results for a sender's deliveries must be the same as without the others.
    """

    backend = ""

    def __init__(self) -> None:
        super().__init__()
        self.loop = Loop()
        self.directory = tempfile.TemporaryDirectory()
        self.now = 1000.0
        self.shared = self.open("shared")
        self.alone = {sender: self.open(f"alone {sender}") for sender in SENDERS}
        # The last results of a store of one sender; only calls of that store change them.
        self.results: dict[str, list[Any]] = {}

    def open(self, name: str) -> Any:
        if self.backend == "memory":
            return ByKey(MemoryInbox(LeaseTerms(owner="one", **TERMS)))
        file = Path(self.directory.name) / f"{name}.db"
        opening = open_inbox if self.backend == "postgres" else open_file
        return ByKey(self.loop(lambda: opening(file, owner="one", **TERMS)))

    def both(self, sender: str, call: Any) -> Any:
        """Call the same on the shared store and on the sender's own; the answers are equal."""
        self.results.pop(sender, None)
        answer = self.loop(lambda: call(self.shared))
        assert answer == self.loop(lambda: call(self.alone[sender]))
        return answer

    # Influence shows only after each of them has sent events.
    @initialize(first=st.lists(st.tuples(*DELIVERY.values()), min_size=6, max_size=12))
    def begin(self, first: list[tuple[str, str, str, bytes, bool, bool]]) -> None:
        for delivery in first:
            self.deliver_one(*delivery)

    @rule(delivery=st.tuples(*DELIVERY.values()))
    def deliver(self, delivery: tuple[str, str, str, bytes, bool, bool]) -> None:
        self.deliver_one(*delivery)

    def deliver_one(
        self, sender: str, id_: str, verb: str, body: bytes, ordered: bool, leased: bool
    ) -> None:
        incoming = NewDelivery(
            id_, f"t.{sender}", body, 7, self.now, "s", ordered, sender or None, sender, "1.2.3.4"
        )
        options = {"leased": leased} if verb == "accept" else {}
        self.both(sender, lambda inbox: getattr(inbox, verb)(incoming, **options))

    @rule(sender=senders, id_=ids, alone=st.booleans())
    def start(self, sender: str, id_: str, alone: bool) -> None:
        key = key_of(id_, sender)
        self.both(sender, lambda inbox: inbox.start(key, now=self.now, alone=alone))

    @rule(
        sender=senders,
        id_=ids,
        outcome=st.sampled_from((Done(), Done(), Dead("no"), Parked(), Retry(1.0, "x"), None)),
    )
    def finish(self, sender: str, id_: str, outcome: Any) -> None:
        reported = outcome or Retry(None, "later")
        self.both(sender, lambda inbox: inbox.finish(key_of(id_, sender), reported, now=self.now))

    @rule(sender=senders, chosen=st.lists(ids, max_size=2))
    def replay(self, sender: str, chosen: list[str]) -> None:
        keys = [key_of(id_, sender) for id_ in chosen]
        self.both(sender, lambda inbox: inbox.replay(keys))

    @rule(sender=senders, id_=ids)
    def release(self, sender: str, id_: str) -> None:
        self.both(sender, lambda inbox: inbox.release([key_of(id_, sender)]))

    @rule(suspects=st.booleans())
    def take(self, suspects: bool) -> None:
        self.results.clear()

        async def take(inbox: Inbox) -> list[DeliveryRecord]:
            if suspects:
                return list((await inbox.claim_suspects(limit=99, now=self.now)).records)
            return list((await inbox.claim_due(limit=99, now=self.now)).records)

        shared = self.loop(lambda: take(self.shared))
        for sender in SENDERS:
            alone = self.loop(partial(take, self.alone[sender]))
            assert [plain(r) for r in shared if r.signer == sender] == [plain(r) for r in alone]

    @rule()
    def purge(self) -> None:
        self.results.clear()
        self.loop(lambda: self.shared.purge(now=self.now))
        for inbox in self.alone.values():
            self.loop(partial(inbox.purge, now=self.now))

    @rule(seconds=st.sampled_from((1, 11, 41, 101)))
    def advance(self, seconds: int) -> None:
        self.now += seconds
        if self.backend == "memory":
            # It forgets what is over its retention at anybody's next delivery, or at a purge; no
            # time is guaranteed. Done for all at once, so that only influence is compared.
            self.purge()

    @invariant()
    def no_tenant_sees_anything_of_the_others(self) -> None:
        changed = [sender for sender in SENDERS if sender not in self.results]
        places = [(self.shared, sender) for sender in SENDERS]
        places += [(self.alone[sender], sender) for sender in changed]
        found = self.loop(lambda: together(partial(look_at_all, *place) for place in places))
        self.results.update(zip(changed, found[len(SENDERS) :], strict=True))
        assert found[: len(SENDERS)] == [self.results[sender] for sender in SENDERS]

    def teardown(self) -> None:
        for inbox in (self.shared, *self.alone.values()):
            self.loop(inbox.close)
        self.loop.stop()
        self.directory.cleanup()


def plain(record: DeliveryRecord | None) -> Any:
    """Return a record without its number, which reveals how many came before."""
    if record is None:
        return None
    names = (name for name in DeliveryRecord.__slots__ if name not in ("sequence", "__weakref__"))
    return {name: getattr(record, name) for name in names}


async def look(inbox: Inbox, key: str) -> Any:
    known, record, attempts, evidence = await together(
        (
            lambda: inbox.known([key]),
            lambda: inbox.get(key),
            lambda: inbox.attempts(key),
            lambda: inbox.evidence(key),
        )
    )
    return known, plain(record), attempts, list(evidence)


async def look_at_all(inbox: Inbox, sender: str) -> list[Any]:
    return await together(partial(look, inbox, key_of(id_, sender)) for id_ in IDS)


class SqliteIsolation(IsolationMachine):
    backend = "sqlite"


class MemoryIsolation(IsolationMachine):
    backend = "memory"


class PostgresIsolation(IsolationMachine):
    backend = "postgres"


@pytest.mark.parametrize("machine", [SqliteIsolation, MemoryIsolation, PostgresIsolation])
def test_the_store_s_results_for_a_sender_do_not_depend_on_the_others(
    machine: type[IsolationMachine],
) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            # Each step is a round trip to another process.
            max_examples=3 if machine.backend == "postgres" else 10,
            stateful_step_count=30,
            deadline=None,
            phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )


# -- the same over sockets -----------------------------------------------------------------------


class Host:
    """A receiver with tenants ``a`` and ``b``, which have secrets of their own, and ``plain``."""

    def __init__(self, app: AppUnderTest, secrets: dict[str, str]) -> None:
        self.app = app
        self.secrets = secrets

    @property
    def service(self) -> Any:
        return self.app.runtime.receiver.tenancy.service

    async def post(
        self,
        body: bytes,
        *,
        secret: str,
        at: str | None = None,
        webhook_id: str | None = None,
    ) -> Posted:
        """Post a body signed with the secret of a tenant or the host, to the address of any
        tenant."""
        signed = sign_delivery(body, secret=Secret(self.secrets[secret]), webhook_id=webhook_id)
        path = self.app.settings.webhooks.path + (f"/{at}" if at is not None else "")
        started = self.app.runtime.started
        assert started is not None
        return await post(own_url(started.receiver[0], path), signed)

    async def state(self, webhook_id: str, tenant: str) -> DeliveryRecord | None:
        found = await self.service.get(tenant)
        return await self.app.store.get(key_of(webhook_id, found.id))


@asynccontextmanager
async def host(
    directory: Path, handlers: HandlerRegistry | None = None, **keys: Any
) -> AsyncIterator[Host]:
    secrets = {name: new_secret(name.encode() * 32) for name in ("a", "b")}
    mapping = {
        "Storage:Backend": "Sqlite",
        "Storage:Path": str(directory / "data"),
        "MultiTenant:Enabled": True,
        "Webhooks:Queue:RetryBaseSeconds": 900,
        **{name.replace("__", ":"): value for name, value in keys.items()},
    }
    with trio.fail_after(60):
        async with running_app(handlers, settings_for_tests(mapping)) as app:
            secrets["host"] = app.settings.webhooks.all_secrets[0].reveal()
            ready = Host(app, secrets)
            for name in ("a", "b", "plain"):
                file = directory / f"{name}.key"
                file.write_text(secrets.get(name, ""))
                sources = (KeyFile(str(file)),) if name in secrets else ()
                await ready.service.add(
                    name,
                    name=name.upper(),
                    organization_id=f"org-{name}",
                    credentials=TenantCredentials(webhook_secrets=sources),
                )
            yield ready


def body(
    tenant: str, *, type_: str = "order.paid", subject: str = "ord_1", more: str = ""
) -> bytes:
    return (
        f'{{"type":"{type_}","data":{{"id":"{subject}","note":"of {tenant}{more}",'
        f'"customer":{{"organization_id":"org-{tenant}"}}}}}}'
    ).encode()


class Seen:
    """Record the runs and their tenants; events of ``failing`` tenants fail."""

    def __init__(self, *, failing: tuple[str, ...] = ()) -> None:
        self.ran: list[tuple[str | None, str, bytes]] = []
        self.keys: list[str] = []
        self.failing = failing

    def registry(self, **options: Any) -> HandlerRegistry:
        handlers = HandlerRegistry()

        @handlers.on(OrderPaidEvent, **options)
        async def keep(event: OrderPaidEvent) -> None:
            name = event.tenant and event.tenant.identifier
            self.ran.append((name, event.webhook_id, event.raw))
            self.keys.append(event.key)
            if name in self.failing:
                raise ValueError("not today")

        return handlers


OPAQUE = (400, b'{"error":"invalid webhook"}')


@pytest.mark.parametrize("at", [None, "own"])
@pytest.mark.parametrize("backend", ["Sqlite", "Memory"])
@pytest.mark.parametrize("enqueue", [False, True])
async def test_the_id_that_one_tenant_has_used_is_new_for_another_one_and_for_the_host(
    tmp_path: Path, backend: str, enqueue: bool, at: str | None
) -> None:
    seen = Seen()
    handlers = seen.registry(enqueue=enqueue)
    async with host(tmp_path, handlers, Storage__Backend=backend) as ready:
        for name in ("a", "b"):
            for _ in range(2):
                posted = await ready.post(
                    body(name), secret=name, webhook_id="evt_1", at=at and name
                )
                assert posted.status == 200
                await ready.app.settle()
        assert (await ready.post(body("x"), secret="host", webhook_id="evt_1")).status == 200
        await ready.app.settle()
        ids = {name: (await ready.service.get(name)).id for name in ("a", "b")}
    assert seen.ran == [
        ("a", "evt_1", body("a")),
        ("b", "evt_1", body("b")),
        (None, "evt_1", body("x")),
    ]
    assert seen.keys == [f"evt_1.{ids['a']}", f"evt_1.{ids['b']}", "evt_1"]


async def test_a_delivery_does_not_run_another_tenant_s_parked_event(
    tmp_path: Path,
) -> None:
    seen = Seen()
    handlers = seen.registry(enqueue=True, ordered=True)
    parked = body("a", type_="no.handler")
    async with host(tmp_path, handlers) as ready:
        assert (await ready.post(parked, secret="a", webhook_id="evt_1")).status == 200
        assert (await ready.post(body("b"), secret="b", webhook_id="evt_1")).status == 200
        await ready.app.settle()
        first, second = await ready.state("evt_1", "a"), await ready.state("evt_1", "b")
    assert seen.ran == [("b", "evt_1", body("b"))]
    assert first is not None
    assert (first.state, first.type, first.raw) == (DeliveryState.PARKED, "no.handler", parked)
    assert second is not None
    assert (second.state, second.raw) == (DeliveryState.DONE, body("b"))


@pytest.mark.parametrize("backend", ["Sqlite", "Memory"])
async def test_an_ordered_event_that_fails_holds_up_no_other_tenant_s_event_of_that_id(
    tmp_path: Path, backend: str
) -> None:
    seen = Seen(failing=("a",))
    handlers = seen.registry(enqueue=True, ordered=True)
    async with host(tmp_path, handlers, Storage__Backend=backend) as ready:
        for name, number in (("a", 1), ("b", 1), ("a", 2)):
            id_ = f"evt_{number}"
            assert (await ready.post(body(name), secret=name, webhook_id=id_)).status == 200
            await ready.app.settle() if number == 1 else None
        waiting = await ready.state("evt_2", "a")
    assert [(name, id_) for name, id_, _ in seen.ran] == [("a", "evt_1"), ("b", "evt_1")]
    assert waiting is not None
    assert waiting.state is DeliveryState.RECEIVED


# -- addresses of tenants ------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [True, False])
async def test_at_a_tenant_s_address_only_its_keys_verify(tmp_path: Path, fast: bool) -> None:
    seen = Seen()
    async with host(tmp_path, seen.registry(), Server__FastPath=fast) as ready:
        for sent in (body("a"), body("b"), b'{"type":"order.paid","data":{}}'):
            assert (await ready.post(sent, secret="a", at="a")).status == 200
        twice = (
            b'{"type":"order.paid","data":{"organization_id":"org-a","organization_id":"org-b"}}'
        )
        assert (await ready.post(twice, secret="a", at="a")).status == 200
        for secret, at in (("host", "a"), ("b", "a"), ("a", "b")):
            refused = await ready.post(body("a"), secret=secret, at=at)
            assert (refused.status, refused.body) == OPAQUE
    assert [name for name, _, _ in seen.ran] == ["a"] * 4


async def test_the_answer_does_not_reveal_which_tenants_exist(tmp_path: Path) -> None:
    async with host(tmp_path, Seen().registry()) as ready:
        await ready.service.add(
            "gone",
            name="Gone",
            credentials=TenantCredentials(webhook_secrets=(KeyFile(str(tmp_path / "a.key")),)),
        )
        assert (await ready.post(body("a"), secret="a", at="gone")).status == 200
        await ready.service.delete("gone", reason="left", actor="test")
        wrong = await ready.post(body("a"), secret="b", at="a")
        assert (wrong.status, wrong.body) == OPAQUE
        for at in ("gone", "plain", "unknown", "A", "a%00", "x" * 300):
            for secret in ("a", "host"):
                refused = await ready.post(body("a"), secret=secret, at=at)
                assert (refused.status, refused.body) == OPAQUE
        for elsewhere in ("", "a/b", "a/"):
            assert (await ready.post(body("a"), secret="a", at=elsewhere)).status == 404


async def test_without_tenants_there_are_no_addresses_of_theirs(tmp_path: Path) -> None:
    async with running_app(Seen().registry(), settings_for_tests()) as app:
        ready = Host(app, {"host": app.settings.webhooks.all_secrets[0].reveal()})
        assert (await ready.post(body("a"), secret="host", at="a")).status == 404


async def test_events_of_a_suspended_tenant_are_taken_at_its_address(tmp_path: Path) -> None:
    seen = Seen()
    async with host(tmp_path, seen.registry(run_when_suspended=False)) as ready:
        await ready.service.deactivate("a", reason="a pause", actor="test")
        assert (await ready.post(body("a"), secret="a", at="a", webhook_id="e")).status == 200
        record = await ready.state("e", "a")
    assert record is not None
    assert record.state is DeliveryState.PARKED
    assert seen.ran == []


@pytest.mark.parametrize("only", [False, True])
async def test_the_host_signs_for_a_tenant_with_its_own_secrets_unless_disabled(
    tmp_path: Path, only: bool
) -> None:
    seen = Seen()
    async with host(tmp_path, seen.registry(), MultiTenant__OwnSecretsOnly=only) as ready:
        posted = await ready.post(body("a"), secret="host")
        assert (posted.status, posted.body) == (OPAQUE if only else (200, b"{}"))
        for secret, name in (("a", "a"), ("host", "plain"), ("host", "unknown")):
            assert (await ready.post(body(name), secret=secret)).status == 200
    assert [name for name, _, _ in seen.ran] == [*([] if only else ["a"]), "a", "plain", None]


# -- another body under the same key -------------------------------------------------------------


@pytest.mark.parametrize("backend", ["Sqlite", "Memory"])
@pytest.mark.parametrize("enqueue", [False, True])
async def test_another_body_under_the_same_key_is_counted_and_kept_beside_the_first(
    tmp_path: Path, backend: str, enqueue: bool
) -> None:
    seen = Seen()
    handlers = seen.registry(enqueue=enqueue)
    async with host(tmp_path, handlers, Storage__Backend=backend) as ready:
        for number in (0, 1, 1, *range(2, 15)):
            sent = body("a", more=f" {number}")
            assert (await ready.post(sent, secret="a", webhook_id="e")).status == 200
            await ready.app.settle()
        tenant = await ready.service.get("a")
        kept = await ready.app.store.evidence(f"e.{tenant.id}")
        counted = ready.app.runtime.receiver.counters.values["different_body"]
    assert [raw for _, _, raw in seen.ran] == [body("a", more=" 0")]
    assert [one.raw for one in kept] == [body("a", more=f" {n}") for n in range(1, 11)]
    assert {one.address for one in kept} == {"127.0.0.1"}
    assert counted == 15


async def test_another_body_that_arrives_during_the_first_run_is_also_stored(
    tmp_path: Path,
) -> None:
    begun, gate = trio.Event(), trio.Event()
    handlers = HandlerRegistry()

    @handlers.on(OrderCreatedEvent)
    async def wait(event: OrderCreatedEvent) -> None:
        begun.set()
        await gate.wait()

    async with host(tmp_path, handlers) as ready:
        answers: list[int] = []

        async def send(more: str) -> None:
            sent = body("a", type_="order.created", more=more)
            answers.append((await ready.post(sent, secret="a", webhook_id="e")).status)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, "first")
            await begun.wait()
            nursery.start_soon(send, "second")
            running = ready.app.runtime.receiver._running
            assert running is not None
            # The second one waits for the first.
            flights = running.runner.inline._in_flight
            await until(lambda: any(flight.ended is not None for flight in flights.values()))
            gate.set()
        record = await ready.state("e", "a")
        assert record is not None
        kept = await ready.app.store.evidence(record.key)
    assert answers == [200, 200]
    assert [one.raw for one in kept] == [body("a", type_="order.created", more="second")]
