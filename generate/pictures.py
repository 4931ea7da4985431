"""Makes the drawings of the pages, ``docs/pictures/*.svg``, each for light and for dark.

A drawing is a list of boxes and of arrows between them, in a grid of columns and rows.
"""

from html import escape
from pathlib import Path

import attrs

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"

#: Colours by theme: text, lines, the fill of a box, of a box that matters, of a group, labels.
THEMES = {
    "light": ("#1b1f24", "#57606a", "#f6f8fa", "#ddf4ff", "#ffffff", "#57606a"),
    "dark": ("#e6edf3", "#8b949e", "#21262d", "#0c2d4d", "#161b22", "#9da7b3"),
}
_FONT = "font-family='system-ui, Segoe UI, Helvetica, Arial, sans-serif'"


@attrs.frozen
class Box:
    """A box with its middle at ``x`` and ``y``; ``main`` is the part that the picture is about."""

    x: int
    y: int
    text: str
    width: int = 150
    height: int = 54
    main: bool = False
    group: bool = False


@attrs.frozen
class Arrow:
    """A line through points, with a head at its end; the label is at ``at``, ``end`` anchored."""

    points: tuple[tuple[int, int], ...]
    label: str = ""
    at: tuple[int, int] = (0, 0)
    anchor: str = "middle"


@attrs.frozen
class Drawing:
    """A picture with its size and a sentence for those who do not see it."""

    width: int
    height: int
    alt: str
    parts: tuple[Box | Arrow, ...]


DRAWINGS = {
    "states": Drawing(
        780,
        300,
        "States of an event: received, running, then done, retrying, dead or parked",
        (
            Box(110, 120, "received\nstored, answered 200"),
            Box(350, 120, "running\nunder a lease", main=True),
            Box(640, 120, "done\nnever runs again"),
            Box(640, 30, "parked\nno handler, or a\nsuspended tenant", height=58),
            Box(350, 250, "retrying\nwaits for its time"),
            Box(640, 250, "dead\ndead letter with\nevery error", height=58),
            Arrow(((185, 120), (275, 120)), "claim", (230, 110)),
            Arrow(((425, 120), (565, 120)), "success", (538, 114)),
            Arrow(((425, 105), (510, 105), (510, 30), (565, 30)), "cannot run", (506, 62), "end"),
            Arrow(((330, 147), (330, 223)), "failure", (324, 190), "end"),
            Arrow(((370, 223), (370, 147)), "its time", (376, 190), "start"),
            Arrow(
                ((425, 135), (510, 135), (510, 250), (565, 250)),
                "last attempt failed",
                (504, 214),
                "end",
            ),
            Arrow(((640, 279), (640, 292), (110, 292), (110, 147)), "replay", (116, 230), "start"),
            Arrow(((565, 20), (110, 20), (110, 93)), "replay", (116, 62), "start"),
        ),
    ),
    "delivery": Drawing(
        900,
        250,
        "Way of a delivery: screened, verified, committed, answered, then handled",
        (
            Box(80, 70, "sender\nsigned POST", width=120),
            Box(250, 70, "screen\nHTTPS, path, size,\nrate", width=140, height=62),
            Box(430, 70, "verify\nexact bytes, secret,\ntime", width=140, height=62),
            Box(620, 70, "store\ncommitted to disk", width=150, main=True),
            Box(810, 70, "worker\nyour handler", width=140),
            Box(430, 205, "400\nthe same for all", width=140),
            Box(250, 205, "4xx, 413, 429", width=140),
            Box(620, 205, "200 after the commit\n503: full or stalled", width=170),
            Box(810, 205, "done, retrying,\ndead", width=140),
            Arrow(((140, 70), (180, 70))),
            Arrow(((320, 70), (360, 70))),
            Arrow(((500, 70), (545, 70))),
            Arrow(((695, 70), (740, 70)), "claim", (717, 60)),
            Arrow(((250, 101), (250, 178)), "refused", (244, 145), "end"),
            Arrow(((430, 101), (430, 178)), "not authentic", (424, 145), "end"),
            Arrow(((620, 97), (620, 178)), "answer", (614, 145), "end"),
            Arrow(((810, 97), (810, 178)), "outcome", (804, 145), "end"),
        ),
    ),
    "deployment": Drawing(
        860,
        290,
        "One receiver behind a proxy: public HTTPS, a private admin address, one data directory",
        (
            Box(520, 115, "", width=420, height=210, group=True),
            Box(90, 80, "upstream\nhttps://hooks.example", width=160),
            Box(400, 80, "proxy with TLS\nnginx, Caddy", width=140),
            Box(620, 80, "sdk-trio run\n127.0.0.1:8080", width=160, main=True),
            Box(620, 180, "data directory\ninbox.db", width=160),
            Box(400, 180, "admin address\n127.0.0.1:8081", width=140),
            Box(90, 180, "operators\nssh -L 8081", width=160),
            Box(90, 255, "another machine", width=160, height=40),
            Arrow(((170, 80), (330, 80)), "443", (285, 72)),
            Arrow(((470, 80), (540, 80)), "http", (505, 72)),
            Arrow(((560, 107), (560, 130), (400, 130), (400, 153))),
            Arrow(((620, 107), (620, 153)), "commits", (626, 135), "start"),
            Arrow(((170, 180), (330, 180)), "tunnel", (240, 172)),
            Arrow(((620, 207), (620, 255), (170, 255)), "storage backup", (240, 247)),
        ),
    ),
    "hosts": Drawing(
        860,
        270,
        "Several hosts on one PostgreSQL: each receives, claims events under leases, handles them",
        (
            Box(80, 135, "upstream", width=120),
            Box(250, 135, "load balancer", width=130),
            Box(470, 45, "host a\nsdk-trio run", main=True),
            Box(470, 135, "host b\nsdk-trio run", main=True),
            Box(470, 225, "host c\nsdk-trio run", main=True),
            Box(740, 100, "PostgreSQL\nprimary", width=140),
            Box(740, 205, "standby", width=140),
            Arrow(((140, 135), (185, 135))),
            Arrow(((315, 125), (395, 50))),
            Arrow(((315, 135), (395, 135))),
            Arrow(((315, 145), (395, 220))),
            Arrow(((545, 45), (670, 85)), "claims, leases, outcomes", (600, 50), "start"),
            Arrow(((545, 135), (670, 105))),
            Arrow(((545, 225), (690, 127))),
            Arrow(((740, 127), (740, 178)), "replication", (746, 157), "start"),
        ),
    ),
}


def files() -> dict[Path, str]:
    """Return the path and the text of each picture."""
    return {
        FOLDER / f"{name}-{theme}.svg": _render(drawing, theme)
        for name, drawing in DRAWINGS.items()
        for theme in THEMES
    }


def _render(drawing: Drawing, theme: str) -> str:
    text, line, fill, main, group, label = THEMES[theme]
    size = f"{drawing.width} {drawing.height}"
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {size}' width='{drawing.width}' "
        f"{_FONT} font-size='13'>",
        f"<title>{escape(drawing.alt)}</title>",
        "<defs><marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='8' "
        f"markerHeight='8' orient='auto'><path d='M0 0 8 4 0 8z' fill='{line}'/></marker></defs>",
    ]
    for part in drawing.parts:
        if isinstance(part, Box):
            lines += _box(part, text, line, group if part.group else main if part.main else fill)
        else:
            points = " ".join(f"{x},{y}" for x, y in part.points)
            lines.append(
                f"<polyline points='{points}' fill='none' stroke='{line}' stroke-width='1.5' "
                "marker-end='url(#head)'/>"
            )
            if part.label:
                x, y = part.at
                lines.append(
                    f"<text x='{x}' y='{y}' fill='{label}' font-size='12' "
                    f"text-anchor='{part.anchor}'>{escape(part.label)}</text>"
                )
    return "\n".join([*lines, "</svg>"]) + "\n"


def _box(box: Box, text: str, line: str, fill: str) -> list[str]:
    left, top = box.x - box.width // 2, box.y - box.height // 2
    dashes = " stroke-dasharray='6 4'" if box.group else ""
    lines = [
        f"<rect x='{left}' y='{top}' width='{box.width}' height='{box.height}' rx='6' "
        f"fill='{fill}' stroke='{line}'{dashes}/>"
    ]
    words = box.text.split("\n") if box.text else []
    for number, word in enumerate(words):
        y = box.y + 5 + (number * 16) - (len(words) - 1) * 8
        weight = " font-weight='600'" if number == 0 else " font-size='12'"
        lines.append(
            f"<text x='{box.x}' y='{y}' fill='{text}' text-anchor='middle'{weight}>"
            f"{escape(word)}</text>"
        )
    return lines
