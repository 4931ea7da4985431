"""Puts new settings into force in every part at once, or in none of them."""

from collections.abc import Callable, Collection

import attrs

from ..config import Settings
from ..config.rules import check
from ..errors import OptionsValidationError, Problem
from .reload import plan_reload

#: Returns what puts settings into force; raises OptionsValidationError if they cannot be used.
#: The call that it returns must not fail, wait, or take long: it runs between two deliveries.
Prepare = Callable[[Settings], Callable[[], None]]


@attrs.frozen
class Reloaded:
    """What a reload did: full keys, never values.

    ``applied`` are in force from now on; ``restart`` differ as well and wait for the next start.
    """

    applied: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()


class Reloader:
    """The parts that can change while they run, and the settings in force.

    ``standalone`` says that no access token is needed (spec 1.6).
    """

    def __init__(self, settings: Settings, *, standalone: bool) -> None:
        self.settings: Settings = settings
        self._standalone = standalone
        self._parts: list[tuple[Prepare, tuple[str, ...]]] = []

    def subscribe(self, prepare: Prepare, keys: Collection[str]) -> None:
        """Let a part take part in every reload.

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

        It neither waits nor can it be cancelled: every part has the old settings or every part
        has the new ones.

        Raises:
            OptionsValidationError: with every problem of every part; nothing has changed.
        """
        plan = plan_reload(self.settings, wanted, live=self.live_keys)
        # The new values were checked beside others that are not in force before the next start.
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
        for commit in commits:
            commit()
        self.settings = plan.settings
        return Reloaded(plan.applied, plan.restart)

    def _problems(self, settings: Settings) -> tuple[Problem, ...]:
        return check(settings, standalone=self._standalone).problems
