"""``tenant``: tenants, their transitions and their audit trail.

JSON has the names of the records' attributes; it is a stable contract.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from ..errors import EXIT_FAILURE, UnknownTenantError
from ..records.states import TenantStatus
from .parse import (
    UsageError,
    add_bypass,
    add_format,
    add_identifier,
    add_limit,
    add_number,
    add_reason_and_actor,
    add_sources,
    add_status,
    describing,
)

if not describing():
    from ..records.tenants import AuditRecord, Tenant, TenantCredentials, source_to_text
    from ..tenants import TenantService, TransitionResult
    from ..tenants.service import PAGE
    from .settings import load
    from .store import actor_of, run_with_tenants, tenant_path
    from .tenant_credentials import (
        check_sources,
        credentials_after,
        named_secrets,
        named_token,
        note_shared,
        print_sources,
    )
    from .terminal import (
        cell,
        confirmed,
        print_fields,
        print_json,
        print_list,
        print_rows,
        print_text,
        say,
    )

if TYPE_CHECKING:
    from ..tenants.service import TenantChanges

#: The columns of ``tenant list``.
LIST_COLUMNS = (
    "identifier",
    "name",
    "status",
    "organization_id",
    "site_manager_email",
    ("email_verified", "site_manager_email_verified"),
    "created_at",
)

#: The columns of ``tenant audit``.
AUDIT_COLUMNS = (
    "sequence",
    "occurred_at",
    "tenant_identifier",
    "action",
    "previous_status",
    "new_status",
    "actor",
    "relaxation",
    "reason",
    "details",
)

RESULT_COLUMNS = (
    "identifier",
    "transition",
    "previous_status",
    "new_status",
    "no_op",
    "occurred_at",
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


#: The fields that ``--search`` matches, of tenants and of audit rows.
_SEARCHED = (
    "identifier",
    "name",
    "id",
    "organization_id",
    "site_manager_email",
    "site_manager_phone",
)
_AUDIT_SEARCHED = (
    "tenant_identifier",
    "tenant_id",
    "action",
    "actor",
    "reason",
    "relaxation",
    "details",
)


def _mentions(record: Tenant | AuditRecord, fields: Sequence[str], text: str | None) -> bool:
    """Return whether one of the fields contains ``text``, ignoring case; True for None."""
    values = (getattr(record, field) for field in fields)
    # casefold, because names are of every language.
    return text is None or any(text.casefold() in value.casefold() for value in values if value)


def list_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``tenant list``."""
    add_status(parser, "only this status")
    parser.add_argument(
        "--search", metavar="TEXT", help="only tenants with TEXT in a name, an id or an address"
    )
    add_limit(parser, default=None)
    parser.add_argument(
        "--after", metavar="IDENTIFIER", default="", help="only tenants after this identifier"
    )
    add_format(parser)


def list_tenants(arguments: Namespace) -> int:
    """Print the tenants by identifier: all of them, or those that match every option."""
    limit: int | None = arguments.limit
    tenants = run_with_tenants(arguments, lambda service: _chosen(service, arguments))
    more = f"--after {tenants[limit - 1].identifier}" if limit and len(tenants) > limit else ""
    rows = [listed(tenant) for tenant in tenants]
    print_list(arguments, rows, LIST_COLUMNS, nothing="no tenants", limit=limit, more=more)
    return 0


async def _chosen(service: TenantService, arguments: Namespace) -> list[Tenant]:
    """Return the tenants that match every option, one more than ``--limit`` if there are more."""
    status = TenantStatus(arguments.status) if arguments.status else None
    found: list[Tenant] = []
    after = arguments.after
    while True:
        page = await service.list(status=status, after=after, limit=PAGE)
        # The store knows only status and order; there are few enough tenants to search the rest
        # here.
        found += [tenant for tenant in page if _mentions(tenant, _SEARCHED, arguments.search)]
        if len(page) < PAGE or (arguments.limit and len(found) > arguments.limit):
            return found
        after = page[-1].identifier


def find_tenant(arguments: Namespace, identifier: str) -> Tenant:
    """Return the tenant of an identifier or id, from the configured store.

    Raises:
        UnknownTenantError: there is no such tenant.
    """
    return run_with_tenants(arguments, lambda service: service.get(identifier))


def show_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``tenant show``."""
    add_identifier(parser)
    add_format(parser)


def show_tenant(arguments: Namespace) -> int:
    """Print one tenant, and whether its own credentials are found.

    Raises:
        UnknownTenantError: there is no such tenant.
    """
    _print_result(arguments, lambda service: service.get(arguments.identifier))
    return 0


def _print_result(
    arguments: Namespace,
    use: Callable[[TenantService], Awaitable[Tenant]],
    *,
    creates: bool = False,
) -> Tenant:
    """Print the tenant that ``use`` returns, its credentials, and its own path."""

    async def work(service: TenantService) -> tuple[Tenant, list[dict[str, Any]]]:
        tenant = await use(service)
        holders = await service.holders(tenant.credentials.sources, but=tenant)
        note_shared(tenant, holders)
        return tenant, await check_sources(tenant, holders)

    tenant, sources = run_with_tenants(arguments, work, creates=creates)
    host = load(arguments).webhooks.path
    # The tenant's own address is only for its own secrets: the host's signature does not count
    # there.
    own = tenant_path(host, tenant.identifier) if tenant.credentials.webhook_secrets else None
    if arguments.format == "json":
        path = {"webhook_path": own or host, "own_webhook_path": bool(own)}
        print_json({**listed(tenant), **path, "sources": sources})
        return tenant
    why = "the host's, with the host's secret: it has no own webhook secrets"
    fields = attrs.asdict(tenant, recurse=False)
    del fields["credentials"]
    path_text = f"{own} (for senders with its own secrets)" if own else f"{host} ({why})"
    print_fields({**fields, "webhook_path": path_text})
    if sources:
        print_text("\ncredentials")
    print_sources(sources)
    return tenant


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
    add_sources(parser)
    add_reason_and_actor(parser)
    add_format(parser)


def add(arguments: Namespace) -> int:
    """Add a tenant; the store is created if there is none yet.

    Raises:
        UsageError: ``--email-verified`` without an address.
        InvalidTenantError: a value cannot be accepted; nothing was changed.
        TenantCredentialsError: a named file does not exist; nothing was created.
        TenantExistsError: the identifier or the organization is another tenant's.
    """
    if arguments.email_verified and arguments.email is None:
        raise UsageError("--email-verified: there is no address; name one with --email")
    # Before a store is opened, and perhaps created.
    credentials = TenantCredentials(
        access_token=named_token(arguments), webhook_secrets=named_secrets(arguments)
    )

    async def create(service: TenantService) -> Tenant:
        return await service.add(
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

    _print_result(arguments, create, creates=True)
    return 0


#: The fields that ``tenant set`` replaces, by the option that gives a value, and the one that
#: removes it.
_FIELDS = (
    ("name", "name", None),
    ("organization_id", "organization_id", "no_organization"),
    ("site_manager_email", "email", "no_email"),
    ("site_manager_phone", "phone", "no_phone"),
)

#: The options of ``tenant set`` that name, keep or remove sources of credentials.
_SOURCE_OPTIONS = (
    "access_token_env",
    "access_token_file",
    "no_access_token",
    "webhook_secret_env",
    "webhook_secret_file",
    "keep_webhook_secrets",
    "remove_webhook_secret",
    "no_webhook_secrets",
)


def set_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``tenant set``."""
    add_identifier(parser)
    parser.add_argument("--name", metavar="N", help="the name for people")
    organization = parser.add_mutually_exclusive_group()
    organization.add_argument(
        "--organization-id", metavar="O", help="the upstream's organization whose events it gets"
    )
    organization.add_argument(
        "--no-organization", action="store_true", help="it gets no organization's events"
    )
    email = parser.add_mutually_exclusive_group()
    email.add_argument(
        "--email", metavar="E", help="the site manager's email address; a new one is not verified"
    )
    email.add_argument("--no-email", action="store_true", help="there is no address")
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
    phone.add_argument("--no-phone", action="store_true", help="there is no phone")
    add_sources(parser, changes=True)
    add_reason_and_actor(parser)
    add_format(parser)


def set_fields(arguments: Namespace) -> int:
    """Change the fields of a tenant that options name, all at once, and print the tenant.

    Raises:
        UsageError: nothing is named, or options contradict each other or the tenant.
        InvalidTenantError: a value cannot be accepted; nothing was changed.
        TenantCredentialsError: a file that is named does not exist; nothing was changed.
        TenantExistsError: the organization is another tenant's.
        TenantError: the tenant does not exist, or was changed concurrently.
    """
    named = named_fields(arguments)
    if not named and not any(getattr(arguments, option) for option in _SOURCE_OPTIONS):
        raise UsageError("nothing to change: name a field, such as --name or --email")
    # The empty text of an unset shell variable must not take the organization away.
    if arguments.organization_id == "":
        raise UsageError("--organization-id is empty: use --no-organization for none")
    versions = []

    async def change(service: TenantService) -> Tenant:
        before = await service.get(arguments.identifier)
        email = named.get("site_manager_email", before.site_manager_email)
        # An address that is added later would count as if it were verified.
        if arguments.email_verified and email is None:
            raise UsageError("--email-verified: there is no address; name one with --email")
        named["credentials"] = credentials_after(before.credentials, arguments)
        versions.append(before.version)
        return await service.change(
            before,
            **named,
            reason=arguments.reason,
            actor=actor_of(arguments),
            expected_version=before.version,
        )

    after = _print_result(arguments, change)
    # The version shows whether anything was written: equal values leave it unchanged.
    if [after.version] == versions:
        say("nothing was changed: the tenant has these values already")
    elif arguments.keep_webhook_secrets and not arguments.remove_webhook_secret:
        say(
            "old and new secrets sign now: have the sender use the new one, check that deliveries "
            "arrive, then remove the old source with --remove-webhook-secret"
        )
    return 0


def named_fields(arguments: Namespace) -> TenantChanges:
    """Return the new values of the fields that options name; credentials are not among them."""
    changes: TenantChanges = {}
    for field, option, removal in _FIELDS:
        value = getattr(arguments, option)
        if value is not None or (removal and getattr(arguments, removal)):
            changes[field] = value  # type: ignore[literal-required] # a field of TenantChanges
    if arguments.email_verified is not None:
        changes["site_manager_email_verified"] = arguments.email_verified
    return changes


def suspend_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of a transition: ``tenant suspend`` and its like."""
    add_identifier(parser)
    add_reason_and_actor(parser)
    add_bypass(parser)
    add_format(parser)


# The last word of a command names the function that declares its arguments.
reactivate_arguments = deactivate_arguments = suspend_arguments


def delete_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``tenant delete``."""
    suspend_arguments(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask")


def transition(arguments: Namespace) -> int:
    """Suspend, reactivate, deactivate or delete a tenant, by the command's last word.

    Deletion is soft, and asks for confirmation.

    Raises:
        SuspensionRefusedError: its site manager's email is not verified, and no setting allows
            that.
        TenantError: there is no such tenant, or its status does not allow it.
    """
    verb = arguments.words.rpartition(" ")[2]
    if verb == "delete" and not arguments.yes:
        # The question is printed on a terminal, and a mistyped identifier may contain control
        # characters.
        name = cell(arguments.identifier)
        kept = f"the tenant {name} can be reactivated until its retention has passed"
        if not confirmed(f"{kept}; delete it?"):
            say("nothing was changed")
            return EXIT_FAILURE
    options = {"reason": arguments.reason, "actor": actor_of(arguments)}
    if verb == "suspend":
        options["bypass_email_verification"] = arguments.bypass_email_verification

    async def change(service: TenantService) -> TransitionResult:
        done: TransitionResult = await getattr(service, verb)(arguments.identifier, **options)
        return done

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
        print_rows([row], RESULT_COLUMNS, as_json=False)
    if result.no_op:
        say(f"nothing was changed: the tenant was {result.new_status} already")
    elif result.relaxation:
        say(f"allowed by {result.relaxation}")
    return 0


def audit_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``tenant audit``."""
    parser.add_argument(
        "identifier", metavar="IDENTIFIER", nargs="?", help="only this tenant, or its id"
    )
    add_status(parser, "only transitions to this status, and other changes in it")
    parser.add_argument(
        "--search", metavar="TEXT", help="only rows with TEXT in actor, change, reason or tenant"
    )
    add_limit(parser, default=None)
    add_number(parser, "--after", default=0, help="only rows after this sequence")
    add_format(parser)


def audit(arguments: Namespace) -> int:
    """Print the audit trail, oldest first: of one tenant, purged ones included, or of all.

    Raises:
        UnknownTenantError: the audit trail does not name this tenant.
    """
    limit: int | None = arguments.limit
    records = run_with_tenants(arguments, lambda service: _trail(service, arguments))
    more = f"--after {records[limit - 1].sequence}" if limit and len(records) > limit else ""
    nothing = "the audit trail has no such rows" if arguments.after else "the audit trail is empty"
    rows = [attrs.asdict(record) for record in records]
    print_list(arguments, rows, AUDIT_COLUMNS, nothing=nothing, limit=limit, more=more)
    return 0


async def _trail(service: TenantService, arguments: Namespace) -> list[AuditRecord]:
    """Return the rows that match every option, one more than ``--limit`` if there are more."""
    key, after = arguments.identifier, arguments.after
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
        # Purged tenants cannot be found by id, so the whole trail is read and compared.
        rows = page if unknown is None else [row for row in page if _is_of(row, key)]
        # A filter may match no row of a known tenant: only a tenant that the trail never names is
        # an error.
        heard = heard or bool(rows)
        found += [
            row
            for row in rows
            if arguments.status in (None, row.new_status)
            and _mentions(row, _AUDIT_SEARCHED, arguments.search)
        ]
        if len(page) < PAGE or (arguments.limit and len(found) > arguments.limit):
            break
        after = page[-1].sequence
    if unknown is not None and not heard:
        raise unknown
    return found


def _is_of(record: AuditRecord, key: str) -> bool:
    return key in (record.tenant_id, record.tenant_identifier)
