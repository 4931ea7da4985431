"""The sender of a simulation: it behaves as real senders of webhooks do.

- It signs by Standard Webhooks, and waits ten seconds for an answer.
- It repeats an event with backoff up to ten times, and delivers some twice.
- It disables an endpoint after ten undelivered events in a row, and skips pending ones. The
  endpoint is enabled again after a while.
"""

import random
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import trio

from ...base.times import rfc3339_of
from ...config import Secret
from ...events.samples import sample_body
from ...webhooks.signed_request import SignedDelivery, sign_body
from .plan import Arrival
from .tenants import organization_of
from .virtual import BEGIN

#: Times of real senders, in seconds: for an answer, before the second attempt, and at most.
ANSWER_SECONDS = 10.0
BACKOFF_SECONDS = 4.0
LONGEST_BACKOFF_SECONDS = 600.0

ATTEMPTS = 10
FAILED_EVENTS = 10
ENABLED_AFTER_SECONDS = 120.0


def wait_after(attempt: int, dice: random.Random) -> float:
    """Return the wait after failed attempt number ``attempt``, in seconds, with 50 % jitter."""
    backoff = min(BACKOFF_SECONDS * 2.0 ** (attempt - 1), LONGEST_BACKOFF_SECONDS)
    return backoff * dice.uniform(0.5, 1.5)


def body_of(arrival: Arrival, sources: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> bytes:
    """Return the body of an event's deliveries; ``sources`` are those of the world."""
    happened = datetime.fromtimestamp(BEGIN + arrival.at, UTC)
    if arrival.source is None:
        return sample_body(
            arrival.type,
            now=happened,
            overrides={"id": arrival.subject},
            seed=arrival.webhook_id,
            organization=None if arrival.tenant is None else organization_of(arrival.tenant),
        )
    time = rfc3339_of(happened, timespec="milliseconds")
    data = {**sources[arrival.source][arrival.type], "id": arrival.subject}
    if "modified_at" in data:
        data["modified_at"] = time
    return msgspec.json.encode({"type": arrival.type, "timestamp": time, "data": data})


#: Opens a connection; raises OSError if that fails.
Dial = Callable[[], Awaitable[trio.SocketStream]]


class Sender:
    """Delivers events to one endpoint.

    Args:
        seed: its dice.
        secret: signs the deliveries.
        path: the endpoint's.
        make_body: returns the body of an event.
        dial: connects.
        record: writes a line of the story.
        acknowledged: called with the key of each event that was answered 2xx.
    """

    def __init__(
        self,
        seed: int,
        secret: Secret,
        path: str,
        make_body: Callable[[Arrival], bytes],
        dial: Dial,
        record: Callable[..., None],
        acknowledged: Callable[[str], None],
    ) -> None:
        self._seed = seed
        self._secret = secret
        self._path = path
        self._make_body = make_body
        self._dial = dial
        self._record = record
        self._acknowledged = acknowledged
        self._failed_in_a_row = 0
        self._disabled_until = 0.0
        self._disablings = 0
        #: The network is calm: no further connection is interrupted.
        self.calm = False

    async def deliver(self, arrival: Arrival) -> None:
        """Deliver one event, with retries, until it is acknowledged or given up."""
        own = "" if arrival.source is None else f"/{arrival.source}"
        dice = random.Random(f"{self._seed}/sender/{arrival.number}{own}")
        body = self._make_body(arrival)
        begun = self._disablings
        for attempt in range(1, ATTEMPTS + 1):
            # Disabling also skips pending events.
            if trio.current_time() < self._disabled_until or self._disablings != begun:
                self._record("sender.skips", id=arrival.key)
                return
            if await self._try(arrival, body, dice, attempt):
                self._failed_in_a_row = 0
                break
            await trio.sleep(wait_after(attempt, dice))
        else:
            self._give_up(arrival)
            return
        if arrival.again_after is not None:
            await trio.sleep(arrival.again_after)
            await self._try(arrival, body, dice, ATTEMPTS + 1)

    def _give_up(self, arrival: Arrival) -> None:
        self._record("sender.gives_up", id=arrival.key)
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= FAILED_EVENTS:
            self._failed_in_a_row = 0
            self._disabled_until = trio.current_time() + ENABLED_AFTER_SECONDS
            self._disablings += 1
            self._record("sender.disables_endpoint")

    async def _try(self, arrival: Arrival, body: bytes, dice: random.Random, attempt: int) -> bool:
        now = BEGIN + trio.current_time()
        signed = sign_body(
            body, secret=self._secret, webhook_id=arrival.webhook_id, timestamp=int(now)
        )
        latency = dice.expovariate(50)
        # Draw the same random numbers whether the network is calm or not.
        cut = dice.random() < 0.06 and not self.calm
        twice = dice.random() < 0.06
        status: int | str = "timeout"
        with trio.move_on_after(ANSWER_SECONDS):
            await trio.sleep(latency)
            if twice:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._exchange, signed, False)
                    status = await self._exchange(signed, cut)
            else:
                status = await self._exchange(signed, cut)
        self._record(
            "sender.delivers",
            id=arrival.key,
            type=arrival.type,
            subject=arrival.subject,
            attempt=attempt,
            answer=status,
        )
        if isinstance(status, int) and 200 <= status < 300:
            self._acknowledged(arrival.key)
            return True
        return False

    async def _exchange(self, signed: SignedDelivery, cut: bool) -> int | str:
        """Post a delivery; return the status, or why there is none."""
        headers = {
            "host": "localhost",
            "content-length": str(len(signed.body)),
            "connection": "close",
            **signed.headers,
        }
        lines = [f"POST {self._path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
        try:
            async with await self._dial() as stream:
                await stream.send_all("\r\n".join([*lines, "", ""]).encode() + signed.body)
                if cut:
                    return "cut"
                answer = b""
                while b"\r\n" not in answer:
                    part = await stream.receive_some(4096)
                    if not part:
                        return "reset"
                    answer += part
            return int(answer.split(b" ", 2)[1])
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            return type(error).__name__
