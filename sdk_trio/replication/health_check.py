"""Asks the replicator how replication stands, now or again and again."""

import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial

import attrs
import trio

from ..base.logs import get_logger
from ..config.options.replication import ReplicationOptions
from ..errors import ReplicationError, ReplicatorError, StorageError
from .control import ControlClient, ReplicatedDatabase, ask_local
from .health import (
    HealthRules,
    HealthState,
    ReplicationHealth,
    SyncHistory,
    disabled,
    judge,
    judge_by_replicas,
)
from .lag import DatabaseMetrics, read_metrics
from .lag_survey import LagSurveyor
from .manifest import METRICS_HOST

_log = get_logger("replication")

#: Between two checks, in seconds.
CHECK_SECONDS = 5.0

#: How long the metrics endpoint may take, and how long its answer may be.
_METRICS_SECONDS = 5.0
_METRICS_BYTES = 64 * 1024 * 1024

_OK = 200

#: How long an answer of the metrics endpoint is believed, in seconds: the replicator takes its port
#: when it starts, or never.
ENDPOINT_SECONDS = 60.0

#: A replicator that has just started opens its endpoint a moment after its control socket.
_ENDPOINT_LOOKS = 3
_ENDPOINT_PAUSE_SECONDS = 0.3

_NO_SOCKET = (
    "its control socket does not answer, so the lag cannot be known; start the replicator with the "
    "configuration that sdk_trio wrote"
)
_WAITING = (
    "it has listed no databases since its start, as while its target is away, so the lag cannot be "
    "known; check the target, and its keys"
)


class HealthChecker:
    """Compares the databases that should be replicated with what the replicator says.

    The control socket gives the lag, and the metrics endpoint has to be served too. Where the
    socket does not answer but the endpoint does, the process is there, and what it has read is
    compared with what the target holds. Without a surveyor nothing can be said about the lag then:
    Degraded, never Healthy.

    Args:
        options: the replication's.
        socket_path: the replicator's control socket.
        wanted: returns the paths of the databases that should be replicated.
        failure: returns what the supervisor has to say, None when all is well.
        reloading: returns whether it restarts the replicator for a reload; meanwhile what the
            replicator said last counts, and the lag grows.
        surveyor: asks the target, for a replicator of the operator's that has no control socket.
        clock: returns Unix seconds.
    """

    def __init__(
        self,
        options: ReplicationOptions,
        socket_path: str,
        *,
        wanted: Callable[[], Awaitable[Collection[str]]],
        failure: Callable[[], str | None] = lambda: None,
        reloading: Callable[[], bool] = lambda: False,
        surveyor: LagSurveyor | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._options = options
        self._client = ControlClient(socket_path)
        self._wanted = wanted
        self._failure = failure
        self._reloading = reloading
        self._surveyor = surveyor
        self._listed: tuple[ReplicatedDatabase, ...] | None = None
        self._clock = clock
        self._history = SyncHistory()
        self._endpoint_seen_at = -math.inf
        self._rules = HealthRules(
            options.sync_interval_seconds, options.health_check_max_lag_seconds
        )
        self.latest: ReplicationHealth | None = None

    async def check(self, *, even_if_disabled: bool = False) -> ReplicationHealth:
        """Look once, and return and keep the result; it is data, whatever is wrong.

        Args:
            even_if_disabled: also with ``HealthCheckEnabled: false``, because somebody asks.
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
            return self.latest  # noqa: ASYNC910 - whoever raised has been waited for
        self.latest = await self._judge(wanted)
        return self.latest

    async def run(self) -> None:
        """Check every :data:`CHECK_SECONDS` until cancelled, and log each change of the state."""
        before: HealthState | None = None
        while True:
            health = await self.check()
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
            if health.state is HealthState.DISABLED:
                return
            await trio.sleep(CHECK_SECONDS)

    async def _judge(self, wanted: Collection[str]) -> ReplicationHealth:
        unserved: str | None = None
        try:
            self._listed = await self._client.list_databases()
        except ReplicatorError as error:
            # What it listed last still counts while it restarts, or waits for its target: the lag
            # grows by itself.
            known = {each.path for each in self._listed or ()}
            if self._listed is None or not self._reloading():
                waits = await self._client.answers()
                if not (waits and known.issuperset(wanted)):
                    return await self._judge_without_socket(wanted, str(error), waits)
        else:
            if not self._reloading():
                unserved = await self._endpoint_problem(self._listed)
        health = judge(
            wanted,
            self._listed or (),
            self._history,
            self._rules,
            now=self._clock(),
            problem=unserved or self._failure() or "",
        )
        if unserved is not None:
            health = attrs.evolve(health, state=HealthState.UNHEALTHY)
        return health  # noqa: ASYNC910 - whoever raised has been waited for

    async def _endpoint_problem(self, listed: Collection[ReplicatedDatabase]) -> str | None:
        """Return what is wrong with the metrics endpoint; None: it is this replicator's."""
        await trio.lowlevel.checkpoint()
        # Only what was synced is in the metrics.
        synced = {each.path for each in listed if each.last_sync_at is not None}
        if not synced or trio.current_time() - self._endpoint_seen_at < ENDPOINT_SECONDS:
            return None
        where = f"{METRICS_HOST}:{self._options.metrics_port}"
        problem = f"what serves {where} is another replicator"
        for _ in range(_ENDPOINT_LOOKS):
            try:
                if synced & (await self._read_metrics()).keys():
                    self._endpoint_seen_at = trio.current_time()
                    return None
            except ReplicatorError as error:
                problem = str(error)
            await trio.sleep(_ENDPOINT_PAUSE_SECONDS)
        return (
            f"the replicator does not serve its metrics: {problem}; set MetricsPort to a port that "
            "no other program uses"
        )

    async def _judge_without_socket(
        self, wanted: Collection[str], error: str, waits: bool
    ) -> ReplicationHealth:
        """Ask the metrics endpoint, which names the databases, and the target for the lag."""
        problem = self._failure()
        try:
            metrics = await self._read_metrics()
        except ReplicatorError:
            return judge(  # noqa: ASYNC910 - whoever raised has been waited for
                wanted,
                None,
                self._history,
                self._rules,
                now=self._clock(),
                problem=problem or error,
            )
        # One that waits for its target is there; the target would not answer us either.
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
            partial(trio.open_tcp_stream, METRICS_HOST, port, happy_eyeballs_delay=math.inf),
            "/metrics",
            seconds=_METRICS_SECONDS,
            max_bytes=_METRICS_BYTES,
            where=f"{METRICS_HOST}:{port}",
        )
        if answer.status != _OK:
            raise ReplicatorError(f"port {port} answers with status {answer.status}")
        found = read_metrics(answer.body.decode("utf-8", "replace"))
        if not found and b"litestream_" not in answer.body:
            raise ReplicatorError(f"what answers on port {port} is no replicator")
        return found
