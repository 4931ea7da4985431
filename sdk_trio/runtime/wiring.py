"""Construction of the optional parts, which are imported only if the settings enable them.

A receiver without client, admin address and tenants then starts faster and needs less memory.
"""

import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec
import trio

from ..base.http import App, DirectRequest, Receive, Scope, Send, Whole
from ..base.telemetry import Sample
from ..config import Secret, Settings
from ..webhooks import WebhookReceiver, asgi
from ..webhooks.signature import NEW_SECRET_BYTES, new_secret
from ..webhooks.signed_request import simulation_secret

if TYPE_CHECKING:
    from ..client.client import Client
    from ..storage.ports import Store
    from ..tenants.tenancy import TenantRuntime
    from ..webhooks.companion import BackgroundTask
    from ..webhooks.simulator import Simulator
    from .admin import AdminServer
    from .console import ObservedRuntime
    from .notifications import ChannelFactory, Notifier


#: Values of ``sdk_client_circuit_state``.
CIRCUIT_STATES = {"closed": 0, "open": 1, "probing": 2, "isolated": 3}


class Counted(Protocol):
    """The part of the client's counters that the metrics read."""

    @property
    def requests(self) -> Mapping[tuple[str, str], int]:
        """Return finished calls by method and outcome."""
        ...

    @property
    def attempts_per_call(self) -> Mapping[int, int]:
        """Return how many calls took so many attempts."""
        ...


def sample_client(counters: Counted, circuit: str) -> tuple[Sample, ...]:
    """Return the client's counters as samples.

    ``sdk_client_requests_total{method,outcome}``, ``sdk_client_circuit_state`` (a number of
    :data:`CIRCUIT_STATES`), and ``sdk_client_attempts`` as a cumulative histogram of attempts a
    call: ``_bucket{le}``, ``_sum`` and ``_count``.
    """
    samples = [
        Sample("sdk_client_requests_total", (("method", method), ("outcome", outcome)), count)
        for (method, outcome), count in sorted(counters.requests.items())
    ]
    samples.append(Sample("sdk_client_circuit_state", (), CIRCUIT_STATES[circuit]))
    # Buckets of the exposition format are cumulative: each counts the calls with at most that many
    # attempts.
    calls = total = 0
    for attempts, count in sorted(counters.attempts_per_call.items()):
        calls += count
        total += attempts * count
        samples.append(Sample("sdk_client_attempts_bucket", (("le", str(attempts)),), calls))
    # The format requires this bucket, equal to the count.
    samples.append(Sample("sdk_client_attempts_bucket", (("le", "+Inf"),), calls))
    samples.append(Sample("sdk_client_attempts_sum", (), total))
    samples.append(Sample("sdk_client_attempts_count", (), calls))
    return tuple(samples)


class Routes:
    """Routes requests: the receiver at its path and, only in Development, the simulator.

    The simulator signs deliveries for any client.
    """

    def __init__(self, settings: Settings, receiver: WebhookReceiver) -> None:
        self._receiver = receiver
        self._simulator = _make_simulator(settings) if settings.is_development else None

    @property
    def application(self) -> App:
        """Return the ASGI application; without a simulator, the receiver itself."""
        # Outside of Development, no request pays for a check of its path.
        return self._receiver if self._simulator is None else self

    def started(self, address: str) -> None:
        """Set the address for the simulator's deliveries: the receiver's actual address."""
        if self._simulator is not None:
            self._simulator.address = address

    def reload(self, settings: Settings) -> None:
        """Have the simulator sign with the secrets of ``settings``."""
        if self._simulator is not None:
            self._simulator.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI ``http`` request."""
        await asgi.serve(self, scope, receive, send)

    def respond(self, request: DirectRequest) -> Awaitable[Whole | None]:
        """Return the response to one request; None if its sender has left."""
        if self._simulator is not None and self._simulator.serves(request.path):
            return self._simulator.respond(request)
        return self._receiver.respond(request)


def _make_simulator(settings: Settings) -> "Simulator":
    from ..webhooks.simulator import Simulator  # loads every sample

    return Simulator(settings)


def make_simulator_secret(settings: Settings) -> Secret | None:
    """Return a random secret for a simulator that has none in the settings; else None."""
    if not settings.is_development or simulation_secret(settings) is not None:
        return None
    return Secret(new_secret(secrets.token_bytes(NEW_SECRET_BYTES)), made_for_tests=True)


def with_simulator_secret(settings: Settings, secret: Secret | None) -> Settings:
    """Return settings with ``secret`` added, unless they already have a secret for simulations."""
    if secret is None or simulation_secret(settings) is not None:
        return settings
    webhooks = settings.webhooks
    return msgspec.structs.replace(
        settings,
        webhooks=msgspec.structs.replace(webhooks, secrets=(*webhooks.secrets, secret)),
    )


class NotificationsOff:
    """Marks notifications as off in the store; a ``webhooks.companion.BackgroundTask``.

    Without notifications, transitions still write outbox rows. The mark means that none of them
    will be announced, so a later start with notifications does not send old messages
    (docs/adr/0013-notifications.md).
    """

    def __init__(self) -> None:
        self._closed = trio.Event()

    async def run(
        self,
        store: "Store",
        tenancy: "TenantRuntime",
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Mark notifications as off, then wait for :meth:`close`; no message is recorded meanwhile.

        Raises:
            StoreUnavailableError: the store cannot be written now.
        """
        # Written at each start, because another process may have run with notifications since.
        await store.notifications.switch_off()
        task_status.started()
        await self._closed.wait()

    def close(self) -> None:
        """Let :meth:`run` return."""
        self._closed.set()


def make_client(settings: Settings) -> "Client":
    """Return a client of the upstream API, not open yet."""
    from ..client.client import Client

    return Client(settings)


def make_administrator(runtime: "ObservedRuntime", clock: Callable[[], float]) -> "AdminServer":
    """Return the server of the admin address of ``runtime``."""
    from .admin import AdminServer

    return AdminServer(runtime, clock=clock)


def make_notifier(
    settings: Settings, channels: "ChannelFactory | None", clock: Callable[[], float]
) -> "Notifier | None":
    """Return the sender of notifications; None if they are not enabled.

    If they are not, their other settings are ignored. Without tenants there are no recipients.
    """
    if not (settings.multi_tenant.enabled and settings.multi_tenant.notifications.enabled):
        return None
    from .notifications import Notifier

    return Notifier(settings, channels=channels, clock=clock)


def make_companion(settings: Settings, notifier: "Notifier | None") -> "BackgroundTask | None":
    """Return the background task of the receiver; None without tenants.

    It sends notifications, or marks them as off in the store.
    """
    if notifier is not None or not settings.multi_tenant.enabled:
        return notifier

    return NotificationsOff()
