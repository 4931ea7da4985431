"""Routing on the receiver's address: the receiver and, in Development, the simulator."""

from typing import TYPE_CHECKING

from ..base.asgi import App, Receive, Scope, Send
from ..config import Settings
from ..webhooks import WebhookReceiver

if TYPE_CHECKING:
    from ..webhooks.simulator import Simulator


class Routes:
    """The receiver at its path and, in Development, the simulator beside it.

    Nowhere else is the simulator mapped: it signs deliveries for whoever asks.
    """

    def __init__(self, settings: Settings, receiver: WebhookReceiver) -> None:
        self._receiver = receiver
        self._simulator = _make_simulator(settings) if settings.is_development else None

    @property
    def application(self) -> App:
        """What serves requests: the receiver itself where nothing stands beside it."""
        return self._receiver if self._simulator is None else self

    def started(self, address: str) -> None:
        """Tell the simulator where its deliveries go: the receiver's real address."""
        if self._simulator is not None:
            self._simulator.address = address

    def reload(self, settings: Settings) -> None:
        """Let the simulator sign with the secrets of ``settings``."""
        if self._simulator is not None:
            self._simulator.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI ``http`` request."""
        if self._simulator is not None and self._simulator.serves(scope["path"]):
            await self._simulator(scope, receive, send)
        else:
            await self._receiver(scope, receive, send)


def _make_simulator(settings: Settings) -> "Simulator":
    from ..webhooks.simulator import Simulator  # loads every sample

    return Simulator(settings)
