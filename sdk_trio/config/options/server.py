"""The settings of servers, store and logs. Pure."""

from typing import Annotated

from ..fields import Form, ForwardedHeaders, LogFormat, LogLevel, Section, StorageBackend, about


class ServerOptions(Section, frozen=True, kw_only=True):
    """The receiver's server."""

    # Loopback by default: an address that others can reach is a decision, and needs TLS or a proxy.
    bind: Annotated[
        tuple[str, ...],
        about(
            "Addresses of the receiver. A socket of unix:PATH is this user's alone, and with "
            "?mode=0660 behind its path its group's, too.",
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
    # Empty by default: whoever is believed chooses the address and the scheme that a request is
    # taken for.
    trusted_proxies: Annotated[
        tuple[str, ...],
        about(
            "Peers whose forwarding headers are believed; unix stands for every peer of a Unix "
            "socket.",
            form=Form.PROXY,
            live=True,
        ),
    ] = ()
    # A proxy that sets one family alone passes the sender's other one on as its own word (ADR 27).
    forwarded_headers: Annotated[
        ForwardedHeaders,
        about(
            "Which headers of a trusted proxy are read: Forwarded, XForwarded (X-Forwarded-For and "
            "X-Forwarded-Proto), or Auto: either; where both came, they must agree, else the "
            "request counts as not secure.",
            live=True,
        ),
    ] = ForwardedHeaders.AUTO
    # An inline delivery costs 93 us of CPU on it, and 388 us on hypercorn (ADR 12).
    fast_path: Annotated[
        bool, about("Serve HTTP/1.1 on the project's own connection class; false: on hypercorn.")
    ] = True
    # One address with idle connections could take all places; 470 of them once did (ADR 26).
    max_connections_per_address: Annotated[
        int,
        about(
            "Open connections of one source address (IPv6: of one /64) that is no trusted proxy, "
            "half of all at most; further ones are answered 503.",
            between=(1, 1_000_000),
        ),
    ] = 256
    # Bodies that nobody has signed yet: 400 unfinished ones once took 400 MiB (ADR 26).
    max_body_bytes_in_flight: Annotated[
        int,
        about(
            "Bytes of bodies that are not verified yet, of all connections together; over it the "
            "largest of them is answered 503.",
            between=(1024, 2**31 - 1),
            unit="bytes",
        ),
    ] = 67_108_864
    # One, because the store in SQLite has one writer at a time, and most hosts need no second core.
    processes: Annotated[
        int,
        about(
            "Receiver processes that share the sockets and the store; 0: one a processor. What is "
            "counted or bounded by other settings counts for each of them.",
            between=(0, 256),
        ),
    ] = 1
    shutdown_delay_seconds: Annotated[
        float,
        about(
            "Between the signal to stop and the end of accepting: readiness fails first, so that "
            "load balancers send elsewhere before an address closes.",
            between=(0, 3600),
            unit="seconds",
            live=True,
        ),
    ] = 0.0
    # A poll, because notification by the kernel sees neither network file systems nor a link
    # that is swapped above the file (ADR 19).
    key_file_poll_seconds: Annotated[
        float,
        about(
            "How often run looks whether key files and certificates have changed; 0: never.",
            between=(0, 86_400),
            unit="seconds",
            live=True,
        ),
    ] = 5.0


class AdminOptions(Section, frozen=True, kw_only=True):
    """The admin address: probes, metrics, console."""

    enabled: Annotated[bool, about("Serve probes, metrics, console, its API and its feed.")] = True
    # Loopback, because it speaks plain HTTP: elsewhere its token could be read on the way.
    bind: Annotated[str, about("The admin address.", form=Form.BIND, required=True)] = (
        "127.0.0.1:8081"
    )
    # The name of a variable: a token in a settings file would be copied with it.
    token_env_var: Annotated[
        str,
        about(
            "Variable with the admin token; when unset, one is generated into the data directory.",
            form=Form.ENV_VAR,
            required=True,
        ),
    ] = "SDK_ADMIN_TOKEN"
    read_only: Annotated[
        bool, about("The console shows, changes nothing and gets no signatures.", live=True)
    ] = False
    # A web page can point a name of its own at 127.0.0.1, and metrics on loopback need no token
    # (ADR 18). IP addresses cannot be pointed elsewhere, so they pass.
    allowed_hosts: Annotated[
        tuple[str, ...],
        about(
            "Further names by which the admin address is reached, beside IP addresses, localhost "
            "and the host of Bind.",
            form=Form.HOST,
            live=True,
        ),
    ] = ()


class RelayOptions(Section, frozen=True, kw_only=True):
    """The relay for local development."""

    enabled: Annotated[
        bool, about("Let the listen command connect from elsewhere; needs the admin token.")
    ] = False


class StorageOptions(Section, frozen=True, kw_only=True):
    """The store."""

    backend: Annotated[StorageBackend, about("The kind of store.")] = StorageBackend.SQLITE
    path: Annotated[
        str,
        about(
            "Data directory; its default is the STATE_DIRECTORY variable where that is set.",
            required=True,
        ),
    ] = "sdk-data"
    # A connection string holds a password.
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
            "Schema of Backend Postgres, which holds nothing else.", form=Form.SCHEMA, required=True
        ),
    ] = "sdk_trio"


class LoggingOptions(Section, frozen=True, kw_only=True):
    """Logging of the command line; an embedding host configures logging itself."""

    level: Annotated[LogLevel, about("The least severe events that are written.", live=True)] = (
        LogLevel.INFO
    )
    format: Annotated[
        LogFormat, about("Auto is readable on a terminal and JSON elsewhere.", live=True)
    ] = LogFormat.AUTO
