"""The units below ``examples/systemd``: what systemd's own tools say, and that they start."""

import configparser
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import trio
from support.programs import program
from support.service_manager import service_manager

from sdk_trio.config import Settings
from sdk_trio.errors import EXIT_CONFIGURATION

UNITS = Path(__file__).parents[2] / "examples" / "systemd"
SERVICE = UNITS / "sdk-trio.service"
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "run-under-systemd.md"
PROGRAM = "/opt/sdk-trio/bin/sdk-trio"

#: What ``systemd-analyze security`` may find, out of 10; more is worse.
GREATEST_EXPOSURE = 1.2


class Unit(configparser.RawConfigParser):
    """A unit file of which the last of several equal keys counts."""

    def __init__(self, path):
        super().__init__(strict=False, delimiters=("=",), interpolation=None)
        self.optionxform = str
        self.read_string(path.read_text())


def lines_of(path, key):
    return re.findall(rf"^{key}=(.*)$", path.read_text(), re.MULTILINE)


def test_systemd_finds_nothing_wrong_with_the_units(tmp_path):
    analyze = program("systemd-analyze")
    for unit in UNITS.iterdir():
        # Where the program is installed is the machine's business.
        text = unit.read_text().replace(PROGRAM, shutil.which("true"))
        (tmp_path / unit.name).write_text(text.replace("/opt/sdk-trio", "/"))
    found = subprocess.run(
        [analyze, "verify", "--man=no", *map(str, tmp_path.iterdir())],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0
    assert [line for line in found.stderr.splitlines() if "sdk-trio" in line] == []


def test_the_service_may_do_little():
    found = subprocess.run(
        [program("systemd-analyze"), "security", "--offline=true", "--no-pager", str(SERVICE)],
        capture_output=True,
        text=True,
    )
    exposure = re.search(r"Overall exposure level for sdk-trio.service: ([0-9.]+)", found.stdout)
    assert float(exposure[1]) <= GREATEST_EXPOSURE


def test_the_service_is_given_time_to_drain_and_not_restarted_in_vain():
    service = Unit(SERVICE)["Service"]
    settings = Settings()
    needed = (
        settings.webhooks.graceful_drain_timeout_seconds + settings.server.shutdown_delay_seconds
    )
    assert float(service["TimeoutStopSec"]) > needed + 5
    assert int(service["RestartPreventExitStatus"]) == EXIT_CONFIGURATION
    assert service["KillMode"] == "mixed"


def test_a_command_beside_the_service_sees_what_the_service_sees():
    text = PAGE.read_text()
    command = text[text.index("sdk-trio-here() {") : text.index("\n}\n")]
    given = set(re.findall(r"--property=(\S+)", command))
    keys = ("DynamicUser", "StateDirectory", "StateDirectoryMode", "WorkingDirectory")
    same = {f"{key}={value}" for key in keys for value in lines_of(SERVICE, key)}
    secrets = {f"LoadCredential={value}" for value in lines_of(SERVICE, "LoadCredential")}
    # Units of one user's name share the user; that of the service is the unit's own.
    assert given == {*same, *secrets, f"User={SERVICE.stem}"}
    started = lines_of(SERVICE, "ExecStart")[0]
    assert f"{PROGRAM} " in command
    settings = "--config /etc/sdk-trio/appsettings.json"
    assert settings in command
    assert settings in started


def prepare(manager):
    """Make the daemons of ``manager`` those of the unit; return the words of its command."""
    (command,) = lines_of(SERVICE, "ExecStart")
    executable, run, *words = command.split()
    assert (executable, run) == (PROGRAM, "run")
    (assignments,) = lines_of(SERVICE, "Environment")
    manager.environment |= dict(pair.split("=", 1) for pair in assignments.split())
    credentials = Path(manager.environment["CREDENTIALS_DIRECTORY"])
    for credential in lines_of(SERVICE, "LoadCredential"):
        name = credential.partition(":")[0]
        if not (credentials / name).exists():
            (credentials / name).write_text("token-of-a-test")
    config = manager.directory / "appsettings.json"
    config.write_text('{"Sdk": {"Webhooks": {"RequireHttps": false}}}')
    manager.settings = {}
    return [str(config) if word == "/etc/sdk-trio/appsettings.json" else word for word in words]


@pytest.mark.parametrize("admin", [True, False])
async def test_the_command_of_the_unit_starts_with_the_sockets_of_the_units(tmp_path, admin):
    with (
        service_manager(tmp_path) as manager,
        socket.create_server(("127.0.0.1", 0)) as web,
        socket.create_server(("127.0.0.1", 0)) as console,
    ):
        words = prepare(manager)
        names = {lines_of(unit, "FileDescriptorName")[0] for unit in UNITS.glob("*.socket")}
        assert names == {"web", "admin"}
        sockets = {"web": web, "admin": console} if admin else {"web": web}
        daemon = manager.start(*words, sockets=sockets, standalone=False)
        if admin:
            await manager.said("READY=1")
            started = await manager.wait_for("runtime.started")
            for url, held in ((started["receiver"], web), (started["admin"], console)):
                assert url == [f"http://127.0.0.1:{held.getsockname()[1]}"]
            assert (tmp_path / "state" / "inbox.db").exists()
            with trio.fail_after(60):
                assert await manager.stop(daemon) == 0
        else:
            assert await manager.ended(daemon) == EXIT_CONFIGURATION
