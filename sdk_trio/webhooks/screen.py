"""Screening: every check of a request that needs neither its body nor its keys. Pure.

All requests take this one path, whatever their server. :meth:`Screen.screen` checks connection and
head: HTTPS, path, method, source, media type. Our own server knows which requests of a connection
have the same head, so the result is remembered and reused. The rate is counted for each request;
the size is checked where a body has to be awaited.

The rate limit is a token bucket for each source address. Memory is bounded, so sources have to be
forgotten, and a forgotten source gets a full bucket again. Therefore sources that were refused are
remembered separately: a flood of new addresses only displaces other new addresses. To displace an
offender, an attacker has to get other addresses refused, which costs a minute's allowance each.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from hmac import compare_digest
from typing import TYPE_CHECKING, Final

import msgspec

from ..base.http import DirectRequest, Headers
from ..base.throttle import TokenBucket
from ..config import Settings
from . import answers
from .answers import RequestRefusal
from .origin import ORIGIN_HEADERS, AllowedSources, RequestOrigin, TrustedProxies, source_of
from .signed_request import SIMULATION_HEADER, simulation_mark
from .verdict import signed_positions

if TYPE_CHECKING:
    from .sources.source import Source

#: The maximum length of a logged path or method of a request that is not for us, in characters.
SHOWN_PATH_CHARACTERS: Final = 200
SHOWN_METHOD_CHARACTERS: Final = 32

#: The maximum number of remembered sources: about 2.5 MB.
MAX_SOURCES: Final = 10_000
#: The number of them that are reserved for sources that have been refused.
MAX_OFFENDERS: Final = 2_000

#: Added to a wait, so that rounding never refuses a caller that waits exactly that long.
_ROUNDING_SECONDS: Final = 0.001

# Not a dict: to find its first key, it scans the gaps that removed keys leave.
_Buckets = OrderedDict[str | int | None, TokenBucket]


class RateLimit:
    """Limits each source to ``per_minute`` deliveries a minute (``RateLimitPerMinute``).

    A source that was quiet for a minute may send ``per_minute`` at once. An IPv6 source is its /64,
    because one subscriber holds that many addresses. IPv4 written as IPv6 is IPv4.

    Raises:
        ValueError: ``per_minute`` is below 1.
    """

    __slots__ = ("_new", "_offenders", "_per_minute", "_per_second")

    def __init__(self, per_minute: int) -> None:
        if per_minute < 1:
            raise ValueError("a rate limit is at least 1 a minute; remove the key for no limit")
        self._per_minute = float(per_minute)
        self._per_second = per_minute / 60.0
        # In the order of insertion: the first key was seen longest ago.
        self._new: _Buckets = OrderedDict()
        self._offenders: _Buckets = OrderedDict()

    def __len__(self) -> int:
        """Return the number of remembered sources: at most ``MAX_SOURCES``."""
        return len(self._new) + len(self._offenders)

    def admit(self, address: str | None, now: float) -> float | None:
        """Count one delivery, unless its source has to wait.

        Args:
            address: the source; all senders of unknown address (None) are one source.
            now: seconds of a monotonic clock. If it goes back, no time has passed.

        Returns:
            None if it is admitted, otherwise the seconds to wait, for ``Retry-After``: a caller
            that waits this long, and is the only one at its address, is then admitted. A refused
            delivery does not extend the wait.
        """
        source = source_of(address)
        bucket = self._offenders.pop(source, None)
        offender = bucket is not None
        if bucket is None:
            bucket = self._new.pop(source, None)
        if bucket is None:
            bucket = TokenBucket(per_second=self._per_second, burst=self._per_minute)
        if wait := bucket.admit(now):
            self._remember_offender(source, bucket)
            return wait + _ROUNDING_SECONDS
        # An offender whose bucket is full again counts as a new source.
        if offender and bucket.missing(now) > 1.0:
            self._remember_offender(source, bucket)
        else:
            self._remember_new(source, bucket)
        return None

    def _remember_new(self, source: str | int | None, bucket: TokenBucket) -> None:
        self._new[source] = bucket
        if len(self._new) > MAX_SOURCES - MAX_OFFENDERS:
            self._new.popitem(last=False)

    def _remember_offender(self, source: str | int | None, bucket: TokenBucket) -> None:
        self._offenders[source] = bucket
        if len(self._offenders) > MAX_OFFENDERS:
            # The offender that was seen longest ago becomes a new source again.
            self._remember_new(*self._offenders.popitem(last=False))


_MEDIA: Final = RequestRefusal("media", answers.UNSUPPORTED_MEDIA)
_SOURCE: Final = RequestRefusal("source", answers.SOURCE_REFUSED)
_NOT_HTTPS: Final = RequestRefusal(
    "not_https",
    answers.INVALID,
    {
        "detail": "the request is not HTTPS and RequireHttps is true: add a proxy that ends TLS to "
        "Server:TrustedProxies; for experiments, set Webhooks:RequireHttps to false."
    },
)


class Screened(msgspec.Struct, frozen=True, gc=False):
    """The decision about a request's connection and head, for the later steps.

    ``peer`` is the host and the scheme of the connection, on which it depends, too.
    ``identifier`` is the one in a tenant's address; None for the host's address. ``source`` is the
    source of the address, None for the upstream's. ``refusal`` is None for a request that passed.
    ``signed_positions`` are those of the three signed headers; None
    unless each of them was sent exactly once.
    """

    screen: "Screen"
    origin: RequestOrigin
    identifier: str | None
    refusal: RequestRefusal | None
    signed_positions: tuple[int, int, int] | None
    source: "Source | None" = None
    peer: tuple[str | None, str] = (None, "")

    @property
    def signer(self) -> str:
        """The signer of the address' source; "" for the upstream's address."""
        return "" if self.source is None else self.source.signer


class Screen:
    """The screening rules of one configuration.

    Args:
        settings: validated settings.
        clock: returns seconds that never go back.
        on_contradiction: see :class:`~sdk_trio.webhooks.origin.TrustedProxies`.
        sources: the sources by their routes.
        previous: the rules that these replace. A rate that has not changed keeps its counts:
            otherwise every reload would give each source a full allowance again.

    Raises:
        OptionsValidationError: a range cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Callable[[], float],
        on_contradiction: Callable[[str | None], object] | None = None,
        sources: "Mapping[str, Source] | None" = None,
        previous: "Screen | None" = None,
    ) -> None:
        options = settings.webhooks
        self._clock = clock
        self._path = options.path
        self._source_at = sources or {}
        # The prefix of tenants' addresses; None without tenants.
        self._tenant_path = (
            f"{options.path.rstrip('/')}/" if settings.multi_tenant.enabled else None
        )
        self._require_https = options.require_https
        self._simulation_mark = simulation_mark(settings)
        self._sources = AllowedSources(options.allowed_source_ip_ranges)
        self._per_minute = options.rate_limit_per_minute
        self.proxies: TrustedProxies = TrustedProxies(
            settings.server.trusted_proxies, settings.server.forwarded_headers, on_contradiction
        )
        #: None: there is no rate limit.
        self.rate: RateLimit | None = None
        if previous is not None and previous._per_minute == self._per_minute:
            self.rate = previous.rate
        elif self._per_minute is not None:
            self.rate = RateLimit(self._per_minute)

    def screen(self, request: DirectRequest) -> Screened:
        """Check a request's connection and head."""
        template = request.template
        known: Screened | None = None if template is None else template.memo
        host = request.client[0] if request.client else None
        peer = host, request.scheme
        if known is not None and known.screen is self and known.peer == peer:
            return known
        is_simulated = self._is_simulated(request.headers)
        origin = self.proxies.resolve(host, request.scheme, request.headers)
        source = self._source_at.get(request.path)
        identifier = self._identifier_in(request.path)
        refusal = self._check(request, origin, identifier, source, is_simulated=is_simulated)
        positions = None if source is not None else signed_positions(request.headers)
        screened = Screened(self, origin, identifier, refusal, positions, source, peer)
        if template is not None and not template.varying & _SCREENED_HEADERS:
            template.memo = screened
        return screened

    def limit_rate(self, rate: RateLimit, origin: RequestOrigin) -> RequestRefusal | None:
        """Count a request of its source; return the refusal if the source must wait."""
        wait = rate.admit(origin.address or "", self._clock())
        return None if wait is None else RequestRefusal("rate", answers.rate_limited(wait))

    def _check(
        self,
        request: DirectRequest,
        origin: RequestOrigin,
        identifier: str | None,
        source: "Source | None",
        *,
        is_simulated: bool,
    ) -> RequestRefusal | None:
        # A delivery of the simulator counts as HTTPS, from an address that may send.
        if self._require_https and not origin.secure and not is_simulated:
            return _NOT_HTTPS
        path, method = request.path, request.method
        if path != self._path and identifier is None and source is None:
            fields = {"path": path[:SHOWN_PATH_CHARACTERS], "configured": self._path}
            return RequestRefusal("path", answers.NOT_FOUND, fields)
        if method != "POST":
            fields = {"method": method[:SHOWN_METHOD_CHARACTERS]}
            return RequestRefusal("method", answers.METHOD_NOT_ALLOWED, fields)
        # The ranges are the upstream's.
        if source is None and not self._sources.allows(origin.address) and not is_simulated:
            return _SOURCE
        return None if _is_plain_json(request.headers) else _MEDIA

    def _identifier_in(self, path: str) -> str | None:
        """Return the identifier in a tenant's address, whether known or not, otherwise None."""
        if path == self._path or not self._tenant_path or not path.startswith(self._tenant_path):
            return None
        identifier = path.removeprefix(self._tenant_path)
        return identifier if identifier and "/" not in identifier else None

    def _is_simulated(self, headers: Headers) -> bool:
        """Return whether the simulator of this receiver sent a request."""
        mark = self._simulation_mark
        return mark is not None and any(
            name.lower() == _SIMULATION_HEADER and compare_digest(value, mark)
            for name, value in headers
        )


_SIMULATION_HEADER: Final = SIMULATION_HEADER.encode()

#: The headers whose values a decision depends on.
_SCREENED_HEADERS: Final = ORIGIN_HEADERS | {
    b"content-type",
    b"content-encoding",
    _SIMULATION_HEADER,
}


def _is_plain_json(headers: Headers) -> bool:
    """Return whether the headers announce JSON, or no media type, without a content encoding."""
    for name, value in headers:
        if name == b"content-type":
            media = value.partition(b";")[0].strip().lower()
            if media != b"application/json" and not media.endswith(b"+json"):
                return False
        # Nothing is decompressed for a sender that is not verified yet.
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            return False
    return True


def declared_size(headers: Headers) -> int | None:
    """Return the declared size of a body in bytes; None if there is none, or it is not a number.

    If it is declared several times, the first value counts.
    """
    for name, value in headers:
        if name == b"content-length":
            # More than 15 digits are above every limit, and int() of a long text takes time.
            return int(value[:16]) if value.isdigit() else None
    return None
