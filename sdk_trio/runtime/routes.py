"""Which ASGI application answers which path on the receiver's address."""

from ..config import Settings
from ..webhooks import Simulator, WebhookReceiver
from ..webhooks.receiver import Receive, Scope, Send
from ..webhooks.simulator import PREFIX


class Routes:
    """The receiver at its path and, in Development, the simulator beside it (spec 4.3)."""

    def __init__(self, settings: Settings, receiver: WebhookReceiver) -> None:
        self._receiver = receiver
        self._simulator = Simulator(settings) if settings.is_development else None

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
        if self._simulator is not None and scope["path"].startswith(PREFIX):
            await self._simulator(scope, receive, send)
        else:
            await self._receiver(scope, receive, send)
