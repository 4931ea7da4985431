"""The servers that are compared, and how the peers get installed."""

import subprocess
import sys
import venv
from pathlib import Path

import attrs

HERE = Path(__file__).parent
SERVERS = HERE / "servers"

#: What the ratios are taken to.
REFERENCE = "fastapi"


@attrs.frozen
class Server:
    """One server: its command (``PORT`` stands for the port) and what it does.

    ``durable``: it waits for the disk as well, so it may leave its core idle.
    """

    name: str
    command: tuple[str, ...]
    about: str
    durable: bool = False


def servers() -> list[Server]:
    """Install what is missing and return every server, ours first."""
    python = _python_peers()
    ours = (sys.executable, str(SERVERS / "receiver.py"), "PORT")
    found = [
        Server("inline", (*ours, "inline"), "ours: typed, deduplicated in memory"),
        Server("durable", (*ours, "durable"), "ours: typed, SQLite synchronous=FULL", durable=True),
        Server("stock", (*ours, "stock"), "inline on hypercorn, without the fast path"),
        Server(
            "minimal",
            (sys.executable, str(SERVERS / "minimal_peer.py"), "PORT"),
            "trio + httptools, our verification, nothing else: the limit",
        ),
        Server(
            REFERENCE,
            (python, str(SERVERS / "fastapi_peer.py"), "PORT"),
            "uvicorn + FastAPI + standardwebhooks",
        ),
        Server(
            "uvicorn",
            (python, str(SERVERS / "bare_peer.py"), "PORT"),
            "uvicorn, bare ASGI + standardwebhooks",
        ),
        Server(
            "granian",
            (
                str(Path(python).with_name("granian")),
                *("--interface", "asgi", "--host", "127.0.0.1", "--port", "PORT"),
                *("--workers", "1", "--no-ws", "--log-level", "error", "--loop", "uvloop"),
                "fastapi_peer:app",
            ),
            "granian + FastAPI + standardwebhooks",
        ),
    ]
    node = _node_peer()
    if node is not None:
        found.append(Server("node", (node, str(SERVERS / "node_peer.mjs"), "PORT"), "node http"))
    return found


def _python_peers() -> str:
    """Install the Python peers once, beside the benchmarks, and return their interpreter."""
    directory = HERE / ".venv"
    python = directory / "bin" / "python"
    stamp = directory / ".installed"
    wanted = (HERE / "requirements.txt").read_text()
    if not stamp.exists() or stamp.read_text() != wanted:
        venv.create(directory, with_pip=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "-r"]
        subprocess.run([*command, str(HERE / "requirements.txt")], check=True)
        stamp.write_text(wanted)
    return str(python)


def _node_peer() -> str | None:
    """Install the Node.js peer once; None where there is no Node.js, which is said."""
    try:
        if not (HERE / "node_modules" / "standardwebhooks").exists():
            command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--no-package-lock"]
            subprocess.run(command, cwd=HERE, check=True)
        subprocess.run(["node", "--version"], check=True, stdout=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"the peer on Node.js is left out: {error}", file=sys.stderr)
        return None
    return "node"
