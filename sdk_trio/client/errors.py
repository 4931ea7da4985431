"""The errors that a call to the upstream API can end with.

::

    SdkError
    └── CallError                       method, path, attempts; of the last answer: status, request
        │                               id, body
        ├── ApiError                    the upstream answered, and not with success
        │   ├── BadRequestError             400
        │   ├── AuthenticationError         401
        │   ├── PermissionDeniedError       403
        │   ├── NotFoundError               404
        │   ├── ConflictError               409
        │   ├── UnprocessableEntityError    422, with the fields that are wrong
        │   ├── RateLimitedError            429, or a limit known beforehand
        │   └── ServerError                 5xx
        ├── ConnectionFailedError       no whole answer: no connection, or it broke
        │   └── AttemptTimeoutError     no whole answer within TimeoutMs
        ├── DeadlineExceededError       no success within the call's total time
        ├── CircuitOpenError            not sent: the upstream has been failing
        ├── OutcomeUnknownError         a write was sent, and whether it took effect is not known
        └── UnexpectedAnswerError       a success whose body is not of the promised form

No message holds a query string or a token: every text is given to ``mask`` first.
"""

import enum
import re
from collections.abc import Iterable
from typing import Any, ClassVar, TypeVar

import attrs

from ..config.secret import LEAST_MASKED, MASK
from ..errors import EXIT_FAILURE, EXIT_UNAVAILABLE, SdkError
from .json_text import UnreadableJsonError, read_json

#: The longest part of an unreadable body that a message quotes, in characters.
_QUOTED_CHARACTERS = 200

#: The nesting beyond which the body of an error stays a text: printing, comparing or pickling a
#: deeper value would exhaust the stack, and no person reads it.
_ERROR_DEPTH = 100


class FailureKind(enum.Enum):
    """The kinds of attempts without an acceptable answer, by what the upstream may have done."""

    NOT_SENT = enum.auto()
    """No byte of the request left: any method can be tried again."""
    NO_CONNECTION_FREE = enum.auto()
    """Not sent either, but for want of a connection of ours: no fault of the upstream."""
    NOT_PROCESSED = enum.auto()
    """The upstream promised not to have acted on it (GOAWAY, REFUSED_STREAM): no fault either."""
    UNCONFIRMED = enum.auto()
    """The request left, at least perhaps, and no whole answer came."""
    REFUSED = enum.auto()
    """Another attempt would fail in the same way: an invalid request, an open circuit."""


class CallError(SdkError):
    """Base of the errors of calls; it can be copied and pickled.

    ``method`` and ``path`` (without its query) say which call, ``attempts`` how many requests
    were sent for it. ``status``, ``request_id`` and ``body`` are of the last answer that the call
    got, None when there was none or it did not say.
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
        # Python makes a copy of an exception from its arguments alone, which lack the keyword
        # arguments that are required here. An incident is known by its identity, which no copy has,
        # so it is left out.
        kept = {name: value for name, value in vars(self).items() if name != "incident"}
        return _remade, (type(self), self.args), kept

    @property
    def outcome(self) -> str:
        """Return the name of this outcome in metrics: ``not_found`` for ``NotFoundError``."""
        # Derived, so that a new error cannot be forgotten in the metrics.
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
    """The upstream answered with ``status``, which is no success.

    ``body`` is the answer: parsed JSON, or text if it was no JSON; of more than 1 MiB it is the
    beginning. ``error_type`` and ``detail`` are its members of these meanings, None when it has
    none. ``retry_after`` is in seconds.
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
        """Return the upstream's explanation: a text, or a list for status 422."""
        return self.body.get("detail") if isinstance(self.body, dict) else None


class BadRequestError(ApiError):
    """400: the upstream could not make sense of the request."""


class AuthenticationError(ApiError):
    """401: the access token is missing, wrong, expired, or of the other environment."""


class PermissionDeniedError(ApiError):
    """403: the access token is good, but not for this."""


class NotFoundError(ApiError):
    """404: no such record or route. A version header with an unknown value has this effect too."""


class ConflictError(ApiError):
    """409: the record's state forbids it."""


@attrs.frozen
class FieldError:
    """One fault of a request: its place (``body.items.0.name``), a message, and its kind."""

    location: str
    message: str
    type: str


class UnprocessableEntityError(ApiError):
    """422: fields of the request are wrong; ``fields`` lists them."""

    @property
    def fields(self) -> tuple[FieldError, ...]:
        """Return the faults by field; empty when the upstream named none."""
        detail = self.detail
        entries = detail if isinstance(detail, list) else []
        return tuple(_field_error(entry) for entry in entries if isinstance(entry, dict))


class RateLimitedError(ApiError):
    """429, or known beforehand: an earlier 429 shut this token's gate for longer than we wait.

    ``retry_after`` is the time to wait in seconds, None when the upstream gave none. For a call
    that was not sent ``attempts`` is 0.
    """

    exit_code = EXIT_UNAVAILABLE


class ServerError(ApiError):
    """5xx: the upstream failed."""

    exit_code = EXIT_UNAVAILABLE


class ConnectionFailedError(CallError):
    """No whole answer came: no connection, or it broke. ``kind`` says whether to try again."""

    #: The failure of the dial or connection that this call shared with others, so that the breaker
    #: counts it once; None when only this call failed.
    incident: object | None = None

    def __init__(self, message: str, *, kind: FailureKind, **context: Any) -> None:
        self.kind = kind
        super().__init__(message, **context)


class AttemptTimeoutError(ConnectionFailedError):
    """The last attempt brought no whole answer within TimeoutMs."""


class DeadlineExceededError(CallError):
    """The call's total time is over; no further attempt is made.

    The cause is the error that the last attempt would have ended the call with, if one had ended.
    """


class CircuitOpenError(CallError):
    """Not sent: the upstream has been failing, and is left alone for ``retry_after`` seconds.

    ``retry_after`` is None when the circuit was opened by hand.
    """


class OutcomeUnknownError(CallError):
    """A write was sent and no answer came: whether it took effect is not known.

    It is not repeated by itself, because that could execute it twice. Look at the upstream's
    state first, or pass ``idempotent=True`` for a call that may be executed twice. The cause is
    the failure that hid the answer.
    """


class UnexpectedAnswerError(CallError):
    """The upstream answered with success, and with a body that is not of the promised form.

    A write *has* been executed: do not send it again. ``status`` and ``request_id`` are the
    answer's, ``content`` is its body as it came (decompressed), empty when it broke on its way or
    was too large.
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
    """Build the error for an answer that is no success.

    ``secrets`` are masked wherever the answer repeats them.
    """
    # Masked before it is parsed: afterwards the secret could be in any of a thousand texts.
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
    Tools that report a failure with the variables of its frames, as Sentry does by default, would
    send them along. The type and the text of each cause stay.
    """
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        # A context that Python keeps and does not print has frames as well, and reporters read it.
        cause = cause.__cause__ or cause.__context__
    return error


def mask(text: str, secrets: Iterable[str]) -> str:
    """Replace ``secrets`` in ``text``, but those that are too short to be any.

    They are found in JSON too, where any character may be written as an escape, so that the parsed
    body does not hold them either.
    """
    for secret in secrets:
        # A shorter one is no real secret, and would take letters out of every word.
        if len(secret) < LEAST_MASKED:
            continue
        # The plain spelling first: it is nearly all there is, and needs no pattern.
        text = text.replace(secret, MASK)
        # Only a text with one of these can hold an escaped spelling.
        if "\\" in text or "%" in text:
            text = re.sub("".join(map(_spellings, secret)), MASK, text)
    return text


def _spellings(character: str) -> str:
    """Return a pattern of one character of a secret: as it is, or escaped for JSON or a URL."""
    code = f"{ord(character):02x}"
    # JSON inside JSON doubles the backslashes. Without a bound on their number, a text of nothing
    # but backslashes would take time proportional to the square of its length.
    return rf"(?:\\{{0,4}}{re.escape(character)}|\\{{1,4}}u00(?i:{code})|%(?i:{code}))"


def _parse(text: str) -> Any:
    try:
        return read_json(text, max_depth=_ERROR_DEPTH)
    except UnreadableJsonError:
        return text


def _printable(text: str) -> str:
    """Return ``text`` without lone surrogates, which no log can encode."""
    # JSON may hold half a surrogate pair; writing it to a log would raise an error about the error.
    return text.encode("utf-8", "backslashreplace").decode()


def _message(status: int, body: Any) -> str:
    if 300 <= status < 400:
        # The upstream answers a path without its last slash like that. Following would repeat a
        # POST as a GET (RFC 9110, 15.4).
        return f"{status}, a redirect, which is not followed: the path may lack its last slash"
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
