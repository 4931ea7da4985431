"""Commands of the program without the half second that each start of an interpreter takes.

A server has loaded the program once. For each command it forks a process of its own, with its own
environment, directory and streams, so that nothing of a command is left to the next one.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Modules that most of the commands load.
_MODULES = (
    "sdk_trio.cli.settings",
    "sdk_trio.cli.doctor.run",
    "sdk_trio.cli.events",
    "sdk_trio.cli.notifications",
    "sdk_trio.cli.replication",
    "sdk_trio.cli.restore",
    "sdk_trio.cli.tenants",
    "sdk_trio.cli.trigger",
    "sdk_trio.runtime.replication",
)

_starting = threading.Lock()
_server: "_Server | None" = None


def run_command(
    words: Sequence[str], *, environ: Mapping[str, str], directory: Path, seconds: float
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m sdk_trio WORDS``; after ``seconds`` it is ended by SIGALRM."""
    global _server
    with _starting:
        if _server is None:
            _server = _Server()
    with tempfile.TemporaryDirectory() as streams:
        request = {
            "words": list(words),
            "environ": dict(environ),
            "directory": str(directory),
            "streams": streams,
            "seconds": seconds,
        }
        status = _server.ask(request, seconds + 10)
        out, err = (Path(streams, name).read_text() for name in ("1", "2"))
    return subprocess.CompletedProcess(list(words), status, out, err)


class _Server:
    """The process that forks; it ends when its standard input does."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._path = str(Path(self._directory.name, "s"))
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        atexit.register(self._end)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def ask(self, request: object, seconds: float) -> int:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(seconds)
            connection.connect(self._path)
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as answer:
                return int(answer.readline())

    def _end(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait(60)
        self._directory.cleanup()


def _serve(path: str) -> None:
    for name in _MODULES:
        __import__(name)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        os.write(1, b"ready\n")
        while True:
            ready, _, _ = select.select([listener, 0], [], [])
            if 0 in ready:
                return
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                os._exit(_attend(connection))
            connection.close()
            _bury()


def _bury() -> None:
    """Take note of attendants that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _attend(connection: socket.socket) -> int:
    """Fork the command, wait for its end, and answer with its status."""
    with connection, connection.makefile("rb") as lines:
        request = json.loads(lines.readline())
        pid = os.fork()
        if pid == 0:
            connection.close()
            _become(request)
        _, status = os.waitpid(pid, 0)
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    return 0


def _become(request: dict) -> None:
    for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        file = os.devnull if number == 0 else os.path.join(request["streams"], str(number))
        descriptor = os.open(file, mode | os.O_CREAT, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["directory"])
    sys.path[0] = request["directory"]  # as "python -m" has it
    signal.alarm(int(request["seconds"]) + 1)
    from sdk_trio.cli.main import main

    # An ordinary end, so that what measures coverage writes what it has.
    sys.exit(main(request["words"]))


if __name__ == "__main__":
    _serve(sys.argv[1])
