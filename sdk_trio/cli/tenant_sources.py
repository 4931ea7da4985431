"""The sources of a tenant's own credentials: from options, and shared with other tenants."""

import os
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence

import attrs

from ..storage.tenant_credentials import source_from_text, source_to_text
from ..storage.tenant_records import (
    CredentialSource,
    EnvironmentVariable,
    KeyFile,
    Tenant,
    TenantCredentials,
)
from ..tenants import TenantService
from .printer import say
from .usage import UsageError


def named_credentials(arguments: Namespace, before: TenantCredentials) -> TenantCredentials:
    """Return ``before`` with the token and the secrets that the options replace."""
    token = _token(arguments)
    secrets = named_secrets(arguments)
    return attrs.evolve(
        before,
        access_token=token or before.access_token,
        webhook_secrets=secrets or before.webhook_secrets,
    )


def named_secrets(arguments: Namespace) -> tuple[CredentialSource, ...]:
    """Return the sources of webhook secrets that options name; paths become absolute."""
    return (
        *map(EnvironmentVariable, arguments.webhook_secret_env),
        *(KeyFile(os.path.abspath(path)) for path in arguments.webhook_secret_file),
    )


def _token(arguments: Namespace) -> CredentialSource | None:
    if arguments.access_token_env is not None:
        return EnvironmentVariable(arguments.access_token_env)
    if arguments.access_token_file is not None:
        return KeyFile(os.path.abspath(arguments.access_token_file))
    return None


def parse_source(text: str) -> CredentialSource:
    """Return the source of a text such as ``env:NAME``.

    Raises:
        UsageError: it is no source. It is not quoted, because it may be a secret by mistake.
    """
    try:
        return source_from_text(text)
    except ValueError as error:
        raise UsageError(f"{error}, as 'tenant credentials show' prints it") from None


def holders_of(
    sources: Iterable[CredentialSource], tenants: Iterable[Tenant], *, but: str
) -> Mapping[CredentialSource, list[str]]:
    """Return the identifiers of the tenants that name a source, except the one with id ``but``."""
    holders: dict[CredentialSource, list[str]] = {source: [] for source in sources}
    for tenant in tenants:
        for source in set(tenant.credentials.sources):
            if source in holders and tenant.id != but:
                holders[source].append(tenant.identifier)
    return holders


async def warn_of_shared_sources(service: TenantService, tenant: Tenant) -> None:
    """Say which sources of a tenant are another one's, too: each could sign for the other."""
    say_shared(tenant, await service.holders(tenant.credentials.sources, but=tenant))


def say_shared(tenant: Tenant, holders: Mapping[CredentialSource, Sequence[str]]) -> None:
    """Print a warning for each source of ``tenant`` that others name."""
    for source, others in holders.items():
        if others:
            names = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
            say(
                f"warning: {source_to_text(source)} of {tenant.identifier} is named by {names} "
                "too: whoever has it signs or calls for each of them; give each its own"
            )
