"""A load generator for signed deliveries: one process, many keep-alive connections, no framework.

Each connection sends a delivery, waits for its whole answer, and sends the next. Every delivery
has an id and a signature of its own, made before the clock starts, so that a receiver cannot answer
from its memory and the generator has little to do while it measures.
"""

import base64
import hashlib
import hmac
import json
import select
import socket
import sys
import time
from dataclasses import asdict, dataclass

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


def requests(count: int, payload: bytes, host: str, path: str, prefix: str) -> list[bytes]:
    """Sign ``count`` deliveries of ``payload``, each with an id of its own."""
    made = []
    moment = str(int(time.time()))
    for number in range(count):
        webhook_id = f"msg_{prefix}{number}"
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
    """What one run saw: answered deliveries, seconds, answers other than 200, latencies in ms.

    ``generator_used`` is the share of its core that the generator itself used: near 1, it was the
    bottleneck.
    """

    deliveries: int
    seconds: float
    errors: int
    p50_ms: float
    p99_ms: float
    began: float
    ended: float
    generator_used: float


class Connection:
    """One keep-alive connection with at most one request under way.

    A server's answers are all as long as its first one, so one comparison tells a whole 200; what
    looks different is read as HTTP.
    """

    __slots__ = ("expected", "received", "sent_at", "socket")

    def __init__(self, host: str, port: int) -> None:
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
        self.socket.setblocking(False)
        self.received = b""
        self.expected = 0
        self.sent_at = 0.0

    def send(self, request: bytes) -> None:
        self.sent_at = time.perf_counter()
        if self.socket.send(request) != len(request):
            raise SystemExit("a request did not fit into an empty socket's buffer")

    def answer(self) -> int | None:
        """Return the status once the whole answer is here; 0 if the connection was closed."""
        try:
            chunk = self.socket.recv(65536)
        except ConnectionResetError:
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
        self.received = b""
        return int(head[9:12])


def run(
    host: str, port: int, path: str, *, connections: int, warm_up: float, seconds: float, rate: int
) -> Measured:
    """Load the receiver for ``warm_up`` and then ``seconds``; ``rate`` bounds what is prepared."""
    total = int(rate * (warm_up + seconds))
    prepared = iter(requests(total, body(), f"{host}:{port}", path, f"{time.time_ns():x}_"))
    open_ones = {c.socket.fileno(): c for c in (Connection(host, port) for _ in range(connections))}
    poll = select.epoll()
    for descriptor in open_ones:
        poll.register(descriptor, select.EPOLLIN)
    latencies: list[float] = []
    errors = 0
    begin = time.perf_counter() + warm_up
    end = begin + seconds
    began = time.time() + warm_up
    busy = time.process_time()
    started = time.perf_counter()
    for connection in open_ones.values():
        connection.send(next(prepared))
    while (now := time.perf_counter()) < end and open_ones:
        for descriptor, _ in poll.poll(0.5):
            connection = open_ones[descriptor]
            status = connection.answer()
            if status is None:
                continue
            now = time.perf_counter()
            if begin <= now < end:
                latencies.append(now - connection.sent_at)
                errors += status != 200
            request = next(prepared, None)
            if status == 0 or request is None:
                poll.unregister(descriptor)
                open_ones.pop(descriptor).socket.close()
            else:
                connection.send(request)
    elapsed = min(time.perf_counter(), end) - begin
    busy = (time.process_time() - busy) / (time.perf_counter() - started)
    for connection in open_ones.values():
        connection.socket.close()
    latencies.sort()
    return Measured(
        deliveries=len(latencies),
        seconds=elapsed,
        errors=errors,
        p50_ms=1000 * latencies[len(latencies) // 2] if latencies else 0.0,
        p99_ms=1000 * latencies[len(latencies) * 99 // 100] if latencies else 0.0,
        began=began,
        ended=began + elapsed,
        generator_used=busy,
    )


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    print(json.dumps(asdict(run(**options))))
