"""The lag and health of replication: of each database, and of all of them together. Pure.

No single metric of the replicator is the lag: if its target is down for minutes, every error
counter stays at 0. The metrics show that it keeps reading each database, by a count of syncs that
also grows while the database is idle. Its control socket reports when a database was last in sync
with its replica. The lag is counted from the earlier of the two (:class:`SyncHistory`). Without a
socket, the position in the metrics is compared with the target (:class:`LagBook`).
"""

import enum
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

import attrs

from .control import ReplicatedDatabase

#: The metrics of one database, as an exposition names them.
_TXID: Final = "litestream_txid"
_SYNCS: Final = "litestream_sync_count"
_FAILED_SYNCS: Final = "litestream_sync_error_count"


# The replicator's metrics report the newest transaction read from each database, the target's
# listing the newest that has arrived. Transactions in between wait, and the age of the oldest is
# the lag. The metrics count as long as they show that the replicator keeps reading.


@attrs.frozen
class DatabaseMetrics:
    """The newest transaction that the replicator has read of a database, and its count of syncs."""

    txid: int = 0
    syncs: int = 0


@attrs.frozen
class ReplicaPosition:
    """The newest transaction in the target, 0 for none, and its time (Unix seconds)."""

    txid: int
    written_at: float | None


@attrs.frozen
class _Known:
    """The last observations of one database; times are Unix seconds or None (never).

    Attributes:
        metrics: the last metrics.
        read_at: the replicator was seen to read the database.
        tried_at: the target was queried, even without an answer.
        answered_at: the target was queried and answered.
        held: the newest transaction that the target had then; 0: none.
        in_step_at: everything up to this time was at the target then; None if nothing was.
    """

    metrics: DatabaseMetrics
    read_at: float | None = None
    tried_at: float | None = None
    answered_at: float | None = None
    held: int = 0
    in_step_at: float | None = None

    @property
    def is_in_step(self) -> bool:
        return self.held > 0 and self.held >= self.metrics.txid


class LagBook:
    """The observations of all databases, and the choice of those to query next.

    ``fresh_seconds``: how long an observation counts; after that the lag grows by itself.
    """

    def __init__(self, fresh_seconds: float = math.inf) -> None:
        self._fresh_seconds = fresh_seconds
        self._known: dict[str, _Known] = {}
        self._noted_at = 0.0

    def note(self, metrics: Mapping[str, DatabaseMetrics], now: float) -> None:
        """Record the replicator's metrics; databases that they do not name are dropped."""
        self._noted_at = now
        found = {}
        for path, each in metrics.items():
            known = self._known.get(path, _Known(each))
            # If the count changes between two observations, the replicator is reading. A smaller
            # one means that it was restarted; 0 means that it has read nothing yet.
            read_at = known.read_at if each.syncs in (0, known.metrics.syncs) else now
            found[path] = attrs.evolve(known, metrics=each, read_at=read_at)
        self._known = found

    def due(self, paths: Collection[str], limit: int) -> list[str]:
        """Return up to ``limit`` of ``paths`` that are not in sync, the longest waiting first.

        Databases that are in sync and were not written since are skipped: each request costs.
        """
        due = [path for path in paths if path in self._known and not self._known[path].is_in_step]
        due.sort(key=lambda path: (self._known[path].tried_at or 0.0, path))
        return due[:limit]

    def tried(self, path: str, now: float) -> None:
        """Record that the target is queried now; if that fails, other databases come first."""
        if path in self._known:
            self._known[path] = attrs.evolve(self._known[path], tried_at=now)

    def covers(self, path: str, position: ReplicaPosition) -> bool:
        """Return whether the target has everything that the replicator has read of a database."""
        known = self._known.get(path)
        return known is not None and attrs.evolve(known, held=position.txid).is_in_step

    def found(
        self, path: str, position: ReplicaPosition, waiting_since: float | None, now: float
    ) -> None:
        """Record the position of a database at the target.

        Args:
            path: the path of the database.
            position: the newest transaction at the target.
            waiting_since: when the replicator read the first transaction that the target lacks,
                None if unknown.
            now: the time of the query.
        """
        known = self._known.get(path)
        if known is None:
            return
        known = attrs.evolve(known, answered_at=now, held=position.txid)
        times = [known.in_step_at, waiting_since, position.written_at]
        in_step_at = max((time for time in times if time is not None), default=None)
        if known.is_in_step:
            in_step_at = known.read_at
        elif not position.txid:
            in_step_at = None
        self._known[path] = attrs.evolve(known, in_step_at=in_step_at)

    def was_queried(self, path: str) -> bool:
        """Return whether the target was ever queried for this database."""
        return path in self._known and self._known[path].answered_at is not None

    def has_replica(self, path: str) -> bool:
        """Return whether the target had any data of this database."""
        return path in self._known and self._known[path].held > 0

    def waits_for_reading(self) -> bool:
        """Return whether the replicator has not been seen to read one of the databases yet."""
        return any(known.read_at is None for known in self._known.values())

    def in_step_at(self, path: str) -> float | None:
        """Return the time up to which all of a database is at the target, None if nothing is."""
        known = self._known.get(path)
        if known is None:
            return None
        return known.read_at if known.is_in_step else known.in_step_at

    def delay(self, path: str, now: float, *, unanswered: bool) -> float | None:
        """Return the age of the oldest waiting transaction, in seconds; None if it is unknown.

        It is as of the last observation. If the target does not answer, or was not queried for this
        database in time, it grows with the time since.
        """
        known = self._known.get(path)
        if known is None or known.answered_at is None or known.read_at is None:
            return None
        in_step_at = self.in_step_at(path)
        outdated = unanswered or now - known.answered_at > self._fresh_seconds
        as_of = now if outdated else known.answered_at
        if known.is_in_step:
            as_of = self._noted_at
        return None if in_step_at is None else max(0.0, as_of - in_step_at)


def read_metrics(text: str) -> dict[str, DatabaseMetrics]:
    """Return the databases in the replicator's metrics, from the text of its endpoint."""
    values: dict[tuple[str, str], int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition('{db="')
        path, quote, value = rest.rpartition('"} ')
        if quote and name in (_TXID, _SYNCS, _FAILED_SYNCS):
            try:
                values[name, _unescaped(path)] = int(float(value))
            except (ValueError, OverflowError):
                continue
    return {
        path: DatabaseMetrics(
            txid, values.get((_SYNCS, path), 0) - values.get((_FAILED_SYNCS, path), 0)
        )
        for (name, path), txid in values.items()
        if name == _TXID
    }


def _unescaped(label: str) -> str:
    """Undo the escapes of the exposition format: backslash, quotation mark, line break."""
    parts = label.split("\\\\")
    return "\\".join(part.replace('\\"', '"').replace("\\n", "\n") for part in parts)


#: The number of databases that a summary names.
NAMED: Final = 5

#: Statuses in which the replicator works on a database.
_WORKING: Final = frozenset({"replicating", "open"})


class HealthState(enum.StrEnum):
    """The states, from best to worst; ``Disabled``: ``HealthCheckEnabled`` is false."""

    DISABLED = "Disabled"
    HEALTHY = "Healthy"
    DEGRADED = "Degraded"
    UNHEALTHY = "Unhealthy"


_NEVER_SYNCED: Final = (
    "never synced since the replicator started; if that continues, its log has the reason "
    "(replication.replicator_said)"
)

_NO_REPLICA: Final = (
    "the target has no replica of it at the configured path; compare the settings with the "
    "configuration that the replicator runs with"
)

_NOT_READ: Final = (
    "the replicator has not been seen to read it; if that continues, its log has the reason"
)

_NOT_COMPARED: Final = "not compared with its replica yet"

_JUDGED: Final = (HealthState.HEALTHY, HealthState.DEGRADED, HealthState.UNHEALTHY)
_RANK: Final = {state: rank for rank, state in enumerate(HealthState)}


@attrs.frozen
class DatabaseHealth:
    """The health of one database; ``lag_seconds`` and ``last_sync_at`` (Unix seconds) may be
    unknown."""

    path: str
    state: HealthState
    lag_seconds: float | None
    last_sync_at: float | None
    reason: str


@attrs.frozen
class ReplicationHealth:
    """The health of all databases, worst first, and the overall state, which is the worst one.

    ``reachable`` is whether the replicator answered; ``reason`` is one line of text.
    """

    state: HealthState
    checked_at: float
    reason: str
    reachable: bool
    databases: tuple[DatabaseHealth, ...] = ()

    @property
    def is_disabled(self) -> bool:
        """Whether the check is disabled by the settings."""
        return self.state is HealthState.DISABLED

    @property
    def is_degraded(self) -> bool:
        """Whether the check has found a fault."""
        return not self.is_disabled and self.state is not HealthState.HEALTHY

    @property
    def lag_seconds(self) -> float | None:
        """The largest lag: infinite if a database was never in sync, None if unknown."""
        if self.state is HealthState.DISABLED:
            return None
        # Infinity for "never in sync": an alert on the lag must fire for it, and does not for a
        # missing sample.
        lags = (each.lag_seconds for each in self.databases)
        return max((float("inf") if lag is None else lag for lag in lags), default=0.0)

    @property
    def worst(self) -> tuple[DatabaseHealth, ...]:
        """The databases to check first: those that are not healthy, at most :data:`NAMED`."""
        bad = (each for each in self.databases if each.state is not HealthState.HEALTHY)
        return tuple(each for _, each in zip(range(NAMED), bad, strict=False))

    @property
    def counts(self) -> dict[HealthState, int]:
        """Count the databases in each state."""
        found = dict.fromkeys(_JUDGED, 0)
        for each in self.databases:
            found[each.state] += 1
        return found


def disabled(now: float) -> ReplicationHealth:
    """Return the health for ``HealthCheckEnabled: false``, when nothing is known."""
    return ReplicationHealth(HealthState.DISABLED, now, "HealthCheckEnabled is false", False)


class SyncHistory:
    """The last time at which each database was seen in sync with its replica.

    A restarted replicator has forgotten these times, but everything that its predecessor brought to
    the target is still there.
    """

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        #: The count of syncs in the metrics, and the time of its last change.
        self._syncs: dict[str, tuple[int, float]] = {}
        self._wanted_since: dict[str, float] | None = None

    def note(self, listed: Iterable[ReplicatedDatabase]) -> None:
        """Record the replicator's report."""
        for each in listed:
            if each.last_sync_at is not None:
                self._last[each.path] = max(each.last_sync_at, self._last.get(each.path, 0.0))

    def note_metrics(self, metrics: Mapping[str, DatabaseMetrics], now: float) -> None:
        """Record a changed count of syncs in the metrics; it also grows while idle."""
        for path, each in metrics.items():
            if self._syncs.get(path, (None,))[0] != each.syncs:
                self._syncs[path] = (each.syncs, now)

    def keep(self, wanted: Collection[str], now: float) -> None:
        """Forget all other databases: a database that returns later starts over."""
        self._last = {path: at for path, at in self._last.items() if path in wanted}
        self._syncs = {path: seen for path, seen in self._syncs.items() if path in wanted}
        # For the databases of the first observation the start is unknown.
        since = float("-inf") if self._wanted_since is None else now
        before = self._wanted_since or {}
        self._wanted_since = {path: before.get(path, since) for path in wanted}

    def wanted_since(self, path: str) -> float:
        """Return when ``path`` was first among the wanted databases, in Unix seconds."""
        return (self._wanted_since or {}).get(path, float("-inf"))

    def last_sync_at(self, path: str) -> float | None:
        """Return the time at which ``path`` was last seen in sync, in Unix seconds; None: never.

        A database whose count of syncs in the metrics does not grow is not in sync, whatever the
        control socket reports.
        """
        last = self._last.get(path)
        if last is None or path not in self._syncs:
            return last
        return min(last, self._syncs[path][1])


@attrs.frozen
class HealthRules:
    """``SyncIntervalSeconds`` and ``HealthCheckMaxLagSeconds``."""

    sync_interval: float
    max_lag: float


def judge(
    wanted: Collection[str],
    listed: Collection[ReplicatedDatabase] | None,
    history: SyncHistory,
    rules: HealthRules,
    *,
    now: float,
    metrics: Mapping[str, DatabaseMetrics] | None = None,
    problem: str = "",
) -> ReplicationHealth:
    """Compare the databases that the replicator reports with those that should be replicated.

    It updates the history. Healthy needs evidence: a database that was never in sync, or whose
    replicator does not answer, is never healthy.

    Args:
        wanted: the databases' paths.
        listed: the replicator's report; None: no answer.
        history: the history from earlier calls.
        rules: the thresholds.
        now: Unix seconds.
        metrics: from its metrics endpoint; None: not queried, or no answer.
        problem: why it does not answer, or another problem of the whole replicator.
    """
    wanted = frozenset(wanted)
    history.keep(wanted, now)
    history.note(each for each in listed or () if each.path in wanted)
    if metrics is not None:
        history.note_metrics({path: metrics[path] for path in wanted & metrics.keys()}, now)
    statuses = {each.path: each.status for each in listed or ()}
    databases = []
    for path in sorted(wanted):
        last, lag = _lag_of_history(path, history, rules, now)
        # A replicator that does not answer may be dead, so nothing is healthy; the lag is reported
        # anyway, because it grows.
        if listed is None:
            reason = problem or "the replicator does not answer"
            databases.append(DatabaseHealth(path, HealthState.UNHEALTHY, lag, last, reason))
        else:
            seen = _Seen(statuses.get(path), last, lag)
            databases.append(_judge_one(path, seen, history, rules, now))
    return _summed(databases, now, problem, reachable=listed is not None)


def judge_by_replicas(
    wanted: Collection[str],
    known: Collection[str],
    book: LagBook | None,
    history: SyncHistory,
    rules: HealthRules,
    *,
    now: float,
    problem: str = "",
    unanswered: str = "",
) -> ReplicationHealth:
    """Judge a replicator that reports no lag by the files in the target.

    Args:
        wanted: the databases' paths.
        known: the databases that its metrics name.
        book: the observations of the target; None: it is not observed, so no database is Healthy.
        history: the history that :func:`judge` updates.
        rules: the thresholds.
        now: Unix seconds.
        problem: a problem of the whole replicator.
        unanswered: why the last query of the target was skipped or failed.
    """
    wanted = frozenset(wanted)
    history.keep(wanted, now)
    databases = []
    for path in sorted(wanted):
        last, lag = _lag_of_history(path, history, rules, now)
        if book is not None:
            # For a replicator with a socket that missed one answer, earlier answers count.
            last = _known(max, last, book.in_step_at(path))
            delay = book.delay(path, now, unanswered=bool(unanswered))
            reported = None if delay is None else max(0.0, delay - rules.sync_interval)
            lag = _known(min, lag, reported)
        elif path in known:
            databases.append(DatabaseHealth(path, HealthState.DEGRADED, lag, last, unanswered))
            continue
        no_lag = unanswered or _why_no_lag(path, book)
        seen = _Seen("replicating" if path in known else None, last, lag, no_lag)
        databases.append(_judge_one(path, seen, history, rules, now))
    return _summed(databases, now, problem or unanswered)


def _known(choose: Callable[[Iterable[float]], float], *values: float | None) -> float | None:
    given = [value for value in values if value is not None]
    return choose(given) if given else None


def _why_no_lag(path: str, book: LagBook | None) -> str:
    if book is None or not book.was_queried(path):
        return _NOT_COMPARED
    return _NOT_READ if book.has_replica(path) else _NO_REPLICA


def _lag_of_history(
    path: str, history: SyncHistory, rules: HealthRules, now: float
) -> tuple[float | None, float | None]:
    """Return the time at which a database was last seen in sync, and its age; both None: never."""
    last = history.last_sync_at(path)
    return last, None if last is None else max(0.0, now - last - rules.sync_interval)


@attrs.frozen
class _Seen:
    """The state of one database, as reported by the replicator.

    Attributes:
        status: as the replicator reports it; None: it does not have the database.
        last_sync_at: when it was last in sync; None: never.
        lag: in seconds; None if unknown.
        no_lag: why it is unknown.
    """

    status: str | None
    last_sync_at: float | None
    lag: float | None
    no_lag: str = _NEVER_SYNCED


def _summed(
    databases: Iterable[DatabaseHealth], now: float, problem: str, *, reachable: bool = True
) -> ReplicationHealth:
    """Sort the databases, and determine the overall state and its reason."""
    databases = sorted(databases, key=_badness)
    state = databases[0].state if databases else HealthState.HEALTHY
    if not reachable:
        state = HealthState.UNHEALTHY
    elif problem and _RANK[state] < _RANK[HealthState.DEGRADED]:
        state = HealthState.DEGRADED
    bad = sum(each.state is not HealthState.HEALTHY for each in databases)
    if problem:
        reason = problem
    elif bad:
        reason = f"{bad} of {len(databases)} databases, {databases[0].path}: {databases[0].reason}"
    else:
        reason = f"{len(databases)} databases are in sync"
    return ReplicationHealth(state, now, reason, reachable, tuple(databases))


def _judge_one(
    path: str, seen: _Seen, history: SyncHistory, rules: HealthRules, now: float
) -> DatabaseHealth:
    state = HealthState.UNHEALTHY
    if seen.status is None:
        reason = "the replicator does not have it"
        if now - history.wanted_since(path) <= rules.max_lag:
            # A new database gets into the configuration, and to the replicator, some seconds later.
            state, reason = HealthState.DEGRADED, "new, the replicator does not have it yet"
    elif seen.status not in _WORKING:
        reason = f"its replication is {seen.status or 'in an unknown state'}"
    elif seen.lag is None:
        state, reason = HealthState.DEGRADED, seen.no_lag
    elif seen.lag > rules.max_lag:
        state = HealthState.DEGRADED
        reason = f"{seen.lag:.0f} s behind, more than HealthCheckMaxLagSeconds ({rules.max_lag:g})"
    else:
        state, reason = HealthState.HEALTHY, ""
    return DatabaseHealth(path, state, seen.lag, seen.last_sync_at, reason)


def _badness(health: DatabaseHealth) -> tuple[int, float, str]:
    lag = float("inf") if health.lag_seconds is None else health.lag_seconds
    return (-_RANK[health.state], -lag, health.path)
