"""Checks before the start, for errors that prevent it.

``Runtime.run`` and ``config check`` make the same checks. They change nothing and connect to
nothing. The settings themselves are checked in ``config/``, and their files in
``config/probe.py``.
"""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..base.private_files import require_usable
from ..config import Settings, StorageBackend
from ..config.probe import alert_credential_problems
from ..config.table import ALERTS
from ..errors import OptionsValidationError, Problem, SdkError
from ..storage.open import postgres_address

if TYPE_CHECKING:
    from ..tenants.upgrade import HostUpgrade

STORAGE_PATH = "Sdk:Storage:Path"
FILE_DB_DIRECTORY = "Sdk:MultiTenant:FileDb:Directory"
STRATEGY = "Sdk:MultiTenant:SingleTenantUpgrade:DefaultTenantStrategy"


def require_startable(settings: Settings) -> None:
    """Raise the error that would make a start fail.

    It reads files, so call it in a thread.

    Raises:
        OptionsValidationError: a certificate, its key, the connection string or a credential of
            alerts cannot be used.
        StoreUnavailableError: the data directory cannot be created or written.
        ExposedDirectoryError: other users can write a directory, or read its files.
    """
    for check in _checks(settings).values():
        check()


def start_problems(settings: Settings, host: "HostUpgrade | None") -> list[Problem]:
    """Return all problems that prevent a start.

    Args:
        settings: validated settings.
        host: the host's part of the upgrade from a single tenant.
    """
    checks = dict(_checks(settings))
    connection = settings.connection
    # A runtime creates its client at construction.
    if settings.has_access_token and (connection.ca_file or connection.client_cert_file):
        from ..net.transport import tls_context  # loads an HTTP client

        checks["Sdk:Connection"] = lambda: tls_context(connection)
    if settings.multi_tenant.enabled:
        from ..tenants.upgrade import require_choice  # loads all modules of tenants

        options = settings.multi_tenant.single_tenant_upgrade
        checks[STRATEGY] = lambda: require_choice(options, host)
    problems: list[Problem] = []
    for key, check in checks.items():
        try:
            check()
        except OptionsValidationError as error:
            problems += error.problems
        except SdkError as error:
            message = str(error).removeprefix(f"{key}: ").removeprefix(f"{key} ")
            problems.append(Problem(key, message))
    return problems


def _checks(settings: Settings) -> Mapping[str, Callable[[], object]]:
    checks: dict[str, Callable[[], object]] = {}
    cert_file, key_file = settings.server.cert_file, settings.server.key_file
    if cert_file is not None:
        checks["Sdk:Server:CertFile"] = lambda: _load_certificate(cert_file, key_file)
    if settings.storage.backend is StorageBackend.POSTGRES:
        checks["Sdk:Storage:PostgresDsnEnvVar"] = lambda: postgres_address(settings).place
    if settings.storage.backend is not StorageBackend.MEMORY:
        checks[STORAGE_PATH] = lambda: require_usable(settings.storage.path)
    databases = settings.multi_tenant.file_db.directory
    if settings.multi_tenant.enabled and databases is not None:
        checks[FILE_DB_DIRECTORY] = lambda: require_usable(databases)
    if settings.alerts.enabled:
        checks[ALERTS] = lambda: _require_alert_credentials(settings)
    return checks


def _require_alert_credentials(settings: Settings) -> None:
    problems = tuple(alert_credential_problems(settings, os.environ))
    if problems:
        raise OptionsValidationError(problems)


def _load_certificate(cert_file: str, key_file: str | None) -> None:
    from ..server.tls import load_certificate  # loads ssl

    load_certificate(cert_file, key_file)
