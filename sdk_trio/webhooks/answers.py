"""The receiver's answers, byte for byte."""

from math import ceil
from typing import Any, NamedTuple

import msgspec

from ..base.http import Headers, Send


class Answer(NamedTuple):
    """One HTTP response: ``status``, ASGI ``headers`` with the content length, ``body``."""

    status: int
    headers: Headers
    body: bytes

    @classmethod
    def of(cls, status: int, body: bytes, *extra: tuple[bytes, bytes]) -> "Answer":
        """Build a JSON answer with its length and the ``extra`` headers."""
        length = str(len(body)).encode()
        return cls(
            status,
            ((b"content-type", b"application/json"), (b"content-length", length), *extra),
            body,
        )

    async def send(self, send: Send) -> None:
        """Send the answer as ASGI messages."""
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})


class RequestRefusal(msgspec.Struct, frozen=True):
    """The answer to a request that is refused; cause and fields are for the log.

    A refusal with the answer of a failed verification is logged and counted as such.
    """

    cause: str
    answer: Answer
    fields: dict[str, Any] = {}

    @property
    def is_rejection(self) -> bool:
        """Whether it has the answer of a failed verification."""
        return self.answer is INVALID

    @property
    def event(self) -> str:
        """The log event."""
        return "webhook.rejected" if self.is_rejection else "webhook.refused"


OK = Answer.of(200, b"{}")
#: One answer for every verification failure: a forger who could distinguish an unknown id, a wrong
#: signature and a stale timestamp would know what to try next.
INVALID = Answer.of(400, b'{"error":"invalid webhook"}')
SOURCE_REFUSED = Answer.of(403, b'{"error":"source address not allowed"}')
NOT_FOUND = Answer.of(404, b'{"error":"not found"}')
METHOD_NOT_ALLOWED = Answer.of(405, b'{"error":"method not allowed"}', (b"allow", b"POST"))
TOO_SLOW = Answer.of(408, b'{"error":"request too slow"}')
TOO_LARGE = Answer.of(413, b'{"error":"payload too large"}')
UNSUPPORTED_MEDIA = Answer.of(415, b'{"error":"unsupported media type"}')
HANDLER_FAILED = Answer.of(500, b'{"error":"webhook handler failed"}')


def _retry_after(seconds: float) -> tuple[bytes, bytes]:
    # Retry-After holds whole seconds (RFC 9110, 10.2.3). Rounded down, a sender that obeys would
    # retry too early, and with 0 at once.
    return (b"retry-after", str(max(1, ceil(seconds))).encode())


def rate_limited(seconds: float) -> Answer:
    """Build the 429 answer: this source may try again in ``seconds``."""
    return Answer.of(429, b'{"error":"rate limit exceeded"}', _retry_after(seconds))


def unavailable(seconds: float) -> Answer:
    """Build the 503 answer: nothing was stored; deliver again in ``seconds``."""
    return Answer.of(503, b'{"error":"temporarily unavailable"}', _retry_after(seconds))
