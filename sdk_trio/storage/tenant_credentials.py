"""Sources of credentials as text: ``env:NAME`` and ``file:PATH``. Pure."""

import json

from .tenant_records import CredentialSource, EnvironmentVariable, KeyFile, TenantCredentials


def source_to_text(source: CredentialSource) -> str:
    """Return the text that stands for a source."""
    if isinstance(source, EnvironmentVariable):
        return f"env:{source.name}"
    return f"file:{source.path}"


def source_from_text(text: str) -> CredentialSource:
    """Return the source that a text of :func:`source_to_text` stands for.

    Raises:
        ValueError: it stands for none.
    """
    kind, _, name = text.partition(":")
    if kind == "env" and name:
        return EnvironmentVariable(name)
    if kind == "file" and name:
        return KeyFile(name)
    raise ValueError("a source is env: and a variable's name, or file: and a path")


def credentials_to_text(credentials: TenantCredentials) -> str | None:
    """Return what the store keeps; None when there is nothing to keep."""
    if credentials == TenantCredentials():
        return None
    token = credentials.access_token
    return json.dumps(
        {
            "access_token": None if token is None else source_to_text(token),
            "webhook_secrets": [source_to_text(source) for source in credentials.webhook_secrets],
        }
    )


def credentials_from_text(text: str | None) -> TenantCredentials:
    """Return what :func:`credentials_to_text` was given."""
    if text is None:
        return TenantCredentials()
    found = json.loads(text)
    token = found["access_token"]
    return TenantCredentials(
        access_token=None if token is None else source_from_text(token),
        webhook_secrets=tuple(map(source_from_text, found["webhook_secrets"])),
    )
