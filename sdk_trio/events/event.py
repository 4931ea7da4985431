"""The event that a handler receives, and the base of its data (docs/reference/events.md)."""

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeAlias, TypeVar

import attrs
import msgspec

from ..records.synthetic import is_synthetic
from .values import members_of, plain, plain_members

DataT_co = TypeVar("DataT_co", covariant=True)

#: A point in time with its UTC offset; a time without an offset does not fit.
Time: TypeAlias = Annotated[datetime, msgspec.Meta(tz=True)]

#: The metadata that an application attached to a record: text, numbers or booleans.
Metadata: TypeAlias = dict[str, Any]


# Structs: an order decodes in half the time of an attrs class. The bases of nested records need no
# garbage collection: values decoded from JSON contain no cycles.
class Embedded(msgspec.Struct, frozen=True, gc=False):
    """Base of embedded records; ``record["email"]`` is ``record.email``.

    ``in`` and iteration cover the names of the fields that have a value.
    """

    def __getitem__(self, name: str) -> Any:
        field = _field_of(self, name)
        if field is None:
            raise KeyError(f"{_unknown(self, name, ())}; event.json has all fields")
        return getattr(self, field)

    # Without these two, Python would try the items 0, 1, 2 and so on.
    def __contains__(self, name: object) -> bool:
        return name in _names_with_value(self)

    def __iter__(self) -> Iterator[str]:
        return iter(_names_with_value(self))


class Payload(msgspec.Struct, frozen=True, dict=True):
    """Base of every data class, and the data of an event with an unknown type.

    ``id`` identifies the subject record; "" if the sender sent none. An application's class derives
    from it without a decorator, and its fields need defaults.

    ``data.amount`` and ``data["amount"]`` are the same. A field that the class does not declare can
    be read both ways as well, as a plain JSON value. If the delivery lacks it, the attribute raises
    ``AttributeError`` and the brackets ``KeyError``. Brackets also raise for a declared field that
    was not sent. ``in`` and iteration cover the names that were sent.
    """

    id: str = ""

    @property
    def extra(self) -> Mapping[str, Any]:
        """The fields that this class does not declare, as plain JSON values; decoded on first use.

        Empty for a payload that was not decoded from a delivery, and for a copy. Undeclared fields
        of *nested* records are in ``event.json``.
        """
        kept = self.__dict__
        extra: Mapping[str, Any] | None = kept.get("extra")
        if extra is None:
            raw = self._sent()
            named = frozenset(self.__struct_fields__)
            extra = kept["extra"] = {} if raw is None else plain_members(raw, without=named)
        return extra

    if not TYPE_CHECKING:  # checkers know the fields of each class, and would accept any name

        def __getattr__(self, name: str) -> Any:
            # Called only for names that normal access does not find. The interpreter, copy and
            # pickle ask for names with underscores.
            if not name.startswith("_") and name in self.extra:
                return self.extra[name]
            raise AttributeError(_unknown(self, name, self.extra))

    def __getitem__(self, name: str) -> Any:
        field = _field_of(self, name)
        if field is None:
            if name in self.extra:
                return self.extra[name]
            raise KeyError(_unknown(self, name, self.extra))
        value = getattr(self, field)
        if value is None and name not in self:
            raise KeyError(name)
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._names()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def _sent(self) -> bytes | msgspec.Raw | None:
        """Return the undecoded ``data`` of the delivery, or None without one."""
        kept = self.__dict__
        raw: bytes | msgspec.Raw | None = kept.get("raw")
        if raw is None and "document" in kept:
            raw = (members_of(kept["document"]) or {}).get("data")
        return raw

    def _names(self) -> Collection[str]:
        """Return the names of the sent fields; without a delivery, those with a value."""
        names: Collection[str] | None = self.__dict__.get("names")
        if names is None:
            raw = self._sent()
            names = _names_with_value(self) if raw is None else tuple(members_of(raw) or ())
            self.__dict__["names"] = names
        return names


def _field_of(record: msgspec.Struct, name: str) -> str | None:
    """Return the attribute of the field with the wire name ``name``, or None."""
    sent = record.__struct_encode_fields__
    return record.__struct_fields__[sent.index(name)] if name in sent else None


def _names_with_value(record: msgspec.Struct) -> tuple[str, ...]:
    pairs = zip(record.__struct_encode_fields__, record.__struct_fields__, strict=True)
    return tuple(sent for sent, field in pairs if getattr(record, field) is not None)


def _unknown(record: msgspec.Struct, name: object, others: Iterable[str]) -> str:
    import difflib  # needed only for a mistake

    known = [*record.__struct_encode_fields__, *others]
    near = difflib.get_close_matches(name, known, n=1) if isinstance(name, str) else ()
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{type(record).__name__} has no field {name!r}{hint}"


def keep_raw(payload: Payload, data_raw: msgspec.Raw) -> None:
    """Let ``payload.extra`` be computed from ``data_raw``, the undecoded ``data`` of its event."""
    payload.__dict__["raw"] = data_raw


def keep_document(payload: Payload, raw: bytes) -> None:
    """Let ``payload.extra`` be computed from ``raw``, the whole body of its event."""
    payload.__dict__["document"] = raw


def _name_of_data(data: object) -> str:
    """Show only the subject: an event may be logged, but customers' input may not."""
    identifier = getattr(data, "id", None)
    return f"<{type(data).__name__} id={identifier!r}>"


# Without slots: a frozen class with slots sets each attribute by a call; its eleven attributes take
# 1.3 us instead of 0.8 us with a dict (CPython 3.11).
@attrs.frozen(slots=False)
class Event(Generic[DataT_co]):
    """One verified delivery, typed by its event class.

    Delivery is at least once. ``key`` is the same for every copy and retry, so a handler can use it
    to make its work idempotent. If all deliveries have one sender, as without tenants,
    ``webhook_id`` is the same text.

    An application's own event class names its type and its data::

        class InvoiceSentEvent(Event[InvoiceData]):
            wire_type = "acme.invoice_sent"
    """

    wire_type: ClassVar[str] = ""
    """The type of this class's deliveries; "" on classes for many types."""

    webhook_id: str
    """The ``webhook-id`` header."""
    type: str
    """The type as sent, such as ``order.paid``."""
    timestamp: datetime
    """When it happened, aware: the document's ``timestamp``, or else the signed header's."""
    data: DataT_co = attrs.field(repr=_name_of_data)
    """The payload's fields that fit its class. ``data.id`` identifies the subject record."""
    raw: bytes = attrs.field(repr=False)
    """The exact signed bytes."""
    attempt: int
    """The number of runs of this event, including this one: from 1."""
    received_at: datetime
    """When this copy arrived here, aware."""
    tenant: Any = None
    """The tenant that the event belongs to, or None."""
    api_version: str | None = None
    """The version of the sender's API that shaped ``data``; None when the document has none."""
    key: str = attrs.field(default=attrs.Factory(lambda self: self.webhook_id, takes_self=True))
    """The key of the delivery: who signed it and ``webhook_id``, in one text."""
    generation: int = 0
    """The number of replays after it was done; retries do not count."""

    @property
    def synthetic(self) -> bool:
        """Whether catch-up made the event from the upstream's state; it was never delivered."""
        return is_synthetic(self.webhook_id)

    @functools.cached_property
    def json(self) -> dict[str, Any]:
        """The full document as plain JSON values; decoded on first use."""
        document: dict[str, Any] = plain(self.raw)
        return document


def make_event(event_class: type[Event[Any]], *values: Any) -> Event[Any]:
    """Create an event from all its attributes, in the order of :class:`Event`.

    Passing them by name would nearly double the time; only classes with additional attributes need
    that.
    """
    if event_class.__init__ is Event.__init__:
        return event_class(*values)
    names = (field.name for field in attrs.fields(Event))
    return event_class(**dict(zip(names, values, strict=True)))


class UnknownEvent(Event[Payload]):
    """An event of an unknown type; its fields are in ``data.extra``."""

    __slots__ = ()
