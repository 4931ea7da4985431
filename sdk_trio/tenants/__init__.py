"""Tenants: their status, their audit trail, their credentials, their databases and clients."""

from ..storage.tenant_records import (
    AuditRecord,
    EnvironmentVariable,
    KeyFile,
    OutboxRecord,
    Tenant,
    TenantCredentials,
    TenantStatus,
    Transition,
)
from .ports import TenantStatusService
from .service import TenantService
from .status import TransitionResult

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
