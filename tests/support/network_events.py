"""Events of a network between a client and healthy servers, and the results of calls.

A *front* forwards bytes to a server and causes one event: it resets the first connection, ignores
it, or drops it while requests are in flight. The servers are node, nginx and those of
``upstreams.py``. ``python -m support.network_events``, run in ``tests``, prints the table in
``docs/adr/0028-network-incidents.md``.
"""

import itertools
import socket
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import attrs
import trio

from sdk_trio.client.client import Client
from sdk_trio.client.errors import CallError
from sdk_trio.client.layers import AttemptKind
from sdk_trio.config import Mode, Secret, Settings
from sdk_trio.config.options.client import ConnectionOptions
from sdk_trio.net.transport import Transport
from support.ports import free_port
from support.programs import program
from support.upstreams import Authority, Upstream, http1_handler, http2_handler, serving
from support.waiting import until

TASKS = 20
#: The seconds until a server responds if the event does not depend on the requests.
ANSWER_SECONDS = 0.4

NODE_SERVER = """
const [,, port, protocol, cert, key, perConnection] = process.argv;
const fs = require("node:fs");
const tls = {cert: fs.readFileSync(cert), key: fs.readFileSync(key), allowHTTP1: false};
let requests = 0;
const waiting = [];
const answer = (request, response) => {
  const [, wait] = request.url.match(/after\\/([0-9.]+)/) ?? [0, "0"];
  const [, together] = request.url.match(/together\\/([0-9]+)/) ?? [0, "0"];
  request.resume();
  requests += 1;
  waiting.push(() => setTimeout(() => response.end("{}"), 1000 * Number(wait)));
  if (requests >= Number(together)) waiting.splice(0).forEach((end) => end());
};
const server = protocol === "h2"
  ? require("node:http2").createSecureServer(tls, answer)
  : require("node:https").createServer(tls, answer);
if (Number(perConnection)) {
  server.maxRequestsPerSocket = Number(perConnection);
  server.on("session", (session) => {
    let streams = 0;
    session.on("stream", () => { if (++streams === Number(perConnection)) session.close(); });
  });
}
server.on("sessionError", () => {});
server.on("clientError", () => {});
server.listen(Number(port), "127.0.0.1", () => console.log("listening"));
"""

NGINX_CONFIG = """
daemon off; master_process off; pid {directory}/nginx.pid; error_log stderr;
events {{}}
http {{
  access_log off;
  client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy;
  fastcgi_temp_path {directory}/fastcgi; uwsgi_temp_path {directory}/uwsgi;
  scgi_temp_path {directory}/scgi;
  keepalive_requests {requests};
  server {{
    listen 127.0.0.1:{port} ssl{http2};
    ssl_certificate {directory}/cert.pem; ssl_certificate_key {directory}/key.pem;
    location / {{ return 200 "{{}}"; }}
  }}
}}
"""


class Front:
    """Forwards connections to ``target``; ``first`` is the event of the first one.

    ``reset``: it is reset after 20 ms. ``silence``: it is accepted and never answered. ``drop``: it
    works, and is reset when the event ``drop`` is set. ``die``: each one is reset after half the
    time of a response. ``mute``: from then on it discards all bytes.
    """

    def __init__(self, target: int, first: str) -> None:
        self.target = target
        self.first = first
        self.port = 0
        self.numbers = itertools.count(1)
        self.connections = 0
        self.drop = trio.Event()

    async def serve(self, stream):
        self.connections += 1
        number = next(self.numbers)
        event = self.first if number == 1 or self.first == "die" else "nothing"
        with _reset_at_end(stream) if event in ("reset", "drop", "die") else stream.socket:
            if event == "reset":
                await trio.sleep(0.02)
            elif event == "silence":
                await trio.sleep_forever()
            elif event == "die":
                with trio.move_on_after(ANSWER_SECONDS / 2):
                    await self._forward(stream, until=None)
            elif event == "mute":
                await self._forward(stream, until=self.drop)
                await trio.sleep_forever()
            else:
                await self._forward(stream, until=self.drop if event == "drop" else None)

    async def _forward(self, stream, until):
        try:
            async with (
                await trio.open_tcp_stream("127.0.0.1", self.target) as other,
                trio.open_nursery() as nursery,
            ):
                scope = nursery.cancel_scope
                nursery.start_soon(_pump, stream, other, scope)
                nursery.start_soon(_pump, other, stream, scope)
                if until is not None:
                    await until.wait()
                    scope.cancel()
        except OSError:
            return


class _reset_at_end:  # noqa: N801 - reads as the context manager that it is
    def __init__(self, stream):
        self.socket = stream.socket

    def __enter__(self):
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def __exit__(self, *_):
        self.socket.close()


async def _pump(source, sink, scope):
    try:
        while data := await source.receive_some(65_536):
            await sink.send_all(data)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    scope.cancel()


@asynccontextmanager
async def fronted(target: int, first: str):
    """Run a front for the length of the block."""
    front = Front(target, first)
    async with trio.open_nursery() as nursery:
        serve = partial(trio.serve_tcp, front.serve, 0, host="127.0.0.1")
        listeners = await nursery.start(serve)
        front.port = listeners[0].socket.getsockname()[1]
        yield front
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def server_of(kind: str, protocol: str, authority: Authority, per_connection: int | None):
    """Run a server of ``kind`` (own, node, nginx) that ends connections gracefully; its port."""
    if kind == "own":
        upstream = Upstream()
        handler = (
            http2_handler(upstream, goaway_after=per_connection)
            if protocol == "h2"
            else http1_handler(upstream)
        )
        context = authority.server_context("h2" if protocol == "h2" else "http/1.1")
        async with serving(upstream, handler, context=context):
            yield upstream.port
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        cert, key = directory / "cert.pem", directory / "key.pem"
        authority.certificate.cert_chain_pems[0].write_to_path(cert)
        authority.certificate.private_key_pem.write_to_path(key)
        port = free_port()
        if kind == "node":
            script = directory / "server.cjs"
            script.write_text(NODE_SERVER)
            limit = str(per_connection or 0)
            command = [program("node"), script, str(port), protocol, cert, key, limit]
        else:
            config = directory / "nginx.conf"
            config.write_text(
                NGINX_CONFIG.format(
                    directory=directory,
                    port=port,
                    requests=per_connection or 1000,
                    http2=" http2" if protocol == "h2" else "",
                )
            )
            command = [program("nginx"), "-p", directory, "-c", config, "-e", "stderr"]
        log = (directory / "log").open("wb")
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            await _until_it_listens(port, process, directory / "log")
            yield port
        finally:
            process.kill()
            process.wait()
            log.close()


async def _until_it_listens(port, process, log):
    with trio.fail_after(60):
        while True:
            assert process.poll() is None, log.read_text()
            try:
                await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
            except OSError:
                await trio.sleep(0.02)
            else:
                return


@attrs.frozen
class Scenario:
    """One event, and the calls that are made meanwhile.

    ``first`` is the front's, ``per_connection`` the server's graceful limit of requests. A
    connection drops when all calls are in flight: none gets a response before one was repeated.
    """

    name: str
    first: str = "nothing"
    per_connection: int | None = None
    calls_per_task: int = 1
    path: str = f"/after/{ANSWER_SECONDS}"
    method: str = "GET"
    tasks: int = TASKS

    @property
    def target(self) -> str:
        """Return the path of the requests."""
        return f"/together/{self.tasks + 1}" if self.first == "drop" else self.path


@attrs.define
class Outcome:
    """The results of the calls, and the state of the circuit."""

    ok: int = 0
    failed: Counter = attrs.Factory(Counter)
    retries: int = 0
    circuits_opened: int = 0
    connections: int = 0

    def __str__(self) -> str:
        failed = ", ".join(f"{count} {name}" for name, count in self.failed.items()) or "0"
        circuit = "opened" if self.circuits_opened else "closed"
        return f"{self.ok} | {self.retries} | {failed} | {circuit} | {self.connections}"


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("the first dial is reset", first="reset"),
        Scenario("the first handshake hangs", first="silence"),
        Scenario("a connection drops under way", first="drop"),
        Scenario("goodbye after 10 requests", per_connection=10, calls_per_task=10, path="/"),
        Scenario(
            "goodbye after 10 requests, POST",
            per_connection=10,
            calls_per_task=10,
            path="/",
            method="POST",
        ),
    )
}


def settings_of(port: int, protocol: str, **fields) -> Settings:
    """Return the default settings for the upstream at ``port``."""
    return Settings(
        mode=Mode.CUSTOM,
        custom_base_url=f"https://localhost:{port}",
        base_path="/",
        access_token=Secret("not-a-real-token"),
        connection=ConnectionOptions(enable_http2=protocol == "h2"),
        **fields,
    )


async def run(scenario: Scenario, kind: str, protocol: str, **fields) -> Outcome:
    """Run a scenario: tasks call a server of ``kind`` while the event happens."""
    authority = Authority()
    outcome = Outcome()
    async with (
        server_of(kind, protocol, authority, scenario.per_connection) as target,
        fronted(target, scenario.first) as front,
    ):
        settings = settings_of(front.port, protocol, **fields)
        transport = Transport(settings.connection, verify=authority.client_context())
        async with Client(settings, transport) as client:

            async def task():
                for _ in range(scenario.calls_per_task):
                    try:
                        await client.request(scenario.method, scenario.target)
                    except CallError as error:
                        outcome.failed[type(error).__name__] += 1
                    else:
                        outcome.ok += 1

            async with trio.open_nursery() as nursery:
                for _ in range(scenario.tasks):
                    nursery.start_soon(task)
                if scenario.first == "drop":
                    await until(lambda: transport.statistics.exchanges >= scenario.tasks)
                    # Each step of the loop sends more of the requests, until the server has them.
                    for _ in range(10):
                        await trio.sleep(0.005)
                    front.drop.set()
            outcome.retries = client.counters.attempts[AttemptKind.RETRY]
            outcome.circuits_opened = client.counters.circuits_opened
        outcome.connections = front.connections
    return outcome


CASES = [
    (name, kind, protocol)
    for name in SCENARIOS
    for kind, protocol in itertools.product(("own", "node", "nginx"), ("h1", "h2"))
    # nginx responds at once; our HTTP/1.1 server sends no GOAWAY.
    if not (kind == "nginx" and SCENARIOS[name].first == "drop")
    and not (kind == "own" and protocol == "h1" and SCENARIOS[name].per_connection)
]


def main() -> None:
    """Print the results of each case; an argument selects scenarios by name."""
    _say("event | server | protocol | ok | retries | failed | circuit | connections")
    _say("---|---|---|---|---|---|---|---")
    for name, kind, protocol in CASES:
        if len(sys.argv) > 1 and sys.argv[1] not in name:
            continue

        async def one(name=name, kind=kind, protocol=protocol):
            with trio.fail_after(120):
                return await run(SCENARIOS[name], kind, protocol)

        _say(f"{name} | {kind} | {protocol} | {trio.run(one)}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
