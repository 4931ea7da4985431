"""The event of a source, and the decoding of its data into a class of the application."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic

import attrs
import msgspec

from .decoding import MAX_DRIFTS, Drift, moment
from .event import DataT_co, Event
from .values import decoder_for, fit, members_of, plain


@attrs.frozen(slots=False)
class SourceEvent(Event[DataT_co], Generic[DataT_co]):
    """One verified delivery of a source, which is a sender other than the upstream.

    ``webhook_id`` is the sender's id of the event, ``key`` also names the source: it is the same
    for every copy and retry, and no other sender's event has it. ``data`` is decoded into the class
    that the handler was registered with, None without one. ``json`` is the whole document.
    """

    source: str = ""
    """The name of the source in the settings."""


def _decode_data(
    kind: Any, raw: bytes, path: Sequence[str], report: Callable[[str, str], None]
) -> Any:
    """Return the data at ``path`` in a body; never raises because of a sender's input.

    A value that does not fit is reported with its path, and the data has the fields that fit. None
    if the class cannot be made from these.
    """
    found: bytes | msgspec.Raw = raw
    for name in path:
        members = members_of(found)
        found = b"null" if members is None else members.get(name, msgspec.Raw(b"null"))
    place = ".".join(path)
    validator = _validator_of(kind)
    if validator is not None:
        return _fit_model(validator, bytes(found), place, report)
    try:
        return decoder_for(kind).decode(found)
    except Exception:  # a type of the application may raise anything
        return fit(kind, found, place or "body", report)


def _validator_of(kind: Any) -> Any:
    """Return the validator of a pydantic model or dataclass; None for any other class."""
    return getattr(kind, "__pydantic_validator__", None)


def is_data_class(kind: type[Any]) -> bool:
    """Return whether the data of a source's event can be decoded into a class."""
    return (
        issubclass(kind, dict | msgspec.Struct)
        or attrs.has(kind)
        or dataclasses.is_dataclass(kind)
        or _validator_of(kind) is not None
    )


def _fit_model(validator: Any, raw: bytes, path: str, report: Callable[[str, str], None]) -> Any:
    """Return an instance of a class of pydantic, without the fields that do not fit."""
    try:
        return validator.validate_json(raw)
    except Exception as error:  # a validator of the application may raise anything
        listed = getattr(error, "errors", None)
        if listed is None:
            report(path or "body", type(error).__name__)
            return None
        wrong = set()
        # Without input and context, which have content of the body.
        for each in listed(include_url=False, include_context=False, include_input=False):
            location = [str(part) for part in each["loc"]]
            wrong.add(location[0] if location else "")
            report(".".join(filter(None, (path, *location))) or "body", each["msg"])
    try:
        members = plain(raw)
        return validator.validate_python({n: v for n, v in members.items() if n not in wrong})
    except Exception:  # no object, or the application's own validators
        return None


def decode_source_event(
    source: str,
    data_class: Any,
    *,
    path: Sequence[str],
    event_type: str,
    webhook_id: str,
    key: str,
    raw: bytes,
    timestamp: float,
    received_at: float,
    attempt: int,
    generation: int,
    on_drift: Callable[[Drift], None],
) -> SourceEvent[Any]:
    """Return the event of a verified delivery of a source.

    Args:
        source: its name.
        data_class: the class of its data; None: its handler has none.
        path: the members that lead to the data in the body.
        event_type: as verified.
        webhook_id: the sender's id of it.
        key: the delivery's key.
        raw: the exact body.
        timestamp: of the attempt, in Unix seconds; of the arrival if the sender names none.
        received_at: in Unix seconds.
        attempt: from 1.
        generation: how often it was replayed after it was done.
        on_drift: called at most 32 times, once for each value that does not fit.
    """
    drifts = 0

    def report(path: str, message: str) -> None:
        nonlocal drifts
        drifts += 1
        if drifts <= MAX_DRIFTS:
            on_drift(Drift(event_type, path, message))

    return SourceEvent(
        webhook_id=webhook_id,
        type=event_type,
        timestamp=moment(timestamp),
        data=None if data_class is None else _decode_data(data_class, raw, path, report),
        raw=raw,
        attempt=attempt,
        received_at=moment(received_at),
        key=key,
        generation=generation,
        source=source,
    )
