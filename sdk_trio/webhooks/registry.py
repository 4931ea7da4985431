"""The registry: one handler for each event type, checked when it is registered.

Mistakes are errors at the line that registers, or at the start, never at the first delivery: a
handler that cannot run would cost the sender's attempts.
"""

import inspect
from collections.abc import Awaitable, Callable, Collection, Iterator
from functools import partial
from typing import (
    Any,
    Literal,
    Protocol,
    TypeVar,
    Unpack,
    cast,
    overload,
)

import msgspec
import trio

from ..config import StorageBackend
from ..errors import (
    HandlerRegistrationError,
    MissingHandlersError,
    OptionsValidationError,
    Problem,
)
from ..events import DEFAULT_CATALOG, Catalog, Event
from ..records.deliveries import SOURCE_MARK
from ..records.policies import PolicyArguments
from ..storage.effects import Transaction
from .bound import BoundHandler, BoundHandlers
from .handler import (
    ForeignLoop,
    Handler,
    Kind,
    Surrounding,
    WebhookHandlerBase,
)
from .registration import (
    Registration,
    bind_registration,
    make_registration,
    require_annotation,
    require_event_class,
)
from .services import Services
from .source_handlers import SourceHandlers

__all__ = ["BoundHandler", "BoundHandlers", "HandlerRegistry", "Registration", "WebhookHandlerBase"]

E = TypeVar("E", bound=Event[Any])
C = TypeVar("C", bound=WebhookHandlerBase[Any])
H = TypeVar("H", bound=Handler[Any])
R = TypeVar("R", bound=Awaitable[Any] | WebhookHandlerBase[Any] | None)


#: The type of the delivery with which ``doctor`` tests a running receiver; no upstream sends it.
PROBE_TYPE = "sdk_trio.doctor"


class _ProbeHandler(WebhookHandlerBase[Event[Any]]):
    """Does nothing, so a probe is done: it reaches no fallback or route, and is not parked."""

    async def handle_core(self, event: Event[Any]) -> None:
        await trio.lowlevel.checkpoint()


#: A handler whose effects are committed in one transaction with the event's end.
TransactionFunction = Callable[[E, Transaction[Any]], None]


class Registrar(Protocol[E]):
    """The decorator of ``@handlers.on(OrderPaidEvent)``: it returns its argument."""

    @overload
    def __call__(self, handler: type[C], /) -> type[C]: ...
    @overload
    def __call__(self, handler: Callable[[E], R], /) -> Callable[[E], R]: ...
    @overload
    def __call__(
        self, handler: Callable[[E, Services[Any]], R], /
    ) -> Callable[[E, Services[Any]], R]: ...


class MissingHandler(msgspec.Struct, frozen=True):
    """A known event type without a handler, as the completeness check reports it.

    ``count`` is their number, as "N of 28".
    """

    count: str
    type: str
    event_class: str

    @property
    def registration(self) -> str:
        """Return the suggested registration."""
        return f"handlers.register({self.event_class}, YourHandler)"

    def __str__(self) -> str:
        return (
            f"{self.count} known event types have no handler: {self.type} ({self.event_class}); "
            f"register it with {self.registration}"
        )


class HandlerRegistry:
    """The handlers of an application, one for each event type.

    ``catalog`` holds the event types that can be registered; the default has all types of the
    upstream, ``DEFAULT_CATALOG.with_event(...)`` adds an application's own.
    """

    def __init__(self, *, catalog: Catalog = DEFAULT_CATALOG) -> None:
        self.catalog = catalog
        self._registrations: dict[str, Registration] = {}
        self._fallback: Registration | None = None
        self._ignored: set[str] = set()
        self._around: list[Surrounding] = []
        self._sources: dict[str, SourceHandlers] = {}
        #: Whether a start logs a warning for each known type without a handler.
        self.warns_of_missing: bool = True
        #: The loop of the handlers with ``asyncio=True``; ``sdk_trio.asgi.Threaded`` sets it.
        self.host_loop: ForeignLoop | None = None

    def register(
        self,
        event_class: type[E],
        handler: Handler[E] | TransactionFunction[E],
        *,
        enqueue: bool = False,
        ordered: bool = False,
        run_when_suspended: bool = True,
        transaction: bool = False,
        asyncio: bool = False,
        **policy: Unpack[PolicyArguments],
    ) -> None:
        """Register ``handler`` for the events of ``event_class``.

        Args:
            event_class: a class of the catalogue, such as ``OrderPaidEvent``.
            handler: an instance of :class:`WebhookHandlerBase`; or a factory (a class included)
                that takes nothing or the :class:`Services` and returns one; or a function of the
                event, or of the event and the services. An ``async`` one runs in the event loop, a
                plain one in a thread, at most ``Queue:Threads`` of them concurrently.
            enqueue: commit the event to the inbox, answer 200, and run the handler in a worker with
                local retries. Recommended from about 5 seconds of work, because senders give up on
                a delivery after about 10.
            ordered: with ``enqueue``: the events of one ``data.id`` run one at a time, in the
                order of arrival.
            run_when_suspended: False parks the events of a tenant that is not active; replay them
                once it is active again. Events of a deleted tenant are always parked.
            transaction: with ``enqueue``: ``handler`` is a plain function of the event and a
                :class:`~sdk_trio.Transaction` of the store's own database, which holds the event.
                Its writes through ``tx.connection`` and the event's end are committed together or
                not at all, so they are applied once. See docs/how-to/exactly-once.md.
            asyncio: await the ``async`` handler on the asyncio loop of the server in which
                ``sdk_trio.asgi.Threaded`` runs. Trio's objects, such as ``services.client``, cannot
                be awaited there.
            policy: how often, how long, and how many of its events run: ``max_attempts``,
                ``timeout``, ``concurrency``, ``rate_per_minute``, ``retry`` and ``coalesce`` of
                :class:`~sdk_trio.records.policies.PolicyArguments`.

        Raises:
            HandlerRegistrationError: the type has a handler already, the class is not in the
                catalogue, or ``handler`` is not a handler, or handles another event class, or a
                policy cannot be kept.
        """
        wire_type = self._wire_type(event_class)
        if wire_type.startswith(SOURCE_MARK):
            raise HandlerRegistrationError(
                f"{wire_type!r} cannot have a handler: {SOURCE_MARK} marks the types of sources."
            )
        if wire_type in self._registrations:
            holder = self._registrations[wire_type]
            raise HandlerRegistrationError(
                f"{event_class.__name__} ({wire_type}) already has a handler: {holder.name}, "
                f"registered at {holder.place}. Each event type has one handler: call both "
                "functions from one handler, or remove a registration."
            )
        registration = make_registration(
            handler,
            enqueue=enqueue,
            ordered=ordered,
            run_when_suspended=run_when_suspended,
            transaction=transaction,
            asyncio=asyncio,
            policy=policy,
        )
        registration = msgspec.structs.replace(
            registration, event_class=event_class, group=wire_type
        )
        require_annotation(registration)
        if isinstance(handler, type):
            require_event_class(registration, handler)
        elif isinstance(handler, WebhookHandlerBase):
            require_event_class(registration, type(handler))
        self._registrations[wire_type] = registration

    @overload
    def on(
        self,
        event_class: type[E],
        *,
        enqueue: bool = ...,
        ordered: bool = ...,
        run_when_suspended: bool = ...,
        transaction: Literal[False] = ...,
        asyncio: bool = ...,
        **policy: Unpack[PolicyArguments],
    ) -> Registrar[E]: ...

    @overload
    def on(
        self,
        event_class: type[E],
        *,
        enqueue: Literal[True],
        ordered: bool = ...,
        run_when_suspended: bool = ...,
        transaction: Literal[True],
        **policy: Unpack[PolicyArguments],
    ) -> Callable[[TransactionFunction[E]], TransactionFunction[E]]: ...

    def on(
        self,
        event_class: type[E],
        *,
        enqueue: bool = False,
        ordered: bool = False,
        run_when_suspended: bool = True,
        transaction: bool = False,
        asyncio: bool = False,
        **policy: Unpack[PolicyArguments],
    ) -> Any:
        """Decorate a function or a handler class: :meth:`register` as a decorator.

        Raises:
            HandlerRegistrationError: ``event_class`` is not a class of the catalogue, for example
                because the decorator has no argument.
        """
        if inspect.isfunction(cast("object", event_class)):
            # Without parentheses, Python passes the decorated function, and nothing would be
            # registered.
            raise HandlerRegistrationError(
                f"@handlers.on above {event_class.__name__} has no event class: write "
                f"@handlers.on(OrderPaidEvent), or the class that {event_class.__name__} handles."
            )
        self._wire_type(event_class)

        def decorate(handler: Any) -> Any:
            self.register(
                event_class,
                handler,
                enqueue=enqueue,
                ordered=ordered,
                run_when_suspended=run_when_suspended,
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
        run_when_suspended: bool = True,
        asyncio: bool = False,
        **policy: Unpack[PolicyArguments],
    ) -> H:
        """Register ``handler`` for every event whose type has none, unknown types included.

        Without a fallback such events are parked and can be replayed later. The fallback does not
        satisfy the completeness check, which requires a handler for each type.
        """
        if self._fallback is not None:
            raise HandlerRegistrationError(
                f"there is already a fallback: {self._fallback.name}, registered at "
                f"{self._fallback.place}. Only one is possible."
            )
        registration = make_registration(
            handler,
            enqueue=enqueue,
            ordered=ordered,
            run_when_suspended=run_when_suspended,
            asyncio=asyncio,
            policy=policy,
        )
        require_annotation(registration)
        self._fallback = registration
        return handler

    def ignore(self, *event_classes: type[Event[Any]]) -> None:
        """Mark event types that have no handler on purpose.

        The completeness check no longer reports them. Their events are still parked, or passed to
        the fallback.

        Args:
            event_classes: classes of the catalogue; none: every known type.

        Raises:
            HandlerRegistrationError: a class is not in the catalogue.
        """
        chosen = event_classes or tuple(row.event_class for row in self.catalog.known)
        self._ignored.update(map(self._wire_type, chosen))

    def around_threads(self, surrounding: Surrounding) -> Surrounding:
        """Enter a context manager around each run of a plain function, in its thread.

        Use it for resources of a thread or of one run: connections, sessions, the locale. It can be
        used as a decorator.

        Args:
            surrounding: takes the event and returns a context manager, such as a generator function
                with ``contextlib.contextmanager``. An exception of it fails the run; if it swallows
                the function's exception, the event is done. The first one registered is the
                outermost.
        """
        self._around.append(surrounding)
        return surrounding

    def source(self, name: str) -> "SourceHandlers":
        """Return the handlers of a source, which is a sender other than the upstream.

        ``name`` is the source's ``Name`` in the settings: ``handlers.source("stripe").on(...)``.
        """
        return self._sources.setdefault(name, SourceHandlers(name))

    @property
    def types_of_sources(self) -> dict[str, tuple[str, ...]]:
        """The types that have a handler, by the name of the source."""
        return {name: each.types for name, each in self._sources.items()}

    @property
    def needs_host_loop(self) -> bool:
        """Return whether a handler has ``asyncio=True``, so that a start without a loop fails."""
        return any(each.asyncio for each in self.registrations)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the wire types that have a handler."""
        return iter(self._registrations)

    def __len__(self) -> int:
        return len(self._registrations)

    def missing(self, *, routed: Collection[str] = ()) -> tuple[MissingHandler, ...]:
        """Return the known types without a handler, in catalogue order.

        A fallback does not count as a handler of a type. Types passed to :meth:`ignore` are
        excluded.

        Args:
            routed: types that routes of the gateway take, which count as handled.
        """
        known = self.catalog.known
        settled = self._registrations.keys() | self._ignored | set(routed)
        lacking = [row for row in known if row.wire_type not in settled]
        count = f"{len(lacking)} of {len(known)}"
        return tuple(
            MissingHandler(count, row.wire_type, row.event_class.__name__) for row in lacking
        )

    def require_complete(self, *, routed: Collection[str] = ()) -> None:
        """Raise :class:`MissingHandlersError`, with every missing type, if there is any.

        Args:
            routed: as for :meth:`missing`.
        """
        missing = self.missing(routed=routed)
        if missing:
            raise MissingHandlersError(
                tuple(each.type for each in missing),
                "Sdk:Webhooks:FailOnMissingHandlers is true, and:\n  "
                + "\n  ".join(map(str, missing)),
            )

    @property
    def registrations(self) -> tuple[Registration, ...]:
        """The registrations in their order, the fallback last; then those of sources."""
        last = () if self._fallback is None else (self._fallback,)
        of_sources = (each for source in self._sources.values() for each in source.registrations)
        return (*self._registrations.values(), *last, *of_sources)

    @property
    def transactional(self) -> tuple[Registration, ...]:
        """The registrations with ``transaction=True``."""
        return tuple(one for one in self.registrations if one.kind is Kind.TRANSACTION)

    def require_transactions(self, backend: StorageBackend) -> None:
        """Raise if handlers need transactions and the store has none.

        Raises:
            OptionsValidationError: names the handlers and their lines.
        """
        if backend is StorageBackend.MEMORY and self.transactional:
            named = ", ".join(f"{one.name} ({one.place})" for one in self.transactional)
            problem = Problem(
                "Sdk:Storage:Backend",
                "Memory has no transactions for the handlers that are registered with "
                f"transaction=True: {named}; use Sqlite or Postgres",
            )
            raise OptionsValidationError([problem])

    def bind(self, services: Services[Any]) -> BoundHandlers:
        """Build every handler once, with ``services``; called when a receiver starts.

        Raises:
            HandlerRegistrationError: a factory raised, or did not return a handler.
        """
        threads = trio.CapacityLimiter(services.settings.webhooks.queue.threads)
        bind = partial(
            bind_registration,
            services=services,
            threads=threads,
            around=tuple(self._around),
            host_loop=self.host_loop,
        )
        return BoundHandlers(
            catalog=self.catalog,
            by_type={
                PROBE_TYPE: BoundHandler("doctor", _ProbeHandler(), enqueue=False, ordered=False),
                **{name: bind(each) for name, each in self._registrations.items()},
            },
            fallback=bind(self._fallback) if self._fallback else None,
            by_source={name: each.bind(bind) for name, each in self._sources.items()},
        )

    def _wire_type(self, event_class: type[Event[Any]]) -> str:
        if isinstance(event_class, str):  # not allowed by the types, but often tried
            row = self.catalog.by_type(event_class)
            if row is not None:
                raise HandlerRegistrationError(
                    f"{event_class!r} is a type's name: give its class, {row.event_class.__name__} "
                    f"of {row.event_class.__module__.rpartition('.')[0]}."
                )
        return self.catalog.by_class(event_class).wire_type
