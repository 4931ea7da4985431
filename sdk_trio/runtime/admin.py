"""The admin address of a runtime: its server, its checks, and its view of the running program.

It starts before the receiver, so that probes see a long start, and ends after the drain.

A replica that lags never makes the process unready: refusing deliveries because a backup is behind
would turn a risk into a loss. The process is degraded, which ``/healthz``, the metrics and the
alerts show.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import trio

from .._version import __version__
from ..admin.access import (
    Access,
    AdminToken,
    Concurrency,
    is_of_this_machine,
    provide_token,
)
from ..admin.app import AdminApp
from ..admin.status import StatusProviders, StoreObserver, TenantCounts
from ..base.clock import wall
from ..base.logs import get_logger
from ..base.telemetry import Check
from ..config import Settings, StorageBackend
from ..config.check import token_fault
from ..errors import OptionsValidationError, Problem, UnknownTenantError
from ..server.limits import Limits, share_descriptors
from ..server.listen import descriptor_limit
from ..server.serve import Server
from ..storage.ports import Inbox
from ..webhooks.companion import supervise
from ..webhooks.origin import source_of
from .console import ObservedRuntime, Overseen, RuntimeConsole, Scheduled

#: The number of tenants that a check names; it counts the others.
NAMED = 5

_log = get_logger("admin")

#: The clients are scrapers, probes and people: they need few connections, and none has a reason to
#: be slow. An orchestrator's probes may share an address with an attacker. So a source at its limit
#: evicts its own waiting connections before a new one is refused.
LIMITS = Limits(
    connections=128,
    connections_per_source=64,
    source_evicts_own=True,
    head_seconds=5.0,
    body_seconds=10.0,
    write_seconds=10.0,
)

#: Settings that :meth:`AdminServer.prepare_reload` can change while requests are served.
LIVE_KEYS = ("Sdk:Admin:ReadOnly", "Sdk:Admin:AllowedHosts")

#: Time for requests in progress when the address closes, in seconds. It closes last, and a query
#: must not lengthen a shutdown.
GRACEFUL_SECONDS = 1.0


def limits_within(descriptors: int) -> Limits:
    """Return :data:`LIMITS` within the admin address' share of the descriptors."""
    shares = share_descriptors(descriptors)
    connections = min(LIMITS.connections, shares.admin)
    return msgspec.structs.replace(LIMITS, connections=connections, refusals=shares.refusals)


def concurrency_within(limits: Limits) -> Concurrency:
    """Return the limits of requests; a quarter of the slots is left for probes."""
    connections = limits.connections
    of_one = min(limits.connections_per_source, connections // 2)
    return Concurrency(most=max(1, connections * 3 // 4), most_of_one=max(1, of_one * 3 // 4))


def check_replication(overseen: Overseen | None) -> Check:
    """Return the state of replication; before the first check it is degraded, not healthy."""
    health = None if overseen is None else overseen.health
    if health is None:
        return Check("replication", True, "not checked yet", degraded=True)
    if health.is_disabled:
        return Check("replication", True, health.reason)
    reason = f"{health.state}: {health.reason}"
    return Check("replication", True, reason, degraded=health.is_degraded)


def check_verification(scheduled: Scheduled | None) -> Check:
    """Return whether the last verification of each tenant's replica was good."""
    failed = {} if scheduled is None else scheduled.state.failed
    if not failed:
        return Check("replicas", True, "no verification has failed")
    names = ", ".join(sorted(failed)[:NAMED])
    more = "" if len(failed) <= NAMED else f" and {len(failed) - NAMED} more"
    return Check(
        "replicas",
        True,
        f"the replicas of {len(failed)} tenants cannot be restored, or differ from their "
        f"databases: {names}{more}; see 'replication verify'",
        degraded=True,
    )


class AdminServer:
    """Serves the admin address of ``runtime``, from before the receiver until after the drain.

    Parts may add checks and samples to ``sources`` at any time. ``token`` is the token and its
    source; None before :meth:`run`.
    """

    def __init__(self, runtime: ObservedRuntime, *, clock: Callable[[], float] = wall) -> None:
        self.sources: StatusProviders = StatusProviders()
        self.token: AdminToken | None = None
        #: The parts that the console shows.
        self.console: RuntimeConsole = RuntimeConsole(runtime, clock=clock)
        self._runtime = runtime
        self._clock = clock
        self._app: AdminApp | None = None
        self._addresses: tuple[str, ...] = ()
        self.sources.checks.extend(
            (
                self._check_drain,
                self._check_receiver,
                self._check_queue,
                runtime.receiver.check_pauses,
            )
        )
        self.sources.samples.append(runtime.samples)
        if runtime.settings.multi_tenant.file_db.replication.use_replication:
            self.sources.checks.extend(
                (
                    lambda: check_replication(runtime.replication),
                    lambda: check_verification(runtime.verification),
                )
            )

    @property
    def observer(self) -> StoreObserver | None:
        """The observer of the store; None before :meth:`run`."""
        return None if self._app is None else self._app.observer

    async def run(
        self, *, task_status: trio.TaskStatus[tuple[str, ...]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Bind, report the actual addresses, and serve until cancelled.

        Raises:
            BindError: the address cannot be listened on; the message names ``Sdk:Admin:Bind``.
        """
        options, storage = self._runtime.settings.admin, self._runtime.settings.storage
        self.token = token = provide_token(self._runtime.settings)
        limits = limits_within(descriptor_limit())
        access = Access(token.value, (), options.allowed_hosts, options.read_only)
        app = AdminApp(
            self,
            self.sources,
            access,
            self.console,
            version=__version__,
            concurrency=concurrency_within(limits),
            source_of=source_of,
            directory=Path(storage.path) if storage.backend is StorageBackend.SQLITE else None,
            clock=self._clock,
            tolerance=lambda: self._runtime.settings.webhooks.tolerance_seconds,
        )
        self._app = app
        server = Server(
            app,
            [options.bind],
            key="Sdk:Admin:Bind",
            graceful_seconds=GRACEFUL_SECONDS,
            limits=limits,
            source_of=lambda host: source_of(host) if host else None,
        )
        async with trio.open_nursery() as nursery:
            serve = partial(supervise, "the server of the admin address", server.run)
            addresses = await nursery.start(partial(serve, may_end=lambda: False))
            _refuse_guessable(token, addresses)
            # Whether a request needs the token depends on all addresses being local, and those of
            # inherited sockets are known only now.
            app.listen_at(addresses)
            self._addresses = addresses
            nursery.start_soon(app.run)
            _log.info("admin.started", admin=addresses, token=token.place)
            task_status.started(addresses)

    def prepare_reload(self, settings: Settings) -> Callable[[], None]:
        """Return a function that puts :data:`LIVE_KEYS` of ``settings`` into force.

        They apply from the next request on.
        """
        options = settings.admin

        def commit() -> None:
            if self._app is not None:
                self._app.restrict(allowed_hosts=options.allowed_hosts, read_only=options.read_only)

        return commit

    # -- the runtime, as the admin application sees it ------------------------------------

    @property
    def state(self) -> str:
        """``starting``, ``running`` or ``draining``."""
        if self._runtime.draining:
            return "draining"
        return "starting" if self._runtime.started is None else "running"

    def stores(self) -> tuple[Inbox, TenantCounts | None]:
        """Return the open inbox, and the tenants' counts if there are tenants.

        Raises:
            NotRunningError: the store is not open.
        """
        receiver = self._runtime.receiver
        tenants = self._runtime.settings.multi_tenant.enabled
        return receiver.store, receiver.tenancy.service.counts if tenants else None

    async def tenant_id(self, name: str) -> str:
        """Return the id of the tenant with this identifier or id, or raise UnknownTenantError."""
        if not self._runtime.settings.multi_tenant.enabled:
            await trio.lowlevel.checkpoint()
            raise UnknownTenantError("there are no tenants: Sdk:MultiTenant:Enabled is false")
        return (await self._runtime.receiver.tenancy.service.get(name)).id

    def wake(self) -> None:
        """Make the workers poll for due events."""
        self._runtime.wake()

    async def refresh(self) -> None:
        """Ask other processes of the runtime for their figures."""
        await self._runtime.refresh()

    def status(self) -> Mapping[str, Any]:
        """Return the addresses, and the current state of the queue."""
        runtime = self._runtime
        started = runtime.started
        return {
            "receiver": started.receiver if started else (),
            "admin": self._addresses,
            "path": runtime.settings.webhooks.path,
            "storage": str(runtime.settings.storage.backend),
            "standalone": not runtime.has_client,
            "queue_depth": runtime.queue_depth,
            "queue_capacity": runtime.queue_capacity,
            "draining": runtime.draining,
            "deliveries": dict(runtime.deliveries),
        }

    def source_names(self) -> Sequence[str]:
        """Return the names of the configured sources, without the upstream."""
        return [source.name for source in self._runtime.settings.sources]

    # -- checks ------------------------------------------------------------------------------

    def _check_drain(self) -> Check:
        draining = self._runtime.draining
        return Check("drain", not draining, "a graceful stop has begun" if draining else "none")

    def _check_receiver(self) -> Check:
        if self._runtime.started is None:
            return Check("receiver", False, "it is starting")
        if self._runtime.ready:
            return Check("receiver", True, "accepts deliveries")
        # The receiver is ready and the runtime is not during Server:ShutdownDelaySeconds.
        leaving = self._runtime.draining and self._runtime.receiver.ready
        detail = "still accepts deliveries for a moment" if leaving else "accepts no new deliveries"
        return Check("receiver", False, detail)

    def _check_queue(self) -> Check:
        depth, capacity = self._runtime.queue_depth, self._runtime.queue_capacity
        # With a full queue, deliveries get 503 with Retry-After, and senders retry. So the process
        # is degraded but ready. Otherwise a load balancer would answer instead, and would remove
        # and add the process as the queue drains and fills.
        detail = f"{depth} of {capacity} slots are used"
        # Also only degraded if long runs occupy all workers: deliveries are still stored and
        # answered 200, and inline handlers run.
        held = self._runtime.held_workers
        if held is not None:
            return Check("queue", True, f"{detail}; {held}", degraded=True)
        return Check("queue", True, detail, degraded=depth >= capacity)


def _refuse_guessable(token: AdminToken, addresses: tuple[str, ...]) -> None:
    """Refuse a weak token if an address can be reached from other machines.

    The command line checks this before the start. Settings that a host builds in code, and the
    addresses of inherited sockets, are known only here.
    """
    fault = token_fault(token.value) if token.value else None
    if fault is not None and not all(map(is_of_this_machine, addresses)):
        raise OptionsValidationError(
            [Problem("Sdk:Admin:TokenEnvVar", f"is in {token.place}, and {fault}")]
        )
