"""One attempt to send one message on one channel: its request, its outcome, and the next step.

:func:`attempt` turns every failure into an outcome, in the same way for all channels.
:func:`classify_response` classifies an answer as accepted, to be retried, or refused.
:func:`ending_of` decides the next state of the message. Faults of our own code are logged by kind
and place, not by their text, which may quote the message.
"""

import json
import re
import traceback
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import attrs
import trio

from ..base.logs import get_logger
from ..base.throttle import jittered_wait
from ..config.check_tenants import ALLOW_PRIVATE_ADDRESSES
from ..config.options.notifications import NotificationsOptions
from ..errors import AddressInvalidError, AddressRefusedError, AnswerLostError, NotSentError
from ..net.poster import PostAnswer
from ..records.notifications import NotificationState, SendResult
from ..records.tenants import OutboxRecord, Tenant, TenantStatus, Transition
from .templates import cut, one_line

_log = get_logger("notifications")

#: Reads an environment variable; None when it is not set.
ReadVariable = Callable[[str], str | None]

#: Characters of a provider's explanation that are stored.
MAX_EXPLANATION_CHARACTERS = 300

#: The longest wait that a provider's answer can cause, in seconds.
MAX_WAIT_SECONDS = 86_400.0

#: Statuses besides 5xx after which the message is retried: the request was incomplete, too early,
#: or over a limit.
_TRY_AGAIN = frozenset({408, 425, 429})

#: Statuses of a gateway between us and the provider: 502, 504, and those invented by CDNs. The
#: gateway may or may not have forwarded the request. An SMS cannot be recalled, so the message
#: becomes ``unknown`` instead of being resent (docs/adr/0013-notifications.md).
_SAID_BY_A_GATEWAY = frozenset({502, 504, 598, 599, *range(520, 531)})


@attrs.frozen
class Sent:
    """The provider accepted it; ``provider_id`` is its id of the message, if it returned one."""

    provider_id: str | None = None


@attrs.frozen
class Again:
    """It was certainly not accepted, but may be later; not before ``after_seconds``, if set."""

    reason: str
    after_seconds: float | None = None


@attrs.frozen
class Refused:
    """It was certainly not accepted, and retrying will not help."""

    reason: str


@attrs.frozen
class Skipped:
    """Nothing was sent, for a local reason: no address, not verified, no credential."""

    reason: str


@attrs.frozen
class Ambiguous:
    """It was sent, and no answer arrived: it is unknown whether it was accepted."""

    reason: str


Outcome = Sent | Again | Refused | Skipped | Ambiguous


def log_fault(event: str, error: Exception, **fields: object) -> None:
    """Log the type of an unexpected exception and the line that raised it.

    Its text and its traceback may quote a credential, an address or a message, so neither is
    logged.
    """
    # The last frame is the line that raised; with the type it is enough for a report.
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{place.filename}:{place.lineno}"
    _log.error(event, error=type(error).__name__, where=where, **fields)


class Channel(Protocol):
    """One channel for notifying site managers."""

    @property
    def repeatable(self) -> bool:
        """Whether a message may be sent again if it is not known whether it arrived.

        True if the receiver recognizes a repetition by its id, as the webhook's does.
        """
        ...

    async def send(self, record: OutboxRecord) -> Outcome:
        """Try once to announce this transition.

        A channel that the settings do not enable, or that lacks something, returns
        :class:`Skipped` with the reason. It raises nothing but ``Cancelled``, after which the
        outcome is unknown.
        """
        ...


class Poster(Protocol):
    """The HTTP layer as a channel sees it; the runtime passes an instance."""

    async def post(
        self,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes,
        timeout_seconds: float,
        public_only: bool = False,
        wants_body: bool = True,
    ) -> PostAnswer:
        """Send one POST request, without following redirects.

        Args:
            url: an absolute URL.
            headers: all except Host and Content-Length.
            body: the exact bytes.
            timeout_seconds: time limit from resolving the name to the answer's last byte.
            public_only: refuse to connect to a private, loopback or link-local address.
            wants_body: False: the answer is complete with its head, and its body is empty.

        Raises:
            AddressInvalidError: nothing can ever be sent to this URL.
            AddressRefusedError: ``public_only``, and the host has no public address.
            NotSentError: nothing of the request was sent: it may be retried.
            AnswerLostError: it was sent, or may have been, and no complete answer came.
        """
        ...


@attrs.frozen(kw_only=True)
class Request:
    """A request that is ready to be sent, with the function that classifies its answer.

    ``repr`` shows no secret.
    """

    url: str = attrs.field(repr=False)
    headers: Mapping[str, str] = attrs.field(repr=False)
    body: bytes = attrs.field(repr=False)
    timeout_seconds: float
    classify: Callable[[PostAnswer], Outcome] = attrs.field(repr=False)
    public_only: bool = False
    wants_body: bool = True


async def attempt(poster: Poster, prepare: Callable[[], Request | Skipped]) -> Outcome:
    """Prepare a request, send it once, and return the outcome.

    It raises nothing but ``Cancelled``; whether the request arrived is then unknown.
    """
    try:
        request = prepare()
    except Exception as error:  # a bug in one message must not end the other channels
        log_fault("notification.not_prepared", error)
        await trio.lowlevel.checkpoint()
        return Refused(f"unexpected {type(error).__name__} while the message was prepared")
    if isinstance(request, Skipped):
        await trio.lowlevel.checkpoint()
        return request
    outcome: Outcome
    try:
        answer = await poster.post(
            request.url,
            headers=request.headers,
            body=request.body,
            timeout_seconds=request.timeout_seconds,
            public_only=request.public_only,
            wants_body=request.wants_body,
        )
        outcome = request.classify(answer)
    except AddressRefusedError as error:
        outcome = Refused(f"{error}: set {ALLOW_PRIVATE_ADDRESSES} to true if this is meant")
    except AddressInvalidError as error:
        outcome = Refused(f"{error}: no message can be sent to this address")
    except NotSentError as error:
        outcome = Again(str(error))
    except AnswerLostError as error:
        outcome = Ambiguous(str(error))
    except Exception as error:  # a bug after the sending began, so the message may have arrived
        log_fault("notification.answer_not_understood", error)
        outcome = Ambiguous(f"unexpected {type(error).__name__} while it was sent")
    return outcome  # noqa: ASYNC910 - a post that raises has waited too


def credential(read_variable: ReadVariable, name: str, *, for_header: bool = True) -> str | Skipped:
    """Return the value of a variable, or the reason not to use it, which never quotes the value.

    ``for_header``: it becomes part of a request's head, where only visible ASCII is safe: a line
    break would start another header.
    """
    # ``echo`` leaves a line break at the end of a variable's file.
    value = (read_variable(name) or "").strip()
    if not value:
        return Skipped(f"the variable {name} is not set")
    if for_header and not all("!" <= character <= "~" for character in value):
        return Skipped(
            f"the value of the variable {name} contains white space, a line break or characters "
            "outside ASCII: copy it again"
        )
    return value


class ProviderChannel(ABC):
    """A channel that sends one HTTP request per message; others implement only :class:`Channel`.

    Args:
        options: the settings of notifications.
        poster: sends requests.
        read_variable: reads the environment for each message, so that a changed credential counts.
        clock: returns Unix seconds.
    """

    #: Whether the receiver can detect repetitions.
    repeatable: bool

    def __init__(
        self,
        options: NotificationsOptions,
        poster: Poster,
        *,
        read_variable: ReadVariable,
        clock: Callable[[], float],
    ) -> None:
        self._options = options
        self._poster = poster
        self._read_variable = read_variable
        self._clock = clock

    async def send(self, record: OutboxRecord) -> Outcome:
        """Try once to send the message; see :class:`Channel`."""
        return await attempt(self._poster, lambda: self._prepare(record))

    @abstractmethod
    def _prepare(self, record: OutboxRecord) -> Request | Skipped:
        """Return the request of a message, or the reason to send none."""


def classify_response(
    answer: PostAnswer,
    *,
    repeatable: bool,
    explanation: str = "",
    advice: str = "",
    now: float = 0,
) -> Outcome:
    """Return the outcome of a message from the status of an unsuccessful answer.

    Args:
        answer: of any status except those that the channel treats as success.
        repeatable: whether the receiver recognizes a repetition. If it does not, a gateway's answer
            leaves the outcome open, like no answer.
        explanation: the provider's words, already bounded and without secrets.
        advice: the remedy for 401 and 403.
        now: Unix seconds, for ``X-RateLimit-Reset``.
    """
    status = answer.status
    reason = f"answered {status}"
    if explanation:
        reason += f": {explanation}"
    # Before the other 5xx, of which these are a part.
    if status in _SAID_BY_A_GATEWAY and not repeatable:
        return Ambiguous(f"{reason}: a gateway's answer; check at the provider whether it was sent")
    if status in _TRY_AGAIN or status >= 500:
        return Again(reason, _wait(answer, now))
    # Following it would send a credential and a person's address to an unconfigured host.
    if 300 <= status < 400:
        return Refused(f"{reason} (redirects are not followed)")
    if status in (401, 403) and advice:
        return Refused(f"{reason}; {advice}")
    # A success that the provider does not document may be a sandbox, a queue, or nothing at all.
    if 200 <= status < 300:
        return Ambiguous(
            f"{reason}, which is not documented; check at the provider whether it was sent"
        )
    return Refused(reason)


def accepted(answer: PostAnswer, provider_id: Any = None) -> Sent:
    """Return the success, with the provider's id if it can be shown."""
    shown = one_line(provider_id)[:128] if isinstance(provider_id, str) else ""
    return Sent(shown or None)


def document_of(answer: PostAnswer) -> dict[str, Any]:
    """Return the answer's JSON object; an empty one if it is not an object."""
    try:
        found = json.loads(answer.body)
    # A proxy answers in HTML, and a hostile server nests a thousand brackets.
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def explained(text: Any, hidden: Iterable[str]) -> str:
    """Return a provider's words as one bounded line, without the ``hidden`` texts in any case."""
    if not isinstance(text, str):
        return ""
    shown = one_line(text)
    for secret in hidden:
        if secret:
            shown = re.sub(re.escape(secret), "***", shown, flags=re.IGNORECASE)
    return cut(shown, MAX_EXPLANATION_CHARACTERS)


def _wait(answer: PostAnswer, now: float) -> float | None:
    """Return the longer of the waits requested by the answer, in seconds, or None."""
    asked = [] if answer.retry_after is None else [answer.retry_after]
    reset = answer.headers.get("x-ratelimit-reset", "").strip()
    # Some providers send a time in Unix seconds instead of a wait. Twelve digits reach beyond the
    # year 30000; a longer number is invalid.
    if answer.status == 429 and reset.isascii() and reset.isdigit() and len(reset) <= 12:
        asked.append(int(reset) - now)
    waits = [wait for wait in asked if wait > 0]
    return min(max(waits), MAX_WAIT_SECONDS) if waits else None


#: The longest stored reason, in characters.
MAX_REASON_LENGTH = 500


@attrs.frozen
class RetrySchedule:
    """The number of attempts of a message on its channel, and the waits between them.

    ``max_attempts`` includes the first one. The wait after the n-th failure is drawn from ``U(0,
    min(cap, base * 2**(n - 1)))``. With the defaults, eight attempts last half an hour on average:
    long enough for a provider to recover, and for the message to be current.
    """

    max_attempts: int = 8
    base_seconds: float = 30.0
    cap_seconds: float = 3600.0


def ending_of(
    outcome: Outcome,
    *,
    attempts: int,
    repeatable: bool,
    schedule: RetrySchedule,
    now: float,
    fraction: float,
) -> SendResult:
    """Decide the next step after an attempt.

    Args:
        outcome: the channel's outcome.
        attempts: the number of this attempt, from 1.
        repeatable: whether the receiver recognizes a repetition: only then is a message sent again
            that may have arrived.
        schedule: the number of attempts and the waits.
        now: Unix seconds.
        fraction: the caller's randomness, from 0 to 1.
    """
    match outcome:
        case Sent(provider_id):
            return SendResult(NotificationState.SENT, provider_id=provider_id)
        case Skipped(reason):
            return SendResult(NotificationState.SKIPPED, _cut(reason))
        case Refused(reason):
            return SendResult(NotificationState.FAILED, _cut(reason))
        # People cannot distinguish a repeated SMS from a second transition, and it cannot be
        # recalled: so a person decides (``notify retry``).
        case Ambiguous(reason) if not repeatable:
            return SendResult(NotificationState.UNKNOWN, _cut(reason))
        # The receiver recognises a repetition by its ``deliveryId``.
        case Ambiguous(reason):
            asked = 0.0
        case Again(reason, after_seconds):
            asked = after_seconds or 0.0
    if attempts >= schedule.max_attempts:
        return SendResult(NotificationState.FAILED, _cut(reason))
    wait = jittered_wait(
        attempts, fraction, base_seconds=schedule.base_seconds, cap_seconds=schedule.cap_seconds
    )
    # The provider's wait is a lower limit. Jitter keeps messages with the same answer from retrying
    # together.
    return SendResult(NotificationState.RETRYING, _cut(reason), next_attempt_at=now + asked + wait)


def interrupted(*, repeatable: bool, reason: str, now: float) -> SendResult:
    """Return the result recorded for an attempt that was interrupted while sending."""
    if repeatable:
        return SendResult(NotificationState.RETRYING, reason, next_attempt_at=now)
    return SendResult(NotificationState.UNKNOWN, reason)


def _cut(reason: str) -> str:
    return reason if len(reason) <= MAX_REASON_LENGTH else reason[: MAX_REASON_LENGTH - 1] + "…"


# A fictitious tenant is active before every other transition.
_BEFORE = {Transition.REACTIVATED: TenantStatus.SUSPENDED}


def sample_record(
    transition: Transition, tenant: Tenant | None = None, *, now: float, reason: str | None = None
) -> OutboxRecord:
    """Return the record of a fictitious transition, of a given or fictitious tenant.

    Args:
        transition: the transition.
        tenant: its tenant; None: a fictitious one.
        now: when it would be, in Unix seconds.
        reason: why; None: an invented reason for a fictitious tenant.
    """
    if tenant is None:
        tenant = Tenant(
            id=str(uuid.uuid4()),
            identifier="example",
            name="Example Ltd",
            status=_BEFORE.get(transition, TenantStatus.ACTIVE),
            created_at=now,
        )
        reason = reason or "invoice 2026-117 is unpaid"
    new = TenantStatus.ACTIVE if transition is Transition.REACTIVATED else TenantStatus(transition)
    return OutboxRecord(
        delivery_id=str(uuid.uuid4()),
        tenant_id=tenant.id,
        tenant_identifier=tenant.identifier,
        tenant_name=tenant.name,
        transition=transition,
        previous_status=tenant.status,
        new_status=new,
        reason=reason,
        actor="cli",
        occurred_at=now,
        site_manager_email=tenant.site_manager_email,
        site_manager_email_verified=tenant.site_manager_email_verified,
        site_manager_phone=tenant.site_manager_phone,
    )
