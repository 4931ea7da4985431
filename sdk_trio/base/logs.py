"""Structured logs: one logger per domain, over the standard library's logging.

Embedded, nothing is configured: events go to the standard logger ``sdk_trio.<domain>`` and the
host decides what becomes of them. The command line calls :func:`configure` once. Events are
dotted and past tense; no secret, signature, token or body is ever passed in.
"""

import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, TextIO, cast

from .times import rfc3339_of

ROOT = "sdk_trio"

_Fields = tuple[str, dict[str, Any]]

#: Level names of ``Sdk:Logging:Level`` and what they mean to the standard library.
LEVELS = {
    "Debug": logging.DEBUG,
    "Info": logging.INFO,
    "Warning": logging.WARNING,
    "Error": logging.ERROR,
}

#: How far up the stack the caller of :meth:`Logger.info` and its like is found.
_STACK_LEVEL = 3


class Logger:
    """Events with fields, for one standard logger; what its level leaves out costs little.

    structlog would do, but its import brings rich along: 45 ms and 6 MB of every start.
    """

    __slots__ = ("_logger",)

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, /, **fields: object) -> None:
        """Log what only a developer wants to see."""
        if self._logger.isEnabledFor(logging.DEBUG):
            self._log(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: object) -> None:
        """Log what happens every day."""
        if self._logger.isEnabledFor(logging.INFO):
            self._log(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: object) -> None:
        """Log what somebody may have to look at."""
        if self._logger.isEnabledFor(logging.WARNING):
            self._log(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: object) -> None:
        """Log what somebody has to look at."""
        if self._logger.isEnabledFor(logging.ERROR):
            self._log(logging.ERROR, event, fields)

    def exception(self, event: str, /, **fields: object) -> None:
        """Log an error with the traceback of the exception that is being handled."""
        if self._logger.isEnabledFor(logging.ERROR):
            self._log(logging.ERROR, event, fields, exc_info=True)

    def store_unavailable(self, error: BaseException, /, **fields: object) -> None:
        """Log that the store cannot be asked at present: operators and alerts look for this event.

        ``retry_in``, where it is asked again by itself, is in seconds.
        """
        if self._logger.isEnabledFor(logging.ERROR):
            self._log(logging.ERROR, "store.unavailable", {"error": str(error), **fields})

    def _log(
        self, level: int, event: str, fields: dict[str, object], *, exc_info: bool = False
    ) -> None:
        """Hand the event to stdlib logging as a readable message, its fields in ``record.sdk``."""
        message = " ".join([event, *(f"{key}={value!r}" for key, value in fields.items())])
        self._logger.log(
            level,
            message,
            extra={"sdk": (event, fields)},
            exc_info=exc_info,
            stacklevel=_STACK_LEVEL,
        )


def get_logger(domain: str) -> Logger:
    """Return the logger of ``domain`` (``webhooks``, ...); a disabled level costs little."""
    return Logger(logging.getLogger(f"{ROOT}.{domain}"))


class Throttle:
    """Lets a few lines of each kind be logged in a while, and counts those that are left out.

    What strangers can cause as often as they like is logged through one of these: otherwise a
    flood of requests is a flood of lines, and hides what else is in the log.

    Args:
        lines: of each kind, in each while.
        seconds: how long a while is; it begins with its first line.
        clock: returns seconds that never go back.
    """

    __slots__ = ("_clock", "_kinds", "_lines", "_seconds")

    #: How many kinds are known at a time; the one that came first is forgotten for another one.
    MOST_KINDS = 1024

    def __init__(
        self, *, lines: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lines = lines
        self._seconds = seconds
        self._clock = clock
        #: By kind: when its while ends, lines in it, and what was left out and not told yet.
        self._kinds: dict[Hashable, tuple[float, int, int]] = {}

    def admit(self, kind: Hashable) -> int | None:
        """Say whether one more line of ``kind`` is logged.

        Returns:
            How many were left out since the last one that was logged; None: leave this one out.
        """
        now = self._clock()
        end, logged, left_out = self._kinds.get(kind, (now, 0, 0))
        if kind not in self._kinds and len(self._kinds) >= self.MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        if now >= end:
            end, logged = now + self._seconds, 0
        if logged >= self._lines:
            self._kinds[kind] = (end, logged, left_out + 1)
            return None
        self._kinds[kind] = (end, logged + 1, 0)
        return left_out

    def fields(self, kind: Hashable) -> dict[str, int] | None:
        """Return what one more line of ``kind`` says beside its own; None: leave it out."""
        suppressed = self.admit(kind)
        if suppressed is None:
            return None
        return {"suppressed": suppressed} if suppressed else {}

    def take_left_out(self) -> dict[Hashable, int]:
        """Return how many lines of each kind were left out and not told yet; now they are."""
        found = {kind: left for kind, (_, _, left) in self._kinds.items() if left}
        for kind in found:
            end, logged, _ = self._kinds[kind]
            self._kinds[kind] = (end, logged, 0)
        return found


class _Formatter(logging.Formatter):
    """Renders records: readable on a terminal, JSON lines elsewhere."""

    def __init__(self, *, json: bool, colors: bool) -> None:
        super().__init__()
        self._render = _render_json if json else partial(render_console, colors=colors)

    def format(self, record: logging.LogRecord) -> str:
        name, fields = cast("_Fields", getattr(record, "sdk", (record.getMessage(), {})))
        event: dict[str, Any] = {
            "event": name,
            "level": record.levelname.lower(),
            "logger": record.name,
            **fields,
            "timestamp": rfc3339_of(datetime.now(UTC)),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return self._render(event)


def _render_json(event: dict[str, Any]) -> str:
    return json.dumps(event, default=repr)


#: What stands at the beginning of a line, or below it; all else are fields.
_NO_FIELDS = {"event", "level", "logger", "timestamp", "exception"}

#: Colors of a terminal (ECMA-48, 8.3.117); what is not here is shown as an error.
_LEVEL_STYLES = {"debug": "32;1", "info": "32;1", "warning": "33;1"}

#: A text that can stand behind ``key=`` without quotes: it cannot be taken for the next field.
_is_bare = re.compile(r"""[^\s"'=\\]+""").fullmatch


def render_console(event: Mapping[str, Any], *, colors: bool) -> str:
    """Return an event as a line for people, ``exception`` below it.

    What strangers can put into a value must not move the cursor, change colors or begin a line that
    looks like another event: characters that cannot be seen are escaped everywhere.
    """

    def paint(style: str, text: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if colors else text

    level, name = event["level"], _visible(event["event"])
    line = [
        paint("2", event["timestamp"]),
        f"[{paint(_LEVEL_STYLES.get(level, '31;1'), f'{level:<8}')}]",
        # Aligned, so that the eye finds the fields.
        paint("1", f"{name:<30}"),
        f"[{paint('34;1', event['logger'])}]",
    ]
    line += [
        f"{paint('36', key)}={paint('35', _console_value(event[key]))}"
        for key in sorted(event.keys() - _NO_FIELDS)
    ]
    below = map(_visible, event.get("exception", "").splitlines())
    return "\n".join((" ".join(line), *below))


def _console_value(value: object) -> str:
    if isinstance(value, str) and _is_bare(value):
        return _visible(value)
    return _visible(repr(value))


def _visible(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )


def configure(*, level: str = "Info", format: str = "Auto", stream: TextIO | None = None) -> None:
    """Send the package's logs to ``stream`` (standard error): for programs, never when embedded.

    Args:
        level: ``Debug``, ``Info``, ``Warning`` or ``Error``.
        format: ``Json``, ``Console``, or ``Auto``: readable on a terminal, JSON otherwise.
        stream: a text stream; default ``sys.stderr``.

    A second call replaces what the first one set, so a reload can change the level.
    """
    target = stream or sys.stderr
    terminal = target.isatty()
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        _Formatter(
            json=format == "Json" or (format == "Auto" and not terminal),
            colors=terminal and not os.environ.get("NO_COLOR"),
        )
    )
    root = logging.getLogger(ROOT)
    root.handlers[:] = [handler]
    root.setLevel(LEVELS[level])
    root.propagate = False
