"""Tables of the figures, for the documentation.

    python benchmarks/report.py [FIGURES.json]

Tables are written between the lines ``<!-- measured -->`` and ``<!-- /measured -->`` of
docs/explanation/performance.md, and a chart next to it; the rest of the page is written by hand.
Without an argument the file is ``benchmarks/figures.json``; a test compares the page with it.
"""

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import attrs

HERE = Path(__file__).parent
FIGURES = HERE / "figures.json"
PAGE = HERE.parent / "docs" / "explanation" / "performance.md"
PICTURE = PAGE.with_suffix(".svg")
BEGIN, END = "<!-- measured -->", "<!-- /measured -->"

#: The stored results of a benchmark: groups by name, each with its facts and its runs.
Kept = Mapping[str, Any]

#: A server that uses less of its core than this at full load was waiting for something else.
SATURATED = 0.85

#: The names of servers in the documentation.
LABELS = {
    "inline": "**sdk_trio, default, inline**",
    "enqueued": "**sdk_trio, default, enqueued**",
    "enqueued-open": "**sdk_trio, default, enqueued**",
    "fastapi": "FastAPI, no store",
    "fastapi-durable": "FastAPI, durable",
    "inline-silent": "sdk_trio, default, inline, no log",
    "memory": "sdk_trio, store in memory, no log",
    "memory-info": "sdk_trio, store in memory, a log line per delivery",
    "minimal": "trio + httptools, no store: the lower limit",
    "minimal-durable": "trio + httptools, one commit in a thread: the lower limit",
    "memory-tls": "sdk_trio, store in memory, no log, TLS",
    "fastapi-tls": "FastAPI, no store, TLS",
}
_FLOOR = "minimal-durable"
#: Servers that wait for the disk, so their core may be idle at full load.
_WAITING = (
    "inline",
    "inline-silent",
    "enqueued",
    "enqueued-open",
    "fastapi-durable",
    "minimal-durable",
)
#: Figures that are meaningful at full load only if the server was the bottleneck.
_OF_THE_RATE = ("rate", "done_rate", "p50_ms", "p99_ms")


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return median and range of a list of figures."""
    if not values:
        return "-"
    middle = statistics.median(values)
    if len(values) == 1:
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


@attrs.frozen
class Column:
    """One figure of one server in one case of a group, in every round."""

    group: str
    case: str
    server: str
    figure: str

    def of(self, kept: Kept) -> list[float]:
        """Return the figure of every round that has it; an empty list if it is not reliable."""
        cases = kept["groups"].get(self.group, {}).get("runs", {})
        rounds = cases.get(self.case, {}).get(self.server, ())
        if self.figure in _OF_THE_RATE and any(idle(self.server, run) for run in rounds):
            return []
        return [run[self.figure] for run in rounds if self.figure in run]


def idle(server: str, run: Mapping[str, Any]) -> bool:
    """Return whether a server was partly idle at full load, so that its rate is not its limit."""
    return server not in _WAITING and run.get("used", 1.0) < SATURATED


def ratios(kept: Kept, one: Column, other: Column) -> list[float]:
    """Return ``one`` divided by ``other`` for each round."""
    pairs = zip(one.of(kept), other.of(kept), strict=False)
    return [dividend / divisor for dividend, divisor in pairs if divisor]


def pooled(rounds: Sequence[Mapping[str, Any]], share: float) -> float:
    """Return a high quantile (0.99 or more) over several rounds, in milliseconds."""
    total = sum(run["count"] for run in rounds)
    slowest = sorted((one for run in rounds for one in run["slowest_ms"]), reverse=True)
    place = total - 1 - min(total - 1, int(share * total))
    return slowest[min(place, len(slowest) - 1)] if slowest else math.nan


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


# -- one table for each group ----------------------------------------------------------------------


def _everyday(kept: Kept, runs: Mapping[str, Any], group: str) -> str:
    rows, compared = [], []
    for rate, servers in runs.items():
        for name, rounds in servers.items():
            columns = [
                spread(Column(group, rate, name, figure).of(kept), digits)
                for figure, digits in (("p50_ms", 2), ("p99_ms", 1))
            ]
            cpu = spread(Column(group, rate, name, "cpu_us").of(kept), 0)
            failed = sum(run["errors"] for run in rounds)
            together = f"{pooled(rounds, 0.999):.1f}"
            rows.append([rate, LABELS[name], *columns, together, cpu, f"{failed:.0f}"])
        for name in ("inline", "enqueued"):
            for peer in ("fastapi", "fastapi-durable", "minimal-durable"):
                if name in servers and peer in servers:
                    beside = [
                        spread(
                            ratios(
                                kept,
                                Column(group, rate, name, figure),
                                Column(group, rate, peer, figure),
                            )
                        )
                        for figure in ("p50_ms", "p99_ms", "cpu_us")
                    ]
                    compared.append([rate, LABELS[name], LABELS[peer], *beside])
    titles = [
        "arrivals/s",
        "server",
        "p50 ms",
        "p99 ms",
        "p99.9 ms",
        "CPU us each",
        "late or not 200",
    ]
    made = _table(titles, rows)
    if compared:
        titles = ["arrivals/s", "server", "compared with", "p50", "p99", "CPU"]
        made += "\n\nAs a fraction of the peer's, lower is better:\n\n" + _table(titles, compared)
    return made


def _at_500(kept: Kept, runs: Mapping[str, Any], group: str) -> str:
    figures = (("p50_ms", 2), ("p99_ms", 1), ("cpu_us", 0))
    rows = [
        [
            _CASES[group, case],
            LABELS[server],
            *(spread(Column(group, case, server, f).of(kept), d) for f, d in figures),
        ]
        for case, server in _rows(runs)
    ]
    return _table(["500 arrivals/s", "server", "p50 ms", "p99 ms", "CPU us each"], rows)


def _counted(kept: Kept, runs: Mapping[str, Any]) -> str:
    figures = (("instructions", 0), ("steps", 0), ("calls", 1))
    rows = [
        [
            _CASES["counted", case],
            LABELS[server],
            *(spread(Column("counted", case, server, f).of(kept), d) for f, d in figures),
        ]
        for case, server in _rows(runs)
    ]
    heads = ["connection", "server", "user instructions", "steps of bytecode", "system calls"]
    return _table(heads, rows)


def _loaded(kept: Kept, runs: Mapping[str, Any], group: str) -> str:
    figures = (("rate", 0), ("cpu_us", 0), ("done_rate", 0), ("done_cpu_us", 0))
    figures += (("p50_ms", 1), ("p99_ms", 1), ("loaded_mb", 0))  # type: ignore[assignment]
    shown = [f for f in figures if any(Column(group, c, s, f[0]).of(kept) for c, s in _rows(runs))]
    titles = {
        "rate": "deliveries/s",
        "cpu_us": "CPU us each",
        "done_rate": "done/s",
        "done_cpu_us": "CPU us each, to done",
        "p50_ms": "p50 ms",
        "p99_ms": "p99 ms",
        "loaded_mb": "MB",
    }
    rows = [
        [
            _CASES.get((group, case), LABELS[server]),
            *(spread(Column(group, case, server, name).of(kept), digits) for name, digits in shown),
        ]
        for case, server in _rows(runs)
    ]
    return _table(["server", *(titles[name] for name, _ in shown)], rows)


def _rows(runs: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(case, server) for case, servers in runs.items() for server in servers]


#: Rows that are named after their case instead of their server.
_CASES = {
    ("history", "empty"): "an empty store",
    ("history", "some"): "some finished events",
    ("history", "many"): "many finished events",
    ("after", "before"): "before full load",
    ("after", "after"): "a second after full load",
    ("after", "rested"): "after ten seconds of rest",
    ("counted", "kept"): "kept",
    ("counted", "fresh"): "fresh",
    ("finished", "empty"): "an empty store",
    ("finished", "full"): "with the finished events",
    ("backlog", "waiting"): "in the store at the start",
    ("backlog", "fresh"): "delivered at full load",
    ("retention", "during"): "while events are removed",
    ("retention", "after"): "afterwards",
}


def _started(kept: Kept, runs: Mapping[str, Any]) -> str:
    figures = (("start_ms", 0), ("start_cpu_ms", 0), ("idle_mb", 0))
    rows = [
        [
            LABELS[server],
            *(spread(Column("start", case, server, f).of(kept), d) for f, d in figures),
        ]
        for case, server in _rows(runs)
    ]
    return _table(["server", "exec to first 200, ms", "CPU ms by then", "idle MB"], rows)


def _asked(kept: Kept, runs: Mapping[str, Any]) -> str:
    rows = [
        [case, spread(Column("queries", case, server, "ms").of(kept))]
        for case, server in _rows(runs)
    ]
    return _table(["question", "ms, warm"], rows)


def _retained(kept: Kept, runs: Mapping[str, Any]) -> str:
    rows = []
    for case, server in _rows(runs):
        rounds = [run for run in runs[case][server] if run["count"]]
        longest = [max(run["slowest_ms"]) for run in rounds]
        columns = [
            spread(Column("retention", case, server, figure).of(kept), digits)
            for figure, digits in (("p50_ms", 2), ("p99_ms", 1))
        ]
        counted = f"{sum(run['count'] for run in rounds):.0f}"
        seconds = spread(Column("retention", case, server, "pass_seconds").of(kept), 1)
        rows.append([_CASES["retention", case], counted, *columns, spread(longest, 1), seconds])
    titles = ["500 arrivals/s", "deliveries", "p50 ms", "p99 ms", "longest ms", "to its end, s"]
    return _table(titles, rows)


#: Groups with their headings, in the order of the page.
_HEADINGS = {
    "everyday": "Everyday load, the default configuration",
    "fresh": "A fresh connection for each delivery",
    "history": "With {some} and {finished} finished events in the store",
    "after": "After three seconds of full load",
    "counted": "Counted work of one delivery",
    "full": "Full load, the default configuration",
    "start": "Start and idle memory, the default configuration",
    "limit": "A store in memory, compared with the lower limit",
    "log": "A log line for each delivery, compared with none",
    "finished": "{finished} finished events in the store",
    "backlog": "A backlog of {backlog} events",
    "queries": "Queries on {finished} finished events",
    "retention": "Deliveries while the retention removes {expired} events",
    "tls": "TLS",
}


def _section(kept: Kept, name: str) -> str:
    group = kept["groups"][name]
    runs = group["runs"]
    numbers = {key: f"{value:,}".replace(",", " ") for key, value in group["sizes"].items()}
    if name in ("everyday", "fresh"):
        made = _everyday(kept, runs, name)
    elif name in ("history", "after"):
        made = _at_500(kept, runs, name)
    elif name == "counted":
        made = _counted(kept, runs)
    elif name == "start":
        made = _started(kept, runs)
    elif name == "queries":
        made = _asked(kept, runs)
    elif name == "retention":
        made = _retained(kept, runs)
    else:
        made = _loaded(kept, runs, name)
    return f"### {_HEADINGS[name].format(**numbers)}\n\n{made}"


# -- goals -----------------------------------------------------------------------------------------


Goal = tuple[str, Column, Column, str]


def _everyday_goals() -> list[Goal]:
    def goal(group: str, rate: str, name: str, figure: str, aim: str) -> Goal:
        what = {"p50_ms": "p50", "p99_ms": "p99", "cpu_us": "CPU"}[figure]
        how = ", a fresh connection each" if group == "fresh" else ""
        one, other = (Column(group, rate, each, figure) for each in (name, "fastapi-durable"))
        return f"default {name} at {rate}/s{how} to durable FastAPI, {what}", one, other, aim

    def to_the_floor(name: str) -> Goal:
        one, other = (Column("everyday", "2000", each, "p50_ms") for each in (name, _FLOOR))
        return f"default {name} at 2000/s to the lower limit, p50", one, other, "<= 2"

    return [
        goal("everyday", "500", "inline", "cpu_us", "<= 0.50"),
        goal("everyday", "500", "inline", "p50_ms", "<= 0.7"),
        goal("everyday", "500", "inline", "p99_ms", "<= 0.6"),
        goal("everyday", "500", "enqueued", "cpu_us", "<= 0.60"),
        goal("everyday", "500", "enqueued", "p50_ms", "<= 0.7"),
        goal("everyday", "500", "enqueued", "p99_ms", "<= 0.6"),
        goal("fresh", "500", "inline", "cpu_us", "<= 0.65"),
        goal("fresh", "500", "enqueued", "cpu_us", "<= 0.85"),
        goal("everyday", "100", "inline", "cpu_us", "<= 0.70"),
        goal("everyday", "100", "enqueued", "cpu_us", "<= 0.80"),
        to_the_floor("inline"),
        to_the_floor("enqueued"),
    ]


def _history_goals() -> list[Goal]:
    def goal(group: str, case: str, other: str, what: str, aim: str) -> Goal:
        columns = (Column(group, each, "inline", "cpu_us") for each in (case, other))
        return (f"default inline at 500/s {what}: CPU", *columns, aim)  # type: ignore[return-value]

    return [
        goal("history", "some", "empty", "after 50 000 finished deliveries", "<= 1.03"),
        goal("history", "many", "empty", "after 1 000 000 finished deliveries", "<= 1.06"),
        goal("after", "after", "before", "a second after full load", "<= 1.1"),
    ]


def _all(group: str, server: str, figure: str) -> Column:
    return Column(group, "all", server, figure)


#: The comparisons: a sentence, two columns, and the goal for the first divided by the second.
_GOALS = (
    *_everyday_goals(),
    *_history_goals(),
    (
        "full load, enqueued, to done: CPU of durable FastAPI to ours",
        _all("full", "fastapi-durable", "done_cpu_us"),
        _all("full", "enqueued-open", "done_cpu_us"),
        ">= 5",
    ),
    (
        "full load, default inline: rate to FastAPI without a store",
        _all("full", "inline", "rate"),
        _all("full", "fastapi", "rate"),
        ">= 1.5",
    ),
    (
        "full load, default inline: CPU of FastAPI without a store to ours",
        _all("full", "fastapi", "cpu_us"),
        _all("full", "inline", "cpu_us"),
        ">= 1.5",
    ),
    (
        "full load, enqueued, to 200: rate to FastAPI without a store",
        _all("full", "enqueued-open", "rate"),
        _all("full", "fastapi", "rate"),
        ">= 1.5",
    ),
    (
        "full load, enqueued, to 200: CPU of FastAPI without a store to ours",
        _all("full", "fastapi", "cpu_us"),
        _all("full", "enqueued-open", "cpu_us"),
        ">= 1.5",
    ),
    (
        "store in memory: CPU of FastAPI without a store to ours",
        _all("limit", "fastapi", "cpu_us"),
        _all("limit", "memory", "cpu_us"),
        ">= 2.3",
    ),
    (
        "store in memory: CPU of the lower limit to ours",
        _all("limit", "minimal", "cpu_us"),
        _all("limit", "memory", "cpu_us"),
        ">= 0.70",
    ),
    (
        "store in memory: instructions of the lower limit to ours",
        Column("counted", "kept", "minimal", "instructions"),
        Column("counted", "kept", "memory", "instructions"),
        ">= 0.85",
    ),
    (
        "default inline: CPU without a log line to that with one",
        _all("log", "inline-silent", "cpu_us"),
        _all("log", "inline", "cpu_us"),
        ">= 0.95",
    ),
    (
        "store in memory: the same",
        _all("log", "memory", "cpu_us"),
        _all("log", "memory-info", "cpu_us"),
        "",
    ),
    (
        "finished events, enqueued to done: CPU without to that with them",
        Column("finished", "empty", "enqueued-open", "done_cpu_us"),
        Column("finished", "full", "enqueued-open", "done_cpu_us"),
        ">= 0.97",
    ),
    (
        "backlog: CPU of an event that waited to that of a delivered one",
        Column("backlog", "waiting", "enqueued-open", "done_cpu_us"),
        Column("backlog", "fresh", "enqueued-open", "done_cpu_us"),
        "<= 0.70",
    ),
    (
        "start to first 200, to FastAPI",
        _all("start", "inline", "start_ms"),
        _all("start", "fastapi", "start_ms"),
        "<= 0.6",
    ),
    (
        "TLS: CPU of FastAPI without a store to ours with a store in memory",
        _all("tls", "fastapi-tls", "cpu_us"),
        _all("tls", "memory-tls", "cpu_us"),
        "",
    ),
)


_ABOUT_GOALS = """\
These are the project's goals, deliberately far above its peers. A measured value that does not
reach its goal means that work is left to do; a goal is not a guarantee. The tables above show the
current values."""


def _counted_goals(kept: Kept) -> list[list[str]]:
    aims = {
        ("inline", "instructions"): "<= 700 000",
        ("inline", "calls"): "<= 32",
        ("enqueued", "instructions"): "<= 850 000",
        ("enqueued", "calls"): "<= 44",
    }
    words = {"instructions": "user instructions", "calls": "system calls"}
    return [
        [f"default {name}: {words[figure]}", spread(found, 0), aim]
        for (name, figure), aim in aims.items()
        if (found := Column("counted", "kept", name, figure).of(kept))
    ]


def goals(kept: Kept) -> str:
    """Return the project's goals and the measured values, as Markdown."""
    rows = [
        [what, spread(found), goal]
        for what, one, other, goal in _GOALS
        if (found := ratios(kept, one, other))
    ]
    idle = _all("start", "inline", "idle_mb").of(kept)
    if idle:
        rows.append(["idle memory, MB", spread(idle, 0), "<= 34"])
    rows += _counted_goals(kept)
    questions = kept["groups"].get("queries", {}).get("runs", {})
    lists = {case: Column("queries", case, "store", "ms").of(kept) for case in questions}
    counts = lists.pop("counts by state", [])
    slowest = [statistics.median(values) for name, values in lists.items() if "list" in name]
    if slowest:
        rows.append(["slowest filter of `events list`, ms", f"{max(slowest):.2f}", "<= 10"])
        rows.append(["counts by state, ms", spread(counts), "<= 1"])
    longest = {
        case: [max(run["slowest_ms"]) for run in servers.get("enqueued", ()) if run["count"]]
        for case, servers in kept["groups"].get("retention", {}).get("runs", {}).items()
    }
    if longest.get("during"):
        pairs = zip(longest["during"], longest["after"], strict=False)
        added = [during - after for during, after in pairs]
        rows.append(["longest additional latency during the retention, ms", spread(added), ""])
    return _table(["comparison", "measured", "goal"], rows) if rows else ""


def problems(kept: Kept) -> list[str]:
    """Return reasons why some of these figures are not reliable."""
    found = []
    for name, group in kept["groups"].items():
        facts = group["facts"]
        if group["quick"]:
            found.append(f"{name}: a quick run, only to test the benchmark; do not quote it")
        if facts["cores"] < 2:
            found.append(
                f"{name}: one core for the server and the generator, so only CPU time is meaningful"
            )
        if facts["disk"].startswith("tmpfs"):
            found.append(f"{name}: the stores are in memory instead of on a disk; see --directory")
        for case, server in _rows(group["runs"]):
            for run in group["runs"][case][server]:
                errors = run.get("errors", 0)
                if errors and not (name == "everyday" and server.startswith("fastapi")):
                    found.append(
                        f"{name}, {server}: {errors:.0f} responses were not 200, or missing"
                    )
                if run.get("left"):
                    found.append(f"{name}, {server}: {run['left']:.0f} events were not handled")
                if run.get("count") == 0:
                    found.append(f"{name}, {server}, {case}: nothing was measured")
                if idle(server, run):
                    found.append(
                        f"{name}, {server}: its rate is not reliable: it used {run['used']:.2f} of "
                        f"its core, and the generator {run['generator_used']:.2f} of its own"
                    )
    return found


# -- the page --------------------------------------------------------------------------------------


def sections(kept: Kept) -> str:
    """Return all tables, the machine, and remarks on the figures, as Markdown."""
    named = [name for name in _HEADINGS if name in kept["groups"]]
    if not named:
        return "There are no figures of this version: `make bench` writes them here."
    parts = [_section(kept, name) for name in named]
    parts.append(f"### Goals\n\n{_ABOUT_GOALS}\n\n{goals(kept)}")
    machines = dict.fromkeys(_machine(kept["groups"][name]) for name in named)
    parts.append("\n".join(machines))
    reasons = dict.fromkeys(problems(kept))
    if reasons:
        parts.append("\n".join(f"- {reason}" for reason in reasons))
    return "\n\n".join(part for part in parts if part)


def _machine(group: Mapping[str, Any]) -> str:
    facts = group["facts"]
    peers = ", ".join(f"{name} {version}" for name, version in facts["peers"].items())
    return (
        f"{facts['date']}: {facts['cores']} cores ({facts['processor']}), "
        f"{facts['memory_gb']:.0f} GB, {facts['disk']}, one fdatasync {facts['sync_ms']:.2f} ms; "
        f"{facts['system']}, Python {facts['python']}, SQLite {facts['sqlite']}, "
        f"sdk_trio {facts['version']}{', ' + peers if peers else ''}. Up to "
        f"{group['rounds']} rounds of {group['seconds']:g} s over {group['connections']} "
        "connections."
    )


WIDTH, LABEL_WIDTH, BAR, GAP, TOP = 760, 300, 22, 10, 56

#: The bars of the chart: a label and its column.
_BARS = (
    *(
        (f"{LABELS[name].strip('*')}, 500/s", Column("everyday", "500", name, "cpu_us"))
        for name in ("inline", "enqueued", "fastapi", "fastapi-durable")
    ),
    ("sdk_trio, default, inline, full load", _all("full", "inline", "cpu_us")),
    ("sdk_trio, enqueued, full load, to done", _all("full", "enqueued-open", "done_cpu_us")),
    ("FastAPI, no store, full load", _all("full", "fastapi", "cpu_us")),
    ("FastAPI, durable, full load, to done", _all("full", "fastapi-durable", "done_cpu_us")),
)


def draw(kept: Kept) -> str:
    """Return CPU time per delivery as a bar chart: a bar for the median, a line for the range."""
    found = [(label, column.of(kept)) for label, column in _BARS]
    shown = [(label, values) for label, values in found if values]
    scale = (WIDTH - LABEL_WIDTH - 90) / max([max(values) for _, values in shown], default=1.0)
    height = TOP + len(shown) * (BAR + GAP) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="14" role="img">',
        "<title>CPU time per delivery, in microseconds; shorter is better</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        '<text x="12" y="24" font-size="16" font-weight="bold">CPU time per delivery (us)</text>',
        '<text x="12" y="43" fill="#555555">2 KB, signed, 32 connections; shorter is better; '
        "median and range</text>",
    ]
    for row, (label, values) in enumerate(shown):
        top = TOP + row * (BAR + GAP)
        colour = "#1f6f54" if label.startswith("sdk_trio") else "#9aa5b1"
        left, right = (LABEL_WIDTH + value * scale for value in (min(values), max(values)))
        centre, middle = top + BAR / 2, statistics.median(values)
        parts += [
            f'<text x="{LABEL_WIDTH - 10}" y="{top + 16}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{LABEL_WIDTH}" y="{top}" width="{middle * scale:.1f}" height="{BAR}" '
            f'fill="{colour}"/>',
            f'<line x1="{left:.1f}" y1="{centre}" x2="{right:.1f}" y2="{centre}" '
            'stroke="#222222" stroke-width="2"/>',
            f'<text x="{right + 8:.1f}" y="{top + 16}">{middle:.0f}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def page_with(text: str, kept: Kept) -> str:
    """Return the text of the page with these figures."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{sections(kept)}\n\n{END}{after}"


def main(source: str | None = None) -> None:
    """Write the page and its chart."""
    kept = json.loads(Path(source or FIGURES).read_text())
    PAGE.write_text(page_with(PAGE.read_text(), kept))
    PICTURE.write_text(draw(kept))
    print(PAGE)


if __name__ == "__main__":
    main(*sys.argv[1:])
