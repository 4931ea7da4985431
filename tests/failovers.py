"""Kill the primary of a cluster under Patroni again and again, and count what became of events.

    python tests/failovers.py [--kills 20] [--nodes 3] [--seed 1] [--limit 1500] [--keep DIRECTORY]

The cluster has synchronous replication (``synchronous_mode``), etcd, and PostgreSQL servers on the
loopback address. Two daemons work on it, whose connection string names all servers. Senders deliver
inline, enqueued and ordered events, each until it is answered 200. In turn, SIGKILL ends the
primary alone, or the primary with its Patroni, as the end of its host does; then the leader's lease
has to run out. The next kill comes when the cluster is complete again.

It prints for how long no delivery was answered 200, and compares the ledgers of senders and
handlers with the store (support/ledger.py). The exit status is 1 if an acknowledged event is lost,
was called done and never was, ran beside itself, out of the order of its lane, or again without a
failover; 2 if it did not come to an end.
"""

import argparse
import contextlib
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import trio
from stalls import ANSWER_SECONDS, APPLICATION, SETTINGS, Ledger, Senders, acknowledges
from support import reaper
from support.ledger import Account
from support.patroni import LEASE_SECONDS, Cluster, patroni_cluster
from support.respawned import Respawned
from torture import drained, states_of

HOSTS = 2

#: What a kill ends.
SERVER, HOST = "the server alone", f"the server and its Patroni, lease of {LEASE_SECONDS} s"


@attrs.frozen
class Report:
    """What came out: how long nothing was acknowledged after each kill, and the comparison."""

    #: In seconds, by what was killed.
    stops: Mapping[str, Sequence[float]]
    answers: Mapping[str, int]
    runs: int
    account: Account

    def rows(self) -> list[tuple[str, object]]:
        """Return the report as pairs of a name and a value."""
        kept = self.account
        stops = [
            (f"kills of {what}", f"{len(each)}; median {statistics.median(each):.1f} s, "
             f"longest {max(each):.1f} s without an answer 200")
            for what, each in self.stops.items()
            if each
        ]  # fmt: skip
        return [
            *stops,
            ("answers", ", ".join(f"{n} x {name}" for name, n in sorted(self.answers.items()))),
            ("acknowledged", kept.acknowledged),
            ("their states", ", ".join(f"{n} {state}" for state, n in sorted(kept.states.items()))),
            ("runs of handlers", self.runs),
            ("lost", len(kept.lost)),
            ("called done, but never finished", len(kept.never_finished)),
            ("ran again over a failover", len(kept.again) - len(kept.again_without_reason)),
            ("ran again without a failover", len(kept.again_without_reason)),
            ("ran beside itself", len(kept.overlapping)),
            ("out of order in a lane", len(kept.out_of_order)),
        ]


async def fail_over(
    directory: Path, cluster: Cluster, *, kills: Sequence[str], seed: int = 1, rate: float = 100.0
) -> Report:
    """Kill the primary for each of ``kills``; daemons and ledgers are in ``directory``."""
    dice = random.Random(seed)
    await trio.to_thread.run_sync(cluster.execute, "CREATE DATABASE proof")
    ledger = Ledger(directory / "handled")
    ledger.handled.write_text("")
    environment = {"LEDGER": str(ledger.handled), "SDK_POSTGRES_DSN": cluster.dsn("proof")}
    daemons = []
    for number in range(HOSTS):
        (directory / str(number)).mkdir()
        settings = {**SETTINGS, "Storage:Backend": "Postgres"}
        daemon = Respawned(
            directory / str(number), APPLICATION, settings, environment, most_starts=1
        )
        daemons.append(daemon)
    senders = Senders([daemon.url for daemon in daemons], ledger, dice, rate)
    stops: dict[str, list[float]] = {what: [] for what in kills}
    async with trio.open_nursery() as nursery:
        for daemon in daemons:
            await nursery.start(daemon.run)
        with trio.fail_after(ANSWER_SECONDS):
            for daemon in daemons:
                await daemon.accepting()
        async with trio.open_nursery() as sending:
            sending.start_soon(senders.run)
            for what in kills:
                await trio.to_thread.run_sync(cluster.wait_until, cluster.is_complete)
                await acknowledges(ledger)
                await trio.sleep(dice.uniform(1.0, 3.0))
                stops[what].append(await _kill(cluster, ledger, what))
            senders.stopped = True
            sending.cancel_scope.deadline = trio.current_time() + ANSWER_SECONDS
        await drained(daemons[0])
        states = await states_of(daemons[0])
        for daemon in daemons:
            daemon.stop()
    return Report(stops, ledger.answers, len(ledger.runs()), ledger.account(states))


async def _kill(cluster: Cluster, ledger: Ledger, what: str) -> float:
    """Kill the primary and wait for the next one; return the longest time without a 200."""
    wait = cluster.wait_until
    leader = await trio.to_thread.run_sync(wait, cluster.leader)
    begin = time.monotonic_ns()
    await trio.to_thread.run_sync(leader.kill if what == HOST else leader.kill_server)
    await trio.to_thread.run_sync(
        wait, lambda: (new := cluster.leader()) is not None and new is not leader
    )
    await acknowledges(ledger)
    end = time.monotonic_ns()
    ledger.stalls.append((begin, end))
    if what == HOST:
        leader.start()
    within = sorted(at for at in ledger.acknowledged.values() if begin <= at <= end)
    pairs = itertools.pairwise([begin, *within])
    return max(after - before for before, after in pairs) / 1e9


async def _main(options: argparse.Namespace, cluster: Cluster) -> int:
    kills = list(itertools.islice(itertools.cycle([SERVER, HOST]), options.kills))
    with contextlib.ExitStack() as stack:
        if options.keep is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            directory = options.keep
            directory.mkdir(parents=True)
        try:
            with trio.fail_after(options.limit):
                report = await fail_over(directory, cluster, kills=kills, seed=options.seed)
        except trio.TooSlowError:
            print(cluster.logs(), "it did not come to an end", sep="\n", file=sys.stderr)
            return 2
    print(*(f"| {name} | {value} |" for name, value in report.rows()), sep="\n")
    found = report.account
    for ids in (found.lost, found.overlapping, found.out_of_order, found.again_without_reason):
        if ids:
            print(*list(ids)[:20])
    return 1 if found.broken else 0


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--kills", type=int, default=20)
    made.add_argument("--nodes", type=int, default=3)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--limit", type=float, default=1500.0, help="seconds until it is given up")
    made.add_argument("--keep", type=Path, help="a new directory for logs and ledgers")
    return made


if __name__ == "__main__":
    reaper.begin()
    given = _parser().parse_args()
    with patroni_cluster(given.nodes) as made:
        sys.exit(trio.run(_main, given, made))
