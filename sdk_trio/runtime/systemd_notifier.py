"""Messages to the service manager, over its datagram socket and without a library."""

import os
import socket
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress

import trio

from ..base.logs import get_logger
from ..errors import SdkError
from . import systemd
from .systemd import FIRST_DESCRIPTOR, ServiceEnvironment

_log = get_logger("runtime")

#: Time between two reports of a long start or drain, in seconds.
REPORT_SECONDS = 1.0

#: Time that each report asks for, in seconds. It is many times REPORT_SECONDS, since reports are
#: dropped while the manager's queue is full.
EXTENSION_SECONDS = 15.0

#: Time for a message that must not get lost to find a place in the manager's queue, which holds
#: about ten, and the time between two tries, in seconds.
PATIENCE_SECONDS = 5.0
RETRY_SECONDS = 0.05


def claim_environment(environ: MutableMapping[str, str]) -> ServiceEnvironment:
    """Read the service manager's variables, and hide them and the sockets from child processes."""
    found = systemd.read_environment(environ, pid=os.getpid())
    for name in systemd.VARIABLES:
        environ.pop(name, None)
    for number in range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + len(found.sockets)):
        # If a descriptor is not open, the server reports it with its setting when it listens.
        with suppress(OSError):
            os.set_inheritable(number, False)
    return found


class SystemdNotifier:
    """Sends messages; without a service manager every call does nothing.

    A manager that does not read never blocks a delivery: signs of life and requests for more time
    are dropped then, other messages after :data:`PATIENCE_SECONDS`.

    ``address`` is a path, or begins with @ for an abstract socket.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address
        if address is not None and address.startswith("@"):
            self._address = f"\0{address[1:]}"
        self._socket: socket.socket | None = None
        self._complained = False
        if self._address is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)

    @property
    def listened_to(self) -> bool:
        """Whether there is a service manager that wants messages."""
        return self._socket is not None

    def close(self) -> None:
        """Close the socket; later messages go nowhere."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def ready(self, status: str) -> None:
        """Say that the service has started, or has finished a reload."""
        await self._tell(systemd.ready(status))

    async def reloading(self) -> None:
        """Say that a reload begins; :meth:`ready` says that it has ended, also after a failure."""
        if self.listened_to:
            await self._tell(systemd.reloading(time.clock_gettime(time.CLOCK_MONOTONIC)))
        await trio.lowlevel.checkpoint()

    async def stopping(self, status: str) -> None:
        """Say that the service begins to stop."""
        await self._tell(systemd.stopping(status))

    async def extend(self, status: Callable[[], str], *, at_most: float | None = None) -> None:
        """Ask for more time and report the status every second, until cancelled.

        ``at_most`` bounds that, in seconds: afterwards the manager's own timeout ends the service.
        """
        if not self.listened_to:
            await trio.lowlevel.checkpoint()
            return
        with trio.move_on_after(float("inf") if at_most is None else at_most):
            while True:
                self._send(
                    f"{systemd.extend_timeout(EXTENSION_SECONDS)}\n{systemd.status_line(status())}"
                )
                await trio.sleep(REPORT_SECONDS)

    async def keep_watchdog(
        self, seconds: float | None, alive: Callable[[], Awaitable[object]]
    ) -> None:
        """Give a sign of life twice in every ``seconds``, until cancelled.

        It gives none while the event loop stands still, nor while ``alive``, which asks the store's
        thread, does not answer: a restart mends both. A store that answers with an error is alive:
        a restart would not mend a full disk, and readiness reports it.
        """
        if not self.listened_to or seconds is None:
            await trio.lowlevel.checkpoint()
            return
        answered = True
        while True:
            next_sign = trio.current_time() + seconds / 2
            with trio.move_on_after(seconds / 2) as waiting:
                try:
                    await alive()
                except SdkError:
                    await trio.lowlevel.checkpoint()
            if not waiting.cancelled_caught:
                self._send(systemd.WATCHDOG)
            elif answered:
                _log.error("runtime.store_silent", seconds=seconds / 2)
            answered = not waiting.cancelled_caught
            await trio.sleep_until(next_sign)

    async def _tell(self, message: str) -> None:
        """Send a message that must not get lost: while the manager's queue is full, try again."""
        with trio.move_on_after(PATIENCE_SECONDS):
            while not self._send(message):  # noqa: ASYNC110 - the kernel tells of no free place
                await trio.sleep(RETRY_SECONDS)
            await trio.lowlevel.checkpoint()

    def _send(self, message: str) -> bool:
        """Send a message if that can be done at once; return False if the queue is full."""
        if self._socket is None or self._address is None:
            return True
        try:
            self._socket.sendto(message.encode(), self._address)
        except BlockingIOError:
            return False
        except OSError as error:
            if not self._complained:
                self._complained = True
                _log.warning("runtime.notify_failed", error=error.strerror or str(error))
        return True
