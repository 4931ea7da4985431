"""What every channel's sender is made of, and how it makes one attempt (contracts 6)."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from ..config.notification_options import NotificationsOptions
from ..storage.tenant_records import OutboxRecord
from .attempter import ReadVariable, Request, attempt
from .outcome import Outcome, Skipped
from .ports import Poster


class Sender(ABC):
    """Sends the messages of one channel; a :class:`~.ports.Channel`.

    Args:
        options: what is configured.
        poster: sends requests.
        read_variable: reads the environment, at each message, so that a changed credential counts.
        clock: returns Unix seconds.
    """

    #: Whether the receiver can tell a repetition.
    repeatable: bool

    def __init__(
        self,
        options: NotificationsOptions,
        poster: Poster,
        *,
        read_variable: ReadVariable,
        clock: Callable[[], float],
    ) -> None:
        self._options = options
        self._poster = poster
        self._read_variable = read_variable
        self._clock = clock

    async def send(self, record: OutboxRecord) -> Outcome:
        """Try once to send the message; see :class:`~.ports.Channel`."""
        return await attempt(self._poster, lambda: self._prepare(record))

    @abstractmethod
    def _prepare(self, record: OutboxRecord) -> Request | Skipped:
        """Return the request of a message, or why there is none."""
