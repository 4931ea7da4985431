"""A simulated host: the real runtime with the handlers under test, restarted when it ends."""

import math
import os
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Protocol, cast

import msgspec
import trio

from ...base.opener import dial_unix
from ...client.client import Client
from ...config import Secret, Settings
from ...errors import only_member
from ...events import Event
from ...records.deliveries import DeliveryRecord
from ...runtime import Runtime
from ...runtime.worker import WorkerAssignment
from ...storage.ports import Inbox
from ...storage.sqlite_inbox import SqliteInbox
from ...webhooks import HandlerRegistry, Services, WebhookHandlerBase
from ...webhooks.bound import BoundHandler, BoundHandlers, HandlersOfSource
from ...webhooks.receiver import Share
from .audit import Auditor
from .disk import HostDownError
from .machine import Machine
from .plan import Trouble, World
from .scheduler import Hosts
from .upstream import SETTINGS as UPSTREAM_SETTINGS

#: The seconds that a handler with the trouble ``hang`` hangs: longer than an inline handler may
#: take.
HANG_SECONDS = 25.0

#: The seconds before a failed runtime is restarted, as by a service manager.
RESTART_SECONDS = 2.0


class HostWorld(Protocol):
    """The part of the world that a host uses."""

    #: The description of the world, the directories of sockets and of the store, the receiver's
    #: path and secret.
    world: World
    root: str
    data: str
    path: str
    secret: Secret
    hosts: Hosts
    auditor: Auditor
    handlers: Callable[[], HandlerRegistry]
    nursery: trio.Nursery
    record: Callable[..., None]

    def make_client(self, settings: Settings) -> Client | None:
        """Return a client of the upstream; None without one."""
        ...

    def trouble(self, key: str, run: int) -> Trouble | None:
        """Return the trouble of an event's handler in its run number ``run``, counted from 0."""
        ...

    async def take_over(self, dead: str, successor: str) -> bool:
        """Release the leases of the ended process ``dead`` to ``successor``."""
        ...

    def crash(self, victims: "Sequence[Host]") -> None:
        """Crash processes."""
        ...


def secret_of(source: str) -> Secret:
    """Return the secret of a simulated source, which differs from those of all others."""
    return Secret(f"whsec_{b64encode(sha256(source.encode()).digest()).decode()}")


class SimulatedError(Exception):
    """A simulated error in a handler."""


class _Handler(WebhookHandlerBase[Any]):
    """A handler under test, with the troubles of the plan, observed by the auditor."""

    def __init__(
        self, bound: BoundHandler, machine: Machine, world: HostWorld, inline_seconds: float
    ) -> None:
        self._inner = bound.handler
        self._ordered = bound.ordered
        self._waits_for_tenant = not bound.run_when_suspended
        limit = bound.policy.timeout or inline_seconds
        self._limit = math.inf if bound.enqueue or bound.threads else limit
        self._group, self._policy = bound.group, bound.policy
        self._machine = machine
        self._world = world

    async def handle_core(self, event: Event[Any]) -> None:
        if self._machine.down:
            # At the end of the simulation, the tasks of a crashed process go on until they end.
            raise HostDownError(self._machine.name)
        auditor: Auditor = self._world.auditor
        run = auditor.begin(
            event.key,
            self._machine.name,
            self._limit,
            ordered=self._ordered,
            tenant=None if event.tenant is None else event.tenant.identifier,
            waits_for_tenant=self._waits_for_tenant,
            group=self._group,
            policy=self._policy,
        )
        number = len(auditor.runs[event.key]) - 1
        trouble = self._world.trouble(event.key, number)
        self._world.record("handler.begins", id=event.key, type=event.type, run=number + 1)
        result = "cut"
        try:
            await self._handle(event, trouble)
            result = "done"
        except Exception as error:
            result = "failed"
            if isinstance(error, AssertionError) and not self._machine.down:
                auditor.find("assertion", f"the handler of {event.key} raised {error!r}")
            raise
        finally:
            auditor.end(run, result)
            if not self._machine.down:
                self._world.record("handler.ends", id=event.key, result=result)

    async def _handle(self, event: Event[Any], trouble: Trouble | None) -> None:
        kind = None if trouble is None else trouble.kind
        if trouble is not None and kind == "slow":
            await trio.sleep(trouble.seconds)
        elif kind == "hang":
            await trio.sleep(HANG_SECONDS)
        elif kind == "cancel":
            nursery = trio.lowlevel.current_task().parent_nursery
            assert nursery is not None
            nursery.cancel_scope.cancel()
            await trio.lowlevel.checkpoint()
        elif trouble is not None and kind == "fail":
            await trio.sleep(trouble.seconds)
            raise SimulatedError("the simulation raised this before the handler began")
        await self._inner.handle_core(event)
        if kind == "fail_after":
            raise SimulatedError("the simulation raised this after the handler had ended")

    async def on_error(self, event: Event[Any], error: Exception) -> None:
        await self._inner.on_error(event, error)


class _Handlers(HandlerRegistry):
    """The handlers of ``registry``, each with :class:`_Handler` around it."""

    def __init__(self, registry: HandlerRegistry, wrap: Callable[[BoundHandler], BoundHandler]):
        super().__init__(catalog=registry.catalog)
        vars(self).update(vars(registry))
        self.warns_of_missing = False
        self._bind = registry.bind
        self._wrap = wrap

    def bind(self, services: Services[Any]) -> BoundHandlers:
        bound = self._bind(services)
        return msgspec.structs.replace(
            bound,
            by_type=self._wrapped(bound.by_type),
            fallback=bound.fallback and self._wrap(bound.fallback),
            by_source={
                name: HandlersOfSource(
                    self._wrapped(own.by_type), own.fallback and self._wrap(own.fallback)
                )
                for name, own in bound.by_source.items()
            },
        )

    def _wrapped(self, handlers: Mapping[str, BoundHandler]) -> dict[str, BoundHandler]:
        return {name: self._wrap(handler) for name, handler in handlers.items()}


class Host:
    """One host of a simulation.

    Args:
        world: has the handlers, the settings and the disk.
        name: the host's.
        place: its number among the processes that share the store, counted from 1.
    """

    def __init__(self, world: HostWorld, name: str, place: int) -> None:
        self._world = world
        self._place = place
        self._after_crash = False
        self._hosts: Hosts = world.hosts
        self._name = name
        self._number = 0
        self.machine: Machine | None = None
        self.runtime: Runtime | None = None
        self._scope = trio.CancelScope()
        self._restart_after = RESTART_SECONDS
        self._dead: list[tuple[Machine, trio.CancelScope]] = []
        self.stopped = False

    @property
    def listens(self) -> bool:
        """Whether senders can connect; the kernel accepts connections for a paused process."""
        return (
            self.machine is not None
            and not self.machine.down
            and self.runtime is not None
            and self.runtime.started is not None
        )

    @property
    def serves(self) -> bool:
        """Whether it listens and is not paused."""
        return self.listens and not self._hosts.is_frozen(self.machine)

    async def dial(self) -> trio.SocketStream:
        """Connect to the process.

        Raises:
            OSError: it does not listen.
        """
        assert self.machine is not None
        return await dial_unix(self.socket(self.machine))

    def socket(self, machine: Machine) -> str:
        """Return the path of the socket that an incarnation listens on."""
        return os.path.join(self._world.root, f"{machine.name}.sock")

    def admin_socket(self, machine: Machine) -> str:
        """Return the path of the socket of an incarnation's admin address."""
        return os.path.join(self._world.root, f"{machine.name}.admin.sock")

    async def run(self) -> None:
        """Keep the runtime running until :meth:`stop`."""
        while not self.stopped:
            self._number += 1
            self.machine = machine = Machine(f"{self._name}.{self._number}")
            machine.on_crash = lambda: self._world.crash([self])
            self._scope = trio.CancelScope()
            self._restart_after = RESTART_SECONDS
            self._world.nursery.start_soon(self._live, machine, self._scope)
            await machine.gone.wait()
            self.runtime = None
            successor = f"{self._name}.{self._number + 1}"
            self._after_crash = await self._world.take_over(machine.name, successor)
            if not self.stopped:
                await trio.sleep(self._restart_after)

    async def _live(self, machine: Machine, scope: trio.CancelScope) -> None:
        self._hosts.enter(machine)
        try:
            with scope:
                settings = self._settings(machine)
                handlers = _Handlers(self._world.handlers(), self._wrap(machine, settings))
                worker = self._worker(machine, settings)
                client = self._world.make_client(settings)
                self.runtime = Runtime(settings, handlers, worker=worker, client=client)
                if self.stopped:  # since the start of this task
                    self.runtime.shut_down("a deploy")
                await self.runtime.run()
        except trio.Cancelled:
            raise
        except BaseException as group:  # whatever ends a process
            error = only_member(group) if isinstance(group, BaseExceptionGroup) else group
            if not machine.down:
                text = f"{type(error).__name__}: {error}"
                self._world.record("host.failed", error=text)
                self._world.auditor.fail(text)
        finally:
            if not machine.down:
                machine.down = True
                self._world.auditor.stop(machine.name)
                machine.release()
                machine.gone.set()

    def _worker(self, machine: Machine, settings: Settings) -> WorkerAssignment | None:
        """Return its assignment among the processes of one store; None: it is the only process."""
        if self._world.world.processes == 1:
            return None
        share = Share(
            singletons=False,
            owner=machine.name,
            after_crash=self._after_crash,
            first=self._place == 1,
        )
        return WorkerAssignment(
            number=self._place,
            settings=settings,
            share=share,
            bind=settings.server.bind,
            supervisor=0,
        )

    def _settings(self, machine: Machine) -> Settings:
        world = self._world
        return Settings.from_mapping(
            {
                "Environment": "Development",
                "Admin:Enabled": world.world.feed,
                "Admin:Bind": f"unix:{self.admin_socket(machine)}",
                "MultiTenant:Enabled": world.world.tenants > 0,
                "Storage:Backend": "Sqlite",
                "Server:Processes": world.world.processes,
                "Webhooks:RequireHttps": False,
                **(UPSTREAM_SETTINGS if world.world.upstream is not None else {}),
                "Webhooks:Path": world.path,
                "Webhooks:Secret": world.secret,
                "Sources": [
                    {"Name": name, "Secrets": [secret_of(name).reveal()]}
                    for name in world.world.sources
                ],
                **world.world.settings,
                "Storage:Path": world.data,
                "Server:Bind": [f"unix:{self.socket(machine)}"],
            },
            standalone=world.world.upstream is None,
        )

    def _wrap(self, machine: Machine, settings: Settings) -> Callable[[BoundHandler], BoundHandler]:
        seconds = settings.webhooks.inline_timeout_seconds
        return lambda bound: msgspec.structs.replace(
            bound, handler=_Handler(bound, machine, self._world, seconds)
        )

    # -- faults of the host ------------------------------------------------------------------

    def crash(self, restart_after: float | None) -> Machine | None:
        """Take the process down; return its machine, which must be frozen, if the process ran."""
        machine = self.machine
        if machine is None or machine.down:
            return None
        machine.down = True
        if restart_after is not None:
            self._restart_after = restart_after
        self._world.record("host.crashes", name=machine.name)
        self._world.auditor.crash(machine.name)
        self._dead.append((machine, self._scope))
        return machine

    async def stall(self, seconds: float) -> None:
        """Pause the process for ``seconds``."""
        machine = self.machine
        if machine is None or machine.down:
            return
        self._hosts.freeze([machine], lambda: None)
        await trio.sleep(seconds)
        if not machine.down:
            self._hosts.thaw(machine)

    def shut_down(self, *, restart_after: float | None = None) -> None:
        """Stop the process gracefully, and restart it after ``restart_after`` seconds; None:
        never."""
        if restart_after is None:
            self.stopped = True
        else:
            self._restart_after = restart_after
        if self.runtime is not None:
            self.runtime.shut_down("a deploy")

    @property
    def ended(self) -> trio.Event:
        """Set when the current incarnation has ended."""
        assert self.machine is not None
        return self.machine.gone

    def discard(self) -> None:
        """End the tasks of crashed incarnations, which no longer have any effect."""
        for machine, scope in self._dead:
            scope.cancel()
            machine.discarded.set()
            self._hosts.thaw(machine)
        self._dead.clear()


async def records_of(store: Inbox) -> list[DeliveryRecord]:
    """Return all records of a store, without bodies."""
    records: list[DeliveryRecord] = []
    after = 0
    while page := await store.find(after_sequence=after, limit=500):
        records += page
        after = page[-1].sequence
    return records


def held_in_memory(runtime: Runtime) -> list[str]:
    """Return the keys of the leases that the queue of a runtime holds."""
    running = runtime.receiver._running
    return [] if running is None else [lease.key for lease in running.runner.leases]


def uncommitted_ends(runtime: Runtime) -> set[str]:
    """Return the keys of the successes that a runtime has reported, and not committed yet."""
    opened = runtime.receiver._last  # also while it stops
    if opened is None:
        return set()
    ends = cast("SqliteInbox", opened.inbox)._ends.values()
    return {end.key for end in ends if not end.finished or end.error is not None}
