"""The errors of calls to the upstream API.

::

    SdkError
    └── CallError method, path, attempts; of the last answer: status, request │ id, body ├──
        ApiError the upstream answered with an error │ ├── BadRequestError 400 │ ├──
        AuthenticationError 401 │ ├── PermissionDeniedError 403 │ ├── NotFoundError 404 │ ├──
        ConflictError 409 │ ├── UnprocessableEntityError 422, with the fields that are wrong │ ├──
        RateLimitedError 429, or a limit known beforehand │ └── ServerError 5xx ├──
        ConnectionFailedError no complete answer: no connection, or it broke │ └──
        AttemptTimeoutError no complete answer within TimeoutMs ├── DeadlineExceededError no success
        within the call's total time ├── CircuitOpenError not sent: the upstream has been failing
        ├── OutcomeUnknownError a write was sent, and it is unknown whether it took effect └──
        UnexpectedAnswerError a success whose body has an unexpected form

Messages contain no query string and no token: ``mask`` is applied to every text.
"""

import enum
import re
from collections.abc import Iterable
from typing import Any, ClassVar, TypeVar

import attrs

from ..config.secret import LEAST_MASKED, MASK
from ..errors import EXIT_FAILURE, EXIT_UNAVAILABLE, SdkError
from .json_text import UnreadableJsonError, read_json

#: The longest quoted part of an unreadable body, in characters.
_QUOTED_CHARACTERS = 200

#: Above this nesting, the body of an error stays text: printing, comparing or pickling a deeper
#: value would exhaust the stack.
_ERROR_DEPTH = 100


class FailureKind(enum.Enum):
    """The kinds of failed attempts, by what the upstream may have done."""

    NOT_SENT = enum.auto()
    """No byte of the request was sent: any method can be retried."""
    NO_CONNECTION_FREE = enum.auto()
    """Not sent, because none of our connections was free: not the upstream's fault."""
    NOT_PROCESSED = enum.auto()
    """The upstream stated that it did not act on it (GOAWAY, REFUSED_STREAM): not its fault."""
    UNCONFIRMED = enum.auto()
    """The request may have been sent, and no complete answer arrived."""
    REFUSED = enum.auto()
    """Another attempt would fail the same way: an invalid request, an open circuit."""


class CallError(SdkError):
    """Base of the errors of calls; can be copied and pickled.

    ``method`` and ``path`` (without its query) identify the call, ``attempts`` counts its requests.
    ``status``, ``request_id`` and ``body`` are those of the call's last answer, or None.
    """

    exit_code = EXIT_UNAVAILABLE

    def __init__(
        self,
        message: str,
        *,
        method: str,
        path: str,
        attempts: int = 0,
        status: int | None = None,
        request_id: str | None = None,
        body: Any = None,
        retry_after: float | None = None,
    ) -> None:
        self.message = message
        self.method = method
        self.path = path
        self.attempts = attempts
        self.status = status
        self.request_id = request_id
        self.body = body
        self.retry_after = retry_after
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        # Python copies an exception from its arguments only, without the required keyword
        # arguments. An incident is compared by identity, which a copy does not have, so it is
        # omitted.
        kept = {name: value for name, value in vars(self).items() if name != "incident"}
        return _remade, (type(self), self.args), kept

    @property
    def outcome(self) -> str:
        """Return the name of this outcome in metrics: ``not_found`` for ``NotFoundError``."""
        # Derived from the class, so that metrics cannot miss a new error.
        words = re.findall("[A-Z][a-z]*", type(self).__name__.removesuffix("Error"))
        return "_".join(word.lower() for word in words)

    def __str__(self) -> str:
        tries = "" if self.attempts <= 1 else f" after {self.attempts} attempts"
        known = "" if self.request_id is None else f" (request id {self.request_id})"
        return f"{self.method} {self.path}: {self.message}{tries}{known}"


E = TypeVar("E", bound=CallError)


def _remade(kind: type[E], args: tuple[Any, ...]) -> E:
    return kind.__new__(kind, *args)


class ApiError(CallError):
    """The upstream answered with ``status``, which is not a success.

    ``body`` is the answer: parsed JSON, or else text; of more than 1 MiB only the beginning.
    ``error_type`` and ``detail`` are its members of these meanings, or None. ``retry_after`` is in
    seconds.
    """

    exit_code: ClassVar[int] = EXIT_FAILURE
    status: int

    def __init__(self, message: str, *, status: int, **context: Any) -> None:
        super().__init__(message, status=status, **context)

    @property
    def error_type(self) -> str | None:
        """Return the upstream's name of the error, such as ``ResourceNotFound``."""
        value = self.body.get("error") if isinstance(self.body, dict) else None
        return value if isinstance(value, str) else None

    @property
    def detail(self) -> Any:
        """Return the upstream's explanation: text, or a list for status 422."""
        return self.body.get("detail") if isinstance(self.body, dict) else None


class BadRequestError(ApiError):
    """400: the upstream could not understand the request."""


class AuthenticationError(ApiError):
    """401: the access token is missing, wrong, expired, or for the other environment."""


class PermissionDeniedError(ApiError):
    """403: the access token is valid, but lacks the permission."""


class NotFoundError(ApiError):
    """404: no such record or route. An unknown value of the version header also causes it."""


class ConflictError(ApiError):
    """409: the record's state does not allow it."""


@attrs.frozen
class FieldError:
    """One invalid field of a request: its path (``body.items.0.name``), a message, and its kind."""

    location: str
    message: str
    type: str


class UnprocessableEntityError(ApiError):
    """422: fields of the request are wrong; ``fields`` lists them."""

    @property
    def fields(self) -> tuple[FieldError, ...]:
        """Return the invalid fields; empty if the upstream named none."""
        detail = self.detail
        entries = detail if isinstance(detail, list) else []
        return tuple(_field_error(entry) for entry in entries if isinstance(entry, dict))


class RateLimitedError(ApiError):
    """429, or not sent: an earlier 429 pauses this token for longer than the call may wait.

    ``retry_after`` is the time to wait in seconds, or None. ``attempts`` is 0 for a call that was
    not sent.
    """

    exit_code = EXIT_UNAVAILABLE


class ServerError(ApiError):
    """5xx: the upstream failed."""

    exit_code = EXIT_UNAVAILABLE


class ConnectionFailedError(CallError):
    """No complete answer: no connection, or it broke. ``kind`` shows whether to retry."""

    #: The failed dial or connection that this call shared with others, so that the breaker counts
    #: it once; None if only this call failed.
    incident: object | None = None

    def __init__(self, message: str, *, kind: FailureKind, **context: Any) -> None:
        self.kind = kind
        super().__init__(message, **context)


class AttemptTimeoutError(ConnectionFailedError):
    """The last attempt got no complete answer within TimeoutMs."""


class DeadlineExceededError(CallError):
    """The call's total time has passed; no further attempt is made.

    The cause is the error of the last finished attempt, if any.
    """


class CircuitOpenError(CallError):
    """Not sent: the upstream has been failing; the next attempt is in ``retry_after`` seconds.

    ``retry_after`` is None if the circuit was opened manually.
    """


class OutcomeUnknownError(CallError):
    """A write was sent and no answer arrived: it is unknown whether it took effect.

    It is not repeated automatically, because that could execute it twice. Check the upstream's
    state first, or pass ``idempotent=True`` for a call that may be executed twice. The cause is the
    failure that hid the answer.
    """


class UnexpectedAnswerError(CallError):
    """The upstream answered with success, but with a body of an unexpected form.

    A write *has* been executed: do not repeat it. ``status`` and ``request_id`` are the answer's;
    ``content`` is its body as received (decompressed), empty if it broke off or was too large.
    """

    exit_code: ClassVar[int] = EXIT_FAILURE

    def __init__(self, message: str, *, content: bytes = b"", **context: Any) -> None:
        self.content = content
        super().__init__(message, **context)


_BY_STATUS: dict[int, type[ApiError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    422: UnprocessableEntityError,
    429: RateLimitedError,
}


def api_error(
    *,
    status: int,
    content: bytes,
    method: str,
    path: str,
    attempts: int,
    request_id: str | None,
    retry_after: float | None,
    secrets: Iterable[str],
) -> ApiError:
    """Build the error for an answer that is not a success.

    ``secrets`` are masked if the answer repeats them.
    """
    # Masked before parsing: afterwards the secret could be in any of a thousand texts.
    body = _parse(mask(content.decode("utf-8", "replace"), secrets))
    kind = _BY_STATUS.get(status, ServerError if status >= 500 else ApiError)
    return kind(
        _printable(_message(status, body)),
        status=status,
        method=method,
        path=path,
        attempts=attempts,
        request_id=request_id,
        body=body,
        retry_after=retry_after,
    )


X = TypeVar("X", bound=BaseException)


def without_frames(error: X) -> X:
    """Return ``error`` without its traceback and those of its causes.

    The frames of connections and parsers hold requests and answers, with the token and the bodies.
    Error reporters that include variables, as Sentry does by default, would send them. Type and
    text of each cause stay.
    """
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        # Python keeps a suppressed context without printing it; reporters read its frames.
        cause = cause.__cause__ or cause.__context__
    return error


def mask(text: str, secrets: Iterable[str]) -> str:
    """Replace ``secrets`` in ``text``, except those too short to be real.

    They are also found in JSON, which may escape any character, so the parsed body does not contain
    them either.
    """
    for secret in secrets:
        # A shorter one is not a real secret, and masking it would remove letters from every word.
        if len(secret) < LEAST_MASKED:
            continue
        # The plain spelling first: it is by far the most common, and needs no pattern.
        text = text.replace(secret, MASK)
        # Only a text with one of these characters can contain an escaped spelling.
        if "\\" in text or "%" in text:
            text = re.sub("".join(map(_spellings, secret)), MASK, text)
    return text


def _spellings(character: str) -> str:
    """Return a pattern of one character of a secret: plain, or escaped for JSON or a URL."""
    code = f"{ord(character):02x}"
    # JSON inside JSON doubles the backslashes. Their number is bounded: otherwise a text of only
    # backslashes would take quadratic time.
    return rf"(?:\\{{0,4}}{re.escape(character)}|\\{{1,4}}u00(?i:{code})|%(?i:{code}))"


def _parse(text: str) -> Any:
    try:
        return read_json(text, max_depth=_ERROR_DEPTH)
    except UnreadableJsonError:
        return text


def _printable(text: str) -> str:
    """Return ``text`` without lone surrogates, which no log can encode."""
    # JSON may contain half a surrogate pair; logging it would raise an error about the error.
    return text.encode("utf-8", "backslashreplace").decode()


def _message(status: int, body: Any) -> str:
    if 300 <= status < 400:
        # The upstream redirects a path without its trailing slash. Following would repeat a POST as
        # a GET (RFC 9110, 15.4).
        return f"{status}, a redirect, which is not followed: the path may lack its trailing slash"
    if not isinstance(body, dict):
        quoted = str(body).strip()[:_QUOTED_CHARACTERS]
        return f"{status} {quoted}".rstrip()
    detail = body.get("detail")
    if isinstance(detail, list):
        fields = [_field_error(entry) for entry in detail if isinstance(entry, dict)]
        said = "; ".join(f"{field.location}: {field.message}" for field in fields)
    else:
        said = "" if detail is None else str(detail)
    name = body.get("error")
    return " ".join(str(part) for part in (status, name, said) if part)


def _field_error(entry: dict[str, Any]) -> FieldError:
    location = entry.get("loc")
    parts = location if isinstance(location, list) else [location]
    return FieldError(
        location=".".join(str(part) for part in parts),
        message=str(entry.get("msg", "")),
        type=str(entry.get("type", "")),
    )
