"""Receiving webhooks: verification, handlers, inbox, queue.

A delivery passes ``receiver`` (screening, then ``verdict``) and ``app`` (which way it takes), and
``dispatcher`` runs it: inline before the sender is answered, or from ``queuer`` after it was
committed to the inbox. ``lifecycle`` decides what a failed run leads to.
"""

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

# The names are imported on first use, because programs that only sign and verify need neither trio
# nor a store.
__getattr__ = importing(
    __name__,
    {
        **dict.fromkeys(("DrainReport", "WebhookReceiver"), "app"),
        **dict.fromkeys(("HandlerRegistry", "WebhookHandlerBase"), "registry"),
        "Services": "services",
        "Simulator": "simulator",
    },
)
