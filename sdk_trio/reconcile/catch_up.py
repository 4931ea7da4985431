"""Catch-up by state: adds events for changes whose deliveries the upstream skipped.

It lists the upstream's records, selects those that changed in a range of time, and adds synthetic
events to the inbox. ``events/lifecycle.py`` decides which types a state implies, and
``storage/subjects.py`` which the inbox holds already. Every step is idempotent. A run that was
interrupted repeats its last page, or the pages whose records have equal times.
"""

import fnmatch
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import attrs
import msgspec
import trio

from ..base.clock import wall
from ..base.logs import get_logger
from ..config import Settings
from ..errors import SdkError
from ..events import organization_of
from ..events.lifecycle import (
    CREATED,
    KINDS,
    Changed,
    Implied,
    RecordKind,
    event_body,
    find_change,
    kinds_of,
    stage_of,
)
from ..records.deliveries import DeliveryState, NewDelivery
from ..records.synthetic import synthetic_id
from ..records.tenants import Tenant
from ..storage.ports import Inbox
from ..storage.subjects import SubjectEvent, events_of_subject, has_state
from ..tenants.identity import is_organization_id
from ..tenants.service import TenantService
from .gap import MOST_RESTARTS, CatchUpRun, ListEnd, ListProgress
from .pages import (
    MOST_FRUITLESS,
    OTHER_SIZES,
    PAGE_RECORDS,
    EndlessListError,
    RepeatCheck,
    TieCheck,
    TiedRecords,
)

_log = get_logger("runtime")

#: Statuses with which the upstream refuses a list for good: no scope, or no such list.
REFUSALS = frozenset({403, 404})

#: Time between two pages, in seconds. One call a second is below the rate limit of every known
#: upstream, with a reserve for the application's own calls.
PAGE_SECONDS = 1.0

#: A change that is more recent than this waits, in seconds: its real event may be on its way.
SETTLE_SECONDS = 30.0

#: Accounts that catch up at a time. Each has its own token and rate limit.
ACCOUNTS_AT_ONCE = 4

#: Records of a page that are compared with the inbox at a time.
COMPARED_AT_ONCE = 16

#: Characters of the id of an unreadable record that are logged.
_SHOWN_CHARACTERS = 64

#: Time between two counts of the waiting events, in seconds.
BACKLOG_POLL_SECONDS = 0.1


class IncompleteCatchUpError(SdkError):
    """Lists could not be read to their end, each for its own reason."""

    def __init__(self, failed: Mapping[str, SdkError]) -> None:
        reasons = "; ".join(f"{name}: {error}" for name, error in failed.items())
        super().__init__(f"these lists could not be read to their end: {reasons}")


class UpstreamState(Protocol):
    """Reads the upstream's lists; implemented by ``client.client.UpstreamDeliveries``."""

    async def read_state(
        self, kind: str, sorting: str, page: int, limit: int
    ) -> tuple[Sequence[Any], int | None, bool]:
        """Return one page of a list, ``limit`` records, in rising order of ``sorting``.

        Returns:
            The records as JSON objects, the number of records in the list (None: not counted), and
            whether another page may follow.

        Raises:
            CallError: the call failed.
        """
        ...


@attrs.frozen
class SyntheticEvent:
    """An event that a catch-up adds, or would add, to the inbox.

    ``changed_at`` is the last change of its subject in Unix seconds.
    """

    delivery: NewDelivery
    changed_at: float


class CatchUp:
    """Adds the events of one account.

    Args:
        inbox: the open store.
        settings: validated settings.
        tenant: the account; None: the host.
        tenants: finds the tenants of the host's records; None: there are none.
        clock: returns Unix seconds.
        types: those that the endpoint subscribes to; None: all.
        page_seconds: the time between two pages.
        settle_seconds: how old a change must be before its event is added.
        wake: is called when events were added.
        note: is called with each event; with ``dry_run``, nothing else is done with it.
        dry_run: add nothing.
        patience: how long to wait for a backlog that does not shrink, in seconds; None: always.
    """

    def __init__(
        self,
        inbox: Inbox,
        settings: Settings,
        *,
        tenant: Tenant | None = None,
        tenants: TenantService | None = None,
        types: Collection[str] | None = None,
        clock: Callable[[], float] = wall,
        page_seconds: float = PAGE_SECONDS,
        settle_seconds: float = SETTLE_SECONDS,
        wake: Callable[[], None] = lambda: None,
        note: Callable[[SyntheticEvent], None] = lambda event: None,
        dry_run: bool = False,
        patience: float | None = None,
    ) -> None:
        self._inbox = inbox
        self._tenant = tenant
        self._fields = {} if tenant is None else {"tenant": tenant.identifier}
        self._tenants = tenants
        self._clock = clock
        self._types = types
        self._page_seconds = page_seconds
        self._settle_seconds = settle_seconds
        self._wake = wake
        self._note = note
        self._dry_run = dry_run
        self._patience = patience
        self._memory_seconds = settings.webhooks.payload_retention_days * 86_400.0
        # Accounts count the waiting events independently, and together may use half of the queue.
        # With a full queue, new deliveries would be refused because of old state.
        share = settings.webhooks.queue.capacity // (2 * ACCOUNTS_AT_ONCE)
        self._most_waiting = max(1, share)
        self._comparing = trio.CapacityLimiter(COMPARED_AT_ONCE)
        # Events that may be added before the waiting ones are counted again.
        self._reservable = 0
        # Events that are being added: a count of the waiting ones may not include them yet.
        self._being_added = 0
        self._counting = trio.Lock()

    async def run(
        self,
        upstream: UpstreamState,
        run: CatchUpRun,
        save: Callable[[CatchUpRun], Awaitable[None]],
    ) -> CatchUpRun:
        """Continue a run to its end; return it with its final counts.

        Args:
            upstream: of this account.
            run: where to continue.
            save: stores the progress after each page.

        Raises:
            IncompleteCatchUpError: lists could not be read; all others were read to their end. The
                next call continues with these. A list that the upstream refuses (403, 404) is
                logged and left out instead.
            CallError: the circuit breaker refuses calls; the progress is saved.
            StoreUnavailableError: from the inbox.

        Cancellation loses at most the progress of one page, which is then repeated.
        """
        wanted = types_of(run.types)
        if self._types is not None:
            # A type that the endpoint does not subscribe to was never delivered to this inbox.
            wanted &= frozenset(self._types)
        memory = await self._memory(run)
        kinds = {kind.name: kind for kind in kinds_of(wanted)}
        run = run.begin(kinds)
        failed: dict[str, SdkError] = {}
        repeats, ties = RepeatCheck(), TieCheck()
        # A list that failed waits behind the others, so the run ends when it is the next one again.
        while (current := run.current) is not None and current.name not in failed:
            kind = kinds[current.name]
            try:
                records, total, has_next = await upstream.read_state(
                    kind.name, kind.sorting, current.page, PAGE_RECORDS
                )
                repeats.check(current, records)
                is_begun = current.page > 1 or current.end is not None
                # With an order by another field, a record moves when it gets a value.
                if is_begun or not has_next or not total or kind.sorting != CREATED:
                    end = None
                else:
                    end = await self._read_end(upstream, kind, -(-total // len(records)))
                hidden: list[Any] = []
                if end is None:
                    tied = ties.check(
                        current, records, kind.sorting, total=total, has_next=has_next
                    )
                    if tied is not None:
                        hidden = await self._read_tied(upstream, kind, tied)
            except SdkError as error:
                run = self._note_failure(run, current, error, failed)
            else:
                if end is not None:
                    # The page is read again: a record may have disappeared before the end was read.
                    run = run.with_end(end)
                else:
                    run = await self._add_page(kind, [*records, *hidden], run, wanted, memory)
                    run = self._advance(
                        run, current, records, total, has_next=has_next, tied_since=ties.since
                    )
            await save(run)
            self._wake()
            await trio.sleep(self._page_seconds)
        if failed:
            raise IncompleteCatchUpError(failed)
        return run

    async def _read_end(
        self, upstream: UpstreamState, kind: RecordKind, page: int
    ) -> ListEnd | None:
        """Read the last page of a list; return where its last record is, or None if unknown."""
        await trio.sleep(self._page_seconds)
        try:
            records, *_ = await upstream.read_state(kind.name, kind.sorting, page, PAGE_RECORDS)
        except SdkError:
            return None  # the pages before it must not wait for it
        times = [record.get(kind.sorting) for record in records[-2:]]
        if len(times) == 2 and times[0] == times[1]:
            return None  # records with equal times may change places
        id = records[-1].get("id") if records else None
        return ListEnd(page, len(records) - 1, id) if isinstance(id, str) else None

    async def _read_tied(
        self, upstream: UpstreamState, kind: RecordKind, tied: TiedRecords
    ) -> list[Any]:
        """Return the records that were hidden by others with equal times, from other pages."""
        found: list[Any] = []
        fruitless = 0
        for size in OTHER_SIZES:
            before = len(found)
            for page in tied.pages(size):
                await trio.sleep(self._page_seconds)
                records, *_ = await upstream.read_state(kind.name, kind.sorting, page, size)
                found += tied.take_unseen(records, kind.sorting)
                if not tied.hides_some:
                    return found
            fruitless = 0 if len(found) > before else fruitless + 1
            if fruitless == MOST_FRUITLESS:
                break
        _log.warning(
            "reconciliation.list_unordered",
            **self._fields,
            list=kind.name,
            missing=tied.size - len(tied.ids),
            hint="records with equal times changed places each time they were read, so some may be "
            "missing: run 'sdk-trio events catch-up' for this time again",
        )
        await trio.lowlevel.checkpoint()
        return found

    def _note_failure(
        self,
        run: CatchUpRun,
        current: ListProgress,
        error: SdkError,
        failed: dict[str, SdkError],
    ) -> CatchUpRun:
        """Return the run without the failed list, or with it after the others."""
        if getattr(error, "status", None) in REFUSALS:
            # The other lists must not wait for a permission that this token may never get.
            _log.error(
                "reconciliation.list_refused",
                **self._fields,
                list=current.name,
                error=str(error),
                hint="its changes are not caught up: give the access token the scope to read "
                "it, and run 'sdk-trio events catch-up' for this time",
            )
            return run.without_current()
        if getattr(error, "attempts", 1) == 0:
            raise error  # the open circuit breaker did not let it out: the list has not failed
        _log.warning(
            "reconciliation.list_failed",
            **self._fields,
            list=current.name,
            page=current.page,
            error=str(error),
            hint="the other lists are read meanwhile; this one is read again later",
        )
        failed[current.name] = error
        return run.postpone_current(from_start=isinstance(error, EndlessListError))

    def _advance(
        self,
        run: CatchUpRun,
        current: ListProgress,
        records: Sequence[Any],
        total: int | None,
        *,
        has_next: bool,
        tied_since: int,
    ) -> CatchUpRun:
        """Return the run after a page; it begins the list again if another record may be hidden."""
        if current.is_shifted([record.get("id") for record in records], total):
            if current.restarts < MOST_RESTARTS:
                return run.restart_current()
            _log.warning(
                "reconciliation.list_shrinks",
                **self._fields,
                list=current.name,
                page=current.page,
                hint="records were deleted each time it was read, so others may be missing: run "
                "'sdk-trio events catch-up' for this time again",
            )
        return run.after_page(total, has_next=has_next, tied_since=tied_since)

    async def _add_page(
        self,
        kind: RecordKind,
        records: Sequence[Any],
        run: CatchUpRun,
        wanted: frozenset[str],
        memory: float,
    ) -> CatchUpRun:
        """Add the events of one page; return the run with its counts."""
        changes = [
            change for record in records if (change := self._read_change(kind, record, run, memory))
        ]
        counts: list[tuple[int, int]] = []
        failures: list[SdkError] = []

        async def work(change: Changed) -> None:
            try:
                counts.append(await self._add_change(change, run, wanted))
            except SdkError as error:
                # A group of the nursery would end the watch of all accounts.
                failures.append(error)
                nursery.cancel_scope.cancel()
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            for change in changes:
                nursery.start_soon(work, change)
        if failures:
            raise failures[0]
        return attrs.evolve(
            run,
            listed=run.listed + len(records),
            changed=run.changed + len(changes),
            added=run.added + sum(added for added, _ in counts),
            uncertain=run.uncertain + sum(uncertain for _, uncertain in counts),
        )

    def _read_change(
        self, kind: RecordKind, record: Mapping[str, Any], run: CatchUpRun, memory: float
    ) -> Changed | None:
        """Return what changed in a record; None also for one that no event can be made of.

        The upstream may send text, numbers and times that cannot be written again. Such a record is
        logged and left out, so that the others are added.
        """
        try:
            change = find_change(kind, record, since=run.since, until=run.until, memory=memory)
            if change is not None:
                for at in (change.changed_at, *(implied.at for implied in change.implied)):
                    event_body(kind.updated, at, change.record)
        except (
            ValueError,
            OverflowError,
            RecursionError,
            TypeError,
            msgspec.MsgspecError,
        ) as error:
            _log.error(
                "reconciliation.record_unreadable",
                **self._fields,
                list=kind.name,
                id=ascii(record.get("id"))[:_SHOWN_CHARACTERS],
                error=type(error).__name__,
            )
            return None
        return change

    async def _add_change(
        self, change: Changed, run: CatchUpRun, wanted: frozenset[str]
    ) -> tuple[int, int]:
        """Add the events of one record; return how many, and how many are uncertain."""
        tenant_id = None if self._tenant is None else self._tenant.id
        if self._tenant is None and self._tenants is not None:
            owner = await self._owner_of(change)
            # A tenant with its own token is an account of its own.
            if isinstance(owner, Tenant) and owner.credentials.access_token is not None:
                return 0, 0
            tenant_id = owner.id if isinstance(owner, Tenant) else owner
        events = await self._events_of(change, tenant_id)
        missing = missing_events(change, events, until=run.until, wanted=wanted)
        age = self._clock() - change.changed_at
        if missing and age < self._settle_seconds:
            await trio.sleep(min(self._settle_seconds, self._settle_seconds - age))
            events = await self._events_of(change, tenant_id)
            missing = missing_events(change, events, until=run.until, wanted=wanted)
        for implied in missing:
            event = self._event(change, implied, tenant_id)
            self._note(event)
            if not self._dry_run:
                await self._reserve()
                try:
                    await self._inbox.accept(event.delivery, leased=False)
                finally:
                    self._being_added -= 1
        known = {each.record.type for each in events}
        return len(missing), len(wanted.intersection(change.uncertain) - known)

    async def _owner_of(self, change: Changed) -> Tenant | str | None:
        """Return the tenant of a record, or the id of a purged one, or None."""
        assert self._tenants is not None
        await trio.lowlevel.checkpoint()
        data = msgspec.json.encode(change.record)
        organization = organization_of(change.kind.updated, data)
        if organization is None or not is_organization_id(organization):
            return None
        found = await self._tenants.find_by_organization(organization)
        return found or await self._tenants.find_erased(organization)

    async def _events_of(self, change: Changed, tenant_id: str | None) -> list[SubjectEvent]:
        async with self._comparing:
            return await events_of_subject(
                self._inbox, change.subject, tenant_id, changed_since=change.changed_at
            )

    def _event(self, change: Changed, implied: Implied, tenant_id: str | None) -> SyntheticEvent:
        return SyntheticEvent(
            NewDelivery(
                webhook_id=synthetic_id(implied.type, change.subject, change.changed_text),
                type=implied.type,
                raw=event_body(implied.type, implied.at, change.record),
                timestamp=int(implied.at),
                received_at=self._clock(),
                subject=change.subject,
                # Also for handlers without order: a state must not overtake an earlier one.
                ordered=True,
                tenant_id=tenant_id,
                signer="" if self._tenant is None else self._tenant.id,
            ),
            change.changed_at,
        )

    async def _memory(self, run: CatchUpRun) -> float:
        """Return since when the inbox knows which events it got for a run (Unix seconds).

        It got none before its first event. Events that retention has removed are unknown.
        """
        oldest = await self._inbox.find(oldest_first=True, limit=1)
        first = min(run.since, oldest[0].received_at) if oldest else run.since
        return max(first, self._clock() - self._memory_seconds)

    async def _reserve(self) -> None:
        """Wait while so many events wait that ordinary deliveries would be refused."""
        async with self._counting:
            least, since = float("inf"), trio.current_time()
            while self._reservable <= 0:
                waiting = (await self._inbox.counts())[DeliveryState.RECEIVED]
                self._reservable = self._most_waiting - waiting - self._being_added
                if self._reservable > 0:
                    break
                if waiting < least:
                    least, since = waiting, trio.current_time()
                # Without a receiver nothing shrinks it; the next start runs the events.
                if self._patience is not None and trio.current_time() - since > self._patience:
                    self._reservable = self._most_waiting
                    break
                self._wake()
                await trio.sleep(BACKLOG_POLL_SECONDS)
            self._reservable -= 1
            self._being_added += 1


def types_of(glob: str | None) -> frozenset[str]:
    """Return the types that can be added and match ``glob``; None: all."""
    types = [name for kind in KINDS for name in kind.types]
    return frozenset(types if glob is None else fnmatch.filter(types, glob))


def missing_events(
    change: Changed, events: Sequence[SubjectEvent], *, until: float, wanted: frozenset[str]
) -> list[Implied]:
    """Return the events that a record's state implies and the inbox lacks; pure.

    Args:
        change: the record.
        events: the events of its subject in the inbox.
        until: the end of the range (Unix seconds). A later state arrives as a delivery.
        wanted: the types to add.
    """
    types = {each.record.type for each in events}
    # Known by their ids also after their bodies have been removed.
    ids = {each.record.webhook_id for each in events}
    status = change.record.get("status")
    missing = []
    for implied in change.implied:
        stage = stage_of(implied.type)
        # A stage that a delivered refund or revocation took back is not given again.
        is_undone = stage is not None and any(stage.is_undone(name, status) for name in types)
        if implied.type not in types and not is_undone:
            missing.append(implied)
    is_unmodified = change.record.get("modified_at") is None
    updated = change.kind.updated
    if change.changed_at <= until and not (
        (is_unmodified and bool(events)) or has_state(events, updated, change.changed_at)
    ):
        missing.append(Implied(updated, change.changed_at))
    return [
        implied
        for implied in missing
        if implied.type in wanted
        and synthetic_id(implied.type, change.subject, change.changed_text) not in ids
    ]
