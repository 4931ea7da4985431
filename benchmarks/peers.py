"""The compared servers, and the installation of the peers."""

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
FLOOR = "minimal-durable"


@attrs.frozen
class Server:
    """One server: its command, and its name in tables.

    In the command, ``PORT`` is replaced by the port. ``settings`` are additional settings of our
    servers. ``queues``: it responds before the event is handled, so the end of handling is measured
    too. ``waits``: it waits for the disk, so its core may be idle. ``most``: more deliveries a
    second than it can answer.
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
    """Return a configuration of our server, as ``python -m sdk_trio run`` starts it.

    Args:
        name: its name in results.
        about: its name in tables.
        queues: its handlers run after the response.
        settings: by the suffixes of their variables, such as ``STORAGE__BACKEND``.
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


#: At constant full load, more events are accepted than handled. With the default queue of 1000,
#: events beyond it would be answered 503 and sent again.
_WITHOUT_REFUSALS = {"WEBHOOKS__QUEUE__CAPACITY": "1000000"}
_MEMORY = {"STORAGE__BACKEND": "Memory", "LOGGING__LEVEL": "Error"}


def our_servers() -> dict[str, Server]:
    """Return every configuration of our server by name."""
    made = [
        ours(INLINE, "sdk_trio, default, inline"),
        ours(ENQUEUED, "sdk_trio, default, enqueued", queues=True),
        ours(
            "enqueued-open",
            "sdk_trio, default with a longer queue, enqueued",
            queues=True,
            **_WITHOUT_REFUSALS,
        ),
        ours("inline-silent", "the same without log lines", LOGGING__LEVEL="Error"),
        attrs.evolve(ours("memory", "sdk_trio, store in memory, no log", **_MEMORY), most=35_000),
        ours(
            "memory-info",
            "the same with a log line for each delivery",
            STORAGE__BACKEND="Memory",
        ),
        attrs.evolve(ours("memory-tls", "sdk_trio, store in memory, TLS", **_MEMORY), tls=True),
        Server(
            "minimal",
            "trio + httptools, no store: the lower limit",
            (sys.executable, str(SERVERS / "minimal_peer.py"), "PORT"),
            most=45_000,
        ),
        Server(
            FLOOR,
            "trio + httptools, one commit in a thread, one log line: the lower limit",
            (sys.executable, str(SERVERS / "minimal_durable_peer.py"), "PORT"),
            waits=True,
        ),
    ]
    return {server.name: server for server in made}


def peer_servers() -> dict[str, Server]:
    """Install missing peers, and return all peers by name."""
    python = _peers_python()
    fastapi = (python, str(SERVERS / "fastapi_peer.py"), "PORT")
    made = [
        Server(FASTAPI, "FastAPI, no store", fastapi),
        Server("fastapi-tls", "FastAPI, no store, TLS", fastapi, tls=True),
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
    """Compile our code to bytecode, as pip does with installed packages such as the peers."""
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
    """Install the peers once, in an environment of their own, and return its interpreter."""
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
