"""The health check of replication: it queries the replicator, and the target if necessary.

Each query of the target starts the replicator's binary, with the keys in our own environment. That
costs a process and some requests, so it is limited: only databases written since they were last in
sync, at most :data:`SURVEYED` per survey, two at a time, and none after the first failure.
"""

import math
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

import attrs
import trio

from ..base import opener
from ..base.clock import wall
from ..base.executor import run_in_thread
from ..base.logs import get_logger
from ..base.private_files import create_data_directory
from ..config import Settings
from ..config.options.tenants import ReplicationOptions
from ..errors import ReplicationError, ReplicatorError, StorageError
from .control import ANSWER_SECONDS, ControlClient, ReplicatedDatabase, ask_local
from .health import (
    DatabaseMetrics,
    HealthRules,
    HealthState,
    LagBook,
    ReplicationHealth,
    SyncHistory,
    disabled,
    judge,
    judge_by_replicas,
    read_metrics,
)
from .manifest import METRICS_HOST
from .replica import ReplicaFile, ReplicaReader, TenantReplica, newest_position, scratch_directory

#: Shortest time between two surveys, in seconds; otherwise it is ``HealthCheckMaxLagSeconds``.
LEAST_PAUSE_SECONDS = 10.0

#: Longest time between two surveys, in seconds.
LONGEST_PAUSE_SECONDS = 60.0

#: Time limit of a survey, in seconds. Databases it did not reach come first in the next one.
SURVEY_SECONDS = 10.0

#: The most databases in one survey: each costs a process of some 40 ms, and a request or more.
SURVEYED = 50

#: Databases of a survey that are queried concurrently.
_AT_A_TIME = 2

#: The level of fresh files; a listing of it is one request.
_FRESH = "0"


class LagSurveyor:
    """Compares the replicator's reads with the target's content, periodically.

    Args:
        settings: validated settings with ``UseReplication``.
        reader: reads the target.
        pause: seconds between two surveys; None: ``HealthCheckMaxLagSeconds`` within bounds.
        clock: returns Unix seconds.
    """

    def __init__(
        self,
        settings: Settings,
        reader: ReplicaReader | None = None,
        *,
        pause: float | None = None,
        clock: Callable[[], float] = wall,
    ) -> None:
        options = settings.multi_tenant.file_db.replication
        self._reader = ReplicaReader(settings) if reader is None else reader
        self._data = Path(settings.storage.path).absolute()
        self._clock = clock
        threshold = max(float(options.health_check_max_lag_seconds), LEAST_PAUSE_SECONDS)
        self._pause = min(threshold, LONGEST_PAUSE_SECONDS) if pause is None else pause
        self._next_at = float("-inf")
        # The longest time between two surveys of a busy database, unless it was omitted.
        self.book: LagBook = LagBook(2 * self._pause + SURVEY_SECONDS)
        #: The error of the last survey; empty: the target answered.
        self.problem: str = ""

    async def survey(
        self, wanted: Mapping[str, str], metrics: Mapping[str, DatabaseMetrics]
    ) -> None:
        """Update the book; query the target if that is due.

        Args:
            wanted: the names of the replicas by the paths of the databases.
            metrics: the replicator's report of what it has read.

        Cancellation ends the binary.
        """
        await trio.lowlevel.checkpoint()
        self.book.note(metrics, self._clock())
        if trio.current_time() < self._next_at:
            return
        due = self.book.due(wanted, SURVEYED)
        if due:
            await self._ask_all({path: wanted[path] for path in due})
        else:
            self.problem = ""
        self._next_at = trio.current_time() + self._pause

    async def _ask_all(self, due: Mapping[str, str]) -> None:
        self.problem = ""
        answered = 0
        # The tasks share one iterator, so each database is queried once, the longest waiting first.
        waiting = iter(due.items())

        async def work(scope: trio.CancelScope) -> None:
            nonlocal answered
            for path, name in waiting:
                try:
                    await self._ask(path, name)
                except (ReplicationError, StorageError, OSError) as error:
                    self.problem = self.problem or str(error)
                    # A failure for one database means a failure for all; the next survey tries
                    # again.
                    scope.cancel()
                    await trio.lowlevel.checkpoint()
                answered += 1

        with trio.move_on_after(SURVEY_SECONDS) as deadline:
            async with trio.open_nursery() as nursery:
                for _ in range(_AT_A_TIME):
                    nursery.start_soon(work, nursery.cancel_scope)
        if deadline.cancelled_caught and not answered:
            self.problem = (
                f"the replication target did not answer within {SURVEY_SECONDS:g} s: check that it "
                "is up and can be reached from this machine"
            )

    async def _ask(self, path: str, name: str) -> None:
        asked_at = self._clock()
        self.book.tried(path, asked_at)
        create_data_directory(self._data)
        with scratch_directory(self._data, ".listing-") as scratch:
            replica = self._reader.prepare(name, scratch)
            position = newest_position(await self._files(replica, path))
        since = await run_in_thread(partial(waiting_since, path, position.txid))
        self.book.found(path, position, since, asked_at)

    async def _files(self, replica: TenantReplica, path: str) -> tuple[ReplicaFile, ...]:
        """Return the fresh files, or all when these do not show that it is in sync."""
        # Usually enough: one request instead of one per level.
        fresh = await replica.list_files(level=_FRESH)
        if self.book.covers(path, newest_position(fresh)):
            return fresh
        return await replica.list_files()


def waiting_since(path: str, replicated: int) -> float | None:
    """Return the time at which the replicator read the transaction after ``replicated``; blocks.

    The replicator keeps transactions in a directory next to the database until the target has them.

    Returns:
        Unix seconds; None if there is no such transaction, or the directory is elsewhere.
    """
    database = Path(path)
    directory = database.with_name(f".{database.name}-litestream") / "ltx" / "0"
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(f"{replicated + 1:016x}-"):
                return entry.stat().st_mtime
    return None


_log = get_logger("replication")

#: Time between two checks, in seconds.
CHECK_SECONDS = 5.0

#: The longest body of the metrics endpoint, in bytes.
_METRICS_BYTES = 64 * 1024 * 1024

_OK = 200

#: Tries to reach the endpoint: a starting replicator opens it a moment after its control socket.
_ENDPOINT_TRIES = 3
_ENDPOINT_PAUSE_SECONDS = 0.3

_NO_SOCKET = (
    "its control socket does not answer, so the lag cannot be known; start the replicator with the "
    "configuration that sdk_trio wrote"
)
_WAITING = (
    "it has listed no databases since its start, which happens while its target is unavailable, "
    "so the lag cannot be known; check the target, and its keys"
)


_Listed: TypeAlias = tuple[ReplicatedDatabase, ...]
_Metrics: TypeAlias = Mapping[str, DatabaseMetrics]


class HealthChecker:
    """Compares the databases that should be replicated with the replicator's answers.

    Each check queries the metrics endpoint and the control socket concurrently; both give the lag.
    A hanging replicator answers neither, and is Unhealthy after 5 seconds or
    ``HealthCheckMaxLagSeconds``, whichever is less. If only the endpoint answers, the transactions
    it reports as read are compared with those in the target. Without a surveyor the lag is then
    unknown: Degraded, never Healthy.

    Args:
        options: the replication options.
        socket_path: the replicator's control socket.
        wanted: returns the databases that should be replicated: the names of their replicas by
            path.
        failure: returns the supervisor's current failure, or None.
        reloading: returns whether the replicator is being restarted for a reload; meanwhile the
            last answer counts, and the lag grows.
        surveyor: queries the target, for an operator's replicator without a control socket.
        clock: returns Unix seconds.
    """

    def __init__(
        self,
        options: ReplicationOptions,
        socket_path: str,
        *,
        wanted: Callable[[], Awaitable[Mapping[str, str]]],
        failure: Callable[[], str | None] = lambda: None,
        reloading: Callable[[], bool] = lambda: False,
        surveyor: LagSurveyor | None = None,
        clock: Callable[[], float] = wall,
    ) -> None:
        self._options = options
        # A check must not take longer than the lag that it should detect.
        self._patience = min(ANSWER_SECONDS, float(options.health_check_max_lag_seconds))
        self._client = ControlClient(socket_path, answer_seconds=self._patience)
        self._wanted = wanted
        self._failure = failure
        self._reloading = reloading
        self._surveyor = surveyor
        self._listed: tuple[ReplicatedDatabase, ...] | None = None
        self._clock = clock
        self._history = SyncHistory()
        self._rules = HealthRules(
            options.sync_interval_seconds, options.health_check_max_lag_seconds
        )
        self.latest: ReplicationHealth | None = None

    async def check(self, *, even_if_disabled: bool = False) -> ReplicationHealth:
        """Check once; store and return the result. A failure is also a result.

        Args:
            even_if_disabled: also with ``HealthCheckEnabled: false``, for an explicit request.
        """
        if not (self._options.health_check_enabled or even_if_disabled):
            await trio.lowlevel.checkpoint()
            self.latest = disabled(self._clock())
            return self.latest
        try:
            wanted = await self._wanted()
        except (ReplicationError, StorageError) as error:
            self.latest = ReplicationHealth(
                HealthState.UNHEALTHY, self._clock(), str(error), reachable=False
            )
            return self.latest
        self.latest = await self._judge(wanted)
        return self.latest

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Check every :data:`CHECK_SECONDS` until cancelled, and log each change of the state.

        With ``HealthCheckEnabled: false`` it reports that once, and waits until cancelled.
        """
        before: HealthState | None = None
        task_status.started()
        while True:
            health = await self.check()
            # Only changes are logged: otherwise a target that is down for a night would fill the
            # log.
            if health.state is not before:
                bad = health.state in (HealthState.DEGRADED, HealthState.UNHEALTHY)
                log = _log.warning if bad else _log.info
                log(
                    "replication.health_changed",
                    state=health.state.value,
                    before=None if before is None else before.value,
                    reason=health.reason,
                    worst=[each.path for each in health.worst],
                )
                before = health.state
            off = health.state is HealthState.DISABLED
            await trio.sleep(math.inf if off else CHECK_SECONDS)

    async def _judge(self, wanted: Mapping[str, str]) -> ReplicationHealth:
        listed, metrics = await self._ask_both()
        unserved: str | None = None
        if isinstance(listed, ReplicatorError):
            # Its last list still counts while it restarts or waits for its target; the lag grows
            # with the time since then.
            known = {each.path for each in self._listed or ()}
            if self._listed is None or not self._reloading():
                silent = isinstance(metrics, ReplicatorError)
                waits = not silent and await self._client.answers()
                if not (waits and known.issuperset(wanted)):
                    return await self._judge_without_socket(wanted, str(listed), waits, metrics)
        else:
            self._listed = listed
            if not self._reloading():
                unserved, metrics = await self._endpoint_problem(listed, metrics)
        health = judge(
            wanted,
            self._listed or (),
            self._history,
            self._rules,
            now=self._clock(),
            metrics=None if isinstance(metrics, ReplicatorError) else metrics,
            problem=unserved or self._failure() or "",
        )
        # With another program on the port, the lag would be unknown if the socket fails.
        if unserved is not None:
            health = attrs.evolve(health, state=HealthState.UNHEALTHY)
        return health

    async def _ask_both(self) -> tuple[_Listed | ReplicatorError, _Metrics | ReplicatorError]:
        """Query socket and endpoint concurrently, so that a silent replicator costs one wait."""
        listed: _Listed | ReplicatorError = ()
        metrics: _Metrics | ReplicatorError = {}

        async def ask_socket() -> None:
            nonlocal listed
            try:
                listed = await self._client.list_databases()
            except ReplicatorError as error:
                listed = error

        async def ask_endpoint() -> None:
            nonlocal metrics
            try:
                metrics = await self._read_metrics()
            except ReplicatorError as error:
                metrics = error

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_socket)
            nursery.start_soon(ask_endpoint)
        return listed, metrics

    async def _endpoint_problem(
        self, listed: _Listed, metrics: _Metrics | ReplicatorError
    ) -> tuple[str | None, _Metrics | ReplicatorError]:
        """Return the problem of the metrics endpoint, None if it is served, and its metrics."""
        # The metrics name a database only after its first sync.
        synced = {each.path for each in listed if each.last_sync_at is not None}
        await trio.lowlevel.checkpoint()
        with trio.move_on_after(self._patience):
            for _ in range(_ENDPOINT_TRIES):
                if not synced or (isinstance(metrics, Mapping) and synced & metrics.keys()):
                    return None, metrics
                await trio.sleep(_ENDPOINT_PAUSE_SECONDS)
                try:
                    metrics = await self._read_metrics()
                except ReplicatorError as error:
                    metrics = error
        where = f"{METRICS_HOST}:{self._options.metrics_port}"
        problem = f"{where} is served by another replicator"
        if isinstance(metrics, ReplicatorError):
            problem = str(metrics)
        return (
            f"the replicator does not serve its metrics: {problem}; set MetricsPort to a port that "
            "no other program uses"
        ), metrics

    async def _judge_without_socket(
        self,
        wanted: Mapping[str, str],
        error: str,
        waits: bool,
        metrics: _Metrics | ReplicatorError,
    ) -> ReplicationHealth:
        """Judge by the metrics, which name the databases, and by the target, which has the lag."""
        problem = self._failure()
        if isinstance(metrics, ReplicatorError):
            return judge(
                wanted,
                None,
                self._history,
                self._rules,
                now=self._clock(),
                problem=problem or error,
            )
        # If the replicator waits for its target, the target would not answer our query either.
        surveyor = None if waits else self._surveyor
        if surveyor is not None:
            await surveyor.survey(wanted, metrics)
        return judge_by_replicas(
            wanted,
            metrics.keys(),
            None if surveyor is None else surveyor.book,
            self._history,
            self._rules,
            now=self._clock(),
            problem=problem or "",
            unanswered=(_WAITING if waits else _NO_SOCKET)
            if surveyor is None
            else surveyor.problem,
        )

    async def _read_metrics(self) -> Mapping[str, DatabaseMetrics]:
        port = self._options.metrics_port
        answer = await ask_local(
            partial(opener.dial_tcp, METRICS_HOST, port, next_address=math.inf),
            "/metrics",
            seconds=self._patience,
            max_bytes=_METRICS_BYTES,
            where=f"{METRICS_HOST}:{port}",
        )
        if answer.status != _OK:
            raise ReplicatorError(f"port {port} answers with status {answer.status}")
        # In a thread: 10 000 databases take 0.1 s, and this runs every few seconds.
        found = await run_in_thread(lambda: read_metrics(answer.body.decode("utf-8", "replace")))
        if not found and b"litestream_" not in answer.body:
            raise ReplicatorError(f"the program on port {port} is not a replicator")
        return found
