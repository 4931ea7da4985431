"""The state of the running program, as probes and metrics show it.

If each probe queried the store, any client could load it. So :class:`StoreObserver` polls it, and
all requests within a few seconds share one poll. Slow polls are repeated less often, so that
counting the rows of a large store uses a few per cent of one reader thread at most.
"""

import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import trio

from ..base.bell import Bell, Flag
from ..base.clock import wall
from ..base.executor import run_in_thread
from ..base.logs import get_logger
from ..base.telemetry import Check, CheckSource, Sample, SampleSource
from ..errors import NotRunningError, StoreUnavailableError
from ..records.deliveries import DeliveryState
from ..storage.admission import TAKEN_OVER_SECONDS
from ..storage.ports import Inbox

if TYPE_CHECKING:
    from ..records.tenants import TenantStatus


TenantCounts = Callable[[], Awaitable[Mapping["TenantStatus", int]]]

_log = get_logger("admin")

#: Seconds for which one poll serves all requests.
FRESH_SECONDS = 5.0

#: The largest share of the time that counting may take: a store of many million rows is counted
#: less often.
COUNTING_SHARE = 0.05

#: Seconds that a request waits for a poll: below the second that orchestrators commonly allow a
#: probe.
PATIENCE_SECONDS = 0.8

#: A write that takes longer than this fails the check, in seconds.
STALLED_SECONDS = 2.0

#: The offset of the host's clock from which it is reported, in seconds.
DIFFERING_SECONDS = 2.0

#: Pause after an error of the store, in seconds.
PAUSE_SECONDS = 0.2

#: Bytes of the probing write, as in a usual delivery: a smaller one would fit on a disk that is too
#: full for a delivery.
PROBE_BYTES = 8192

#: Name of the checkpoint of the probing write. Only a write proves that the store can write: a full
#: disk still reads.
CHECKPOINT = "admin.probe"

Stores = Callable[[], tuple[Inbox, TenantCounts | None]]


class RunningProgram(Protocol):
    """The running program, as far as its admin address uses it."""

    @property
    def state(self) -> str:
        """``starting``, ``running`` or ``draining``."""
        ...

    def stores(self) -> tuple[Inbox, TenantCounts | None]:
        """Return the open inbox, and the counter of tenants, if any.

        Raises:
            NotRunningError: it is not open.
        """
        ...

    async def tenant_id(self, name: str) -> str:
        """Return the id of the tenant with this identifier or id.

        Raises:
            UnknownTenantError: there is none.
            NotRunningError: the store is not open.
        """
        ...

    def status(self) -> Mapping[str, Any]:
        """Return the current addresses and figures for ``GET /api/status``."""
        ...

    def source_names(self) -> Sequence[str]:
        """Return the names of the configured sources, without the upstream."""
        ...

    def wake(self) -> None:
        """Make the workers poll the store: due events were added."""
        ...

    async def refresh(self) -> None:
        """Get the figures of the program's other processes; wait a moment at most."""
        ...


class StatusProviders(msgspec.Struct, frozen=True):
    """The functions that report on the parts; each part adds its own to the lists."""

    checks: list[CheckSource] = msgspec.field(default_factory=list)
    samples: list[SampleSource] = msgspec.field(default_factory=list)


class Figures(msgspec.Struct, frozen=True):
    """Counts: events by state, arrival of the oldest waiting event, tenants by status.

    ``expired_leases`` are events whose process hangs or has ended, and that no other process has
    claimed.

    ``disk`` has the free bytes of the store's file system and all of them, None without a disk.
    """

    events: Mapping[DeliveryState, int]
    oldest_at: float | None
    expired_leases: int
    tenants: "Mapping[TenantStatus, int] | None"
    disk: tuple[int, int] | None = None


class StoreObserver:
    """The last observations of the store; :meth:`run` polls, everything else only waits.

    Args:
        stores: returns the open stores, or raises :class:`~sdk_trio.errors.NotRunningError`.
        directory: the data directory, whose file system is measured at each poll; None: the store
            has no files.
        clock: returns Unix seconds.
    """

    def __init__(
        self,
        stores: Stores,
        *,
        directory: Path | None = None,
        clock: Callable[[], float] = wall,
    ) -> None:
        self._stores = stores
        self._directory = directory
        self._clock = clock
        self._wanted = Flag()
        self._moved = Bell()
        self._written_at = -inf
        self._writing_since = inf
        self._fault: str | None = "the store has not been checked yet"
        self._clock_offset: float | None = None
        self._failed_looks = 0
        self._counted_at = -inf
        self._next_count_at = -inf
        self.figures: Figures | None = None

    # -- for requests ------------------------------------------------------------------------

    async def wait_for_check(self) -> None:
        """Wait until there is a recent write check of the store, or until that takes too long."""
        await self._wait(lambda: trio.current_time() < self._written_at + FRESH_SECONDS)

    async def wait_for_figures(self) -> None:
        """Wait until there are recent figures, or until that takes too long."""
        await self._wait(
            lambda: trio.current_time() < max(self._counted_at + FRESH_SECONDS, self._next_count_at)
        )

    def check(self) -> Check:
        """Return whether the store can write, by the last poll."""
        with suppress(NotRunningError):
            if (lost := self._stores()[0].lost) is not None:
                return Check("store", False, lost)
        taken = trio.current_time() - self._writing_since
        if taken > STALLED_SECONDS:
            return Check("store", False, f"the store has not answered for {taken:.0f} s")
        return Check("store", self._fault is None, self._fault or "writes")

    def clock_check(self, tolerance: float) -> Check | None:
        """Compare this host's clock with the store's, by the last poll; None: the store has no
        clock.

        Signatures are checked by this host's clock, and ``tolerance`` is the maximum difference, in
        seconds.
        """
        offset = self._clock_offset
        if offset is None:
            return None
        if abs(offset) < DIFFERING_SECONDS:
            return Check("clock", True, f"within {DIFFERING_SECONDS:g} s of the database's")
        side = "ahead of" if offset > 0 else "behind"
        detail = f"this host's clock is {abs(offset):.0f} s {side} the database's"
        remedy = "synchronize both (chrony, systemd-timesyncd)"
        if abs(offset) > tolerance:
            return Check("clock", False, f"{detail}, so every delivery is refused; {remedy}")
        return Check("clock", True, f"{detail}; {remedy}", degraded=True)

    def check_leases(self) -> Check:
        """Report events that no process runs, by the last count; this check never makes us unready.

        Other processes still accept deliveries, and one that is removed from a load balancer would
        not run these events either.
        """
        if self.figures is None:
            return Check("leases", True, "not counted yet")
        expired = self.figures.expired_leases
        if not expired:
            oldest = self.oldest_seconds()
            return Check(
                "leases", True, f"none is overdue; the oldest event arrived {oldest:.0f} s ago"
            )
        return Check(
            "leases",
            True,
            f"{expired} events belong to processes that hang or have ended, and no other one "
            "has claimed them: the workers are busy, or cannot reach the store",
            degraded=True,
        )

    def samples(self) -> Iterator[Sample]:
        """Return the metrics of the store: its events, its oldest event, its tenants, its disk."""
        if self._clock_offset is not None:
            yield Sample("sdk_clock_offset_seconds", (), round(self._clock_offset, 3))
        figures = self.figures
        if figures is None:
            return
        for state, count in figures.events.items():
            yield Sample("sdk_inbox_events", (("state", str(state)),), count)
        yield Sample("sdk_queue_oldest_seconds", (), self.oldest_seconds())
        yield Sample("sdk_leases_expired", (), figures.expired_leases)
        for status, count in (figures.tenants or {}).items():
            yield Sample("sdk_tenants", (("status", str(status)),), count)
        if figures.disk is not None:
            free, size = figures.disk
            yield Sample("sdk_disk_free_bytes", (), free)
            yield Sample("sdk_disk_size_bytes", (), size)

    def oldest_seconds(self) -> float:
        """Return the age of the oldest waiting event; 0 without one."""
        oldest = self.figures.oldest_at if self.figures else None
        return 0.0 if oldest is None else round(max(0.0, self._clock() - oldest), 3)

    async def _wait(self, is_fresh: Callable[[], bool]) -> None:
        looks = self._failed_looks
        with trio.move_on_after(PATIENCE_SECONDS):
            await trio.lowlevel.checkpoint()
            while not is_fresh() and looks == self._failed_looks:
                self._wanted.set()
                await self._moved.wait()

    # -- polling -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Poll whenever a request needs fresher observations, until cancelled."""
        while True:
            await self._wanted.wait()
            try:
                inbox, tenants = self._stores()
                await self._try_writing(inbox)
                await self._count(inbox, tenants)
            except (NotRunningError, StoreUnavailableError) as error:
                self._failed_looks += 1
                self._written_at = -inf
                self._set_fault(str(error))
                await trio.sleep(PAUSE_SECONDS)

    async def _try_writing(self, inbox: Inbox) -> None:
        if trio.current_time() < self._written_at + FRESH_SECONDS:
            return
        self._writing_since = trio.current_time()
        try:
            await inbox.write_checkpoint(CHECKPOINT, f"{int(self._clock()):<{PROBE_BYTES}}")
        finally:
            self._writing_since = inf
        self._written_at = trio.current_time()
        self._clock_offset = await inbox.clock_offset()
        self._set_fault(None)

    async def _count(self, inbox: Inbox, tenants: TenantCounts | None) -> None:
        begun = trio.current_time()
        if begun < max(self._counted_at + FRESH_SECONDS, self._next_count_at):
            return
        self.figures = Figures(
            await inbox.counts(),
            await inbox.oldest_waiting(),
            await inbox.expired_leases(before=self._clock() - TAKEN_OVER_SECONDS),
            None if tenants is None else await tenants(),
            await self._measure(),
        )
        self._counted_at = trio.current_time()
        self._next_count_at = self._counted_at + (self._counted_at - begun) / COUNTING_SHARE
        self._wake()

    async def _measure(self) -> tuple[int, int] | None:
        if self._directory is None:
            return None
        try:
            # A hanging network file system would block the event loop.
            usage = await run_in_thread(shutil.disk_usage, self._directory, abandon_on_cancel=True)
        except OSError:
            return None
        return usage.free, usage.total

    def _set_fault(self, fault: str | None) -> None:
        self._fault = fault
        self._wake()

    def _wake(self) -> None:
        self._moved.ring()
