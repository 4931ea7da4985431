"""The servers that are compared, and how the peers get installed."""

import compileall
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

import attrs

HERE = Path(__file__).parent
SERVERS = HERE / "servers"

#: Names in tables and results.
INLINE, ENQUEUED, FASTAPI, DURABLE = "inline", "enqueued", "fastapi", "fastapi-durable"


@attrs.frozen
class Server:
    """One server: its command, and what it is called in a table.

    In the command ``PORT`` stands for the port. ``settings`` are ours, beside those that every one
    of ours needs. ``queues``: it answers before the event is handled, so that it has an end of its
    own. ``waits``: it waits for the disk, so that it may leave its core idle. ``most``: more
    deliveries a second than it can answer.
    """

    name: str
    about: str
    command: tuple[str, ...]
    settings: Mapping[str, str] = {}
    queues: bool = False
    waits: bool = False
    tls: bool = False
    most: int = 25_000


def ours(name: str, about: str, *, queues: bool = False, **settings: str) -> Server:
    """Return a server of ours as ``python -m sdk_trio run`` starts it.

    Args:
        name: what it is called in results.
        about: what it is called in tables.
        queues: its handlers run behind the answer.
        settings: by the ends of their keys' variables, such as ``STORAGE__BACKEND``.
    """
    handlers = "handlers:enqueued" if queues else "handlers:inline"
    command = (sys.executable, "-m", "sdk_trio", "run", "--standalone", "--app", handlers)
    return Server(
        name,
        about,
        command,
        settings,
        queues=queues,
        waits=settings.get("STORAGE__BACKEND") != "Memory",
    )


#: At full load and without a pause, more events are accepted than handled. In the default's place
#: of 1000, those above it would be answered 503, and the sender would send them again.
_WITHOUT_REFUSALS = {"WEBHOOKS__QUEUE__CAPACITY": "1000000"}
_MEMORY = {"STORAGE__BACKEND": "Memory", "LOGGING__LEVEL": "Error"}


def our_servers() -> dict[str, Server]:
    """Return every server of ours by its name."""
    made = [
        ours(INLINE, "sdk_trio, default, inline"),
        ours(ENQUEUED, "sdk_trio, default, enqueued", queues=True),
        ours(
            "enqueued-open",
            "sdk_trio, default with a longer queue, enqueued",
            queues=True,
            **_WITHOUT_REFUSALS,
        ),
        ours("inline-silent", "the same without a line of log", LOGGING__LEVEL="Error"),
        attrs.evolve(ours("memory", "sdk_trio, store in memory, no log", **_MEMORY), most=35_000),
        ours(
            "memory-info",
            "the same with a line of log for each delivery",
            STORAGE__BACKEND="Memory",
        ),
        attrs.evolve(ours("memory-tls", "sdk_trio, store in memory, TLS", **_MEMORY), tls=True),
        Server(
            "minimal",
            "trio + httptools, no inbox: the limit",
            (sys.executable, str(SERVERS / "minimal_peer.py"), "PORT"),
            most=45_000,
        ),
    ]
    return {server.name: server for server in made}


def peer_servers() -> dict[str, Server]:
    """Install the peers where they are missing, and return them by their names."""
    python = _peers_python()
    fastapi = (python, str(SERVERS / "fastapi_peer.py"), "PORT")
    made = [
        Server(FASTAPI, "FastAPI, keeps nothing", fastapi),
        Server("fastapi-tls", "FastAPI, keeps nothing, TLS", fastapi, tls=True),
        Server(
            DURABLE,
            "FastAPI, durable",
            (python, str(SERVERS / "fastapi_durable_peer.py"), "PORT"),
            queues=True,
            waits=True,
        ),
    ]
    return {server.name: server for server in made}


def compile_all() -> None:
    """Compile ours, as pip does with what it installs: the peers are compiled, too."""
    for directory in (HERE.parent / "sdk_trio", SERVERS):
        compileall.compile_dir(directory, quiet=1)


def versions() -> dict[str, str]:
    """Return the versions of the peers' packages."""
    listed = subprocess.run(
        [_peers_python(), "-m", "pip", "freeze"], check=True, capture_output=True, text=True
    )
    found = dict(line.split("==") for line in listed.stdout.splitlines() if "==" in line)
    return {name: found[name] for name in ("fastapi", "uvicorn", "standardwebhooks")}


def _peers_python() -> str:
    """Install the peers once, beside the benchmarks, and return their interpreter."""
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
