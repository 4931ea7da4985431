"""Receiving webhooks: verification, handlers, inbox, queue (spec 4)."""

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
