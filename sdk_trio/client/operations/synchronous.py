"""The synchronous client's resources: at run time the asynchronous one's, with other operations.

The client chooses whether an operation is awaited or blocks, so there is one table for both; the
stub beside this file has the signatures for type checkers.
"""

from . import Resources as SyncResources

__all__ = ["SyncResources"]
