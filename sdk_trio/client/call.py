"""One call: its options, its arguments, its address, and its progress. Pure.

A *call* is one request by the program; it becomes one or more *attempts*, each one HTTP request.
:class:`Call` is its only record in all layers. The functions here decide whether it may be executed
twice, its address and its headers.
"""

import enum
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import date
from functools import lru_cache
from typing import Any, Protocol, TypedDict, TypeVar

import attrs
import httpx
import msgspec

from ..base.http import IDEMPOTENT_METHODS, is_token
from ..config.secret import MASK
from .errors import CallError, ConnectionFailedError

#: Methods whose requests have a Content-Length even without a body (RFC 9110, 8.6).
METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})

#: Read-only methods. No other request is hedged, because both attempts may be executed.
HEDGED_METHODS = frozenset({"GET", "HEAD"})

#: Headers that frame a message, keep its connection open (RFC 9110, 7.6.1; RFC 9112, 6), or name
#: the host. Only the transport sets them. A caller's could make the upstream read part of a request
#: as the next one, on a connection that carries the token.
FRAMING_HEADERS = frozenset(
    {
        "connection",
        "content-length",
        "host",
        "http2-settings",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)

#: A header value of one line that starts and ends with a visible character. Readers disagree about
#: bytes beyond ASCII.
_HEADER_VALUE = re.compile(r"(?:[!-~](?:[ -~\t]*[!-~])?)?", re.ASCII)

_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")

#: Routes with a customer's credential in their path, which logs and errors must not contain.
_SECRET_SEGMENT = re.compile(r"(/checkouts/client/|/customer-seats/claim/)[^/?]+")


class HeaderList:
    """The headers of a request, including the token; the repr shows no value.

    Not a list, because error reporters print lists item by item, bypassing the repr.
    """

    __slots__ = ("_pairs", "_parsed")

    def __init__(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        self._pairs = tuple(pairs)
        self._parsed: httpx.Headers | None = None

    @property
    def parsed(self) -> httpx.Headers:
        """Return them for httpx, which copies parsed headers and parses all others."""
        if self._parsed is None:
            self._parsed = httpx.Headers(self._pairs)
        return self._parsed

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        return iter(self._pairs)

    def __repr__(self) -> str:
        names = ", ".join(name.decode("ascii", "replace") for name, _ in self)
        return f"<headers {names}>"


QueryValue = str | int | float | bool | date | None
Query = (
    Mapping[str, QueryValue | Sequence[QueryValue]]
    | Iterable[tuple[str, QueryValue | Sequence[QueryValue]]]
)

T = TypeVar("T")


class Unset(enum.Enum):
    """The type of ``UNSET``: an option that was not given; None means "none"."""

    UNSET = "UNSET"

    def __repr__(self) -> str:
        return "UNSET"


# An enumeration of one member: type checkers distinguish it from None and other values by ``is``.
UNSET = Unset.UNSET


@attrs.frozen(kw_only=True)
class CallOptions:
    """Options of a call, or of a client made by ``with_options``, that override the settings.

    ``attempt_timeout``, ``total_timeout`` and ``hedge_after`` are in seconds, above 0;
    ``total_timeout=None`` means no deadline and ``hedge_after=None`` no hedging. ``max_retries`` is
    0 or more. ``idempotent=True`` means that this call may be executed twice, ``False`` that it may
    not. ``idempotency_key`` replaces the generated one. ``accepts_any_status=True`` returns answers
    of every status instead of raising ``ApiError``. ``max_answer_bytes`` limits the answer's body,
    decompressed; None means no limit. ``organization_id`` names the call's organization, for tokens
    of several. ``headers`` add to the settings' headers and override them; a None value removes
    one. Headers that frame a message (``Content-Length``, ``Transfer-Encoding``, ``Connection``,
    ``Host``, ...) are refused.

    Raises:
        TypeError, ValueError: an option has the wrong type or an invalid value.
    """

    attempt_timeout: float | Unset = UNSET
    total_timeout: float | Unset | None = UNSET
    max_retries: int | Unset = UNSET
    hedge_after: float | Unset | None = UNSET
    idempotent: bool | Unset | None = UNSET
    idempotency_key: str | Unset = UNSET
    accepts_any_status: bool | Unset = UNSET
    max_answer_bytes: int | Unset | None = UNSET
    access_token: str | Unset = attrs.field(default=UNSET, repr=False)
    organization_id: str | Unset = UNSET
    headers: Mapping[str, str | None] = attrs.field(factory=dict, repr=False)

    def __attrs_post_init__(self) -> None:
        _check_seconds("attempt_timeout", self.attempt_timeout)
        if self.total_timeout is not None:
            _check_seconds("total_timeout", self.total_timeout)
        if self.hedge_after is not None:
            _check_seconds("hedge_after", self.hedge_after)
        _check_count("max_retries", self.max_retries, least=0)
        if self.max_answer_bytes is not None:
            _check_count("max_answer_bytes", self.max_answer_bytes, least=1)
        if self.idempotency_key is not UNSET:
            _check_header_value("idempotency_key", self.idempotency_key)
        if self.organization_id is not UNSET:
            _check_header_value("organization_id", self.organization_id)
        if self.headers:
            _check_headers(self.headers)

    def merged_with(self, other: "CallOptions") -> "CallOptions":
        """Return these options, overridden by those set in ``other``; headers are merged."""
        if other is NO_OPTIONS:
            return self
        given = {
            name: value
            for name in _OPTION_NAMES
            if (value := getattr(other, name)) is not UNSET and name != "headers"
        }
        return attrs.evolve(self, **given, headers={**self.headers, **other.headers})


class OptionFields(TypedDict, total=False):
    """The fields of :class:`CallOptions` as keyword arguments."""

    attempt_timeout: float
    total_timeout: float | None
    max_retries: int
    hedge_after: float | None
    idempotent: bool | None
    idempotency_key: str
    accepts_any_status: bool
    max_answer_bytes: int | None
    access_token: str
    organization_id: str
    headers: Mapping[str, str | None]


def _check_seconds(name: str, value: object) -> None:
    if value is UNSET:
        return
    # True would count as one second.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}: it must be seconds above 0")
    if not value > 0:
        raise ValueError(f"{name} is {value!r}: it must be seconds above 0")


def _check_count(name: str, value: object, *, least: int) -> None:
    if value is UNSET:
        return
    # As above: True would count as one retry.
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}: it must be an integer from {least}")
    if value < least:
        raise ValueError(f"{name} is {value}: it must be an integer from {least}")


def _check_headers(headers: object) -> None:
    if not isinstance(headers, Mapping):
        raise TypeError("headers must be a mapping of names to values")
    for name, value in headers.items():
        if not isinstance(name, str):
            raise TypeError(f"headers has the name {name!r}: names must be text")
        if not is_token(name):
            raise ValueError(f"headers has the invalid name {name!r}")
        # With a second Content-Length or Transfer-Encoding, two servers may disagree about the end
        # of the request (RFC 9112, 11.2: request smuggling).
        if name.lower() in FRAMING_HEADERS:
            raise ValueError(f"headers has {name!r}, which only the client may set: remove it")
        if value is not None:
            _check_header_value(f"headers[{name!r}]", value)


def _check_header_value(where: str, value: object) -> None:
    # The value is not quoted, because it may be a credential.
    if not isinstance(value, str):
        raise TypeError(f"{where} must be text, not {type(value).__name__}")
    if not _HEADER_VALUE.fullmatch(value):
        raise ValueError(
            f"{where} has a line break, a control character, a non-ASCII character, or leading or "
            "trailing white space: remove it"
        )


_OPTION_NAMES = tuple(field.name for field in attrs.fields(CallOptions))
NO_OPTIONS = CallOptions()


#: Parsing an address costs more than the rest of a request object, and addresses recur.
parsed_url = lru_cache(maxsize=512)(httpx.URL)


def chosen(given: T | Unset, otherwise: T) -> T:
    """Return ``given``, or ``otherwise`` if ``given`` is unset."""
    return otherwise if isinstance(given, Unset) else given


@attrs.define(kw_only=True)
class Call:
    """One call, from its arguments to its answer; times are in seconds.

    The first part is the request, which does not change. ``path`` is below the base path, with or
    without a query; ``query`` are pairs of text, with a list's key repeated. ``json`` is a body as
    plain JSON values, UNSET if there is none (None is the JSON null); ``form`` are the fields of a
    form; ``content`` is a raw body. ``name`` is the operation's, empty for a route without one.

    The pipeline fills in the second part when the call is sent, once; a call to be sent again is
    first copied by ``attrs.evolve``. ``url`` is the requested address, ``max_answer_bytes`` the
    limit for the body of a success (None: no limit), ``secrets`` the texts to be masked in every
    message.

    The third part is the call's progress, which is not copied. ``deadline`` is on the pipeline's
    clock, ``inf`` for none. ``attempts`` counts the requests passed to the transport.
    ``is_unconfirmed`` is true if one of them may have reached the upstream, must not be executed
    twice, and has no answer. ``not_before`` is the earliest time of a further attempt requested by
    the upstream. ``head`` is the last answer whose head has arrived, with or without its body;
    ``last`` is the answer or error of the last finished attempt, ``refusal`` the breaker's refusal
    of another one.
    """

    method: str
    # Not in the repr, as it may be personal or secret: error reports include variables.
    path: str = attrs.field(repr=False)
    name: str = ""
    query: tuple[tuple[str, str], ...] = attrs.field(default=(), repr=False)
    json: Any | Unset = attrs.field(default=UNSET, repr=False)
    form: tuple[tuple[str, str], ...] | None = attrs.field(default=None, repr=False)
    content: bytes | None = attrs.field(default=None, repr=False)
    options: CallOptions = NO_OPTIONS

    url: str = attrs.field(init=False, default="", repr=False)
    origin: str = attrs.field(init=False, default="")
    headers: HeaderList = attrs.field(init=False, default=HeaderList(()), repr=False)
    token: str = attrs.field(init=False, default="", repr=False)
    secrets: tuple[str, ...] = attrs.field(init=False, default=(), repr=False)
    idempotent: bool = attrs.field(init=False, default=True)
    total_timeout: float | None = attrs.field(init=False, default=None)
    attempt_timeout: float = attrs.field(init=False, default=30.0)
    max_retries: int = attrs.field(init=False, default=3)
    hedge_after: float | None = attrs.field(init=False, default=None)
    is_stream: bool = attrs.field(init=False, default=False)
    accepts_any_status: bool = attrs.field(init=False, default=False)
    max_answer_bytes: int | None = attrs.field(init=False, default=None)

    deadline: float = attrs.field(init=False, default=math.inf, eq=False)
    attempts: int = attrs.field(init=False, default=0, eq=False)
    is_unconfirmed: bool = attrs.field(init=False, default=False, eq=False)
    not_before: float = attrs.field(init=False, default=-math.inf, eq=False)
    head: httpx.Response | None = attrs.field(init=False, default=None, eq=False)
    last: httpx.Response | ConnectionFailedError | None = attrs.field(
        init=False, default=None, eq=False
    )
    refusal: CallError | None = attrs.field(init=False, default=None, eq=False)

    @property
    def shown_path(self) -> str:
        """Return the path for logs and messages: without its query, and with secrets masked."""
        return without_path_secrets(self.path.partition("?")[0])

    @property
    def may_be_hedged(self) -> bool:
        """Return whether a duplicate of an attempt may be sent."""
        return (
            self.hedge_after is not None
            and self.method in HEDGED_METHODS
            and self.idempotent
            and not self.is_stream
        )

    def note_departure(self) -> None:
        """Note that the upstream may execute this write from now on."""
        self.is_unconfirmed = True


class OperationSender(Protocol):
    """The part of the client that resources use to send calls."""

    async def send(self, call: Call) -> httpx.Response:
        """Send ``call`` and return its successful answer with the whole body.

        Raises:
            CallError: there is no successful answer.
        """
        ...

    def stream(self, call: Call) -> AbstractAsyncContextManager[httpx.Response]:
        """Send ``call`` as :meth:`send` does; the body is read while the context is open."""
        ...


def deadline_of(total_timeout: float | None, *, now: float) -> float:
    """Return the deadline of a call that starts ``now``; ``inf`` if it has none."""
    return math.inf if total_timeout is None else now + total_timeout


def is_idempotent(method: str, *, declared: bool | None) -> bool:
    """Return whether ``method`` (upper case) may be executed twice; ``declared`` wins if given."""
    return method in IDEMPOTENT_METHODS if declared is None else declared


def may_execute_twice(method: str, options: CallOptions, *, upstream_honours_keys: bool) -> bool:
    """Return whether a call with an unknown outcome may be repeated.

    A key makes a write safe to repeat only if the upstream honors it, which the settings must
    declare; ``idempotent`` in the options overrides both.
    """
    declared = chosen(options.idempotent, None)
    # With keys, the upstream recognizes the second execution and returns the first result.
    if declared is None and upstream_honours_keys:
        return True
    return is_idempotent(method, declared=declared)


def credentials_in(headers: Mapping[str, str | None]) -> Iterator[str]:
    """Yield credentials in a caller's headers, to be masked like the token."""
    for name, value in headers.items():
        if value and name.lower() in ("authorization", "proxy-authorization", "cookie"):
            # Without the scheme: an answer repeats the credential, not the word Bearer.
            yield value.rpartition(" ")[2]


def idempotency_key(method: str, options: CallOptions, *, new_key: Callable[[], str]) -> str | None:
    """Return the key of every attempt of this call; None for methods that need none."""
    if not isinstance(options.idempotency_key, Unset):
        return options.idempotency_key
    # By the method only: even if the caller allows executing a POST twice, the upstream can
    # recognize the second one.
    return None if is_idempotent(method, declared=None) else new_key()


def checked_method(method: str) -> str:
    """Return ``method`` in upper case.

    Raises:
        ValueError: it is not the name of a method.
    """
    if not is_token(method):
        raise ValueError(f"{method!r} is not an HTTP method")
    return method.upper()


def checked_path(path: str) -> str:
    """Return ``path`` if it is below the base path, with or without a query.

    Raises:
        ValueError: it is a whole address, has a fragment or a control character, or leaves the base
            path by dots. A path built from a stranger's text must not send the access token
            elsewhere.
    """
    if not path.startswith("/"):
        raise ValueError(f"the path {path!r} must start with /, below the base path")
    plain = path.partition("?")[0]
    if _CONTROL_CHARACTER.search(path):
        raise ValueError(f"the path {plain!r} has a control character: percent-encode it")
    # A host would follow "//", and many readers treat a backslash as a slash: either would send the
    # token to another server.
    if "#" in path or "\\" in plain or plain.startswith("//"):
        raise ValueError(f"the path {plain!r} has //, \\ or #: percent-encode them in a name")
    # Servers and proxies decode %2e before resolving dots, so both spellings are checked.
    if "/." in plain.replace("%2e", ".").replace("%2E", "."):
        segments = plain.replace("%2e", ".").replace("%2E", ".").split("/")
        if "." in segments or ".." in segments:
            raise ValueError(f"the path {plain!r} has a segment of dots: remove it")
    return path


def without_path_secrets(path: str) -> str:
    """Return a path or address with any customer's credential masked."""
    # Routes such as /checkouts/client/SECRET have a customer's credential in the path
    # (docs/adr/0020-exception-text.md).
    return _SECRET_SEGMENT.sub(rf"\1{MASK}", path)


def join_url(base: str, path: str, query: str) -> str:
    """Return the address of ``path`` (from :func:`checked_path`) below ``base``.

    Raises:
        ValueError: it is too long, or has half a surrogate pair.
    """
    url = base + path
    if query:
        url = f"{url}{'&' if '?' in path else '?'}{query}"
    try:
        parsed_url(url)
    except (httpx.InvalidURL, UnicodeError) as error:
        fault = str(error) if isinstance(error, httpx.InvalidURL) else "half a character"
    else:
        return url
    raise ValueError(f"the path {path.partition('?')[0][:200]!r} gives no valid address: {fault}")


def encode_json(value: object) -> bytes:
    """Return ``value`` as JSON.

    Raises:
        TypeError, ValueError: a part of it has no JSON form, or is nested too deeply.
    """
    try:
        return msgspec.json.encode(value)
    # Raised outside the handler: the frames of a RecursionError hold the body.
    except RecursionError:
        pass
    raise ValueError("the body is nested too deeply, or contains itself")


def merge_headers(base: HeaderList, extra: Mapping[str, str | None]) -> HeaderList:
    """Return ``base``, with headers replaced by those of the same name in ``extra``."""
    # Header names are case-insensitive (RFC 9110, 5.1).
    replaced = {name.lower().encode("ascii") for name in extra}
    kept = [(name, value) for name, value in base if name.lower() not in replaced]
    added = [
        (name.encode("ascii"), value.encode("ascii"))
        for name, value in extra.items()
        if value is not None
    ]
    return HeaderList([*kept, *added])
