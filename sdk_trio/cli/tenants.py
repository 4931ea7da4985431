"""``tenant``: tenants, their transitions and their audit trail.

JSON has the names of the records' attributes; it is a stable contract.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypedDict

import attrs

from ..errors import EXIT_FAILURE, UnknownTenantError
from ..records.states import TenantStatus
from .parse import (
    UsageError,
    add_bypass,
    add_format,
    add_identifier,
    add_secret_sources,
    add_token,
    add_who_and_why,
    describing,
    moment_text,
    parse_count,
)

if not describing():
    from ..records.tenants import AuditRecord, Tenant, TenantCredentials, source_to_text
    from ..tenants import TenantService, TransitionResult
    from ..tenants.service import PAGE, UNCHANGED
    from .settings import load
    from .store import actor_of, run_with_tenants, tenant_path
    from .tenant_credentials import named_credentials, warn_of_shared_sources
    from .terminal import Row, cell, confirmed, print_json, print_rows, print_text, say

#: The columns of ``tenant list``.
LIST_COLUMNS = (
    "identifier",
    "name",
    "status",
    "organization_id",
    "site_manager_email",
    "email_verified",
    "created",
)

#: The columns of ``tenant audit``.
AUDIT_COLUMNS = (
    "sequence",
    "occurred",
    "tenant_identifier",
    "action",
    "previous_status",
    "new_status",
    "actor",
    "relaxation",
    "reason",
    "details",
)


def listed(tenant: Tenant) -> dict[str, Any]:
    """Return every attribute; credentials as their sources, ``env:NAME`` or ``file:PATH``."""
    credentials = tenant.credentials
    token = credentials.access_token
    return {
        **attrs.asdict(tenant, recurse=False),
        "credentials": {
            "access_token": None if token is None else source_to_text(token),
            "webhook_secrets": [source_to_text(source) for source in credentials.webhook_secrets],
        },
    }


def table_row(tenant: Tenant) -> dict[str, Any]:
    """Return the cells of ``LIST_COLUMNS``."""
    return {
        **listed(tenant),
        "email_verified": tenant.site_manager_email_verified,
        "created": moment_text(tenant.created_at),
    }


def mentions(tenant: Tenant, text: str | None) -> bool:
    """Return whether a tenant has ``text`` in a name, an id or an address, in any case."""
    fields = (
        tenant.identifier,
        tenant.name,
        tenant.id,
        tenant.organization_id,
        tenant.site_manager_email,
        tenant.site_manager_phone,
    )
    return _any_holds(fields, text)


def audit_mentions(record: AuditRecord, status: str | None, text: str | None) -> bool:
    """Return whether an audit row led to ``status``, and has ``text`` in one of its fields."""
    fields = (
        record.tenant_identifier,
        record.tenant_id,
        record.action,
        record.actor,
        record.reason,
        record.relaxation,
        record.details,
    )
    return status in (None, record.new_status) and _any_holds(fields, text)


def _any_holds(fields: Iterable[str | None], text: str | None) -> bool:
    # casefold, because names are of every language.
    return text is None or any(text.casefold() in field.casefold() for field in fields if field)


def audited(record: AuditRecord) -> dict[str, Any]:
    """Return every attribute of an audit row."""
    return attrs.asdict(record)


def audit_row(record: AuditRecord) -> dict[str, Any]:
    """Return the cells of ``AUDIT_COLUMNS``."""
    return {**audited(record), "occurred": moment_text(record.occurred_at)}


class Contact(TypedDict):
    """The arguments of :meth:`sdk_trio.tenants.TenantService.change_contact`."""

    site_manager_email: str | None
    site_manager_email_verified: bool
    site_manager_phone: str | None


def changes_contact(arguments: Namespace) -> bool:
    """Return whether any option changes the contact."""
    return (
        arguments.email is not None
        or arguments.email_verified is not None
        or arguments.phone is not None
        or arguments.no_email
        or arguments.no_phone
    )


def contact_after(tenant: Tenant, arguments: Namespace) -> Contact:
    """Return the contact of ``tenant`` with the options' values.

    A new address counts as not verified, unless the options say otherwise.

    Raises:
        UsageError: an option verifies an address, and there is none.
    """
    email = _after(tenant.site_manager_email, arguments.email, gone=arguments.no_email)
    verified = arguments.email_verified
    if verified is None:
        # Whoever changes an address has not verified the new one: a stranger would get the tenant's
        # messages.
        verified = tenant.site_manager_email_verified and email == tenant.site_manager_email
    # Nothing would be verified, and an address that is added later would count as if it were.
    elif verified and email is None:
        raise UsageError("--email-verified: there is no address; name one with --email")
    return Contact(
        site_manager_email=email,
        site_manager_email_verified=verified,
        site_manager_phone=_after(
            tenant.site_manager_phone, arguments.phone, gone=arguments.no_phone
        ),
    )


def _after(before: str | None, named: str | None, *, gone: bool) -> str | None:
    if gone:
        return None
    return before if named is None else named


RESULT_COLUMNS = ("identifier", "transition", "previous_status", "new_status", "no_op", "occurred")


def list_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``tenant list``."""
    parser.add_argument(
        "--status", choices=[status.value for status in TenantStatus], help="only this status"
    )
    parser.add_argument(
        "--search", metavar="TEXT", help="only those with it in a name, an id or an address"
    )
    parser.add_argument("--limit", metavar="N", help="at most this many (default: all)")
    parser.add_argument(
        "--after", metavar="IDENTIFIER", default="", help="only those that come after this one"
    )
    add_format(parser)


def list_tenants(arguments: Namespace) -> int:
    """Print the tenants by identifier: all of them, or those that match every option."""
    limit = None if arguments.limit is None else parse_count(arguments.limit, option="--limit")
    tenants = run_with_tenants(arguments, lambda service: _chosen(service, arguments, limit))
    as_json = arguments.format == "json"
    print_rows(
        [listed(t) if as_json else table_row(t) for t in tenants], LIST_COLUMNS, as_json=as_json
    )
    if not tenants:
        say("no tenants")
    elif len(tenants) == limit:
        say(f"there may be more: --after {tenants[-1].identifier}")
    return 0


async def _chosen(service: TenantService, arguments: Namespace, limit: int | None) -> list[Tenant]:
    status = TenantStatus(arguments.status) if arguments.status else None
    found: list[Tenant] = []
    after = arguments.after
    while True:
        page = await service.list(status=status, after=after, limit=PAGE)
        # The store knows only status and order; there are few enough tenants to search the rest
        # here.
        found += [tenant for tenant in page if mentions(tenant, arguments.search)]
        if len(page) < PAGE or (limit is not None and len(found) >= limit):
            return found[:limit]
        after = page[-1].identifier


def find_tenant(arguments: Namespace, identifier: str) -> Tenant:
    """Return the tenant of an identifier or id, out of the configured store.

    Raises:
        UnknownTenantError: there is none.
    """
    return run_with_tenants(arguments, lambda service: service.get(identifier))


def show_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``tenant show``."""
    add_identifier(parser)
    add_format(parser)


def show_tenant(arguments: Namespace) -> int:
    """Print one tenant.

    Raises:
        UnknownTenantError: there is none.
    """
    _tell(arguments, find_tenant(arguments, arguments.identifier))
    return 0


def _tell(arguments: Namespace, tenant: Tenant) -> None:
    """Print one tenant, with the path that its senders post to."""
    host = load(arguments).webhooks.path
    # The own address is of use to own secrets alone: at it, the host's signature does not count.
    own = tenant_path(host, tenant.identifier) if tenant.credentials.webhook_secrets else None
    if arguments.format == "json":
        print_json({**listed(tenant), "webhook_path": own or host, "own_webhook_path": bool(own)})
    elif own is not None:
        _print_tenant(tenant, path=f"{own} (for senders with its own secrets)")
    else:
        why = "the host's, with the host's secret: it has no webhook secrets of its own"
        _print_tenant(tenant, path=f"{host} ({why})")


def _print_tenant(tenant: Tenant, *, path: str) -> None:
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


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``tenant add``."""
    parser.add_argument(
        "identifier", metavar="IDENTIFIER", help="lowercase letters, digits and hyphens, 1 to 64"
    )
    parser.add_argument("--name", metavar="N", required=True, help="the name for people")
    parser.add_argument("--email", metavar="E", help="the site manager's email address")
    parser.add_argument("--email-verified", action="store_true", help="the address is verified")
    parser.add_argument("--phone", metavar="P", help="the site manager's phone, as +15551234567")
    parser.add_argument(
        "--organization-id", metavar="O", help="the upstream's organization whose events it gets"
    )
    add_token(parser)
    add_secret_sources(parser)
    add_who_and_why(parser)
    add_format(parser)


def add(arguments: Namespace) -> int:
    """Add a tenant; the store is created if there is none yet.

    Raises:
        UsageError: an address is verified that there is not.
        InvalidTenantError: a value cannot be accepted; nothing was changed.
        TenantCredentialsError: a file that is named does not exist; nothing was made.
        TenantExistsError: the identifier or the organization is another tenant's.
    """
    if arguments.email_verified and arguments.email is None:
        raise UsageError("--email-verified: there is no address; name one with --email")
    # Before a store is opened, and maybe made.
    credentials = named_credentials(arguments, TenantCredentials())

    async def create(service: TenantService) -> Tenant:
        tenant = await service.add(
            arguments.identifier,
            name=arguments.name,
            site_manager_email=arguments.email,
            site_manager_email_verified=arguments.email_verified,
            site_manager_phone=arguments.phone,
            organization_id=arguments.organization_id,
            credentials=credentials,
            reason=arguments.reason,
            actor=actor_of(arguments),
        )
        await warn_of_shared_sources(service, tenant)
        return tenant

    tenant = run_with_tenants(arguments, create, creates=True)
    _tell(arguments, tenant)
    return 0


def change_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``tenant change``."""
    add_identifier(parser)
    parser.add_argument("--name", metavar="N", help="the name for people")
    organization = parser.add_mutually_exclusive_group()
    organization.add_argument(
        "--organization-id", metavar="O", help="the upstream's organization whose events it gets"
    )
    organization.add_argument(
        "--no-organization", action="store_true", help="it gets no organization's events any more"
    )
    add_who_and_why(parser)
    add_format(parser)


def change(arguments: Namespace) -> int:
    """Change a tenant's name or organization; fields that are not named stay.

    Raises:
        UsageError: nothing is named.
        InvalidTenantError: a value cannot be accepted; nothing was changed.
        TenantExistsError: the organization is another tenant's.
        TenantError: there is no such tenant, or somebody else has changed it at the same time.
    """
    # UNCHANGED and None differ: None takes the organization away.
    organization = None if arguments.no_organization else arguments.organization_id or UNCHANGED
    if arguments.name is None and organization is UNCHANGED:
        raise UsageError("say what changes: --name, --organization-id or --no-organization")
    # The empty text of an unset shell variable must not take the organization away.
    if arguments.organization_id == "":
        raise UsageError("--organization-id is empty: --no-organization says that there is none")

    async def apply(service: TenantService, before: Tenant) -> Tenant:
        return await service.change(
            before,
            name=arguments.name,
            organization_id=organization,
            reason=arguments.reason,
            actor=actor_of(arguments),
            expected_version=before.version,
        )

    return change_tenant(arguments, apply)


def change_tenant(
    arguments: Namespace, apply: Callable[[TenantService, Tenant], Awaitable[Tenant]]
) -> int:
    """Let ``apply`` change the named tenant, print it, and say if nothing was changed."""

    async def work(service: TenantService) -> tuple[Tenant, bool]:
        before = await service.get(arguments.identifier)
        after = await apply(service, before)
        # The version tells whether anything was written: equal values leave it as it is.
        return after, after.version != before.version

    tenant, changed = run_with_tenants(arguments, work)
    _tell(arguments, tenant)
    if not changed:
        say("it was so already: nothing was changed")
    return 0


def contact_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``tenant contact``."""
    add_identifier(parser)
    email = parser.add_mutually_exclusive_group()
    email.add_argument(
        "--email", metavar="E", help="the site manager's email address; another one is not verified"
    )
    email.add_argument("--no-email", action="store_true", help="there is no address any more")
    verified = parser.add_mutually_exclusive_group()
    verified.add_argument(
        "--email-verified", action="store_true", default=None, help="the address is verified"
    )
    verified.add_argument(
        "--email-not-verified",
        dest="email_verified",
        action="store_false",
        default=None,
        help="the address is not verified",
    )
    phone = parser.add_mutually_exclusive_group()
    phone.add_argument("--phone", metavar="P", help="the site manager's phone, as +15551234567")
    phone.add_argument("--no-phone", action="store_true", help="there is no phone any more")
    add_who_and_why(parser)
    add_format(parser)


def change_contact(arguments: Namespace) -> int:
    """Change the contact data of a tenant's site manager; fields that are not named stay.

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

    async def apply(service: TenantService, before: Tenant) -> Tenant:
        return await service.change_contact(
            before,
            **contact_after(before, arguments),
            reason=arguments.reason,
            actor=actor_of(arguments),
            expected_version=before.version,
        )

    return change_tenant(arguments, apply)


def transition_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of a transition: ``tenant suspend`` and its like."""
    add_identifier(parser)
    add_who_and_why(parser)
    add_bypass(parser)
    add_format(parser)


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
            actor=actor_of(arguments),
            bypass_email_verification=arguments.bypass_email_verification,
        ),
    )


def reactivate(arguments: Namespace) -> int:
    """Make a tenant active again; raises TenantError as :func:`suspend` does."""
    return _change(
        arguments,
        lambda service: service.reactivate(
            arguments.identifier, reason=arguments.reason, actor=actor_of(arguments)
        ),
    )


def deactivate(arguments: Namespace) -> int:
    """Deactivate a tenant; raises TenantError as :func:`suspend` does."""
    return _change(
        arguments,
        lambda service: service.deactivate(
            arguments.identifier, reason=arguments.reason, actor=actor_of(arguments)
        ),
    )


def delete_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``tenant delete``."""
    transition_arguments(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask")


def delete(arguments: Namespace) -> int:
    """Delete a tenant softly, after asking; raises TenantError as :func:`suspend` does."""
    # The question is printed on a terminal, and a mistyped identifier may hold control characters.
    name = cell(arguments.identifier)
    kept = f"the tenant {name} can be reactivated until its retention has passed"
    if not (arguments.yes or confirmed(f"{kept}; delete it?")):
        say("nothing was changed")
        return EXIT_FAILURE
    return _change(
        arguments,
        lambda service: service.delete(
            arguments.identifier, reason=arguments.reason, actor=actor_of(arguments)
        ),
    )


def _change(
    arguments: Namespace, change: Callable[[TenantService], Awaitable[TransitionResult]]
) -> int:
    result = run_with_tenants(arguments, change)
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


def audit_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``tenant audit``."""
    parser.add_argument(
        "identifier", metavar="IDENTIFIER", nargs="?", help="only this tenant, or its id"
    )
    parser.add_argument(
        "--status",
        choices=[status.value for status in TenantStatus],
        help="only what led to this status, or stayed there",
    )
    parser.add_argument(
        "--search", metavar="TEXT", help="only rows with it in who, what, why or whom"
    )
    parser.add_argument("--limit", metavar="N", help="at most this many (default: all)")
    parser.add_argument("--after", metavar="SEQUENCE", help="only rows after this one")
    add_format(parser)


def audit(arguments: Namespace) -> int:
    """Print the audit trail, oldest first: of one tenant, purged ones included, or of all.

    Raises:
        UnknownTenantError: the audit trail does not name this tenant.
    """
    limit = None if arguments.limit is None else parse_count(arguments.limit, option="--limit")
    after = 0 if arguments.after is None else parse_count(arguments.after, option="--after")
    records = run_with_tenants(arguments, lambda service: _trail(service, arguments, after, limit))
    as_json = arguments.format == "json"
    rows: Sequence[Row] = [audited(r) if as_json else audit_row(r) for r in records]
    print_rows(rows, AUDIT_COLUMNS, as_json=as_json)
    if not records:
        say("the audit trail has nothing of that" if after else "the audit trail is empty")
    elif len(records) == limit:
        say(f"there may be more: --after {records[-1].sequence}")
    return 0


async def _trail(
    service: TenantService, arguments: Namespace, after: int, limit: int | None
) -> list[AuditRecord]:
    key = arguments.identifier
    tenant_id: str | None = None
    unknown: UnknownTenantError | None = None
    if key is not None:
        try:
            tenant_id = (await service.get(key)).id
        except UnknownTenantError as error:
            unknown = error  # a purged tenant is only in the trail
    found: list[AuditRecord] = []
    heard = unknown is None
    while True:
        page = await service.audit(tenant_id, after_sequence=after, limit=PAGE)
        # Purged tenants have no id to ask by, so the whole trail is read and compared.
        rows = page if unknown is None else [row for row in page if _is_of(row, key)]
        # A filter may leave nothing of a tenant that the trail knows: only one that it never names
        # is an error.
        heard = heard or bool(rows)
        found += [row for row in rows if audit_mentions(row, arguments.status, arguments.search)]
        if len(page) < PAGE or (limit is not None and len(found) >= limit):
            break
        after = page[-1].sequence
    if unknown is not None and not heard:
        raise unknown
    return found[:limit]


def _is_of(record: AuditRecord, key: str) -> bool:
    return key in (record.tenant_id, record.tenant_identifier)
