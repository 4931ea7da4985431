"""Make the picture of a terminal session: ``python docs/site/terminal.py``.

The session is real: it starts `dev` with a handler that fails, and shows what the commands print.
The picture has the ids and times of that session, so a test does not compare it.
"""

import os
import subprocess
import sys
import tempfile
import time
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "pictures"
BIN = Path(sys.executable).parent
HANDLER = """\
import sdk_trio
from sdk_trio.events import OrderPaidEvent

handlers = sdk_trio.HandlerRegistry()
handlers.ignore()


@handlers.on(OrderPaidEvent, enqueue=True, max_attempts=1)
async def grant_access(event: OrderPaidEvent) -> None:
    if event.attempt == 1:
        raise ConnectionError("the database is unavailable")
"""
COMMANDS = (
    "sdk-trio events trigger order.paid",
    "sdk-trio events list",
    "sdk-trio events replay --state dead",
    "sdk-trio events list",
)
#: Background, text and prompt.
THEMES = {"light": ("#f6f8fa", "#1b1f24", "#0969da"), "dark": ("#0d1117", "#e6edf3", "#58a6ff")}
WIDTH = 104


def main() -> None:
    """Record the session, and write both pictures."""
    lines = session()
    for theme in THEMES:
        (FOLDER / f"terminal-{theme}.svg").write_text(render(lines, theme), "utf-8")


def session() -> list[str]:
    """Return the lines of the session; those of commands begin with ``$``."""
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("SDK")},
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "SDK__SERVER__BIND": "127.0.0.1:0",
        "SDK__ADMIN__BIND": "127.0.0.1:0",
    }
    with tempfile.TemporaryDirectory() as name:
        place = {"cwd": name, "env": environment, "text": True}
        Path(name, "app.py").write_text(HANDLER)
        daemon = subprocess.Popen(
            ["sdk-trio", "dev", "--app", "app:handlers"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **place,
        )
        try:
            for line in daemon.stdout:
                if "Ctrl-C" in line:
                    break
            shown = []
            for command in COMMANDS:
                shown.append(f"$ {command}")
                ran = subprocess.run(command.split(), capture_output=True, check=False, **place)
                shown += [line[:WIDTH] for line in (ran.stdout + ran.stderr).splitlines()]
                time.sleep(1)
            return shown
        finally:
            daemon.terminate()
            daemon.wait(30)


def render(lines: list[str], theme: str) -> str:
    """Return the lines as an SVG."""
    background, text, prompt = THEMES[theme]
    height = 20 * len(lines) + 24
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 860 {height}' width='860' "
        "font-family='ui-monospace, Menlo, Consolas, monospace' font-size='13'>",
        "<title>A terminal: an event fails, is listed as dead, and is replayed</title>",
        f"<rect width='860' height='{height}' rx='8' fill='{background}'/>",
    ]
    for number, line in enumerate(lines):
        colour = prompt if line.startswith("$ ") else text
        parts.append(
            f"<text x='14' y='{20 * number + 26}' fill='{colour}' xml:space='preserve'>"
            f"{escape(line)}</text>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
