"""``health``: asks a running daemon for its status, for containers without another HTTP client.

A container's health check has to be a program in the image that exits with a status.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from urllib.parse import urlsplit

from ..errors import EXIT_FAILURE, EXIT_UNAVAILABLE, SdkError
from .parse import UsageError, describing

if not describing():
    import socket
    from http.client import HTTPConnection, HTTPException, HTTPSConnection

    from ..config import Settings
    from ..config.text_formats import split_unix
    from ..webhooks.signed_request import own_url
    from .settings import read
    from .terminal import print_text

LIVE = "/livez"
READY = "/readyz"

#: How long the daemon may take to answer, in seconds: less than probes usually wait.
ANSWER_SECONDS = 3.0


class SilentError(SdkError):
    """The admin address does not answer."""

    exit_code = EXIT_UNAVAILABLE


def health_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``health``."""
    parser.add_argument(
        "--ready", action="store_true", help="ask whether it takes deliveries, not only if it lives"
    )
    parser.add_argument(
        "--url", metavar="U", help="the admin address (default: that of the settings)"
    )


def check_health(arguments: Namespace) -> int:
    """Print the status of ``/livez`` or, with ``--ready``, of ``/readyz``; return 0 if it is 200.

    Raises:
        SilentError: there is no answer in time.
        UsageError: the address is unknown or cannot be used.
    """
    path = READY if arguments.ready else LIVE
    url = arguments.url or _admin_address(read(arguments).require())
    status = _ask(url, path)
    print_text(f"{path} {status}")
    return 0 if status == 200 else EXIT_FAILURE


def _admin_address(settings: Settings) -> str:
    admin = settings.admin
    if not admin.enabled:
        raise UsageError("Sdk:Admin:Enabled is false: there is no admin address to ask")
    if admin.bind.startswith("fd:") or admin.bind.endswith(":0"):
        raise UsageError(f"Sdk:Admin:Bind {admin.bind} says no address: give it with --url")
    if admin.bind.startswith("unix:"):
        return f"unix:{split_unix(admin.bind)[0]}"
    return f"http://{admin.bind}"


def _ask(url: str, path: str) -> int:
    connection = _connection(url)
    try:
        if url.startswith("unix:"):
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.settimeout(ANSWER_SECONDS)
            connection.sock.connect(url.removeprefix("unix:"))
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise SilentError(
            f"{url}{path} does not answer: {reason}. Is the daemon running, and is that its "
            "Sdk:Admin:Bind?"
        ) from error
    finally:
        connection.close()


def _connection(url: str) -> HTTPConnection:
    if url.startswith("unix:"):
        return HTTPConnection("localhost", timeout=ANSWER_SECONDS)
    try:
        parts = urlsplit(own_url(url, ""))
        host, port = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https"):
        raise UsageError("--url takes http://HOST:PORT, https://HOST:PORT or unix:PATH")
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    return kind(host, port, timeout=ANSWER_SECONDS)
