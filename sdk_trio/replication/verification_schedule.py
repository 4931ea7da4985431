"""The verification of all active tenants' replicas, now or by schedule, with stored results."""

from collections.abc import Callable

import trio

from ..base.clock import wall
from ..base.logs import get_logger
from ..config import Settings
from ..errors import SdkError, StoreLockedError
from ..records.tenants import Tenant, TenantStatus
from ..storage.ports import Inbox
from .verification import CHECKPOINT, Verification, VerificationState, Verifier, state_from_text
from .watch import TenantList

Report = Callable[[Verification, int, int], None]

_log = get_logger("replication")

#: Polling interval for the clock and the store, in seconds: a command may also have verified.
LOOK_SECONDS = 60.0

_HOUR_SECONDS = 3600.0

#: Time to the next run after one with failures, in seconds.
RETRY_SECONDS = 3600.0


class VerificationKeeper:
    """Runs verifications and stores their state with the deliveries.

    Args:
        verifier: does the work.
        inbox: stores the state.
        clock: returns Unix seconds.
        term: results count only while this host is the leader in that term; None: it is the only
    host.
    """

    def __init__(
        self,
        verifier: Verifier,
        inbox: Inbox,
        *,
        clock: Callable[[], float] = wall,
        term: int | None = None,
    ) -> None:
        self._term = term
        self._verifier = verifier
        self._inbox = inbox
        self._clock = clock

    async def read(self) -> VerificationState:
        """Return the stored state, including results of other processes.

        Raises:
            StoreUnavailableError: the store cannot be read.
        """
        return state_from_text(await self._inbox.read_checkpoint(CHECKPOINT))

    async def verify_active(
        self,
        tenants: TenantList,
        *,
        accept_loss: bool = False,
        report: Report = lambda _result, _done, _total: None,
    ) -> list[Verification]:
        """Verify every active tenant, one at a time, and store the outcome.

        Args:
            tenants: the tenants' service.
            accept_loss: accept replicas that begin later than before.
            report: called after each replica with its result, the number of finished replicas, and
                their total.

        Raises:
            StoreLockedError: another verification runs.
            StoreUnavailableError: the store cannot be read or written.

        On cancellation, it stores nothing.
        """
        with self._verifier.alone():
            # The lock makes us the only writer of the state.
            state = await self.read()
            chosen = await tenants.all(status=TenantStatus.ACTIVE)
            results: list[Verification] = []
            for tenant in chosen:
                results.append(await self._verify(tenant, state, accept_loss))
                report(results[-1], len(results), len(chosen))
            state = state.after_run(results, now=self._clock(), accept_loss=accept_loss)
            await self._inbox.write_checkpoint(CHECKPOINT, state.to_text(), term=self._term)
            return results

    async def verify_one(self, tenant: Tenant, *, accept_loss: bool = False) -> Verification:
        """Verify one tenant of any status, and store the outcome if it is active.

        ``accept_loss`` is that of :meth:`verify_active`.

        Raises:
            StoreLockedError: another verification runs.
            StoreUnavailableError: the store cannot be read or written.
        """
        with self._verifier.alone():
            state = await self.read()
            result = await self._verify(tenant, state, accept_loss)
            if tenant.is_active:
                state = state.after_one(result, accept_loss=accept_loss)
                await self._inbox.write_checkpoint(CHECKPOINT, state.to_text(), term=self._term)
            return result

    async def _verify(
        self, tenant: Tenant, state: VerificationState, accept_loss: bool
    ) -> Verification:
        result = await self._verifier.verify(tenant)
        if accept_loss:
            return result
        return state.compared(result, retention=self._verifier.retention)


class VerificationScheduler:
    """Runs a verification ``VerifyIntervalHours`` after the last one, whichever process ran that.

    Args:
        settings: validated settings.
        tenants: lists the active tenants.
        keeper: runs the verifications.
        clock: returns Unix seconds.

    If there was none within the interval, the first one starts a minute after the start, when
    replication should be running. After a failure the next one follows within the hour.
    """

    def __init__(
        self,
        settings: Settings,
        tenants: TenantList,
        keeper: VerificationKeeper,
        *,
        clock: Callable[[], float] = wall,
    ) -> None:
        hours = settings.multi_tenant.file_db.replication.verify_interval_hours
        self._interval = None if hours is None else hours * _HOUR_SECONDS
        self._tenants = tenants
        self._keeper = keeper
        self._clock = clock
        self._state = VerificationState()

    @property
    def state(self) -> VerificationState:
        """The stored state, at most :data:`POLL_SECONDS` old; health uses its ``failed``."""
        return self._state

    @property
    def verified_age_seconds(self) -> float | None:
        """Seconds since all replicas were verified: ``sdk_replication_verified_age_seconds``.

        None if they never were.
        """
        return self._state.age(self._clock())

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled; after a failure of the store or target it retries at the next poll.

        Without ``VerifyIntervalHours`` it only keeps :attr:`state` up to date.
        """
        began = trio.current_time()
        task_status.started()
        while True:
            try:
                self._state = await self._keeper.read()
                if trio.current_time() - began >= LOOK_SECONDS and self._is_due():
                    await self._keeper.verify_active(self._tenants, report=_log_result)
                    self._state = await self._keeper.read()
            except StoreLockedError:
                _log.debug("replication.verification_postponed", reason="a command verifies")
            except SdkError as error:
                _log.error(
                    "replication.verification_failed", problem=str(error), retry_in=LOOK_SECONDS
                )
            await trio.sleep(LOOK_SECONDS)

    def _is_due(self) -> bool:
        if self._interval is None:
            return False
        wait = min(self._interval, RETRY_SECONDS) if self._state.failed else self._interval
        ran_at = self._state.ran_at
        # A time in the future comes from a clock that was set back, and must not delay it for long.
        return ran_at is None or not 0 <= self._clock() - ran_at < wait


def _log_result(result: Verification, _done: int, _total: int) -> None:
    if not result.ok:
        _log.error(
            "replication.verification_failed",
            tenant=result.identifier,
            tenant_id=result.tenant_id,
            problem=result.problem,
        )
    elif result.skipped is None:
        _log.info(
            "replication.verified",
            tenant=result.identifier,
            tenant_id=result.tenant_id,
            txid=result.txid,
            content=str(result.content),
            seconds=result.seconds,
        )
