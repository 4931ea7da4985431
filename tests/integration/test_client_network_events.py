"""Events of the network under twenty calls at once: none is lost, and the circuit stays closed."""

import pytest
import trio
from support import network_events
from support.network_events import CASES, SCENARIOS, TASKS

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
