"""The client's counters as metrics (docs/reference/metrics.md). Pure."""

from collections.abc import Mapping
from typing import Protocol

from ..base.metrics import Sample

#: Values of ``sdk_client_circuit_state``.
CIRCUIT_STATES = {"closed": 0, "open": 1, "probing": 2, "isolated": 3}


class Counted(Protocol):
    """The part of the client's counters that the metrics read."""

    @property
    def requests(self) -> Mapping[tuple[str, str], int]:
        """Return finished calls by method and outcome."""
        ...

    @property
    def attempts_per_call(self) -> Mapping[int, int]:
        """Return how many calls took so many attempts."""
        ...


def sample_client(counters: Counted, circuit: str) -> tuple[Sample, ...]:
    """Return the client's counters so far as samples.

    ``sdk_client_requests_total{method,outcome}``, ``sdk_client_circuit_state`` (a number of
    :data:`CIRCUIT_STATES`), and ``sdk_client_attempts`` as a cumulative histogram of attempts a
    call: ``_bucket{le}``, ``_sum`` and ``_count``.
    """
    samples = [
        Sample("sdk_client_requests_total", (("method", method), ("outcome", outcome)), count)
        for (method, outcome), count in sorted(counters.requests.items())
    ]
    samples.append(Sample("sdk_client_circuit_state", (), CIRCUIT_STATES[circuit]))
    calls = total = 0
    for attempts, count in sorted(counters.attempts_per_call.items()):
        calls += count
        total += attempts * count
        samples.append(Sample("sdk_client_attempts_bucket", (("le", str(attempts)),), calls))
    samples.append(Sample("sdk_client_attempts_bucket", (("le", "+Inf"),), calls))
    samples.append(Sample("sdk_client_attempts_sum", (), total))
    samples.append(Sample("sdk_client_attempts_count", (), calls))
    return tuple(samples)
