"""The program as a process: commands that end, and daemons that a test stops."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from .command_forker import Program, run_command, start_program
from .deliveries import SECRET
from .logs import entries_in
from .waiting import PATIENCE_SECONDS, wait_until


def clean_environment() -> dict[str, str]:
    """Return this process's environment without the program's variables."""
    ours = ("SDK_", "STATE_DIRECTORY", "CREDENTIALS_DIRECTORY")
    return {name: value for name, value in os.environ.items() if not name.upper().startswith(ours)}


@attrs.frozen
class Place:
    """A directory in which commands run, with its own environment."""

    directory: Path
    environ: dict[str, str] = attrs.field(
        factory=lambda: {
            **clean_environment(),
            "SDK__WEBHOOKS__SECRET": SECRET,
            "SDK__SERVER__BIND": "127.0.0.1:0",
            "SDK__ADMIN__BIND": "127.0.0.1:0",
            "SDK__WEBHOOKS__REQUIREHTTPS": "false",
        }
    )

    @property
    def data(self) -> Path:
        return self.directory / "sdk-data"

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; the test checks the status."""
        return run_command(
            words, environ=self.environ, directory=self.directory, seconds=PATIENCE_SECONDS
        )

    def checked(self, *assignments: str, **environ: str) -> list[dict[str, Any]]:
        """Return the problems and warnings of ``config check`` for ``KEY=VALUE`` settings."""
        words = [word for assignment in assignments for word in ("--set", assignment)]
        ran = run_command(
            ["config", "check", "--standalone", "--format", "json", *words],
            environ={**self.environ, **environ},
            directory=self.directory,
            seconds=PATIENCE_SECONDS,
        )
        found: list[dict[str, Any]] = json.loads(ran.stdout)
        assert ran.returncode == (78 if any(f["level"] == "error" for f in found) else 0), ran
        return found

    @contextmanager
    def daemon(
        self, *words: str, umask: int = -1, start: Sequence[str] = ("run", "--standalone")
    ) -> Iterator["Daemon"]:
        """Run a daemon for the length of the block; stop it with TERM."""
        log = self.directory / "log"
        with log.open("w") as err:
            process = start_program(
                [*start, *words],
                directory=self.directory,
                environ=self.environ,
                stdout=err,
                stderr=err,
                umask=umask,
            )
        try:
            daemon = Daemon(process, log)
            daemon.wait_for("runtime.started")
            yield daemon
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_SECONDS)
        finally:
            process.kill()
            process.wait()


@attrs.frozen
class Daemon:
    """A running daemon and its log."""

    process: Program
    log: Path

    def logged(self, event: str) -> list[Mapping[str, Any]]:
        return entries_in(self.log.read_text(), event)

    def wait_for(self, event: str) -> Mapping[str, Any]:

        def logged() -> Sequence[Mapping[str, Any]]:
            ended = self.process.poll() is not None
            found = self.logged(event)
            assert found or not ended, self.log.read_text()
            return found

        entries: Sequence[Mapping[str, Any]] = wait_until(
            logged, lambda: f"{event} did not come: {self.log.read_text()}"
        )
        return entries[-1]

    @property
    def receiver(self) -> str:
        return str(self.wait_for("runtime.started")["receiver"][0])

    @property
    def admin(self) -> str:
        return str(self.wait_for("runtime.started")["admin"][0])
