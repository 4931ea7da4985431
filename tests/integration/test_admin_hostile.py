"""Hostile clients of the admin address, and what the receiver's deliveries notice of them."""

import os
import statistics
import subprocess
import sys
from contextlib import suppress

import pytest
import trio
from support.admin import TOKEN, administered
from support.serving import RawWire, registry, signed, works
from support.wire import Wire

from sdk_trio.admin.app import BURST, REQUESTS_PER_SECOND

#: How long each of the measured rounds lasts, in seconds.
ROUND_SECONDS = 0.8

#: Rounds of each kind; a full-size run on a quiet machine sets SDK_TEST_ADMIN_ROUNDS=3 or more.
FULL = "SDK_TEST_ADMIN_ROUNDS" in os.environ
ROUNDS = int(os.environ.get("SDK_TEST_ADMIN_ROUNDS", "1"))

#: Deliveries go on at this part of their pace at least, while four clients ask without a pause.
#: Without pacing it is a tenth. What a machine with other work leaves of it says nothing about us.
LEAST_PACE = 0.55

#: A process of its own, so that its own work does not count: it asks as fast as it is answered,
#: and at the end of its input it says how often that was.
FLOOD = """
import socket, sys, threading
host, port = sys.argv[1].removeprefix("http://").split(":")
paths = ("/metrics", "/readyz", "/healthz", "/api/status")
answered = []
def flood(path):
    request = f"GET {path} HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n".encode()
    with socket.create_connection((host, int(port))) as sock:
        while sock.send(request * 4):
            received = sock.recv(65536)
            answered.append(received.count(b"HTTP/1.1 "))
for path in paths:
    threading.Thread(target=flood, args=(path,), daemon=True).start()
print("begun", flush=True)
sys.stdin.read()
print(sum(answered))
"""


@pytest.fixture(autouse=True)
def token(monkeypatch, tmp_path):
    monkeypatch.setenv("SDK_TEST_ADMIN_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)


async def deliveries_in_a_round(url):
    """How many deliveries one sender gets through, one after the other: one at least."""
    done = 0
    with await Wire.connect(url) as wire:
        end = trio.current_time() + ROUND_SECONDS
        while not done or trio.current_time() < end:
            assert (await wire.post(signed("order.paid"))).status == 200
            done += 1
    return done


async def test_a_flood_of_the_admin_address_leaves_deliveries_their_pace():
    calm, flooded = [], []
    async with administered(registry(works), patience=60) as admin:
        await deliveries_in_a_round(admin.app.url)
        for _ in range(ROUNDS):
            calm.append(await deliveries_in_a_round(admin.app.url))
            began = trio.current_time()
            flood = await trio.lowlevel.open_process(
                [sys.executable, "-c", FLOOD, admin.runtime.started.admin[0]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            try:
                await flood.stdout.receive_some()
                flooded.append(await deliveries_in_a_round(admin.app.url))
                await flood.stdin.aclose()
                answered = int(await flood.stdout.receive_some())
                # What is left of the time to deliveries: there are two paces, of probes and others.
                lasted = trio.current_time() - began
                assert answered <= 2 * (BURST + REQUESTS_PER_SECOND * lasted)
            finally:
                flood.kill()
                await flood.wait()
                await flood.stdout.aclose()
        assert (await admin.get("/readyz")).status_code == 200
    pace = statistics.median(flooded) / statistics.median(calm)
    # Without a full-size run it is enough that the deliveries go on.
    assert not FULL or pace >= LEAST_PACE, (calm, flooded)


async def test_slow_and_malformed_clients_end_nobody_elses_requests():
    async with administered(registry(works)) as admin:
        url = admin.runtime.started.admin[0]
        slow = [await RawWire.connect(url) for _ in range(60)]
        try:
            for number, wire in enumerate(slow):
                beginning = (
                    b"GET /metrics HTT",
                    b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: ",
                    b"POST /api/events/replay HTTP/1.1\r\nHost: localhost\r\n"
                    b"Content-Length: 1000\r\n\r\n{",
                    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
                    b"GET / HTTP/1.1\r\n" + b"X: " + b"x" * 20_000,
                    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                )[number % 6]
                await wire.send_what_is_taken(beginning)
            assert (await admin.get("/readyz")).status_code == 200
            assert (await admin.get("/metrics")).status_code == 200
            delivered = await admin.app.deliver("order.paid")
            assert (delivered.status, delivered.state) == (200, "done")
        finally:
            for wire in slow:
                wire.__exit__()


async def test_more_connections_than_are_allowed_are_told_so_and_the_receiver_goes_on():
    async with administered(registry(works)) as admin:
        url = admin.runtime.started.admin[0]
        idle = [await RawWire.connect(url) for _ in range(140)]
        try:
            assert await idle[0].rest() == b""  # it has given its place to a later one
            unfinished = (
                b"POST /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
                b"Expect: 100-continue\r\n\r\n"
            )
            served = 0
            for wire in idle:
                await wire.send_what_is_taken(unfinished)
            for wire in idle:  # those that have a place are in a request then
                with suppress(ConnectionError):
                    served += (await wire.rest_of_head()).startswith(b"HTTP/1.1 100")
            assert served == 128
            with await RawWire.connect(url) as late:
                assert (await late.answer()).status == 503
            assert (await admin.app.deliver("order.paid")).status == 200
        finally:
            for wire in idle:
                wire.__exit__()
        while True:
            try:
                assert (await admin.get("/livez")).status_code == 200
                break
            except AssertionError:
                await trio.sleep(0.01)


async def test_a_client_that_reads_no_answer_holds_up_nobody():
    async with administered(registry(works)) as admin:
        with await RawWire.connect(admin.runtime.started.admin[0]) as wire:
            await wire.send(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400)
            for _ in range(3):
                assert (await admin.get("/readyz")).status_code == 200
                assert (await admin.app.deliver("order.paid")).status == 200
            wire.reset_at_close()
