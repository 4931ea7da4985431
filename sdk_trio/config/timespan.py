"""Time spans as the settings write them: ``[d.]hh:mm:ss[.fffffff]``. Pure (contracts 2)."""

import re
from datetime import timedelta

#: The most days that the form's original can hold: 2**63 units of 100 ns.
MAXIMUM_DAYS = 10_675_199

_FORM = re.compile(
    r"(?:(?P<days>[0-9]{1,8})\.)?"
    r"(?P<hours>[0-9]{2}):(?P<minutes>[0-9]{2}):(?P<seconds>[0-9]{2})"
    r"(?:\.(?P<fraction>[0-9]{1,7}))?"
)


def parse_timespan(text: str) -> timedelta:
    """Read a time span.

    Args:
        text: days, then hours 00-23, minutes and seconds 00-59 in two digits each, then up to
            seven digits of a second, of which the seventh (100 ns) is dropped.

    Raises:
        ValueError: the text has another form; the message completes a sentence.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError("must be a time span, [d.]hh:mm:ss[.fffffff], such as 00:30:00")
    days, hours = int(match["days"] or 0), int(match["hours"])
    minutes, seconds = int(match["minutes"]), int(match["seconds"])
    if hours > 23:
        raise ValueError("has more than 23 hours: write whole days in front, as in 1.06:00:00")
    if minutes > 59 or seconds > 59:
        raise ValueError("has more than 59 minutes or seconds: carry them over")
    if days > MAXIMUM_DAYS:
        raise ValueError(f"has more than {MAXIMUM_DAYS} days")
    microseconds = int((match["fraction"] or "").ljust(6, "0")[:6])
    return timedelta(
        days=days, hours=hours, minutes=minutes, seconds=seconds, microseconds=microseconds
    )


def format_timespan(span: timedelta) -> str:
    """Write a time span; days and the fraction are left out where they are zero.

    Raises:
        ValueError: the span is negative, which the form cannot say.
    """
    if span < timedelta(0):
        raise ValueError("a time span cannot be negative")
    minutes, seconds = divmod(span.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days = f"{span.days}." if span.days else ""
    fraction = f".{span.microseconds * 10:07d}" if span.microseconds else ""
    return f"{days}{hours:02d}:{minutes:02d}:{seconds:02d}{fraction}"
