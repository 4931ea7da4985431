"""Track the use of each configured secret, which shows when a rotation is over. Pure."""

from collections.abc import Sequence
from typing import Final

DAY_SECONDS: Final = 24 * 60 * 60


class SecretUsage:
    """Counts the deliveries that each configured secret has signed.

    Indexes are positions in the configured order, as in ``Accepted.secret_index``. All times are
    seconds of one clock that does not go back; ``now`` is when the secrets were configured, from
    which an idle secret's first day counts.
    """

    __slots__ = ("_last_match", "_last_report", "_matches", "_since")

    def __init__(self, secrets: int, now: float) -> None:
        self._since = [now] * secrets
        self._matches = [0] * secrets
        self._last_match: list[float | None] = [None] * secrets
        self._last_report: list[float | None] = [None] * secrets

    @property
    def matches(self) -> Sequence[int]:
        """Return each secret's matches so far (``sdk_webhook_secret_matches_total{index}``)."""
        return tuple(self._matches)

    def record(self, index: int, now: float) -> None:
        """Count one delivery whose signature the secret at ``index`` made."""
        self._matches[index] += 1
        self._last_match[index] = now

    def note(self, index: int, now: float) -> None:
        """Note a match that another process of this receiver has counted."""
        # A process may not have heard yet that there are fewer secrets.
        if index < len(self._last_match):
            self._last_match[index] = now

    def rearrange(self, positions: Sequence[int | None], now: float) -> None:
        """Switch to a new list of secrets; ``positions[i]`` is the old index of secret ``i``.

        None stands for a new secret: its counts begin at 0, and its first day at ``now``.
        """
        kept = [None if old is None else self._record(old) for old in positions]
        records = [record or (now, 0, None, None) for record in kept]
        self._since = [record[0] for record in records]
        self._matches = [record[1] for record in records]
        self._last_match = [record[2] for record in records]
        self._last_report = [record[3] for record in records]

    def _record(self, index: int) -> tuple[float, int, float | None, float | None]:
        return (
            self._since[index],
            self._matches[index],
            self._last_match[index],
            self._last_report[index],
        )

    def unused(self, now: float) -> list[int]:
        """Return the secrets to report as unused, each at most once a day.

        A secret is unused when it has not matched for a day although another one has. Without
        deliveries no secret is reported, because a quiet day proves nothing. Calling this counts as
        the report.
        """
        if not any(_within_a_day(last, now) for last in self._last_match):
            return []
        due = [
            index
            for index in range(len(self._matches))
            if self._idle_for_a_day(index, now) and not _within_a_day(self._last_report[index], now)
        ]
        for index in due:
            self._last_report[index] = now
        return due

    def _idle_for_a_day(self, index: int, now: float) -> bool:
        last = self._last_match[index]
        return now - (self._since[index] if last is None else last) >= DAY_SECONDS


def _within_a_day(moment: float | None, now: float) -> bool:
    return moment is not None and now - moment < DAY_SECONDS
