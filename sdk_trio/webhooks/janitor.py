"""The janitor: retention of finished deliveries, and a warning about secrets that match nothing."""

from collections.abc import Callable

import trio

from ..base.clock import wall
from ..base.logs import get_logger
from ..errors import StoreUnavailableError
from ..storage.ports import Inbox
from .secret_usage import SecretUsage

_log = get_logger("webhooks")

#: The seconds between two passes of retention: the settings count in hours.
INTERVAL_SECONDS = 3600.0


class Janitor:
    """Applies the retention settings once an hour, beginning at the start."""

    def __init__(
        self, inbox: Inbox, secret_usage: SecretUsage, *, clock: Callable[[], float] = wall
    ) -> None:
        self._inbox = inbox
        self._secret_usage = secret_usage
        self._clock = clock

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled; a store that fails is tried again an hour later."""
        task_status.started()
        while True:
            try:
                purged = await self._inbox.purge(now=self._clock())
            except StoreUnavailableError as error:
                _log.store_unavailable(error, retry_in=INTERVAL_SECONDS)
            else:
                if purged.bodies or purged.finished or purged.parked:
                    _log.info(
                        "inbox.purged",
                        bodies=purged.bodies,
                        finished=purged.finished,
                        parked=purged.parked,
                    )
            self._report_unused_secrets()
            await trio.sleep(INTERVAL_SECONDS)

    def _report_unused_secrets(self) -> None:
        for index in self._secret_usage.unused(self._clock()):
            _log.warning(
                "webhook.secret_unused",
                index=index,
                hint="it has verified nothing for a day; if its rotation is over, remove it",
            )
