"""A real daemon and its supervisor, which starts it again after any end."""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import attrs
import trio

from .command_forker import Program, start_program
from .deliveries import SECRET
from .ports import free_port
from .wire import Wire

#: The pause of the supervisor before a restart, in seconds.
RESTART_SECONDS = 0.1


@attrs.frozen
class Death:
    """The end of one process: its status as ``subprocess`` gives it, and the monotonic time."""

    pid: int
    status: int
    at_ns: int


async def _ended(process: Program) -> None:
    """Wait for the end of a process, without asking for it all the time."""
    with suppress(ProcessLookupError):  # it has ended, and its parent has waited for it
        descriptor = os.pidfd_open(process.pid)
        try:
            await trio.lowlevel.wait_readable(descriptor)
        finally:
            os.close(descriptor)
    while process.poll() is None:
        await trio.sleep(0.002)


@attrs.define
class Respawned:
    """``python -m sdk_trio run`` in ``directory``, on addresses that stay the same.

    ``application`` is the text of a module whose ``handlers`` is the registry. Use :meth:`run` as a
    task; :meth:`stop` ends the daemon and that task.
    """

    directory: Path
    application: str
    settings: Mapping[str, object] = attrs.Factory(dict)
    environment: Mapping[str, str] = attrs.Factory(dict)
    most_starts: int | None = None
    port: int = attrs.Factory(free_port)
    admin_port: int = attrs.Factory(free_port)
    deaths: list[Death] = attrs.Factory(list)
    starts: int = 0
    stopping: bool = False
    process: Program | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def ended(self) -> bool:
        """Whether the daemon has ended and will not be restarted."""
        return self.process is None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the daemon running until :meth:`stop`, or for ``most_starts`` starts."""
        (self.directory / "tortured_application.py").write_text(self.application)
        try:
            while not self.stopping and self.starts != self.most_starts:
                self.process = self._spawn()
                self.starts += 1
                task_status.started()
                task_status = trio.TASK_STATUS_IGNORED
                await _ended(self.process)
                ended = (self.process.pid, self.process.returncode, time.monotonic_ns())
                self.deaths.append(Death(*ended))
                await trio.sleep(RESTART_SECONDS)
        finally:
            if self.process is not None and self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self.process = None

    def _spawn(self) -> Program:
        settings = {
            "Storage:Path": str(self.data),
            "Server:Bind": f"127.0.0.1:{self.port}",
            "Admin:Bind": f"127.0.0.1:{self.admin_port}",
            "Webhooks:RequireHttps": "false",
            **self.settings,
        }
        words = ["run", "--standalone", "--app", "tortured_application:handlers"]
        for key, value in settings.items():
            words += ["--set", f"Sdk:{key}={value}"]
        environment = {**os.environ, "SDK__WEBHOOKS__SECRET": SECRET, **self.environment}
        with (self.directory / "log").open("a") as log:
            return start_program(
                words, directory=self.directory, environ=environment, stdout=log, stderr=log
            )

    async def accepting(self) -> None:
        """Wait until the daemon accepts connections."""
        while True:
            try:
                with await Wire.connect(self.url):
                    return
            except OSError:
                await trio.sleep(0.01)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the daemon, if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def stop(self) -> None:
        """End the daemon with TERM and do not start it again."""
        self.stopping = True
        self.kill(signal.SIGTERM)

    def logged(self, words: Sequence[str]) -> dict[str, int]:
        """Return the number of log lines that contain all of ``words``."""
        lines = (self.directory / "log").read_text(errors="replace").splitlines()
        return {word: sum(word in line for line in lines) for word in words}
