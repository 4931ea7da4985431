"""Draws the last run as a bar chart for the documentation: an SVG, written without a library.

    python benchmarks/plot.py [RESULTS.json] [PICTURE.svg]

Bars are CPU time per delivery: what a delivery costs, whatever else the machine was doing.
"""

import json
import statistics
import sys
from html import escape
from pathlib import Path

HERE = Path(__file__).parent

#: What a server is called in the documentation.
LABELS = {
    "inline": "sdk_trio, inline",
    "durable": "sdk_trio, durable, to 200",
    "done": "sdk_trio, durable, to done",
    "full": "sdk_trio, durable, a full store, to 200",
    "growing": "sdk_trio, durable, growing ids, to 200",
    "full-growing": "sdk_trio, durable, both, to 200",
    "stock": "sdk_trio on stock hypercorn",
    "minimal": "trio + httptools, no inbox: the limit",
    "fastapi": "uvicorn + FastAPI",
    "fastapi-durable": "uvicorn + FastAPI, durable",
    "uvicorn": "uvicorn, bare ASGI",
    "granian": "granian + FastAPI",
    "node": "Node.js http",
    "tls": "sdk_trio, inline, TLS",
    "tls-stock": "sdk_trio on stock hypercorn, TLS",
    "tls-fastapi": "uvicorn + FastAPI, TLS",
}
WIDTH, LABEL_WIDTH, BAR, GAP, TOP = 760, 300, 22, 10, 56


def figures(runs: dict[str, list[dict[str, float]]]) -> dict[str, list[float]]:
    """CPU microseconds per delivery of every server; ``done`` is durable with its handler."""
    found = {name: [run["cpu_us"] for run in rows] for name, rows in runs.items() if rows}
    if runs.get("durable"):
        found["done"] = [run["done_cpu_us"] for run in runs["durable"]]
    return found


def draw(found: dict[str, list[float]]) -> str:
    """Return the chart: a bar for the median, a line for the range."""
    order = [name for name in LABELS if name in found]
    order.sort(key=lambda name: statistics.median(found[name]))
    longest = max(max(values) for values in found.values())
    scale = (WIDTH - LABEL_WIDTH - 90) / longest
    height = TOP + len(order) * (BAR + GAP) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="14" role="img">',
        "<title>CPU time per delivery, in microseconds; shorter is better</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        '<text x="12" y="24" font-size="16" font-weight="bold">CPU time per delivery (us)</text>',
        '<text x="12" y="43" fill="#555555">2 KB, signed, 32 connections; shorter is better; '
        "median and range</text>",
    ]
    for row, name in enumerate(order):
        values = found[name]
        middle = statistics.median(values)
        top = TOP + row * (BAR + GAP)
        colour = "#1f6f54" if LABELS[name].startswith("sdk_trio") else "#9aa5b1"
        left, right = (LABEL_WIDTH + value * scale for value in (min(values), max(values)))
        centre = top + BAR / 2
        parts += [
            f'<text x="{LABEL_WIDTH - 10}" y="{top + 16}" text-anchor="end">'
            f"{escape(LABELS[name])}</text>",
            f'<rect x="{LABEL_WIDTH}" y="{top}" width="{middle * scale:.1f}" height="{BAR}" '
            f'fill="{colour}"/>',
            f'<line x1="{left:.1f}" y1="{centre}" x2="{right:.1f}" y2="{centre}" '
            'stroke="#222222" stroke-width="2"/>',
            f'<text x="{right + 8:.1f}" y="{top + 16}">{middle:.0f}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def main(source: str | None = None, target: str | None = None) -> None:
    results = Path(source or HERE / "results" / "deliveries.json")
    picture = Path(target or HERE.parent / "docs" / "explanation" / "performance.svg")
    picture.write_text(draw(figures(json.loads(results.read_text())["runs"]["1"])))
    print(picture)


if __name__ == "__main__":
    main(*sys.argv[1:])
