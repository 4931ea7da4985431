"""``dev``, ``run`` and the commands beside them, as processes with real sockets."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import httpx
import pytest
from support.command_forker import run_command
from support.deliveries import SECRET
from support.waiting import PATIENCE_SECONDS, wait_until

from sdk_trio.testing import sign_delivery

COMMAND = (sys.executable, "-m", "sdk_trio")

APPLICATION = """
import trio, sdk_trio
from sdk_trio.events import OrderPaidEvent, OrderCreatedEvent, OrderRefundedEvent

handlers = sdk_trio.HandlerRegistry()

@handlers.on(OrderPaidEvent, enqueue=True)
async def slow(event):
    print("slow began", flush=True)
    await trio.sleep(float(event.data.metadata["seconds"]))

@handlers.on(OrderCreatedEvent, enqueue=True)
async def broken(event):
    raise ValueError("no such product")

@handlers.on(OrderRefundedEvent)
async def broken_inline(event):
    raise ValueError("no such refund")
"""


@attrs.define
class Workplace:
    """A directory in which commands run; what still runs is killed at the end of the test."""

    directory: Path
    environment: dict[str, str]
    daemons: list[subprocess.Popen[str]] = attrs.Factory(list)

    def start(self, *words: str) -> subprocess.Popen[str]:
        number = len(self.daemons)
        with (
            (self.directory / f"out-{number}").open("w") as out,
            (self.directory / f"err-{number}").open("w") as err,
        ):
            daemon = subprocess.Popen(
                [*COMMAND, *words],
                cwd=self.directory,
                env=self.environment,
                stdout=out,
                stderr=err,
                text=True,
            )
        self.daemons.append(daemon)
        return daemon

    def printed(self, number: int = 0) -> tuple[str, str]:
        out, err = (self.directory / f"{name}-{number}" for name in ("out", "err"))
        return out.read_text(), err.read_text()

    def wait_for(self, text: str, number: int = 0) -> str:
        """Wait until a daemon has printed ``text`` anywhere, and return all that it printed."""
        daemon = self.daemons[number]

        def came() -> bool:
            ended = daemon.poll() is not None
            return text in "".join(self.printed(number)) or ended

        wait_until(came, lambda: f"{text!r} did not come: {self.printed(number)}")
        printed = "".join(self.printed(number))
        assert text in printed, f"it ended without {text!r}: {printed}"
        return printed

    def run(self, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        ran = run_command(
            words, environ=self.environment, directory=self.directory, seconds=PATIENCE_SECONDS
        )
        assert ran.returncode == status, (ran.stdout, ran.stderr)
        return ran


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Workplace]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith("SDK_") and name != "STATE_DIRECTORY"
    }
    environment["SDK__ADMIN__BIND"] = "127.0.0.1:0"
    (tmp_path / "application.py").write_text(APPLICATION)
    place = Workplace(tmp_path, environment)
    yield place
    for daemon in place.daemons:
        if daemon.poll() is None:
            daemon.kill()
        daemon.wait()
    # An interpreter's end reports here what it could not end in order.
    for printed in tmp_path.glob("err-*"):
        assert "Exception ignored" not in printed.read_text()


def end(daemon: subprocess.Popen[str], number: int = signal.SIGTERM) -> int:
    daemon.send_signal(number)
    return daemon.wait(PATIENCE_SECONDS)


def test_dev_then_trigger_then_list_shows_the_event_done(workplace):
    daemon = workplace.start("dev", "--set", "Sdk:Server:Bind=127.0.0.1:0")
    printed = workplace.wait_for("Ctrl-C")
    out, _ = workplace.printed()

    # The printed commands work, word for word.
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines())
    words = lines["send an event"].split(" -m sdk_trio ")[1].split()
    triggered = workplace.run(*words, "--format", "json")
    (sent,) = json.loads(triggered.stdout)
    assert (sent["status"], sent["state"], sent["attempts"]) == (200, "done", 1)
    answer = httpx.post(lines["or"].split()[-1]).json()
    assert (answer["status"], answer["eventType"]) == (200, "order.created")
    assert workplace.run("events", "list").stdout.count(" done ") == 2

    page = httpx.get(lines["console"])
    assert (page.status_code, page.headers["content-type"].split(";")[0]) == (200, "text/html")
    ready = lines["admin"].split()[0]
    assert httpx.get(ready).json()["ready"] is True
    token = Path(lines["admin token"]).read_text().strip()
    status = httpx.get(
        ready.replace("/readyz", "/api/status"), headers={"authorization": f"Bearer {token}"}
    ).json()
    assert (status["state"], status["events"]["done"]) == ("running", 2)

    # An invented type reaches the fallback, and all others are known.
    many = workplace.run("events", "trigger", "refund.updated", "--count", "3", "--data", "{}")
    assert many.stdout.count(" done ") == 3
    assert printed.count("webhook.handler_missing") == 0

    secret = (workplace.directory / "sdk-data" / "dev-secret").read_text().strip()
    assert (workplace.directory / "sdk-data" / "dev-secret").stat().st_mode & 0o777 == 0o600
    shown = workplace.run("events", "show", sent["webhook_id"], "--format", "json")
    assert json.loads(json.loads(shown.stdout)["raw"])["type"] == "order.created"
    assert end(daemon) == 0
    log = workplace.printed()[1]
    events = [json.loads(line) for line in log.splitlines()]
    (logged,) = [
        event
        for event in events
        if event["event"] == "webhook.dev_event" and event["webhook_id"] == sent["webhook_id"]
    ]
    assert logged["type"] == "order.created"
    assert logged["subject"]
    everything = "".join((*workplace.printed(), triggered.stdout, triggered.stderr, shown.stdout))
    assert secret not in everything
    assert token not in everything
    assert secret.removeprefix("whsec_") not in everything

    # Its record goes with it, its secret stays.
    assert not (workplace.directory / "sdk-data" / "runtime.json").exists()
    gone = workplace.run("events", "trigger", "order.created", status=69)
    assert "no receiver is running" in gone.stderr
    again = workplace.start("dev", "--set", "Sdk:Server:Bind=127.0.0.1:0")
    workplace.wait_for("Ctrl-C", 1)
    assert (workplace.directory / "sdk-data" / "dev-secret").read_text().strip() == secret
    assert end(again, signal.SIGINT) == 0


def test_dev_is_one_process_regardless_of_the_settings_of_production(workplace):
    (workplace.directory / "appsettings.json").write_text('{"Sdk": {"Server": {"Processes": 2}}}')
    sets = ("--set", "Sdk:Server:Bind=127.0.0.1:0", "--set", "sdk__server__processes=3")
    daemon = workplace.start("dev", *sets)
    guide = workplace.wait_for("Ctrl-C")
    assert (
        "note: Sdk:Server:Processes is for 'run': 'dev' is one process\n"
        in (workplace.printed()[1])
    )
    assert "events list --set Sdk:Server:Bind=127.0.0.1:0\n" in guide
    workplace.run("events", "trigger", "order.created")
    assert end(daemon) == 0


def test_dev_takes_another_port_only_if_the_first_was_not_configured(workplace):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 8080))
            taken.listen()
        except OSError:
            pass  # another process has it, which is just as good
        chosen = workplace.run("dev", "--set", "Sdk:Server:Bind=127.0.0.1:8080", status=69)
        assert "sdk-trio: error: Sdk:Server:Bind: cannot listen on 127.0.0.1:8080" in chosen.stderr
        assert chosen.stdout == ""
        daemon = workplace.start("dev")
        out = workplace.wait_for("Ctrl-C")
        assert "http://127.0.0.1:8080/" not in out
        workplace.run("events", "trigger", "order.created")
        second = workplace.run("dev", status=69)
        assert "is in use by process" in second.stderr
        workplace.run("events", "trigger", "order.created")
        assert end(daemon) == 0


def start_run(workplace: Workplace, *words: str) -> subprocess.Popen[str]:
    workplace.environment["SDK__WEBHOOKS__SECRET"] = SECRET
    daemon = workplace.start(
        *("run", "--app", "application:handlers", "--set", "Sdk:Server:Bind=127.0.0.1:0"),
        *("--set", "Sdk:Webhooks:RequireHttps=false", *words),
    )
    workplace.wait_for("runtime.started")
    return daemon


def trigger(workplace: Workplace, *words: str, status: int = 0) -> tuple[dict[str, object], str]:
    ran = workplace.run("events", "trigger", *words, "--format", "json", status=status)
    (sent,) = json.loads(ran.stdout)
    return sent, ran.stderr


def wait_for_record(workplace: Workplace) -> None:
    """``runtime.started`` is logged a moment before commands can find the receiver."""
    wait_until((workplace.directory / "sdk-data" / "runtime.json").exists)


def deliver_slow_one(workplace: Workplace, seconds: float) -> str:
    """Deliver an event whose handler takes ``seconds``, wait until it runs, return its id."""
    wait_for_record(workplace)
    record = json.loads((workplace.directory / "sdk-data" / "runtime.json").read_text())
    metadata = {"metadata": {"seconds": str(seconds)}}
    signed = sign_delivery("order.paid", metadata, secret=SECRET)
    answer = httpx.post(record["url"], content=signed.body, headers=signed.headers)
    assert answer.status_code == 200
    workplace.wait_for("slow began")
    return signed.webhook_id


def test_a_daemon_without_standard_streams_gives_their_numbers_to_no_file(workplace):
    # By the shell, as those who start a daemon from a script do it.
    closed = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *COMMAND, "run", "--standalone")
    workplace.environment |= {
        "SDK__WEBHOOKS__SECRET": SECRET,
        "SDK__SERVER__BIND": "127.0.0.1:0",
        "SDK__WEBHOOKS__REQUIREHTTPS": "false",
    }
    daemon = subprocess.Popen(closed, cwd=workplace.directory, env=workplace.environment, text=True)
    workplace.daemons.append(daemon)
    record = workplace.directory / "sdk-data" / "runtime.json"
    wait_until(lambda: record.exists() or daemon.poll() is not None)
    assert daemon.poll() is None
    assert {os.readlink(f"/proc/{daemon.pid}/fd/{number}") for number in range(3)} == {os.devnull}
    signed = sign_delivery("order.paid", secret=SECRET)
    answer = httpx.post(
        json.loads(record.read_text())["url"], content=signed.body, headers=signed.headers
    )
    assert answer.status_code == 200
    assert end(daemon) == 0


def test_the_first_signal_drains_and_the_second_one_forces(workplace):
    daemon = start_run(workplace, "--standalone")
    webhook_id = deliver_slow_one(workplace, 60)
    daemon.send_signal(signal.SIGTERM)
    workplace.wait_for("runtime.draining")
    assert daemon.poll() is None
    assert end(daemon, signal.SIGINT) == 128 + signal.SIGINT
    _, err = workplace.printed()
    assert "runtime.forced" in err
    assert "Traceback" not in err
    # Nothing is lost: the event waits for the next start.
    (row,) = json.loads(workplace.run("events", "list", "--format", "json").stdout)
    assert (row["webhook_id"], row["state"]) == (webhook_id, "received")


def test_the_first_line_of_a_start_names_both_addresses(workplace):
    daemon = start_run(workplace, "--standalone")
    events = [json.loads(line) for line in workplace.printed()[1].splitlines()]
    (started,) = [event for event in events if event["event"] == "runtime.started"]
    assert httpx.get(f"{started['admin'][0]}/readyz").status_code == 200
    assert started["receiver"][0] != started["admin"][0]
    assert end(daemon) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{started['admin'][0]}/livez")


def test_a_first_signal_alone_waits_for_the_handler(workplace):
    daemon = start_run(workplace, "--standalone")
    webhook_id = deliver_slow_one(workplace, 0.7)
    assert end(daemon) == 0
    (row,) = json.loads(workplace.run("events", "list", "--format", "json").stdout)
    assert (row["webhook_id"], row["state"]) == (webhook_id, "done")


def test_commands_beside_a_running_daemon(workplace):
    workplace.environment["SDK__ACCESSTOKEN"] = "token-that-must-stay-secret"
    daemon = start_run(workplace, "--set", "Sdk:Webhooks:Queue:MaxAttempts=1")
    wait_for_record(workplace)
    failed, _ = trigger(workplace, "order.created")
    assert (failed["status"], failed["state"]) == (200, "dead")
    assert failed["last_error"] == "ValueError: no such product"
    parked, _ = trigger(workplace, "customer.created")
    assert parked["state"] == "parked"
    refused, hint = trigger(workplace, "order.refunded", status=1)
    assert (refused["status"], refused["state"]) == (500, "retrying")
    assert "the handler raised an exception" in hint

    tail = workplace.start("events", "tail", "--format", "json")
    workplace.wait_for("waiting for changes", 1)
    # The daemon notices events that a command replayed, and runs them: they fail again.
    replayed = workplace.run("events", "replay", "--state", "dead")
    assert failed["webhook_id"] in replayed.stdout
    workplace.wait_for('"state": "dead"', 1)
    assert end(tail, signal.SIGINT) == 130
    seen = [json.loads(line) for line in workplace.printed(1)[0].splitlines()]
    assert {event["webhook_id"] for event in seen} == {failed["webhook_id"]}
    assert workplace.printed(1)[1] == "waiting for changes; Ctrl-C ends\n"

    daemon.send_signal(signal.SIGHUP)
    workplace.wait_for("runtime.reloaded")
    wrong, hint = wrong_secret(workplace)
    assert wrong["status"] == 400
    assert "the secret differs from the receiver's" in hint
    assert end(daemon) == 0
    everything = "".join((*workplace.printed(), hint))
    assert SECRET not in everything
    assert "must-stay-secret" not in everything


def wrong_secret(workplace: Workplace) -> tuple[dict[str, object], str]:
    workplace.environment["SDK__WEBHOOKS__SECRET"] = "a-secret-of-another-endpoint-of-it"
    return trigger(workplace, "order.created", status=1)


def test_a_crashed_receiver_leaves_a_record_that_is_recognised(workplace):
    daemon = start_run(workplace, "--standalone")
    wait_for_record(workplace)
    daemon.kill()
    daemon.wait()
    stale = workplace.run("events", "trigger", "order.created", status=69)
    assert f"was left behind by process {daemon.pid}, which has ended" in stale.stderr


def test_the_statuses_of_processes(workplace):
    assert workplace.run("--help").stdout.startswith("usage: sdk-trio")
    workplace.run("bogus", status=2)
    workplace.run("run", status=78)
    workplace.run("events", "list", status=69)
    workplace.run("sign", "--secret-env", "NOT_THERE", status=2)
