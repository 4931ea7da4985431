"""Read tenants' credentials from their sources: variables and key files.

The store has only names of sources, so a copy of the store gives no one a credential.
"""

import os
from collections.abc import Callable, Mapping, Sequence

import trio

from ..base.executor import run_in_thread
from ..base.logs import get_logger
from ..config import Secret
from ..errors import TenantCredentialsError
from ..records.tenants import CredentialSource, EnvironmentVariable, KeyFile, Tenant

_log = get_logger("tenants")

#: The largest key file, in bytes. It has a few lines; a larger file was named by mistake.
MAX_FILE_BYTES = 64 * 1024

#: The maximum number of files read at a time: a hanging file system must not occupy every thread.
MAX_THREADS = 4


class CredentialReader:
    """Reads the current values of a tenant's credentials; keeps none of them.

    Key files are read at every use, so that a rotation applies from the next delivery or call, even
    on file systems with coarse times. The environment is that of the start, or of the last
    :meth:`reload`.

    ``environ`` returns the current environment.
    """

    def __init__(self, environ: Callable[[], Mapping[str, str]] = lambda: os.environ) -> None:
        self._environ = environ
        # A copy: a variable changed by code in the running process is not a rotation.
        self._variables = dict(environ())
        self._threads = trio.CapacityLimiter(MAX_THREADS)

    def reload(self) -> None:
        """Read the environment again."""
        self._variables = dict(self._environ())

    async def access_token(self, tenant: Tenant) -> Secret | None:
        """Return the tenant's own access token; None if it has no source.

        Raises:
            TenantCredentialsError: its source cannot be read. The host's token is not used instead:
                calls for a tenant must not have the host's rights.
        """
        source = tenant.credentials.access_token
        if source is None:
            await trio.lowlevel.checkpoint()
            return None
        found = await self._read(tenant, (source,))
        if isinstance(found[0], TenantCredentialsError):
            raise found[0]
        return Secret(found[0].strip())

    async def webhook_secrets(self, tenant: Tenant) -> tuple[Secret, ...]:
        """Return the tenant's own webhook secrets, one for each line of each source.

        A source that cannot be read is logged and skipped, so that the others still verify.
        """
        secrets: list[Secret] = []
        for found in await self._read(tenant, tenant.credentials.webhook_secrets):
            if isinstance(found, TenantCredentialsError):
                _log.error(
                    "tenant.credential_unavailable", tenant=tenant.identifier, error=str(found)
                )
            else:
                secrets += _lines(found)
        return tuple(secrets)

    async def read_webhook_secrets(
        self, tenant: Tenant, source: CredentialSource
    ) -> tuple[Secret, ...]:
        """Return the secrets of one source, one a line.

        Raises:
            TenantCredentialsError: the source cannot be read.
        """
        (found,) = await self._read(tenant, (source,))
        if isinstance(found, TenantCredentialsError):
            raise found
        return _lines(found)

    async def _read(
        self, tenant: Tenant, sources: Sequence[CredentialSource]
    ) -> list[str | TenantCredentialsError]:
        """Return the text of each source, or the reason why it cannot be read."""
        # Only files need a thread: variables are read here.
        if any(isinstance(source, KeyFile) for source in sources):
            return await run_in_thread(
                self._read_all, tenant, sources, abandon_on_cancel=True, limiter=self._threads
            )
        await trio.lowlevel.checkpoint()
        return self._read_all(tenant, sources)

    def _read_all(
        self, tenant: Tenant, sources: Sequence[CredentialSource]
    ) -> list[str | TenantCredentialsError]:
        found: list[str | TenantCredentialsError] = []
        for source in sources:
            try:
                text = self._text_of(source)
            except (OSError, ValueError) as error:
                found.append(_unreadable(tenant, source, error))
            else:
                found.append(text)
        return found

    def _text_of(self, source: CredentialSource) -> str:
        if isinstance(source, EnvironmentVariable):
            text = self._variables.get(source.name, "")
        else:
            with open(source.path, "rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
            if len(content) > MAX_FILE_BYTES:
                raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
            text = _decode(content)
        if not text.strip():
            raise ValueError("it is not set, or empty")
        return text


def _lines(text: str) -> tuple[Secret, ...]:
    return tuple(Secret(line.strip()) for line in text.splitlines() if line.strip())


def _decode(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        # The codec's own message would quote the content, which is a secret.
        raise ValueError("it is not UTF-8 text") from None


def _unreadable(
    tenant: Tenant, source: CredentialSource, error: OSError | ValueError
) -> TenantCredentialsError:
    where = (
        f"the variable {source.name}"
        if isinstance(source, EnvironmentVariable)
        else f"the key file {source.path}"
    )
    why = error.strerror if isinstance(error, OSError) else str(error)
    return TenantCredentialsError(
        f"a credential of the tenant {tenant.identifier!r} cannot be read from {where}: {why}"
    )
