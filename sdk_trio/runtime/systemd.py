"""The protocol of the service manager: environment variables and notifications.

The variables are those of sd_notify(3), sd_watchdog_enabled(3) and sd_listen_fds(3). They are meant
for one process, so they are removed from the environment after reading: child processes must not
answer instead. Notifications are sent to the manager's datagram socket, without a library.
"""

import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Final

import msgspec
import trio

from ..base import opener
from ..base.logs import get_logger
from ..config import Settings
from ..errors import OptionsValidationError, Problem, SdkError

#: Every variable that :func:`read_environment` understands.
VARIABLES: Final = (
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
)

#: The descriptor of the first passed socket; the others have the next numbers.
FIRST_DESCRIPTOR: Final = 3

#: A larger number of sockets is an error, and is read as none.
_MOST_SOCKETS = 1024

_MICROSECONDS = 1_000_000

#: sd_listen_fds_with_names(3): the name of sockets whose unit does not set one.
_UNNAMED = "unknown"

WATCHDOG: Final = "WATCHDOG=1"

_log = get_logger("runtime")

#: Time between two reports of a long start or drain, in seconds.
REPORT_SECONDS = 1.0

#: Time that each report asks for, in seconds. It is many times REPORT_SECONDS, because reports are
#: dropped while the manager's queue is full.
EXTENSION_SECONDS = 15.0

#: Time to retry a message that must not be lost while the manager's queue of about ten messages is
#: full, and the time between two tries, in seconds.
PATIENCE_SECONDS = 5.0
RETRY_SECONDS = 0.05


class ServiceEnvironment(msgspec.Struct, frozen=True):
    """The requests of the service manager, and the sockets that it passes.

    ``notify_socket`` is the path of its socket, or begins with @ for an abstract one; None: it
    expects no messages. ``watchdog_seconds`` is the time within which it expects a keep-alive
    message; None: it expects no keep-alive messages. ``sockets`` are the names of the inherited
    sockets, in the order of their descriptors.
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
    # The variables may come from the environment of a parent, whose sockets are not ours
    # (sd_listen_fds(3)).
    if environ.get("LISTEN_PID") != str(pid) or count > _MOST_SOCKETS:
        count = 0
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    # There may be fewer names than sockets.
    names += [_UNNAMED] * count
    return ServiceEnvironment(
        notify_socket=address if address[:1] in ("/", "@") and len(address) > 1 else None,
        watchdog_seconds=None if watchdog is None else watchdog / _MICROSECONDS,
        sockets=tuple(name or _UNNAMED for name in names[:count]),
    )


def with_inherited_sockets(settings: Settings, sockets: Sequence[str]) -> Settings:
    """Return the settings with ``fd:NAME`` replaced by the descriptors of sockets with that name.

    Several sockets of the receiver may have the same name; the admin address has one socket.

    Raises:
        OptionsValidationError: no socket has the name, or several have that of the admin address.
    """
    problems: list[Problem] = []
    server_key, admin_key = "Sdk:Server:Bind", "Sdk:Admin:Bind"
    bind: list[str] = []
    for address in settings.server.bind:
        bind += _resolved(server_key, address, sockets, problems)
    admin = settings.admin.bind
    if settings.admin.enabled:
        found = _resolved(admin_key, admin, sockets, problems)
        if len(found) > 1:
            message = f"is one address, but the service manager passed {len(found)} sockets"
            problems.append(Problem(admin_key, f"{message} with the name {_name(admin)!r}"))
        admin = found[0] if found else admin
    if problems:
        raise OptionsValidationError(problems)
    return msgspec.structs.replace(
        settings,
        server=msgspec.structs.replace(settings.server, bind=tuple(bind)),
        admin=msgspec.structs.replace(settings.admin, bind=admin),
    )


def ready(status: str) -> str:
    """Return the message that the service has started or finished a reload."""
    return f"READY=1\n{status_line(status)}"


def reloading(monotonic_seconds: float) -> str:
    """Return the message that a reload begins; the time is that of CLOCK_MONOTONIC."""
    return f"RELOADING=1\nMONOTONIC_USEC={_usec(monotonic_seconds)}"


def stopping(status: str) -> str:
    """Return the message that the service begins to stop."""
    return f"STOPPING=1\n{status_line(status)}"


def status_line(status: str) -> str:
    """Return the message that shows ``status`` in ``systemctl status``."""
    return f"STATUS={' '.join(status.split())}"


def extend_timeout(seconds: float) -> str:
    """Return the message that extends the timeout for the start or stop, from now on."""
    return f"EXTEND_TIMEOUT_USEC={_usec(seconds)}"


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
                f"the service manager passed no socket with the name {name!r}, {passed}; set "
                "FileDescriptorName= in the socket unit, and start the service through that unit",
            )
        )
    return found


def _name(address: str) -> str | None:
    """Return the name in ``fd:NAME``; None for any other address."""
    name = address.removeprefix("fd:")
    return None if name == address or name.isdigit() else name


def _positive(text: str | None) -> int | None:
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 18:
        return None
    return int(text) or None


def _usec(seconds: float) -> int:
    return int(seconds * _MICROSECONDS)


def claim_environment(environ: MutableMapping[str, str]) -> ServiceEnvironment:
    """Read the service manager's variables, and hide them and the sockets from child processes."""
    found = read_environment(environ, pid=os.getpid())
    for name in VARIABLES:
        environ.pop(name, None)
    for number in range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + len(found.sockets)):
        # If a descriptor is not open, the server reports its setting when it listens.
        with suppress(OSError):
            os.set_inheritable(number, False)
    return found


class SystemdNotifier:
    """Sends messages to the service manager; without one, every call is a no-op.

    A manager that does not read never blocks a delivery. Keep-alive messages and requests for more
    time are dropped at once, other messages after :data:`PATIENCE_SECONDS`.

    Args:
        address: a path, or begins with @ for an abstract socket; None: there is no manager.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address
        if address is not None and address.startswith("@"):
            self._address = f"\0{address[1:]}"
        self._socket: socket.socket | None = None
        self._failure_logged = False
        if self._address is not None:
            self._socket = opener.open_socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            # The manager's queue holds about ten messages; a full one must not block the loop.
            self._socket.setblocking(False)

    @property
    def listened_to(self) -> bool:
        """Whether there is a service manager that wants messages."""
        return self._socket is not None

    def close(self) -> None:
        """Close the socket; later messages are not sent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def ready(self, status: str) -> None:
        """Report that the service has started or finished a reload."""
        await self._deliver(ready(status))

    async def reloading(self) -> None:
        """Report that a reload begins; :meth:`ready` reports its end, even after a failure."""
        if self.listened_to:
            await self._deliver(reloading(time.clock_gettime(time.CLOCK_MONOTONIC)))
        await trio.lowlevel.checkpoint()

    async def stopping(self, status: str) -> None:
        """Report that the service begins to stop."""
        await self._deliver(stopping(status))

    async def show(self, status: str) -> None:
        """Set the text of ``systemctl status``."""
        await self._deliver(status_line(status))

    async def extend(self, status: Callable[[], str], *, at_most: float | None = None) -> None:
        """Ask for more time and report the status every second, until cancelled.

        After ``at_most`` seconds it stops asking, and the manager's own timeout ends the service.
        """
        if not self.listened_to:
            await trio.lowlevel.checkpoint()
            return
        with trio.move_on_after(float("inf") if at_most is None else at_most):
            while True:
                self._send(f"{extend_timeout(EXTENSION_SECONDS)}\n{status_line(status())}")
                await trio.sleep(REPORT_SECONDS)

    async def keep_watchdog(
        self, seconds: float | None, alive: Callable[[], Awaitable[object]]
    ) -> None:
        """Send a keep-alive message twice in every ``seconds``, until cancelled.

        None is sent while the event loop is blocked, or while ``alive``, which asks the store's
        thread, does not return: a restart fixes both. A store that answers with an error is alive:
        a restart would not fix a full disk, and readiness reports it.
        """
        if not self.listened_to or seconds is None:
            await trio.lowlevel.checkpoint()
            return
        answered = True
        while True:
            # Half the time, as sd_watchdog_enabled(3) recommends.
            next_message = trio.current_time() + seconds / 2
            with trio.move_on_after(seconds / 2) as waiting:
                try:
                    await alive()
                except SdkError:
                    await trio.lowlevel.checkpoint()
            if not waiting.cancelled_caught:
                self._send(WATCHDOG)
            elif answered:
                _log.error("runtime.store_silent", seconds=seconds / 2)
            answered = not waiting.cancelled_caught
            await trio.sleep_until(next_message)

    async def _deliver(self, message: str) -> None:
        """Send a message that must not be lost; while the manager's queue is full, retry."""
        with trio.move_on_after(PATIENCE_SECONDS):
            while not self._send(message):  # noqa: ASYNC110 - the kernel reports no free slot
                await trio.sleep(RETRY_SECONDS)

    def _send(self, message: str) -> bool:
        """Send a message without waiting; return False if the queue is full."""
        if self._socket is None or self._address is None:
            return True
        try:
            self._socket.sendto(message.encode(), self._address)
        except BlockingIOError:
            return False
        except OSError as error:
            if not self._failure_logged:
                self._failure_logged = True
                _log.warning("runtime.notify_failed", error=error.strerror or str(error))
        return True
