"""A runtime whose alerts arrive at a real receiver of webhooks, and whose clock can be moved."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from sdk_trio.runtime import Runtime, Started
from support.deliveries import settings
from support.notifications import FakeProvider, fake_provider, http_answer
from support.waiting import PATIENCE_SECONDS, until

#: A key of settings: it closes an alert at the first check in which its condition does not hold.
AT_ONCE = {"Alerts__CloseAfterSeconds": 0}


@attrs.define
class Clock:
    """The real time plus ``ahead`` seconds."""

    ahead: float = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


@attrs.define
class AlertedRuntime:
    """A running runtime with alerts, its clock, and the receiver of its messages."""

    runtime: Runtime
    started: Started
    clock: Clock
    provider: FakeProvider

    @property
    def target(self) -> str:
        """The URL of the receiver of deliveries."""
        return f"{self.started.webhook_url}/hooks/sdk"

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(request.body) for request in self.provider.requests]

    @property
    def kinds(self) -> list[str]:
        """The messages as ``dead_letters opened``."""
        return [f"{each['alert']} {each['type'].removeprefix('alert.')}" for each in self.messages]

    async def has_sent(self, *kinds: str) -> None:
        """Check the conditions until exactly these messages have arrived."""

        async def have_arrived() -> bool:
            await self.runtime.alerts.watch.check()
            return len(self.provider.requests) >= len(kinds)

        try:
            await until(have_arrived)
        except trio.TooSlowError:
            assert self.kinds == list(kinds)
            raise
        assert self.kinds == list(kinds)

    async def stored(self) -> dict[str, Any]:
        """Return the rows of the store by the names of the alerts."""
        book = await self.runtime.receiver.whole_store.alerts.load()
        return {str(alert.name): alert for alert in book.alerts}


def alert_keys(url: str, **keys: Any) -> dict[str, Any]:
    """Settings of alerts that are sent to a webhook."""
    return {
        "Alerts__Enabled": True,
        "Alerts__Channels": ["Webhook"],
        "Alerts__Webhook__Url": url,
        **AT_ONCE,
        **keys,
    }


@asynccontextmanager
async def alerted(
    handlers: Any = None, *, make: Any = settings, **keys: Any
) -> AsyncIterator[AlertedRuntime]:
    """Run a runtime with alerts; ``make`` returns the settings for keys."""
    clock = Clock()
    async with fake_provider(http_answer(204)) as provider, trio.open_nursery() as nursery:
        made = make(**alert_keys(f"{provider.url}/alerts", **keys))
        runtime = Runtime(made, handlers, clock=clock)
        with trio.fail_after(2 * PATIENCE_SECONDS):
            started = await nursery.start(runtime.run)
            yield AlertedRuntime(runtime, started, clock, provider)
            runtime.shut_down("the test ended")
