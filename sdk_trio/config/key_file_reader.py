"""Notices that files with secrets or certificates hold something else than before. Does I/O.

Orchestrators replace such files without telling anybody: Kubernetes swaps a symbolic link, others
rename a new file over the old one. Looking costs one ``stat`` a file; only a file that is another
one, or was written, is read, and only other content counts.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import attrs

from .loader import SECRETS_DIRECTORY
from .options import Settings
from .sources import CREDENTIALS_DIRECTORY_VARIABLE, is_key_file

#: A file with secrets or certificates is smaller; of a larger one its beginning is compared.
MAX_FILE_BYTES = 1024 * 1024


def key_directories(
    environ: Mapping[str, str], secrets_directory: str = SECRETS_DIRECTORY
) -> tuple[Path, ...]:
    """Return the directories with one file per key that settings are read from."""
    credentials = environ.get(CREDENTIALS_DIRECTORY_VARIABLE)
    return (Path(secrets_directory), *([Path(credentials)] if credentials else []))


def key_files(settings: Settings) -> tuple[Path, ...]:
    """Return the files that the settings name and a running receiver can take anew."""
    named = (settings.server.cert_file, settings.server.key_file)
    return tuple(Path(path) for path in named if path is not None)


@attrs.frozen
class _Seen:
    """What a file was at the last look: ``identity`` tells cheaply whether it may have changed."""

    identity: tuple[int, ...]
    digest: bytes = attrs.field(repr=False)


class KeyFileReader:
    """Compares files with what they were at the last look. Not for several threads at once."""

    def __init__(self) -> None:
        self._seen: dict[Path, _Seen | None] = {}
        self._places: frozenset[Path] = frozenset()

    def look(self, places: Iterable[Path]) -> tuple[str, ...]:
        """Return the files whose content is another than at the last look, with new and lost ones.

        Args:
            places: files, and directories of key files. What lies in a place that was not looked
                at before has not changed.
        """
        places = frozenset(places)
        known = {place for place in places if place in self._places}
        found = {path: self._see(path) for place in places for path in _files_of(place)}
        changed = [
            path
            for path in found.keys() | self._seen.keys()
            if (path in known or path.parent in known)
            and _digest(found.get(path)) != _digest(self._seen.get(path))
        ]
        self._seen = found
        self._places = places
        return tuple(sorted(map(str, changed)))

    def _see(self, path: Path) -> _Seen | None:
        """Return what the file is now; None if it cannot be read."""
        try:
            status = path.stat()
            identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            before = self._seen.get(path)
            if before is not None and before.identity == identity:
                return before
            with path.open("rb") as file:
                return _Seen(identity, hashlib.sha256(file.read(MAX_FILE_BYTES)).digest())
        except (OSError, ValueError):
            return None


def _digest(seen: _Seen | None) -> bytes | None:
    return None if seen is None else seen.digest


def _files_of(place: Path) -> Iterator[Path]:
    try:
        names = os.listdir(place)
    except NotADirectoryError:
        yield place
    except (OSError, ValueError):
        return
    else:
        for name in names:
            path = place / name
            if is_key_file(name) and not path.is_dir():
                yield path
