"""The settings of the webhook receiver, its queue and reconciliation. Pure."""

from typing import Annotated

from ..fields import Form, KeyDerivation, Section, about
from ..secret import Secret


class QueueOptions(Section, frozen=True, kw_only=True):
    """The background queue."""

    capacity: Annotated[
        int, about("Events that wait in memory; a full queue answers 503.", minimum=1)
    ] = 1000
    # While as many runs hang as there are workers, no other queued event runs: tenants share them,
    # too.
    workers: Annotated[int, about("Worker tasks.", between=(1, 1024))] = 8
    # As many as the workers of the queue and as many again for inline deliveries, so that neither
    # waits for the other; each may hold a connection of a database, of which there are 100 in a
    # PostgreSQL as it is installed.
    threads: Annotated[
        int,
        about(
            "Handlers written as plain functions that run at once, each in a thread.",
            between=(1, 1024),
        ),
    ] = 16
    # A run that hangs holds a worker, and so many as there are workers stop the queue. Longer than
    # any call of a service should take, and as long as the longest wait for a retry.
    handler_timeout_seconds: Annotated[
        float | None,
        about(
            "A run of the queue is cancelled after this time, which is a failed attempt; null: "
            "never.",
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
    # Further back the inbox has forgotten what it has handled, and would handle it again.
    max_lookback_hours: Annotated[
        int,
        about(
            "How far back a pass looks; at most DedupRetentionHours and PayloadRetentionDays.",
            between=(1, 8760),
            unit="hours",
        ),
    ] = 24
    # An organization may have further endpoints, whose deliveries are not this receiver's.
    endpoint_ids: Annotated[
        tuple[str, ...],
        about(
            "The upstream's ids of the webhook endpoints that lead here; when empty, the only "
            "endpoint there is, or the only one whose URL ends in Path."
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
        str, about("Route that receives deliveries.", form=Form.ROUTE, required=True)
    ] = "/hooks/sdk"
    # The scheme of the sender counts, not that of the hop behind the proxy.
    require_https: Annotated[
        bool, about("Requests that are not HTTPS are rejected with 400, not redirected.")
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
    # Senders do both: some sign with the decoded key, some with the text, and Auto accepts either.
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
    # Below the 10 s after which a sender gives up: the answer and the commit need the rest.
    inline_timeout_seconds: Annotated[
        float,
        about(
            "An inline handler is cancelled after this time; the sender waits 10 s.",
            between=(0.01, 3600),
            unit="seconds",
        ),
    ] = 8.0
    graceful_drain_timeout_seconds: Annotated[
        float,
        about("Time that a shutdown gives the queue to drain.", between=(0, 3600), unit="seconds"),
    ] = 30.0
    queue: QueueOptions = QueueOptions()
    # Answered 200 then, because senders disable an endpoint that goes on failing.
    inline_max_attempts: Annotated[
        int,
        about(
            "Deliveries of one event whose inline handler failed, before it is a dead letter "
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
    # By the sender's address: without TrustedProxies everybody behind a proxy has the proxy's.
    allowed_source_ip_ranges: Annotated[
        tuple[str, ...],
        about(
            "When not empty, other addresses get 403 before the body is read.",
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
        """Return Secret (if set) and then Secrets: the list that verification goes through."""
        return (*(() if self.secret is None else (self.secret,)), *self.secrets)


class SimulatorOptions(Section, frozen=True, kw_only=True):
    """The simulator, which Development alone maps."""

    # A variable of its own, because whoever reaches the simulator has it sign anything: with a
    # secret that another installation verifies with, that could be sent on (ADR 27).
    secret_env_var: Annotated[
        str | None,
        about(
            "Variable with the secret that the simulator signs with, and that the receiver "
            "accepts beside its own in Development. No other installation may verify with it.",
            form=Form.ENV_VAR,
            default_note="one that dev or this process generates",
        ),
    ] = None
