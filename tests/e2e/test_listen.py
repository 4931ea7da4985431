"""``listen``: accepted deliveries arrive on another machine, once, in order, and verified."""

import http.server
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import attrs
import httpx
import pytest
import standardwebhooks
from support.admin import TOKEN
from support.command_forker import start_program
from support.daemon import Place
from support.deliveries import SECRET
from support.ports import free_port
from support.waiting import PATIENCE_SECONDS, wait_until

from sdk_trio.testing import sign_delivery

#: The number of deliveries while a listener is disconnected; 1000 take half a minute.
MISSED = 60 + int(os.environ.get("SDK_TEST_RELAY_MISSED", "60"))


@attrs.define
class LocalServer:
    """The server of an application on a laptop: keeps the ids that it has verified, by path."""

    port: int = attrs.Factory(free_port)
    seen: dict[str, list[str]] = attrs.Factory(dict)
    forged: int = 0
    _server: http.server.ThreadingHTTPServer | None = None

    def start(self) -> None:
        local = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                try:
                    # The reference implementation judges: time, id, exact bytes, signature.
                    standardwebhooks.Webhook(SECRET).verify(body, dict(self.headers))
                except standardwebhooks.WebhookVerificationError:
                    local.forged += 1
                local.seen.setdefault(self.path, []).append(self.headers["webhook-id"])
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def local() -> Iterator[LocalServer]:
    server = LocalServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def place(tmp_path) -> Place:
    place = Place(tmp_path)
    place.environ["SDK_ADMIN_TOKEN"] = TOKEN
    place.environ["SDK__ADMIN__BIND"] = f"127.0.0.1:{free_port()}"
    place.environ["SDK__SERVER__BIND"] = f"127.0.0.1:{free_port()}"
    # Both ends are in one process tree, and the positions are in the test's directory.
    place.environ["XDG_STATE_HOME"] = str(tmp_path / "state")
    return place


@contextmanager
def listener(place, local, path, *words):
    """``listen`` as a process, which has connected; it is interrupted at the end."""
    command = ["listen", "--format", "json", *words]
    command += ["--from", f"ws://{place.environ['SDK__ADMIN__BIND']}"]
    name = place.directory / f"said{path.replace('/', '-')}"
    said = name.open("a")
    connected = name.read_text().count("listening to")
    process = start_program(
        [*command, "--forward-to", f"http://127.0.0.1:{local.port}{path}"],
        directory=place.directory,
        environ=place.environ,
        stdout=said,
        stderr=said,
    )
    try:
        wait_until(lambda: name.read_text().count("listening to") > connected, name.read_text)
        yield name
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == 130, name.read_text()
    finally:
        process.kill()
        process.wait()
        said.close()


def deliver(place, first, last, wire_type="order.paid"):
    """Post events from several connections at a time, until each is accepted."""
    url = f"http://{place.environ['SDK__SERVER__BIND']}/hooks/sdk"

    def post(numbers):
        with httpx.Client() as client:
            for number in numbers:
                signed = sign_delivery(wire_type, secret=SECRET, webhook_id=f"msg_{number}")
                while True:
                    try:
                        answer = client.post(url, content=signed.body, headers=signed.headers)
                    except httpx.HTTPError:
                        answer = None
                    if answer is not None and answer.status_code == 200:
                        break
                    time.sleep(0.02)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(post, [range(first + part, last, 4) for part in range(4)]))


def arrived(place):
    """The ids in the order of their arrival, as the store has them."""
    rows = json.loads(place.run("events", "list", "--format", "json", "--limit", "5000").stdout)
    return [row["webhook_id"] for row in reversed(rows)]


def wait_for(place, path, number):
    """Wait until the listener has shown so many deliveries: then it has kept its position."""
    file = place.directory / f"said{path.replace('/', '-')}"
    shown = file.read_text
    wait_until(lambda: shown().count('"sequence"') >= number, shown, PATIENCE_SECONDS + number)


def test_each_delivery_comes_once_and_in_order_to_each_listener(place, local):
    with listener_of_a_killed_receiver(place, local) as first:
        assert "not connected" in first.read_text()
        # The second listener is disconnected meanwhile.
        deliver(place, 60, MISSED)
        wait_for(place, "/a", MISSED)
        with listener(place, local, "/b"):
            wait_for(place, "/b", MISSED)
            deliver(place, MISSED, MISSED + 10)
            wait_for(place, "/b", MISSED + 10)
            wait_for(place, "/a", MISSED + 10)
    expected = arrived(place)
    assert local.seen == {"/a": expected, "/b": expected}
    assert local.forged == 0


@contextmanager
def listener_of_a_killed_receiver(place, local):
    """A listener that has been there while the receiver was killed and started again."""
    with place.daemon() as daemon, listener(place, local, "/a") as said:
        with listener(place, local, "/b"):
            deliver(place, 0, 30)
            wait_for(place, "/b", 30)
        os.kill(daemon.process.pid, signal.SIGKILL)
        daemon.process.wait()
        wait_until(lambda: "not connected" in said.read_text(), said.read_text)
        with place.daemon():
            deliver(place, 30, 60)
            wait_for(place, "/a", 60)
            yield said
