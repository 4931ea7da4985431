"""Tables of medians with their range, and ratios that are taken round by round."""

import statistics
from collections.abc import Mapping, Sequence

from peers import REFERENCE, Server

Runs = Mapping[str, Sequence[Mapping[str, float]]]

#: A server that uses less of its cores than this was waiting for somebody else.
SATURATED = 0.85

#: Those that wait for the disk as well, and may leave their core idle.
DURABLE = ("durable", "full", "growing", "full-growing")

#: Servers that wait for the disk, so that a core of theirs may be idle.
WAITING = (*DURABLE, "fastapi-durable")

#: Figures that say something only of a server that was saturated.
_OF_THE_RATE = ("rate", "done_rate", "p50_ms", "p99_ms")


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median and range of a list of figures."""
    if not values:
        return "-"
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def saturated(server: str, run: Mapping[str, float]) -> bool:
    """Whether the rate of this run says what the server can do."""
    return not run["crowded"] and (server in WAITING or run["used"] >= SATURATED)


def column(runs: Runs, server: str, figure: str) -> list[float]:
    """One figure of a server in every round; none if it needs saturation that one round lacked."""
    rounds = runs.get(server, ())
    if figure in _OF_THE_RATE and not all(saturated(server, run) for run in rounds):
        return []
    return [run[figure] for run in rounds if figure in run]


def ratios(runs: Runs, one: tuple[str, str], other: tuple[str, str]) -> list[float]:
    """``one`` divided by ``other``, each a server and a figure, round by round."""
    pairs = zip(column(runs, *one), column(runs, *other), strict=False)
    return [dividend / divisor for dividend, divisor in pairs if divisor]


def table(runs: Runs, servers: Sequence[Server]) -> str:
    """Every server's figures as Markdown."""
    titles = ["server", "deliveries/s", f"ratio to {REFERENCE}"]
    titles += [f"{what} {unit}".strip() for what, unit, _, _ in COLUMNS]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for server in servers:
        columns = [
            f"{server.name}: {server.about}",
            spread(column(runs, server.name, "rate"), 0),
            spread(ratios(runs, (server.name, "rate"), (REFERENCE, "rate"))),
            *(spread(column(runs, server.name, figure), digits) for *_, figure, digits in COLUMNS),
        ]
        lines.append("| " + " | ".join(columns) + " |")
    return "\n".join(lines)


#: Columns of the table: what it is, its unit, the name of the figure, decimals.
COLUMNS = (
    ("CPU", "us each", "cpu_us", 0),
    ("p50", "ms", "p50_ms", 2),
    ("p99", "ms", "p99_ms", 2),
    ("idle", "MB", "idle_mb", 0),
    ("loaded", "MB", "loaded_mb", 0),
    ("first 200", "ms", "start_ms", 0),
    ("drain", "ms", "drain_ms", 0),
    ("unanswered", "", "dropped", 0),
    ("cores used", "", "used", 2),
)

#: What is compared: a sentence, one server and figures, another one, and the goal.
_GOALS = (
    ("inline to FastAPI", "inline", "", REFERENCE, ">= 3"),
    ("inline to node", "inline", "", "node", ">= 1.2"),
    ("inline to the limit", "inline", "", "minimal", ">= 0.9"),
    ("inline to stock hypercorn", "inline", "", "stock", ">= 9"),
    ("durable enqueue to FastAPI", "durable", "", REFERENCE, ">= 1.8"),
    ("durable to done to FastAPI", "durable", "done_", REFERENCE, ">= 1"),
    ("durable enqueue to FastAPI that keeps it, too", "durable", "", "fastapi-durable", ""),
    ("enqueue beside finished events to an empty store", "full", "", "durable", ">= 0.95"),
    ("the same to done", "full", "done_", "durable", ">= 0.95"),
    ("the same, ids that grow with time, to done", "full-growing", "done_", "growing", ">= 0.95"),
    ("inline over TLS to stock hypercorn over TLS", "tls", "", "tls-stock", ""),
    ("inline over TLS to FastAPI over TLS", "tls", "", "tls-fastapi", ""),
)


def goals(runs: Runs, *, processes: int = 1) -> str:
    """The goals of the project and what this run says of them, as Markdown.

    ``by rate`` is what the cores deliver. ``by CPU`` compares CPU time per delivery: it says the
    same where every server was saturated, and still holds where a neighbour took a core away.
    """
    lines = ["| what | by rate | by CPU | goal |", "|---|---|---|---|"]
    for what, one, stage, other, goal in _GOALS:
        # A peer's answer is its end, so one that is measured to done is compared with that.
        of_other = stage if other in DURABLE else ""
        by_rate = ratios(runs, (one, f"{stage}rate"), (other, f"{of_other}rate"))
        by_cpu = ratios(runs, (other, f"{of_other}cpu_us"), (one, f"{stage}cpu_us"))
        if by_cpu:
            lines.append(f"| {what} | {spread(by_rate)} | {spread(by_cpu)} | {goal} |")
    start = ratios(runs, ("inline", "start_ms"), (REFERENCE, "start_ms"))
    added = _differences(runs, "p50_ms", "durable", "inline")
    memory = column(runs, "inline", "idle_mb")
    others = (
        ("p50 added by durability, ms", added, 2, "<= 1"),
        ("idle memory, MB", memory, 0, "<= 40"),
        ("exec to first 200, to FastAPI", start, 2, "<= 0.7"),
    )
    lines += [
        f"| {what} | {spread(values, digits)} | | {goal} |"
        for what, values, digits, goal in others
        if values and processes == 1
    ]
    return "\n".join(lines)


def _differences(runs: Runs, figure: str, one: str, other: str) -> list[float]:
    pairs = zip(column(runs, one, figure), column(runs, other, figure), strict=False)
    return [first - second for first, second in pairs]


def problems(runs: Runs, *, processes: int) -> list[str]:
    """Reasons not to believe this run, or a part of it."""
    found = []
    if any(run["crowded"] for rounds in runs.values() for run in rounds):
        found.append(
            f"{processes} server processes and the load generator need more cores than there are: "
            "the generator takes part of the servers' cores, so that rates and latencies say "
            "nothing; CPU time per delivery does"
        )
    for server, rounds in runs.items():
        for run in rounds:
            if run["errors"]:
                found.append(f"{server}: {run['errors']:.0f} answers were not 200")
            if not run["crowded"] and not saturated(server, run):
                found.append(
                    f"{server}: rate refused, the server was not the bottleneck (it used "
                    f"{run['used']:.2f} of its cores, the generator {run['generator_used']:.2f})"
                )
    return found
