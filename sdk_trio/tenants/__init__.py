"""Tenants: their life, their audit trail, their credentials (spec 2.6, 2.8 and 3.1)."""

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
