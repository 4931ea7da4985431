"""The act of a reload: new settings take effect in every part at once, or in none of them.

Every part prepares first (parses keys, loads a certificate) and returns a call that swaps a
reference. Only when all have prepared are these calls made, without a checkpoint in between, so
that no delivery sees a mixture and no cancellation leaves one.
"""

from collections.abc import Callable, Collection

import attrs

from ..config import Settings
from ..config.rules import check
from ..errors import OptionsValidationError, Problem
from .reload import plan_reload

#: Takes settings and returns the call that puts them into force; raises OptionsValidationError if
#: they cannot be used. The returned call must not fail, wait, or take long: it runs between two
#: deliveries.
Prepare = Callable[[Settings], Callable[[], None]]


@attrs.frozen
class Reloaded:
    """The result of a reload, as full keys and never as values, which may be secret.

    ``applied`` are in force from now on; ``restart`` differ as well and wait for the next start.
    """

    applied: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()


class Reloader:
    """The parts that can change while they run, and the settings in force.

    ``standalone``: the program runs without the client and so needs no access token.
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

        It is synchronous, so it cannot be cancelled: every part has the old settings or every part
        has the new ones.

        Raises:
            OptionsValidationError: with every problem of every part; nothing has changed.
        """
        plan = plan_reload(self.settings, wanted, live=self.live_keys)
        # ``wanted`` was valid as a whole. What takes effect is a mixture of it and of old values
        # that wait for the next start, and that mixture may be invalid, so it is checked again.
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
