"""Run the replicator: find its binary, start it, stop it with this process, read its output.

``trio.lowlevel.open_process`` starts a child from a worker thread that ends after ten idle seconds,
and on Linux "end the child with its parent" applies to the *thread* that started it. This module
therefore starts each child in a thread of its own, which waits for the child.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from ..base.logs import get_logger
from ..config.options.tenants import ReplicationOptions
from ..errors import ReplicatorError
from .control import ControlClient
from .plan import difference

#: The binary's name.
PROGRAM: Final = "litestream"

_KEY = "Sdk:MultiTenant:FileDb:Replication:ReplicatorPath"
_REMEDY = f"Run pip install 'sdk-trio[replication]', or set {_KEY} to the path of another binary"


def find_replicator(
    options: ReplicationOptions,
    *,
    environ: Mapping[str, str] | None = None,
    interpreter: str | None = None,
) -> str:
    """Return the absolute path of the replicator's binary.

    Use only ``ReplicatorPath`` if it is set. Otherwise search the interpreter's directory, where
    pip installs the binary, and then ``PATH``.

    Args:
        options: the replication options.
        environ: the environment whose ``PATH`` is searched; None: this process's.
        interpreter: the Python executable whose directory is searched; None: this process's.

    Raises:
        ReplicatorError: no executable binary was found; the message names the remedy.
    """
    if options.replicator_path is not None:
        chosen = os.path.abspath(options.replicator_path)
        if not (os.path.isfile(chosen) and os.access(chosen, os.X_OK)):
            raise ReplicatorError(
                f"the replicator {chosen} ({_KEY}) is not an executable file: correct the "
                "path, or remove the key to use the binary that sdk-trio[replication] installs"
            )
        return chosen
    beside = Path(sys.executable if interpreter is None else interpreter).parent
    path = (os.environ if environ is None else environ).get("PATH", "")
    # Search absolute directories only. shutil.which resolves empty and relative entries against the
    # working directory, where anyone may plant a program, and replaces an empty PATH by a default.
    places = os.pathsep.join([str(beside), *filter(os.path.isabs, path.split(os.pathsep))])
    found = shutil.which(PROGRAM, path=places)
    if found is None:
        raise ReplicatorError(
            f"the replicator '{PROGRAM}' is neither in {beside} nor on PATH. {_REMEDY}"
        )
    return os.path.abspath(found)


#: The replicator's log levels and ours; an unknown level becomes a warning.
LEVELS: Final = {
    "TRACE": "debug",
    "DEBUG": "debug",
    "INFO": "debug",
    "WARN": "warning",
    "ERROR": "error",
}

#: Errors of the replicator that are normal here: a host has no tenants yet.
_HARMLESS: Final = frozenset({"no databases specified in configuration"})

# The child's log lines become our structured events. It logs every compaction of every database at
# ``INFO``, so that level becomes our ``Debug``. While a target is down, it logs one line per second
# and database: the first few lines of each message are logged, the rest are counted.

#: The most lines of one message that are logged per :data:`WINDOW_SECONDS`.
LINES_A_WINDOW: Final = 3
WINDOW_SECONDS: Final = 60.0

#: The maximum number of distinct messages counted at a time, and of characters in a field.
MAX_MESSAGES: Final = 200
MAX_FIELD: Final = 500

#: Fields that repeat those of our own line.
_DROPPED = frozenset({"time", "level", "msg"})

_log = get_logger("replication")

#: Longer lines are truncated to this many bytes.
MAX_LINE_BYTES = 16_384

#: Seconds between two polls of a starting replicator.
_POLL_SECONDS: Final = 0.1

#: Time for a killed child to be reaped, in seconds.
KILL_SECONDS: Final = 5.0

_LAUNCHER = str(Path(__file__).resolve().with_name("launcher.py"))

# A limiter of its own: if the default one is full, children must still be started and reaped.
_THREADS = trio.CapacityLimiter(math.inf)


@attrs.frozen
class ChildLine:
    """One line of the replicator's output; ``level`` is one of our log levels.

    ``plain`` is true if the line was not JSON: a crash reports its reason in plain text.
    """

    level: str
    message: str
    fields: dict[str, str] = attrs.field(factory=dict)
    plain: bool = False


def read_line(line: bytes, secrets: Collection[str]) -> ChildLine:
    """Parse one line of the replicator's output, with all ``secrets`` masked."""
    text = line.decode("utf-8", "replace").strip()
    for secret in secrets:
        text = text.replace(secret, "***")
        # The same secret with JSON escapes.
        text = text.replace(json.dumps(secret)[1:-1], "***")
    try:
        document: Any = json.loads(text, object_pairs_hook=_first_of_each)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        # The last line before the replicator exits starts like this. Other plain lines are
        # warnings from the object stores' client libraries.
        level = "error" if text.startswith(("Error", "panic")) else "warning"
        return ChildLine(level, text[:MAX_FIELD], plain=True)
    message = str(document.get("msg", ""))[:MAX_FIELD]
    level = LEVELS.get(str(document.get("level")), "warning")
    return ChildLine(
        "debug" if message in _HARMLESS else level,
        message,
        {
            str(name)[:50]: _text(value)[:MAX_FIELD]
            for name, value in list(document.items())[:20]
            if name not in _DROPPED
        },
    )


def _first_of_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Keep the first of several fields with one name.

    Lines about compaction have a second field ``level``, which is not the level of the log.
    """
    return dict(reversed(pairs))


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


class LineLimiter:
    """Logs a few lines of each message per window, and counts the rest."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        self._window_ends = 0.0

    def admit(self, line: ChildLine, now: float) -> tuple[bool, dict[str, int]]:
        """Return whether to log ``line``, and the omitted lines per message of the last window.

        Args:
            line: the line.
            now: seconds of a monotonic clock.
        """
        omitted: dict[str, int] = {}
        if now >= self._window_ends:
            omitted = {m: n - LINES_A_WINDOW for m, n in self._seen.items() if n > LINES_A_WINDOW}
            self._seen.clear()
            self._window_ends = now + WINDOW_SECONDS
        if line.level == "debug":
            return True, omitted
        # Plain lines start with the time, so all differ; they share one count.
        key = "lines of libraries" if line.plain else line.message
        # We do not control these texts: a number or a path in them makes each line a new key.
        if key not in self._seen and len(self._seen) >= MAX_MESSAGES:
            key = "others"
        self._seen[key] = self._seen.get(key, 0) + 1
        return self._seen[key] <= LINES_A_WINDOW, omitted


def secret_values(options: ReplicationOptions, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values that must never be logged: those of the credentials' variables.

    Args:
        options: the replication options.
        environ: the environment to read the variables from.
    """
    names = (
        options.object_store.access_key_id_env_var,
        options.object_store.secret_access_key_env_var,
        options.blob_store.access_key_env_var,
    )
    # Longest first, because one secret may be a substring of another.
    return tuple(sorted({environ[n] for n in names if environ.get(n)}, key=len, reverse=True))


class ChildOutputReader:
    """Logs the output of one child, and keeps its last warnings in ``last_lines``.

    Args:
        secrets: values that are masked.
        limiter: limits repeated lines.
        last_lines: gets every warning, error and plain line.
    """

    def __init__(
        self, secrets: Sequence[str], limiter: LineLimiter, last_lines: "deque[str]"
    ) -> None:
        self._secrets = secrets
        self._limiter = limiter
        self._last_lines = last_lines

    async def run(self, output: trio.abc.ReceiveStream) -> None:
        """Read until the end of ``output`` and close it; if cancelled, close it at once."""
        pending = bytearray()
        async with output:
            async for piece in output:
                pending += piece
                *lines, rest = pending.split(b"\n")
                for line in lines:
                    self._take(bytes(line[:MAX_LINE_BYTES]))
                # Bound the memory that a line without a newline can use.
                pending = bytearray(rest[:MAX_LINE_BYTES])
        self._take(bytes(pending))

    def _take(self, raw: bytes) -> None:
        if not raw.strip():
            return
        line = read_line(raw, self._secrets)
        if line.level != "debug":
            error = line.fields.get("error")
            self._last_lines.append(f"{line.message}: {error}" if error else line.message)
        admitted, omitted = self._limiter.admit(line, trio.current_time())
        for message, count in omitted.items():
            _log.warning("replication.lines_omitted", message=message, count=count)
        if admitted:
            _write(line)


def _write(line: ChildLine) -> None:
    fields: dict[str, object] = {"message": line.message}
    if line.fields:
        fields["detail"] = line.fields
    {"debug": _log.debug, "warning": _log.warning, "error": _log.error}[line.level](
        "replication.replicator_said", **fields
    )


async def confirm(
    client: ControlClient, pid: int, wanted: Collection[str], *, seconds: float
) -> None:
    """Wait until the replicator with process id ``pid`` has exactly the databases ``wanted``.

    Answers from other processes are ignored: a replicator that is shutting down may still own the
    socket.

    Raises:
        ReplicatorError: the databases still differ after ``seconds``; the message lists how.
    """
    problem = "it has not answered"
    expected = frozenset(wanted)
    with trio.move_on_after(seconds):
        while True:
            try:
                if (await client.info()).pid == pid:
                    found = {each.path for each in await client.list_databases()}
                    if found == expected:
                        return
                    problem = difference(expected, found)
            except ReplicatorError as error:
                problem = str(error)
            await trio.sleep(_POLL_SECONDS)
    raise ReplicatorError(
        f"the replicator does not have the configured databases after {seconds:g} s: {problem}"
    )


class ChildMonitor:
    """Checks that a running replicator answers and still has the right databases.

    Args:
        client: queries the replicator.
        silent_checks: number of consecutive unanswered checks after which it counts as hung.
    """

    def __init__(self, client: ControlClient, *, silent_checks: int) -> None:
        self._client = client
        self._silent_limit = silent_checks
        self._silent = 0

    async def check(self, wanted: Collection[str]) -> None:
        """Check once.

        Raises:
            ReplicatorError: the replicator hangs, or its databases differ from ``wanted``.
        """
        problem: ReplicatorError
        try:
            found = {each.path for each in await self._client.list_databases()}
        except ReplicatorError as error:
            problem = error
        else:
            self._silent = 0
            if found != set(wanted):
                raise ReplicatorError(f"the replicator lost databases: {difference(wanted, found)}")
            return
        # A replicator that waits for its target lists nothing, but it works and must not be killed.
        self._silent = 0 if await self._client.answers() else self._silent + 1
        if self._silent >= self._silent_limit:
            raise ReplicatorError(f"the replicator hangs: {problem}") from problem


@attrs.define(eq=False)
class Child:
    """A child process. Exactly one reader may read ``output``, and must close it."""

    output: trio.abc.ReceiveStream
    ended: trio.Event
    _process: "subprocess.Popen[bytes]"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status, or the negated signal number that ended it; None while it runs."""
        return self._process.returncode

    @property
    def ending(self) -> str:
        """Describe how the child ended, for messages."""
        status = self.status
        if status is not None and status < 0:
            return f"signal {signal.Signals(-status).name}"
        return f"status {status}"

    def send(self, number: signal.Signals) -> None:
        """Send a signal; a no-op if the child has ended."""
        self._process.send_signal(number)


@attrs.define(eq=False)
class _Launch:
    """The thread's report: the process, or the error that prevented its start."""

    settled: trio.Event = attrs.field(factory=trio.Event)
    ended: trio.Event = attrs.field(factory=trio.Event)
    process: "subprocess.Popen[bytes] | None" = None
    failure: OSError | None = None


async def run_child(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    inherited: Sequence[int] = (),
    task_status: trio.TaskStatus[Child] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run ``command`` in its own process group until it ends; report the child via task_status.

    Args:
        command: an absolute path and its arguments.
        environment: all variables of the child.
        inherited: file descriptors that it keeps open.

    Raises:
        ReplicatorError: it cannot be started.

    Cancellation kills the child. To stop it gracefully, call :func:`end_child`.
    """
    reading, writing = os.pipe()
    launch = _Launch()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_start_and_wait, launch, command, environment, inherited, writing)
        try:
            await launch.settled.wait()
            if launch.process is not None:
                output = trio.lowlevel.FdStream(reading)
                task_status.started(Child(output, launch.ended, launch.process))
                await launch.ended.wait()
        finally:
            if launch.process is not None and not launch.ended.is_set():
                launch.process.kill()
    if launch.failure is not None:
        os.close(reading)
        reason = launch.failure.strerror
        raise ReplicatorError(f"{command[0]} cannot be started: {reason}") from launch.failure


async def end_child(child: Child, seconds: float) -> None:
    """Ask ``child`` to end (SIGTERM), and kill it after ``seconds``; 0 kills it at once.

    Cancellation only ends the wait: the child continues to shut down.
    """
    if seconds > 0:
        child.send(signal.SIGTERM)
    with trio.move_on_after(seconds):
        await child.ended.wait()
    if child.ended.is_set():
        return
    _log.warning(
        "replication.killed",
        pid=child.pid,
        after=seconds,
        hint="the next start syncs the changes that were not synced yet",
    )
    child.send(signal.SIGKILL)
    with trio.move_on_after(KILL_SECONDS):
        await child.ended.wait()


async def _start_and_wait(
    launch: _Launch,
    command: Sequence[str],
    environment: Mapping[str, str],
    inherited: Sequence[int],
    output: int,
) -> None:
    token = trio.lowlevel.current_trio_token()

    # PR_SET_PDEATHSIG is tied to the *thread* that started the child. Trio's open_process starts it
    # in a worker thread that ends after ten idle seconds, which would also end the child. So this
    # thread starts the child and stays alive until the child exits.
    def in_thread() -> None:
        try:
            launch.process = subprocess.Popen(
                # Isolated and without site packages: the launcher needs a few standard modules and
                # must start fast, whatever is installed in this environment.
                [sys.executable, "-I", "-S", _LAUNCHER, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                pass_fds=inherited,
                # Ctrl-C in a terminal signals the whole process group. We stop the child ourselves,
                # after its last sync.
                process_group=0,
            )
        except OSError as error:
            launch.failure = error
        finally:
            os.close(output)
            trio.from_thread.run_sync(launch.settled.set, trio_token=token)
        if launch.process is not None:
            # The thread that started the child must live as long as the child: the kernel ties
            # PDEATHSIG to it.
            launch.process.wait()

    try:
        await trio.to_thread.run_sync(in_thread, limiter=_THREADS)
    finally:
        launch.ended.set()
