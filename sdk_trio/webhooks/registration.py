"""Registrations: what was given for the events of a type, checked, and made ready to run.

Mistakes are errors at the line that registers, or at the start, never at the first delivery: a
handler that cannot run would cost the sender's attempts.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from types import FrameType, UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin

import msgspec
import trio

from ..base.foreign_errors import is_interrupt
from ..errors import HandlerRegistrationError
from ..events import Event
from ..records.policies import UNLIMITED, Policy, PolicyArguments, problems_of
from .bound import BoundHandler
from .handler import (
    CoroutineHandler,
    ForeignHandler,
    ForeignLoop,
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
from .services import Services

#: The group of the events that a fallback handles; see :class:`~sdk_trio.records.policies.Policy`.
FALLBACK = "*"


class Registration(msgspec.Struct, frozen=True):
    """One registered handler: the given object, and the options for running its events.

    ``event_class`` is the class that it was registered for, None for a fallback; ``place`` is the
    line that registered it; ``group`` is the type of its events, ``*`` for a fallback. A handler of
    a source's events has its name in ``source``, ``@NAME:`` before its group, and in ``data_class``
    the class of their data, if any.
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
    policy: Policy = UNLIMITED
    group: str = FALLBACK
    source: str | None = None
    data_class: Any = None


_POLICIES = frozenset(Policy.__struct_fields__)


def make_registration(
    handler: object,
    *,
    enqueue: bool,
    ordered: bool,
    run_when_suspended: bool = True,
    transaction: bool = False,
    asyncio: bool = False,
    policy: PolicyArguments,
) -> Registration:
    """Check a handler and its options, and return the registration; see ``HandlerRegistry``.

    Raises:
        HandlerRegistrationError: it is not a handler, or its options cannot be kept.
    """
    name, place = name_of(handler), _users_line()
    policies = _policy_of(name, place, policy, enqueue=enqueue)
    ordered = ordered or policies.coalesce
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
        kind = Kind.TRANSACTION
    if isinstance(handler, type) and issubclass(handler, WebhookHandlerBase):
        _require_handle_core(name, handler)
    if kind in (Kind.COROUTINE, Kind.THREAD):
        takes_services(name, cast("Callable[..., object]", handler))
    return Registration(
        name,
        handler,
        kind,
        enqueue,
        ordered,
        run_when_suspended,
        asyncio,
        place=place,
        policy=policies,
    )


def _policy_of(name: str, place: str, given: PolicyArguments, *, enqueue: bool) -> Policy:
    """Return the policies of a handler.

    Raises:
        HandlerRegistrationError: names what cannot be kept, and the line that registers it.
    """
    unknown = [f"there is no policy {each}" for each in given if each not in _POLICIES]
    policy = UNLIMITED if unknown else Policy(**given)
    problems = [*unknown, *problems_of(policy, enqueue=enqueue)]
    if problems:
        raise HandlerRegistrationError(f"{place}: {name}: {'; '.join(problems)}.")
    return policy


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


def bind_registration(
    registration: Registration,
    *,
    services: Services[Any],
    threads: trio.CapacityLimiter,
    around: Sequence[Surrounding],
    host_loop: ForeignLoop | None,
) -> BoundHandler:
    """Build a registered handler.

    Args:
        registration: the handler, and how its events are run.
        services: given to the handler if it takes them.
        threads: limits the concurrent plain functions.
        around: context managers around each plain function, the outermost first.
        host_loop: runs handlers with ``asyncio=True``.

    Raises:
        HandlerRegistrationError: a factory raised, or did not return a handler.
    """
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
    require_event_class(registration, type(built))
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
        policy=registration.policy,
        group=registration.group,
        limited=registration.policy.is_limited,
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


def require_event_class(registration: Registration, handler_class: type) -> None:
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


def require_annotation(registration: Registration) -> None:
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
    except BaseException as error:
        # SystemExit from a factory is a fault of the factory, not a request to stop.
        if is_interrupt(error):
            raise
        raise HandlerRegistrationError(  # noqa: ASYNC104 - no loop cancels a start's factories
            f"{place}: building the handler {name} failed: {describe_error(error)}"
        ) from error
