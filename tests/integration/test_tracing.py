"""Spans of deliveries, runs of handlers and calls, as the real SDK sees them in memory."""

import httpx
import pytest
import trio
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from support.deliveries import settings
from support.scripted_upstream import TOKEN, full_stack, scripted_upstream
from support.serving import asgi_headers, ask, delivery_request, exchange, registry, serving, signed
from support.waiting import until

from sdk_trio.base.telemetry import REMEMBERED_SPANS, Links, find_tracer
from sdk_trio.client.client import Client
from sdk_trio.client.errors import DeadlineExceededError
from sdk_trio.events import OrderCreatedEvent
from sdk_trio.webhooks import WebhookReceiver

SPAN_OF_ELSEWHERE = ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")


class Spans:
    """The finished spans so far."""

    def __init__(self, monkeypatch):
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        # The public way to set it works once in a process.
        monkeypatch.setattr(trace, "_TRACER_PROVIDER", self.provider)
        self.tracer = self.provider.get_tracer("application")

    def of(self, kind):
        return [span for span in self._exporter.get_finished_spans() if span.kind is kind]

    def named(self, name):
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    async def wait_for(self, count, kind):
        await until(lambda: len(self.of(kind)) >= count)
        return self.of(kind)

    def texts(self):
        return "".join(span.to_json() for span in self._exporter.get_finished_spans())


@pytest.fixture
def spans(monkeypatch):
    return Spans(monkeypatch)


def context_of(span):
    return (span.context.trace_id, span.context.span_id)


def parent_of(span):
    return None if span.parent is None else (span.parent.trace_id, span.parent.span_id)


async def test_an_inline_delivery_holds_its_handler_and_what_that_does(spans):
    async def handle(event):
        with spans.tracer.start_as_current_span("own"):
            await trio.lowlevel.checkpoint()

    delivery = signed("order.paid", webhook_id="msg_1")
    async with serving(registry(handle)) as app:
        with spans.tracer.start_as_current_span("elsewhere"):
            data = delivery_request(delivery, SPAN_OF_ELSEWHERE, ("User-Agent", "Sender/1"))
            assert (await exchange(app, data)).status == 200
        port = int(app.url.rpartition(":")[2].partition("/")[0])
    (received,) = spans.of(SpanKind.SERVER)
    assert received.name == "POST /hooks/sdk"
    assert dict(received.attributes) == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/hooks/sdk",
        "url.scheme": "http",
        "url.path": "/hooks/sdk",
        "client.address": "127.0.0.1",
        "network.peer.address": "127.0.0.1",
        "network.protocol.version": "1.1",
        "server.address": "127.0.0.1",
        "server.port": port,
        "user_agent.original": "Sender/1",
        "sdk.webhook.id": "msg_1",
        "sdk.webhook.type": "order.paid",
    }
    assert received.status.status_code is StatusCode.UNSET
    # A sender's traceparent decides nothing.
    assert received.parent is None
    assert received.context.trace_id != int(SPAN_OF_ELSEWHERE[1].split("-")[1], 16)
    (run,) = spans.named("handle order.paid")
    assert parent_of(run) == context_of(received)
    assert (run.kind, run.links) == (SpanKind.INTERNAL, ())
    assert run.attributes["sdk.webhook.attempt"] == 1
    assert run.attributes["sdk.handler.name"].endswith("handle")
    (own,) = spans.named("own")
    assert parent_of(own) == context_of(run)


async def test_each_run_from_the_queue_is_linked_to_the_delivery(spans):
    class NoSuchProductError(Exception):
        pass

    async def handle(event):
        with spans.tracer.start_as_current_span("own"):
            if event.attempt < 3:
                raise NoSuchProductError("planted-message")

    keys = {"Webhooks__Queue__RetryBaseSeconds": 0.01}
    async with serving(registry(handle, enqueue=True), **keys) as app:
        assert (await exchange(app, delivery_request(signed(webhook_id="msg_2")))).status == 200
        runs = await spans.wait_for(3, SpanKind.CONSUMER)
    (received,) = spans.of(SpanKind.SERVER)
    assert [run.attributes["sdk.webhook.attempt"] for run in runs] == [1, 2, 3]
    for run, own in zip(runs, spans.named("own"), strict=True):
        assert run.name == "handle order.paid"
        assert run.parent is None
        assert run.context.trace_id != received.context.trace_id
        assert [link.context for link in run.links] == [received.context]
        assert parent_of(own) == context_of(run)
    assert [run.status.status_code for run in runs] == [
        *(StatusCode.ERROR, StatusCode.ERROR, StatusCode.UNSET)
    ]
    assert runs[0].attributes["error.type"] == "NoSuchProductError"
    # The text of the exception stays in the inbox; the application's own spans may contain it.
    assert [run.events for run in runs] == [(), (), ()]
    assert all("planted-message" not in run.to_json() for run in [received, *runs])


async def test_an_event_from_the_store_after_a_restart_has_no_link(spans, tmp_path):
    async def handle(event):
        raise ValueError("again")

    began = trio.Event()

    async def hold(event):
        began.set()
        await trio.sleep_forever()

    keys = {
        "Storage__Backend": "Sqlite",
        "Storage__Path": str(tmp_path / "data"),
        "Webhooks__GracefulDrainTimeoutSeconds": 0,
        "Webhooks__Queue__MaxAttempts": 1,
    }
    async with serving(registry(hold, enqueue=True), **keys) as app:
        assert (await exchange(app, delivery_request(signed()))).status == 200
        await began.wait()
    async with serving(registry(handle, enqueue=True), **keys):
        runs = await spans.wait_for(2, SpanKind.CONSUMER)
    assert [len(run.links) for run in runs] == [1, 0]
    # The first was cut short, which its span says as well.
    assert runs[0].attributes["error.type"] == "Cancelled"


async def test_an_inline_handler_that_takes_too_long_or_fails(spans):
    async def handle(event):
        if event.data.id == "slow":
            await trio.sleep_forever()
        raise ValueError("planted-message")

    async with serving(registry(handle), Webhooks__InlineTimeoutSeconds=0.5) as app:
        for subject in ("slow", "bad"):
            delivery = signed("order.paid", {"id": subject})
            assert (await exchange(app, delivery_request(delivery))).status == 500
    received = spans.of(SpanKind.SERVER)
    assert [span.attributes["error.type"] for span in received] == ["500", "500"]
    runs = spans.of(SpanKind.INTERNAL)
    assert [span.attributes["error.type"] for span in runs] == ["Cancelled", "ValueError"]
    assert {span.status.status_code for span in received + runs} == {StatusCode.ERROR}
    assert "planted-message" not in spans.texts()


async def test_requests_that_are_refused(spans):
    delivery = signed()
    async with serving() as app:
        forged = signed(secret="whsec_" + "A" * 32)
        await exchange(app, delivery_request(forged))
        await exchange(app, delivery_request(delivery, path="/other?token=planted"))
        await exchange(app, delivery_request(delivery, method="BREW"))
        await exchange(app, delivery_request(delivery, ("Content-Encoding", "gzip")))
        parked = signed("customer.created")
        await exchange(app, delivery_request(parked))
    rejected, unknown, brew, media, kept = spans.of(SpanKind.SERVER)
    assert rejected.attributes["sdk.webhook.rejected"] == "no_match"
    assert rejected.attributes["http.response.status_code"] == 400
    assert "sdk.webhook.id" not in rejected.attributes
    # A client's fault is not an error of the server's span.
    assert rejected.status.status_code is StatusCode.UNSET
    assert (unknown.name, unknown.attributes["http.response.status_code"]) == ("POST", 404)
    assert "http.route" not in unknown.attributes
    assert brew.name == "HTTP /hooks/sdk"
    assert brew.attributes["http.request.method"] == "_OTHER"
    assert media.attributes["sdk.webhook.refused"] == "media"
    assert kept.attributes["sdk.webhook.type"] == "customer.created"
    everything = spans.texts()
    assert "planted" not in everything
    for one in (delivery, forged, parked):
        assert one.signature not in everything


async def test_a_host_in_a_span_and_a_receiver_mounted_below_one(spans):
    handlers = registry(_nothing)
    handlers.register(OrderCreatedEvent, _nothing, enqueue=True)
    receiver = WebhookReceiver(settings(), handlers)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            with spans.tracer.start_as_current_span("start of the host"):
                await nursery.start(receiver.run)
                # What inherits the span of the start, as our server's connections do.
                delivery = signed()
                await ask(receiver, delivery.body, asgi_headers(delivery))
                delivery = signed("order.created")
                await ask(receiver, delivery.body, asgi_headers(delivery))
                (queued,) = await spans.wait_for(1, SpanKind.CONSUMER)
            with spans.tracer.start_as_current_span("request of the host") as outer:
                delivery = signed()
                await ask(receiver, delivery.body, asgi_headers(delivery))
            nursery.cancel_scope.cancel()
    first, created, second = spans.of(SpanKind.SERVER)
    assert first.parent is None
    # The workers were started within that span as well.
    assert queued.parent is None
    assert [link.context for link in queued.links] == [created.context]
    assert parent_of(second) == context_of(outer)


async def _nothing(event):
    """A handler."""


async def test_each_attempt_of_a_call_has_a_span(spans):
    async with scripted_upstream() as upstream:
        failures = iter([503])
        upstream.fails = lambda method, path: next(failures, None)
        async with Client(full_stack(upstream, MaxRetries=2)) as client:
            with spans.tracer.start_as_current_span("work") as work:
                await client.orders.get("ord_1", query={"expand": "planted-query"})
            with pytest.raises(Exception, match="404") as raised:
                await client.checkouts.client_get("planted-path")
        port = upstream.port
    assert "planted-path" not in str(raised.value)
    first, second, third = spans.of(SpanKind.CLIENT)
    url = f"http://127.0.0.1:{port}/v1/orders/ord_1"
    assert first.name == "GET"
    assert dict(first.attributes) == {
        "http.request.method": "GET",
        "http.response.status_code": 503,
        "server.address": "127.0.0.1",
        "server.port": port,
        "url.full": url,
        "network.protocol.version": "1.1",
        "error.type": "503",
        "sdk.client.attempt.kind": "first",
    }
    assert first.status.status_code is StatusCode.ERROR
    assert second.attributes["http.request.resend_count"] == 1
    assert second.attributes["sdk.client.attempt.kind"] == "retry"
    assert second.status.status_code is StatusCode.UNSET
    assert {parent_of(first), parent_of(second)} == {context_of(work)}
    assert third.attributes["url.full"].endswith("/v1/checkouts/client/********")
    everything = spans.texts()
    assert "planted" not in everything
    assert TOKEN not in everything


async def test_an_attempt_without_an_answer(spans):
    class Broken(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request):
            raise httpx.ConnectError("planted-message")

    async with (
        scripted_upstream() as upstream,
        Client(full_stack(upstream), transport=Broken()) as client,
    ):
        with pytest.raises(Exception, match="planted"):
            await client.orders.get("ord_1")
    (span,) = spans.of(SpanKind.CLIENT)
    assert span.attributes["error.type"] == "ConnectionFailedError"
    assert "http.response.status_code" not in span.attributes
    assert span.events == ()
    assert "planted" not in span.to_json()


async def test_an_attempt_that_the_total_time_cuts_is_no_error(spans):
    async def hang(_request):
        await trio.sleep_forever()

    async with (
        scripted_upstream() as upstream,
        Client(full_stack(upstream), transport=httpx.MockTransport(hang)) as client,
    ):
        with pytest.raises(DeadlineExceededError):
            await client.with_options(total_timeout=0.5).orders.get("ord_1")
    (span,) = spans.of(SpanKind.CLIENT)
    assert span.attributes["sdk.cancelled"] is True
    assert span.status.status_code is StatusCode.UNSET


async def test_the_attempt_that_a_hedge_has_beaten_is_no_error(spans):
    class FirstHangs(httpx.AsyncBaseTransport):
        requests = 0

        async def handle_async_request(self, request):
            self.requests += 1
            if self.requests == 1:
                await trio.sleep_forever()
            await trio.lowlevel.checkpoint()
            return httpx.Response(200, json={"id": "ord_1"})

    settings = {"Resilience__HedgeAfterMs": 10}
    async with (
        scripted_upstream() as upstream,
        Client(full_stack(upstream, **settings), transport=FirstHangs()) as client,
    ):
        await client.orders.get("ord_1")
    by_kind = {
        span.attributes["sdk.client.attempt.kind"]: span for span in spans.of(SpanKind.CLIENT)
    }
    assert by_kind["first"].attributes["sdk.cancelled"] is True
    assert by_kind["hedge"].attributes["http.response.status_code"] == 200
    assert by_kind["hedge"].attributes["http.request.resend_count"] == 1
    assert {span.status.status_code for span in by_kind.values()} == {StatusCode.UNSET}


def test_without_an_sdk_there_are_no_traces(monkeypatch):
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    assert find_tracer() is None
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", trace.NoOpTracerProvider())
    assert find_tracer() is None


def test_the_memory_of_received_spans_is_bounded(spans):
    links = Links()
    context = spans.tracer.start_span("x").get_span_context()
    for number in range(REMEMBERED_SPANS + 5):
        links.remember(str(number), context)
    assert len(links) == REMEMBERED_SPANS
    assert links.find("4") is None
    assert links.find("5") is context
    links.forget("5")
    assert links.find("5") is None
