"""Compare this commit with another one, in the same run.

    python benchmarks/commits.py OTHER/.venv/bin/python [--rounds 5] [--directory /var/tmp]

``OTHER`` is a checkout of the other commit with its own environment. In each round the default
configuration of both runs once for each row, in alternating order: inline and enqueued at 500
deliveries a second, the same over a fresh connection each, and at full load, enqueued events to
their end. It prints the CPU time of a delivery of both in microseconds (medians), and the ratio of
this commit to the other within a round: median, lowest and highest. It needs two cores and an
otherwise idle machine, takes about five minutes, and ends by itself.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import attrs
from groups import WHOLE, Bench, Figures, at_500, load_closed
from peers import ENQUEUED, INLINE, Server, compile_all, our_servers
from serving import GENERATOR_CORE, Process
from stores import issue_certificate

_Row = tuple[str, str, Callable[[Bench, Process, int], Figures], str]


def _fresh(bench: Bench, process: Process, number: int) -> Figures:
    return at_500(bench, process, number, fresh=True)


def _full(bench: Bench, process: Process, number: int) -> Figures:
    del number
    return load_closed(bench, process)


#: Name, server, load, and the figure that is compared.
ROWS: tuple[_Row, ...] = (
    ("inline, 500/s", INLINE, at_500, "cpu_us"),
    ("enqueued, 500/s", ENQUEUED, at_500, "cpu_us"),
    ("inline, fresh", INLINE, _fresh, "cpu_us"),
    ("enqueued, fresh", ENQUEUED, _fresh, "cpu_us"),
    ("inline, full load", INLINE, _full, "cpu_us"),
    ("enqueued, full load, to done", "enqueued-open", _full, "done_cpu_us"),
)


def main() -> int:
    """Measure every row in every round, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", help="the interpreter of the other commit's environment")
    parser.add_argument("--rounds", type=int, default=WHOLE.rounds)
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"))
    options = parser.parse_args()
    os.sched_setaffinity(0, {GENERATOR_CORE})
    compile_all()
    servers = our_servers()
    scale = attrs.evolve(WHOLE, rounds=options.rounds)
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="commits") as place:
        directory = Path(place)
        bench = Bench(servers, directory, issue_certificate(directory), scale, _say)
        for number in range(options.rounds):
            for name, server, load, figure in ROWS:
                _say(f"round {number + 1}: {name}")
                pair = [servers[server], _with(servers[server], options.other)]
                turned = number % 2 == 1
                costs = [
                    _cost(bench, one, load, figure, number) for one in pair[:: -1 if turned else 1]
                ]
                found.setdefault(name, []).append(tuple(costs[:: -1 if turned else 1]))
    print("| row | this commit, us | the other, us | ratio: median (lowest to highest) |")
    print("|---|---|---|---|")
    for name, pairs in found.items():
        ratios = [this / other for this, other in pairs]
        this, other = (statistics.median(values) for values in zip(*pairs, strict=True))
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {name} | {this:.0f} | {other:.0f} | {spread} |")
    return 0


def _with(server: Server, python: str) -> Server:
    return attrs.evolve(server, command=(python, *server.command[1:]))


def _cost(
    bench: Bench,
    server: Server,
    load: Callable[[Bench, Process, int], Figures],
    figure: str,
    number: int,
) -> float:
    with bench.serving(server) as process:
        process.settle()
        cost = load(bench, process, number)[figure]
    assert isinstance(cost, float)
    return cost


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
