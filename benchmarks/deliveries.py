"""Deliveries a second, CPU, latency, memory, start and end of ours and of peers, in one run.

    python benchmarks/deliveries.py [--rounds 5] [--seconds 4] [--connections 32] [--processes 1 2]
                                    [--tls] [--finished 1000000] [--only NAME...]

Every round runs every server once, in a rotated order; ratios are taken within a round, so that a
machine whose speed drifts does not change them. Every process of a server and as many load
generators have a core each, where the machine has that many. Absolute figures say little about
another machine; the ratios do. The rate of a server that was not saturated is refused: it is left
out of the tables, the run ends with status 1 and says which.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from figures import goals, problems, table
from peers import FINISHED, HERE, TLS, Server, servers
from serving import DATABASE, drain, load, serving
from stores import Certificate, fill_store, issue_certificate

RESULTS = HERE / "results" / "deliveries.json"


def main() -> int:
    options = _parser().parse_args()
    kept = {"options": vars(options), "cores": len(os.sched_getaffinity(0)), "runs": {}}
    reasons: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory) / DATABASE
        asked = [TLS] * options.tls + [FINISHED] * bool(options.finished)
        certificate = issue_certificate(Path(directory))
        if options.finished:
            fill_store(store, options.finished)
        for processes in options.processes:
            found = servers(asked, processes=processes, store=store)
            chosen = [server for server in found if not options.only or server.name in options.only]
            runs = kept["runs"][processes] = {server.name: [] for server in chosen}
            for server in _in_rounds(chosen, options.rounds, processes):
                runs[server.name].append(_measure(server, processes, certificate, options))
                _keep(kept)
            compared = goals(runs, processes=processes)
            print(f"\n{processes} process(es)", table(runs, chosen), compared, sep="\n\n")
            reasons += problems(runs, processes=processes)
    print(*reasons, sep="\n", file=sys.stderr)
    return 1 if reasons else 0


def _in_rounds(chosen: list[Server], rounds: int, processes: int) -> Iterator[Server]:
    """Yield every server once a round, in a rotated order, and say which is next."""
    for number in range(rounds):
        turn = number % len(chosen)
        for server in chosen[turn:] + chosen[:turn]:
            place = f"round {number + 1} of {rounds}, {processes} process(es)"
            print(f"{place}: {server.name}", file=sys.stderr)
            yield server


def _measure(
    server: Server, processes: int, certificate: Certificate, options: argparse.Namespace
) -> dict[str, float]:
    """Run one server once: start it, load it, and end it under load."""
    sent = {"connections": options.connections, "rate": options.rate}
    with serving(server, processes=processes, certificate=certificate) as process:
        return load(process, seconds=options.seconds, **sent) | drain(process, **sent)


def _keep(kept: dict[str, object]) -> None:
    """Write down what there is, so that a run which is interrupted has not been for nothing."""
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(kept, indent=1))


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--seconds", type=float, default=4.0)
    made.add_argument("--connections", type=int, default=32)
    made.add_argument("--rate", type=int, default=20_000, help="prepared deliveries a second")
    made.add_argument("--processes", type=int, nargs="+", default=[1], help="of every server")
    made.add_argument("--tls", action="store_true", help="over TLS as well")
    made.add_argument("--finished", type=int, default=0, help="events in a store to compare with")
    made.add_argument("--only", nargs="+", help="names of servers; all without it")
    return made


if __name__ == "__main__":
    sys.exit(main())
