"""Logs faults of ours where a message is made or sent: what kind and where, not its words."""

import traceback

from ..base.logs import get_logger

_log = get_logger("notifications")


def log_fault(event: str, error: Exception, **fields: object) -> None:
    """Log an unexpected exception and the line that raised it.

    Neither its words nor its traceback: both may quote a credential, an address or a text.
    """
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{place.filename}:{place.lineno}"
    _log.error(event, error=type(error).__name__, where=where, **fields)
