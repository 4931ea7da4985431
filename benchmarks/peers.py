"""The servers that are compared, and how the peers get installed."""

import compileall
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path

import attrs

HERE = Path(__file__).parent
SERVERS = HERE / "servers"

#: What the ratios are taken to.
REFERENCE = "fastapi"

#: Servers that only a run with ``--tls`` or ``--finished`` has.
TLS, FINISHED = "tls", "finished"


@attrs.frozen
class Server:
    """One server: its command and what it does.

    In the command, ``PORT`` and ``WORKERS`` stand for the port and the number of processes. With
    ``inherits``, every process is started by itself, and ``ADDRESS`` stands for the listening
    socket that all of them inherit.

    ``durable``: it waits for the disk as well, so it may leave its core idle. ``store``: a database
    that it gets a copy of. ``growing_ids``: its senders' ids grow with time and are not random.
    ``only_with``: the option that it needs. ``alone``: it has no form of several processes.
    """

    name: str
    command: tuple[str, ...]
    about: str
    durable: bool = False
    inherits: bool = False
    tls: bool = False
    growing_ids: bool = False
    store: Path | None = None
    only_with: str | None = None
    alone: bool = False


def servers(options: Iterable[str], *, processes: int, store: Path) -> list[Server]:
    """Install what is missing and return every server that takes part, ours first.

    Args:
        options: of :data:`TLS` and :data:`FINISHED`.
        processes: of each server; above 1, those that have no such form are left out.
        store: where the store full of finished events is.
    """
    # As pip does with what it installs: the peers are compiled, and so are those who use us.
    for directory in (HERE.parent / "sdk_trio", SERVERS):
        compileall.compile_dir(directory, quiet=1)
    wanted = (None, *options)
    found = [*_ours(store), *_python_peers(), *_node_peers()]
    return [
        server
        for server in found
        if server.only_with in wanted and not (server.alone and processes > 1)
    ]


def _ours(store: Path) -> list[Server]:
    receiver = (sys.executable, str(SERVERS / "receiver.py"), "ADDRESS")
    inline, durable = (*receiver, "inline"), (*receiver, "durable")
    minimal = (sys.executable, str(SERVERS / "minimal_peer.py"), "ADDRESS")
    full = {"durable": True, "inherits": True, "only_with": FINISHED}
    return [
        Server("inline", inline, "ours: typed, deduplicated in memory", inherits=True),
        Server(
            "durable",
            durable,
            "ours: typed, SQLite synchronous=FULL",
            durable=True,
            inherits=True,
        ),
        Server("full", durable, "durable beside finished events", store=store, **full),
        Server(
            "growing",
            durable,
            "durable, ids that grow with time",
            growing_ids=True,
            **full,
        ),
        Server(
            "full-growing",
            durable,
            "both",
            store=store,
            growing_ids=True,
            **full,
        ),
        Server(
            "stock",
            (*receiver, "stock"),
            "inline on hypercorn, without the fast path",
            inherits=True,
            alone=True,
        ),
        Server(
            "minimal",
            minimal,
            "trio + httptools, our verification, nothing else: the limit",
            inherits=True,
        ),
        Server("tls", inline, "inline over TLS", inherits=True, tls=True, only_with=TLS),
        Server(
            "tls-stock",
            (*receiver, "stock"),
            "stock over TLS",
            inherits=True,
            tls=True,
            only_with=TLS,
            alone=True,
        ),
    ]


def _python_peers() -> list[Server]:
    python = _peers_python()
    fastapi = (python, str(SERVERS / "fastapi_peer.py"), "PORT", "WORKERS")
    return [
        Server(REFERENCE, fastapi, "uvicorn + FastAPI + standardwebhooks"),
        Server(
            "fastapi-durable",
            (python, str(SERVERS / "fastapi_durable_peer.py"), "PORT", "WORKERS"),
            "fastapi that keeps each event in SQLite before it answers",
            durable=True,
            alone=True,
        ),
        Server("tls-fastapi", fastapi, "fastapi over TLS", tls=True, only_with=TLS),
        Server(
            "uvicorn",
            (python, str(SERVERS / "bare_peer.py"), "PORT", "WORKERS"),
            "uvicorn, bare ASGI + standardwebhooks",
        ),
        Server(
            "granian",
            (
                str(Path(python).with_name("granian")),
                *("--interface", "asgi", "--host", "127.0.0.1", "--port", "PORT"),
                *("--workers", "WORKERS", "--no-ws", "--log-level", "error", "--loop", "uvloop"),
                "fastapi_peer:app",
            ),
            "granian + FastAPI + standardwebhooks",
        ),
    ]


def _node_peers() -> list[Server]:
    node = _node()
    if node is None:
        return []
    return [Server("node", (node, str(SERVERS / "node_peer.mjs"), "PORT", "WORKERS"), "node http")]


def _peers_python() -> str:
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


def _node() -> str | None:
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
