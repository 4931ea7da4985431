"""Hostile clients of the admin address, and their effect on deliveries."""

import os
import statistics
import subprocess
import sys
from contextlib import ExitStack

import msgspec
import pytest
import trio
import trio.testing
from support.admin import TOKEN, administered
from support.serving import RawWire, registry, signed, works
from support.wire import Wire

from sdk_trio.admin.app import BURST, REQUESTS_PER_SECOND
from sdk_trio.runtime import admin as admin_address

#: How long each of the measured rounds lasts, in seconds.
ROUND_SECONDS = 0.8

#: Rounds of each kind; a full-size run on a quiet machine sets SDK_TEST_ADMIN_ROUNDS=3 or more.
FULL = "SDK_TEST_ADMIN_ROUNDS" in os.environ
ROUNDS = int(os.environ.get("SDK_TEST_ADMIN_ROUNDS", "1"))

#: Deliveries keep at least this share of their rate while four clients send requests without a
#: pause. Without pacing it is a tenth. On a loaded machine the share has no meaning.
LEAST_PACE = 0.55

#: A separate process, so that its own work does not count: it sends requests as fast as they are
#: answered, and prints their number at the end of its input.
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


#: A process whose threads each hold a request that they do not finish, again and again.
HOLD = """
import socket, sys, threading, time
host, port = sys.argv[1].removeprefix("http://").split(":")
beginning = sys.stdin.buffer.read()
connected = threading.Semaphore(0)
def hold():
    while True:
        try:
            with socket.create_connection((host, int(port))) as sock:
                sock.sendall(beginning)
                connected.release()
                while sock.recv(65536):
                    pass
        except OSError:
            pass
        time.sleep(0.05)
for _ in range(int(sys.argv[2])):
    threading.Thread(target=hold, daemon=True).start()
for _ in range(int(sys.argv[2])):
    connected.acquire()
print("held", flush=True)
time.sleep(600)
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
                # The share of the time that is left to deliveries: probes and other requests are
                # paced separately.
                lasted = trio.current_time() - began
                assert answered <= 2 * (BURST + REQUESTS_PER_SECOND * lasted)
            finally:
                flood.kill()
                await flood.wait()
                await flood.stdout.aclose()
        assert (await admin.get("/readyz")).status_code == 200
    pace = statistics.median(flooded) / statistics.median(calm)
    # Without a full-size run it is enough that the deliveries continue.
    assert not FULL or pace >= LEAST_PACE, (calm, flooded)


async def test_slow_and_malformed_clients_end_no_other_requests():
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


#: Requests whose body lacks 9 bytes, and what they are answered without it.
SHORT = {
    "probe": (b"POST /livez HTTP/1.1", 405),
    "health": (b"POST /healthz HTTP/1.1", 405),
    "no token": (b"POST /api/events/replay HTTP/1.1", 401),
    "nothing there": (b"POST /nothing HTTP/1.1", 404),
    "too large": (b"POST /livez HTTP/1.1", 413),
    "read only": (b"GET /metrics HTTP/1.1", 200),
}

REPLAY = b"POST /api/events/replay HTTP/1.1"


def short_body(line, size=100, *headers):
    lines = [line, b"Host: localhost", b"Content-Length: %d" % size, *headers]
    return b"\r\n".join([*lines, b"", b" " * (min(size, 100) - 9)])


AUTHORIZED = (b"Content-Type: application/json", b"Authorization: Bearer " + TOKEN.encode())


def asked(path):
    return b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path.encode()


async def probe_statuses(url, rounds, source=None):
    statuses = []
    for _ in range(rounds):
        for probe in ("/livez", "/readyz", "/healthz"):
            with await RawWire.connect(url, source) as wire:
                await wire.send(asked(probe))
                statuses.append((await wire.answer()).status)
    return statuses


@pytest.mark.parametrize("kind", SHORT)
async def test_refusals_by_the_head_do_not_wait_for_the_body(kind, monkeypatch):
    patient = msgspec.structs.replace(admin_address.LIMITS, body_seconds=3600.0)
    monkeypatch.setattr(admin_address, "LIMITS", patient)
    line, status = SHORT[kind]
    async with administered(registry(works)) as admin:
        with await RawWire.connect(admin.url) as wire:
            await wire.send(short_body(line, 300_000 if kind == "too large" else 100))
            assert (await wire.answer()).status == status


async def test_a_body_that_breaks_off_is_no_order():
    async with administered(registry(works)) as admin:
        # What has come of it would be an order by itself.
        line = b"POST /api/notifications/retry HTTP/1.1"
        order = short_body(line, 100, *AUTHORIZED).rstrip(b" ") + b'{"failed": true}'
        with await RawWire.connect(admin.url) as wire:
            await wire.send(order)
            await wire.end_of_sending()
            assert (await wire.answer()).body == b'{"error":"bad request"}'
        assert await admin.api("/actions") == []


@pytest.mark.parametrize("beginning", ["bodies", "authorized bodies", "heads"])
async def test_probes_are_answered_while_their_own_address_holds_160_requests(beginning):
    """Such bodies of strangers once left 1 of 108 probe requests answered."""
    held = {
        "bodies": short_body(REPLAY),
        "authorized bodies": short_body(REPLAY, 100, *AUTHORIZED),
        "heads": REPLAY[:20],
    }[beginning]
    async with administered(registry(works)) as admin:
        with subprocess.Popen(
            [sys.executable, "-c", HOLD, admin.url, "160"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as holding:
            try:
                holding.stdin.write(held)
                holding.stdin.close()
                await trio.to_thread.run_sync(holding.stdout.readline)
                assert await probe_statuses(admin.url, 12) == [200] * 36
                assert (await admin.app.deliver("order.paid")).status == 200
            finally:
                holding.kill()


async def test_probes_are_answered_while_their_own_address_floods_probes(monkeypatch):
    """Connections that waited for their rate slot held all slots: 20 of 25 probes got 503."""
    # After the burst no further probe has a rate slot in this test.
    monkeypatch.setattr("sdk_trio.admin.app.REQUESTS_PER_SECOND", 0.001)
    async with administered(registry(works)) as admin:
        with ExitStack() as stack:
            for source in ("127.0.0.1", "127.0.0.2"):
                for _ in range(70):
                    wire = stack.enter_context(await RawWire.connect(admin.url, source))
                    await wire.send_what_is_taken(asked("/livez") * 2)
            for source in ("127.0.0.1", "127.0.0.3"):
                assert await probe_statuses(admin.url, 3, source) == [200] * 9
            # A flood keeps no connection: each further probe costs it a new one.
            with await RawWire.connect(admin.url) as wire:
                await wire.send(asked("/livez") * 2)
                assert (await wire.rest()).count(b"HTTP/1.1 200") == 1


async def test_a_flood_of_probes_does_not_say_which_token_is_right(monkeypatch):
    monkeypatch.setattr("sdk_trio.admin.app.REQUESTS_PER_SECOND", 0.001)
    async with administered(registry(works), Admin__Bind="0.0.0.0:0") as admin:
        for probe in ("/readyz", "/healthz"):
            answers = []
            for token in (TOKEN, "wrong"):
                authorization = (
                    f"GET {probe} HTTP/1.1\r\nAuthorization: Bearer {token}\r\n".encode()
                )
                with await RawWire.connect(admin.url) as wire:
                    await wire.send_what_is_taken(asked("/livez") * (BURST + 1))
                    await wire.rest()
                with await RawWire.connect(admin.url) as wire:
                    await wire.send(authorization + b"Host: localhost\r\n\r\n")
                    answers.append((await wire.rest()).partition(b"\r\n\r\n"))
            assert answers[0] == answers[1]
            assert b"detail" not in answers[0][2]


async def test_probes_of_a_hanging_store_leave_slots_to_others(monkeypatch):
    monkeypatch.setattr("sdk_trio.admin.status.PATIENCE_SECONDS", 3600.0)
    monkeypatch.setattr("sdk_trio.admin.status.FRESH_SECONDS", 0.0)
    async with administered(registry(works)) as admin:
        monkeypatch.setattr(type(admin.runtime.receiver.store), "write_checkpoint", hang)
        with ExitStack() as stack:
            for source in ("127.0.0.1", "127.0.0.2"):
                for _ in range(70):
                    wire = stack.enter_context(await RawWire.connect(admin.url, source))
                    await wire.send_what_is_taken(asked("/readyz"))
                await trio.testing.wait_all_tasks_blocked(0.02)
            for source in ("127.0.0.1", "127.0.0.3"):
                with await RawWire.connect(admin.url, source) as wire:
                    await wire.send(asked("/livez"))
                    assert (await wire.answer()).status == 200


async def hang(*_arguments, **_options):
    await trio.sleep_forever()


async def test_requests_in_progress_leave_slots_to_probes(monkeypatch):
    # After the burst each further request waits for a rate slot, and gets none in this test.
    monkeypatch.setattr("sdk_trio.admin.app.REQUESTS_PER_SECOND", 0.001)
    async with administered(registry(works)) as admin:
        for _ in range(BURST):
            assert (await admin.get("/metrics")).status_code == 200
        with ExitStack() as stack:
            refused = {}
            for source, most in (("127.0.0.1", 48), ("127.0.0.2", 48), ("127.0.0.3", 0)):
                for _ in range(most):
                    wire = stack.enter_context(await RawWire.connect(admin.url, source))
                    await wire.send(asked("/metrics"))
                await trio.testing.wait_all_tasks_blocked(0.02)
                with await RawWire.connect(admin.url, source) as wire:
                    # 1000 pipelined requests kept their connection busy, which then never gave way:
                    # 70 such connections left 3 of 32 probes answered.
                    await wire.send_what_is_taken(asked("/metrics") * 3)
                    answers = await wire.rest()
                    assert answers.count(b"HTTP/1.1 ") == 1
                    refused[source] = int(answers.split()[1])
                assert await probe_statuses(admin.url, 3, source) == [200] * 9
            assert set(refused.values()) == {503}
            assert (await admin.app.deliver("order.paid")).status == 200


async def test_a_client_that_reads_no_answer_delays_no_other():
    async with administered(registry(works)) as admin:
        with await RawWire.connect(admin.runtime.started.admin[0]) as wire:
            await wire.send(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400)
            for _ in range(3):
                assert (await admin.get("/readyz")).status_code == 200
                assert (await admin.app.deliver("order.paid")).status == 200
            wire.reset_at_close()
