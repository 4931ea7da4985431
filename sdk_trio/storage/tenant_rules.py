"""What every store refuses when a tenant is written, and in which words. Pure."""

from ..errors import TenantConflictError, TenantExistsError, UnknownTenantError
from .tenant_records import Tenant


def require_version(stored: int | None, tenant: Tenant, *, expected: int) -> None:
    """Raise unless the stored version of ``tenant`` is the expected one; None: it is not stored."""
    if stored is None:
        raise UnknownTenantError(f"there is no tenant {tenant.identifier!r} any more")
    if stored != expected:
        raise TenantConflictError(
            f"the tenant {tenant.identifier!r} was changed by somebody else meanwhile (version "
            f"{stored}, not {expected}): nothing was changed by this call; look at the tenant "
            "and decide again"
        )


def taken(column: str, value: str | None, holder: str) -> TenantExistsError:
    """Return the error of a value that another tenant has."""
    name = column.replace("_", " ")
    return TenantExistsError(
        f"the {name} {value!r} belongs to the tenant {holder!r} already: choose another one"
    )
