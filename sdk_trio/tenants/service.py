"""The service of tenants: adds, finds, changes them, and runs their transitions.

Every change writes the tenant's row, its audit row and, for a transition, its outbox row in one
transaction, and only if the tenant still has the version that was read. Of concurrent changes of
one tenant exactly one succeeds (docs/adr/0009-tenant-transitions.md). ``feed`` notifies
subscribers.

:class:`TenantCache` is a bounded cache of the tenants of recent deliveries, so that a delivery does
not query the store for its tenant each time.
"""

import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack

import attrs
import trio

from ..base.clock import monotonic, wall
from ..base.logs import Throttle, get_logger
from ..base.lru import Lru
from ..config import Settings
from ..errors import (
    IllegalTransitionError,
    StoreUnavailableError,
    SuspensionRefusedError,
    TenantConflictError,
    TenantNotActiveError,
    UnknownTenantError,
)
from ..records.tenants import (
    AuditAction,
    AuditRecord,
    CredentialSource,
    OutboxRecord,
    Tenant,
    TenantCredentials,
    TenantStatus,
    Transition,
)
from . import identity
from .feed import Subscribers, TransitionFeed
from .status import (
    ACTIONS,
    APPLICATION,
    Decision,
    StatusPolicy,
    TenantKey,
    TransitionResult,
    decide,
)

if TYPE_CHECKING:
    from ..storage.sql.tenants import TenantStore

#: Cached results of queries, including "there is none": two for each of 8000 tenants, about ten
#: megabytes.
CAPACITY: Final = 16_384

#: The result of a query: a tenant, the id of a purged tenant, or None.
Answer = Tenant | str | None

_log = get_logger("tenants")

#: Polling interval for changes by other processes (``tenant suspend`` in a shell), in seconds.
POLL_SECONDS = 0.5

#: Seconds for which repeated refusals are one row of the audit trail.
REFUSAL_SECONDS = 60.0

#: Tenants read per query when all of them are read.
PAGE = 500


class TenantChanges(TypedDict, total=False):
    """New values of a tenant's fields; a field that is not given is unchanged."""

    name: str
    organization_id: str | None
    site_manager_email: str | None
    site_manager_email_verified: bool
    site_manager_phone: str | None
    credentials: TenantCredentials


_CHECKS: Mapping[str, Callable[[Any], object]] = {
    "name": identity.check_name,
    "organization_id": identity.check_organization_id,
    "site_manager_email": identity.check_email,
    "site_manager_email_verified": bool,
    "site_manager_phone": identity.check_phone,
    "credentials": identity.check_credentials,
}


def with_changes(tenant: Tenant, changes: TenantChanges) -> Tenant:
    """Return a tenant with new values, of the same version.

    A new address is unverified unless the changes set it so: a stranger could own it and get the
    tenant's messages. Without an address nothing is verified.

    Raises:
        InvalidTenantError: a value cannot be accepted.
    """
    values: dict[str, Any] = {name: _CHECKS[name](value) for name, value in changes.items()}
    changed = attrs.evolve(tenant, **values)
    email = changed.site_manager_email
    same = "site_manager_email_verified" in changes or email == tenant.site_manager_email
    verified = changed.site_manager_email_verified and same and email is not None
    return attrs.evolve(changed, site_manager_email_verified=verified)


def differing_fields(before: Tenant, after: Tenant) -> tuple[str, ...]:
    """Return the names of the fields that :class:`TenantChanges` has and that differ."""
    return tuple(name for name in _CHECKS if getattr(before, name) != getattr(after, name))


def in_status(tenant: Tenant, status: TenantStatus, now: float) -> Tenant:
    """Return the tenant's next version, whose status changed at ``now``."""
    return attrs.evolve(
        tenant,
        status=status,
        deleted_at=now if status is TenantStatus.DELETED else None,
        version=tenant.version + 1,
    )


def audit_of(
    tenant: Tenant, action: AuditAction, reason: str | None, actor: str, now: float
) -> AuditRecord:
    """Return the audit row of a change; raise InvalidTenantError for a bad reason or actor."""
    return AuditRecord(
        tenant_id=tenant.id,
        tenant_identifier=tenant.identifier,
        action=action,
        actor=identity.check_actor(actor),
        reason=identity.check_reason(reason),
        occurred_at=now,
    )


def refused(audit: AuditRecord, transition: Transition, tenant: Tenant, why: str) -> AuditRecord:
    """Return the audit row of a transition that was requested and refused.

    Refused requests matter when looking for an intruder or a broken script.
    """
    return attrs.evolve(
        audit,
        action=AuditAction.REFUSED,
        previous_status=tenant.status,
        new_status=tenant.status,
        details=f"{transition}: {why}",
    )


def outbox_of(
    tenant: Tenant, transition: Transition, audit: AuditRecord, delivery_id: str
) -> OutboxRecord:
    """Return the outbox row that announces a transition to the tenant's current status."""
    if audit.previous_status is None:
        raise AssertionError("a transition has a previous status")
    return OutboxRecord(
        delivery_id=delivery_id,
        tenant_id=tenant.id,
        tenant_identifier=tenant.identifier,
        tenant_name=tenant.name,
        transition=transition,
        previous_status=audit.previous_status,
        new_status=tenant.status,
        reason=audit.reason,
        actor=audit.actor,
        occurred_at=audit.occurred_at,
        site_manager_email=tenant.site_manager_email,
        site_manager_email_verified=tenant.site_manager_email_verified,
        site_manager_phone=tenant.site_manager_phone,
    )


class TenantCache:
    """The store's last answers, such as the tenant of an organization.

    They are valid until :meth:`forget_all`, which must follow every change. An answer read before a
    change but arriving after it is not cached: :meth:`remember` takes the :attr:`generation` at the
    time of the query.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._known: Lru[str, Answer] = Lru(capacity)
        self.generation: int = 0

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def recall(self, key: str) -> Answer:
        """Return the cached answer to a query."""
        return self._known[key]

    def remember(self, key: str, answer: Answer, *, generation: int) -> None:
        """Cache an answer of the store, and drop the least recently used one.

        A tenant is also cached by its id: a delivery needs both lookups, first by organization,
        then by id for the current state. All lookups share one record.
        """
        # The query started before a change, so its result may be stale.
        if generation != self.generation:
            return
        if isinstance(answer, Tenant):
            known = self._known.get(own := f"id {answer.id}")
            # One record serves both keys, so two results per tenant do not need twice the memory.
            answer = known if known == answer else answer
            self._known[own] = answer
        self._known[key] = answer

    def forget_all(self) -> None:
        """Forget every answer, because a tenant has changed."""
        self._known.clear()
        self.generation += 1


class TenantService:
    """The operations on tenants; it is a :class:`TenantStatusService`.

    Args:
        settings: validated settings; ``multi_tenant.tenant_status`` is used.
        store: the tenants' side of an open store.
        clock: returns Unix seconds.
        new_id: returns a new UUID.
        stopwatch: returns seconds that never go back.

    Transitions of this process reach its subscribers at once; those of other processes while
    :meth:`run` runs.
    """

    def __init__(
        self,
        settings: Settings,
        store: "TenantStore",
        *,
        clock: Callable[[], float] = wall,
        new_id: Callable[[], uuid.UUID] = uuid.uuid4,
        stopwatch: Callable[[], float] = monotonic,
    ) -> None:
        self._policy = StatusPolicy.of(settings)
        multi_tenant = settings.multi_tenant
        # Written with each transition: the first daemon with notifications starts there (ADR 13).
        self._announced = multi_tenant.enabled and multi_tenant.notifications.enabled
        self._store = store
        self._clock = clock
        self._new_id = new_id
        self._directory = TenantCache()
        self._subscribers = Subscribers()
        self._attempts: list[_Attempt] = []
        self._refusals = Throttle(lines=1, seconds=REFUSAL_SECONDS, clock=stopwatch)

    # -- changes -----------------------------------------------------------------------------

    async def add(
        self,
        identifier: str,
        *,
        name: str,
        site_manager_email: str | None = None,
        site_manager_email_verified: bool = False,
        site_manager_phone: str | None = None,
        organization_id: str | None = None,
        credentials: TenantCredentials | None = None,
        reason: str | None = None,
        actor: str = APPLICATION,
    ) -> Tenant:
        """Add an active tenant and return it.

        Args:
            identifier: a slug: 1 to 64 lowercase letters, digits and hyphens, no hyphen at either
                end; no other tenant has it, deleted ones included.
            name: one line for people, at most 200 characters.
            site_manager_email: the address that gets messages about transitions.
            site_manager_email_verified: whether that address is known to be the manager's.
            site_manager_phone: in E.164 format.
            organization_id: deliveries with this ``data.organization_id`` belong to the tenant.
            credentials: the sources of the tenant's own access token and webhook secrets.
            reason: for the audit trail, one line.
            actor: the person or program making the change.

        Raises:
            InvalidTenantError: a value cannot be accepted; nothing was changed.
            TenantExistsError: another tenant has the identifier or the organization.
        """
        now = self._clock()
        blank = Tenant(
            id=str(self._new_id()),
            identifier=identity.check_identifier(identifier),
            name="",
            created_at=now,
        )
        fields = TenantChanges(
            name=name,
            site_manager_email=site_manager_email,
            site_manager_email_verified=site_manager_email_verified,
            site_manager_phone=site_manager_phone,
            organization_id=organization_id,
            credentials=credentials or TenantCredentials(),
        )
        tenant = with_changes(blank, fields)
        audit = audit_of(tenant, AuditAction.CREATED, reason, actor, now)
        # An added tenant has no earlier status, so nothing is announced.
        audit = attrs.evolve(audit, new_status=tenant.status)
        try:
            await self._store.add(tenant, audit)
        finally:
            self._announce()
        _log.info("tenant.created", tenant=tenant.identifier, tenant_id=tenant.id, actor=actor)
        return tenant

    async def change(
        self,
        tenant: TenantKey,
        *,
        reason: str | None = None,
        actor: str = APPLICATION,
        expected_version: int | None = None,
        **changes: Unpack[TenantChanges],
    ) -> Tenant:
        """Change the named fields of a tenant at once; equal values change nothing.

        Args:
            tenant: the record, its id or its identifier.
            reason: for the audit trail, one line.
            actor: the person or program making the change.
            expected_version: the version that the caller has seen; if the tenant has changed since,
                it is a conflict.
            changes: the fields, as in :meth:`add`; None removes an optional one. A new address is
                unverified unless ``site_manager_email_verified`` is given. New content of the same
                credential sources needs no call: key files are read at every use.

        Raises:
            InvalidTenantError: a value cannot be accepted; nothing was changed.
            TenantExistsError: another tenant has the organization.
            TenantError: as for the transitions.
        """
        with self._attempt() as attempt:
            before = await self._read_current(tenant, attempt, expected_version)
            audit = audit_of(before, AuditAction.CHANGED, reason, actor, self._clock())
            after = with_changes(before, changes)
            differing = differing_fields(before, after)
            if not differing:
                return before
            # Only the names of the fields: the audit trail outlives the tenant, and an address in
            # it would be kept longer than the tenant.
            audit = attrs.evolve(audit, details=", ".join(differing))
            after = attrs.evolve(after, version=before.version + 1)
            await self._write(attempt, after, audit, None)
        return after

    async def suspend(
        self,
        tenant: TenantKey,
        *,
        reason: str | None = None,
        actor: str = APPLICATION,
        bypass_email_verification: bool = False,
        expected_version: int | None = None,
    ) -> TransitionResult:
        """See :meth:`TenantStatusService.suspend`."""
        return await self._transition(
            tenant,
            Transition.SUSPENDED,
            reason,
            actor,
            expected_version,
            bypass=bypass_email_verification,
        )

    async def reactivate(
        self,
        tenant: TenantKey,
        *,
        reason: str | None = None,
        actor: str = APPLICATION,
        expected_version: int | None = None,
    ) -> TransitionResult:
        """See :meth:`TenantStatusService.reactivate`."""
        return await self._transition(
            tenant, Transition.REACTIVATED, reason, actor, expected_version
        )

    async def deactivate(
        self,
        tenant: TenantKey,
        *,
        reason: str | None = None,
        actor: str = APPLICATION,
        expected_version: int | None = None,
    ) -> TransitionResult:
        """See :meth:`TenantStatusService.deactivate`."""
        return await self._transition(
            tenant, Transition.DEACTIVATED, reason, actor, expected_version
        )

    async def delete(
        self,
        tenant: TenantKey,
        *,
        reason: str | None = None,
        actor: str = APPLICATION,
        expected_version: int | None = None,
    ) -> TransitionResult:
        """See :meth:`TenantStatusService.delete`."""
        return await self._transition(tenant, Transition.DELETED, reason, actor, expected_version)

    async def _transition(
        self,
        key: TenantKey,
        transition: Transition,
        reason: str | None,
        actor: str,
        expected_version: int | None,
        *,
        bypass: bool = False,
    ) -> TransitionResult:
        with self._attempt() as attempt:
            tenant = await self._read_current(key, attempt, expected_version)
            now = self._clock()
            audit = audit_of(tenant, ACTIONS[transition], reason, actor, now)
            refusal: IllegalTransitionError | SuspensionRefusedError | None = None
            try:
                decision = decide(
                    tenant, transition, self._policy, now=now, bypass_email_verification=bypass
                )
            except (IllegalTransitionError, SuspensionRefusedError) as error:
                refusal = error
            # Outside the except block, so that the await is not inside exception handling, and the
            # refusal is raised without a chain.
            if refusal is not None:
                await self._note(refused(audit, transition, tenant, str(refusal)))
                raise refusal
            # A repeated transition writes nothing and notifies no one, so a script may run twice.
            if not decision.no_op:
                changed = in_status(tenant, decision.new_status, now)
                audit = attrs.evolve(
                    audit,
                    previous_status=tenant.status,
                    new_status=decision.new_status,
                    relaxation=decision.relaxation,
                )
                outbox = outbox_of(changed, transition, audit, str(self._new_id()))
                await self._write(attempt, changed, audit, outbox)
                _log_transition(outbox, decision)
                tenant, previous = changed, tenant
            else:
                previous = tenant
        return TransitionResult(
            tenant=tenant,
            transition=transition,
            previous_status=previous.status,
            new_status=decision.new_status,
            no_op=decision.no_op,
            occurred_at=now,
            relaxation=decision.relaxation,
        )

    async def _note(self, audit: AuditRecord) -> None:
        """Record a refusal in the audit trail; if the store fails, only the log has it.

        The same refusal within a minute is only counted, and the next row reports the count:
        repeated requests must not fill the store.
        """
        _log.warning(
            "tenant.refused",
            tenant=audit.tenant_identifier,
            tenant_id=audit.tenant_id,
            actor=audit.actor,
            error=audit.details,
        )
        # A caller that loops would fill the store (docs/adr/0009-tenant-transitions.md).
        left_out = self._refusals.admit((audit.tenant_id, audit.actor, audit.details))
        if left_out is None:
            await trio.lowlevel.checkpoint()
            return
        if left_out:
            details = f"{audit.details} ({left_out} more since the previous row)"
            audit = attrs.evolve(audit, details=details)
        try:
            await self._store.add_audit(audit)
        except StoreUnavailableError as error:
            _log.store_unavailable(error)
            await trio.lowlevel.checkpoint()

    async def _read_current(
        self, key: TenantKey, attempt: "_Attempt", expected_version: int | None
    ) -> Tenant:
        """Return the tenant's current record; raise a conflict if it has changed since."""
        tenant = await self.get(key)
        attempt.tenant_id = tenant.id
        if expected_version is not None and tenant.version != expected_version:
            raise _conflict(tenant)
        for other in self._attempts:
            if other is not attempt and other.wrote(tenant.id, tenant.version):
                raise _conflict(tenant)
        if tenant.id in attempt.changed_meanwhile:
            raise _conflict(tenant)
        return tenant

    async def _write(
        self,
        attempt: "_Attempt",
        tenant: Tenant,
        audit: AuditRecord,
        outbox: OutboxRecord | None,
    ) -> None:
        attempt.version = tenant.version
        try:
            await self._store.change(tenant, audit, outbox, announced=self._announced)
        finally:
            # Announced also after an exception, including Cancelled: the change may have been
            # written, and the cache must not keep the old tenant.
            self._announce()
        for other in self._attempts:
            if other is not attempt:
                other.changed_meanwhile.add(tenant.id)

    @contextmanager
    def _attempt(self) -> Iterator["_Attempt"]:
        attempt = _Attempt()
        self._attempts.append(attempt)
        try:
            yield attempt
        finally:
            self._attempts.remove(attempt)

    def _announce(self) -> None:
        # The cache before the subscribers: a woken subscriber must not read a stale tenant.
        self._directory.forget_all()
        self._subscribers.wake()

    # -- reads -------------------------------------------------------------------------------

    async def get(self, tenant: TenantKey) -> Tenant:
        """Return a tenant's current record by its id, its identifier, or an earlier record.

        Raises:
            UnknownTenantError: there is no such tenant.
        """
        key = tenant.id if isinstance(tenant, Tenant) else tenant
        # A new identifier that has the form of an id is refused, so one text never means two
        # tenants.
        by_id = identity.is_tenant_id(key)
        found = await (self._store.get(key) if by_id else self._store.find(key))
        if found is None:
            shown = tenant.identifier if isinstance(tenant, Tenant) else tenant[:100]
            raise UnknownTenantError(
                f"there is no tenant {shown!r}; 'tenant list' lists all tenants"
            )
        return found

    async def find_by_organization(self, organization_id: str) -> Tenant | None:
        """Return the tenant of an organization of the upstream, or None.

        Answers are cached for a bounded number of organizations, so a change by another process may
        be seen half a second later.
        """
        found = await self._owner_of(organization_id)
        return found if isinstance(found, Tenant) else None

    async def find_erased(self, organization_id: str) -> str | None:
        """Return the id of the purged tenant that had this organization, None if it has one now.

        Cached with the results of :meth:`find_by_organization`.
        """
        found = await self._owner_of(organization_id)
        return found if isinstance(found, str) else None

    async def _owner_of(self, organization_id: str) -> Answer:
        return await self._ask(
            f"organization {organization_id}", lambda: self._store.owner_of(organization_id)
        )

    async def find_by_identifier(self, identifier: str) -> Tenant | None:
        """Return the tenant with this identifier or None, as :meth:`find_by_organization` does."""
        return await self._recall(f"identifier {identifier}", lambda: self._store.find(identifier))

    async def recall(self, tenant_id: str) -> Tenant | None:
        """Return the tenant with this id or None, as :meth:`find_by_organization` does."""
        return await self._recall(f"id {tenant_id}", lambda: self._store.get(tenant_id))

    async def _recall(
        self, key: str, query: Callable[[], Awaitable[Tenant | None]]
    ) -> Tenant | None:
        found = await self._ask(key, query)
        return found if isinstance(found, Tenant) else None

    async def _ask(self, key: str, query: Callable[[], Awaitable[Answer]]) -> Answer:
        await trio.lowlevel.checkpoint()
        if key in self._directory:
            return self._directory.recall(key)
        # Read before the query: a result that a change has overtaken is not cached.
        generation = self._directory.generation
        answer = await query()
        self._directory.remember(key, answer, generation=generation)
        return answer

    async def holders(
        self, sources: Sequence[CredentialSource], *, but: Tenant
    ) -> Mapping[CredentialSource, Sequence[str]]:
        """Return for each source the identifiers of the other tenants that name it."""
        return await self._store.holders(sources, but=but.id)

    async def list(
        self, *, status: TenantStatus | None = None, after: str = "", limit: int = 100
    ) -> Sequence[Tenant]:
        """List up to ``limit`` tenants by identifier, starting after ``after``."""
        return await self._store.page(status=status, after=after, limit=limit)

    async def all(self, *, status: TenantStatus | None = None) -> Sequence[Tenant]:
        """List every tenant by identifier, read page by page."""
        await trio.lowlevel.checkpoint()
        found: list[Tenant] = []
        while True:
            after = found[-1].identifier if found else ""
            page = await self._store.page(status=status, after=after, limit=PAGE)
            found += page
            if len(page) < PAGE:
                return found

    async def counts(self) -> dict[TenantStatus, int]:
        """Return how many tenants are in each status (``sdk_tenants{status}``)."""
        return await self._store.counts()

    async def audit(
        self, tenant_id: str | None = None, *, after_sequence: int = 0, limit: int = 100
    ) -> Sequence[AuditRecord]:
        """List audit rows, oldest first: of one tenant, even a purged one, or of all."""
        return await self._store.audit(tenant_id, after_sequence=after_sequence, limit=limit)

    async def require_active(self, tenant: TenantKey) -> Tenant:
        """Return the current record of a tenant if it is active.

        Raises:
            TenantNotActiveError: it is not active.
            UnknownTenantError: there is no such tenant.
        """
        found = await self.get(tenant)
        if not found.is_active:
            raise TenantNotActiveError(found.identifier, found.status)
        return found

    # -- subscriptions -----------------------------------------------------------------------

    async def transitions(self, *, after: int, limit: int = 100) -> Sequence[OutboxRecord]:
        """List transitions whose sequence is above ``after``, oldest first."""
        return await self._store.outbox(after_sequence=after, limit=limit)

    async def newest_transition(self) -> int:
        """Return the sequence of the newest transition, 0 without any."""
        await trio.lowlevel.checkpoint()
        newest, reach = 0, 1
        # The outbox can only be read forwards. Doubling steps, then halving them, finds its end in
        # some forty reads of one row.
        while reach:
            rows = await self._store.outbox(after_sequence=newest + reach - 1, limit=1)
            if rows:
                newest, reach = rows[0].sequence, reach * 2
            else:
                reach = reach // 2
        return newest

    def subscribe(self, *, after: int = 0) -> AbstractContextManager[TransitionFeed]:
        """Return a block with a feed of all transitions after that sequence.

        ``with tenants.subscribe(after=position) as feed: records = await feed.next()``. A slow
        subscriber does not delay transitions.
        """
        return self._subscribers.subscribe(self._store, after)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Poll for changes by other processes until cancelled; each is noticed within half a
        second."""
        task_status.started()
        # The first poll announces as well: a change after the store was opened must not be missed.
        seen: int | None = None
        while True:
            try:
                revision = await self._store.revision()
            except StoreUnavailableError as error:
                _log.store_unavailable(error, retry_in=POLL_SECONDS)
            else:
                # Clear everything. Determining the exact changes would need reads, and the next
                # deliveries query the tenants anyway.
                if revision != seen:
                    seen = revision
                    self._announce()
            await trio.sleep(POLL_SECONDS)


@attrs.define(eq=False)
class _Attempt:
    """A change of a tenant in progress.

    Of two overlapping attempts exactly one must succeed, however their reads and writes interleave.
    The version does not ensure that by itself: an attempt that reads after the other has written
    would follow it, in an order that no caller chose.
    """

    tenant_id: str | None = None
    version: int | None = None
    changed_meanwhile: set[str] = attrs.Factory(set)

    def wrote(self, tenant_id: str, version: int) -> bool:
        """Return whether this attempt has written that version and has not returned yet."""
        return self.tenant_id == tenant_id and self.version == version


def _log_transition(outbox: OutboxRecord, decision: Decision) -> None:
    _log.info(
        f"tenant.{outbox.transition.lower()}",
        tenant=outbox.tenant_identifier,
        tenant_id=outbox.tenant_id,
        previous_status=str(outbox.previous_status),
        actor=outbox.actor,
        relaxation=decision.relaxation,
    )


def _conflict(tenant: Tenant) -> TenantConflictError:
    return TenantConflictError(
        f"the tenant {tenant.identifier!r} was changed by someone else in the meantime (it is "
        f"{tenant.status}, version {tenant.version}): this call changed nothing; check "
        "the tenant and decide again"
    )
