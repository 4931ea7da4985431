"""A worker process and its messages to and from its supervisor, over a socket pair.

The supervisor sends pickled messages: settings with their secrets, to a program that it has started
itself. The process answers in MessagePack. It runs the application's code, and an answer must not
be able to run code in the supervisor.

A process ends with its supervisor, which holds the lock of the data directory and the listening
sockets. Linux kills it; elsewhere the end of the socket pair ends it. Otherwise it would run events
that the next supervisor takes over.
"""

import os
import pickle
import signal
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import attrs
import msgspec
import trio

from ..base.logs import get_logger
from ..base.telemetry import Sample
from ..config import Settings
from ..errors import EXIT_FAILURE, NotRunningError, OptionsValidationError, Problem, SdkError
from ..webhooks.receiver import Share
from ..webhooks.rejections import Rejection
from .presence import SUPERVISOR_VARIABLE
from .reload import Reloaded

if TYPE_CHECKING:
    from ..webhooks import DrainReport, WebhookReceiver

_log = get_logger("runtime")

#: The seconds between two regular reports.
REPORT_SECONDS = 1.0

#: The first bytes of each message: a mark, and the length of the message. The mark detects bytes
#: that the application has written into the socket by mistake; they would be read as a length.
_HEAD = struct.Struct("!4sI")
_MARK = b"sdkm"

#: prctl(2): the signal that this process gets when the thread that has started it ends.
_PR_SET_PDEATHSIG = 1


@attrs.frozen(kw_only=True)
class WorkerAssignment:
    """The first message to a process: its number, settings and share of the work.

    ``settings`` are those in force, even if their files have changed. ``bind`` are the inherited
    sockets, as ``fd:N``. With ``watchdog_seconds``, the process reports only while the store's
    thread answers within half that time; None: it always reports.
    """

    number: int
    settings: Settings
    share: Share
    bind: tuple[str, ...]
    supervisor: int
    watchdog_seconds: float | None = None


class ProcessReport(msgspec.Struct):
    """The metrics of one process; ``store_failing``: its writes fail or hang."""

    queue_depth: int = 0
    unfinished: int = 0
    deliveries: dict[str, int] = {}
    samples: list[tuple[str, list[tuple[str, str]], float]] = []
    held_workers: str | None = None
    store_failing: bool = False


class FromProcess(msgspec.Struct, omit_defaults=True):
    """A message of a process. ``kind``: ``ready``, ``prepared``, ``report`` or ``drained``.

    ``number`` is that of the request that it answers, or 0. ``causes`` counts all requests that
    were rejected since the last message with ``causes``; ``rejected`` are the newest of them.
    """

    kind: str
    number: int = 0
    addresses: list[str] = []
    handled_types: dict[str, str] = {}
    problems: list[tuple[str, str, str | None]] = []
    report: ProcessReport | None = None
    rejected: list[tuple[float, Rejection]] = []
    causes: dict[str, int] = {}
    drained: int = 0


class WorkingRuntime(Protocol):
    """The part of the runtime of this process that its supervisor uses."""

    @property
    def receiver(self) -> "WebhookReceiver":
        """Return its receiver."""
        ...

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the receiver's actual addresses."""
        ...

    @property
    def handled_types(self) -> Mapping[str, str]:
        """Return the event types that have a handler, each with its policies."""
        ...

    @property
    def unfinished(self) -> int:
        """Return how many events wait in memory or run."""
        ...

    @property
    def report(self) -> "DrainReport | None":
        """Return the counts of the shutdown; None until the end."""
        ...

    def own_samples(self) -> Sequence[Sample]:
        """Return the metrics of this process."""
        ...

    def prepare_reload(self, settings: Settings) -> Callable[[], Reloaded]:
        """Return a function that puts new settings into force, or raise OptionsValidationError."""
        ...

    def shut_down(self, reason: str) -> None:
        """Begin a graceful stop."""
        ...


def samples_of(report: ProcessReport) -> list[Sample]:
    """Return the metrics of a report."""
    return [
        Sample(name, tuple((key, text) for key, text in labels), value)
        for name, labels, value in report.samples
    ]


def framed(message: bytes) -> bytes:
    """Return a message with its mark and its length in front."""
    return _HEAD.pack(_MARK, len(message)) + message


def encoded(message: FromProcess) -> bytes:
    """Encode a message; leave out rejections with text that cannot be encoded."""
    try:
        return msgspec.msgpack.encode(message, enc_hook=str)
    except ValueError:  # a lone surrogate, which any client may send
        return msgspec.msgpack.encode(msgspec.structs.replace(message, rejected=[]), enc_hook=str)


class MessageSocket:
    """Sends and receives whole messages over one end of a socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = trio.socket.from_stdlib_socket(sock)
        self._buffer = bytearray()
        self._sending = trio.Lock()
        self._cut = False

    async def send(self, message: bytes) -> None:
        """Send one message. After a cancelled one, no further message is sent.

        Raises:
            OSError: the other end is gone.
        """
        async with self._sending:
            if self._cut:
                return
            self._cut = True
            left = memoryview(framed(message))
            while left:
                left = left[await self._socket.send(left) :]
            self._cut = False

    async def receive(self) -> bytes | None:
        """Return the next message; None when the other end is closed or gone.

        Raises:
            ValueError: the bytes are not a message.
        """
        while True:
            if len(self._buffer) >= _HEAD.size:
                mark, length = _HEAD.unpack_from(self._buffer)
                if mark != _MARK:
                    raise ValueError(f"{mark!r} is not the beginning of a message")
                end = _HEAD.size + length
                if len(self._buffer) >= end:
                    message = bytes(self._buffer[_HEAD.size : end])
                    del self._buffer[:end]
                    await trio.lowlevel.checkpoint()
                    return message
            try:
                read = await self._socket.recv(65536)
            except OSError:
                return None
            if not read:
                return None
            self._buffer += read

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


class SupervisorLink:
    """This process's end of the socket pair: reads the assignment, executes messages, reports.

    Args:
        sock: the inherited end.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.assignment: WorkerAssignment = self._read_assignment()
        self._prepared: dict[int, Callable[[], Reloaded]] = {}
        self._messages: MessageSocket | None = None
        self._rejected = 0
        self._causes: Counter[str] = Counter()

    @classmethod
    def claim(cls, environ: MutableMapping[str, str]) -> "SupervisorLink":
        """Take the descriptor from the environment, and read the assignment.

        The variable is removed, and the descriptor is not inherited further: a program that a
        handler starts must not look like a worker process, nor keep this end open.
        """
        descriptor = int(environ.pop(SUPERVISOR_VARIABLE))
        os.set_inheritable(descriptor, False)
        link = cls(socket.socket(fileno=descriptor))
        for address in link.assignment.bind:
            os.set_inheritable(int(address.removeprefix("fd:")), False)
        die_with(link.assignment.supervisor)
        return link

    def _read_assignment(self) -> WorkerAssignment:
        _, length = _HEAD.unpack(self._read_exactly(_HEAD.size))
        content = self._read_exactly(length)
        assignment: WorkerAssignment = _unpickled(content)
        return assignment

    def _read_exactly(self, size: int) -> bytes:
        content = b""
        while len(content) < size:
            read = self._socket.recv(size - len(content))
            if not read:
                _end()  # the supervisor ended before it sent the assignment
            content += read
        return content

    def request(self) -> None:
        """Do nothing: HUP is for the supervisor, which reloads all processes or none."""

    async def run(self, runtime: "WorkingRuntime", _notifier: object, _status: str) -> None:
        """Report that ``runtime`` serves, then execute messages and report, until cancelled.

        The process ends at once if the supervisor has ended.
        """
        self._messages = messages = MessageSocket(self._socket)
        await self._send(
            FromProcess(
                "ready",
                addresses=list(runtime.addresses),
                handled_types=dict(runtime.handled_types),
            )
        )
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._report_regularly, runtime)
                while (message := await messages.receive()) is not None:
                    await self._execute(runtime, _unpickled(message))
            _end()
        finally:
            with trio.move_on_after(1, shield=True):
                report = runtime.report
                ended = FromProcess("drained", drained=report.drained if report else 0)
                await self._send(self._with_rejected(runtime, ended))

    async def _execute(self, runtime: "WorkingRuntime", message: tuple[Any, ...]) -> None:
        kind, *arguments = message
        if kind == "prepare":
            number, settings = arguments
            problems: tuple[Problem, ...] = ()
            try:
                self._prepared = {number: runtime.prepare_reload(settings)}
            except OptionsValidationError as error:
                problems = error.problems
            reported = [(problem.key, problem.message, problem.origin) for problem in problems]
            await self._send(FromProcess("prepared", number=number, problems=reported))
        elif kind == "commit":
            commit = self._prepared.pop(arguments[0], None)
            if commit is None:
                runtime.shut_down("it cannot use the settings in force")
            else:
                commit()
        elif kind == "abort":
            self._prepared.clear()
        elif kind == "wake":
            runtime.receiver.wake()
        else:
            await self._report(runtime, arguments[0])

    async def _report_regularly(self, runtime: "WorkingRuntime") -> None:
        every = self.assignment.watchdog_seconds
        while True:
            await trio.sleep(REPORT_SECONDS)
            if every is not None:
                # A store that answers with an error is alive: a restart does not fix a full disk.
                # If its thread hangs, no report is sent, and the supervisor kills this process.
                if not await self._try_store(runtime, every / 2):
                    continue
            elif _is_store_failing(runtime):
                # Unready, the process may get no deliveries. Then only this write finds out that
                # the store works again.
                await self._try_store(runtime, REPORT_SECONDS)
            await self._report(runtime, 0)

    async def _try_store(self, runtime: "WorkingRuntime", seconds: float) -> bool:
        """Write to the store; return False if it has not answered in time."""
        with trio.move_on_after(seconds) as waiting:
            with suppress(SdkError):
                await runtime.receiver.store.write_checkpoint("watchdog", None)
        return not waiting.cancelled_caught

    async def _report(self, runtime: "WorkingRuntime", number: int) -> None:
        samples = [
            (sample.name, list(sample.labels), sample.value) for sample in runtime.own_samples()
        ]
        report = ProcessReport(
            runtime.receiver.queue_depth,
            runtime.unfinished,
            dict(runtime.receiver.counters.values),
            samples,
            runtime.receiver.held_workers,
            _is_store_failing(runtime),
        )
        message = FromProcess("report", number=number, report=report)
        await self._send(self._with_rejected(runtime, message))

    def _with_rejected(self, runtime: "WorkingRuntime", message: FromProcess) -> FromProcess:
        """Add the rejections since the last message; the ring keeps only the newest."""
        ring = runtime.receiver.rejected
        causes = Counter(ring.causes)
        message.rejected = ring.after(self._rejected)
        message.causes = dict(causes - self._causes)
        self._rejected, self._causes = ring.total, causes
        return message

    async def _send(self, message: FromProcess) -> None:
        if self._messages is not None:
            try:
                await self._messages.send(encoded(message))
            except OSError:
                _end()


def _is_store_failing(runtime: WorkingRuntime) -> bool:
    with suppress(NotRunningError):  # a drain has ended
        return runtime.receiver.store.failing
    return False


def _unpickled(content: bytes) -> Any:
    return pickle.loads(content)  # noqa: S301 - from the supervisor, which started this process


def die_with(supervisor: int) -> None:
    """Have the kernel kill this process when the supervisor ends.

    Only on Linux; elsewhere the event loop notices the end of the socket pair.
    """
    if sys.platform == "linux":
        # ctypes needs memory that is both writable and executable, which some sandboxes deny
        # (MemoryDenyWriteExecute= of systemd, with an older libffi).
        with suppress(ImportError, MemoryError, OSError):
            import ctypes

            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # If the supervisor ended before that call, this process already has another parent.
    if os.getppid() != supervisor:
        _end()


def _end() -> NoReturn:
    # As after kill -9: the lock is free, and the next supervisor relies on all processes of this
    # one having ended.
    os._exit(EXIT_FAILURE)
