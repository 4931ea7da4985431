"""Invocations of user code: a handler within its deadline, and its error hook once it has failed.

An exception of user code is a :class:`~sdk_trio.webhooks.outcomes.Failure` of its event. Our own
cancellation and an operator's Ctrl-C are not, and propagate.
"""

from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import msgspec
import trio

from ..base.cells import is_cell_cancelled
from ..base.clock import current as current_clock
from ..base.foreign_errors import attempt, is_a, is_interrupt, type_name
from ..base.http import Deadline, Expiry
from ..base.logs import get_logger
from ..config import Settings
from ..config.secret import LEAST_MASKED
from ..errors import HandlerAbortedError
from ..events import Drift, Event, decode_event
from ..events.source_event import decode_source_event
from ..records.deliveries import Done, Lease, NewDelivery
from .arrival import VerifiedDelivery
from .bound import BoundHandler, BoundHandlers
from .counters import Counters
from .effects import Conclusions
from .handler import refuse_result
from .outcomes import (
    Failure,
    describe_error,
    divide,
    ending_of,
    is_caused_by,
    only_asks,
    place_of,
    post_failure,
    queued_timeout_failure,
    retry_after_of,
    timeout_failure,
    traceback_of,
)
from .recording import BUSY, CLEANUP_SECONDS, DONE, OutcomeRecorder, names_of
from .routes import PostFailedError
from .sources.schemes import layout_of
from .unawaited import LEFT, Forgotten, install, require_awaited

if TYPE_CHECKING:
    from ..records.tenants import Tenant

_log = get_logger("webhooks")

_STILL_THREADED = (
    "its thread cannot be stopped: the event stays claimed until it ends, and does not run twice"
)
_STILL_RUNNING = "it occupies a worker; set a timeout on each call that it makes"

#: The error text of an exception that cannot be described.
UNDESCRIBED = "an exception that could not be described"


class Run(msgspec.Struct, frozen=True, gc=False):
    """A running handler: its name, its event, and its start time (``clock.monotonic``).

    ``threaded``: it is a plain function in a thread, which cannot be stopped. ``timeout`` is the
    handler's own limit in seconds, if it has one. ``lease`` is that of the run, if it is known.
    """

    handler: str
    webhook_id: str
    begun: float
    key: str
    threaded: bool = False
    timeout: float | None = None
    lease: Lease | None = None

    def described(self, now: float) -> dict[str, object]:
        """Return its fields for a log at ``now``, by ``clock.monotonic``."""
        return {
            "webhook_id": self.webhook_id,
            "handler": self.handler,
            "seconds": round(now - self.begun, 1),
        }


class Ended(msgspec.Struct, frozen=True):
    """The end of a run: its failure, if it failed, and its duration in seconds.

    ``is_concluded``: the handler has ended its event itself, with its effects. Nothing is recorded.
    """

    failure: Failure | None
    seconds: float
    is_concluded: bool


def inline_deadline(seconds: float, expiry: Expiry | None) -> AbstractContextManager[Deadline]:
    """Limit a handler to ``seconds``, with the server's own deadline if it has one.

    The server's deadline saves the run a cancel scope, which would cost more than checking its
    signature.
    """
    if expiry is None:
        return trio.CancelScope(relative_deadline=seconds)
    # The answer if the deadline passes before the outcome is recorded.
    return expiry.move_on_after(seconds, BUSY)


class Invocations:
    """Calls handlers with claimed events, and knows which handlers are running.

    Args:
        settings: see :meth:`use`; in Development a failure keeps its traceback.
        handlers: their catalog has the types of the events.
        counters: counts runs, and payloads that differ from their types.
        recorder: releases events whose runs are cancelled.
        conclusions: knows the events that their handlers have ended themselves.
    """

    def __init__(
        self,
        settings: Settings,
        handlers: BoundHandlers,
        counters: Counters,
        recorder: OutcomeRecorder,
        conclusions: Conclusions,
    ) -> None:
        install(Invocations.call.__code__)
        self._handlers = handlers
        self._counters = counters
        self._recorder = recorder
        self._stopwatch = current_clock().monotonic
        self._secrets: list[str] = []
        self.use(settings)
        self._in_development = settings.is_development
        #: The running handlers by the key of their event, the oldest first. Other threads read it,
        #: to name handlers that prevent a daemon from ending.
        self.running: dict[str, Run] = {}
        self._conclusions = conclusions
        conclusions.runs = self.running
        self._timed_out: dict[str, float] = {}
        self._drifted: set[tuple[str | None, str]] = set()

    def use(self, settings: Settings) -> None:
        """Read the data of sources where ``settings`` have it, and mask their secrets in errors.

        Earlier secrets stay masked.
        """
        self._data_paths = {each.name: layout_of(each).data for each in settings.sources}
        of_sources = (secret for source in settings.sources for secret in source.secrets)
        known = (settings.access_token, *settings.webhooks.all_secrets, *of_sources)
        # The version prefix is removed before use, so an error may quote the rest alone.
        revealed = {secret.reveal().removeprefix("v1,") for secret in known if secret is not None}
        found = {text for text in revealed if len(text) >= LEAST_MASKED}
        # Longest first: masking a shorter secret inside a longer one would leave the rest visible.
        self._secrets = sorted(found.union(self._secrets), key=len, reverse=True)

    @property
    def runs(self) -> tuple[Run, ...]:
        """Return the running handlers, the oldest first. Callable from any thread."""
        # One call into C copies the dictionary, so it cannot change meanwhile.
        return tuple(self.running.copy().values())

    def seconds_of(self, run: Run) -> float:
        """Return how long a handler has been running."""
        return self._stopwatch() - run.begun

    def report_threads(self) -> None:
        """Log each running plain function, which cannot be stopped at the end of a drain."""
        for run in self.runs:
            if run.threaded:
                self.report_still_running(run)

    def report_still_running(self, run: Run | None) -> None:
        """Log that a handler is still running, with a hint."""
        if run is not None:
            _log.warning(
                "webhook.still_running",
                **run.described(self._stopwatch()),
                hint=_STILL_THREADED if run.threaded else _STILL_RUNNING,
            )

    def time_out(self, run: Run, cell: trio.Nursery, seconds: float) -> None:
        """Cancel a run in ``cell`` that has exceeded its limit of ``seconds``.

        A plain function continues in its thread, because it cannot be cancelled; its outcome
        counts.
        """
        self._timed_out[run.key] = seconds
        cell.cancel_scope.cancel()

    async def run(
        self,
        arrival: VerifiedDelivery,
        handler: BoundHandler,
        tenant: "Tenant | None",
        attempt: int,
        lease: Lease,
        limit: float | None = None,
        expiry: Expiry | None = None,
    ) -> Ended:
        """Run a handler for an event that is claimed, as run number ``attempt``.

        Cancellation while the handler runs releases the event, and the attempt does not count.

        Args:
            arrival: the event.
            handler: the handler of its type.
            tenant: the tenant of the event, as it is now.
            attempt: counted from 1.
            lease: the run's.
            limit: the handler's time limit in seconds; None: :meth:`time_out` ends the run.
            expiry: the server's own deadline, where it has one.
        """
        delivery = arrival.delivery
        failure: Failure | None = None
        deadline: Deadline | None = None
        seconds = 0.0
        has_ended = False
        try:
            event = self._decode(arrival, handler, attempt, tenant)
            begun = self._stopwatch()
            try:
                if limit is None:
                    # A cancel scope around each run would cost as much as checking its signature.
                    failure = await self.call(handler, event, begun, lease)
                else:
                    with inline_deadline(limit, expiry) as deadline:
                        failure = await self.call(handler, event, begun, lease)
            finally:
                seconds = round(self._stopwatch() - begun, 6)
                self._counters.observe(
                    event.type,
                    seconds,
                    handler.enqueue,
                    delivery.source if delivery.signer else None,
                )
            if limit is not None and deadline is not None and deadline.cancelled_caught:
                own = handler.policy.timeout is not None
                failure = timeout_failure(handler.name, limit, own=own)
            elif (
                failure is not None
                and failure.cut_short
                and not (deadline is not None and deadline.cancel_called)
            ):
                # The handler failed because we were cancelled, not because of its time: our own
                # Cancelled is raised here, and the event released below.
                await trio.lowlevel.checkpoint_if_cancelled()
            has_ended = True
        finally:
            if not has_ended:
                if self._conclusions.forget(delivery.key):
                    self._recorder.report(delivery, attempt, DONE, handler, seconds)
                else:
                    with trio.move_on_after(CLEANUP_SECONDS, shield=True):
                        await self._recorder.release(lease)
        is_concluded = False
        if self._conclusions.ended and self._conclusions.forget(delivery.key):
            is_concluded = True
            if failure is not None:
                self._report_late_failure(delivery, handler, failure)
        return Ended(failure, seconds, is_concluded)

    def _decode(
        self,
        arrival: VerifiedDelivery,
        handler: BoundHandler,
        attempt: int,
        tenant: "Tenant | None",
    ) -> Event[Any]:
        """Build the typed event; count values that do not fit, and log the first of each type."""
        delivery = arrival.delivery
        drifts: list[Drift] = []
        if delivery.signer and (source := delivery.source) is not None:
            of_source = decode_source_event(
                source,
                handler.data_class,
                path=self._data_paths.get(source, ()),
                event_type=delivery.type,
                webhook_id=delivery.webhook_id,
                key=delivery.key,
                raw=delivery.raw,
                timestamp=delivery.timestamp,
                received_at=delivery.received_at,
                attempt=arrival.earlier_attempts + attempt,
                generation=arrival.generation,
                on_drift=drifts.append,
            )
            if drifts:
                self._report_drift(drifts[0], delivery)
            return of_source
        event = decode_event(
            arrival.envelope,
            webhook_id=delivery.webhook_id,
            key=delivery.key if delivery.signer else delivery.webhook_id,
            raw=delivery.raw,
            header_timestamp=delivery.timestamp,
            received_at=delivery.received_at,
            attempt=arrival.earlier_attempts + attempt,
            generation=arrival.generation,
            catalog=self._handlers.catalog,
            on_drift=drifts.append,
            tenant=tenant,
        )
        if drifts:
            self._report_drift(drifts[0], delivery)
        return event

    def _report_drift(self, drift: Drift, delivery: NewDelivery) -> None:
        self._counters.count("drift", signer=delivery.signer)
        source = delivery.source
        if (source, drift.type) not in self._drifted:
            self._drifted.add((source, drift.type))
            fields = {"type": drift.type} | ({} if source is None else {"source": source})
            _log.warning(
                "webhook.drifted",
                **fields,
                path=drift.path,
                error=drift.message,
                hint="the payload differs from the typed class; event.data has the fields that fit",
            )

    def _report_late_failure(
        self, delivery: NewDelivery, handler: BoundHandler, failure: Failure
    ) -> None:
        """Log a failure that changes nothing, because the handler had already ended its event."""
        _log.error(
            "webhook.failed_after_done",
            **names_of(delivery),
            type=delivery.type,
            handler=handler.name,
            error=failure.error,
            place=failure.place,
            hint="the handler had finished the event before; it is done and is not run again",
        )

    async def call(
        self, handler: BoundHandler, event: Event[Any], begun: float, lease: Lease
    ) -> Failure | None:
        """Call a handler, and its error hook if it fails; return its failure, or None.

        ``begun`` is the start time, by ``clock.monotonic``. Our own cancellation is raised.
        """
        self.running[event.key] = Run(
            handler.name,
            event.webhook_id,
            begun,
            event.key,
            handler.threads is not None,
            handler.policy.timeout,
            lease,
        )
        # A class may return something other than None, whatever its annotation.
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
        # event too: if they propagated, they would end the whole process or leave the worker's
        # nursery. _own_part raises the parts that are not the handler's own.
        except BaseException as error:  # noqa: ASYNC103 - _own_part raises ours
            own = self._own_part(handler, event, error)
            failure = self._failure_of(handler, event, own)
            await self._call_error_hook(handler, event, own)  # noqa: ASYNC102 - no Cancelled of ours is here
            return failure  # noqa: ASYNC104 - a Cancelled of ours was raised by _own_part
        finally:
            if self._timed_out:
                self._timed_out.pop(event.key, None)
            self.running.pop(event.key, None)
        return None

    def _failure_of(
        self, handler: BoundHandler, event: Event[Any], error: BaseException
    ) -> Failure:
        seconds = self._timed_out.get(event.key)
        if seconds is not None and is_caused_by(error, trio.Cancelled):
            own = handler.policy.timeout is not None
            return queued_timeout_failure(handler.name, seconds, own=own)
        # There may be too little memory, or the exception may have a kind that no rule here
        # expects.
        failure, _ = attempt(lambda: self._judge(handler, error))
        return failure or Failure(UNDESCRIBED, error_type="unknown", place=handler.place)

    def _judge(self, handler: BoundHandler, error: BaseException) -> Failure:
        if is_a(error, PostFailedError):
            return post_failure(cast("PostFailedError", error))
        asked, ends = only_asks(error), ending_of(error)
        traced = self._in_development and not asked and ends is not Done
        return Failure(
            self._describe(error),
            retry_after_of(error),
            type_name(error),
            place_of(error) or handler.place,
            traceback_of(error, self._secrets) if traced else None,
            self._is_cancelled() and is_caused_by(error, trio.Cancelled),
            asked,
            ends=ends,
        )

    async def _call_error_hook(
        self, handler: BoundHandler, event: Event[Any], error: BaseException
    ) -> None:
        if is_cell_cancelled():  # the hook could not wait for anything
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
        """Return the part of ``error`` that user code has raised itself.

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
        """Return whether a scope around this task is cancelled, and not only its own cell."""
        # Trio reports minus infinity as the deadline of a cancelled scope, whatever cancelled it.
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

    It is for reports about a blocked event loop, in which no task can run.
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
