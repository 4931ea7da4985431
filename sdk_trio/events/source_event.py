"""The event of a source, and the decoding of its data into a class of the application."""

from collections.abc import Callable
from typing import Any, Generic

import attrs
import msgspec

from .decoding import MAX_DRIFTS, Drift, moment
from .event import DataT_co, Event
from .values import decoder_for, fit, members_of, plain


@attrs.frozen(slots=False)
class SourceEvent(Event[DataT_co], Generic[DataT_co]):
    """One verified delivery of a source, which is another sender than the upstream.

    ``webhook_id`` is the sender's id of the event, ``key`` also names the source: it is the same
    for every copy and retry, and no other sender's event has it. ``data`` is decoded into the class
    that the handler was registered with, None without one. ``json`` is the whole document.
    """

    source: str = ""
    """The name of the source in the settings."""


class DataClass(msgspec.Struct, frozen=True):
    """The class of a handler's data, and the members that lead to it in the body."""

    kind: Any
    path: tuple[str, ...]

    def decode(self, raw: bytes, report: Callable[[str, str], None]) -> Any:
        """Return the data in a body; never raises because of a sender's input.

        A value that does not fit is reported with its path, and the data has the fields that fit.
        None if the class cannot be made from these.
        """
        found: bytes | msgspec.Raw = raw
        for name in self.path:
            members = members_of(found)
            found = b"null" if members is None else members.get(name, msgspec.Raw(b"null"))
        place = ".".join(self.path)
        if hasattr(self.kind, "model_validate_json"):
            return _fit_model(self.kind, bytes(found), place, report)
        try:
            return decoder_for(self.kind).decode(found)
        except Exception:  # a type of the application may raise anything
            return fit(self.kind, found, place or "body", report)


def _fit_model(kind: Any, raw: bytes, path: str, report: Callable[[str, str], None]) -> Any:
    """Return an instance of a pydantic model, without the fields that do not fit."""
    try:
        return kind.model_validate_json(raw)
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
        return kind.model_validate({n: v for n, v in members.items() if n not in wrong})
    except Exception:  # no object, or the application's own validators
        return None


def decode_source_event(
    source: str,
    data_class: DataClass | None,
    *,
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
        data_class: the class of its data, if its handler has one.
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
        data=None if data_class is None else data_class.decode(raw, report),
        raw=raw,
        attempt=attempt,
        received_at=moment(received_at),
        key=key,
        generation=generation,
        source=source,
    )
