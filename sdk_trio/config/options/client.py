"""The client's settings: origins, breaker and hedging, connection pool. Pure."""

import attrs

from ..fields import Form, about


@attrs.frozen(kw_only=True)
class UpstreamOptions:
    """Addresses of the upstream API."""

    production_url: str = attrs.field(
        default="https://api.polar.sh",
        metadata=about("Base address of Mode Live.", form=Form.HTTPS_URL, required=True),
    )
    sandbox_url: str = attrs.field(
        default="https://sandbox-api.polar.sh",
        metadata=about("Base address of Mode Test.", form=Form.HTTPS_URL, required=True),
    )
    version_header: str = attrs.field(
        default="Sdk-Version",
        metadata=about(
            "Name of the header that carries ApiVersion.",
            form=Form.HEADER,
            required=True,
        ),
    )
    organization_header: str = attrs.field(
        default="Polar-Organization",
        metadata=about(
            "Name of the header that carries a call's organization_id, for tokens of several "
            "organizations.",
            form=Form.HEADER,
            required=True,
        ),
    )
    # False until the upstream says so: repeating a write that it has executed charges a customer
    # twice.
    honours_idempotency_keys: bool = attrs.field(
        default=False,
        metadata=about(
            "The upstream executes one write only for each idempotency key, so writes whose answer "
            "was lost are repeated like reads."
        ),
    )
    requests_per_minute: int | None = attrs.field(
        default=None,
        metadata=about(
            "Rate that the client holds its attempts to.",
            minimum=1,
            unit="per minute",
            default_note="only what the upstream's answers ask for",
            live=True,
        ),
    )


@attrs.frozen(kw_only=True)
class ResilienceOptions:
    """Circuit breaker and hedging of the client."""

    # In a row, so that a few failures among many successes do not stop every call.
    circuit_breaker_failure_threshold: int = attrs.field(
        default=5,
        metadata=about("Consecutive failures before the circuit opens.", minimum=1),
    )
    circuit_breaker_sampling_seconds: int = attrs.field(
        default=30,
        metadata=about("Window in which failures are counted.", minimum=1, unit="seconds"),
    )
    circuit_breaker_break_seconds: int = attrs.field(
        default=15,
        metadata=about(
            "Time the circuit stays open before probe requests are allowed.",
            minimum=1,
            unit="seconds",
        ),
    )
    # Reads alone: a duplicate of a write would be executed twice.
    hedge_after_ms: int | None = attrs.field(
        default=None,
        metadata=about(
            "A duplicate GET or HEAD is sent after this time; never for other methods.",
            minimum=1,
            unit="milliseconds",
            default_note="disabled",
            live=True,
        ),
    )


@attrs.frozen(kw_only=True)
class ConnectionOptions:
    """The client's connection pool."""

    max_connections_per_server: int = attrs.field(
        default=100,
        metadata=about("Cap on simultaneous TCP connections per host.", minimum=1),
    )
    # A connection that is kept for ever never sees a change of the name's addresses.
    pooled_connection_lifetime_minutes: int = attrs.field(
        default=15,
        metadata=about("Forced reconnection interval.", minimum=1, unit="minutes"),
    )
    pooled_connection_idle_timeout_minutes: int = attrs.field(
        default=2,
        metadata=about("Idle connections are closed after this period.", minimum=1, unit="minutes"),
    )
    enable_http2: bool = attrs.field(default=True, metadata=about("Use HTTP/2 multiplexing."))
    enable_http3: bool = attrs.field(
        default=False, metadata=about("Use HTTP/3; experimental, opt-in.")
    )
    enable_multiple_http2_connections: bool = attrs.field(
        default=True,
        metadata=about("Allow several simultaneous HTTP/2 connections."),
    )
    # Whoever may set a variable would else choose the way of the access token (ADR 28).
    proxy_url: str | None = attrs.field(
        default=None,
        metadata=about(
            "HTTP proxy that opens a tunnel to the upstream for every connection (CONNECT); "
            "HTTPS_PROXY is not followed.",
            form=Form.URL,
            default_note="no proxy",
        ),
    )
    # Not in ProxyUrl: URLs end up in logs and messages.
    proxy_credentials_env_var: str = attrs.field(
        default="SDK_PROXY_CREDENTIALS",
        metadata=about(
            "Variable with user:password for the proxy, if it wants any.",
            form=Form.ENV_VAR,
            required=True,
        ),
    )
    # In place of the public authorities and not beside them: whoever names one trusts no other.
    ca_file: str | None = attrs.field(
        default=None,
        metadata=about(
            "PEM file with the authorities whose certificates the upstream may have, and no "
            "others.",
            default_note="the public ones, or those of SSL_CERT_FILE",
        ),
    )
    client_cert_file: str | None = attrs.field(
        default=None,
        metadata=about(
            "PEM certificate that the client shows to the upstream. Needs ClientKeyFile.",
            default_note="none",
        ),
    )
    client_key_file: str | None = attrs.field(
        default=None,
        metadata=about(
            "PEM private key of ClientCertFile, without a passphrase.",
            default_note="none",
        ),
    )
    # 600 KiB of gzip once became 600 MiB in the process that receives the payments (ADR 29).
    max_answer_bytes: int = attrs.field(
        default=33_554_432,
        metadata=about(
            "Largest body of an answer that is taken into memory, decompressed.",
            minimum=1024,
            unit="bytes",
        ),
    )
