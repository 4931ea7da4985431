"""Enforce the time limit of queued runs, and log long runs."""

from collections.abc import Iterator, Mapping
from math import inf

import trio

from .arrival import VerifiedDelivery
from .invocation import Invocations, Run

#: Seconds after which a run is reported as long, and its worker counts as occupied.
LONG_RUN_SECONDS = 60.0

#: The interval in seconds at which runs are compared with their limits.
WATCH_SECONDS = 1.0


class RunWatch:
    """Compares runs with their limits once a second.

    This adds no cost to a run; a cancel scope around each would cost as much as checking its
    signature.

    Args:
        invocations: knows the running handlers.
        running: the queue's events by the cells that run them.
        limit: the maximum duration of a run in seconds; None: no limit.
    """

    def __init__(
        self,
        invocations: Invocations,
        running: Mapping[trio.Nursery, VerifiedDelivery],
        limit: float | None,
    ) -> None:
        self._invocations = invocations
        self._running = running
        self._limit = inf if limit is None else limit
        # Seconds after which each long run is reported next, by its key.
        self._next_report: dict[str, float] = {}

    @property
    def long_runs(self) -> tuple[Run, ...]:
        """Return the runs of the queue that have lasted ``LONG_RUN_SECONDS`` or more."""
        seconds_of = self._invocations.seconds_of
        return tuple(run for _, run in self._runs() if seconds_of(run) >= LONG_RUN_SECONDS)

    def _runs(self) -> Iterator[tuple[trio.Nursery, Run]]:
        """Yield the handlers of queued events that run, each with its cell."""
        for cell, arrival in [*self._running.items()]:
            run = self._invocations.running.get(arrival.delivery.key)
            if run is not None:
                yield cell, run

    async def run(self) -> None:
        """Watch until cancelled.

        Then log the plain functions that still run in threads: the drain was cut short, and they
        cannot be stopped.
        """
        try:
            while True:
                await trio.sleep(min(WATCH_SECONDS, self._limit / 2))
                self._cancel_late_runs()
                self._report_long_runs()
        finally:
            self._invocations.report_threads()

    def _cancel_late_runs(self) -> None:
        for cell, run in self._runs():
            is_late = self._invocations.seconds_of(run) >= self._limit
            if is_late and not cell.cancel_scope.cancel_called:
                self._invocations.time_out(run, cell, self._limit)
                if run.threaded:
                    self._invocations.report_still_running(run)

    def _report_long_runs(self) -> None:
        """Log each run that has lasted a minute, and again each time that it has doubled."""
        reports: dict[str, float] = {}
        for run in self._invocations.runs:
            due = self._next_report.get(run.key, LONG_RUN_SECONDS)
            if self._invocations.seconds_of(run) >= due:
                self._invocations.report_still_running(run)
                due *= 2
            if due > LONG_RUN_SECONDS:
                reports[run.key] = due
        self._next_report = reports
