"""Find the running receiver by its ``runtime.json``, and implement ``health``.

``health`` queries the admin address, for containers without another HTTP client: their health check
must be a program in the image that exits with a status.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import EXIT_FAILURE, EXIT_UNAVAILABLE, SdkError
from .parse import UsageError, describing

if not describing():
    import socket
    from http.client import HTTPConnection, HTTPException, HTTPSConnection

    import msgspec

    from ..base.private_files import read_private
    from ..config import Settings
    from ..config.fields import split_unix
    from ..runtime.presence import FILE_NAME, Presence
    from ..webhooks.signed_request import own_url
    from .settings import read
    from .terminal import print_text


class NoReceiverError(SdkError):
    """No receiver is running on the data directory."""

    exit_code = EXIT_UNAVAILABLE


def find(directory: str | os.PathLike[str]) -> Presence:
    """Return the receiver that runs on the data directory ``directory``.

    Raises:
        NoReceiverError: there is none, or the file was left by a process that has ended.
    """
    file = Path(directory) / FILE_NAME
    try:
        # Another version may have written it, so it is validated like any input.
        presence = msgspec.json.decode(read_private(file), type=Presence)
    except FileNotFoundError:
        raise NoReceiverError(
            f"no receiver is running on the data directory {file.parent.absolute()}: start one "
            "('dev' in another terminal), name its directory with --set Sdk:Storage:Path=..., or "
            "give its address with --url"
        ) from None
    except (OSError, ValueError, RecursionError, msgspec.DecodeError) as error:
        raise NoReceiverError(
            f"{file.absolute()} cannot be read: {error}; give the receiver's address with --url"
        ) from error
    # The process number may belong to another program by now. A wrong guess costs a refused
    # connection, which the command reports.
    if not _is_alive(presence.pid):
        raise NoReceiverError(
            f"{file.absolute()} was left behind by process {presence.pid}, which has ended: start "
            "the receiver again, or give the address of another one with --url"
        )
    return presence


def reach(directory: str | os.PathLike[str]) -> Presence:
    """Return the receiver that runs on the data directory, including its address.

    Raises:
        NoReceiverError: there is none, or its address is not known.
    """
    presence = find(directory)
    if not presence.url:
        raise NoReceiverError(
            f"the receiver in process {presence.pid} runs inside another server, whose address is "
            "not known before the first request to the receiver: give it with --url "
            "http://HOST:PORT"
        )
    return presence


def _is_alive(pid: int) -> bool:
    if os.name != "posix" or pid <= 0:
        # On Windows os.kill with signal 0 ends a process instead of checking whether it exists.
        return pid > 0
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # the process belongs to another user
    return True


# -- health ------------------------------------------------------------------------------------

LIVE = "/livez"
READY = "/readyz"

#: Timeout for the daemon's answer, in seconds; shorter than the usual timeout of a probe.
ANSWER_SECONDS = 3.0


class NoAnswerError(SdkError):
    """The admin address does not answer."""

    exit_code = EXIT_UNAVAILABLE


def health_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``health``."""
    parser.add_argument(
        "--ready",
        action="store_true",
        help="check whether it accepts deliveries, not only whether it runs",
    )
    parser.add_argument(
        "--url", metavar="U", help="the admin address (default: that of the settings)"
    )


def check_health(arguments: Namespace) -> int:
    """Print the status of ``/livez`` or, with ``--ready``, of ``/readyz``; return 0 if it is 200.

    Raises:
        NoAnswerError: no answer in time.
        UsageError: the address is unknown or cannot be used.
    """
    path = READY if arguments.ready else LIVE
    url = arguments.url or admin_address(read(arguments).require())
    status, _ = fetch(url, path)
    print_text(f"{path} {status}")
    return 0 if status == 200 else EXIT_FAILURE


def admin_address(settings: Settings, *, option: str = "--url") -> str:
    """Return the admin address of the settings.

    Args:
        settings: the settings.
        option: the command-line option that the error message suggests.

    Raises:
        UsageError: the admin address is disabled, or the settings do not contain its port.
    """
    admin = settings.admin
    if not admin.enabled:
        raise UsageError(
            "Sdk:Admin:Enabled is false, so there is no admin address: set it to true, or give the "
            f"address of another receiver with {option}"
        )
    if admin.bind.startswith("fd:") or admin.bind.endswith(":0"):
        # Neither names a port: the service manager opens fd:N, and the system chooses a port for 0.
        raise UsageError(
            f"Sdk:Admin:Bind {admin.bind} does not name a port: give the address with {option}"
        )
    if admin.bind.startswith("unix:"):
        return f"unix:{split_unix(admin.bind)[0]}"
    return f"http://{admin.bind}"


def fetch(url: str, path: str) -> tuple[int, bytes]:
    """Send a GET without a token to an admin address; return the status and body of the answer.

    Raises:
        NoAnswerError: no answer in time.
        UsageError: ``url`` is not a valid address.
    """
    connection = _connection(url)
    try:
        if url.startswith("unix:"):
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.settimeout(ANSWER_SECONDS)
            connection.sock.connect(url.removeprefix("unix:"))
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise NoAnswerError(
            f"{url}{path} does not answer: {reason}. Check that the daemon is running and that "
            "this is its Sdk:Admin:Bind"
        ) from error
    finally:
        connection.close()


def _connection(url: str) -> HTTPConnection:
    if url.startswith("unix:"):
        # fetch() connects the socket itself; the name only fills the Host header.
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
