"""``Server:Processes``: the supervisor of the processes that receive and run deliveries.

The supervisor binds the addresses, holds the lock of the data directory, and does what one process
alone may do. Each process is begun by a fresh start of the interpreter, inherits the sockets, and
has its own connection to the store. All wait on the same sockets, so a connection goes to one that
is free, and none waits for a process that hangs or has died.

When a process has ended, nobody but the supervisor can know that it runs nothing any more. So it
takes the leases away at once: what had not begun is free for the others, and what ran is left to
the successor, which tries it alone first (docs/adr/0023-quarantine.md). A
successor begins at once, then after a growing pause; where no process serves for long, the
supervisor gives up with an error, and the service manager decides.

A reload asks all processes whether they can take the new settings, and only when all can, all are
told to (docs/adr/0057-several-processes.md).
"""

import os
import pickle
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from math import inf
from typing import Any, Final

import attrs
import msgspec
import trio

from ..admin.metrics import add_up, lasting
from ..base.executor import start_thread
from ..base.logs import get_logger
from ..base.telemetry import Check, Sample
from ..config import Settings
from ..config.table import ROOT
from ..errors import (
    EXIT_CONFIGURATION,
    EXIT_UNAVAILABLE,
    NotRunningError,
    OptionsValidationError,
    Problem,
    SdkError,
    StoreUnavailableError,
)
from ..server.listen import listen
from ..server.tls import load_certificate
from ..webhooks import WebhookReceiver
from ..webhooks.receiver import Share
from .presence import SUPERVISOR_VARIABLE
from .worker import (
    REPORT_SECONDS,
    FromProcess,
    MessageSocket,
    ProcessReport,
    WorkerPlace,
    samples_of,
)

_log = get_logger("runtime")

#: A process that has served for this long, in seconds, was no failure: the next one begins at once.
STEADY_SECONDS: Final = 5.0

#: One that ends earlier than this, in seconds, has served nobody.
USELESS_SECONDS: Final = 1.0

#: The pause before the second successor in a row, in seconds, doubled for each further one, and the
#: longest. An event that ends its process each time is dead after a few runs; what lasts longer is
#: a fault of the machine or of the application, which haste does not mend.
FIRST_PAUSE_SECONDS: Final = 0.5
LONGEST_PAUSE_SECONDS: Final = 30.0

#: Processes that end one after the other, while none serves steadily, before the supervisor ends.
MOST_ENDS: Final = 10

#: The seconds within which every process answers whether it can take new settings.
PREPARE_SECONDS: Final = 5.0

#: The seconds without a report after which a process counts as silent.
SILENT_SECONDS: Final = 5.0

#: The time between two checks counts as silence up to this many seconds. After a longer one the
#: supervisor itself did not run: the machine was suspended, or all its processes were stopped.
LONGEST_GAP_SECONDS: Final = 2.0

#: Checks in a row that find a silent process holding the store's write lock before it is killed.
HOLDER_CHECKS: Final = 2

#: The signal of a process that uses a mapped file which was truncated; Windows has none.
_BUS: Final = int(getattr(signal, "SIGBUS", 0))
_BUS_HINT = (
    "a file that it had mapped was truncated, such as the store's index (-shm), or the disk failed "
    "to read one; keep other programs away from the data directory, and check the disk (dmesg)"
)

_SILENT_HINT = "its event loop stands still; see process.silent and runtime.blocked in the log"

#: The seconds that a scrape or a probe waits for the figures of the processes. The last ones that
#: they sent by themselves are a second old at most.
ASK_SECONDS: Final = 0.5

#: The seconds for the system to end a process that was killed.
KILLED_SECONDS: Final = 1.0


class ProcessesError(SdkError):
    """The processes that receive deliveries do not start, or end again and again."""


class ProcessMisconfiguredError(ProcessesError):
    """A process has refused its settings, or the application's."""

    exit_code = EXIT_CONFIGURATION


class ProcessUnavailableError(ProcessesError):
    """A process lacks what it needs, such as its store."""

    exit_code = EXIT_UNAVAILABLE


_START_ERRORS: dict[int, type[ProcessesError]] = {
    kind.exit_code: kind for kind in (ProcessMisconfiguredError, ProcessUnavailableError)
}


@attrs.frozen
class WorkerCommand:
    """The program of a process, how many there are, and their bounds in seconds.

    ``end_seconds`` is the time after the end of the drain's time in which each names what it leaves
    behind (docs/adr/0031-bounded-shutdown.md), ``forced_end_seconds`` that after a
    second signal. ``watchdog``: a process that is silent for so long is ended; None: none is.
    """

    arguments: tuple[str, ...]
    count: int
    end_seconds: float
    forced_end_seconds: float
    watchdog: float | None = None


def process_count(settings: Settings) -> int:
    """Return ``Server:Processes``, with 0 as the number of processors that this process may use."""
    if settings.server.processes:
        return settings.server.processes
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def pause_before(ends: int) -> float:
    """Return the pause before a successor, in seconds; ``ends``: quick ends in a row before it."""
    if ends < 2:
        return 0.0
    return min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(ends - 2, 16))


def tell_end(status: int) -> str:
    """Return how a process ended, for people; ``status`` is that of :mod:`subprocess`."""
    if status >= 0:
        return f"with status {status}"
    with suppress(ValueError):
        return f"by {signal.Signals(-status).name}"
    return f"by signal {-status}"


@attrs.define(eq=False)
class _Process:
    """One process, from its start until it has ended."""

    number: int
    owner: str
    settings: Settings
    popen: "subprocess.Popen[bytes]"
    messages: MessageSocket
    out: "trio.MemorySendChannel[bytes]"
    outgoing: "trio.MemoryReceiveChannel[bytes]"
    ended: trio.Event = attrs.Factory(trio.Event)
    ready_at: float | None = None
    silent_seconds: float = 0.0
    holder_checks: int = 0
    report: ProcessReport = attrs.Factory(ProcessReport)
    told: bool = False

    def post(self, *message: Any) -> None:
        """Have a message sent; it waits without a bound, as only few are ever sent."""
        self.out.send_nowait(pickle.dumps(message))

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self.popen.send_signal(number)


@attrs.define(eq=False)
class _Question:
    """A question to processes: those that have not answered yet, and what the others said."""

    left: set[_Process]
    problems: list[Problem] = attrs.Factory(list)
    answered: trio.Event = attrs.Factory(trio.Event)

    def take(self, process: _Process) -> None:
        self.left.discard(process)
        if not self.left:
            self.answered.set()


class Processes:
    """Runs the processes of ``Server:Processes``; stands in the place of a server.

    Args:
        settings: those of the start.
        command: how a process is begun, and how many there are.
        receiver: this process's own, which holds the lock and has the store open.
    """

    def __init__(
        self, settings: Settings, command: WorkerCommand, receiver: WebhookReceiver
    ) -> None:
        #: Set when no process runs any more.
        self.ended: trio.Event = trio.Event()
        #: Deliveries that the processes have finished during their drains.
        self.drained: int = 0
        self._settings = settings
        self._command = command
        self._receiver = receiver
        self._sockets: list[socket.socket] = []
        self._processes: dict[int, _Process] = {}
        self._questions: dict[int, _Question] = {}
        self._asked = 0
        self._owners = 0
        self._reloading = trio.Lock()
        self._first_ready = [trio.Event() for _ in range(command.count)]
        self._addresses: tuple[str, ...] = ()
        self._handled_types: set[str] = set()
        self._stopping = trio.Event()
        self._forced = False
        self._ends = 0
        self._ends_in_all = 0
        self._failed = False
        # The counters of processes that have ended, so that no sum ever falls.
        self._past: list[Sample] = []
        self._past_deliveries: Counter[str] = Counter()

    # -- what is seen from outside ---------------------------------------------------------------

    @property
    def count(self) -> int:
        """The number of processes that there are to be."""
        return self._command.count

    @property
    def serving(self) -> int:
        """The number of processes that accept deliveries, as far as is known."""
        return sum(
            process.ready_at is not None and not process.told and not process.report.store_failing
            for process in self._processes.values()
        )

    @property
    def failed(self) -> bool:
        """Whether a process that was told to end has left something behind."""
        return self._failed

    @property
    def queue_depth(self) -> int:
        """The number of events that wait in the processes' memory."""
        return sum(process.report.queue_depth for process in self._processes.values())

    @property
    def held_workers(self) -> str | None:
        """The long runs that hold all workers of one of the processes; None if there are none."""
        held = (process.report.held_workers for process in self._processes.values())
        return next((text for text in held if text is not None), None)

    @property
    def unfinished(self) -> int:
        """The number of events that wait in the processes' memory or run there."""
        return sum(process.report.unfinished for process in self._processes.values())

    @property
    def deliveries(self) -> Counter[str]:
        """The results of deliveries in all processes, with their numbers."""
        found = Counter(self._past_deliveries)
        for process in self._processes.values():
            found.update(process.report.deliveries)
        return found

    @property
    def handled_types(self) -> set[str]:
        """The event types that have a handler, as a process has told."""
        return self._handled_types

    @property
    def circuits(self) -> list[int]:
        """The states of the processes' circuit breakers, as their metric has them."""
        return [
            int(value)
            for process in self._processes.values()
            for name, _, value in process.report.samples
            if name == "sdk_client_circuit_state"
        ]

    def add_samples(self, own: Sequence[Sample]) -> tuple[Sample, ...]:
        """Return the metrics of this process and of all others, added up by their rules."""
        others = [samples_of(process.report) for process in self._processes.values()]
        return (
            *add_up([own, self._past, *others]),
            Sample("sdk_processes", (("state", "wanted"),), self.count),
            Sample("sdk_processes", (("state", "serving"),), self.serving),
            Sample("sdk_process_ends_total", (), self._ends_in_all),
        )

    def check(self) -> Check:
        """Return whether any process serves; fewer than wanted are a degradation."""
        serving = self.serving
        detail = f"{serving} of {self.count} serve"
        return Check("processes", serving > 0, detail, degraded=serving < self.count)

    def wake(self) -> None:
        """Have the processes look into the store at once."""
        for process in self._processes.values():
            process.post("wake")

    async def refresh(self) -> None:
        """Ask the processes for their figures, and wait for these a moment."""
        with self._question() as (number, question):
            for process in question.left:
                process.post("report", number)
            with trio.move_on_after(ASK_SECONDS):
                await question.answered.wait()

    # -- life ------------------------------------------------------------------------------------

    async def run(
        self, *, task_status: trio.TaskStatus[tuple[str, ...]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Bind, begin all processes, report the addresses, and keep the processes until the stop.

        The first one begins alone: what is wrong with the application is said once.

        Raises:
            BindError: an address cannot be listened on.
            ProcessesError: a process does not start, or processes end again and again.
        """
        # Loaded here as well: a certificate that is wrong is an error of the start.
        if self._settings.server.cert_file and self._settings.server.key_file:
            load_certificate(self._settings.server.cert_file, self._settings.server.key_file)
        self._sockets = listen(self._settings.server.bind, key="Sdk:Server:Bind")
        try:
            async with trio.open_nursery() as watching:
                watching.start_soon(self._watch)
                async with trio.open_nursery() as places:
                    places.start_soon(self._keep, 1, self._receiver.recovered > 0)
                    await self._first_ready[0].wait()
                    for number in range(2, self.count + 1):
                        places.start_soon(self._keep, number, False)
                    for ready in self._first_ready:
                        await ready.wait()
                    task_status.started(self._addresses)
                watching.cancel_scope.cancel()
        finally:
            self._close_sockets()
            self.ended.set()

    def stop(self) -> None:
        """Have every process accept nothing more, drain, and end."""
        self._stopping.set()
        # A socket that is open here would take connections that nobody accepts.
        self._close_sockets()
        for process in self._processes.values():
            process.signal(signal.SIGTERM)

    def force(self) -> None:
        """Have every process cancel its handlers and end."""
        self._forced = True
        if not self._stopping.is_set():
            self.stop()
        for process in self._processes.values():
            # Another signal than that of the stop: of two equal ones the system may deliver one.
            process.signal(signal.SIGINT)

    def prepare_certificate(self, cert_file: str, key_file: str) -> Callable[[], None]:
        """Load a new certificate to see whether it can be used; the processes use it."""
        load_certificate(cert_file, key_file)
        return _nothing

    def _close_sockets(self) -> None:
        for sock in self._sockets:
            sock.close()

    async def _keep(self, number: int, after_crash: bool) -> None:
        """Keep the process of one place running until the stop."""
        owner = self._new_owner()
        quick = 0
        while not self._stopping.is_set():
            # A process that begins during a reload would have neither the old nor the new settings
            # for sure.
            async with self._reloading:
                process = self._begin(number, owner, after_crash)
            status = await self._attend(process)
            if self._stopping.is_set():
                return
            served = 0.0
            if process.ready_at is not None:
                served = trio.current_time() - process.ready_at
            quick = 0 if served >= STEADY_SECONDS else quick + 1
            self._count_end(process, status, served)
            owner = self._new_owner()
            after_crash = await self._take_over(process.owner, owner)
            pause = pause_before(quick)
            _log.error(
                "process.ended",
                process=number,
                pid=process.popen.pid,
                ended=tell_end(status),
                served_seconds=round(served, 1),
                retry_in=round(pause, 1),
                **({"hint": _BUS_HINT} if status == -_BUS else {}),
            )
            with trio.move_on_after(pause):
                await self._stopping.wait()

    def _new_owner(self) -> str:
        """Return a name that says whose process it is, so that the next supervisor knows it."""
        self._owners += 1
        return f"{self._receiver.owner}.{self._owners}"

    def _begin(self, number: int, owner: str, after_crash: bool) -> _Process:
        """Start a process. It must be called in the main thread, which lasts as long as this one.

        The wish to die with the supervisor (prctl(2), PR_SET_PDEATHSIG) is tied to the thread that
        has started the process.
        """
        ours, theirs = socket.socketpair()
        descriptors = [sock.fileno() for sock in self._sockets]
        place = WorkerPlace(
            number=number,
            settings=self._settings,
            share=Share(singletons=False, owner=owner, after_crash=after_crash, first=number == 1),
            bind=tuple(f"fd:{descriptor}" for descriptor in descriptors),
            supervisor=os.getpid(),
            asked_every=self._command.watchdog,
        )
        # A process inherits the mask: a HUP in the first instant of its Python waits there until it
        # ignores the signal.
        with theirs, _hangup_blocked():
            popen = subprocess.Popen(
                self._command.arguments,
                stdin=subprocess.DEVNULL,
                env={**os.environ, SUPERVISOR_VARIABLE: str(theirs.fileno())},
                pass_fds=(theirs.fileno(), *descriptors),
                # Ctrl-C is a signal to all of a terminal's foreground group; the supervisor passes
                # it on in its own way.
                process_group=0,
            )
        out, outgoing = trio.open_memory_channel[bytes](inf)
        process = _Process(number, owner, self._settings, popen, MessageSocket(ours), out, outgoing)
        out.send_nowait(pickle.dumps(place))
        token = trio.lowlevel.current_trio_token()
        # A thread of our own for each, as all of them wait for as long as the processes run.
        start_thread(_wait, popen, token, process.ended, name="sdk_trio-process")
        self._processes[number] = process
        return process

    async def _attend(self, process: _Process) -> int:
        """Talk with a process until it has ended, and return its status."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send, process)
                nursery.start_soon(self._receive, process)
                try:
                    await process.ended.wait()
                finally:
                    with trio.move_on_after(self._patience(process), shield=True):
                        await process.ended.wait()
                    if not process.ended.is_set():
                        process.signal(signal.SIGKILL)
                    with trio.move_on_after(KILLED_SECONDS, shield=True):
                        await process.ended.wait()
                nursery.cancel_scope.cancel()
        finally:
            process.messages.close()
            self._forget(process)
            if (
                self._stopping.is_set()
                and process.ready_at is not None
                and process.popen.returncode
            ):
                self._failed = True
        status = process.popen.returncode
        # The first process of all; what ends later is replaced.
        if not self._first_ready[0].is_set() and not self._stopping.is_set():
            raise _START_ERRORS.get(status, ProcessesError)(
                f"process {process.number} of {self.count} ended {tell_end(status)} before it "
                "served; what it said about it stands above"
            )
        return status

    def _patience(self, process: _Process) -> float:
        """Return the seconds that a process has when the drain's time is over, or is cut short."""
        if not process.ended.is_set() and not self._stopping.is_set():
            # Another part has failed, and nothing was said of a stop.
            process.signal(signal.SIGTERM)
        return self._command.forced_end_seconds if self._forced else self._command.end_seconds

    def _forget(self, process: _Process) -> None:
        self._processes.pop(process.number, None)
        self._past = add_up([self._past, lasting(samples_of(process.report))])
        self._past_deliveries.update(process.report.deliveries)
        for question in self._questions.values():
            question.take(process)

    def _count_end(self, process: _Process, status: int, served: float) -> None:
        """Count the end of a process that nobody has asked for.

        Raises:
            ProcessesError: so many ended while none served steadily.
        """
        self._ends_in_all += 1
        now = trio.current_time()
        steady = served >= USELESS_SECONDS or any(
            other.ready_at is not None and now - other.ready_at >= STEADY_SECONDS
            for other in self._processes.values()
        )
        self._ends = 0 if steady else self._ends + 1
        if self._ends >= MOST_ENDS:
            raise ProcessesError(
                f"{self._ends} processes ended one after the other, and none has served for "
                f"{STEADY_SECONDS:g} s; the last one, process {process.number}, ended "
                f"{tell_end(status)}. Look at what it said before, and at 'process.ended' above"
            )

    async def _take_over(self, dead: str, heir: str) -> bool:
        """Take the leases of a dead process away; say whether its successor has to be careful."""
        try:
            held = await self._receiver.take_over(dead, heir)
        except StoreUnavailableError as error:
            # The leases end by themselves, and the successor looks for suspects all the same.
            _log.store_unavailable(error)
            await trio.lowlevel.checkpoint()
            return True
        if held:
            _log.warning("webhook.recovered", events=held)
            self.wake()
        return held > 0

    async def _watch(self) -> None:
        """Report silent processes, and kill those that stop the others or outlast the watchdog.

        A process whose event loop stands still accepts nothing, and others take its connections;
        what runs in it does not end. Only a service manager's WatchdogSec says for how long that
        may last. But if it holds the store's write lock, no other process can write either.
        """
        checked_at = trio.current_time()
        while True:
            await trio.sleep(REPORT_SECONDS)
            passed = min(trio.current_time() - checked_at, LONGEST_GAP_SECONDS)
            checked_at = trio.current_time()
            for process in self._processes.values():
                if process.ready_at is not None:
                    process.silent_seconds += passed
                silent = process.silent_seconds
                if silent < SILENT_SECONDS:
                    process.told = False
                    process.holder_checks = 0
                    continue
                if not process.told:
                    process.told = True
                    _log.warning(
                        "process.silent",
                        process=process.number,
                        pid=process.popen.pid,
                        seconds=round(silent, 1),
                        hint="its event loop stands still, or it gets no processor",
                    )
                self._end_holder(process)
                watchdog = self._command.watchdog
                if watchdog is not None and silent >= max(watchdog, SILENT_SECONDS):
                    process.signal(signal.SIGKILL)

    def _end_holder(self, process: _Process) -> None:
        """Kill a silent process that holds the store's write lock."""
        holder = None
        with suppress(NotRunningError):  # a stop
            holder = self._receiver.store.writing_process()
        if holder != process.popen.pid:
            process.holder_checks = 0
            return
        process.holder_checks += 1
        if process.holder_checks == HOLDER_CHECKS:
            _log.error(
                "process.killed",
                process=process.number,
                pid=process.popen.pid,
                seconds=round(process.silent_seconds, 1),
                hint="it was silent and held the store's write lock, so no other process could "
                "write; a successor starts, and what it ran is tried again",
            )
            process.signal(signal.SIGKILL)

    # -- reload ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def prepared(self, settings: Settings) -> AsyncIterator[Callable[[Settings], None]]:
        """Have every process prepare for ``settings``; lend the call that puts them into force.

        The call takes the settings that are then in force, and neither fails nor waits. Without it,
        no process changes anything.

        Raises:
            OptionsValidationError: a process cannot use them, or does not answer.
        """
        committed = False
        async with self._reloading:
            with self._question() as (number, question):
                asked = tuple(question.left)
                for process in asked:
                    process.post("prepare", number, settings)
                with trio.move_on_after(PREPARE_SECONDS):
                    await question.answered.wait()

            def commit(in_force: Settings) -> None:
                nonlocal committed
                committed = True
                self._settings = in_force
                for process in asked:
                    process.settings = in_force
                    process.post("commit", number)

            try:
                problems = [
                    *question.problems,
                    *(
                        Problem(ROOT, f"process {process.number} does not answer: {_SILENT_HINT}")
                        for process in question.left
                    ),
                ]
                if problems:
                    raise OptionsValidationError(tuple(dict.fromkeys(problems)))
                yield commit
            finally:
                if not committed:
                    for process in asked:
                        process.post("abort")

    # -- messages --------------------------------------------------------------------------------

    async def _send(self, process: _Process) -> None:
        async for message in process.outgoing:
            try:
                await process.messages.send(message)
            except OSError:
                return  # it has ended, which its thread reports

    async def _receive(self, process: _Process) -> None:
        """Take what a process says until it ends; one that says what nobody understands is ended.

        The application's code runs there, and may write into a descriptor that is not its own. What
        comes behind that cannot be told from messages, so the process counts as crashed.
        """
        while True:
            try:
                content = await process.messages.receive()
                if content is None:
                    return
                message = msgspec.msgpack.decode(content, type=FromProcess)
            except (ValueError, RecursionError) as error:
                _log.error(
                    "process.garbled",
                    process=process.number,
                    pid=process.popen.pid,
                    error=str(error),
                    hint="killed and replaced; does the application write into sockets it has not "
                    "opened, or close descriptors twice?",
                )
                process.signal(signal.SIGKILL)
                return
            process.silent_seconds = 0.0
            if message.kind == "ready":
                process.ready_at = trio.current_time()
                self._addresses = tuple(message.addresses)
                self._handled_types = set(message.handled_types)
                self._first_ready[process.number - 1].set()
                if process.settings is not self._settings:
                    # They were exchanged while it started. If it cannot take them, it ends, and its
                    # successor begins with them.
                    process.post("prepare", 0, self._settings)
                    process.post("commit", 0)
            elif message.kind == "drained":
                self.drained += message.drained
            if message.report is not None:
                # The janitor is here, and the secrets that match are known there.
                before = _matches_of(process.report)
                for index, matches in _matches_of(message.report).items():
                    if matches > before.get(index, 0):
                        self._receiver.note_secret(index)
                process.report = message.report
            self._receiver.rejected.add_reported(message.causes, message.rejected)
            question = self._questions.get(message.number)
            if question is not None:
                question.problems += [Problem(*problem) for problem in message.problems]
                question.take(process)

    @contextmanager
    def _question(self) -> Iterator[tuple[int, _Question]]:
        """Ask something of every process that serves; the answers count within the block."""
        self._asked += 1
        number = self._asked
        asked = {process for process in self._processes.values() if process.ready_at is not None}
        question = self._questions[number] = _Question(asked)
        if not asked:
            question.answered.set()
        try:
            yield number, question
        finally:
            del self._questions[number]


@contextmanager
def _hangup_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(
    popen: "subprocess.Popen[bytes]", token: trio.lowlevel.TrioToken, ended: trio.Event
) -> None:
    popen.wait()
    with suppress(trio.RunFinishedError):
        token.run_sync_soon(ended.set)


def _matches_of(report: ProcessReport) -> dict[int, float]:
    """Return the matches of each of the host's secrets in a process."""
    return {
        int(labels[0][1]): value
        for name, labels, value in report.samples
        if name == "sdk_webhook_secret_matches_total"
    }


def _nothing() -> None:
    """Do nothing: each process does it for itself."""
