"""Counts and log lines of requests that are not answered 200.

Anybody can have requests refused, as often as they like, so each cause is logged a few times in a
while, and one line at the end says how many were left out. A verified delivery that could not be
taken is noted here as well, beside the log event that gives the reason.
"""

from collections.abc import Callable
from typing import Final

import attrs
import trio

from ..base.http import Headers
from ..base.logs import Throttle, get_logger
from .counters import Counters
from .signature import is_valid_id
from .verdict import ID_HEADER

_log = get_logger("webhooks")

#: The most lines of one cause (``LINES``) in a time (``SECONDS``).
LINES: Final = 3
SECONDS: Final = 10.0

#: Causes of the HTTP server's own refusals by status, before a request reaches the application.
_SERVER_CAUSES: Final = {
    400: "malformed",
    408: "slow_request",
    414: "long_line",
    431: "large_head",
    500: "no_answer",
    501: "not_implemented",
    505: "http_version",
}


@attrs.frozen
class Rejection:
    """One request that was not answered 200.

    ``event`` is ``webhook.rejected`` (a verification failed) or ``webhook.refused``. ``address`` is
    the sender's, None if unknown. ``webhook_id`` is the sender's claim, if it has the form of an
    id. ``fields`` are further log fields; nothing of a body is among them.
    """

    event: str
    cause: str
    status: int
    address: str | None
    webhook_id: str | None
    fields: tuple[tuple[str, object], ...] = ()


class Rejections:
    """Notes every rejection of one receiver.

    Args:
        counters: counts them by cause.
        clock: returns seconds that never go back; None: the clock of the process.
    """

    def __init__(self, counters: Counters, *, clock: Callable[[], float] | None = None) -> None:
        self._counters = counters
        self._throttle = (
            Throttle(lines=LINES, seconds=SECONDS)
            if clock is None
            else Throttle(lines=LINES, seconds=SECONDS, clock=clock)
        )
        self._left_out = trio.Event()

    def note(self, rejection: Rejection) -> None:
        """Count a rejection, and log it unless its cause has been logged often enough."""
        self._counters.count_refusal(rejection.cause)
        suppressed = self._throttle.admit(rejection.cause)
        if suppressed is None:
            self._left_out.set()
            return
        fields = dict(rejection.fields)
        if suppressed:
            fields["suppressed"] = suppressed
        _log.warning(
            rejection.event,
            cause=rejection.cause,
            status=rejection.status,
            address=rejection.address,
            webhook_id=rejection.webhook_id,
            **fields,
        )

    def note_request(self, status: int, reason: str, address: str | None) -> None:
        """Note a request that the server refused before the receiver saw it."""
        cause = _SERVER_CAUSES.get(status, "malformed")
        detail = (("detail", reason),)
        self._counters.count("refused")
        self.note(Rejection("webhook.refused", cause, status, address, None, detail))

    async def run(  # noqa: ASYNC910 - it never returns
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Log how many lines were left out, every ``SECONDS`` and at the end, until cancelled."""
        task_status.started()
        try:
            while True:
                await self._left_out.wait()
                await trio.sleep(SECONDS)
                self._summarize()
        finally:
            self._summarize()

    def _summarize(self) -> None:
        self._left_out = trio.Event()
        left_out = {str(cause): left for cause, left in self._throttle.take_left_out().items()}
        if left_out:
            _log.warning(
                "webhook.rejections_suppressed", suppressed=sum(left_out.values()), causes=left_out
            )


def claimed_id(headers: Headers) -> str | None:
    """Return the id that a request claims, None if it claims none that has the form of one."""
    for name, value in headers:
        if name == ID_HEADER:
            return value.decode("ascii") if is_valid_id(value) else None
    return None
