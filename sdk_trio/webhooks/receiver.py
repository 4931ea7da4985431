"""The receiver as one ASGI application, with its inbox and workers.

:class:`WebhookReceiver` opens the store, builds handlers, runner and queue, and starts its services
in a nursery: the runtime's, or its own if it is mounted. It answers 200 for an event only once the
inbox has it, and closes the store only after the last run has recorded its outcome.
"""

import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import trio

from ..base.clock import current as current_clock
from ..base.clock import wall
from ..base.executor import run_in_thread
from ..base.http import DirectRequest, Receive, Scope, Send
from ..base.logs import Throttle, get_logger
from ..base.telemetry import Check, Links, Sample, find_tracer
from ..config import Settings, StorageBackend
from ..errors import NotRunningError, StoreUnavailableError
from ..records.deliveries import UNFINISHED
from ..storage.data_directory import lock_data_directory
from ..storage.open import StoreUse, open_store
from ..storage.ports import Inbox, Store
from . import asgi
from .answers import Answer
from .companion import BackgroundTask, Part, supervise
from .counters import Counters
from .effects import Conclusions
from .endpoint import DeliveryPaths, Endpoint
from .invocation import Run
from .pauses import NOTHING_PAUSED, Pauses
from .queue import WorkerPool
from .recording import CLEANUP_SECONDS
from .registry import HandlerRegistry
from .rejections import LINES, SECONDS, RejectionRing, Rejections
from .routes import first_match, routes_of
from .run import DeliveryRunner
from .secret_usage import SecretUsage
from .services import Services

if TYPE_CHECKING:
    from ..tenants.tenancy import ClientFactory, TenantRuntime
    from ..tenants.upgrade import HostUpgrade, Quiescence
    from ..tenants.upgrade_run import Upgrader
    from .forward import Forwarder
    from .tenant_keys import TenantKeys

    _Opened = tuple[Inbox, TenantRuntime | None, Store | None]

_log = get_logger("webhooks")

#: Seconds between two retention passes; the settings are in hours.
JANITOR_SECONDS = 3600.0

#: The maximum number of ids in a drain report; the counts are always complete.
REPORTED_IDS = 100

#: The maximum number of long runs that readiness names.
REPORTED_RUNS = 3


class Share(msgspec.Struct, frozen=True):
    """The share of one process in the work of a receiver; by default it does all of it.

    ``deliveries``: it accepts and runs deliveries. ``singletons``: it does the work that only one
    process may do: it holds the lock of the data directory, takes over events of earlier processes,
    upgrades, applies the retention, and sends notifications. ``owner`` is its name in the store;
    None: a random one. ``after_crash``: it takes the runs that ended a process, and runs them alone
    first. ``first``: it writes log lines that concern all processes.
    """

    deliveries: bool = True
    singletons: bool = True
    owner: str | None = None
    after_crash: bool = False
    first: bool = True

    @property
    def use(self) -> StoreUse:
        """The role of the process among those that have the store open."""
        if not self.singletons:
            return StoreUse.WORKER
        return StoreUse.RUNTIME if self.deliveries else StoreUse.SUPERVISOR


WHOLE = Share()


class DrainReport(msgspec.Struct, frozen=True):
    """The deliveries that a shutdown has finished or abandoned.

    ``drained`` events were finished during the drain. ``persisted`` ones are unfinished and wait
    in the store for the next start; ``lost`` ones were only in memory (``Storage:Backend`` is
    ``Memory``). ``ids`` names the first of them.
    """

    drained: int
    persisted: int
    lost: int
    ids: tuple[str, ...] = ()


class WebhookReceiver:
    """The webhook receiver without a runtime: an ASGI application for any Trio ASGI server.

    Args:
        settings: validated settings; an access token is not needed.
        handlers: the handlers by event type.
        inbox: an open inbox to use, without tenants; None: it opens ``settings.storage`` itself
            and closes it.
        client: ``services.client`` of the handlers, open while the receiver runs; None: the
            receiver is standalone, and ``services.client`` raises.
        clock: returns Unix seconds; None: the clock of :mod:`sdk_trio.base.clock`.
        client_factory: makes the client that ``services.client_for`` returns for a tenant, from
            settings with the tenant's access token.
        host_upgrade: the host's part of the upgrade from a single tenant: a resolver and steps.
        quiescence: the host's signal that nothing writes its data; with
            ``RequireGracefulQuiescence`` the upgrade is refused without it.
        companion: a part that runs beside the queue on the same store and tenants, such as
            notifications; started only with tenants.
        share: the work of this process, if several processes form one receiver.

    Its services need a nursery: the ASGI lifespan starts and drains it. Servers pass no lifespan to
    a mounted application: pass :meth:`lifespan` to the application that mounts it, or start it with
    ``await nursery.start(receiver.run)``. Before it runs, and after its end, deliveries are
    answered 503. It cannot run on an asyncio server such as uvicorn: use ``sdk_trio.asgi.Threaded``
    there.

    Raises:
        OptionsValidationError: the settings cannot be used.
        MissingHandlersError: ``FailOnMissingHandlers`` is true and a known type has no handler.
        NotSupportedError: ``DefaultTenantStrategy`` is FirstUserOrganization.
        DefaultTenantError: ``DefaultTenantStrategy`` is HostSupplied, and ``host_upgrade`` has no
            resolver.
    """

    def __init__(
        self,
        settings: Settings,
        handlers: HandlerRegistry,
        *,
        inbox: Inbox | None = None,
        client: object | None = None,
        clock: Callable[[], float] | None = None,
        client_factory: "ClientFactory | None" = None,
        host_upgrade: "HostUpgrade | None" = None,
        quiescence: "Quiescence | None" = None,
        companion: BackgroundTask | None = None,
        share: Share = WHOLE,
    ) -> None:
        if settings.webhooks.fail_on_missing_handlers and share.deliveries:
            handlers.require_complete(routed=_routed_types(settings, handlers))
        if inbox is None:
            handlers.require_transactions(settings.storage.backend)
        if settings.multi_tenant.enabled and share.singletons:
            from ..tenants.upgrade import require_choice  # loads all of the tenants' modules

            require_choice(settings.multi_tenant.single_tenant_upgrade, host_upgrade)
        self.settings = settings
        self.counters: Counters = Counters(
            (row.event_class.wire_type for row in handlers.catalog), handlers.types_of_sources
        )
        self._registry = handlers
        self._throttle = Throttle(lines=LINES, seconds=SECONDS)
        self._given_inbox = inbox
        self._client = client
        # Keep the function itself: each delivery calls it several times.
        self._clock = clock or current_clock().wall
        self._client_factory = client_factory
        self._host_upgrade = host_upgrade
        self._quiescence = quiescence
        self._upgrader: Upgrader | None = None
        self._companion = companion
        self._companion_ended: trio.Event | None = None
        self._share = share
        self._drain_wanted = trio.Event()
        #: The name that holds this process's leases in the store.
        self.owner: str = share.owner or str(uuid.uuid4())
        # The owner of an earlier runtime that is known to be dead.
        self._dead: str | None = None
        self._is_locked = False
        #: The number of deliveries of earlier processes that the start has taken over.
        self.recovered: int = 0
        self._rejections = Rejections(self.counters)
        self._endpoint: Endpoint = Endpoint(
            settings, self.counters, self._rejections, clock=self._clock
        )
        #: Returns the answer to one request; None if its sender has left. Cancellation while the
        #: handler runs releases the delivery.
        self.respond: Callable[[DirectRequest], Awaitable[Answer | None]] = self._endpoint.respond
        self._running: _Running | None = None
        self._last: _Running | None = None
        self._drained: trio.Event = trio.Event()
        self.report: DrainReport | None = None

    # -- ASGI --------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection: ``http``, or the ``lifespan`` of a receiver without a
        runtime."""
        if not trio.lowlevel.in_trio_run():
            await self._refuse_loop(scope, receive, send)
        elif scope["type"] == "http":
            await asgi.serve(self, scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            raise NotRunningError(f"a webhook receiver serves no {scope['type']} connections")

    def prepare_reload(self, settings: Settings) -> Callable[[], None]:
        """Check new settings and return a function that puts them into force.

        Only the keys of ``webhooks.endpoint.LIVE_KEYS`` can change while it runs; the others are
        used as given, so pass the running settings with these keys changed. Calling the returned
        function cannot fail and changes everything at once; tenants' credentials are then read
        again.

        Raises:
            OptionsValidationError: the settings cannot be used; nothing has changed.
        """
        # Everything that can fail happens here, before the commit: a reload is all or nothing
        # (docs/adr/0019-atomic-reload.md).
        commit_rules = self._endpoint.prepare(settings)
        tenancy = None if self._running is None else self._running.tenancy
        commit_clients = None if tenancy is None else tenancy.clients.prepare_reload(settings)

        def commit() -> None:
            commit_rules()
            self.settings = settings
            if self._running is not None:
                self._running.runner.invocations.use(settings)
            if tenancy is not None and commit_clients is not None:
                tenancy.credentials.reload()
                commit_clients()
                self._endpoint.verification.tenant_keys = _tenant_keys(tenancy, settings)

        return commit

    async def _refuse_loop(  # noqa: ASYNC910 - another library's loop has no checkpoints of Trio
        self, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Log and answer that this loop is not Trio's; it cannot verify anything."""
        hint = (
            "this receiver needs an ASGI server on Trio (hypercorn -k trio); on asyncio, as under "
            "uvicorn, use sdk_trio.asgi.Threaded instead"
        )
        extra = self._throttle.fields("not_trio")
        if extra is not None:
            _log.error("webhook.refused", cause="not_trio", status=503, hint=hint, **extra)
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.failed", "message": hint})
        elif scope["type"] == "http":
            await Answer.of(503, json.dumps({"error": hint}).encode()).send(send)

    @asynccontextmanager
    async def lifespan(self, app: object = None) -> AsyncIterator[None]:
        """Start the receiver, and drain it at the end of the block; on a Trio server.

        It ignores its argument, the application, so that it works with Starlette, FastAPI and
        Litestar: ``Starlette(lifespan=receiver.lifespan)``. On cancellation, or when the drain
        times out, running handlers are cancelled and their events released.

        Raises:
            NotRunningError: the loop is not Trio's.
            StoreLockedError: another process uses the data directory.
        """
        if not trio.lowlevel.in_trio_run():
            raise NotRunningError(
                "receiver.lifespan needs a server on Trio, as hypercorn -k trio: on asyncio use "
                "sdk_trio.asgi.Threaded"
            )
        async with trio.open_nursery() as nursery:
            await nursery.start(self.run)
            yield
            with trio.move_on_after(self.settings.webhooks.graceful_drain_timeout_seconds):
                await self.drain()
            nursery.cancel_scope.cancel()

    async def _live(self, receive: Receive, send: Send) -> None:
        message = await receive()
        if message["type"] != "lifespan.startup":
            return
        async with trio.open_nursery() as nursery:
            try:
                await nursery.start(self.run)
            except Exception as error:
                with trio.move_on_after(CLEANUP_SECONDS, shield=True):
                    await send({"type": "lifespan.startup.failed", "message": str(error)})
                raise
            await send({"type": "lifespan.startup.complete"})
            await receive()
            with trio.move_on_after(self.settings.webhooks.graceful_drain_timeout_seconds):
                await self.drain()
            nursery.cancel_scope.cancel()
        await send({"type": "lifespan.shutdown.complete"})

    # -- start and stop
    # --------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Return whether deliveries are accepted: the receiver runs, and no drain has begun."""
        return self._running is not None and not self._endpoint.draining

    @property
    def store(self) -> Inbox:
        """The open inbox; raises :class:`NotRunningError` before the start and after the end."""
        if self._running is None:
            raise NotRunningError("the receiver is not running, so its store is not open")
        return self._running.inbox

    @property
    def tenancy(self) -> "TenantRuntime":
        """The tenants; raises :class:`NotRunningError` if there are none, or they are not open."""
        if self._running is None or self._running.tenancy is None:
            raise NotRunningError(
                "there are no tenants: the receiver is not running, or MultiTenant:Enabled is false"
            )
        return self._running.tenancy

    @property
    def whole_store(self) -> Store:
        """The open store with its other parts; raises :class:`NotRunningError` as :attr:`store`."""
        if self._running is None or self._running.store is None:
            raise NotRunningError("the receiver is not running, or was given only an inbox")
        return self._running.store

    @property
    def handlers(self) -> HandlerRegistry:
        """The handlers by event type."""
        return self._registry

    @property
    def rejected(self) -> RejectionRing:
        """The last requests that were not answered 200."""
        return self._rejections.ring

    @property
    def queue_depth(self) -> int:
        """Return how many events wait in the memory channel."""
        return self._running.queue.depth if self._running else 0

    async def take_over(self, dead: str, successor: str) -> int:
        """Release the leases of a dead process, and leave its runs to ``successor``; count them.

        Raises:
            NotRunningError: the store is not open.
            StoreUnavailableError: the store does not answer.
        """
        return await self.store.take_over(dead, successor=successor, now=self._clock())

    def wake(self) -> None:
        """Make the feeder poll the store at once, after this process has added events."""
        if self._running is not None:
            self._running.queue.wake()

    @property
    def pauses(self) -> Pauses:
        """The pauses of events, as this process knows them.

        Raises:
            NotRunningError: the store is not open.
        """
        if self._last is None:
            raise NotRunningError("the store is not open: enter receiver.opened() first")
        return self._last.runner.pauses

    def check_pauses(self) -> Check:
        """Return whether events are paused, and since when; never unready."""
        if self._last is None:
            return NOTHING_PAUSED
        return self._last.runner.pauses.check()

    def samples(self) -> Iterator[Sample]:
        """Return the metrics of deliveries, secrets, the queue and the open store."""
        yield from self.counters.samples()
        for index, matches in enumerate(self._endpoint.secret_usage.matches):
            labels = (("index", str(index)),)
            yield Sample("sdk_webhook_secret_matches_total", labels, matches)
        if self._last is not None and self._last.forwarder is not None:
            yield from self._last.forwarder.samples()
        if self._share.deliveries:
            if self._last is not None:
                yield from self._last.runner.samples()
            yield Sample("sdk_queue_depth", (), self.queue_depth)
            yield Sample("sdk_queue_capacity", (), self.settings.webhooks.queue.capacity)
        with suppress(NotRunningError):
            yield from self.store.samples()

    def source_of(self, host: str | None) -> Hashable:
        """Return the key by which connections from ``host`` are counted; None for a trusted
        proxy."""
        return self._endpoint.source_of(host)

    def note_refusal(self, status: int, reason: str, address: str | None) -> None:
        """Note a request that the server refused before the receiver saw it."""
        self._rejections.note_request(status, reason, address)

    def note_secret(self, index: int) -> None:
        """Note that another process of this receiver has verified a delivery with the secret at
        ``index``."""
        self._endpoint.secret_usage.note(index, self._clock())

    @property
    def unused_secrets(self) -> list[int]:
        """The positions of configured secrets that have verified nothing for a day."""
        return self._endpoint.secret_usage.idle(self._clock())

    @property
    def unfinished(self) -> int:
        """Return how many events wait in memory or run in a worker; a drain waits for these."""
        return self._running.queue.unfinished if self._running else 0

    @property
    def runs(self) -> tuple[Run, ...]:
        """Return the running handlers, the oldest first. Callable from any thread."""
        return () if self._last is None else self._last.runner.invocations.runs

    @property
    def held_workers(self) -> str | None:
        """Describe the long runs that occupy all workers; None while a worker is free."""
        if self._running is None:
            return None
        queue = self._running.queue
        runs = queue.long_runs
        if len(runs) < queue.workers:
            return None
        seconds_of = self._running.runner.invocations.seconds_of
        named = ", ".join(
            f"{run.handler} with {run.webhook_id} for {seconds_of(run):.0f} s"
            for run in runs[:REPORTED_RUNS]
        )
        return f"long runs occupy all {queue.workers} workers: {named}"

    @property
    def upgrade_step(self) -> str | None:
        """The current step of the upgrade from a single tenant. Callable from any thread."""
        return None if self._upgrader is None else self._upgrader.step

    async def leave(self) -> None:
        """Release the events of handlers that do not end when cancelled, and write :attr:`report`.

        Call it only right before the process ends: another process may claim a released event, and
        a run that continues here would then run twice concurrently.
        """
        if self._last is None:
            await trio.lowlevel.checkpoint()
            return
        self._last.runner.inline.report_unrecorded()  # first: the store may not answer
        await self._last.runner.leave()
        await self._write_report(self._last.inbox, self._last)

    @property
    def idle(self) -> bool:
        """Return whether no event waits in memory and no worker runs one."""
        return self._running is None or self._running.queue.idle

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Open the store and run the services; report the start once deliveries can be accepted.

        With tenants, the first start runs the upgrade from a single tenant before that, and raises
        its errors.

        Returns after :meth:`drain`. Cancellation cancels running handlers and releases their
        events; :attr:`report` lists the unfinished ones. The store stays open until the inline runs
        of open requests have ended, at most 5 s after a cancellation.
        """
        async with self.opened(), trio.open_nursery() as nursery:
            await self.start_services(nursery)
            task_status.started()
            await self._drain_wanted.wait()
            await self.finish()
            nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Open the store for the block, in which :meth:`start_services` can be called.

        At its end, it waits for inline runs to record their outcomes, writes :attr:`report`, and
        closes the store. The caller must end the services first.

        Raises:
            StoreLockedError: another process uses the data directory.
            StorageError: the store cannot be opened.
            UpgradeError: the upgrade from a single tenant cannot be done.
        """
        async with AsyncExitStack() as stack:
            inbox, tenancy, store = await self._open(stack)
            share = self._share
            if share.singletons:
                # Before anything new is accepted, the events are recovered that an earlier process
                # claimed and did not finish. ``reschedule`` corrects due times that are too late
                # because the clock was set back.
                self.recovered = await inbox.recover(dead=self._dead)
                await inbox.reschedule(now=self._clock())
            if self.recovered:
                _log.warning("webhook.recovered", events=self.recovered)
            after_crash = share.after_crash or self.recovered > 0
            running = self._last = self._assemble(inbox, tenancy, after_crash=after_crash)
            running.store = store
            if share.deliveries and share.first and self._registry.warns_of_missing:
                self._report_missing_handlers()
            try:
                yield
                await running.runner.inline.wait_until_ended()
            finally:
                self._running = self._endpoint.paths = None
                # A scope for each, so that runs that do not end cannot use up the others' time.
                with trio.move_on_after(CLEANUP_SECONDS, shield=True):
                    await running.runner.inline.end()
                with trio.move_on_after(CLEANUP_SECONDS, shield=True):
                    await self._write_report(inbox, running)
                self._drained.set()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the data directory for the block, if this process needs it.

        :meth:`opened` takes it unless its caller already holds it.

        Raises:
            StoreLockedError: another process uses the data directory.
            StoreUnavailableError: the directory cannot be created or written.
        """
        backend = self.settings.storage.backend
        if not self._share.singletons or backend is StorageBackend.MEMORY:
            yield
            return
        with lock_data_directory(self.settings.storage.path) as held:
            if backend is StorageBackend.POSTGRES:
                # In a file, all owners but this one are dead.
                self._dead = held.replace_owner(self.owner)
            self._is_locked = True
            try:
                yield
            finally:
                self._is_locked = False

    async def _open(self, stack: AsyncExitStack) -> "_Opened":
        if self._given_inbox is not None:
            await trio.lowlevel.checkpoint()
            return self._given_inbox, None, None
        if not self._is_locked:
            stack.enter_context(self.locked())
        share = self._share
        store = await stack.enter_async_context(
            open_store(
                self.settings,
                owner=self.owner,
                use=share.use,
            )
        )
        if not self.settings.multi_tenant.enabled:
            return store, None, store
        # Imported here, so that receivers without tenants do not load these modules.
        from ..tenants.tenancy import TenantRuntime

        tenancy = TenantRuntime(
            self.settings, store.tenants, clock=self._clock, client_factory=self._client_factory
        )
        # The upgrade is for stores that were used before tenants were enabled. A store in memory
        # begins empty.
        if share.singletons and self.settings.storage.backend is not StorageBackend.MEMORY:
            await self._upgrade(store, tenancy)
        return store, tenancy, store

    async def _upgrade(self, store: Store, tenancy: "TenantRuntime") -> None:
        from ..tenants.upgrade import Quiescence
        from ..tenants.upgrade_run import Upgrader

        quiescence = self._quiescence or Quiescence()
        await run_in_thread(quiescence.directory_locked, self.settings)
        upgrader = Upgrader(
            self.settings,
            store,
            tenancy.service,
            quiescence=quiescence,
            host=self._host_upgrade,
            clock=self._clock,
        )
        self._upgrader = upgrader
        await upgrader.run_at_start()

    async def start_services(self, nursery: trio.Nursery) -> None:
        """Start the tasks that work on the open store in ``nursery``, then accept deliveries.

        Janitor, rejections, paused routes, tenants, notifications and queue become sibling tasks.
        A part that returns too early raises an error with its name. Cancel the nursery once
        :meth:`finish` has returned.

        Raises:
            NotRunningError: the store is not open.
        """
        running = self._last
        if running is None:
            raise NotRunningError("the store is not open: enter receiver.opened() first")
        start = partial(_start, nursery, lambda: running.queue.closed)
        if self._share.singletons:
            await start("the janitor", running.janitor.run)
        await start("the summary of refusals", self._rejections.run)
        if running.forwarder is not None:
            await start("the poll for paused routes", running.forwarder.run)
        # Also without deliveries: a supervisor's probes and console report the pauses.
        await start("the poll for paused events", running.runner.pauses.run)
        if running.tenancy is not None:
            await start("the watch over the tenants", running.tenancy.run)
        if self._companion and running.store is not None and running.tenancy is not None:
            companion = partial(self._run_companion, running.store, running.tenancy)
            await _start(
                nursery, self._has_begun_to_drain, "the sending of notifications", companion
            )
        if self._share.deliveries:
            await start("the queue", running.queue.run)
            self._endpoint.paths = DeliveryPaths(
                running.runner, running.queue, running.runner.handlers.documents
            )
        self._running = running

    async def _run_companion(  # noqa: ASYNC128 - the companion calls it
        self, store: Store, tenancy: "TenantRuntime", *, task_status: trio.TaskStatus[None]
    ) -> None:
        assert self._companion is not None
        self._companion_ended = trio.Event()
        try:
            await self._companion.run(store, tenancy, task_status=task_status)
        finally:
            self._companion_ended.set()

    def _has_begun_to_drain(self) -> bool:
        return self._endpoint.draining

    async def drain(self) -> None:
        """Accept nothing new, finish the events in memory, and end :meth:`run`.

        Cancelling this call does not stop the drain; cancel :meth:`run` to cut it short.
        """
        self._begin_drain()
        if self._running is None:
            await trio.lowlevel.checkpoint()
            return
        await self._drained.wait()

    async def finish(self) -> None:
        """Accept nothing new, and wait until queue and notifications have finished.

        The caller of :meth:`start_services` calls it, then ends the other parts by cancelling
        their nursery.
        """
        self._begin_drain()
        if self._running is not None and self._share.deliveries:
            await self._running.queue.ended.wait()
        if self._companion_ended is not None:
            await self._companion_ended.wait()
        await trio.lowlevel.checkpoint()

    def _begin_drain(self) -> None:
        self.stop_accepting()
        # Set during the start too: a receiver that accepts nothing must end.
        self._drain_wanted.set()
        if self._running is not None:
            self._running.queue.close()

    def stop_accepting(self) -> None:
        """Answer every further delivery 503; runs in progress continue."""
        if not self._endpoint.draining and self._running is not None:
            self._running.handled_before_drain = self.counters.values.get("handled", 0)
        self._endpoint.draining = True
        self._close_companion()

    def _close_companion(self) -> None:
        if self._companion is not None:
            self._companion.close()

    def _assemble(
        self, inbox: Inbox, tenancy: "TenantRuntime | None", *, after_crash: bool
    ) -> "_Running":
        conclusions = Conclusions(inbox, clock=self._clock)
        services = Services(
            self.settings, inbox, self._client, tenancy=tenancy, conclusions=conclusions
        )
        handlers = self._registry.bind(services)
        forwarder = None
        if self._share.deliveries:
            forwarder = _forwarder(self.settings, inbox, self._clock)
        if forwarder is not None:
            handlers = msgspec.structs.replace(handlers, routed=forwarder.bound)
        make_runner = self._trace() or DeliveryRunner
        runner = make_runner(
            self.settings,
            handlers,
            inbox,
            self.counters,
            clock=self._clock,
            tenancy=tenancy,
            conclusions=conclusions,
        )
        if tenancy is not None:
            self._endpoint.verification.tenant_keys = _tenant_keys(tenancy, self.settings)
        queue = WorkerPool(
            self.settings,
            runner,
            inbox,
            self.counters,
            clock=self._clock,
            after_crash=after_crash,
        )
        janitor = Janitor(inbox, self._endpoint.secret_usage, clock=self._clock)
        return _Running(inbox, runner, queue, janitor, tenancy, forwarder=forwarder)

    def _trace(self) -> Callable[..., DeliveryRunner] | None:
        """Switch to an endpoint with spans and return the factory of a runner with spans.

        Returns None when no tracer is configured, and changes nothing then.
        """
        tracer = find_tracer()
        if tracer is None:
            return None
        # Imported here, because it needs an optional package that may not be installed.
        from .tracing import TracedEndpoint, TracedRunner

        links = Links()
        draining = self._endpoint.draining
        self._endpoint = TracedEndpoint(
            self.settings,
            self.counters,
            self._rejections,
            clock=self._clock,
            tracer=tracer,
            links=links,
        )
        self._endpoint.draining = draining
        self.respond = self._endpoint.respond
        return partial(TracedRunner, tracer=tracer, links=links)

    def _report_missing_handlers(self) -> None:
        """Log a warning for each known type without a handler, as the specification requires
        (6.1)."""
        routed = _routed_types(self.settings, self._registry)
        for each in self._registry.missing(routed=routed):
            _log.warning(
                "webhook.handler_missing",
                missing=f"{each.count} known event types",
                type=each.type,
                event_class=each.event_class,
                register=each.registration,
                hint=(
                    f"its events are parked; handlers.ignore({each.event_class}) if that is "
                    "intended"
                ),
            )
        known = {source.name for source in self.settings.sources}
        for name in self._registry.types_of_sources.keys() - known:
            _log.warning(
                "webhook.source_unknown",
                source=name,
                hint="handlers are registered for it, and Sdk:Sources has no source of this name",
            )

    async def _write_report(self, inbox: Inbox, running: "_Running") -> None:
        drained = self.counters.values.get("handled", 0) - running.handled_before_drain
        if inbox.failing:  # the query would take longer than a shutdown allows
            await trio.lowlevel.checkpoint()
            return
        try:
            left, ids = await _unfinished(inbox)
        except StoreUnavailableError as error:
            _log.store_unavailable(error)
            await trio.lowlevel.checkpoint()
            return
        in_memory = self.settings.storage.backend is StorageBackend.MEMORY
        self.report = DrainReport(
            drained=max(0, drained),
            persisted=0 if in_memory else left,
            lost=left if in_memory else 0,
            ids=ids,
        )


async def _start(nursery: trio.Nursery, may_end: Callable[[], bool], name: str, part: Part) -> None:
    await nursery.start(partial(supervise, name, part, may_end=may_end))


def _routed_types(settings: Settings, handlers: HandlerRegistry) -> tuple[str, ...]:
    """Return the known types of which a route of the gateway takes every event."""
    routes = routes_of(settings)
    known = (row.wire_type for row in handlers.catalog.known)
    return tuple(each for each in known if first_match(routes, each, None) is not None)


def _forwarder(settings: Settings, inbox: Inbox, clock: Callable[[], float]) -> "Forwarder | None":
    if not settings.forward.all_routes:
        return None
    from .forward import Forwarder  # loads an HTTP client

    return Forwarder(settings, inbox, clock=clock)


def _tenant_keys(tenancy: "TenantRuntime", settings: Settings) -> "TenantKeys":
    from .tenant_keys import TenantKeys  # loads all of the tenants' modules

    return TenantKeys(tenancy, settings.webhooks.key_derivation)


async def _unfinished(inbox: Inbox) -> tuple[int, tuple[str, ...]]:
    """Return the number of unfinished deliveries, and the ids of the first ones."""
    counts = await inbox.counts()
    ids: list[str] = []
    for state in sorted(UNFINISHED):
        if counts[state] and len(ids) < REPORTED_IDS:
            found = await inbox.find(state=state, limit=REPORTED_IDS - len(ids))
            ids += [record.key for record in found]
    return sum(counts[state] for state in UNFINISHED), tuple(ids)


class Janitor:
    """Applies the retention settings once an hour, beginning at the start."""

    def __init__(
        self, inbox: Inbox, secret_usage: SecretUsage, *, clock: Callable[[], float] = wall
    ) -> None:
        self._inbox = inbox
        self._secret_usage = secret_usage
        self._clock = clock

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled; a failing store is retried an hour later."""
        task_status.started()
        while True:
            try:
                purged = await self._inbox.purge(now=self._clock())
            except StoreUnavailableError as error:
                _log.store_unavailable(error, retry_in=JANITOR_SECONDS)
            else:
                if purged.bodies or purged.finished or purged.parked:
                    _log.info(
                        "inbox.purged",
                        bodies=purged.bodies,
                        finished=purged.finished,
                        parked=purged.parked,
                    )
            self._report_unused_secrets()
            await trio.sleep(JANITOR_SECONDS)

    def _report_unused_secrets(self) -> None:
        for index in self._secret_usage.unused(self._clock()):
            _log.warning(
                "webhook.secret_unused",
                index=index,
                hint="it has verified nothing for a day; if its rotation is over, remove it",
            )


class _Running(msgspec.Struct):
    """The parts that exist while a receiver runs."""

    inbox: Inbox
    runner: DeliveryRunner
    queue: WorkerPool
    janitor: Janitor
    tenancy: "TenantRuntime | None" = None
    store: Store | None = None
    handled_before_drain: int = 0
    forwarder: "Forwarder | None" = None
