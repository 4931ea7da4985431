"""``runtime.json`` in the data directory: the address of the running receiver.

``events trigger`` and ``doctor`` read it, so they need no address as an argument. It is not a lock,
because a process that was killed leaves it behind.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from ..base.logs import get_logger
from ..base.private_files import write_private
from ..config import Settings
from ..webhooks.signed_request import own_url

_log = get_logger("runtime")

FILE_NAME = "runtime.json"

#: The environment variable of a worker process: the descriptor of the socket to its supervisor.
SUPERVISOR_VARIABLE = "SDK_TRIO_SUPERVISOR"

#: The sources of the secret that ``events trigger`` signs with: the file of ``dev``, the settings.
DEV_SECRET = "dev-secret"
SETTINGS_SECRET = "settings"


class Presence(msgspec.Struct, frozen=True):
    """A running receiver: its ``address``, the ``url`` of deliveries, its process, its secret.

    Address and URL are empty while the server is another program's and has not reported them.
    """

    address: str
    url: str
    pid: int
    secret: str


def announce(directory: str | os.PathLike[str], presence: Presence) -> Path:
    """Write the file, and return its path.

    Raises:
        OSError: it cannot be written.
    """
    file = Path(directory) / FILE_NAME
    # Replaced atomically, so that a command never reads half of it.
    write_private(file, json.dumps(msgspec.structs.asdict(presence)) + "\n")
    return file


@contextmanager
def announced(directory: str | os.PathLike[str], presence: Presence) -> Iterator[None]:
    """Keep the file during the block; its directory must exist.

    Raises:
        OSError: it cannot be written.
    """
    file = announce(directory, presence)
    try:
        yield
    finally:
        # The directory may be gone, and a stop must not fail because of that. Readers recognise a
        # file that was left behind by its process id.
        with suppress(OSError):
            file.unlink()


class Announcement:
    """The presence file of a runtime in this process. Disk errors are logged as warnings."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._announced = False

    @contextmanager
    def kept(self, address: str) -> Iterator[None]:
        """Keep the file during the block; ``address`` is empty while it is unknown."""
        with ExitStack() as stack:
            with self._errors_logged():
                stack.enter_context(announced(self._settings.storage.path, self._presence(address)))
                self._announced = True
            yield

    def write(self, address: str) -> None:
        """Replace the file with one that has the ``address`` of another program's server."""
        if not self._announced:
            return
        with self._errors_logged():
            announce(self._settings.storage.path, self._presence(address))

    def _presence(self, address: str) -> Presence:
        url = own_url(address, self._settings.webhooks.path) if address else ""
        return Presence(address, url, os.getpid(), SETTINGS_SECRET)

    @contextmanager
    def _errors_logged(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            _log.warning("runtime.not_announced", error=str(error), hint="commands need --url")
