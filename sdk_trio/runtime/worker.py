"""One process of several: what its supervisor tells it, and what it tells its supervisor.

Both ends of a socket pair are here. The supervisor sends what it has pickled: settings with their
secrets, to a program that it has started itself. A process answers in MessagePack, because it runs
the application's code, and an answer must not be able to make its reader run anything.

A process lives no longer than its supervisor, which holds the lock of the data directory and the
listening sockets: Linux kills it, elsewhere the end of the socket pair ends it. A process that went
on would run events beside the next supervisor, which takes them over.
"""

import os
import pickle
import signal
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable, Collection, MutableMapping, Sequence
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

#: The seconds between two reports that nobody has asked for.
REPORT_SECONDS = 1.0

#: The first bytes of each message: a mark, and the message's length. What an application writes
#: between messages would else count as a length, and all that follows be waited for as one message.
_HEAD = struct.Struct("!4sI")
_MARK = b"sdkm"

#: prctl(2): the signal that this process gets when the thread that has started it ends.
_PR_SET_PDEATHSIG = 1


@attrs.frozen(kw_only=True)
class WorkerPlace:
    """The place of one process among several, as its supervisor gives it.

    ``settings`` are those in force, whatever their files say by now. ``bind`` are the inherited
    sockets, as ``fd:N``. ``asked_every`` is the time in seconds within which the store's thread has
    to answer for a report to be sent; None: nobody expects that.
    """

    number: int
    settings: Settings
    share: Share
    bind: tuple[str, ...]
    supervisor: int
    asked_every: float | None = None


class ProcessReport(msgspec.Struct):
    """The figures of one process at one moment; ``store_failing``: its writes fail or hang."""

    queue_depth: int = 0
    unfinished: int = 0
    deliveries: dict[str, int] = {}
    samples: list[tuple[str, list[tuple[str, str]], float]] = []
    held_workers: str | None = None
    store_failing: bool = False


class FromProcess(msgspec.Struct, omit_defaults=True):
    """A message of a process. ``kind``: ``ready``, ``prepared``, ``report`` or ``drained``.

    ``number`` is that of the question that it answers, 0 without one. ``causes`` counts
    all requests that were rejected since the last message that did; ``rejected`` are the newest.
    """

    kind: str
    number: int = 0
    addresses: list[str] = []
    handled_types: list[str] = []
    problems: list[tuple[str, str, str | None]] = []
    report: ProcessReport | None = None
    rejected: list[tuple[float, Rejection]] = []
    causes: dict[str, int] = {}
    drained: int = 0


class WorkingRuntime(Protocol):
    """The runtime of this process, as far as its supervisor has to do with it."""

    @property
    def receiver(self) -> "WebhookReceiver":
        """Return its receiver."""
        ...

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the receiver's real addresses."""
        ...

    @property
    def handled_types(self) -> Collection[str]:
        """Return the event types that have a handler."""
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
        """Return the call that puts new settings into force, or raise OptionsValidationError."""
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
    """Return a message behind its mark and its length."""
    return _HEAD.pack(_MARK, len(message)) + message


def encoded(message: FromProcess) -> bytes:
    """Return a message as bytes; rejections whose words cannot be written are left out."""
    try:
        return msgspec.msgpack.encode(message, enc_hook=str)
    except ValueError:  # half of a surrogate pair, which a stranger may claim
        return msgspec.msgpack.encode(msgspec.structs.replace(message, rejected=[]), enc_hook=str)


class MessageSocket:
    """Whole messages over one end of a socket pair, each behind its mark and its length."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = trio.socket.from_stdlib_socket(sock)
        self._buffer = bytearray()
        self._sending = trio.Lock()
        self._cut = False

    async def send(self, message: bytes) -> None:
        """Send one message; after one that was cancelled in the middle, none is sent any more.

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
            ValueError: what comes is no message.
        """
        while True:
            if len(self._buffer) >= _HEAD.size:
                mark, length = _HEAD.unpack_from(self._buffer)
                if mark != _MARK:
                    raise ValueError(f"{mark!r} begins no message")
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
    """This process's end of the socket pair: reads its place, then obeys and reports.

    Args:
        sock: the inherited end.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.place: WorkerPlace = self._read_place()
        self._prepared: dict[int, Callable[[], Reloaded]] = {}
        self._messages: MessageSocket | None = None
        self._rejected = 0
        self._causes: Counter[str] = Counter()

    @classmethod
    def claim(cls, environ: MutableMapping[str, str]) -> "SupervisorLink":
        """Take over the descriptor that the environment names, and read the place.

        The variable goes, and the descriptor is not inherited any further: a program that a handler
        starts must not be taken for a process of ours, nor keep this end open.
        """
        descriptor = int(environ.pop(SUPERVISOR_VARIABLE))
        os.set_inheritable(descriptor, False)
        link = cls(socket.socket(fileno=descriptor))
        for address in link.place.bind:
            os.set_inheritable(int(address.removeprefix("fd:")), False)
        die_with(link.place.supervisor)
        return link

    def _read_place(self) -> WorkerPlace:
        _, length = _HEAD.unpack(self._read_exactly(_HEAD.size))
        content = self._read_exactly(length)
        place: WorkerPlace = _unpickled(content)
        return place

    def _read_exactly(self, size: int) -> bytes:
        content = b""
        while len(content) < size:
            read = self._socket.recv(size - len(content))
            if not read:
                _end()  # the supervisor is gone before it has said anything
            content += read
        return content

    def request(self) -> None:
        """Do nothing: HUP is for the supervisor, which reloads all processes or none."""

    async def run(self, runtime: "WorkingRuntime", _notifier: object, _status: str) -> None:
        """Report that ``runtime`` serves, then obey and report, until cancelled.

        It ends the process at once if the supervisor is gone.
        """
        self._messages = messages = MessageSocket(self._socket)
        await self._tell(
            FromProcess(
                "ready",
                addresses=list(runtime.addresses),
                handled_types=list(runtime.handled_types),
            )
        )
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._report_regularly, runtime)
                while (message := await messages.receive()) is not None:
                    await self._obey(runtime, _unpickled(message))
            _end()
        finally:
            with trio.move_on_after(1, shield=True):
                report = runtime.report
                ended = FromProcess("drained", drained=report.drained if report else 0)
                await self._tell(self._with_rejected(runtime, ended))

    async def _obey(self, runtime: "WorkingRuntime", message: tuple[Any, ...]) -> None:
        kind, *arguments = message
        if kind == "prepare":
            number, settings = arguments
            problems: tuple[Problem, ...] = ()
            try:
                self._prepared = {number: runtime.prepare_reload(settings)}
            except OptionsValidationError as error:
                problems = error.problems
            told = [(problem.key, problem.message, problem.origin) for problem in problems]
            await self._tell(FromProcess("prepared", number=number, problems=told))
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
        every = self.place.asked_every
        while True:
            await trio.sleep(REPORT_SECONDS)
            if every is not None:
                # A store that answers with an error is alive: a restart does not fix a full disk.
                # One whose thread hangs keeps the report back, and the supervisor ends this.
                if not await self._try_store(runtime, every / 2):
                    continue
            elif _is_store_failing(runtime):
                # Without deliveries, which readiness may keep away, nothing else would find out
                # that it works again.
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
        await self._tell(self._with_rejected(runtime, message))

    def _with_rejected(self, runtime: "WorkingRuntime", message: FromProcess) -> FromProcess:
        """Add the rejections since the last message. The ring keeps fewer than may have come."""
        ring = runtime.receiver.rejected
        causes = Counter(ring.causes)
        message.rejected = ring.after(self._rejected)
        message.causes = dict(causes - self._causes)
        self._rejected, self._causes = ring.total, causes
        return message

    async def _tell(self, message: FromProcess) -> None:
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
    return pickle.loads(content)  # noqa: S301 - the supervisor has sent it, which started this


def die_with(supervisor: int) -> None:
    """Have the system end this process with the supervisor, whatever its code does then.

    Elsewhere than on Linux the end of the socket pair is noticed by the event loop alone.
    """
    if sys.platform == "linux":
        # Some sandboxes have no memory for ctypes, which wants some that is writable and executable
        # (MemoryDenyWriteExecute= of systemd, with an older libffi).
        with suppress(ImportError, MemoryError, OSError):
            import ctypes

            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have died before the wish was made: then another process is the parent already.
    if os.getppid() != supervisor:
        _end()


def _end() -> NoReturn:
    # As kill -9 would: whoever is gone has let go of the lock, and the next supervisor counts on
    # the end of every process of this one.
    os._exit(EXIT_FAILURE)
