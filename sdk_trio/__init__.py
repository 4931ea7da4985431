"""A Trio runtime for signed payment webhooks: verified, stored, then handled.

The names below are imported when they are first used, so that a program loads only the parts that
it uses. Event classes are in :mod:`sdk_trio.events`, the test kit in :mod:`sdk_trio.testing`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__
from .base import importing

if TYPE_CHECKING:
    from .admin.follow import FeedReader, FeedRefusedError, open_feed
    from .base.telemetry import Check
    from .client.blocking import SyncClient
    from .client.call import CallOptions
    from .client.client import Client
    from .client.errors import (
        ApiError,
        AttemptTimeoutError,
        AuthenticationError,
        BadRequestError,
        CallError,
        CircuitOpenError,
        ConflictError,
        ConnectionFailedError,
        DeadlineExceededError,
        NotFoundError,
        OutcomeUnknownError,
        PermissionDeniedError,
        RateLimitedError,
        ServerError,
        UnexpectedAnswerError,
        UnprocessableEntityError,
    )
    from .client.layers.retry import BudgetPolicy
    from .client.records import Record
    from .config import Secret, Settings, load_settings
    from .errors import (
        EffectError,
        EventTakenOverError,
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
        StoreLostError,
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
        UpgradeError,
        VerificationError,
    )
    from .net.transport import Transport
    from .runtime import BindError, Runtime, Started
    from .storage.effects import Transaction
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
    from .tenants.upgrade import (
        DefaultTenantResolver,
        HostUpgrade,
        Quiescence,
        SqliteTenantIds,
        StepBatch,
        UpgradeStep,
    )
    from .webhooks import DrainReport, HandlerRegistry, WebhookHandlerBase, WebhookReceiver
    from .webhooks import Services as _Services
    from .webhooks.markers import MARKERS_SCHEMA, first_time, forget_markers

    # For annotations: the services of programs that use this package's client (docs/adr/0030).
    Services = _Services[Client]

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
    # effects exactly once
    "MARKERS_SCHEMA",
    "Transaction",
    "first_time",
    "forget_markers",
    # the client
    "BudgetPolicy",
    "CallOptions",
    "Client",
    "Record",
    "SyncClient",
    "Transport",
    # the upgrade from a single tenant
    "DefaultTenantResolver",
    "HostUpgrade",
    "Quiescence",
    "SqliteTenantIds",
    "StepBatch",
    "UpgradeStep",
    # tenants
    "EnvironmentVariable",
    "KeyFile",
    "Tenant",
    "TenantCredentials",
    "TenantService",
    "TenantStatus",
    "TenantStatusService",
    "TransitionResult",
    # following a receiver
    "FeedReader",
    "FeedRefusedError",
    "open_feed",
    # running
    "Check",
    "DrainReport",
    "Runtime",
    "Started",
    "WebhookReceiver",
    # errors
    "BindError",
    "EffectError",
    "EventTakenOverError",
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
    "StoreLostError",
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
    "UpgradeError",
    "VerificationError",
    # errors of the client
    "ApiError",
    "AttemptTimeoutError",
    "AuthenticationError",
    "BadRequestError",
    "CallError",
    "CircuitOpenError",
    "ConflictError",
    "ConnectionFailedError",
    "DeadlineExceededError",
    "NotFoundError",
    "OutcomeUnknownError",
    "PermissionDeniedError",
    "RateLimitedError",
    "ServerError",
    "UnexpectedAnswerError",
    "UnprocessableEntityError",
]

_HOMES = {
    **dict.fromkeys(__all__, "errors"),
    "BudgetPolicy": "client.layers.retry",
    "CallOptions": "client.call",
    "Client": "client.client",
    "Record": "client.records",
    "SyncClient": "client.blocking",
    "Transport": "net.transport",
    **dict.fromkeys(
        ("DefaultTenantResolver", "HostUpgrade", "Quiescence", "StepBatch", "UpgradeStep"),
        "tenants.upgrade",
    ),
    "SqliteTenantIds": "tenants.upgrade",
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
    **dict.fromkeys(
        (
            "ApiError",
            "AttemptTimeoutError",
            "AuthenticationError",
            "BadRequestError",
            "CallError",
            "CircuitOpenError",
            "ConflictError",
            "ConnectionFailedError",
            "DeadlineExceededError",
            "NotFoundError",
            "OutcomeUnknownError",
            "PermissionDeniedError",
            "RateLimitedError",
            "ServerError",
            "UnexpectedAnswerError",
            "UnprocessableEntityError",
        ),
        "client.errors",
    ),
    **dict.fromkeys(("MARKERS_SCHEMA", "first_time", "forget_markers"), "webhooks.markers"),
    **dict.fromkeys(("Secret", "Settings", "load_settings"), "config"),
    **dict.fromkeys(("HandlerRegistry", "WebhookHandlerBase"), "webhooks.registry"),
    **dict.fromkeys(("DrainReport", "WebhookReceiver"), "webhooks.receiver"),
    **dict.fromkeys(("Runtime", "Started"), "runtime.runtime"),
    **dict.fromkeys(("FeedReader", "FeedRefusedError", "open_feed"), "admin.follow"),
    "BindError": "server.serve",
    "Check": "base.telemetry",
    "Services": "webhooks.services",
    "Transaction": "storage.effects",
}

__getattr__: Callable[[str], Any] = importing(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
