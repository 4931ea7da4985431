"""``Server:Processes``: the supervisor of the processes that receive and run deliveries.

The supervisor binds the addresses, holds the lock of the data directory, and runs the parts that
only one process may run. Each worker process is a new interpreter that inherits the sockets and has
its own connection to the store. All of them wait on the same sockets, so the kernel passes a
connection to a free process, and none waits for a process that hangs or has died.

When a process has ended, only the supervisor knows for sure that it no longer runs anything. So the
supervisor takes over its leases at once. Claimed events that had not begun are free for all
processes. Events that were running go to the successor, which first runs each one alone
(docs/adr/0023-quarantine.md). The successor starts at once, later ones after a growing pause. If no
process serves for long, the supervisor ends with an error, and the service manager decides.

A reload has two phases: all processes prepare the new settings, and commit them only if all can
(docs/adr/0057-several-processes.md).
"""

import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

import msgspec
import trio

from ..base.logs import get_logger
from ..config import Settings
from ..config.table import ROOT
from ..errors import NotRunningError, OptionsValidationError, Problem, StoreUnavailableError
from ..server.listen import listen
from ..server.tls import load_certificate
from ..webhooks import WebhookReceiver
from ..webhooks.receiver import Share
from .process_figures import ProcessFigures
from .restarts import STEADY_SECONDS, describe_end, pause_before, start_error
from .worker import REPORT_SECONDS, FromProcess, ProcessReport, WorkerAssignment
from .worker_process import WorkerCommand, WorkerProcess

_log = get_logger("runtime")

#: The seconds within which every process answers whether it can use new settings.
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

_SILENT_HINT = "its event loop is blocked; see process.silent and runtime.blocked in the log"

#: The seconds for the system to end a process that was killed.
KILLED_SECONDS: Final = 1.0


class Processes(ProcessFigures):
    """Starts, supervises and reloads the processes of ``Server:Processes``; used as a server.

    Args:
        settings: the settings at the start.
        command: the program of a process, and the number of processes.
        receiver: the receiver of this process, which holds the lock and has the store open.
    """

    def __init__(
        self, settings: Settings, command: WorkerCommand, receiver: WebhookReceiver
    ) -> None:
        super().__init__(command.count)
        #: Set when the last process has ended.
        self.ended: trio.Event = trio.Event()
        #: Deliveries that the processes have finished during their drains.
        self.drained: int = 0
        self._settings = settings
        self._command = command
        self._receiver = receiver
        self._sockets: list[socket.socket] = []
        self._owners = 0
        self._reloading = trio.Lock()
        self._first_ready = [trio.Event() for _ in range(command.count)]
        self._addresses: tuple[str, ...] = ()
        self._stopping = trio.Event()
        self._forced = False
        self._failed = False

    @property
    def failed(self) -> bool:
        """Whether a process ended with an error after the stop had begun."""
        return self._failed

    # -- start and stop
    # ------------------------------------------------------------------------------------

    async def run(
        self, *, task_status: trio.TaskStatus[tuple[str, ...]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Bind, start all processes, report the addresses, and replace processes until the stop.

        The first process starts alone, so that an error of the application is logged once.

        Raises:
            BindError: an address cannot be listened on.
            ProcessesError: the first process does not start, or processes end repeatedly.
        """
        # Loaded here as well, so that an invalid certificate is an error of the start.
        if self._settings.server.cert_file and self._settings.server.key_file:
            load_certificate(self._settings.server.cert_file, self._settings.server.key_file)
        self._sockets = listen(self._settings.server.bind, key="Sdk:Server:Bind")
        try:
            async with trio.open_nursery() as watching:
                watching.start_soon(self._watch)
                async with trio.open_nursery() as slots:
                    slots.start_soon(self._keep_running, 1, self._receiver.recovered > 0)
                    await self._first_ready[0].wait()
                    for number in range(2, self.count + 1):
                        slots.start_soon(self._keep_running, number, False)
                    for ready in self._first_ready:
                        await ready.wait()
                    task_status.started(self._addresses)
                watching.cancel_scope.cancel()
        finally:
            self._close_sockets()
            self.ended.set()

    def stop(self) -> None:
        """Have every process stop accepting, drain, and end."""
        self._stopping.set()
        # While a socket is open here, the kernel queues connections that no process accepts.
        self._close_sockets()
        for process in self._processes.values():
            process.signal(signal.SIGTERM)

    def force(self) -> None:
        """Have every process cancel its handlers and end."""
        self._forced = True
        if not self._stopping.is_set():
            self.stop()
        for process in self._processes.values():
            # Not the signal of the stop: the system may merge two equal signals.
            process.signal(signal.SIGINT)

    def prepare_certificate(self, cert_file: str, key_file: str) -> Callable[[], None]:
        """Check that a new certificate can be used. Each process loads it by itself."""
        load_certificate(cert_file, key_file)
        return _no_op

    def _close_sockets(self) -> None:
        for sock in self._sockets:
            sock.close()

    async def _keep_running(self, number: int, after_crash: bool) -> None:
        """Run a process with this number, and its successors, until the stop."""
        owner = self._new_owner()
        quick = 0
        while not self._stopping.is_set():
            # Not during a reload: it would be unclear which settings the process has.
            async with self._reloading:
                process = self._start(number, owner, after_crash)
            status = await self._run_process(process)
            if self._stopping.is_set():
                return
            served = process.served_seconds(trio.current_time())
            quick = 0 if served >= STEADY_SECONDS else quick + 1
            self._ends.count(number, status, served=served, others_steady=self._any_steady())
            owner = self._new_owner()
            after_crash = await self._take_over_leases(process.owner, owner)
            pause = pause_before(quick)
            _log.error(
                "process.ended",
                process=number,
                pid=process.popen.pid,
                ended=describe_end(status),
                served_seconds=round(served, 1),
                retry_in=round(pause, 1),
                **({"hint": _BUS_HINT} if status == -_BUS else {}),
            )
            with trio.move_on_after(pause):
                await self._stopping.wait()

    def _new_owner(self) -> str:
        """Return a name that begins with the supervisor's, so that its successor recognises it."""
        self._owners += 1
        return f"{self._receiver.owner}.{self._owners}"

    def _start(self, number: int, owner: str, after_crash: bool) -> WorkerProcess:
        assignment = WorkerAssignment(
            number=number,
            settings=self._settings,
            share=Share(singletons=False, owner=owner, after_crash=after_crash, first=number == 1),
            bind=tuple(f"fd:{sock.fileno()}" for sock in self._sockets),
            supervisor=os.getpid(),
            watchdog_seconds=self._command.watchdog,
        )
        process = WorkerProcess.start(self._command.arguments, assignment, owner, self._sockets)
        self._processes[number] = process
        return process

    async def _run_process(self, process: WorkerProcess) -> int:
        """Exchange messages with a process until it has ended; return its status."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send, process)
                nursery.start_soon(self._receive, process)
                try:
                    await process.ended.wait()
                finally:
                    with trio.move_on_after(self._end_seconds(process), shield=True):
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
        # Only the first process: later ones are replaced.
        if not self._first_ready[0].is_set() and not self._stopping.is_set():
            raise start_error(status, process.number, self.count)
        return status

    def _end_seconds(self, process: WorkerProcess) -> float:
        """Return the seconds that a process has after the drain's time is over or cut short."""
        if not process.ended.is_set() and not self._stopping.is_set():
            # Another part has failed, without a stop.
            process.signal(signal.SIGTERM)
        return self._command.forced_end_seconds if self._forced else self._command.end_seconds

    def _any_steady(self) -> bool:
        now = trio.current_time()
        return any(
            process.served_seconds(now) >= STEADY_SECONDS for process in self._processes.values()
        )

    async def _take_over_leases(self, dead: str, successor: str) -> bool:
        """Move the leases of a dead process; return whether any of its runs may have crashed it."""
        try:
            events = await self._receiver.take_over(dead, successor)
        except StoreUnavailableError as error:
            # The leases expire, and the successor still quarantines suspects.
            _log.store_unavailable(error)
            await trio.lowlevel.checkpoint()
            return True
        if events:
            _log.warning("webhook.recovered", events=events)
            self.wake()
        return events > 0

    async def _watch(self) -> None:
        """Log silent processes; kill those that block the others or exceed the watchdog's time.

        A process with a blocked event loop accepts no connections, so others get them, and its
        runs do not end. Only WatchdogSec of a service manager limits how long that may last. But if
        the process holds the store's write lock, no other process can write either.
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
                    process.silence_logged = False
                    process.holder_checks = 0
                    continue
                if not process.silence_logged:
                    process.silence_logged = True
                    _log.warning(
                        "process.silent",
                        process=process.number,
                        pid=process.popen.pid,
                        seconds=round(silent, 1),
                        hint="its event loop is blocked, or it gets no processor time",
                    )
                self._end_holder(process)
                watchdog = self._command.watchdog
                if watchdog is not None and silent >= max(watchdog, SILENT_SECONDS):
                    process.signal(signal.SIGKILL)

    def _end_holder(self, process: WorkerProcess) -> None:
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
                "write; a successor starts and retries its runs",
            )
            process.signal(signal.SIGKILL)

    # -- reload ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def prepared(self, settings: Settings) -> AsyncIterator[Callable[[Settings], None]]:
        """Have every process prepare for ``settings``; yield the function that commits them.

        The function takes the settings that are then in force, and neither fails nor waits. If it
        is not called, no process changes anything.

        Raises:
            OptionsValidationError: a process cannot use them, or does not answer.
        """
        committed = False
        async with self._reloading:
            with self._request() as (number, request):
                asked = tuple(request.pending)
                for process in asked:
                    process.post("prepare", number, settings)
                with trio.move_on_after(PREPARE_SECONDS):
                    await request.answered.wait()

            def commit(in_force: Settings) -> None:
                nonlocal committed
                committed = True
                self._settings = in_force
                for process in asked:
                    process.settings = in_force
                    process.post("commit", number)

            try:
                problems = [
                    *request.problems,
                    *(
                        Problem(ROOT, f"process {process.number} does not answer: {_SILENT_HINT}")
                        for process in request.pending
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

    async def _send(self, process: WorkerProcess) -> None:
        async for message in process.outgoing:
            try:
                await process.messages.send(message)
            except OSError:
                return  # the process has ended; its thread sets the event

    async def _receive(self, process: WorkerProcess) -> None:
        """Handle the messages of a process until it ends; kill it after an invalid one.

        The process runs the application's code, which may write into the wrong descriptor. Later
        messages could not be recognised then, so the process counts as crashed.
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
                    hint="killed and replaced; check whether the application writes into sockets "
                    "that it has not opened, or closes descriptors twice",
                )
                process.signal(signal.SIGKILL)
                return
            process.silent_seconds = 0.0
            if message.kind == "ready":
                process.ready_at = trio.current_time()
                self._addresses = tuple(message.addresses)
                self._handled_types = message.handled_types
                self._first_ready[process.number - 1].set()
                if process.settings is not self._settings:
                    # The settings changed while it started. If it cannot use them, it ends, and its
                    # successor starts with them.
                    process.post("prepare", 0, self._settings)
                    process.post("commit", 0)
            elif message.kind == "drained":
                self.drained += message.drained
            if message.report is not None:
                # The janitor runs in this process, but the others see which secrets match.
                before = _matches_of(process.report)
                for index, matches in _matches_of(message.report).items():
                    if matches > before.get(index, 0):
                        self._receiver.note_secret(index)
                process.report = message.report
            self._receiver.rejected.add_reported(message.causes, message.rejected)
            request = self._requests.get(message.number)
            if request is not None:
                request.problems += [Problem(*problem) for problem in message.problems]
                request.remove(process)


def _matches_of(report: ProcessReport) -> dict[int, float]:
    """Return how often each of the host's secrets matched in a process, by its index."""
    return {
        int(labels[0][1]): value
        for name, labels, value in report.samples
        if name == "sdk_webhook_secret_matches_total"
    }


def _no_op() -> None:
    """Do nothing: each process loads the certificate itself."""
