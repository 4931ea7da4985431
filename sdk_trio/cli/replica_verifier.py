"""``replication verify``: proves that replicas can be restored."""

import uuid
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from ..base import logs
from ..errors import EXIT_FAILURE
from ..replication.verification import Verification
from ..replication.verification_keeper import VerificationKeeper
from ..replication.verifier import Verifier
from ..storage import open_store
from ..tenants.service import TenantService
from .moments import moment_text
from .printer import Progress, Row, print_rows, say
from .replica_chooser import open_reader, run_until_signal
from .settings_reader import load
from .upgrade import require_tenants

COLUMNS = ("tenant", "result", "content", "as_of", "txid", "bytes", "seconds", "reason")


def verify(arguments: Namespace) -> int:
    """Verify one tenant's replica or those of all active tenants; return 1 if one is damaged.

    Raises:
        TenantsDisabledError: there are no tenants.
        UnknownTenantError: there is no such tenant.
        StoreLockedError: another verification runs.
        ReplicatorError: there is no binary.
    """
    settings = load(arguments)
    require_tenants(settings)
    reader = open_reader(settings)
    logs.configure(level="Error", format=settings.logging.format)

    async def work() -> Sequence[Verification]:
        async with open_store(settings, owner=f"command-{uuid.uuid4()}") as store:
            keeper = VerificationKeeper(Verifier(settings, reader), store.inbox)
            tenants = TenantService(settings, store.tenants)
            if arguments.tenant is not None:
                tenant = await tenants.get(arguments.tenant)
                return [await keeper.verify_one(tenant, accept_loss=arguments.accept_loss)]
            return await keeper.verify_active(
                tenants, accept_loss=arguments.accept_loss, report=_progress()
            )

    status, results = run_until_signal(work)
    if results is None:
        return status
    as_json = arguments.format == "json"
    rows = [_document(each) if as_json else _row(each) for each in results]
    print_rows(rows, COLUMNS, as_json=as_json)
    failed = sum(not each.ok for each in results)
    say(f"{failed} of {len(results)} replicas are not good" if failed else _praise(results))
    return EXIT_FAILURE if failed else 0


def _praise(results: Sequence[Verification]) -> str:
    if not results:
        return "no active tenant"
    skipped = sum(each.skipped is not None for each in results)
    left = f", {skipped} without a database yet" if skipped else ""
    return f"{len(results) - skipped} verified{left}"


def _progress() -> Any:
    shown: list[Progress] = []

    def report(_result: Verification, _done: int, total: int) -> None:
        if not shown:
            shown.append(Progress("verified", total, quiet_below=2))
        shown[0].advance()

    return report


def _document(result: Verification) -> Row:
    return {
        "tenant": result.identifier,
        "tenant_id": result.tenant_id,
        "ok": result.ok,
        "problem": result.problem,
        "skipped": result.skipped,
        "content": str(result.content),
        "txid": result.txid,
        "as_of": result.as_of,
        "begins_at": result.begins_at,
        "bytes": result.bytes,
        "seconds": result.seconds,
        "verified_at": result.verified_at,
    }


def _row(result: Verification) -> Row:
    word = "skipped" if result.skipped else "good"
    return {
        **_document(result),
        "result": word if result.ok else "FAILED",
        "as_of": moment_text(result.as_of),
        "reason": result.problem or result.skipped,
    }
