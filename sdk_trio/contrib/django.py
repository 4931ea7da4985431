"""Django's database connections in handlers that run in threads.

Django opens a connection for each thread and closes it at the end of a request. A handler is not a
request. Without this module its connections would stay open, and one that the database server has
closed would fail every run in its thread.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import close_old_connections

from ..events import Event


@contextmanager
def database_connections(event: Event[Any]) -> Iterator[None]:
    """Close old connections before and after a run, as Django does for a request.

    Pass it to ``handlers.around_threads``. Connections older than ``CONN_MAX_AGE`` (with the
    default 0, all of them) and broken ones are closed, in the thread of the run.
    """
    close_old_connections()
    try:
        yield
    finally:
        close_old_connections()
