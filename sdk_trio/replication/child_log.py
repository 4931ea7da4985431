"""The replicator's own log lines as structured events of ours. Pure.

Its ``INFO`` is a line for every compaction of every database, so it becomes our ``Debug``. A
target that is away makes a line a second for every database: of each message a few are let
through, the rest are counted.
"""

import json
from collections.abc import Collection
from typing import Any, Final

import attrs

#: Its levels and ours; what is new to us is a warning.
LEVELS: Final = {
    "TRACE": "debug",
    "DEBUG": "debug",
    "INFO": "debug",
    "WARN": "warning",
    "ERROR": "error",
}

#: Errors to it, everyday to us: a host without tenants yet.
_HARMLESS: Final = frozenset({"no databases specified in configuration"})

#: How many lines of one message are let through in :data:`WINDOW_SECONDS`.
LINES_A_WINDOW: Final = 3
WINDOW_SECONDS: Final = 60.0

#: How many different messages are counted at a time, and how long a field may be.
MAX_MESSAGES: Final = 200
MAX_FIELD: Final = 500

#: Fields that repeat what our own line says, and one whose name is that of our own.
_DROPPED = frozenset({"time", "level", "msg"})


@attrs.frozen
class ChildLine:
    """One line: ``level`` is ours, ``plain`` says that it was no JSON, so a last word perhaps."""

    level: str
    message: str
    fields: dict[str, str] = attrs.field(factory=dict)
    plain: bool = False


def read_line(line: bytes, secrets: Collection[str]) -> ChildLine:
    """Read one line of its output; whatever is in it, none of ``secrets`` is in the result."""
    text = line.decode("utf-8", "replace").strip()
    for secret in secrets:
        text = text.replace(secret, "***")
        # As it stands in a JSON text and in an address.
        text = text.replace(json.dumps(secret)[1:-1], "***")
    try:
        document: Any = json.loads(text, object_pairs_hook=_first_of_each)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        # Its own last word begins so; the stores' libraries warn in a form of their own.
        level = "error" if text.startswith(("Error", "panic")) else "warning"
        return ChildLine(level, text[:MAX_FIELD], plain=True)
    message = str(document.get("msg", ""))[:MAX_FIELD]
    level = LEVELS.get(str(document.get("level")), "warning")
    return ChildLine(
        "debug" if message in _HARMLESS else level,
        message,
        {
            str(name)[:50]: _text(value)[:MAX_FIELD]
            for name, value in list(document.items())[:20]
            if name not in _DROPPED
        },
    )


def _first_of_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Keep the first of fields with one name: some lines have a level of compaction, too."""
    return dict(reversed(pairs))


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


class LineLimiter:
    """Lets a few lines of each message through in each window, and counts the rest."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        self._window_ends = 0.0

    def admit(self, line: ChildLine, now: float) -> tuple[bool, dict[str, int]]:
        """Return whether ``line`` is logged, and what the window that ended held back.

        Args:
            line: the line.
            now: seconds of a clock that never goes back.
        """
        held: dict[str, int] = {}
        if now >= self._window_ends:
            held = {m: n - LINES_A_WINDOW for m, n in self._seen.items() if n > LINES_A_WINDOW}
            self._seen.clear()
            self._window_ends = now + WINDOW_SECONDS
        if line.level == "debug":
            return True, held
        # Those lines begin with the time, so no two are the same.
        key = "lines of libraries" if line.plain else line.message
        if key not in self._seen and len(self._seen) >= MAX_MESSAGES:
            key = "others"
        self._seen[key] = self._seen.get(key, 0) + 1
        return self._seen[key] <= LINES_A_WINDOW, held
