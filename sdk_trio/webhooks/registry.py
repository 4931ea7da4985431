"""The registry: one handler for each event type, checked when it is registered.

Mistakes are errors at the line that registers, or at the start, never at the first delivery: a
handler that cannot run would cost the sender's attempts.
"""

import inspect
import sys
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType
from typing import Any, Generic, TypeVar, cast, get_args, get_origin

import attrs

from ..errors import HandlerRegistrationError, MissingHandlersError
from ..events import DEFAULT_CATALOG, Catalog, Event, EventType
from ..events.decoding import Documents
from .outcomes import describe_error, is_interrupt
from .services import Services

E = TypeVar("E", bound=Event[Any])
H = TypeVar("H")

#: The types without a handler that a start names; ``doctor`` lists all.
_MOST_NAMED = 3


class WebhookHandlerBase(Generic[E]):
    """Base of a handler for one event type: derive from it and implement ``handle_core``.

    One object serves every delivery of its type, several at the same time, so state of one event
    belongs into local variables. Delivery is at-least-once: make ``handle_core`` idempotent, with
    ``event.key`` as the key (``event.webhook_id`` is enough where there is one sender).
    """

    async def handle_core(self, event: E) -> None:
        """Handle one verified event; returning means that it is done.

        Any exception counts as a failed attempt, ``SystemExit`` and its like as well;
        :class:`~sdk_trio.RetryLater` also says when to try again. Inline handlers are cancelled
        after ``InlineTimeoutSeconds``, which is a failed attempt, and enqueued ones when a
        shutdown's drain timeout ends; exceptions because of the latter cost no attempt.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement handle_core")

    async def on_error(self, event: E, error: Exception) -> None:
        """Hook: called after ``handle_core`` raised ``error``, before the attempt is recorded.

        A BaseException that is no Exception, such as ``SystemExit``, comes as the cause of a
        :class:`~sdk_trio.errors.HandlerAbortedError`. Exceptions of this hook are logged and change
        nothing else. The default does nothing.
        """


class _FunctionHandler(WebhookHandlerBase[Any]):
    """Adapts ``async def handler(event)`` or ``async def handler(event, services)``."""

    def __init__(
        self, name: str, function: Callable[..., Awaitable[None]], services: Services[Any]
    ) -> None:
        self._function = function
        self._arguments = (services,) if _positional_count(function) == 2 else ()
        signature = inspect.signature(function)
        try:
            signature.bind(None, *self._arguments)
        except TypeError:
            raise HandlerRegistrationError(
                f"{name}{signature}: a handler function takes the event, or the event and the "
                "services."
            ) from None

    async def handle_core(self, event: Event[Any]) -> None:
        await self._function(event, *self._arguments)


@attrs.frozen
class Registration:
    """One registered handler: the given object, and the way in which its events are run.

    ``event_class`` is the class that it was registered for, None for a fallback; ``place`` is the
    line that registered it.
    """

    name: str
    handler: object
    enqueue: bool
    ordered: bool
    run_when_suspended: bool = True
    event_class: type[Event[Any]] | None = None
    place: str = ""


@attrs.frozen
class BoundHandler:
    """A handler that is ready to run."""

    name: str
    handler: WebhookHandlerBase[Any]
    enqueue: bool
    ordered: bool
    run_when_suspended: bool = True


@attrs.frozen
class BoundHandlers:
    """All handlers of an application, built with its services; looked up for each delivery."""

    catalog: Catalog
    by_type: dict[str, BoundHandler]
    fallback: BoundHandler | None

    @property
    def documents(self) -> Documents:
        """Return the decoders of the types that have an inline handler of their own."""
        inline = [wire_type for wire_type, handler in self.by_type.items() if not handler.enqueue]
        rows = (self.catalog.by_type(wire_type) for wire_type in inline)
        return Documents(row for row in rows if row is not None)

    def find(self, event_type: str) -> BoundHandler | None:
        """Return the handler of ``event_type``, else the fallback, else None."""
        return self.by_type.get(event_type, self.fallback)


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

    def register(
        self,
        event_class: type[E],
        handler: object,
        *,
        enqueue: bool = False,
        ordered: bool = False,
        run_when_suspended: bool = True,
    ) -> None:
        """Register ``handler`` for the events of ``event_class``.

        Args:
            event_class: a class of the catalogue, such as ``OrderPaidEvent``.
            handler: an instance of :class:`WebhookHandlerBase`; or a factory (a class included)
                that takes nothing or the :class:`Services` and returns one; or an ``async``
                function of the event, or of the event and the services.
            enqueue: commit the event to the inbox, answer 200, and run the handler in a worker
                with local retries. Advised from about 5 seconds of work, because senders give up
                on a delivery after some 10.
            ordered: with ``enqueue``: the events of one ``data.id`` run one at a time, in the
                order of arrival.
            run_when_suspended: False keeps the events of a tenant that is not active as parked,
                to be replayed once it is active again.

        Raises:
            HandlerRegistrationError: the type has a handler already, the class is not in the
                catalogue, or ``handler`` is no handler, or one of another event class.
        """
        wire_type = self._wire_type(event_class)
        if wire_type in self._registrations:
            holder = self._registrations[wire_type]
            raise HandlerRegistrationError(
                f"{event_class.__name__} ({wire_type}) has a handler already: {holder.name}, "
                f"registered at {holder.place}. One handler per event type; call both from one, or "
                "remove a registration."
            )
        registration = _registration(
            handler, enqueue=enqueue, ordered=ordered, run_when_suspended=run_when_suspended
        )
        registration = attrs.evolve(registration, event_class=event_class, place=_users_line())
        if isinstance(handler, type):
            _require_event_class(registration, handler)
        elif isinstance(handler, WebhookHandlerBase):
            _require_event_class(registration, type(handler))
        self._registrations[wire_type] = registration

    def on(
        self,
        event_class: type[E],
        *,
        enqueue: bool = False,
        ordered: bool = False,
        run_when_suspended: bool = True,
    ) -> Callable[[H], H]:
        """Decorate an ``async`` function or a handler class: :meth:`register` as a decorator.

        Raises:
            HandlerRegistrationError: at once, if ``event_class`` is no class of the catalogue: as
                where the decorator is written without it.
        """
        if inspect.isfunction(cast("object", event_class)):
            # Python calls a decorator without parentheses with what stands below it, which would
            # register nothing and say nothing.
            raise HandlerRegistrationError(
                f"@handlers.on above {event_class.__name__} has no event class: write "
                f"@handlers.on(OrderPaidEvent), or the class that {event_class.__name__} handles."
            )
        self._wire_type(event_class)

        def decorate(handler: H) -> H:
            self.register(
                event_class,
                handler,
                enqueue=enqueue,
                ordered=ordered,
                run_when_suspended=run_when_suspended,
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
    ) -> H:
        """Register ``handler`` for every event whose type has none, unknown types included.

        Without a fallback such events are kept as parked and can be replayed later. The fallback
        does not satisfy the completeness check, which asks for each type's own handler.
        """
        if self._fallback is not None:
            raise HandlerRegistrationError(
                f"there is a fallback already: {self._fallback.name}, registered at "
                f"{self._fallback.place}. Only one is possible."
            )
        registration = _registration(
            handler, enqueue=enqueue, ordered=ordered, run_when_suspended=run_when_suspended
        )
        self._fallback = attrs.evolve(registration, place=_users_line())
        return handler

    def ignore(self, *event_classes: type[Event[Any]]) -> None:
        """Mark event types that are left without a handler on purpose.

        The completeness check does not ask for them, and nothing is said of them at the start.
        Their events are kept as parked, or go to the fallback, as those of any such type.

        Raises:
            HandlerRegistrationError: a class is not in the catalogue.
        """
        self._ignored.update(map(self._wire_type, event_classes))

    def __iter__(self) -> Iterator[str]:
        """Iterate over the wire types that have a handler."""
        return iter(self._registrations)

    def __len__(self) -> int:
        return len(self._registrations)

    def missing(self) -> tuple[str, ...]:
        """Return a line for each known type without a handler, in catalogue order.

        Types given to :meth:`ignore` are left out.

        Each line has the count ("N of 28"), the type, its class and the suggested registration.
        """
        known = self.catalog.known
        lacking = self._lacking()
        return tuple(
            f"{len(lacking)} of {len(known)} known event types have no handler: {entry.wire_type} "
            f"({entry.event_class.__name__}); "
            f"register it with handlers.register({entry.event_class.__name__}, YourHandler)"
            for entry in lacking
        )

    @property
    def missing_types(self) -> tuple[str, ...]:
        """The known types without a handler, but those given to :meth:`ignore`."""
        return tuple(row.wire_type for row in self._lacking())

    def incomplete(self) -> str | None:
        """Say in one line how many known types nothing handles; None if there are none.

        A fallback handles each type, so there are none with one.
        """
        lacking = self._lacking()
        if not lacking or self._fallback is not None:
            return None
        if len(lacking) > _MOST_NAMED:
            some = f"{', '.join(row.wire_type for row in lacking[:_MOST_NAMED])}, ..."
        else:
            some = ", ".join(row.wire_type for row in lacking)
        return f"{len(lacking)} of {len(self.catalog.known)} known event types: {some}"

    def require_complete(self) -> None:
        """Raise :class:`MissingHandlersError`, with every missing type, if there is any."""
        lines = self.missing()
        if lines:
            raise MissingHandlersError(
                self.missing_types,
                "Sdk:Webhooks:FailOnMissingHandlers is true, and:\n  " + "\n  ".join(lines),
            )

    def bind(self, services: Services[Any]) -> BoundHandlers:
        """Build every handler once, with ``services``; called when a receiver starts.

        Raises:
            HandlerRegistrationError: a factory raised, or returned no handler.
        """
        return BoundHandlers(
            catalog=self.catalog,
            by_type={
                wire_type: _bind(registration, services)
                for wire_type, registration in self._registrations.items()
            },
            fallback=_bind(self._fallback, services) if self._fallback else None,
        )

    def _lacking(self) -> list[EventType]:
        settled = self._registrations.keys() | self._ignored
        return [row for row in self.catalog.known if row.wire_type not in settled]

    def _wire_type(self, event_class: type[Event[Any]]) -> str:
        if isinstance(event_class, str):  # not typed so, but often tried
            row = self.catalog.by_type(event_class)
            if row is not None:
                raise HandlerRegistrationError(
                    f"{event_class!r} is a type's name: give its class, {row.event_class.__name__} "
                    f"of {row.event_class.__module__.rpartition('.')[0]}."
                )
        return self.catalog.by_class(event_class).wire_type


def _registration(
    handler: object, *, enqueue: bool, ordered: bool, run_when_suspended: bool
) -> Registration:
    name = getattr(handler, "__qualname__", None) or type(handler).__qualname__
    if ordered and not enqueue:
        raise HandlerRegistrationError(
            f"{name}: ordered=True needs enqueue=True, because only the queue keeps an order."
        )
    if isinstance(handler, type) and issubclass(handler, WebhookHandlerBase):
        _require_handle_core(name, handler)
    if not callable(handler) and not isinstance(handler, WebhookHandlerBase):
        raise HandlerRegistrationError(
            f"{name} is no handler: give a WebhookHandlerBase, a factory of one, or an async "
            "function of the event."
        )
    if inspect.isfunction(handler) and _is_unawaited(handler):
        raise HandlerRegistrationError(
            f"{name} is no coroutine function: write `async def {handler.__name__}"
            f"{_names(handler)}`. A plain function is taken for a factory, and a factory takes "
            "nothing or one parameter `services`."
        )
    return Registration(name, handler, enqueue, ordered, run_when_suspended)


def _is_unawaited(function: Callable[..., object]) -> bool:
    """Say whether a function is a handler whose ``async`` was forgotten, and no factory.

    A factory is called at the start with the services. A handler that was taken for one would run
    then, with the services in the place of an event.
    """
    if inspect.iscoroutinefunction(inspect.unwrap(function)):
        return False
    needed = [one for one in _positional(function) if one.default is inspect.Parameter.empty]
    if len(needed) != 1:
        return bool(needed)
    (parameter,) = needed
    # An annotation may be a text, a class or one with arguments: its name is in each of these.
    return parameter.name != "services" and "Services" not in str(parameter.annotation)


def _names(function: Callable[..., object]) -> str:
    return f"({', '.join(parameter.name for parameter in _positional(function))})"


def _bind(registration: Registration, services: Services[Any]) -> BoundHandler:
    handler = registration.handler
    if isinstance(handler, WebhookHandlerBase):
        built: object = handler
    elif inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
        getattr(handler, "__call__", None)  # noqa: B004 - the method itself is asked for
    ):
        function = cast("Callable[..., Awaitable[None]]", handler)
        built = _FunctionHandler(registration.name, function, services)
    else:
        factory = cast("Callable[..., object]", handler)
        built = _build(registration.name, registration.place, factory, services)
    if not isinstance(built, WebhookHandlerBase):
        raise HandlerRegistrationError(
            f"{registration.place}: {registration.name} returned {type(built).__name__}, which is "
            "no WebhookHandlerBase. A handler function must be `async def`."
        )
    _require_handle_core(registration.name, type(built))
    _require_event_class(registration, type(built))
    return BoundHandler(
        registration.name,
        built,
        registration.enqueue,
        registration.ordered,
        registration.run_when_suspended,
    )


def _require_handle_core(name: str, handler_class: type[WebhookHandlerBase[Any]]) -> None:
    function = handler_class.handle_core
    if function is WebhookHandlerBase.handle_core or not (
        # A decorator with functools.wraps is a plain function around the coroutine function.
        inspect.iscoroutinefunction(function)
        or inspect.iscoroutinefunction(inspect.unwrap(function))
    ):
        raise HandlerRegistrationError(
            f"{name} does not implement `async def handle_core(self, event)`."
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
    arguments = (services,) if _positional_count(factory) else ()
    try:
        return factory(*arguments)
    except BaseException as error:  # SystemExit from a factory is its fault, not a wish to stop
        if is_interrupt(error):
            raise
        raise HandlerRegistrationError(  # noqa: ASYNC104 - no loop cancels a start's factories
            f"{place}: building the handler {name} failed: {describe_error(error)}"
        ) from error


def _positional_count(function: Callable[..., object]) -> int:
    """Count the positional parameters without a default that a call must give."""
    return sum(one.default is inspect.Parameter.empty for one in _positional(function))


def _positional(function: Callable[..., object]) -> list[inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [one for one in inspect.signature(function).parameters.values() if one.kind in kinds]
