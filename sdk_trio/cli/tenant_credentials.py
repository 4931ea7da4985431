"""The sources of a tenant's own credentials: their options, and the tenants that share them."""

import os
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import trio

from ..errors import TenantCredentialsError
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
from .parse import UsageError
from .terminal import print_rows, say


def named_token(arguments: Namespace) -> CredentialSource | None:
    """Return the source of the access token that an option names, None if none does.

    Raises:
        TenantCredentialsError: a file does not exist.
    """
    if arguments.access_token_env is not None:
        return EnvironmentVariable(arguments.access_token_env)
    if arguments.access_token_file is not None:
        return _key_file("--access-token-file", arguments.access_token_file)
    return None


def named_secrets(arguments: Namespace) -> tuple[CredentialSource, ...]:
    """Return the sources of webhook secrets that options name; paths become absolute.

    Raises:
        TenantCredentialsError: a file of them does not exist.
    """
    return (
        *map(EnvironmentVariable, arguments.webhook_secret_env),
        *(_key_file("--webhook-secret-file", path) for path in arguments.webhook_secret_file),
    )


def credentials_after(before: TenantCredentials, arguments: Namespace) -> TenantCredentials:
    """Return the credentials with the sources that the options name, keep or remove.

    Raises:
        UsageError: options contradict each other, or a source to remove does not exist or is the
            last one.
        TenantCredentialsError: a file does not exist.
    """
    token = None if arguments.no_access_token else named_token(arguments) or before.access_token
    return attrs.evolve(
        before, access_token=token, webhook_secrets=_secrets_after(before, arguments)
    )


def _secrets_after(before: TenantCredentials, arguments: Namespace) -> tuple[CredentialSource, ...]:
    new = named_secrets(arguments)
    removed = tuple(map(_parse_source, arguments.remove_webhook_secret))
    keeps = arguments.keep_webhook_secrets or removed
    if arguments.no_webhook_secrets:
        if new or keeps:
            raise UsageError(
                "--no-webhook-secrets: not allowed with options that name, keep or remove one"
            )
        return ()
    if arguments.keep_webhook_secrets and not new:
        raise UsageError(
            "--keep-webhook-secrets: name the new source with --webhook-secret-env or "
            "--webhook-secret-file"
        )
    for source in removed:
        if source not in before.webhook_secrets:
            raise UsageError(f"--remove-webhook-secret: the tenant has no {source_to_text(source)}")
    if not keeps:
        return new or before.webhook_secrets
    # The first source signs, so a source that is given again moves to the front.
    kept = tuple(s for s in before.webhook_secrets if s not in removed and s not in new)
    # Without its own secret, the host's secrets sign for the tenant: a rotation must not cause
    # that.
    if not (new or kept):
        raise UsageError(
            "--remove-webhook-secret: it is the last one, without which the host's own secrets "
            "only sign for the tenant; if that is intended: --no-webhook-secrets"
        )
    return (*new, *kept)


def _key_file(option: str, path: str) -> KeyFile:
    # The daemon reads it, maybe as another user: a file that this one cannot read is not an error.
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


def _parse_source(text: str) -> CredentialSource:
    try:
        return source_from_text(text)
    except ValueError as error:
        # Not quoted: it may be a secret by mistake.
        raise UsageError(f"{error}, as 'tenant show' prints it") from None


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


def note_shared(tenant: Tenant, holders: Mapping[CredentialSource, Sequence[str]]) -> None:
    """Print a warning for each source of ``tenant`` that others name."""
    for source, others in holders.items():
        if others:
            names = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
            say(
                f"warning: {source_to_text(source)} of {tenant.identifier} is named by {names} "
                "too: its owner can sign or call for each of them; use a separate one for each"
            )


async def check_sources(
    tenant: Tenant, holders: Mapping[CredentialSource, Sequence[str]]
) -> list[dict[str, Any]]:
    """Return for each source how many values this process finds there, and who shares it."""
    # Variables of this shell: the reader copies its environment when it is created.
    reader = CredentialReader()
    credentials = tenant.credentials
    uses = [("webhook_secret", source) for source in credentials.webhook_secrets]
    if credentials.access_token is not None:
        uses.insert(0, ("access_token", credentials.access_token))
    rows = []
    for use, source in uses:
        found, problem = 0, None
        try:
            if use == "access_token":
                await reader.access_token(tenant)
                found = 1
            else:
                found = len(await reader.read_webhook_secrets(tenant, source))
        except TenantCredentialsError as error:
            problem = str(error)
        rows.append(
            {
                "use": use,
                "source": source_to_text(source),
                "found": found,
                "problem": problem,
                "shared_with": list(holders[source]),
            }
        )
    await trio.lowlevel.checkpoint()
    return rows


def print_sources(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows of :func:`check_sources` for people."""
    print_rows(rows, ("use", "source", "found", "problem", "shared_with"), as_json=False)
    # The most common reason for a missing variable: it is set only in the daemon's unit.
    if any(row["problem"] and row["source"].startswith("env:") for row in rows):
        say("note: variables are looked up in this shell's environment, not in the daemon's")
