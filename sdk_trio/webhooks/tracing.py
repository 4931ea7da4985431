"""Endpoint and runner with a span for each delivery and each handler run.

They replace the plain classes if :func:`~sdk_trio.base.telemetry.find_tracer` finds a tracer, so
that tracing has no cost without one. Attributes follow the stable conventions of HTTP servers.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Tracer, get_current_span

from ..base.http import DirectRequest, Expiry, Headers
from ..base.telemetry import Links, attributes_of, fail, known_method, link_to, recorded
from ..config import Settings
from ..events import Event
from ..records.deliveries import Dead, Done, Lease, NewDelivery, Outcome, Parked
from .answers import Answer, RequestRefusal
from .arrival import VerifiedDelivery
from .bound import BoundHandler, BoundHandlers
from .endpoint import Endpoint
from .invocation import Invocations
from .outcomes import Failure
from .recording import OutcomeRecorder
from .run import DeliveryRunner
from .screen import Screened

if TYPE_CHECKING:
    from opentelemetry.trace import Span

#: The first status that marks a span as failed: OpenTelemetry's conventions for servers count 5xx
#: as errors, and 4xx as the client's.
_SERVER_ERROR = 500


class TracedEndpoint(Endpoint):
    """An endpoint that makes a SERVER span for every request.

    It ignores the ``traceparent`` of a request: anyone can send one, and it would decide which
    requests are sampled here. The parent is the host's span if the host mounts the receiver inside
    a traced application; otherwise the span is the root of its trace.
    """

    def __init__(
        self, settings: Settings, *arguments: Any, tracer: Tracer, links: Links, **options: Any
    ) -> None:
        super().__init__(settings, *arguments, **options)
        self._host_route = settings.webhooks.path
        self._tenant_route = f"{self._host_route.rstrip('/')}/{{identifier}}"
        self._tracer = tracer
        self._links = links
        # Tasks of our own server inherit the span in which the host has started the receiver. A
        # delivery is not part of it, so it is never the parent.
        self._starting_span = get_current_span()

    async def respond(self, request: DirectRequest) -> Answer | None:
        """Respond to one request within its span; see :meth:`Endpoint.respond`."""
        with recorded(self._begin(request)) as span:
            answer = await super().respond(request)
            if answer is not None:
                span.set_attribute("http.response.status_code", answer.status)
                if answer.status >= _SERVER_ERROR:
                    fail(span, str(answer.status))
            return answer

    def _begin(self, request: DirectRequest) -> "Span":
        method = known_method(request.method)
        screened = self._rules.screen.screen(request)
        route = self._host_route if request.path == self._host_route else None
        if screened.identifier is not None:
            route = self._tenant_route
        elif screened.source is not None:
            route = screened.source.path
        server = request.server or (None, None)
        inside = get_current_span()
        return self._tracer.start_span(
            " ".join(part for part in ("HTTP" if method[0] == "_" else method, route) if part),
            context=Context() if inside is self._starting_span else None,
            kind=SpanKind.SERVER,
            attributes=attributes_of(
                http__request__method=method,
                url__scheme="https" if screened.origin.secure else "http",
                url__path=request.path,
                http__route=route,
                client__address=screened.origin.address,
                network__peer__address=request.client[0] if request.client else None,
                network__protocol__version=request.version,
                server__address=server[0],
                server__port=server[1],
                user_agent__original=_user_agent(request.headers),
            ),
        )

    async def _route(self, arrival: VerifiedDelivery, expiry: Expiry | None) -> Answer:
        delivery = arrival.delivery
        span = get_current_span()
        span.set_attributes(_event_attributes(delivery.webhook_id, delivery.type))
        self._links.remember(delivery.key, span.get_span_context())
        return await super()._route(arrival, expiry)

    def _note(
        self, refusal: RequestRefusal, headers: Headers, screened: Screened, body: bytes | None
    ) -> None:
        get_current_span().set_attribute(f"sdk.{refusal.event}", str(refusal.cause))
        super()._note(refusal, headers, screened, body)


class TracedInvocations(Invocations):
    """Invocations with a span for every run of a handler.

    An inline run is a child of the delivery's span. A run from the queue is the root of a trace of
    its own, with a link to the span that received the event, if this process still knows it.
    """

    def __init__(
        self,
        settings: Settings,
        handlers: BoundHandlers,
        *arguments: Any,
        tracer: Tracer,
        links: Links,
    ) -> None:
        super().__init__(settings, handlers, *arguments)
        self._tracer = tracer
        self._links = links

    async def call(
        self, handler: BoundHandler, event: Event[Any], begun: float, lease: Lease
    ) -> Failure | None:
        """Call a handler within its span; see :meth:`Invocations.call`."""
        received = self._links.find(event.key)
        inline = received is not None and get_current_span().get_span_context() == received
        span = self._tracer.start_span(
            f"handle {event.type}" if event.type in self._handlers.by_type else "handle",
            context=None if inline else Context(),
            kind=SpanKind.INTERNAL if inline else SpanKind.CONSUMER,
            links=[] if inline else link_to(received),
            attributes={
                **_event_attributes(event.webhook_id, event.type),
                "sdk.webhook.attempt": event.attempt,
                "sdk.handler.name": handler.name,
            },
        )
        with recorded(span):
            failure = await super().call(handler, event, begun, lease)
            if failure is not None and not failure.asked:
                fail(span, failure.error_type)
            return failure


class TracedRecorder(OutcomeRecorder):
    """A recorder that forgets the span of an event that is not run again."""

    def __init__(self, *arguments: Any, links: Links) -> None:
        super().__init__(*arguments)
        self._links = links

    def report(
        self,
        delivery: NewDelivery,
        attempt: int,
        outcome: Outcome,
        handler: BoundHandler | None = None,
        seconds: float = 0.0,
        address: str | None = None,
    ) -> None:
        """Count and log an outcome; see :meth:`OutcomeRecorder.report`."""
        if isinstance(outcome, Done | Dead | Parked):
            self._links.forget(delivery.key)
        super().report(delivery, attempt, outcome, handler, seconds, address)


class TracedRunner(DeliveryRunner):
    """A runner with spans."""

    def __init__(self, *arguments: Any, tracer: Tracer, links: Links, **options: Any) -> None:
        super().__init__(
            *arguments,
            make_recorder=partial(TracedRecorder, links=links),
            make_invocations=partial(TracedInvocations, tracer=tracer, links=links),
            **options,
        )


def _event_attributes(webhook_id: str, event_type: str) -> dict[str, str]:
    return {"sdk.webhook.id": webhook_id, "sdk.webhook.type": event_type}


def _user_agent(headers: Any) -> str | None:
    for name, value in headers:
        if name == b"user-agent":
            text: str = value.decode("latin-1")
            return text
    return None
