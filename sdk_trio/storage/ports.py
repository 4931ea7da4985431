"""What the rest of the program asks of a store; every store passes the same contract suite.

Every method is a checkpoint. A method that writes returns after the change is durable to the
degree of the store (SQLite: synced to disk; memory: kept by this process), and is *not* undone by
cancellation: the write is finished, then ``Cancelled`` is raised. Every method raises
:class:`~sdk_trio.errors.StoreUnavailableError` when the store cannot do it at present.
"""

from collections.abc import Sequence
from typing import Protocol

from .records import (
    Admitted,
    AttemptRecord,
    DeliveryRecord,
    DeliveryState,
    Due,
    NewDelivery,
    Outcome,
    Purged,
)


class Inbox(Protocol):
    """The durable inbox: one record for each webhook id, from arrival to its end (contracts 5).

    An inbox acts for one *owner*, named when it is opened. A lease is held by an owner up to a
    deadline; owners never take over a lease of their own, only those of others that have expired
    (``take_due``) or that are known to be dead (``recover``).
    """

    async def accept(self, delivery: NewDelivery, *, leased: bool) -> Admitted:
        """Keep ``delivery`` for our own workers, before the sender is answered 200.

        ``NEW`` when it was unknown, dead, parked, done longer ago than the dedup retention, or
        had failed inline and waited for a redelivery: then it is ``received``, queued, its
        attempts back at 0 if it had been done, dead or parked. With ``leased`` the caller runs it
        itself; otherwise the next ``take_due`` hands it out. Everything else changes nothing:
        ``DONE``, or ``QUEUED``, or ``RUNNING`` (inline, under the live lease of another owner).
        """
        ...

    async def claim(self, delivery: NewDelivery) -> Admitted:
        """Claim ``delivery`` for an inline run: ``NEW`` means that it is ``running`` and ours.

        The attempt counts as started. ``RUNNING`` when another owner's live lease runs it inline;
        one of our own (the caller knows that it does not run), or whose lease has expired, or that
        waits for a redelivery, or is dead or parked, is claimed (attempts continue after a failed
        or dead run, and start anew after parked).
        """
        ...

    async def park(self, delivery: NewDelivery) -> Admitted:
        """Keep ``delivery`` as ``parked``: nothing handles its type.

        ``NEW`` when it was unknown, done longer ago than the dedup retention, or had failed inline
        and waited for a redelivery, which it has got now. Everything else changes nothing:
        ``QUEUED``, ``RUNNING``, or ``DONE`` when it was done, dead or parked.
        """
        ...

    async def start(self, webhook_id: str, *, now: float) -> None:
        """A worker starts a run: ``running``, one more attempt, the lease is ours."""
        ...

    def begin(self, webhook_id: str, *, now: float) -> None:
        """As :meth:`start`, without waiting for it: what is asked for later is done later.

        For the first run of a delivery that this process has just accepted (ADR 6). Returns at
        once, raises nothing; a store that fails is logged, and the run is then not counted.
        """
        ...

    async def finish(self, webhook_id: str, outcome: Outcome, *, now: float) -> None:
        """Record how a run ended, and give up the lease. A failed one leaves an attempt record."""
        ...

    async def release(self, webhook_ids: Sequence[str]) -> None:
        """Give up the leases of deliveries whose run was never started."""
        ...

    async def take_due(self, *, limit: int, now: float) -> Due:
        """Lease up to ``limit`` queued deliveries that nobody holds, oldest arrival first.

        Due are: ``received`` ones, ``retrying`` ones whose time has come, and any unfinished
        queued one whose lease (of another owner) has expired. An *ordered* one only when no
        earlier unfinished ordered delivery has the same subject.
        """
        ...

    async def recover(self) -> int:
        """Take away the leases of all other owners, known to be dead; return how many.

        Runs that were cut short become ``received`` and queued, inline ones as well, so that our
        own workers finish them; their attempts stay counted.
        """
        ...

    async def renew(self, *, now: float) -> None:
        """Extend all of our leases."""
        ...

    async def replay(self, webhook_ids: Sequence[str]) -> Sequence[str]:
        """Put dead and parked deliveries back to ``received``, queued, with attempts at 0.

        Returns the ids that were put back; the others were in another state or have no body.
        """
        ...

    async def get(self, webhook_id: str) -> DeliveryRecord | None:
        """Return one delivery with its body, or None."""
        ...

    async def attempts(self, webhook_id: str) -> Sequence[AttemptRecord]:
        """Return the failed runs of one delivery, oldest first."""
        ...

    async def find(
        self,
        *,
        type: str | None = None,
        state: DeliveryState | None = None,
        since: float | None = None,
        after_sequence: int | None = None,
        subject: str | None = None,
        limit: int = 50,
    ) -> Sequence[DeliveryRecord]:
        """List deliveries without bodies, newest first (oldest first with ``after_sequence``)."""
        ...

    async def counts(self) -> dict[DeliveryState, int]:
        """Return how many deliveries are in each state; states without any are 0."""
        ...

    async def changed_elsewhere(self) -> bool:
        """Return whether somebody else has changed the store since the last call.

        Somebody else is another process, or another inbox in this one.
        """
        ...

    async def purge(self, *, now: float) -> Purged:
        """Apply the retention settings: see docs/reference/configuration.md.

        Bodies of done deliveries go after the payload retention; done deliveries go when both
        the payload and the dedup retention have passed; parked ones after the payload retention.
        Dead letters stay until they are replayed.
        """
        ...

    async def close(self) -> None:
        """Finish what was begun and close; a second call does nothing.

        Shielded from cancellation, but not for ever from a disk that hangs.
        """
        ...
