"""The upstream of a simulation: the user's own upstream, with outages."""

import random
from collections.abc import Callable

import httpx
import trio

#: The settings of a client of this upstream.
SETTINGS = {
    "Mode": "Custom",
    "CustomBaseUrl": "https://upstream.example",
    "AccessToken": "simulated-token",
}

#: The mean time of an answer in seconds, and the share of requests that fail without an outage.
ANSWER_SECONDS = 0.05
FAILING = 0.02

#: The seconds that a transport waits for an answer, unless the request sets its own timeout.
TIMEOUT_SECONDS = 10.0

_OUTAGES = ("refused", "reset", "timeout", "late", "429", "500", "503")


class SimulatedUpstream(httpx.AsyncBaseTransport):
    """A transport with outages.

    Args:
        upstream: answers the requests.
        dice: choose how a request fails.
        fails: returns whether there is an outage.
        record: writes a line of the story.
    """

    def __init__(
        self,
        upstream: httpx.AsyncBaseTransport,
        dice: random.Random,
        fails: Callable[[], bool],
        record: Callable[..., None],
    ) -> None:
        self._upstream = upstream
        self._dice = dice
        self._fails = fails
        self._record = record

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer, or fail."""
        # Draw the same random numbers whether it fails or not.
        seconds, unlucky = self._dice.expovariate(1 / ANSWER_SECONDS), self._dice.random() < FAILING
        outage = self._dice.choice(_OUTAGES)
        failing = self._fails() or unlucky
        self._record("upstream.is_called", path=request.url.path, fault=outage if failing else "")
        await trio.sleep(seconds)
        return await (self._fail(request, outage) if failing else self._answer(request))

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        return await self._upstream.handle_async_request(request)

    async def _fail(self, request: httpx.Request, outage: str) -> httpx.Response:
        limit = request.extensions.get("timeout", {}).get("read") or TIMEOUT_SECONDS
        match outage:
            case "refused":
                raise httpx.ConnectError("the upstream refuses connections")
            case "reset":
                # The request is executed, but the client gets no answer.
                await self._answer(request)
                raise httpx.ReadError("the connection was reset")
            case "timeout":
                await trio.sleep(limit)
                raise httpx.ReadTimeout("the upstream did not answer")
            case "late":
                await self._answer(request)
                await trio.sleep(limit)
                raise httpx.ReadTimeout("the answer came too late")
            case "429":
                wait = str(self._dice.randint(1, 5))
                return httpx.Response(429, headers={"Retry-After": wait}, json={"detail": "slow"})
        return httpx.Response(int(outage), json={"detail": "an outage"})
