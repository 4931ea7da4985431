"""``tenant credentials``: the sources of a tenant's own credentials, and who shares them."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from ..errors import TenantCredentialsError
from .parse import (
    UsageError,
    add_format,
    add_identifier,
    add_secret_sources,
    add_token,
    add_who_and_why,
    describing,
)

if not describing():
    import trio

    from ..records.tenants import (
        CredentialSource,
        EnvironmentVariable,
        KeyFile,
        Tenant,
        TenantCredentials,
        source_from_text,
        source_to_text,
    )
    from ..tenants.credentials import CredentialReader
    from ..tenants.service import TenantService
    from .store import actor_of, run_with_tenants
    from .terminal import print_rows, say


def named_credentials(arguments: Namespace, before: TenantCredentials) -> TenantCredentials:
    """Return ``before`` with the token and the secrets that the options replace.

    Raises:
        TenantCredentialsError: a file of them does not exist.
    """
    token = _token(arguments)
    secrets = named_secrets(arguments)
    return attrs.evolve(
        before,
        access_token=token or before.access_token,
        # All at once: what is named replaces the list. `rotate` is the command that adds to it.
        webhook_secrets=secrets or before.webhook_secrets,
    )


def named_secrets(arguments: Namespace) -> tuple[CredentialSource, ...]:
    """Return the sources of webhook secrets that options name; paths become absolute.

    Raises:
        TenantCredentialsError: a file of them does not exist.
    """
    return (
        *map(EnvironmentVariable, arguments.webhook_secret_env),
        *(_key_file("--webhook-secret-file", path) for path in arguments.webhook_secret_file),
    )


def _token(arguments: Namespace) -> CredentialSource | None:
    if arguments.access_token_env is not None:
        return EnvironmentVariable(arguments.access_token_env)
    if arguments.access_token_file is not None:
        return _key_file("--access-token-file", arguments.access_token_file)
    return None


def _key_file(option: str, path: str) -> KeyFile:
    # The daemon reads it, maybe as another user: what this one may not see is no mistake.
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise TenantCredentialsError(
            f"{option} {path}: the file does not exist: write it first, or check its path"
        ) from error
    except OSError:
        pass
    # The daemon has another working directory than this shell.
    return KeyFile(os.path.abspath(path))


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


COLUMNS = ("use", "source", "found", "problem", "shared_with")

_TOKEN, _SECRET = "access_token", "webhook_secret"


def show_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``tenant credentials show``."""
    add_identifier(parser)
    add_format(parser)


def show_credentials(arguments: Namespace) -> int:
    """Print each source of a tenant, and the number of values that this process finds there.

    Raises:
        UnknownTenantError: there is no such tenant.
    """

    async def look(service: TenantService) -> list[dict[str, Any]]:
        return await _rows(service, await service.get(arguments.identifier))

    _print(run_with_tenants(arguments, look), arguments)
    return 0


def set_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``tenant credentials set``."""
    add_identifier(parser)
    add_token(parser, removable=True)
    add_secret_sources(parser)
    parser.add_argument(
        "--no-webhook-secrets", action="store_true", help="it has none of its own any more"
    )
    add_who_and_why(parser)
    add_format(parser)


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
    # Compared with nothing at all, so that every option that could name something is looked at
    # once.
    removes = arguments.no_access_token or arguments.no_webhook_secrets
    if not removes and named_credentials(arguments, TenantCredentials()) == TenantCredentials():
        raise UsageError(
            "say what changes: --access-token-env, --access-token-file or --no-access-token, "
            "--webhook-secret-env, --webhook-secret-file or --no-webhook-secrets"
        )
    return _change(arguments, after)


def rotate_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``tenant credentials rotate``."""
    add_identifier(parser)
    add_secret_sources(parser)
    parser.add_argument(
        "--remove",
        metavar="SOURCE",
        action="append",
        default=[],
        help="an old source, env:NAME or file:PATH as 'tenant credentials show' prints it",
    )
    add_who_and_why(parser)
    add_format(parser)


def rotate_credentials(arguments: Namespace) -> int:
    """Put a new source of webhook secrets before the others, or take old ones away.

    Raises:
        UsageError: nothing is named, a removed source is not there, or it is the last one.
        TenantCredentialsError: a new file does not exist.
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
        # A source that is named again moves to the front instead of standing twice: the first one
        # signs.
        old = tuple(s for s in before.webhook_secrets if s not in removed and s not in new)
        # Without a secret of its own, the host's sign for the tenant: a rotation must not lead
        # there.
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
    # Variables are those of this shell: the reader takes its environment when it is made.
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
        # The most usual reason of a variable that is missing here: it is set in the unit of the
        # daemon alone.
        if row["problem"] and row["source"].startswith("env:"):
            say("note: variables are looked up in this shell's environment, not in the daemon's")
            return
