"""The simulation of one seed: a world in one ``trio.run`` that executes a plan, and the auditor's
verdict."""

import functools
import hashlib
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import msgspec
import trio

from ...client.client import Client
from ...config import Secret, Settings
from ...errors import SdkError
from ...events.lifecycle import stored_state
from ...records.deliveries import DeliveryRecord, DeliveryState, key_of, signer_of
from ...runtime import Runtime
from ...webhooks import HandlerRegistry
from .audit import FINAL, Auditor, Violation
from .disk import Disk, SimulatedFiles
from .feed import TOKEN, TOKEN_VARIABLE, FeedClient
from .host import (
    Host,
    held_in_memory,
    records_of,
    secret_of,
    uncommitted_ends,
)
from .journal import Journal, Line
from .machine import Machine, SimulatedOpener
from .plan import Arrival, Fault, SimulationPlan, Trouble, World
from .scheduler import Hosts, deterministic
from .sender import Sender, body_of
from .tenants import Operator, tenant_of
from .threads import NO_DELAY, Delay, InlineExecutor
from .upstream import SimulatedUpstream
from .virtual import VirtualTime, seeded

#: After this many virtual seconds without progress, unfinished events will never finish. It is
#: longer than a lease and than the polling interval of the queue.
STUCK_SECONDS = 110.0

#: A world that still runs this many virtual seconds after the last fault is ended.
LONGEST_REST_SECONDS = 4 * 3600.0

#: This many seconds after the last commit, memory must hold no event.
SETTLE_SECONDS = 1.0

#: After a stall of this many seconds, a host may lose its leases.
LONG_STALL_SECONDS = 60.0

#: A retry may be planned this many seconds beyond the longest backoff.
RETRY_SLACK_SECONDS = 60.0

#: A stop must end within the drain timeout and this many virtual seconds.
STOP_SECONDS = 5.0

#: The seconds after which a takeover of leases has failed: no answer of a store takes longer.
TAKE_OVER_SECONDS = 10.0

_PATH = "/hooks/sdk"

#: A file system in memory, if there is one: the files of a world need no real disk. The directory
#: created in it has a random name and is private.
_MEMORY = "/dev/shm"


class Result(msgspec.Struct, frozen=True):
    """The outcome of one seed; ``seconds`` are virtual ones."""

    plan: SimulationPlan
    violations: tuple[Violation, ...]
    story: tuple[Line, ...]
    seconds: float
    acknowledged: int
    runs: int

    @property
    def digest(self) -> str:
        """A hash of the whole story; equal simulations have equal hashes."""
        text = "\n".join(map(str, self.story))
        return hashlib.sha256(text.encode()).hexdigest()


class Simulation:
    """The world of one seed.

    Args:
        plan: the events and faults.
        world: its description.
        handlers: creates the handlers of each incarnation of a host.
        check: called at the end with all records; raises AssertionError.
    """

    def __init__(
        self,
        plan: SimulationPlan,
        world: World,
        handlers: Callable[[], HandlerRegistry],
        check: Callable[[Sequence[DeliveryRecord]], object] | None = None,
    ) -> None:
        self.plan = plan
        self.world = world
        self.handlers = handlers
        self._check = check
        self.time: VirtualTime = VirtualTime(self._clock_offset)
        self.hosts: Hosts = Hosts(self.time.now, self._end_livelock)
        self.auditor: Auditor = Auditor(self.time.now)
        self.journal: Journal = Journal(self.time.now, self._machine, self._note)
        #: Writes a line of the story.
        self.record: Callable[..., None] = self.journal.record
        self.secret: Secret = Secret("whsec_c2ltdWxhdGVkIHNlY3JldCBvZiAzMiBieXRlcyEhISE=")
        self._power_fails = False
        #: Seconds by which the wall clock of the hosts is wrong.
        self.clock_step: float = 0.0
        self._found: Sequence[DeliveryRecord] = ()
        self._policies = [each.policy for each in handlers().registrations]
        rates = [each.rate_per_minute for each in self._policies]
        # The seconds between two runs of the handler with the lowest rate.
        self._slowest: float = max((60.0 / rate for rate in rates if rate), default=0.0)
        self.nursery: trio.Nursery
        self._troubles = {each.key: each.troubles for each in plan.arrivals}
        self._events = {each.key: each for each in plan.arrivals}
        self._dice = random.Random(f"{plan.seed}/threads")
        self._network_dice = random.Random(f"{plan.seed}/network")
        self._orphans: dict[str, str] = {}
        self._hang_until = 0.0
        self._network_until = 0.0
        self._upstream_until = 0.0
        self._upstream: SimulatedUpstream | None = None
        if world.upstream is not None:
            self._upstream = SimulatedUpstream(
                world.upstream(),
                random.Random(f"{plan.seed}/upstream"),
                lambda: self.time.now() < self._upstream_until,
                self.record,
            )

    def run(self) -> Result:
        """Run the world to its end, and return the result."""
        with ExitStack() as stack:
            in_memory = os.access(_MEMORY, os.W_OK)
            self.root: str = tempfile.mkdtemp(prefix="sdk-", dir=_MEMORY if in_memory else None)
            stack.callback(shutil.rmtree, self.root, ignore_errors=True)
            self.journal.root = self.root
            self.data: str = os.path.join(self.root, "data")
            if self.world.feed:
                stack.enter_context(patch.dict(os.environ, {TOKEN_VARIABLE: TOKEN}))
            stack.enter_context(seeded(self.plan.seed))
            stack.enter_context(deterministic(self.plan.seed, self.hosts))
            stack.enter_context(self.time.in_use())
            stack.enter_context(self.journal.in_use())
            dice = random.Random(f"{self.plan.seed}/disk")
            self.disk: Disk = Disk(dice, self.data, self.time.now)
            files = SimulatedFiles(self.disk, self._machine, self._touch)
            stack.callback(files.unregister)
            executor = InlineExecutor(self._delay, self._machine)
            stack.enter_context(executor.in_use())
            opener = SimulatedOpener(self.disk, self._machine, executor.pause)
            stack.enter_context(opener.in_use())
            trio.run(
                self._main,
                clock=self.time.trio_clock,
                instruments=[self.hosts],
                strict_exception_groups=True,
            )
        return Result(
            self.plan,
            tuple(self.auditor.violations),
            tuple(self.journal.lines),
            self.time.now(),
            len(self.auditor.acknowledged),
            sum(map(len, self.auditor.runs.values())),
        )

    # -- called by the seams -----------------------------------------------------------------

    def _machine(self) -> Machine | None:
        machine = self.hosts.current()
        return machine if isinstance(machine, Machine) else None

    def _touch(self, machine: object, what: str) -> None:
        if isinstance(machine, Machine):
            machine.touch(what)

    def _clock_offset(self) -> float:
        machine = self._machine()
        return 0.0 if machine is None else self.clock_step

    def _delay(self) -> Delay:
        left = self._hang_until - self.time.now()
        roll = self._dice.random()
        if left > 0:
            # The disk hangs before a job, in the middle of a commit, or after a job.
            place = int(roll * 3)
        elif roll < 0.85:
            return NO_DELAY
        else:
            left, place = roll / 50, int((roll - 0.85) * 20)
        if place == 1 and self.world.processes > 1:
            # The job holds the write lock then, and waiting for that is one step.
            place = 0
        return Delay(
            before=left if place == 0 else 0.0,
            within=left if place == 1 else None,
            after=left if place == 2 else 0.0,
        )

    def make_client(self, settings: Settings) -> Client | None:
        """Return a client of the upstream; None without one."""
        return None if self._upstream is None else Client(settings, self._upstream)

    def trouble(self, key: str, run: int) -> Trouble | None:
        """Return the trouble of an event's handler in its run number ``run``, counted from 0."""
        troubles = self._troubles.get(key, ())
        return troubles[run] if run < len(troubles) else None

    def _note(self, event: str, fields: dict[str, Any], host: str) -> None:
        """Note an event of the runtime's log."""
        if event in ("webhook.handled", "webhook.parked"):
            source = fields.get("source")
            key = key_of(str(fields["webhook_id"]), source and signer_of(source))
            if event == "webhook.handled":
                self.auditor.handled(key, host)
            else:
                self.auditor.parked.add(key)
        elif event in ("server.application_failed", "admin.feed_failed"):
            self.auditor.find("failed", f"{event}: a request ended with an exception of the server")

    def _body_of(self, arrival: Arrival) -> bytes:
        return body_of(arrival, self.world.sources)

    # -- the course of the world -------------------------------------------------------------

    async def _main(self) -> None:
        count = self.world.processes
        names = ["host"] if count == 1 else [f"host{place + 1}" for place in range(count)]
        self.members: list[Host] = [Host(self, name, place) for place, name in enumerate(names, 1)]
        self.path = _PATH
        self.auditor.uncommitted = self._uncommitted
        self._operator = Operator(self._runtimes, self.auditor)
        self._feed = FeedClient(self.plan.seed, self.members[0], self.auditor, self.record)
        self.auditor.events = self._events
        self.auditor.tenant_of = tenant_of
        self.auditor.changed_at = functools.cache(
            lambda key: stored_state(self._body_of(self._events[key])).changed_at
        )
        self.senders: dict[str | None, Sender] = {
            source: Sender(
                self.plan.seed,
                self.secret if source is None else secret_of(source),
                _PATH if source is None else f"/hooks/{source}",
                self._body_of,
                self._dial,
                self.record,
                self.auditor.acknowledge,
            )
            for source in (None, *self.world.sources)
        }
        async with trio.open_nursery() as self.nursery:
            for member in self.members:
                self.nursery.start_soon(member.run)
            longest = LONGEST_REST_SECONDS + self._slowest * len(self.plan.arrivals)
            with trio.move_on_after(longest + self.plan.end) as self._limit:
                await self._operator.add(self.world.tenants)
                async with trio.open_nursery() as clients:
                    if self.world.feed:
                        clients.start_soon(self._feed.run)
                    await self._unfold()
                    await self._rest()
                    await self._judge()
                    clients.cancel_scope.cancel()
                await self._stop()
            if self._limit.cancelled_caught and not self.auditor.violations:
                self.auditor.find("endless", "unfinished work remains")
            for member in self.members:
                member.discard()
            if self._limit.cancelled_caught:
                self.nursery.cancel_scope.cancel()
        if self._check is not None:
            try:
                self._check(self._found)
            except AssertionError as error:
                self.auditor.find("check", str(error) or repr(error))

    def _end_livelock(self) -> None:
        self.auditor.find("livelock", "tasks run without end while no virtual time passes")
        self._power_fails = False
        self.crash(self.members)
        self._limit.cancel()

    async def _unfold(self) -> None:
        async with trio.open_nursery() as nursery:
            for arrival in self.plan.arrivals:
                deliver = self.senders[arrival.source].deliver
                nursery.start_soon(self._at, arrival.at, deliver, arrival)
            async with trio.open_nursery() as faults:
                for fault in self.plan.faults:
                    faults.start_soon(self._at, fault.at, self._happen, fault)
            await trio.sleep_until(self.plan.end)
            for sender in self.senders.values():
                sender.calm = True
            self.record("world.calm")

    async def _at(self, at: float, function: Any, argument: Any) -> None:
        await trio.sleep_until(at)
        await function(argument)

    async def _dial(self) -> trio.SocketStream:
        listening = [member for member in self.members if member.listens]
        if not listening or self.time.now() < self._network_until:
            raise ConnectionRefusedError
        return await self._network_dice.choice(listening).dial()

    async def take_over(self, dead: str, successor: str) -> bool:
        """Release the leases of an ended process, as the supervisor of several does.

        Returns:
            Whether the ended process may have left runs behind.
        """
        self._orphans[dead] = successor
        held = await self._take_over_orphans() if len(self.members) > 1 else {}
        if held is None:
            self.nursery.start_soon(self._take_over_at_start)
            return True
        return held.get(dead, 1) > 0

    async def _take_over_orphans(self) -> dict[str, int] | None:
        """Release the leases of ended processes; count them by process. None: no one serves."""
        await trio.lowlevel.checkpoint()
        for member in self.members:
            runtime = member.runtime
            if runtime is not None and member.serves:
                held = {}
                for owner, successor in list(self._orphans.items()):
                    # The process that takes over may end meanwhile, and then never answers.
                    with trio.move_on_after(TAKE_OVER_SECONDS) as patience:
                        try:
                            held[owner] = await runtime.receiver.take_over(owner, successor)
                        except SdkError:  # the leases expire
                            break
                    if patience.cancelled_caught:
                        break
                    self._orphans.pop(owner, None)
                return held
        return None

    async def _take_over_at_start(self) -> None:
        """Release the leases of ended processes when one serves again, as a start does."""
        while not all(member.stopped for member in self.members):
            await trio.sleep(1)
            if await self._take_over_orphans() is not None:
                return

    async def _happen(self, fault: Fault) -> None:
        self.record("fault", what=str(fault))
        # From this fault only, so that the victim stays the same when other faults are removed.
        dice = random.Random(f"{self.plan.seed}/{fault.at}")
        victim = dice.choice(self.members)
        match fault.kind:
            case "kill":
                await self._crash(fault, [victim])
            case "power":
                await self._crash(fault, self.members)
            case "stall":
                name = "" if victim.machine is None else victim.machine.name
                self.auditor.stall(name, long=fault.seconds >= LONG_STALL_SECONDS)
                await victim.stall(fault.seconds)
                self.auditor.wake(name)
            case "deploy":
                victim.shut_down(restart_after=fault.seconds)
            case "hang":
                self._hang_until = max(self._hang_until, fault.end)
                self.auditor.fault(fault.end)
            case "network":
                self._network_until = max(self._network_until, fault.end)
            case "upstream":
                self._upstream_until = max(self._upstream_until, fault.end)
            case "clock":
                self._step_clock(fault.value)
                await trio.sleep(fault.seconds)
                self._step_clock(-fault.value)
            case "suspend":
                await self._operator.suspend(int(fault.value), fault.seconds)
            case "pause":
                await self._operator.pause(fault.glob, fault.seconds)
            case "full" | "sync" | "read":
                self.auditor.fault(fault.end)
                self.disk.ends[fault.kind] = max(fault.end, self.disk.ends.get(fault.kind, 0.0))
                await trio.sleep_until(fault.end)

    def _step_clock(self, seconds: float) -> None:
        self.clock_step += seconds
        self.auditor.step_clock(seconds)

    async def _crash(self, fault: Fault, victims: Sequence[Host]) -> None:
        self._power_fails = fault.kind == "power"
        machine = victims[0].machine
        if machine is not None and fault.value:
            machine.crash_in = int(fault.value)
            with trio.move_on_after(3):
                await victims[0].ended.wait()
        self.crash(victims, restart_after=fault.seconds)

    def crash(self, victims: Sequence[Host], *, restart_after: float | None = None) -> None:
        """Crash processes; a power cut crashes all of them and loses unsynced writes."""
        if self._power_fails:
            victims = self.members
        machines = [
            machine for member in victims if (machine := member.crash(restart_after)) is not None
        ]

        def finish() -> None:
            for machine in machines:
                machine.release()
            if self._power_fails:
                self.record("disk.lost", blocks=self.disk.cut_power())
            for machine in machines:
                machine.gone.set()

        if machines:
            self.hosts.freeze(machines, finish)

    # -- at rest -----------------------------------------------------------------------------

    async def _rest(self) -> None:
        """Wait until no work is left; without progress for long enough, work never ends."""
        progress: object = None
        since = self.time.now()
        due = 0.0
        while True:
            await trio.sleep(2)
            records = await self._records()
            if self.world.tenants and records is not None:
                await self._operator.replay(records)
            final = FINAL - {DeliveryState.PARKED} if self.world.tenants else FINAL
            open_ = [] if records is None else [one for one in records if one.state not in final]
            if records is not None and not open_:
                return
            seen = records is not None and [(one.key, one.state, one.attempts) for one in open_]
            if seen != progress or self.auditor.is_running:
                progress, since = seen, self.time.now()
                due = min((one.next_attempt_at or 0.0 for one in open_), default=0.0)
            waits = max(0.0, due - self.time.wall())
            if waits > self._longest_wait():
                self.auditor.find("late_retry", f"a retry is planned {waits:.0f} s ahead")
                return
            if self.time.now() - since > STUCK_SECONDS + waits + self._slowest:
                return

    def _runtimes(self) -> list[Runtime]:
        """Return the runtimes that serve."""
        return [
            member.runtime
            for member in self.members
            if member.serves and member.runtime is not None
        ]

    def _runtime_of(self, machine: str) -> Runtime | None:
        """Return the runtime of an incarnation that has not ended."""
        for member in self.members:
            if member.machine is not None and member.machine.name == machine:
                return member.runtime
        return None

    def _uncommitted(self, machine: str) -> set[str]:
        runtime = self._runtime_of(machine)
        return set() if runtime is None else uncommitted_ends(runtime)

    def _longest_wait(self) -> float:
        caps = [each.settings.webhooks.queue.retry_cap_seconds for each in self._runtimes()]
        caps += [each.retry.cap for each in self._policies if each.retry is not None]
        return max(caps, default=0.0) + RETRY_SLACK_SECONDS

    async def _records(self) -> list[DeliveryRecord] | None:
        """Return all that the store has; None while it does not answer."""
        for runtime in self._runtimes():
            try:
                return await records_of(runtime.receiver.store)
            except SdkError:  # treated like a host that is down
                break
        await trio.lowlevel.checkpoint()
        return None

    async def _judge(self) -> None:
        records = await self._records()
        if records is None:
            self.auditor.find("unready", "the host does not serve although nothing is wrong")
            return
        self._found = records
        self.auditor.workers = sum(
            each.settings.webhooks.queue.workers for each in self._runtimes()
        )
        self.auditor.judge(
            records,
            dead_is_failure=self.world.dead_is_failure,
            parked_is_final=not self.world.tenants,
        )
        if self.world.feed:
            await self._feed.judge(records)
        await trio.sleep(SETTLE_SECONDS)
        for runtime in self._runtimes():
            if runtime.unfinished or runtime.queue_depth:
                self.auditor.find("leak", f"{runtime.unfinished} events stay in memory at rest")
            if held := held_in_memory(runtime):
                self.auditor.find("leak", f"the lease of {held[0]} is held although nothing runs")

    async def _stop(self) -> None:
        limit = STOP_SECONDS
        for runtime in self._runtimes():
            drain = runtime.settings.webhooks.graceful_drain_timeout_seconds
            limit = max(limit, drain + STOP_SECONDS)
        for member in self.members:
            member.shut_down()
        with trio.move_on_after(limit) as patience:
            for member in self.members:
                await member.ended.wait()
        if patience.cancelled_caught:
            self.auditor.find("drain", f"the stop takes longer than {limit:g} s")
            for member in self.members:
                if member.runtime is not None:
                    member.runtime.force()
