"""Opens the channels that the settings enable."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from ..config import Settings
from ..notifications.ports import Channel


@asynccontextmanager
async def open_channels(settings: Settings) -> AsyncIterator[Mapping[str, Channel]]:
    """Open the enabled channels, by name: ``email``, ``sms``, ``webhook``."""
    raise NotImplementedError
    yield {}
