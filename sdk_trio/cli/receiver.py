"""``runtime.json`` in the data directory: where the running receiver listens.

``events trigger`` reads it, so that it needs no arguments. It is no lock, because a process that
was killed leaves it behind.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs

from ..errors import EXIT_UNAVAILABLE, SdkError
from ..storage.data_directory import read_private, write_private

FILE_NAME = "runtime.json"

#: Who signs what ``events trigger`` sends: the file of the ``dev`` command, or the settings.
DEV_SECRET = "dev-secret"
SETTINGS_SECRET = "settings"


class NobodyThereError(SdkError):
    """No receiver is running on the data directory."""

    exit_code = EXIT_UNAVAILABLE


@attrs.frozen
class Presence:
    """A running receiver: its ``address``, the ``url`` of deliveries, its process, its secret."""

    address: str
    url: str
    pid: int
    secret: str


@contextmanager
def announced(directory: str | os.PathLike[str], presence: Presence) -> Iterator[None]:
    """Keep the file for the length of the block; its directory exists."""
    file = Path(directory) / FILE_NAME
    write_private(file, json.dumps(attrs.asdict(presence)) + "\n")
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()


def find(directory: str | os.PathLike[str]) -> Presence:
    """Return the receiver that runs on the data directory ``directory``.

    Raises:
        NobodyThereError: there is none, or the file was left by a process that has ended.
    """
    file = Path(directory) / FILE_NAME
    try:
        presence = _presence(json.loads(read_private(file)))
    except FileNotFoundError:
        raise NobodyThereError(
            f"no receiver is running on the data directory {file.parent.absolute()}: start one "
            "('dev' in another terminal), name its directory with --set Sdk:Storage:Path=..., or "
            "give its address with --url"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise NobodyThereError(f"{file.absolute()} cannot be read: {error}; use --url") from error
    # The process number may belong to another program by now. A wrong guess costs a refused
    # connection, which the command reports.
    if not _is_alive(presence.pid):
        raise NobodyThereError(
            f"{file.absolute()} was left behind by process {presence.pid}, which has ended: start "
            "the receiver again, or give the address of another one with --url"
        )
    return presence


def _presence(document: Any) -> Presence:
    if not isinstance(document, dict) or not isinstance(document.get("pid"), int):
        raise ValueError("it is no record of a receiver")
    names = ("address", "url", "secret")
    texts = {name: text for name in names if isinstance(text := document.get(name), str)}
    if len(texts) < len(names):
        raise ValueError("it is no record of a receiver")
    return Presence(pid=document["pid"], **texts)


def _is_alive(pid: int) -> bool:
    if os.name != "posix" or pid <= 0:
        # On Windows os.kill with signal 0 does not ask whether a process exists, but ends it.
        return pid > 0
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's
    return True
