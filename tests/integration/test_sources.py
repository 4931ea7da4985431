"""Several senders through one inbox: addresses, handlers, keys, pauses and order of sources."""

import dataclasses
import json
import logging
from collections.abc import Callable
from typing import Any

import attrs
import httpx
import msgspec
import pydantic
import pytest
import trio
from support.sources import BY_NAME, SENDERS, Sender, settings_of

from sdk_trio import HandlerRegistry, RetryLater
from sdk_trio.errors import HandlerRegistrationError
from sdk_trio.events import Event, SourceEvent
from sdk_trio.records.deliveries import DeliveryState
from sdk_trio.testing import AppUnderTest, running_app, settings_for_tests

SOURCES = settings_of()

EACH = pytest.mark.parametrize("sender", SENDERS, ids=lambda sender: sender.name)


def settings(**more: Any) -> Any:
    return settings_for_tests({"Sources": SOURCES, **more})


async def send(app: AppUnderTest, sender: Sender, webhook_id: str, number: int = 0) -> int:
    """Post what the sender's own library has signed; return the status."""
    body = sender.body(webhook_id, number)
    return await send_exactly(app, sender, sender.headers(webhook_id, _now(app), body), body)


async def send_exactly(
    app: AppUnderTest, sender: Sender, headers: dict[str, str], body: bytes, method: str = "POST"
) -> int:
    url = app.url.removesuffix(app.settings.webhooks.path) + sender.options.route
    async with httpx.AsyncClient() as client:
        return (await client.request(method, url, content=body, headers=headers)).status_code


def _now(app: AppUnderTest) -> int:
    return int(app.runtime.clock())


def recording() -> tuple[HandlerRegistry, list[SourceEvent[Any]]]:
    """Return handlers of all senders, and the events that they have got."""
    handlers = HandlerRegistry()
    seen: list[SourceEvent[Any]] = []

    async def record(event: SourceEvent[Any]) -> None:
        await trio.lowlevel.checkpoint()
        seen.append(event)

    for sender in SENDERS:
        handlers.source(sender.name).on(sender.type)(record)
    return handlers, seen


@pytest.mark.parametrize("fast", [True, False], ids=["own server", "hypercorn"])
async def test_each_sender_reaches_its_own_handler_in_both_servers(fast: bool) -> None:
    handlers, seen = recording()
    async with running_app(handlers, settings(**{"Server:FastPath": fast})) as app:
        for sender in SENDERS:
            assert await send(app, sender, "evt_1", 7) == 200
        # The upstream is unchanged beside them.
        assert (await app.deliver("order.paid")).state == "parked"

    assert [(event.source, event.type) for event in seen] == [
        (sender.name, sender.type) for sender in SENDERS
    ]
    stripe = seen[2]
    assert isinstance(stripe, SourceEvent)
    assert stripe.webhook_id == "evt_1"
    assert stripe.key == "evt_1.@stripe"
    assert stripe.attempt == 1
    assert stripe.json["data"]["object"]["amount_paid"] == 7
    assert json.loads(stripe.raw) == stripe.json
    assert stripe.received_at.tzinfo is not None


async def test_equal_ids_of_two_sources_and_of_the_upstream_never_touch() -> None:
    handlers, seen = recording()
    async with running_app(handlers, settings()) as app:
        for _ in range(2):
            for sender in SENDERS:
                assert await send(app, sender, "evt_1") == 200
            await app.deliver("order.paid", webhook_id="evt_1")
        found = await app.store.find()
        records = [record async for record in _of(app, "evt_1")]

    assert len(seen) == len(SENDERS)
    assert len(found) == len(SENDERS) + 1
    assert {record.key for record in records} == {
        "evt_1",
        *(f"evt_1.@{sender.name}" for sender in SENDERS),
    }
    assert all(record.tenant_id is None for record in records)


async def _of(app: AppUnderTest, webhook_id: str) -> Any:
    for record in await app.store.find_by_id(webhook_id):
        yield record


async def test_a_failure_is_that_of_the_own_source_where_two_have_equal_ids() -> None:
    handlers = HandlerRegistry()

    @handlers.source("stripe").on("a")
    def fail(event: SourceEvent[None]) -> None:
        raise ValueError("of stripe")

    async with running_app(handlers, settings()) as app:
        failed = await app.deliver("a", {}, source="stripe", webhook_id="evt_1")
        other = await app.deliver("a", {}, source="mail", webhook_id="evt_1", expect="parked")

    assert str(failed.exception) == "of stripe"
    assert other.exception is None


async def test_results_of_deliveries_are_counted_by_source() -> None:
    handlers = HandlerRegistry()
    handlers.source("stripe").on("charge.paid")(lambda event: None)

    async with running_app(handlers, settings()) as app:
        for _ in range(2):
            await app.deliver("charge.paid", {}, source="stripe", webhook_id="evt_1")
        await app.deliver("push", {}, source="github")
        await app.deliver("order.paid")
        await send_exactly(app, BY_NAME["stripe"], {}, b"{}")
        counted = {
            sample.labels: sample.value
            for sample in app.runtime.receiver.samples()
            if sample.name == "sdk_webhook_deliveries_total" and sample.value
        }
        total = dict(app.runtime.deliveries)

    assert counted == {
        (("result", "handled"), ("source", "stripe")): 1,
        (("result", "duplicate"), ("source", "stripe")): 1,
        (("result", "rejected"), ("source", "stripe")): 1,
        (("result", "parked"), ("source", "github")): 1,
        (("result", "parked"),): 1,
    }
    assert total == {"handled": 1, "duplicate": 1, "rejected": 1, "parked": 2}


async def test_refusals_are_counted_by_source() -> None:
    async with running_app(None, settings()) as app:
        await send_exactly(app, BY_NAME["stripe"], {}, b"{}")
        await send_exactly(app, BY_NAME["mail"], {}, b"{}", method="GET")
        await app.deliver(b"{}")
        counted = {
            sample.labels: sample.value
            for sample in app.runtime.receiver.samples()
            if sample.name == "sdk_webhook_refusals_total" and sample.value
        }

    assert counted == {
        (("cause", "missing_header"), ("source", "stripe")): 1,
        (("cause", "method"), ("source", "mail")): 1,
        (("cause", "not_an_event"),): 1,
    }


@EACH
async def test_every_refusal_of_a_source_is_the_same_answer(sender: Sender) -> None:
    handlers, seen = recording()
    async with running_app(handlers, settings()) as app:
        now = _now(app)
        body = sender.body("evt_1")
        url = app.url.removesuffix(app.settings.webhooks.path) + sender.options.route
        good = sender.headers("evt_1", now, body)
        old = sender.headers("evt_1", now - 1000, body)
        attempts = [
            (good, body + b" "),
            ({"content-type": "application/json"}, body),
            ({name: value[:-3] for name, value in good.items()} | {"content-type": "a/json"}, body),
        ]
        attempts[-1][0]["content-type"] = "application/json"
        if sender.signs_timestamp:
            attempts.append((old, body))
        answers = set()
        async with httpx.AsyncClient() as client:
            for headers, content in attempts:
                answer = await client.post(url, content=content, headers=headers)
                answers.add((answer.status_code, answer.content, tuple(answer.headers)))
        rejected = app.runtime.receiver.rejected.newest(cause=None, before=None, limit=9)

    assert len(answers) == 1
    assert next(iter(answers))[:2] == (400, b'{"error":"invalid webhook"}')
    assert seen == []
    assert {row["source"] for row in rejected} == {sender.name}


async def test_other_methods_media_and_sizes_are_refused_as_at_the_first_address() -> None:
    stripe = BY_NAME["stripe"]
    async with running_app(None, settings(**{"Webhooks:MaxPayloadBytes": 1024})) as app:
        headers = stripe.headers("evt_1", _now(app), b"{}")

        assert await send_exactly(app, stripe, headers, b"", method="GET") == 405
        assert await send_exactly(app, stripe, headers, b"x" * 2000) == 413
        plain = headers | {"content-type": "text/plain"}
        assert await send_exactly(app, stripe, plain, b"{}") == 415
        url = app.url.removesuffix(app.settings.webhooks.path)
        async with httpx.AsyncClient() as client:
            assert (await client.post(f"{url}/hooks/other", content=b"{}")).status_code == 404


async def test_the_rate_of_an_address_counts_all_sources_together() -> None:
    async with running_app(None, settings(**{"Webhooks:RateLimitPerMinute": 2})) as app:
        answers = [await send(app, sender, "evt_1") for sender in SENDERS[:3]]

    assert answers == [200, 200, 429]


async def test_ranges_of_the_upstreams_addresses_are_not_those_of_sources() -> None:
    ranges = {"Webhooks:AllowedSourceIpRanges": ["192.0.2.0/24"]}
    async with running_app(None, settings(**ranges)) as app:
        assert await send(app, BY_NAME["stripe"], "evt_1") == 200
        assert (await app.deliver("order.paid", settle=False)).status == 403


async def test_the_upstreams_fallback_gets_no_event_of_a_source() -> None:
    handlers = HandlerRegistry()
    seen: list[str] = []
    handlers.fallback(lambda event: seen.append("upstream"))
    handlers.source("stripe").fallback(lambda event: seen.append(f"stripe {event.type}"))
    async with running_app(handlers, settings()) as app:
        parked = await app.deliver("push", {}, source="github")
        handled = await app.deliver("charge.refunded", {}, source="stripe")

    assert parked.state == "parked"
    assert handled.state == "done"
    assert seen == ["stripe charge.refunded"]


# -- decoding into classes -----------------------------------------------------------------------


class StructInvoice(msgspec.Struct):
    id: str
    amount_paid: int = 0


@attrs.define
class AttrsInvoice:
    id: str
    amount_paid: int = 0


@dataclasses.dataclass
class DataInvoice:
    id: str
    amount_paid: int = 0


class ModelInvoice(pydantic.BaseModel):
    id: str
    amount_paid: int = 0


@pydantic.dataclasses.dataclass
class CheckedInvoice:
    id: str
    amount_paid: int = 0


KINDS = [StructInvoice, AttrsInvoice, DataInvoice, ModelInvoice, CheckedInvoice]


@pytest.mark.parametrize("kind", KINDS, ids=lambda one: one.__name__)
async def test_data_is_decoded_into_the_class_of_the_handler(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    handlers = HandlerRegistry()
    seen: list[Any] = []
    handlers.source("stripe").on("invoice.paid", kind)(lambda event: seen.append(event.data))
    with caplog.at_level(logging.WARNING):
        async with running_app(handlers, settings()) as app:
            await app.deliver("invoice.paid", {"id": "in_1", "amount_paid": 5}, source="stripe")
            # A value that does not fit keeps its default, and the event is handled all the same.
            await app.deliver("invoice.paid", {"id": "in_2", "amount_paid": "x"}, source="stripe")
            await app.deliver("invoice.paid", {"amount_paid": 1}, source="stripe")
            drifts = app.runtime.receiver.counters.values["drift"]

    assert seen == [kind(id="in_1", amount_paid=5), kind(id="in_2"), None]
    assert drifts == 2


@pytest.mark.parametrize("kind", KINDS, ids=lambda one: one.__name__)
async def test_no_log_line_has_content_of_a_body_that_differs_from_the_class(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    handlers = HandlerRegistry()
    handlers.source("stripe").on("invoice.paid", kind)(lambda event: None)
    with caplog.at_level(logging.INFO):
        async with running_app(handlers, settings()) as app:
            for data in ({"amount_paid": 771144}, {"id": "in_1", "amount_paid": "771144x"}, 771144):
                await app.deliver("invoice.paid", data, source="stripe", expect="done")

    assert "webhook.drifted" in caplog.text
    assert "771144" not in caplog.text


async def test_a_pydantic_dataclass_is_validated_by_its_own_validators() -> None:
    @pydantic.dataclasses.dataclass
    class Positive:
        amount: pydantic.PositiveInt = 1

    handlers = HandlerRegistry()
    seen: list[Any] = []
    handlers.source("stripe").on("a", Positive)(lambda event: seen.append(event.data))
    async with running_app(handlers, settings()) as app:
        await app.deliver("a", {"amount": -5}, source="stripe", expect="done")

    assert seen == [Positive()]


# -- keys of groups: pauses, policies, lanes -----------------------------------------------------


async def test_a_pause_holds_the_events_of_its_source_only() -> None:
    handlers = HandlerRegistry()
    seen: list[str] = []
    for name in ("stripe", "paddle"):
        handlers.source(name).fallback(
            lambda event: seen.append(f"{event.source} {event.type}"), enqueue=True
        )
    handlers.fallback(lambda event: seen.append(event.type), enqueue=True)
    async with running_app(handlers, settings()) as app:
        await app.pause("invoice.*", source="stripe")
        held = await app.deliver("invoice.paid", {}, source="stripe")
        await app.deliver("charge.refunded", {}, source="stripe")
        await app.deliver("invoice.paid", {}, source="paddle")
        await app.deliver("order.paid")
        before = list(seen)
        detail = app.runtime.receiver.check_pauses().detail
        await app.resume()
        await app.pause("*")
        await app.deliver("order.paid")
        await app.deliver("invoice.paid", {}, source="paddle")

    assert held.state == "received"
    assert before == ["stripe charge.refunded", "paddle invoice.paid", "order.paid"]
    assert detail.startswith("invoice.* of stripe is paused")
    assert seen[3:] == ["stripe invoice.paid", "paddle invoice.paid"]


@pytest.mark.parametrize("backend", ["Memory", "Sqlite"])
async def test_order_and_coalescing_do_not_mix_sources_with_equal_subjects(
    backend: str, tmp_path: Any
) -> None:
    handlers = HandlerRegistry()
    seen: list[tuple[str, Any]] = []

    def record(event: Event[Any]) -> None:
        seen.append((getattr(event, "source", ""), event.json["data"]))

    for name in ("ai", "mail"):
        handlers.source(name).on("job", coalesce=True, enqueue=True)(record)
    store = {"Storage:Backend": backend, "Storage:Path": str(tmp_path)}
    async with running_app(handlers, settings(**store)) as app:
        for name in ("ai", "mail"):
            await app.pause("*", source=name)
        for number in (1, 2):
            for name in ("ai", "mail"):
                await app.deliver("job", {"id": "same", "n": number}, source=name, settle=False)
        await app.resume()
        found = await app.store.find(source="ai")
        reasons = [record.last_error for record in await app.store.find(oldest_first=True)]

    assert sorted(seen, key=lambda one: one[0]) == [
        ("ai", {"id": "same", "n": 2}),
        ("mail", {"id": "same", "n": 2}),
    ]
    assert [record.source for record in found] == ["ai", "ai"]
    superseded = [reason for reason in reasons if reason]
    assert len(superseded) == 2
    assert "@ai" in superseded[0]
    assert "@mail" in superseded[1]


async def test_an_ordered_event_waits_for_its_own_source_only() -> None:
    handlers = HandlerRegistry()
    seen: list[tuple[str, int]] = []

    def run(event: SourceEvent[Any]) -> None:
        if event.source == "ai" and event.attempt == 1 and event.json["data"]["n"] == 1:
            raise RetryLater(60)
        seen.append((event.source, event.json["data"]["n"]))

    for name in ("ai", "mail"):
        handlers.source(name).on("job", ordered=True, enqueue=True)(run)
    async with running_app(handlers, settings()) as app:
        for number in (1, 2):
            for name in ("ai", "mail"):
                await app.deliver("job", {"id": "same", "n": number}, source=name)
        before = list(seen)
        await app.retry()
        await app.settle()

    assert before == [("mail", 1), ("mail", 2)]
    assert seen[2:] == [("ai", 1), ("ai", 2)]


async def test_policies_of_a_handler_work_per_source() -> None:
    handlers = HandlerRegistry()

    def fail(event: SourceEvent[Any]) -> None:
        raise ValueError("no")

    handlers.source("stripe").on("a", enqueue=True, max_attempts=1, concurrency=1)(fail)
    handlers.source("paddle").on("a", enqueue=True, max_attempts=3)(fail)
    async with running_app(handlers, settings()) as app:
        first = await app.deliver("a", {}, source="stripe")
        second = await app.deliver("a", {}, source="paddle")

    assert first.state == "dead"
    assert second.state == "retrying"


async def test_an_event_of_a_source_is_replayed_with_its_handler(tmp_path: Any) -> None:
    handlers = HandlerRegistry()
    seen: list[SourceEvent[Any]] = []
    store = {"Storage:Backend": "Sqlite", "Storage:Path": str(tmp_path)}
    async with running_app(handlers, settings(**store)) as app:
        parked = await app.deliver("invoice.paid", {"id": "in_1"}, source="stripe")
    handlers.source("stripe").on("invoice.paid", StructInvoice, enqueue=True)(
        lambda event: seen.append(event)
    )
    async with running_app(handlers, settings(**store)) as app:
        assert parked.record is not None
        await app.store.replay([parked.record.key])
        app.runtime.receiver.wake()
        await app.settle()

    assert [event.data for event in seen] == [StructInvoice("in_1")]
    assert seen[0].source == "stripe"


# -- registration --------------------------------------------------------------------------------


def nothing(event: SourceEvent[Any]) -> None:
    pass


def of_order(event: "msgspec.Struct") -> None:
    pass


@pytest.mark.parametrize(
    ("register", "message"),
    [
        (lambda own: [own.on("a")(nothing), own.on("a")(nothing)], "already has a handler"),
        (lambda own: own.on(nothing), "is a text"),
        (lambda own: own.on("")(nothing), "is a text"),
        (lambda own: own.on("a", "Invoice")(nothing), "give a msgspec.Struct"),
        (lambda own: own.on("a", int)(nothing), "give a msgspec.Struct"),
        (lambda own: own.on("a", HandlerRegistry)(nothing), "give a msgspec.Struct"),
        (lambda own: own.on("a")(of_order), "takes Struct"),
        (lambda own: [own.fallback(nothing), own.fallback(nothing)], "already has a fallback"),
        (lambda own: own.on("a", ordered=True)(nothing), "needs enqueue=True"),
    ],
)
def test_a_mistake_is_reported_where_it_is_registered(
    register: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(HandlerRegistrationError, match=message):
        register(HandlerRegistry().source("stripe"))


async def test_handlers_of_a_source_that_is_not_configured_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from sdk_trio.runtime import Runtime

    handlers = HandlerRegistry()
    handlers.source("strpie").on("a")(nothing)
    with caplog.at_level(logging.WARNING):
        runtime = Runtime(settings(), handlers)
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.run)
            runtime.shut_down("the test ended")

    assert any("strpie" in record.getMessage() for record in caplog.records)


async def test_a_known_state_is_listed_by_source() -> None:
    async with running_app(None, settings()) as app:
        await app.deliver("a", {}, source="stripe")
        await app.deliver("a", {}, source="paddle")
        found = await app.store.find(source="stripe", state=DeliveryState.PARKED, type="a")

    assert [(record.source, record.tenant_id) for record in found] == [("stripe", None)]
