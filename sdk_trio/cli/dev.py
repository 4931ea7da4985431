"""``dev``: run a receiver to try, without any configuration file."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .parse import (
    REFERENCE,
    UsageError,
    add_forward_to,
    add_port,
    describing,
    forward_settings,
    port_settings,
)

if not describing():
    import msgspec
    import trio

    from ..admin.access import AdminToken
    from ..base import logs
    from ..base.private_files import keep_files_private
    from ..config import Loaded, Settings, StorageBackend
    from ..config.options import DEVELOPMENT, environment_meant
    from ..config.sources import split_mapping_key
    from ..events import Event
    from ..runtime import Runtime, Started
    from ..runtime.presence import DEV_SECRET
    from ..storage.data_directory import DATABASE_NAME
    from ..webhooks import HandlerRegistry
    from ..webhooks.signed_request import own_url
    from ..webhooks.simulator import PREFIX
    from .application import import_registry
    from .main import release_collector
    from .run import announcement, begin_logs, configure_console, own_process, serve
    from .settings import DEV_DEFAULTS, assignments, read
    from .sign import DEV_SECRET_NAME, provide_dev_secret
    from .terminal import print_text, program_name, say

    _log = logs.get_logger("dev")

_BIND = "Sdk:Server:Bind"
_ADMIN_BIND = "Sdk:Admin:Bind"


def dev_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``dev``."""
    parser.add_argument(
        "--app",
        metavar=REFERENCE,
        help="the HandlerRegistry to run; without it every event is logged",
    )
    add_port(parser)
    add_forward_to(parser)
    parser.add_argument(
        "--reload",
        action="store_true",
        help="restart when a Python or settings file of this directory changes",
    )


def dev(arguments: Namespace) -> int:
    """Run a receiver in the Development environment and print commands to try with it.

    Raises:
        SdkError: it could not start.
    """
    # A secret is generated and the simulator signs with it. Neither may happen in Production.
    _refuse_another_environment(arguments)
    if arguments.reload:
        return run_reloading(Path.cwd(), arguments.config)
    keep_files_private()
    # Set before the settings are read, so that their errors are also shown in full.
    arguments.development = True
    loaded = read(
        arguments,
        defaults={
            **DEV_DEFAULTS,
            **port_settings(arguments.port),
            **forward_settings(arguments.forward_to),
        },
    )
    begin_logs(loaded)
    settings = _for_development(loaded)
    # The logging handlers would take each event before a route does.
    plain = HandlerRegistry() if settings.forward.all_routes else logging_handlers()
    handlers = import_registry(arguments.app) if arguments.app else plain
    runtime = Runtime(settings, handlers, quiescence=own_process(settings))
    configure_console(runtime, loaded, arguments)

    @contextmanager
    def announce(started: Started) -> Iterator[None]:
        with announcement(settings, started, secret=DEV_SECRET):
            # Only the token's location is printed: a terminal is recorded and shared.
            token = runtime.administrator.token if started.admin else None
            options = _settings_arguments(arguments)
            print_text(guide(settings, started, options, token, sample_of(handlers)))
            # Flush, because a pipe would buffer the guide.
            sys.stdout.flush()
            yield

    return serve(runtime, announce)


#: Directories without files of the application.
_PASSED_OVER = frozenset({"__pycache__", "node_modules", "site-packages", "sdk-data"})

#: File name endings of the application and its settings.
_WATCHED = (".py", ".json", ".toml", ".env")

#: The polling interval for changed files, in seconds; people do not notice half a second.
LOOK_SECONDS = 0.5


def scan_files(directory: Path, others: Iterable[str] = ()) -> dict[str, int]:
    """Return the files that a reload watches, with the time of their last change."""
    found = list(others)
    for place, below, names in os.walk(directory):
        if "pyvenv.cfg" in names:
            below.clear()  # a virtual environment
            continue
        below[:] = [name for name in below if name not in _PASSED_OVER and name[0] != "."]
        found += [os.path.join(place, name) for name in names if name.endswith(_WATCHED)]
    times: dict[str, int] = {}
    for file in found:
        with suppress(OSError):  # removed in the meantime
            times[file] = os.stat(file).st_mtime_ns
    return times


def run_reloading(directory: Path, others: Sequence[str]) -> int:
    """Run ``dev`` in a separate process, and restart it whenever a file has changed.

    A process that ended by itself, for example because the application cannot be imported, is
    restarted at the next change. Each one drains as at a stop: no acknowledged event is lost.

    Returns:
        the status of the last process, after INT or TERM.
    """
    words = [sys.executable, "-m", "sdk_trio", *(w for w in sys.argv[1:] if w != "--reload")]
    release_collector()
    wanted: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: wanted.append(number))
    while True:
        seen = scan_files(directory, others)
        # A separate session: a Ctrl-C of the terminal reaches it once, through this process.
        process = subprocess.Popen(words, start_new_session=True)
        changed: list[str] = []
        while not wanted and not changed:
            time.sleep(LOOK_SECONDS)
            now = scan_files(directory, others)
            changed = sorted(file for file, _ in seen.items() ^ now.items())
        if process.poll() is None:
            process.send_signal(wanted[-1] if wanted else signal.SIGTERM)
            asked = len(wanted)
            while process.poll() is None:
                time.sleep(0.05)
                if len(wanted) > asked:
                    process.send_signal(wanted[-1])  # a second one cuts the stop short
                    asked = len(wanted)
        if wanted:
            return process.wait()
        say(f"{os.path.relpath(changed[0], directory)} has changed: restarting")


def logging_handlers() -> HandlerRegistry:
    """Return a registry that logs every event, also of types that are not in the catalogue."""
    handlers = HandlerRegistry()

    async def log_event(event: Event[Any]) -> None:
        _log.info(
            "webhook.dev_event",
            webhook_id=event.webhook_id,
            type=event.type,
            subject=getattr(event.data, "id", None),
        )
        # A handler that never waits would handle a full queue without letting other tasks run.
        await trio.lowlevel.checkpoint()

    # Register each type, although a fallback would suffice: the startup check then reports nothing.
    for row in handlers.catalog:
        handlers.register(row.event_class, log_event, enqueue=True)
    # Enqueued, so that a trial uses the queue.
    handlers.fallback(log_event, enqueue=True)
    return handlers


#: The type of the sample in the guide, unless the application handles others.
USUAL_SAMPLE = "order.created"


def sample_of(handlers: HandlerRegistry) -> str:
    """Return a type of the catalogue that the application handles, so that a trial shows it."""
    handled = set(handlers)
    if not handled or USUAL_SAMPLE in handled:
        return USUAL_SAMPLE
    known = (row.wire_type for row in handlers.catalog.known if row.wire_type in handled)
    return next(known, USUAL_SAMPLE)


def guide(
    settings: Settings,
    started: Started,
    settings_arguments: list[str],
    token: AdminToken | None = None,
    sample: str = USUAL_SAMPLE,
) -> str:
    """Return the next steps: addresses, files and commands to copy; contains no secret."""
    directory = Path(settings.storage.path).absolute()
    address = started.receiver[0]
    program = program_name()
    options = "".join(f" {shlex.quote(word)}" for word in settings_arguments)
    store = settings.storage.backend is StorageBackend.SQLITE
    simulator = own_url(address, f"{PREFIX}{sample}")
    rows = {
        "receiver": own_url(address, settings.webhooks.path),
        "secret": f"{directory / DEV_SECRET_NAME} (readable only by you)",
        "inbox": str(directory / DATABASE_NAME) if store else "in memory",
        "send an event": f"{program} events trigger {sample}{options}",
        "or": _curl(simulator),
        "list the events": f"{program} events list{options}",
        **_admin_rows(started, token),
        "stop": "Ctrl-C",
    }
    width = max(map(len, rows))
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in rows.items())


def _admin_rows(started: Started, token: AdminToken | None) -> dict[str, str]:
    if not started.admin or token is None:
        return {}
    address = started.admin[0]
    return {
        "console": own_url(address, "/"),
        "admin token": token.place,
        "admin": f"{own_url(address, '/readyz')} /healthz /metrics /api/status",
    }


def _refuse_another_environment(arguments: Namespace) -> None:
    for key, value in assignments(arguments.set).items():
        is_environment = split_mapping_key(key)[-1].casefold() == "environment"
        if is_environment and environment_meant(value) != DEVELOPMENT:
            raise UsageError(
                f"--set {key}: 'dev' always uses the Development environment; use 'run' for "
                "another one"
            )


def _for_development(loaded: Loaded) -> Settings:
    """Return the settings with the generated secret first, and with ports that are free.

    Configured secrets stay valid. A port is changed only if the user has not chosen it.
    """
    settings = loaded.require()
    webhooks = msgspec.structs.replace(
        settings.webhooks,
        # First, because `events trigger` signs with the first one.
        secret=provide_dev_secret(settings.storage.path),
        secrets=settings.webhooks.all_secrets,
    )
    server = settings.server
    if server.processes != 1:
        say("note: Sdk:Server:Processes is for 'run': 'dev' is one process")
        server = msgspec.structs.replace(server, processes=1)
    # A user who chose a port wants that port, and gets an error if it is in use.
    if _BIND not in loaded.origins:
        server = msgspec.structs.replace(server, bind=tuple(map(_free_address, server.bind)))
    admin = settings.admin
    if _ADMIN_BIND not in loaded.origins:
        admin = msgspec.structs.replace(admin, bind=_free_address(admin.bind))
    return msgspec.structs.replace(settings, webhooks=webhooks, server=server, admin=admin)


def _free_address(address: str) -> str:
    """Return ``HOST:PORT``, with port 0 if another program listens there."""
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the server does: a port in TIME_WAIT since the last trial counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            # The server reports every other error.
            return f"{host}:0" if error.errno == errno.EADDRINUSE else address
    return address


def _settings_arguments(arguments: Namespace) -> list[str]:
    """Return the arguments that another command needs to find the same settings."""
    words: list[str] = []
    for file in arguments.config:
        # Other commands do not need --app and the rest.
        words += ["--config", file]
    for assignment in arguments.set:
        key = split_mapping_key(assignment.partition("=")[0].strip().casefold())
        # `dev` itself ignores it, and has reported that.
        if key[-2:] != ("server", "processes"):
            words += ["--set", assignment]
    return words


def _curl(url: str) -> str:
    if url.startswith("unix:"):
        _, socket_path, path = url.split(":", 2)
        return f"curl --unix-socket {shlex.quote(socket_path)} -X POST http://localhost{path}"
    # A development certificate is self-signed.
    insecure = "--insecure " if url.startswith("https:") else ""
    return f"curl {insecure}-X POST {url}"
