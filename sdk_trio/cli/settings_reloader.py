"""The reload of a running daemon's settings: at HUP, and when a key file has changed."""

import os
from collections.abc import Callable

import trio

from ..base.logs import get_logger
from ..config import Loaded, Settings
from ..config.key_file_reader import KeyFileReader, key_directories, key_files
from ..config.table import ROOT
from ..errors import OptionsValidationError, Problem
from ..runtime import Runtime
from ..runtime.systemd_notifier import SystemdNotifier

_log = get_logger("runtime")

_VANISHED = "the file has vanished: put it back, or restart without it"
_EMPTIED = "the file holds no settings any more: put them back, or restart without them"


class SettingsReloader:
    """Makes one reload at a time; a request during a reload leads to another one after it.

    Args:
        read: reads all layers again; called in a thread.
        complete: makes the settings of a start from the layers, or raises
            OptionsValidationError; called in a thread.
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
        # Taken before the settings are first read, so that a change in between is noticed later.
        self._key_files.look(self._directories)

    def began_with(self, loaded: Loaded) -> None:
        """Remember the files of the settings in force; none of them may vanish."""
        self._files = _with_settings(loaded)

    def request(self) -> None:
        """Request a reload, as HUP does; several requests before it begins count as one."""
        self._wanted.set()

    async def run(self, runtime: Runtime, notifier: SystemdNotifier, status: str) -> None:
        """Reload at each request and when a key file has changed, until cancelled.

        When it is cancelled, either all of the new settings are in force or none of them.
        ``status`` is the text that the service manager shows after each reload.
        """
        await self._look(runtime)
        while True:
            asked = await self._wait(runtime.settings.server.key_file_poll_seconds)
            files = await self._look(runtime)
            if not asked and not files:
                continue
            if not runtime.ready:
                _log.warning("runtime.reload_ignored", hint="the daemon is stopping")
                continue
            await notifier.reloading()
            await self._reload(runtime, cause="signal" if asked else "key files", files=files)
            if runtime.ready:
                await notifier.ready(status)

    async def _wait(self, seconds: float) -> bool:
        """Wait for a request, at most ``seconds`` (0: without a bound); say whether one came."""
        with trio.move_on_after(seconds or float("inf")):
            await self._wanted.wait()
        asked = self._wanted.is_set()
        self._wanted = trio.Event()
        return asked

    async def _look(self, runtime: Runtime) -> tuple[str, ...]:
        places = (*self._directories, *key_files(runtime.settings))
        # Abandoned on cancel, so that a hanging file system cannot hold up a stop. Otherwise it is
        # awaited, so that there is never more than one such thread.
        return await trio.to_thread.run_sync(self._key_files.look, places, abandon_on_cancel=True)

    async def _reload(self, runtime: Runtime, *, cause: str, files: tuple[str, ...]) -> None:
        try:
            loaded, settings = await trio.to_thread.run_sync(self._read_all, abandon_on_cancel=True)
            done = runtime.reload(settings)
            self.began_with(loaded)
        except OptionsValidationError as error:
            _report_failure(error.problems, cause=cause, files=files)
            await trio.lowlevel.checkpoint()
            return
        for warning in loaded.warnings:
            _log.warning("config.warning", key=warning.key, message=str(warning))
        log = _log.warning if done.restart else _log.info
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
            # A file may have been replaced at that moment, or belong to another Environment now, so
            # everything is read once more.
            loaded = self._read()
        told = {problem.origin for problem in loaded.problems}
        # A file that was not named explicitly may be missing at the start, but one that vanishes is
        # an accident: its settings would fall back to the defaults, and a list of allowed sources
        # would become "everybody".
        lost = [file for file in self._files if file not in {*told, *_with_settings(loaded)}]
        gone = tuple(
            Problem(ROOT, _EMPTIED if file in loaded.files else _VANISHED, file)
            for file in lost
            if file in loaded.files or not os.path.exists(file)
        )
        if gone:
            raise OptionsValidationError((*gone, *loaded.problems))
        return loaded, self._complete(loaded)


def _with_settings(loaded: Loaded) -> tuple[str, ...]:
    """Return the files that hold settings."""
    empty = {warning.origin for warning in loaded.warnings if warning.key == ROOT}
    return tuple(file for file in loaded.files if file not in empty)


def _report_failure(problems: tuple[Problem, ...], *, cause: str, files: tuple[str, ...]) -> None:
    _log.error(
        "runtime.reload_failed",
        cause=cause,
        files=files,
        problems=[str(problem) for problem in problems],
        hint="the settings in force stay; put right what is listed, and send HUP",
    )
