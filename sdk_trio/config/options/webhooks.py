"""The settings of the webhook receiver, its queue and reconciliation. Pure."""

import attrs

from ..fields import Form, KeyDerivation, about
from ..secret import Secret

#: For so long a captured delivery can be sent again, in seconds. Senders sign each attempt anew, so
#: five minutes, the default, are enough for clocks that differ.
MOST_TOLERANCE = 3600


@attrs.frozen(kw_only=True)
class QueueOptions:
    """The background queue."""

    capacity: int = attrs.field(
        default=1000,
        metadata=about("Events that wait in memory; a full queue answers 503.", minimum=1),
    )
    # While as many runs hang as there are workers, no other queued event runs: tenants share them,
    # too.
    workers: int = attrs.field(default=8, metadata=about("Worker tasks.", minimum=1, maximum=1024))
    # As many as the workers of the queue and as many again for inline deliveries, so that neither
    # waits for the other; each may hold a connection of a database, of which there are 100 in a
    # PostgreSQL as it is installed.
    threads: int = attrs.field(
        default=16,
        metadata=about(
            "Handlers written as plain functions that run at once, each in a thread.",
            minimum=1,
            maximum=1024,
        ),
    )
    max_attempts: int = attrs.field(
        default=8,
        metadata=about("Attempts before an event is a dead letter.", minimum=1),
    )
    retry_base_seconds: float = attrs.field(
        default=1.0,
        metadata=about(
            "First retry delay, doubled each time and fully jittered.",
            minimum=0,
            maximum=86_400,
            unit="seconds",
        ),
    )
    retry_cap_seconds: float = attrs.field(
        default=900.0,
        metadata=about(
            "Longest retry delay; at least RetryBaseSeconds.",
            minimum=0,
            maximum=604_800,
            unit="seconds",
            at_least="retry_base_seconds",
        ),
    )


@attrs.frozen(kw_only=True)
class ReconciliationOptions:
    """Fetching missed deliveries from the upstream."""

    enabled: bool = attrs.field(
        default=False,
        metadata=about("Fetch what was missed from the upstream's list of deliveries."),
    )
    interval_minutes: int = attrs.field(
        default=15,
        metadata=about("Time between passes.", minimum=1, maximum=1440, unit="minutes"),
    )
    # Further back the inbox has forgotten what it has handled, and would handle it again.
    max_lookback_hours: int = attrs.field(
        default=24,
        metadata=about(
            "How far back a pass looks; at most DedupRetentionHours and PayloadRetentionDays.",
            minimum=1,
            maximum=8760,
            unit="hours",
        ),
    )
    # An organization may have further endpoints, whose deliveries are not this receiver's.
    endpoint_ids: tuple[str, ...] = attrs.field(
        default=(),
        metadata=about(
            "The upstream's ids of the webhook endpoints that lead here; when empty, the only "
            "endpoint there is, or the only one whose URL ends in Path."
        ),
    )


@attrs.frozen(kw_only=True)
class WebhooksOptions:
    """The webhook receiver."""

    secret: Secret | None = attrs.field(
        default=None,
        metadata=about(
            "Single webhook secret; combined with Secrets.",
            form=Form.SIGNING,
            default_note="none",
            live=True,
        ),
    )
    secrets: tuple[Secret, ...] = attrs.field(
        default=(),
        metadata=about(
            "Active secrets; verification passes if any one matches (rotation).",
            form=Form.SIGNING,
            live=True,
        ),
    )
    path: str = attrs.field(
        default="/hooks/sdk",
        metadata=about("Route that receives deliveries.", form=Form.ROUTE, required=True),
    )
    # The scheme of the sender counts, not that of the hop behind the proxy.
    require_https: bool = attrs.field(
        default=True,
        metadata=about("Requests that are not HTTPS are rejected with 400, not redirected."),
    )
    # A captured delivery stays valid for so long, and the memory of ids is what stops it: they have
    # to be remembered for longer.
    tolerance_seconds: int = attrs.field(
        default=300,
        metadata=about(
            "Maximum age of the webhook timestamp, in either direction; below DedupRetentionHours.",
            minimum=1,
            maximum=MOST_TOLERANCE,
            unit="seconds",
            live=True,
        ),
    )
    fail_on_missing_handlers: bool = attrs.field(
        default=False,
        metadata=about(
            "Startup fails if any known event type has no handler; otherwise one line "
            "says how many."
        ),
    )
    # Senders do both: some sign with the decoded key, some with the text, and Auto accepts either.
    key_derivation: KeyDerivation = attrs.field(
        default=KeyDerivation.AUTO,
        metadata=about(
            "How a secret becomes the HMAC key: Standard (decoded), Utf8 (whole text), "
            "Auto (either).",
            live=True,
        ),
    )
    max_payload_bytes: int = attrs.field(
        default=1_048_576,
        metadata=about(
            "Larger bodies are answered 413 while they stream.",
            minimum=1024,
            maximum=104_857_600,
            unit="bytes",
        ),
    )
    # Below the 10 s after which a sender gives up: the answer and the commit need the rest.
    inline_timeout_seconds: float = attrs.field(
        default=8.0,
        metadata=about(
            "An inline handler is cancelled after this time; the sender waits 10 s.",
            minimum=0.01,
            maximum=3600,
            unit="seconds",
        ),
    )
    graceful_drain_timeout_seconds: float = attrs.field(
        default=30.0,
        metadata=about(
            "Time that a shutdown gives the queue to drain.",
            minimum=0,
            maximum=3600,
            unit="seconds",
        ),
    )
    queue: QueueOptions = attrs.field(factory=QueueOptions)
    # Answered 200 then, because senders disable an endpoint that goes on failing.
    inline_max_attempts: int = attrs.field(
        default=5,
        metadata=about(
            "Deliveries of one event whose inline handler failed, before it is a dead letter "
            "and answered 200.",
            minimum=1,
        ),
    )
    dedup_retention_hours: int = attrs.field(
        default=168,
        metadata=about("How long a finished id is remembered.", minimum=1, unit="hours"),
    )
    payload_retention_days: int = attrs.field(
        default=30,
        metadata=about("How long bodies are kept.", minimum=1, unit="days"),
    )
    # By the sender's address: without TrustedProxies everybody behind a proxy has the proxy's.
    allowed_source_ip_ranges: tuple[str, ...] = attrs.field(
        default=(),
        metadata=about(
            "When not empty, other addresses get 403 before the body is read.",
            form=Form.CIDR,
            live=True,
        ),
    )
    rate_limit_per_minute: int | None = attrs.field(
        default=None,
        metadata=about(
            "Deliveries a minute from one address; above it 429 with Retry-After.",
            minimum=1,
            unit="per minute",
            default_note="no limit",
            live=True,
        ),
    )
    reconciliation: ReconciliationOptions = attrs.field(factory=ReconciliationOptions)

    @property
    def all_secrets(self) -> tuple[Secret, ...]:
        """Return Secret (if set) and then Secrets: the list that verification goes through."""
        return (*(() if self.secret is None else (self.secret,)), *self.secrets)


@attrs.frozen(kw_only=True)
class SimulatorOptions:
    """The simulator, which Development alone maps."""

    # A variable of its own, because whoever reaches the simulator has it sign anything: with a
    # secret that another installation verifies with, that could be sent on (ADR 27).
    secret_env_var: str | None = attrs.field(
        default=None,
        metadata=about(
            "Variable with the secret that the simulator signs with, and that the receiver "
            "accepts beside its own in Development. No other installation may verify with it.",
            form=Form.ENV_VAR,
            default_note="the one that dev generates",
        ),
    )
