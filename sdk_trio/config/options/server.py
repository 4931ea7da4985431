"""The settings of servers, store and logs. Pure."""

from typing import Annotated

from ..fields import Form, ForwardedHeaders, LogFormat, LogLevel, Section, StorageBackend, about


class ServerOptions(Section, frozen=True, kw_only=True):
    """The receiver's server."""

    # Loopback by default: listening publicly is a decision, and needs TLS or a proxy.
    bind: Annotated[
        tuple[str, ...],
        about(
            "Addresses of the receiver. Only this user can connect to unix:PATH; with "
            "?mode=0660 after its path, its group can as well.",
            form=Form.BIND,
            required=True,
        ),
    ] = ("127.0.0.1:8080",)
    cert_file: Annotated[
        str | None,
        about(
            "PEM certificate chain: TLS ends here. Needs KeyFile.", default_note="no TLS", live=True
        ),
    ] = None
    key_file: Annotated[
        str | None, about("PEM private key. Needs CertFile.", default_note="no TLS", live=True)
    ] = None
    # Empty by default: a trusted peer chooses the address and scheme that count for a request.
    trusted_proxies: Annotated[
        tuple[str, ...],
        about(
            "Peers whose forwarding headers are trusted; unix means every peer of a Unix socket.",
            form=Form.PROXY,
            live=True,
        ),
    ] = ()
    # A proxy that sets only one family passes on the sender's other one as its own (ADR 27).
    forwarded_headers: Annotated[
        ForwardedHeaders,
        about(
            "Which headers of a trusted proxy are read: Forwarded, XForwarded (X-Forwarded-For and "
            "X-Forwarded-Proto), or Auto: either; if both are present, they must agree, or the "
            "request counts as not secure.",
            live=True,
        ),
    ] = ForwardedHeaders.AUTO
    # An inline delivery costs 93 us of CPU on it, and 388 us on hypercorn (ADR 12).
    fast_path: Annotated[
        bool, about("Serve HTTP/1.1 with the project's own server; false: with hypercorn.")
    ] = True
    # One address with idle connections could fill the connection limit; 470 once did (ADR 26).
    max_connections_per_address: Annotated[
        int,
        about(
            "Connection limit per source address (IPv6: per /64) that is not a trusted proxy, "
            "at most half of all; further ones are answered 503.",
            between=(1, 1_000_000),
        ),
    ] = 256
    # Bodies not verified yet: 400 unfinished ones once took 400 MiB (ADR 26).
    max_body_bytes_in_flight: Annotated[
        int,
        about(
            "Bytes of unverified bodies of all connections together; above it, the "
            "largest of them is answered 503.",
            between=(1024, 2**31 - 1),
            unit="bytes",
        ),
    ] = 67_108_864
    # One, because SQLite has one writer at a time, and most hosts need no second core.
    processes: Annotated[
        int,
        about(
            "Receiver processes that share the sockets and the store; 0: one per processor. "
            "Counts and limits of other settings apply to each process.",
            between=(0, 256),
        ),
    ] = 1
    shutdown_delay_seconds: Annotated[
        float,
        about(
            "Time between the stop signal and the end of accepting: readiness fails first, so that "
            "load balancers send traffic elsewhere before an address closes.",
            between=(0, 3600),
            unit="seconds",
            live=True,
        ),
    ] = 0.0
    # Polling, because kernel notification misses network file systems and links swapped above the
    # file (ADR 19).
    key_file_poll_seconds: Annotated[
        float,
        about(
            "How often run checks key files and certificates for changes; 0: never.",
            between=(0, 86_400),
            unit="seconds",
            live=True,
        ),
    ] = 5.0


class AdminOptions(Section, frozen=True, kw_only=True):
    """The admin address: probes, metrics, console."""

    enabled: Annotated[bool, about("Serve probes, metrics, console, its API and its feed.")] = True
    # Loopback, because it uses plain HTTP: elsewhere its token could be read in transit.
    bind: Annotated[str, about("The admin address.", form=Form.BIND, required=True)] = (
        "127.0.0.1:8081"
    )
    # The name of a variable: a token in a settings file would be copied with the file.
    token_env_var: Annotated[
        str,
        about(
            "Variable with the admin token; when unset, one is generated in the data directory.",
            form=Form.ENV_VAR,
            required=True,
        ),
    ] = "SDK_ADMIN_TOKEN"
    read_only: Annotated[
        bool, about("The console is read-only and gets no signatures.", live=True)
    ] = False
    # A web page can point its own host name to 127.0.0.1, and metrics on loopback need no token
    # (ADR 18). IP addresses cannot be redirected, so they are allowed.
    allowed_hosts: Annotated[
        tuple[str, ...],
        about(
            "Further host names of the admin address, besides IP addresses, localhost "
            "and the host of Bind.",
            form=Form.HOST,
            live=True,
        ),
    ] = ()


class RelayOptions(Section, frozen=True, kw_only=True):
    """The relay for local development."""

    enabled: Annotated[
        bool,
        about("Allow the listen command to connect from other machines, with the admin token."),
    ] = False


class StorageOptions(Section, frozen=True, kw_only=True):
    """The store."""

    backend: Annotated[StorageBackend, about("The storage backend.")] = StorageBackend.SQLITE
    path: Annotated[
        str,
        about(
            "Data directory; the default is the STATE_DIRECTORY variable, if set.",
            required=True,
        ),
    ] = "sdk-data"
    # A connection string contains a password.
    postgres_dsn_env_var: Annotated[
        str,
        about(
            "Variable with the connection string of Backend Postgres.",
            form=Form.ENV_VAR,
            required=True,
        ),
    ] = "SDK_POSTGRES_DSN"
    postgres_schema: Annotated[
        str,
        about(
            "Schema of Backend Postgres, used for nothing else.", form=Form.SCHEMA, required=True
        ),
    ] = "sdk_trio"


class LoggingOptions(Section, frozen=True, kw_only=True):
    """Logging of the command line; an embedding host configures logging itself."""

    level: Annotated[LogLevel, about("The lowest severity that is logged.", live=True)] = (
        LogLevel.INFO
    )
    format: Annotated[
        LogFormat, about("Auto is readable text on a terminal and JSON elsewhere.", live=True)
    ] = LogFormat.AUTO
