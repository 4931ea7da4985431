"""Runs one server and one load, and measures their CPU time and memory."""

import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import attrs
from load import SECRET, Load, Measured, body, cpu_seconds, read_count, requests
from peers import HERE, SERVERS, Server
from stores import Certificate

PATH = "/hooks/sdk"
START_SECONDS = 20.0
#: The same under a program that makes it fifty times slower.
OBSERVED_START_SECONDS = 300.0
#: The seconds after which a server is killed; its data is no longer needed.
STOP_SECONDS = 5.0
#: The seconds within which all accepted events should be handled.
DONE_SECONDS = 60.0
_OURS = ("SDK_", "STATE_DIRECTORY", "CREDENTIALS_DIRECTORY", "BENCHMARK_")


_USABLE = sorted(os.sched_getaffinity(0))
CORES = len(_USABLE)
#: The core that only servers use.
SERVER_CORE = _USABLE[0]
#: The core of the generator and of this program. If servers use it as well, rates and latencies are
#: meaningless.
GENERATOR_CORE = _USABLE[-1]


@attrs.define
class Process:
    """A running server, its milliseconds to the first 200, and its memory at that time."""

    server: Server
    port: int
    popen: "subprocess.Popen[bytes]"
    handled_file: Path
    data: Path
    log: Path
    certificate: Certificate | None
    start_ms: float = 0.0

    @property
    def pid(self) -> int:
        return self.popen.pid

    def cpu_seconds(self) -> float:
        """Return user and system time so far, including all threads."""
        return cpu_seconds(self.pid)

    def memory_mb(self) -> float:
        """Resident memory."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def handled(self) -> int:
        """Return the number of handled events; 0 for a peer without a store."""
        return read_count(str(self.handled_file))

    def settle(self, seconds: float = DONE_SECONDS) -> float:
        """Wait until it is idle, and return its CPU seconds.

        The work of its start and after the last response has ended when it has used less than a
        twentieth of its core for a fifth of a second.
        """
        deadline = time.monotonic() + seconds
        used = self.cpu_seconds()
        while time.monotonic() < deadline:
            time.sleep(0.2)
            before, used = used, self.cpu_seconds()
            if used - before < 0.01:
                break
        return used


@contextmanager
def serving(
    server: Server,
    *,
    directory: Path,
    data: Path | None = None,
    certificate: Certificate | None = None,
    under: Sequence[str] = (),
    steps: Path | None = None,
) -> Iterator[Process]:
    """Run ``server`` on a free port and its own core until the end of the block.

    Args:
        server: the server to run.
        directory: for its files.
        data: its data directory, which is not removed; None: an empty one.
        certificate: its certificate, if it uses TLS.
        under: the command of a program that runs and observes it, such as valgrind.
        steps: the file in which it counts the steps of its bytecode; None: it does not.
    """
    with tempfile.TemporaryDirectory(dir=directory) as place:
        own = Path(place)
        if data is None:
            data = own / "data"
            data.mkdir(mode=0o700)
        handled, log = own / "handled", own / "log"
        handled.write_bytes(bytes(8))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = int(listener.getsockname()[1])
        environment = _environment(server, port, data, handled, certificate)
        observed = bool(under) or steps is not None
        if observed:
            environment["PYTHONPATH"] += f":{SERVERS / 'observed'}"
        if steps is not None:
            steps.write_bytes(bytes(8))
            environment["BENCHMARK_STEPS"] = str(steps)
        trusted = certificate if server.tls else None
        command = [*under]
        command += [str(port) if word == "PORT" else word for word in server.command]
        began = time.perf_counter()
        # The log is written to a file, as by a service manager.
        with log.open("wb") as err:
            popen = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=err,
                stderr=err,
                preexec_fn=lambda: os.sched_setaffinity(0, {SERVER_CORE}),
            )
        process = Process(server, port, popen, handled, data, log, trusted)
        try:
            _wait_for_answer(process, OBSERVED_START_SECONDS if observed else START_SECONDS)
            process.start_ms = 1000 * (time.perf_counter() - began)
            yield process
        finally:
            popen.terminate()
            with suppress(subprocess.TimeoutExpired):
                popen.wait(STOP_SECONDS)
            popen.kill()
            popen.wait()


def _environment(
    server: Server, port: int, data: Path, handled: Path, certificate: Certificate | None
) -> dict[str, str]:
    """Return the environment of a server.

    Of our settings only the secret, the addresses and the path are set; ``RequireHttps`` is off
    because the load is plain HTTP.
    """
    environment = {k: v for k, v in os.environ.items() if not k.upper().startswith(_OURS)}
    environment |= {
        "PYTHONPATH": str(SERVERS),
        "BENCHMARK_SECRET": SECRET,
        "BENCHMARK_HANDLED": str(handled),
        "BENCHMARK_DATA": str(data),
        "SDK__WEBHOOKS__SECRET": SECRET,
        "SDK__WEBHOOKS__REQUIREHTTPS": "false",
        "SDK__SERVER__BIND": f"127.0.0.1:{port}",
        "SDK__ADMIN__BIND": "127.0.0.1:0",
        "SDK__STORAGE__PATH": str(data),
        **{f"SDK__{key}": value for key, value in server.settings.items()},
    }
    if server.tls and certificate is not None:
        environment |= {
            "BENCHMARK_CERTIFICATE": str(certificate.chain),
            "BENCHMARK_KEY": str(certificate.key),
            "SDK__SERVER__CERTFILE": str(certificate.chain),
            "SDK__SERVER__KEYFILE": str(certificate.key),
        }
    return environment


def _wait_for_answer(process: Process, seconds: float) -> None:
    """Deliver until the first 200."""
    deadline = time.monotonic() + seconds
    while not _delivered(process):
        if time.monotonic() > deadline or process.popen.poll() is not None:
            raise SystemExit(f"{process.server.name} did not start:\n{process.log.read_text()}")
        time.sleep(0.002)


def _delivered(process: Process) -> bool:
    (delivery,) = requests(1, body(), "127.0.0.1", PATH)
    try:
        with socket.create_connection(("127.0.0.1", process.port), timeout=5) as plain:
            connection: socket.socket = plain
            if process.certificate is not None:
                context = ssl.create_default_context(cafile=str(process.certificate.authority))
                connection = context.wrap_socket(plain, server_hostname="127.0.0.1")
            with connection:
                connection.sendall(delivery)
                answer = http.client.HTTPResponse(connection)
                answer.begin()
                return answer.status == 200
    except (OSError, http.client.HTTPException):
        return False


@contextmanager
def generating(load: Load) -> Iterator["subprocess.Popen[str]"]:
    """Start a generator, which begins at once and is killed at the end of the block."""
    popen = subprocess.Popen(
        [sys.executable, str(HERE / "load.py"), json.dumps(asdict(load))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {GENERATOR_CORE}),
    )
    assert popen.stdin is not None
    assert popen.stdout is not None
    try:
        popen.stdout.readline()
        popen.stdin.write("go\n")
        popen.stdin.flush()
        yield popen
    finally:
        popen.kill()
        popen.communicate()


def measured(generator: "subprocess.Popen[str]") -> Measured:
    """Wait for the end of a load and return its measurement."""
    out, _ = generator.communicate()
    if generator.returncode:
        raise SystemExit("the load generator failed, see above")
    return Measured(**json.loads(out))


def send(process: Process, **load: float) -> Measured:
    """Load a running server once; ``load`` are fields of :class:`Load`."""
    with generating(load_of(process, **load)) as generator:
        return measured(generator)


def load_of(process: Process, **load: float) -> Load:
    """Return a load of this server."""
    certificate = process.certificate
    return Load(
        port=process.port,
        path=PATH,
        pid=process.pid,
        handled=str(process.handled_file),
        spin=CORES > 1,
        authority=None if certificate is None else str(certificate.authority),
        **load,
    )


@contextmanager
def copied(store: Path, directory: Path) -> Iterator[Path]:
    """Make a data directory with a copy of a store's file, until the end of the block."""
    with tempfile.TemporaryDirectory(dir=directory, prefix="data") as place:
        shutil.copyfile(store, Path(place) / store.name)
        # The disk must not be busy with the copy during a measurement.
        os.sync()
        yield Path(place)
