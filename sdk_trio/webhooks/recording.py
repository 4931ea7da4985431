"""The leases that this process holds in memory, and the outcomes that are recorded under them.

If the store has leased a queued event to this process that :class:`HeldLeases` does not have, and
that is no in-flight inline run, the call that claimed it was abandoned. The next renewal gives the
lease up, and the event is claimed again.

An outcome goes to the store first, then to the log and the counters.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import trio

from ..base.logs import get_logger
from ..errors import StoreLostError, StoreUnavailableError
from ..records.deliveries import (
    Admission,
    Admitted,
    Dead,
    Done,
    Lease,
    NewDelivery,
    Outcome,
    Parked,
    Postponed,
    Released,
    Retry,
    signer_of_key,
)
from ..storage.ports import Inbox
from . import answers
from .answers import Answer
from .bound import BoundHandler, BoundHandlers
from .counters import Counters

_log = get_logger("webhooks")

T = TypeVar("T")

#: Seconds that a cancelled task may take to record an outcome: longer than a slow disk's sync. If
#: the store does not answer by then, its lease expires, and the event is claimed again.
CLEANUP_SECONDS = 5.0

#: Seconds after which a failing store is retried.
STORE_RETRY_SECONDS = 1.0

#: The Retry-After, in seconds, while another delivery of the same key is still being handled.
BUSY_RETRY_SECONDS = 5.0

#: The maximum number of events that one log line names.
_NAMED = 20

BUSY = answers.unavailable(BUSY_RETRY_SECONDS)

DONE = Done()


async def retry_until_stored(ask: Callable[[], Awaitable[T]]) -> T:
    """Repeat ``ask`` until the store answers.

    Raises:
        StoreLostError: the store will never answer again.
    """
    while True:
        try:
            return await ask()
        except StoreLostError:
            raise
        except StoreUnavailableError as error:
            _log.store_unavailable(error, retry_in=STORE_RETRY_SECONDS)
            await trio.sleep(STORE_RETRY_SECONDS)


class HeldLease(msgspec.Struct, eq=False):
    """The lease of a queued event, which waits in memory or runs.

    Args:
        lease: the lease.
        since: when the lease began, in Unix seconds.
        runs: a worker has taken the event.
        lost: another process has claimed the event in the meantime.
        is_ending: the outcome of the run is being recorded.
    """

    lease: Lease
    since: float
    runs: bool = False
    lost: bool = False
    is_ending: bool = False

    @property
    def key(self) -> str:
        """The key of the event."""
        return self.lease.key


class HeldLeases:
    """The leases by key; iterating gives those to renew."""

    def __init__(self) -> None:
        self._by_key: dict[str, HeldLease] = {}
        #: Held while leases are claimed or renewed, so that a renewal knows every claimed one.
        self.lock: trio.Lock = trio.Lock()

    def hold(self, lease: Lease, *, since: float) -> HeldLease | None:
        """Hold the lease of an event that the store has just leased, since that Unix time.

        None: the event already runs or waits here, under a lease that it had lost. It gets the new
        one, so that no second run of it begins. A run that is recording its outcome does not: that
        outcome is stale.
        """
        earlier = self._by_key.get(lease.key)
        if earlier is not None and not earlier.is_ending:
            earlier.lost = False
            earlier.lease.renew_as(lease)
            return None
        held = self._by_key[lease.key] = HeldLease(lease, since)
        return held

    def drop(self, held: HeldLease) -> None:
        """Stop renewing a lease; a later one of the same event is kept."""
        if self._by_key.get(held.key) is held:
            del self._by_key[held.key]

    def lose(self, keys: Iterable[str]) -> list[str]:
        """Stop renewing leases that others have taken over; return the keys that were held.

        A run in progress keeps its lease, so that no second run of the event begins in this
        process.
        """
        lost = [lease for key in keys if (lease := self._by_key.get(key)) is not None]
        for lease in lost:
            lease.lost = True
            if not lease.runs:
                self.drop(lease)
        return [lease.key for lease in lost]

    def __iter__(self) -> Iterator[Lease]:
        return (held.lease for held in self._by_key.values() if not held.lost)


class OutcomeRecorder:
    """Records outcomes of runs in the inbox, and reports them.

    Args:
        inbox: the open store.
        handlers: gives the name of a failed run's handler.
        counters: counts outcomes and duplicates.
        clock: returns Unix seconds.
    """

    def __init__(
        self,
        inbox: Inbox,
        handlers: BoundHandlers,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._inbox = inbox
        self._handlers = handlers
        self._counters = counters
        self._clock = clock

    # -- in the store ------------------------------------------------------------------------

    async def record(self, lease: Lease, outcome: Outcome) -> bool:
        """Record the outcome of a run; False: no change, its lease is stale.

        If cancelled before it starts, it may still take ``CLEANUP_SECONDS``.

        Raises:
            StoreUnavailableError: it is unknown whether the outcome was recorded.
        """
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
        except trio.Cancelled:  # noqa: ASYNC103 - whatever waits next is cancelled
            # Outside a shield the store's call would be cancelled before it writes, and the handler
            # would run again although it has finished.
            with trio.move_on_after(CLEANUP_SECONDS, shield=True) as patience:
                is_recorded = await self._inbox.finish(lease, outcome, now=self._clock())
            if patience.cancelled_caught:
                raise
        else:
            is_recorded = await self._inbox.finish(lease, outcome, now=self._clock())
        return is_recorded

    async def record_until_stored(self, held: HeldLease, outcome: Outcome) -> None:
        """Record the outcome of a queued run; retry while the store fails.

        No sender repeats a queued event, so its outcome stays in memory until the store has it.
        After the loss of a store, no later start would find the event: its outcome is dropped.
        """
        held.is_ending = True
        is_repeated = False
        at = None
        offset = 0.0
        # The types are compared because this path counts its calls.
        if type(outcome) is Retry or type(outcome) is Postponed:
            at = outcome.at
            offset = self._clock() - trio.current_time()
        while True:
            try:
                is_recorded = await self.record(held.lease, outcome)
            except StoreLostError as error:
                _log.store_unavailable(error)
                await trio.lowlevel.checkpoint()
                return
            except StoreUnavailableError as error:
                _log.store_unavailable(error, retry_in=STORE_RETRY_SECONDS)
                await trio.sleep(STORE_RETRY_SECONDS)
            else:
                # A repeated outcome may have been recorded before.
                if not (is_recorded or is_repeated or held.lost):
                    held.lost = True
                    self.report_lost([held.key])
                return
            is_repeated = True
            if at is not None:
                # The clock may have been set since the first try. The store corrects due times
                # then, but does not have this one.
                moved = self._clock() - trio.current_time() - offset
                outcome = msgspec.structs.replace(outcome, at=at + moved)

    async def release(self, lease: Lease) -> None:
        """Release an event, so that this attempt does not count."""
        try:
            await self._inbox.finish(lease, Released(), now=self._clock())
        except StoreUnavailableError as error:
            # Its lease stays with this process, until a renewal gives it up.
            _log.store_unavailable(error, key=lease.key)
            await trio.lowlevel.checkpoint()

    # -- in the log and the counters ---------------------------------------------------------

    def report_received(self, delivery: NewDelivery) -> None:
        """Count and log an event that was stored, and runs later."""
        self._counters.count("accepted", signer=delivery.signer)
        fields = names_of(delivery)
        fields["type"] = delivery.type
        fields["address"] = delivery.address
        _log.info("webhook.received", **fields)

    def answer_known(self, delivery: NewDelivery, admitted: Admitted) -> Answer:
        """Answer a delivery whose key the inbox has: 200, or 503 while the first one runs."""
        if admitted.same_body:
            self.report_duplicate(delivery)
        else:
            self.report_different_body(delivery)
        self._counters.count("duplicate", signer=delivery.signer)
        return BUSY if admitted.admission is Admission.RUNNING else answers.OK

    def report_duplicate(self, delivery: NewDelivery) -> None:
        """Log a delivery of a known key with the same body."""
        fields = names_of(delivery)
        _log.info("webhook.duplicate", **fields, type=delivery.type, address=delivery.address)

    def report_different_body(self, delivery: NewDelivery) -> None:
        """Count and log a known key that arrived with another body; the inbox has stored both."""
        self._counters.count("different_body", signer=delivery.signer)
        _log.warning(
            "webhook.duplicate",
            **names_of(delivery),
            type=delivery.type,
            address=delivery.address,
            different_body=True,
            hint=(
                "same signer and webhook-id, other bytes: the first body stays, and this one is "
                "stored beside it ('events show' has both)"
            ),
        )

    def report_lost(self, keys: Sequence[str]) -> None:
        """Count and log events that another process has claimed."""
        for key in keys:
            self._counters.count("lease_lost", signer=signer_of_key(key))
        _log.warning(
            "webhook.lease_lost",
            keys=keys[:_NAMED],
            events=len(keys),
            hint=(
                "another process has claimed these events, because this one did not respond for "
                "longer than a lease; outcomes of their runs in this process are not recorded"
            ),
        )

    def report_unrecorded(self, keys: Sequence[str]) -> None:
        """Log the events whose runs have ended, and whose outcomes will not be recorded."""
        for first in range(0, len(keys), _NAMED):
            _log.warning(
                "webhook.outcomes_unrecorded",
                keys=keys[first : first + _NAMED],
                events=len(keys),
                hint=(
                    "the store did not confirm these outcomes, and they cannot be recorded any "
                    "later; their senders were answered 503, and the handlers may run again"
                ),
            )

    def report_superseded(self, keys: Sequence[tuple[str, str]]) -> None:
        """Count and log events that were ended because a newer one of their subject waits."""
        for key, newer in keys:
            self._counters.count("superseded", signer=signer_of_key(key))
            _log.info("webhook.superseded", key=key, by=newer)

    def report(
        self,
        delivery: NewDelivery,
        attempt: int,
        outcome: Outcome,
        handler: BoundHandler | None = None,
        seconds: float = 0.0,
        address: str | None = None,
    ) -> None:
        """Count and log the outcome of run number ``attempt``, which took ``seconds``.

        ``address`` is that of the sender, for a run whose ``webhook.received`` was not logged.
        """
        fields = names_of(delivery)
        fields["type"] = delivery.type
        fields["attempt"] = attempt
        if handler is not None:
            fields["handler"] = handler.name
            fields["seconds"] = seconds
        if address is not None:
            fields["address"] = address
        match outcome:
            case Done(reason=None):
                self._counters.count("handled", signer=delivery.signer)
                _log.info("webhook.handled", **fields)
            case Done(reason=reason):
                self._counters.count("discarded", signer=delivery.signer)
                _log.info("webhook.discarded", **fields, reason=reason)
            case Retry(at):
                self._counters.count("failed", signer=delivery.signer)
                wait = "redelivery" if at is None else round(at - self._clock(), 3)
                fields |= self._failure_fields(delivery, outcome) | {"retry_in": wait}
                if outcome.asked:
                    _log.info("webhook.postponed", **fields)
                else:
                    _log.warning("webhook.failed", **fields)
            case Dead():
                self._counters.count("dead", signer=delivery.signer)
                _log.error("webhook.dead", **(fields | self._failure_fields(delivery, outcome)))
            case Parked(reason):
                self._counters.count("parked", signer=delivery.signer)
                _log.warning("webhook.parked", **fields, hint=reason)
            case Postponed(at, reason):
                wait = round(at - self._clock(), 3)
                _log.debug("webhook.postponed", **fields, reason=reason, retry_in=wait)
            case Released():
                _log.info("webhook.released", **fields)

    def _failure_fields(self, delivery: NewDelivery, outcome: Retry | Dead) -> dict[str, str]:
        handler = self._handlers.find(delivery.type, delivery.raw, delivery.signer)
        fields = {
            "handler": None if handler is None else handler.name,
            "error": outcome.error,
            "place": outcome.place,
            "traceback": outcome.traceback,
        }
        return {name: value for name, value in fields.items() if value is not None}


def names_of(delivery: NewDelivery) -> dict[str, Any]:
    """Return the log fields that name a delivery: its id, and its tenant or source if any."""
    fields = {"webhook_id": delivery.webhook_id}
    if delivery.tenant_id is not None:
        fields["tenant_id"] = delivery.tenant_id
    # Most signers are the host's, and have an empty name.
    elif delivery.signer and delivery.source is not None:
        fields["source"] = delivery.source
    return fields
