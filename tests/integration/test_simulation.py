"""Deterministic simulation: equal seeds are equal, clean ones clean, failures become stories."""

import os
import subprocess
import sys
import threading
import time

import apsw
import pytest
import seeds
import trio
from planted_bugs import BUGS, SOURCES, handlers, handlers_for, look_for, make_upstream

from sdk_trio import HandlerRegistry, Runtime
from sdk_trio.config import Settings
from sdk_trio.errors import NotSupportedError
from sdk_trio.events import OrderCreatedEvent, OrderPaidEvent
from sdk_trio.storage.sql import arrivals
from sdk_trio.testing import SimulationFailedError, World, simulate
from sdk_trio.testing.simulation import scheduler
from sdk_trio.testing.simulation.audit import Auditor
from sdk_trio.testing.simulation.host import secret_of
from sdk_trio.testing.simulation.plan import Arrival, Fault, SimulationPlan, make_plan
from sdk_trio.testing.simulation.run import handled_types
from sdk_trio.testing.simulation.tenants import Operator
from sdk_trio.testing.simulation.world import Simulation

TYPES = handled_types(handlers())


def run(plan, world=None):
    made = handlers()
    return Simulation(plan, World() if world is None else world, lambda: made).run()


# -- determinism -----------------------------------------------------------------------------------

#: A world of each kind, and a seed of it.
KINDS = {
    "one process": (World(), 9),
    "two processes": (World(processes=2), 10),
    "tenants": (World(tenants=2), 11),
    "tenants of two processes": (World(tenants=2, processes=2), 12),
    "feed": (World(feed=True), 13),
    "upstream": (World(upstream=make_upstream), 14),
    "policies and sources": (World(sources=SOURCES), 15),
}

#: Prints what identifies the whole course of one seed of each kind of world.
DIGESTS = """
import sys
from integration.test_simulation import KINDS
from planted_bugs import handlers_for
from sdk_trio.testing.simulation.plan import make_plan
from sdk_trio.testing.simulation.run import handled_types
from sdk_trio.testing.simulation.world import Simulation
for kind in sys.argv[1:]:
    world, seed = KINDS[kind]
    made = handlers_for(world)
    plan = make_plan(seed, world, handled_types(made))
    print(Simulation(plan, world, lambda: made).run().digest, kind)
"""


def test_a_seed_is_the_same_in_every_process_after_whatever_seeds():
    def digests(hash_seed, kinds):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": "tests"}
        output = subprocess.run(
            [sys.executable, "-c", DIGESTS, *kinds],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        return {
            kind: digest for digest, kind in (line.split(" ", 1) for line in output.splitlines())
        }

    one = digests("1", KINDS)
    other = digests("2", reversed(KINDS))
    assert one == other
    assert len(set(one.values())) == len(KINDS)


def test_another_thread_that_sleeps_changes_nothing():
    plan, ended = make_plan(9, World(), TYPES), threading.Event()
    alone = run(plan).digest

    def sleep_until_it_ends():
        while not ended.is_set():
            time.sleep(0.001)

    thread = threading.Thread(target=sleep_until_it_ends, daemon=True)
    thread.start()
    try:
        assert run(plan).digest == alone
    finally:
        ended.set()
        thread.join()


def test_a_story_has_no_directory_of_this_machine():
    story = "\n".join(map(str, run(make_plan(1000, World(), TYPES)).story))
    assert "planted_bugs.py:" in story
    assert os.path.dirname(__file__).rpartition("/")[0] not in story


# -- promises --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_clean_seeds_are_clean_and_something_happens_in_them(kind):
    world, _ = KINDS[kind]
    report = simulate(lambda: handlers_for(world), seeds=2, world=world)
    assert report.acknowledged == report.seeds * World().events
    assert report.runs > report.acknowledged
    assert report.hours > 0.02


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_worlds_that_their_seeds_have_drawn_are_clean(first):
    sums = seeds.Sums()
    for outcome in map(seeds.simulate, range(first, first + 25)):
        sums.add(outcome)
    assert sums.failed == []
    assert sums.acknowledged
    assert sums.faults
    assert len(sums.kinds) > 4


#: Seeds of drawn worlds that have found a defect (docs/explanation/proof.md).
FOUND = (
    1000761, 1001151, 3000090, 10005994, 10014670, 10015019, 10016146, 10017896, 10017915,
    20000411, 20008266, 20016293, 20017992, 30009791, 50043852, 50069704, 50094001,
)  # fmt: skip


@pytest.mark.parametrize("seed", FOUND)
def test_a_world_that_has_found_a_defect_is_clean(seed):
    assert seeds.simulate_any(seed).violations == ()


def test_several_processes_share_the_seeds_and_find_the_same():
    world = World(faults=(), events=4)
    seen = []
    shared = simulate(handlers, seeds=6, world=world, jobs=2, progress=seen.append)
    assert shared == simulate(handlers, seeds=6, world=world)
    assert seen == [0, 1, 2, 3, 4, 5]
    shop = Shop()
    with pytest.raises(SimulationFailedError, match="granted twice") as found:
        simulate(shop.handlers, seeds=20, check=shop.check, jobs=2, world=World(events=10))
    # Others may have failed before it, but it is the first.
    assert simulate(shop.handlers, seeds=found.value.seed, check=shop.check, world=World(events=10))


QUICK = {
    "renewed_by_owner",
    "start_trusts_leases",
    "log_not_rewritten",
    "commit_not_synced",
    "failed_commit_acknowledged",
    "no_poll",
    "deduplication_forgets",
    "lanes_ignored",
    "waiting_never_fetched",
    "outcome_dropped_when_store_fails",
    "slot_leaks",
    "claim_believed_before_commit",
    "lanes_shared_by_tenants",
    "suspension_ignored",
    "tenant_of_another",
    "feed_repeats",
    "pause_ignored",
    "held_after_resume",
    "sources_share_ids",
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.plant.__name__)
def test_each_planted_bug_still_changes_what_it_names(bug):
    with bug.plant():
        pass


@pytest.mark.parametrize(
    "bug", [bug for bug in BUGS if bug.plant.__name__ in QUICK], ids=lambda bug: bug.plant.__name__
)
def test_a_planted_bug_is_found(bug):
    assert look_for(bug, seeds=200) is not None


# -- stories ---------------------------------------------------------------------------------------


class Shop:
    """An application whose effect happens once for each run of its handler."""

    def __init__(self):
        self.granted = []
        self.handlers = HandlerRegistry()
        self.handlers.register(OrderPaidEvent, self.grant, enqueue=True)

    async def grant(self, event):
        self.granted.append(event.webhook_id)

    def check(self):
        granted, self.granted = self.granted, []
        assert len(set(granted)) == len(granted), "granted twice"


def test_an_effect_that_is_not_idempotent_is_found_and_its_story_is_short():
    shop = Shop()
    with pytest.raises(SimulationFailedError, match="granted twice") as caught:
        simulate(shop.handlers, seeds=20, check=shop.check)
    plan = caught.value.result.plan
    assert (len(plan.arrivals), len(plan.faults)) == (1, 0)
    story = str(caught.value)
    assert story.index("run=1") < story.index("run=2")


def test_a_handler_that_needs_order_is_found():
    created = []

    async def create(event):
        created.append(event.data.id)

    async def pay(event):
        assert event.data.id in created, "paid before it was created"

    def made():
        created.clear()
        registry = HandlerRegistry()
        registry.register(OrderCreatedEvent, create, enqueue=True)
        registry.register(OrderPaidEvent, pay, enqueue=True)
        return registry

    with pytest.raises(SimulationFailedError, match="paid before it was created"):
        simulate(made, seeds=20)


def test_an_event_that_ends_dead_is_found_unless_the_world_allows_it():
    async def refuse(_event):
        raise ValueError("no such product")

    registry = HandlerRegistry()
    registry.register(OrderPaidEvent, refuse, enqueue=True)
    settings = {"Webhooks:Queue:MaxAttempts": 2}
    world = World(faults=(), events=2, settings=settings)
    with pytest.raises(SimulationFailedError, match=r"ended dead: ValueError: no such product"):
        simulate(registry, seeds=1, world=world)
    allowed = World(faults=(), events=2, settings=settings, dead_is_failure=False)
    assert simulate(registry, seeds=1, world=allowed).runs == 4


def test_a_check_gets_the_records_of_the_store():
    seen = []
    simulate(handlers, seeds=1, world=World(faults=(), events=3), check=seen.extend)
    assert sorted(record.webhook_id for record in seen) == ["msg_0000", "msg_0001", "msg_0002"]


def test_applications_that_cannot_be_simulated_are_refused(monkeypatch):
    with pytest.raises(NotSupportedError, match="nothing to simulate"):
        simulate(HandlerRegistry())

    async def inside():
        simulate(handlers)

    with pytest.raises(NotSupportedError, match=r"outside of trio\.run"):
        trio.run(inside)
    monkeypatch.delattr(scheduler._run, "_r")
    with pytest.raises(NotSupportedError, match="does not have _r"):
        scheduler.require_trio()


APP = """
from sdk_trio import HandlerRegistry
from sdk_trio.events import OrderPaidEvent

handlers = HandlerRegistry()
granted = []


@handlers.on(OrderPaidEvent, enqueue=True)
async def grant(event):
    granted.append(event.webhook_id)


def once():
    seen = granted[:]
    granted.clear()
    assert len(set(seen)) == len(seen), "granted twice"
"""


def run_command(*words, cwd):
    arguments = [sys.executable, "-m", "sdk_trio", *words]
    return subprocess.run(arguments, cwd=cwd, capture_output=True, text=True)


def test_the_command_replays_a_failure_and_writes_it_as_a_test(tmp_path):
    (tmp_path / "shop.py").write_text(APP)
    command = ("simulate", "--app", "shop:handlers")
    clean = run_command(*command, "--seeds", "2", cwd=tmp_path)
    assert clean.returncode == 0, clean.stderr
    assert clean.stdout.startswith("2 seeds, none failed")
    checked = (*command, "--check", "shop:once")
    failed = run_command(*checked, "--write-test", "test_shop.py", cwd=tmp_path)
    assert failed.returncode == 1
    assert "granted twice" in failed.stdout
    seed = failed.stdout.split()[1]
    assert f"replay it with:     sdk-trio {' '.join(checked[:3])} --seed {seed}" in failed.stdout
    replayed = run_command(*checked, "--seed", seed, cwd=tmp_path)
    assert replayed.stdout == failed.stdout
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_shop.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "granted twice" in found.stdout
    assert "1 failed" in found.stdout


# -- the world -------------------------------------------------------------------------------------


def test_a_power_cut_in_the_middle_of_a_commit_happens_and_is_survived():
    world = World(faults=(), events=12, troubles=False)
    base = make_plan(3, world, TYPES)
    lost = 0
    for changes in (1, 2, 3, 5):
        at = base.arrivals[4].at
        plan = SimulationPlan(3, base.arrivals, (Fault(at, "power", 1.0, float(changes)),))
        result = run(plan, world)
        assert not result.violations
        story = "\n".join(map(str, result.story))
        lost += "disk.lost" in story and "blocks=0" not in story
    assert lost


def test_a_stalled_process_serves_after_it_wakes_up():
    world = World(faults=(), events=6, troubles=False)
    base = make_plan(1, world, TYPES)
    plan = SimulationPlan(1, base.arrivals, (Fault(base.arrivals[0].at, "stall", 12.0),))
    result = run(plan, world)
    assert not result.violations
    assert result.acknowledged == 6
    assert any("answer=timeout" in line.fields for line in result.story)


def test_an_exception_of_the_server_is_found(monkeypatch):
    add = arrivals.add
    errors = iter([AttributeError("planted")] * 2)  # in the batch, and alone

    def added(*arguments, **named):
        for error in errors:
            raise error
        return add(*arguments, **named)

    monkeypatch.setattr(arrivals, "add", added)
    arrival = Arrival(0, 1.0, "order.created", "sub_0")
    found = run(SimulationPlan(1, (arrival,), ())).violations
    assert [each.kind for each in found] == ["failed"]
    assert "server.application_failed" in found[0].text


async def test_an_operator_waits_for_a_process_that_serves(autojump_clock):
    settings = Settings.from_mapping(
        {
            "Environment": "Development",
            "MultiTenant:Enabled": True,
            "Webhooks:Secret": secret_of("shop"),
        },
        standalone=True,
    )
    stopped = Runtime(settings, handlers())
    operator = Operator(lambda: [stopped], Auditor(trio.current_time))
    for change in (operator.pause("*", 1.0), operator.suspend(0, 1.0), operator.add(1)):
        with trio.move_on_after(5) as waiting:
            await change
        assert waiting.cancelled_caught


def test_a_crashed_process_no_longer_runs_handlers():
    # It is stalled with a delivery in its socket, and crashes before it has read it.
    result = run(make_plan(500_022, World(), TYPES))
    assert result.violations == ()
    (crash,) = (n for n, line in enumerate(result.story) if "host.crashes" in str(line))
    later = [str(line) for line in result.story[crash:]]
    assert any("handler.begins" in line for line in later)
    assert not [line for line in later if "host.1 " in line and "handler.begins" in line]


def test_a_host_that_is_restarted_while_the_world_stops_is_stopped_as_well():
    for seed in range(24):
        plan = SimulationPlan(seed, (), (Fault(1.0, "kill", 3.0, 10**6),))
        assert run(plan, World(processes=3)).violations == (), seed


def test_sqlite_is_as_before_after_a_simulation(tmp_path):
    run(make_plan(0, World(events=1), TYPES), World(events=1))
    assert apsw.vfs_names()[0] == "unix"
    apsw.Connection(str(tmp_path / "file.db")).close()
