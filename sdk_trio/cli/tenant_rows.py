"""Tenants and audit rows as rows of a table and objects of JSON. Pure.

JSON has the names of the records' attributes; it is a stable contract.
"""

from collections.abc import Iterable
from typing import Any

import attrs

from ..storage.tenant_credentials import source_to_text
from ..storage.tenant_records import AuditRecord, Tenant
from .moments import moment_text

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
    return text is None or any(text.casefold() in field.casefold() for field in fields if field)


def audited(record: AuditRecord) -> dict[str, Any]:
    """Return every attribute of an audit row."""
    return attrs.asdict(record)


def audit_row(record: AuditRecord) -> dict[str, Any]:
    """Return the cells of ``AUDIT_COLUMNS``."""
    return {**audited(record), "occurred": moment_text(record.occurred_at)}
