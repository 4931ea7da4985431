"""The data of a runtime that the console shows.

The console does not import the packages whose data it shows. :class:`RuntimeConsole` is the
:class:`~sdk_trio.admin.console.ConsoleSource` that gives it the data. Modules for a single view are
imported when the view is requested.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from ..config.secret import first_signing
from ..config.show import SettingRow, describe
from ..errors import NotRunningError
from ..records.deliveries import DeliveryRecord
from ..records.policies import split_glob
from ..webhooks.signed_request import sign_body
from ..webhooks.sources.signing import sign_as

if TYPE_CHECKING:
    from ..base.telemetry import Sample
    from ..client.client import Client
    from ..records.states import Transition
    from ..records.tenants import Tenant
    from ..replication.health import ReplicationHealth
    from ..replication.verification import VerificationState
    from ..storage.sql.alerts import AlertStore
    from ..storage.sql.notifications import NotificationStore
    from ..tenants.service import TenantService
    from ..webhooks import WebhookReceiver
    from ..webhooks.rejections import RejectionRing

#: The maximum number of databases whose replicas are listed, worst first.
LISTED_DATABASES = 500

#: The origin of a value in settings that a program has built in code.
BY_PROGRAM = "the program"

#: A stored timestamp is reused until its age is this share of the tolerance. The rest is for the
#: transport to the listener and for clock differences.
REUSABLE_SHARE = 0.5

#: The header with the original timestamp of a relayed delivery that is signed again.
ORIGINAL_TIMESTAMP = "sdk-original-timestamp"


class Overseen(Protocol):
    """The part of replication that the check reads."""

    @property
    def health(self) -> "ReplicationHealth | None":
        """Return the result of the last check; None before the first one."""
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

    The runtime imports this module, so importing the runtime here would be circular.
    """

    settings: Settings
    receiver: "WebhookReceiver"

    @property
    def started(self) -> BoundAddresses | None:
        """Return the actual addresses; None before the start."""
        ...

    @property
    def ready(self) -> bool:
        """Return whether senders should send deliveries here."""
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
        """Return the client; raise NotRunningError without one."""
        ...

    @property
    def replication(self) -> Overseen | None:
        """Return the state of replication; None without replication."""
        ...

    @property
    def verification(self) -> Scheduled | None:
        """Return the state of the verification of replicas; None without replication."""
        ...

    @property
    def queue_depth(self) -> int:
        """Return how many events wait in memory for a worker."""
        ...

    @property
    def held_workers(self) -> str | None:
        """Describe the long runs that occupy all workers of the queue; None if none do."""
        ...

    @property
    def queue_capacity(self) -> int:
        """Return the upper limit of ``queue_depth``."""
        ...

    @property
    def deliveries(self) -> Mapping[str, int]:
        """Return the number of deliveries by result."""
        ...

    @property
    def handled_types(self) -> Mapping[str, str]:
        """Return the event types that have a handler, each with its policies."""
        ...

    @property
    def circuit(self) -> str | None:
        """Return the state of the client's circuit breaker; None without a client."""
        ...

    def samples(self) -> "Sequence[Sample]":
        """Return the metrics of every part except the admin address."""
        ...

    async def refresh(self) -> None:
        """Ask other processes of this runtime for their metrics."""
        ...

    def wake(self) -> None:
        """Make the workers poll for due events."""
        ...


class RuntimeConsole:
    """Reads the data of ``runtime``.

    The command line sets ``origins``, the origins of settings, and ``examine``, which runs the
    doctor.

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
        """Return whether the environment is Development."""
        return self._settings.is_development

    @property
    def features(self) -> Sequence[str]:
        """Return the names of the available features."""
        tenants = self._settings.multi_tenant
        available = {
            "tenants": tenants.enabled,
            "notifications": tenants.enabled,
            "replication": tenants.file_db.replication.use_replication,
            "alerts": self._settings.alerts.enabled,
            "doctor": self.examine is not None,
            "trigger": self.development,
            "relay": self._settings.relay.enabled,
            "sources": bool(self._settings.sources),
        }
        return [name for name, is_available in available.items() if is_available]

    @property
    def circuit(self) -> str | None:
        """Return the state of the client's circuit breaker; None without a client."""
        return self._runtime.circuit

    @property
    def activity(self) -> int:
        """Return a number that increases with every delivery and every end of a run."""
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
        # Settings that a program has built have no sources.
        return [
            row
            if row.value == defaults[row.key]
            else msgspec.structs.replace(row, origin=BY_PROGRAM)
            for row in describe(self._settings)
        ]

    def types(self) -> list[dict[str, Any]]:
        """Return the known event types; in Development each with a sample."""
        policies = self._runtime.handled_types
        rows = []
        for row in self._runtime.receiver.handlers.catalog:
            name = row.wire_type
            about = {
                "type": name,
                "handled": name in policies,
                "policies": policies.get(name, ""),
            }
            rows.append({**about, **self._sample(name)})
        return [*rows, *types_of_sources(policies)]

    def _sample(self, wire_type: str) -> dict[str, Any]:
        if not self.development:
            return {}
        from ..events.samples import UnknownEventTypeError, sample  # loads every sample

        try:
            made = sample(wire_type, now=datetime.fromtimestamp(self._clock(), UTC))
        except UnknownEventTypeError:  # a type that the application added
            return {}
        return {"sample": made["data"]}

    def replication(self) -> dict[str, Any]:
        """Return the state of replication."""
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
            "reason": "not checked yet" if health is None else health.reason,
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

    def alerts(self) -> "AlertStore":
        """Return the alerts."""
        if not self._settings.alerts.enabled:
            raise MissingPartError("there are no alerts: Sdk:Alerts:Enabled is false")
        return self._runtime.receiver.whole_store.alerts

    def preview(self, transition: "Transition", tenant: "Tenant | None") -> dict[str, str]:
        """Return the texts of a transition, for a tenant or for sample values."""
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
        """Run the doctor without the network."""
        if self.examine is None:
            raise MissingPartError(
                "the application has no doctor; run the command 'sdk-trio doctor'"
            )
        return await self.examine()

    async def trigger(self, type: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Deliver a signed sample to the receiver, only in Development."""
        if not self.development:
            raise MissingPartError("samples are sent only in Development; use 'events trigger'")
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
        result = msgspec.json.decode(answer.body)
        if answer.status != 200:
            raise BadQueryError(result["error"])
        return {
            "webhook_id": result["webhookId"],
            "type": result["eventType"],
            "status": result["status"],
            "body": result["body"],
        }

    # -- the relay ---------------------------------------------------------------------------

    async def sign(self, record: DeliveryRecord, is_local: bool) -> list[tuple[str, str]]:
        """Return the signature headers for relaying a delivery; none if they may not be seen.

        There are none while ``Admin:ReadOnly`` is true.

        The sender's signature is not stored. An HMAC is computed again, byte for byte, from id,
        timestamp, body and secret. A timestamp that the listener's receiver would refuse is
        replaced by the current time (docs/adr/0062-relay.md).
        """
        await trio.lowlevel.checkpoint()
        may_sign = self._may_sign(is_local) and not self._is_read_only
        if record.source is not None:
            return self._sign_as_source(record, record.source) if may_sign else []
        secret = await self._secret_of(record) if may_sign else None
        if secret is None or record.raw is None:
            return []
        now = self._clock()
        age = abs(now - record.timestamp)
        is_recent = age <= REUSABLE_SHARE * self._settings.webhooks.tolerance_seconds
        signed = sign_body(
            record.raw,
            secret=secret,
            webhook_id=record.webhook_id,
            timestamp=record.timestamp if is_recent else int(now),
            derivation=self._settings.webhooks.key_derivation,
        )
        original = [] if is_recent else [(ORIGINAL_TIMESTAMP, str(record.timestamp))]
        return [*signed.headers.items(), *original]

    def _sign_as_source(self, record: DeliveryRecord, name: str) -> list[tuple[str, str]]:
        """Return the headers of a delivery of a source, with the current time; none without it."""
        options = next((each for each in self._settings.sources if each.name == name), None)
        secret = None if options is None else first_signing(options.secrets)
        if options is None or secret is None or record.raw is None:
            return []
        signed = sign_as(
            options,
            record.type,
            record.raw,
            webhook_id=record.webhook_id,
            timestamp=int(self._clock()),
            secret=secret,
        )
        return [*signed.headers.items()]

    def _may_sign(self, is_local: bool) -> bool:
        return self._settings.relay.enabled or is_local

    @property
    def _is_read_only(self) -> bool:
        # A signature allows more than reading: with the body it can be posted to run the event
        # again.
        return self._settings.admin.read_only

    async def _secret_of(self, record: DeliveryRecord) -> Secret | None:
        """Return a secret of the record's signer that can sign."""
        await trio.lowlevel.checkpoint()
        if not record.signer:
            return first_signing(self._settings.webhooks.all_secrets)
        tenancy = self._runtime.receiver.tenancy
        tenant = await tenancy.service.recall(record.signer)
        if tenant is None:
            return None
        return first_signing(await tenancy.credentials.webhook_secrets(tenant))

    def relay(self, is_local: bool) -> dict[str, Any]:
        """Return the information that a listener needs."""
        self._require_relay(is_local)
        webhooks = self._settings.webhooks
        return {
            "versions": ["1"],
            "can_sign": not self._is_read_only and first_signing(webhooks.all_secrets) is not None,
            "tolerance_seconds": webhooks.tolerance_seconds,
        }

    def relay_secret(self, is_local: bool) -> str:
        """Return the secret that relayed deliveries are signed with."""
        self._require_relay(is_local)
        secret = first_signing(self._settings.webhooks.all_secrets)
        if secret is None:
            raise MissingPartError("the host has no secret that can sign, only public keys or none")
        return secret.reveal()

    def _require_relay(self, is_local: bool) -> None:
        if not self._may_sign(is_local):
            raise SecretsStayHereError(
                "deliveries are relayed only to this machine; set Sdk:Relay:Enabled to true to "
                "relay them to others"
            )


def types_of_sources(policies: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the types of sources that have a handler, as :meth:`RuntimeConsole.types` does."""
    found = ((*split_glob(name), text) for name, text in policies.items())
    return [
        {"type": name, "source": source, "handled": True, "policies": text}
        for source, name, text in found
        if source is not None
    ]


def _finite(lag: float | None) -> float | None:
    # Infinite while a replica was never in sync; JSON has no infinity.
    return None if lag is None or lag == inf else lag
