"""A running receiver with its admin address, and requests to that address."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from sdk_trio.runtime import Runtime
from sdk_trio.testing import AppUnderTest
from sdk_trio.webhooks import HandlerRegistry

from .deliveries import settings
from .serving import running
from .waiting import PATIENCE_SECONDS

#: A test value of the variable that names the token.
TOKEN = "token-of-a-test-as-long-as-it-has-to-be"  # a test value


class AdminUnderTest:
    """A runtime, and a client of its admin address."""

    def __init__(self, runtime: Runtime, client: httpx.AsyncClient) -> None:
        self.runtime = runtime
        self.app = AppUnderTest(runtime)
        self._client = client

    @property
    def url(self) -> str:
        """The URL of the admin address."""
        return str(self._client.base_url).rstrip("/")

    async def get(self, path: str, token: str | None = None, **headers: str) -> httpx.Response:
        return await self.ask("GET", path, token, headers)

    async def api(self, path: str) -> Any:
        """Return the document at a path below ``/api``."""
        answer = await self.get(f"/api{path}", TOKEN)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def replay(self, order: Any, **headers: str) -> httpx.Response:
        return await self.ask("POST", "/api/events/replay", TOKEN, headers, order)

    async def ask(
        self,
        method: str,
        path: str,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        order: Any = None,
    ) -> httpx.Response:
        sent = {name.replace("_", "-"): value for name, value in (headers or {}).items()}
        if token is not None:
            sent["authorization"] = f"Bearer {token}".strip()
        return await self._client.request(method, path, headers=sent, json=order)

    async def metrics(self) -> dict[str, float]:
        """Return every sample of ``/metrics`` by its name with labels."""
        answer = await self.get("/metrics")
        assert answer.status_code == 200, answer.text
        lines = [line for line in answer.text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@asynccontextmanager
async def administered(
    handlers: HandlerRegistry | None = None, *, patience: float = PATIENCE_SECONDS, **keys: Any
) -> AsyncIterator[AdminUnderTest]:
    """Run a runtime with an admin address; settings as ``Webhooks__Queue__Capacity=2``."""
    keys = {"Admin__Enabled": True, "Admin__TokenEnvVar": "SDK_TEST_ADMIN_TOKEN", **keys}
    runtime = Runtime(settings(**keys), handlers)
    async with (
        running(runtime, patience) as started,
        httpx.AsyncClient(base_url=started.admin[0], timeout=None) as client,
    ):
        yield AdminUnderTest(runtime, client)
