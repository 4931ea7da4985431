"""The store: deliveries before their senders are answered, tenants, messages to site managers."""

from typing import TYPE_CHECKING

from ..base import importing

if TYPE_CHECKING:
    from .open import LEASE_SECONDS, open_inbox, open_store

__all__ = ["LEASE_SECONDS", "open_inbox", "open_store"]

# Imported on first use, because records and settings of the store need no Trio.
__getattr__ = importing(__name__, dict.fromkeys(__all__, "open"))
