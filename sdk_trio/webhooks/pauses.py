"""Pauses of events by type, and the limits that a claim of events obeys.

A pause is a row of the store. Each process reads the active ones every :data:`POLL_SECONDS`, so
that all hosts obey within a second. Events of a paused type are stored and answered 200, and wait
in the store: the claim of due events passes over them, and no attempt is used.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping

import trio

from ..base.clock import wall
from ..base.logs import get_logger
from ..base.telemetry import Check, Sample
from ..errors import StoreUnavailableError
from ..records.deliveries import source_of_signer
from ..records.policies import (
    ClaimLimits,
    EventPause,
    GroupLimit,
    handler_group,
    pause_group,
    resume_options,
    split_glob,
)
from ..storage.ports import Inbox
from .bound import BoundHandlers
from .recording import STORE_RETRY_SECONDS
from .routes import OUR_OWN

_log = get_logger("webhooks")

#: The interval in seconds at which the pauses are read from the store.
POLL_SECONDS = 0.75

NOTHING_PAUSED = Check("pauses", True, "nothing is paused")

#: The most pauses that the check names.
_NAMED = 5


class Pauses:
    """The active pauses, as this process knows them, and the limits of its handlers.

    Args:
        inbox: the open store, which keeps the pauses.
        handlers: the handlers, whose policies limit their events.
        clock: returns Unix seconds.
    """

    def __init__(
        self, inbox: Inbox, handlers: BoundHandlers, *, clock: Callable[[], float] = wall
    ) -> None:
        self._inbox = inbox
        self._handlers = handlers
        self._clock = clock
        #: Called when a pause has begun or ended.
        self.on_change: Callable[[], None] = lambda: None
        # By the group of each pause: its source, and the pattern of its types.
        self._globs: dict[str, tuple[str | None, re.Pattern[str]]] = {}
        self._groups: Mapping[str, GroupLimit] = {
            handler_group(handler.group): GroupLimit(
                handler.policy.concurrency,
                handler.policy.rate_per_minute,
                handler.policy.coalesce,
            )
            for handler in handlers
            if handler.limited
        }
        self._reads_bodies = any(each.route.conditions for each in handlers.routed)
        #: The active pauses, the oldest first.
        self.active: tuple[EventPause, ...] = ()

    def holds(self, event_type: str, signer: str = "") -> bool:
        """Return whether events of this type by this signer are paused."""
        return self._group_of_pause(event_type, source_of_signer(signer)) is not None

    def _group_of_pause(self, event_type: str, source: str | None) -> str | None:
        if source is None and event_type.startswith(OUR_OWN):
            return None
        for group, (paused, pattern) in self._globs.items():
            if paused == source and pattern.match(event_type) is not None:
                return group
        return None

    def limits(self, *, free_workers: int) -> ClaimLimits | None:
        """Return the limits that a claim obeys; None without pauses and limited handlers.

        ``free_workers`` is how many workers are free.
        """
        if not self.active and not self._groups:
            return None
        return ClaimLimits(
            self._group_of,
            self._groups,
            frozenset(self._globs),
            max(0, free_workers),
            self._reads_bodies,
        )

    def _group_of(self, event_type: str, raw: bytes, signer: str) -> str | None:
        paused = self._group_of_pause(event_type, source_of_signer(signer))
        if paused is not None:
            return paused
        handler = self._handlers.find(event_type, raw, signer)
        if handler is None or not handler.limited:
            return None
        return handler_group(handler.group)

    # -- reading -----------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read the pauses until cancelled; report the start once they are known.

        Raises:
            StoreUnavailableError: only at the start; later it is logged and tried again.
        """
        await self.poll()
        task_status.started()
        while True:
            await trio.sleep(POLL_SECONDS)
            try:
                await self.poll()
            except StoreUnavailableError as error:
                _log.store_unavailable(error, retry_in=STORE_RETRY_SECONDS)

    async def poll(self) -> None:
        """Read the pauses once.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        active = tuple(await self._inbox.pauses(now=self._clock()))
        before, self.active = self.active, active
        if active == before:
            return
        self._globs = {}
        for pause in active:
            source, types = split_glob(pause.glob)
            pattern = re.compile(fnmatch.translate(types))
            self._globs[pause_group(pause.glob)] = source, pattern
        for pause in active:
            if pause not in before:
                _log.warning(
                    "webhook.paused",
                    **_names_of(pause),
                    by=pause.actor,
                    reason=pause.reason,
                    until=pause.until,
                    hint="events of these types are stored and wait; let them run with: events "
                    f"resume {resume_options(pause.glob)}",
                )
        for pause in before:
            if pause.glob not in {each.glob for each in active}:
                _log.info("webhook.resumed", **_names_of(pause))
        self.on_change()

    # -- figures -----------------------------------------------------------------------------

    def check(self) -> Check:
        """Return whether events are paused, and since when; never unready."""
        if not self.active:
            return NOTHING_PAUSED
        named = "; ".join(map(str, self.active[:_NAMED]))
        more = f"; and {len(self.active) - _NAMED} more" if len(self.active) > _NAMED else ""
        return Check("pauses", True, f"{named}{more}", degraded=True)

    def samples(self) -> tuple[Sample, ...]:
        """Return the metrics of pauses and policies."""
        now = self._clock()
        oldest = max((now - pause.since for pause in self.active), default=0.0)
        limits = [
            Sample("sdk_handler_policy", (("handler", handler.group), ("policy", name)), value)
            for handler in self._handlers
            for name, value in (
                ("max_attempts", handler.policy.max_attempts),
                ("timeout", handler.policy.timeout),
                ("concurrency", handler.policy.concurrency),
                ("rate_per_minute", handler.policy.rate_per_minute),
                ("coalesce", 1 if handler.policy.coalesce else None),
            )
            if value is not None
        ]
        return (
            Sample("sdk_pauses", (), len(self.active)),
            Sample("sdk_pause_seconds", (), max(0.0, oldest)),
            *limits,
        )


def _names_of(pause: EventPause) -> dict[str, str]:
    source, types = split_glob(pause.glob)
    return {"types": types} if source is None else {"types": types, "source": source}
