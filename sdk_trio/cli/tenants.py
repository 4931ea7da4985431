"""``tenant list|show|add|contact|suspend|reactivate|deactivate|delete|audit`` (contracts 9)."""

import getpass
import os
import uuid
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import trio

from ..config import Settings, StorageBackend
from ..errors import EXIT_FAILURE, StoreUnavailableError, UnknownTenantError
from ..storage import open_store
from ..storage.tenant_credentials import source_to_text
from ..storage.tenant_records import (
    AuditRecord,
    EnvironmentVariable,
    KeyFile,
    Tenant,
    TenantCredentials,
    TenantStatus,
)
from ..tenants import TenantService, TransitionResult
from .moments import moment_text, parse_count
from .printer import Row, cell, print_json, print_rows, print_text, say
from .questioner import confirmed
from .settings_reader import load
from .store_opener import why_unreachable
from .tenant_contact import changes_contact, contact_after
from .tenant_rows import AUDIT_COLUMNS, LIST_COLUMNS, audit_row, audited, listed, table_row
from .usage import UsageError

T = TypeVar("T")

#: Rows that are read at once.
PAGE = 500

RESULT_COLUMNS = ("identifier", "transition", "previous_status", "new_status", "no_op", "occurred")


def list_tenants(arguments: Namespace) -> int:
    """Print the tenants by identifier, all of them or those of one status."""
    limit = None if arguments.limit is None else parse_count(arguments.limit, option="--limit")
    status = TenantStatus(arguments.status) if arguments.status else None
    tenants = _run(arguments, lambda service: _all_tenants(service, status, limit))
    as_json = arguments.format == "json"
    print_rows(
        [listed(t) if as_json else table_row(t) for t in tenants], LIST_COLUMNS, as_json=as_json
    )
    if not tenants:
        say("no tenants")
    return 0


async def _all_tenants(
    service: TenantService, status: TenantStatus | None, limit: int | None
) -> list[Tenant]:
    found: list[Tenant] = []
    while True:
        wanted = PAGE if limit is None else min(PAGE, limit - len(found))
        after = found[-1].identifier if found else ""
        page = await service.list(status=status, after=after, limit=wanted)
        found += page
        if len(page) < wanted or len(found) == limit:
            return found


def find_tenant(arguments: Namespace, identifier: str) -> Tenant:
    """Return the tenant of an identifier or id, out of the configured store.

    Raises:
        UnknownTenantError: there is none.
    """
    return _run(arguments, lambda service: service.get(identifier))


def show_tenant(arguments: Namespace) -> int:
    """Print one tenant.

    Raises:
        UnknownTenantError: there is none.
    """
    tenant = find_tenant(arguments, arguments.identifier)
    if arguments.format == "json":
        print_json(listed(tenant))
    else:
        path = load(arguments).webhooks.path
        if tenant.credentials.webhook_secrets:
            path = f"{path.rstrip('/')}/{tenant.identifier} (for senders with its own secrets)"
        else:
            path += " (the host's, with the host's secret: it has no webhook secrets of its own)"
        _print_tenant(tenant, path=path)
    return 0


def _print_tenant(tenant: Tenant, *, path: str | None = None) -> None:
    credentials = tenant.credentials
    token = credentials.access_token
    fields = {
        "identifier": tenant.identifier,
        "name": tenant.name,
        "status": tenant.status,
        "id": tenant.id,
        "organization id": tenant.organization_id,
        "site manager email": tenant.site_manager_email,
        "email verified": tenant.site_manager_email_verified,
        "site manager phone": tenant.site_manager_phone,
        "created": moment_text(tenant.created_at),
        "deleted": moment_text(tenant.deleted_at),
        "version": tenant.version,
        "access token": None if token is None else source_to_text(token),
        "webhook secrets": ", ".join(map(source_to_text, credentials.webhook_secrets)) or None,
        "webhook path": path,
    }
    width = max(map(len, fields))
    for name, value in fields.items():
        if value is not None:
            print_text(f"{name.ljust(width)}  {cell(value)}")


def add(arguments: Namespace) -> int:
    """Add a tenant; the store is created if there is none yet.

    Raises:
        InvalidTenantError: a value cannot be accepted; nothing was changed.
        TenantExistsError: the identifier or the organization is another tenant's.
    """

    async def create(service: TenantService) -> Tenant:
        return await service.add(
            arguments.identifier,
            name=arguments.name,
            site_manager_email=arguments.email,
            site_manager_email_verified=arguments.email_verified,
            site_manager_phone=arguments.phone,
            organization_id=arguments.organization_id,
            credentials=_credentials(arguments),
            reason=arguments.reason,
            actor=_actor(arguments),
        )

    tenant = _run(arguments, create, creates=True)
    if arguments.format == "json":
        print_json(listed(tenant))
    else:
        _print_tenant(tenant)
    return 0


def _credentials(arguments: Namespace) -> TenantCredentials:
    token: EnvironmentVariable | KeyFile | None = None
    if arguments.access_token_env is not None:
        token = EnvironmentVariable(arguments.access_token_env)
    elif arguments.access_token_file is not None:
        token = KeyFile(os.path.abspath(arguments.access_token_file))
    return TenantCredentials(
        access_token=token,
        webhook_secrets=(
            *map(EnvironmentVariable, arguments.webhook_secret_env),
            *(KeyFile(os.path.abspath(path)) for path in arguments.webhook_secret_file),
        ),
    )


def change_contact(arguments: Namespace) -> int:
    """Change what is known of a tenant's site manager; what is not named stays as it is.

    Raises:
        UsageError: nothing is named, or an address is verified that there is not.
        InvalidTenantError: a value cannot be accepted; nothing was changed.
        TenantError: there is no such tenant, or somebody else has changed it at the same time.
    """
    if not changes_contact(arguments):
        raise UsageError(
            "say what changes: --email or --no-email, --email-verified or --email-not-verified, "
            "--phone or --no-phone"
        )

    async def change(service: TenantService) -> tuple[Tenant, bool]:
        before = await service.get(arguments.identifier)
        after = await service.change_contact(
            before,
            **contact_after(before, arguments),
            reason=arguments.reason,
            actor=_actor(arguments),
            expected_version=before.version,
        )
        return after, after.version != before.version

    tenant, changed = _run(arguments, change)
    if arguments.format == "json":
        print_json(listed(tenant))
    else:
        _print_tenant(tenant)
    if not changed:
        say("it was so already: nothing was changed")
    return 0


def suspend(arguments: Namespace) -> int:
    """Suspend an active tenant.

    Raises:
        SuspensionRefusedError: its site manager's email is not verified, and nothing relaxes that.
        TenantError: there is no such tenant, or its status does not allow it.
    """
    return _change(
        arguments,
        lambda service: service.suspend(
            arguments.identifier,
            reason=arguments.reason,
            actor=_actor(arguments),
            bypass_email_verification=arguments.bypass_email_verification,
        ),
    )


def reactivate(arguments: Namespace) -> int:
    """Make a tenant active again; raises TenantError as :func:`suspend` does."""
    return _change(
        arguments,
        lambda service: service.reactivate(
            arguments.identifier, reason=arguments.reason, actor=_actor(arguments)
        ),
    )


def deactivate(arguments: Namespace) -> int:
    """Deactivate a tenant; raises TenantError as :func:`suspend` does."""
    return _change(
        arguments,
        lambda service: service.deactivate(
            arguments.identifier, reason=arguments.reason, actor=_actor(arguments)
        ),
    )


def delete(arguments: Namespace) -> int:
    """Delete a tenant softly, after asking; raises TenantError as :func:`suspend` does."""
    name = cell(arguments.identifier)
    kept = f"the tenant {name} can be reactivated until its retention has passed"
    if not (arguments.yes or confirmed(f"{kept}; delete it?")):
        say("nothing was changed")
        return EXIT_FAILURE
    return _change(
        arguments,
        lambda service: service.delete(
            arguments.identifier, reason=arguments.reason, actor=_actor(arguments)
        ),
    )


def _change(
    arguments: Namespace, change: Callable[[TenantService], Awaitable[TransitionResult]]
) -> int:
    result = _run(arguments, change)
    row = {
        "identifier": result.tenant.identifier,
        "transition": result.transition,
        "previous_status": result.previous_status,
        "new_status": result.new_status,
        "no_op": result.no_op,
        "occurred_at": result.occurred_at,
        "relaxation": result.relaxation,
    }
    if arguments.format == "json":
        print_json(row)
    else:
        shown = {**row, "occurred": moment_text(result.occurred_at)}
        print_rows([shown], RESULT_COLUMNS, as_json=False)
    if result.no_op:
        say(f"the tenant was {result.new_status} already: nothing was changed")
    elif result.relaxation:
        say(f"possible because of {result.relaxation}")
    return 0


def audit(arguments: Namespace) -> int:
    """Print the audit trail, oldest first: of one tenant, purged ones included, or of all.

    Raises:
        UnknownTenantError: the trail has never heard of this tenant.
    """
    records = _run(arguments, lambda service: _trail(service, arguments.identifier))
    as_json = arguments.format == "json"
    rows: Sequence[Row] = [audited(r) if as_json else audit_row(r) for r in records]
    print_rows(rows, AUDIT_COLUMNS, as_json=as_json)
    if not records:
        say("the audit trail is empty")
    return 0


async def _trail(service: TenantService, key: str | None) -> list[AuditRecord]:
    if key is None:
        return await _all_audit_rows(service, None)
    unknown: UnknownTenantError | None = None
    try:
        return await _all_audit_rows(service, (await service.get(key)).id)
    except UnknownTenantError as error:
        unknown = error
    # A purged tenant is only in the trail.
    rows = await _all_audit_rows(service, None)
    found = [row for row in rows if key in (row.tenant_id, row.tenant_identifier)]
    if not found:
        raise unknown
    return found


async def _all_audit_rows(service: TenantService, tenant_id: str | None) -> list[AuditRecord]:
    found: list[AuditRecord] = []
    while True:
        after = found[-1].sequence if found else 0
        page = await service.audit(tenant_id, after_sequence=after, limit=PAGE)
        found += page
        if len(page) < PAGE:
            return found


def _actor(arguments: Namespace) -> str:
    """Return who asks: ``--actor``, or the user of the machine."""
    if arguments.actor is not None:
        return str(arguments.actor)
    try:
        return f"cli:{getpass.getuser()}"
    except (KeyError, OSError):  # a user id without a name, as in containers
        return f"cli:{os.getuid()}" if hasattr(os, "getuid") else "cli"


def _run(
    arguments: Namespace,
    use: Callable[[TenantService], Awaitable[T]],
    *,
    creates: bool = False,
) -> T:
    settings = load(arguments)
    if creates and not settings.multi_tenant.enabled:
        say("note: Sdk:MultiTenant:Enabled is false, so a runtime takes no notice of tenants")

    async def work() -> T:
        async with _tenants(settings, creates=creates) as service:
            return await use(service)

    return trio.run(work)


@asynccontextmanager
async def _tenants(settings: Settings, *, creates: bool) -> AsyncIterator[TenantService]:
    """Open the tenants, beside a daemon or without one.

    Raises:
        StorageError: the store cannot be opened, or there is none and ``creates`` is false.
    """
    missing = why_unreachable(settings)
    in_memory = settings.storage.backend is StorageBackend.MEMORY
    if missing is not None and (in_memory or not creates):
        raise StoreUnavailableError(missing)
    async with open_store(settings, owner=f"command-{uuid.uuid4()}") as store:
        yield TenantService(settings, store.tenants)
