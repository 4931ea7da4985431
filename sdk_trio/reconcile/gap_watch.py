"""The gap watch: notices that the upstream may have skipped events, and starts catching up.

Each minute it reads the endpoints of every account. The decisions are in ``gap.py``.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import attrs
import trio

from ..base.clock import wall
from ..base.logs import Throttle, get_logger
from ..base.throttle import longest_wait
from ..config import Settings
from ..errors import SdkError, StoreUnavailableError, UnknownTenantError
from ..records.tenants import Tenant
from ..storage.ports import Inbox
from ..tenants.service import TenantService
from .catch_up import ACCOUNTS_AT_ONCE, PAGE_SECONDS, SETTLE_SECONDS, CatchUp, UpstreamState
from .gap import (
    AccountState,
    CatchUpRun,
    found_disabled,
    found_enabled,
    may_reenable,
    state_name,
)
from .plan import ReadEndpoint, choose_endpoints, choose_tenant_endpoints, subscribed_types

_log = get_logger("runtime")

#: Time between two checks of the endpoints, in seconds. A catch-up must begin within three
#: minutes after the endpoint was enabled.
WATCH_SECONDS = 60.0

#: Accounts that are checked at a time, and the time limit of one check, in seconds. An account
#: whose calls hang must not delay the catch-up of another one.
CHECKED_AT_ONCE = 16
CHECK_SECONDS = 30.0

#: The catch-up begins without the upstream's deliveries after so many checks in which they could
#: not be requested: what changed must not wait for that list longer.
DELIVERY_TRIES = 2

#: The wait after a catch-up that failed doubles from ``WATCH_SECONDS`` to so many seconds.
LONGEST_RETRY_SECONDS = 900.0

#: A check that keeps failing is logged at once, then after so many seconds, and then after twice as
#: long each time, up to the second value.
LOGGED_AGAIN_SECONDS = 900.0
LONGEST_UNLOGGED_SECONDS = 14_400.0

#: Progress is logged after so many pages.
LOG_EVERY_PAGES = 10


class AccountUpstream(UpstreamState, Protocol):
    """The upstream of one account; implemented by ``client.client.UpstreamDeliveries``.

    Every method raises ``CallError`` if the call fails.
    """

    async def endpoints(self) -> list[Any]:
        """Return every webhook endpoint, as its JSON object."""
        ...

    async def enable(self, endpoint_id: str) -> None:
        """Enable a webhook endpoint."""
        ...


#: Opens the upstream with the credentials of a tenant; None: of the host.
OpenUpstream = Callable[[Tenant | None], AbstractAsyncContextManager[AccountUpstream]]


async def list_accounts(tenants: TenantService | None) -> list[Tenant | None]:
    """Return the host (None), and the tenants that have an access token of their own.

    Raises:
        StoreUnavailableError: from the store.
    """
    await trio.lowlevel.checkpoint()
    everyone: Sequence[Tenant] = () if tenants is None else await tenants.all()
    own = (each for each in everyone if each.credentials.access_token and not each.is_deleted)
    return [None, *own]


def endpoints_of(
    settings: Settings, tenant: Tenant | None, listed: Sequence[Any]
) -> tuple[ReadEndpoint, ...]:
    """Return the endpoints of an account that deliver to this receiver.

    Raises:
        UnknownEndpointError: no endpoint matches, or more than one.
    """
    configured = settings.webhooks.reconciliation.endpoint_ids
    path = settings.webhooks.path
    if tenant is None:
        return choose_endpoints(listed, configured=configured, path=path)
    return choose_tenant_endpoints(
        listed, configured=configured, path=path, identifier=tenant.identifier
    )


class GapWatch:
    """Watches the accounts, enables their endpoints if that is set, and catches up.

    Args:
        inbox: the open store.
        settings: ``Sdk:Webhooks:Reconciliation`` applies.
        open_upstream: opens the upstream of an account.
        tenants: the tenants; None: there are none.
        clock: returns Unix seconds.
        is_ready: whether this receiver takes deliveries now.
        wake: is called when events were added.
        deliveries_first: requests the deliveries that the upstream lists to the host, and waits
            for them. They are the real events, and arrive before the state is compared.
        term: writes are valid only while this host leads in that term; None: the only host.
        page_seconds: the time between two pages.
        settle_seconds: how old a change must be before its event is added.
    """

    def __init__(
        self,
        inbox: Inbox,
        settings: Settings,
        open_upstream: OpenUpstream,
        *,
        tenants: TenantService | None = None,
        clock: Callable[[], float] = wall,
        is_ready: Callable[[], bool] = lambda: True,
        wake: Callable[[], None] = lambda: None,
        deliveries_first: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
        term: int | None = None,
        page_seconds: float = PAGE_SECONDS,
        settle_seconds: float = SETTLE_SECONDS,
    ) -> None:
        self._inbox = inbox
        self._settings = settings
        self._options = settings.webhooks.reconciliation
        self._open_upstream = open_upstream
        self._tenants = tenants
        self._clock = clock
        self._is_ready = is_ready
        self._wake = wake
        self._deliveries_first = deliveries_first
        self._term = term
        self._page_seconds = page_seconds
        self._settle_seconds = settle_seconds
        # The states of accounts that were read from the store, by the tenant's id.
        self._states: dict[str | None, AccountState] = {}
        self._catching_up: dict[str | None, trio.CancelScope] = {}
        # The failures of an account's catch-up in a row, and the time of its next try.
        self._failures: dict[str | None, tuple[int, float]] = {}
        self._limit = trio.CapacityLimiter(ACCOUNTS_AT_ONCE)
        self._checking = trio.CapacityLimiter(CHECKED_AT_ONCE)
        # The accounts of the last round.
        self._accounts: list[str | None] = [None]
        #: Whether the upstream answered the host's last check; None: there was none.
        self.answers: bool | None = None
        self._delivery_failures = 0
        self._throttle = Throttle(
            lines=1,
            seconds=LOGGED_AGAIN_SECONDS,
            longest=LONGEST_UNLOGGED_SECONDS,
            clock=trio.current_time,
        )
        # By account, how often its endpoint was found enabled after a failure: the next failure is
        # logged at once.
        self._recoveries: Counter[str | None] = Counter()
        self._failing: set[str | None] = set()

    @property
    def disabled(self) -> int | None:
        """The number of accounts whose endpoints were found disabled; None: not known yet."""
        if None not in self._states:
            return None
        states = (self._states.get(account) for account in self._accounts)
        return sum(state is not None and state.disabled_since is not None for state in states)

    async def run(self, *, watch_seconds: float = WATCH_SECONDS) -> None:
        """Check all accounts now and every ``watch_seconds``, until cancelled.

        A cancelled catch-up keeps its progress.
        """
        async with trio.open_nursery() as nursery:
            while True:
                await self.check_all(nursery)
                await trio.sleep(watch_seconds)

    async def check_all(self, nursery: trio.Nursery) -> None:
        """Check all accounts once; catch-ups begin, and continue, in ``nursery``."""
        try:
            accounts = await list_accounts(self._tenants)
            self._accounts = [_key(tenant) for tenant in accounts]
            await self._leave_others()
        except SdkError as error:
            self._log_failure("watch_failed", None, type(error).__name__, error=str(error))
            await trio.lowlevel.checkpoint()
            return
        async with trio.open_nursery() as checks:
            for tenant in accounts:
                checks.start_soon(self._watch, tenant, nursery)

    async def _watch(self, tenant: Tenant | None, nursery: trio.Nursery) -> None:
        """Check one account, and start its catch-up if it has one to do."""
        key = _key(tenant)
        try:
            async with self._checking:
                with trio.fail_after(CHECK_SECONDS):
                    endpoints = await self.check(tenant)
        except (SdkError, trio.TooSlowError) as error:
            reason = str(error) or f"the upstream did not answer within {CHECK_SECONDS:g} s"
            # The text may have parts that change, such as the time of the next attempt.
            kind = f"{type(error).__name__} {getattr(error, 'status', None)}"
            self._log_failure("watch_failed", tenant, kind, error=reason)
            await trio.lowlevel.checkpoint()
            return
        if endpoints and key in self._failing:
            self._failing.discard(key)
            self._recoveries[key] += 1
        if not endpoints or not self._options.by_state or key in self._catching_up:
            return
        _, again_at = self._failures.get(key, (0, 0.0))
        if self._states[key].run is not None and trio.current_time() >= again_at:
            self._catching_up[key] = trio.CancelScope()
            nursery.start_soon(self._keep_catching_up, tenant, endpoints)

    def _log_failure(self, event: str, tenant: Tenant | None, kind: str, **fields: object) -> None:
        """Log a failed check, unless one of this kind was logged recently."""
        key = _key(tenant)
        self._failing.add(key)
        extra = self._throttle.fields((event, key, kind, self._recoveries[key]))
        if extra is not None:
            _log.warning(f"reconciliation.{event}", **_fields(tenant), **fields, **extra)

    async def _leave_others(self) -> None:
        """End the catch-ups of tenants that are no longer accounts; forget purged tenants."""
        await trio.lowlevel.checkpoint()
        for key in self._states.keys() - {*self._accounts}:
            if key in self._catching_up:
                self._catching_up[key].cancel()
                continue  # it may be writing its progress
            if key is not None and self._tenants is not None:
                try:
                    await self._tenants.get(key)
                except UnknownTenantError:
                    # Its progress may have been written after its purge.
                    await self._inbox.write_checkpoint(state_name(key), None, term=self._term)
            del self._states[key]
            self._failures.pop(key, None)
            self._failing.discard(key)
            del self._recoveries[key]

    async def check(self, tenant: Tenant | None) -> tuple[ReadEndpoint, ...]:
        """Read the endpoints of an account and note a gap; return the enabled ones.

        A disabled endpoint is enabled, if that is set, this receiver is ready, the last attempt is
        an hour ago, and the endpoint is certainly that of this receiver.

        Raises:
            CallError: the upstream did not answer; the account has no contact.
            UnknownEndpointError: the endpoint for this receiver is unknown.
            StoreUnavailableError: from the inbox.
        """
        await self._load(tenant)
        async with self._open_upstream(tenant) as upstream:
            answers = False
            try:
                listed = await upstream.endpoints()
                answers = True
            finally:
                self._note_answer(tenant, answers=answers)
            chosen = endpoints_of(self._settings, tenant, listed)
            # Read only now: a catch-up may have stored its progress meanwhile.
            state, now = self._states[_key(tenant)], self._clock()
            disabled = [endpoint for endpoint in chosen if not endpoint.enabled]
            if disabled:
                # The catch-up after a new gap begins soon.
                self._failures.pop(_key(tenant), None)
                if state.disabled_since is None:
                    _log.error(
                        "reconciliation.endpoint_disabled",
                        **_fields(tenant),
                        endpoint_id=disabled[0].id,
                        hint="the upstream delivers nothing to it, and keeps no record of what it "
                        "skips; enable it there",
                    )
                    await self._save(tenant, found_disabled(state, now))
                await self._reenable(tenant, upstream, disabled)
                return ()
        lookback = self._options.max_lookback_hours * 3600.0
        state = found_enabled(state, now, lookback_seconds=lookback)
        if not self._options.by_state:
            state = attrs.evolve(state, run=None)
        # While a catch-up runs it owns the progress; a new gap makes it begin again.
        await self._save(tenant, state)
        return chosen

    def _note_answer(self, tenant: Tenant | None, *, answers: bool) -> None:
        # A tenant's token may be revoked, which says nothing about the upstream.
        if tenant is None:
            self.answers = answers

    async def _reenable(
        self, tenant: Tenant | None, upstream: AccountUpstream, disabled: Sequence[ReadEndpoint]
    ) -> None:
        await trio.lowlevel.checkpoint()
        state, now = self._states[_key(tenant)], self._clock()
        if not self._options.reenable_endpoint or not may_reenable(state, now):
            return
        if not self._is_ready():
            # Its first deliveries would fail, and the upstream would disable it again.
            self._log_failure("reenable_postponed", tenant, "not ready", reason="not ready")
            return
        # Stored first: a crash must not make it happen more often than once an hour.
        await self._save(tenant, attrs.evolve(state, reenabled_at=now))
        for endpoint in disabled:
            if not endpoint.is_certain:
                _log.error(
                    "reconciliation.reenable_refused",
                    **_fields(tenant),
                    endpoint_id=endpoint.id,
                    hint="its URL has another path, so it may be another program's: set "
                    "Sdk:Webhooks:Reconciliation:EndpointIds to its id if it is this receiver's",
                )
                continue
            await upstream.enable(endpoint.id)
            _log.warning(
                "reconciliation.endpoint_reenabled",
                **_fields(tenant),
                endpoint_id=endpoint.id,
                hint="this receiver has enabled it at the upstream; find out why deliveries failed",
            )

    # -- catching up -------------------------------------------------------------------------

    async def _keep_catching_up(
        self, tenant: Tenant | None, endpoints: tuple[ReadEndpoint, ...]
    ) -> None:
        await trio.lowlevel.checkpoint()
        key = _key(tenant)
        try:
            with self._catching_up[key]:
                async with self._limit:
                    await self.catch_up(tenant, endpoints)
                self._failures.pop(key, None)
        except SdkError as error:
            # A later check continues where it stopped.
            failures = self._failures.get(key, (0, 0.0))[0] + 1
            wait = longest_wait(
                failures, base_seconds=WATCH_SECONDS, cap_seconds=LONGEST_RETRY_SECONDS
            )
            # A check that begins at that moment finds the time reached.
            self._failures[key] = (failures, trio.current_time() + wait - WATCH_SECONDS / 2)
            _log.warning(
                "reconciliation.catch_up_failed",
                **_fields(tenant),
                error=str(error),
                retry_in=wait,
            )
        finally:
            del self._catching_up[key]

    async def catch_up(
        self, tenant: Tenant | None, endpoints: tuple[ReadEndpoint, ...]
    ) -> CatchUpRun | None:
        """Continue the stored catch-up of an account to its end; None: there is none.

        Raises:
            IncompleteCatchUpError, CallError, StoreUnavailableError: as :meth:`CatchUp.run`; the
                progress is stored.
        """
        state = await self._load(tenant)
        run = state.run
        if run is None:
            return None
        _log.info(
            "reconciliation.catch_up_started",
            **_fields(tenant),
            since=run.since,
            until=run.until,
            lists=None if run.lists is None else [each.name for each in run.lists],
        )
        if tenant is None and run.lists is None:
            await self._request_deliveries()
        catch_up = CatchUp(
            self._inbox,
            self._settings,
            tenant=tenant,
            tenants=self._tenants,
            types=subscribed_types(endpoints),
            clock=self._clock,
            page_seconds=self._page_seconds,
            settle_seconds=self._settle_seconds,
            wake=self._wake,
        )

        async def save(progress: CatchUpRun) -> None:
            await self._save_progress(tenant, run, progress)

        async with self._open_upstream(tenant) as upstream:
            finished = await catch_up.run(upstream, run, save)
        await self._save_progress(tenant, run, None)
        _log.info("reconciliation.caught_up", **_fields(tenant), **_counts(finished))
        return finished

    async def _request_deliveries(self) -> None:
        """Request the deliveries that the upstream lists; leave them out after several failures."""
        await trio.lowlevel.checkpoint()
        try:
            await self._deliveries_first()
        except StoreUnavailableError:
            raise
        except SdkError as error:
            self._delivery_failures += 1
            if self._delivery_failures < DELIVERY_TRIES:
                raise
            _log.warning("reconciliation.deliveries_not_requested", error=str(error))
        self._delivery_failures = 0

    async def _save_progress(
        self, tenant: Tenant | None, began: CatchUpRun, progress: CatchUpRun | None
    ) -> None:
        """Store the progress of a run that began as ``began``; None: it has finished."""
        await trio.lowlevel.checkpoint()
        state = self._states[_key(tenant)]
        if state.run is None or (state.run.since, state.run.until) != (began.since, began.until):
            # A new gap was found meanwhile: its run begins after this one.
            return
        current = None if progress is None else progress.current
        if progress is not None and current is not None and current.page % LOG_EVERY_PAGES == 0:
            _log.info("reconciliation.catching_up", **_fields(tenant), **_counts(progress))
        await self._save(tenant, attrs.evolve(state, run=progress))

    # -- the stored state --------------------------------------------------------------------

    async def _load(self, tenant: Tenant | None) -> AccountState:
        key = _key(tenant)
        if key not in self._states:
            text = await self._inbox.read_checkpoint(state_name(key))
            state = AccountState()
            if text is not None:
                try:
                    state = AccountState.from_text(text)
                except ValueError as error:
                    _log.error("reconciliation.checkpoint_unreadable", error=str(error))
            self._states[key] = state
        await trio.lowlevel.checkpoint()
        return self._states[key]

    async def _save(self, tenant: Tenant | None, state: AccountState) -> None:
        key = _key(tenant)
        # In memory first: a check and a catch-up of one account write by turns.
        self._states[key] = state
        await self._inbox.write_checkpoint(state_name(key), state.as_text(), term=self._term)


def _key(tenant: Tenant | None) -> str | None:
    return None if tenant is None else tenant.id


def _fields(tenant: Tenant | None) -> dict[str, str]:
    return {} if tenant is None else {"tenant": tenant.identifier}


def _counts(run: CatchUpRun) -> dict[str, Any]:
    return {
        "list": None if run.current is None else run.current.name,
        "page": None if run.current is None else run.current.page,
        "listed": run.listed,
        "changed": run.changed,
        "added": run.added,
        "uncertain": run.uncertain,
    }
