"""The store: deliveries before their senders are answered, tenants, messages to site managers.

To read this package, follow one delivery:

1. ``records/deliveries.py``: what a store takes and returns; ``ports.py``: the contract of every
   store; ``open.py``: the uses that a store is opened for.
2. ``sql/dialect.py``: the SQL of all statements, and the methods made of functions of a
   transaction ("Whole units" can wait until ``engines/postgres.py``); ``sql/schema.py``: the
   tables; ``sql/versions.py``: which store is found.
3. ``admission.py``: the answer to a duplicate; ``sql/arrivals.py``: how a key is found;
   ``sql/admission.py``: the states of a delivery, and how it enters them; ``sql/runs.py``.
4. ``engines/__init__.py``: what an engine does; ``commit.py``: the thread that commits the work of
   all tasks; ``readers.py``: queries; ``inbox.py``: the methods that SQLite and PostgreSQL share.
5. ``sql/leases.py``: which process runs a delivery; ``sql/policies.py``: limits of handlers.
6. ``unawaited.py``, ``known_keys.py``, ``claims_file.py``: how SQLite saves a commit for most
   deliveries; ``effects.py``; ``sqlite_inbox.py`` and ``postgres_inbox.py`` add what differs.
7. ``sql/reads.py``: listings and counts. ``engines/``: connections, failures of disks and servers;
   ``engines/postgres_days.py``: history by days on PostgreSQL. ``memory/``: deliveries without SQL.

Other data: ``sql/checkpoints.py``, ``sql/tenants.py``, ``sql/notifications.py``,
``sql/alerts.py``, ``subjects.py`` (the newest state of a subject), ``data_directory.py`` (its
lock).

For operators: ``backup.py``, ``copying.py``, ``locations.py``, ``transfer.py``,
``examine.py``, ``examine_postgres.py``.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..base import importing

if TYPE_CHECKING:
    from .open import LEASE_SECONDS, open_inbox, open_store

__all__ = ["LEASE_SECONDS", "open_inbox", "open_store"]

# Imported on first use, because records and settings of the store need no Trio.
__getattr__: Callable[[str], Any] = importing(__name__, dict.fromkeys(__all__, "open"))
