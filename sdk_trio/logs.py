"""Structured logs: one logger per domain, over the standard library's logging.

Embedded, nothing is configured: events go to the standard logger ``sdk_trio.<domain>`` and the
host decides what becomes of them. The command line calls :func:`configure` once. Events are
dotted and past tense (contracts 10); no secret, signature, token or body is ever passed in.
"""

import logging
import os
import sys
from typing import Any, TextIO, cast

import structlog

ROOT = "sdk_trio"

_Fields = tuple[str, dict[str, Any]]

#: Level names of ``Sdk:Logging:Level`` and what they mean to the standard library.
LEVELS = {
    "Debug": logging.DEBUG,
    "Info": logging.INFO,
    "Warning": logging.WARNING,
    "Error": logging.ERROR,
}


def _render_for_stdlib(_logger: Any, _method: str, event: Any) -> Any:
    """Hand the event to stdlib logging as a readable message, its fields in ``record.sdk``."""
    name = event.pop("event")
    exc_info = event.pop("exc_info", None)
    message = " ".join([name, *(f"{key}={value!r}" for key, value in event.items())])
    return (message,), {"extra": {"sdk": (name, event)}, "exc_info": exc_info}


class _Logger(structlog.stdlib.BoundLogger):
    """Asks for the level before anything else: on the way of a delivery most events are unwanted.

    structlog itself would assemble each event before it learns that nobody wants it.
    """

    def debug(self, event: str | None = None, *args: Any, **fields: Any) -> Any:
        if self._logger.isEnabledFor(logging.DEBUG):
            super().debug(event, *args, **fields)

    def info(self, event: str | None = None, *args: Any, **fields: Any) -> Any:
        if self._logger.isEnabledFor(logging.INFO):
            super().info(event, *args, **fields)


def get_logger(domain: str) -> structlog.stdlib.BoundLogger:
    """Return the logger of ``domain`` (``webhooks``, ...); a disabled level costs little."""
    return cast(
        "structlog.stdlib.BoundLogger",
        structlog.wrap_logger(
            logging.getLogger(f"{ROOT}.{domain}"),
            processors=[structlog.stdlib.filter_by_level, _render_for_stdlib],
            wrapper_class=_Logger,
            cache_logger_on_first_use=True,
        ),
    )


class _Formatter(logging.Formatter):
    """Renders records with structlog: readable on a terminal, JSON lines elsewhere."""

    def __init__(self, *, json: bool, colors: bool) -> None:
        super().__init__()
        self._stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
        self._render: Any = (
            structlog.processors.JSONRenderer()
            if json
            else structlog.dev.ConsoleRenderer(colors=colors)
        )

    def format(self, record: logging.LogRecord) -> str:
        name, fields = cast("_Fields", getattr(record, "sdk", (record.getMessage(), {})))
        event: dict[str, Any] = {
            "event": name,
            "level": record.levelname.lower(),
            "logger": record.name,
            **fields,
        }
        event = dict(self._stamp(None, "", event))
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return str(self._render(None, record.levelname.lower(), event))


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
