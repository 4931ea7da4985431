"""``run``: the runtime as a process of its own, with signals and logs (contracts 1)."""

import os
import signal
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

import trio

from .. import logs
from ..config import Loaded, Settings
from ..errors import EXIT_FAILURE
from ..runtime import Runtime, Started
from ..webhooks.sender import own_url
from .app_importer import import_registry
from .presence import SETTINGS_SECRET, Presence, announced
from .settings_reader import read

_log = logs.get_logger("cli")

Announce = Callable[[Started], AbstractContextManager[None]]

#: The signals that end a daemon; Windows has no HUP.
_ENDING = (signal.SIGTERM, signal.SIGINT)
_HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)


def run(arguments: Namespace) -> int:
    """Run until TERM or INT; return 0 after a graceful stop, 128 + signal after a forced one.

    Raises:
        SdkError: it could not start; every problem of the settings at once.
    """
    loaded = read(arguments, standalone=arguments.standalone, receiver=True)
    settings = loaded.require()
    begin_logs(loaded)
    handlers = import_registry(arguments.app) if arguments.app else None
    runtime = Runtime(settings, handlers, standalone=arguments.standalone)
    return serve(runtime, lambda started: announcement(settings, started))


def begin_logs(loaded: Loaded) -> None:
    """Configure the logs as the settings say, and log what is odd about the settings."""
    options = loaded.require().logging
    logs.configure(level=options.level, format=options.format)
    for warning in loaded.warnings:
        _log.warning("config.warning", key=warning.key, message=str(warning))


def announcement(
    settings: Settings, started: Started, *, secret: str = SETTINGS_SECRET
) -> AbstractContextManager[None]:
    """Return the block in which ``events trigger`` finds the receiver."""
    if not os.path.isdir(settings.storage.path):
        return nullcontext()  # a store in memory needs no data directory
    address = started.receiver[0]
    url = own_url(address, settings.webhooks.path)
    return announced(settings.storage.path, Presence(address, url, os.getpid(), secret))


def serve(runtime: Runtime, announce: Announce, *, hangup_ends: bool = False) -> int:
    """Run ``runtime`` with signals; ``announce`` is entered once it accepts deliveries.

    The first TERM or INT begins a graceful stop, the second one forces it. HUP does the same with
    ``hangup_ends``; otherwise it is logged, and the settings stay as they are.

    Returns:
        0, 128 + the number of the signal that forced, or 1 if nobody asked for the end.
    """
    return trio.run(_serve, runtime, announce, hangup_ends)


async def _serve(runtime: Runtime, announce: Announce, hangup_ends: bool) -> int:
    signals = _Signals(runtime, hangup_ends=hangup_ends)
    watched = _ENDING if _HANGUP is None else (*_ENDING, _HANGUP)
    with trio.open_signal_receiver(*watched) as arriving, ExitStack() as while_running:
        async with trio.open_nursery() as outer:
            outer.start_soon(signals.watch, arriving)
            async with trio.open_nursery() as inner:
                started = await inner.start(runtime.run)
                while_running.enter_context(announce(started))
            outer.cancel_scope.cancel()
    if signals.forced_by is not None:
        return 128 + signals.forced_by
    return 0 if signals.stopped else EXIT_FAILURE


class _Signals:
    """What the signals have asked for so far."""

    def __init__(self, runtime: Runtime, *, hangup_ends: bool) -> None:
        self._runtime = runtime
        self._ending = {*_ENDING, _HANGUP} if hangup_ends else set(_ENDING)
        self.stopped = False
        self.forced_by: int | None = None

    async def watch(self, arriving: AsyncIterator[int]) -> None:
        """Obey signals as they arrive, until cancelled."""
        async for number in arriving:
            if number not in self._ending:
                _log.warning("runtime.reload_ignored", hint="settings are read at the start only")
            elif not self.stopped:
                self.stopped = True
                self._runtime.shut_down(signal.Signals(number).name)
            elif self.forced_by is None:
                self.forced_by = number
                _log.warning("runtime.forced", signal=signal.Signals(number).name)
                self._runtime.force()
