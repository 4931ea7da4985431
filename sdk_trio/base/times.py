"""Times as text, always in UTC: RFC 3339 for programs, and a shorter form for people. Pure."""

import math
import re
from datetime import UTC, datetime

_LAST_SECOND = 253_402_300_799  # the end of the year 9999, where the calendar of Python ends

_SHORT_SPAN = re.compile(r"([0-9]{1,9})([smhd])")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def parse_short_span(text: str) -> int | None:
    """Return the seconds of a span such as ``90s``, ``15m``, ``2h`` or ``3d``; None: it is none."""
    match = _SHORT_SPAN.fullmatch(text)
    return int(match[1]) * _UNIT_SECONDS[match[2]] if match else None


def rfc3339(seconds: float, *, timespec: str = "auto") -> str:
    """Return Unix seconds as RFC 3339, such as ``2026-04-01T12:00:00Z``.

    ``timespec`` is that of ``datetime.isoformat``. What lies before 1970 or after the year 9999
    becomes the nearest time between, and what is no finite number the beginning of 1970: a time
    that is only shown must not fail its message.
    """
    within = min(max(seconds, 0.0), _LAST_SECOND) if math.isfinite(seconds) else 0.0
    return rfc3339_of(datetime.fromtimestamp(within, UTC), timespec=timespec)


def rfc3339_of(moment: datetime, *, timespec: str = "auto") -> str:
    """Return an aware time as RFC 3339 in UTC, with ``Z`` where Python writes ``+00:00``."""
    text = moment.astimezone(UTC).isoformat(timespec=timespec)
    return text.removesuffix("+00:00") + "Z"


def readable(seconds: float) -> str:
    """Return Unix seconds as people read them, to the second: ``2026-04-01 12:00:00Z``.

    A number beyond the calendar is returned as it is, in seconds.
    """
    try:
        moment = datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{seconds:.0f}"
    return moment.strftime("%Y-%m-%d %H:%M:%SZ")
