"""The conditions of alerts, decided from facts that other parts have measured. Pure.

A condition holds, does not hold, or is unknown: its part has not reported yet, or is off. A detail
consists of numbers, times and names of this package. It quotes no text of an event, an answer or
an error, so it cannot contain a body, a secret or a token.
"""

import base64
import json
from collections.abc import Iterator, Sequence
from math import inf, isfinite
from typing import Any, Final

import attrs

from ..base.times import readable
from ..config.options.alerts import AlertsOptions
from ..records.alerts import AlertName
from ..records.policies import EventPause, name_of_glob

DAY_SECONDS = 86_400.0

#: The store must fail for this time before an alert opens, in seconds: longer than a restart of the
#: database, or a stall of the disk, that senders survive by their own retries.
UNREACHABLE_SECONDS = 15.0

#: Replicas must be behind for this time, in seconds: a new database is until its first sync.
BEHIND_SECONDS = 60.0


#: The most pauses that a message names.
MOST_NAMED: Final = 5


@attrs.frozen(kw_only=True)
class Facts:
    """The facts at one time. None: unknown; the condition keeps its state.

    Args:
        store_writes: whether the store accepts writes.
        store_failing_since: when it stopped accepting them; None while it does.
        new_dead_letters: events that became dead letters within ``RepeatHours`` and still are.
        last_delivery_at: when the newest stored delivery arrived.
        oldest_waiting_at: when the oldest waiting event arrived; ``inf``: none waits.
        pauses: those of events that are in force.
        disabled_endpoints: the host and the tenants whose endpoints the upstream disabled.
        sender_answers: whether the upstream answers the client.
        replication_lags: whether replicas are behind their limit or cannot be written.
        replication_lags_since: when that began; None while they are not.
        certificate_ends_at: the expiry of the receiver's certificate; ``inf``: there is none.
        token_ends_at: the expiry of the access token; ``inf``: unknown.
        clock_differs: whether this host's clock differs too much from the store's.
        clock_offset: the difference, in seconds.
        unused_secrets: positions of configured secrets that no sender uses.
    """

    store_writes: bool | None = None
    store_failing_since: float | None = None
    new_dead_letters: int | None = None
    last_delivery_at: float | None = None
    oldest_waiting_at: float | None = None
    pauses: Sequence[EventPause] | None = None
    disabled_endpoints: int | None = None
    sender_answers: bool | None = None
    replication_lags: bool | None = None
    replication_lags_since: float | None = None
    certificate_ends_at: float | None = None
    token_ends_at: float | None = None
    clock_differs: bool | None = None
    clock_offset: float = 0.0
    unused_secrets: tuple[int, ...] | None = None


@attrs.frozen
class AlertCondition:
    """Whether a condition holds (None: unknown), and its description if it does."""

    name: AlertName
    holds: bool | None
    detail: str = ""


def evaluate(facts: Facts, options: AlertsOptions, now: float) -> tuple[AlertCondition, ...]:
    """Return every condition at ``now``, in Unix seconds."""
    return tuple(_evaluate(facts, options, now))


def _evaluate(facts: Facts, options: AlertsOptions, now: float) -> Iterator[AlertCondition]:
    yield _dead_letters(facts.new_dead_letters, options)
    yield _disabled(facts.disabled_endpoints)
    yield _silence(facts.last_delivery_at, options, now)
    yield _oldest_waiting(facts.oldest_waiting_at, options, now)
    yield _paused(facts.pauses, options, now)
    yield _store(facts, now)
    yield AlertCondition(
        AlertName.SENDER_UNREACHABLE,
        _negated(facts.sender_answers),
        "Calls of the upstream API fail. 'doctor' finds the cause.",
    )
    yield AlertCondition(
        AlertName.REPLICATION_LAG,
        _lasting(facts.replication_lags, facts.replication_lags_since, BEHIND_SECONDS, now),
        "Replicas of tenants' databases are behind, or cannot be written. 'replication status' "
        "shows which ones.",
    )
    ends = facts.certificate_ends_at
    yield _expiry(AlertName.CERTIFICATE_EXPIRY, "The receiver's certificate", ends, options, now)
    ends = facts.token_ends_at
    yield _expiry(AlertName.TOKEN_EXPIRY, "The access token Sdk:AccessToken", ends, options, now)
    yield AlertCondition(
        AlertName.CLOCK_OFFSET,
        facts.clock_differs,
        f"This host's clock differs from the database's by {abs(facts.clock_offset):.0f} s. "
        "Synchronize both.",
    )
    yield _unused_secret(facts.unused_secrets)


def _disabled(accounts: int | None) -> AlertCondition:
    of = "" if accounts in (None, 1) else f" for {accounts} accounts (the host, or tenants)"
    return AlertCondition(
        AlertName.ENDPOINT_DISABLED,
        None if accounts is None else accounts > 0,
        f"The upstream has disabled the endpoint of this receiver{of} and delivers nothing to it. "
        "Enable it at the upstream; 'reconciliation.endpoint_disabled' in the log names it.",
    )


def _negated(value: bool | None) -> bool | None:
    return None if value is None else not value


def _store(facts: Facts, now: float) -> AlertCondition:
    fails = _negated(facts.store_writes)
    return AlertCondition(
        AlertName.STORE_UNREACHABLE,
        _lasting(fails, facts.store_failing_since, UNREACHABLE_SECONDS, now),
        "The store does not accept writes, so deliveries are refused with 503. The check 'store' "
        "of /readyz and the log have the cause.",
    )


def _lasting(holds: bool | None, since: float | None, seconds: float, now: float) -> bool | None:
    """Return ``holds``, but unknown while it has held for less than ``seconds``."""
    return None if holds and since is not None and now - since < seconds else holds


def _dead_letters(count: int | None, options: AlertsOptions) -> AlertCondition:
    holds = None if count is None else count >= options.dead_letters
    became = "1 event became a dead letter" if count == 1 else f"{count} events became dead letters"
    detail = (
        f"{became} within {options.repeat_hours} hours. 'events list --state dead' shows what "
        "failed, 'events replay' runs it again."
    )
    return AlertCondition(AlertName.DEAD_LETTERS, holds, detail)


def _silence(last: float | None, options: AlertsOptions, now: float) -> AlertCondition:
    minutes = options.silence_minutes
    if minutes is None:
        # The condition was disabled: an open alert must close.
        return AlertCondition(AlertName.SILENCE, False)
    # A new installation has no stored delivery; that is not silence.
    holds = None if last is None else now - last > minutes * 60
    detail = (
        f"No delivery has arrived for more than {minutes} minutes; the last one at "
        f"{readable(last or 0.0)}."
    )
    return AlertCondition(AlertName.SILENCE, holds, detail)


def _oldest_waiting(since: float | None, options: AlertsOptions, now: float) -> AlertCondition:
    holds = None if since is None else now - since > options.oldest_waiting_minutes * 60
    detail = ""
    if since is not None and holds:
        detail = (
            f"The oldest waiting event arrived at {readable(since)}, more than "
            f"{options.oldest_waiting_minutes} minutes ago. The workers are too slow, or hang."
        )
    return AlertCondition(AlertName.OLDEST_WAITING, holds, detail)


def _paused(
    pauses: Sequence[EventPause] | None, options: AlertsOptions, now: float
) -> AlertCondition:
    # An operator who has paused something needs no message, but one who has forgotten it does.
    longest = options.oldest_waiting_minutes * 60
    holds = None if pauses is None else any(now - each.since > longest for each in pauses)
    # Without the reason, which is a free text.
    named = "; ".join(
        f"{name_of_glob(each.glob)} since {readable(each.since)}"
        for each in (pauses or ())[:MOST_NAMED]
    )
    detail = (
        f"Events are paused and wait in the store: {named}. 'events pauses' shows who paused them, "
        "'events resume' lets them run."
    )
    return AlertCondition(AlertName.EVENTS_PAUSED, holds, detail)


def _expiry(
    name: AlertName, subject: str, ends: float | None, options: AlertsOptions, now: float
) -> AlertCondition:
    holds = None if ends is None else ends - now < options.expiry_days * DAY_SECONDS
    detail = ""
    if ends is not None and holds:
        verb = "expired" if ends <= now else "expires"
        detail = f"{subject} {verb} at {readable(ends)}. Renew it."
    return AlertCondition(name, holds, detail)


def _unused_secret(positions: tuple[int, ...] | None) -> AlertCondition:
    if positions is None:
        return AlertCondition(AlertName.SECRET_UNUSED, None)
    numbers = ", ".join(map(str, positions))
    detail = (
        f"The webhook secrets at position {numbers} of the settings have verified nothing for a "
        "day, while another one has. If their rotation is over, remove them."
    )
    return AlertCondition(AlertName.SECRET_UNUSED, bool(positions), detail)


def token_end(token: str | None) -> float:
    """Return when a token expires, in Unix seconds; infinity if it does not show that.

    A JSON Web Token has the claim ``exp`` (RFC 7519, 4.1.4). Other tokens are opaque. The signature
    is not verified: only the upstream has the key.
    """
    parts = token.strip().split(".") if token is not None else []
    if len(parts) != 3:
        return inf
    try:
        padded = parts[1] + "=" * (-len(parts[1]) % 4)
        claims: Any = json.loads(base64.urlsafe_b64decode(padded))
    except (ValueError, RecursionError):
        return inf
    end = claims.get("exp") if isinstance(claims, dict) else None
    if not isinstance(end, int | float) or isinstance(end, bool):
        return inf
    try:
        return float(end) if isfinite(end) else inf
    except OverflowError:
        return inf  # an integer of more than 300 digits
