"""Count and log requests that are not answered 200, and keep the latest ones.

Anyone can cause any number of refusals, so each cause is logged at most :data:`LINES` times in
:data:`SECONDS`, and one more line reports how many were omitted. A verified delivery that could not
be accepted is also noted here, in addition to the log event with the reason.

A ring keeps the latest ones, so that the admin address can show why a sender gets its 400. It holds
the claims of the request, truncated, and only the type from its body.
"""

import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import trio

from ..base.clock import wall
from ..base.http import Headers
from ..base.logs import Throttle, get_logger
from .counters import Counters
from .signature import is_valid_id
from .verdict import ID_HEADER

_log = get_logger("webhooks")

#: The maximum number of lines of one cause (``LINES``) in a period (``SECONDS``).
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
    503: "no_slot",
    505: "http_version",
}


class Rejection(msgspec.Struct, frozen=True):
    """One request that was not answered 200.

    ``event`` is ``webhook.rejected`` (a verification failed) or ``webhook.refused``. ``address`` is
    the sender's, None if unknown. ``webhook_id`` is the sender's claim, if it has the form of an
    id; ``type`` is also its claim. ``size`` is the size of the body in bytes, if known. ``fields``
    are further log fields; none contains a part of a body.
    """

    event: str
    cause: str
    status: int
    address: str | None
    webhook_id: str | None
    fields: tuple[tuple[str, object], ...] = ()
    type: str | None = None
    size: int | None = None


#: The number of rejections that are kept: about a quarter of a megabyte.
KEPT: Final = 500

#: The maximum length of a stored detail, in characters.
_DETAIL_CHARACTERS: Final = 300

#: Log fields with the tenant that a request claims.
_TENANT_FIELDS: Final = ("tenant", "claimed_tenant")


class RejectionRing:
    """The last :data:`KEPT` rejections, with their numbers and times.

    Args:
        clock: returns Unix seconds.
    """

    def __init__(self, clock: Callable[[], float] = wall) -> None:
        self._clock = clock
        self._kept: deque[tuple[int, float, Rejection]] = deque(maxlen=KEPT)
        self._causes: Counter[str] = Counter()
        self._total = 0

    def add(self, rejection: Rejection) -> None:
        """Count a rejection, and keep it; it replaces the oldest one."""
        self._causes[rejection.cause] += 1
        self._keep(self._clock(), rejection)

    def add_reported(
        self, causes: Mapping[str, int], newest: Sequence[tuple[float, Rejection]]
    ) -> None:
        """Count the rejections of another process, and keep its newest ones.

        Args:
            causes: the number of rejections by cause since its last report.
            newest: the rejections that it still had, each with its time, oldest first.
        """
        self._causes.update(causes)
        # Rejections without a row preceded the others, so the last row has the highest number.
        self._total += sum(causes.values()) - len(newest)
        for at, rejection in newest:
            self._keep(at, rejection)

    def _keep(self, at: float, rejection: Rejection) -> None:
        self._total += 1
        self._kept.append((self._total, at, rejection))

    def after(self, seq: int) -> list[tuple[float, Rejection]]:
        """Return the stored rejections after the one with this number, oldest first."""
        return [(at, rejection) for number, at, rejection in self._kept if number > seq]

    @property
    def total(self) -> int:
        """Return the number of rejections since the start: the ``seq`` of the newest."""
        return self._total

    @property
    def causes(self) -> Mapping[str, int]:
        """Return the number of rejections by cause."""
        return Counter(self._causes)

    def newest(self, *, cause: str | None, before: int | None, limit: int) -> list[dict[str, Any]]:
        """Return up to ``limit`` stored rejections, newest first, as JSON.

        Args:
            cause: only rejections with this cause.
            before: only rejections with a smaller ``seq``.
            limit: the maximum number.
        """
        found: list[dict[str, Any]] = []
        for seq, at, rejection in reversed(self._kept):
            if len(found) == limit:
                break
            if cause in (None, rejection.cause) and (before is None or seq < before):
                found.append(_listed(seq, at, rejection))
        return found


def _listed(seq: int, at: float, rejection: Rejection) -> dict[str, Any]:
    fields = dict(rejection.fields)
    detail = fields.get("detail")
    tenant = next((str(fields[name]) for name in _TENANT_FIELDS if name in fields), None)
    source = {"source": fields["source"]} if "source" in fields else {}
    return {
        "seq": seq,
        "at": at,
        "event": rejection.event,
        "cause": rejection.cause,
        "status": rejection.status,
        "address": rejection.address,
        "webhook_id": rejection.webhook_id,
        "type": rejection.type,
        "size": rejection.size,
        "detail": None if detail is None else str(detail)[:_DETAIL_CHARACTERS],
        "tenant": tenant,
        **source,
    }


class Rejections:
    """Notes every rejection of one receiver.

    Args:
        counters: counts rejections by cause.
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
        #: The latest rejections, for the admin address.
        self.ring: RejectionRing = RejectionRing()

    def note(self, rejection: Rejection) -> None:
        """Count a rejection, and log it unless its cause has been logged often enough."""
        fields = dict(rejection.fields)
        source = fields.get("source")
        self._counters.count_refusal(rejection.cause, None if source is None else str(source))
        self.ring.add(rejection)
        suppressed = self._throttle.admit(rejection.cause)
        if suppressed is None:
            self._left_out.set()
            return
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
        """Log the number of omitted lines, every ``SECONDS`` and at the end, until cancelled."""
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
    """Return the id that a request claims; None if there is none of a valid form."""
    for name, value in headers:
        if name == ID_HEADER:
            return value.decode("ascii") if is_valid_id(value) else None
    return None


# Found without decoding: no unverified body is decoded. Senders write the type first, so only the
# beginning is searched.
_find_type = re.compile(rb'"type"\s*+:\s*+"([\x20\x21\x23-\x5b\x5d-\x7e]{1,256})"').search
_TYPE_WITHIN: Final = 1024


def claimed_type(body: bytes) -> str | None:
    """Return the type that the beginning of an unverified body claims, or None."""
    match = _find_type(body, 0, _TYPE_WITHIN)
    return None if match is None else match[1].decode("ascii")
