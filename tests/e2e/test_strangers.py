"""A daemon with few descriptors, and events that strict decoders refuse, as processes."""

import json
import os
import resource
import signal
import socket
import time
from contextlib import suppress

import httpx
import pytest
from support.command_forker import run_command, start_program
from support.deliveries import SECRET
from support.logs import entries_in
from support.waiting import PATIENCE_SECONDS, wait_until

from sdk_trio.testing import sign_delivery

APPLICATION = """
import json, sdk_trio
from sdk_trio.events import OrderPaidEvent, OrderCreatedEvent

handlers = sdk_trio.HandlerRegistry()

@handlers.on(OrderPaidEvent, enqueue=True)
async def paid(event):
    print("handled", event.webhook_id, event.data.id, flush=True)

@handlers.on(OrderCreatedEvent, enqueue=True)
async def created(event):
    raise ValueError(json.loads(event.raw)["data"]["name"])
"""


class Daemon:
    """``sdk-trio run`` in a directory, with a secret of its own."""

    def __init__(self, directory, **keys):
        self.directory = directory
        (directory / "application.py").write_text(APPLICATION)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SDK_")},
            "SDK__ADMIN__BIND": "127.0.0.1:0",
            "SDK__SERVER__BIND": "0.0.0.0:0",
            "SDK__WEBHOOKS__SECRET": SECRET,
            "SDK__WEBHOOKS__REQUIREHTTPS": "false",
            "SDK__WEBHOOKS__QUEUE__MAXATTEMPTS": "1",
            **keys,
        }
        self.starts = 0

    def start(self, descriptors=None):
        if isinstance(descriptors, int):
            descriptors = descriptors, descriptors
        self.starts += 1
        words = ("run", "--standalone", "--app", "application:handlers")
        with (
            (self.directory / f"out-{self.starts}").open("w") as out,
            (self.directory / f"err-{self.starts}").open("w") as err,
        ):
            self.process = start_program(
                words,
                directory=self.directory,
                environ=self.environment,
                stdout=out,
                stderr=err,
                descriptors=descriptors,
            )
        wait_until(lambda: self.process.poll() is not None or self.started(), self.errors)
        (line,) = self.started()
        self.port = int(line["receiver"][0].rpartition(":")[2])
        return self

    def output(self):
        return (self.directory / f"out-{self.starts}").read_text()

    def log(self):
        return entries_in(self.errors())

    def started(self):
        return entries_in(self.errors(), "runtime.started")

    def errors(self):
        return (self.directory / f"err-{self.starts}").read_text()

    def wait_for(self, text):
        def came():
            assert self.process.poll() is None, self.errors()
            return text in self.output() + self.errors()

        wait_until(came, self.errors)

    def post(self, event, address="127.0.0.1", **options):
        delivery = sign_delivery(event, secret=SECRET, **options)
        transport = httpx.HTTPTransport(local_address=address)
        with httpx.Client(transport=transport, timeout=PATIENCE_SECONDS) as client:
            return client.post(
                f"http://127.0.0.1:{self.port}/hooks/sdk",
                content=delivery.body,
                headers=delivery.headers,
            )

    def get(self, port, path, address="127.0.0.1"):
        transport = httpx.HTTPTransport(local_address=address)
        with httpx.Client(transport=transport, timeout=PATIENCE_SECONDS) as client:
            return client.get(f"http://127.0.0.1:{port}{path}")

    def command(self, *words, status=0):
        ran = run_command(
            words, environ=self.environment, directory=self.directory, seconds=PATIENCE_SECONDS
        )
        assert ran.returncode == status, (ran.stdout, ran.stderr)
        return ran.stdout

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE_SECONDS) == 0


@pytest.fixture
def daemon(tmp_path):
    daemon = Daemon(tmp_path)
    yield daemon
    with suppress(ProcessLookupError):
        daemon.process.kill()
    daemon.process.wait()


STRANGE = {
    "emoji": b'{"type":"order.paid","data":{"id":"o\\ud83d","name":"Jo \\ud83d"}}',
    "depth": b'{"type":"order.paid","data":{"id":"o","x":%b}}' % (b"[" * 9000 + b"]" * 9000),
    "digits": b'{"type":"order.paid","data":{"id":"o","amount":%b}}' % (b"9" * 6000),
    "nan": b'{"type":"order.paid","data":{"id":"o","amount":NaN}}',
    "bom": b'\xef\xbb\xbf{"type":"order.paid","data":{"id":"o"}}',
    "named": b'{"type":"order.\\udc00","data":{"id":"o"}}',
    "failing": b'{"type":"order.created","data":{"id":"o","name":"Jo \\ud83d"}}',
}


def test_an_event_that_strict_decoders_refuse_lives_through_everything(daemon):
    daemon.start()
    for name, body in STRANGE.items():
        answer = daemon.post(body, webhook_id=name)
        assert (answer.status_code, answer.content) == (200, b"{}"), name
    for name in STRANGE:
        if name not in ("named", "failing"):
            daemon.wait_for(f"handled {name} ")
    daemon.wait_for("webhook.dead")
    # Delivered again, shown, listed, restarted and replayed.
    for name, body in STRANGE.items():
        assert daemon.post(body, webhook_id=name).status_code == 200
    listed = json.loads(daemon.command("events", "list", "--format", "json"))
    states = {event["webhook_id"]: event["state"] for event in listed}
    assert states == {**dict.fromkeys(STRANGE, "done"), "named": "parked", "failing": "dead"}
    assert daemon.command("events", "list")
    for name in STRANGE:
        assert "o" in daemon.command("events", "show", name)
        assert json.loads(daemon.command("events", "show", name, "--format", "json"))
    daemon.end()
    daemon.start()
    daemon.command("events", "replay", "failing")
    daemon.wait_for("webhook.dead")
    daemon.end()
    for line in daemon.log():
        assert line["level"] != "critical"
    assert "Traceback" not in daemon.errors()
    assert "UnicodeEncodeError" not in daemon.errors()


def hold(port, count, beginning):
    """Open connections from 127.0.0.1 that send ``beginning`` and nothing more."""
    held = []
    for _ in range(count):
        sock = socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS)
        held.append(sock)
        with suppress(OSError):  # it may have been refused already
            sock.sendall(beginning)
    return held


def head(path, *lines):
    return b"\r\n".join([b"POST %b HTTP/1.1" % path, b"Host: localhost", *lines])


UNFINISHED = {
    "heads": head(b"/hooks/sdk", b"X: y"),
    "one byte": b"P",
    # 9 bytes are missing of this body, and the headers look right.
    "bodies": head(
        b"/hooks/sdk",
        b"Content-Type: application/json",
        b"Content-Length: 100",
        b"webhook-id: w1",
        b"webhook-timestamp: %d" % time.time(),
        b"webhook-signature: v1,AAAA",
        b"",
        b"x" * 91,
    ),
}


@pytest.mark.parametrize("fast", ["true", "false"], ids=["fast path", "hypercorn"])
@pytest.mark.parametrize("descriptors", [64, 1024])
@pytest.mark.parametrize("kind", UNFINISHED)
def test_unfinished_requests_of_one_address_do_not_lock_out_another(
    tmp_path, kind, descriptors, fast
):
    daemon = Daemon(tmp_path, SDK__SERVER__FASTPATH=fast)
    held = []
    try:
        daemon.start(descriptors=descriptors)
        admin = int(daemon.started()[0]["admin"][0].rpartition(":")[2])
        for port in (admin, daemon.port):
            held += hold(port, descriptors + 44, UNFINISHED[kind])
        statuses = [daemon.post("order.paid", "127.0.0.2").status_code for _ in range(8)]
        assert statuses == [200] * 8
        for address in ("127.0.0.1", "127.0.0.2"):
            for probe in ("/livez", "/readyz", "/healthz"):
                assert daemon.get(admin, probe, address).status_code == 200
        assert not entries_in(daemon.errors(), "server.accept_failed")
        daemon.end()
    finally:
        for sock in held:
            sock.close()
        daemon.process.kill()
        daemon.process.wait()


@pytest.mark.parametrize("hard", [256, 4096, 1_000_000])
def test_the_start_raises_the_soft_limit_of_descriptors(daemon, hard):
    most = min(hard, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    daemon.start(descriptors=(256, most))
    soft, _ = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
    assert soft == min(most, 65_536)
    daemon.end()


def test_idle_connections_of_one_address_do_not_lock_out_another(daemon):
    daemon.start(descriptors=512)
    idle = []
    try:
        for _ in range(470):
            sock = socket.create_connection(("127.0.0.1", daemon.port), PATIENCE_SECONDS)
            idle.append(sock)
        assert daemon.post("order.paid", address="127.0.0.2").status_code == 200
        assert daemon.post("order.paid", address="127.0.0.3").status_code == 200
        full = [line for line in daemon.log() if line["event"] == "server.source_full"]
        # Half of the connections that 512 descriptors allow.
        assert [(line["address"], line["limit"]) for line in full] == [("127.0.0.1", 176)]
    finally:
        for sock in idle:
            sock.close()
    daemon.end()
