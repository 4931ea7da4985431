"""Optional parts of a runtime, imported only where the settings ask for them.

A receiver without client, admin address and tenants then starts faster and takes less memory.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..config import Settings

if TYPE_CHECKING:
    from ..client.client import Client
    from ..webhooks.companion import Companion
    from .administrator import Administrator
    from .notifier import ChannelFactory, Notifier
    from .runtime import Runtime


def make_client(settings: Settings) -> "Client":
    """Return a client of the upstream API, not open yet."""
    from ..client.client import Client

    return Client(settings)


def make_administrator(runtime: "Runtime", clock: Callable[[], float]) -> "Administrator":
    """Return the server of the admin address of ``runtime``."""
    from .administrator import Administrator

    return Administrator(runtime, clock=clock)


def make_notifier(
    settings: Settings, channels: "ChannelFactory | None", clock: Callable[[], float]
) -> "Notifier | None":
    """Return the sender of notifications; None where they are not enabled.

    While they are not, their other settings are not looked at.
    """
    if not (settings.multi_tenant.enabled and settings.multi_tenant.notifications.enabled):
        return None
    from .notifier import Notifier

    return Notifier(settings, channels=channels, clock=clock)


def make_companion(settings: Settings, notifier: "Notifier | None") -> "Companion | None":
    """Return the part that runs beside the receiver's queue; None where there are no tenants.

    Without notifications it marks them off in the store; see ``docs/adr/0013``.
    """
    if notifier is not None or not settings.multi_tenant.enabled:
        return notifier
    from .silencer import Silencer

    return Silencer()
