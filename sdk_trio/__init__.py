"""A Trio runtime for signed payment webhooks: verified, kept, then handled.

The names below are imported when they are first used, so that a program pays only for the parts
that it has. Event classes are in :mod:`sdk_trio.events`, the test kit in :mod:`sdk_trio.testing`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Secret, Settings, load_settings
    from .errors import (
        HandlerRegistrationError,
        IllegalTransitionError,
        InvalidTenantError,
        MissingHandlersError,
        NotInThisVersionError,
        NotRunningError,
        NotSupportedError,
        OptionsValidationError,
        Problem,
        RetryLater,
        SdkError,
        StorageError,
        StoreLockedError,
        StoreUnavailableError,
        StoreVersionError,
        SuspensionRefusedError,
        TenantConflictError,
        TenantCredentialsError,
        TenantError,
        TenantExistsError,
        TenantNotActiveError,
        TenantsDisabledError,
        UnknownTenantError,
        VerificationError,
    )
    from .runtime import BindError, Runtime, Started
    from .tenants import (
        EnvironmentVariable,
        KeyFile,
        Tenant,
        TenantCredentials,
        TenantService,
        TenantStatus,
        TenantStatusService,
        TransitionResult,
    )
    from .webhooks import (
        DrainReport,
        HandlerRegistry,
        Services,
        WebhookHandlerBase,
        WebhookReceiver,
    )

__version__ = "0.1.0"

__all__ = [
    # settings
    "Secret",
    "Settings",
    "load_settings",
    # handlers
    "HandlerRegistry",
    "RetryLater",
    "Services",
    "WebhookHandlerBase",
    # tenants
    "EnvironmentVariable",
    "KeyFile",
    "Tenant",
    "TenantCredentials",
    "TenantService",
    "TenantStatus",
    "TenantStatusService",
    "TransitionResult",
    # running
    "DrainReport",
    "Runtime",
    "Started",
    "WebhookReceiver",
    # errors
    "BindError",
    "HandlerRegistrationError",
    "IllegalTransitionError",
    "InvalidTenantError",
    "MissingHandlersError",
    "NotInThisVersionError",
    "NotRunningError",
    "NotSupportedError",
    "OptionsValidationError",
    "Problem",
    "SdkError",
    "StorageError",
    "StoreLockedError",
    "StoreUnavailableError",
    "StoreVersionError",
    "SuspensionRefusedError",
    "TenantConflictError",
    "TenantCredentialsError",
    "TenantError",
    "TenantExistsError",
    "TenantNotActiveError",
    "TenantsDisabledError",
    "UnknownTenantError",
    "VerificationError",
]

_HOMES = {
    **dict.fromkeys(("Secret", "Settings", "load_settings"), "config"),
    **dict.fromkeys(
        (
            "EnvironmentVariable",
            "KeyFile",
            "Tenant",
            "TenantCredentials",
            "TenantService",
            "TenantStatus",
            "TenantStatusService",
            "TransitionResult",
        ),
        "tenants",
    ),
    **dict.fromkeys(("BindError", "Runtime", "Started"), "runtime"),
    **dict.fromkeys(
        ("DrainReport", "HandlerRegistry", "Services", "WebhookHandlerBase", "WebhookReceiver"),
        "webhooks",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'sdk_trio' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"sdk_trio.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
