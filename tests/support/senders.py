"""A sender that delivers continuously, counts responses, and retries like the upstream."""

import collections
import itertools

import attrs
import trio

from sdk_trio.config import KeyDerivation
from sdk_trio.testing import sign_delivery

from .deliveries import SECRET
from .waiting import until
from .wire import Wire


@attrs.define
class Senders:
    """Delivers until stopped, each delivery on a new connection.

    ``accepted`` are the ids that were answered 200. ``answers`` counts responses by status, and
    failures by the name of the exception. Secret and address may change meanwhile.
    """

    url: str
    secret: str = SECRET
    accepted: list[str] = attrs.Factory(list)
    answers: collections.Counter[int | str] = attrs.Factory(collections.Counter)
    pause: float = 0.002
    retry: bool = True
    stopped: bool = False
    _numbers: itertools.count = attrs.Factory(itertools.count)

    async def run(self, tasks: int = 4) -> None:
        """Send from ``tasks`` tasks until :meth:`stop`; every delivery is accepted by then."""
        async with trio.open_nursery() as nursery:
            for _ in range(tasks):
                nursery.start_soon(self._send)

    def stop(self) -> None:
        self.stopped = True

    async def wait_for(self, more: int) -> None:
        """Wait until ``more`` deliveries have been accepted from now on."""
        wanted = len(self.accepted) + more
        await until(lambda: len(self.accepted) >= wanted)

    async def _send(self) -> None:
        while not self.stopped:
            webhook_id = f"msg_{next(self._numbers)}"
            while await self._attempt(webhook_id) != 200 and self.retry:
                await trio.sleep(0.02)
            await trio.sleep(self.pause)

    async def _attempt(self, webhook_id: str, seconds: float = 0.002) -> int | str:
        signed = sign_delivery(
            "order.paid",
            {"metadata": {"seconds": str(seconds)}},
            secret=self.secret,
            webhook_id=webhook_id,
            derivation=KeyDerivation.STANDARD,
        )
        answer: int | str
        try:
            with trio.fail_after(60), await Wire.connect(self.url) as wire:
                answer = (await wire.post(signed)).status
        except (OSError, trio.BrokenResourceError, trio.TooSlowError) as error:
            answer = type(error).__name__
            if isinstance(error.__cause__, BaseExceptionGroup | OSError):
                answer = "refused" if "refused" in repr(error.__cause__) else answer
        self.answers[answer] += 1
        if answer == 200:
            self.accepted.append(webhook_id)
        return answer
