"""The tutorial, word for word: its commands in a shell, its files unchanged."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from support.logs import entries_in
from support.tables import STATES
from support.waiting import wait_until

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial" / "first-receiver.md"

#: Longer than any step takes on a busy machine, in seconds.
PATIENCE_SECONDS = 90

#: Commands that would fetch packages: the environment of the tests has them.
INSTALLS = ("python3 -m venv", "pip install")


def blocks():
    """The blocks of each step: its number, the language, and the text."""
    steps = re.split(r"^## (\d+)\. .*$", TUTORIAL.read_text(), flags=re.MULTILINE)[1:]
    for number, text in zip(steps[::2], steps[1::2], strict=True):
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            yield int(number), language, block


class Shell:
    """A shell whose directory and variables outlast each command, and one daemon beside it."""

    def __init__(self, directory, environment):
        self.directory = directory
        self.state = directory / "state.sh"
        self.environment = environment
        self.daemon = None
        self.log = directory / "daemon.log"
        self.open_terminal()

    def open_terminal(self):
        """Forget the directory and the variables."""
        self.state.write_text(f"cd {self.directory}\n")

    def script(self, command):
        keep = f"declare -px > {self.state}; printf 'cd %q\\n' \"$PWD\" >> {self.state}"
        return ["bash", "-c", f". {self.state}; set -e\n{command}\n{keep}"]

    def run(self, command):
        ran = subprocess.run(
            self.script(command),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert ran.returncode == 0, f"{command}\n{ran.stdout}{ran.stderr}"
        return ran.stdout + ran.stderr

    def start(self, command):
        with self.log.open("w") as log:
            self.daemon = subprocess.Popen(
                ["bash", "-c", f". {self.state}; exec {command}"],
                env=self.environment,
                stdout=log,
                stderr=log,
            )
        wait_until(lambda: "runtime.started" in self.log.read_text() or self.daemon.poll())
        assert self.daemon.poll() is None, self.log.read_text()

    def stop(self):
        """As Ctrl-C does."""
        if self.daemon is not None:
            self.daemon.send_signal(signal.SIGINT)
            assert self.daemon.wait(PATIENCE_SECONDS) == 0, self.log.read_text()
            self.daemon = None


@pytest.fixture
def shell(tmp_path):
    # The package is installed already; activating the environment makes it available.
    activate = tmp_path / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f'export PATH="{Path(sys.executable).parent}:$PATH"\n')
    environment = {k: v for k, v in os.environ.items() if not k.upper().startswith("SDK")}
    environment |= {
        "SDK__SERVER__BIND__0": "127.0.0.1:0",
        "SDK__ADMIN__BIND": "127.0.0.1:0",
        "PYTHONUNBUFFERED": "1",
    }
    shell = Shell(tmp_path, environment)
    yield shell
    if shell.daemon is not None:
        shell.daemon.kill()
        shell.daemon.wait()


def test_the_tutorial_works_as_it_is_written(shell, tmp_path):
    shop = tmp_path / "shop"
    app = shop / "app.py"
    states = ["done"]
    seen = set()
    for step, language, block in blocks():
        seen.add(step)
        if language == "python" and step == 4:
            working = app.read_text()
            before, mark, _ = working.partition("@handlers.on")
            assert mark
            app.write_text(before + block)
            shell.stop()
        elif language == "python":
            # The page shows what init has written.
            assert (shop / "test_app.py").read_text().partition("\n\n")[2] == block
        elif language == "sh":
            if step == 3 and "activate" in block:
                shell.open_terminal()
            if step == 5:
                shell.stop()
                app.write_text(working)
                shell.start("sdk-trio dev --app app:handlers")
            follow(shell, block)
        if step == 4 and "trigger" in block:
            states = ["dead", "done"]
        elif step == 5:
            states = ["done", "done"]
        if step in (3, 4, 5) and "events list" in block:
            wait_until(lambda expected=states: stored(shop) == sorted(expected))
            assert listed(shell) == states
    assert seen == set(range(1, 8))
    shell.stop()


def follow(shell, block):
    """Run the lines of a block unchanged."""
    printed = ""
    for line in block.splitlines():
        command = line.partition("  #")[0].strip()
        if command.startswith(INSTALLS):
            continue
        if command.startswith(("sdk-trio dev", "sdk-trio run")):
            shell.stop()
            shell.start(command)
        else:
            if "8081" in command:
                (started,) = entries_in(shell.log.read_text(), "runtime.started")
                command = command.replace("8081", started["admin"][0].rpartition(":")[2])
            printed += shell.run(command)
    if "readyz" in block:
        assert '"ready": true' in printed
        assert re.search(r"order \S+ is paid", shell.log.read_text())
    if "pytest" in block and "install" not in block:
        assert "1 passed" in printed
    if "doctor" in block:
        assert "a signed delivery passed through the whole pipeline: 200" in printed


def stored(shop):
    """The states in the store: it is asked until they are there, and a command takes longer."""
    with closing(sqlite3.connect(shop / "sdk-data" / "inbox.db")) as store:
        return sorted(state for state, count in store.execute(STATES) for _ in range(count))


def listed(shell):
    """The states of all events that were triggered, newest first."""
    return [event["state"] for event in json.loads(shell.run("sdk-trio events list --format json"))]
