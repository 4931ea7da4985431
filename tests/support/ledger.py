"""A ledger of acknowledged events and of runs, and the comparison of both.

The sender writes a line for each id that was answered 200; the handler writes one at its beginning
and one at its end. Each line is one ``write`` to a file opened with O_APPEND, so it survives a kill
of its writer. Times are nanoseconds of the monotonic clock, which all processes of a machine share.
"""

import bisect
import collections
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf

import attrs

#: Ids of one ordered lane: its name, and the position in it.
_IN_LANE = re.compile(r"(lane\d+)_(\d+)").fullmatch

#: Final states of an acknowledged event.
FINAL = frozenset({"done", "dead", "parked"})


@attrs.frozen
class Run:
    """One run of a handler; ``end`` is the time at which its process died if it wrote none.

    ``finished``: the handler returned, even if its outcome was not recorded.
    """

    webhook_id: str
    pid: int
    start: int
    end: int
    finished: bool


@attrs.frozen
class Again:
    """A repeated run after a finished one.

    ``before_death_ms`` is the time between that end and a death; None without a death. ``faulty``:
    the disk failed between the end and that death, or between both runs.
    """

    webhook_id: str
    before_death_ms: float | None
    faulty: bool


@attrs.frozen
class Account:
    """The comparison: ids by their result."""

    acknowledged: int
    states: Mapping[str, int]
    lost: Sequence[str]
    never_finished: Sequence[str]
    again: Sequence[Again]
    out_of_order: Sequence[str]
    overlapping: Sequence[str]

    @property
    def again_without_reason(self) -> list[Again]:
        """Events that ran again although neither their process died nor the disk failed."""
        return [again for again in self.again if again.before_death_ms is None and not again.faulty]

    @property
    def broken(self) -> bool:
        """Whether a guarantee was violated."""
        return bool(
            self.lost
            or self.never_finished
            or self.out_of_order
            or self.overlapping
            or self.again_without_reason
        )


def by_process(
    lines: Iterable[str], deaths: Iterable[tuple[int, int]]
) -> tuple[list[str], dict[int, int]]:
    """Replace each pid by a unique number, because the system reuses the pids of ended processes.

    Args:
        lines: those of handlers, as in :func:`runs_of`.
        deaths: pid and moment of each death.

    Returns:
        the lines with those numbers, and the moments of the deaths by them.
    """
    moments: dict[int, list[int]] = collections.defaultdict(list)
    for pid, moment in deaths:
        bisect.insort(moments[pid], moment)
    numbers: dict[tuple[int, int], int] = {}
    died: dict[int, int] = {}
    numbered = []
    for line in lines:
        stamp, what, webhook_id, pid = line.split()
        of_pid = moments[int(pid)]
        dead_before = bisect.bisect_left(of_pid, int(stamp))
        number = numbers.setdefault((int(pid), dead_before), len(numbers))
        if dead_before < len(of_pid):
            died[number] = of_pid[dead_before]
        numbered.append(f"{stamp} {what} {webhook_id} {number}")
    return numbered, died


def runs_of(lines: Iterable[str], deaths: Mapping[int, int], last: int) -> list[Run]:
    """Read the handler's lines: ``stamp start|stop|finish id pid``, in the order of their starts.

    ``deaths`` are the times of the deaths of processes, by pid; ``last`` is the end of a run whose
    process is alive.
    """
    open_runs: dict[tuple[str, int], int] = {}
    runs: list[Run] = []
    for line in lines:
        stamp, what, webhook_id, number = line.split()
        key = (webhook_id, int(number))
        if what == "start":
            if key in open_runs:  # a second, concurrent one in the same process
                runs.append(Run(*key, open_runs.pop(key), last, finished=False))
            open_runs[key] = int(stamp)
        else:
            runs.append(Run(*key, open_runs.pop(key), int(stamp), finished=what == "finish"))
    for (webhook_id, pid), start in open_runs.items():
        runs.append(Run(webhook_id, pid, start, deaths.get(pid, last), finished=False))
    return sorted(runs, key=lambda run: run.start)


def account(
    acknowledged: Collection[str],
    runs: Sequence[Run],
    states: Mapping[str, str],
    *,
    deaths: Mapping[int, int],
    faults: Sequence[tuple[int, int]],
) -> Account:
    """Compare the acknowledged events with the runs and with the states in the store.

    Args:
        acknowledged: the ids that were answered 200.
        runs: what :func:`runs_of` returned.
        states: the state of each id in the store, after all has been drained.
        deaths: the moment of each process's death, by its pid.
        faults: begin and end of each time in which the disk failed.
    """
    by_id: dict[str, list[Run]] = collections.defaultdict(list)
    for run in runs:
        by_id[run.webhook_id].append(run)
    finished = {run.webhook_id for run in runs if run.finished}
    dead = {webhook_id for webhook_id, state in states.items() if state == "dead"}
    return Account(
        acknowledged=len(acknowledged),
        states=collections.Counter(states.get(one, "unknown") for one in acknowledged),
        lost=sorted(one for one in acknowledged if states.get(one) not in FINAL),
        never_finished=sorted(
            one for one, state in states.items() if state == "done" and one not in finished
        ),
        again=[again for one in by_id.values() for again in _again(one, deaths, faults)],
        out_of_order=_out_of_order(runs, dead),
        overlapping=[one for one, mine in by_id.items() if _overlap(mine)],
    )


def _again(
    runs: Sequence[Run], deaths: Mapping[int, int], faults: Sequence[tuple[int, int]]
) -> Iterable[Again]:
    """Yield each run of one id after a finished one."""
    done: Run | None = None
    for run in runs:
        if done is not None:
            died = deaths.get(done.pid)
            until = run.start if died is None else min(died, run.start)
            faulty = any(begin <= until and done.end <= end for begin, end in faults)
            between = died is not None and died <= run.start
            yield Again(
                run.webhook_id, (died - done.end) / 1e6 if between and died else None, faulty
            )
        if run.finished:
            done = run


def _overlap(runs: Sequence[Run]) -> bool:
    return any(after.start < before.end for before, after in itertools.pairwise(runs))


def _out_of_order(runs: Sequence[Run], dead: Collection[str]) -> list[str]:
    """Return the runs of an ordered lane that were out of order.

    An event of a lane begins when every earlier one has finished or is a dead letter. No other one
    runs concurrently, and no earlier one begins after it.
    """
    lanes: dict[str, list[tuple[int, Run]]] = collections.defaultdict(list)
    for run in runs:
        if match := _IN_LANE(run.webhook_id):
            lanes[match[1]].append((int(match[2]), run))
    found: list[str] = []
    for lane in lanes.values():
        through = {number: 0 for number, run in lane if run.webhook_id in dead}
        for number, run in lane:
            if run.finished:
                through[number] = min(run.end, through.get(number, run.end))
        furthest, busy_until = -1, 0
        for number, run in lane:
            waited = all(through.get(one, inf) <= run.start for one in range(number))
            if not waited or number < furthest or run.start < busy_until:
                found.append(run.webhook_id)
            furthest, busy_until = max(furthest, number), max(busy_until, run.end)
    return found
