"""A service manager: it passes sockets, reads messages, starts and stops daemons."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import attrs
import pytest
import trio

from .command_forker import Program, start_program
from .deliveries import SECRET
from .logs import entries_in
from .waiting import PATIENCE_SECONDS, until

APPLICATION = """
import os, time, trio, sdk_trio
from sdk_trio.events import OrderPaidEvent, OrderCreatedEvent

handlers = sdk_trio.HandlerRegistry()
log = os.open(os.environ["HANDLED"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

@handlers.on(OrderPaidEvent, enqueue=True)
async def handle(event):
    open("running", "w").close()
    while os.path.exists("hold"):
        await trio.sleep(0.01)
    await trio.sleep(float(event.data.metadata.get("seconds", 0.002)))
    os.write(log, event.webhook_id.encode() + b"\\n")

@handlers.on(OrderCreatedEvent)
async def blocks(event):
    open("blocked", "w").close()
    while os.path.exists("hold"):
        time.sleep(0.01)  # as a handler must not
"""

#: Passes sockets as a service manager does: numbers from 3 on, addressed to the process itself.
_ACTIVATE = """
import os, sys
names, *rest = sys.argv[1:]
count = len(names.split(":"))
held = [os.dup(int(number)) for number in rest[:count]]
moved = [os.dup2(number, number + 100) for number in held]
for place, number in enumerate(moved, 3):
    os.dup2(number, place, inheritable=True)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(count), LISTEN_FDNAMES=names)
os.execv(sys.executable, [sys.executable, *rest[count:]])
"""


@attrs.define
class ServiceManager:
    """Daemons in one directory, with their logs, runs and messages to the service manager.

    No handler ends while the directory has a file "hold". The handler of ``order.created`` first
    makes a file "blocked" and then blocks the event loop until that file is gone.
    """

    directory: Path
    notify: socket.socket
    address: str
    environment: dict[str, str] = attrs.Factory(dict)
    settings: dict[str, str] = attrs.Factory(dict)
    processes: list[Program] = attrs.Factory(list)
    messages: list[str] = attrs.Factory(list)

    def start(
        self,
        *words: str,
        sockets: dict[str, socket.socket] | None = None,
        standalone: bool = True,
    ) -> Program:
        """Start ``run``; ``sockets`` are passed to it under their names."""
        command = ["run", *words]
        if standalone:
            command += ["--standalone", "--app", "application:handlers"]
        for key, value in self.settings.items():
            command += ["--set", f"Sdk:{key}={value}"]
        environ = {**os.environ, "HANDLED": str(self.directory / "handled"), **self.environment}
        with (self.directory / "log").open("a") as log:
            if sockets:
                process = self._activate(command, environ, sockets, log)
            else:
                process = start_program(
                    command, directory=self.directory, environ=environ, stdout=log, stderr=log
                )
        self.processes.append(process)
        return process

    def _activate(
        self,
        words: list[str],
        environ: dict[str, str],
        sockets: dict[str, socket.socket],
        log: IO[str],
    ) -> Program:
        descriptors = [sock.fileno() for sock in sockets.values()]
        command = ["-c", _ACTIVATE, ":".join(sockets), *map(str, descriptors)]
        return subprocess.Popen(
            [sys.executable, *command, "-m", "sdk_trio", *words],
            cwd=self.directory,
            env=environ,
            pass_fds=descriptors,
            stdout=log,
            stderr=log,
        )

    def log(self) -> list[dict[str, Any]]:
        return entries_in((self.directory / "log").read_text())

    def logged(self, event: str) -> list[dict[str, Any]]:
        return entries_in((self.directory / "log").read_text(), event)

    async def wait_for(self, event: str, count: int = 1) -> dict[str, Any]:
        """Wait until ``event`` was logged ``count`` times, and return the last one."""

        def logged() -> list[dict[str, Any]]:
            ended = self.processes[-1].poll() is not None
            found = self.logged(event)
            assert len(found) >= count or not ended, (self.directory / "log").read_text()
            return found if len(found) >= count else []

        entries: list[dict[str, Any]] = await until(logged)
        return entries[-1]

    async def url(self) -> str:
        """Return the address of the daemon that started last."""
        entry = await self.wait_for("runtime.started", len(self.processes))
        return entry["receiver"][0]

    async def said(self, text: str, *, after: int = 0) -> int:
        """Wait for a message with ``text``, from index ``after`` on; return the next index."""
        with trio.fail_after(PATIENCE_SECONDS):
            while True:
                self.listen()
                for place, message in enumerate(self.messages[after:], after):
                    if text in message:
                        return place + 1
                await trio.sleep(0.01)

    def listen(self) -> None:
        """Receive the messages of daemons."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.messages.append(self.notify.recv(65536).decode())

    async def ended(self, process: Program) -> int:
        await until(lambda: process.poll() is not None)
        return process.returncode

    async def stop(self, process: Program) -> int:
        process.send_signal(signal.SIGTERM)
        return await self.ended(process)

    def handled(self) -> list[str]:
        file = self.directory / "handled"
        return file.read_text().split() if file.exists() else []


@contextlib.contextmanager
def service_manager(directory: Path, *, abstract: bool = False) -> Iterator[ServiceManager]:
    """Return a service manager without daemons; processes that still run are killed at the end.

    Its daemons use plain HTTP on a free port, and the secret of the other tests as a key file.
    """
    if sys.platform != "linux":
        pytest.skip("a service manager's sockets")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        address = f"@sdk-trio-{uuid.uuid4()}" if abstract else str(directory / "notify")
        notify.bind(address.replace("@", "\0", 1) if abstract else address)
        notify.setblocking(False)
        (directory / "application.py").write_text(APPLICATION)
        credentials = directory / "credentials"
        credentials.mkdir()
        (credentials / "Sdk__Webhooks__Secrets__0").write_text(SECRET)
        manager = ServiceManager(directory, notify, address)
        manager.environment = {
            "NOTIFY_SOCKET": address,
            "CREDENTIALS_DIRECTORY": str(credentials),
            "STATE_DIRECTORY": str(directory / "state"),
        }
        manager.settings = {
            "Server:Bind:0": "127.0.0.1:0",
            "Webhooks:RequireHttps": "false",
            "Admin:Enabled": "false",
        }
        try:
            yield manager
        finally:
            for process in manager.processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
