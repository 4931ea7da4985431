"""The auditor of the simulation: which second run of an event it excuses."""

import msgspec
import pytest

from sdk_trio.testing.simulation.audit import Auditor
from sdk_trio.testing.simulation.plan import Arrival

EVENT = Arrival(1, 0.0, "order.paid", "sub_1")


class World:
    """An auditor with a clock of its own, and what a host has not committed."""

    def __init__(self):
        self.now = 100.0
        self.uncommitted = set()
        self.auditor = Auditor(lambda: self.now)
        self.auditor.events = {EVENT.key: EVENT}
        self.auditor.uncommitted = lambda _machine: self.uncommitted

    def runs(self, machine, *, recorded):
        run = self.auditor.begin(EVENT.key, machine, 15.0, ordered=False)
        self.now += 0.1
        self.auditor.end(run, "done")
        if recorded:
            self.auditor.handled(EVENT.key, machine)
        self.now += 1.0

    @property
    def found(self):
        return [each.kind for each in self.auditor.violations]


@pytest.fixture
def world():
    return World()


def test_a_committed_success_runs_never_again_even_after_a_fault_of_the_disk(world):
    world.auditor.fault(world.now + 0.5)
    world.runs("host.1", recorded=True)
    world.auditor.crash("host.1")
    world.runs("host.2", recorded=True)
    assert world.found == ["ran_again"]


def test_a_success_that_was_not_committed_at_the_kill_may_run_again(world):
    world.runs("host.1", recorded=True)
    world.uncommitted = {EVENT.key}
    world.auditor.crash("host.1")
    world.runs("host.2", recorded=True)
    assert world.found == []


def test_the_crash_of_another_process_excuses_nothing(world):
    world.runs("host1.1", recorded=False)
    world.auditor.crash("host2.1")
    world.runs("host1.1", recorded=True)
    assert world.found == ["ran_again"]


def test_an_unrecorded_success_may_run_again_after_the_kill_of_its_process(world):
    world.runs("host.1", recorded=False)
    world.auditor.crash("host.1")
    world.runs("host.2", recorded=True)
    assert world.found == []


def test_a_stop_excuses_only_while_the_disk_fails(world):
    world.auditor.fault(world.now + 0.5)
    world.runs("host.1", recorded=False)
    world.now += 60.0
    world.auditor.stop("host.1")
    world.runs("host.2", recorded=True)
    assert world.found == ["ran_again"]


def test_a_stop_during_a_fault_of_the_disk_gives_up_an_outcome(world):
    world.auditor.fault(world.now + 5.0)
    world.runs("host.1", recorded=False)
    world.auditor.stop("host.1")
    world.runs("host.2", recorded=True)
    assert world.found == []


@pytest.mark.parametrize(("stopped_at", "found"), [(None, ["too_long"]), (99.0, [])])
def test_only_an_event_that_a_stopped_process_may_have_claimed_may_take_long(
    world, stopped_at, found
):
    """The queue runs it then, as it runs any event whose process has ended."""
    world.auditor.events[EVENT.key] = msgspec.structs.replace(EVENT, at=98.0)
    if stopped_at is not None:
        world.now = stopped_at
        world.auditor.stop("host.1")
    run = world.auditor.begin(EVENT.key, "host.2", 15.0, ordered=False)
    world.now += 25.0
    world.auditor.end(run, "done")
    assert world.found == found


def test_a_kill_excuses_only_the_successes_of_the_last_seconds(world):
    """The outcome is recorded about a second after the store answers."""
    world.auditor.fault(world.now + 5.0)
    world.runs("host.1", recorded=False)
    world.now += 30.0
    world.auditor.crash("host.1")
    world.runs("host.2", recorded=True)
    assert world.found == ["ran_again"]


@pytest.mark.parametrize("disturb", ["fault", "stall"])
def test_while_no_store_answers_a_kill_excuses_earlier_successes(world, disturb):
    if disturb == "fault":
        world.auditor.fault(world.now + 60.0)
    else:
        world.auditor.stall("other", long=False)
    world.runs("host.1", recorded=False)
    world.now += 50.0
    world.auditor.crash("host.1")
    world.runs("host.2", recorded=True)
    assert world.found == []


def test_a_suspension_of_a_tenant_excuses_no_second_run(world):
    world.auditor.may_park("tenant")
    world.runs("host.1", recorded=False)
    world.now += 30.0
    world.auditor.crash("host.1")
    world.runs("host.2", recorded=True)
    assert world.found == ["ran_again"]


@pytest.mark.parametrize(("after", "found"), [(1.0, []), (60.0, ["ran_again"])])
def test_a_long_stall_excuses_the_runs_before_its_end(world, after, found):
    world.auditor.stall("host.1", long=True)
    world.now += 100.0
    world.auditor.wake("host.1")
    world.now += after
    world.runs("host.1", recorded=False)
    world.runs("host.2", recorded=True)
    assert world.found == found
