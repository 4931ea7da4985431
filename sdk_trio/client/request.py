"""One logical call: its options, its deadline, its address. Pure.

A *call* is what the program asks for; it becomes one or more *attempts*, each one HTTP request.
"""

import enum
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from typing import Any, TypedDict, TypeVar
from urllib.parse import urlencode

import attrs

from ..config.secret import MASK
from .retry import is_idempotent

#: Methods whose requests have a length even without a body (RFC 9110, 8.6).
METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})

#: Methods that read only; nothing else is ever hedged (spec 2.2).
HEDGED_METHODS = frozenset({"GET", "HEAD"})

#: Routes with a credential of a customer in their path.
_SECRET_SEGMENT = re.compile(r"(/checkouts/client/|/customer-seats/claim/)[^/?]+")

HeaderList = list[tuple[bytes, bytes]]

QueryValue = str | int | float | bool | date | None
Query = (
    Mapping[str, QueryValue | Sequence[QueryValue]]
    | Iterable[tuple[str, QueryValue | Sequence[QueryValue]]]
)

T = TypeVar("T")


class Unset(enum.Enum):
    """The type of ``UNSET``: an option that was not given, where None means "none"."""

    UNSET = "UNSET"

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset.UNSET


@attrs.frozen(kw_only=True)
class CallOptions:
    """What a call, or a client made by ``with_options``, does otherwise than the settings say.

    ``attempt_timeout``, ``total_timeout`` and ``hedge_after`` are in seconds, above 0;
    ``total_timeout=None`` means no deadline and ``hedge_after=None`` no hedging. ``max_retries``
    is 0 or more. ``idempotent=True`` says that this call may be executed twice, ``False`` that it
    may not. ``idempotency_key`` replaces the generated one. ``accepts_any_status=True`` gives back
    answers of every status instead of raising ``ApiError``. ``headers`` are added to the
    settings' ones and win over them; None as a value removes one.
    """

    attempt_timeout: float | Unset = UNSET
    total_timeout: float | Unset | None = UNSET
    max_retries: int | Unset = UNSET
    hedge_after: float | Unset | None = UNSET
    idempotent: bool | Unset | None = UNSET
    idempotency_key: str | Unset = UNSET
    accepts_any_status: bool | Unset = UNSET
    access_token: str | Unset = attrs.field(default=UNSET, repr=False)
    headers: Mapping[str, str | None] = attrs.field(factory=dict, repr=False)

    def __attrs_post_init__(self) -> None:
        for name in ("attempt_timeout", "total_timeout", "hedge_after"):
            value = getattr(self, name)
            if value is not UNSET and value is not None and not value > 0:
                raise ValueError(f"{name} is {value!r}: it takes seconds, above 0")
        if self.max_retries is not UNSET and self.max_retries < 0:
            raise ValueError(f"max_retries is {self.max_retries}: it takes 0 or more")

    def merged_with(self, other: "CallOptions") -> "CallOptions":
        """Return these options with what ``other`` gives in their place; headers are joined."""
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
    access_token: str
    headers: Mapping[str, str | None]


_OPTION_NAMES = tuple(field.name for field in attrs.fields(CallOptions))
NO_OPTIONS = CallOptions()


def chosen(given: T | Unset, otherwise: T) -> T:
    """Return ``given``, or ``otherwise`` when it is unset."""
    return otherwise if isinstance(given, Unset) else given


@attrs.define(eq=False, kw_only=True)
class Call:
    """The state of one logical call on its way through the pipeline.

    The first part does not change; its times are in seconds. ``path`` is for people: it has no
    query, and a mask in place of a secret; ``url`` is what is sent. ``deadline`` is set when the
    call is sent, on the pipeline's clock, ``inf`` for none.
    ``attempts`` counts the requests that were handed to the transport. ``is_unconfirmed`` says
    that one of them may have reached the upstream, must not be executed twice, and has no answer.
    ``not_before`` is the earliest time of a further attempt that the upstream has asked for.
    """

    method: str
    path: str
    url: str
    origin: str
    headers: HeaderList = attrs.field(repr=False)
    content: bytes = attrs.field(repr=False, default=b"")
    token: str = attrs.field(repr=False, default="")
    idempotent: bool = True
    total_timeout: float | None = None
    attempt_timeout: float = 30.0
    max_retries: int = 3
    hedge_after: float | None = None
    is_stream: bool = False
    accepts_any_status: bool = False

    deadline: float = math.inf
    attempts: int = 0
    is_unconfirmed: bool = False
    not_before: float = -math.inf
    last_error: Exception | None = None

    def note_departure(self) -> None:
        """From now on the upstream may execute this write."""
        self.is_unconfirmed = True

    @property
    def may_be_hedged(self) -> bool:
        """Return whether a duplicate of an attempt may be sent."""
        return (
            self.hedge_after is not None
            and self.method in HEDGED_METHODS
            and self.idempotent
            and not self.is_stream
        )


def deadline_of(total_timeout: float | None, *, now: float) -> float:
    """Return when a call that starts ``now`` has to be over; ``inf`` when it need not be."""
    return math.inf if total_timeout is None else now + total_timeout


def may_execute_twice(method: str, options: CallOptions, *, upstream_honours_keys: bool) -> bool:
    """Return whether a call whose outcome is not known may be sent again.

    A key makes a write safe to repeat only when the upstream looks at it, so the settings must
    say so; ``idempotent`` in the options overrules both.
    """
    declared = chosen(options.idempotent, None)
    if declared is None and upstream_honours_keys:
        return True
    return is_idempotent(method, declared=declared)


def idempotency_key(method: str, options: CallOptions, *, new_key: Callable[[], str]) -> str | None:
    """Return the key that every attempt of this call carries; None for methods that need none."""
    if not isinstance(options.idempotency_key, Unset):
        return options.idempotency_key
    return None if is_idempotent(method, declared=None) else new_key()


def checked_path(path: str) -> str:
    """Return ``path`` if it is one below the base path, with or without a query.

    Raises:
        ValueError: it is an address of its own, has a fragment, or climbs out by dots. A path put
            together from someone else's text must not take the access token elsewhere.
    """
    if not path.startswith("/"):
        raise ValueError(f"the path {path!r} does not start with /: give it below the base path")
    plain = path.partition("?")[0]
    if "#" in path or "\\" in plain or plain.startswith("//"):
        raise ValueError(f"the path {plain!r} holds //, \\ or #: quote what is part of a name")
    if "/." in plain.replace("%2e", ".").replace("%2E", "."):
        segments = plain.replace("%2e", ".").replace("%2E", ".").split("/")
        if "." in segments or ".." in segments:
            raise ValueError(f"the path {plain!r} has a segment of dots: quote what is a name")
    return path


def without_path_secrets(path: str) -> str:
    """Return a path, or an address, as it may be shown: with a mask for what opens something."""
    return _SECRET_SEGMENT.sub(rf"\1{MASK}", path)


def join_url(base: str, path: str, query: str) -> str:
    """Return the address of ``path`` (as :func:`checked_path` gave it) below ``base``."""
    url = base + path
    if not query:
        return url
    return f"{url}{'&' if '?' in path else '?'}{query}"


def encode_query(params: Query | None) -> str:
    """Return the query string: lists become repeated keys, None is left out."""
    if not params:
        return ""
    pairs = params.items() if isinstance(params, Mapping) else params
    flat: list[tuple[str, str]] = []
    for key, value in pairs:
        if isinstance(value, Sequence) and not isinstance(value, str):
            flat.extend((key, _query_text(item)) for item in value if item is not None)
        elif value is not None:
            flat.append((key, _query_text(value)))
    return urlencode(flat)


def _query_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, date):  # datetime is one
        return value.isoformat()
    return str(value.value) if isinstance(value, enum.Enum) else str(value)


def merge_headers(base: HeaderList, extra: Mapping[str, str | None]) -> HeaderList:
    """Return ``base`` with the headers of ``extra`` in place of those of the same name."""
    if not extra:
        return list(base)
    replaced = {name.lower().encode("ascii") for name in extra}
    kept = [(name, value) for name, value in base if name.lower() not in replaced]
    added = [
        (name.encode("ascii"), value.encode("latin-1"))
        for name, value in extra.items()
        if value is not None
    ]
    return kept + added
