"""Deliveries a second, CPU, latency, memory, start and end of ours and of peers, in one run.

    python benchmarks/deliveries.py [--rounds 5] [--seconds 4] [--connections 32] [--only NAME...]

Every round runs every server once, in a rotated order; ratios are taken within a round, so that a
machine whose speed drifts does not change them. Server and load generator have a core each where
the machine has two. Absolute figures say little about another machine; the ratios do. A run in
which a server was not saturated is refused: it ends with status 1 and says which.
"""

import argparse
import json
import sys

from figures import goals, problems, table
from peers import HERE, servers
from serving import load, serving

RESULTS = HERE / "results" / "deliveries.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--rate", type=int, default=20_000, help="prepared deliveries a second")
    parser.add_argument("--only", nargs="+", help="names of servers; all without it")
    options = parser.parse_args()
    chosen = [server for server in servers() if not options.only or server.name in options.only]
    runs: dict[str, list[dict[str, float]]] = {server.name: [] for server in chosen}
    for number in range(options.rounds):
        turn = number % len(chosen)
        for server in chosen[turn:] + chosen[:turn]:
            print(f"round {number + 1} of {options.rounds}: {server.name}", file=sys.stderr)
            with serving(server) as process:
                figures = load(
                    process,
                    connections=options.connections,
                    seconds=options.seconds,
                    rate=options.rate,
                )
            runs[server.name].append({**figures, "stop_ms": process.stop_ms})
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"options": vars(options), "runs": runs}, indent=1))
    print(table(runs, chosen), goals(runs), sep="\n\n")
    found = problems(runs, chosen)
    print(*found, sep="\n", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
