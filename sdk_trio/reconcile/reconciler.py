"""Reconciliation: finds deliveries that never arrived, and requests them again.

A redelivery arrives like any other delivery and passes every check of the receiver. The decisions
are in ``plan.py``. This module reads the upstream's lists and stores the checkpoint.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import trio

from ..base.clock import wall
from ..base.logs import get_logger
from ..config import Settings
from ..errors import SdkError, StoreUnavailableError
from ..storage.ports import Inbox
from .plan import (
    CHECKPOINT_NAME,
    OVERLAP_SECONDS,
    Action,
    Checkpoint,
    ReadEndpoint,
    Sighting,
    Window,
    advanced,
    choose_endpoints,
    decide,
    merge,
    read_sighting,
    windows,
    with_asked,
    without,
)

_log = get_logger("runtime")

#: Time between two requests for a redelivery, in seconds. 60 a minute are below the rate limit of
#: every known upstream, with a reserve for the application's own calls.
ASK_SECONDS = 1.0

#: Time for a cancelled pass to save its checkpoint, in seconds.
SAVE_SECONDS = 5.0

#: Time for requested events to arrive before the state is compared, in seconds.
ARRIVAL_SECONDS = 120.0

#: The checkpoint is saved after so many requests. A crash may repeat as many, which is harmless:
#: the inbox recognises a duplicate.
SAVE_EVERY = 100


@attrs.frozen
class ReconcileReport:
    """The result of one pass.

    ``asked`` is the number of events that this pass requested. ``waiting`` events were requested
    earlier and have not arrived; ``lost`` ones can no longer be delivered. Up to ``until`` (Unix
    seconds) no event of the upstream's list is missing.
    """

    asked: int
    waiting: int
    lost: int
    until: float


@attrs.frozen
class Survey:
    """The missing events, the oldest first, and the ids of disabled endpoints.

    Events that the upstream skipped while an endpoint was disabled are not in its list;
    ``catch_up.py`` makes these from the state of its records.
    """

    missing: list[Sighting]
    disabled: tuple[str, ...]


class Upstream(Protocol):
    """Reads the upstream's deliveries; implemented by ``client.client.UpstreamDeliveries``.

    Every method raises ``CallError`` if the call fails.
    """

    async def endpoints(self) -> list[Any]:
        """Return every webhook endpoint, as its JSON object."""
        ...

    async def read(
        self,
        endpoint_ids: Sequence[str],
        query: Mapping[str, str],
        visit: Callable[[list[Any]], Awaitable[None]],
    ) -> None:
        """Await ``visit`` with each page of the deliveries to these endpoints, as JSON objects."""
        ...

    async def redeliver(self, webhook_id: str) -> bool:
        """Request another delivery of an event; return whether the upstream accepted."""
        ...


class Reconciler:
    """Compares the upstream's list of deliveries with the inbox.

    Args:
        upstream: calls the upstream, through an open client.
        inbox: the store of deliveries and of the checkpoint.
        settings: ``Sdk:Webhooks:Reconciliation`` applies.
        clock: returns Unix seconds.
        ask_seconds: the time between two requests for a redelivery.
        term: writes are valid only while this host leads in that term; None: the only host.
    """

    def __init__(
        self,
        upstream: Upstream,
        inbox: Inbox,
        settings: Settings,
        *,
        clock: Callable[[], float] = wall,
        ask_seconds: float = ASK_SECONDS,
        term: int | None = None,
    ) -> None:
        self._term = term
        options = settings.webhooks.reconciliation
        self._upstream = upstream
        self._inbox = inbox
        self._clock = clock
        self._ask_seconds = ask_seconds
        self._lookback = options.max_lookback_hours * 3600.0
        self._interval = options.interval_minutes * 60.0
        self._configured = options.endpoint_ids
        # Without configured ids, an endpoint is found by the path of its URL, since the host may be
        # a proxy's.
        self._path = settings.webhooks.path
        # Two passes at a time would request the same events.
        self._passing = trio.Lock()

    async def run(self) -> None:
        """Make a pass now and one each interval, until cancelled.

        A pass that fails is logged and not repeated before the next interval.
        """
        while True:
            try:
                await self.reconcile()
            except SdkError as error:
                # Not sooner: the next pass finds the same events in the upstream's list.
                _log.warning("reconciliation.failed", error=str(error), retry_in=self._interval)
            await trio.sleep(self._interval)

    async def reconcile(self) -> ReconcileReport | None:
        """Make one pass from the checkpoint.

        Returns:
            The result; None if every endpoint for this receiver is disabled.

        Raises:
            CallError: a call failed; the requests made so far are saved.
            UnknownEndpointError: the endpoint for this receiver is unknown.
            StoreUnavailableError: from the inbox.

        Cancellation saves the checkpoint, within :data:`SAVE_SECONDS`, and the next pass continues
        from there.
        """
        async with self._passing:
            return await self._reconcile()

    async def reconcile_and_wait(self) -> None:
        """Make one pass and wait, up to :data:`ARRIVAL_SECONDS`, for what it requested.

        Raises:
            As :meth:`reconcile`.
        """
        await self.reconcile()
        with trio.move_on_after(ARRIVAL_SECONDS):
            while True:
                asked = list((await self._load(self._clock())).asked)
                if len(await self._inbox.known(asked)) == len(asked):
                    return
                await trio.sleep(self._ask_seconds or 0.1)
        _log.warning("reconciliation.not_arrived", events=len(asked))

    async def _reconcile(self) -> ReconcileReport | None:
        endpoints = await self._enabled_endpoints()
        if not endpoints:
            return None
        now = self._clock()
        progress = _Progress(await self._load(now), now)
        for window in windows(self._start(progress.checkpoint, now), now):
            # Window by window, so that an interrupted pass keeps its progress.
            await self._reconcile_window(window, endpoints, progress)
        self._forget_abandoned(progress, now)
        await self._save(progress.checkpoint)
        report = progress.report()
        _log.info("reconciliation.finished", **attrs.asdict(report))
        return report

    async def survey(self, since: float) -> Survey:
        """Find every listed event since a time (Unix seconds) that has no record in the inbox.

        The checkpoint is ignored, so the result includes events that another receiver has
        acknowledged. ``since`` must be within the time for which the inbox keeps ids: older events
        would all seem to be missing.

        Raises:
            As :meth:`reconcile`.
        """
        chosen = await self._endpoints()
        enabled = tuple(endpoint for endpoint in chosen if endpoint.enabled)
        sightings: list[Sighting] = []
        for window in windows(since, self._clock()) if enabled else ():
            sightings += await self._missing(window, enabled)
        disabled = tuple(endpoint.id for endpoint in chosen if not endpoint.enabled)
        return Survey(merge(sightings), disabled)

    async def request_redelivery(self, sighting: Sighting) -> bool:
        """Request an event again from the upstream; return whether it accepted.

        It takes at least ``ask_seconds``, which limits the rate of calls in a loop. After a
        cancellation the request may have been sent.

        Raises:
            CallError: the call failed.
        """
        # A second delivery is harmless: the inbox recognises the duplicate.
        agreed = await self._upstream.redeliver(sighting.webhook_id)
        if agreed:
            _log.info("reconciliation.asked", webhook_id=sighting.webhook_id, type=sighting.type)
        await trio.sleep(self._ask_seconds)
        return agreed

    def _start(self, checkpoint: Checkpoint, now: float) -> float:
        # With an overlap, because the upstream may list a delivery some time after it was made.
        start, earliest = checkpoint.until - OVERLAP_SECONDS, now - self._lookback
        if checkpoint.until < earliest - OVERLAP_SECONDS:
            _log.warning(
                "reconciliation.shortened",
                hours=round((earliest - checkpoint.until) / 3600, 1),
                hint="deliveries before MaxLookbackHours are no longer checked",
            )
        return max(start, earliest)

    async def _reconcile_window(
        self, window: Window, endpoints: tuple[ReadEndpoint, ...], progress: "_Progress"
    ) -> None:
        """Request the missing events of one window, then advance the checkpoint."""
        missing = await self._missing(window, endpoints, progress)
        unresolved: list[Sighting] = []
        try:
            for sighting in missing:
                action = decide(sighting, progress.checkpoint, progress.now)
                if action is Action.ASK:
                    await self._ask_and_note(sighting, progress)
                elif action is Action.WAIT:
                    progress.waiting.add(sighting.webhook_id)
                elif action is Action.LOST:
                    progress.note_lost(sighting, "the upstream has archived it")
                if sighting.webhook_id in progress.waiting | progress.asked:
                    unresolved.append(sighting)
        except BaseException:
            # Save the requests of an interrupted pass; otherwise the next pass repeats them.
            await self._save_at_the_end(progress.checkpoint)  # noqa: ASYNC102 - it shields itself
            raise
        progress.move_over(window, unresolved)
        await self._save(progress.checkpoint)

    async def _ask_and_note(self, sighting: Sighting, progress: "_Progress") -> None:
        if not await self.request_redelivery(sighting):
            progress.note_lost(sighting, "the upstream refuses to deliver it again")
            return
        progress.note_asked(sighting, self._clock())
        if len(progress.asked) % SAVE_EVERY == 0:
            await self._save(progress.checkpoint)

    async def _missing(
        self,
        window: Window,
        endpoints: tuple[ReadEndpoint, ...],
        progress: "_Progress | None" = None,
    ) -> list[Sighting]:
        """Return the events of a window without a record in the inbox, the oldest first."""
        missing: list[Sighting] = []

        async def visit(page: list[Any]) -> None:
            sightings = [read_sighting(item) for item in page]
            # One query for each page, so that memory does not grow with the upstream's list.
            known = await self._inbox.known([sighting.webhook_id for sighting in sightings])
            if progress is not None:
                progress.checkpoint = without(progress.checkpoint, known)
            missing.extend(s for s in sightings if s.webhook_id not in known)

        await self._upstream.read([endpoint.id for endpoint in endpoints], window.query(), visit)
        return merge(missing)

    async def _endpoints(self) -> tuple[ReadEndpoint, ...]:
        """Return the endpoints for this receiver; callers leave out disabled ones.

        For a disabled endpoint the upstream would accept a request and skip the event.
        """
        listed = await self._upstream.endpoints()
        return choose_endpoints(listed, configured=self._configured, path=self._path)

    async def _enabled_endpoints(self) -> tuple[ReadEndpoint, ...]:
        """Return the enabled endpoints for this receiver, and log each disabled one."""
        chosen = await self._endpoints()
        for endpoint in chosen:
            if not endpoint.enabled:
                _log.error(
                    "reconciliation.endpoint_disabled",
                    endpoint_id=endpoint.id,
                    hint="the upstream delivers nothing to it, and keeps no record of what it "
                    "skips; enable it there. With Sdk:Webhooks:Reconciliation:ByState the events "
                    "are then made from the state of its records",
                )
        return tuple(endpoint for endpoint in chosen if endpoint.enabled)

    async def _load(self, now: float) -> Checkpoint:
        text = await self._inbox.read_checkpoint(CHECKPOINT_NAME)
        if text is not None:
            try:
                return Checkpoint.from_text(text)
            except ValueError as error:
                _log.error("reconciliation.checkpoint_unreadable", error=str(error))
        # An unreadable checkpoint costs a longer pass. Stopping would leave events missing until an
        # operator reads the log.
        return Checkpoint.first(now, self._lookback)

    async def _save(self, checkpoint: Checkpoint) -> None:
        text = checkpoint.as_text()
        await self._inbox.write_checkpoint(CHECKPOINT_NAME, text, term=self._term)

    async def _save_at_the_end(self, checkpoint: Checkpoint) -> None:
        with trio.move_on_after(SAVE_SECONDS, shield=True):
            try:
                await self._save(checkpoint)
            except StoreUnavailableError as error:
                # The next pass repeats the requests that are not saved, which is harmless.
                _log.store_unavailable(error)

    def _forget_abandoned(self, progress: "_Progress", now: float) -> None:
        """Abandon requested events that are older than the look-back time.

        No later pass finds them in the list, so they would not be requested again.
        """
        asked = progress.checkpoint.asked
        unseen = asked.keys() - progress.waiting - progress.asked
        # Otherwise the checkpoint would grow with every event that this receiver refuses.
        old = {name for name in unseen if asked[name].last < now - self._lookback}
        for webhook_id in sorted(old):
            _log.error(
                "reconciliation.abandoned", webhook_id=webhook_id, asked=asked[webhook_id].times
            )
        progress.checkpoint = without(progress.checkpoint, old)


class _Progress:
    """The progress of one pass."""

    def __init__(self, checkpoint: Checkpoint, now: float) -> None:
        self.checkpoint = checkpoint
        self.now = now
        self.asked: set[str] = set()
        self.waiting: set[str] = set()
        self.lost: set[str] = set()
        self._whole = True

    def note_asked(self, sighting: Sighting, now: float) -> None:
        self.asked.add(sighting.webhook_id)
        self.checkpoint = with_asked(self.checkpoint, sighting.webhook_id, now)

    def note_lost(self, sighting: Sighting, reason: str) -> None:
        self.checkpoint = without(self.checkpoint, (sighting.webhook_id,))
        if sighting.webhook_id not in self.lost:
            self.lost.add(sighting.webhook_id)
            _log.error(
                "reconciliation.lost",
                webhook_id=sighting.webhook_id,
                type=sighting.type,
                reason=reason,
            )

    def move_over(self, window: Window, unresolved: list[Sighting]) -> None:
        self.checkpoint = advanced(self.checkpoint, window, unresolved, whole=self._whole)
        self._whole = self._whole and not unresolved

    def report(self) -> ReconcileReport:
        return ReconcileReport(
            asked=len(self.asked),
            waiting=len(self.waiting - self.asked),
            lost=len(self.lost),
            until=self.checkpoint.until,
        )
