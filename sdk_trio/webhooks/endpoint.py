"""The endpoint: one request from its headers to its answer.

The way of a delivery begins here: screen, read the body, verify, route, and then either the inline
run (``run``) or the queue (``queue``), whose answer is sent. docs/explanation/delivery.md draws it.
"""

from collections.abc import Callable, Hashable
from hmac import compare_digest
from typing import NamedTuple

import msgspec
import trio
from msgspec.structs import replace

from ..base.clock import wall
from ..base.http import (
    SHORTCUT,
    DirectRequest,
    Expiry,
    Headers,
    Receive,
    RequestTemplate,
    Scope,
    Send,
)
from ..base.logs import Throttle, get_logger
from ..config import Secret, Settings
from ..errors import StoreUnavailableError
from ..events.decoding import Documents
from . import answers
from .answers import Answer
from .arrival import VerifiedDelivery
from .body import Bodies, Unread, send_early
from .counters import Counters
from .queue import WorkerPool
from .rejections import LINES, SECONDS, Rejection, Rejections, claimed_id, claimed_type
from .run import DeliveryRunner
from .screen import (
    SCREENED_HEADERS,
    AllowedSources,
    RateLimit,
    RequestOrigin,
    TrustedProxies,
    describe_body,
    source_of,
)
from .secret_usage import SecretUsage
from .signature import Keyring
from .signed_request import SIMULATION_HEADER, simulation_mark
from .verdict import signed_places
from .verify import Unverified, WebhookRequest, WebhookVerification

_log = get_logger("webhooks")

#: The most characters that are logged of a path or method that is not ours.
SHOWN_PATH_CHARACTERS = 200
SHOWN_METHOD_CHARACTERS = 32

#: The Retry-After, in seconds, while the receiver starts, stops or has no store.
UNAVAILABLE_RETRY_SECONDS = 5.0


_SIMULATION_HEADER = SIMULATION_HEADER.encode()

_HINTS = {
    "draining": "the receiver is stopping; senders deliver again",
    "not_running": "nothing has started the receiver, or it has ended: servers pass no lifespan to "
    "a mounted application, so give lifespan=receiver.lifespan to the one around it",
}

#: The settings that :meth:`Endpoint.prepare` can change while requests are served.
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


class Rules(msgspec.Struct, frozen=True, eq=False):
    """The screening rules of one configuration; a reload replaces all of them at once."""

    secrets: tuple[Secret, ...]
    keyring: Keyring
    tolerance: int
    proxies: TrustedProxies
    sources: AllowedSources
    rate: RateLimit | None
    per_minute: int | None
    simulation_mark: bytes | None = None

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
            simulation_mark=simulation_mark(settings),
        )

    def is_simulated(self, headers: Headers) -> bool:
        """Return whether the simulator of this receiver sent a request.

        Its delivery counts as one that came by HTTPS, from an address that may send.
        """
        mark = self.simulation_mark
        return mark is not None and any(
            name.lower() == _SIMULATION_HEADER and compare_digest(value, mark)
            for name, value in headers
        )

    def positions_in(self, earlier: "Rules") -> list[int | None]:
        """Return the position of each secret in ``earlier``; None for a new one."""
        places = {secret: index for index, secret in reversed([*enumerate(earlier.secrets)])}
        return [places.get(secret) for secret in self.secrets]


class _Passed(msgspec.Struct, frozen=True, gc=False):
    """The screening of requests that have one template, under one configuration: they passed it.

    ``places`` is where the three signed headers stand, None if not each of them came once.
    """

    rules: Rules
    origin: RequestOrigin
    identifier: str | None
    places: tuple[int, int, int] | None


class Ways(NamedTuple):
    """The two ways of a verified delivery, which exist while the store is open.

    ``documents`` are the types that an inline handler takes: their payload is wanted at once.
    """

    runner: DeliveryRunner
    queue: WorkerPool
    documents: Documents | None = None


class Endpoint:
    """Answers requests; holds no state of a delivery beyond its request.

    Args:
        settings: validated settings.
        counters: counts results.
        rejections: notes each request that is not answered 200.
        clock: returns Unix seconds.
    """

    def __init__(
        self,
        settings: Settings,
        counters: Counters,
        rejections: Rejections,
        *,
        clock: Callable[[], float] = wall,
    ) -> None:
        options = settings.webhooks
        self._counters = counters
        self._rejections = rejections
        self._throttle = Throttle(lines=LINES, seconds=SECONDS)
        self._clock = clock
        self._path = options.path
        # The prefix of tenants' addresses; None without tenants.
        self._tenant_path: str | None = (
            f"{options.path.rstrip('/')}/" if settings.multi_tenant.enabled else None
        )
        self._require_https = options.require_https
        self._limit = options.max_payload_bytes
        self._bodies = Bodies(
            largest=self._limit, together=settings.server.max_body_bytes_in_flight
        )
        self._rules = Rules.of(settings)
        self.secret_usage: SecretUsage = SecretUsage(len(options.all_secrets), clock())
        self.verification: WebhookVerification = WebhookVerification(settings, self.secret_usage)
        #: The ways of verified deliveries; None: the receiver does not run, and they are refused.
        self.ways: Ways | None = None
        #: True from the beginning of the drain on: verified deliveries are refused.
        self.draining = False

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

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI ``http`` request.

        Cancelled while the handler runs, it releases the delivery and sends no answer.
        """
        await self._serve(scope, receive, send, None)

    async def serve_direct(self, request: DirectRequest) -> None:
        """Serve one request of our own server, as :meth:`serve` does with its scope.

        What the first one of a template has passed, the others pass: nothing that the screening
        looks at differs between them, but the size of the body and the rate.
        """
        template = request.template
        passed = None if template is None else template.memo
        rules = self._rules
        if (
            not isinstance(passed, _Passed)
            or passed.rules is not rules
            or (body := request.take_body(self._limit)) is None
        ):
            await self._serve(request.scope(), request.receive, request.send, template)
            return
        headers = request.headers
        signed = None
        if passed.places is not None:
            first, second, third = passed.places
            signed = headers[first][1], headers[second][1], headers[third][1]
        webhook = WebhookRequest(headers, passed.origin, passed.identifier, signed)
        answer = None if rules.rate is None else self._slow_down(rules.rate, webhook)
        if answer is None:
            answer = await self._deliver(webhook, body, request.expiry)
        await request.answer(answer)

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, template: RequestTemplate | None
    ) -> None:
        direct: DirectRequest | None = (scope.get("extensions") or {}).get(SHORTCUT)
        client = scope.get("client")
        peer = client[0] if client else None
        headers = scope["headers"]
        rules = self._rules
        origin = rules.proxies.resolve(peer, scope["scheme"], headers)
        path = scope["path"]
        request = WebhookRequest(
            headers, origin, None if path == self._path else self._identifier_in(path)
        )
        body: bytes | Answer | Unread | None = self._screen(scope, request)
        if (
            body is None
            and template is not None
            and not template.varying & SCREENED_HEADERS
            # The mark of one request says nothing about the next one.
            and not rules.is_simulated(headers)
        ):
            template.memo = _Passed(rules, origin, request.identifier, signed_places(headers))
        if body is None and direct is not None:
            # A body that has arrived needs no deadline, which would cost a tenth of a delivery.
            body = direct.take_body(self._limit)
        if body is None:
            body = await self._bodies.read(receive)
        if isinstance(body, bytes):
            answer = await self._deliver(request, body, None if direct is None else direct.expiry)
            if direct is None:
                await answer.send(send)
            else:
                await direct.answer(answer)
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

    # -- screen ------------------------------------------------------------------------------

    def _identifier_in(self, path: str) -> str | None:
        """Return the identifier in a tenant's address, whether known or not, else None."""
        if self._tenant_path is None or not path.startswith(self._tenant_path):
            return None
        identifier = path[len(self._tenant_path) :]
        return identifier if identifier and "/" not in identifier else None

    def _screen(self, scope: Scope, request: WebhookRequest) -> Answer | None:
        """Apply every check that needs no body; None lets the request pass."""
        rules = self._rules
        address = request.origin.address
        if (
            self._require_https
            and not request.origin.secure
            and not rules.is_simulated(request.headers)
        ):
            return self._reject(
                "not_https",
                "the request is not HTTPS and RequireHttps is true: a proxy that ends TLS has to "
                "be in Server:TrustedProxies; to try things out, set Webhooks:RequireHttps to "
                "false.",
                request,
            )
        if scope["path"] != self._path and request.identifier is None:
            asked = scope["path"][:SHOWN_PATH_CHARACTERS]
            return self._refuse(
                "path", answers.NOT_FOUND, request, path=asked, configured=self._path
            )
        if scope["method"] != "POST":
            method = scope["method"][:SHOWN_METHOD_CHARACTERS]
            return self._refuse("method", answers.METHOD_NOT_ALLOWED, request, method=method)
        if not rules.sources.allows(address) and not rules.is_simulated(request.headers):
            return self._refuse("source", answers.SOURCE_REFUSED, request)
        if rules.rate is not None and (answer := self._slow_down(rules.rate, request)) is not None:
            return answer
        plain_json, declared_size = describe_body(request.headers)
        if not plain_json:
            return self._refuse("media", answers.UNSUPPORTED_MEDIA, request)
        if declared_size > self._limit:
            return self._refuse(
                "size", answers.TOO_LARGE, request, declared=declared_size, limit=self._limit
            )
        return None

    def _slow_down(self, rate: RateLimit, request: WebhookRequest) -> Answer | None:
        """Count a request of its source; return the answer if it has to wait."""
        wait = rate.admit(request.origin.address or "", trio.current_time())
        if wait is None:
            return None
        return self._refuse("rate", answers.rate_limited(wait), request)

    # -- verify, route -----------------------------------------------------------------------

    async def _deliver(self, request: WebhookRequest, body: bytes, expiry: Expiry | None) -> Answer:
        """Verify a delivery and send it its way; return the answer for its sender."""
        rules = self._rules
        webhook_id = None
        try:
            verified = await self.verification.verify(
                request,
                body,
                rules.keyring,
                tolerance=rules.tolerance,
                now=self._clock(),
                documents=None if self.ways is None else self.ways.documents,
            )
            if isinstance(verified, Unverified):
                refused = self._reject(
                    verified.cause, verified.detail, request, body, **verified.fields
                )
                await trio.lowlevel.checkpoint()
                return refused
            webhook_id = verified.delivery.webhook_id
            answer = await self._route(verified, expiry)
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
            self._note("webhook.refused", cause, answer, request, body)
        return answer

    async def _route(self, arrival: VerifiedDelivery, expiry: Expiry | None) -> Answer:
        """Run, enqueue or park a verified delivery, and return the answer for its sender.

        Handler and tenant are looked up here, once: an inline run takes both from here. Cancelled
        in the middle of an inline run, the delivery is released and the attempt does not count; a
        commit to the inbox is not undone.
        """
        if self.ways is None or self.draining:
            self._counters.count("refused")
            cause = "draining" if self.draining else "not_running"
            extra = self._throttle.fields(cause)
            if extra is not None:
                _log.warning("webhook.refused", cause=cause, hint=_HINTS[cause], **extra)
            await trio.lowlevel.checkpoint()
            return answers.unavailable(UNAVAILABLE_RETRY_SECONDS)
        runner, queue, _ = self.ways
        delivery = arrival.delivery
        handler = runner.handlers.find(delivery.type, delivery.raw)
        # Nearly all deliveries have no tenant: what is asked of each is asked without a call.
        parking = runner.parking
        tenant = None if delivery.tenant_id is None else await parking.tenant_of(delivery)
        if handler is None or (
            delivery.tenant_id is not None and parking.is_suspended(handler, delivery, tenant)
        ):
            return await parking.park(delivery, handler, tenant)
        if not handler.enqueue:
            return await runner.inline.run(arrival, handler, tenant, expiry=expiry)
        if handler.ordered:
            arrival = replace(arrival, delivery=replace(delivery, ordered=True))
        return await queue.accept(arrival)

    # -- refusals ----------------------------------------------------------------------------

    def _reject(
        self,
        cause: str,
        detail: str,
        request: WebhookRequest,
        body: bytes | None = None,
        **fields: object,
    ) -> Answer:
        self._counters.count("rejected")
        self._note(
            "webhook.rejected", cause, answers.INVALID, request, body, detail=detail, **fields
        )
        return answers.INVALID

    def _refuse(
        self, cause: str, answer: Answer, request: WebhookRequest, **fields: object
    ) -> Answer:
        self._counters.count("refused")
        self._note("webhook.refused", cause, answer, request, None, **fields)
        return answer

    def _note(
        self,
        event: str,
        cause: str,
        answer: Answer,
        request: WebhookRequest,
        body: bytes | None,
        **fields: object,
    ) -> None:
        self._rejections.note(
            Rejection(
                event,
                str(cause),
                answer.status,
                request.origin.address,
                claimed_id(request.headers),
                tuple(fields.items()),
                None if body is None else claimed_type(body),
                _declared_size(request.headers) if body is None else len(body),
            )
        )


def _declared_size(headers: Headers) -> int | None:
    size = describe_body(headers)[1]
    return None if size < 0 else size


def _report_contradiction(peer: str | None) -> None:
    _log.warning(
        "webhook.forwarding_contradiction",
        peer=peer,
        hint="Forwarded and X-Forwarded-* do not say the same, so such requests count as not "
        "secure: let the proxy remove what it does not set, and name the family that it sets in "
        "Sdk:Server:ForwardedHeaders; logged once",
    )
