"""The endpoint: one POST route that checks, verifies and hands over deliveries (spec 4.1).

The order of the checks is that of contracts 3. Nothing is stored and no handler runs before the
signature has been verified.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import trio

from ..config import Secret, Settings
from ..errors import DeliveryDecodingError, StoreUnavailableError
from ..events import Envelope, decode_envelope, subject_of
from ..logs import get_logger
from ..storage.records import NewDelivery
from . import answers
from .answers import Answer
from .arrival import Arrival
from .counters import Counters
from .peers import AllowedSources, TrustedProxies
from .rates import RateLimit
from .secret_usage import SecretUsage
from .shortcut import SHORTCUT, Expiry, Shortcut
from .signature import Keyring
from .verdict import Accepted, Cause, Delivery, Rejected, judge

if TYPE_CHECKING:
    from .tenant_keys import TenantKeys

_log = get_logger("webhooks")

# Servers and frameworks type the same ASGI messages in ways that exclude each other (typed dicts,
# mutable mappings); Any is what all of them accept an application with.
Scope = Any
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]

#: How long a sender may take for its body, in seconds: it gives up on us after 10 itself.
BODY_SECONDS = 10.0

#: What a sender is asked to wait, in seconds, while the receiver starts, stops or has no store.
UNAVAILABLE_RETRY_SECONDS = 5.0


#: The settings that :meth:`Receiver.prepare` can change while requests are served.
LIVE_KEYS = (
    "Sdk:Webhooks:Secret",
    "Sdk:Webhooks:Secrets",
    "Sdk:Webhooks:KeyDerivation",
    "Sdk:Webhooks:ToleranceSeconds",
    "Sdk:Webhooks:AllowedSourceIpRanges",
    "Sdk:Webhooks:RateLimitPerMinute",
    "Sdk:Server:TrustedProxies",
    "Sdk:Server:ForwardedHeaders",
)


class Intake(Protocol):
    """Where verified deliveries go."""

    async def take(self, arrival: Arrival, expiry: Expiry | None) -> Answer:
        """Handle or keep one verified delivery and return the answer for its sender."""
        ...


@attrs.frozen(eq=False)
class Rules:
    """What decides about a request and can change while others are served: replaced as a whole."""

    secrets: tuple[Secret, ...]
    keyring: Keyring
    tolerance: int
    proxies: TrustedProxies
    sources: AllowedSources
    rate: RateLimit | None
    per_minute: int | None

    @classmethod
    def of(cls, settings: Settings, *, previous: "Rules | None" = None) -> "Rules":
        """Return the rules of ``settings``; a rate that has not changed keeps its counts.

        Raises:
            OptionsValidationError: a secret, range or rate cannot be used.
        """
        options = settings.webhooks
        secrets = options.all_secrets
        per_minute = options.rate_limit_per_minute
        rate = None if per_minute is None else RateLimit(per_minute)
        return cls(
            secrets=secrets,
            # With tenants there may be no secret of the host's own: each brings its own then.
            keyring=Keyring(())
            if settings.multi_tenant.enabled and not secrets
            else Keyring.from_secrets(secrets, options.key_derivation),
            tolerance=options.tolerance_seconds,
            proxies=TrustedProxies(
                settings.server.trusted_proxies,
                settings.server.forwarded_headers,
                _report_contradiction,
            ),
            sources=AllowedSources(options.allowed_source_ip_ranges),
            rate=previous.rate if previous and previous.per_minute == per_minute else rate,
            per_minute=per_minute,
        )

    def positions_in(self, earlier: "Rules") -> list[int | None]:
        """Return where each secret stood in ``earlier``; None for one that is new."""
        places = {secret: index for index, secret in reversed([*enumerate(earlier.secrets)])}
        return [places.get(secret) for secret in self.secrets]


class Receiver:
    """Answers requests; holds no state of a delivery beyond its request.

    ``intake`` is called for each verified delivery. ``clock`` returns Unix seconds.
    """

    def __init__(
        self,
        settings: Settings,
        intake: Intake,
        counters: Counters,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        options = settings.webhooks
        self._intake = intake
        self._counters = counters
        self._clock = clock
        self._path = options.path
        self._require_https = options.require_https
        self._limit = options.max_payload_bytes
        self._rules = Rules.of(settings)
        #: Whose deliveries they are; None: nobody's.
        self.tenant_keys: TenantKeys | None = None
        self.secret_usage: SecretUsage = SecretUsage(len(options.all_secrets), clock())

    def prepare(self, settings: Settings) -> Callable[[], None]:
        """Return what puts the rules of ``settings`` (:data:`LIVE_KEYS`) into force.

        Nothing has changed until it is called, and calling it cannot fail. A delivery that is
        judged at that moment is judged by the old rules to its end.

        Raises:
            OptionsValidationError: a secret, range or rate cannot be used.
        """
        rules = Rules.of(settings, previous=self._rules)

        def commit() -> None:
            positions = rules.positions_in(self._rules)
            self._rules = rules
            self.secret_usage.rearrange(positions, self._clock())

        return commit

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI ``http`` request.

        Cancelled while the handler runs, the delivery is released and no answer is sent.
        """
        shortcut = self._shortcut_in(scope)
        body: bytes | Answer | None = self._screen(scope)
        if body is None and shortcut is not None:
            # Nothing to wait for, so no deadline either: it would cost a tenth of a delivery.
            body = shortcut.take_body()
        if body is None:
            body = await self._read_body(receive)
        elif isinstance(body, bytes) and len(body) > self._limit:
            body = self._refuse("size", answers.TOO_LARGE, received=len(body))
        if isinstance(body, bytes):
            expiry = None if shortcut is None else shortcut.expiry
            answer = await self._verify_and_take(scope["headers"], body, expiry)
            if shortcut is None:
                await answer.send(send)
            else:
                await shortcut.answer(answer)
        elif body is not None:
            await send_early(body, receive, send)
        else:
            await trio.lowlevel.checkpoint()

    def _shortcut_in(self, scope: Scope) -> Shortcut | None:
        shortcut: Shortcut | None = (scope.get("extensions") or {}).get(SHORTCUT)
        return shortcut

    async def _verify_and_take(
        self, headers: Headers, body: bytes, expiry: Expiry | None
    ) -> Answer:
        keys = self.tenant_keys
        webhook_id = None
        try:
            arrival = (
                self._verify(headers, body)
                if keys is None
                else await self._verify_with_tenants(headers, body, keys)
            )
            if isinstance(arrival, Answer):
                await trio.lowlevel.checkpoint()
                return arrival
            webhook_id = arrival.delivery.webhook_id
            return await self._intake.take(arrival, expiry)
        except StoreUnavailableError as error:
            self._counters.count("unavailable")
            _log.error("store.unavailable", webhook_id=webhook_id, error=str(error))
            await trio.lowlevel.checkpoint()
            return answers.unavailable(UNAVAILABLE_RETRY_SECONDS)

    def _screen(self, scope: Scope) -> Answer | None:
        """Apply every check that needs no body; None lets the request pass."""
        rules = self._rules
        client = scope.get("client")
        peer = client[0] if client else None
        origin = rules.proxies.resolve(peer, scope["scheme"], scope["headers"])
        if self._require_https and not origin.secure:
            return self._reject("not_https", "the request is not HTTPS and RequireHttps is true")
        if scope["path"] != self._path:
            return answers.NOT_FOUND
        if scope["method"] != "POST":
            return answers.METHOD_NOT_ALLOWED
        if not rules.sources.allows(origin.address):
            return self._refuse("source", answers.SOURCE_REFUSED, address=origin.address)
        if rules.rate is not None:
            wait = rules.rate.admit(origin.address or "", trio.current_time())
            if wait is not None:
                return self._refuse("rate", answers.rate_limited(wait), address=origin.address)
        plain_json, declared_size = _describe_body(scope["headers"])
        if not plain_json:
            return self._refuse("media", answers.UNSUPPORTED_MEDIA, address=origin.address)
        if declared_size > self._limit:
            return self._refuse("size", answers.TOO_LARGE, address=origin.address)
        return None

    async def _read_body(self, receive: Receive) -> bytes | Answer | None:
        """Return the body; an answer if it is too large or too slow; None if the sender left."""
        chunks: list[bytes] = []
        size = 0
        with trio.move_on_after(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return None
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > self._limit:
                    return self._refuse("size", answers.TOO_LARGE, received=size)
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
        return self._refuse("slow", answers.TOO_SLOW, received=size)

    def _verify(self, headers: Headers, body: bytes) -> Arrival | Answer:
        """Verify and decode a delivery, in the order of spec 4.1; no I/O."""
        now = self._clock()
        rules = self._rules
        verdict = judge(
            Delivery(headers, body, now), rules.keyring, tolerance_seconds=rules.tolerance
        )
        if not isinstance(verdict, Accepted):
            return self._reject(verdict.cause, verdict.detail)
        self.secret_usage.record(verdict.secret_index, now)
        try:
            envelope = decode_envelope(body)
        except DeliveryDecodingError as error:
            return self._reject("not_an_event", str(error), webhook_id=verdict.webhook_id)
        return self._arrival(verdict, envelope, body, now, tenant_id=None)

    async def _verify_with_tenants(
        self, headers: Headers, body: bytes, keys: "TenantKeys"
    ) -> Arrival | Answer:
        """Verify as :meth:`_verify`, with the secrets of the tenant that the body claims as well.

        A body that is not verified yet decides about one thing: whose keys are tried after the
        host's own have failed.
        """
        await trio.lowlevel.checkpoint()
        now = self._clock()
        delivery = Delivery(headers, body, now)
        rules = self._rules
        verdict = judge(delivery, rules.keyring, tolerance_seconds=rules.tolerance)
        if isinstance(verdict, Accepted):
            self.secret_usage.record(verdict.secret_index, now)
        elif verdict.cause is not Cause.NO_MATCH:
            return self._reject(verdict.cause, verdict.detail)
        try:
            envelope = decode_envelope(body)
        except DeliveryDecodingError as error:
            if isinstance(verdict, Rejected):
                return self._reject(verdict.cause, verdict.detail)
            return self._reject("not_an_event", str(error), webhook_id=verdict.webhook_id)
        tenant = await keys.claimed(envelope)
        if isinstance(verdict, Rejected) and tenant is not None:
            keyring = await keys.keyring(tenant)
            if keyring is not None:
                verdict = judge(delivery, keyring, tolerance_seconds=rules.tolerance)
        if isinstance(verdict, Rejected):
            claimed = None if tenant is None else tenant.identifier
            return self._reject(verdict.cause, verdict.detail, claimed_tenant=claimed)
        return self._arrival(
            verdict, envelope, body, now, tenant_id=None if tenant is None else tenant.id
        )

    def _arrival(
        self,
        verdict: Accepted,
        envelope: Envelope,
        body: bytes,
        now: float,
        *,
        tenant_id: str | None,
    ) -> Arrival:
        delivery = NewDelivery(
            webhook_id=verdict.webhook_id,
            type=envelope.type,
            raw=body,
            timestamp=verdict.timestamp,
            received_at=now,
            subject=subject_of(envelope),
            tenant_id=tenant_id,
        )
        _log.debug("webhook.received", webhook_id=delivery.webhook_id, type=delivery.type)
        return Arrival(delivery, envelope)

    def _reject(self, cause: str, detail: str, **fields: object) -> Answer:
        self._counters.count("rejected")
        _log.warning("webhook.rejected", cause=str(cause), detail=detail, **fields)
        return answers.INVALID

    def _refuse(self, cause: str, answer: Answer, **fields: object) -> Answer:
        self._counters.count("refused")
        _log.warning("webhook.refused", cause=cause, status=answer.status, **fields)
        return answer


def _report_contradiction(peer: str | None) -> None:
    _log.warning(
        "webhook.forwarding_contradiction",
        peer=peer,
        hint="Forwarded and X-Forwarded-* do not say the same, so such requests count as not "
        "secure: let the proxy remove what it does not set, and name the family that it sets in "
        "Sdk:Server:ForwardedHeaders; logged once",
    )


async def send_early(answer: Answer, receive: Receive, send: Send) -> None:
    """Send the answer to a request whose body was not read to its end.

    What else arrives is thrown away meanwhile: a server that first has to hand it over could
    neither finish nor close the connection.
    """

    async def discard() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(discard)
        await answer.send(send)
        nursery.cancel_scope.cancel()


def _describe_body(headers: Headers) -> tuple[bool, int]:
    """Return what the headers say of the body: whether it is plain JSON, and its size in bytes.

    Plain JSON is a JSON media type, or none, without a content encoding. The size is -1 when none
    is declared that is a number; the first one counts.
    """
    plain_json = True
    size: int | None = None
    for name, value in headers:
        if name == b"content-type":
            media = value.partition(b";")[0].strip().lower()
            if media != b"application/json" and not media.endswith(b"+json"):
                plain_json = False
        elif name == b"content-length":
            if size is None:
                # More than 15 digits are above every limit, and int() of a long text takes time.
                size = int(value[:16]) if value.isdigit() else -1
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            plain_json = False
    return plain_json, -1 if size is None else size
