"""The service manager's environment variables and notification messages. Pure.

The variables are those of sd_notify(3), sd_watchdog_enabled(3) and sd_listen_fds(3). They address
one process: its reader removes them from the environment, so that child processes do not inherit
them and answer in its place.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from ..config import Settings
from ..config.table import full_key
from ..errors import OptionsValidationError, Problem

#: Every variable that :func:`read_environment` understands.
VARIABLES: Final = (
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
)

#: The number of the first socket that is passed; the others follow without a gap.
FIRST_DESCRIPTOR: Final = 3

#: A larger number of sockets is a mistake, and is read as none.
_MOST_SOCKETS = 1024

_MICROSECONDS = 1_000_000

#: sd_listen_fds_with_names(3): the name of sockets whose unit gives none.
_UNNAMED = "unknown"


@attrs.frozen
class ServiceEnvironment:
    """The requests of the service manager, and the sockets that it passes.

    ``notify_socket`` is the path of its socket, or begins with @ for an abstract one; None: it
    wants no messages. ``watchdog_seconds`` is the time within which it expects a sign of life;
    None: it expects none. ``sockets`` are the names of the inherited sockets, in the order of their
    numbers.
    """

    notify_socket: str | None = None
    watchdog_seconds: float | None = None
    sockets: tuple[str, ...] = ()


def read_environment(environ: Mapping[str, str], *, pid: int) -> ServiceEnvironment:
    """Read the variables for the process ``pid``; malformed ones count as unset.

    ``LISTEN_PID`` must name this process. ``WATCHDOG_PID`` must name it or be unset.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    watchdog = _positive(environ.get("WATCHDOG_USEC"))
    if environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        watchdog = None
    count = _positive(environ.get("LISTEN_FDS")) or 0
    if environ.get("LISTEN_PID") != str(pid) or count > _MOST_SOCKETS:
        count = 0
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    names += [_UNNAMED] * count
    return ServiceEnvironment(
        notify_socket=address if address[:1] in ("/", "@") and len(address) > 1 else None,
        watchdog_seconds=None if watchdog is None else watchdog / _MICROSECONDS,
        sockets=tuple(name or _UNNAMED for name in names[:count]),
    )


def with_inherited_sockets(settings: Settings, sockets: Sequence[str]) -> Settings:
    """Return the settings with ``fd:NAME`` replaced by the numbers of the sockets of that name.

    One name may stand for several sockets of the receiver, and for one of the admin address.

    Raises:
        OptionsValidationError: no socket has the name, or several have the name of the admin
            address.
    """
    problems: list[Problem] = []
    server_key, admin_key = full_key(("Server", "Bind")), full_key(("Admin", "Bind"))
    bind: list[str] = []
    for address in settings.server.bind:
        bind += _resolved(server_key, address, sockets, problems)
    admin = settings.admin.bind
    if settings.admin.enabled:
        found = _resolved(admin_key, admin, sockets, problems)
        if len(found) > 1:
            message = f"is one address, but the service manager has passed {len(found)} sockets"
            problems.append(Problem(admin_key, f"{message} of the name {_name(admin)!r}"))
        admin = found[0] if found else admin
    if problems:
        raise OptionsValidationError(problems)
    return attrs.evolve(
        settings,
        server=attrs.evolve(settings.server, bind=tuple(bind)),
        admin=attrs.evolve(settings.admin, bind=admin),
    )


def ready(status: str) -> str:
    """Return the message that the service has started, or has finished a reload."""
    return f"READY=1\n{status_line(status)}"


def reloading(monotonic_seconds: float) -> str:
    """Return the message that a reload begins, at that time of the system's monotonic clock."""
    return f"RELOADING=1\nMONOTONIC_USEC={_usec(monotonic_seconds)}"


def stopping(status: str) -> str:
    """Return the message that the service begins to stop."""
    return f"STOPPING=1\n{status_line(status)}"


def status_line(status: str) -> str:
    """Return the message that shows ``status`` in ``systemctl status``."""
    return f"STATUS={' '.join(status.split())}"


def extend_timeout(seconds: float) -> str:
    """Return the message that asks for so much time from now on, to start or to stop."""
    return f"EXTEND_TIMEOUT_USEC={_usec(seconds)}"


WATCHDOG: Final = "WATCHDOG=1"


def _resolved(key: str, address: str, sockets: Sequence[str], problems: list[Problem]) -> list[str]:
    name = _name(address)
    if name is None:
        return [address]
    found = [
        f"fd:{number}" for number, other in enumerate(sockets, FIRST_DESCRIPTOR) if other == name
    ]
    if not found:
        passed = f"only {', '.join(map(repr, sockets))}" if sockets else "none at all"
        problems.append(
            Problem(
                key,
                f"the service manager has passed no socket of the name {name!r}, {passed}: start "
                "the service through its socket unit, and name it there (FileDescriptorName=)",
            )
        )
    return found


def _name(address: str) -> str | None:
    """Return the name in ``fd:NAME``; None of every other address."""
    name = address.removeprefix("fd:")
    return None if name == address or name.isdigit() else name


def _positive(text: str | None) -> int | None:
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 18:
        return None
    return int(text) or None


def _usec(seconds: float) -> int:
    return int(seconds * _MICROSECONDS)
