"""``Server:Processes``: several real processes behind one address, and what becomes of them."""

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from processes import kill_processes
from support.daemon import Daemon, Place
from support.deliveries import SECRET
from support.ports import free_port
from support.postgres import running_server
from support.senders import Senders
from support.service_manager import service_manager
from support.waiting import PATIENCE_SECONDS, until, wait_until

from sdk_trio.testing import sign_delivery

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes share sockets")

APPLICATION = """
import gc, os, signal, time, trio, sdk_trio
from sdk_trio.events import *
from sdk_trio.runtime.worker import MessageSocket

handlers = sdk_trio.HandlerRegistry()
ledger = os.open("ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(what, event):
    os.write(ledger, f"{time.monotonic_ns()} {what} {event.webhook_id} {os.getpid()}\\n".encode())


async def run(event):
    note("start", event)
    asked = event.data.metadata
    if "poison" in event.webhook_id:
        os.kill(os.getpid(), signal.SIGKILL)
    if "stuck" in event.webhook_id:
        time.sleep(60)
    if "garbled" in event.webhook_id and not os.path.exists("has-garbled"):
        open("has-garbled", "x").close()
        (link,) = [found for found in gc.get_objects() if isinstance(found, MessageSocket)]
        await link.send(b"\\xc1 is in no MessagePack")
        await trio.sleep_forever()
    await trio.sleep(float(asked.get("seconds", 0)))
    while "held" in event.webhook_id and not os.path.exists("let-go"):
        await trio.sleep(0.01)
    note("finish", event)


handlers.register(OrderCreatedEvent, run)
handlers.register(OrderPaidEvent, run, enqueue=True)
handlers.register(SubscriptionUpdatedEvent, run, enqueue=True, ordered=True)
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "app.py").write_text(APPLICATION)
    found = Place(tmp_path)
    found.environ["SDK__SERVER__PROCESSES"] = "2"
    # Not one that any connection may be given while no daemon runs.
    found.environ["SDK__SERVER__BIND"] = f"127.0.0.1:{free_port()}"
    return found


@contextlib.contextmanager
def several(place: Place, *words: str) -> Iterator[Daemon]:
    with place.daemon("--app", "app:handlers", *words) as daemon:
        yield daemon


def processes_of(daemon: Daemon) -> dict[int, int]:
    """The process id of each number, of the processes that run now."""
    began = {entry["process"]: entry["pid"] for entry in daemon.logged("process.started")}
    return {number: pid for number, pid in began.items() if lives(pid)}


def lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def ledger(place: Place) -> list[str]:
    file = place.directory / "ledger"
    return file.read_text().splitlines() if file.exists() else []


def finished(place: Place) -> list[str]:
    return [line.split()[2] for line in ledger(place) if line.split()[1] == "finish"]


def metric(daemon: Daemon, name: str) -> float:
    text = httpx.get(f"{daemon.admin}/metrics", timeout=30).text
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"{name}")
    )


def checks(daemon: Daemon) -> dict[str, Any]:
    answer = httpx.get(f"{daemon.admin}/healthz", timeout=30).json()
    return {check["name"]: check for check in answer["checks"]}


def deliver(daemon: Daemon, webhook_id: str, type_: str = "order.paid", seconds: float = 0) -> int:
    signed = sign_delivery(
        type_, {"metadata": {"seconds": str(seconds)}}, secret=SECRET, webhook_id=webhook_id
    )
    url = f"{daemon.receiver}/hooks/sdk"
    return httpx.post(url, content=signed.body, headers=signed.headers, timeout=30).status_code


@contextlib.asynccontextmanager
async def under_load(place: Place, daemon: Daemon) -> AsyncIterator[Senders]:
    """Send meanwhile, and for a while after; all that was accepted has been handled then."""
    senders = Senders(f"{daemon.receiver}/hooks/sdk")
    with trio.fail_after(PATIENCE_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(senders.run)
            await senders.wait_for(60)
            yield senders
            await senders.wait_for(60)
            senders.stop()
        await until(lambda: set(senders.accepted) <= set(finished(place)))


async def test_a_killed_process_loses_nothing_and_all_are_one_program(place: Place) -> None:
    place.environ["SDK__WEBHOOKS__GRACEFULDRAINTIMEOUTSECONDS"] = "20"
    with several(place) as daemon:
        first = processes_of(daemon)
        assert sorted(first) == [1, 2]
        async with under_load(place, daemon) as senders:
            os.kill(first[2], signal.SIGKILL)
            await until(lambda: len(daemon.logged("process.started")) == 3)
        (ended,) = daemon.logged("process.ended")
        reported = (ended["process"], ended["pid"], ended["ended"], ended["retry_in"])
        assert reported == (2, first[2], "by SIGKILL", 0.0)
        second = processes_of(daemon)
        assert (second[1], second[2] != first[2]) == (first[1], True)
        accepted = set(senders.accepted)
        # What the killed process had finished and not recorded runs again, and nothing else does.
        done = [line.split() for line in ledger(place) if line.split()[1] == "finish"]
        kept = [webhook_id for _, _, webhook_id, pid in done if int(pid) != first[2]]
        twice = [webhook_id for webhook_id, times in Counter(kept).items() if times > 1]
        assert not twice
        assert len({line.split()[3] for line in ledger(place)}) == 3, "each process has worked"
        # One address answers for all, for the killed one but for its last second.
        wait_until(lambda: checks(daemon)["processes"]["detail"] == "2 of 2 serve")
        assert metric(daemon, "sdk_process_ends_total") == 1
        wait_until(lambda: metric(daemon, 'sdk_inbox_events{state="done"}') == len(accepted))
        handled = metric(daemon, 'sdk_webhook_deliveries_total{result="handled"}')
        assert 0 < handled <= len(accepted)
        # Commands work beside them.
        assert deliver(daemon, "parked", "product.created") == 200
        ran = place.run("events", "list", "--state", "parked", "--format", "json")
        assert [event["webhook_id"] for event in json.loads(ran.stdout)] == ["parked"]
        assert place.run("events", "trigger", "order.paid").returncode == 0
        wait_until(lambda: metric(daemon, 'sdk_inbox_events{state="done"}') == len(accepted) + 1)
        # One drain for all of them, within one time.
        held = [f"held_{number}" for number in range(8)]
        for webhook_id in held:
            assert deliver(daemon, webhook_id) == 200
        wait_until(lambda: sum("start held" in line for line in ledger(place)) == len(held))
        daemon.process.send_signal(signal.SIGTERM)
        wait_until(lambda: len(daemon.logged("process.draining")) == 2)
        (place.directory / "let-go").touch()
        assert daemon.process.wait(PATIENCE_SECONDS) == 0
    assert set(held) <= set(finished(place))
    (stopped,) = daemon.logged("runtime.stopped")
    assert (stopped["drained"], stopped["persisted"], stopped["lost"]) == (8, 0, 0)
    assert {entry["process"] for entry in daemon.logged("process.stopped")} == {1, 2}


def test_an_event_that_kills_is_left_to_the_successor_and_ends_as_a_dead_letter(
    place: Place,
) -> None:
    place.environ["SDK__WEBHOOKS__QUEUE__MAXATTEMPTS"] = "2"
    place.environ["SDK__WEBHOOKS__GRACEFULDRAINTIMEOUTSECONDS"] = "1"
    with several(place) as daemon:
        assert deliver(daemon, "poison") == 200
        wait_until(lambda: len(daemon.logged("webhook.dead")) == 1)
        # The very first start is not waited for, so that run may end its process uncounted.
        ended = [entry["process"] for entry in daemon.logged("process.ended")]
        assert len(ended) in (2, 3)
        # Each further run was in the successor of the process that it had ended.
        assert len(set(ended[-2:])) == 1
        assert all(deliver(daemon, f"innocent_{number}") == 200 for number in range(9))
        wait_until(lambda: len(finished(place)) == 9)
        # An invalid message of a process ends that process, and no other.
        assert deliver(daemon, "garbled") == 200
        wait_until(lambda: "garbled" in finished(place))
        (garbled,) = daemon.logged("process.garbled")
        # A sibling may take the event over, and end it, before this line is written.
        wait_until(lambda: daemon.logged("process.ended")[-1]["pid"] == garbled["pid"])
        assert daemon.logged("process.ended")[-1]["ended"] == "by SIGKILL"
        # A handler that no cancellation ends is left behind in time, and its process with it.
        assert deliver(daemon, "stuck") == 200
        wait_until(lambda: "stuck" in ledger(place)[-1])
        pids = processes_of(daemon).values()
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(PATIENCE_SECONDS) == 1
        assert not any(lives(pid) for pid in pids)
        (left,) = daemon.logged("runtime.left_behind")
        assert left["runs"][0]["webhook_id"] == "stuck"


def test_a_killed_supervisor_leaves_no_process_and_no_port(place: Place) -> None:
    place.environ["SDK__WEBHOOKS__GRACEFULDRAINTIMEOUTSECONDS"] = "1"
    with several(place) as daemon:
        pids = processes_of(daemon).values()
        assert deliver(daemon, "slow", seconds=60) == 200
        wait_until(lambda: len(ledger(place)) == 1)
        daemon.process.kill()
        daemon.process.wait(PATIENCE_SECONDS)
        wait_until(lambda: not any(lives(pid) for pid in pids))
    # Port and directory are free at once, and the event that ran is found.
    with several(place) as daemon:
        assert [entry["events"] for entry in daemon.logged("webhook.recovered")] == [1]
        wait_until(lambda: len(ledger(place)) == 2)


def test_a_reload_is_that_of_all_processes_or_of_none(place: Place) -> None:
    config = place.directory / "settings.json"
    config.write_text("{}")
    with several(place, "--config", str(config)) as daemon:

        def hang_up(ranges: list[str]) -> None:
            config.write_text(json.dumps({"Sdk": {"Webhooks": {"AllowedSourceIpRanges": ranges}}}))
            daemon.process.send_signal(signal.SIGHUP)

        def statuses() -> set[int]:
            return {deliver(daemon, f"m{number}") for number in range(20)}

        hang_up(["192.0.2.0/24"])
        daemon.wait_for("runtime.reloaded")
        wait_until(lambda: statuses() == {403})
        # One process cannot answer: none changes anything.
        pids = processes_of(daemon)
        os.kill(pids[2], signal.SIGSTOP)
        hang_up([])
        failed = daemon.wait_for("runtime.reload_failed")
        assert "process 2 does not answer" in failed["problems"][0]
        os.kill(pids[2], signal.SIGCONT)
        assert statuses() == {403}
        # A successor has the settings in force, whatever the file says.
        os.kill(pids[2], signal.SIGKILL)
        wait_until(lambda: len(daemon.logged("process.started")) == 3)
        assert statuses() == {403}
        daemon.process.send_signal(signal.SIGHUP)
        wait_until(lambda: len(daemon.logged("runtime.reloaded")) == 2)
        wait_until(lambda: statuses() == {200})


def test_an_application_that_is_wrong_is_said_once(place: Place) -> None:
    ran = place.run("run", "--standalone", "--app", "app:nothing")
    assert ran.returncode == 78
    assert ran.stderr.count("has no attribute 'nothing'") == 1
    assert "process 1 of 2 ended with status 78 before it served" in ran.stderr


def test_processes_that_end_again_and_again_end_the_supervisor(place: Place) -> None:
    with several(place) as daemon:
        # From here on, each of them ends while it starts.
        (place.directory / "app.py").write_text("import os; os._exit(7)")
        for pid in processes_of(daemon).values():
            os.kill(pid, signal.SIGKILL)
        assert daemon.process.wait(2 * PATIENCE_SECONDS) == 1
        text = daemon.log.read_text()
        assert "10 processes ended in a row" in text
        assert "ended with status 7" in text
        pauses = [entry["retry_in"] for entry in daemon.logged("process.ended")]
        assert pauses == sorted(pauses)
        assert pauses[-1] >= 2


async def test_a_service_manager_talks_with_the_supervisor_alone(tmp_path: Path) -> None:
    with (
        service_manager(tmp_path) as manager,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        manager.environment["WATCHDOG_USEC"] = "6000000"
        manager.settings |= {"Server:Bind:0": "fd:hooks", "Server:Processes": "2"}
        daemon = manager.start(sockets={"hooks": listener})
        await manager.said("READY=1")
        assert (await manager.url()).endswith(f":{listener.getsockname()[1]}")
        assert await Senders(await manager.url())._attempt("a") == 200
        place = await manager.said("2 of 2 processes serve")
        # One that says nothing for the watchdog's time is ended and replaced; the others go on.
        (silent, _) = (entry["pid"] for entry in manager.logged("process.started"))
        os.kill(silent, signal.SIGSTOP)
        await manager.wait_for("process.silent")
        place = await manager.said("1 of 2 processes serve", after=place)
        place = await manager.said("2 of 2 processes serve", after=place)
        (ended,) = manager.logged("process.ended")
        assert (ended["pid"], ended["ended"]) == (silent, "by SIGKILL")
        assert await manager.stop(daemon) == 0
        await manager.said("STOPPING=1", after=place)
    assert any("WATCHDOG=1" in message for message in manager.messages)


async def test_kills_on_postgresql_lose_nothing_and_keep_the_order_of_tenant_and_subject(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dsn = running_server().fresh()
    monkeypatch.setenv("SDK_POSTGRES_DSN", dsn)  # the program sets it, and this process lives on
    report = await kill_processes(
        tmp_path, events=200, processes=3, every=0.4, seed=2, dsn=dsn, seconds=300
    )
    table = "\n".join(f"{name}: {value}" for name, value in report.rows())
    assert not report.broken, table
    assert report.kills, table


def refuse(daemon: Daemon, number: int) -> None:
    """Have so many requests refused, as fast as one connection takes them."""
    host, _, port = daemon.receiver.partition("://")[2].rpartition(":")
    request = b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n"
    last = request.replace(b"Host", b"Connection: close\r\nHost")
    with socket.create_connection((host, int(port)), PATIENCE_SECONDS) as sock:
        sock.sendall(request * (number - 1) + last)
        while sock.recv(65536):
            pass


def test_the_total_of_rejected_requests_counts_those_of_all_processes(place: Place) -> None:
    """A process keeps 500 of them, and may refuse more before it reports."""
    with several(place) as daemon, concurrent.futures.ThreadPoolExecutor() as senders:
        token = (place.data / "admin-token").read_text().strip()
        for _ in senders.map(refuse, [daemon] * 4, [1500] * 4):
            pass

        def reported() -> Any:
            headers = {"authorization": f"Bearer {token}"}
            url = f"{daemon.admin}/api/rejections?limit=500"
            return httpx.get(url, headers=headers, timeout=30).json()

        wait_until(lambda: reported()["total"] == 6000, lambda: str(reported()["total"]))
        found = reported()
    assert list(found["causes"].values()) == [6000]
    numbers = [row["seq"] for row in found["rejections"]]
    assert (len(numbers), numbers[0]) == (500, 6000)
    assert numbers == sorted(set(numbers), reverse=True)


def test_a_pause_and_the_policies_show_for_several_processes(place: Place) -> None:
    text = (place.directory / "app.py").read_text()
    policed = text.replace("run, enqueue=True)", "run, enqueue=True, concurrency=2)")
    source = "handlers.source('stripe').on('invoice.paid', enqueue=True, max_attempts=3)(run)\n"
    (place.directory / "app.py").write_text(policed + source)
    with several(place) as daemon:
        token = (place.data / "admin-token").read_text().strip()
        headers = {"authorization": f"Bearer {token}"}
        with httpx.Client(base_url=daemon.admin, headers=headers, timeout=30) as client:
            rows = {row["type"]: row for row in client.get("/api/types").json()}
            assert rows["order.paid"]["policies"] == "concurrency=2"
            assert rows["order.created"]["handled"]
            of_source = rows["invoice.paid"]
            assert (of_source["source"], of_source["policies"]) == ("stripe", "max_attempts=3")
            client.post("/api/pause", json={"type": "order.*", "reason": "migration"})

            def check() -> Any:
                checks = {each["name"]: each for each in client.get("/healthz").json()["checks"]}
                return checks["pauses"]

            wait_until(lambda: check()["degraded"])
            assert "order.* is paused since" in check()["detail"]
            client.post("/api/resume", json={"type": "order.*"})
            wait_until(lambda: not check()["degraded"])
