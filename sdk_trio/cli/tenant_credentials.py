"""``tenant credentials set|show|rotate``: the sources of a tenant's own token and secrets.

Sources are printed, ``env:NAME`` or ``file:PATH``, and never their content.
"""

from argparse import Namespace
from typing import Any

import attrs
import trio

from ..errors import TenantCredentialsError
from ..storage.tenant_credentials import source_to_text
from ..storage.tenant_records import CredentialSource, Tenant, TenantCredentials
from ..tenants import TenantService
from ..tenants.credential_reader import CredentialReader
from .printer import print_rows, say
from .tenant_access import actor_of, run_with_tenants
from .tenant_sources import (
    named_credentials,
    named_secrets,
    parse_source,
    say_shared,
)
from .usage import UsageError

COLUMNS = ("use", "source", "found", "problem", "shared_with")

_TOKEN, _SECRET = "access_token", "webhook_secret"


def show_credentials(arguments: Namespace) -> int:
    """Print each source of a tenant, and the number of values that this process finds there.

    Raises:
        UnknownTenantError: there is no such tenant.
    """

    async def look(service: TenantService) -> list[dict[str, Any]]:
        return await _rows(service, await service.get(arguments.identifier))

    _print(run_with_tenants(arguments, look), arguments)
    return 0


def set_credentials(arguments: Namespace) -> int:
    """Replace the token's source, the secrets' sources, or both; other sources stay.

    Raises:
        UsageError: nothing is named.
        InvalidTenantError: a source cannot be accepted; nothing was changed.
        TenantError: there is no such tenant, or somebody else has changed it at the same time.
    """

    def after(before: TenantCredentials) -> TenantCredentials:
        changed = named_credentials(arguments, before)
        if arguments.no_access_token:
            changed = attrs.evolve(changed, access_token=None)
        if arguments.no_webhook_secrets:
            changed = attrs.evolve(changed, webhook_secrets=())
        return changed

    if arguments.no_webhook_secrets and named_secrets(arguments):
        raise UsageError("--no-webhook-secrets: not allowed with a source of webhook secrets")
    removes = arguments.no_access_token or arguments.no_webhook_secrets
    if not removes and named_credentials(arguments, TenantCredentials()) == TenantCredentials():
        raise UsageError(
            "say what changes: --access-token-env, --access-token-file or --no-access-token, "
            "--webhook-secret-env, --webhook-secret-file or --no-webhook-secrets"
        )
    return _change(arguments, after)


def rotate_credentials(arguments: Namespace) -> int:
    """Put a new source of webhook secrets before the others, or take old ones away.

    Raises:
        UsageError: nothing is named, a removed source is not there, or it is the last one.
        InvalidTenantError: a source cannot be accepted; nothing was changed.
        TenantError: there is no such tenant, or somebody else has changed it at the same time.
    """
    new = named_secrets(arguments)
    removed = tuple(map(parse_source, arguments.remove))
    if not (new or removed):
        raise UsageError(
            "name the new source with --webhook-secret-env or --webhook-secret-file, or an old one "
            "with --remove"
        )

    def after(before: TenantCredentials) -> TenantCredentials:
        for source in removed:
            if source not in before.webhook_secrets:
                raise UsageError(f"--remove: the tenant has no {source_to_text(source)}")
        old = tuple(s for s in before.webhook_secrets if s not in removed and s not in new)
        if not (new or old):
            raise UsageError(
                "--remove: it is the last one, without which the host's own secrets alone sign "
                "for the tenant; if that is meant: tenant credentials set --no-webhook-secrets"
            )
        return attrs.evolve(before, webhook_secrets=(*new, *old))

    status = _change(arguments, after)
    if new and not removed:
        say(
            "both sign now: have the sender use the new secret, see that deliveries come, then "
            "remove the old source with --remove"
        )
    return status


def _change(arguments: Namespace, after: Any) -> int:
    async def change(service: TenantService) -> tuple[list[dict[str, Any]], bool]:
        before = await service.get(arguments.identifier)
        tenant = await service.set_credentials(
            before,
            after(before.credentials),
            reason=arguments.reason,
            actor=actor_of(arguments),
            expected_version=before.version,
        )
        return await _rows(service, tenant), tenant.version != before.version

    rows, changed = run_with_tenants(arguments, change)
    _print(rows, arguments)
    if not changed:
        say("it was so already: nothing was changed")
    return 0


async def _rows(service: TenantService, tenant: Tenant) -> list[dict[str, Any]]:
    holders = await service.holders(tenant.credentials.sources, but=tenant)
    say_shared(tenant, holders)
    reader = CredentialReader()
    credentials = tenant.credentials
    uses = [(_SECRET, source) for source in credentials.webhook_secrets]
    if credentials.access_token is not None:
        uses.insert(0, (_TOKEN, credentials.access_token))
    rows = []
    for use, source in uses:
        found, problem = await _found(reader, tenant, use, source)
        rows.append(
            {
                "use": use,
                "source": source_to_text(source),
                "found": found,
                "problem": problem,
                "shared_with": list(holders[source]),
            }
        )
    return rows


async def _found(
    reader: CredentialReader, tenant: Tenant, use: str, source: CredentialSource
) -> tuple[int, str | None]:
    """Return the number of values in a source, or the reason why it has none."""
    try:
        if use == _TOKEN:
            await reader.access_token(tenant)
            return 1, None
        return len(await reader.read_webhook_secrets(tenant, source)), None
    except TenantCredentialsError as error:
        problem = str(error)
    await trio.lowlevel.checkpoint()
    return 0, problem


def _print(rows: list[dict[str, Any]], arguments: Namespace) -> None:
    if arguments.format == "json":
        print_rows(rows, COLUMNS, as_json=True)
        return
    shown = [{**row, "shared_with": ", ".join(row["shared_with"]) or None} for row in rows]
    print_rows(shown, COLUMNS, as_json=False)
    if not rows:
        say("the tenant has no credentials of its own: the host's are used")
    for row in rows:
        if row["problem"] and row["source"].startswith("env:"):
            say("note: variables are looked up in this shell's environment, not in the daemon's")
            return
