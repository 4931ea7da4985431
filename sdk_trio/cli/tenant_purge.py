"""``tenant purge``: removal of deleted tenants, after their retention or on demand."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

from ..errors import EXIT_FAILURE, ReplicationError, StoreUnavailableError, TenantError
from .parse import UsageError, add_format, describing

if not describing():
    import trio

    from ..base import logs
    from ..config import Settings, StorageBackend
    from ..replication.erasure import ReplicaErasure
    from ..tenants.purge import PurgeCandidate, Purger, TenantRemoved
    from .settings import load
    from .store import actor_of, open_store, require_tenants
    from .terminal import Progress, confirmed, print_list, say

COLUMNS = (
    "identifier",
    "tenant_id",
    "deleted_days_ago",
    "deliveries",
    "messages",
    "outbox",
    "audit",
    "bytes",
    "replica",
    "purged",
    "reason",
)

_DAY_SECONDS = 86_400


def purge_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``tenant purge``."""
    parser.add_argument(
        "identifier", metavar="IDENTIFIER", nargs="?", help="only this tenant, or its id"
    )
    parser.add_argument(
        "--now",
        action="store_true",
        help="also within its retention, with all earlier audit rows; needs IDENTIFIER",
    )
    parser.add_argument(
        "--orphans",
        action="store_true",
        help="also replicas on a local disk whose tenants this store does not know",
    )
    parser.add_argument("--dry-run", action="store_true", help="show the data to remove")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--reason", metavar="R", help="why, for the audit trail")
    parser.add_argument("--actor", metavar="A", help="who, for the audit trail (default: the user)")
    parser.add_argument(
        "--forget-audit", action="store_true", help="remove the tenants' earlier audit rows too"
    )
    add_format(parser)


def purge_tenants(arguments: Namespace) -> int:
    """Show the data to remove, ask, and remove them; return 1 if any part remains.

    With ``--dry-run`` it only shows them. A script without a terminal is not asked.

    Raises:
        UsageError: ``--now`` or ``--orphans`` without or with an identifier.
        TenantError: the named tenant cannot be removed.
    """
    if arguments.now and arguments.identifier is None:
        raise UsageError("--now removes one tenant within its retention: name it")
    if arguments.orphans and arguments.identifier is not None:
        raise UsageError("--orphans finds all replicas without a tenant: do not name a tenant")
    settings = load(arguments)
    require_tenants(settings)
    # The table shows what was removed; the log would repeat it between the lines.
    logs.configure(level="Error", format=settings.logging.format)
    # Read in a separate run: the store must not stay open while a person considers the question.
    candidates = trio.run(_candidates, settings, arguments)
    days = settings.multi_tenant.tenant_status.deleted_tenant_retention_days
    none = f"no tenant was deleted more than {days} days ago"
    if arguments.dry_run:
        print_list(arguments, [_row(c, purged=False) for c in candidates], COLUMNS)
        _note_places(candidates)
        say(f"{len(candidates)} would be removed permanently" if candidates else none)
        return 0
    # Always ask, even for one: this command cannot be undone.
    if candidates and not arguments.yes:
        _note_places(candidates)
        if not confirmed(_question(candidates)):
            say("nothing was removed")
            return EXIT_FAILURE
    rows, unreached, other_tables = trio.run(_purge, settings, candidates, arguments)
    print_list(arguments, rows, COLUMNS)
    removed = sum(row["purged"] for row in rows)
    say(f"{removed} removed; backups elsewhere remain" if rows else none)
    if removed and settings.storage.backend is StorageBackend.POSTGRES:
        say(
            "the server owns the pages and the log of the database: "
            "remnants disappear with its VACUUM, and when it recycles its WAL"
        )
    for left in unreached:
        say(f"not reached: {left}")
    if rows and other_tables:
        say(
            f"not checked: {', '.join(other_tables)} (tables that handlers have created in the "
            "store); remove the tenant's data from them"
        )
    # An unreachable replica is remaining personal data: a script must notice it.
    return 0 if removed == len(rows) and not unreached else EXIT_FAILURE


async def _candidates(settings: Settings, arguments: Namespace) -> Sequence[PurgeCandidate]:
    async with open_store(settings) as store:
        purger = Purger(settings, store, replicas=ReplicaErasure(settings))
        if arguments.identifier is not None:
            return [await purger.candidate(arguments.identifier, now=arguments.now)]
        return await purger.candidates(orphans=arguments.orphans)


async def _purge(
    settings: Settings, candidates: Sequence[PurgeCandidate], arguments: Namespace
) -> tuple[list[dict[str, Any]], list[str], Sequence[str]]:
    """Return a row per candidate, the unreachable data, and the application's tables."""
    actor = actor_of(arguments)
    rows = []
    unreached: list[str] = []
    progress = Progress("removed", len(candidates))
    async with open_store(settings) as store:
        purger = Purger(settings, store, replicas=ReplicaErasure(settings))
        for candidate in candidates:
            try:
                removed = await purger.purge(
                    candidate,
                    actor=actor,
                    reason=arguments.reason,
                    forget_audit=arguments.forget_audit,
                    now=arguments.now,
                )
            # A failure for one tenant (such as an open database) must not stop the others.
            except (TenantError, StoreUnavailableError, ReplicationError) as error:
                rows.append(_row(candidate, purged=False, reason=str(error)))
            else:
                rows.append(_row(candidate, purged=True, removed=removed))
                unreached += removed.unreached
            progress.advance()
        # Also without a candidate: an earlier purge may have been interrupted before its wipe.
        left = await purger.wipe()
        if left is not None:
            unreached.append(left)
        return rows, unreached, await store.other_tables()


def _row(
    candidate: PurgeCandidate,
    *,
    purged: bool,
    reason: str | None = None,
    removed: TenantRemoved | None = None,
) -> dict[str, Any]:
    tenant = candidate.tenant
    if tenant is None and reason is None:
        reason = "left over from an earlier purge, or from an unknown tenant"
    days = None
    if tenant is not None and tenant.deleted_at is not None:
        # Full days, as the retention counts them.
        days = int((time.time() - tenant.deleted_at) // _DAY_SECONDS)
    return {
        "identifier": None if tenant is None else tenant.identifier,
        "tenant_id": candidate.tenant_id,
        "deleted_days_ago": days,
        **candidate.rows,
        "bytes": candidate.bytes if removed is None else removed.bytes,
        "files": list(candidate.files),
        "replica": None if candidate.replica is None else candidate.replica.where,
        "replica_files": None if candidate.replica is None else candidate.replica.files,
        "purged": purged,
        "unreached": [] if removed is None else list(removed.unreached),
        "reason": reason,
    }


def _note_places(candidates: Sequence[PurgeCandidate]) -> None:
    """Name every file and replica, and how many rows there are."""
    for candidate in candidates:
        name = candidate.tenant.identifier if candidate.tenant else candidate.tenant_id
        rows = ", ".join(f"{number} {what}" for what, number in candidate.rows.items())
        say(f"{name}: {rows}")
        for file in candidate.files:
            say(f"  file {file}")
        replica = candidate.replica
        if replica is not None:
            size = "" if replica.files is None else f" ({replica.files} files)"
            say(f"  replica {replica.where}{size}")


def _question(candidates: Sequence[PurgeCandidate]) -> str:
    names = ", ".join(c.tenant.identifier if c.tenant else c.tenant_id for c in candidates[:5])
    more = f" and {len(candidates) - 5} more" if len(candidates) > 5 else ""
    return f"remove {names}{more} permanently?"
