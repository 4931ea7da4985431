"""The synchronous client's resources: at run time the asynchronous one's, with other operations.

What an operation becomes is the client's choice, so there is one table; the stub beside this file
has their signatures for type checkers.
"""

from . import Resources as SyncResources

__all__ = ["SyncResources"]
