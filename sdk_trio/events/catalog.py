"""The catalogue of event types: the event class and the data class of each wire type.

It is built from the classes in :mod:`sdk_trio.events.known` and :mod:`sdk_trio.events.additional`,
in their order. Exports, samples, the reference page and the command line use it, so a type is
declared once (CONTRIBUTING.md, "Add an event type").
"""

import enum
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from types import ModuleType
from typing import Any, get_args, get_origin

import attrs
import msgspec

from ..errors import HandlerRegistrationError
from . import additional, known
from .event import Event
from .values import decoder_for, fields_of

#: A type is stored in a column and used as a metric label: short, printable, parts joined by dots.
_WIRE_TYPE = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_MAX_WIRE_TYPE_LENGTH = 128


class EventGroup(enum.Enum):
    """The origin of a type in the catalogue."""

    KNOWN = "known"
    """Counted by the completeness check at startup."""
    ADDITIONAL = "additional"
    """Sent by the upstream, typed and dispatched, not counted."""
    APPLICATION = "application"
    """Added by the application with :meth:`Catalog.with_event`."""


class EventType(msgspec.Struct, frozen=True):
    """One row of the catalogue."""

    wire_type: str
    event_class: type[Event[Any]]
    data_class: type[Any]
    group: EventGroup


def _data_class_of(event_class: type[Event[Any]]) -> type[Any] | None:
    """Return ``X`` of the nearest base ``Event[X]``; None when it is not a class."""
    # The generic base is erased from the class itself; `__orig_bases__` keeps it.
    for ancestor in event_class.__mro__:
        for base in ancestor.__dict__.get("__orig_bases__", ()):
            if get_origin(base) is Event:
                (argument,) = get_args(base)
                found = get_origin(argument) or argument
                return found if isinstance(found, type) else None
    return None


def _row(event_class: type[Event[Any]], group: EventGroup) -> EventType:
    data_class = _data_class_of(event_class)
    if data_class is None:
        raise HandlerRegistrationError(
            f"{event_class.__qualname__} does not declare its data: derive it from Event[X], "
            "where X is a class of the application, or Event[dict]"
        )
    return EventType(event_class.wire_type, event_class, data_class, group)


def _by_wire_type(rows: tuple[EventType, ...]) -> dict[str, EventType]:
    return {row.wire_type: row for row in rows}


@attrs.frozen
class Catalog:
    """All types that have their own class. Immutable: :meth:`with_event` returns a new one.

    Iteration yields every :class:`EventType`: known, additional, then the application's.
    """

    rows: tuple[EventType, ...]
    _by_type: dict[str, EventType] = attrs.field(init=False, repr=False, eq=False)
    _by_class: dict[type[Event[Any]], EventType] = attrs.field(init=False, repr=False, eq=False)

    # Both are indexes of `rows`, built once: every delivery looks up its type.
    @_by_type.default
    def _index_types(self) -> dict[str, EventType]:
        return _by_wire_type(self.rows)

    @_by_class.default
    def _index_classes(self) -> dict[type[Event[Any]], EventType]:
        return {row.event_class: row for row in self.rows}

    def __iter__(self) -> Iterator[EventType]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def by_type(self, wire_type: str) -> EventType | None:
        """Return the row of ``wire_type``; None for a type without a class (no error)."""
        return self._by_type.get(wire_type)

    def by_class(self, event_class: type[Event[Any]]) -> EventType:
        """Return the row of ``event_class``.

        Raises:
            HandlerRegistrationError: the class is not in this catalogue.
        """
        row = self._by_class.get(event_class)
        if row is None:
            name = getattr(event_class, "__qualname__", repr(event_class))
            raise HandlerRegistrationError(
                f"{name} is not in the catalogue of events: use one of its classes "
                f"(OrderPaidEvent, ...), or add yours with catalog.with_event({name})"
            )
        return row

    @property
    def known(self) -> tuple[EventType, ...]:
        """The types that the completeness check counts, in the order of its report."""
        return self._of(EventGroup.KNOWN)

    @property
    def additional(self) -> tuple[EventType, ...]:
        """The further types that the upstream sends."""
        return self._of(EventGroup.ADDITIONAL)

    @property
    def application(self) -> tuple[EventType, ...]:
        """The types that the application added."""
        return self._of(EventGroup.APPLICATION)

    def _of(self, group: EventGroup) -> tuple[EventType, ...]:
        return tuple(row for row in self.rows if row.group is group)

    def with_event(self, *event_classes: type[Event[Any]]) -> "Catalog":
        """Return a catalogue that also has the application's event classes.

        Args:
            event_classes: classes derived from ``Event[X]``, each with its own ``wire_type``. ``X``
                is an attrs class, a ``msgspec.Struct``, a dataclass or ``dict``; each of its fields
                needs a default, because a delivery may omit it.

        Raises:
            HandlerRegistrationError: a type is malformed or already declared, or a class cannot be
                decoded or constructed.
        """
        catalog = self
        for event_class in event_classes:
            row = _checked(event_class)
            # An upstream type cannot be replaced either: its handlers would get another class than
            # documented.
            taken = catalog.by_type(row.wire_type)
            if taken is not None:
                raise HandlerRegistrationError(
                    f"{event_class.__qualname__}: the type {row.wire_type!r} already belongs to "
                    f"{taken.event_class.__qualname__}; each type has one class"
                )
            catalog = Catalog((*catalog.rows, row))
        return catalog


def _checked(event_class: Any) -> EventType:
    """Check at startup everything that could make decoding fail at the first delivery."""
    if not (isinstance(event_class, type) and issubclass(event_class, Event)):
        raise HandlerRegistrationError(
            f"{event_class!r} is not a class derived from sdk_trio's Event"
        )
    name = event_class.__qualname__
    wire_type: Any = event_class.wire_type
    if not isinstance(wire_type, str) or not (
        _WIRE_TYPE.fullmatch(wire_type) and len(wire_type) <= _MAX_WIRE_TYPE_LENGTH
    ):
        raise HandlerRegistrationError(
            f"{name}.wire_type is {wire_type!r}: it must be a type as sent, such as "
            f"'acme.invoice_sent': letters, digits, '_' and '-', parts joined by '.', at most "
            f"{_MAX_WIRE_TYPE_LENGTH} characters"
        )
    row = _row(event_class, EventGroup.APPLICATION)
    _check_data_class(name, row.data_class)
    _check_construction(event_class, row)
    return row


def _check_data_class(event_name: str, data_class: type[Any]) -> None:
    where = f"{event_name}: its data class {data_class.__qualname__}"
    if not issubclass(data_class, dict) and fields_of(data_class) is None:
        raise HandlerRegistrationError(
            f"{where} must be an attrs class, a msgspec.Struct, a dataclass or dict"
        )
    try:
        # Built now, because msgspec detects undecodable types only when it builds.
        decoder_for(data_class)
    except Exception as error:  # any error caused by the application's annotations
        raise HandlerRegistrationError(f"{where} cannot be decoded from JSON: {error}") from error
    try:
        data_class()
    except Exception as error:  # the application's own constructor
        raise HandlerRegistrationError(
            f"{where} cannot be created from an empty payload ({error}): give every field a "
            "default, for example None"
        ) from error


def _check_construction(event_class: type[Event[Any]], row: EventType) -> None:
    # Created as in decoding, so that a field without a default fails at registration.
    epoch = datetime.fromtimestamp(0, UTC)
    try:
        event_class(
            webhook_id="",
            type=row.wire_type,
            timestamp=epoch,
            data=row.data_class(),
            raw=b"",
            attempt=1,
            received_at=epoch,
        )
    except Exception as error:  # the application's own constructor
        raise HandlerRegistrationError(
            f"{event_class.__qualname__} cannot be created with an event's attributes ({error}): "
            "give every added field a default"
        ) from error


def _declared_in(module: ModuleType, group: EventGroup) -> Iterator[EventType]:
    """Yield a row for each event class of ``module``, in the order of declaration."""
    # A module keeps the order of its names, which is the order of listings.
    for value in vars(module).values():
        # `Event` itself is imported there from another module.
        if getattr(value, "__module__", None) == module.__name__:
            yield _row(value, group)


#: The types that have classes in this package: known ones, then additional ones.
DEFAULT_CATALOG = Catalog(
    (
        *_declared_in(known, EventGroup.KNOWN),
        *_declared_in(additional, EventGroup.ADDITIONAL),
    )
)
