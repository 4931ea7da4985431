"""Plant bugs in the runtime, one at a time, and see the simulator find each of them.

    python tests/planted_bugs.py [--seeds N] [--seconds S] [--match TEXT]

Prints a table: the bug, the first seed that shows it, the promise that was broken, and the CPU time
until then. The exit status is 1 if a bug was not found. ``--seconds`` bounds the CPU time of each.
"""

import argparse
import copy
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from unittest.mock import patch

import attrs
import trio

from sdk_trio import HandlerRegistry
from sdk_trio.admin import feed
from sdk_trio.admin.feed import Feed
from sdk_trio.base.breaker import CircuitBreaker, CircuitRefusal
from sdk_trio.errors import StoreUnavailableError
from sdk_trio.events import (
    OrderCreatedEvent,
    OrderPaidEvent,
    SubscriptionActiveEvent,
    SubscriptionCanceledEvent,
)
from sdk_trio.records.deliveries import (
    Admission,
    Admitted,
    Dead,
    Done,
    NewDelivery,
    Retry,
)
from sdk_trio.storage import commit, inbox, known_keys
from sdk_trio.storage.engines import sqlite as engine
from sdk_trio.storage.sql import admission, arrivals, leases, policies, runs
from sdk_trio.storage.sqlite_inbox import SqliteInbox
from sdk_trio.storage.unawaited import UnawaitedClaims
from sdk_trio.tenants.service import TenantCache, TenantService
from sdk_trio.testing import MockUpstream, World
from sdk_trio.testing.simulation.plan import Arrival, Fault, SimulationPlan, Trouble, make_plan
from sdk_trio.testing.simulation.run import handled_types
from sdk_trio.testing.simulation.world import Result, Simulation
from sdk_trio.webhooks import (
    answers,
    clock_watch,
    inline,
    invocation,
    parking,
    pauses,
    queue,
    queued,
    recording,
)
from sdk_trio.webhooks.recording import HeldLeases

#: Worlds in which a kind of bug shows itself soon.
CALM = World(faults=(), events=12)
CRASHES = World(faults=("kill", "power", "deploy"), events=16)
POWER = World(faults=("power",), events=16, troubles=False)
HANGS = World(faults=("hang",), events=16)
FULL = World(faults=("full", "sync"), events=16)
SYNCS = World(faults=("sync", "power"), most_faults=8, events=40, hours=0.01, troubles=False)
CLOCKS = World(
    faults=("clock",), most_faults=8, events=40, settings={"Webhooks:ToleranceSeconds": 7200}
)
TWO = World(faults=("stall", "kill"), events=16, processes=2)
TENANTS = World(faults=(), events=16, tenants=2)
FAILING = World(faults=(), tenants=2, dead_is_failure=False)
SUSPENSIONS = World(faults=("suspend",), most_faults=8, events=30, tenants=2)
FEED = World(faults=("deploy",), events=30, troubles=False, feed=True)
TWO_FULL = World(faults=("full", "sync"), events=16, processes=2)
TWO_CLOCKS = World(processes=2, settings={"Webhooks:ToleranceSeconds": 7200})
ONE_WORKER = World(faults=(), events=16, settings={"Webhooks:Queue:Workers": 1})


def handlers(*, run_when_suspended: bool = True) -> HandlerRegistry:
    """Return handlers of each kind: queued, inline, ordered."""
    registry = HandlerRegistry()
    kind: Any = {"run_when_suspended": run_when_suspended}

    async def nothing(_event: Any) -> None:
        pass

    registry.register(OrderCreatedEvent, nothing, enqueue=True, **kind)
    registry.register(OrderPaidEvent, nothing, **kind)
    registry.register(SubscriptionActiveEvent, nothing, enqueue=True, ordered=True, **kind)
    registry.register(SubscriptionCanceledEvent, nothing, enqueue=True, ordered=True, **kind)
    return registry


def calling_handlers() -> HandlerRegistry:
    """Return handlers that call the upstream."""
    registry = HandlerRegistry()

    async def call(event: Any, services: Any) -> None:
        await services.client.orders.get(event.data.id)

    registry.register(OrderCreatedEvent, call, enqueue=True)
    registry.register(OrderPaidEvent, call)
    return registry


def make_upstream() -> MockUpstream:
    """Return an upstream that has every order."""
    upstream = MockUpstream()
    upstream.on("orders.get").gives({"id": "ord_1"})
    return upstream


def limited_handlers() -> HandlerRegistry:
    """Return handlers with policies, for the upstream's events and those of sources."""
    registry = HandlerRegistry()

    async def nothing(_event: Any) -> None:
        pass

    registry.register(OrderCreatedEvent, nothing, enqueue=True, concurrency=2)
    registry.register(OrderPaidEvent, nothing, enqueue=True, coalesce=True)
    registry.register(SubscriptionActiveEvent, nothing, timeout=5)
    registry.register(SubscriptionCanceledEvent, nothing, enqueue=True, rate_per_minute=1)
    for source in SOURCES:
        own = registry.source(source)
        own.register("invoice.paid", nothing, enqueue=True, coalesce=True)
        own.register("invoice.sent", nothing, enqueue=True, rate_per_minute=1)
        own.register("ping", nothing)
    return registry


#: Two other senders, and a sample of each of their types.
SOURCES: dict[str, Any] = {
    name: {"invoice.paid": {"modified_at": ""}, "invoice.sent": {}, "ping": {}}
    for name in ("shop", "bank")
}


def handlers_for(world: World) -> HandlerRegistry:
    """Return the handlers that show most in a world."""
    if world.sources:
        return limited_handlers()
    if world.upstream is not None:
        return calling_handlers()
    return handlers(run_when_suspended=not world.tenants)


#: Worlds with policies, pauses, and senders that use the same ids.
LIMITS = World(faults=(), events=40, sources=SOURCES)
ONE_LIMITED_WORKER = World(
    faults=(), events=8, sources=SOURCES, settings={"Webhooks:Queue:Workers": 1}
)
PAUSES = World(faults=("pause",), most_faults=8, events=40, sources=SOURCES)

#: A world with outages of the upstream.
OUTAGES = World(faults=("upstream",), troubles=False, upstream=make_upstream)


class Everything:
    """A collection that has everything in it."""

    def __contains__(self, _: object) -> bool:
        return True


# -- the bugs --------------------------------------------------------------------------------------


def renewed_by_owner() -> Any:
    """All leases of an owner are renewed, so a lease that no run holds never expires."""
    renew = leases.renew

    def renew_all(tx: Any, terms: Any, held: Any, _: Any, now: float) -> Any:
        tokens = [token for _, token in tx.all(leases._LEASED_BY_US, owner=terms.owner)]
        return renew(tx, terms, held, tokens, now=now)

    return patch.object(inbox.leases, "renew", renew_all)


def sync_failure_ignored() -> Any:
    """After a failed sync the log is trusted."""
    return patch.object(engine.SqliteEngine, "_note_failed_sync", lambda *_: None)


def log_not_rewritten() -> Any:
    """After a failed sync the next sync is trusted, and the log is not rewritten."""

    def prove(self: Any, _connection: Any) -> None:
        self._log_proven = True

    return patch.object(engine.SqliteEngine, "_prove_log", prove)


def commit_not_synced() -> Any:
    """Commits are never synced."""
    transact = engine.SqliteEngine.transact
    return patch.object(
        engine.SqliteEngine, "transact", lambda self, work, **_: transact(
            self, work, durable=False
        )
    )  # fmt: skip


def acknowledged_before_commit() -> Any:
    """An event is acknowledged when its commit was requested."""
    accept = SqliteInbox.accept

    async def early(self: Any, delivery: Any, *, leased: bool, **_named: Any) -> Admitted:
        async def commit() -> None:
            with suppress(StoreUnavailableError):
                await accept(self, delivery, leased=False)

        trio.lowlevel.spawn_system_task(commit)
        await trio.lowlevel.checkpoint()
        return Admitted(Admission.QUEUED, 0, same_body=True)

    return patch.object(SqliteInbox, "accept", early)


def failed_commit_acknowledged() -> Any:
    """Deliveries are acknowledged although the store fails."""
    accept = queue.WorkerPool.accept

    async def lenient(self: Any, arrival: Any, **given: Any) -> Any:
        try:
            return await accept(self, arrival, **given)
        except StoreUnavailableError:
            return answers.OK

    return patch.object(queue.WorkerPool, "accept", lenient)


def failed_batch_succeeds() -> Any:
    """The callers of a failed batch are not notified."""
    return patch.object(commit, "_fail", lambda *_: None)


def no_poll() -> Any:
    """The feeder waits for signals in memory only."""

    async def wait(self: Any) -> None:
        await self._feed_wanted.wait()

    return patch.object(queue.WorkerPool, "_wait_for_work", wait)


def lost_wake_up() -> Any:
    """The feeder is not woken, and polls once an hour."""
    return _several(
        patch.object(queue.WorkerPool, "wake", lambda _self: None),
        patch.object(queue, "POLL_SECONDS", 3600.0),
    )


def fence_missing() -> Any:
    """An outcome is recorded regardless of the current lease holder."""
    unfenced = "(lease_token = :token OR 1 = 1)"
    names = ("_FAIL", "_RELEASE_RUN", "_POSTPONE", "_PARK", "_RUN_OF")
    return _several(
        patch.object(
            runs,
            "_TAKE_OUT",
            _changed(
                runs._TAKE_OUT,
                "lease_token IN ints(:tokens)",
                "(lease_token IN ints(:tokens) OR 1 = 1)",
            ),
        ),
        *(
            patch.object(
                runs,
                name,
                _changed(getattr(runs, name), "lease_token = :token", unfenced),
            )
            for name in names
        ),
    )


def deduplication_forgets() -> Any:
    """Finished ids are forgotten after a second."""
    standing = admission.existing_state
    return patch.object(
        admission, "existing_state", lambda known, now, dedup_seconds: standing(
            known, now=now, dedup_seconds=1.0
        )
    )  # fmt: skip


def deduplication_lost_at_restart() -> Any:
    """A restarted process knows only the ids that it has seen itself."""
    add = arrivals.add

    def added(tx: Any, new: Any, *rest: Any, **named: Any) -> Any:
        for delivery in new:
            sequence = arrivals.find_one(tx, delivery.key)
            if sequence is not None and tx.version[0] not in _seen(tx, delivery.key):
                arrivals.remove(tx, [sequence])
            _seen(tx, delivery.key).add(tx.version[0])
        return add(tx, new, *rest, **named)

    seen: dict[str, set[Any]] = {}

    def _seen(tx: Any, key: str) -> set[Any]:
        return seen.setdefault(f"{id(tx.connection)} {key}", set())

    return patch.object(arrivals, "add", added)


def lanes_ignored() -> Any:
    """Events of one subject are claimed in any order, several at a time."""
    return _several(
        patch.object(
            leases, "_FIND_DUE", _changed(leases._FIND_DUE, leases._is_first("this"), "(1 = 1)")
        ),
        patch.object(leases, "_NEXT_LANES", _changed(leases._NEXT_LANES, "min(seq", "max(seq")),
    )


def ordered_run_from_memory() -> Any:
    """An ordered event runs at once, concurrently with earlier ones of its subject."""
    new = admission.NewDelivery

    def unordered(delivery: Any) -> Any:
        return new(**{**_fields(delivery), "ordered": False})

    accept = queue.WorkerPool.accept

    async def accepting(self: Any, arrival: Any, **given: Any) -> Any:
        arrival = _replaced(arrival, delivery=unordered(arrival.delivery))
        return await accept(self, arrival, **given)

    return patch.object(queue.WorkerPool, "accept", accepting)


def waiting_never_fetched() -> Any:
    """Events of an earlier process are not fetched."""
    return patch.object(
        leases,
        "_FIND_DUE",
        _changed(leases._FIND_DUE, "state = 'received'", "state = 'received' AND 1 = 0"),
    )


def retries_never_fetched() -> Any:
    """Due retries are not fetched."""
    return patch.object(
        leases,
        "_FIND_DUE",
        _changed(leases._FIND_DUE, leases._retrying("this"), "1 = 0"),
    )


def expired_never_claimed() -> Any:
    """Expired leases are never taken over, not even at a start."""
    return _several(
        patch.object(
            leases, "_FIND_DUE", _changed(leases._FIND_DUE, leases._expired("this"), "1 = 0")
        ),
        patch.object(SqliteInbox, "recover", _none),
    )


def outcome_dropped_when_store_fails() -> Any:
    """An outcome that the store refuses is not recorded later."""

    async def once(self: Any, lease: Any, outcome: Any) -> None:
        try:
            await self.record(lease.lease, outcome)
        except StoreUnavailableError:
            await trio.lowlevel.checkpoint()

    return patch.object(recording.OutcomeRecorder, "record_until_stored", once)


def inline_outcome_forgotten() -> Any:
    """An inline outcome that the store refuses is not remembered."""
    return patch.object(inline.UnrecordedRuns, "add", lambda *_: None)


def inline_outcome_left_to_redelivery() -> Any:
    """An inline outcome that the store refuses is recorded by a redelivery to its process only."""
    return patch.object(inline.UnrecordedRuns, "successes", ())


def ended_run_paused() -> Any:
    """A pause holds an event whose handler has run, and whose outcome is not recorded."""

    def in_flight(self: Any, delivery: Any) -> bool:
        return delivery.key in self._in_flight

    return patch.object(inline.InlineRuns, "has_run_of", in_flight)


def start_trusts_leases() -> Any:
    """A process that starts after the clock was set takes over the leases of the others."""
    check = clock_watch.ClockWatch.check

    def without_start(self: Any) -> float:
        is_first = self._offset is None
        found = check(self)
        if is_first:
            self._set_at = -math.inf
        return math.inf if is_first else found

    return patch.object(clock_watch.ClockWatch, "check", without_start)


def slot_leaks() -> Any:
    """A duplicate keeps its queue slot."""
    answer = recording.OutcomeRecorder.answer_known
    accept = queue.WorkerPool.accept

    async def leaking(self: Any, arrival: Any, **given: Any) -> Any:
        known: list[bool] = []

        def noted(*arguments: Any) -> Any:
            known.append(True)
            return answer(*arguments)

        with patch.object(recording.OutcomeRecorder, "answer_known", noted):
            result = await accept(self, arrival, **given)
        self._slots_used += bool(known)
        return result

    return patch.object(queue.WorkerPool, "accept", leaking)


def leases_pile_up() -> Any:
    """The lease of a finished run is not released."""
    return patch.object(HeldLeases, "drop", lambda *_: None)


def duplicates_not_joined() -> Any:
    """A duplicate of an in-flight inline run runs concurrently with it."""

    async def run(
        self: Any, arrival: Any, handler: Any, tenant: Any = None, *, expiry: Any = None
    ) -> Any:
        self._in_flight.pop(arrival.delivery.key, None)
        try:
            return await self._run_first(arrival.delivery.key, arrival, handler, tenant, expiry)
        except KeyError:
            return answers.OK

    return patch.object(inline.InlineRuns, "run", run)


def failure_acknowledged() -> Any:
    """A failed inline handler is answered 200."""
    return patch.object(inline, "_ask_again", lambda _failure: answers.OK)


def failure_is_done() -> Any:
    """A failed queued handler is recorded as done."""
    return patch.object(queued, "after_queued_failure", lambda *_, **__: Done())


def given_up_too_early() -> Any:
    """A queued event is dead after its first failure."""
    return patch.object(queued, "after_queued_failure", lambda failure, **_: Dead(failure.error))


def retry_tomorrow() -> Any:
    """A retry is planned in milliseconds."""
    after = queued.after_queued_failure

    def late(*arguments: Any, now: float, **named: Any) -> Any:
        outcome = after(*arguments, now=now, **named)
        if isinstance(outcome, Retry) and outcome.at is not None:
            return _replaced(outcome, at=now + (outcome.at - now) * 1000)
        return outcome

    return patch.object(queued, "after_queued_failure", late)


def clock_step_ignored() -> Any:
    """A wall clock that is set back delays retries."""
    return _several(
        patch.object(clock_watch.ClockWatch, "check", lambda _self: math.inf),
        patch.object(inbox.SqlInbox, "reschedule", _none),
    )


def timeout_missing() -> Any:
    """An inline handler is not cancelled at its deadline."""
    run = invocation.Invocations.run

    async def patient(self: Any, *arguments: Any, **_: Any) -> Any:
        return await run(self, *arguments[:5])

    return patch.object(invocation.Invocations, "run", patient)


def claim_taken_twice() -> Any:
    """The filter of known keys reports each key as new."""
    return patch.object(known_keys.KnownKeys, "may_hold", lambda *_: False)


def worker_dies() -> Any:
    """A worker ends when its run is cancelled."""

    async def once(self: Any) -> None:
        await queue.run_in_cell(self._work)

    return patch.object(queue.WorkerPool, "_keep_working", once)


def renewal_missing() -> Any:
    """Leases are not renewed."""

    async def never(_self: Any) -> None:
        await trio.sleep_forever()

    return _several(
        patch.object(queue.WorkerPool, "_keep_leases", never),
        patch.object(queue.WorkerPool, "_renew", _nothing),
    )


def claim_believed_before_commit() -> Any:
    """The end of an inline run relies on a claim that is still being committed."""
    finish = UnawaitedClaims.finish

    async def believing(self: Any, run: Any, *arguments: Any, **named: Any) -> bool:
        if run.claim.value is not None and not run.claim.finished:
            # A failure of the commit changes only the original.
            run.claim = copy.copy(run.claim)
        return await finish(self, run, *arguments, **named)

    return patch.object(UnawaitedClaims, "finish", believing)


def lanes_shared_by_tenants() -> Any:
    """Ordered events of different tenants with the same subject wait for each other."""
    lane_of = admission.lane_of
    return patch.object(
        admission, "lane_of", lambda ordered, _tenant, subject: lane_of(ordered, None, subject)
    )


def parked_event_leased() -> Any:
    """A parked event that arrives again is put back for workers, and runs inline as well."""
    admit = admission._admit_known

    def leased(tx: Any, terms: Any, arriving: Any, *rest: Any) -> Any:
        admitted, sequence = admit(tx, terms, arriving, *rest)
        if admitted.admission is Admission.QUEUED:
            sequence = arrivals.find_one(tx, arriving.delivery.key)
        return admitted, sequence

    return patch.object(admission, "_admit_known", leased)


def suspension_ignored() -> Any:
    """Events of a suspended tenant run, even those that must wait for it."""
    return patch.object(parking.Parking, "is_suspended", lambda *_: False)


def suspension_noticed_late() -> Any:
    """A process never refreshes a tenant that it has read."""
    return patch.object(TenantService, "_announce", lambda _self: None)


def tenant_of_another() -> Any:
    """The cache always returns the first tenant that was requested."""
    recall = TenantCache.recall

    def first(self: Any, key: str) -> Any:
        return vars(self).setdefault("first", recall(self, key))

    return patch.object(TenantCache, "recall", first)


def feed_runs_ahead() -> Any:
    """The feed sends one page, and counts later deliveries as part of that page."""
    send = Feed._send_deliveries

    async def ahead(self: Any, socket: Any, listener: Any) -> bool:
        await send(self, socket, listener)
        listener.position = self._position
        return False

    return _several(patch.object(feed, "PAGE", 3), patch.object(Feed, "_send_deliveries", ahead))


def feed_resumes_one_late() -> Any:
    """The feed skips the delivery after a client's position."""
    serve = Feed.serve

    async def late(self: Any, upgrade: Any, query: Any, **named: Any) -> None:
        if query.after:
            query = attrs.evolve(query, after=query.after + 1)
        await serve(self, upgrade, query, **named)

    return patch.object(Feed, "serve", late)


def feed_repeats() -> Any:
    """A returning client gets its last delivery again."""
    serve = Feed.serve

    async def early(self: Any, upgrade: Any, query: Any, **named: Any) -> None:
        if query.after:
            query = attrs.evolve(query, after=query.after - 1)
        await serve(self, upgrade, query, **named)

    return patch.object(Feed, "serve", early)


def feed_before_sync() -> Any:
    """The feed sends deliveries whose sequences a power cut may give to others."""
    return patch.object(SqliteInbox, "sync", _none)


def breaker_never_closes() -> Any:
    """An open circuit admits no probe."""
    acquire = CircuitBreaker.acquire
    opened: dict[int, Any] = {}

    def never(self: Any) -> Any:
        permit = opened.get(id(self)) or acquire(self)
        if isinstance(permit, CircuitRefusal):
            opened[id(self)] = permit
        return permit

    return patch.object(CircuitBreaker, "acquire", never)


def pause_ignored() -> Any:
    """Events of a paused type run."""
    return patch.object(pauses.Pauses, "_group_of_pause", lambda *_: None)


def pause_noticed_late() -> Any:
    """A process reads the pauses twice a minute."""
    return patch.object(pauses, "POLL_SECONDS", 30.0)


def held_after_resume() -> Any:
    """Events that a pause has held stay so after the resume."""
    return patch.object(
        policies,
        "_END_GROUP",
        _changed(policies._END_GROUP, "WHERE sequence", "WHERE 1 = 0 AND sequence"),
    )


def concurrency_ignored() -> Any:
    """The runs of a limited handler are not counted."""
    counted = _changed(policies._COUNT_RUNNING, "count(*)", "0")
    return patch.object(policies, "_COUNT_RUNNING", counted)


def rate_refilled() -> Any:
    """The tokens that runs have taken are not saved."""
    saved = _changed(policies._SAVE_TOKENS, "= :missing", "= 0 * :missing")
    return patch.object(policies, "_SAVE_TOKENS", saved)


def newest_state_superseded() -> Any:
    """Of the waiting events of a subject, the oldest state supersedes the others."""
    first = policies.coalesce

    def oldest(event: Any, others: Any) -> Any:
        newest, superseded = first(event, others)
        alike = sorted([newest, *superseded], key=lambda each: each.changed_at or 0.0)
        return alike[0], alike[1:]

    return patch.object(policies, "coalesce", oldest)


def late_state_runs() -> Any:
    """An older state that arrives after a newer one was handled runs."""
    return patch.object(queued, "find_newer_handled", _nothing)


def sources_share_ids() -> Any:
    """The key of a delivery is its id, whichever source has sent it."""
    return patch.object(NewDelivery, "key", property(lambda delivery: delivery.webhook_id))


def _changed(text: str, old: str, new: str) -> str:
    """Return a statement with another part; the part must be in it."""
    assert old in text, f"{old!r} is not in {text!r}"
    return text.replace(old, new)


async def _nothing(*_: Any) -> None:
    await trio.lowlevel.checkpoint()


async def _none(*_: Any, **__: Any) -> int:
    await trio.lowlevel.checkpoint()
    return 0


def _fields(struct: Any) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def _replaced(struct: Any, **changes: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(struct, **changes)


@contextmanager
def _several(*patches: Any) -> Iterator[None]:
    first, *rest = patches
    with first:
        if rest:
            with _several(*rest):
                yield
        else:
            yield


class Bug(NamedTuple):
    """A planted bug and the world in which it is looked for."""

    plant: Callable[[], Any]
    world: World
    #: Makes the plan of a seed; None: dice do.
    plan: Callable[[int], SimulationPlan] | None = None


def slow_events(seed: int, *troubles: Trouble, faults: tuple[Fault, ...] = ()) -> SimulationPlan:
    """Return a plan of six events that come at once, and whose runs go as ``troubles`` say."""
    arrivals = tuple(
        Arrival(number, 1.0 + number / 100, "order.created", f"sub_{number}", troubles)
        for number in range(6)
    )
    return SimulationPlan(seed, arrivals, faults)


def stalled_runs(seed: int) -> SimulationPlan:
    """Return a plan in which a process is paused, and its runs fail when it resumes."""
    stall = Fault(2.0 + seed / 1000, "stall", 100.0)
    return slow_events(seed, Trouble("fail", 5.0), Trouble("slow", 40.0), faults=(stall,))


def ends_in_commits(seed: int) -> SimulationPlan:
    """Return a plan of inline runs that end during a commit, which a disk fails that is full."""
    begin = 1.0 + seed % 100 / 1000
    arrivals = tuple(
        Arrival(number, 1.0 + number / 50, "order.paid", f"sub_{number}", (Trouble("slow", 1.0),))
        for number in range(3)
    )
    hang = Fault(begin, "hang", 3.0)
    full = Fault(begin + 1.0, "full", 2.0 + seed % 7 / 1000)
    return SimulationPlan(seed, arrivals, (hang, full))


def paused_ends(seed: int) -> SimulationPlan:
    """Return a plan of inline runs whose outcomes find the disk full; then their type is paused."""
    # The first event lets the receiver read the keys of the store; the others run before claims.
    arrivals = tuple(
        Arrival(number, 0.2 if number == 0 else 1.0 + number / 50, "order.paid", f"sub_{number}")
        for number in range(6)
    )
    full = Fault(0.9, "full", 0.3), Fault(1.6, "full", 1.5 + seed % 40 / 10)
    return SimulationPlan(seed, arrivals, (*full, Fault(1.3, "pause", 30.0, glob="order.paid")))


def power_after_claims(seed: int) -> SimulationPlan:
    """Return a plan in which the power fails during an inline run, and others come after it."""
    slow = (Trouble("slow", 9.0),)
    arrivals = tuple(
        Arrival(number, 3.0 if number == 0 else 6.0 + number / 10, "order.paid", "sub_0", slow)
        for number in range(6)
    )
    return SimulationPlan(seed, arrivals, (Fault(4.0 + seed % 50 / 100, "power", 2.0),))


def start_after_step(seed: int) -> SimulationPlan:
    """Return a plan in which a process starts just after the clock was set back."""
    deploy = Fault(0.5, "deploy", 1.5)
    step = Fault(1.6 + seed % 10 / 20, "clock", 10.0, -3600.0)
    return slow_events(seed, Trouble("slow", 20.0), faults=(deploy, step))


def failing_tenant(seed: int) -> SimulationPlan:
    """Return a plan in which events of one tenant of two fail again and again."""
    failing = (Trouble("fail", 0.1),) * 9
    arrivals = tuple(
        Arrival(
            number,
            1.0 + number / 10 + seed / 1000,
            "subscription.active",
            f"sub_{number // 2}",
            () if number % 2 else failing,
            tenant=number % 2,
        )
        for number in range(6)
    )
    return SimulationPlan(seed, arrivals, ())


def simultaneous_runs(seed: int) -> SimulationPlan:
    """Return a plan of events of a limited handler that come at once, and run for a while."""
    return slow_events(seed, Trouble("slow", 5.0))


def long_runs(seed: int) -> SimulationPlan:
    """Return a plan of runs that last longer than a lease."""
    return slow_events(seed, Trouble("slow", 100.0))


def limited_event_forgotten() -> Any:
    """A worker runs one limited event that was claimed in advance, and waits for new events."""
    take = queue.WorkerPool._take_ahead

    def take_one(self: Any) -> Any:
        taken = None if getattr(self, "has_taken", False) else take(self)
        self.has_taken = taken is not None
        return taken

    return patch.object(queue.WorkerPool, "_take_ahead", take_one)


BUGS = (
    Bug(renewed_by_owner, HANGS),
    Bug(sync_failure_ignored, SYNCS),
    Bug(log_not_rewritten, SYNCS),
    Bug(commit_not_synced, POWER),
    Bug(acknowledged_before_commit, CRASHES),
    Bug(failed_commit_acknowledged, FULL),
    Bug(failed_batch_succeeds, FULL),
    Bug(no_poll, CALM),
    Bug(lost_wake_up, CALM),
    Bug(fence_missing, TWO, stalled_runs),
    Bug(deduplication_forgets, CALM),
    Bug(deduplication_lost_at_restart, CRASHES),
    Bug(lanes_ignored, CALM),
    Bug(ordered_run_from_memory, CALM),
    Bug(waiting_never_fetched, CRASHES),
    Bug(retries_never_fetched, CALM),
    Bug(expired_never_claimed, CRASHES),
    Bug(outcome_dropped_when_store_fails, FULL),
    Bug(inline_outcome_forgotten, FULL),
    Bug(inline_outcome_left_to_redelivery, TWO_FULL),
    Bug(ended_run_paused, FULL, paused_ends),
    Bug(start_trusts_leases, TWO_CLOCKS, start_after_step),
    Bug(slot_leaks, CALM),
    Bug(leases_pile_up, CALM),
    Bug(duplicates_not_joined, CALM),
    Bug(failure_acknowledged, CALM),
    Bug(failure_is_done, CALM),
    Bug(given_up_too_early, CALM),
    Bug(retry_tomorrow, CALM),
    Bug(clock_step_ignored, CLOCKS),
    Bug(timeout_missing, CALM),
    Bug(claim_taken_twice, CALM),
    Bug(worker_dies, ONE_WORKER),
    Bug(renewal_missing, TWO, long_runs),
    Bug(claim_believed_before_commit, FULL, ends_in_commits),
    Bug(lanes_shared_by_tenants, FAILING, failing_tenant),
    Bug(parked_event_leased, SUSPENSIONS),
    Bug(suspension_ignored, SUSPENSIONS),
    Bug(suspension_noticed_late, SUSPENSIONS),
    Bug(tenant_of_another, TENANTS),
    Bug(feed_runs_ahead, FEED),
    Bug(feed_resumes_one_late, FEED),
    Bug(feed_repeats, FEED),
    Bug(feed_before_sync, FEED, power_after_claims),
    Bug(breaker_never_closes, OUTAGES),
    Bug(pause_ignored, PAUSES),
    Bug(pause_noticed_late, PAUSES),
    Bug(held_after_resume, PAUSES),
    Bug(concurrency_ignored, LIMITS, simultaneous_runs),
    Bug(rate_refilled, LIMITS),
    Bug(newest_state_superseded, LIMITS),
    Bug(late_state_runs, LIMITS),
    Bug(sources_share_ids, LIMITS),
    Bug(limited_event_forgotten, ONE_LIMITED_WORKER),
)


def look_for(bug: Bug, seeds: int, seconds: float = math.inf) -> Result | None:
    """Return the result of the first seed that finds ``bug``; None if none does."""
    until = time.process_time() + seconds
    types = handled_types(handlers_for(bug.world))
    for seed in range(seeds):
        registry = handlers_for(bug.world)
        plan = make_plan(seed, bug.world, types) if bug.plan is None else bug.plan(seed)
        with bug.plant():
            result = Simulation(plan, bug.world, lambda made=registry: made).run()
        if result.violations:
            return result
        if time.process_time() > until:
            break
    return None


def main() -> int:
    """Look for each bug and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--match", default="", help="a part of the bugs' names")
    parser.add_argument("--begin", default="", help="the name of the first bug")
    arguments = parser.parse_args()
    missed = 0
    names = [bug.plant.__name__ for bug in BUGS]
    for bug in BUGS[names.index(arguments.begin) if arguments.begin else 0 :]:
        name = bug.plant.__name__
        if arguments.match not in name:
            continue
        begun = time.process_time()
        result = look_for(bug, arguments.seeds, arguments.seconds)
        took = time.process_time() - begun
        missed += result is None
        first = "not found" if result is None else result.violations[0].kind
        seed = "" if result is None else result.plan.seed
        sys.stdout.write(f"{name:36} {seed!s:>6} {first:14} {took:7.1f} s\n")
        sys.stdout.flush()
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
