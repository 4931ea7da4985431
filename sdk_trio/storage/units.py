"""Units of work, and batches of them: many units in one transaction.

A batch is committed as a whole. If a unit raises, the batch is rolled back and each unit runs in a
transaction of its own, so that only the one that raises fails. Batches are committed in the thread
of the engine.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import trio

from ..base import clock
from ..base.telemetry import Histogram
from ..errors import StoreUnavailableError
from .engines import CommitUnknownError, Engine
from .sql.dialect import SqlTransaction

T = TypeVar("T")

#: A unit of work: runs in the thread of the engine, within a transaction that it neither begins nor
#: ends. It may run again after a rollback.
Work = Callable[[SqlTransaction], T]

#: Does the work for many items of different keys by few statements; returns their results in order.
Kind = Callable[[SqlTransaction, Sequence[Any]], Sequence[Any]]

#: Upper ends of the buckets of ``sdk_store_commit_seconds``, in seconds.
COMMIT_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Unit:
    """A unit of work on its way through the thread, and the task that waits for it, if any.

    The event loop makes a unit and hands it over. From then on the commit thread alone writes
    ``value`` and ``error``, until it has returned the unit's batch; the other attributes stay the
    event loop's. ``value`` may be set before the commit, which may still fail.

    The class has the defaults: most units differ in few attributes, and each delivery has two.
    """

    work: Callable[[Any], Any] | None = None
    kind: Kind | None = None
    key: str | None = None
    item: Any = None
    #: It runs outside of any transaction.
    outside_transaction = False
    #: It shares its transaction with no other unit.
    single = False
    #: The key of the event whose effects it applies.
    name: str | None = None
    durable = True
    posted = False
    #: It waits for other work to share its transaction.
    lingers = False
    #: The time at which its caller began to wait; infinite for one that waits without a limit.
    asked_at = math.inf
    #: Its caller got the error that the store is silent.
    refused = False
    task: trio.lowlevel.Task | None = None
    #: It was committed or has failed.
    finished = False
    #: It was taken back before it was handed over.
    withdrawn = False
    value: Any = None
    error: BaseException | None = None

    def abort(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        """Let a cancelled caller stop waiting."""
        self.task = None
        return trio.lowlevel.Abort.SUCCEEDED


class Batches:
    """Commits batches through one engine.

    Args:
        engine: belongs to the thread.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._now = clock.current().monotonic
        self.seconds: Histogram = Histogram(COMMIT_BOUNDS)
        #: The key of the event whose effects run. The event loop reads it, only for messages.
        self.effects_key: str | None = None

    def commit(self, batch: Sequence[Unit]) -> bool:
        """Run ``batch`` in one transaction, or each unit in its own when one of them raises."""
        in_work = False

        def work(transaction: SqlTransaction) -> None:
            nonlocal in_work
            in_work = True
            self._perform(batch, transaction)
            in_work = False

        try:
            if batch[0].outside_transaction:
                assert batch[0].work is not None
                batch[0].value = self._engine.run_outside_transaction(batch[0].work)
                return False  # it proves no write: a poll only reads
            durable = any(unit.durable for unit in batch)
            only_item = len(batch) == 1 and batch[0].kind is not None
            begun = self._now()
            wrote = self._engine.transact(work, durable=durable, only_item=only_item)
        except Exception as error:  # each caller of the batch gets it
            if in_work and len(batch) > 1 and not isinstance(error, CommitUnknownError):
                return sum(self.commit((unit,)) for unit in batch) > 0
            _fail(batch, error)
            return False
        if wrote:
            self.seconds.observe(self._now() - begun)
        return wrote

    def _perform(self, batch: Sequence[Unit], transaction: SqlTransaction) -> None:
        """Do the units; those of one kind together, as long as their keys are different ones."""
        gathered: dict[Kind, list[Unit]] = {}
        keys: set[str | None] = set()
        for unit in batch:
            if unit.kind is None or unit.key in keys:
                _perform_kinds(gathered, transaction)
                keys.clear()
            if unit.kind is not None:
                keys.add(unit.key)
                gathered.setdefault(unit.kind, []).append(unit)
            elif unit.work is not None:
                self.effects_key = unit.name
                try:
                    unit.value = unit.work(transaction)
                finally:
                    self.effects_key = None
        _perform_kinds(gathered, transaction)


def _perform_kinds(gathered: dict[Kind, list[Unit]], transaction: SqlTransaction) -> None:
    for kind, units in gathered.items():
        values = kind(transaction, [unit.item for unit in units])
        for unit, value in zip(units, values, strict=True):
            unit.value = value
    gathered.clear()


def _fail(batch: Sequence[Unit], error: Exception) -> None:
    for unit in batch:
        # One object raised in several tasks would mix up their tracebacks.
        shared = len(batch) > 1 and isinstance(error, StoreUnavailableError)
        unit.error = type(error)(str(error)) if shared else error
