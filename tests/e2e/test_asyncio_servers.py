"""Deliveries to applications of asyncio frameworks, under a real uvicorn."""

import json
import signal
import threading

import pytest
from support.asyncio_servers import Uvicorn, sending
from support.waiting import wait_until

EVENTS = {"order.paid": "in-a-thread", "order.created": "on-asyncio", "order.refunded": "on-trio"}


@pytest.mark.parametrize("framework", ["litestar", "django"])
def test_every_kind_of_handler_runs_beside_the_routes_of_the_application(tmp_path, framework):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    with Uvicorn(tmp_path, framework) as server:
        server.start()
        assert server.hello() is True
        early = server.run("events", "trigger", "order.paid")
        assert early.returncode == 69
        assert f"the receiver in process {server.process.pid} runs inside" in early.stderr
        for event_type, webhook_id in EVENTS.items():
            assert server.deliver(event_type, webhook_id) == 200, server.log()
        assert server.deliver("order.paid", "a", "/hooks/elsewhere") == 404
        wait_until(lambda: sorted(server.handled()) == sorted(EVENTS.values()), server.log)
        triggered = server.run("events", "trigger", "order.paid", "--format", "json")
        (sent,) = json.loads(triggered.stdout)
        assert (sent["status"], sent["state"]) == (200, "done")
        assert server.stop() in (0, -signal.SIGTERM)
        assert server.states() == dict.fromkeys((*EVENTS.values(), sent["webhook_id"]), "done")
        assert not (tmp_path / "data" / "runtime.json").exists()


def test_nothing_acknowledged_is_lost_in_start_load_drain_and_by_a_killed_thread(tmp_path):
    acknowledged, stop = [], threading.Event()
    with Uvicorn(tmp_path, "fastapi") as server:
        senders = [
            threading.Thread(target=sending, args=(server, acknowledged, stop, f"sender-{n}"))
            for n in range(4)
        ]
        for sender in senders:
            sender.start()

        def more():
            before = len(acknowledged)
            wait_until(lambda: len(acknowledged) > before + 60, server.log)

        try:
            server.start()
            more()
            assert server.stop() in (0, -signal.SIGTERM)
            server.start()
            more()
            server.ask("GET", "/kill")
            wait_until(lambda: server.hello() is False, server.log)
            # The application continues; only deliveries are refused.
            assert server.deliver("order.paid", "after") == 503
            wait_until(lambda: "runtime.thread_ended" in server.log(), server.log)
            server.stop()
            server.start()
            assert server.deliver("order.paid", "after") == 200
            more()
        finally:
            stop.set()
            for sender in senders:
                sender.join()
        wanted = {*acknowledged, "after"}
        wait_until(lambda: wanted <= set(server.handled()), server.log)
        assert server.stop() in (0, -signal.SIGTERM)
        states = server.states()
    assert {states[webhook_id] for webhook_id in wanted} == {"done"}


def test_a_second_worker_on_one_directory_is_refused_with_the_remedy(tmp_path):
    with Uvicorn(tmp_path, "starlette", ("--workers", "2")) as server:
        server.begin()
        wait_until(lambda: "or receive with `sdk-trio run`" in server.log(), server.log)
        assert "cannot share a directory of SQLite" in server.log()
        assert "direct cause" not in server.log()
        # The other one has the directory. Then uvicorn ends all, as one of them cannot start.
        wait_until(lambda: "Application startup complete." in server.log(), server.log)
        assert server.log().count("is in use by process") == 1
        server.stop()
