"""Silence: what callers do while a store does not answer.

A unit that was handed to the thread is always finished. A cancelled caller waits for it for
:data:`STALL_SECONDS`, any other caller for :data:`ANSWER_SECONDS`. A caller that stops waiting does
not know the outcome: the unit stays in the queue, and is committed when the store answers. Until
then, the store is *silent*, and further callers are refused at once.

Everything here runs in the event loop.
"""

import trio

from ..base import clock
from ..base.logs import Outage, get_logger
from .engines import Engine
from .units import Batches, Unit

#: Time that a caller waits for a store that does not answer, in seconds. A sender of a webhook
#: gives up after 10, and its delivery needs time before and after the store.
ANSWER_SECONDS = 5.0

#: Time that a cancelled caller waits for it, in seconds. It is longer than any sync that ends; with
#: the clean-up behind it, it fits into the 5 s that a stop allows.
STALL_SECONDS = 2.0

#: Time between two checks of the waiting callers, in seconds.
WATCH_SECONDS = 0.5

#: A store whose callers have waited for longer, in seconds, is not prompt.
PROMPT_SECONDS = 0.1

_log = get_logger("storage")

_IN_EFFECTS = (
    "the store {place} has not answered for {seconds:.0f} s: the effects of the event {key} run "
    "in its thread and do not return; SQL alone belongs there, no network and no sleep"
)


class Silence:
    """The callers that wait for a store, and since when it has been silent.

    Args:
        engine: the store's.
        batches: knows the event whose effects run.
        outage: counts the calls that fail.
    """

    def __init__(self, engine: Engine, batches: Batches, outage: Outage) -> None:
        self._engine = engine
        self._batches = batches
        self._outage = outage
        self._now = clock.current().monotonic
        #: In the order of their arrival.
        self.waiting: dict[Unit, None] = {}
        #: None: the store answers.
        self.since: float | None = None
        self._answered_at = 0.0
        self._someone_waits = trio.Event()
        self._watching = trio.CancelScope()
        # A system task: it lives as long as the store, and no nursery of a caller does.
        trio.lowlevel.spawn_system_task(self._watch)

    @property
    def is_prompt(self) -> bool:
        """Whether the store has answered just now, or no one waits for it."""
        return not self.waiting or self._now() - self._answered_at < PROMPT_SECONDS

    def begin(self, unit: Unit) -> None:
        """Note that the caller of ``unit`` begins to wait, for :data:`ANSWER_SECONDS`."""
        unit.asked_at = self._now()
        if not self.waiting:
            self._answered_at = unit.asked_at
            self._someone_waits.set()
        self.waiting[unit] = None

    def end(self) -> None:
        """Note that the store has answered."""
        self.since = None
        self._answered_at = self._now()

    def stop(self) -> None:
        """Stop watching the callers."""
        self._watching.cancel()

    def message(self, seconds: float | None = None) -> str:
        """Return the error of a caller that the silence refuses, after so many seconds."""
        if seconds is None:
            now = self._now()
            seconds = now - (self.since or now)
        key = self._batches.effects_key
        text = self._engine.silence if key is None else _IN_EFFECTS
        return text.format(place=self._engine.place, seconds=seconds, key=key)

    async def wait_again(self, unit: Unit) -> None:
        """Let a cancelled caller wait for the end of its unit."""
        # No unit can finish between the test and the sleep: both are in the event loop.
        if unit.finished or unit.refused:
            await trio.lowlevel.checkpoint()
        else:
            unit.task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(unit.abort)

    async def _watch(self) -> None:
        """Refuse the callers that have waited too long."""
        with self._watching:
            while True:
                await self._someone_waits.wait()
                looked_at = self._now()
                while self.waiting:
                    await trio.sleep(WATCH_SECONDS)
                    # Real time: Trio's clock may run ahead of the disk in tests.
                    now = self._now()
                    self._discount(now - looked_at - 2 * WATCH_SECONDS, now)
                    self._refuse_late(now - ANSWER_SECONDS)
                    looked_at = now
                self._someone_waits = trio.Event()

    def _discount(self, seconds: float, now: float) -> None:
        """Do not blame the store for a time in which this process did not run.

        The store cannot answer a process that is stopped, or whose event loop is blocked.
        """
        if seconds > 0:
            for unit in self.waiting:
                unit.asked_at = min(unit.asked_at + seconds, now)

    def _refuse_late(self, asked_before: float) -> None:
        late = [unit for unit in self.waiting if unit.asked_at <= asked_before]
        if late:
            self.fall(ANSWER_SECONDS)
            self._outage.fail(len(late))
        for unit in late:
            unit.refused = True
            self.waiting.pop(unit, None)
            if unit.task is not None:
                trio.lowlevel.reschedule(unit.task)
                unit.task = None

    def fall(self, seconds: float) -> None:
        """Note that the store has not answered for so many seconds."""
        if self.since is not None:
            return
        self.since = self._now() - seconds
        self._outage.fail(0, seconds=seconds)
        key = self._batches.effects_key
        _log.error(
            "store.stalled",
            waited_seconds=seconds,
            hint="the store does not answer; writes in progress are finished when it does"
            if key is None
            else f"the effects of the event {key} run in the store's thread and do not return; all "
            "deliveries wait for them",
        )
