"""Cells: a task that cancels its nursery ends only itself."""

import contextvars
import gc
import weakref

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from sdk_trio.base import cells as module
from sdk_trio.base.cells import Cells, current_cell, is_cell_cancelled, run_in_cell


def cancel_own_nursery():
    trio.lowlevel.current_task().parent_nursery.cancel_scope.cancel()


async def test_a_task_that_cancels_its_nursery_ends_alone():
    ended = []

    async def beside():
        await wait_all_tasks_blocked()
        ended.append("beside")

    async def odd():
        cancel_own_nursery()
        assert is_cell_cancelled()
        try:
            await trio.sleep_forever()
        finally:
            ended.append("odd")

    async with trio.open_nursery() as nursery:
        cells = Cells(nursery)
        cells.start_soon(beside)
        cells.start_soon(odd)
        await wait_all_tasks_blocked()
        cells.start_soon(beside)
        cells.close()
    assert ended == ["odd", "beside", "beside"]


async def test_a_cancellation_from_outside_is_not_the_cells_own():
    seen = []

    async def task():
        try:
            await trio.sleep_forever()
        finally:
            seen.append(is_cell_cancelled())

    for _ in range(20):  # Trio wakes the tasks in any order
        async with trio.open_nursery() as nursery:
            Cells(nursery).start_soon(task)
            nursery.start_soon(run_in_cell, task)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    assert seen == [False] * 40


async def test_a_cell_is_reused_unless_it_was_cancelled(monkeypatch):
    monkeypatch.setattr(module, "_MOST_IDLE", 1)
    used = []

    async def task(ending=lambda: None):
        used.append(current_cell())
        ending()
        await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        cells = Cells(nursery)
        for ending in (lambda: None, lambda: None, cancel_own_nursery, lambda: None):
            cells.start_soon(task, ending)
            await wait_all_tasks_blocked()
        first, second, third, fourth = used
        assert first is second is third is not fourth
        cells.start_soon(task)
        cells.start_soon(task)
        await wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 1, "idle cells are bounded"
        cells.close()


async def test_a_task_has_its_own_context_which_ends_with_it():
    class Held:
        pass

    held = Held()
    variable = contextvars.ContextVar("held")
    context = contextvars.copy_context()
    context.run(variable.set, held)
    seen = []

    async def task():
        seen.append(variable.get(None) is not None)

    async with trio.open_nursery() as nursery:
        cells = Cells(nursery)
        for given in (context, None):
            cells.start_soon(task, context=given)
            await wait_all_tasks_blocked()
        watched = weakref.ref(held)
        del held, context, given
        gc.collect()
        assert watched() is None
        cells.close()
    assert seen == [True, False]


async def test_an_exception_of_a_task_leaves_the_nursery():
    async def fails():
        raise ValueError("odd")

    with pytest.RaisesGroup(pytest.RaisesGroup(ValueError)):
        async with trio.open_nursery() as nursery:
            Cells(nursery).start_soon(fails)
            await trio.sleep_forever()


async def test_a_child_task_of_user_code_is_not_in_the_cell():
    seen = []

    async def child():
        seen.append(current_cell())

    async def task():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)

    await run_in_cell(task)
    assert seen == [None]
