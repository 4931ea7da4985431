"""A load generator for signed deliveries: one process, many keep-alive connections, no framework.

Closed loop (no ``rate``): each connection sends a delivery, waits for the whole response, and sends
the next. It measures the maximum throughput. Open loop (``rate``): deliveries have scheduled times
that do not depend on responses, and wait for a free connection if necessary. Latency counts from
the scheduled time. So if a server stops for a second, all deliveries of that second are late, not
only the one in progress (G. Tene calls the opposite coordinated omission).

Every delivery has its own id and signature, made before the measurement. So the receiver cannot
answer from a cache, and the generator has little work while it measures. Ids are random UUIDs, like
the upstream's: the worst order for an index.

As a program, it reads the fields of :class:`Load` as JSON, prints "ready" after preparing the
deliveries, waits for a line, and prints its :class:`Measured` as one line of JSON.
"""

import base64
import hashlib
import hmac
import json
import random
import select
import socket
import ssl
import struct
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

#: A key for benchmarks on the loopback address; it protects nothing.
KEY = b"benchmark-key-that-protects-nothing"
SECRET = "whsec_" + base64.b64encode(KEY).decode()

#: Seconds that an open loop waits for its last responses. A delivery without one by then counts
#: with the time that it has waited.
PATIENCE = 5.0


@dataclass
class Load:
    """The deliveries to send: destination, connections, duration.

    ``count`` is the number of deliveries of a closed loop, which ends with the last. ``rate`` is
    the average number of arrivals a second, at random times: a Poisson process of ``seed``, the
    same for each server of a round. ``spin``: never sleep, for a generator with its own core.
    Otherwise waking the generator would count as CPU time of the server, most for a server that
    sends single responses instead of bursts. ``pid`` is the server whose CPU time is read.
    ``fresh``: each delivery opens a connection, when it is sent.
    ``handled`` is the file with its count of handled events. ``authority`` is the certificate to
    trust; with it, connections use TLS.
    """

    port: int
    path: str
    connections: int
    warm_up: float
    seconds: float
    count: int = 0
    rate: float | None = None
    seed: int = 0
    spin: bool = True
    pid: int | None = None
    handled: str | None = None
    authority: str | None = None
    host: str = "127.0.0.1"
    fresh: bool = False


@dataclass
class Measured:
    """The results after the warm-up.

    ``latencies_us`` and ``scheduled_at`` (Unix seconds) have the same order. ``errors`` counts
    responses other than 200, ``dropped`` connections closed without a response, ``unanswered``
    deliveries that an open loop gave up. The server used ``cpu_seconds`` for ``answered``
    responses; ``cpu_at_begin`` and ``handled_at_begin`` are its totals at ``began`` (Unix seconds).
    ``generator_used`` is the share of its core that the generator used: near 1, it was the
    bottleneck.
    """

    latencies_us: list[int]
    scheduled_at: list[float]
    began: float
    seconds: float
    errors: int
    dropped: int
    unanswered: int
    answered: int
    cpu_seconds: float
    cpu_at_begin: float
    handled_at_begin: int
    generator_used: float


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


def webhook_ids(count: int) -> Iterator[str]:
    """Make new ids: random UUIDs of version 4."""
    source = random.Random(time.time_ns())
    return (str(uuid.UUID(int=source.getrandbits(128), version=4)) for _ in range(count))


def requests(count: int, payload: bytes, host: str, path: str) -> list[bytes]:
    """Sign ``count`` deliveries of ``payload``, each with its own id."""
    made = []
    moment = str(int(time.time()))
    for webhook_id in webhook_ids(count):
        signed = b"%b.%b.%b" % (webhook_id.encode(), moment.encode(), payload)
        signature = base64.b64encode(hmac.digest(KEY, signed, hashlib.sha256)).decode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(payload)}\r\nwebhook-id: {webhook_id}\r\n"
            f"webhook-timestamp: {moment}\r\nwebhook-signature: v1,{signature}\r\n\r\n"
        )
        made.append(head.encode() + payload)
    return made


def schedule(rate: float, seconds: float, seed: int) -> list[float]:
    """Return the times of arrivals in seconds from the start, on average ``rate`` a second."""
    source = random.Random(seed)
    moments = []
    at = source.expovariate(rate)
    while at < seconds:
        moments.append(at)
        at += source.expovariate(rate)
    return moments


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process so far, including all its threads.

    The id of a process's CPU clock is computed from its pid as in Linux' ``posix-timers.h``. It
    counts nanoseconds, while /proc/PID/stat counts hundredths of a second.
    """
    return time.clock_gettime((~pid << 3) | 2)


def read_count(file: str | None) -> int:
    """Return the number of handled events that a server keeps in ``file``; 0 without a file."""
    return 0 if file is None else struct.unpack("<Q", Path(file).read_bytes())[0]


class Connection:
    """One keep-alive connection with at most one request in flight.

    All responses of a server have the length of its first one, so one comparison recognises a
    complete 200. Other bytes are parsed as HTTP.
    """

    __slots__ = ("busy", "closing", "expected", "received", "scheduled", "socket")

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self.socket = socket.create_connection((host, port), timeout=PATIENCE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname=host)
        self.socket.setblocking(False)
        self.received = b""
        self.expected = 0
        self.closing = self.busy = False
        self.scheduled = 0.0

    def send(self, request: bytes, scheduled: float) -> None:
        self.scheduled = scheduled
        self.busy = True
        try:
            sent = self.socket.send(request)
        except (ConnectionError, ssl.SSLError):
            return  # reading detects that it was closed
        if sent != len(request):
            raise SystemExit("a request did not fit into an empty socket's buffer")

    def answer(self) -> int | None:
        """Return the status once the response is complete; 0 if the connection was closed."""
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


class _Connections:
    """Open connections: free ones, and those that wait for a response."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._tls = load.authority and ssl.create_default_context(cafile=load.authority)
        self._poll = select.epoll()
        self._open: dict[int, Connection] = {}
        # The longest idle one is next, so that none is idle long enough for a server to close it.
        # None: a connection that is opened when it is taken.
        self.free: deque[Connection | None] = deque()
        for _ in range(load.connections):
            self._connect()

    def _connect(self) -> None:
        self.free.append(None if self._load.fresh else self._opened())

    def _opened(self) -> Connection:
        made = Connection(self._load.host, self._load.port, self._tls or None)
        self._open[made.socket.fileno()] = made
        self._poll.register(made.socket.fileno(), select.EPOLLIN)
        return made

    def take(self) -> Connection:
        """Take the next free connection."""
        return self.free.popleft() or self._opened()

    def _replace(self, descriptor: int) -> None:
        gone = self._open.pop(descriptor)
        self._poll.unregister(descriptor)
        if not gone.busy:
            self.free.remove(gone)
        gone.socket.close()
        self._connect()

    def poll(self, pause: float) -> list[tuple[int, int]]:
        return self._poll.poll(pause)

    def answers(self, events: list[tuple[int, int]]) -> Iterator[tuple[float, int]]:
        """Yield the scheduled time and the status of each response; the status 0: no response."""
        for descriptor, _ in events:
            connection = self._open[descriptor]
            status = connection.answer()
            if status is None:
                continue
            if connection.busy:
                yield connection.scheduled, status
            if status == 0 or connection.closing or self._load.fresh:
                self._replace(descriptor)
            else:
                connection.busy = False
                self.free.append(connection)

    def waiting(self) -> list[float]:
        """Return the scheduled times of deliveries without a response."""
        return [one.scheduled for one in self._open.values() if one.busy]

    def close(self) -> None:
        for connection in self._open.values():
            connection.socket.close()


def run(load: Load) -> Measured:
    """Run a load, which ends by itself."""
    length = load.warm_up + load.seconds
    moments = None if load.rate is None else schedule(load.rate, length, load.seed)
    count = load.count if moments is None else len(moments)
    prepared = deque(requests(count, body(), f"{load.host}:{load.port}", load.path))
    print("ready", flush=True)
    sys.stdin.readline()
    connections = _Connections(load)
    arrivals = None if moments is None else deque(moments)
    started = time.perf_counter()
    unix = time.time() - started
    begin, end = started + load.warm_up, started + length
    seen: list[tuple[float, float]] = []
    errors = dropped = answered = 0
    cpu_began: float | None = None
    handled_began = 0
    began = started
    idle = 0.0
    while True:
        now = time.perf_counter()
        if cpu_began is None and now >= begin:
            cpu_began = 0.0 if load.pid is None else cpu_seconds(load.pid)
            handled_began = read_count(load.handled)
            answered = 0
            began = now
        free = connections.free
        if arrivals is None:
            if now >= end or not prepared:
                break
            while free and prepared:
                connection = connections.take()
                connection.send(prepared.popleft(), now)
            pause = 0.0 if load.spin else 0.05
        else:
            while arrivals and free and started + arrivals[0] <= now:
                connection = connections.take()
                connection.send(prepared.popleft(), started + arrivals.popleft())
            if now >= end and not arrivals and len(free) == load.connections:
                break
            if now >= end + PATIENCE:
                break
            next_one = started + arrivals[0] - now if arrivals and free else 0.05
            pause = 0.0 if load.spin else min(0.05, max(0.0, next_one))
        events = connections.poll(pause)
        now = time.perf_counter() if events else now
        if not events:
            idle += time.perf_counter() - now
            continue
        for scheduled, status in connections.answers(events):
            answered += 1
            if status == 0:
                dropped += 1
            # A closed loop sends when it can, so only responses within its time count.
            elif begin <= (now if arrivals is None else scheduled):
                seen.append((scheduled, now - scheduled))
                errors += status != 200
    cpu_used = 0.0 if load.pid is None else cpu_seconds(load.pid) - (cpu_began or 0.0)
    late = [] if arrivals is None else connections.waiting() + [started + a for a in arrivals]
    seen += [(scheduled, now - scheduled) for scheduled in late if scheduled >= begin]
    ended = time.perf_counter()
    connections.close()
    return Measured(
        latencies_us=[int(1e6 * latency) for _, latency in seen],
        scheduled_at=[round(unix + scheduled, 4) for scheduled, _ in seen],
        began=unix + began,
        seconds=ended - began,
        errors=errors,
        dropped=dropped,
        unanswered=len(late),
        answered=answered,
        cpu_seconds=cpu_used,
        cpu_at_begin=cpu_began or 0.0,
        handled_at_begin=handled_began,
        generator_used=1 - idle / (ended - started),
    )


if __name__ == "__main__":
    print(json.dumps(asdict(run(Load(**json.loads(sys.argv[1]))))))
