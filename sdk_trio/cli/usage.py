"""The check of the words that name a command, with suggestions for misspelt ones. Pure."""

import difflib
import re
from collections.abc import Collection, Sequence
from datetime import datetime

from ..base.times import readable
from ..errors import EXIT_USAGE, SdkError

#: Commands that the documentation names and that this version does not contain.
NOT_IN_THIS_VERSION = frozenset(
    {
        "listen",
        "storage",
    }
)


class UsageError(SdkError):
    """A command was called wrongly: the message says which argument and what it takes."""

    exit_code = EXIT_USAGE


def check_words(arguments: Sequence[str], known: Collection[str]) -> None:
    """Check the words before the first option against the known commands.

    Args:
        arguments: the command line after the program's name.
        known: the commands in full, such as ``run`` and ``events list``.

    Raises:
        UsageError: the command is not in this version, or unknown; with the closest name.
    """
    chosen = ""
    for depth, word in enumerate(arguments, start=1):
        if chosen in known or word.startswith("-"):
            return
        within = [command for command in known if command.startswith(chosen and f"{chosen} ")]
        chosen = f"{chosen} {word}".lstrip()
        _check(chosen, [" ".join(command.split()[:depth]) for command in within])


def option_meant(given: Sequence[str], known: Collection[str]) -> str:
    """Return ``; did you mean --config?`` for the first option that is similar to a known one.

    The text is empty if none is similar.
    """
    for word in given:
        if word.startswith("--"):
            close = difflib.get_close_matches(word.partition("=")[0], known, n=1)
            if close:
                return f"; did you mean {close[0]}?"
    return ""


def _check(chosen: str, candidates: Sequence[str]) -> None:
    if chosen in candidates:
        return
    if chosen in NOT_IN_THIS_VERSION:
        raise UsageError(f"the command '{chosen}' is not in this version")
    close = difflib.get_close_matches(chosen, candidates, n=1)
    advice = (
        f"did you mean '{close[0]}'?"
        if close
        else f"choose from {', '.join(dict.fromkeys(candidates))}"
    )
    raise UsageError(f"there is no command '{chosen}': {advice}")


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
