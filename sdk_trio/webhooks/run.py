"""The parts that run verified deliveries: inline, queued, parked. They share one inbox."""

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import trio

from ..base.cells import Cells
from ..base.clock import wall
from ..base.logs import get_logger
from ..base.telemetry import Sample
from ..config import Settings
from ..records.deliveries import Renewed
from ..storage.ports import Inbox
from .bound import BoundHandlers
from .clock_watch import ClockWatch
from .counters import Counters
from .effects import Conclusions
from .inline import InlineRuns
from .invocation import Invocations
from .parking import Parking
from .pauses import Pauses
from .queued import QueuedRuns
from .recording import HeldLeases, OutcomeRecorder

if TYPE_CHECKING:
    from ..tenants.tenancy import TenantRuntime

_log = get_logger("webhooks")

#: The hint of ``runtime.left_behind``. A released inline event is delivered again by its sender, as
#: after any delivery without an answer.
LEFT_BEHIND = (
    "these handlers did not stop; queued events run again at the next start, inline events when "
    "the sender delivers them again"
)


class DeliveryRunner:
    """Runs the deliveries of one inbox; any number of tasks may use it.

    Args:
        settings: deadlines, attempts and retries.
        handlers: the handlers by type.
        inbox: the open store.
        counters: count outcomes.
        clock: returns Unix seconds.
        jitter: returns a random number in [0, 1) that spreads retries.
        tenancy: the tenants; None without tenants.
        conclusions: completes events on behalf of their handlers, and tracks which ones.
        make_recorder: creates the recorder; one that records spans if traces are configured.
        make_invocations: creates the invocations, likewise.
    """

    def __init__(
        self,
        settings: Settings,
        handlers: BoundHandlers,
        inbox: Inbox,
        counters: Counters,
        *,
        clock: Callable[[], float] = wall,
        jitter: Callable[[], float] = random.random,
        tenancy: "TenantRuntime | None" = None,
        conclusions: Conclusions | None = None,
        make_recorder: Callable[..., OutcomeRecorder] = OutcomeRecorder,
        make_invocations: Callable[..., Invocations] = Invocations,
    ) -> None:
        self.handlers = handlers
        self._inbox = inbox
        self._counters = counters
        self._clock = clock
        self._renewals = 0
        self._conclusions = conclusions or Conclusions(inbox)
        #: The leases of queued events.
        self.leases: HeldLeases = HeldLeases()
        self.recorder: OutcomeRecorder = make_recorder(inbox, handlers, counters, clock)
        self.invocations: Invocations = make_invocations(
            settings, handlers, counters, self.recorder, self._conclusions
        )
        self.parking: Parking = Parking(inbox, self.recorder, tenancy)
        self.pauses: Pauses = Pauses(inbox, handlers, clock=clock)
        self.clock_watch: ClockWatch = ClockWatch(inbox, clock=clock, renew=self.renew)
        self.inline: InlineRuns = InlineRuns(
            settings,
            inbox,
            self.invocations,
            self.recorder,
            counters,
            self.clock_watch,
            clock=clock,
        )
        self.queued: QueuedRuns = QueuedRuns(
            settings,
            handlers,
            inbox,
            self.invocations,
            self.recorder,
            self.parking,
            self.pauses,
            clock=clock,
            jitter=jitter,
        )

    def samples(self) -> Iterator[Sample]:
        """Return the metrics of leases and pauses."""
        yield from self.pauses.samples()
        yield Sample("sdk_leases_held", (), len([*self.inline.leases, *self.leases]))
        yield Sample("sdk_leases_renewed_total", (), self._renewals)

    def use_tasks(self, tasks: Cells | None) -> None:
        """Set where to start tasks that may outlast a request or a cancelled run; None: nowhere."""
        self.inline.tasks = self.queued.tasks = tasks

    async def renew(self) -> Renewed:
        """Renew the leases of events that run or wait in memory, and give up all other leases.

        Waits for claims in progress, because this process does not hold their leases yet.

        Raises:
            StoreUnavailableError: the store is unavailable.
        """
        async with self.leases.lock:
            leases = [*self.inline.leases, *self.leases]
            renewed = await self._inbox.renew(leases, now=self._clock())
        self._renewals += len(leases) - len(renewed.lost)
        lost = self.leases.lose(renewed.lost)
        if lost:
            self.recorder.report_lost(lost)
        if renewed.given_up:
            self._counters.count("lease_given_up", renewed.given_up)
            _log.warning(
                "webhook.lease_given_up",
                events=renewed.given_up,
                hint="the store did not answer in time when this process accepted or fetched these "
                "events; they are due again",
            )
        return renewed

    async def leave(self) -> None:
        """Release the events of all running handlers, because the process ends before they do.

        An event whose effects are being written is skipped: on PostgreSQL its row is locked until
        the end of the transaction, and a release that waits for it would delay all others.
        """
        for run in self.invocations.runs:
            if run.lease is not None and not self._conclusions.is_concluding(run.key):
                await self.recorder.release(run.lease)
        await trio.lowlevel.checkpoint()
