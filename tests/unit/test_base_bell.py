"""A bell wakes only tasks that wait at that moment; a flag stays set until it is seen."""

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from sdk_trio.base.bell import Bell, Flag


async def test_a_ring_wakes_all_waiters_and_is_not_stored():
    bell = Bell()
    woken = []

    async def wait(name: str) -> None:
        await bell.wait()
        woken.append(name)

    with trio.fail_after(30):
        bell.ring()  # no task waits
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, "a")
            nursery.start_soon(wait, "b")
            await wait_all_tasks_blocked()
            assert woken == []
            bell.ring()
            await wait_all_tasks_blocked()
            assert sorted(woken) == ["a", "b"]
            nursery.start_soon(wait, "c")
            await wait_all_tasks_blocked()
            assert len(woken) == 2
            bell.ring()


async def test_waiting_is_a_checkpoint_and_can_be_cancelled():
    bell = Bell()
    with trio.move_on_after(0), pytest.raises(trio.Cancelled), assert_checkpoints():
        await bell.wait()
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bell.wait)
            await wait_all_tasks_blocked()
            bell.ring()


@given(st.lists(st.sampled_from(["wait", "ring", "cancel"]), max_size=20))
def test_each_ring_wakes_exactly_the_current_waiters(steps):
    async def main() -> None:
        bell = Bell()
        waiting: dict[int, trio.CancelScope] = {}
        woken: list[int] = []

        async def wait(name: int) -> None:
            with trio.CancelScope() as scope:
                waiting[name] = scope
                await bell.wait()
                woken.append(name)

        async with trio.open_nursery() as nursery:
            for number, step in enumerate(steps):
                due = sorted(waiting)
                if step == "wait":
                    nursery.start_soon(wait, number)
                    due = []
                elif step == "ring":
                    bell.ring()
                    waiting.clear()
                else:
                    for name in due[:1]:
                        waiting.pop(name).cancel()
                    due = []
                await wait_all_tasks_blocked()
                assert sorted(woken) == due
                woken.clear()
            nursery.cancel_scope.cancel()

    trio.run(main)


async def test_a_flag_stays_up_until_its_task_has_seen_it_and_counts_once():
    flag = Flag()
    with trio.fail_after(30):
        flag.set()
        flag.set()
        with assert_checkpoints():
            await flag.wait()
    with trio.move_on_after(0) as scope:
        await flag.wait()
    assert scope.cancelled_caught, "it was taken down"


async def test_a_flag_that_is_raised_at_a_cancelled_wait_is_left_up():
    flag = Flag()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(flag.wait)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        flag.set()
    with trio.fail_after(30):
        await flag.wait()


@given(st.lists(st.sampled_from(["up", "wait"]), max_size=20))
def test_no_raising_of_a_flag_is_missed_and_none_is_seen_twice(steps):
    async def main() -> None:
        flag = Flag()
        is_up = False
        for step in steps:
            if step == "up":
                flag.set()
                is_up = True
            else:
                seen = False
                with trio.move_on_after(0):
                    await flag.wait()
                    seen = True
                # A wait that is cancelled already sees nothing, and leaves the flag up.
                assert not seen
                if is_up:
                    await flag.wait()
                is_up = False

    trio.run(main)
