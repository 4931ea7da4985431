"""The supervisor: runs the replicator as a child process and applies its configuration.

The binary cannot reload: SIGHUP ends it. So databases that are added or removed are registered and
unregistered over its control socket, if they are then replicated as configured
(docs/adr/0033-replicator-supervision.md). Any other change is a restart, which takes two seconds
for 500 databases and loses nothing: unsynced data stays in their logs. In both cases, the child's
own report of its databases decides.

One shielded task runs everything: the caller's cancellation becomes an orderly stop with a time
limit. :class:`ReloadRequests` merges concurrent requests for a reload, and gives each caller the
result.
"""

import math
import os
import random
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import trio

from ..base.bell import Bell
from ..base.logs import get_logger
from ..base.throttle import jittered_wait
from ..config.options.tenants import ReplicationOptions
from ..errors import ReplicationError, ReplicatorError
from .child import (
    KILL_SECONDS,
    Child,
    ChildMonitor,
    ChildOutputReader,
    LineLimiter,
    confirm,
    end_child,
    find_replicator,
    run_child,
    secret_values,
)
from .control import ControlClient, control_socket_path
from .manifest import TenantDatabaseFile, child_environment
from .plan import (
    BASE_SECONDS,
    CAP_SECONDS,
    STABLE_SECONDS,
    ChildConfiguration,
    LiveChange,
    Plan,
    PlanReader,
    SupervisorTimeouts,
    live_change,
)
from .running_replicator import lock_patiently

_log = get_logger("replication")

#: Time for the last sync of a removed database, in seconds; if it takes longer, a restart removes
#: the database.
_UNREGISTER_SECONDS: Final = 5


class ReloadRequests:
    """The pending requests for a reload: callers add them, and one task settles them.

    A request is a number. Settling one settles all earlier ones, because all request the same: the
    current configuration.
    """

    def __init__(self) -> None:
        self._asked = self._settled = 0
        self._applied = False
        self._bell = Bell()
        self._outcome = Bell()

    @property
    def newest(self) -> int:
        """The number of the last request; 0 before the first one."""
        return self._asked

    def add(self) -> int:
        """Request a reload, and return the request."""
        self._asked += 1
        self.wake()
        return self._asked

    def wake(self) -> None:
        """Make :meth:`wait_asked` evaluate ``unless`` again."""
        self._bell.ring()

    async def wait_asked(self, *, unless: Callable[[], bool]) -> None:
        """Wait until there is an unsettled request, or ``unless`` returns True."""
        await trio.lowlevel.checkpoint()
        while not unless() and self._settled >= self._asked:
            await self._bell.wait()

    def settle(self, *, applied: bool, up_to: int | None = None) -> None:
        """Settle the requests up to one, or all, with their common result."""
        self._settled = self._asked if up_to is None else up_to
        self._applied = applied
        self._outcome.ring()

    async def wait_settled(self, request: int, *, unless: Callable[[], bool]) -> bool:
        """Wait for a request and return its result; False as soon as ``unless`` returns True."""
        await trio.lowlevel.checkpoint()
        while not unless():
            if self._settled >= request:
                return self._applied
            await self._outcome.wait()
        return False


class Supervisor:
    """One replicator as our child; a :class:`Reloader` for the watcher.

    Args:
        options: the replication options.
        directory: the directory of the tenants' databases; made absolute.
        config_path: the configuration; None: ``ConfigOutputPath``.
        environ: our own environment; None: this process's.
        patience: the timeouts.
        waits_for_reload: whether to wait, at most ``patience.first_reload``, until a caller has
            written the configuration and called :meth:`reload`; this avoids a start with an
            outdated one.
        fraction: returns a random number from 0 to 1.

    Raises:
        ReplicatorError: the control socket's path would be too long.

    It runs once. Failures of the child are logged, retried and kept in ``failure``; they never end
    :meth:`run`.
    """

    def __init__(
        self,
        options: ReplicationOptions,
        directory: str | os.PathLike[str],
        *,
        config_path: str | None = None,
        environ: Mapping[str, str] | None = None,
        patience: SupervisorTimeouts | None = None,
        waits_for_reload: bool = False,
        fraction: Callable[[], float] = random.random,
    ) -> None:
        environ = os.environ if environ is None else environ
        self._options = options
        self._environ = environ
        self._directory = Path(directory).absolute()
        self._environment = partial(child_environment, options, environ)
        self._patience = patience or SupervisorTimeouts()
        self._waits_for_reload = waits_for_reload
        self._fraction = fraction
        socket_path = control_socket_path(str(self._directory))
        self.client: ControlClient = ControlClient(socket_path)
        reader = PlanReader(
            os.path.abspath(config_path or options.config_output_path),
            self._directory,
            socket_path=socket_path,
            environment=self._environment,
        )
        self._plans = ChildConfiguration(reader)
        self._requests = ReloadRequests()
        self._secrets = secret_values(options, environ)
        self._limiter = LineLimiter()
        # The child's last lines contain the reason for its end, and are logged with it.
        self._last_lines: deque[str] = deque(maxlen=5)
        self._child: Child | None = None
        # Shielded without a deadline only until the caller is cancelled: :meth:`run` sets one then.
        self._scope = trio.CancelScope(shield=True)
        self._interruptible = trio.CancelScope()
        self._stopping = self._forced = self._running = False
        self._end_by = math.inf
        self.restarts: int = 0
        self.failure: str | None = None
        self.confirmed: bool = False
        #: A restart for a reload is in progress: silence is then not a failure.
        self.reloading: bool = False

    @property
    def socket_path(self) -> str:
        """The path of the replicator's control socket."""
        return self.client.socket_path

    @property
    def pid(self) -> int | None:
        """The replicator's process id, or None while there is no process."""
        child = self._child
        return None if child is None or child.ended.is_set() else child.pid

    @property
    def databases(self) -> frozenset[str]:
        """The paths of the databases that the accepted configuration names."""
        return self._plans.databases

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Supervise until :meth:`stop`; started once the databases are locked.

        On cancellation, it stops the replicator in an orderly way, within ``patience.stop`` and a
        few seconds, then raises ``Cancelled``.

        Raises:
            StoreLockedError: another process replicates these databases.
            ReplicatorError: they cannot be locked.
        """
        with ExitStack() as stack:
            # The child of a killed predecessor may have to end first.
            lock = await lock_patiently(stack, self._directory, seconds=self._patience.lock)
            self._running = True
            task_status.started()
            ended = trio.Event()
            async with trio.open_nursery() as nursery:
                try:
                    nursery.start_soon(self._supervise_shielded, lock, ended)
                    await ended.wait()
                finally:
                    self.stop()
                    self._scope.deadline = min(
                        self._scope.deadline,
                        trio.current_time() + self._stop_seconds() + 2 * KILL_SECONDS,
                    )

    def end_by(self, deadline: float) -> None:
        """Limit the last sync of a stop, including one that starts later.

        Args:
            deadline: in Trio's time. A stop that starts later, or just before it, still has
                ``patience.last_sync`` seconds, because other parts may have used up the time.
        """
        self._end_by = deadline

    def stop(self) -> None:
        """Start an orderly stop: the child syncs a last time. A second call is a no-op."""
        self._stopping = True
        self._interruptible.cancel()
        self._requests.wake()

    def force(self) -> None:
        """Cut a stop short and kill the child; the databases keep the unsynced data."""
        self._forced = True
        self.stop()
        if self._child is not None:
            self._child.send(signal.SIGKILL)

    def request_reload(self) -> None:
        """Request that the configuration is read again; concurrent requests are merged."""
        self._requests.add()

    async def reload(self, databases: Sequence[TenantDatabaseFile]) -> bool:
        """Reload and wait until the child replicates it, or the attempt has failed.

        The configuration, not the argument, decides what is replicated. Also returns False before
        :meth:`run` has started and after it has ended.
        """
        await trio.lowlevel.checkpoint()
        request = self._requests.add()
        applied = await self._requests.wait_settled(
            request, unless=lambda: self._stopping or not self._running
        )
        return applied and {d.path for d in databases} <= self.databases

    def _stop_seconds(self) -> float:
        """Return the seconds that the child has for an orderly stop that starts now."""
        # At least two seconds: without a last sync, only this disk has the newest rows until the
        # next start.
        left = max(self._end_by - trio.current_time(), self._patience.last_sync)
        return 0.0 if self._forced else min(left, self._patience.stop)

    async def _supervise_shielded(self, lock: int, ended: trio.Event) -> None:
        try:
            with self._scope:
                await self._supervise(lock)
        finally:
            self._running = False
            self._requests.settle(applied=False)
            ended.set()

    async def _supervise(self, lock: int) -> None:
        failures = 0
        reason: str | None = None
        if self._waits_for_reload:
            with trio.move_on_after(self._patience.first_reload):
                await self._wait_for_request()
        while not self._stopping:
            began = trio.current_time()
            try:
                await self._run_once(lock, reason)
                # It ended because of a newer request, so this is not a failure.
                failures, reason = 0, "reload"
            except ReplicationError as error:
                if self._stopping:
                    break
                # A child that worked for long and then failed has a new problem: its backoff starts
                # over.
                stable = trio.current_time() - began >= STABLE_SECONDS
                failures = 1 if stable else failures + 1
                reason = str(error)
                await self._back_off(reason, failures)
        _log.info("replication.stopped", forced=self._forced)

    async def _back_off(self, reason: str, failures: int) -> None:
        """Log the failure and wait; a new request ends the wait."""
        self.failure, self.reloading = reason, False
        delay = jittered_wait(
            failures, self._fraction(), base_seconds=BASE_SECONDS, cap_seconds=CAP_SECONDS
        )
        _log.error(
            "replication.failed",
            error=reason,
            last_lines=list(self._last_lines),
            failures=failures,
            retry_in=round(delay, 2),
        )
        self._requests.settle(applied=False)
        # An operator who has fixed the configuration does not wait for the end of the pause.
        with trio.move_on_after(delay):
            await self._wait_for_request()

    async def _wait_for_request(self) -> None:
        """Wait until a reload or the stop is requested."""
        await self._requests.wait_asked(unless=lambda: self._stopping)

    async def _run_once(self, lock: int, reason: str | None) -> None:
        """Run one child until it must be replaced or stopped.

        Raises:
            ReplicationError: it could not be started, ended, hangs, or does not work.
        """
        # Read before the configuration: a later request may need a newer one.
        asked = self._requests.newest
        binary = find_replicator(self._options, environ=self._environ)
        self._last_lines.clear()
        before = self._plans.databases
        with self._until_stopped():
            # A manually started replicator does not know our lock, but answers at the same socket.
            await self._refuse_another()
            await self._plans.choose(binary)
        if self._stopping:
            return
        command = [binary, "replicate", "-config", self._plans.running_path]
        environment = self._environment("" if self._plans.plan is None else self._plans.plan.text)
        failure: ReplicationError | None = None
        async with trio.open_nursery() as nursery:
            try:
                child = await nursery.start(
                    partial(run_child, command, environment=environment, inherited=(lock,))
                )
            except ReplicatorError as error:
                failure = error
            else:
                self._child = child
                reader = ChildOutputReader(self._secrets, self._limiter, self._last_lines)
                nursery.start_soon(reader.run, child.output)
                failure = await self._look_after(child, binary, reason, asked, before)
        # By now all of its output has been read.
        self.confirmed = False
        if failure is not None:
            self._plans.reject()
            raise failure

    @contextmanager
    def _until_stopped(self) -> Iterator[None]:
        """Cancel the block when a stop starts, or has started."""
        with trio.CancelScope() as self._interruptible:
            if self._stopping:
                self._interruptible.cancel()
            yield

    async def _refuse_another(self) -> None:
        """Raise if a replicator that is not our child answers; it does not know our lock."""
        try:
            other = await self.client.info()
        except ReplicatorError:
            return
        raise ReplicatorError(
            f"process {other.pid} already replicates these databases, and is not our child: "
            "stop it, because two replicators of one database corrupt its replica"
        )

    async def _look_after(
        self, child: Child, binary: str, reason: str | None, asked: int, before: frozenset[str]
    ) -> ReplicationError | None:
        """Serve reloads until the child must end, and end it; return its failure, if any."""
        failure: ReplicationError | None = None
        with self._until_stopped():
            async with trio.open_nursery() as nursery:
                # Once the child has ended, it can no longer answer a pending query.
                nursery.start_soon(_cancel_after, child.ended, self._interruptible)
                try:
                    await self._confirm(child)
                    self._report_start(child, reason, before)
                    self._requests.settle(applied=True, up_to=asked)
                    await self._serve_reloads(child, binary)
                except ReplicationError as error:
                    failure = error
                nursery.cancel_scope.cancel()
        if child.ended.is_set() and not self._stopping:
            return ReplicatorError(f"the replicator ended on its own with {child.ending}")
        patience = self._stop_seconds() if self._stopping else self._patience.reload_stop
        await end_child(child, 0.0 if self._forced else patience)
        return failure

    def _report_start(self, child: Child, reason: str | None, before: frozenset[str]) -> None:
        self.confirmed, self.failure, self.reloading = True, None, False
        fields = {"pid": child.pid, "databases": len(self.databases)}
        if reason is None:
            _log.info("replication.started", **fields)
        elif reason == "reload":
            added, removed = len(self.databases - before), len(before - self.databases)
            _log.info("replication.reloaded", **fields, added=added, removed=removed)
        else:
            self.restarts += 1
            _log.warning("replication.restarted", **fields, reason=reason)

    async def _confirm(self, child: Child) -> None:
        wanted = self.databases
        # At its start the replicator queries the position of every database in the object store,
        # with several requests each.
        seconds = self._patience.start + self._patience.start_each * len(wanted)
        await confirm(self.client, child.pid, wanted, seconds=seconds)
        self._plans.confirm()

    async def _serve_reloads(self, child: Child, binary: str) -> None:
        """Apply reloads without a restart as long as that is possible; return for a restart.

        Raises:
            ReplicatorError: the child hangs, or lost a database.
        """
        monitor = ChildMonitor(self.client, silent_checks=self._patience.silent_checks)
        while True:
            with trio.move_on_after(self._patience.watch) as waiting:
                await self._wait_for_request()
            if waiting.cancelled_caught:
                await monitor.check(self.databases)
            elif await self._apply(child, binary):
                return

    async def _apply(self, child: Child, binary: str) -> bool:
        """Apply the current configuration; return whether that needs a restart."""
        asked, before = self._requests.newest, self._plans.plan
        plan = await self._plans.read_latest(binary)
        # An unreadable configuration is no reason to end a working replicator.
        if plan is None or plan is before:
            self._requests.settle(applied=plan is not None, up_to=asked)
            if plan is not None:
                _log.debug("replication.reloaded", pid=child.pid, databases=len(self.databases))
            return False
        change = None
        if before is not None:
            change = live_change(before, plan, self._options, working_directory=os.getcwd())
        if change is None or not await self._change_live(change, plan):
            self.reloading = True
            return True
        await self._confirm(child)
        _log.info(
            "replication.reloaded",
            pid=child.pid,
            databases=len(plan.databases),
            added=len(change.added),
            removed=len(change.gone),
        )
        self._requests.settle(applied=True, up_to=asked)
        return False

    async def _change_live(self, change: LiveChange, plan: Plan) -> bool:
        """Unregister databases and register others; return whether that worked."""
        try:
            for path in change.gone:
                await self.client.unregister(path, seconds=_UNREGISTER_SECONDS)
            for path, url in change.added.items():
                await self.client.register(path, url)
            # Last: after a crash before this, the old copy is used, and the next poll finds the
            # difference again.
            await self._plans.adopt(plan)
        except ReplicationError as error:
            _log.warning("replication.change_failed", error=str(error), hint="restarting it")
            return False
        return True


async def _cancel_after(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()
