"""The store: deliveries before their senders are answered, tenants, messages to site managers.

To read this package, follow one delivery:

1. ``ports.py``: the contract of every store.
2. ``sql/deliveries.py``: the life of a delivery; ``sql/schema.py``: its tables.
3. ``inbox.py``: what SQLite and PostgreSQL do the same way; ``sqlite_inbox.py`` and
   ``postgres_inbox.py`` add what differs.
4. ``commit.py``: the thread that commits the work of all tasks; ``readers.py``: queries.
5. ``sql/leases.py``: which process runs a delivery; ``admission.py``: the answer to a duplicate.
6. ``claims.py``, ``known_keys.py``: how SQLite saves a commit for most inline deliveries.
7. ``engines/``: connections, failures of disks and servers. ``memory/``: a store without SQL.

The other modules are for operators: ``backup.py``, ``transfer.py``, ``examine.py``, ``replay.py``.
"""

from typing import TYPE_CHECKING

from ..base import importing

if TYPE_CHECKING:
    from .open import LEASE_SECONDS, open_inbox, open_store

__all__ = ["LEASE_SECONDS", "open_inbox", "open_store"]

# Imported on first use, because records and settings of the store need no Trio.
__getattr__ = importing(__name__, dict.fromkeys(__all__, "open"))
