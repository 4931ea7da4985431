"""The state of all worker processes together: their metrics, and requests to all of them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import attrs
import trio

from ..admin.metrics import add_up, lasting
from ..base.telemetry import Check, Sample
from ..errors import Problem
from .restarts import EndCounter
from .worker import samples_of
from .worker_process import WorkerProcess

#: The seconds that a scrape or a probe waits for current metrics of the processes. Metrics that the
#: processes send regularly are at most a second old.
ASK_SECONDS: Final = 0.5


@attrs.define(eq=False)
class ProcessRequest:
    """A request to several processes: the processes that have not answered, and the problems of
    those that have."""

    pending: set[WorkerProcess]
    problems: list[Problem] = attrs.Factory(list)
    answered: trio.Event = attrs.Factory(trio.Event)

    def remove(self, process: WorkerProcess) -> None:
        """Note that a process has answered or ended."""
        self.pending.discard(process)
        if not self.pending:
            self.answered.set()


class ProcessFigures:
    """Knows the running processes, and sums their figures.

    Args:
        count: the number of processes that should run.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._processes: dict[int, WorkerProcess] = {}
        self._requests: dict[int, ProcessRequest] = {}
        self._asked = 0
        self._handled_types: dict[str, str] = {}
        self._ends = EndCounter()
        # The counters of processes that have ended, so that no sum decreases.
        self._past: list[Sample] = []
        self._past_deliveries: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """The number of processes that should run."""
        return self._count

    @property
    def serving(self) -> int:
        """The number of processes that accept deliveries, as of their last reports."""
        return sum(
            process.ready_at is not None
            and not process.silence_logged
            and not process.report.store_failing
            for process in self._processes.values()
        )

    @property
    def queue_depth(self) -> int:
        """The number of events that wait in the processes' memory."""
        return sum(process.report.queue_depth for process in self._processes.values())

    @property
    def held_workers(self) -> str | None:
        """A description of the long runs that occupy all workers of a process; None if none do."""
        found = (process.report.held_workers for process in self._processes.values())
        return next((text for text in found if text is not None), None)

    @property
    def unfinished(self) -> int:
        """The number of events that wait in the processes' memory or run there."""
        return sum(process.report.unfinished for process in self._processes.values())

    @property
    def deliveries(self) -> Counter[str]:
        """The results of deliveries in all processes, with their numbers."""
        found = Counter(self._past_deliveries)
        for process in self._processes.values():
            found.update(process.report.deliveries)
        return found

    @property
    def handled_types(self) -> dict[str, str]:
        """The event types that have a handler, with its policies, as a process has reported."""
        return self._handled_types

    @property
    def circuits(self) -> list[int]:
        """The states of the processes' circuit breakers, as numbers of their metric."""
        return [
            int(value)
            for process in self._processes.values()
            for name, _, value in process.report.samples
            if name == "sdk_client_circuit_state"
        ]

    def add_samples(self, own: Sequence[Sample]) -> tuple[Sample, ...]:
        """Return the metrics of this process and of all others, summed by the rules of each."""
        others = [samples_of(process.report) for process in self._processes.values()]
        return (
            *add_up([own, self._past, *others]),
            Sample("sdk_processes", (("state", "wanted"),), self.count),
            Sample("sdk_processes", (("state", "serving"),), self.serving),
            Sample("sdk_process_ends_total", (), self._ends.total),
        )

    def check(self) -> Check:
        """Return a check that fails if no process serves, and is degraded if some do not."""
        serving = self.serving
        detail = f"{serving} of {self.count} serve"
        return Check("processes", serving > 0, detail, degraded=serving < self.count)

    def wake(self) -> None:
        """Have the processes poll the store at once."""
        for process in self._processes.values():
            process.post("wake")

    async def refresh(self) -> None:
        """Request the metrics of the processes, and wait at most :data:`ASK_SECONDS`."""
        with self._request() as (number, request):
            for process in request.pending:
                process.post("report", number)
            with trio.move_on_after(ASK_SECONDS):
                await request.answered.wait()

    @contextmanager
    def _request(self) -> Iterator[tuple[int, ProcessRequest]]:
        """Send a request to every process that serves; answers count within the block."""
        self._asked += 1
        number = self._asked
        asked = {process for process in self._processes.values() if process.ready_at is not None}
        request = self._requests[number] = ProcessRequest(asked)
        if not asked:
            request.answered.set()
        try:
            yield number, request
        finally:
            del self._requests[number]

    def _forget(self, process: WorkerProcess) -> None:
        """Remove a process that has ended, and keep its counters."""
        self._processes.pop(process.number, None)
        self._past = add_up([self._past, lasting(samples_of(process.report))])
        self._past_deliveries.update(process.report.deliveries)
        for request in self._requests.values():
            request.remove(process)
