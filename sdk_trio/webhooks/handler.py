"""Handlers: their base class, and the functions that can be registered instead.

A coroutine function runs in the event loop. A plain function runs in a thread: it may block, and a
blocking call in the event loop stops all other work. A factory is called once, at the start.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from enum import Enum
from types import CodeType
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

import trio

from ..base.executor import run_in_thread
from ..base.foreign_errors import attempt
from ..errors import HandlerRegistrationError, NotAwaitedError
from ..events import Event
from ..storage.effects import Transaction
from .services import Services
from .unawaited import require_awaited

E = TypeVar("E", bound=Event[Any])
E_contra = TypeVar("E_contra", bound=Event[Any], contravariant=True)

#: Called in the thread of a plain function, with its event: the block of the context manager that
#: it returns is the run.
Surrounding: TypeAlias = Callable[[Any], AbstractContextManager[object]]


class WebhookHandlerBase(Generic[E_contra]):
    """Base of a handler for one event type: derive from it and implement ``handle_core``.

    One object handles every delivery of its type, several concurrently, so keep the state of one
    event in local variables. Delivery is at-least-once: make ``handle_core`` idempotent, with
    ``event.key`` as the key (``event.webhook_id`` is enough with a single sender).
    """

    async def handle_core(self, event: E_contra) -> None:
        """Handle one verified event; returning means that it is done.

        Any exception counts as a failed attempt, including ``SystemExit``;
        :class:`~sdk_trio.RetryLater` also sets the time of the retry. Inline handlers are cancelled
        after ``InlineTimeoutSeconds``, which is a failed attempt, and enqueued ones at the end of a
        shutdown's drain timeout; exceptions caused by the latter use no attempt.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement handle_core")

    async def on_error(self, event: E_contra, error: Exception) -> None:
        """Hook: called after ``handle_core`` raised ``error``, before the attempt is recorded.

        A BaseException that is not an Exception, such as ``SystemExit``, is passed as the cause of
        a :class:`~sdk_trio.errors.HandlerAbortedError`. Exceptions of this hook are logged and
        change nothing else. The default does nothing.
        """


#: A function that handles an event: a coroutine function, or a plain one, which runs in a thread.
HandlerFunction: TypeAlias = (
    Callable[[E], Awaitable[Any] | None] | Callable[[E, Services[Any]], Awaitable[Any] | None]
)
#: A function, or a class, that makes a handler.
HandlerFactory: TypeAlias = (
    Callable[[], WebhookHandlerBase[E]] | Callable[[Services[Any]], WebhookHandlerBase[E]]
)
#: Everything that can be registered for an event class.
Handler: TypeAlias = WebhookHandlerBase[E] | HandlerFunction[E] | HandlerFactory[E]


class Kind(Enum):
    """The use of a registered object."""

    INSTANCE = "instance"
    FACTORY = "factory"
    COROUTINE = "coroutine"
    THREAD = "thread"
    TRANSACTION = "transaction"


def kind_of(handler: object) -> Kind:
    """Decide how a handler is used, by its form alone: it is not called.

    A plain function is a factory if it takes no arguments, if its only parameter is named
    ``services`` or annotated ``Services``, or if it is annotated to return a handler.

    Raises:
        HandlerRegistrationError: it is not a handler.
    """
    if isinstance(handler, WebhookHandlerBase):
        return Kind.INSTANCE
    name = name_of(handler)
    if not callable(handler):
        raise HandlerRegistrationError(
            f"{name} is not a handler: give a function of the event, a WebhookHandlerBase, or a "
            "factory of one."
        )
    if isinstance(handler, type):
        return Kind.FACTORY
    if _is(handler, inspect.isgeneratorfunction) or _is(handler, inspect.isasyncgenfunction):
        raise HandlerRegistrationError(
            f"{name} is a generator function, which is never iterated over: write it without yield."
        )
    if _is(handler, inspect.iscoroutinefunction):
        return Kind.COROUTINE
    return Kind.FACTORY if _is_factory(name, handler) else Kind.THREAD


def name_of(handler: object) -> str:
    """Return the name of a handler for messages; for a ``partial``, the name of its function."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    return getattr(handler, "__qualname__", None) or type(handler).__qualname__


def _function_of(handler: Any) -> object:
    """Return the Python function that a callable calls: of a partial, a method, an object."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not inspect.isroutine(handler):
        handler = handler.__call__
    return getattr(handler, "__func__", handler)


def definition_of(handler: object) -> str | None:
    """Return the line that defines a handler, ``FILE:LINE in NAME``; None if it has none."""
    if isinstance(handler, WebhookHandlerBase):
        handler = type(handler)
    if isinstance(handler, type) and issubclass(handler, WebhookHandlerBase):
        handler = handler.handle_core
    if callable(handler):
        handler = _function_of(inspect.unwrap(handler))
    code = getattr(handler, "__code__", None)
    if not isinstance(code, CodeType):
        return None
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_qualname}"


def _is(function: Callable[..., object], test: Callable[[object], bool]) -> bool:
    # A decorator with functools.wraps is a plain function, and returns what the inner one returns.
    called = getattr(function, "__call__", None)  # noqa: B004 - the method itself is asked for
    return test(function) or test(called) or test(inspect.unwrap(function))


def _is_factory(name: str, function: Callable[..., object]) -> bool:
    signature = signature_of(name, function)
    made = signature.return_annotation
    if isinstance(made, str):  # a string annotation, or `from __future__ import annotations`
        made = getattr(inspect.unwrap(function), "__globals__", {}).get(made)
    if isinstance(made, type) and issubclass(made, WebhookHandlerBase):
        return True
    if any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in signature.parameters.values()):
        return False
    needed = needed_parameters(signature)
    possible = needed or positional_parameters(signature)
    if len(possible) != 1:
        return not possible
    # An annotation may be a text, a class or one with arguments: its name is in each of these.
    return possible[0].name == "services" or "Services" in str(possible[0].annotation)


def signature_of(name: str, function: Callable[..., object]) -> inspect.Signature:
    """Return the signature of a handler or factory.

    Raises:
        HandlerRegistrationError: Python does not know its signature, as with some functions in C.
    """
    try:
        return inspect.signature(function)
    except (ValueError, TypeError) as error:
        raise HandlerRegistrationError(
            f"the signature of {name} is unknown: write `lambda event: {name}(...)`."
        ) from error


def event_annotation(function: Callable[..., object]) -> object:
    """Return the annotation of a handler function's event; Any without one, or if unresolved.

    A decorator's own signature counts, because it may pass something else to the inner function. A
    string annotation is resolved in the function's module.
    """
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (ValueError, TypeError):  # a wrapper in C
        return Any
    found = positional_parameters(signature)
    annotation: Any = found[0].annotation if found else inspect.Parameter.empty
    if annotation is inspect.Parameter.empty:
        return Any
    if isinstance(annotation, str):
        names = getattr(_function_of(function), "__globals__", {})
        # The user's own annotation, as typing.get_type_hints evaluates it. A name that exists only
        # for type checkers cannot be judged.
        annotation, _ = attempt(lambda: eval(annotation, names))  # noqa: S307 - see above
        return Any if annotation is None else annotation
    return annotation


def positional_parameters(signature: inspect.Signature) -> list[inspect.Parameter]:
    """Return the parameters that can be given by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [one for one in signature.parameters.values() if one.kind in kinds]


def needed_parameters(signature: inspect.Signature) -> list[inspect.Parameter]:
    """Return the positional parameters without a default, which a call must give."""
    empty = inspect.Parameter.empty
    return [one for one in positional_parameters(signature) if one.default is empty]


def takes_services(name: str, function: Callable[..., object]) -> bool:
    """Return whether a handler function takes the services in addition to the event.

    Raises:
        HandlerRegistrationError: it can be called neither with the event nor with both.
    """
    signature = signature_of(name, function)
    both = len(needed_parameters(signature)) == 2
    try:
        signature.bind(*((None, None) if both else (None,)))
    except TypeError:
        raise HandlerRegistrationError(
            f"{name}{signature}: a handler function takes the event, or the event and the services."
        ) from None
    return both


class CoroutineHandler(WebhookHandlerBase[Any]):
    """Adapts ``async def handler(event)`` or ``async def handler(event, services)``."""

    def __init__(
        self, name: str, function: Callable[..., Awaitable[object]], services: Services[Any]
    ) -> None:
        self._name = name
        self._place = definition_of(function)
        self._function = function
        self._arguments = (services,) if takes_services(name, function) else ()

    async def handle_core(self, event: Event[Any]) -> None:
        """Await the function."""
        returned: object = await self._function(event, *self._arguments)
        if returned is not None:
            refuse_result(self._name, returned, self._place)


class ThreadHandler(WebhookHandlerBase[Any]):
    """Adapts ``def handler(event)`` or ``def handler(event, services)``, which runs in a thread.

    Args:
        name: the handler's name, which is also the thread's name while it runs.
        function: the function.
        services: given to a function of two parameters.
        around: context managers that are entered in the thread around the function, the first one
            outermost.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., None],
        services: Services[Any],
        around: Sequence[Surrounding] = (),
    ) -> None:
        self._name = name
        self._place = definition_of(function)
        self._function = function
        self._arguments = (services,) if takes_services(name, function) else ()
        self._around = around

    async def handle_core(self, event: Event[Any]) -> None:
        """Run the function in a thread, with the context variables of this task.

        Nothing can stop a thread: on cancellation, this waits until the function has ended, so that
        the event is neither recorded as failed nor run again during the first run. A function that
        calls ``trio.from_thread.check_cancelled()`` ends at a cancellation.
        """
        # No limiter here: the runner acquired a thread slot before it claimed the event.
        raised = await run_in_thread(self._run, event, limiter=_NO_LIMIT, name=self._name)
        if raised is not None:
            raise raised

    def _run(self, event: Event[Any]) -> BaseException | None:
        """Run the function, and return what it raises.

        If it were raised, an exception whose ``__traceback__`` cannot be read would end Trio's
        thread, and the task would wait forever.
        """
        return attempt(functools.partial(self._call, event))[1]

    def _call(self, event: Event[Any]) -> None:
        with ExitStack() as stack:
            for surrounding in self._around:
                stack.enter_context(surrounding(event))
            returned: object = self._function(event, *self._arguments)
            # Inside the blocks: a transaction around a refused run must not commit.
            if returned is not None:
                refuse_result(self._name, returned, self._place)
            require_awaited(self._name, self._place)


class TransactionHandler(WebhookHandlerBase[Any]):
    """Adapts ``def handler(event, tx)``, whose effects are one transaction with the event's end.

    Args:
        name: the handler's name, for messages.
        function: the function; the store calls it in a thread of its own.
        services: end the event.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[Any, Transaction[Any]], object],
        services: Services[Any],
    ) -> None:
        self._name = name
        self._place = definition_of(function)
        self._function = function
        self._services = services

    async def handle_core(self, event: Event[Any]) -> None:
        """End the event with the effects of the function; it cannot be interrupted."""
        await self._services.finish(event, functools.partial(self._apply, event))

    def _apply(self, event: Event[Any], transaction: Transaction[Any]) -> None:
        returned = self._function(event, transaction)
        # Inside the transaction, which must not commit if this raises.
        if returned is not None:
            refuse_result(self._name, returned, self._place)
        require_awaited(self._name, self._place)


class ForeignLoop(Protocol):
    """Another event loop of this process, which runs coroutines for handlers."""

    async def run(self, call: Callable[[], Awaitable[None]]) -> None:
        """Await the result of ``call`` there; on cancellation, wait until it has ended."""
        ...


class ForeignHandler(WebhookHandlerBase[Any]):
    """Runs a handler on another event loop: the asyncio loop of the application's server."""

    def __init__(self, inner: WebhookHandlerBase[Any], loop: ForeignLoop) -> None:
        self._inner = inner
        self._loop = loop

    async def handle_core(self, event: Event[Any]) -> None:
        """Run the handler there; on cancellation, cancel it there, and wait for its end."""
        await self._loop.run(functools.partial(self._inner.handle_core, event))

    async def on_error(self, event: Event[Any], error: Exception) -> None:
        """Call the handler's hook there as well."""
        await self._loop.run(functools.partial(self._inner.on_error, event, error))


def refuse_result(name: str, returned: object, place: str | None) -> None:
    """Fail a run whose handler returned unfinished work; any other result is ignored.

    Args:
        name: the handler's name.
        returned: what it returned.
        place: the line that defines it.

    Raises:
        NotAwaitedError: it returned a coroutine, another awaitable, a generator or a handler.
    """
    kind = type(returned).__name__
    if inspect.iscoroutine(returned):
        returned.close()  # or Python warns of it a second time
    if inspect.isawaitable(returned) or inspect.isasyncgen(returned):
        raise NotAwaitedError(
            f"{name} returned a {kind} that is not awaited: write `async def`, and `await` it",
            place,
        )
    if inspect.isgenerator(returned):
        raise NotAwaitedError(f"{name} returned a generator that is not iterated over", place)
    if isinstance(returned, WebhookHandlerBase):
        raise NotAwaitedError(
            f"{name} returned a handler: the parameter of a factory is named `services`, or "
            f"annotated so; `-> {kind}` works as well",
            place,
        )


class _NoLimit:
    """A capacity limiter without a limit: the runner has acquired a thread slot already."""

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        """Return at once."""
        await trio.lowlevel.checkpoint_if_cancelled()

    def release_on_behalf_of(self, borrower: object) -> None:
        """Do nothing."""


# Trio accepts any object with these two methods; its annotation is narrower.
_NO_LIMIT = cast("trio.CapacityLimiter", _NoLimit())
