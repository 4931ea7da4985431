"""What a handler may use (contracts 4)."""

from typing import Generic, TypeVar

import attrs

from ..config import Settings
from ..errors import NotRunningError
from ..storage.ports import Inbox

ClientType = TypeVar("ClientType")


@attrs.frozen
class Services(Generic[ClientType]):
    """Given to handler factories and to handler functions of two parameters.

    ``settings`` are the validated settings, ``store`` is the inbox that holds the delivery.
    ``client`` is the client of the upstream API. This package does not know its class, whoever
    builds the services does; ``sdk_trio.Services`` is the form that says :class:`sdk_trio.Client`.
    """

    settings: Settings
    store: Inbox
    _client: ClientType | None = None

    @property
    def client(self) -> ClientType:
        """The open client of the upstream API, for as long as handlers run.

        Raises:
            NotRunningError: there is none, because the receiver runs standalone (spec 1.6).
        """
        if self._client is None:
            raise NotRunningError(
                "services.client: the receiver runs standalone, so there is no client; run the "
                "full stack, with Sdk:AccessToken and without standalone"
            )
        return self._client
