"""Handlers of sources: senders other than the upstream, each with its own types."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, Unpack

import msgspec

from ..errors import HandlerRegistrationError
from ..events.source_event import SourceEvent, is_data_class
from ..records.deliveries import signer_of
from ..records.policies import PolicyArguments
from ..storage.effects import Transaction
from .bound import BoundHandler, HandlersOfSource
from .handler import Handler, WebhookHandlerBase
from .registration import (
    FALLBACK,
    Registration,
    make_registration,
    require_annotation,
    require_event_class,
)

#: Everything that can be registered, a function of the event and a transaction included.
SourceHandler: TypeAlias = Handler[Any] | Callable[[Any, Transaction[Any]], None]
H = TypeVar("H", bound=SourceHandler)


class SourceHandlers:
    """The handlers of one source, by event type; see :meth:`HandlerRegistry.source`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._by_type: dict[str, Registration] = {}
        self._fallback: Registration | None = None

    @property
    def registrations(self) -> tuple[Registration, ...]:
        """The registrations in their order, the fallback last."""
        last = () if self._fallback is None else (self._fallback,)
        return (*self._by_type.values(), *last)

    @property
    def types(self) -> tuple[str, ...]:
        """The types that have a handler."""
        return tuple(self._by_type)

    def register(
        self,
        event_type: str,
        handler: SourceHandler,
        data_class: type[Any] | None = None,
        *,
        enqueue: bool = False,
        ordered: bool = False,
        transaction: bool = False,
        asyncio: bool = False,
        **policy: Unpack[PolicyArguments],
    ) -> None:
        """Register ``handler`` for the source's events of one type.

        Args:
            event_type: as the sender writes it, such as ``invoice.paid``.
            handler: as for :meth:`HandlerRegistry.register`; it gets a
                :class:`~sdk_trio.events.SourceEvent`.
            data_class: the class of ``event.data``: a msgspec.Struct, an attrs class, a dataclass,
                a pydantic model, or dict. None: ``event.data`` is None; ``event.json`` has it all.
            enqueue: as for :meth:`HandlerRegistry.register`, as are the arguments below.
            ordered: events of one subject run one at a time; the settings say where it is.
            transaction: see there.
            asyncio: see there.
            policy: see there.

        Raises:
            HandlerRegistrationError: the type has a handler already, ``handler`` is not a handler,
                or ``data_class`` is no such class.
        """
        self._require_type(event_type)
        if event_type in self._by_type:
            holder = self._by_type[event_type]
            raise HandlerRegistrationError(
                f"{event_type} of source {self.name!r} already has a handler: {holder.name}, "
                f"registered at {holder.place}. Each event type has one handler."
            )
        self._by_type[event_type] = self._registration(
            handler,
            event_type,
            data_class,
            enqueue=enqueue,
            ordered=ordered,
            transaction=transaction,
            asyncio=asyncio,
            policy=policy,
        )

    def on(
        self,
        event_type: str,
        data_class: type[Any] | None = None,
        *,
        enqueue: bool = False,
        ordered: bool = False,
        transaction: bool = False,
        asyncio: bool = False,
        **policy: Unpack[PolicyArguments],
    ) -> Callable[[H], H]:
        """Decorate a function or a handler class: :meth:`register` as a decorator."""
        self._require_type(event_type)

        def decorate(handler: H) -> H:
            self.register(
                event_type,
                handler,
                data_class,
                enqueue=enqueue,
                ordered=ordered,
                transaction=transaction,
                asyncio=asyncio,
                **policy,
            )
            return handler

        return decorate

    def fallback(
        self,
        handler: H,
        *,
        enqueue: bool = False,
        ordered: bool = False,
        asyncio: bool = False,
        **policy: Unpack[PolicyArguments],
    ) -> H:
        """Register ``handler`` for every event of the source whose type has none.

        Without it such events are parked. The fallback of the upstream's events gets none of them.
        """
        if self._fallback is not None:
            raise HandlerRegistrationError(
                f"source {self.name!r} already has a fallback: {self._fallback.name}, registered "
                f"at {self._fallback.place}. Only one is possible."
            )
        self._fallback = self._registration(
            handler,
            FALLBACK,
            None,
            enqueue=enqueue,
            ordered=ordered,
            asyncio=asyncio,
            policy=policy,
        )
        return handler

    def _require_type(self, event_type: object) -> None:
        if not isinstance(event_type, str) or not event_type:
            raise HandlerRegistrationError(
                f"a type of source {self.name!r} is a text, such as 'invoice.paid', not "
                f"{event_type!r}."
            )

    def _registration(
        self,
        handler: object,
        event_type: str,
        data_class: object,
        *,
        policy: PolicyArguments,
        **options: bool,
    ) -> Registration:
        if data_class is not None and not (
            isinstance(data_class, type) and is_data_class(data_class)
        ):
            raise HandlerRegistrationError(
                f"the class of the data of {event_type} is {data_class!r}: give a msgspec.Struct, "
                "an attrs class, a dataclass, a pydantic model, or dict."
            )
        registration = msgspec.structs.replace(
            make_registration(handler, policy=policy, **options),
            event_class=SourceEvent,
            group=f"{signer_of(self.name)}:{event_type}",
            source=self.name,
            data_class=data_class,
        )
        require_annotation(registration)
        if isinstance(handler, type):
            require_event_class(registration, handler)
        elif isinstance(handler, WebhookHandlerBase):
            require_event_class(registration, type(handler))
        return registration

    def bind(self, bind: Callable[[Registration], BoundHandler]) -> HandlersOfSource:
        """Build every handler once; ``bind`` builds one."""

        def bound(registration: Registration) -> BoundHandler:
            return msgspec.structs.replace(bind(registration), data_class=registration.data_class)

        return HandlersOfSource(
            {name: bound(each) for name, each in self._by_type.items()},
            None if self._fallback is None else bound(self._fallback),
        )
