"""Receiving webhooks: verification, handlers, inbox, queue.

A delivery passes ``endpoint`` (screen), ``body``, ``verify`` and again ``endpoint`` (route and
answer). ``run`` runs it: inline before the sender is answered, or from a worker of ``queue`` after
it was committed to the inbox. ``outcomes`` decides what follows a failed run. ``receiver`` contains
them: it opens the store, starts and drains them.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..base import importing

if TYPE_CHECKING:
    from .receiver import DrainReport, WebhookReceiver
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
__getattr__: Callable[[str], Any] = importing(
    __name__,
    {
        **dict.fromkeys(("DrainReport", "WebhookReceiver"), "receiver"),
        **dict.fromkeys(("HandlerRegistry", "WebhookHandlerBase"), "registry"),
        "Services": "services",
        "Simulator": "simulator",
    },
)
