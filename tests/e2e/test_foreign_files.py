"""Files and directories of other users: none of them decides what this program does."""

import base64
import json
import os
import pwd
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
from support.daemon import Place
from support.waiting import PATIENCE_SECONDS

#: Tests change the owner of files to imitate other users, which only root can do.
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user: needs root")

OTHER_USER = pwd.getpwnam("nobody").pw_uid


@contextmanager
def as_other_user():
    """Be that user for the length of a block."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(pwd.getpwuid(OTHER_USER).pw_gid)
    os.seteuid(OTHER_USER)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


@pytest.fixture
def place(tmp_path):
    # The directories that pytest makes can be entered by their owner alone.
    tmp_path.chmod(0o755)
    return Place(tmp_path)


# -- the data directory -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o702])
def test_a_data_directory_that_others_can_write_is_refused(place, mode):
    place.data.mkdir()
    place.data.chmod(mode)
    ran = place.run("run", "--standalone")
    assert (ran.returncode, "is open to other users" in ran.stderr) == (78, True), ran.stderr
    assert f"chmod 0700 {place.data}" in ran.stderr
    assert stat.S_IMODE(place.data.stat().st_mode) == mode
    assert list(place.data.iterdir()) == []


@pytest.mark.parametrize("mode", [0o755, 0o711])
def test_one_that_others_can_enter_is_used_and_shows_them_nothing(place, mode):
    place.data.mkdir()
    place.data.chmod(mode)
    with place.daemon(umask=0) as daemon:
        (visible,) = daemon.logged("store.directory_visible")
        assert visible["level"] == "warning"
        assert f"chmod 0700 {place.data}" in visible["detail"]
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in place.data.rglob("*")}
        assert {"inbox.db", "inbox.db-wal", "admin-token", "runtime.lock"} <= set(modes)
        assert {name: mode for name, mode in modes.items() if mode & 0o077} == {}


@pytest.mark.parametrize("mode", [0o755, 0o711])
def test_one_that_others_can_enter_is_refused_if_they_can_read_what_is_in_it(place, mode):
    place.data.mkdir()
    place.data.chmod(mode)
    (place.data / "inbox.db").touch()
    (place.data / "inbox.db").chmod(0o640)
    ran = place.run("run", "--standalone")
    assert (ran.returncode, "so are its contents (inbox.db)" in ran.stderr) == (78, True), ran
    assert f"chmod -R go= {place.data}" in ran.stderr
    # Once, and after no line that says that something has started.
    assert ran.stderr.count("so are its contents") == 1
    assert "admin.started" not in ran.stderr
    (place.data / "inbox.db").chmod(0o600)
    with place.daemon() as daemon:
        assert daemon.logged("store.directory_visible")


@as_root
def test_a_data_directory_of_another_user_is_refused(place):
    place.data.mkdir(mode=0o700)
    os.chown(place.data, OTHER_USER, -1)
    ran = place.run("run", "--standalone")
    assert (ran.returncode, "belongs to the user nobody" in ran.stderr) == (78, True), ran.stderr
    assert list(place.data.iterdir()) == []


@pytest.mark.parametrize("name", ["runtime.pid", "runtime.json"])
def test_a_link_in_the_data_directory_is_not_written_through(place, name):
    precious = place.directory / "precious"
    precious.write_text("untouched")
    place.data.mkdir(mode=0o700)
    (place.data / name).symlink_to(precious)
    with place.daemon() as daemon:
        daemon.wait_for("runtime.started")
    assert precious.read_text() == "untouched"


@as_root
def test_an_admin_token_of_another_user_opens_nothing(place):
    place.data.mkdir(mode=0o700)
    token = place.data / "admin-token"
    token.write_text("chosen-by-another-user-and-long-enough\n")
    token.chmod(0o600)
    os.chown(token, OTHER_USER, -1)
    with place.daemon() as daemon:
        asked = {"authorization": f"Bearer {token.read_text().strip()}"}
        assert httpx.get(f"{daemon.admin}/api/status", headers=asked).status_code == 401
        [missing] = daemon.logged("admin.token_missing")
        assert "belongs to the user nobody" in missing["error"]
    doctor = place.run("doctor", "--standalone", "--offline", "--format", "json")
    [found] = [f for f in json.loads(doctor.stdout) if f["where"].startswith("the admin token")]
    assert (found["level"], "user nobody" in found["what"]) == ("problem", True)


def test_nothing_that_a_daemon_makes_is_open_to_others_whatever_the_umask(place):
    sockets = place.directory / "sockets"
    sockets.mkdir()
    words = (
        *("--set", f"Sdk:Server:Bind=unix:{sockets}/private,unix:{sockets}/group?mode=0660"),
        *("--set", f"Sdk:Admin:Bind=unix:{sockets}/admin"),
    )
    with place.daemon(*words, umask=0) as daemon:
        modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in sockets.iterdir()}
        assert modes == {"private": 0o600, "group": 0o660, "admin": 0o600}
        assert daemon.receiver == f"unix:{sockets}/private"
        health = place.run("health", *words)
        assert health.returncode == 0, health.stderr
        made = {p.name: stat.S_IMODE(p.stat().st_mode) for p in place.data.rglob("*")}
        assert {"runtime.lock", "runtime.pid", "runtime.json", "inbox.db"} <= set(made)
        assert {name: mode for name, mode in made.items() if mode & 0o077} == {}


@as_root
def test_a_proxy_of_another_user_reaches_the_socket_that_its_group_may_use(place, request):
    # Not below the directories of pytest, which no other user may enter.
    sockets = Path(tempfile.mkdtemp())
    request.addfinalizer(partial(shutil.rmtree, sockets))
    os.chown(sockets, -1, pwd.getpwuid(OTHER_USER).pw_gid)
    sockets.chmod(0o2750)
    bind = f"unix:{sockets}/private,unix:{sockets}/group?mode=0660"

    def connects(name):
        with as_other_user(), socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(sockets / name))
            except PermissionError:
                return False
            return True

    with place.daemon("--set", f"Sdk:Server:Bind={bind}"):
        assert (connects("group"), connects("private")) == (True, False)


# -- what the working directory says ------------------------------------------------------------


def settings_file(place, name="appsettings.json", **settings):
    file = place.directory / name
    file.write_text(json.dumps({"Sdk": settings}))
    file.chmod(0o644)
    return file


COMMANDS = (
    ("config", "check", "--standalone"),
    ("config", "show"),
    ("run", "--standalone"),
    ("dev",),
    ("doctor", "--standalone", "--offline"),
    ("events", "list"),
)


@as_root
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_settings_that_another_user_left_in_the_working_directory_are_refused(place, words):
    file = settings_file(place, Webhooks={"Path": "/chosen/by/another"})
    os.chown(file, OTHER_USER, -1)
    ran = place.run(*words)
    shown = ran.stdout + ran.stderr
    assert ran.returncode == 78, shown
    assert "appsettings.json" in shown
    assert "belongs to the user nobody" in shown
    assert "--config" in shown


@as_root
@pytest.mark.parametrize("name", ["sdk.toml", "appsettings.Production.json", ".env"])
def test_so_are_its_siblings(place, name):
    settings_file(place, "appsettings.json", Webhooks={"Path": "/mine"})
    file = place.directory / name
    file.write_text("")
    os.chown(file, OTHER_USER, -1)
    place.environ["SDK_ENVIRONMENT"] = "Development" if name == ".env" else "Production"
    ran = place.run("config", "show")
    assert (ran.returncode, f"{name}: the file" in ran.stderr) == (78, True), ran.stderr
    assert "belongs to the user nobody" in ran.stderr


@as_root
def test_a_link_that_another_user_left_is_refused(place):
    target = settings_file(place, "mine.json", Webhooks={"Path": "/mine"})
    link = place.directory / "appsettings.json"
    link.symlink_to(target)
    assert place.run("config", "show").returncode == 0
    os.chown(link, OTHER_USER, -1, follow_symlinks=False)
    assert place.run("config", "show").returncode == 78


def test_settings_that_others_can_write_are_refused_unless_they_are_named(place):
    file = settings_file(place, Webhooks={"Path": "/mine"})
    file.chmod(0o646)
    ran = place.run("config", "show")
    assert (ran.returncode, f"chmod go-w {file.name}" in ran.stderr) == (78, True), ran.stderr
    assert "/mine" in place.run("config", "show", "--config", str(file)).stdout
    file.chmod(0o644)
    assert "/mine" in place.run("config", "show").stdout


@as_root
def test_a_group_of_others_may_not_write_them_and_ones_own_may(place):
    file = settings_file(place, Webhooks={"Path": "/mine"})
    file.chmod(0o664)
    assert place.run("config", "show").returncode == 0
    os.chown(file, -1, pwd.getpwuid(OTHER_USER).pw_gid)
    assert place.run("config", "show").returncode == 78


def test_files_of_init_are_readable_under_any_umask(place):
    subprocess.run(
        [sys.executable, "-m", "sdk_trio", "init"],
        cwd=place.directory,
        env=place.environ,
        umask=0,
        check=True,
        timeout=PATIENCE_SECONDS,
        stdout=subprocess.DEVNULL,
    )
    assert "appsettings.json" in place.run("config", "show").stdout


def test_doctor_executes_nothing_that_the_working_directory_names(place):
    witness = place.directory / "executed"
    program = place.directory / "replicator"
    program.write_text(f"#!/bin/sh\ntouch {witness}\necho v1\n")
    program.chmod(0o755)
    file = settings_file(
        place,
        MultiTenant={
            "Enabled": True,
            "FileDb": {
                "Replication": {
                    "UseReplication": True,
                    "ReplicaTargetType": "LocalDisk",
                    "LocalDisk": {"Path": str(place.directory / "replica")},
                    "ConfigOutputPath": str(place.directory / "replicator.yml"),
                    "ReplicatorPath": str(program),
                }
            },
        },
    )
    words = ("doctor", "--standalone", "--offline", "--format", "json")
    found = json.loads(place.run(*words).stdout)
    assert [f for f in found if "version was not checked" in f["what"]] != []
    assert not witness.exists()
    found = json.loads(place.run(*words, "--config", str(file)).stdout)
    assert [f for f in found if f["what"].endswith("version v1")] != []
    assert witness.exists()


# -- the replicator's pid file ------------------------------------------------------------------


def hold_pid_file(file: Path) -> subprocess.CompletedProcess[str]:
    program = (
        "import sys; from sdk_trio.replication.running_replicator import hold_pid_file\n"
        "with hold_pid_file(sys.argv[1]): print(open(sys.argv[1]).read())"
    )
    return subprocess.run(
        [sys.executable, "-c", program, str(file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )


def test_a_pid_file_follows_no_link_and_leaves_what_it_leads_to(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("untouched")
    file = tmp_path / "replicator.pid"
    assert hold_pid_file(file).returncode == 0
    file.symlink_to(precious)
    ran = hold_pid_file(file)
    assert (ran.returncode, "is a symbolic link" in ran.stderr) == (1, True), ran.stderr
    assert precious.read_text() == "untouched"


@as_root
def test_a_pid_file_of_another_user_is_not_taken_for_ours(tmp_path):
    file = tmp_path / "replicator.pid"
    file.write_text("1\n")
    os.chown(file, OTHER_USER, -1)
    ran = hold_pid_file(file)
    assert (ran.returncode, "belongs to another user" in ran.stderr) == (1, True), ran.stderr
    assert file.exists()


# -- what is left behind ------------------------------------------------------------------------


@as_root
def test_events_trigger_goes_to_no_receiver_that_another_user_announced(place):
    place.data.mkdir(mode=0o700)
    record = place.data / "runtime.json"
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.setblocking(False)
        port = trap.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        record.write_text(
            json.dumps({"address": url, "url": f"{url}/", "pid": os.getpid(), "secret": "settings"})
        )
        os.chown(record, OTHER_USER, -1)
        ran = place.run("events", "trigger", "order.paid")
        assert (ran.returncode, "belongs to the user nobody" in ran.stderr) == (69, True)
        with pytest.raises(BlockingIOError):
            trap.accept()


def test_a_dev_secret_that_is_a_link_signs_nothing(place):
    elsewhere = place.directory / "known-to-others"
    elsewhere.write_text("whsec_" + base64.b64encode(bytes(range(7, 39))).decode())
    place.data.mkdir(mode=0o700)
    (place.data / "dev-secret").symlink_to(elsewhere)
    ran = place.run("dev")
    assert (ran.returncode, "is a symbolic link" in ran.stderr) == (78, True), ran.stderr
