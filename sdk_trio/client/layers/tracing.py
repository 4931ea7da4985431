"""A span for each attempt of a call, by OpenTelemetry's conventions for HTTP clients.

Used only if :func:`~sdk_trio.base.telemetry.find_tracer` finds a tracer. No ``traceparent`` is
sent: the upstream belongs to another company.
"""

from urllib.parse import urlsplit

import httpx
from opentelemetry.trace import Span, SpanKind, Tracer

from ...base.http import DEFAULT_PORTS
from ...base.telemetry import attributes_of, fail, known_method, recorded
from ..call import Call, without_path_secrets
from . import AttemptKind, CallCut, CallLayer

_CLIENT_ERROR = 400


class TracingLayer(CallLayer):
    """Wraps each attempt in a CLIENT span.

    Args:
        tracer: creates the span.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    async def send(self, call: Call, kind: AttemptKind) -> httpx.Response:
        """Make the attempt; answer and errors are those of the next layer.

        A cancelled attempt, as when its hedge won, is marked in the span, and is not an error.
        """
        origin = urlsplit(call.origin)
        method = known_method(call.method)
        span = self._tracer.start_span(
            method,
            kind=SpanKind.CLIENT,
            attributes=attributes_of(
                http__request__method=method,
                server__address=origin.hostname,
                server__port=origin.port or DEFAULT_PORTS.get(origin.scheme),
                url__full=without_path_secrets(call.url.partition("?")[0]),
                http__request__resend_count=call.attempts or None,
                sdk__client__attempt__kind=str(kind),
            ),
        )
        with recorded(span, failures=Exception):
            try:
                response = await self.next.send(call, kind)
            except CallCut as given_up:
                cut = given_up
                span.set_attribute("sdk.cancelled", True)
            else:
                _describe(span, response)
                return response
        raise cut


def _describe(span: Span, response: httpx.Response) -> None:
    span.set_attribute("http.response.status_code", response.status_code)
    if response.http_version.startswith("HTTP/"):
        span.set_attribute("network.protocol.version", response.http_version.removeprefix("HTTP/"))
    if response.status_code >= _CLIENT_ERROR:
        fail(span, str(response.status_code))
