"""The nursery tree: every part of the runtime as a sibling task, and their orderly end.

``run`` has three layers. The caller's cancellation reaches only its body, which waits; when that
ends, however it ends, a synchronous ``finally`` starts the drain. The parts live in a shielded
scope, so that a cancelled caller still drains; the same ``finally`` gives that scope its deadline,
so that no drain lasts longer than ``GracefulDrainTimeoutSeconds`` (spec 4.2 and 8).
"""

import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import attrs
import trio

from ..config import Settings, missing_parts, unmet_needs
from ..config.rules import RECONCILIATION_NEEDS_CLIENT
from ..errors import NotInThisVersionError, NotRunningError, OptionsValidationError
from ..logs import get_logger
from ..tenants.client_pool import ClientFactory
from ..tenants.upgrade import HostUpgrade
from ..webhooks import DrainReport, HandlerRegistry, WebhookReceiver
from .client_samples import Sample, sample_client
from .routes import Routes
from .server import Server

if TYPE_CHECKING:
    from ..client.client import Client
    from ..replication.verification_scheduler import VerificationScheduler
    from .replication_overseer import ReplicationOverseer

_log = get_logger("runtime")


@attrs.frozen
class Started:
    """Where a running runtime listens: real URLs, with the ports that were picked for 0."""

    receiver: tuple[str, ...]
    admin: tuple[str, ...] = ()

    @property
    def webhook_url(self) -> str:
        """The first address that deliveries can be sent to, without the path."""
        return self.receiver[0]


class Runtime:
    """Everything in one nursery: client, receiver, inbox, queue and workers (contracts 1).

    Args:
        settings: validated settings of :func:`sdk_trio.load_settings`.
        handlers: which handler runs for which event type; None: every event is parked.
        client: a client to use, not open yet, such as one with a transport of your own; None: the
            runtime makes one of the settings. It opens and closes either.
        standalone: run without a client (spec 1.6); None: when there is neither an access token
            nor a ``client``.
        clock: returns Unix seconds.
        client_factory: makes the client of a tenant out of settings with its access token.
        host_upgrade: the host's part of the upgrade from a single tenant: a resolver and steps.

    Raises:
        NotInThisVersionError: the settings ask for a part that this version does not contain.
        OptionsValidationError: they ask for what needs a client, an extra or tenants that are not
            there.
        MissingHandlersError: ``FailOnMissingHandlers`` is true and a known type has no handler.

    It runs once; make another one to run again. No signal handler is installed.
    """

    def __init__(
        self,
        settings: Settings,
        handlers: HandlerRegistry | None = None,
        *,
        client: "Client | None" = None,
        standalone: bool | None = None,
        clock: Callable[[], float] = time.time,
        client_factory: ClientFactory | None = None,
        host_upgrade: HostUpgrade | None = None,
    ) -> None:
        problems = missing_parts(settings)
        if problems:
            raise NotInThisVersionError(problems)
        if unmet_needs(settings):
            raise OptionsValidationError(unmet_needs(settings))
        self.settings = settings
        if standalone is None:
            standalone = client is None and settings.access_token is None
        self._client = None if standalone else client or _make_client(settings)
        self._reconciles = settings.webhooks.reconciliation.enabled
        if self._reconciles and self._client is None:
            raise OptionsValidationError([RECONCILIATION_NEEDS_CLIENT])
        if client_factory is None and not standalone:
            client_factory = _make_client
        self.receiver = WebhookReceiver(
            settings,
            handlers or HandlerRegistry(),
            client=self._client,
            clock=clock,
            client_factory=client_factory,
            host_upgrade=host_upgrade,
        )
        self._clock = clock
        self.started: Started | None = None
        #: How replication stands, and its metrics; None: there is none, or it has not begun.
        self.replication: ReplicationOverseer | None = None
        #: What is known of the replicas' verification; None as above.
        self.verification: VerificationScheduler | None = None
        self._reason = "the surrounding scope ended"
        self._stop_wanted = trio.Event()
        self._drain_begun = trio.Event()
        self._scope = trio.CancelScope()
        self._reconciling = trio.CancelScope()
        self._used = False
        self._served = False

    @property
    def report(self) -> DrainReport | None:
        """What the shutdown left behind; None until :meth:`run` has ended."""
        return self.receiver.report

    @property
    def ready(self) -> bool:
        """Whether deliveries are accepted."""
        return self.receiver.ready

    @property
    def client(self) -> "Client":
        """The client of the upstream API: open while the runtime runs, readable afterwards.

        ``client.counters`` are its totals, ``client.breaker`` can be read and set by hand.

        Raises:
            NotRunningError: the runtime is standalone.
        """
        if self._client is None:
            raise NotRunningError("this runtime is standalone: it has no client")
        return self._client

    @property
    def client_samples(self) -> tuple[Sample, ...]:
        """The client's metrics (contracts 10); none before the start, nor in standalone mode."""
        if self._client is None or self.started is None:
            return ()
        return sample_client(self._client.counters, self._client.breaker.state)

    def shut_down(self, reason: str) -> None:
        """Begin a graceful stop: accept nothing new, drain, end. A second call does nothing."""
        if not self._stop_wanted.is_set():
            self._reason = reason
            self._stop_wanted.set()

    def force(self) -> None:
        """Cut a drain short: handlers are cancelled now, their events stay in the store."""
        self._stop_wanted.set()
        if self.replication is not None:
            self.replication.force()
        self._scope.cancel()

    async def run(  # noqa: ASYNC910 - opening the nursery is a checkpoint, or it raises
        self, *, task_status: trio.TaskStatus[Started] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run until :meth:`shut_down`; started with the real addresses once it serves.

        Cancelled, it drains as well, within ``GracefulDrainTimeoutSeconds``, then raises
        ``Cancelled``. If a part crashes, the others are cancelled and its own exception is raised.

        Raises:
            BindError: an address cannot be listened on.
            StoreLockedError: another process uses the data directory.
            StorageError: the store cannot be opened.
            NotRunningError: it was run before, or :meth:`force` came before it had started.
        """
        if self._used:
            raise NotRunningError("this runtime has been run already; make another one")
        self._used = True
        try:
            async with trio.open_nursery(strict_exception_groups=True) as nursery:
                try:
                    self.started = await nursery.start(self._serve)
                    task_status.started(self.started)
                    await self._stop_wanted.wait()
                finally:
                    self._begin_drain()
        except BaseExceptionGroup as group:
            _raise_only_member(group)
        finally:
            self._log_end()

    def _begin_drain(self) -> None:
        self._scope.deadline = min(
            self._scope.deadline,
            trio.current_time() + self.settings.webhooks.graceful_drain_timeout_seconds,
        )
        self._drain_begun.set()
        if self.started is not None:
            self.receiver.stop_accepting()
            _log.info("runtime.draining", reason=self._reason, queued=self.receiver.queue_depth)

    async def _serve(  # noqa: ASYNC128 - _run_parts calls it
        self, *, task_status: trio.TaskStatus[Started]
    ) -> None:
        settings = self.settings
        routes = Routes(settings, self.receiver)
        server = Server(
            routes,
            settings.server.bind,
            key="Sdk:Server:Bind",
            graceful_seconds=settings.webhooks.graceful_drain_timeout_seconds,
            cert_file=settings.server.cert_file,
            key_file=settings.server.key_file,
            fast_path=settings.server.fast_path,
        )
        with self._scope:
            async with AsyncExitStack() as stack:
                if self._client is not None:
                    # Opened first and closed last: handlers use it until the drain has ended.
                    await stack.enter_async_context(self._client)
                await self._run_parts(server, routes, task_status=task_status)
        if not self._served:
            raise NotRunningError("the runtime was stopped by force before it had started")

    async def _run_parts(
        self, server: Server, routes: Routes, *, task_status: trio.TaskStatus[Started]
    ) -> None:
        async with trio.open_nursery() as parts:
            await parts.start(self.receiver.run)
            if self.settings.multi_tenant.file_db.replication.use_replication:
                await parts.start(self._replicate)
            started = Started(receiver=await parts.start(server.run))
            routes.started(started.receiver[0])
            _log.info("runtime.started", receiver=started.receiver, admin=started.admin)
            # From here on, only the drain's deadline or force() ends the parts.
            self._scope.shield = self._served = True
            task_status.started(started)
            # hypercorn returns without being asked when it swallows KeyboardInterrupt.
            parts.start_soon(_call_after, server.ended, self.shut_down, "the server ended")
            if self._reconciles:
                parts.start_soon(self._reconcile)
            await self._drain_begun.wait()
            self._reconciling.cancel()
            server.stop()
            await server.ended.wait()
            await self.receiver.drain()
            parts.cancel_scope.cancel()

    async def _replicate(  # noqa: ASYNC128 - run_replication calls it
        self, *, task_status: trio.TaskStatus[None]
    ) -> None:
        from .replication_overseer import ReplicationOverseer  # loaded by those who replicate
        from .verification_runner import make_scheduler

        self.replication = ReplicationOverseer(self.settings, self.receiver.tenancy.service)
        self.verification = make_scheduler(
            self.settings, self.receiver.tenancy.service, self.receiver.store, clock=self._clock
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.verification.run)
            await self.replication.run(task_status=task_status)

    async def _reconcile(self) -> None:
        from .reconciler import Reconciler  # loads the client, which is optional

        reconciler = Reconciler(self.client, self.receiver.store, self.settings, clock=self._clock)
        with self._reconciling:
            await reconciler.run()

    def _log_end(self) -> None:
        report = self.report
        if report is None:
            return
        log = _log.error if report.lost else _log.info
        log(
            "runtime.stopped",
            drained=report.drained,
            persisted=report.persisted,
            lost=report.lost,
            ids=report.ids,
        )


def _make_client(settings: Settings) -> "Client":
    # Imported here, so that a standalone receiver does not load httpx and the client.
    from ..client.client import Client

    return Client(settings)


async def _call_after(event: trio.Event, call: Callable[[str], None], argument: str) -> None:
    await event.wait()
    call(argument)


def _raise_only_member(group: BaseExceptionGroup[BaseException]) -> None:
    """Raise the group's only exception, through nested groups of one; else the group itself."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    raise error from (None if error is group else error.__cause__)
