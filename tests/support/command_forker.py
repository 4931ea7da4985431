"""Runs the program without the half second of an interpreter's start.

A server process loads the program once. For each command, and for the daemons of most tests, it
forks a process with its own environment, directory and streams, so that commands do not affect each
other. Tests of the start itself, and of the interpreter's end, start an interpreter.
"""

import atexit
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

#: Modules that most commands and a daemon load.
_MODULES = (
    "sdk_trio.__main__",
    "sdk_trio.cli.settings",
    "sdk_trio.cli.doctor.network",
    "sdk_trio.cli.doctor.run",
    "sdk_trio.cli.events",
    "sdk_trio.cli.notifications",
    "sdk_trio.cli.replication",
    "sdk_trio.cli.restore",
    "sdk_trio.cli.run",
    "sdk_trio.cli.storage",
    "sdk_trio.cli.tenants",
    "sdk_trio.cli.trigger",
    "sdk_trio.runtime.admin",
    "sdk_trio.runtime.replication",
    "sdk_trio.storage.sql.tenants",
    "sdk_trio.storage.sqlite_inbox",
    "encodings.idna",
)


def _read_at_start(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an interpreter or the system's loader reads at its start."""
    names = ("LD_", "LC_", "LANG", "PYTHON")
    return {name: text for name, text in environ.items() if name.startswith(names)}


#: If any other is set, the program is started as usual.
_HERE = _read_at_start(os.environ)

#: Responses of the server: the id of a started process, and later its status.
_NUMBER = struct.Struct("!q")

_starting = threading.Lock()
_server: "_Server | None" = None


class ForkedProgram:
    """A process of the program, with the part of ``subprocess.Popen`` that tests use."""

    def __init__(self, connection: socket.socket) -> None:
        from . import reaper  # the server runs this file without its package

        self.returncode: int | None = None
        self._connection = connection
        self.pid = self._read()
        reaper.register(self.pid)

    def _read(self) -> int:
        content = self._connection.recv(_NUMBER.size, socket.MSG_WAITALL)
        return int(_NUMBER.unpack(content)[0])

    def poll(self) -> int | None:
        """The status; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the status; after ``timeout`` seconds, TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("sdk_trio", timeout or 0.0)
            self.returncode = self._read()
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            # It may have ended, and the server has waited for it.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


#: A daemon, forked or started.
Program = ForkedProgram | subprocess.Popen[bytes]


def start_program(
    words: Sequence[str],
    *,
    environ: Mapping[str, str],
    directory: Path,
    stdout: IO[Any],
    stderr: IO[Any],
    umask: int = -1,
    seconds: int = 0,
    descriptors: tuple[int, int] | None = None,
) -> Program:
    """Start ``python -m sdk_trio WORDS``; end it by SIGALRM after ``seconds``, if given.

    ``descriptors``: the soft and hard limits of its open files; None: those of this process.
    """
    global _server
    if _read_at_start(environ) != _HERE:
        return subprocess.Popen(
            [sys.executable, "-m", "sdk_trio", *words],
            cwd=directory,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            umask=umask,
            preexec_fn=None if descriptors is None else partial(_limit, descriptors),
        )
    with _starting:
        if _server is None:
            _server = _Server()
    request = {
        "words": list(words),
        "environ": dict(environ),
        "directory": str(directory),
        "umask": umask,
        "seconds": seconds,
        "descriptors": descriptors,
    }
    return ForkedProgram(_server.ask(request, [stdout.fileno(), stderr.fileno()]))


def run_command(
    words: Sequence[str], *, environ: Mapping[str, str], directory: Path, seconds: float
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m sdk_trio WORDS`` to its end."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        program = start_program(
            words,
            environ=environ,
            directory=directory,
            stdout=out,
            stderr=err,
            seconds=int(seconds) + 1,
        )
        try:
            status = program.wait(seconds + 10)
        finally:
            program.kill()
        printed = []
        for stream in (out, err):
            stream.seek(0)
            printed.append(stream.read().decode())
    return subprocess.CompletedProcess(list(words), status, *printed)


def _limit(descriptors: Sequence[int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, tuple(descriptors))


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

    def ask(self, request: object, streams: Sequence[int]) -> socket.socket:
        """Send a request with the descriptors of its streams; return the response socket."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._path)
        socket.send_fds(connection, [b"\0"], streams)
        connection.sendall(json.dumps(request).encode() + b"\n")
        return connection

    def _end(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait(60)
        self._directory.cleanup()


def _serve(path: str) -> None:
    for name in _MODULES:
        __import__(name)
    # A forked process would copy the pages of what is loaded to collect garbage there in vain.
    gc.freeze()
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
            _reap()


def _reap() -> None:
    """Collect attendants that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _attend(connection: socket.socket) -> int:
    """Fork the program, send its id, wait for its end, and send its status."""
    with connection:
        _, streams, _, _ = socket.recv_fds(connection, 1, 2)
        with connection.makefile("rb") as lines:
            request = json.loads(lines.readline())
        pid = os.fork()
        if pid == 0:
            connection.close()
            _become(request, streams)
        for stream in streams:
            os.close(stream)
        # The client may have ended meanwhile.
        with suppress(BrokenPipeError):
            connection.sendall(_NUMBER.pack(pid))
        _, status = os.waitpid(pid, 0)
        with suppress(BrokenPipeError):
            connection.sendall(_NUMBER.pack(os.waitstatus_to_exitcode(status)))
    return 0


def _become(request: dict, streams: Sequence[int]) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((null, *streams)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environ"])
    time.tzset()
    if request["umask"] >= 0:
        os.umask(request["umask"])
    if request["descriptors"] is not None:
        _limit(request["descriptors"])
    os.chdir(request["directory"])
    sys.path[0] = request["directory"]  # as "python -m" has it
    signal.alarm(request["seconds"])
    from sdk_trio import __main__ as program

    sys.argv = [program.__file__, *request["words"]]
    _end(program.main())


def _end(status: int) -> None:
    """End as an interpreter does after its last statement, but leave the memory to the system.

    To free the loaded modules, their pages would be copied, which takes longer than most commands.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
    except OSError:
        sys.exit(status)  # the interpreter reports it
    os._exit(status)


if __name__ == "__main__":
    _serve(sys.argv[1])
