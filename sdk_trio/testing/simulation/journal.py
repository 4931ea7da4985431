"""The journal of a simulation: the actions of the world, and the log of the runtime."""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from ...base.logs import Outage, get_logger
from .machine import Machine

#: Fields of the log that the story omits.
_LEFT_OUT = {"hint", "traceback"}

#: The place of an object in memory, which differs from process to process.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

#: The directory of a source file, which differs from machine to machine.
_DIRECTORY = re.compile(r"/[^\s=]*/(?=[^\s/]+\.py:\d)")


class Line(msgspec.Struct, frozen=True):
    """One line of the story: the virtual time in seconds, the host, the event and its fields."""

    at: float
    host: str
    event: str
    fields: str

    def __str__(self) -> str:
        return f"{self.at:12.6f}  {self.host:<8} {self.event} {self.fields}".rstrip()


class Journal(logging.Handler):
    """Writes the lines of one simulation.

    Args:
        now: returns the virtual seconds.
        machine: returns the current host's machine; None: the world itself.
        noted: called with the event, the fields and the host's name of each line of the log.
    """

    def __init__(
        self,
        now: Callable[[], float],
        machine: Callable[[], Machine | None],
        noted: Callable[[str, dict[str, Any], str], None],
    ) -> None:
        super().__init__()
        self._now = now
        self._machine = machine
        self._noted = noted
        self.lines: list[Line] = []
        #: The directory of the simulation, whose name differs each time.
        self.root = ""

    def record(self, event: str, **fields: object) -> None:
        """Write an action of the world."""
        machine = self._machine()
        self._add(event, fields, "" if machine is None else machine.name)

    def _add(self, event: str, fields: dict[str, Any], host: str) -> None:
        shown = (f"{name}={value}" for name, value in fields.items() if name not in _LEFT_OUT)
        text = " ".join(shown).replace("\n", " | ")
        if self.root:
            text = text.replace(self.root, "")
        self.lines.append(Line(self._now(), host, event, _bare(text)))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line of the runtime's log; a host that has crashed logs nothing."""
        event, fields = record.__dict__.get("sdk", (record.getMessage(), {}))
        machine = self._machine()
        if machine is not None and machine.down:
            return
        host = "" if machine is None else machine.name
        self._noted(event, fields, host)
        self._add(event, fields, host)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Receive the runtime's log during the block, without the state of earlier seeds."""
        root = logging.getLogger("sdk_trio")
        level, propagate, handlers = root.level, root.propagate, root.handlers[:]
        root.handlers[:] = [self]
        root.propagate = False
        root.setLevel(logging.INFO)
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("sdk_trio."):
                get_logger(name.removeprefix("sdk_trio."))._again._kinds.clear()
        Outage.ended = 0
        try:
            yield
        finally:
            root.handlers[:] = handlers
            root.propagate = propagate
            root.setLevel(level)


def _bare(text: str) -> str:
    if " at 0x" in text:
        text = _ADDRESS.sub("", text)
    return _DIRECTORY.sub("", text) if ".py:" in text else text
