"""The auditor of a simulation: it compares the promises with the actual events.

It trusts only two things of the runtime: that an outcome was recorded (``webhook.handled``), and
the final content of the store.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import msgspec

from ...events.coalescing import SKEW_SECONDS
from ...records.deliveries import DeliveryRecord, DeliveryState
from ...records.policies import UNLIMITED, Policy, burst_of, split_glob
from ...storage.sqlite_inbox import LINGER_SECONDS
from .plan import Arrival

#: States in which nothing is left to do.
FINAL = {DeliveryState.DONE, DeliveryState.DEAD, DeliveryState.PARKED}


#: The seconds beyond its limit that a handler may take, since limits are checked periodically.
LIMIT_SLACK_SECONDS = 2.0

#: The seconds after a fault of the disk within which a process may still end because of it.
AFTERMATH_SECONDS = 30.0


#: The seconds after a suspension within which a run may still begin: a process learns of it within
#: the documented half second, and a run may be about to begin.
SUSPENSION_SECONDS = 2.0

#: The same after a pause of events, which a process learns of within a second.
PAUSE_SECONDS = 2.5

#: The seconds over which the rate of a handler is judged.
RATE_SECONDS = 60.0

#: The seconds within which an event must begin to run if nothing prevents it.
LATE_SECONDS = 20.0

#: Time after which the reported success of a queued run is committed, in seconds.
UNCOMMITTED_SECONDS = 2 * LINGER_SECONDS

#: A process that stops within this many seconds after a fault of the disk may give up outcomes, and
#: one that crashes may leave the outcomes of its last seconds unrecorded.
GIVE_UP_SECONDS = 10.0


class HandlerRun(msgspec.Struct, eq=False):
    """One run of a handler: ``result`` is None while it runs, ``done``, ``failed`` or ``cut``."""

    key: str
    machine: str
    begun: float
    place: int
    ended: float | None = None
    result: str | None = None
    #: The seconds that it may take.
    limit: float = math.inf
    #: The events that its handler's policies limit together.
    group: str = ""


class _Pause(msgspec.Struct, eq=False):
    """A pause of ``glob``: it may hold events from ``begun`` to ``ended``, and certainly from
    ``since`` to ``until``."""

    glob: str
    begun: float
    since: float = math.inf
    until: float = math.inf
    ended: float = math.inf

    def holds(self, event: Arrival) -> bool:
        source, types = split_glob(self.glob)
        return source == event.source and fnmatchcase(event.type, types)


class Violation(msgspec.Struct, frozen=True):
    """A broken promise: its kind, the virtual time at which it was found, and a description."""

    kind: str
    at: float
    text: str


class Auditor:
    """Records the promises and runs of one simulation.

    Args:
        now: returns the virtual seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._crashed_at = self._stopped_at = self._faulty_until = -math.inf
        self._faulty_since = math.inf
        # When a host was paused or resumed.
        self._paused_at = -math.inf
        self.violations: list[Violation] = []
        #: When each event was first acknowledged.
        self.acknowledged: dict[str, float] = {}
        self.runs: dict[str, list[HandlerRun]] = {}
        # When the success of an event was reported as recorded, and by which host.
        self._recorded: dict[str, tuple[float, str]] = {}
        self._down: set[str] = set()
        self._stalled: set[str] = set()
        # Hosts that may have left outcomes unrecorded: those that crashed, those that were stalled
        # for long, and those that stopped while the disk failed. Of runs that ended after the first
        # time, and began before the second one.
        self._unrecorded: dict[str, list[tuple[float, float]]] = {}
        # The start and end of each time in which a store may not have answered.
        self._store_faults: list[tuple[float, float]] = []
        # When the hosts that are stalled at present were stalled.
        self._stalled_at: dict[str, float] = {}
        self._ordered: set[str] = set()
        self._begun = 0
        #: The start and end of each fault, in seconds.
        self._disturbances: list[tuple[float, float]] = []
        #: Returns the events whose success a host has reported, and not committed yet.
        self.uncommitted: Callable[[str], Collection[str]] = lambda _machine: ()
        #: The number of workers of all processes.
        self.workers = 1
        #: The events of the plan.
        self.events: dict[str, Arrival] = {}
        #: Returns the tenant of an event.
        self.tenant_of: Callable[[Arrival], str | None] = lambda _event: None
        #: Returns when the state in an event's body changed, in Unix seconds; None: it has no time.
        self.changed_at: Callable[[str], float | None] = lambda _key: None
        self._pauses: list[_Pause] = []
        # The times at which runs of a group have begun.
        self._begins: dict[str, list[float]] = {}
        self._policies: dict[str, Policy] = {}
        self._clock_set_at = -math.inf
        # The wall clock was so wrong that states seemed to come from the future.
        self._doubts_states = False
        #: Events that were parked: they have left their lane, and wait for a replay.
        self.parked: set[str] = set()
        # The time since which each tenant is certainly suspended.
        self._suspended: dict[str, float] = {}

    def find(self, kind: str, text: str) -> None:
        """Note a violation."""
        self.violations.append(Violation(kind, self._now(), text))

    def acknowledge(self, key: str) -> None:
        """Note that a delivery was answered 200."""
        self.acknowledged.setdefault(key, self._now())

    def may_park(self, tenant: str) -> None:
        """Note that a tenant may be suspended from now on, until :meth:`reactivate`."""
        self._disturb(math.inf)

    def suspend(self, tenant: str) -> None:
        """Note that a tenant is suspended: no handler with ``run_when_suspended=False`` may
        begin."""
        self._suspended.setdefault(tenant, self._now())

    def reactivate(self, tenant: str) -> None:
        """Note that a tenant is about to be reactivated."""
        self._suspended.pop(tenant, None)

    def may_pause(self, glob: str) -> _Pause:
        """Note that a pause may hold events from now on."""
        pause = _Pause(glob, self._now())
        self._pauses.append(pause)
        return pause

    def pause(self, pause: _Pause) -> None:
        """Note that a pause is stored: no event that it holds may begin to run."""
        pause.since = self._now()

    def may_resume(self, glob: str) -> None:
        """Note that the pauses of a glob are about to end."""
        for pause in self._pauses:
            if pause.glob == glob:
                pause.until = min(pause.until, self._now())

    def resume(self, glob: str) -> None:
        """Note that the pauses of a glob have ended."""
        for pause in self._pauses:
            if pause.glob == glob:
                pause.ended = min(pause.ended, self._now())

    def step_clock(self, seconds: float) -> None:
        """Note that the wall clock was set by ``seconds``."""
        self._clock_set_at = self._now()
        self._doubts_states |= seconds <= -SKEW_SECONDS

    def _disturb(self, until: float) -> None:
        self._disturbances.append((self._now(), until))

    def crash(self, machine: str) -> None:
        """Note that a host has crashed: its runs have no end."""
        self._disturb(self._now())
        self._down.add(machine)
        self._note_unrecorded(machine)
        self._crashed_at = self._now()
        self._forget_uncommitted(machine)
        for runs in self.runs.values():
            for run in runs:
                if run.machine == machine and run.ended is None:
                    run.ended, run.result = self._now(), "cut"

    def stall(self, machine: str, *, long: bool) -> None:
        """Note that a host is paused; ``long``: for longer than a lease may last.

        Another host may then run its events, and its own runs continue when it resumes.
        """
        self._paused_at = self._stalled_at[machine] = self._now()
        self._disturb(self._now())
        if long:
            self._stalled.add(machine)
            self._note_unrecorded(machine, until=math.inf)
            self._forget_uncommitted(machine)

    def wake(self, machine: str) -> None:
        """Note that a host was resumed; after a long stall, outcomes of its runs may not count."""
        self._paused_at = self._now()
        self._disturb(self._now())
        self._store_faults.append((self._stalled_at.pop(machine, self._now()), self._now()))
        if machine in self._stalled:
            (since, _) = self._unrecorded[machine].pop()
            self._unrecorded[machine].append((since, self._now() + GIVE_UP_SECONDS))
            self._crashed_at = self._now()

    def fault(self, until: float) -> None:
        """Note that the disk fails until ``until``."""
        if self._faulty_until + AFTERMATH_SECONDS < self._now():
            self._faulty_since = self._now()
        self._faulty_until = max(self._faulty_until, until)
        self._store_faults.append((self._now(), until))
        self._disturb(until)

    def stop(self, machine: str) -> None:
        """Note that a process has stopped, as requested or by an error."""
        now = self._stopped_at = self._now()
        if now <= self._faulty_until + GIVE_UP_SECONDS:
            self._note_unrecorded(machine)
        if now <= self._faulty_until:
            since = min(now, self._faulty_since) - UNCOMMITTED_SECONDS
            self._forget([
                key for key, (at, by) in self._recorded.items() if by == machine and at >= since
            ])  # fmt: skip
        self._disturb(now)

    def _forget_uncommitted(self, machine: str) -> None:
        self._forget(self.uncommitted(machine))

    def _forget(self, keys: Iterable[str]) -> None:
        """Forget successes that are not committed: their events may run again."""
        for key in keys:
            self._recorded.pop(key, None)

    def fail(self, error: str) -> None:
        """Note that a process has ended with an error, which only a failing disk justifies."""
        if self._faulty_until + AFTERMATH_SECONDS < self._now():
            self.find("failed", f"a process has ended: {error}")

    def _may_repeat(self, run: HandlerRun) -> bool:
        """Return whether another run may begin after one that has succeeded.

        The outcome of that run was not reported as recorded, and only its own host could record it.
        """
        return any(
            run.ended is not None and run.ended >= since and run.begun <= until
            for since, until in self._unrecorded.get(run.machine, ())
        )

    def _note_unrecorded(self, machine: str, *, until: float | None = None) -> None:
        """Note that the last successes of a host may not be recorded: those of the last seconds,
        and those since the store has not answered. ``until``: now, unless it is stalled."""
        now = self._now()
        since = now - GIVE_UP_SECONDS
        stalls = [(at, now) for at in self._stalled_at.values()]
        for at, end in sorted(self._store_faults + stalls, reverse=True):
            if end >= since:
                since = min(since, at - GIVE_UP_SECONDS)
        window = (since, now if until is None else until)
        self._unrecorded.setdefault(machine, []).append(window)

    def begin(
        self,
        key: str,
        machine: str,
        limit: float,
        *,
        ordered: bool,
        tenant: str | None = None,
        waits_for_tenant: bool = False,
        group: str = "",
        policy: Policy = UNLIMITED,
    ) -> HandlerRun:
        """Note that a handler is called, and judge whether it may be.

        Args:
            key: the event's.
            machine: the host that calls it.
            limit: the seconds that it may take.
            ordered: it was registered with ``ordered=True``.
            tenant: the tenant that is passed to the handler.
            waits_for_tenant: it was registered with ``run_when_suspended=False``.
            group: the events that the handler's policies limit together.
            policy: those policies.
        """
        if ordered:
            self._ordered.add(key)
        event = self.events.get(key)
        expected = None if event is None else self.tenant_of(event)
        if tenant != expected:
            self.find("tenant", f"{key} of {expected} runs as an event of {tenant}")
        since = self._suspended.get(tenant or "") if waits_for_tenant else None
        if since is not None and self._now() > since + SUSPENSION_SECONDS and not self._paused:
            self.find("suspended", f"{key} runs, although {tenant} is suspended since {since:.3f}")
        self._policies[group] = policy
        if event is not None:
            self._judge_pauses(event)
            if policy.coalesce:
                self._judge_state(event)
        self._judge_limits(group, policy)
        runs = self.runs.setdefault(key, [])
        self._begun += 1
        run = HandlerRun(key, machine, self._now(), self._begun, limit=limit, group=group)
        if (recorded := self._recorded.get(key)) is not None:
            self.find(
                "ran_again",
                f"{key} runs again, although it was recorded as done at {recorded[0]:.3f}",
            )
        for earlier in runs:
            if earlier.ended is None and earlier.machine in self._stalled:
                continue
            if earlier.ended is None:
                self.find("two_runs", f"{key} runs twice at once, since {earlier.begun:.3f}")
            elif earlier.result == "done" and not self._may_repeat(earlier):
                self.find(
                    "ran_again",
                    f"{key} runs again, although it had succeeded at {earlier.ended:.3f} and "
                    "nothing has prevented its record",
                )
        runs.append(run)
        return run

    def _judge_pauses(self, event: Arrival) -> None:
        for pause in self._pauses:
            certain = pause.since + PAUSE_SECONDS < self._now() <= pause.until
            if certain and pause.holds(event) and not self._paused:
                self.find(
                    "paused",
                    f"{event.key} runs, although {pause.glob} is paused since {pause.since:.3f}",
                )

    def _judge_limits(self, group: str, policy: Policy) -> None:
        now = self._now()
        if policy.concurrency is not None:
            running = [
                run.key
                for runs in self.runs.values()
                for run in runs
                if run.group == group and run.ended is None and run.machine not in self._stalled
            ]
            if len(running) >= policy.concurrency:
                self.find("too_many", f"{group} runs another event beside {', '.join(running)}")
        if policy.rate_per_minute is not None:
            begins = self._begins.setdefault(group, [])
            begins.append(now)
            late = max(self._paused_at, self._faulty_until, self._crashed_at, self._clock_set_at)
            recent = [at for at in begins if at > now - RATE_SECONDS]
            # One event may wait for a worker with its token.
            most = policy.rate_per_minute + burst_of(policy.rate_per_minute) + 1
            # Otherwise runs whose tokens are older may have begun late.
            if len(recent) > most and late < now - RATE_SECONDS:
                self.find("too_often", f"{group} began {len(recent)} runs within a minute")

    def _judge_state(self, event: Arrival) -> None:
        changed_at = self.changed_at(event.key)
        if changed_at is None or self._doubts_states or event.key in self.parked:
            return
        for key in self._recorded:
            other = self.events[key]
            if self._may_replace(other, event) and (self.changed_at(key) or 0.0) > changed_at:
                self.find(
                    "stale", f"{event.key} runs, although {key} has a newer state and is done"
                )

    def _may_replace(self, other: Arrival, event: Arrival) -> bool:
        """Return whether one state supersedes the other if it is newer."""
        return (other.type, other.subject, other.source, other.tenant) == (
            event.type, event.subject, event.source, event.tenant
        )  # fmt: skip

    def end(self, run: HandlerRun, result: str) -> None:
        """Note how a run has ended."""
        if run.machine in self._down:
            return
        now = self._now()
        run.ended, run.result = now, result
        took = now - run.begun
        disturbed_at = max(self._crashed_at, self._faulty_until, self._paused_at)
        # The queue runs inline events without this limit if they were parked or paused, or if a
        # process has ended since they arrived: it may have left a claim behind.
        is_first = run is self.runs[run.key][0] and run.key not in self.parked
        is_first = is_first and not self._held_until(run.key, 0.0)
        ended_at = max(self._crashed_at, self._stopped_at)
        is_first = is_first and self.events[run.key].at > ended_at
        if is_first and took > run.limit + LIMIT_SLACK_SECONDS and disturbed_at < run.begun:
            self.find("too_long", f"the handler of {run.key} took {took:.1f} s")

    @property
    def _paused(self) -> bool:
        """Whether a process may have missed a change that was made in time."""
        last = max(self._paused_at, self._faulty_until, self._crashed_at, self._stopped_at)
        return self._now() - last < SUSPENSION_SECONDS

    @property
    def is_running(self) -> bool:
        """Whether a handler runs."""
        return any(run.ended is None for runs in self.runs.values() for run in runs)

    def handled(self, key: str, machine: str) -> None:
        """Note that the runtime has recorded an event as done."""
        # A run that has lost its lease also logs this event, but nothing is recorded.
        if machine not in self._stalled:
            self._recorded.setdefault(key, (self._now(), machine))

    def _is_done_without_success(
        self, record: DeliveryRecord, held: Mapping[str, DeliveryRecord]
    ) -> bool:
        """Return whether its handler has discarded an event, or a newer one superseded it."""
        reason = record.last_error or ""
        if reason.startswith("discarded: "):
            return bool(self.runs.get(record.key))
        newer = held.get(reason.removeprefix("superseded by "))
        if newer is None or not self._may_replace(self.events[newer.key], self.events[record.key]):
            return False
        arrived_later = newer.sequence > record.sequence
        old, new = self.changed_at(record.key), self.changed_at(newer.key)
        if old is None or new is None:
            return arrived_later
        by_state = (new, newer.sequence) > (old, record.sequence)
        return by_state or (self._doubts_states and arrived_later)

    # -- at rest -----------------------------------------------------------------------------

    def judge(
        self,
        records: Iterable[DeliveryRecord],
        *,
        dead_is_failure: bool,
        parked_is_final: bool = True,
    ) -> None:
        """Judge the content of the store when everything has ended."""
        held = {record.key: record for record in records}
        for key in self.acknowledged:
            if key not in held:
                self.find("lost", f"{key} was acknowledged, and the store does not have it")
        for key, record in held.items():
            waits = record.state is DeliveryState.PARKED and not parked_is_final
            if record.state not in FINAL or waits:
                self.find("unfinished", f"{key} stays {record.state.value} without end")
            elif record.state is DeliveryState.DONE and not (
                self._has_succeeded(key) or self._is_done_without_success(record, held)
            ):
                self.find("not_run", f"{key} is done, and no run of it has succeeded")
            elif record.state is DeliveryState.DEAD and dead_is_failure:
                self.find("dead", f"{key} ended dead: {record.last_error}")
        lanes: dict[tuple[str | None, str], list[DeliveryRecord]] = {}
        for record in sorted(held.values(), key=lambda each: each.sequence):
            if record.key in self.parked:
                continue
            if record.key in self._ordered and record.subject is not None:
                owner = record.tenant_id if record.source is None else record.signer
                lanes.setdefault((owner, record.subject), []).append(record)
            else:
                self._judge_delay(record.key, ())
        for lane in lanes.values():
            self._judge_order(lane)
            for place, record in enumerate(lane):
                self._judge_delay(record.key, lane[:place])

    def _judge_delay(self, key: str, earlier: Sequence[DeliveryRecord]) -> None:
        """Require that an event began to run in time, counted from the end of those it waits
        for."""
        runs = self.runs.get(key)
        since = self.acknowledged.get(key)
        if not runs or since is None:
            return
        policy = self._policies[runs[0].group]
        if policy.concurrency is not None or policy.rate_per_minute is not None:
            return
        before = [run for record in earlier for run in self.runs.get(record.key, ())]
        begun = runs[0].begun
        since = max([since, *(run.ended or run.begun for run in before)])
        since = max(since, min(begun, self._held_until(key, since)))
        if begun - since <= LATE_SECONDS:
            return
        wait = begun - since
        if any(at <= begun and until >= since - LATE_SECONDS for at, until in self._disturbances):
            return
        busy = sum(
            max(0.0, min(begun, run.ended or begun) - max(since, run.begun))
            for others in self.runs.values()
            for run in others
        )
        # Otherwise all workers were busy except for this many seconds.
        if busy < (wait - LATE_SECONDS) * self.workers:
            self.find("late", f"{key} began to run {wait:.1f} s after it could have")

    def _held_until(self, key: str, since: float) -> float:
        """Return the end of the last pause of an event that was in force after ``since``."""
        event = self.events[key]
        ends = (each.ended for each in self._pauses if each.holds(event) and each.ended > since)
        return max(ends, default=0.0)

    def _has_succeeded(self, key: str) -> bool:
        # A run that was interrupted by a crash may have recorded its outcome before.
        return any(run.result in ("done", "cut") for run in self.runs.get(key, ()))

    def _judge_order(self, lane: Sequence[DeliveryRecord]) -> None:
        last: HandlerRun | None = None
        for record in lane:
            runs = self.runs.get(record.key, [])
            if (
                runs
                and last is not None
                and runs[0].place < last.place
                # Otherwise it was in no lane yet: the store had it parked, or not at all.
                and self.acknowledged.get(last.key, math.inf) <= runs[0].begun
            ):
                self.find(
                    "order",
                    f"{record.key} ran at {runs[0].begun:.3f}, before {last.key} of the same "
                    f"subject had ended, which arrived earlier and ran at {last.begun:.3f}",
                )
            if runs and (last is None or runs[-1].place > last.place):
                last = runs[-1]
