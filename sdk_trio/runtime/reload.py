"""Reload of settings: a decision about what can change now, and a commit in every part at once.

A setting that cannot change in a running program keeps its value, and every reload reports it until
the next start. It is not an error: otherwise an unrelated change of such a setting would keep a
leaked secret in force.

Every part first prepares (parses keys, loads a certificate) and returns a function that swaps a
reference. These functions are called only when all parts have prepared, without a checkpoint in
between. So no delivery sees a mixture, and no cancellation leaves one
(docs/adr/0019-atomic-reload.md).
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import msgspec

from ..config import Settings
from ..config.check import check
from ..config.table import Setting, is_below, table
from ..errors import OptionsValidationError, Problem

#: These paths can change in a running program, but TLS cannot be switched on or off: the addresses
#: that were reported at the start contain the scheme.
_TLS_FILES = ("Sdk:Server:CertFile", "Sdk:Server:KeyFile")

#: Takes settings and returns a function that puts them into force; raises OptionsValidationError if
#: they cannot be used. The returned function must not fail, wait, or take long: it runs between two
#: deliveries.
Prepare = Callable[[Settings], Callable[[], None]]


class ReloadPlan(msgspec.Struct, frozen=True):
    """The decision about a reload.

    ``settings`` are the running ones with every live key taken from the wanted ones. ``applied``
    are the full keys that change now, ``restart`` those that differ and wait for the next start.
    """

    settings: Settings
    applied: tuple[str, ...]
    restart: tuple[str, ...]


def plan_reload(running: Settings, wanted: Settings, *, live: Collection[str]) -> ReloadPlan:
    """Decide which settings of ``wanted`` replace those of ``running``.

    Args:
        running: the settings in force.
        wanted: valid settings, read from the sources now.
        live: full keys, or keys of sections, that some part can change while it runs.
    """
    settings = running
    applied: list[str] = []
    restart: list[str] = []
    for setting in _changed(running, wanted):
        if any(is_below(setting.key, key) for key in live) and _can_change(
            setting, running, wanted
        ):
            settings = _replaced(settings, setting.attributes, setting.of(wanted))
            applied.append(setting.key)
        else:
            restart.append(setting.key)
    return ReloadPlan(settings, tuple(applied), tuple(restart))


def _changed(running: Settings, wanted: Settings) -> Iterator[Setting]:
    return (setting for setting in table() if setting.of(running) != setting.of(wanted))


def _can_change(setting: Setting, running: Settings, wanted: Settings) -> bool:
    if setting.key not in _TLS_FILES:
        return True
    return running.server.cert_file is not None and wanted.server.cert_file is not None


def _replaced(section: Any, attributes: tuple[str, ...], value: Any) -> Any:
    """Return ``section`` with the value at ``attributes`` replaced."""
    first, *rest = attributes
    if rest:
        value = _replaced(getattr(section, first), tuple(rest), value)
    return msgspec.structs.replace(section, **{first: value})


class Reloaded(msgspec.Struct, frozen=True):
    """The result of a reload, as full keys without values, which may be secret.

    ``applied`` are in force from now on; ``restart`` keys also differ, and wait for the next start.
    """

    applied: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()


class SettingsReload:
    """The parts that can change while they run, and the settings in force.

    ``standalone``: the program runs without the client and so needs no access token.
    """

    def __init__(self, settings: Settings, *, standalone: bool) -> None:
        self.settings: Settings = settings
        self._standalone = standalone
        self._parts: list[tuple[Prepare, tuple[str, ...]]] = []

    def subscribe(self, prepare: Prepare, keys: Collection[str]) -> None:
        """Register a part for every reload.

        Args:
            prepare: see :data:`Prepare`; called with the settings that will be in force.
            keys: full keys, or keys of sections, that it can change while it runs.
        """
        self._parts.append((prepare, tuple(keys)))

    @property
    def live_keys(self) -> tuple[str, ...]:
        """Full keys, or keys of sections, that some part can change while it runs."""
        return tuple(key for _, keys in self._parts for key in keys)

    def reload(self, wanted: Settings) -> Reloaded:
        """Put ``wanted`` into force, as far as that can be done while running.

        It is synchronous, so it cannot be cancelled: every part has the old settings or every part
        has the new ones.

        Raises:
            OptionsValidationError: lists every problem of every part; nothing has changed.
        """
        return self.prepare(wanted)()

    def prepare(self, wanted: Settings) -> Callable[[], Reloaded]:
        """Prepare every part for ``wanted``, and return a function that puts it into force.

        The function cannot fail. If it is not called, nothing changes.

        Raises:
            OptionsValidationError: with every problem of every part.
        """
        plan = plan_reload(self.settings, wanted, live=self.live_keys)
        # ``wanted`` is valid as a whole. But the new settings also contain old values that cannot
        # change before the next start, and the combination may be invalid.
        known = self._problems(self.settings)
        problems = [found for found in self._problems(plan.settings) if found not in known]
        commits = []
        if not problems:
            for prepare, _ in self._parts:
                try:
                    commits.append(prepare(plan.settings))
                except OptionsValidationError as error:
                    problems += error.problems
        if problems:
            raise OptionsValidationError(tuple(dict.fromkeys(problems)))

        def put_into_force() -> Reloaded:
            for commit in commits:
                commit()
            self.settings = plan.settings
            return Reloaded(plan.applied, plan.restart)

        return put_into_force

    def _problems(self, settings: Settings) -> tuple[Problem, ...]:
        return check(settings, standalone=self._standalone).problems
