"""Verify one delivery: choose the keys to try, and decode the verified body.

The decision itself is pure (``verdict``). This module looks up the tenant and its keys.
"""

import base64
import os
from typing import TYPE_CHECKING, Final

from ..base.http import Headers
from ..config import Secret, Settings
from ..errors import DeliveryDecodingError, StoreUnavailableError
from ..events import (
    Envelope,
    claimed_organization,
    organization_of,
    plain_envelope,
    subject_of,
)
from ..events.decoding import Documents, Outline, plain_outline
from ..records.deliveries import NewDelivery
from ..records.synthetic import SYNTHETIC_PREFIX, delivered_id
from . import answers
from .answers import RequestRefusal
from .arrival import VerifiedDelivery, decode_in_full
from .screen import Screened
from .secret_usage import SecretUsage
from .signature import Keyring
from .verdict import Accepted, Cause, Delivery, Rejected, verify_delivery

if TYPE_CHECKING:
    from ..records.tenants import Tenant
    from .tenant_keys import TenantKeys

_PREFIX_LENGTH = len(SYNTHETIC_PREFIX)

#: The maximum length of a logged tenant identifier, which may be invented.
SHOWN_IDENTIFIER_CHARACTERS = 64


class WebhookVerification:
    """Verifies deliveries with the keys of the host and of its tenants.

    Args:
        settings: validated settings; the host's keys come with each call, as a reload changes them.
        secret_usage: records which of the host's secrets matched, and when.
    """

    def __init__(self, settings: Settings, secret_usage: SecretUsage) -> None:
        #: Finds a delivery's tenant and its keys; None without tenants.
        self.tenant_keys: TenantKeys | None = None
        self._secret_usage = secret_usage
        self._own_secrets_only = settings.multi_tenant.own_secrets_only
        # A delivery for an unknown tenant is verified with a random key. That takes the same time,
        # so the time of the answer does not reveal which tenants exist.
        self._dummy_keyring = Keyring(())
        if settings.multi_tenant.enabled:
            derivation = settings.webhooks.key_derivation
            self._dummy_keyring = Keyring.from_secrets([_random_secret()], derivation)

    async def verify(
        self,
        headers: Headers,
        body: bytes,
        screened: Screened,
        host_keyring: Keyring,
        *,
        tolerance: int,
        now: float,
        documents: Documents | None = None,
    ) -> VerifiedDelivery | RequestRefusal:
        """Verify and decode a delivery; return it, or the refusal.

        At the address of a tenant only its keys verify, and the delivery is that tenant's. At the
        host's address, the unverified body decides one thing: whose keys are tried after the host's
        own have failed. A delivery that the host's key verifies belongs to the tenant that its body
        names; one that a tenant's key verifies belongs to that tenant. Trying every tenant's keys
        instead would cost ten thousand HMACs, and would let tenant A sign for tenant B
        (docs/adr/0036-delivery-keys.md).

        Args:
            headers: the headers of the request.
            body: its bytes.
            screened: its origin, and the address that it came to.
            host_keyring: the host's keys.
            tolerance: the maximum difference of its timestamp, in seconds.
            now: Unix seconds.
            documents: the types whose payload is needed at once.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        # This usually has no checkpoint; accepting or refusing the delivery is one.
        signed = None
        if (positions := screened.signed_positions) is not None:
            signed = headers[positions[0]][1], headers[positions[1]][1], headers[positions[2]][1]
        delivery = Delivery(headers, body, now, signed)
        identifier = screened.identifier
        keys = self.tenant_keys
        tenant: Tenant | None = None
        erased: str | None = None
        verdict: Accepted | Rejected
        if identifier is not None:
            verdict, tenant = await self._judge_at(identifier, delivery, tolerance)
        elif isinstance(
            verdict := verify_delivery(delivery, host_keyring, tolerance_seconds=tolerance),
            Accepted,
        ):
            self._secret_usage.record(verdict.secret_index, now)
        elif keys is not None and verdict.cause is Cause.NO_MATCH:
            tenant = await keys.tenant_of(claimed_organization(body))
            keyring = None if tenant is None else await keys.keyring(tenant)
            if keyring is not None:
                verdict = verify_delivery(delivery, keyring, tolerance_seconds=tolerance)
        if isinstance(verdict, Rejected):
            return _refusal_of(verdict, identifier, tenant)  # noqa: ASYNC910 - answering is a checkpoint
        # So far a tenant is known only if its own key has verified.
        signer = "" if tenant is None else tenant.id
        envelope: Envelope | Outline | None = None
        # The tenant is found by the data, which an outline omits.
        if keys is None or tenant is not None:
            envelope = plain_outline(body, documents)
        if envelope is None:
            try:
                envelope = plain_envelope(body) or await decode_in_full(body)
            except DeliveryDecodingError as error:
                return _rejection(Cause.NOT_AN_EVENT, str(error))  # noqa: ASYNC910 - answering is a checkpoint
        if keys is not None and tenant is None and isinstance(envelope, Envelope):
            organization = organization_of(envelope.type, envelope.data_raw)
            tenant = await keys.tenant_of(organization)
            if tenant is None:
                erased = await keys.erased(organization)
            elif self._own_secrets_only and tenant.credentials.webhook_secrets:
                return _rejection(  # noqa: ASYNC910 - answering is a checkpoint
                    "own_secrets", _NOT_THE_HOSTS, claimed_tenant=tenant.identifier
                )
        webhook_id = verdict.webhook_id
        # Most ids are compared without a call of a function.
        if webhook_id[:_PREFIX_LENGTH] == SYNTHETIC_PREFIX:
            webhook_id = delivered_id(webhook_id)
        return VerifiedDelivery(  # noqa: ASYNC910 - answering is a checkpoint
            NewDelivery(
                webhook_id=webhook_id,
                type=envelope.type,
                raw=body,
                timestamp=verdict.timestamp,
                received_at=now,
                subject=subject_of(envelope),
                tenant_id=erased if tenant is None else tenant.id,
                signer=signer,
                address=screened.origin.address,
            ),
            envelope,
        )

    async def _judge_at(
        self, identifier: str, delivery: Delivery, tolerance: int
    ) -> "tuple[Accepted | Rejected, Tenant | None]":
        """Verify a delivery to a tenant's address; return the verdict and the tenant, if known."""
        if self.tenant_keys is None:
            raise StoreUnavailableError("the tenants are not open: the receiver has not started")
        tenant = await self.tenant_keys.tenant_at(identifier)
        keyring = None if tenant is None else await self.tenant_keys.keyring(tenant)
        # Without keys, a random key does the same work, so that neither the answer nor its time
        # reveals whether the tenant exists.
        verdict = verify_delivery(
            delivery, keyring or self._dummy_keyring, tolerance_seconds=tolerance
        )
        if keyring is None and (isinstance(verdict, Accepted) or verdict.cause is Cause.NO_MATCH):
            return _NO_KEYS, None
        return verdict, tenant


_NO_KEYS: Final = Rejected(
    Cause.NO_MATCH,
    "no tenant with webhook secrets of its own has this address, or it is deleted: 'tenant show' "
    "prints the address of a tenant.",
)
_NOT_THE_HOSTS: Final = (
    "signed with the host's secret for a tenant that has secrets of its own, and "
    "Sdk:MultiTenant:OwnSecretsOnly is true: have the sender use the tenant's secret and address."
)


def _refusal_of(
    verdict: Rejected, identifier: str | None, tenant: "Tenant | None"
) -> RequestRefusal:
    """Return the refusal, with the tenant of the address or that which the body claims."""
    fields = {} if tenant is None else {"claimed_tenant": tenant.identifier}
    if identifier is not None:
        fields = {"tenant": identifier[:SHOWN_IDENTIFIER_CHARACTERS]}
    return _rejection(verdict.cause, verdict.detail, **fields)


def _rejection(cause: str, detail: str, **fields: str) -> RequestRefusal:
    return RequestRefusal(str(cause), answers.INVALID, {"detail": detail, **fields})


def _random_secret() -> Secret:
    return Secret(f"whsec_{base64.b64encode(os.urandom(32)).decode('ascii')}")
