"""Handlers that are ready to run, as they are found for each delivery."""

from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

import msgspec
import trio

from ..events import Catalog
from ..events.decoding import Documents
from ..records.deliveries import Postponed, source_of_signer
from ..records.policies import UNLIMITED, Policy
from .handler import WebhookHandlerBase
from .routes import Route, first_match


class Gate(Protocol):
    """Decides when a handler takes events; only forwarding has one."""

    def hold(self) -> Postponed | None:
        """Return when an event is due again, or None if it can run now."""
        ...

    def take_answer(self, key: str) -> str | None:
        """Return the application's answer to the event of ``key``, once."""
        ...


class BoundHandler(msgspec.Struct, frozen=True):
    """A handler that is ready to run.

    ``threads`` limits the number of concurrent plain functions; a run acquires a slot before it
    starts. It is None for other handlers. ``place`` is the line that defines it, None if unknown.
    ``group`` names the events that its ``policy`` limits together; ``limited``: the store decides
    which of them may run. ``data_class`` is that of the data of
    a source's events.
    """

    name: str
    handler: WebhookHandlerBase[Any]
    enqueue: bool
    ordered: bool
    run_when_suspended: bool = True
    threads: trio.CapacityLimiter | None = None
    gate: Gate | None = None
    place: str | None = None
    policy: Policy = UNLIMITED
    group: str = ""
    limited: bool = False
    data_class: Any = None


class HandlersOfSource(msgspec.Struct, frozen=True):
    """The handlers of one source: by type, and the fallback."""

    by_type: dict[str, BoundHandler] = {}
    fallback: BoundHandler | None = None


_NONE_OF_SOURCE: Final = HandlersOfSource()


class RoutedHandler(msgspec.Struct, frozen=True):
    """The handler that posts the events of a route."""

    route: Route
    handler: BoundHandler


class BoundHandlers(msgspec.Struct, frozen=True):
    """All handlers of an application, built with its services; looked up for each delivery.

    A type's own handler comes first, then the first route that takes the event, then the fallback.
    Each source has handlers of its own.
    """

    catalog: Catalog
    by_type: dict[str, BoundHandler]
    fallback: BoundHandler | None
    routed: Sequence[RoutedHandler] = ()
    by_source: dict[str, HandlersOfSource] = {}

    @property
    def documents(self) -> Documents:
        """Return the decoders of the types that have an inline handler of their own."""
        inline = [wire_type for wire_type, handler in self.by_type.items() if not handler.enqueue]
        rows = (self.catalog.by_type(wire_type) for wire_type in inline)
        return Documents(row for row in rows if row is not None)

    def __iter__(self) -> Iterator[BoundHandler]:
        """Iterate over the handlers of types, those of routes, and the fallback, then sources'."""
        yield from self.by_type.values()
        yield from (each.handler for each in self.routed)
        if self.fallback is not None:
            yield self.fallback
        for of_source in self.by_source.values():
            yield from of_source.by_type.values()
            if of_source.fallback is not None:
                yield of_source.fallback

    @property
    def timeouts(self) -> tuple[float, ...]:
        """Return the timeouts of the handlers that have one of their own, in seconds."""
        limits = (handler.policy.timeout for handler in self)
        return tuple(limit for limit in limits if limit is not None)

    def find(
        self, event_type: str, raw: bytes | None = None, signer: str = ""
    ) -> BoundHandler | None:
        """Return the handler of ``event_type``, otherwise of a route or the fallback, otherwise
        None.

        ``raw`` is the body, against which the conditions of routes are checked; ``signer`` is the
        delivery's, which names its source.
        """
        by_type, fallback = self.by_type, self.fallback
        source = source_of_signer(signer) if signer else None
        if source is not None:
            own = self.by_source.get(source, _NONE_OF_SOURCE)
            by_type, fallback = own.by_type, own.fallback
        if not self.routed:
            return by_type.get(event_type, fallback)
        if (handler := by_type.get(event_type)) is not None:
            return handler
        index = first_match([each.route for each in self.routed], event_type, raw, source)
        return fallback if index is None else self.routed[index].handler
