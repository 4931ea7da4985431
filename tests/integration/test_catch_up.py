"""Catch-up by state after outages in which the upstream disabled the endpoint."""

import trio
from support.outage import at, disable, order, shop, subscription
from support.waiting import until

HOUR = 3600.0


async def test_the_state_of_a_gap_is_put_once_and_running_it_again_changes_nothing(tmp_path):
    async with shop(Storage__Path=str(tmp_path)) as place:
        upstream, clock = place.upstream, place.clock
        async with place.running():
            now = clock()
            for number in range(30):
                record = order(f"ord_{number:03}", created=now - 3 * HOUR, modified=now)
                upstream.change("orders", record, "order.created", "order.paid", "order.updated")
            await until(lambda: len(place.got) == 90)
            assert await place.catch_up() is None  # no gap
        await disable(place)
        clock.move(hours=1)
        now = clock()
        for number in range(20):
            for later in (1, 2):  # of several states the last one can be known
                record = order(f"ord_{number:03}", created=now - 4 * HOUR, modified=now + later)
                upstream.change("orders", record, "order.updated")
        for number in range(150):
            record = order(f"ord_new_{number:03}", created=now, modified=now + 3)
            upstream.change("orders", record, "order.created", "order.paid", "order.updated")
        assert upstream.organization.skipped_unrecorded == 40 + 450
        place.got.clear()
        clock.move(hours=2)
        async with place.running():
            assert await place.catch_up() is None  # still disabled
            assert place.got == []
            upstream.enable()
            finished = await place.catch_up()
            new = [(f"ord_new_{number:03}", at(now + 3)) for number in range(150)]
            changed = [(f"ord_{number:03}", at(now + 2)) for number in range(20)]
            assert place.states("order.updated", synthetic=True) == sorted(changed + new)
            # What the upstream had tried to deliver came from it, by a request.
            redelivered = [name for name, _ in place.states("order.updated", synthetic=False)]
            assert redelivered == [f"ord_lost_{number}" for number in range(10)]
            for event_type in ("order.paid", "order.created"):
                names = [name for name, _ in place.states(event_type)]
                assert names == sorted(redelivered + [name for name, _ in new])
            assert finished.uncertain == 0
            count = len(place.got)
            assert await place.catch_up() is None
            clock.move(hours=1)  # without contact: the same states are compared again
            again = await place.catch_up()
            assert (again.put, len(place.got)) == (0, count)
