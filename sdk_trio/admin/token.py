"""The admin token: from a variable, or generated into the data directory."""

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import attrs

from ..base.logs import get_logger
from ..config import Settings
from ..errors import StoreUnavailableError
from ..storage.data_directory import create_data_directory, open_private

_log = get_logger("admin")

#: The file in the data directory.
TOKEN_NAME = "admin-token"

_TOKEN_BYTES = 32


@attrs.frozen
class AdminToken:
    """The token, and its place for people: the name of a variable or the path of a file."""

    value: str | None = attrs.field(repr=False)
    place: str


def provide_token(settings: Settings, environ: Mapping[str, str] = os.environ) -> AdminToken:
    """Return the token of the variable that the settings name, else of the file, made if missing.

    A file that others can read is replaced; one of another user is refused. If no token can be
    kept, a warning says so and calls that need it are refused; the receiver runs all the same,
    because deliveries matter more than the admin address.
    """
    variable = settings.admin.token_env_var
    given = environ.get(variable, "").strip()
    if given:
        return AdminToken(given, f"the variable {variable}")
    file = Path(settings.storage.path) / TOKEN_NAME
    try:
        create_data_directory(settings.storage.path)
        return AdminToken(_kept(file) or _generate(file), str(file.absolute()))
    except (OSError, StoreUnavailableError) as error:
        _log.warning(
            "admin.token_missing",
            path=str(file),
            error=str(error),
            hint=f"set the variable {variable}; until then /api is closed",
        )
        return AdminToken(None, f"the variable {variable}")


def _kept(file: Path) -> str | None:
    """Return the token of an earlier start, if it is still secret."""
    try:
        descriptor = open_private(file)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, encoding="ascii", errors="replace") as opened:
        token = opened.read(1024).strip()
        exposed = os.name == "posix" and os.fstat(opened.fileno()).st_mode & 0o077
    if token and not exposed:
        return token
    _log.warning("admin.token_replaced", path=str(file), hint="other users could read it")
    file.unlink()
    return None


def _generate(file: Path) -> str:
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    temporary = file.with_name(f"{TOKEN_NAME}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as opened:
            opened.write(f"{token}\n")
        try:
            # Unlike a rename, a hard link does not replace a file of another process that started
            # at the same moment; both then use the same token.
            os.link(temporary, file)
        except FileExistsError:
            return _kept(file) or token
    finally:
        with suppress(OSError):
            temporary.unlink()
    return token
