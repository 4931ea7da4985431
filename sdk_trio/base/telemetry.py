"""Telemetry: samples of metrics, checks of health, and the spans of OpenTelemetry.

Any part of the program may register samples and a health check; the admin address serves them.

Spans exist only if tracing is configured (docs/how-to/tracing.md). Each part calls
:func:`find_tracer` once, at its start. Without the extra ``otel`` or a configured OpenTelemetry SDK
it returns None: nothing is imported, and deliveries and calls do no extra work.
"""

import os
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from .._version import __version__
from .lru import Lru

if TYPE_CHECKING:
    from opentelemetry.trace import Link, Span, SpanContext, Tracer
    from opentelemetry.util.types import AttributeValue


Labels = tuple[tuple[str, str], ...]


class Sample(msgspec.Struct, frozen=True):
    """One value of a metric: its name, its labels in order, and the value now."""

    name: str
    labels: Labels
    value: float


class Check(msgspec.Struct, frozen=True):
    """The health of one part: if ``ok`` is False the process is unready; ``degraded`` has no effect
    on that.

    ``detail`` is one line for people: the reason, or the figures. It must not contain secrets.
    """

    name: str
    ok: bool
    detail: str = ""
    degraded: bool = False


#: Functions that a part registers. Both run on the event loop at every request: they read known
#: state and must not wait.
SampleSource = Callable[[], Iterable[Sample]]
CheckSource = Callable[[], Check]


class Histogram:
    """A count for each bucket of a fixed list, and the sum of all values.

    ``bounds`` are the upper bounds of the buckets, ascending; larger values are counted too.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self, name: str, labels: Labels = ()) -> Iterator[Sample]:
        """Return the samples of the metric ``name``: ``_bucket{le}``, ``_sum`` and ``_count``."""
        # Prometheus buckets are cumulative: each counts all values up to its bound.
        total = 0
        # repr gives the shortest text that parses to the same number.
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield Sample(f"{name}_bucket", (*labels, ("le", bound)), total)
        yield Sample(f"{name}_sum", labels, self._sum)
        yield Sample(f"{name}_count", labels, total)


# -- traces --------------------------------------------------------------------------------------

#: If set, the API loads a provider by name, without any code of the application.
_PROVIDER_VARIABLE = "OTEL_PYTHON_TRACER_PROVIDER"

#: Receiving spans kept for the runs of their events; the least recently used is dropped first.
REMEMBERED_SPANS = 10_000

#: OpenTelemetry's value for an unknown HTTP method, so that senders cannot invent names.
OTHER_METHOD = "_OTHER"
_METHODS = frozenset(
    {"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"}
)


def find_tracer() -> "Tracer | None":
    """Return the tracer of this package, or None if no SDK is configured.

    Call it at startup; an SDK configured later is not seen until the next start.
    """
    # An application that traces has already imported the API; checking is cheaper than an import.
    if "opentelemetry.trace" not in sys.modules and _PROVIDER_VARIABLE not in os.environ:
        return None
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    provider = trace.get_tracer_provider()
    # The API returns these while no SDK is configured.
    if isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider)):
        return None
    return provider.get_tracer("sdk_trio", __version__)


def known_method(method: str) -> str:
    """Return an HTTP method in the form that the semantic conventions require."""
    return method if method in _METHODS else OTHER_METHOD


@contextmanager
def recorded(span: "Span", *, failures: type[BaseException] = BaseException) -> "Iterator[Span]":
    """Make ``span`` the current one for the block; end it when the block ends.

    An exception of class ``failures`` that leaves the block sets the span's status to error and
    ``error.type`` to its class. Any other, such as a cancellation, sets ``sdk.cancelled``. Messages
    and tracebacks are never recorded: they may contain payload data, and spans leave this machine.
    """
    from opentelemetry.trace import use_span

    try:
        with use_span(
            span, end_on_exit=True, record_exception=False, set_status_on_exception=False
        ):
            try:
                yield span
            except BaseException as error:
                if isinstance(error, failures):
                    fail(span, type(error).__name__)
                else:
                    span.set_attribute("sdk.cancelled", True)
                raise
    finally:
        # use_span ends the span unless another context left it, as a closed coroutine does.
        if span.is_recording():
            span.end()


def fail(span: "Span", error_type: str) -> None:
    """Give ``span`` the status of an error, with ``error_type`` as the conventions name it."""
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", error_type)
    span.set_status(StatusCode.ERROR)


def trace_headers() -> dict[str, str]:
    """Return the headers that name the current span to another program (W3C Trace Context)."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers


class Links:
    """The receiving span of each unfinished event, for the spans of its runs.

    Kept in this process's memory only: an event read from the store after a restart, or by another
    process, has no span. At most :data:`REMEMBERED_SPANS` are kept.
    """

    def __init__(self) -> None:
        self._contexts: Lru[str, SpanContext] = Lru(REMEMBERED_SPANS)

    def remember(self, key: str, context: "SpanContext") -> None:
        """Keep the span that received an event; it replaces an earlier one."""
        self._contexts[key] = context

    def find(self, key: str) -> "SpanContext | None":
        """Return the span that received an event or None if it is unknown here."""
        return self._contexts.get(key)

    def forget(self, key: str) -> None:
        """Drop the span: no run follows."""
        self._contexts.discard(key)

    def __len__(self) -> int:
        return len(self._contexts)


def attributes_of(**values: "AttributeValue | None") -> "dict[str, AttributeValue]":
    """Return the attributes that are not None; ``__`` in a name stands for a dot."""
    return {name.replace("__", "."): value for name, value in values.items() if value is not None}


def link_to(context: "SpanContext | None") -> "list[Link]":
    """Return the list of links to a span: one, or an empty list if it is unknown."""
    from opentelemetry.trace import Link

    return [] if context is None else [Link(context)]
