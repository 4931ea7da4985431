"""Writes the last run into the documentation: its tables and its picture.

    python benchmarks/report.py [RESULTS.json]

Tables go between the lines ``<!-- measured -->`` and ``<!-- /measured -->`` of
docs/explanation/performance.md; what stands around them is for people to write.
"""

import json
import sys
from pathlib import Path

import plot
from figures import Runs, column, goals, problems, ratios, spread
from peers import REFERENCE
from plot import HERE, LABELS

PAGE = HERE.parent / "docs" / "explanation" / "performance.md"
BEGIN, END = "<!-- measured -->", "<!-- /measured -->"


def one_process(runs: Runs) -> str:
    """What a server does on one core, as Markdown."""
    lines = [
        "| server | deliveries/s | ratio to FastAPI | CPU us a delivery | p50 ms | p99 ms "
        "| idle MB | first 200 ms | drain ms |",
        "|---" * 9 + "|",
    ]
    for name in (name for name in LABELS if runs.get(name)):
        cells = [
            LABELS[name],
            spread(column(runs, name, "rate"), 0),
            spread(ratios(runs, (name, "rate"), (REFERENCE, "rate"))),
            spread(column(runs, name, "cpu_us"), 0),
            spread(column(runs, name, "p50_ms")),
            spread(column(runs, name, "p99_ms"), 1),
            spread(column(runs, name, "idle_mb"), 0),
            spread(column(runs, name, "start_ms"), 0),
            spread(column(runs, name, "drain_ms"), 0),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def several_processes(runs: Runs, alone: Runs, count: str) -> str:
    """What a delivery costs in several processes beside one, as Markdown."""
    lines = [
        f"| {count} processes | deliveries/s | to one process | CPU us a delivery "
        "| to one process | to FastAPI, by CPU |",
        "|---" * 6 + "|",
    ]
    for name in (name for name in LABELS if runs.get(name)):
        cells = [
            LABELS[name],
            spread(column(runs, name, "rate"), 0),
            _medians(column(runs, name, "rate"), column(alone, name, "rate")),
            spread(column(runs, name, "cpu_us"), 0),
            _medians(column(runs, name, "cpu_us"), column(alone, name, "cpu_us")),
            spread(ratios(runs, (REFERENCE, "cpu_us"), (name, "cpu_us"))),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _medians(one: list[float], other: list[float]) -> str:
    """The ratio of two medians: their rounds were not the same ones."""
    if not one or not other:
        return "-"
    return f"{sorted(one)[len(one) // 2] / sorted(other)[len(other) // 2]:.2f}"


def sections(kept: dict) -> str:
    """All tables of a run, and what is to be known of them."""
    options, runs = kept["options"], kept["runs"]
    alone = runs.get("1", {})
    parts = []
    if alone:
        parts += [one_process(alone), goals(alone)]
    parts += [several_processes(runs[count], alone, count) for count in runs if count != "1"]
    parts.append(
        f"{options['rounds']} rounds of {options['seconds']:g} s on {kept['cores']} cores, "
        f"{options['connections']} connections"
        + (f", {options['finished']} finished events" if options["finished"] else "")
        + ". A dash stands for a figure that was refused or not measured."
    )
    reasons = [reason for count in runs for reason in problems(runs[count], processes=int(count))]
    parts += [f"- {reason}" for reason in dict.fromkeys(reasons)]
    return "\n\n".join(parts)


def main(source: str | None = None) -> None:
    file = Path(source or HERE / "results" / "deliveries.json")
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{sections(json.loads(file.read_text()))}\n\n{END}{after}")
    print(PAGE)
    plot.main(str(file))


if __name__ == "__main__":
    main(*sys.argv[1:])
