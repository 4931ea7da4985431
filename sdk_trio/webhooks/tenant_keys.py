"""The keys of a tenant's own webhook secrets.

The address of a delivery selects its keys: a tenant with its own secrets has an address at which no
other keys are accepted. At the host's address the host's keys are tried first. If they fail, the
organization in the unverified body selects a tenant's keys, and is used for nothing else.
"""

from typing import TYPE_CHECKING

import trio

from ..base.logs import get_logger
from ..base.lru import Lru
from ..config import KeyDerivation, Secret
from ..config.fields import Form, check_form
from ..errors import OptionsValidationError
from ..records.tenants import Tenant, TenantStatus
from ..tenants.identity import is_organization_id
from .signature import Keyring

if TYPE_CHECKING:
    from ..tenants.tenancy import TenantRuntime

_log = get_logger("webhooks")

#: The number of tenants whose keys are kept prepared. Key files are read at each delivery that
#: needs them, so that a rotation takes effect at once; only the derived keys are cached, by their
#: secrets.
CAPACITY = 1024


class TenantKeys:
    """Finds the tenant that a delivery claims, and the keys that can prove the claim."""

    def __init__(self, tenancy: "TenantRuntime", derivation: KeyDerivation) -> None:
        self._tenancy = tenancy
        self._derivation = derivation
        self._prepared: Lru[tuple[Secret, ...], Keyring | None] = Lru(CAPACITY)

    async def tenant_of(self, organization_id: str | None) -> Tenant | None:
        """Return the tenant of an organization that a delivery names, or None.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        await trio.lowlevel.checkpoint()
        if organization_id is None or not is_organization_id(organization_id):
            return None
        return await self._tenancy.service.find_by_organization(organization_id)

    async def tenant_at(self, identifier: str) -> Tenant | None:
        """Return the tenant whose address ends with ``identifier``, or None.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        await trio.lowlevel.checkpoint()
        if check_form(Form.SLUG, identifier, development=False) is not None:
            return None
        return await self._tenancy.service.find_by_identifier(identifier)

    async def erased(self, organization_id: str | None) -> str | None:
        """Return the id of the purged tenant that an organization had, None if it had none.

        A delivery after the purge is stored as that tenant's. Otherwise it would run as an event
        without a tenant.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        await trio.lowlevel.checkpoint()
        if organization_id is None or not is_organization_id(organization_id):
            return None
        return await self._tenancy.service.find_erased(organization_id)

    async def keyring(self, tenant: Tenant) -> Keyring | None:
        """Return the keys of the tenant's current secrets; None if it has none.

        The secrets of a deleted tenant verify nothing: off-boarding revokes them.
        """
        if not tenant.credentials.webhook_secrets or tenant.status is TenantStatus.DELETED:
            await trio.lowlevel.checkpoint()
            return None
        secrets = await self._tenancy.credentials.webhook_secrets(tenant)
        if secrets not in self._prepared:
            self._prepared[secrets] = self._prepare(tenant, secrets)
        return self._prepared[secrets]

    def _prepare(self, tenant: Tenant, secrets: tuple[Secret, ...]) -> Keyring | None:
        usable = []
        for number, secret in enumerate(secrets, start=1):
            try:
                # Each secret separately, so that an unusable line of a key file is logged and the
                # other secrets still verify deliveries.
                Keyring.from_secrets([secret], self._derivation)
            except OptionsValidationError as error:
                _log.error(
                    "tenant.secret_unusable",
                    tenant=tenant.identifier,
                    number=number,
                    error=error.problems[0].message,
                )
            else:
                usable.append(secret)
        return Keyring.from_secrets(usable, self._derivation) if usable else None
