"""A daemon whose log is not read: deliveries continue, and dropped lines are counted afterwards."""

import collections
import fcntl
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import httpx
import pytest
from support.daemon import Place
from support.deliveries import SECRET
from support.ports import free_port
from support.waiting import PATIENCE_SECONDS, wait_until

from sdk_trio.testing import sign_delivery

APPLICATION = """
import sdk_trio, trio
from sdk_trio.events import OrderCreatedEvent

handlers = sdk_trio.HandlerRegistry()


@handlers.on(OrderCreatedEvent)
async def handle(event):
    await trio.lowlevel.checkpoint()
"""

#: Lines of some 400 bytes are more than the pipe and the buffer of the daemon hold.
DELIVERIES = 3600


class Silent:
    """A daemon whose standard error is a pipe that the test reads on request."""

    def __init__(self, place, port, admin_port):
        self.port, self.admin_port = port, admin_port
        self.read_end, write_end = os.pipe()
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 65536)
        settings = {
            "Server:Bind": f"127.0.0.1:{port}",
            "Admin:Bind": f"127.0.0.1:{admin_port}",
            "Storage:Backend": "Memory",
        }
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "sdk_trio",
                "run",
                "--standalone",
                "--app",
                "application:handlers",
            ]
            + [f"--set=Sdk:{key}={value}" for key, value in settings.items()],
            cwd=place.directory,
            env={**place.environ, "SDK_ADMIN_TOKEN": "token-of-a-test"},  # a test value
            stdout=subprocess.DEVNULL,
            stderr=write_end,
        )
        os.close(write_end)
        self._sent = 0
        self._reading = None
        self._said = b""

    def serves(self):
        assert self.process.poll() is None
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def deliver(self, count):
        """Deliver one after the other on one connection; return the answers' statuses."""
        answers = collections.Counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
        for number in range(self._sent, self._sent + count):
            signed = sign_delivery(
                "order.created", secret=SECRET, webhook_id=f"msg_{number}_".ljust(200, "x")
            )
            connection.request("POST", "/hooks/sdk", signed.body, dict(signed.headers))
            answer = connection.getresponse()
            answer.read()
            answers[answer.status] += 1
        connection.close()
        self._sent += count
        return answers

    def dropped(self):
        """The lines that were dropped so far, by the metric."""
        text = httpx.get(
            f"http://127.0.0.1:{self.admin_port}/metrics",
            headers={"authorization": "Bearer token-of-a-test"},
        ).text
        [figure] = re.findall(r'^sdk_log_dropped_total\{level="info"\} (\S+)', text, re.MULTILINE)
        return int(float(figure))

    def read(self):
        """Begin to read."""

        def run():
            while data := os.read(self.read_end, 65536):
                self._said += data

        self._reading = threading.Thread(target=run)
        self._reading.start()

    def lines(self):
        whole, _, _ = self._said.rpartition(b"\n")
        return [json.loads(line) for line in whole.splitlines()]


@contextmanager
def silent(directory):
    (directory / "application.py").write_text(APPLICATION)
    daemon = Silent(Place(directory), free_port(), free_port())
    try:
        wait_until(daemon.serves)
        yield daemon
    finally:
        daemon.process.kill()
        daemon.process.wait()
        if daemon._reading is not None:
            daemon._reading.join(PATIENCE_SECONDS)
        os.close(daemon.read_end)


def test_a_reader_that_hangs_costs_lines_and_no_delivery(tmp_path):
    with silent(tmp_path) as daemon:
        assert daemon.deliver(DELIVERIES) == {200: DELIVERIES}
        dropped = daemon.dropped()
        assert dropped > 0
        daemon.read()
        reported = wait_until(lambda: [x for x in daemon.lines() if x["event"] == "log.dropped"])
        assert sum(line["info"] for line in reported) == dropped
        daemon.deliver(1)
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(PATIENCE_SECONDS) == 0
        daemon._reading.join(PATIENCE_SECONDS)
        handled = [line for line in daemon.lines() if line["event"] == "webhook.handled"]
        assert len(handled) + dropped == DELIVERIES + 1
        assert handled[-1]["webhook_id"].startswith(f"msg_{DELIVERIES}_")
        assert daemon.lines()[-1]["event"] == "runtime.stopped"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_reader_that_hangs_does_not_hold_up_the_end(tmp_path, number):
    with silent(tmp_path) as daemon:
        assert daemon.deliver(300) == {200: 300}
        daemon.process.send_signal(number)
        assert daemon.process.wait(PATIENCE_SECONDS) == 0


def test_a_reader_that_is_gone_does_not_end_the_daemon(tmp_path):
    with silent(tmp_path) as daemon:
        os.close(daemon.read_end)
        assert daemon.deliver(50) == {200: 50}
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(PATIENCE_SECONDS) == 0
        daemon.read_end = os.open(os.devnull, os.O_RDONLY)
