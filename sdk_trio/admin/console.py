"""The API behind the console's views: tenants, messages, alerts, replication, settings, relay.

Each view shows one part of the program. The runtime provides the parts as a
:class:`ConsoleSource`. A request for a part that this program does not have gets 404.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import urlencode

import attrs
import msgspec
import trio

from ..config.show import SettingRow
from ..errors import IllegalTransitionError, SdkError, TenantConflictError, TenantError
from ..records.deliveries import DeliveryRecord
from ..records.states import NotificationState, TenantStatus, Transition
from .api import (
    USUAL_ACTOR,
    Actions,
    Reply,
    document,
    problem,
)
from .query import (
    LARGEST_LIMIT,
    LARGEST_SEQUENCE,
    LONGEST_REASON,
    USUAL_LIMIT,
    BadQueryError,
    check_line,
    link_header,
    parameters,
    parse_number,
    parse_request,
)

if TYPE_CHECKING:
    from ..records.notifications import NotificationId
    from ..records.tenants import AuditRecord, Tenant
    from ..storage.sql.alerts import AlertStore
    from ..storage.sql.notifications import NotificationStore
    from ..tenants.service import TenantService
    from ..tenants.status import TransitionResult


#: The maximum number of messages that one call retries.
LARGEST_RETRY = 200

#: Timeout of ``doctor``, in seconds.
DOCTOR_SECONDS = 60.0


class MissingPartError(SdkError):
    """This program does not have the requested part."""


class SecretsStayHereError(SdkError):
    """A remote caller requested signatures or secrets, and the relay is off."""


class RejectedRequests(Protocol):
    """The ring buffer of requests that were not answered 200."""

    @property
    def total(self) -> int:
        """Return the number of requests since the start, which is the newest one's ``seq``."""
        ...

    @property
    def causes(self) -> Mapping[str, int]:
        """Return the number of requests by cause."""
        ...

    def newest(self, *, cause: str | None, before: int | None, limit: int) -> list[dict[str, Any]]:
        """Return up to ``limit`` stored requests, newest first."""
        ...


class ConsoleSource(Protocol):
    """The parts of the running program that the console shows.

    A method whose part is missing raises :class:`MissingPartError`.
    """

    @property
    def development(self) -> bool:
        """Return whether the environment is Development."""
        ...

    @property
    def features(self) -> Sequence[str]:
        """Return the available parts, by their names in the OpenAPI document."""
        ...

    @property
    def circuit(self) -> str | None:
        """Return the state of the client's circuit breaker; None without a client."""
        ...

    @property
    def activity(self) -> int:
        """Return a counter that increases with every delivery and every finished run."""
        ...

    @property
    def rejected(self) -> RejectedRequests:
        """Return the ring buffer of rejected requests."""
        ...

    def settings(self) -> Sequence[SettingRow]:
        """Return every setting with its origin; secrets are masked."""
        ...

    def types(self) -> list[dict[str, Any]]:
        """Return the known event types, in Development with a sample of each."""
        ...

    def replication(self) -> dict[str, Any]:
        """Return the status of replication."""
        ...

    def alerts(self) -> "AlertStore":
        """Return the alerts."""
        ...

    def tenants(self) -> "TenantService":
        """Return the tenants."""
        ...

    def notifications(self) -> "NotificationStore":
        """Return the messages to site managers."""
        ...

    def preview(self, transition: Transition, tenant: "Tenant | None") -> dict[str, str]:
        """Return the message texts for a transition, for a tenant or with sample values."""
        ...

    async def doctor(self) -> list[dict[str, str]]:
        """Run those checks of ``doctor`` that need no network."""
        ...

    async def trigger(self, type: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Deliver a signed sample to the receiver, in Development only.

        Raises:
            MissingPartError: there is no such type.
            BadQueryError: the data cannot be merged.
        """
        ...

    async def sign(self, record: DeliveryRecord, is_local: bool) -> list[tuple[str, str]]:
        """Return the headers of a delivery as a relay sends them; empty if they must not be seen.

        ``is_local``: whether the caller is on this machine. Remote callers need the relay to be on.
        """
        ...

    def relay(self, is_local: bool) -> dict[str, Any]:
        """Return the data that a listener needs to start.

        Raises:
            SecretsStayHereError: the caller is on another machine, and the relay is off.
        """
        ...

    def relay_secret(self, is_local: bool) -> str:
        """Return the secret that signs relayed deliveries; raises the same as :meth:`relay`."""
        ...


class TransitionRequest(msgspec.Struct, frozen=True):
    """The request body of ``POST /api/tenants/{tenant}/transition``."""

    transition: Literal["Suspended", "Reactivated", "Deactivated"]
    reason: str | None = None
    bypass_email_verification: bool = False
    actor: str | None = None


class RetryRequest(msgspec.Struct, frozen=True):
    """The request body of ``POST /api/notifications/retry``: the ids of messages."""

    ids: list[str]
    actor: str | None = None


class TriggerRequest(msgspec.Struct, frozen=True):
    """The request body of ``POST /api/events/trigger``; ``data`` is merged into the sample's."""

    type: str
    data: dict[str, Any] = msgspec.field(default_factory=dict)
    actor: str | None = None


class RelaySecretRequest(msgspec.Struct, frozen=True):
    """The request body of ``POST /api/relay/secret``."""

    actor: str | None = None


def listed_tenant(tenant: "Tenant") -> dict[str, Any]:
    """Return a tenant as JSON, without its credential sources, which no browser may see."""
    fields = attrs.asdict(tenant, recurse=False)
    del fields["credentials"]
    return fields


class ConsoleAnswerer:
    """Answers the requests of the console's API.

    Args:
        source: the parts of the program.
        actions: records the actions that callers request.
    """

    def __init__(self, source: ConsoleSource, actions: Actions) -> None:
        self._source = source
        self._actions = actions

    # -- rejected, settings, replication, types, doctor --------------------------------------

    async def rejections(self, query: bytes) -> Reply:
        """Return the newest stored rejected requests, and the total number."""
        given = parameters(query, ("cause", "before", "limit"))
        ring = self._source.rejected
        rows = ring.newest(
            cause=given.get("cause"),
            before=parse_number(given, "before", None, 0, LARGEST_SEQUENCE),
            limit=_limit(given),
        )
        await trio.lowlevel.checkpoint()
        return document(200, {"rejections": rows, "total": ring.total, "causes": dict(ring.causes)})

    async def settings(self) -> Reply:
        """Return every setting with its origin."""
        await trio.lowlevel.checkpoint()
        return document(200, [msgspec.structs.asdict(row) for row in self._source.settings()])

    async def replication(self) -> Reply:
        """Return the status of replication, with the age of its verification."""
        await trio.lowlevel.checkpoint()
        return document(200, self._source.replication())

    async def alerts(self) -> Reply:
        """Return every alert, the open ones first."""
        # Imported here, because only a program with alerts needs this module.
        from ..records.alerts import listed_alerts

        return document(200, listed_alerts(await self._source.alerts().load()))

    async def types(self) -> Reply:
        """Return the known event types."""
        await trio.lowlevel.checkpoint()
        return document(200, self._source.types())

    async def doctor(self) -> Reply:
        """Return the findings of ``doctor``, worst first."""
        return document(200, await self._source.doctor())

    async def actions(self) -> Reply:
        """Return the last actions."""
        await trio.lowlevel.checkpoint()
        return document(200, self._actions.listed())

    # -- tenants -----------------------------------------------------------------------------

    async def tenants(self, query: bytes) -> Reply:
        """Return a page of tenants, ordered by identifier."""
        given = parameters(query, ("status", "after", "limit"))
        status = _choice(given, "status", TenantStatus)
        limit = _limit(given)
        service = self._source.tenants()
        found = await service.list(status=status, after=given.get("after", ""), limit=limit + 1)
        page = found[:limit]
        after = page[-1].identifier if len(found) > limit else None
        return _page("/api/tenants", given, [listed_tenant(each) for each in page], after=after)

    async def tenant(self, name: str) -> Reply:
        """Return one tenant."""
        return document(200, listed_tenant(await self._source.tenants().get(name)))

    async def audit(self, name: str, query: bytes) -> Reply:
        """Return a page of the audit trail of one tenant, oldest first."""
        given = parameters(query, ("after", "limit"))
        after = parse_number(given, "after", 0, 0, LARGEST_SEQUENCE) or 0
        limit = _limit(given)
        service = self._source.tenants()
        tenant = await service.get(name)
        found = await service.audit(tenant.id, after_sequence=after, limit=limit + 1)
        page = found[:limit]
        following = str(page[-1].sequence) if len(found) > limit else None
        path = f"/api/tenants/{tenant.identifier}/audit"
        return _page(path, given, [_audited(each) for each in page], after=following)

    async def change_tenant(self, name: str, body: bytes, address: str | None) -> Reply:
        """Apply a transition to a tenant; answer 409 if its status or the rules forbid it.

        The audit row names the actor and the address of the client.
        """
        order: TransitionRequest = parse_request(body, TransitionRequest)
        check_line("reason", order.reason, LONGEST_REASON)
        service = self._source.tenants()
        tenant = await service.get(name)
        actor = order.actor or USUAL_ACTOR
        named_actor = f"{actor} ({address or 'unix socket'})"
        transition = Transition(order.transition)
        try:
            result = await _transition(service, transition, tenant, order, named_actor)
        except (IllegalTransitionError, TenantConflictError, TenantError) as error:
            return problem(409, str(error))
        self._actions.note(
            f"tenant {order.transition}", actor=actor, address=address, ids=[tenant.identifier]
        )
        return document(200, _changed(result))

    # -- messages ----------------------------------------------------------------------------

    async def messages(self, query: bytes) -> Reply:
        """Return a page of messages to site managers, newest first."""
        # Imported here, because only a program with messages needs this module.
        from ..records.notifications import listed_notification

        given = parameters(query, ("state", "channel", "tenant", "before", "limit"))
        limit = _limit(given)
        store = self._source.notifications()
        tenant = given.get("tenant")
        tenant_id = None if tenant is None else (await self._source.tenants().get(tenant)).id
        found = await store.find(
            state=_choice(given, "state", NotificationState),
            channel=given.get("channel"),
            tenant_id=tenant_id,
            before=None if "before" not in given else _message_id(given["before"]),
            limit=limit + 1,
        )
        page = found[:limit]
        before = str(page[-1].id) if len(found) > limit else None
        rows = [listed_notification(each) for each in page]
        return _page("/api/notifications", given, rows, before=before)

    async def preview(self, query: bytes) -> Reply:
        """Return the message texts for a transition; nothing is sent."""
        given = parameters(query, ("transition", "tenant"))
        transition = _choice(given, "transition", Transition)
        if transition is None:
            raise BadQueryError(f"transition takes one of {', '.join(Transition)}")
        # Checked first, so that a program without messages reports that.
        self._source.notifications()
        name = given.get("tenant")
        tenant = None if name is None else await self._source.tenants().get(name)
        await trio.lowlevel.checkpoint()
        return document(200, self._source.preview(transition, tenant))

    async def retry_messages(self, body: bytes, address: str | None) -> Reply:
        """Retry failed, skipped and unknown messages; ``left`` lists those not retried."""
        order: RetryRequest = parse_request(body, RetryRequest)
        if not 1 <= len(order.ids) <= LARGEST_RETRY:
            raise BadQueryError(f"ids must contain 1 to {LARGEST_RETRY} ids")
        ids = [_message_id(text) for text in dict.fromkeys(order.ids)]
        done = [str(id) for id in await self._source.notifications().retry(ids)]
        actor = order.actor or USUAL_ACTOR
        self._actions.note("notification retry", actor=actor, address=address, ids=done)
        left = [str(id) for id in ids if str(id) not in done]
        return document(200, {"retried": done, "left": left})

    # -- samples, relay ----------------------------------------------------------------------

    async def trigger(self, body: bytes, address: str | None) -> Reply:
        """Deliver a signed sample to the receiver; in Development only."""
        order: TriggerRequest = parse_request(body, TriggerRequest)
        sent = await self._source.trigger(order.type, order.data)
        actor = order.actor or USUAL_ACTOR
        self._actions.note("trigger", actor=actor, address=address, ids=[sent["webhook_id"]])
        return document(200, sent)

    async def relay(self, is_local: bool, newest: Callable[[], Awaitable[int]]) -> Reply:
        """Return the data that a listener needs to start."""
        info = self._source.relay(is_local)
        return document(200, {**info, "newest": await newest()})

    async def relay_secret(self, body: bytes, address: str | None, *, is_local: bool) -> Reply:
        """Return the secret that relayed deliveries are signed with."""
        order: RelaySecretRequest = parse_request(body or b"{}", RelaySecretRequest)
        secret = self._source.relay_secret(is_local)
        self._actions.note("relay secret", actor=order.actor or USUAL_ACTOR, address=address)
        await trio.lowlevel.checkpoint()
        return document(200, {"secret": secret})


async def _transition(
    service: "TenantService",
    transition: Transition,
    tenant: "Tenant",
    order: TransitionRequest,
    actor: str,
) -> "TransitionResult":
    if transition is Transition.SUSPENDED:
        return await service.suspend(
            tenant.id,
            reason=order.reason,
            actor=actor,
            bypass_email_verification=order.bypass_email_verification,
        )
    if transition is Transition.REACTIVATED:
        return await service.reactivate(tenant.id, reason=order.reason, actor=actor)
    return await service.deactivate(tenant.id, reason=order.reason, actor=actor)


def _changed(result: "TransitionResult") -> dict[str, Any]:
    return {
        **attrs.asdict(result, recurse=False),
        "tenant": listed_tenant(result.tenant),
    }


def _audited(record: "AuditRecord") -> dict[str, Any]:
    return attrs.asdict(record)


def _message_id(text: str) -> "NotificationId":
    from ..records.notifications import parse_notification_id

    id = parse_notification_id(text)
    if id is None:
        raise BadQueryError("give a message's id as number and channel, such as 17-email")
    return id


def _limit(given: Mapping[str, str]) -> int:
    return parse_number(given, "limit", USUAL_LIMIT, 1, LARGEST_LIMIT) or USUAL_LIMIT


def _choice(given: Mapping[str, str], name: str, kind: Any) -> Any:
    text = given.get(name)
    if text is None:
        return None
    if text not in set(kind):
        raise BadQueryError(f"{name} takes one of {', '.join(kind)}")
    return kind(text)


def _page(
    path: str, given: Mapping[str, str], rows: Sequence[Mapping[str, Any]], **cursor: str | None
) -> Reply:
    """Return rows, with a link to the next page if ``cursor`` has a value."""
    name, value = next(iter(cursor.items()))
    if value is None:
        return document(200, rows)
    query = urlencode({**given, name: value})
    return document(200, rows, (b"link", link_header(path, {"next": query}).encode("ascii")))
