"""A load generator for signed deliveries: one process, many keep-alive connections, no framework.

Each connection sends a delivery, waits for its whole answer, and sends the next. Every delivery
has an id and a signature of its own, made before the clock starts, so that a receiver cannot answer
from its memory and the generator has little to do while it measures. Ids are random UUIDs, as the
upstream's are: the worst order for an index. Other senders' ids grow with time (``growing``).

Run as a program, it takes its arguments as JSON, says "ready" once it has prepared them, waits for
a line, so that several generators begin together, says "begun", and writes its measurement to the
file ``result``.
"""

import base64
import hashlib
import hmac
import json
import random
import select
import socket
import ssl
import sys
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

#: A key for benchmarks on the loopback address; it protects nothing.
KEY = b"benchmark-key-that-protects-nothing"
SECRET = "whsec_" + base64.b64encode(KEY).decode()


def body(size: int = 2048) -> bytes:
    """An order.paid document of about ``size`` bytes, as the upstream sends it."""
    data = {
        "id": "0f2e7b8a-5d31-4c67-9a57-2f9f64b6a001",
        "status": "paid",
        "amount": 2000,
        "total_amount": 2400,
        "tax_amount": 400,
        "currency": "eur",
        "billing_reason": "subscription_cycle",
        "customer": {"id": "c-1", "email": "ada@example.com", "name": "Ada Example"},
        "product_id": "p-1",
        "subscription_id": "s-1",
        "items": [{"product_id": "p-1", "label": "Studio Plan", "amount": 2400, "currency": "eur"}],
        "metadata": {},
        "created_at": "2026-01-02T03:04:05Z",
    }
    document = {"type": "order.paid", "timestamp": "2026-01-02T03:04:05Z", "data": data}
    missing = size - len(json.dumps(document, separators=(",", ":")))
    data["metadata"] = {f"key{n}": "v" * 40 for n in range(max(0, missing) // 50)}
    return json.dumps(document, separators=(",", ":")).encode()


def webhook_ids(count: int, *, growing: bool = False) -> list[str]:
    """Return new ids: random UUIDs of version 4, or texts in the order of their making."""
    if growing:
        prefix = f"msg_{time.time_ns():x}_"
        return [f"{prefix}{number:010d}" for number in range(count)]
    source = random.Random(time.time_ns())
    return [str(uuid.UUID(int=source.getrandbits(128), version=4)) for _ in range(count)]


def requests(
    count: int, payload: bytes, host: str, path: str, *, growing: bool = False
) -> list[bytes]:
    """Sign ``count`` deliveries of ``payload``, each with an id of its own."""
    made = []
    moment = str(int(time.time()))
    for webhook_id in webhook_ids(count, growing=growing):
        signed = b"%b.%b.%b" % (webhook_id.encode(), moment.encode(), payload)
        signature = base64.b64encode(hmac.digest(KEY, signed, hashlib.sha256)).decode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(payload)}\r\nwebhook-id: {webhook_id}\r\n"
            f"webhook-timestamp: {moment}\r\nwebhook-signature: v1,{signature}\r\n\r\n"
        )
        made.append(head.encode() + payload)
    return made


@dataclass
class Measured:
    """What one run saw: seconds, answers other than 200, and how long each answer took, in us.

    ``dropped`` are requests whose connection was closed instead of answered. ``generator_used`` is
    the share of its core that the generator itself used: near 1, it was the bottleneck.
    """

    latencies_us: list[int]
    seconds: float
    errors: int
    dropped: int
    began: float
    ended: float
    generator_used: float


class Connection:
    """One keep-alive connection with at most one request under way.

    A server's answers are all as long as its first one, so one comparison tells a whole 200; what
    looks different is read as HTTP.
    """

    __slots__ = ("closing", "expected", "received", "sent_at", "socket")

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname=host)
        self.socket.setblocking(False)
        self.received = b""
        self.expected = 0
        self.closing = False
        self.sent_at = 0.0

    def send(self, request: bytes) -> None:
        self.sent_at = time.perf_counter()
        try:
            sent = self.socket.send(request)
        except (ConnectionError, ssl.SSLError):
            return  # reading tells that it was closed
        if sent != len(request):
            raise SystemExit("a request did not fit into an empty socket's buffer")

    def answer(self) -> int | None:
        """Return the status once the whole answer is here; 0 if the connection was closed."""
        try:
            chunk = self.socket.recv(65536)
        except ssl.SSLWantReadError:
            return None
        except (ConnectionError, ssl.SSLError):
            return 0
        if len(chunk) == self.expected and not self.received and chunk[9:12] == b"200":
            return 200
        if not chunk:
            return 0
        self.received += chunk
        head, separator, rest = self.received.partition(b"\r\n\r\n")
        if not separator:
            return None
        lowered = head.lower()
        start = lowered.find(b"content-length:")
        length = int(lowered[start + 15 :].split(b"\r\n", 1)[0]) if start >= 0 else 0
        if len(rest) < length:
            return None
        self.expected = len(self.received)
        self.closing = b"\r\nconnection: close" in lowered
        self.received = b""
        return int(head[9:12])


def run(
    host: str,
    port: int,
    path: str,
    *,
    connections: int,
    warm_up: float,
    seconds: float,
    count: int,
    growing: bool = False,
    authority: str | None = None,
    spin: bool = False,
) -> Measured:
    """Load the receiver with ``count`` deliveries, or for ``warm_up`` and then ``seconds``.

    ``authority`` is the file of the certificate to trust: with it, connections speak TLS.
    ``spin``: never sleep, for a generator with a core of its own. Waking it would be charged to the
    server whose answer does so, and most to one that answers at once instead of in bursts.
    """
    prepared = iter(requests(count, body(), f"{host}:{port}", path, growing=growing))
    print("ready", flush=True)
    sys.stdin.readline()
    tls = None if authority is None else ssl.create_default_context(cafile=authority)
    opened = [Connection(host, port, tls) for _ in range(connections)]
    open_ones = {connection.socket.fileno(): connection for connection in opened}
    poll = select.epoll()
    for descriptor in open_ones:
        poll.register(descriptor, select.EPOLLIN)
    latencies: list[float] = []
    errors = dropped = 0
    begin = time.perf_counter() + warm_up
    end = begin + seconds
    began = time.time() + warm_up
    pause = 0.0 if spin else 0.5
    idle = 0.0
    started = time.perf_counter()
    for connection in open_ones.values():
        connection.send(next(prepared))
    print("begun", flush=True)
    while (now := time.perf_counter()) < end and open_ones:
        events = poll.poll(pause)
        if not events or not spin:
            idle += time.perf_counter() - now
        for descriptor, _ in events:
            connection = open_ones[descriptor]
            status = connection.answer()
            if status is None:
                continue
            now = time.perf_counter()
            if status == 0:
                dropped += 1
            elif begin <= now < end:
                latencies.append(now - connection.sent_at)
                errors += status != 200
            request = next(prepared, None)
            if status == 0 or connection.closing or request is None:
                poll.unregister(descriptor)
                open_ones.pop(descriptor).socket.close()
            else:
                connection.send(request)
    elapsed = min(time.perf_counter(), end) - begin
    busy = 1 - idle / (time.perf_counter() - started)
    for connection in open_ones.values():
        connection.socket.close()
    return Measured(
        latencies_us=[int(1e6 * latency) for latency in latencies],
        seconds=elapsed,
        errors=errors,
        dropped=dropped,
        began=began,
        ended=began + elapsed,
        generator_used=busy,
    )


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    result = Path(options.pop("result"))
    result.write_text(json.dumps(asdict(run(**options))))
