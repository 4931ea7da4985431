"""Tenants: their status, their audit trail, their credentials, their databases and clients."""

from ..records.tenants import (
    AuditRecord,
    EnvironmentVariable,
    KeyFile,
    OutboxRecord,
    Tenant,
    TenantCredentials,
    TenantStatus,
    Transition,
)
from .service import TenantService
from .status import TenantStatusService, TransitionResult

__all__ = [
    "AuditRecord",
    "EnvironmentVariable",
    "KeyFile",
    "OutboxRecord",
    "Tenant",
    "TenantCredentials",
    "TenantService",
    "TenantStatus",
    "TenantStatusService",
    "Transition",
    "TransitionResult",
]
