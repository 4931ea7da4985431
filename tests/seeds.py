"""Simulate many small worlds, each with sizes, parts and faults of its own.

    python tests/seeds.py [--seeds N] [--first N] [--jobs N] [--minutes M] [--bug NAME]

The seed draws the world too: one to three processes, two to twelve events, tenants, other sources,
an upstream or the feed, and a part of the kinds of faults (*swarm testing*, Groce and others,
ISSTA 2012). A line a minute shows the progress. At the end it prints the sums, and each seed that
failed with its violations; the exit status is then 1. A world that ends with an exception, or that
does not end, is a failed one too. ``--bug`` plants one of
``tests/planted_bugs.py``, and ends at the first seed that finds it.
"""

import argparse
import multiprocessing
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, nullcontext

import attrs
import msgspec
import planted_bugs

from sdk_trio.testing import World
from sdk_trio.testing.simulation.plan import FAULTS, make_plan
from sdk_trio.testing.simulation.run import handled_types
from sdk_trio.testing.simulation.world import Result, Simulation

#: The kinds of worlds, each as often as it is drawn.
KINDS = (*("plain",) * 5, *("tenants",) * 2, "sources", "upstream", "feed")

#: Seconds between two lines of progress.
PROGRESS_SECONDS = 60.0

#: Seconds after which a world that has not ended is given up; most take less than one.
WORLD_SECONDS = 120

#: Chunks of seeds after which a process is replaced, so that nothing that one keeps can grow.
CHUNKS_OF_A_PROCESS = 100


class Outcome(msgspec.Struct):
    """The outcome of one seed; ``hours`` are virtual, ``cpu`` is in seconds."""

    seed: int
    kind: str
    events: int
    acknowledged: int
    runs: int
    faults: tuple[str, ...]
    hours: float
    cpu: float
    violations: tuple[str, ...]


def world_of(seed: int) -> tuple[str, World]:
    """Return the kind and the world of a seed."""
    dice = random.Random(f"{seed}/world")
    kind = dice.choice(KINDS)
    events = dice.choice((2, 3, 4, 5, 6, 8, 12))
    world = World(
        events=events,
        subjects=dice.randint(1, max(1, events // 2)),
        hours=events * dice.choice((0.2, 1.0, 3.0)) / 3600,
        faults=[fault for fault in FAULTS if dice.random() < 0.5],
        most_faults=dice.choice((0, 1, 2, 2, 3, 5)),
        troubles=dice.random() < 0.7,
        processes=1 if kind == "feed" else dice.choice((1,) * 7 + (2, 2, 3)),
        tenants=2 if kind == "tenants" else 0,
        sources=planted_bugs.SOURCES if kind == "sources" else {},
        upstream=planted_bugs.make_upstream if kind == "upstream" else None,
        feed=kind == "feed",
        settings=_settings(dice),
    )
    return kind, world


def _settings(dice: random.Random) -> dict[str, int]:
    settings = {}
    if dice.random() < 0.3:
        # Deliveries are also accepted while the clock is wrong by an hour.
        settings["Webhooks:ToleranceSeconds"] = 7200
    if dice.random() < 0.2:
        settings["Webhooks:Queue:Workers"] = 1
    return settings


def simulate(seed: int) -> Outcome:
    """Run the world of a seed."""
    begun = time.process_time()
    kind, world = world_of(seed)
    handlers = planted_bugs.handlers_for(world)
    plan = make_plan(seed, world, handled_types(handlers))
    result: Result = Simulation(plan, world, lambda: handlers).run()
    return Outcome(
        seed,
        f"{kind}, {world.processes}",
        world.events,
        result.acknowledged,
        result.runs,
        tuple(fault.kind for fault in plan.faults),
        result.seconds / 3600,
        time.process_time() - begun,
        tuple(f"{each.at:.3f} {each.kind}: {each.text}" for each in result.violations),
    )


class WorldHangsError(BaseException):
    """A world does not end. No code of the product catches it."""


def simulate_any(seed: int) -> Outcome:
    """Run the world of a seed; an exception, or an end that does not come, is a violation."""
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(WORLD_SECONDS)
    try:
        return simulate(seed)
    except (Exception, WorldHangsError):
        error = traceback.format_exc(limit=-8)
        return Outcome(seed, "failed", 0, 0, 0, (), 0.0, 0.0, (error,))
    finally:
        signal.alarm(0)


def _give_up(_number: int, _frame: object) -> None:
    raise WorldHangsError(f"the world has not ended in {WORLD_SECONDS} s")


def outcomes(seeds: range, jobs: int) -> Iterator[Outcome]:
    """Yield the outcome of each seed, as they end."""
    if jobs == 1:
        yield from map(simulate_any, seeds)
        return
    context = multiprocessing.get_context("fork")
    with context.Pool(jobs, maxtasksperchild=CHUNKS_OF_A_PROCESS) as pool:
        yield from pool.imap_unordered(simulate_any, seeds, chunksize=20)


@attrs.define
class Sums:
    """The sums of many outcomes."""

    worlds: int = 0
    acknowledged: int = 0
    runs: int = 0
    hours: float = 0.0
    cpu: float = 0.0
    kinds: Counter[str] = attrs.field(factory=Counter)
    faults: Counter[str] = attrs.field(factory=Counter)
    failed: list[Outcome] = attrs.field(factory=list)

    def add(self, outcome: Outcome) -> None:
        """Add one outcome."""
        self.worlds += 1
        self.acknowledged += outcome.acknowledged
        self.runs += outcome.runs
        self.hours += outcome.hours
        self.cpu += outcome.cpu
        self.kinds[outcome.kind] += 1
        self.faults.update(outcome.faults)
        if outcome.violations:
            self.failed.append(outcome)

    def __str__(self) -> str:
        return (
            f"{self.worlds} worlds, {len(self.failed)} failed, {self.acknowledged} acknowledged, "
            f"{self.runs} runs, {self.faults.total()} faults, {self.hours:.1f} virtual hours, "
            f"{self.cpu:.0f} s of CPU time"
        )


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Run the seeds and print the sums."""
    plants = {bug.plant.__name__: bug.plant for bug in planted_bugs.BUGS}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--bug", choices=plants)
    options = parser.parse_args()
    plant = plants.get(options.bug, nullcontext)
    seeds = range(options.first, options.first + options.seeds)
    until = time.monotonic() + options.minutes * 60
    shown = time.monotonic()
    sums = Sums()
    with plant(), closing(outcomes(seeds, options.jobs)) as found:
        for outcome in found:
            sums.add(outcome)
            if outcome.violations:
                _say(f"seed {outcome.seed} ({outcome.kind}): {outcome.violations}")
            if time.monotonic() > shown + PROGRESS_SECONDS:
                shown = time.monotonic()
                _say(f"{time.strftime('%H:%M:%S')} {sums}")
            if time.monotonic() > until or (outcome.violations and options.bug):
                break
    _say(str(sums))
    _say(f"by kind and processes: {dict(sums.kinds.most_common())}")
    _say(f"by fault: {dict(sums.faults.most_common())}")
    return 1 if sums.failed else 0


if __name__ == "__main__":
    sys.exit(main())
