"""Structured logs: one logger per domain, on the standard library's logging.

Embedded, this module configures nothing: events go to the standard logger ``sdk_trio.<domain>``,
and the host handles them. The command line calls :func:`configure` once; events then become lines
without a ``LogRecord``, unless an added handler or filter needs one. Event names are dotted and in
the past tense. Secrets, signatures, tokens and bodies are never passed in.
"""

import logging
import os
import re
import sys
import textwrap
import threading
from collections.abc import Callable, Hashable, Mapping
from datetime import UTC, datetime
from functools import cache, partial
from json import JSONEncoder
from json.encoder import encode_basestring_ascii
from typing import Any, ClassVar, TextIO, cast

import msgspec

from .clock import monotonic, wall
from .log_output import EXIT_SECONDS, LogOutput, level_name

ROOT = "sdk_trio"

_Fields = tuple[str, dict[str, Any]]

#: Names of ``Sdk:Logging:Level``, and the standard library's levels.
LEVELS = {
    "Debug": logging.DEBUG,
    "Info": logging.INFO,
    "Warning": logging.WARNING,
    "Error": logging.ERROR,
}

DEBUG, INFO, WARNING, ERROR = LEVELS.values()

#: The stack depth of the caller of :meth:`Logger.info` and its siblings.
_STACK_LEVEL = 3


class Logger:
    """Logs events with fields to one standard logger; disabled levels cost little.

    structlog would do, but it imports rich: 45 ms and 6 MB at every start.
    """

    __slots__ = ("_again", "_logger")

    def __init__(self, logger: logging.Logger, *, clock: Callable[[], float] = monotonic) -> None:
        self._logger = logger
        self._again = Throttle(lines=1, seconds=10.0, longest=60.0, clock=clock)

    def debug(self, event: str, /, **fields: object) -> None:
        """Log an event for developers."""
        logger = self._logger
        if logger.isEnabledFor(DEBUG) and not _written(logger, DEBUG, event, fields):
            self._log(DEBUG, event, fields)

    def info(self, event: str, /, **fields: object) -> None:
        """Log a routine event."""
        logger = self._logger
        if logger.isEnabledFor(INFO) and not _written(logger, INFO, event, fields):
            self._log(INFO, event, fields)

    def warning(self, event: str, /, **fields: object) -> None:
        """Log an event that may need attention."""
        logger = self._logger
        if logger.isEnabledFor(WARNING) and not _written(logger, WARNING, event, fields):
            self._log(WARNING, event, fields)

    def error(self, event: str, /, **fields: object) -> None:
        """Log an event that needs attention."""
        logger = self._logger
        if logger.isEnabledFor(ERROR) and not _written(logger, ERROR, event, fields):
            self._log(ERROR, event, fields)

    def exception(self, event: str, /, **fields: object) -> None:
        """Log an error with the traceback of the current exception."""
        if self._logger.isEnabledFor(ERROR):
            self._log(ERROR, event, fields, exc_info=True)

    def store_unavailable(self, error: BaseException, /, **fields: object) -> None:
        """Log that the store is unavailable; operators and alerts rely on this event.

        ``retry_in`` is the time until an automatic retry, in seconds. While the store is retried
        each second, the event is logged again after 10, 20 and 40 s, then each minute, until the
        store answers. ``suppressed`` counts the omitted lines.
        """
        if "retry_in" in fields:
            extra = self._again.fields(Outage.ended)
            if extra is None:
                return
            fields |= extra
        logger, all_fields = self._logger, {"error": str(error), **fields}
        if logger.isEnabledFor(ERROR) and not _written(
            logger, ERROR, "store.unavailable", all_fields
        ):
            self._log(ERROR, "store.unavailable", all_fields)

    def _log(
        self, level: int, event: str, fields: dict[str, object], *, exc_info: bool = False
    ) -> None:
        """Pass the event to stdlib logging as a readable message, its fields in ``record.sdk``."""
        shown = (f"{key}={_shown(value)}" for key, value in fields.items() if key != "traceback")
        message = " ".join([event, *shown])
        if "traceback" in fields:
            message += "\n" + str(fields["traceback"]).rstrip()
        self._logger.log(
            level,
            message,
            extra={"sdk": (event, fields)},
            exc_info=exc_info,
            stacklevel=_STACK_LEVEL,
        )


def _written(logger: logging.Logger, level: int, event: str, fields: dict[str, object]) -> bool:
    """Write an event without the standard library; False if other handlers need its record.

    The host may have added handlers and filters since :func:`configure`, or replaced a method that
    every record passes through, as Sentry's SDK does.
    """
    handler = _installed.handler
    if (
        handler is None
        or _root.handlers != handler.alone
        or logger.handlers
        or logger.filters
        or not logger.propagate
        or _root.propagate
        or handler.filters
        or handler.formatter is not None
        or level < handler.level
        or logging.Logger.callHandlers is not _call_handlers
    ):
        return False
    try:
        line = handler.lines.of_event(level, logger.name, event, fields)
    except Exception:
        return False  # such as a number of 5000 digits: the slow path handles it
    handler.output.write(level, line)
    return True


@cache
def get_logger(domain: str) -> Logger:
    """Return the logger of ``domain`` (``webhooks``, ...); a disabled level costs little."""
    return Logger(logging.getLogger(f"{ROOT}.{domain}"))


class Throttle:
    """Limits the log lines of each kind per period, and counts the omitted ones.

    For lines that untrusted clients can cause at any rate: otherwise a flood of requests becomes a
    flood of lines, which hides the rest of the log.

    Args:
        lines: the number of lines of each kind per period.
        seconds: the length of a period, which starts with its first line.
        longest: the maximum length of a period. A period that directly follows one with omitted
            lines is twice as long. By default all periods have the same length.
        clock: returns seconds that never go back.
    """

    __slots__ = ("_clock", "_kinds", "_lines", "_longest", "_seconds")

    #: The most kinds tracked at a time; the oldest is dropped first.
    MOST_KINDS = 1024

    def __init__(
        self,
        *,
        lines: int,
        seconds: float,
        longest: float | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._lines = lines
        self._seconds = seconds
        self._longest = seconds if longest is None else longest
        self._clock = clock
        #: By kind: the period's end and length in seconds, its lines, and omitted lines not yet
        #: reported.
        self._kinds: dict[Hashable, tuple[float, float, int, int]] = {}

    def admit(self, kind: Hashable) -> int | None:
        """Count one more line of ``kind``, and decide whether to log it.

        Returns:
            The number omitted since the last logged line; None: omit this one.
        """
        now = self._clock()
        end, seconds, logged, left_out = self._kinds.get(kind, (now, self._seconds, 0, 0))
        if kind not in self._kinds and len(self._kinds) >= self.MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        if now >= end:
            goes_on = left_out and now < end + seconds
            seconds = min(2 * seconds, self._longest) if goes_on else self._seconds
            end, logged = now + seconds, 0
        if logged >= self._lines:
            self._kinds[kind] = (end, seconds, logged, left_out + 1)
            return None
        self._kinds[kind] = (end, seconds, logged + 1, 0)
        return left_out

    def fields(self, kind: Hashable) -> dict[str, int] | None:
        """Return the extra fields for one more line of ``kind``; None: omit the line."""
        suppressed = self.admit(kind)
        if suppressed is None:
            return None
        return {"suppressed": suppressed} if suppressed else {}

    def take_left_out(self) -> dict[Hashable, int]:
        """Return the number of omitted lines by kind since they were last reported."""
        found = {kind: left for kind, (*_, left) in self._kinds.items() if left}
        for kind in found:
            end, seconds, logged, _ = self._kinds[kind]
            self._kinds[kind] = (end, seconds, logged, 0)
        return found


class Outage:
    """A period in which a store is unavailable; its end is logged with its length.

    Args:
        log: the logger of the store's domain.

    Callable from any thread.
    """

    __slots__ = ("_failed", "_lock", "_log", "since")

    #: Number of ended outages of all stores. The throttle uses it as the kind, so that the next
    #: outage is logged at once.
    ended: ClassVar[int] = 0

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        #: On the monotonic clock; None while the store answers.
        self.since: float | None = None
        self._failed = 0

    def fail(self, calls: int, *, seconds: float = 0.0) -> bool:
        """Count failed calls, the first ``seconds`` ago; return whether an outage starts."""
        with self._lock:
            begins = self.since is None
            if begins:
                self.since, self._failed = monotonic() - seconds, 0
            self._failed += calls
        return begins

    def refuse(self) -> None:
        """Count a call refused without calling the store, while it is unavailable."""
        with self._lock:
            self._failed += 1

    def end(self) -> None:
        """Log that the store answers again, if an outage was in progress."""
        with self._lock:
            since, self.since = self.since, None
        if since is not None:
            seconds = round(monotonic() - since, 3)
            self._log.info("store.answers", seconds=seconds, failed=self._failed)
            Outage.ended += 1


def _shown(value: object) -> str:
    """Return a value's ``repr``, or a placeholder: no event may fail because of its fields."""
    try:
        return repr(value)
    except Exception as failure:  # it may be a class of user code
        return f"(no text: its repr raised {type(failure).__name__})"


_encode_json = JSONEncoder(default=_shown, allow_nan=False, separators=(",", ":")).encode

_encode_plain = msgspec.json.Encoder().encode

#: Half of a surrogate pair, with the preceding text that must be skipped to find it.
_escape = re.compile(r"\\ud[89ab]..\\ud[c-f]..|\\(ud[89a-f]..)|\\.")


def _json_of(value: object) -> str:
    """Return a value as JSON that every parser accepts; its ``repr`` if JSON has no such value.

    Such values are non-finite numbers, keys that are not text, and cycles.
    """
    try:
        text = _encode_json(value)
    except (ValueError, TypeError, RecursionError):
        text = encode_basestring_ascii(_shown(value))
    return _without_halves(text) if "\\ud" in text else text


def _without_halves(text: str) -> str:
    """Return JSON with each lone surrogate, as in undecodable file names, as six plain characters.

    jq and others reject an escaped lone surrogate, and stop reading at that line.
    """
    return _escape.sub(lambda found: f"\\\\{found[1]}" if found[1] else found[0], text)


#: Standard fields of a line; a field of the same name replaces them.
_HEAD = frozenset({"event", "level", "logger", "process", "timestamp"})


class _Stamp:
    """Returns the time as RFC 3339; the text up to the second is cached for a second."""

    __slots__ = ("_second",)

    def __init__(self) -> None:
        self._second = (0, "")

    def __call__(self) -> str:
        begin, text = self._second
        micros = int(wall() * 1e6 + 0.5) - begin
        if 0 < micros < 1_000_000:
            # Slicing is faster than formatting six digits: 0.13 us instead of 0.18.
            return f"{text}{str(micros + 1_000_000)[1:]}Z"
        second, fraction = divmod(micros + begin, 1_000_000)
        shown = datetime.fromtimestamp(second, UTC).isoformat()[:19]
        self._second = (second * 1_000_000, f"{shown}.")
        # As datetime.isoformat does, which omits a zero fraction.
        return f"{shown}.{fraction:06d}Z" if fraction else f"{shown}Z"


_now = _Stamp()

Fields = Mapping[str, Any]


class _JsonLines:
    """Renders events as lines of strict JSON (RFC 8259), in ASCII."""

    #: The types of fields that msgspec encodes as JSON without asking an object for its attributes,
    #: which may be secret.
    _PLAIN = frozenset((str, int, float, bool))

    #: Maximum number of cached line prefixes. Each of the about 200 logging call sites has one.
    MOST = 1024

    def __init__(self) -> None:
        self._heads: dict[tuple[int, str, str], str] = {}

    def of_event(self, level: int, logger: str, event: str, fields: Fields) -> str:
        """Return the line of an event."""
        if (
            fields
            and _HEAD.isdisjoint(fields)
            and self._PLAIN.issuperset(map(type, fields.values()))
        ):
            try:
                members = _encode_plain(fields)
            except UnicodeEncodeError:  # half of a surrogate pair
                members = b"null"
            # Numbers that JSON does not have become null.
            if members.isascii() and b"null" not in members:
                head = self._heads.get((level, logger, event)) or self._head(level, logger, event)
                return f'{head},{members[1:-1].decode()},"timestamp":"{_now()}"}}\n'
        return self.of_keys(_as_event(level, logger, event, fields))

    def _head(self, level: int, logger: str, event: str) -> str:
        head = _json_of(_beginning(level, logger, event))[:-1]
        if len(self._heads) >= self.MOST:
            self._heads.clear()
        self._heads[level, logger, event] = head
        return head

    def of_keys(self, event: Mapping[str, Any]) -> str:
        """Return the line of an event whose keys are already ordered."""
        members = [f"{_json_of(key)}:{_json_of(value)}" for key, value in event.items()]
        return f"{{{','.join(members)}}}\n"


class _ConsoleLines:
    """Renders events for people: ``width`` returns their terminal's width; None without one."""

    def __init__(self, *, colors: bool, width: Callable[[], int] | None = None) -> None:
        self._colors = colors
        self._width = width

    def of_event(self, level: int, logger: str, event: str, fields: Fields) -> str:
        """Return the line of an event."""
        return self.of_keys(_as_event(level, logger, event, fields))

    def of_keys(self, event: Mapping[str, Any]) -> str:
        """Return the line of an event with ordered keys, and its traceback below it."""
        if self._width is None:
            return render_console(event, colors=self._colors) + "\n"
        # Read for each line, because users resize their windows.
        return render_terminal(event, colors=self._colors, width=self._width()) + "\n"


def _as_event(level: int, logger: str, event: str, fields: Fields) -> dict[str, Any]:
    return {**_beginning(level, logger, event), **fields, "timestamp": _now()}


def _beginning(level: int, logger: str, event: str) -> dict[str, Any]:
    head: dict[str, Any] = {"event": event, "level": level_name(level), "logger": logger}
    if _installed.process is not None:
        head["process"] = _installed.process
    return head


class LineHandler(logging.Handler):
    """Writes the package's events as lines directly, and records of other loggers too.

    Args:
        output: takes the lines.
        lines: renders the lines.
    """

    def __init__(self, output: LogOutput, lines: _JsonLines | _ConsoleLines) -> None:
        super().__init__()
        self.output = output
        self.lines = lines
        #: The package's handlers as long as no one adds another.
        self.alone: list[logging.Handler] = [self]

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, of any logger."""
        try:
            self.output.write(record.levelno, self._line(record))
        except Exception:  # logging reports write errors in its own way
            self.handleError(record)

    def _line(self, record: logging.LogRecord) -> str:
        if self.formatter is not None:
            return self.format(record) + "\n"
        known = getattr(record, "sdk", None)
        name, fields = cast("_Fields", known or (record.getMessage(), {}))
        event = _as_event(record.levelno, record.name, name, fields)
        if record.exc_info:
            event["exception"] = _tracebacks.formatException(record.exc_info)
        return self.lines.of_keys(event)

    def flush(self) -> None:
        """Wait up to a second for the reader; the standard library calls this at exit."""
        self.output.flush(EXIT_SECONDS)


class _Installed:
    """The command line's handler, once configured, and the number of this process."""

    handler: LineHandler | None = None
    process: int | None = None


_installed = _Installed()
_root = logging.getLogger(ROOT)
_call_handlers = logging.Logger.callHandlers
_tracebacks = logging.Formatter()


#: Members with a fixed position in a line, or below it; all others are fields.
_NO_FIELDS = {"event", "level", "logger", "timestamp", "exception", "traceback"}

#: Terminal colors (ECMA-48, 8.3.117); other levels are shown as errors.
_LEVEL_STYLES = {"debug": "32;1", "info": "32;1", "warning": "33;1"}

#: Text that needs no quotes after ``key=``: it cannot be read as the next field.
_is_bare = re.compile(r"""[^\s"'=\\]+""").fullmatch


def render_console(event: Mapping[str, Any], *, colors: bool) -> str:
    """Return an event as a line for people, its traceback below it.

    Untrusted clients choose some values. Invisible characters are escaped, so that no value
    can move the cursor, change colors or start a line that looks like another event.
    """

    def paint(style: str, text: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if colors else text

    level, name = event["level"], _visible(event["event"])
    line = [
        paint("2", event["timestamp"]),
        f"[{paint(_LEVEL_STYLES.get(level, '31;1'), f'{level:<8}')}]",
        # Aligned, so that the fields are easy to find.
        paint("1", f"{name:<30}"),
        f"[{paint('34;1', event['logger'])}]",
    ]
    line += [
        f"{paint('36', key)}={paint('35', _console_value(event[key]))}"
        for key in sorted(event.keys() - _NO_FIELDS)
    ]
    return "\n".join((" ".join(line), *_below(event)))


def render_terminal(event: Mapping[str, Any], *, colors: bool, width: int) -> str:
    """Return an event as :func:`render_console` does, in lines of at most ``width`` characters.

    The time is UTC without a date, and the logger is omitted: a terminal shows live output.
    Continuation lines are indented; the terminal breaks only words longer than a line.
    """

    def paint(style: str, text: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if colors else text

    level, name = event["level"], _visible(event["event"])
    clock = f"{event['timestamp'][11:19]}Z"
    indent = " " * (len(clock) + 1)
    line = (
        f"{paint('2', clock)} {paint(_LEVEL_STYLES.get(level, '31;1'), f'{level:<7}')} "
        f"{paint('1', name)}"
    )
    used = len(indent) + 8 + len(name)
    lines = []
    for key in (key for key in event if key not in _NO_FIELDS):
        field = f"{key}={_console_value(event[key])}"
        available = max(width - len(indent), 20)
        for part in textwrap.wrap(field, available, break_long_words=False, break_on_hyphens=False):
            if used + 1 + len(part) > width:
                lines.append(line)
                line, used = indent, len(indent)
            else:
                line, used = f"{line} ", used + 1
            used += len(part)
            begin = f"{key}="
            shown = part.removeprefix(begin)
            if shown != part:
                line += f"{paint('36', key)}="
            line += paint("35", shown)
    return "\n".join((*lines, line, *_below(event)))


def _below(event: Mapping[str, Any]) -> list[str]:
    """Return the lines of a traceback, with their line breaks."""
    text = event.get("exception") or event.get("traceback") or ""
    return [_visible(each) for each in str(text).splitlines()]


def _console_value(value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(_console_value, value)) or "-"
    if isinstance(value, str) and _is_bare(value):
        return _visible(value)
    return _visible(_shown(value))


def _visible(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )


def configure(*, level: str = "Info", format: str = "Auto", stream: TextIO | None = None) -> None:
    """Send the package's logs to ``stream`` (standard error): for programs, not when embedded.

    Args:
        level: ``Debug``, ``Info``, ``Warning`` or ``Error``.
        format: ``Json``, ``Console``, or ``Auto``: readable on a terminal, JSON otherwise.
        stream: a text stream; default ``sys.stderr``.

    Lines never make the caller wait for a slow reader; see docs/how-to/logs.md. A second call
    replaces the first one's settings, so a reload can change the level.
    """
    before = _installed.handler
    target = stream or sys.stderr
    # At a reload, user code may have closed the stream or replaced it with None.
    is_usable = target is not None and not getattr(target, "closed", False)
    terminal = is_usable and target.isatty()
    lines = (
        _JsonLines()
        if format == "Json" or (format == "Auto" and not terminal)
        else _ConsoleLines(
            colors=terminal and not os.environ.get("NO_COLOR"),
            width=partial(_width_of, target) if terminal else None,
        )
    )
    if before is None:
        # Windows has no fork.
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=partial(_at_fork, LogOutput.before_fork),
                after_in_parent=partial(_at_fork, LogOutput.after_fork_in_parent),
                after_in_child=partial(_at_fork, LogOutput.after_fork_in_child),
            )
        output = LogOutput(target, _dropped_line)
    elif not is_usable or before.output.leads_to(target):
        output = before.output  # buffered lines stay first
    else:
        before.output.close()
        output = LogOutput(target, _dropped_line)
    _installed.handler = LineHandler(output, lines)
    _root.handlers[:] = [_installed.handler]
    _root.setLevel(LEVELS[level])
    _root.propagate = False


def number_process(number: int) -> None:
    """Put ``process: number`` into every line when several processes share one log.

    Call it before the first line.
    """
    _installed.process = number


def _width_of(terminal: TextIO) -> int:
    """Return the line width in characters: COLUMNS if it is set, else the terminal's width."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isascii() and columns.isdigit() and len(columns) < 5 and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(terminal.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _dropped_line(dropped: Mapping[str, int]) -> str:
    """Return the line that reports the number of dropped lines by level."""
    assert _installed.handler is not None
    fields = {**dropped, "hint": "the log's reader was too slow: check the program that reads it"}
    event = _as_event(logging.WARNING, f"{ROOT}.logs", "log.dropped", fields)
    return _installed.handler.lines.of_keys(event)


def begin_batching() -> None:
    """Buffer the lines of this thread, which runs the event loop, until :func:`write_batch`."""
    if _installed.handler is not None:
        _installed.handler.output.begin_batching()


def write_batch() -> None:
    """Write the lines gathered since the last iteration of the event loop."""
    if _installed.handler is not None:
        _installed.handler.output.write_batch()


def end_batching() -> None:
    """Write each line at once from now on."""
    if _installed.handler is not None:
        _installed.handler.output.end_batching()


def flush(seconds: float) -> None:
    """Wait up to ``seconds`` until the reader has all lines; call it before ``os._exit``."""
    if _installed.handler is not None:
        _installed.handler.output.flush(seconds)


def _at_fork(method: Callable[[LogOutput], None]) -> None:
    if _installed.handler is not None:
        method(_installed.handler.output)
