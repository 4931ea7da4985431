"""What the dispatcher asks of a channel, and a channel of the network. Pure."""

from collections.abc import Mapping
from typing import Protocol

import attrs

from ..storage.tenant_records import OutboxRecord
from .outcome import Outcome


class Channel(Protocol):
    """One way to reach a site manager."""

    @property
    def repeatable(self) -> bool:
        """Whether a message may be sent again when it is not known if it arrived.

        True where the receiver can tell a repetition by its id: the webhook channel.
        """
        ...

    async def send(self, record: OutboxRecord) -> Outcome:
        """Try once to tell of this transition.

        Raises nothing but ``Cancelled``, after which the outcome is unknown.
        """
        ...


@attrs.frozen
class Answer:
    """What a server answered; header names are in lower case.

    ``body`` may be cut short where it is long or broke off. ``retry_after`` is what
    ``Retry-After`` asks for, in seconds from now.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    retry_after: float | None = None


class Poster(Protocol):
    """The project's HTTP layer as a channel sees it; the runtime makes one."""

    async def post(
        self,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes,
        timeout_seconds: float,
        public_only: bool = False,
        wants_body: bool = True,
    ) -> Answer:
        """Send one POST request, without following redirects.

        Args:
            url: an absolute URL.
            headers: all but Host and Content-Length.
            body: the exact bytes.
            timeout_seconds: for everything, from the name's look-up to the answer's last byte.
            public_only: refuse to connect to a private, loopback or link-local address.
            wants_body: False: the answer is whole when its head has come, and its body is empty.

        Raises:
            AddressInvalidError: nothing can ever be sent to this URL.
            AddressRefusedError: ``public_only``, and the host has no public address.
            NotSentError: nothing of the request was sent: it may be tried again.
            AnswerLostError: it was sent, or may have been, and no whole answer came.
        """
        ...
