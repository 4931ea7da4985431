"""The client's settings: origins, breaker and hedging, connection pool. Pure."""

from typing import Annotated

from ..fields import Form, Section, about


class UpstreamOptions(Section, frozen=True, kw_only=True):
    """Addresses of the upstream API."""

    production_url: Annotated[
        str, about("Base address of Mode Live.", form=Form.HTTPS_URL, required=True)
    ] = "https://api.polar.sh"
    sandbox_url: Annotated[
        str, about("Base address of Mode Test.", form=Form.HTTPS_URL, required=True)
    ] = "https://sandbox-api.polar.sh"
    version_header: Annotated[
        str, about("Name of the header that carries ApiVersion.", form=Form.HEADER, required=True)
    ] = "Sdk-Version"
    organization_header: Annotated[
        str,
        about(
            "Name of the header that carries a call's organization_id, for tokens of several "
            "organizations.",
            form=Form.HEADER,
            required=True,
        ),
    ] = "Polar-Organization"
    # False until the upstream documents it: repeating a write that was executed charges a customer
    # twice.
    honours_idempotency_keys: Annotated[
        bool,
        about(
            "The upstream executes one write per idempotency key, so writes whose answer "
            "was lost are repeated like reads."
        ),
    ] = False
    requests_per_minute: Annotated[
        int | None,
        about(
            "Rate limit of the client's attempts.",
            minimum=1,
            unit="per minute",
            default_note="only the limits that the upstream's answers request",
            live=True,
        ),
    ] = None


class ResilienceOptions(Section, frozen=True, kw_only=True):
    """Circuit breaker and hedging of the client."""

    # Consecutive, so that a few failures among many successes do not stop every call.
    circuit_breaker_failure_threshold: Annotated[
        int, about("Consecutive failures before the circuit opens.", minimum=1)
    ] = 5
    circuit_breaker_sampling_seconds: Annotated[
        int, about("Window in which failures are counted.", minimum=1, unit="seconds")
    ] = 30
    circuit_breaker_break_seconds: Annotated[
        int,
        about(
            "Time the circuit stays open before probe requests are allowed.",
            minimum=1,
            unit="seconds",
        ),
    ] = 15
    # Reads only: a duplicated write would be executed twice.
    hedge_after_ms: Annotated[
        int | None,
        about(
            "Send a duplicate GET or HEAD after this time; other methods are never duplicated.",
            minimum=1,
            unit="milliseconds",
            default_note="disabled",
            live=True,
        ),
    ] = None


class ConnectionOptions(Section, frozen=True, kw_only=True):
    """The client's connection pool."""

    max_connections_per_server: Annotated[
        int, about("Cap on simultaneous TCP connections per host.", minimum=1)
    ] = 100
    # A connection kept forever never sees a change of the name's addresses.
    pooled_connection_lifetime_minutes: Annotated[
        int, about("Forced reconnection interval.", minimum=1, unit="minutes")
    ] = 15
    pooled_connection_idle_timeout_minutes: Annotated[
        int, about("Idle connections are closed after this period.", minimum=1, unit="minutes")
    ] = 2
    enable_http2: Annotated[bool, about("Use HTTP/2 multiplexing.")] = True
    enable_http3: Annotated[bool, about("Use HTTP/3; experimental, opt-in.")] = False
    enable_multiple_http2_connections: Annotated[
        bool, about("Allow several simultaneous HTTP/2 connections.")
    ] = True
    # Otherwise anyone who may set a variable could redirect the access token (ADR 28).
    proxy_url: Annotated[
        str | None,
        about(
            "HTTP proxy that opens a tunnel to the upstream for every connection (CONNECT); "
            "HTTPS_PROXY is not followed.",
            form=Form.URL,
            default_note="no proxy",
        ),
    ] = None
    # Not in ProxyUrl: URLs end up in logs and messages.
    proxy_credentials_env_var: Annotated[
        str,
        about(
            "Variable with user:password for the proxy, if it requires them.",
            form=Form.ENV_VAR,
            required=True,
        ),
    ] = "SDK_PROXY_CREDENTIALS"
    # Replaces the public authorities: a user who names one trusts no other.
    ca_file: Annotated[
        str | None,
        about(
            "PEM file with the only certificate authorities that are trusted for the upstream.",
            default_note="the public ones, or those of SSL_CERT_FILE",
        ),
    ] = None
    client_cert_file: Annotated[
        str | None,
        about(
            "PEM certificate that the client shows to the upstream. Needs ClientKeyFile.",
            default_note="none",
        ),
    ] = None
    client_key_file: Annotated[
        str | None,
        about("PEM private key of ClientCertFile, without a passphrase.", default_note="none"),
    ] = None
    # 600 KiB of gzip can expand to 600 MiB in the process that receives the payments (ADR 29).
    max_answer_bytes: Annotated[
        int,
        about(
            "Largest body of an answer, decompressed; it is read into memory.",
            minimum=1024,
            unit="bytes",
        ),
    ] = 33_554_432
