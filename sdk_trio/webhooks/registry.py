"""The registry: one handler for each event type, checked when it is registered.

Mistakes are errors at the line that registers, or at the start, never at the first delivery: a
handler that cannot run would cost the sender's attempts.
"""

import inspect
import sys
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from functools import partial
from types import FrameType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    Protocol,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    overload,
)

import msgspec
import trio

from ..base.foreign_errors import is_interrupt
from ..config import StorageBackend
from ..errors import (
    HandlerRegistrationError,
    MissingHandlersError,
    OptionsValidationError,
    Problem,
)
from ..events import DEFAULT_CATALOG, Catalog, Event
from ..events.decoding import Documents
from ..records.deliveries import Postponed
from ..storage.effects import Transaction
from .handler import (
    CoroutineHandler,
    ForeignHandler,
    ForeignLoop,
    Handler,
    Kind,
    Surrounding,
    ThreadHandler,
    TransactionHandler,
    WebhookHandlerBase,
    definition_of,
    event_annotation,
    kind_of,
    name_of,
    needed_parameters,
    signature_of,
    takes_services,
)
from .outcomes import describe_error
from .routes import Route, first_match
from .services import Services

__all__ = ["BoundHandler", "BoundHandlers", "HandlerRegistry", "Registration", "WebhookHandlerBase"]

E = TypeVar("E", bound=Event[Any])
C = TypeVar("C", bound=WebhookHandlerBase[Any])
H = TypeVar("H", bound=Handler[Any])
R = TypeVar("R", bound=Awaitable[Any] | WebhookHandlerBase[Any] | None)


class Registration(msgspec.Struct, frozen=True):
    """One registered handler: the given object, and the options for running its events.

    ``event_class`` is the class that it was registered for, None for a fallback; ``place`` is the
    line that registered it.
    """

    name: str
    handler: object
    kind: Kind
    enqueue: bool
    ordered: bool
    run_when_suspended: bool = True
    asyncio: bool = False
    event_class: type[Event[Any]] | None = None
    place: str = ""


#: The type of the delivery with which ``doctor`` tests a running receiver; no upstream sends it.
PROBE_TYPE = "sdk_trio.doctor"


class _ProbeHandler(WebhookHandlerBase[Event[Any]]):
    """Does nothing, so a probe is done: it reaches no fallback or route, and is not parked."""

    async def handle_core(self, event: Event[Any]) -> None:
        await trio.lowlevel.checkpoint()


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
    """

    name: str
    handler: WebhookHandlerBase[Any]
    enqueue: bool
    ordered: bool
    run_when_suspended: bool = True
    threads: trio.CapacityLimiter | None = None
    gate: Gate | None = None
    place: str | None = None


class RoutedHandler(msgspec.Struct, frozen=True):
    """The handler that posts the events of a route."""

    route: Route
    handler: BoundHandler


class BoundHandlers(msgspec.Struct, frozen=True):
    """All handlers of an application, built with its services; looked up for each delivery.

    A type's own handler comes first, then the first route that takes the event, then the fallback.
    """

    catalog: Catalog
    by_type: dict[str, BoundHandler]
    fallback: BoundHandler | None
    routed: Sequence[RoutedHandler] = ()

    @property
    def documents(self) -> Documents:
        """Return the decoders of the types that have an inline handler of their own."""
        inline = [wire_type for wire_type, handler in self.by_type.items() if not handler.enqueue]
        rows = (self.catalog.by_type(wire_type) for wire_type in inline)
        return Documents(row for row in rows if row is not None)

    def find(self, event_type: str, raw: bytes | None = None) -> BoundHandler | None:
        """Return the handler of ``event_type``, otherwise of a route or the fallback, otherwise
        None.

        ``raw`` is the body, against which the conditions of routes are checked.
        """
        if not self.routed:
            return self.by_type.get(event_type, self.fallback)
        if (handler := self.by_type.get(event_type)) is not None:
            return handler
        index = first_match([each.route for each in self.routed], event_type, raw)
        return self.fallback if index is None else self.routed[index].handler


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

        Raises:
            HandlerRegistrationError: the type has a handler already, the class is not in the
                catalogue, or ``handler`` is not a handler, or handles another event class.
        """
        wire_type = self._wire_type(event_class)
        if wire_type in self._registrations:
            holder = self._registrations[wire_type]
            raise HandlerRegistrationError(
                f"{event_class.__name__} ({wire_type}) already has a handler: {holder.name}, "
                f"registered at {holder.place}. Each event type has one handler: call both "
                "functions from one handler, or remove a registration."
            )
        registration = _registration(
            handler,
            enqueue=enqueue,
            ordered=ordered,
            run_when_suspended=run_when_suspended,
            transaction=transaction,
            asyncio=asyncio,
        )
        registration = msgspec.structs.replace(
            registration, event_class=event_class, place=_users_line()
        )
        _require_annotation(registration)
        if isinstance(handler, type):
            _require_event_class(registration, handler)
        elif isinstance(handler, WebhookHandlerBase):
            _require_event_class(registration, type(handler))
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
        registration = _registration(
            handler,
            enqueue=enqueue,
            ordered=ordered,
            run_when_suspended=run_when_suspended,
            asyncio=asyncio,
        )
        registration = msgspec.structs.replace(registration, place=_users_line())
        _require_annotation(registration)
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

    @property
    def needs_host_loop(self) -> bool:
        """Return whether a handler has ``asyncio=True``, so that a start without a loop fails."""
        given = (*self._registrations.values(), self._fallback)
        return any(each is not None and each.asyncio for each in given)

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
    def transactional(self) -> tuple[Registration, ...]:
        """The registrations with ``transaction=True``."""
        each = self._registrations.values()
        return tuple(one for one in each if one.kind is Kind.TRANSACTION)

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
            _bind,
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


def _registration(
    handler: object,
    *,
    enqueue: bool,
    ordered: bool,
    run_when_suspended: bool,
    transaction: bool = False,
    asyncio: bool = False,
) -> Registration:
    name = name_of(handler)
    if ordered and not enqueue:
        raise HandlerRegistrationError(
            f"{name}: ordered=True needs enqueue=True, because only the queue keeps the order."
        )
    kind = kind_of(handler)
    if asyncio and kind is Kind.THREAD:
        raise HandlerRegistrationError(
            f"{name} is a plain function, which runs in a thread: asyncio=True is for `async def`."
        )
    if transaction:
        _require_transaction_function(name, handler, kind, enqueue=enqueue)
        return Registration(name, handler, Kind.TRANSACTION, enqueue, ordered, run_when_suspended)
    if isinstance(handler, type) and issubclass(handler, WebhookHandlerBase):
        _require_handle_core(name, handler)
    if kind in (Kind.COROUTINE, Kind.THREAD):
        takes_services(name, cast("Callable[..., object]", handler))
    return Registration(name, handler, kind, enqueue, ordered, run_when_suspended, asyncio)


def _require_transaction_function(name: str, handler: object, kind: Kind, *, enqueue: bool) -> None:
    """Refuse a handler whose effects could not be in one transaction with the event's end."""
    if not enqueue:
        raise HandlerRegistrationError(
            f"{name}: transaction=True needs enqueue=True, because the transaction ends a run of "
            "the queue."
        )
    if kind is Kind.COROUTINE:
        raise HandlerRegistrationError(
            f"{name}: a transaction cannot await anything, so write `def`. To await something "
            "first, write an `async` handler that ends with `await services.finish(event, save)`."
        )
    if kind is Kind.THREAD:
        signature = signature_of(name, cast("Callable[..., object]", handler))
        if len(needed_parameters(signature)) == 2:
            return
    raise HandlerRegistrationError(
        f"{name}: with transaction=True a handler is a function of the event and the transaction, "
        "`def handler(event, tx)`."
    )


def _bind(
    registration: Registration,
    *,
    services: Services[Any],
    threads: trio.CapacityLimiter,
    around: Sequence[Surrounding],
    host_loop: ForeignLoop | None,
) -> BoundHandler:
    name, given = registration.name, cast("Any", registration.handler)
    match registration.kind:
        case Kind.INSTANCE:
            built: object = given
        case Kind.COROUTINE:
            built = CoroutineHandler(name, given, services)
        case Kind.THREAD:
            built = ThreadHandler(name, given, services, around)
        case Kind.TRANSACTION:
            built = TransactionHandler(name, given, services)
        case Kind.FACTORY:
            built = _build(name, registration.place, given, services)
    if not isinstance(built, WebhookHandlerBase):
        raise HandlerRegistrationError(
            f"{registration.place}: {name} returned {type(built).__name__}, which is not a "
            "WebhookHandlerBase. A function that handles events takes the event."
        )
    _require_handle_core(name, type(built))
    _require_event_class(registration, type(built))
    core = built
    if registration.asyncio:
        if host_loop is None:
            raise HandlerRegistrationError(
                f"{registration.place}: {name} has asyncio=True, and there is no asyncio loop: "
                "run it with sdk_trio.asgi.Threaded in an application of an asyncio server."
            )
        built = ForeignHandler(built, host_loop)
    return BoundHandler(
        name,
        built,
        registration.enqueue,
        registration.ordered,
        registration.run_when_suspended,
        threads if registration.kind in (Kind.THREAD, Kind.TRANSACTION) else None,
        place=definition_of(given if registration.kind is not Kind.FACTORY else type(core)),
    )


def _require_handle_core(name: str, handler_class: type[WebhookHandlerBase[Any]]) -> None:
    function = handler_class.handle_core
    if function is WebhookHandlerBase.handle_core or not (
        # A decorator with functools.wraps is a plain function around the coroutine function.
        inspect.iscoroutinefunction(function)
        or inspect.iscoroutinefunction(inspect.unwrap(function))
    ):
        raise HandlerRegistrationError(
            f"{name} does not implement `async def handle_core(self, event)`; for work that "
            "blocks, write a plain function of the event, which runs in a thread."
        )


def _require_event_class(registration: Registration, handler_class: type) -> None:
    """Refuse a handler that declares another event class: it could not read its events."""
    declared = _declared_event(handler_class)
    wanted = registration.event_class
    if wanted is None or declared is None or issubclass(wanted, declared):
        return
    raise HandlerRegistrationError(
        f"{registration.place}: {registration.name} handles {declared.__name__}, and is registered "
        f"for {wanted.__name__}. Register it for {declared.__name__}, or derive it from "
        f"WebhookHandlerBase[{wanted.__name__}]."
    )


def _require_annotation(registration: Registration) -> None:
    """Refuse a function whose parameter is annotated with another class than its events'.

    Raises:
        HandlerRegistrationError: names the annotation, and the line that registers the function.
    """
    if registration.kind not in (Kind.COROUTINE, Kind.THREAD, Kind.TRANSACTION):
        return
    annotation = event_annotation(cast("Callable[..., object]", registration.handler))
    wanted = registration.event_class
    declared = _classes_in(annotation)
    if declared is None or any(_may_be(wanted, each) for each in declared):
        return
    shown = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    expected = "Event" if wanted is None else wanted.__name__
    raise HandlerRegistrationError(
        f"{registration.place}: {registration.name} takes {shown}, and is registered for "
        f"{'every type' if wanted is None else expected}. Annotate its event with {expected}, or "
        "register it for the class that it takes."
    )


def _may_be(wanted: type[Event[Any]] | None, declared: type) -> bool:
    """Return whether events of ``wanted``, or of any type if None, can have a declared class."""
    if getattr(declared, "_is_protocol", False):
        return True
    if wanted is None:
        return issubclass(declared, Event) or issubclass(Event, declared)
    return issubclass(wanted, declared)


def _classes_in(annotation: object) -> list[type] | None:
    """Return the classes that an annotation allows; None if it cannot be judged."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _classes_in(get_args(annotation)[0])
    if origin in (Union, UnionType):
        members = [_classes_in(each) for each in get_args(annotation)]
        return None if None in members else [each for found in members for each in found or ()]
    declared = origin or annotation
    # From Python 3.11 on, Any is also a class.
    return [declared] if isinstance(declared, type) and declared is not Any else None


def _declared_event(handler_class: type) -> type | None:
    """Return the event class of ``WebhookHandlerBase[...]`` among the bases, None if it is open."""
    for base in handler_class.__mro__:
        for generic in base.__dict__.get("__orig_bases__", ()):
            origin = get_origin(generic)
            if isinstance(origin, type) and issubclass(origin, WebhookHandlerBase):
                declared = get_args(generic)[0]
                declared = get_origin(declared) or declared
                if isinstance(declared, type) and issubclass(declared, Event):
                    return declared
    return None


def _users_line() -> str:
    """Return the innermost calling line outside this package, as ``FILE:LINE``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("sdk_trio."):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _build(
    name: str, place: str, factory: Callable[..., object], services: Services[Any]
) -> object:
    arguments = (services,) if needed_parameters(signature_of(name, factory)) else ()
    try:
        return factory(*arguments)
    except (
        BaseException
    ) as error:  # SystemExit from a factory is a fault of the factory, not a request to stop
        if is_interrupt(error):
            raise
        raise HandlerRegistrationError(  # noqa: ASYNC104 - no loop cancels a start's factories
            f"{place}: building the handler {name} failed: {describe_error(error)}"
        ) from error
