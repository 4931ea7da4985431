"""Telemetry: samples of metrics, checks of health, and the spans of OpenTelemetry.

Every part of the program may report samples and a check of itself; the runtime hands them to the
admin address, which shows them.

Spans are made if traces are wanted (docs/how-to/tracing.md). Everything asks :func:`find_tracer`
once, when it starts. Without the extra ``otel``, or without an SDK that somebody has configured,
the answer is None: nothing is imported, and no delivery or call does anything for it.
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
    """The health of one part: ``ok`` False makes the process unready, ``degraded`` does not.

    ``detail`` is one line for people: the reason, or the figures. It holds no secret.
    """

    name: str
    ok: bool
    detail: str = ""
    degraded: bool = False


#: The functions that a part registers. Both are called on the event loop for every request: they
#: look at what is known already, and wait for nothing.
SampleSource = Callable[[], Iterable[Sample]]
CheckSource = Callable[[], Check]


class Histogram:
    """A count for each bucket of a fixed list, and the sum of all values.

    ``bounds`` are the upper ends of the buckets, ascending; what is above the last one is counted
    as well.
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
        # Prometheus counts cumulatively: each bucket holds all below it.
        total = 0
        # repr, because it is the shortest text that reads back as the same number.
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield Sample(f"{name}_bucket", (*labels, ("le", bound)), total)
        yield Sample(f"{name}_sum", labels, self._sum)
        yield Sample(f"{name}_count", labels, total)


# -- traces --------------------------------------------------------------------------------------

#: Makes the API load a provider by name, without any code of the application.
_PROVIDER_VARIABLE = "OTEL_PYTHON_TRACER_PROVIDER"

#: Receiving spans that are remembered for the runs of their events; more push out those
#: that were not used for longest.
REMEMBERED_SPANS = 10_000

#: The conventions' word for a method that is none of HTTP's, so that a sender invents no names.
OTHER_METHOD = "_OTHER"
_METHODS = frozenset(
    {"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"}
)


def find_tracer() -> "Tracer | None":
    """Return the tracer of this package, None where nobody has configured an SDK.

    Call it at a start: what is configured later counts from the next start on.
    """
    # An application that traces has imported the API; looking is cheaper than importing it for
    # nothing.
    if "opentelemetry.trace" not in sys.modules and _PROVIDER_VARIABLE not in os.environ:
        return None
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    provider = trace.get_tracer_provider()
    # The API answers these as long as nobody has configured an SDK.
    if isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider)):
        return None
    return provider.get_tracer("sdk_trio", __version__)


def known_method(method: str) -> str:
    """Return an HTTP method as the conventions want it in an attribute."""
    return method if method in _METHODS else OTHER_METHOD


@contextmanager
def recorded(span: "Span", *, failures: type[BaseException] = BaseException) -> "Iterator[Span]":
    """Make ``span`` the current one for the block, and end it there.

    An exception of the class ``failures`` that leaves the block gives the span the status of an
    error and its class as ``error.type``; another one, a cancellation, ``sdk.cancelled``. No
    message and no traceback is recorded: both may hold what came in a payload, and spans leave
    this machine.
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
        # use_span ends it unless it was left in another context, as by a closed coroutine.
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
    """The receiving span of each event that is not finished, for the spans of its runs.

    They are in this process's memory alone: what is taken out of the store after a restart, or by
    another process, has none. At most :data:`REMEMBERED_SPANS` are kept.
    """

    def __init__(self) -> None:
        self._contexts: Lru[str, SpanContext] = Lru(REMEMBERED_SPANS)

    def remember(self, key: str, context: "SpanContext") -> None:
        """Keep the span that received an event, in place of an earlier one."""
        self._contexts[key] = context

    def find(self, key: str) -> "SpanContext | None":
        """Return the span that received an event, None if it is not known here."""
        return self._contexts.get(key)

    def forget(self, key: str) -> None:
        """Drop it: no run follows."""
        self._contexts.discard(key)

    def __len__(self) -> int:
        return len(self._contexts)


def attributes_of(**values: "AttributeValue | None") -> "dict[str, AttributeValue]":
    """Return the attributes that have a value; ``__`` in a name stands for a dot."""
    return {name.replace("__", "."): value for name, value in values.items() if value is not None}


def link_to(context: "SpanContext | None") -> "list[Link]":
    """Return the list of links to a span: one, or none where it is not known."""
    from opentelemetry.trace import Link

    return [] if context is None else [Link(context)]
