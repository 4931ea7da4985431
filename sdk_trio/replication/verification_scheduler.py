"""Verifies the replicas of all active tenants again and again, while the runtime runs."""

import time
from collections.abc import Callable

import trio

from ..base.logs import get_logger
from ..config import Settings
from ..errors import SdkError, StoreLockedError
from .database_finder import TenantList
from .verification import Verification, VerificationState
from .verification_keeper import VerificationKeeper

_log = get_logger("replication")

#: How often the clock is looked at, in seconds: what a command has verified meanwhile counts too.
LOOK_SECONDS = 60.0

_HOUR_SECONDS = 3600.0

#: After a run with failures the next one comes sooner, in seconds.
RETRY_SECONDS = 3600.0


class VerificationScheduler:
    """Runs a verification ``VerifyIntervalHours`` after the last one, by whomever that was.

    Args:
        settings: validated settings.
        tenants: knows the active ones.
        keeper: runs the verifications.
        clock: returns Unix seconds.

    The first one begins a minute after the start, when replication should be up, if there was none
    within the interval. After a failure the next one comes within the hour.
    """

    def __init__(
        self,
        settings: Settings,
        tenants: TenantList,
        keeper: VerificationKeeper,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        hours = settings.multi_tenant.file_db.replication.verify_interval_hours
        self._interval = None if hours is None else hours * _HOUR_SECONDS
        self._tenants = tenants
        self._keeper = keeper
        self._clock = clock
        self._state = VerificationState()

    @property
    def state(self) -> VerificationState:
        """What is remembered, at most :data:`LOOK_SECONDS` old; ``failed`` is for health."""
        return self._state

    @property
    def verified_age_seconds(self) -> float | None:
        """How long ago all replicas were good, for ``sdk_replication_verified_age_seconds``.

        None when they never were.
        """
        return self._state.age(self._clock())

    async def run(self) -> None:
        """Run until cancelled; a store or a target that fails is tried again at the next look.

        Without ``VerifyIntervalHours`` it only keeps :attr:`state` up to date.
        """
        began = trio.current_time()
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
        # A clock that was set back must not put it off for long.
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
