"""Events of the network under twenty calls at once: none is lost, and the circuit stays closed."""

import pytest
import trio
from support import network_events
from support.network_events import CASES, SCENARIOS, TASKS, Scenario

from sdk_trio.client.layers.retry import BudgetPolicy

PATIENCE_SECONDS = 120


@pytest.mark.parametrize(("event", "server", "protocol"), CASES)
async def test_no_call_is_lost_and_the_circuit_stays_closed(event, server, protocol):
    scenario = SCENARIOS[event]
    with trio.fail_after(PATIENCE_SECONDS):
        outcome = await network_events.run(scenario, server, protocol)
    assert not outcome.failed
    assert outcome.ok == TASKS * scenario.calls_per_task
    assert outcome.circuits_opened == 0
    if scenario.first in ("silence", "nothing") or (scenario.first, protocol) == ("reset", "h2"):
        # These cost no call an attempt: the pool itself finds another way.
        assert outcome.retries == 0


async def test_a_dropped_connection_costs_none_of_a_hundred_calls():
    """From rest the budget holds 20 retries, and one connection that drops is paid for once."""
    scenario = Scenario("a connection drops under way", first="drop", tasks=100)
    with trio.fail_after(PATIENCE_SECONDS):
        outcome = await network_events.run(scenario, "own", "h2")
    assert not outcome.failed
    assert outcome.ok == outcome.retries == 100
    assert outcome.circuits_opened == 0


async def test_an_upstream_that_drops_every_connection_gets_no_storm_of_retries():
    scenario = Scenario("every connection drops", first="die", tasks=100)
    began = trio.current_time()
    with trio.fail_after(PATIENCE_SECONDS):
        outcome = await network_events.run(scenario, "own", "h2")
    seconds, policy = trio.current_time() - began, BudgetPolicy()
    assert outcome.ok == 0
    free = 100 * (1 + seconds // policy.incident_seconds)
    earned = policy.reserve + 100 * policy.deposit_per_call + seconds * policy.floor_per_second
    assert 100 <= outcome.retries <= free + earned
