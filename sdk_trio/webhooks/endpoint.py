"""The endpoint: one request from its head to its answer.

The path of a delivery: screen, read the body, verify, route, and then the inline run (``run``) or
the queue (``queue``), which give the answer. docs/explanation/delivery.md shows it.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple

import msgspec
import trio
from msgspec.structs import replace

from ..base.clock import wall
from ..base.http import DirectRequest, Expiry, Headers
from ..base.logs import Throttle, get_logger
from ..config import Secret, Settings
from ..errors import StoreUnavailableError
from ..events.decoding import Documents
from . import answers
from .answers import Answer, RequestRefusal
from .arrival import VerifiedDelivery
from .body import Bodies
from .counters import Counters
from .origin import source_of
from .queue import WorkerPool
from .rejections import LINES, SECONDS, Rejection, Rejections, claimed_id, claimed_type
from .run import DeliveryRunner
from .screen import Screen, Screened, declared_size
from .secret_usage import SecretUsage
from .signature import Keyring
from .sources.source import sources_by_path
from .verify import WebhookVerification

_log = get_logger("webhooks")

#: The Retry-After, in seconds, while the receiver starts, stops or has no store.
UNAVAILABLE_RETRY_SECONDS = 5.0


_HINTS = {
    "draining": "the receiver is stopping; senders will deliver again",
    "not_running": "nothing has started the receiver, or it has ended: servers pass no lifespan to "
    "a mounted application, so pass lifespan=receiver.lifespan to the application that mounts it",
}

#: The settings that :meth:`Endpoint.prepare` can change while requests are served.
LIVE_KEYS = (
    "Sdk:Webhooks:Secret",
    "Sdk:Webhooks:Secrets",
    "Sdk:Webhooks:KeyDerivation",
    "Sdk:Webhooks:ToleranceSeconds",
    "Sdk:Webhooks:AllowedSourceIpRanges",
    "Sdk:Webhooks:RateLimitPerMinute",
    "Sdk:Sources",
    "Sdk:Server:TrustedProxies",
    "Sdk:Server:ForwardedHeaders",
)


class Rules(msgspec.Struct, frozen=True, eq=False):
    """The rules of one configuration for screening and verification; a reload replaces them all."""

    secrets: tuple[Secret, ...]
    keyring: Keyring
    tolerance: int
    screen: Screen

    @classmethod
    def of(cls, settings: Settings, *, previous: "Rules | None" = None) -> "Rules":
        """Return the rules of ``settings``, which replace ``previous``.

        Raises:
            OptionsValidationError: a secret, range or rate cannot be used.
        """
        options = settings.webhooks
        secrets = options.all_secrets
        return cls(
            secrets=secrets,
            # With tenants the host may have no secret: then each tenant has its own.
            keyring=Keyring(())
            if settings.multi_tenant.enabled and not secrets
            else Keyring.from_secrets(secrets, options.key_derivation),
            tolerance=options.tolerance_seconds,
            screen=Screen(
                settings,
                clock=trio.current_time,
                on_contradiction=_report_contradiction,
                sources=sources_by_path(settings),
                previous=None if previous is None else previous.screen,
            ),
        )

    def positions_in(self, earlier: "Rules") -> list[int | None]:
        """Return the position of each secret in ``earlier``; None for a new one."""
        places = {secret: index for index, secret in reversed([*enumerate(earlier.secrets)])}
        return [places.get(secret) for secret in self.secrets]


class DeliveryPaths(NamedTuple):
    """The inline path (``runner``) and the queued path (``queue``), while the store is open.

    ``documents`` are the types with an inline handler, whose payload is decoded at once.
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
        self._limit = options.max_payload_bytes
        self._bodies = Bodies(
            largest=self._limit, together=settings.server.max_body_bytes_in_flight
        )
        self._rules = Rules.of(settings)
        self.secret_usage: SecretUsage = SecretUsage(len(options.all_secrets), clock())
        self.verification: WebhookVerification = WebhookVerification(settings, self.secret_usage)
        #: None while the receiver is stopped: deliveries are answered 503.
        self.paths: DeliveryPaths | None = None
        #: True once the drain has begun: deliveries are answered 503.
        self.draining = False

    def prepare(self, settings: Settings) -> Callable[[], None]:
        """Check the rules of ``settings`` and return a function that puts them into force.

        They are the keys of :data:`LIVE_KEYS`. Nothing changes until the function is called, and
        calling it cannot fail. A delivery that is being verified at that moment keeps the old
        rules.

        Raises:
            OptionsValidationError: a secret, range or rate cannot be used.
        """
        rules = Rules.of(settings, previous=self._rules)

        def commit() -> None:
            positions = rules.positions_in(self._rules)
            self._rules = rules
            self.secret_usage.rearrange(positions, self._clock())

        return commit

    async def respond(self, request: DirectRequest) -> Answer | None:
        """Return the answer to one request; None if its sender has left.

        Cancellation while the handler runs releases the delivery.
        """
        screen = self._rules.screen
        screened = screen.screen(request)
        refusal = screened.refusal
        if refusal is None and screen.rate is not None:
            refusal = screen.limit_rate(screen.rate, screened.origin)
        if refusal is not None:
            await trio.lowlevel.checkpoint()
            return self._refuse(refusal, request.headers, screened)
        # A complete body needs no deadline, which would cost a tenth of a delivery.
        body = request.take_body(self._limit)
        if body is None:
            read = await self._read_body(request)
            if read is None:
                return None
            if isinstance(read, RequestRefusal):
                return self._refuse(read, request.headers, screened)
            body = read
        return await self._deliver(request, screened, body)

    def source_of(self, host: str | None) -> Hashable:
        """Return the key by which connections from ``host`` are counted; None for no limit.

        Trusted proxies have no limit, because all senders use them; unix sockets have no limit
        either, because their peers have no addresses.
        """
        if not host or self._rules.screen.proxies.trusts(host):
            return None
        return source_of(host)

    async def _read_body(self, request: DirectRequest) -> bytes | RequestRefusal | None:
        """Wait for the body; return it, or a refusal, or None if the sender has left."""
        size = declared_size(request.headers)
        if size is not None and size > self._limit:
            await trio.lowlevel.checkpoint()
            return RequestRefusal(
                "size", answers.TOO_LARGE, {"declared": size, "limit": self._limit}
            )
        return await self._bodies.read(request.receive)

    # -- verify, route -----------------------------------------------------------------------

    async def _deliver(self, request: DirectRequest, screened: Screened, body: bytes) -> Answer:
        """Verify and route a delivery; return the answer for its sender."""
        rules = self._rules
        webhook_id = None
        try:
            if screened.source is not None:
                verified = await screened.source.verify(
                    request.headers, body, address=screened.origin.address, now=self._clock()
                )
            else:
                verified = await self.verification.verify(
                    request.headers,
                    body,
                    screened,
                    rules.keyring,
                    tolerance=rules.tolerance,
                    now=self._clock(),
                    documents=None if self.paths is None else self.paths.documents,
                )
            if isinstance(verified, RequestRefusal):
                await trio.lowlevel.checkpoint()
                return self._refuse(verified, request.headers, screened, body)
            webhook_id = verified.delivery.webhook_id
            answer = await self._route(verified, request.expiry)
        except StoreUnavailableError as error:
            self._counters.count("unavailable", signer=screened.signer)
            extra = self._throttle.fields("store")
            if extra is not None:
                _log.store_unavailable(error, webhook_id=webhook_id, **extra)
            await trio.lowlevel.checkpoint()
            answer = answers.unavailable(UNAVAILABLE_RETRY_SECONDS)
        if answer.status != answers.OK.status:
            # The cause was already logged where it occurred. This log line records that the sender
            # was asked to deliver again.
            cause = "handler" if answer.status == answers.HANDLER_FAILED.status else "later"
            self._note(RequestRefusal(cause, answer), request.headers, screened, body)
        return answer

    async def _route(self, arrival: VerifiedDelivery, expiry: Expiry | None) -> Answer:
        """Run, enqueue or park a verified delivery, and return the answer for its sender.

        Handler and tenant are looked up here, and an inline run uses both. Cancellation during an
        inline run releases the delivery, and the attempt does not count; a commit to the inbox is
        not undone.
        """
        if self.paths is None or self.draining:
            self._counters.count("refused", signer=arrival.delivery.signer)
            cause = "draining" if self.draining else "not_running"
            extra = self._throttle.fields(cause)
            if extra is not None:
                _log.warning("webhook.refused", cause=cause, hint=_HINTS[cause], **extra)
            await trio.lowlevel.checkpoint()
            return answers.unavailable(UNAVAILABLE_RETRY_SECONDS)
        runner, queue, _ = self.paths
        delivery = arrival.delivery
        handler = runner.handlers.find(delivery.type, delivery.raw, delivery.signer)
        # Nearly all deliveries have no tenant, so that is checked without a call.
        parking = runner.parking
        tenant = None if delivery.tenant_id is None else await parking.tenant_of(delivery)
        is_suspended = (
            delivery.tenant_id is not None
            and handler is not None
            and parking.is_suspended(handler, delivery, tenant)
        )
        paused = bool(runner.pauses.active) and runner.pauses.holds(delivery.type, delivery.signer)
        must_wait = is_suspended or paused
        if handler is not None and not handler.enqueue and not must_wait:
            return await runner.inline.run(arrival, handler, tenant, expiry=expiry)
        # A redelivery, whose tenant was suspended or whose body has another type, may meet an
        # inline run of its key. The store would treat the claim of that run as a leftover.
        if runner.inline.has_run_of(delivery):
            return await runner.inline.join(delivery)
        if handler is None or is_suspended:
            until = runner.clock_watch.take_expired_until()
            return await parking.park(delivery, handler, tenant, take_expired_until=until)
        if handler.ordered:
            arrival = replace(arrival, delivery=replace(delivery, ordered=True))
        return await queue.accept(arrival, direct=not (handler.limited or paused))

    # -- refusals ----------------------------------------------------------------------------

    def _refuse(
        self,
        refusal: RequestRefusal,
        headers: Headers,
        screened: Screened,
        body: bytes | None = None,
    ) -> Answer:
        result = "rejected" if refusal.is_rejection else "refused"
        self._counters.count(result, signer=screened.signer)
        self._note(refusal, headers, screened, body)
        return refusal.answer

    def _note(
        self, refusal: RequestRefusal, headers: Headers, screened: Screened, body: bytes | None
    ) -> None:
        source = () if screened.source is None else (("source", screened.source.name),)
        self._rejections.note(
            Rejection(
                refusal.event,
                refusal.cause,
                refusal.answer.status,
                screened.origin.address,
                claimed_id(headers),
                (*refusal.fields.items(), *source),
                None if body is None else claimed_type(body),
                declared_size(headers) if body is None else len(body),
            )
        )


def _report_contradiction(peer: str | None) -> None:
    _log.warning(
        "webhook.forwarding_contradiction",
        peer=peer,
        hint="Forwarded and X-Forwarded-* disagree, so such requests count as not secure: "
        "configure the proxy to remove the headers that it does not set, and set "
        "Sdk:Server:ForwardedHeaders to the family that it sets; logged once",
    )
