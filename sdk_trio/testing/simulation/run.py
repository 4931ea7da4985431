"""Simulations of many seeds, and the story of the first failure."""

import inspect
import multiprocessing
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing

import attrs
import msgspec
import trio

from ...errors import NotSupportedError
from ...events.samples import sample_types
from ...records.deliveries import DeliveryRecord
from ...webhooks import HandlerRegistry
from .plan import SimulationPlan, World, make_plan
from .stories import describe, shrink
from .world import Result, Simulation

#: Handlers, or a function that creates them for each seed.
Handlers = HandlerRegistry | Callable[[], HandlerRegistry]

#: Called at the end of each seed, with the records of the store if it takes an argument.
Check = Callable[..., object]


class SimulationFailedError(AssertionError):
    """A seed has failed; the message is its story.

    ``result`` is that of the shrunk plan, and ``seed`` the number that replays it.
    """

    def __init__(self, result: Result, story: str) -> None:
        super().__init__(story)
        self.result = result
        self.seed: int = result.plan.seed


@attrs.frozen(kw_only=True)
class SimulationReport:
    """The sums over clean seeds; ``hours`` are virtual ones."""

    seeds: int
    hours: float
    acknowledged: int
    runs: int

    def __str__(self) -> str:
        return (
            f"{self.seeds} seeds, none failed: {self.acknowledged} events acknowledged, "
            f"{self.runs} runs of handlers, {self.hours:.2f} virtual hours"
        )


def simulate(
    handlers: Handlers,
    *,
    seeds: int | Iterable[int] = 100,
    world: World | None = None,
    check: Check | None = None,
    plan: str | None = None,
    progress: Callable[[int], object] | None = None,
    jobs: int = 1,
) -> SimulationReport:
    """Run the real runtime with these handlers in virtual worlds full of faults.

    Each seed is one ``trio.run``; call it outside of any event loop. Randomness, time, threads,
    sockets and SQLite's disk are replaced in the whole process meanwhile.

    Args:
        handlers: the handlers under test, or a function that creates them for each seed.
        seeds: the number of seeds, counted from 0, or the seeds themselves.
        world: describes the worlds.
        check: called after each seed, raises AssertionError. Its argument, if it takes one, is the
            sequence of the store's :class:`~sdk_trio.records.deliveries.DeliveryRecord`.
        plan: a plan in JSON, as in a test that was written for a failure; ``seeds`` is then
            ignored.
        progress: called with each seed before it runs, or with ``jobs`` after it has run.
        jobs: the number of processes that share the seeds; they are forks of this one.

    Returns:
        The sums over all seeds, if none failed.

    Raises:
        SimulationFailedError: a seed failed: an event was lost, ran twice or ended dead, an
            assertion of a handler or of ``check`` failed, or the runtime broke another promise.
        NotSupportedError: this release of Trio cannot be simulated, a loop is running, or the
            application handles no type with a sample.
    """
    _require_no_loop()
    world = World() if world is None else world
    if plan is not None:
        result = _run(msgspec.json.decode(plan, type=SimulationPlan), world, handlers, check)
        _require_clean(result, None)
        return _summed([result])
    types = handled_types(_made(handlers), required=not world.sources)

    def run(plan: SimulationPlan) -> Result:
        return _run(plan, world, handlers, check)

    def run_seed(seed: int) -> Result:
        return run(make_plan(seed, world, types))

    numbers = range(seeds) if isinstance(seeds, int) else seeds
    results = []
    found = (
        _in_turn(numbers, run_seed, progress)
        if jobs == 1
        else _shared(numbers, run_seed, progress, jobs)
    )
    # Closed before another simulation runs in this process: the threads and finalizers of a pool
    # would meet its clock and its process id.
    with closing(found):
        for result in found:
            results.append(result)
            if result.violations:
                break
    if results and results[-1].violations:
        whole = run(results[-1].plan)
        _require_clean(shrink(whole, run), whole)
    return _summed(results)


def _in_turn(
    seeds: Iterable[int],
    run_seed: Callable[[int], Result],
    progress: Callable[[int], object] | None,
) -> Generator[Result]:
    for seed in seeds:
        if progress is not None:
            progress(seed)
        yield _bare(run_seed(seed))


def _shared(
    seeds: Iterable[int],
    run_seed: Callable[[int], Result],
    progress: Callable[[int], object] | None,
    jobs: int,
) -> Generator[Result]:
    """Yield the results of seeds that several processes run, in the order of the seeds."""
    # Forked processes inherit the handlers, which cannot be pickled.
    context = multiprocessing.get_context("fork")
    pool = context.Pool(jobs, initializer=_adopt, initargs=(run_seed,))
    try:
        for result in pool.imap(_run_adopted, seeds):
            if progress is not None:
                progress(result.plan.seed)
            yield result
    finally:
        pool.terminate()
        pool.join()


def _adopt(run_seed: Callable[[int], Result]) -> None:
    global _run_seed
    _run_seed = run_seed


def _run_adopted(seed: int) -> Result:
    return _bare(_run_seed(seed))


#: The function of a process of :func:`_shared`.
_run_seed: Callable[[int], Result]


def _bare(result: Result) -> Result:
    """Return a result without its story, which needs most of the memory."""
    return msgspec.structs.replace(result, story=())


def handled_types(handlers: HandlerRegistry, *, required: bool = True) -> Sequence[str]:
    """Return the handled types that have a sample, or some of each kind for a fallback.

    Raises:
        NotSupportedError: there is none, and one is ``required``.
    """
    samples = sample_types()
    types = [name for name in samples if name in set(handlers)]
    if not types and handlers._fallback is not None:
        types = [name for name in samples if name.startswith("order.")]
    if required and not types:
        raise NotSupportedError(
            "there is nothing to simulate: register a handler of an event type that 'events types' "
            "lists, or a fallback"
        )
    return types


def _require_no_loop() -> None:
    if trio.lowlevel.in_trio_run():
        raise NotSupportedError(
            "a simulation starts an event loop: call simulate() from a plain function, outside of "
            "trio.run"
        )


def _made(handlers: Handlers) -> HandlerRegistry:
    return handlers if isinstance(handlers, HandlerRegistry) else handlers()


def _run(plan: SimulationPlan, world: World, handlers: Handlers, check: Check | None) -> Result:
    made = _made(handlers)
    called: Callable[[Sequence[DeliveryRecord]], object] | None = None
    if check is not None:
        takes = bool(inspect.signature(check).parameters)
        called = check if takes else lambda _records: check()
    return Simulation(plan, world, lambda: made, called).run()


def _summed(results: Sequence[Result]) -> SimulationReport:
    return SimulationReport(
        seeds=len(results),
        hours=sum(result.seconds for result in results) / 3600,
        acknowledged=sum(result.acknowledged for result in results),
        runs=sum(result.runs for result in results),
    )


def _require_clean(result: Result, whole: Result | None) -> None:
    if result.violations:
        raise SimulationFailedError(result, describe(result, whole))
