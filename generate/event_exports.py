"""Makes ``sdk_trio/events/__init__.py``: it names each event class and each class of data.

Editors and type checkers see only names that are written out, so they are written by this.
"""

import ast
from pathlib import Path

from event_payloads import SHAPES

EVENTS = Path(__file__).parents[1] / "sdk_trio" / "events"
FILE = EVENTS / "__init__.py"

_TEXT = '''\
"""Events: their classes, their data, the catalogue of types, and decoding.

Made by ``make generate`` (generate/event_exports.py) of the files beside it. Samples are in
:mod:`sdk_trio.events.samples`, which is not imported here: receiving needs none.
"""

from .additional import (
{additional})
from .catalog import DEFAULT_CATALOG, Catalog, EventGroup, EventType
from .decoding import (
    Drift,
    Envelope,
    claimed_organization,
    decode_envelope,
    decode_event,
    organization_of,
    plain_envelope,
    subject_of,
)
from .event import Event, Payload, UnknownEvent
from .known import (
{known})
from .payloads import (
{payloads})

__all__ = [
    # the catalogue and decoding
    "DEFAULT_CATALOG",
    "Catalog",
    "EventGroup",
    "EventType",
    "Drift",
    "Envelope",
    "decode_envelope",
    "decode_event",
    "claimed_organization",
    "organization_of",
    "plain_envelope",
    "subject_of",
    # events
    "Event",
    "UnknownEvent",
{events}    # data
    "Payload",
{data}]
'''


def files() -> dict[Path, str]:
    """Return the file and its text."""
    known, additional = _classes("known.py"), _classes("additional.py")
    data = [shape.name for shape in SHAPES]
    text = _TEXT.format(
        additional=_imported(additional),
        known=_imported(known),
        payloads=_imported(data),
        events=_named([*known, *additional]),
        data=_named(data),
    )
    return {FILE: text}


def _classes(file: str) -> list[str]:
    """Return the names of the classes of a file, read and not imported: it may need this one."""
    tree = ast.parse((EVENTS / file).read_text("utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


def _imported(names: list[str]) -> str:
    return "".join(f"    {name},\n" for name in sorted(names, key=str.lower))


def _named(names: list[str]) -> str:
    return "".join(f'    "{name}",\n' for name in names)
