"""The contact data of a tenant after the options of ``tenant contact``. Pure."""

from argparse import Namespace
from typing import TypedDict

from ..storage.tenant_records import Tenant
from .usage import UsageError


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
        verified = tenant.site_manager_email_verified and email == tenant.site_manager_email
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
