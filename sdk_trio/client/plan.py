"""The plan of a client, derived from the settings: addresses, headers, policies. Pure."""

import re
from urllib.parse import urlsplit

import attrs

from ..base.http import DEFAULT_PORTS
from ..config import Mode, Settings, bundled_api_version
from ..errors import OptionsValidationError, Problem
from .call import HeaderList
from .layers.admission import LimitPolicy
from .layers.breaker import BreakerPolicy
from .layers.retry import RetryPolicy

MILLISECONDS = 1000.0

#: The least total time of a call, in seconds, when none is configured. It equals the longest time
#: that a call waits for our own rate limit: a shorter one would end calls that wait in order.
LEAST_TOTAL_SECONDS = 120.0

#: Words inside an access token that name the environment it was issued for.
_SANDBOX_WORDS = frozenset({"sandbox", "test", "testing"})
_PRODUCTION_WORDS = frozenset({"production", "prod", "live"})


@attrs.frozen(kw_only=True)
class ClientConfig:
    """The settings in the form that the client uses. Times are in seconds, None for no limit.

    ``base_url`` includes the base path, without a slash at its end; ``origin`` is its scheme, host
    and port. ``upstream_honours_keys`` says that a write with an idempotency key may be repeated.
    """

    mode: str
    base_url: str
    origin: str
    access_token: str = attrs.field(repr=False)
    version_header: str
    api_version: str
    attempt_timeout: float
    total_timeout: float | None
    hedge_after: float | None
    retry: RetryPolicy
    breaker: BreakerPolicy
    limit: LimitPolicy = attrs.field(factory=LimitPolicy)
    max_answer_bytes: int | None = None
    upstream_honours_keys: bool = False
    idempotency_header: str = "Idempotency-Key"
    organization_header: str = "Polar-Organization"

    @property
    def host(self) -> str:
        """Return the name or address of the upstream."""
        return urlsplit(self.base_url).hostname or ""

    def headers(self, *, user_agent: str) -> HeaderList:
        """Return the headers of every request except the token's, ``Host`` first."""
        host = urlsplit(self.base_url).netloc.rpartition("@")[2]
        return HeaderList(
            [
                (b"Host", host.encode("idna") if not host.isascii() else host.encode("ascii")),
                (b"Accept", b"application/json"),
                (b"Accept-Encoding", b"gzip, deflate"),
                (b"User-Agent", user_agent.encode("ascii")),
                (self.version_header.encode("ascii"), self.api_version.encode("ascii")),
            ]
        )

    def total_timeout_of(self, *, attempt_timeout: float, max_retries: int) -> float:
        """Return the total time in seconds of a call for which none is configured.

        It is two minutes, or the time that the attempts need when each takes its whole timeout and
        each wait between them is the longest. So it cuts no attempt short, and the remainder is for
        waits that the upstream asks for.
        """
        attempts = attempt_timeout * (max_retries + 1) + self.retry.cap_seconds * max_retries
        return max(LEAST_TOTAL_SECONDS, attempts)

    def summary(self) -> dict[str, object]:
        """Return the fields of the start-up log line; no secret is among them."""
        return {
            "mode": self.mode,
            "base_url": self.base_url,
            "version": f"{self.version_header}: {self.api_version}",
            "attempt_timeout": self.attempt_timeout,
            "total_timeout": self.total_timeout
            or self.total_timeout_of(
                attempt_timeout=self.attempt_timeout, max_retries=self.retry.max_retries
            ),
            "max_retries": self.retry.max_retries,
            "hedge_after": self.hedge_after,
            "breaker": (
                f"{self.breaker.failure_threshold} failures in {self.breaker.sampling_seconds:g} s,"
                f" open for {self.breaker.break_seconds:g} s"
            ),
            "requests_per_minute": self.limit.per_minute,
            "upstream_honours_keys": self.upstream_honours_keys,
        }


def plan_of(settings: Settings) -> ClientConfig:
    """Return the plan that ``settings`` describe.

    Raises:
        OptionsValidationError: they hold no usable access token, or no base address. Settings
            that were validated for the client have both.
    """
    token = "" if settings.access_token is None else settings.access_token.reveal()
    problems = []
    if problem := token_problem(token):
        problems.append(Problem("Sdk:AccessToken", problem))
    if not settings.base_url:
        problems.append(Problem("Sdk:CustomBaseUrl", "is missing: Mode Custom needs it"))
    if problems:
        raise OptionsValidationError(problems)
    resilience = settings.resilience
    return ClientConfig(
        mode=str(settings.mode),
        base_url=join_base(settings.base_url, settings.base_path),
        origin=origin_of(settings.base_url),
        access_token=token,
        version_header=settings.upstream.version_header,
        api_version=settings.api_version or bundled_api_version(settings.upstream.version_header),
        attempt_timeout=settings.timeout_ms / MILLISECONDS,
        total_timeout=_seconds(settings.total_timeout_ms),
        hedge_after=_seconds(resilience.hedge_after_ms),
        retry=RetryPolicy(max_retries=settings.max_retries),
        breaker=BreakerPolicy(
            failure_threshold=resilience.circuit_breaker_failure_threshold,
            sampling_seconds=resilience.circuit_breaker_sampling_seconds,
            break_seconds=resilience.circuit_breaker_break_seconds,
        ),
        limit=LimitPolicy(per_minute=settings.upstream.requests_per_minute),
        max_answer_bytes=settings.connection.max_answer_bytes,
        upstream_honours_keys=settings.upstream.honours_idempotency_keys,
        organization_header=settings.upstream.organization_header,
    )


def join_base(base_url: str, base_path: str) -> str:
    """Return the address that paths are appended to, without a slash at its end."""
    path = base_path.strip("/")
    return f"{base_url.rstrip('/')}/{path}" if path else base_url.rstrip("/")


def origin_of(url: str) -> str:
    """Return scheme, host and port of ``url``, the port always spelled out."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = DEFAULT_PORTS.get(parts.scheme, 0) if parts.port is None else parts.port
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def token_problem(token: str) -> str | None:
    """Return the reason why ``token`` cannot be sent, None when it can; it is not quoted."""
    if not token:
        return "is missing: the client needs an organization access token"
    if not (token.isascii() and token.isprintable()) or " " in token:
        return "holds a space, line break or other character that no token has: copy it again"
    return None


def token_warning(token: str, mode: Mode) -> str | None:
    """Return a warning when ``token`` looks like the other environment's, else None.

    The words in its prefix decide, so it is a guess; the warning quotes no part of the token.
    """
    words = set(re.split(r"[_\-.]", token.lower())[:-1])
    if mode is Mode.LIVE and words & _SANDBOX_WORDS:
        return "Sdk:AccessToken looks like a sandbox token, and Sdk:Mode is Live"
    if mode is Mode.TEST and words & _PRODUCTION_WORDS:
        return "Sdk:AccessToken looks like a production token, and Sdk:Mode is Test"
    return None


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / MILLISECONDS
