"""Outcomes of runs: pure decisions after a run has failed or ended the process.

A queued failure leads to a retry with full jitter or to a dead letter; an inline failure asks the
sender to deliver again or ends as a dead letter. Events that were running when the process ended
are run alone until it is clear which of them is the cause
(docs/adr/0023-quarantine.md). The second half describes exceptions of user code
in texts that can be stored and logged.
"""

import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from ..base.foreign_errors import (
    attempt,
    attribute_of,
    chain_of,
    frames_of,
    is_a,
    leaves_of,
    members_of,
    message_of,
    type_name,
)
from ..base.throttle import jittered_wait
from ..config import Settings
from ..config.secret import MASK
from ..errors import DeadLetter, Discard, NotAwaitedError, RetryLater, SdkError
from ..records.deliveries import Dead, Done, Postponed, Retry
from ..records.policies import Policy
from .routes import PostFailedError, Ruling

if TYPE_CHECKING:
    from ..records.tenants import Tenant

#: The longest error text that is stored with a delivery, in characters: a handler's exception may
#: quote a whole payload, and each delivery would store it again.
MAX_ERROR_LENGTH = 2000

#: The longest traceback that is stored with a failed run in Development, in characters.
MAX_TRACEBACK_LENGTH = 20_000

#: The number of runs that ended the process after which an event runs alone, so that a further end
#: names its cause. A single end proves little: it may be a restart, or the fault of another event.
ENDS_BEFORE_ALONE = 2

#: The maximum number of runs beyond MaxAttempts of an event that never ran alone, so that it is not
#: dead-lettered for another event's fault.
RUNS_FOR_PROOF = 2

#: The longest delay in seconds that an unhandled error of the client requests for its event.
LONGEST_UPSTREAM_DELAY = 3600.0

#: Directories whose code is not the user's: this package, the standard library, installed packages.
#: ``place_of`` skips them, because a line in a library does not show which handler failed.
_PACKAGE = str(Path(__file__).parents[1])
_STANDARD_LIBRARY = str(Path(traceback.__file__).parent)
_INSTALLED = ("site-packages", "dist-packages")
#: Installed packages whose frames are between this package and a handler, in threads and child
#: tasks.
_RUNNERS = tuple(str(Path("packages", name, "_"))[:-1] for name in ("trio", "outcome"))


class Failure(msgspec.Struct, frozen=True):
    """The failure of one run: ``error`` as text, ``retry_after`` in seconds if the handler
    requested it.

    ``asked``: the handler raised only ``RetryLater``, which is an answer and needs no traceback.
    ``error_type`` is the name of the exception's class, ``place`` the user's line that raised it.
    ``cut_short``: our own cancellation caused it. ``ruling`` is the consequence of a failed post.
    ``ends`` is Done for ``Discard`` and Dead for ``DeadLetter``: there is no further run.
    """

    error: str
    retry_after: float | None = None
    error_type: str = "timeout"
    place: str | None = None
    traceback: str | None = None
    cut_short: bool = False
    asked: bool = False
    ruling: Ruling | None = None
    ends: type[Done] | type[Dead] | None = None


def timeout_failure(handler: str, seconds: float, *, own: bool = False) -> Failure:
    """Return the failure of an inline run that exceeded its limit; ``own``: its handler's."""
    limit = "its timeout" if own else "InlineTimeoutSeconds"
    return Failure(
        f"the handler {handler} took longer than {limit} ({seconds:g} s); register it with "
        "enqueue=True"
    )


def queued_timeout_failure(handler: str, seconds: float, *, own: bool = False) -> Failure:
    """Return the failure of a run of the queue that was cancelled at its limit.

    ``own``: the limit is the handler's ``timeout``.
    """
    limit = "its timeout" if own else "Queue:HandlerTimeoutSeconds"
    return Failure(f"the handler {handler} took longer than {limit} ({seconds:g} s)")


class DeliveryRetries(msgspec.Struct, frozen=True):
    """The number and the delays of an enqueued event's runs.

    ``max_attempts`` counts all runs, including the first; ``base_seconds`` and ``cap_seconds``
    limit the delay: full jitter, ``U(0, min(cap, base * 2**(attempts - 1)))``. Jitter keeps events
    that failed together from retrying together.
    """

    max_attempts: int
    base_seconds: float
    cap_seconds: float

    @classmethod
    def of_settings(cls, settings: Settings) -> "DeliveryRetries":
        """Return the retries of ``Webhooks:Queue``."""
        queue = settings.webhooks.queue
        return cls(queue.max_attempts, queue.retry_base_seconds, queue.retry_cap_seconds)

    def of(self, policy: Policy) -> "DeliveryRetries":
        """Return the retries of a handler, which are these where its policy has none."""
        if policy.max_attempts is None and policy.retry is None:
            return self
        retry = policy.retry
        return DeliveryRetries(
            policy.max_attempts or self.max_attempts,
            self.base_seconds if retry is None else retry.base,
            self.cap_seconds if retry is None else retry.cap,
        )


def after_queued_failure(
    failure: Failure, *, attempts: int, policy: DeliveryRetries, now: float, fraction: float
) -> Done | Retry | Dead | Postponed:
    """Decide what follows the failed run number ``attempts`` of an enqueued event.

    ``fraction`` in [0, 1) is the caller's randomness, ``now`` Unix seconds. A delay that the
    handler requested is a lower bound: the jitter is added to it, so that many events with the same
    delay do not return at once.
    """
    if failure.ends is not None:
        return _end_of(failure)
    ruling = failure.ruling or Ruling()
    if ruling.postponed is not None:
        return ruling.postponed
    if attempts >= min(policy.max_attempts, ruling.most_attempts or policy.max_attempts):
        return Dead(failure.error, failure.place, failure.traceback, answer=ruling.answer)
    wait = jittered_wait(
        attempts, fraction, base_seconds=policy.base_seconds, cap_seconds=policy.cap_seconds
    )
    at = now + (failure.retry_after or ruling.retry_after or 0.0) + wait
    trace = failure.traceback
    return Retry(at, failure.error, failure.place, trace, ruling.answer, failure.asked)


def after_inline_failure(
    failure: Failure, *, attempts: int, max_attempts: int
) -> Done | Retry | Dead:
    """Decide what follows the failed run number ``attempts`` of an inline event.

    Up to ``max_attempts`` the sender is asked to deliver again. Then the event is a dead letter and
    the sender gets 200, because senders disable an endpoint that fails too often, and one event
    that no handler can process must not stop all others.
    """
    if failure.ends is not None:
        return _end_of(failure)
    if attempts >= max_attempts:
        return Dead(failure.error, failure.place, failure.traceback)
    return Retry(None, failure.error, failure.place, failure.traceback, asked=failure.asked)


def _end_of(failure: Failure) -> Done | Dead:
    if failure.ends is Done:
        return Done(reason=f"discarded: {failure.error.removeprefix('Discard: ')}")
    return Dead(failure.error, failure.place, failure.traceback)


def after_process_ends(
    ends: int, *, ran_alone: bool, attempts: int, max_attempts: int
) -> Dead | None:
    """Return the dead letter of an event whose runs ended the process, or None to run it again.

    Args:
        ends: the number of its runs in which the process ended.
        ran_alone: whether no other run was in progress when the process last ended.
        attempts: the number of its runs so far.
        max_attempts: the maximum number of its runs.

    Once its attempts are used up, the event is dead if its last run was alone, since nothing else
    can have ended the process then. Otherwise it gets another run, alone (:func:`must_run_alone`).
    It is dead in any case after ``RUNS_FOR_PROOF`` more runs, because an event that is never alone
    must not run forever.
    """
    if not ends or attempts < max_attempts:
        return None
    if not ran_alone and attempts < max_attempts + RUNS_FOR_PROOF:
        return None
    times = "time" if ends == 1 else "times"
    return Dead(f"the process ended {ends} {times} while it ran", recorded=True)


def must_run_alone(ends: int, *, attempts: int, max_attempts: int) -> bool:
    """Decide whether the next run of an event must be alone; see :func:`after_process_ends`."""
    # The last allowed run is alone as well: otherwise an event with a single allowed run could be
    # dead-lettered for another event's fault.
    return ends >= ENDS_BEFORE_ALONE or (ends > 0 and attempts + 1 >= max_attempts)


def retry_after_of(error: BaseException) -> float | None:
    """Return the longest delay, in seconds, that an error or a member of its group requested.

    So do the client's errors with a ``retry_after``: an attempt that comes before the upstream is
    asked again would be lost.
    """
    asked = [
        _seconds_of(part) if is_a(part, RetryLater) else _upstream_delay_of(part)
        for part in leaves_of(error)
    ]
    return max((seconds for seconds in asked if seconds is not None), default=None)


def only_asks(error: BaseException) -> bool:
    """Return whether an error is only ``RetryLater``, which is an answer and not a failure."""
    return all(
        is_a(part, RetryLater) and _seconds_of(part) is not None for part in leaves_of(error)
    )


def ending_of(error: BaseException) -> type[Done] | type[Dead] | None:
    """Return how the event ends at once: dead if any part of the error is a ``DeadLetter``.

    Done if all parts are ``Discard``. None: it does not, as for any other exception.
    """
    parts = [*leaves_of(error)]
    if any(is_a(part, DeadLetter) for part in parts):
        return Dead
    return Done if all(is_a(part, Discard) for part in parts) else None


def _seconds_of(error: BaseException) -> float | None:
    """Return the delay of a ``RetryLater``; None if it is unusable, for example in a subclass."""
    return _usable(attribute_of(error, "seconds"))


def _upstream_delay_of(error: BaseException) -> float | None:
    """Return the ``retry_after`` of an error of the client, at most an hour; otherwise None."""
    if not is_a(error, SdkError):
        return None
    seconds = _usable(attribute_of(error, "retry_after"))
    return None if seconds is None else min(seconds, LONGEST_UPSTREAM_DELAY)


def _usable(seconds: object) -> float | None:
    # The exact type: a subclass may redefine comparisons.
    if type(seconds) is int or type(seconds) is float:
        return float(seconds) if 0 <= seconds < RetryLater.LIMIT_SECONDS else None
    return None


def post_failure(error: PostFailedError) -> Failure:
    """Return the failure of a forwarded event; no line of user code caused it."""
    return Failure(str(error), error_type=type(error).__name__, ruling=error.ruling)


#: A common mistake of FastAPI users: the message of asyncio does not name the remedy.
_NOT_ASYNCIO = (
    " (handlers run on Trio, or in a thread; under sdk_trio.asgi.Threaded, asyncio=True runs a "
    "handler on the application's loop)"
)


def describe_error(error: BaseException, secrets: Iterable[str] = ()) -> str:
    """Return ``Type: message`` of an exception, with groups flattened, truncated to a bounded
    length.

    The message is the handler's own, for operators; any of ``secrets`` in it is masked.

    The text can be stored and logged whatever the exception is: its ``__str__`` may raise, or
    return characters that UTF-8 cannot encode (a file name with undecodable bytes).
    """
    texts: list[str] = []
    length = 0
    for part in leaves_of(error):
        message = message_of(part)
        texts.append(f"{type_name(part)}: {message}" if message else type_name(part))
        length += len(texts[-1])
        if length > MAX_ERROR_LENGTH:
            break
    text = "; ".join(texts)
    if text == "RuntimeError: no running event loop":
        text += _NOT_ASYNCIO
    for secret in secrets:
        text = text.replace(secret, MASK)
    return text if len(text) <= MAX_ERROR_LENGTH else text[: MAX_ERROR_LENGTH - 1] + "…"


def parked_reason(tenant: "Tenant | None", gone: str | None = None) -> str:
    """Return why an event was parked, and the remedy; ``gone`` is the id of a purged tenant."""
    if gone is not None:
        return f"its tenant {gone} was purged, and no other tenant may get its events"
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


# -- which part of an exception belongs to the handler ------------------------------------------


def divide(
    error: BaseException, belongs: Callable[[BaseException], bool]
) -> tuple[BaseException | None, BaseException | None]:
    """Return the part of an exception or group for which ``belongs`` is true, and the rest.

    Both parts of a mixed group are flat groups: the method ``split`` would call ``derive`` of its
    class, which may raise anything, and it recurses.
    """
    taken: list[BaseException] = []
    rest: list[BaseException] = []
    for part in leaves_of(error):
        (taken if belongs(part) else rest).append(part)
    if not taken:
        return None, error
    return _joined(taken), _joined(rest)


def _joined(parts: Sequence[BaseException]) -> BaseException | None:
    if len(parts) > 1:
        return BaseExceptionGroup("parts of a handler's exception group", parts)
    return parts[0] if parts else None


def is_caused_by(error: BaseException, kind: type[BaseException]) -> bool:
    """Return whether an exception, or a part of it, was raised while a ``kind`` was handled."""
    return any(is_a(found, kind) for found in chain_of(error))


def place_of(error: BaseException) -> str | None:
    """Return the innermost line of the user's code that an exception passed: ``FILE:LINE in NAME``.

    If all code is installed, as an application's own package may be, it is the outermost line
    outside this package and Trio: the handler's.
    """
    if is_a(error, NotAwaitedError):
        place = attribute_of(error, "place")
        return place if type(place) is str else None
    # The line of a group's member is more useful than that of the nursery around it.
    while (members := members_of(error)) and any(frames_of(members[0])):
        error = members[0]
    return place_in(frames_of(error))


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
        installed = any(part in file for part in _INSTALLED)
        if installed and any(part in file for part in _RUNNERS):
            continue
        place = f"{file}:{line} in {frame.f_code.co_qualname}"
        if installed:
            first = first or place
        elif not file.startswith(_STANDARD_LIBRARY):
            own = place
    return own or first


def library_of(file: str) -> str | None:
    """Return the directory of the library that a file of code belongs to.

    Returns None for user code that is not installed, and for this package.
    """
    if file.startswith(_PACKAGE):
        return None
    parts = Path(file).parts
    for name in _INSTALLED:
        if name in parts:
            return str(Path(*parts[: parts.index(name) + 2]))
    return _STANDARD_LIBRARY if file.startswith(_STANDARD_LIBRARY) else None


def traceback_of(error: BaseException, secrets: Iterable[str] = ()) -> str:
    """Return the traceback as text, with secrets masked; a long one loses its beginning.

    The end is kept, because it has the exception and its message.
    """
    text, failure = attempt(lambda: "".join(traceback.format_exception(error)))
    if text is None:  # the group is nested too deeply, or an attribute of the class raises
        raised = "" if failure is None else f": formatting it raised {type_name(failure)}"
        text = f"(no traceback{raised})\n{describe_error(error)}"
    for secret in secrets:
        text = text.replace(secret, MASK)
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text[-MAX_TRACEBACK_LENGTH:]
