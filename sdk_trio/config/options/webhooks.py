"""The settings of the webhook receiver, its queue and reconciliation. Pure."""

from typing import Annotated

from ..fields import Form, KeyDerivation, Section, about
from ..secret import Secret


class QueueOptions(Section, frozen=True, kw_only=True):
    """The background queue."""

    capacity: Annotated[
        int, about("Queue slots for events in memory; a full queue answers 503.", minimum=1)
    ] = 1000
    # If as many runs hang as there are workers, no other queued event runs: all tenants share them.
    workers: Annotated[int, about("Worker tasks.", between=(1, 1024))] = 8
    # Twice the number of queue workers, so that queued and inline runs do not wait for each other.
    # Each may hold a database connection; PostgreSQL allows 100 by default.
    threads: Annotated[
        int,
        about(
            "Concurrent runs of handlers written as plain functions, each in a thread.",
            between=(1, 1024),
        ),
    ] = 16
    # A hanging run blocks a worker, and hanging runs on all workers stop the queue. Longer than any
    # service call should take, and as long as the longest wait for a retry.
    handler_timeout_seconds: Annotated[
        float | None,
        about(
            "Cancel a queued run after this time, as a failed attempt; null: never.",
            between=(0.01, 604_800),
            unit="seconds",
        ),
    ] = 900.0
    max_attempts: Annotated[int, about("Attempts before an event is a dead letter.", minimum=1)] = 8
    retry_base_seconds: Annotated[
        float,
        about(
            "First retry delay, doubled each time and fully jittered.",
            between=(0, 86_400),
            unit="seconds",
        ),
    ] = 1.0
    retry_cap_seconds: Annotated[
        float,
        about(
            "Longest retry delay; at least RetryBaseSeconds.",
            between=(0, 604_800),
            unit="seconds",
            at_least="retry_base_seconds",
        ),
    ] = 900.0


class ReconciliationOptions(Section, frozen=True, kw_only=True):
    """Fetching missed deliveries from the upstream."""

    enabled: Annotated[
        bool, about("Fetch what was missed from the upstream's list of deliveries.")
    ] = False
    interval_minutes: Annotated[
        int, about("Time between passes.", between=(1, 1440), unit="minutes")
    ] = 15
    # Events further back are forgotten by the inbox, and would be handled again.
    max_lookback_hours: Annotated[
        int,
        about(
            "How far back a pass fetches; at most DedupRetentionHours and PayloadRetentionDays.",
            between=(1, 8760),
            unit="hours",
        ),
    ] = 24
    by_state: Annotated[
        bool,
        about(
            "After a gap, list the records that changed in it and add an event for each, because "
            "no list of deliveries shows what the upstream skipped."
        ),
    ] = True
    reenable_endpoint: Annotated[
        bool,
        about(
            "Enable this receiver's endpoint at the upstream when it was disabled, at most once an "
            "hour."
        ),
    ] = False
    # An organization may have other endpoints, whose deliveries belong to other receivers.
    endpoint_ids: Annotated[
        tuple[str, ...],
        about(
            "The upstream's ids of this receiver's webhook endpoints; when empty, the only "
            "endpoint, or the only one whose URL ends in Path."
        ),
    ] = ()


class WebhooksOptions(Section, frozen=True, kw_only=True):
    """The webhook receiver."""

    secret: Annotated[
        Secret | None,
        about(
            "Single webhook secret; combined with Secrets.",
            form=Form.SIGNING,
            default_note="none",
            live=True,
        ),
    ] = None
    secrets: Annotated[
        tuple[Secret, ...],
        about(
            "Active secrets; verification passes if any one matches (rotation).",
            form=Form.SIGNING,
            live=True,
        ),
    ] = ()
    path: Annotated[
        str, about("Route that receives deliveries.", form=Form.RECEIVER_ROUTE, required=True)
    ] = "/hooks/sdk"
    # The sender's scheme counts, not that of the connection behind the proxy.
    require_https: Annotated[
        bool, about("Reject plain HTTP requests with 400; they are not redirected.")
    ] = True
    tolerance_seconds: Annotated[
        int,
        about(
            "Maximum age of the webhook timestamp, in either direction; more than 3600, or than "
            "DedupRetentionHours, is a warning.",
            minimum=1,
            unit="seconds",
            live=True,
        ),
    ] = 300
    fail_on_missing_handlers: Annotated[
        bool,
        about(
            "Startup fails if any known event type has no handler; otherwise each one is a warning."
        ),
    ] = False
    # Some senders sign with the decoded key, some with the text; Auto accepts either.
    key_derivation: Annotated[
        KeyDerivation,
        about(
            "How a secret becomes the HMAC key: Standard (decoded), Utf8 (whole text), "
            "Auto (either).",
            live=True,
        ),
    ] = KeyDerivation.AUTO
    max_payload_bytes: Annotated[
        int,
        about(
            "Larger bodies are answered 413 while they stream.",
            between=(1024, 104_857_600),
            unit="bytes",
        ),
    ] = 1_048_576
    # Below the 10 s after which a sender gives up: answer and commit need the rest.
    inline_timeout_seconds: Annotated[
        float,
        about(
            "Cancel an inline handler after this time; the sender waits 10 s.",
            between=(0.01, 3600),
            unit="seconds",
        ),
    ] = 8.0
    graceful_drain_timeout_seconds: Annotated[
        float,
        about("Time that a shutdown gives the queue to drain.", between=(0, 3600), unit="seconds"),
    ] = 30.0
    queue: QueueOptions = QueueOptions()
    # The answer is then 200, because senders disable an endpoint that keeps failing.
    inline_max_attempts: Annotated[
        int,
        about(
            "Failed inline deliveries of one event before it becomes a dead letter "
            "and answered 200.",
            minimum=1,
        ),
    ] = 5
    dedup_retention_hours: Annotated[
        int, about("How long a finished id is remembered.", minimum=1, unit="hours")
    ] = 168
    payload_retention_days: Annotated[
        int, about("How long bodies are kept.", minimum=1, unit="days")
    ] = 30
    # By the sender's address: without TrustedProxies, everyone behind a proxy has its address.
    allowed_source_ip_ranges: Annotated[
        tuple[str, ...],
        about(
            "If not empty, other addresses get 403 before the body is read.",
            form=Form.CIDR,
            live=True,
        ),
    ] = ()
    rate_limit_per_minute: Annotated[
        int | None,
        about(
            "Deliveries a minute from one address; above it 429 with Retry-After.",
            minimum=1,
            unit="per minute",
            default_note="no limit",
            live=True,
        ),
    ] = None
    reconciliation: ReconciliationOptions = ReconciliationOptions()

    @property
    def all_secrets(self) -> tuple[Secret, ...]:
        """Return Secret (if set), then Secrets: the list used for verification."""
        return (*(() if self.secret is None else (self.secret,)), *self.secrets)


class SimulatorOptions(Section, frozen=True, kw_only=True):
    """The simulator, available in Development only."""

    # A separate variable: anyone who can reach the simulator can have anything signed. If another
    # installation verified with that secret, it could be sent there (ADR 27).
    secret_env_var: Annotated[
        str | None,
        about(
            "Variable with the simulator's signing secret, which the receiver also "
            "accepts in Development. No other installation may verify with it.",
            form=Form.ENV_VAR,
            default_note="generated by dev or this process",
        ),
    ] = None
