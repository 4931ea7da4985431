"""``simulate``: run the application in simulations with injected faults."""

from __future__ import annotations

import json
import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

from ..errors import EXIT_FAILURE
from .parse import UsageError, add_number, describing

if not describing():
    from ..testing.simulation.plan import World
    from ..testing.simulation.run import SimulationFailedError, simulate
    from ..testing.simulation.stories import written_test
    from ..webhooks import HandlerRegistry
    from .application import AppNotFoundError, import_part
    from .terminal import Progress, print_text, say

#: The number of seeds without ``--seeds``.
SEEDS = 100


def simulate_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``simulate``."""
    parser.add_argument(
        "--app",
        metavar="MODULE:ATTR",
        required=True,
        help="the HandlerRegistry, or a function that returns one for each seed",
    )
    add_number(
        parser,
        "--seeds",
        greatest=10_000_000,
        default=SEEDS,
        help=f"number of seeds to run, from 0 (default {SEEDS})",
    )
    parser.add_argument(
        "--seed", metavar="S", type=int, help="run only this seed, to replay a failure"
    )
    parser.add_argument(
        "--hours",
        metavar="H",
        type=_hours,
        help="hours of virtual time during which events and faults occur",
    )
    add_number(
        parser, "--jobs", greatest=1024, default=1, help="number of processes that share the seeds"
    )
    parser.add_argument(
        "--check",
        metavar="MODULE:FUNCTION",
        help="called after each seed; raises AssertionError to fail it",
    )
    parser.add_argument(
        "--upstream",
        metavar="MODULE:FUNCTION",
        help="returns the upstream that handlers call, such as a MockUpstream",
    )
    parser.add_argument(
        "--write-test", metavar="FILE", help="write the failure to this file, as a pytest test"
    )


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = 0.0
    if not 0 < hours < math.inf:
        raise ArgumentTypeError(f"{text!r} is not a number of hours above 0, such as 0.5")
    return hours


def simulate_app(arguments: Namespace) -> int:
    """Simulate the application; if a seed fails, print its sequence of events and return 1.

    Raises:
        AppNotFoundError: ``--app``, ``--check`` or ``--upstream`` cannot be imported or has the
            wrong type.
        NotSupportedError: there is nothing to simulate, or this release of Trio is not supported.
    """
    handlers = import_part("--app", arguments.app, object, example="app:handlers")
    if not isinstance(handlers, HandlerRegistry) and not callable(handlers):
        raise AppNotFoundError(
            f"--app {arguments.app} is a {type(handlers).__name__}: name a HandlerRegistry, or a "
            "function that returns one"
        )
    check = _function("--check", arguments.check)
    upstream = _function("--upstream", arguments.upstream)
    given: dict[str, Any] = {} if arguments.hours is None else {"hours": arguments.hours}
    world = World(settings=_overrides(arguments.set), upstream=upstream, **given)
    seeds = range(arguments.seeds) if arguments.seed is None else [arguments.seed]
    shown = Progress("seeds", len(seeds))
    try:
        report = simulate(
            handlers,
            seeds=seeds,
            world=world,
            check=check,
            progress=lambda _seed: shown.advance(),
            jobs=arguments.jobs,
        )
    except SimulationFailedError as failure:
        print_text(f"{failure}\n\n{_replay(arguments, failure.seed)}")
        if arguments.write_test is not None:
            test = written_test(
                failure.result, arguments.app, arguments.check, world, arguments.upstream
            )
            Path(arguments.write_test).write_text(test, encoding="utf-8")
            say(f"wrote {arguments.write_test}")
        return EXIT_FAILURE
    print_text(str(report))
    return 0


def _function(argument: str, reference: str | None) -> Any:
    if reference is None:
        return None
    found = import_part(argument, reference, object, example=f"app:{argument.removeprefix('--')}")
    if not callable(found):
        raise AppNotFoundError(
            f"{argument} {reference} is not a function: name one as MODULE:FUNCTION"
        )
    return found


def _overrides(texts: list[str]) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set takes KEY=VALUE, not {text!r}")
        try:
            overrides[key.removeprefix("Sdk:")] = json.loads(value)
        except ValueError:
            overrides[key.removeprefix("Sdk:")] = value
    return overrides


def _replay(arguments: Namespace, seed: int) -> str:
    words = ["sdk-trio simulate", f"--app {arguments.app}", f"--seed {seed}"]
    if arguments.hours is not None:
        words.append(f"--hours {arguments.hours:g}")
    if arguments.check is not None:
        words.append(f"--check {arguments.check}")
    if arguments.upstream is not None:
        words.append(f"--upstream {arguments.upstream}")
    words += [f"--set {text}" for text in arguments.set]
    line = " ".join(words)
    return f"replay it with:     {line}\nas a test:          {line} --write-test FILE"
