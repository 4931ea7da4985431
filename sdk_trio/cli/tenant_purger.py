"""``tenant purge``: removes tenants that were deleted longer ago than their retention."""

import time
import uuid
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import trio

from .. import logs
from ..config import Settings
from ..errors import EXIT_FAILURE, TenantError
from ..storage import open_store
from ..tenants.purger import PurgeCandidate, Purger, TenantRemoved
from .printer import Progress, print_rows, say
from .questioner import confirmed
from .settings_reader import load
from .tenant_access import actor_of
from .upgrade import require_tenants

COLUMNS = ("identifier", "tenant_id", "deleted_days_ago", "bytes", "purged", "reason")

_DAY_SECONDS = 86_400


def purge_tenants(arguments: Namespace) -> int:
    """Show which tenants would be removed, ask, and remove them; 1 if one of them could not be.

    With ``--dry-run`` it ends after the first part. Where nobody can be asked, it does not ask.
    """
    settings = load(arguments)
    require_tenants(settings)
    logs.configure(level="Error", format=settings.logging.format)
    candidates = trio.run(_candidates, settings)
    as_json = arguments.format == "json"
    days = settings.multi_tenant.tenant_status.deleted_tenant_retention_days
    if arguments.dry_run or not candidates:
        print_rows([_row(c, purged=False) for c in candidates], COLUMNS, as_json=as_json)
        say(
            f"{len(candidates)} would be removed for ever"
            if candidates
            else f"no tenant was deleted more than {days} days ago"
        )
        return 0
    if not (arguments.yes or confirmed(_question(candidates))):
        say("nothing was removed")
        return EXIT_FAILURE
    rows = trio.run(_purge, settings, candidates, arguments)
    print_rows(rows, COLUMNS, as_json=as_json)
    removed = sum(row["purged"] for row in rows)
    say(f"{removed} removed")
    return 0 if removed == len(rows) else EXIT_FAILURE


async def _candidates(settings: Settings) -> Sequence[PurgeCandidate]:
    async with open_store(settings, owner=f"command-{uuid.uuid4()}") as store:
        return await Purger(settings, store.tenants).candidates()


async def _purge(
    settings: Settings, candidates: Sequence[PurgeCandidate], arguments: Namespace
) -> list[dict[str, Any]]:
    actor = actor_of(arguments)
    rows = []
    progress = Progress("removed", len(candidates))
    async with open_store(settings, owner=f"command-{uuid.uuid4()}") as store:
        purger = Purger(settings, store.tenants)
        for candidate in candidates:
            try:
                removed: TenantRemoved = await purger.purge(
                    candidate,
                    actor=actor,
                    reason=arguments.reason,
                    forget_audit=arguments.forget_audit,
                )
            except TenantError as error:
                rows.append(_row(candidate, purged=False, reason=str(error)))
            else:
                rows.append(_row(candidate, purged=True, freed=removed.bytes))
            progress.advance()
    return rows


def _row(
    candidate: PurgeCandidate, *, purged: bool, reason: str | None = None, freed: int | None = None
) -> dict[str, Any]:
    tenant = candidate.tenant
    if tenant is None and reason is None:
        reason = "left behind by an earlier purge"
    days = None
    if tenant is not None and tenant.deleted_at is not None:
        days = int((time.time() - tenant.deleted_at) // _DAY_SECONDS)
    return {
        "identifier": None if tenant is None else tenant.identifier,
        "tenant_id": candidate.tenant_id,
        "deleted_days_ago": days,
        "bytes": candidate.bytes if freed is None else freed,
        "purged": purged,
        "reason": reason,
    }


def _question(candidates: Sequence[PurgeCandidate]) -> str:
    names = ", ".join(c.tenant.identifier if c.tenant else c.tenant_id for c in candidates[:5])
    more = f" and {len(candidates) - 5} more" if len(candidates) > 5 else ""
    return f"remove {names}{more} for ever?"
