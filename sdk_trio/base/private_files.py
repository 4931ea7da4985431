"""Directories and files that only this user can access: customers' data and secrets.

A user who can write into such a directory could make this process overwrite any file, by a symbolic
link, or plant a token that it trusts. So such a directory is refused, and its files are opened
without following links. A directory that others can only enter, as systemd and mkdir create it, is
accepted while they can read nothing in it: every file is created for its owner only.
"""

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from ..errors import EXIT_CONFIGURATION, StoreUnavailableError
from .opener import open_file
from .ownership import user_name

_GROUP_OR_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
_ENTERED = stat.S_IXGRP | stat.S_IXOTH

#: The maximum number of readable files that an error names.
_FILES_NAMED = 3

#: The maximum number of bytes read from a private file; tokens and process ids are small.
_LARGEST_PRIVATE = 65_536


class ExposedDirectoryError(StoreUnavailableError):
    """The data directory belongs to another user, or others can write it or read its files."""

    exit_code = EXIT_CONFIGURATION


class ForeignFileError(OSError):
    """A file of the data directory belongs to another user, is a link, or is not a regular file."""


def create_data_directory(path: str | os.PathLike[str]) -> Path:
    """Create ``path`` if it does not exist, for this user only (mode 0700), and return it.

    Raises:
        StoreUnavailableError: it cannot be created, or is not a directory.
        ExposedDirectoryError: others can write it or read its files; it is not changed.
    """
    directory = Path(path)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        # In a call of its own: mkdir(parents=True) ignores the mode for the parents.
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise _not_created(directory, error.strerror) from error
    fault = exposure(directory)
    if fault is not None:
        raise ExposedDirectoryError(f"the data directory {directory} {fault}")
    return directory


def require_usable(path: str | os.PathLike[str]) -> None:
    """Raise the error with which :func:`create_data_directory` would refuse ``path``.

    It changes nothing, and makes no directory.
    """
    directory = Path(path).absolute()
    try:
        if directory.exists():
            if not directory.is_dir():
                raise _not_created(path, "it is not a directory")
            fault = exposure(directory)
            if fault is not None:
                raise ExposedDirectoryError(f"the data directory {path} {fault}")
        else:
            above = next(each for each in directory.parents if each.exists())
            if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
                raise _not_created(path, f"this user cannot write to {above}")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _not_created(path, reason) from error


def _not_created(path: str | os.PathLike[str], reason: str | None) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"the data directory {path} cannot be created ({reason}); create it for this user, or set "
        "Sdk:Storage:Path to a writable directory"
    )


def exposure(directory: Path) -> str | None:
    """Describe who else can use an existing directory and what to do; None: no other user.

    The mode is not corrected automatically: a person should first check the directory for files
    that others may have left.

    Raises:
        OSError: its status cannot be read.
    """
    if os.name != "posix":
        return None
    status = directory.stat()
    if status.st_uid != os.geteuid():
        return (
            f"belongs to the user {user_name(status.st_uid)}, and this is "
            f"{user_name(os.geteuid())}: run this as that user, give the directory to this one "
            "(chown -R), or choose another one (Sdk:Storage:Path, or MultiTenant:FileDb:Directory)"
        )
    mode = f"{stat.S_IMODE(status.st_mode):04o}"
    other = (
        "or choose one below it (Sdk:Storage:Path, or MultiTenant:FileDb:Directory), which is then "
        "made "
    )
    if status.st_mode & _WRITABLE:
        return (
            f"is open to other users, who can write into it (mode {mode}): chmod 0700 "
            f"{directory.absolute()}, after checking it for files that they may have left; "
            f"{other}for this user alone"
        )
    if status.st_mode & _ENTERED and (files := _open_files(directory)):
        return (
            f"is open to other users (mode {mode}), and so are its contents ({', '.join(files)}): "
            f"chmod -R go= {directory.absolute()}; {other}for this user alone"
        )
    return None


def visibility(directory: Path) -> str | None:
    """Describe that others can see the names in a directory that :func:`exposure` accepts, or None.

    Raises:
        OSError: its status cannot be read.
    """
    if os.name != "posix":
        return None
    mode = stat.S_IMODE(directory.stat().st_mode)
    if not mode & _GROUP_OR_OTHERS:
        return None
    return (
        f"can be entered or listed by other users (mode {mode:04o}), who cannot read any of its "
        f"files: chmod 0700 {directory.absolute()}, or StateDirectoryMode=0700 in a unit of "
        "systemd"
    )


def _open_files(directory: Path) -> list[str]:
    """Return a few files that others can read or write in a directory that they can enter."""
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            mode = entry.stat(follow_symlinks=False).st_mode
            if not stat.S_ISLNK(mode) and mode & _GROUP_OR_OTHERS:
                found.append(entry.name)
                if len(found) == _FILES_NAMED:
                    break
    return sorted(found)


def keep_files_private() -> None:
    """Make every file, lock, directory and socket of this process private to its user.

    It sets the umask, so only this package's own programs call it; an embedding host has its own.
    """
    # SQLite, filelock and handlers create files as well, and only the umask controls their mode.
    os.umask(0o077)


def write_private(file: Path, text: str, *, mode: int = 0o600) -> None:
    """Replace ``file`` with a new one with this text, for this user only (mode 0600).

    A symbolic link in its place is replaced and never followed. A reader sees the whole new text or
    the whole old one. Another ``mode`` opens the file to others, as far as the umask allows.

    Raises:
        OSError: it cannot be written.
    """
    # An unguessable name, and O_EXCL below: a link that another user has put there is refused
    # instead of followed.
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    descriptor = open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            opened.write(text)
        temporary.replace(file)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def open_private(file: Path) -> int:
    """Open a file for reading without following links, and return its descriptor.

    Raises:
        FileNotFoundError: the file does not exist.
        ForeignFileError: it is a link, not a regular file, or belongs to another user.
        OSError: it cannot be opened.
    """
    if file.is_symlink():
        raise ForeignFileError(f"{file.absolute()} is a symbolic link: remove it")
    # Not blocking: a pipe in its place would never open.
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = open_file(file, os.O_RDONLY | flags)
    status = os.fstat(descriptor)
    owner = os.geteuid() if os.name == "posix" else status.st_uid
    if stat.S_ISREG(status.st_mode) and status.st_uid in (owner, 0):
        return descriptor
    os.close(descriptor)
    raise ForeignFileError(
        f"{file.absolute()} belongs to the user {user_name(status.st_uid)}, or is not a regular "
        "file: check it, and remove it"
    )


def read_private(file: Path) -> str:
    """Return the text of a file of this user or root; see :func:`open_private`.

    Raises: OSError: see there. UnicodeDecodeError: it is not UTF-8 text.
    """
    with os.fdopen(open_private(file), "rb") as opened:
        return opened.read(_LARGEST_PRIVATE).decode("utf-8")
