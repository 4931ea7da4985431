"""``tenant import`` and ``tenant export``: many tenants at once, from a file and into one."""

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from typing import Any

import trio

from ..config import StorageBackend
from ..errors import EXIT_FAILURE, StorageError, TenantError
from ..storage.tenant_records import Tenant, TenantStatus
from ..tenants import TenantService
from .file_reader import read_bytes
from .printer import Progress, print_json, print_rows, say
from .settings_reader import load
from .store_opener import why_unreachable
from .tenant_access import actor_of, run_with_tenants
from .tenant_exchange import Step, csv_of, plan, read_tenants
from .tenant_rows import listed
from .tenant_sources import holders_of, say_shared

COLUMNS = ("row", "identifier", "verdict", "changes", "reason")


def export_tenants(arguments: Namespace) -> int:
    """Print every tenant, or those of a status, as CSV or JSON that ``tenant import`` reads."""
    status = TenantStatus(arguments.status) if arguments.status else None
    tenants = run_with_tenants(arguments, lambda service: service.all(status=status))
    if arguments.format == "json":
        print_json([listed(tenant) for tenant in tenants])
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(csv_of(tenants).encode())
    return 0


def import_tenants(arguments: Namespace) -> int:
    """Add and change the tenants of a file, and print the result of each row.

    All rows are examined first, and nothing is imported if one is refused. Then the rows are
    imported one after the other: after an interruption the same file does the rest, because
    finished rows are ``unchanged`` then. Returns 1 if a row was refused or failed.

    Raises:
        UnreadableFileError: the file cannot be read.
        ImportFileError: it is no CSV or JSON of tenants.
        StorageError: the store cannot be opened or written.
    """
    rows = read_tenants(read_bytes(arguments.file))

    async def work(service: TenantService) -> list[Step]:
        tenants = await service.all()
        steps = plan(rows, tenants)
        _say_shared(steps, tenants)
        if arguments.dry_run or any(step.verdict == "refused" for step in steps):
            return steps
        return await _apply(service, steps, arguments)

    if arguments.dry_run and _is_new(arguments):
        steps = plan(rows, ())
    else:
        steps = run_with_tenants(arguments, work, creates=not arguments.dry_run)
    print_rows([_shown(s) for s in steps], COLUMNS, as_json=arguments.format == "json")
    return _summary(steps, dry_run=arguments.dry_run)


def _is_new(arguments: Namespace) -> bool:
    settings = load(arguments)
    sqlite = settings.storage.backend is StorageBackend.SQLITE
    return sqlite and why_unreachable(settings) is not None


async def _apply(service: TenantService, steps: Sequence[Step], arguments: Namespace) -> list[Step]:
    await trio.lowlevel.checkpoint()
    done: list[Step] = []
    progress = Progress("imported", len(steps))
    for step in steps:
        try:
            await _do(service, step, arguments)
        except TenantError as error:  # another process has changed it since it was examined
            done.append(Step(step.row, "failed", step.changes, str(error)))
        except StorageError:
            say(f"{len(done)} of {len(steps)} rows were done; the same file again continues")
            raise
        else:
            done.append(step)
        progress.advance()
    return done


async def _do(service: TenantService, step: Step, arguments: Namespace) -> None:
    """Create a tenant, or change its differing fields; each kind of change has an audit row."""
    who: dict[str, Any] = {"reason": arguments.reason, "actor": actor_of(arguments)}
    tenant, after = step.before, step.after
    await trio.lowlevel.checkpoint()
    if after is None or step.verdict == "unchanged":
        return
    contact: dict[str, Any] = {
        "site_manager_email": after.site_manager_email,
        "site_manager_email_verified": after.site_manager_email_verified,
        "site_manager_phone": after.site_manager_phone,
    }
    if tenant is None:
        await service.add(
            after.identifier,
            name=after.name,
            organization_id=after.organization_id,
            credentials=after.credentials,
            **contact,
            **who,
        )
        return
    if not {"name", "organization_id"}.isdisjoint(step.changes):
        names: dict[str, Any] = {"name": after.name, "organization_id": after.organization_id}
        tenant = await service.change(tenant, **names, **who, expected_version=tenant.version)
    if not contact.keys().isdisjoint(step.changes):
        tenant = await service.change_contact(
            tenant, **contact, **who, expected_version=tenant.version
        )
    if "credentials" in step.changes:
        await service.set_credentials(
            tenant, after.credentials, **who, expected_version=tenant.version
        )


def _say_shared(steps: Sequence[Step], tenants: Sequence[Tenant]) -> None:
    """Warn of sources that two tenants name once the file is imported."""
    final = {tenant.identifier: tenant for tenant in tenants}
    imported = [step.after for step in steps if step.after is not None]
    final |= {tenant.identifier: tenant for tenant in imported}
    named = Counter(s for tenant in final.values() for s in set(tenant.credentials.sources))
    shared = {source for source, times in named.items() if times > 1}
    for tenant in imported:
        own = shared.intersection(tenant.credentials.sources)
        if own:
            others = [other for other in final.values() if other.identifier != tenant.identifier]
            say_shared(tenant, holders_of(own, others, but="-"))


def _shown(step: Step) -> dict[str, Any]:
    return {
        "row": step.row.number,
        "identifier": step.row.identifier,
        "verdict": step.verdict,
        "changes": ", ".join(step.changes) or None,
        "reason": step.reason,
    }


def _summary(steps: Sequence[Step], *, dry_run: bool) -> int:
    counts = Counter(step.verdict for step in steps)
    told = ", ".join(f"{verdict}: {counts[verdict]}" for verdict in sorted(counts)) or "no rows"
    if dry_run:
        say(f"{told}; nothing was changed (--dry-run)")
    elif counts["refused"]:
        say(f"{told}; nothing was changed: mend what was refused, and import the file again")
    elif counts["failed"]:
        say(f"{told}; the same file again does what is left")
    else:
        say(told)
    return EXIT_FAILURE if counts["refused"] or counts["failed"] else 0
