"""Receiving webhooks: verification, handlers, inbox, queue (spec 4)."""

from typing import TYPE_CHECKING

from ..base.lazily import importing

if TYPE_CHECKING:
    from .app import DrainReport, WebhookReceiver
    from .registry import HandlerRegistry, WebhookHandlerBase
    from .services import Services
    from .simulator import Simulator

__all__ = [
    "DrainReport",
    "HandlerRegistry",
    "Services",
    "Simulator",
    "WebhookHandlerBase",
    "WebhookReceiver",
]

# Signing and verifying alone need neither trio nor a store.
__getattr__ = importing(
    __name__,
    {
        **dict.fromkeys(("DrainReport", "WebhookReceiver"), "app"),
        **dict.fromkeys(("HandlerRegistry", "WebhookHandlerBase"), "registry"),
        "Services": "services",
        "Simulator": "simulator",
    },
)
