"""The ``Retry-After`` header (RFC 9110, 10.2.3) as seconds. Pure."""

import math
import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

_SECONDS = re.compile(r"[0-9]+(\.[0-9]+)?", re.ASCII)

#: The longest wait returned, in seconds (31 years), so that a header of thousands of digits still
#: gives a finite number.
_LONGEST_ASKED = 999_999_999.0


def parse_retry_after(value: str | None, *, date: str | None, now: float) -> float | None:
    """Read a ``Retry-After`` header as seconds from now; None when it is absent or invalid.

    Args:
        value: the header: seconds, or an HTTP date.
        date: the same response's ``Date``. A date is taken relative to it, so an incorrect local
            clock does not matter.
        now: Unix time, used when there is no readable ``Date``.

    Returns:
        Zero or more seconds; 0 for a date in the past. Negative and non-finite numbers are ignored;
        a number with too many digits means a very long wait.
    """
    if value is None:
        return None
    value = value.strip()
    if _SECONDS.fullmatch(value):
        return min(float(value), _LONGEST_ASKED)
    until = _http_date(value)
    if until is None:
        return None
    since = None if date is None else _http_date(date)
    return max(0.0, until - (now if since is None else since))


def _http_date(text: str) -> float | None:
    try:
        parsed = parsedate_to_datetime(text)
        if parsed.tzinfo is None:
            parsed = parsed.replace(tzinfo=UTC)
        stamp = (parsed - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return stamp if math.isfinite(stamp) else None
