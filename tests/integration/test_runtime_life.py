"""A runtime from start to end: its addresses, refusals, stop and report."""

import contextlib
import gc
import os
import signal
import socket
import sys
from functools import partial

import pytest
import trio
from support.deliveries import settings
from support.ports import free_port
from support.postgres import on_every_store
from support.replicating import said
from support.serving import RawWire, asgi_headers, ask, registry, running, signed, works
from support.waiting import until

from sdk_trio.errors import (
    HandlerRegistrationError,
    MissingHandlersError,
    NotRunningError,
    OptionsValidationError,
    PartEndedError,
    StoreLockedError,
)
from sdk_trio.records.deliveries import DeliveryState
from sdk_trio.replication.health_check import HealthChecker
from sdk_trio.replication.verification_schedule import VerificationScheduler
from sdk_trio.replication.watch import Watcher
from sdk_trio.runtime import BindError, Runtime
from sdk_trio.runtime.admin import AdminServer
from sdk_trio.server.serve import Server
from sdk_trio.testing import AppUnderTest
from sdk_trio.webhooks import HandlerRegistry
from sdk_trio.webhooks.queue import WorkerPool
from sdk_trio.webhooks.receiver import Janitor


async def hangs(event):
    await trio.sleep_forever()


@pytest.fixture
def sqlite(tmp_path):
    return {"Storage__Backend": "Sqlite", "Storage__Path": str(tmp_path / "data")}


async def deliver(runtime, *names, event="order.paid"):
    app = AppUnderTest(runtime)
    for name in names:
        delivered = await app.deliver(event, webhook_id=name, settle=False)
        assert delivered.status == 200


# -- start ------------------------------------------------------------------------------------


async def test_it_starts_with_its_real_addresses_and_serves_all_of_them(tmp_path):
    addresses = ["127.0.0.1:0", "localhost:0", f"unix:{tmp_path / 'a.sock'}"]
    if socket.has_ipv6:
        addresses.append("[::1]:0")
    runtime = Runtime(settings(Server__Bind=addresses), registry(works))
    async with running(runtime) as started:
        assert started is runtime.started
        assert runtime.ready
        assert started.webhook_url == started.receiver[0]
        assert started.receiver[2] == f"unix:{tmp_path / 'a.sock'}"
        for url in started.receiver:
            if url.startswith("http://["):
                stream = await trio.open_tcp_stream("::1", int(url.rpartition(":")[2]))
            elif url.startswith("http://"):
                assert url.startswith("http://127.0.0.1:")
                assert not url.endswith(":0")
                stream = await trio.open_tcp_stream("127.0.0.1", int(url.rpartition(":")[2]))
            else:
                stream = await trio.open_unix_socket(url.removeprefix("unix:"))
            with RawWire(stream) as wire:
                assert (await wire.post(signed())).status == 200
    assert not runtime.ready


@pytest.mark.skipif(sys.platform == "win32", reason="inherited sockets")
async def test_it_serves_a_socket_that_it_inherits():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        inherited = os.dup(listening.fileno())
        runtime = Runtime(settings(Server__Bind=[f"fd:{inherited}"]), registry(works))
        async with running(runtime):
            port = listening.getsockname()[1]
            assert runtime.started.receiver == (f"http://127.0.0.1:{port}",)
            await deliver(runtime, "a")


async def test_a_second_runtime_on_one_data_directory_is_refused_and_harms_nothing(sqlite):
    first, second = (Runtime(settings(**sqlite), registry(works)) for _ in range(2))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(first.run)
            with pytest.raises(StoreLockedError) as caught:
                await second.run()
            assert sqlite["Storage__Path"] in str(caught.value)
            assert str(os.getpid()) in str(caught.value)
            assert caught.value.exit_code == 69
            await deliver(first, "a")
            first.shut_down("test")
        # The directory is free again.
        async with trio.open_nursery() as nursery:
            third = Runtime(settings(**sqlite), registry(works))
            await nursery.start(third.run)
            assert (await third.receiver.store.get("a")).state is DeliveryState.DONE
            third.shut_down("test")


async def test_an_address_of_no_interface_is_not_said_to_be_in_use():
    with trio.fail_after(60), pytest.raises(BindError, match="No interface") as caught:
        await Runtime(settings(Server__Bind=["192.0.2.1:0"])).run()
    assert "Stop the program" not in str(caught.value)


async def test_an_address_in_use_names_key_and_address_and_frees_the_others(store):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = f"127.0.0.1:{free_port()}"
        used = f"127.0.0.1:{taken.getsockname()[1]}"
        with trio.fail_after(60):
            with pytest.raises(BindError) as caught:
                await Runtime(settings(Server__Bind=[free, used], **store)).run()
            assert "Sdk:Server:Bind" in str(caught.value)
            assert used in str(caught.value)
            assert free not in str(caught.value)
            assert caught.value.exit_code == 69
            await _starts_and_stops(Runtime(settings(Server__Bind=[free], **store)))


@pytest.mark.parametrize(
    "address", ["192.0.2.1:8080", "host.invalid:80", "unix:/nowhere/x.sock", "fd:999999"]
)
async def test_an_address_that_is_not_ours_is_named(address):
    with trio.fail_after(60), pytest.raises(BindError, match="Sdk:Server:Bind") as caught:
        await Runtime(settings(Server__Bind=[address])).run()
    assert address in str(caught.value)


@pytest.mark.skipif(sys.platform == "win32", reason="unix sockets")
async def test_a_unix_socket_of_a_dead_process_is_replaced_and_one_in_use_is_not(tmp_path):
    path = str(tmp_path / "a.sock")
    bind = {"Server__Bind": [f"unix:{path}"]}
    with trio.fail_after(60):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(path)
        await _starts_and_stops(Runtime(settings(**bind)))
        with socket.socket(socket.AF_UNIX) as alive, contextlib.suppress(FileNotFoundError):
            os.unlink(path)
            alive.bind(path)
            alive.listen()
            with pytest.raises(BindError, match=r"a\.sock"):
                await Runtime(settings(**bind)).run()
        os.unlink(path)
        (tmp_path / "a.sock").write_text("precious")
        with pytest.raises(BindError):
            await Runtime(settings(**bind)).run()
        assert (tmp_path / "a.sock").read_text() == "precious"


async def _starts_and_stops(runtime):
    async with trio.open_nursery() as nursery:
        await nursery.start(runtime.run)
        runtime.shut_down("test")


# -- refusals ---------------------------------------------------------------------------------


def test_an_embedded_runtime_is_one_process(tmp_path):
    several = settings(
        Server__Processes=2, Storage__Backend="Sqlite", Storage__Path=str(tmp_path / "data")
    )
    with pytest.raises(OptionsValidationError, match=r"Sdk:Server:Processes: .* 'sdk-trio run'"):
        Runtime(several)


def test_missing_handlers_are_refused_before_anything_starts():
    with pytest.raises(MissingHandlersError, match="27 of 28"):
        Runtime(settings(Webhooks__FailOnMissingHandlers=True), registry(works))


async def test_a_factory_that_fails_stops_the_start_with_its_own_error(store):
    def factory():
        raise OSError("no database")

    runtime = Runtime(settings(**store), registry(factory))
    with trio.fail_after(60), pytest.raises(HandlerRegistrationError, match="no database"):
        await runtime.run()


async def test_a_runtime_runs_once():
    runtime = Runtime(settings())
    with trio.fail_after(60):
        await _starts_and_stops(runtime)
        with pytest.raises(NotRunningError):
            await runtime.run()


# -- end --------------------------------------------------------------------------------------


async def test_shutting_down_twice_keeps_the_first_reason_and_drains(store, caplog):
    caplog.set_level("INFO")
    gate = trio.Event()

    async def handler(event):
        await gate.wait()

    runtime = Runtime(settings(**store), registry(handler, enqueue=True))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.run)
            await deliver(runtime, "a", "b", "c")
            assert runtime.report is None
            runtime.shut_down("first reason")
            runtime.shut_down("second reason")
            await until(lambda: "runtime.draining" in caplog.text)
            (draining,) = said(caplog, "runtime.draining")
            named = {(run["webhook_id"], run["handler"].split(".")[-1]) for run in draining["runs"]}
            assert named == {(name, "handler") for name in "abc"}
            gate.set()
    report = runtime.report
    assert (report.drained, report.persisted, report.lost, report.ids) == (3, 0, 0, ())
    assert "first reason" in caplog.text
    assert "second reason" not in caplog.text
    assert caplog.text.count("runtime.stopped") == 1


@on_every_store
async def test_events_that_the_drain_did_not_finish_are_reported_with_ids(store, caplog):
    caplog.set_level("INFO")
    runtime = Runtime(
        settings(Webhooks__GracefulDrainTimeoutSeconds=0.2, Webhooks__Queue__Workers=2, **store),
        registry(hangs, enqueue=True),
    )
    names = [f"m{number}" for number in range(5)]
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.run)
            await deliver(runtime, *names)
            runtime.shut_down("test")
            before = trio.current_time()
        assert trio.current_time() - before > 0.15
    report = runtime.report
    in_memory = store["Storage__Backend"] == "Memory"
    assert report.drained == 0
    assert (report.persisted, report.lost) == ((0, 5) if in_memory else (5, 0))
    assert sorted(report.ids) == names
    [record] = [record for record in caplog.records if "runtime.stopped" in record.getMessage()]
    assert record.levelname == ("ERROR" if in_memory else "INFO")
    assert set(names) <= set(record.sdk[1]["ids"])


async def test_cancelled_surroundings_drain_within_the_timeout_and_no_later(store):
    handled, gate = [], trio.Event()

    async def handler(event):
        if event.webhook_id == "stuck":
            await trio.sleep_forever()
        await gate.wait()
        await trio.sleep(0.05)
        handled.append(event.webhook_id)

    runtime = Runtime(
        settings(Webhooks__GracefulDrainTimeoutSeconds=2, **store),
        registry(handler, enqueue=True),
    )
    with trio.fail_after(60):
        with trio.CancelScope() as surroundings:
            async with trio.open_nursery() as nursery:
                await nursery.start(runtime.run)
                await deliver(runtime, "a", "b", "stuck")
                surroundings.cancel()
                gate.set()
                before = trio.current_time()
        assert surroundings.cancelled_caught
        assert trio.current_time() - before > 1.9
    assert sorted(handled) == ["a", "b"]
    assert runtime.report.drained == 2
    assert runtime.report.ids == ("stuck",)


async def test_a_cancelled_runtime_that_is_idle_ends_at_once(store):
    runtime = Runtime(settings(**store), registry(works))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.run)
            nursery.cancel_scope.cancel()
    assert runtime.report.ids == ()


async def test_an_idle_keep_alive_connection_does_not_hold_up_the_end():
    runtime = Runtime(settings(), registry(works))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            started = await nursery.start(runtime.run)
            with await RawWire.connect(started.webhook_url) as used:
                assert (await used.post(signed())).status == 200
                with await RawWire.connect(started.webhook_url) as unused:
                    await trio.sleep(0.02)
                    runtime.shut_down("test")
                    assert await used.rest() == b""
                    assert await unused.rest() == b""


async def test_force_cuts_a_drain_short_and_loses_nothing(sqlite):
    runtime = Runtime(settings(**sqlite), registry(hangs, enqueue=True))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.run)
            await deliver(runtime, "a", "b")
            runtime.shut_down("first signal")
            await trio.sleep(0.05)
            runtime.force()
            runtime.force()
    assert runtime.report.persisted == 2


@pytest.mark.parametrize("checkpoints", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("call", ["shut_down", "force", "cancel"])
async def test_ended_in_the_middle_of_its_start_it_just_ends(sqlite, call, checkpoints):
    runtime = Runtime(settings(**sqlite), registry(works))
    outcomes = []

    async def run():
        try:
            await runtime.run()
        except NotRunningError as error:
            outcomes.append(error)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            for _ in range(checkpoints):
                await trio.lowlevel.checkpoint()
            if call == "shut_down":
                runtime.shut_down("test")
            elif call == "force":
                runtime.force()
            else:
                nursery.cancel_scope.cancel()
        assert bool(outcomes) == (call == "force" and runtime.started is None)
        await _starts_and_stops(Runtime(settings(**sqlite), registry(works)))


async def test_a_stop_before_the_run_ends_it():
    stopped, forced = (Runtime(settings(), registry(works)) for _ in range(2))
    stopped.shut_down("early")
    forced.force()
    with trio.fail_after(60):
        await stopped.run()
        with pytest.raises(NotRunningError, match="force"):
            await forced.run()


class Crash(BaseException):
    """An exception that no ``except Exception`` catches."""


class Fault:
    """Makes a part end: by an exception, or by returning, which no part does by itself."""

    def __init__(self, monkeypatch):
        self.now = trio.Event()
        self._patch = monkeypatch.setattr

    def hits(self, part, error=None):
        """Let ``part.run`` begin as usual, and end when :attr:`now` is set."""
        run = part.run

        async def fail(*arguments, **options):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(run, *arguments, **options))
                await self.now.wait()
                if error is not None:
                    raise error
                nursery.cancel_scope.cancel()

        self._patch(part, "run", fail)


@pytest.fixture
def fault(monkeypatch):
    return Fault(monkeypatch)


async def test_a_part_that_crashes_ends_the_run_with_its_own_exception(store, fault):
    fault.hits(Janitor, Crash("boom"))
    runtime = Runtime(settings(**store), registry(works))
    with trio.fail_after(60), pytest.RaisesGroup(Crash):
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.run)
            fault.now.set()
    assert not runtime.ready


@pytest.mark.parametrize(
    ("part", "named"),
    [
        (WorkerPool, "the queue"),
        (Janitor, "the janitor"),
        (Server, "the server"),
        (AdminServer, "the admin address"),
    ],
)
async def test_a_part_that_returns_without_being_asked_to_ends_the_run_with_its_name(
    sqlite, fault, part, named
):
    fault.hits(part)
    admin = {"Admin__Enabled": True} if part is AdminServer else {}
    runtime = Runtime(settings(**sqlite, **admin), registry(hangs, enqueue=True))
    with trio.fail_after(60), pytest.RaisesGroup(pytest.RaisesExc(PartEndedError, match=named)):
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.run)
            fault.now.set()
    assert not runtime.ready


async def test_all_parts_are_siblings_in_one_nursery(sqlite):
    tenants = {"MultiTenant__Enabled": True, "MultiTenant__Notifications__Enabled": True}
    tenants["MultiTenant__Notifications__EnabledChannels__Email"] = True
    tenants["MultiTenant__Notifications__Email__FromAddress"] = "noreply@example.com"
    admin = {"Admin__Enabled": True}
    runtime = Runtime(settings(**sqlite, **admin, **tenants), registry(works, enqueue=True))
    parts = {}

    def look(task):
        for nursery in task.child_nurseries:
            for child in nursery.child_tasks:
                if child.coro.__name__ == "supervise":
                    parts[child.coro.cr_frame.f_locals["name"]] = nursery
                look(child)

    async with running(runtime):
        look(trio.lowlevel.current_root_task())
    named = {
        *("the admin address", "the server", "the queue", "the janitor"),
        *("the sending of notifications", "the watch over the tenants"),
    }
    assert named <= parts.keys()
    assert len({id(parts[name]) for name in named}) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="there is no replicator")
@pytest.mark.parametrize(
    ("part", "named"),
    [
        (Watcher, "the watcher of the tenants' databases"),
        (HealthChecker, "the health check of replication"),
        (VerificationScheduler, "the verification of replicas"),
    ],
)
async def test_a_part_of_replication_that_returns_ends_the_run_with_its_name(
    sqlite, tmp_path, fault, part, named
):
    fault.hits(part)
    replication = {
        "UseReplication": True,
        "AutoRegenerateOnTenantChange": True,
        "ReplicaTargetType": "LocalDisk",
        "LocalDisk__Path": str(tmp_path / "replica"),
        "ConfigOutputPath": str(tmp_path / "replicator.yml"),
        "ReplicatorPidFilePath": str(tmp_path / "replicator.pid"),
    }
    keys = {f"MultiTenant__FileDb__Replication__{key}": value for key, value in replication.items()}
    tenants = {"MultiTenant__Enabled": True, "MultiTenant__FileDb__Directory": str(tmp_path / "db")}
    runtime = Runtime(settings(**sqlite, **tenants, **keys), registry(works))
    with trio.fail_after(60), pytest.RaisesGroup(pytest.RaisesExc(PartEndedError, match=named)):
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.run)
            fault.now.set()


async def test_after_a_crash_the_next_start_handles_the_event(sqlite):
    handled = []

    async def handler(event):
        handled.append(event.webhook_id)

    with trio.fail_after(60):
        with pytest.MonkeyPatch.context() as patch:
            fault = Fault(patch)
            fault.hits(Janitor, Crash())
            runtime = Runtime(settings(**sqlite), registry(hangs, enqueue=True))
            with pytest.RaisesGroup(Crash):
                async with trio.open_nursery() as nursery:
                    await nursery.start(runtime.run)
                    await deliver(runtime, "a")
                    fault.now.set()
        again = Runtime(settings(**sqlite), registry(handler, enqueue=True))
        async with trio.open_nursery() as nursery:
            await nursery.start(again.run)
            await AppUnderTest(again).settle()
            again.shut_down("test")
    assert handled == ["a"]


async def test_a_restart_handles_what_was_left_and_nothing_twice(sqlite):
    handled = []

    async def first_day(event):
        if event.webhook_id != "done":
            await trio.sleep_forever()

    async def second_day(event):
        handled.append((event.webhook_id, event.attempt))

    names = [f"m{number}" for number in range(20)]
    limits = {"Webhooks__GracefulDrainTimeoutSeconds": 0.1, "Webhooks__Queue__Workers": 3}
    with trio.fail_after(60):
        runtime = Runtime(settings(**sqlite, **limits), registry(first_day, enqueue=True))
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.run)
            await deliver(runtime, "done")
            await AppUnderTest(runtime).settle()
            await deliver(runtime, *names)
            runtime.shut_down("test")
        assert runtime.report.persisted == 20
        again = Runtime(settings(**sqlite, **limits), registry(second_day, enqueue=True))
        async with trio.open_nursery() as nursery:
            await nursery.start(again.run)
            await AppUnderTest(again).settle()
            again.shut_down("test")
    # A run that the shutdown cut short does not count.
    assert sorted(handled) == sorted((name, 1) for name in names)


async def test_events_left_without_a_handler_are_parked(sqlite):
    with trio.fail_after(60):
        limits = {"Webhooks__GracefulDrainTimeoutSeconds": 0.1}
        runtime = Runtime(settings(**sqlite, **limits), registry(hangs, enqueue=True))
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.run)
            await deliver(runtime, "a")
            runtime.shut_down("test")
        again = Runtime(settings(**sqlite), HandlerRegistry())
        async with trio.open_nursery() as nursery:
            await nursery.start(again.run)
            await AppUnderTest(again).settle()
            assert (await again.receiver.store.get("a")).state is DeliveryState.PARKED
            again.shut_down("test")


# -- a good guest -----------------------------------------------------------------------------


@on_every_store
async def test_nothing_is_left_open_after_the_end(store):
    def descriptors():
        gc.collect()
        return sorted(os.listdir("/proc/self/fd"))

    async def once():
        runtime = Runtime(settings(**store), registry(works, enqueue=True))
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.run)
            await deliver(runtime, "a", "b")
            runtime.shut_down("test")

    with trio.fail_after(60):
        await once()
        before = descriptors()
        for _ in range(3):
            await once()
        # What an earlier test of this process has left may be closed meanwhile.
        assert len(descriptors()) <= len(before)


async def test_no_signal_handler_is_installed_when_embedded():
    names = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if os.name == "posix" else [])]
    before = [signal.getsignal(name) for name in names]
    runtime = Runtime(settings(), registry(works))
    async with running(runtime):
        assert [signal.getsignal(name) for name in names] == before
    assert [signal.getsignal(name) for name in names] == before


async def test_two_runtimes_live_side_by_side(tmp_path):
    handled = {"one": [], "two": []}

    def runtime(name):
        async def handler(event):
            handled[name].append(event.webhook_id)

        return Runtime(
            settings(Storage__Backend="Sqlite", Storage__Path=str(tmp_path / name)),
            registry(handler),
        )

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            one, two = runtime("one"), runtime("two")
            await nursery.start(one.run)
            await nursery.start(two.run)
            await deliver(one, "a")
            await deliver(two, "a", "b")
            one.shut_down("test")
            await deliver(two, "c")
            two.shut_down("test")
    assert handled == {"one": ["a"], "two": ["a", "b", "c"]}


async def test_the_receiver_of_an_ended_runtime_answers_503():
    runtime = Runtime(settings(), registry(works))
    with trio.fail_after(60):
        await _starts_and_stops(runtime)
        delivery = signed()
        answer = await ask(runtime.receiver, delivery.body, asgi_headers(delivery))
    assert answer.status == 503
