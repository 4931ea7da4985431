"""Outcomes of runs: pure decisions after a run has failed or ended the process.

A queued failure leads to a retry with full jitter or to a dead letter; an inline failure asks the
sender to deliver again or ends as a dead letter. Events that were running when the process ended
are run alone until it is clear which of them is the cause
(docs/adr/0023-an-event-that-ends-the-process.md). The second half describes exceptions of user code
in texts that can be stored and logged.
"""

import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

import msgspec

from ..base.throttle import jittered_wait
from ..config.secret import MASK
from ..errors import RetryLater
from ..records.deliveries import Dead, Postponed, Retry
from .routes import PostFailedError, Ruling

if TYPE_CHECKING:
    from ..records.tenants import Tenant

#: The longest error text that is kept with a delivery, in characters: a handler's exception may
#: quote a whole payload, and each delivery would store it again.
MAX_ERROR_LENGTH = 2000

#: The longest traceback that is kept with a failed run in Development, in characters.
MAX_TRACEBACK_LENGTH = 20_000

#: The number of runs that ended the process after which an event runs alone, so that a further end
#: names its cause. A single end proves little: it may be a restart, or the fault of another event.
ENDS_BEFORE_ALONE = 2

#: The most runs beyond MaxAttempts of an event while none of its runs was alone, so that it is not
#: dead for another event's fault.
RUNS_FOR_PROOF = 2

#: Directories whose code is not the user's: this package, the standard library, installed packages.
#: ``place_of`` passes over them, because a line in a library does not say which handler failed.
_PACKAGE = str(Path(__file__).parents[1])
_STANDARD_LIBRARY = str(Path(traceback.__file__).parent)
_INSTALLED = ("site-packages", "dist-packages")


class Failure(msgspec.Struct, frozen=True):
    """The failure of one run: ``error`` for people, ``retry_after`` seconds if the handler asked.

    ``asked`` says that it asked and did nothing else: then it is an answer, without a traceback.
    ``error_type`` is the name of the exception's class, ``place`` the user's line that raised it.
    ``cut_short`` says that it was caused by a cancellation of ours. ``ruling`` says what follows a
    post that failed.
    """

    error: str
    retry_after: float | None = None
    error_type: str = "timeout"
    place: str | None = None
    traceback: str | None = None
    cut_short: bool = False
    asked: bool = False
    ruling: Ruling | None = None


def timeout_failure(handler: str, seconds: float) -> Failure:
    """Return the failure of an inline run that outlasted InlineTimeoutSeconds."""
    return Failure(
        f"the handler {handler} took longer than InlineTimeoutSeconds ({seconds:g} s); "
        "register it with enqueue=True"
    )


class DeliveryRetries(msgspec.Struct, frozen=True):
    """The number and the delays of an enqueued event's runs.

    ``max_attempts`` counts all runs, the first included; ``base_seconds`` and ``cap_seconds``
    bound the delay: full jitter, ``U(0, min(cap, base * 2**(attempts - 1)))``. Events that failed
    together, because one service was away, so do not come back together.
    """

    max_attempts: int
    base_seconds: float
    cap_seconds: float


def after_queued_failure(
    failure: Failure, *, attempts: int, policy: DeliveryRetries, now: float, fraction: float
) -> Retry | Dead | Postponed:
    """Decide what follows the failed run number ``attempts`` of an enqueued event.

    ``fraction`` in [0, 1) is the caller's randomness, ``now`` Unix seconds. A delay that the
    handler asked for is a lower bound: the jitter is added to it, so that many events that were
    told the same delay do not return at once.
    """
    ruling = failure.ruling or Ruling()
    if ruling.put_off is not None:
        return ruling.put_off
    if attempts >= min(policy.max_attempts, ruling.most_attempts or policy.max_attempts):
        return Dead(failure.error, failure.place, failure.traceback, answer=ruling.answer)
    wait = jittered_wait(
        attempts, fraction, base_seconds=policy.base_seconds, cap_seconds=policy.cap_seconds
    )
    at = now + (failure.retry_after or ruling.retry_after or 0.0) + wait
    trace = failure.traceback
    return Retry(at, failure.error, failure.place, trace, ruling.answer, failure.asked)


def after_inline_failure(failure: Failure, *, attempts: int, max_attempts: int) -> Retry | Dead:
    """Decide what follows the failed run number ``attempts`` of an inline event.

    Up to ``max_attempts`` the sender is asked to deliver again. Then the event is a dead letter and
    the sender gets 200, because senders disable an endpoint that fails too often, and one event
    that no handler can process must not stop all others.
    """
    if attempts >= max_attempts:
        return Dead(failure.error, failure.place, failure.traceback)
    return Retry(None, failure.error, failure.place, failure.traceback, asked=failure.asked)


def after_process_ends(
    ends: int, *, ran_alone: bool, attempts: int, max_attempts: int
) -> Dead | None:
    """Return the dead letter of an event whose runs ended the process, or None to run it again.

    Args:
        ends: in how many of its runs the process ended.
        ran_alone: whether no other run was in progress when the process ended the last time.
        attempts: how many runs it has had.
        max_attempts: how many it may have.

    Once its attempts are used up, the event is dead if its last run was alone, since nothing else
    can have ended the process then. Otherwise it gets another run, alone (:func:`must_run_alone`).
    It is dead in any case after ``RUNS_FOR_PROOF`` more runs, for an event that is never alone must
    not run for ever.
    """
    if not ends or attempts < max_attempts:
        return None
    if not ran_alone and attempts < max_attempts + RUNS_FOR_PROOF:
        return None
    times = "time" if ends == 1 else "times"
    return Dead(f"the process ended {ends} {times} while it ran", recorded=True)


def must_run_alone(ends: int, *, attempts: int, max_attempts: int) -> bool:
    """Decide whether the next run of an event must be alone; see :func:`after_process_ends`."""
    # The last allowed run is alone as well: without that, an event that is allowed one run only
    # could die for what another event did.
    return ends >= ENDS_BEFORE_ALONE or (ends > 0 and attempts + 1 >= max_attempts)


def retry_after_of(error: BaseException) -> float | None:
    """Return the longest delay, in seconds, that an error or one in its group asked for."""
    asked = [part.seconds for part in _leaves(error) if isinstance(part, RetryLater)]
    return max(asked, default=None)


def only_asks(error: BaseException) -> bool:
    """Say whether an error is ``RetryLater`` alone, so that it is an answer and no failure."""
    return all(isinstance(part, RetryLater) for part in _leaves(error))


def post_failure(error: PostFailedError) -> Failure:
    """Return the failure of a forwarded event, of which no line of user code can be blamed."""
    return Failure(str(error), error_type=type(error).__name__, ruling=error.ruling)


#: The mistake of whoever comes from FastAPI: what asyncio says does not name the way out.
_NOT_ASYNCIO = (
    " (handlers run on Trio, or in a thread; under sdk_trio.asgi.Threaded, asyncio=True runs one "
    "on the loop of the application)"
)


def describe_error(error: BaseException, secrets: Iterable[str] = ()) -> str:
    """Return ``Type: message`` of an exception, groups flattened, cut to a bounded length.

    The message is the handler's own, for operators; each of ``secrets`` that it quotes is masked.

    The text can be stored and logged whatever the exception is: its ``__str__`` may raise, or
    return characters that UTF-8 cannot encode (a file name with undecodable bytes).
    """
    texts = [
        f"{type(part).__name__}: {message}"
        if (message := _message_of(part))
        else type(part).__name__
        for part in _leaves(error)
    ]
    text = "; ".join(texts)
    if text == "RuntimeError: no running event loop":
        text += _NOT_ASYNCIO
    for secret in secrets:
        text = text.replace(secret, MASK)
    return text if len(text) <= MAX_ERROR_LENGTH else text[: MAX_ERROR_LENGTH - 1] + "…"


def parked_reason(tenant: "Tenant | None", gone: str | None = None) -> str:
    """Say why an event was parked, and what to do; ``gone`` is the id of a purged tenant."""
    if gone is not None:
        return f"its tenant {gone} was purged, and nobody else may have its events"
    if tenant is None or tenant.is_active:
        return "no handler for this type; register one, then replay the event"
    if tenant.is_deleted:
        return (
            f"its tenant {tenant.identifier} is deleted; reactivate the tenant, then replay the "
            "event"
        )
    return (
        f"its tenant {tenant.identifier} is {tenant.status}, and the handler has "
        "run_when_suspended=False; reactivate the tenant, then replay the event"
    )


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Return the exceptions of a group in their order; of no group, the exception itself."""
    # Without recursion: nurseries of a task that calls itself nest groups as deep as it went.
    waiting = [error]
    while waiting:
        found = waiting.pop()
        if isinstance(found, BaseExceptionGroup):
            waiting += reversed(found.exceptions)
        else:
            yield found


def _message_of(error: BaseException) -> str:
    try:
        # The method of str itself: what __str__ returns may be of anybody's class.
        return str.encode(str(error), "utf-8", "backslashreplace").decode("utf-8")
    except BaseException as failure:  # noqa: ASYNC103 - whatever it raises is its own
        if is_interrupt(failure):
            raise
        return f"(no text: its __str__ raised {type(failure).__name__})"  # noqa: ASYNC104 - the text stands for it


# -- which part of an exception belongs to the handler ------------------------------------------


def is_interrupt(error: BaseException) -> bool:
    """Say whether an exception is an operator's Ctrl-C and not a handler's own KeyboardInterrupt.

    Trio raises a real one in its signal handler, so the innermost frame tells the two apart.
    """
    if not isinstance(error, KeyboardInterrupt):
        return False
    frame = _innermost(error.__traceback__)
    return frame is not None and frame.f_globals.get("__name__") == "trio._core._ki"


def divide(
    error: BaseException, belongs: Callable[[BaseException], bool]
) -> tuple[BaseException | None, BaseException | None]:
    """Return the part of an exception or group for which ``belongs`` is true, and the rest."""
    if isinstance(error, BaseExceptionGroup):
        try:
            return error.split(belongs)
        except Exception:  # too deep, or its class has a method that raises: all is the handler's
            return None, error
    return (error, None) if belongs(error) else (None, error)


def comes_of(error: BaseException, kind: type[BaseException]) -> bool:
    """Say whether an exception, or a part of it, was raised while a ``kind`` was handled."""
    # __context__ and __cause__ may form a circle, which user code can build by assignment.
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        found = waiting.pop()
        if isinstance(found, kind):
            return True
        seen.add(id(found))
        parts = found.exceptions if isinstance(found, BaseExceptionGroup) else ()
        further = (*parts, found.__context__, found.__cause__)
        waiting += [one for one in further if one is not None and id(one) not in seen]
    return False


def place_of(error: BaseException) -> str | None:
    """Return the innermost line of the user's code that an exception passed: ``FILE:LINE in NAME``.

    Where all code is installed, as an application's own package may be, it is the outermost line
    outside this package: the handler's.
    """
    # The place where a member of a group failed says more than that of the nursery around it.
    while isinstance(error, BaseExceptionGroup) and error.exceptions[0].__traceback__ is not None:
        error = error.exceptions[0]
    return place_in(_frames(error.__traceback__))


def place_in(frames: Iterable[tuple[FrameType, int]]) -> str | None:
    """Return the innermost line of the user's code among frames; see :func:`place_of`.

    ``frames`` are pairs of frame and line number, the outermost first.
    """
    first: str | None = None
    own: str | None = None
    for frame, line in frames:
        file = frame.f_code.co_filename
        if file.startswith((_PACKAGE, "<")):
            continue
        place = f"{file}:{line} in {frame.f_code.co_qualname}"
        first = first or place
        if not file.startswith(_STANDARD_LIBRARY) and not any(part in file for part in _INSTALLED):
            own = place
    return own or first


def traceback_of(error: BaseException, secrets: Iterable[str] = ()) -> str:
    """Return the whole traceback as text, secrets masked, its beginning cut off if it is long.

    The end is kept, because that is where the exception and its message stand.
    """
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as failure:  # too deep a group, or a class with an attribute that raises
        text = f"(no traceback: making it raised {type(failure).__name__})\n{describe_error(error)}"
    for secret in secrets:
        text = text.replace(secret, MASK)
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text[-MAX_TRACEBACK_LENGTH:]


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _innermost(trace: TracebackType | None) -> FrameType | None:
    return next(reversed([frame for frame, _ in _frames(trace)]), None)
