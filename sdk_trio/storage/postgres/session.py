"""The settings of every session of ours, or behind a pooler of every transaction."""

from collections.abc import Mapping

from psycopg import sql

# Settings of the server, the database or the role that would change what a statement does or what a
# row holds. They are set for each session, or behind a pooler for each transaction. PgBouncer
# refuses them as options of the connection.
#
# default_transaction_read_only is left alone: failover managers and operators stop writes with it.
FIXED: Mapping[str, str] = {
    # A commit without its standby is known by a warning alone, see UnreplicatedError.
    "client_min_messages": "warning",
    # Statements decide by what is committed when they begin, and no caller expects a conflict.
    "default_transaction_isolation": "read committed",
    # A time would lose its fraction on its way here.
    "extra_float_digits": "1",
    # "off" makes a missing subject or tenant the text "NULL".
    "array_nulls": "on",
    "standard_conforming_strings": "on",
}


def limits(statement: float, idle: float, lock: float | None = None) -> dict[str, str]:
    """Return the settings that end what takes too long.

    All are in seconds, 0 for no limit. ``lock`` None leaves that one as it is.
    """
    times = {"statement_timeout": statement, "idle_in_transaction_session_timeout": idle}
    if lock is not None:
        times["lock_timeout"] = lock
    return {name: f"{seconds * 1000:.0f}" for name, seconds in times.items()}


def set_all(settings: Mapping[str, str], *, local: bool) -> sql.Composed:
    """Return statements that set all of ``settings``, for this transaction if ``local``."""
    calls = [
        sql.SQL("set_config({}, {}, {})").format(*map(sql.Literal, (name, value, local)))
        for name, value in settings.items()
    ]
    # With synchronous_commit off, PostgreSQL loses the last commits of a crash, with local those of
    # a failover, each of which was answered 200. A stricter setting (remote_apply) of the server's
    # stays.
    kept = sql.SQL(
        "set_config('synchronous_commit', CASE current_setting('synchronous_commit') "
        "WHEN 'off' THEN 'on' WHEN 'local' THEN 'on' ELSE current_setting('synchronous_commit') "
        "END, {})"
    ).format(sql.Literal(local))
    made = sql.SQL("SELECT {}").format(sql.SQL(", ").join([*calls, kept]))
    if local and "default_transaction_isolation" in settings:
        # The default comes too late for a transaction that has begun.
        made = sql.SQL("SET TRANSACTION ISOLATION LEVEL READ COMMITTED;{}").format(made)
    return made
