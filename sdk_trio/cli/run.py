"""``run``: the receiver as a daemon that reloads its settings on request."""

from __future__ import annotations

import gc
import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

from ..errors import EXIT_FAILURE, OptionsValidationError, Problem
from .parse import (
    REFERENCE,
    UsageError,
    add_forward_to,
    add_port,
    describing,
    forward_settings,
    port_settings,
)

if not describing():
    import trio

    from ..base import logs
    from ..base.private_files import keep_files_private
    from ..config import Loaded, Settings
    from ..config.sources import KeyFileReader, key_directories, key_files
    from ..config.table import ROOT
    from ..runtime import Runtime, Started
    from ..runtime.presence import (
        SETTINGS_SECRET,
        SUPERVISOR_VARIABLE,
        Presence,
        announced,
    )
    from ..runtime.systemd import (
        ServiceEnvironment,
        SystemdNotifier,
        claim_environment,
        with_inherited_sockets,
    )
    from ..server.listen import raise_descriptor_limit
    from ..webhooks.signed_request import own_url
    from .application import import_part, import_registry
    from .main import release_collector, release_interrupt
    from .settings import read
    from .shutdown import (
        SUPERVISOR_BOUNDS,
        WORKER_BOUNDS,
        WORKER_END_SECONDS,
        WORKER_FORCED_END_SECONDS,
        BoundedShutdown,
        Bounds,
    )

    _log = logs.get_logger("cli")
    _runtime_log = logs.get_logger("runtime")

if TYPE_CHECKING:
    from ..runtime.processes import Processes
    from ..tenants.upgrade import HostUpgrade, Quiescence
    from ..webhooks import WebhookReceiver

# A missing file is refused at a reload: its settings would silently become the defaults.
_VANISHED = "the file was removed: put it back, or restart without it"
_EMPTIED = "the file no longer has settings: put them back, or restart without them"


class SettingsReloader:
    """Runs one reload at a time; a request during a reload causes another one after it.

    Args:
        read: reads all layers again; called in a thread.
        complete: creates the settings of a start from the layers, or raises OptionsValidationError;
            called in a thread.
        environ: the environment, which names the directory of credentials.
    """

    def __init__(
        self,
        read: Callable[[], Loaded],
        complete: Callable[[Loaded], Settings],
        *,
        environ: dict[str, str] | None = None,
    ) -> None:
        self._read = read
        self._complete = complete
        self._directories = key_directories(os.environ if environ is None else environ)
        self._key_files = KeyFileReader()
        self._wanted = trio.Event()
        self._files: tuple[str, ...] = ()
        # Recorded before the settings are first read, so that a change in between is noticed later.
        self._key_files.read(self._directories)

    def began_with(self, loaded: Loaded) -> None:
        """Remember the files of the current settings; none of them may be removed."""
        self._files = _with_settings(loaded)

    def request(self) -> None:
        """Request a reload, as HUP does; several requests before it starts are merged."""
        # An event instead of a queue: the files must be read after the last request.
        self._wanted.set()

    async def run(self, runtime: Runtime, notifier: SystemdNotifier, status: str) -> None:
        """Reload at each request and when a key file has changed, until cancelled.

        On cancellation, either all of the new settings apply or none of them.
        ``status`` is the text that the service manager shows after each reload.
        """
        await self._changed_files(runtime)
        while True:
            # The poll also limits the wait for a request, so that one task does both and reloads
            # never overlap.
            asked = await self._wait(runtime.settings.server.key_file_poll_seconds)
            files = await self._changed_files(runtime)
            if not asked and not files:
                continue
            # A reload during a drain would open parts that are being closed.
            if not runtime.ready:
                _runtime_log.warning("runtime.reload_ignored", hint="the daemon is stopping")
                continue
            await notifier.reloading()
            await self._reload(runtime, cause="signal" if asked else "key files", files=files)
            if runtime.ready:
                await notifier.ready(status)

    async def _wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` (0: unlimited) for a request; return whether one came."""
        with trio.move_on_after(seconds or float("inf")):
            await self._wanted.wait()
        asked = self._wanted.is_set()
        self._wanted = trio.Event()
        return asked

    async def _changed_files(self, runtime: Runtime) -> tuple[str, ...]:
        places = (*self._directories, *key_files(runtime.settings))
        # Abandoned on cancel, so that a hanging file system cannot delay a stop. Otherwise it is
        # awaited, so there is never more than one such thread.
        return await trio.to_thread.run_sync(self._key_files.read, places, abandon_on_cancel=True)

    async def _reload(self, runtime: Runtime, *, cause: str, files: tuple[str, ...]) -> None:
        try:
            loaded, settings = await trio.to_thread.run_sync(self._read_all, abandon_on_cancel=True)
            # All or nothing: reading and preparing may fail, and nothing has been applied so far.
            done = await runtime.reload_everywhere(settings)
            self.began_with(loaded)
            if runtime.settings.admin.enabled:
                runtime.administrator.console.origins = loaded.origins
        except OptionsValidationError as error:
            _report_failure(error.problems, cause=cause, files=files)
            await trio.lowlevel.checkpoint()
            return
        for warning in loaded.warnings:
            _runtime_log.warning("config.warning", key=warning.key, message=str(warning))
        # A warning, because a key that needs a restart looks like one without effect.
        log = _runtime_log.warning if done.restart else _runtime_log.info
        log(
            "runtime.reloaded",
            cause=cause,
            files=files,
            changed=done.applied,
            restart_needed_for=done.restart,
        )

    def _read_all(self) -> tuple[Loaded, Settings]:
        loaded = self._read()
        if any(file not in loaded.files and os.path.exists(file) for file in self._files):
            # A file may just have been replaced, or belong to another Environment now, so
            # everything is read again.
            loaded = self._read()
        faulty = {problem.origin for problem in loaded.problems}
        # A file that was not named may be missing at the start, but its removal later is an
        # accident: its settings would become defaults, and a list of allowed sources would become
        # "all".
        lost = [file for file in self._files if file not in {*faulty, *_with_settings(loaded)}]
        gone = tuple(
            Problem(ROOT, _EMPTIED if file in loaded.files else _VANISHED, file)
            for file in lost
            if file in loaded.files or not os.path.exists(file)
        )
        if gone:
            raise OptionsValidationError((*gone, *loaded.problems))
        return loaded, self._complete(loaded)


def _with_settings(loaded: Loaded) -> tuple[str, ...]:
    """Return the files with settings."""
    empty = {warning.origin for warning in loaded.warnings if warning.key == ROOT}
    return tuple(file for file in loaded.files if file not in empty)


def _report_failure(problems: tuple[Problem, ...], *, cause: str, files: tuple[str, ...]) -> None:
    _runtime_log.error(
        "runtime.reload_failed",
        cause=cause,
        files=files,
        problems=[str(problem) for problem in problems],
        hint="the current settings stay; fix the listed problems, and send HUP",
    )


class Reloads(Protocol):
    """The part that applies new settings while a runtime runs."""

    def request(self) -> None:
        """Record a HUP signal."""
        ...

    async def run(self, runtime: Runtime, notifier: SystemdNotifier, status: str) -> None:
        """Reload on request, until cancelled."""
        ...


Announce: TypeAlias = "Callable[[Started], AbstractContextManager[None]]"

#: The signals that end a daemon; Windows has no HUP.
_ENDING = (signal.SIGTERM, signal.SIGINT)
_HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)

#: The seconds for which a start keeps extending the service manager's timeout. After that the
#: manager ends a start that hangs. An upgrade from a single tenant has MaxRunDuration in addition.
START_SECONDS = 300.0


#: The polling interval for the number of serving processes, in seconds.
SHOW_SECONDS = 1.0


def run_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``run``."""
    parser.add_argument(
        "--app",
        metavar=REFERENCE,
        help="the HandlerRegistry to run, imported from the current directory as uvicorn does; "
        "without it every event is parked, or forwarded",
    )
    add_port(parser)
    add_forward_to(parser)
    parser.add_argument(
        "--standalone", action="store_true", help="only the receiver: no AccessToken is needed"
    )
    parser.add_argument(
        "--upgrade-host",
        metavar=REFERENCE,
        help="the application's HostUpgrade, for the upgrade from a single tenant at the start",
    )


def run(arguments: Namespace) -> int:
    """Run until TERM or INT; return 0 after a graceful stop, 128 + signal after a forced one.

    HUP, or a changed key file, applies new settings; see the how-to pages.

    Raises:
        SdkError: it could not start; every problem of the settings at once.
    """
    # Before any file is created: the umask applies to the store, its logs and handlers' files.
    keep_files_private()
    if SUPERVISOR_VARIABLE in os.environ:
        return _work(arguments)
    manager = claim_environment(os.environ)
    # A gateway without an application makes no calls, so it needs no token, but may have one.
    is_gateway = arguments.forward_to is not None and not arguments.app
    read_again = partial(
        read,
        arguments,
        standalone=arguments.standalone or is_gateway,
        receiver=True,
        defaults=port_settings(arguments.port) | forward_settings(arguments.forward_to),
    )

    def complete(loaded: Loaded) -> Settings:
        return with_inherited_sockets(loaded.require(), manager.sockets)

    reloader = SettingsReloader(read_again, complete)
    if _HANGUP is not None:
        # A HUP before the runtime handles it must neither end the process nor get lost.
        before = signal.signal(_HANGUP, lambda *_: reloader.request())
        if getattr(before, "called", False):  # a HUP that __main__ received before this code ran
            reloader.request()
    loaded = read_again()
    settings = complete(loaded)
    # The reloader compares with the files of the start: a later removal is an error, not a silent
    # return to the defaults.
    reloader.began_with(loaded)
    begin_logs(loaded)
    workers = _workers(arguments, settings, manager)
    # Only processes that run handlers import the application: its code could end a supervisor.
    handlers = import_registry(arguments.app) if arguments.app and workers is None else None
    runtime = Runtime(
        settings,
        handlers,
        standalone=arguments.standalone or (None if is_gateway else False),
        host_upgrade=_host(arguments, settings),
        quiescence=own_process(settings),
        workers=workers,
    )
    configure_console(runtime, loaded, arguments)
    # The runtime is a library, whose host configures the logs; here the command line is the host.
    runtime.on_reload(_prepare_logs, ("Sdk:Logging",))
    return serve(
        runtime,
        lambda started: announcement(settings, started, secret=SETTINGS_SECRET),
        reloader=reloader,
        manager=manager,
        bounds=Bounds() if workers is None else SUPERVISOR_BOUNDS,
    )


def _workers(
    arguments: Namespace, settings: Settings, manager: ServiceEnvironment
) -> Callable[[WebhookReceiver], Processes] | None:
    """Return the factory of the processes of ``Server:Processes``; None: this is the only one."""
    if settings.server.processes == 1:
        return None
    from ..runtime.processes import Processes
    from ..runtime.worker_process import WorkerCommand, process_count

    count = process_count(settings)
    flags = [] if os.getcwd() in sys.path else ["-P"]  # the installed command has no directory
    command = [sys.executable, *flags, "-m", __package__.partition(".")[0], "run"]
    if arguments.app:
        command += ["--app", arguments.app]
    if arguments.standalone or not settings.has_access_token:
        command.append("--standalone")
    worker = WorkerCommand(
        tuple(command),
        count,
        end_seconds=WORKER_END_SECONDS,
        forced_end_seconds=WORKER_FORCED_END_SECONDS,
        watchdog=manager.watchdog_seconds,
    )
    # The runtime may have added the simulator's secret to the settings.
    return lambda receiver: Processes(receiver.settings, worker, receiver)


def _work(arguments: Namespace) -> int:
    """Run as one process of several, started by a supervisor."""
    from ..runtime.worker import SupervisorLink

    if _HANGUP is not None:
        # Only the supervisor starts a reload: some service managers send HUP to all processes.
        signal.signal(_HANGUP, signal.SIG_IGN)
        # The supervisor has blocked the signal until this line.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {_HANGUP})
    link = SupervisorLink.claim(os.environ)
    place = link.assignment
    arguments.development = place.settings.is_development
    options = place.settings.logging
    logs.number_process(place.number)
    logs.configure(level=options.level, format=options.format)
    handlers = import_registry(arguments.app) if arguments.app else None
    runtime = Runtime(place.settings, handlers, standalone=arguments.standalone, worker=place)
    runtime.on_reload(_prepare_logs, ("Sdk:Logging",))
    return serve(runtime, lambda _: nullcontext(), reloader=link, bounds=WORKER_BOUNDS)


def configure_console(runtime: Runtime, loaded: Loaded, arguments: Namespace) -> None:
    """Pass data of the command line to the console: origins of settings, and the doctor."""
    if not runtime.settings.admin.enabled:
        return

    async def examine() -> list[dict[str, str]]:
        from .doctor.run import examine_running  # loads every check

        return await examine_running(loaded, arguments)

    console = runtime.administrator.console
    console.origins = loaded.origins
    console.examine = examine


def _host(arguments: Namespace, settings: Settings) -> HostUpgrade | None:
    if not arguments.upgrade_host:
        return None
    if not settings.multi_tenant.enabled:
        raise UsageError("--upgrade-host takes part in MultiTenant:Enabled, which is false")
    from ..tenants.upgrade import HostUpgrade  # only here, because a lean start knows no tenants

    return import_part("--upgrade-host", arguments.upgrade_host, HostUpgrade, example="app:upgrade")


def own_process(settings: Settings) -> Quiescence | None:
    """Return the signal of a command that owns its process; None without tenants."""
    if not settings.multi_tenant.enabled:
        return None
    from ..tenants.upgrade import OwnedProcess  # only here, because a lean start knows no tenants

    return OwnedProcess()


def _prepare_logs(settings: Settings) -> Callable[[], None]:
    options = settings.logging
    return partial(logs.configure, level=options.level, format=options.format)


def begin_logs(loaded: Loaded) -> None:
    """Configure the logs by the settings, and log the warnings about the settings."""
    options = loaded.require().logging
    logs.configure(level=options.level, format=options.format)
    for warning in loaded.warnings:
        _log.warning("config.warning", key=warning.key, message=str(warning))


def announcement(
    settings: Settings, started: Started, *, secret: str
) -> AbstractContextManager[None]:
    """Return the block in which ``events trigger`` finds the receiver."""
    if not os.path.isdir(settings.storage.path):
        return nullcontext()  # a store in memory needs no data directory
    # The address that was bound and not the configured one: port 0 is known only now.
    address = started.receiver[0]
    url = own_url(address, settings.webhooks.path)
    return announced(settings.storage.path, Presence(address, url, os.getpid(), secret))


def serve(
    runtime: Runtime,
    announce: Announce,
    *,
    reloader: Reloads | None = None,
    manager: ServiceEnvironment | None = None,
    bounds: Bounds | None = None,
) -> int:
    """Run ``runtime`` with signals; ``announce`` is entered once it accepts deliveries.

    The first TERM or INT starts a graceful stop, the second one forces it. HUP makes ``reloader``
    reload; without a reloader it ends the program like TERM. If a handler cannot be ended, the
    process ends anyway: see :class:`BoundedShutdown`.

    Returns:
        0, 128 + the number of the signal that forced the end, or 1 if it ended without a signal.
    """
    ends_too = () if reloader is not None or _HANGUP is None else (_HANGUP,)
    raise_descriptor_limit()
    with _streams_kept(), BoundedShutdown(runtime, (*_ENDING, *ends_too), bounds) as shutdown:
        # Trio replaces the handler of INT only if it is Python's own.
        release_interrupt()
        # Modules stay until the end. Exclude them from later collections, which would delay
        # deliveries by 10 ms.
        gc.collect()
        gc.freeze()
        release_collector()
        return trio.run(
            _serve,
            runtime,
            announce,
            reloader,
            manager or ServiceEnvironment(),
            shutdown,
            instruments=[cast("trio.abc.Instrument", _LogBatches())],
        )


@contextmanager
def _streams_kept() -> Iterator[None]:
    """Restore the standard streams at the end, even if a handler has replaced them.

    A handler that sets ``sys.stderr = None``, or closes it, must not make the stop fail.
    """
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    try:
        yield
    finally:
        for name, stream in before.items():
            # Closing the stream does not close its descriptor.
            number = 1 if name == "stdout" else 2
            usable = open(number, "w", closefd=False) if stream.closed else stream  # noqa: SIM115 - it stays
            setattr(sys, name, usable)


class _LogBatches:
    """Writes the lines of one iteration of the event loop together, before the loop waits.

    Trio calls an instrument's methods by name. It is not a subclass of Trio's, because ``run
    --help`` loads this file without Trio.
    """

    def before_run(self) -> None:
        """Gather lines from now on."""
        logs.begin_batching()

    def before_io_wait(self, timeout: float) -> None:
        """Write the lines of this iteration."""
        logs.write_batch()

    def after_run(self) -> None:
        """Write each line at once again."""
        logs.end_batching()


async def _serve(
    runtime: Runtime,
    announce: Announce,
    reloader: Reloads | None,
    manager: ServiceEnvironment,
    shutdown: BoundedShutdown,
) -> int:
    signals = _Signals(runtime, reloader)
    watched = _ENDING if _HANGUP is None else (*_ENDING, _HANGUP)
    with (
        # Opened before the runtime starts, so that a TERM in the middle of a start drains instead
        # of killing.
        trio.open_signal_receiver(*watched) as arriving,
        closing(SystemdNotifier(manager.notify_socket)) as notifier,
        ExitStack() as while_running,
    ):
        async with trio.open_nursery() as outer:
            # Signals and the shutdown deadline are watched in the outer nursery: they must work
            # while the runtime in the inner one starts, drains, or hangs.
            outer.start_soon(signals.watch, arriving)
            outer.start_soon(shutdown.watch)
            async with shutdown.watching_signals(), trio.open_nursery() as inner:
                started = await _start(runtime, inner, notifier)
                gc.freeze()
                # Before READY=1: units that start after this one can find the receiver by its file.
                while_running.enter_context(announce(started))
                status = f"serving on {', '.join(started.receiver)}"
                await notifier.ready(status)
                outer.start_soon(_report_end, runtime, notifier)
                outer.start_soon(
                    notifier.keep_watchdog, manager.watchdog_seconds, partial(_ask_store, runtime)
                )
                if reloader is not None:
                    outer.start_soon(reloader.run, runtime, notifier, status)
                if runtime.processes is not None:
                    outer.start_soon(_show_processes, runtime, notifier, status)
            # The inner nursery is empty, so the runtime has ended; now end the watching tasks.
            outer.cancel_scope.cancel()
    if signals.forced_by is not None:
        return 128 + signals.forced_by
    # A runtime that ends unexpectedly is a failure even if it raised nothing: systemd must restart
    # it.
    left = runtime.processes is not None and runtime.processes.failed
    return 0 if signals.stopped and not left else EXIT_FAILURE


async def _start(runtime: Runtime, nursery: trio.Nursery, notifier: SystemdNotifier) -> Started:
    """Start the runtime, and meanwhile notify the service manager that it is not stuck."""
    tenants = runtime.settings.multi_tenant
    upgrade = tenants.single_tenant_upgrade.max_run_duration.total_seconds()
    longest = START_SECONDS + (upgrade if tenants.enabled else 0.0)
    # A start may take long (checking a large store, an upgrade). systemd would kill it after
    # TimeoutStartSec unless it is notified.
    async with trio.open_nursery() as starting:
        starting.start_soon(partial(notifier.extend, lambda: "starting", at_most=longest))
        started: Started = await nursery.start(runtime.run)
        starting.cancel_scope.cancel()
    return started


async def _report_end(runtime: Runtime, notifier: SystemdNotifier) -> None:
    """Notify the service manager of the shutdown, and of the number of waiting events."""
    reason = await runtime.wait_stopping()
    await notifier.stopping(f"stopping: {reason}")
    await notifier.extend(lambda: f"stopping: {reason}; {runtime.unfinished} events left")


async def _show_processes(runtime: Runtime, notifier: SystemdNotifier, status: str) -> None:
    """Have the service manager show how many processes serve, whenever that changes."""
    shown = ""
    while True:
        await trio.sleep(SHOW_SECONDS)
        processes = runtime.processes
        if processes is not None and runtime.ready:
            text = f"{status}; {processes.serving} of {processes.count} processes serve"
            if text != shown:
                await notifier.show(text)
                shown = text


async def _ask_store(runtime: Runtime) -> None:
    """Return once the store has answered.

    It deletes a key that never exists: a write without effect, which proves that the commit thread
    works.
    """
    await runtime.receiver.store.write_checkpoint("watchdog", None)


class _Signals:
    """The requests of the signals so far."""

    def __init__(self, runtime: Runtime, reloader: Reloads | None) -> None:
        self._runtime = runtime
        self._reloader = reloader
        self.stopped = False
        self.forced_by: int | None = None

    async def watch(self, arriving: AsyncIterator[int]) -> None:
        """Obey signals as they arrive, until cancelled."""
        async for number in arriving:
            if number == _HANGUP and self._reloader is not None:
                self._reloader.request()
            elif not self.stopped:
                self.stopped = True
                self._runtime.shut_down(signal.Signals(number).name)
            elif self.forced_by is None:
                self.forced_by = number
                _log.warning("runtime.forced", signal=signal.Signals(number).name)
                # Only once: the time limits of BoundedShutdown do the rest without a third signal.
                self._runtime.force()
