"""Times as text, always in UTC: RFC 3339 for programs, and a shorter form for people. Pure."""

import math
import re
from datetime import UTC, datetime

_LAST_SECOND = 253_402_300_799  # the end of the year 9999, the last of Python's calendar

_SHORT_SPAN = re.compile(r"([0-9]{1,9})([smhd])")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def parse_short_span(text: str) -> int | None:
    """Return the seconds of a span such as ``90s``, ``15m``, ``2h`` or ``3d``, or None."""
    match = _SHORT_SPAN.fullmatch(text)
    return int(match[1]) * _UNIT_SECONDS[match[2]] if match else None


def rfc3339(seconds: float, *, timespec: str = "auto") -> str:
    """Return Unix seconds as RFC 3339, such as ``2026-04-01T12:00:00Z``.

    ``timespec`` is that of ``datetime.isoformat``. A time before 1970 or after 9999 becomes the
    nearest valid time; a non-finite number becomes the start of 1970. A time that is only displayed
    must not make its message fail.
    """
    within = min(max(seconds, 0.0), _LAST_SECOND) if math.isfinite(seconds) else 0.0
    return rfc3339_of(datetime.fromtimestamp(within, UTC), timespec=timespec)


def rfc3339_of(moment: datetime, *, timespec: str = "auto") -> str:
    """Return an aware time as RFC 3339 in UTC, with ``Z`` where Python writes ``+00:00``."""
    text = moment.astimezone(UTC).isoformat(timespec=timespec)
    return text.removesuffix("+00:00") + "Z"


def readable(seconds: float) -> str:
    """Return Unix seconds as people read them, to the second: ``2026-04-01 12:00:00Z``.

    A number outside the calendar is returned unchanged, in seconds.
    """
    try:
        moment = datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{seconds:.0f}"
    return moment.strftime("%Y-%m-%d %H:%M:%SZ")
