"""The parts of a runtime as the console shows them.

The console stands beside the rooms that it shows and does not know them. :class:`RuntimeConsole` is
the :class:`~sdk_trio.admin.console.ConsoleSource` that hands it what it needs. What is loaded only
for a view is imported when the view is asked for.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import msgspec
import trio

from ..admin.console import MissingPartError, SecretsStayHereError
from ..admin.query import BadQueryError
from ..base.clock import wall
from ..config import Secret, Settings
from ..config.secret import PUBLIC_KEY_PREFIX
from ..config.show import SettingRow, describe
from ..errors import NotRunningError
from ..records.deliveries import DeliveryRecord
from ..webhooks.signed_request import sign_body

if TYPE_CHECKING:
    from ..base.telemetry import Sample
    from ..client.client import Client
    from ..records.states import Transition
    from ..records.tenants import Tenant
    from ..replication.health import ReplicationHealth
    from ..replication.verification import VerificationState
    from ..storage.ports import NotificationStore
    from ..tenants.service import TenantService
    from ..webhooks import WebhookReceiver
    from ..webhooks.rejections import RejectionRing

#: Databases whose replicas are listed, the worst first.
LISTED_DATABASES = 500

#: The origin of a value in settings that a program has made itself.
BY_PROGRAM = "the program"

#: A stored signature is sent on as it was made until it has used up this share of the tolerance:
#: the rest is for the way to the listener and for clocks that differ.
FRESH_SHARE = 0.5

#: The time that a relayed delivery was first signed at, where it is signed anew.
ORIGINAL_TIMESTAMP = "sdk-original-timestamp"


class Overseen(Protocol):
    """The part of replication that the check reads."""

    @property
    def health(self) -> "ReplicationHealth | None":
        """Return the last result, None before the first look."""
        ...


class Scheduled(Protocol):
    """The part of the verification that the check reads."""

    @property
    def state(self) -> "VerificationState":
        """Return the results of the runs so far."""
        ...


class BoundAddresses(Protocol):
    """The addresses of a runtime that has started."""

    @property
    def receiver(self) -> tuple[str, ...]:
        """Return the receiver's addresses."""
        ...


class ObservedRuntime(Protocol):
    """The part of :class:`~sdk_trio.Runtime` that the admin address shows.

    The runtime makes its admin server; a class here that named the runtime would close a circle.
    """

    settings: Settings
    receiver: "WebhookReceiver"

    @property
    def started(self) -> BoundAddresses | None:
        """Return the real addresses; None before the start."""
        ...

    @property
    def ready(self) -> bool:
        """Return whether deliveries are to be sent here."""
        ...

    @property
    def draining(self) -> bool:
        """Return whether a stop has begun."""
        ...

    @property
    def has_client(self) -> bool:
        """Return whether the runtime is full stack."""
        ...

    @property
    def client(self) -> "Client":
        """Return the client; raises NotRunningError where there is none."""
        ...

    @property
    def replication(self) -> Overseen | None:
        """Return how replication stands; None where there is none."""
        ...

    @property
    def verification(self) -> Scheduled | None:
        """Return how the verification of replicas stands; None where there is none."""
        ...

    @property
    def queue_depth(self) -> int:
        """Return how many events wait in memory for a worker."""
        ...

    @property
    def held_workers(self) -> str | None:
        """Name what holds all workers of the queue, None if nothing does."""
        ...

    @property
    def queue_capacity(self) -> int:
        """Return the most that ``queue_depth`` can be."""
        ...

    @property
    def deliveries(self) -> Mapping[str, int]:
        """Return what happened to deliveries, by result."""
        ...

    @property
    def handled_types(self) -> Collection[str]:
        """Return the event types that have a handler."""
        ...

    @property
    def circuit(self) -> str | None:
        """Return the state of the client's circuit breaker; None without a client."""
        ...

    def samples(self) -> "Sequence[Sample]":
        """Return the metrics of every part but the admin address."""
        ...

    async def refresh(self) -> None:
        """Ask other processes of this runtime for their figures."""
        ...

    def wake(self) -> None:
        """Make the workers look for due events."""
        ...


class RuntimeConsole:
    """Shows the parts of ``runtime``.

    ``origins`` and ``examine`` are the command line's, which alone knows where a setting came from
    and how an installation is examined.

    Args:
        runtime: the running program.
        clock: returns Unix seconds.
    """

    def __init__(self, runtime: ObservedRuntime, *, clock: Callable[[], float] = wall) -> None:
        self.origins: Mapping[str, str] | None = None
        self.examine: Callable[[], Awaitable[list[dict[str, str]]]] | None = None
        self._runtime = runtime
        self._clock = clock

    @property
    def _settings(self) -> Settings:
        return self._runtime.settings

    @property
    def development(self) -> bool:
        """Say whether the environment is Development."""
        return self._settings.is_development

    @property
    def features(self) -> Sequence[str]:
        """Return the parts that there are."""
        tenants = self._settings.multi_tenant
        there = {
            "tenants": tenants.enabled,
            "notifications": tenants.enabled,
            "replication": tenants.file_db.replication.use_replication,
            "doctor": self.examine is not None,
            "trigger": self.development,
            "relay": self._settings.relay.enabled,
        }
        return [name for name, is_there in there.items() if is_there]

    @property
    def circuit(self) -> str | None:
        """Return the state of the client's circuit breaker; None without a client."""
        return self._runtime.circuit

    @property
    def activity(self) -> int:
        """Return a number that grows with every delivery and every end of a run."""
        return sum(self._runtime.deliveries.values())

    @property
    def rejected(self) -> "RejectionRing":
        """Return the ring of rejected requests."""
        return self._runtime.receiver.rejected

    def settings(self) -> Sequence[SettingRow]:
        """Return every setting with its origin; secrets are masked."""
        if self.origins is not None:
            return describe(self._settings, self.origins)
        defaults = {row.key: row.value for row in describe(Settings())}
        # Settings that a program has made have no sources that could be named.
        return [
            row
            if row.value == defaults[row.key]
            else msgspec.structs.replace(row, origin=BY_PROGRAM)
            for row in describe(self._settings)
        ]

    def types(self) -> list[dict[str, Any]]:
        """Return the known event types, in Development with a sample of each."""
        handled_types = self._runtime.handled_types
        rows = []
        for row in self._runtime.receiver.handlers.catalog:
            handled = row.wire_type in handled_types
            rows.append({"type": row.wire_type, "handled": handled, **self._sample(row.wire_type)})
        return rows

    def _sample(self, wire_type: str) -> dict[str, Any]:
        if not self.development:
            return {}
        from ..events.samples import UnknownEventTypeError, sample  # loads every sample

        try:
            made = sample(wire_type, now=datetime.fromtimestamp(self._clock(), UTC))
        except UnknownEventTypeError:  # a type of the application's own
            return {}
        return {"sample": made["data"]}

    def replication(self) -> dict[str, Any]:
        """Return how replication stands."""
        if not self._settings.multi_tenant.file_db.replication.use_replication:
            raise MissingPartError("there is no replication: UseReplication is false")
        overseer, scheduler = self._runtime.replication, self._runtime.verification
        health = None if overseer is None else overseer.health
        state = None if scheduler is None else scheduler.state
        verified_at = None if state is None else state.verified_at
        databases = () if health is None else health.databases[:LISTED_DATABASES]
        return {
            "state": "Unknown" if health is None else str(health.state),
            "checked_at": None if health is None else health.checked_at,
            "reason": "nobody has looked yet" if health is None else health.reason,
            "lag_seconds": None if health is None else _finite(health.lag_seconds),
            "databases": [
                {**attrs.asdict(each), "lag_seconds": _finite(each.lag_seconds)}
                for each in databases
            ],
            "verification": {
                "ran_at": None if state is None else state.ran_at,
                "verified_at": verified_at,
                "age_seconds": None if verified_at is None else self._clock() - verified_at,
                "failed": {} if state is None else dict(state.failed),
                "verified": None if state is None else state.verified,
            },
        }

    def tenants(self) -> "TenantService":
        """Return the tenants."""
        if not self._settings.multi_tenant.enabled:
            raise MissingPartError("there are no tenants: Sdk:MultiTenant:Enabled is false")
        return self._runtime.receiver.tenancy.service

    def notifications(self) -> "NotificationStore":
        """Return the messages to site managers."""
        self.tenants()
        return self._runtime.receiver.whole_store.notifications

    def preview(self, transition: "Transition", tenant: "Tenant | None") -> dict[str, str]:
        """Return the texts of a transition, of a tenant or of made-up values."""
        from ..notifications.send import sample_record
        from ..notifications.templates import render, template_of

        templates = self._settings.multi_tenant.notifications.templates
        record = sample_record(transition, tenant, now=self._clock())
        message = render(template_of(templates, transition), record)
        return {
            "transition": str(transition),
            "email_subject": message.email_subject,
            "email_text": message.email_text,
            "email_html": message.email_html,
            "sms_text": message.sms_text,
        }

    async def doctor(self) -> list[dict[str, str]]:
        """Examine the installation without the network."""
        if self.examine is None:
            raise MissingPartError("the application has no doctor: run 'sdk-trio doctor' beside it")
        return await self.examine()

    async def trigger(self, type: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Deliver a signed sample to the receiver, in Development alone."""
        if not self.development:
            raise MissingPartError("samples are sent in Development alone: see 'events trigger'")
        from ..events.samples import UnknownEventTypeError
        from ..webhooks.simulator import Simulator  # loads every sample

        started = self._runtime.started
        if started is None:
            raise NotRunningError("the receiver is starting")
        simulator = Simulator(self._settings, clock=self._clock)
        simulator.address = started.receiver[0]
        try:
            answer = await simulator.simulate(type, dict(data))
        except UnknownEventTypeError as error:
            raise MissingPartError(str(error)) from None
        except RecursionError as error:
            raise BadQueryError(str(error)) from None
        told = msgspec.json.decode(answer.body)
        if answer.status != 200:
            raise BadQueryError(told["error"])
        return {
            "webhook_id": told["webhookId"],
            "type": told["eventType"],
            "status": told["status"],
            "body": told["body"],
        }

    # -- the relay ---------------------------------------------------------------------------

    async def sign(self, record: DeliveryRecord, here: bool) -> list[tuple[str, str]]:
        """Return the headers of a delivery as a relay sends them; empty where none may be seen.

        There are none while ``Admin:ReadOnly`` is true.

        The signature of the sender is not kept: of an HMAC it can be made again, byte for byte,
        out of id, time, body and secret. A time that the listener's receiver would refuse is
        replaced by the present one (docs/adr/0062-relay.md).
        """
        await trio.lowlevel.checkpoint()
        may_sign = self._may_sign(here) and not self._is_read_only
        secret = await self._secret_of(record) if may_sign else None
        if secret is None or record.raw is None:
            return []
        now = self._clock()
        age = abs(now - record.timestamp)
        is_fresh = age <= FRESH_SHARE * self._settings.webhooks.tolerance_seconds
        signed = sign_body(
            record.raw,
            secret=secret,
            webhook_id=record.webhook_id,
            timestamp=record.timestamp if is_fresh else int(now),
            derivation=self._settings.webhooks.key_derivation,
        )
        original = [] if is_fresh else [(ORIGINAL_TIMESTAMP, str(record.timestamp))]
        return [*signed.headers.items(), *original]

    def _may_sign(self, here: bool) -> bool:
        return self._settings.relay.enabled or here

    @property
    def _is_read_only(self) -> bool:
        # A signature allows a change: posting it with the body runs the event again.
        return self._settings.admin.read_only

    async def _secret_of(self, record: DeliveryRecord) -> Secret | None:
        """Return a secret of the record's signer that can make signatures."""
        await trio.lowlevel.checkpoint()
        if not record.signer:
            return _signing(self._settings.webhooks.all_secrets)
        tenancy = self._runtime.receiver.tenancy
        tenant = await tenancy.service.recall(record.signer)
        if tenant is None:
            return None
        return _signing(await tenancy.credentials.webhook_secrets(tenant))

    def relay(self, here: bool) -> dict[str, Any]:
        """Return what a listener needs to know."""
        self._require_relay(here)
        webhooks = self._settings.webhooks
        return {
            "versions": ["1"],
            "can_sign": not self._is_read_only and _signing(webhooks.all_secrets) is not None,
            "tolerance_seconds": webhooks.tolerance_seconds,
        }

    def relay_secret(self, here: bool) -> str:
        """Return the secret that relayed deliveries are signed with."""
        self._require_relay(here)
        secret = _signing(self._settings.webhooks.all_secrets)
        if secret is None:
            raise MissingPartError("the host has no secret that signs: only public keys, or none")
        return secret.reveal()

    def _require_relay(self, here: bool) -> None:
        if not self._may_sign(here):
            raise SecretsStayHereError(
                "deliveries are relayed to this machine alone: Sdk:Relay:Enabled is false"
            )


def _signing(secrets: Sequence[Secret]) -> Secret | None:
    """Return the first secret that makes signatures: a public key only checks them."""
    return next((s for s in secrets if not s.reveal().startswith(PUBLIC_KEY_PREFIX)), None)


def _finite(lag: float | None) -> float | None:
    # Infinite while a replica was never in step, which JSON cannot say.
    return None if lag is None or lag == inf else lag
