"""Django's database connections in handlers that run in threads.

Django opens a connection for each thread and closes it when a request ends. A handler
is not a request: without this its connections would stay open, and one dropped by the server would
fail every run in its thread.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import close_old_connections

from ..events import Event


@contextmanager
def database_connections(event: Event[Any]) -> Iterator[None]:
    """Do at the start and end of a run what Django does for a request.

    Give it to ``handlers.around_threads``. Connections older than ``CONN_MAX_AGE`` (at the default,
    0, all of them) and broken ones are closed, in the thread of the run.
    """
    close_old_connections()
    try:
        yield
    finally:
        close_old_connections()
