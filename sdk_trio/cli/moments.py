"""Times as people write them on a command line. Pure."""

import re
from datetime import datetime

from ..base.times import readable
from .usage import UsageError

_AGO = re.compile(r"([0-9]{1,9})([smhd])")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_UNIX_SECONDS = re.compile(r"[0-9]{1,12}")


def parse_since(text: str, *, now: float, option: str = "--since") -> float:
    """Return Unix seconds of a time in ISO 8601, or of an age: ``15m``, ``2h``, ``3d``.

    A time without an offset from UTC is one of this machine's time zone; a date alone is its
    first moment. ``option`` is for the message.

    Raises:
        UsageError: it is neither.
    """
    ago = _AGO.fullmatch(text.strip())
    if ago:
        return now - int(ago[1]) * _UNIT_SECONDS[ago[2]]
    moment = _iso(text)
    if moment is None:
        raise UsageError(
            f"{option} takes a time such as 2026-01-31T12:00Z, or 15m, 2h, 3d ago; not {text!r}"
        )
    return moment


def parse_moment(text: str, *, option: str) -> int:
    """Return Unix seconds of a time in Unix seconds or ISO 8601; ``option`` is for the message.

    Raises:
        UsageError: it is neither.
    """
    stripped = text.strip()
    moment = float(stripped) if _UNIX_SECONDS.fullmatch(stripped) else _iso(text)
    if moment is None or moment < 0:
        raise UsageError(
            f"{option} takes Unix seconds or a time such as 2026-01-31T12:00Z, not {text!r}"
        )
    return int(moment)


def parse_count(text: str, *, option: str, greatest: int = 1_000_000) -> int:
    """Return a whole number from 1 to ``greatest``.

    Raises:
        UsageError: it is none.
    """
    if text.isascii() and text.isdigit() and len(text) <= 12 and 1 <= int(text) <= greatest:
        return int(text)
    raise UsageError(f"{option} takes a whole number from 1 to {greatest}, not {text!r}")


def moment_text(seconds: float | None) -> str | None:
    """Return Unix seconds as people read them, in UTC to the second; None stays None."""
    return None if seconds is None else readable(seconds)


def _iso(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
