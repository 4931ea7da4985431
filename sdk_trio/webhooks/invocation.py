"""Invocations of user code: a handler, and its error hook once the handler has failed.

Whatever user code raises of its own is a :class:`~sdk_trio.webhooks.outcomes.Failure` of its event.
A cancellation of ours and an operator's Ctrl-C are not its own, and go on to whoever they are for.
"""

from collections.abc import Awaitable, Callable, Iterable
from types import FrameType
from typing import Any, cast

import msgspec
import trio

from ..base.cells import is_cell_cancelled
from ..base.foreign_errors import attempt, is_a, is_interrupt, type_name
from ..base.logs import get_logger
from ..config import Settings
from ..config.secret import LEAST_MASKED
from ..errors import HandlerAbortedError
from ..events import Event
from .handler import refuse_result
from .outcomes import (
    Failure,
    comes_of,
    describe_error,
    divide,
    only_asks,
    place_of,
    post_failure,
    queued_timeout_failure,
    retry_after_of,
    traceback_of,
)
from .registry import BoundHandler
from .routes import PostFailedError
from .unawaited import LEFT, Forgotten, install, require_awaited

_log = get_logger("webhooks")

#: The error of a failure that no one could put into words.
UNDESCRIBED = "an exception that could not be described"


class Run(msgspec.Struct, frozen=True, gc=False):
    """A handler at work: its name, its event, and when it began (``clock.monotonic``).

    ``threaded`` says that it is a plain function in a thread, which nothing can stop.
    """

    handler: str
    webhook_id: str
    begun: float
    key: str
    threaded: bool = False

    def described(self, now: float) -> dict[str, object]:
        """Return its fields for a log at ``now``, by ``clock.monotonic``."""
        return {
            "webhook_id": self.webhook_id,
            "handler": self.handler,
            "seconds": round(now - self.begun, 1),
        }


class Invocations:
    """Calls handlers, and knows which ones are at work.

    ``settings`` are those whose secrets are masked in the texts of errors, and that say whether a
    failure keeps its traceback, as it does in Development.
    """

    def __init__(self, settings: Settings) -> None:
        install(Invocations.call.__code__)
        self._secrets: list[str] = []
        self.mask(settings)
        self._in_development = settings.is_development
        #: The handlers at work by the key of their event, the oldest first. Other threads read it,
        #: to name those that keep a daemon from ending.
        self.at_work: dict[str, Run] = {}
        self._timed_out: dict[str, float] = {}

    def mask(self, settings: Settings) -> None:
        """Mask the secrets of ``settings``, besides the earlier ones, in handlers' error texts."""
        known = (settings.access_token, *settings.webhooks.all_secrets)
        # The version is dropped before use, so the rest alone may stand in an error.
        revealed = {secret.reveal().removeprefix("v1,") for secret in known if secret is not None}
        found = {text for text in revealed if len(text) >= LEAST_MASKED}
        # The longest first: a secret that contains another one would else keep its other half.
        self._secrets = sorted(found.union(self._secrets), key=len, reverse=True)

    @property
    def runs(self) -> tuple[Run, ...]:
        """Return the handlers at work, the oldest first; any thread may ask."""
        # One call into C copies the dictionary, so it cannot change in the middle.
        return tuple(self.at_work.copy().values())

    def time_out(self, run: Run, cell: trio.Nursery, seconds: float) -> None:
        """Cancel a run at work that has outlasted its limit of ``seconds``; ``cell`` holds it.

        What nothing cancels goes on, and ends as it ends: a plain function in its thread.
        """
        self._timed_out[run.key] = seconds
        cell.cancel_scope.cancel()

    async def call(self, handler: BoundHandler, event: Event[Any], begun: float) -> Failure | None:
        """Call a handler, and its error hook if it fails; return how it failed, None if it has not.

        ``begun`` is when it began, by ``clock.monotonic``. A cancellation of ours is raised.
        """
        self.at_work[event.key] = Run(
            handler.name, event.webhook_id, begun, event.key, handler.threads is not None
        )
        # A class may return what is no None, whatever its annotation.
        core: Callable[[Event[Any]], Awaitable[object]] = handler.handler.handle_core
        left: list[Forgotten] = []
        LEFT.set(left)
        try:
            returned = await core(event)
            if returned is not None:
                refuse_result(handler.name, returned, handler.place)
            if left:
                require_awaited(handler.name, handler.place)
        # SystemExit, KeyboardInterrupt and a leaked Cancelled from user code are failures of this
        # event too: let through, they would end the whole process or leave the worker's nursery.
        # _own_part raises what is not the handler's own.
        except BaseException as error:  # noqa: ASYNC103 - _own_part raises ours
            own = self._own_part(handler, event, error)
            failure = self._failure_of(handler, event, own)
            await self._call_error_hook(handler, event, own)  # noqa: ASYNC102 - no Cancelled of ours is here
            return failure  # noqa: ASYNC104 - a Cancelled of ours was raised by _own_part
        finally:
            if self._timed_out:
                self._timed_out.pop(event.key, None)
            self.at_work.pop(event.key, None)
        return None

    def _failure_of(
        self, handler: BoundHandler, event: Event[Any], error: BaseException
    ) -> Failure:
        seconds = self._timed_out.get(event.key)
        if seconds is not None and comes_of(error, trio.Cancelled):
            return queued_timeout_failure(handler.name, seconds)
        # Memory may be short, or the exception of a kind that no rule here foresees.
        failure, _ = attempt(lambda: self._judge(handler, error))
        return failure or Failure(UNDESCRIBED, error_type="unknown", place=handler.place)

    def _judge(self, handler: BoundHandler, error: BaseException) -> Failure:
        if is_a(error, PostFailedError):
            return post_failure(cast("PostFailedError", error))
        asked = only_asks(error)
        traced = self._in_development and not asked
        return Failure(
            self._describe(error),
            retry_after_of(error),
            type_name(error),
            place_of(error) or handler.place,
            traceback_of(error, self._secrets) if traced else None,
            self._is_cancelled() and comes_of(error, trio.Cancelled),
            asked,
        )

    async def _call_error_hook(
        self, handler: BoundHandler, event: Event[Any], error: BaseException
    ) -> None:
        if is_cell_cancelled():  # the hook could wait for nothing
            await trio.lowlevel.cancel_shielded_checkpoint()
            return
        shown = cast("Exception", error) if is_a(error, Exception) else _as_exception(error)
        try:
            await handler.handler.on_error(event, shown)
        except BaseException as failure:  # noqa: ASYNC103 - _own_part raises ours
            own = self._own_part(handler, event, failure)
            _log.error(
                "webhook.error_hook_failed",
                webhook_id=event.webhook_id,
                handler=handler.name,
                error=self._describe(own),
                place=place_of(own),
            )
            await trio.lowlevel.checkpoint()  # noqa: ASYNC102 - no Cancelled of ours is here

    def _own_part(
        self, handler: BoundHandler, event: Event[Any], error: BaseException
    ) -> BaseException:
        """Return the part of ``error`` that user code has raised of its own.

        A Ctrl-C is not its own, and neither is a cancellation while a scope around us is cancelled.
        The part that is not its own is raised. The rest is only logged then, because the run will
        be repeated.
        """
        cancelled = self._is_cancelled()
        ours, own = divide(
            error, lambda part: (cancelled and is_a(part, trio.Cancelled)) or is_interrupt(part)
        )
        if ours is None:
            return error
        if own is not None:
            _log.error(
                "webhook.failed",
                webhook_id=event.webhook_id,
                handler=handler.name,
                error=self._describe(own),
                place=place_of(own),
            )
        raise ours from None

    def _is_cancelled(self) -> bool:
        """Say whether a scope around this task is cancelled, and not its own cell alone."""
        # Trio reports minus infinity as the deadline of a cancelled scope, whoever cancelled it.
        if trio.current_effective_deadline() > trio.current_time():
            return False
        return not is_cell_cancelled()

    def _describe(self, error: BaseException) -> str:
        text = describe_error(error, self._secrets)
        if not is_a(error, trio.Cancelled):
            return text
        if is_cell_cancelled():
            return f"{text} (the handler cancelled the task that runs it)"
        return f"{text} (the handler let a cancellation escape whose scope is not around it)"


def run_in(frames: Iterable[FrameType]) -> Run | None:
    """Return the handler's run among the frames of a thread, None if there is none.

    It serves reports about a stalled event loop, where no task can be asked.
    """
    for frame in frames:
        if frame.f_code is Invocations.call.__code__:
            seen = frame.f_locals
            event = seen["event"]
            return Run(seen["handler"].name, event.webhook_id, seen.get("begun", 0.0), event.key)
    return None


def _as_exception(error: BaseException) -> HandlerAbortedError:
    """Wrap a BaseException for a hook that takes an Exception."""
    shown = HandlerAbortedError(f"the handler raised {type_name(error)}")
    shown.__cause__ = error
    return shown
