"""``runtime.json`` in the data directory, which says where the running receiver listens.

Commands read it, so that ``events trigger`` and ``doctor`` need no address, whether the runtime is
a daemon or a part of another program. It is no lock, because a process that was killed leaves it
behind.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from ..base.private_files import write_private

FILE_NAME = "runtime.json"

#: The variable by which a process of several is begun: the descriptor that leads to its supervisor.
SUPERVISOR_VARIABLE = "SDK_TRIO_SUPERVISOR"

#: The place of the secret that ``events trigger`` signs with: the file of ``dev``, or the settings.
DEV_SECRET = "dev-secret"
SETTINGS_SECRET = "settings"


class Presence(msgspec.Struct, frozen=True):
    """A running receiver: its ``address``, the ``url`` of deliveries, its process, its secret.

    Address and URL are empty where a server of somebody else's has not told them yet.
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
    # Replaced whole, so that a command never reads half of it.
    write_private(file, json.dumps(msgspec.structs.asdict(presence)) + "\n")
    return file


@contextmanager
def announced(directory: str | os.PathLike[str], presence: Presence) -> Iterator[None]:
    """Keep the file for the length of the block; its directory exists.

    Raises:
        OSError: it cannot be written.
    """
    file = announce(directory, presence)
    try:
        yield
    finally:
        # The directory may be gone, and a stop must not fail by that; a file that is left behind is
        # recognised by its process.
        with suppress(OSError):
            file.unlink()
