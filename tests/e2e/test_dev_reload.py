"""``dev --reload`` and ``--port``, as used in a terminal beside an editor."""

import os
import signal
import subprocess
import sys

import pytest
from support.daemon import Place
from support.ports import free_port
from support.waiting import PATIENCE_SECONDS, wait_until

APPLICATION = """
from sdk_trio import HandlerRegistry
from sdk_trio.events import OrderPaidEvent

handlers = HandlerRegistry()

@handlers.on(OrderPaidEvent, enqueue=True)
async def grant(event):
    print("{word}", event.webhook_id, flush=True)
"""


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path)
    place.environ["PYTHONUNBUFFERED"] = "1"
    del place.environ["SDK__SERVER__BIND"]
    return place


def write(place, text):
    """Replace the application at once: half a file would be a change of its own."""
    fresh = place.directory / "app.new"
    fresh.write_text(text)
    fresh.replace(place.directory / "app.py")


@pytest.fixture
def dev(place):
    """A running ``dev --reload``, and what it has printed so far."""
    write(place, APPLICATION.format(word="first"))
    log = place.directory / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "sdk_trio", "dev", "--reload", "--app", "app:handlers", "-p0"],
            cwd=place.directory,
            env=place.environ,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    yield process, log.read_text
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_SECONDS)


def triggered(place):
    ran = place.run("events", "trigger", "order.paid")
    assert ran.returncode == 0, ran.stderr


def test_a_change_of_the_application_starts_it_again(place, dev):
    process, printed = dev
    wait_until(lambda: printed().count("runtime.started") == 1, printed)
    triggered(place)
    wait_until(lambda: "first msg_" in printed(), printed)

    write(place, "this is no Python")
    wait_until(lambda: "app.py:1: SyntaxError" in printed(), printed)
    assert "app.py has changed: restarting" in printed()
    assert process.poll() is None
    write(place, APPLICATION.format(word="repaired"))
    wait_until(lambda: printed().count("runtime.started") == 2, printed)
    triggered(place)
    wait_until(lambda: "repaired msg_" in printed(), printed)

    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_SECONDS) == 0
    # Each has drained, and none is left behind.
    assert printed().count("runtime.stopped") == 2
    assert not list(place.data.glob("runtime.json"))


def test_files_outside_of_the_application_cause_no_reload(place, dev):
    _, printed = dev
    wait_until(lambda: "runtime.started" in printed(), printed)
    for name in (".hidden/a.py", "node_modules/a.py", "env/pyvenv.cfg", "env/a.py", "notes.txt"):
        file = place.directory / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
    (place.directory / "below").mkdir()
    (place.directory / "below" / "other.py").write_text("")  # watched: it ends the wait
    wait_until(lambda: "restarting" in printed(), printed)
    assert f"{os.path.join('below', 'other.py')} has changed: restarting" in printed()
    assert printed().count("restarting") == 1


@pytest.mark.parametrize("command", [["run", "--standalone"], ["dev"]])
def test_a_port_can_be_given(place, command):
    port = free_port()
    # Another bind of the settings gives way.
    (place.directory / "appsettings.json").write_text('{"Sdk": {"Server": {"Bind": ["::1:9"]}}}')
    with place.daemon("--port", str(port), start=command) as daemon:
        assert daemon.receiver == f"http://127.0.0.1:{port}"
