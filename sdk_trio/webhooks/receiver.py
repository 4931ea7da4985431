"""Reading of bodies that are not verified yet, within bounds that all senders share."""

import base64
import os
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs
import msgspec
import trio

from ..base.asgi import SHORTCUT, DirectRequest, Expiry, Headers, Receive, Scope, Send
from ..base.logs import Throttle, get_logger
from ..config import Secret, Settings
from ..errors import DeliveryDecodingError, StoreUnavailableError
from ..events import Envelope, claimed_organization, organization_of, plain_envelope, subject_of
from ..records.deliveries import NewDelivery
from . import answers
from .answers import Answer
from .arrival import VerifiedDelivery, look_closer
from .counters import Counters
from .rejections import LINES, SECONDS, Rejection, Rejections, claimed_id
from .screen import AllowedSources, RateLimit, RequestOrigin, TrustedProxies, source_of
from .secret_usage import SecretUsage
from .signature import Keyring
from .verdict import Accepted, Cause, Delivery, Rejected, verify_delivery

if TYPE_CHECKING:
    from ..records.tenants import Tenant
    from .tenant_keys import TenantKeys


#: How long a sender may take for its body, in seconds. The upstream gives up on a delivery after 10
#: seconds itself, so waiting longer serves nobody but a client that means to hold a connection.
BODY_SECONDS: Final = 10.0

#: Pieces below this size are copied together: kept apart, small ones take ten times their size.
_SMALL_BYTES: Final = 16 * 1024

#: What they are copied into is closed at this size: buffers that grow further and further leave
#: gaps behind that nothing fits into, as much again as they hold.
_BLOCK_BYTES: Final = 64 * 1024

#: What a sender is asked to wait when too many bodies are in flight, in seconds.
CROWDED_RETRY_SECONDS: Final = 5.0


@attrs.frozen
class Unread:
    """A body that was not read: the cause for the log, the answer, and the bytes received."""

    cause: str
    answer: Answer
    received: int


class _Pieces:
    """The arrived pieces of one body; they take little more memory than the body."""

    def __init__(self) -> None:
        self._done: list[bytes] = []
        self._small = bytearray()

    def add(self, piece: bytes) -> None:
        """Keep one more piece."""
        if len(piece) < _SMALL_BYTES:
            self._small += piece
            if len(self._small) < _BLOCK_BYTES:
                return
            self._close_block()
        else:
            self._close_block()
            self._done.append(piece)

    def _close_block(self) -> None:
        if self._small:
            self._done.append(bytes(self._small))
            self._small = bytearray()

    def whole(self, last: bytes) -> bytes:
        """Return the body with its last piece."""
        if not self._done and not self._small:
            return last
        return b"".join((*self._done, self._small, last))


@attrs.define(eq=False)
class _InFlight:
    scope: trio.CancelScope
    pieces: _Pieces = attrs.Factory(_Pieces)
    size: int = 0
    gave_way: bool = False


class Bodies:
    """Reads bodies, and bounds the memory of those that have not arrived whole.

    When their bytes exceed ``together``, the largest body gives way, not the one that came last:
    otherwise 64 connections with unfinished bodies would have every delivery refused that arrives
    in two parts.

    Args:
        largest: the most bytes of one body.
        together: the most bytes of all that are in flight.
    """

    def __init__(self, *, largest: int, together: int) -> None:
        self._largest = largest
        # A body that MaxPayloadBytes allows has to fit even if MaxBodyBytesInFlight is smaller; it
        # is alone in flight then.
        self._together = max(largest, together)
        self._bytes = 0
        self._in_flight: set[_InFlight] = set()

    async def read(self, receive: Callable[[], Awaitable[Any]]) -> bytes | Unread | None:
        """Return the body; an :class:`Unread` with the reason; or None if the sender has left.

        Cancelled, it forgets the bytes received so far.
        """
        with trio.move_on_after(BODY_SECONDS) as scope:
            body = _InFlight(scope)
            self._in_flight.add(body)
            try:
                received = await self._receive(receive, body)
            finally:
                self._in_flight.remove(body)
                self._bytes -= 0 if body.gave_way else body.size
            if not body.gave_way:
                return received
        if body.gave_way:
            return Unread("crowded", answers.unavailable(CROWDED_RETRY_SECONDS), body.size)
        return Unread("slow", answers.TOO_SLOW, body.size)

    async def _receive(
        self, receive: Callable[[], Awaitable[Any]], body: _InFlight
    ) -> bytes | Unread | None:
        while True:
            message = await receive()
            # Who gave way may have had a piece on its way all the same, which nobody counts.
            if body.gave_way or message["type"] != "http.request":
                return None
            chunk: bytes = message.get("body", b"")
            more = bool(message.get("more_body", False))
            body.size += len(chunk)
            self._bytes += len(chunk)
            if body.size > self._largest:
                return Unread("size", answers.TOO_LARGE, body.size)
            if not more:
                return body.pieces.whole(chunk)
            body.pieces.add(chunk)
            # While it waits it holds what it counts, and not the last piece once more.
            del message, chunk
            if self._bytes > self._together:
                self._free_the_largest()

    def _free_the_largest(self) -> None:
        largest = max(
            (body for body in self._in_flight if not body.gave_way), key=lambda body: body.size
        )
        # Its bytes are subtracted now and not when its task has noticed: until then further pieces
        # would make other bodies give way for the same excess.
        largest.gave_way = True
        largest.pieces = _Pieces()  # now, and not when its task has its turn: others go on reading
        self._bytes -= largest.size
        largest.scope.cancel()


_log = get_logger("webhooks")

#: How much of a path or method that is not ours is logged.
SHOWN_PATH_CHARACTERS = 200
SHOWN_METHOD_CHARACTERS = 32
SHOWN_IDENTIFIER_CHARACTERS = 64

#: The Retry-After, in seconds, while the receiver starts, stops or has no store.
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
    """The destination of verified deliveries."""

    async def take(self, arrival: VerifiedDelivery, expiry: Expiry | None) -> Answer:
        """Handle or keep one verified delivery and return the answer for its sender."""
        ...


@attrs.frozen(eq=False)
class Rules:
    """The screening rules of one configuration; a reload replaces all of them at once."""

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

        Otherwise every reload would give each source a full allowance again.

        Raises:
            OptionsValidationError: a secret, range or rate cannot be used.
        """
        options = settings.webhooks
        secrets = options.all_secrets
        per_minute = options.rate_limit_per_minute
        rate = None if per_minute is None else RateLimit(per_minute)
        return cls(
            secrets=secrets,
            # With tenants the host may have no secret of its own: each tenant has one then.
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
        """Return the position of each secret in ``earlier``; None for a new one."""
        places = {secret: index for index, secret in reversed([*enumerate(earlier.secrets)])}
        return [places.get(secret) for secret in self.secrets]


class Receiver:
    """Answers requests; holds no state of a delivery beyond its request.

    Args:
        settings: validated settings.
        intake: takes each verified delivery and returns its answer.
        counters: counts results.
        rejections: notes each request that is not answered 200.
        clock: returns Unix seconds.
    """

    def __init__(
        self,
        settings: Settings,
        intake: Intake,
        counters: Counters,
        rejections: Rejections,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        options = settings.webhooks
        self._intake = intake
        self._counters = counters
        self._rejections = rejections
        self._throttle = Throttle(lines=LINES, seconds=SECONDS)
        self._clock = clock
        self._path = options.path
        # The prefix of tenants' addresses; None without tenants.
        self._tenant_path: str | None = (
            f"{options.path.rstrip('/')}/" if settings.multi_tenant.enabled else None
        )
        # An unknown tenant's delivery is judged with a key that nobody has. The same work takes the
        # same time, so the time of the answer does not tell which tenants exist.
        self._nobodys = Keyring(())
        if self._tenant_path is not None:
            self._nobodys = Keyring.from_secrets([_random_secret()], options.key_derivation)
        self._own_secrets_only = settings.multi_tenant.own_secrets_only
        self._require_https = options.require_https
        self._limit = options.max_payload_bytes
        self._bodies = Bodies(
            largest=self._limit, together=settings.server.max_body_bytes_in_flight
        )
        self._rules = Rules.of(settings)
        #: Finds a delivery's tenant and its keys; None without tenants.
        self.tenant_keys: TenantKeys | None = None
        self.secret_usage: SecretUsage = SecretUsage(len(options.all_secrets), clock())

    def prepare(self, settings: Settings) -> Callable[[], None]:
        """Check the rules of ``settings`` and return a function that puts them into force.

        They are the keys of :data:`LIVE_KEYS`. Nothing changes until the function is called, and
        calling it cannot fail. A delivery that is being judged at that moment is judged by the old
        rules to its end.

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

        Cancelled while the handler runs, it releases the delivery and sends no answer.
        """
        shortcut = self._shortcut_in(scope)
        client = scope.get("client")
        peer = client[0] if client else None
        headers = scope["headers"]
        origin = self._rules.proxies.resolve(peer, scope["scheme"], headers)
        path = scope["path"]
        request = _Request(
            headers, origin, None if path == self._path else self._identifier_in(path)
        )
        body: bytes | Answer | Unread | None = self._screen(scope, request)
        if body is None and shortcut is not None:
            # A body that has arrived needs no deadline, which would cost a tenth of a delivery.
            body = shortcut.take_body()
        if body is None:
            body = await self._bodies.read(receive)
        elif isinstance(body, bytes) and len(body) > self._limit:
            body = Unread("size", answers.TOO_LARGE, len(body))
        if isinstance(body, bytes):
            expiry = None if shortcut is None else shortcut.expiry
            answer = await self._verify_and_take(request, body, expiry)
            if shortcut is None:
                await answer.send(send)
            else:
                await shortcut.answer(answer)
        elif body is None:
            await trio.lowlevel.checkpoint()
        else:
            if isinstance(body, Unread):
                body = self._refuse(body.cause, body.answer, request, received=body.received)
            await send_early(body, receive, send)

    def source_of(self, host: str | None) -> Hashable:
        """Return the key that connections from ``host`` count by; None for no limit.

        Trusted proxies have no limit, because everybody comes from them; nor has a unix socket,
        which has no addresses to tell apart.
        """
        if not host or self._rules.proxies.trusts(host):
            return None
        return source_of(host)

    def _identifier_in(self, path: str) -> str | None:
        """Return the identifier in a tenant's address, whether known or not, else None."""
        if self._tenant_path is None or not path.startswith(self._tenant_path):
            return None
        identifier = path[len(self._tenant_path) :]
        return identifier if identifier and "/" not in identifier else None

    def _shortcut_in(self, scope: Scope) -> DirectRequest | None:
        shortcut: DirectRequest | None = (scope.get("extensions") or {}).get(SHORTCUT)
        return shortcut

    async def _verify_and_take(
        self, request: "_Request", body: bytes, expiry: Expiry | None
    ) -> Answer:
        webhook_id = None
        try:
            arrival = await self._verify(request, body)
            if isinstance(arrival, Answer):
                await trio.lowlevel.checkpoint()
                return arrival
            webhook_id = arrival.delivery.webhook_id
            answer = await self._intake.take(arrival, expiry)
        except StoreUnavailableError as error:
            self._counters.count("unavailable")
            extra = self._throttle.fields("store")
            if extra is not None:
                _log.store_unavailable(error, webhook_id=webhook_id, **extra)
            await trio.lowlevel.checkpoint()
            answer = answers.unavailable(UNAVAILABLE_RETRY_SECONDS)
        if answer.status != answers.OK.status:
            # The cause has been logged where it arose. This line says that the sender was asked to
            # deliver again.
            cause = "handler" if answer.status == answers.HANDLER_FAILED.status else "later"
            self._note("webhook.refused", cause, answer, request)
        return answer

    def _screen(self, scope: Scope, request: "_Request") -> Answer | None:
        """Apply every check that needs no body; None lets the request pass."""
        rules = self._rules
        address = request.origin.address
        if self._require_https and not request.origin.secure:
            return self._reject(
                "not_https", "the request is not HTTPS and RequireHttps is true", request
            )
        if scope["path"] != self._path and request.identifier is None:
            asked = scope["path"][:SHOWN_PATH_CHARACTERS]
            return self._refuse(
                "path", answers.NOT_FOUND, request, path=asked, configured=self._path
            )
        if scope["method"] != "POST":
            method = scope["method"][:SHOWN_METHOD_CHARACTERS]
            return self._refuse("method", answers.METHOD_NOT_ALLOWED, request, method=method)
        if not rules.sources.allows(address):
            return self._refuse("source", answers.SOURCE_REFUSED, request)
        if rules.rate is not None:
            wait = rules.rate.admit(address or "", trio.current_time())
            if wait is not None:
                return self._refuse("rate", answers.rate_limited(wait), request)
        plain_json, declared_size = _describe_body(request.headers)
        if not plain_json:
            return self._refuse("media", answers.UNSUPPORTED_MEDIA, request)
        if declared_size > self._limit:
            return self._refuse("size", answers.TOO_LARGE, request, declared=declared_size)
        return None

    async def _verify(self, request: "_Request", body: bytes) -> VerifiedDelivery | Answer:
        """Verify and decode a delivery; return it, or the answer that rejects it.

        At the address of a tenant only its keys verify, and the delivery is that tenant's. At the
        host's address, the unverified body decides one thing: whose keys are tried after the host's
        own have failed. A delivery that the host's key verifies belongs to the tenant that its body
        names; one that a tenant's key verifies belongs to that tenant. Trying every tenant's keys
        instead would cost ten thousand HMACs, and would let tenant A sign for tenant B
        (docs/adr/0008-a-claim-chooses-a-key.md).
        """
        # As a rule it waits for nothing; taking or refusing the delivery is a checkpoint.
        now = self._clock()
        delivery = Delivery(request.headers, body, now)
        tolerance = self._rules.tolerance
        keys = self.tenant_keys
        tenant: Tenant | None = None
        erased: str | None = None
        signer = ""
        verdict: Accepted | Rejected
        if request.identifier is not None:
            verdict, tenant = await self._judge_at(request.identifier, delivery, tolerance)
            signer = "" if tenant is None else tenant.id
        elif isinstance(
            verdict := verify_delivery(delivery, self._rules.keyring, tolerance_seconds=tolerance),
            Accepted,
        ):
            self.secret_usage.record(verdict.secret_index, now)
        elif keys is not None and verdict.cause is Cause.NO_MATCH:
            tenant = await keys.tenant_of(claimed_organization(body))
            keyring = None if tenant is None else await keys.keyring(tenant)
            if keyring is not None:
                verdict = verify_delivery(delivery, keyring, tolerance_seconds=tolerance)
                signer = "" if tenant is None else tenant.id
        if isinstance(verdict, Rejected):
            claimed = {} if tenant is None else {"claimed_tenant": tenant.identifier}
            if request.identifier is not None:
                claimed = {"tenant": request.identifier[:SHOWN_IDENTIFIER_CHARACTERS]}
            return self._reject(verdict.cause, verdict.detail, request, **claimed)  # noqa: ASYNC910 - answering is a checkpoint
        try:
            envelope = plain_envelope(body) or await look_closer(body)
        except DeliveryDecodingError as error:
            return self._reject("not_an_event", str(error), request)  # noqa: ASYNC910 - answering is a checkpoint
        if keys is not None and tenant is None:
            organization = organization_of(envelope.type, envelope.data_raw)
            tenant = await keys.tenant_of(organization)
            if tenant is None:
                erased = await keys.erased(organization)
            if tenant is not None and self._own_secrets_only and tenant.credentials.webhook_secrets:
                return self._reject(  # noqa: ASYNC910 - answering is a checkpoint
                    "own_secrets", _NOT_THE_HOSTS, request, claimed_tenant=tenant.identifier
                )
        arrival = self._arrival(
            NewDelivery(
                webhook_id=verdict.webhook_id,
                type=envelope.type,
                raw=body,
                timestamp=verdict.timestamp,
                received_at=now,
                subject=subject_of(envelope),
                tenant_id=erased if tenant is None else tenant.id,
                signer=signer,
                address=request.origin.address,
            ),
            envelope,
        )
        named = {} if tenant is None else {"tenant": tenant.identifier}
        _log.info(
            "webhook.received",
            webhook_id=verdict.webhook_id,
            type=envelope.type,
            address=request.origin.address,
            **named,
        )
        return arrival  # noqa: ASYNC910 - answering is a checkpoint

    async def _judge_at(
        self, identifier: str, delivery: Delivery, tolerance: int
    ) -> "tuple[Accepted | Rejected, Tenant | None]":
        """Judge a delivery to a tenant's address; return the verdict and the tenant, if known."""
        if self.tenant_keys is None:
            raise StoreUnavailableError("the tenants are not open: the receiver has not started")
        tenant = await self.tenant_keys.tenant_at(identifier)
        keyring = None if tenant is None else await self.tenant_keys.keyring(tenant)
        # Without keys, a key that nobody has does the same work, so that neither the answer nor its
        # time says whether the tenant exists.
        verdict = verify_delivery(delivery, keyring or self._nobodys, tolerance_seconds=tolerance)
        if keyring is None and (isinstance(verdict, Accepted) or verdict.cause is Cause.NO_MATCH):
            return _NO_KEYS, None
        return verdict, tenant

    def _arrival(self, delivery: NewDelivery, envelope: Envelope) -> VerifiedDelivery:
        return VerifiedDelivery(delivery, envelope)

    def _reject(self, cause: str, detail: str, request: "_Request", **fields: object) -> Answer:
        self._counters.count("rejected")
        self._note("webhook.rejected", cause, answers.INVALID, request, detail=detail, **fields)
        return answers.INVALID

    def _refuse(self, cause: str, answer: Answer, request: "_Request", **fields: object) -> Answer:
        self._counters.count("refused")
        self._note("webhook.refused", cause, answer, request, **fields)
        return answer

    def _note(
        self, event: str, cause: str, answer: Answer, request: "_Request", **fields: object
    ) -> None:
        self._rejections.note(
            Rejection(
                event,
                str(cause),
                answer.status,
                request.origin.address,
                claimed_id(request.headers),
                tuple(fields.items()),
            )
        )


# A msgspec Struct without garbage collection is cheaper to make than an attrs class, and one is
# made for each request.
class _Request(msgspec.Struct, frozen=True, gc=False):
    """The properties of a request that all steps share."""

    headers: Headers
    origin: RequestOrigin
    #: The identifier in the tenant's address that it came to; None for the host's address.
    identifier: str | None = None


_NO_KEYS: Final = Rejected(
    Cause.NO_MATCH,
    "no tenant with webhook secrets of its own has this address, or it is deleted: 'tenant show' "
    "prints the address of a tenant.",
)
_NOT_THE_HOSTS: Final = (
    "signed with the host's secret for a tenant that has secrets of its own, and "
    "Sdk:MultiTenant:OwnSecretsOnly is true: have the sender use the tenant's secret and address."
)


def _random_secret() -> Secret:
    return Secret(f"whsec_{base64.b64encode(os.urandom(32)).decode('ascii')}")


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

    The rest of the body is received and thrown away meanwhile: a server that has to hand it over
    first could neither finish nor close the connection.
    """

    async def discard() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(discard)
        await answer.send(send)
        nursery.cancel_scope.cancel()


def _describe_body(headers: Headers) -> tuple[bool, int]:
    """Return whether the headers announce plain JSON, and the announced size in bytes.

    Plain JSON is a JSON media type, or none, without a content encoding. The size is -1 when none
    is declared that is a number; the first one counts.
    """
    # Encoded bodies are refused: nothing is decompressed for a sender that is not verified yet.
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
