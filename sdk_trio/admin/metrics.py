"""The table of metrics (name, kind, labels, meaning) and the exposition for Prometheus. Pure.

The exposition (format 0.0.4), ``docs/reference/metrics.md`` and the tests of the dashboards read
this table. A sample whose name is not in the table is not shown, so every metric is documented.
"""

from collections.abc import Iterable, Mapping
from typing import Final, Literal

import msgspec

from ..base.telemetry import Labels, Sample

Kind = Literal["counter", "gauge", "histogram"]

#: Endings that a histogram's samples add to its name.
HISTOGRAM_ENDINGS: Final = ("_bucket", "_sum", "_count")

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"

_LABEL_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})

#: Numbers that the format spells differently from Python.
_NAMED: Final = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}

_HELP_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})


class Metric(msgspec.Struct, frozen=True):
    """One metric; ``help`` is one line for people, ``labels`` the names of its labels.

    ``across``: how the values of several processes are combined. Counts are summed. For a state,
    the worst value is shown.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    across: Literal["sum", "max", "min"] = "sum"


METRICS: Final = (
    Metric(
        "sdk_build_info",
        "gauge",
        "Versions, as labels; the value is always 1.",
        ("version", "python"),
    ),
    Metric(
        "process_start_time_seconds", "gauge", "When this runtime started, in seconds since 1970."
    ),
    Metric(
        "sdk_clock_offset_seconds",
        "gauge",
        "Seconds by which this host's clock is ahead of the database's; with PostgreSQL only.",
    ),
    Metric("sdk_check_ok", "gauge", "A check of /readyz: 1 passes, 0 fails.", ("check",)),
    Metric(
        "sdk_admin_token_refusals_total",
        "counter",
        "Requests to the admin address refused because the token was missing or wrong.",
        ("reason",),
    ),
    Metric(
        "sdk_runtime_blocked_total",
        "counter",
        "How often the event loop was blocked for more than a second.",
    ),
    Metric(
        "sdk_runtime_blocked_seconds_total",
        "counter",
        "Total seconds for which the event loop was blocked.",
    ),
    Metric(
        "sdk_processes",
        "gauge",
        "Configured processes and serving processes; only if Server:Processes is not 1.",
        ("state",),
    ),
    Metric(
        "sdk_process_ends_total",
        "counter",
        "Worker processes (Server:Processes) that ended unexpectedly.",
    ),
    Metric(
        "sdk_log_dropped_total",
        "counter",
        "Log lines that were dropped because the log's reader was too slow.",
        ("level",),
    ),
    Metric("sdk_draining", "gauge", "1 during a graceful shutdown, otherwise 0."),
    Metric(
        "sdk_webhook_deliveries_total",
        "counter",
        "Results of deliveries; one delivery may count under several results. Those of a source "
        "have the label source, except leases that were given up.",
        ("result",),
    ),
    Metric(
        "sdk_webhook_refusals_total",
        "counter",
        "Requests to the receiver's address that were not answered 200, by cause. Those at the "
        "route of a source have the label source.",
        ("cause",),
    ),
    Metric(
        "sdk_webhook_handler_seconds",
        "histogram",
        "Duration of each handler run, whatever its outcome; a type outside the catalogue counts "
        "as other. Events of a source have the label source, and their types are those with a "
        "handler.",
        ("type", "mode"),
    ),
    Metric(
        "sdk_webhook_secret_matches_total",
        "counter",
        "Deliveries verified with the secret at this index in the settings.",
        ("index",),
    ),
    Metric(
        "sdk_forward_attempts_total",
        "counter",
        "Events posted to the application of a route, by result.",
        ("route", "result"),
    ),
    Metric(
        "sdk_forward_postponed_total",
        "counter",
        "How often an event was postponed because its route could not accept it.",
        ("route",),
    ),
    Metric(
        "sdk_forward_route_state",
        "gauge",
        "State of a route: 0 open, 1 waiting for its application, 2 paused; the highest of all "
        "processes.",
        ("route",),
        across="max",
    ),
    Metric(
        "sdk_forward_seconds",
        "histogram",
        "Duration of each request to an application.",
        ("route",),
    ),
    Metric(
        "sdk_handler_policy",
        "gauge",
        "A handler's policy. The label handler is the type of its events, * for a fallback, or "
        "route:NAME for a route.",
        ("handler", "policy"),
        across="max",
    ),
    Metric("sdk_pauses", "gauge", "Event pauses that are in force.", across="max"),
    Metric(
        "sdk_pause_seconds",
        "gauge",
        "Age of the oldest pause that is in force; 0 when there is none.",
        across="max",
    ),
    Metric("sdk_queue_depth", "gauge", "Events that wait in memory for a worker."),
    Metric("sdk_queue_capacity", "gauge", "Maximum of sdk_queue_depth."),
    Metric(
        "sdk_queue_oldest_seconds",
        "gauge",
        "Age of the oldest queued event that waits or runs, excluding retries that are not due; "
        "0 if there is none.",
    ),
    Metric(
        "sdk_leases_expired",
        "gauge",
        "Events of a process that hangs or is gone, not yet claimed by another process; above 0 "
        "only briefly.",
    ),
    Metric(
        "sdk_leases_held",
        "gauge",
        "Events that wait or run in a process that holds their leases in the store.",
    ),
    Metric(
        "sdk_leases_renewed_total",
        "counter",
        "Lease renewals; sdk_webhook_deliveries_total counts leases that were lost or given up.",
    ),
    Metric(
        "sdk_store_commit_seconds",
        "histogram",
        "Duration of each committed transaction of the store: its statements and its sync.",
    ),
    Metric(
        "sdk_store_readers",
        "gauge",
        "Queries of the store that have a connection, and queries that wait for one.",
        ("state",),
    ),
    Metric(
        "sdk_certificate_end_time_seconds",
        "gauge",
        "When the receiver's certificate expires, in seconds since 1970; the earliest of all "
        "processes. Only if the receiver itself serves TLS.",
        across="min",
    ),
    Metric(
        "sdk_disk_free_bytes",
        "gauge",
        "Free space on the file system of the data directory; with SQLite only.",
    ),
    Metric(
        "sdk_disk_size_bytes",
        "gauge",
        "Total size of the file system of the data directory.",
    ),
    Metric("sdk_inbox_events", "gauge", "Events of the inbox in each state.", ("state",)),
    Metric("sdk_tenants", "gauge", "Tenants in each status.", ("status",)),
    Metric(
        "sdk_client_requests_total",
        "counter",
        "Finished calls to the upstream API.",
        ("method", "outcome"),
    ),
    Metric(
        "sdk_client_circuit_state",
        "gauge",
        "State of the circuit breaker: 0 closed, 1 open, 2 probing, 3 isolated manually; the "
        "highest of all processes.",
        across="max",
    ),
    Metric("sdk_client_attempts", "histogram", "Attempts per call."),
    Metric(
        "sdk_notifications_total",
        "counter",
        "Messages to site managers by channel and result.",
        ("channel", "result"),
    ),
    Metric(
        "sdk_alert_open",
        "gauge",
        "1 while the alert is open, otherwise 0; only on the host that sends alerts.",
        ("alert",),
        across="max",
    ),
    Metric(
        "sdk_alert_messages_total",
        "counter",
        "Attempts to send a message about an alert, by channel and result.",
        ("channel", "result"),
    ),
    Metric(
        "sdk_replication_lag_seconds",
        "gauge",
        "The largest lag of any replica of a tenant's database; +Inf while one has never caught "
        "up.",
    ),
    Metric(
        "sdk_replication_databases",
        "gauge",
        "Tenants' databases by the health of their replicas.",
        ("state",),
    ),
    Metric(
        "sdk_replication_verified_age_seconds",
        "gauge",
        "Time since the replicas of all active tenants were last restored and verified.",
    ),
)

BY_NAME: Final[Mapping[str, Metric]] = {metric.name: metric for metric in METRICS}


def metric_of(sample_name: str) -> Metric | None:
    """Return the metric that a sample of this name belongs to, or None."""
    # The full name first: a counter may end in one of a histogram's suffixes.
    found = BY_NAME.get(sample_name)
    if found is not None:
        return None if found.kind == "histogram" else found
    base, _, ending = sample_name.rpartition("_")
    found = BY_NAME.get(base)
    if found is None or found.kind != "histogram" or f"_{ending}" not in HISTOGRAM_ENDINGS:
        return None
    return found


def add_up(processes: Iterable[Iterable[Sample]]) -> list[Sample]:
    """Combine the samples of several processes into one list, in order of arrival."""
    values: dict[tuple[str, Labels], float] = {}
    for samples in processes:
        for sample in samples:
            name = sample.name, sample.labels
            metric = metric_of(sample.name)
            before = values.get(name)
            if before is None:
                values[name] = sample.value
            elif metric is not None and metric.across != "sum":
                worse = max if metric.across == "max" else min
                values[name] = worse(before, sample.value)
            else:
                values[name] = before + sample.value
    return [Sample(name, labels, value) for (name, labels), value in values.items()]


def lasting(samples: Iterable[Sample]) -> list[Sample]:
    """Return the counters and histograms, whose values must outlast their process; no gauges."""
    found = ((sample, metric_of(sample.name)) for sample in samples)
    return [sample for sample, metric in found if metric is not None and metric.kind != "gauge"]


class UnknownMetricError(ValueError):
    """A sample has a name that is not in the table of metrics."""


def expose(samples: Iterable[Sample]) -> bytes:
    """Return the samples, grouped by metric in the order of the table, with help and type.

    Raises:
        UnknownMetricError: a name is not in :data:`~METRICS`.
    """
    lines: dict[str, list[str]] = {}
    for sample in samples:
        metric = metric_of(sample.name)
        if metric is None:
            raise UnknownMetricError(f"{sample.name} is not in the table of metrics")
        lines.setdefault(metric.name, []).append(_line(sample))
    text: list[str] = []
    for metric in METRICS:
        # Format 0.0.4: the lines of one metric must be contiguous, below its help and type. The
        # samples of one metric may arrive apart from each other.
        if metric.name in lines:
            text.append(f"# HELP {metric.name} {metric.help.translate(_HELP_ESCAPES)}")
            text.append(f"# TYPE {metric.name} {metric.kind}")
            text += lines[metric.name]
    return ("\n".join(text) + "\n").encode("utf-8", "replace")


def _number(value: float) -> str:
    # As an integer: Python would write a large counter as 1e+16.
    if value.is_integer():
        return str(int(value))
    return _NAMED.get(str(value), repr(value))


def _line(sample: Sample) -> str:
    number = _number(float(sample.value))
    if not sample.labels:
        return f"{sample.name} {number}"
    labels = ",".join(f'{name}="{text.translate(_LABEL_ESCAPES)}"' for name, text in sample.labels)
    return f"{sample.name}{{{labels}}} {number}"
