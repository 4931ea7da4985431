"""What the watcher asks of whoever makes the replicator take a new manifest. Pure."""

from collections.abc import Sequence
from typing import Protocol

from .manifest import TenantDatabaseFile


class Reloader(Protocol):
    """Makes a replicator work on what the manifest says: by a signal, or as its supervisor."""

    async def reload(self, databases: Sequence[TenantDatabaseFile]) -> bool:
        """Make the replicator replicate exactly these databases, which the manifest holds already.

        Returns whether it was told. If not, the reason has been logged, and the watcher asks again
        later with the databases of then. The same databases again are no error.

        Raises nothing but ``Cancelled``.
        """
        ...
