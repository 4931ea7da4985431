"""What a handler may use (contracts 4)."""

import attrs

from ..config import Settings
from ..storage.ports import Inbox


@attrs.frozen
class Services:
    """Given to handler factories and to handler functions of two parameters.

    ``settings`` are the validated settings, ``store`` is the inbox that holds the delivery.
    """

    settings: Settings
    store: Inbox
