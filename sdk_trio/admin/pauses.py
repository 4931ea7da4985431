"""The calls of the API that pause and resume events by their type."""

from collections.abc import Callable
from typing import Any

import msgspec
import trio

from ..base.clock import wall
from ..config.fields import Form, check_form
from ..records.policies import EventPause, glob_of, glob_problem, split_glob
from .api import USUAL_ACTOR, Actions, Reply, document, problem
from .query import LONGEST_REASON, BadQueryError, check_line, parse_moment, parse_request
from .status import RunningProgram


class PauseRequest(msgspec.Struct, frozen=True):
    """The request of ``POST /api/pause``: the types, until when, why, and who wants it.

    ``source`` is the source of the events; without it, they are the upstream's.
    """

    type: str
    source: str | None = None
    until: str | None = None
    reason: str | None = None
    actor: str | None = None


class ResumeRequest(msgspec.Struct, frozen=True):
    """The request of ``POST /api/resume``: the glob of the pause, its source, and who wants it."""

    type: str
    source: str | None = None
    actor: str | None = None


class PauseAnswerer:
    """Lists, begins and ends pauses in the store.

    Args:
        observed: the program.
        actions: records the ordered actions.
        clock: returns Unix seconds.
    """

    def __init__(
        self, observed: RunningProgram, actions: Actions, *, clock: Callable[[], float] = wall
    ) -> None:
        self._observed = observed
        self._actions = actions
        self._clock = clock

    async def active(self) -> Reply:
        """Return an array of the pauses that are in force, the oldest first."""
        return document(200, await self._shown_active())

    async def pause(self, body: bytes, address: str | None) -> Reply:
        """Pause the events of a glob; return all pauses.

        Answer 404 if the source has no settings, as its pause would hold nothing, and 409 if
        ``until`` has passed.

        Raises:
            BadQueryError: the request is not understood.
        """
        wanted: PauseRequest = parse_request(body, PauseRequest)
        check_line("reason", wanted.reason, LONGEST_REASON)
        if (wrong := glob_problem(wanted.type)) is not None:
            raise BadQueryError(f"type: {wrong}")
        check_source(wanted.source)
        known = self._observed.source_names()
        if wanted.source is not None and wanted.source not in known:
            await trio.lowlevel.checkpoint()
            names = ", ".join(known) or "none"
            return problem(404, f"source: Sdk:Sources has no such source; it has {names}")
        given = {} if wanted.until is None else {"until": wanted.until}
        until, now = parse_moment(given, "until"), self._clock()
        if until is not None and until <= now:
            await trio.lowlevel.checkpoint()
            return problem(409, "until takes a time in the future")
        actor = wanted.actor or USUAL_ACTOR
        glob = glob_of(wanted.type, wanted.source)
        await self._inbox.pause(
            glob,
            actor=f"{actor} ({address or 'unix socket'})",
            reason=wanted.reason or "",
            until=until,
            now=now,
        )
        self._actions.note("pause", actor=actor, address=address, ids=[glob])
        return document(200, await self._shown_active())

    async def resume(self, body: bytes, address: str | None) -> Reply:
        """End the pause of a glob; return the pauses that are left, 404 if there was none.

        Raises:
            BadQueryError: the request is not understood.
        """
        wanted: ResumeRequest = parse_request(body, ResumeRequest)
        actor = wanted.actor or USUAL_ACTOR
        check_source(wanted.source)
        glob = glob_of(wanted.type, wanted.source)
        ended = await self._inbox.resume(
            glob, actor=f"{actor} ({address or 'unix socket'})", now=self._clock()
        )
        if not ended:
            return problem(404, "this type is not paused")
        self._actions.note("resume", actor=actor, address=address, ids=ended)
        return document(200, await self._shown_active())

    async def _shown_active(self) -> list[dict[str, Any]]:
        return list(map(_shown, await self._inbox.pauses(now=self._clock())))

    @property
    def _inbox(self) -> Any:
        return self._observed.stores()[0]


def _shown(pause: EventPause) -> dict[str, Any]:
    fields = {name: getattr(pause, name) for name in ("since", "until", "actor", "reason")}
    source, types = split_glob(pause.glob)
    return {"type": types, **({} if source is None else {"source": source}), **fields}


def check_source(name: str | None) -> None:
    """Raise :class:`BadQueryError` for a text that cannot be the name of a source."""
    if name is not None and check_form(Form.SLUG, name, development=False):
        raise BadQueryError("source takes the name of a source")
