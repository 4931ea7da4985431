"""Events that end the process which handles them, under a supervisor that starts it again."""

import time
from collections.abc import Sequence
from math import inf
from pathlib import Path

import attrs
import trio

from sdk_trio.records.deliveries import DeliveryRecord
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.sqlite_inbox import SqliteInbox
from sdk_trio.testing import sign_delivery

from .deliveries import SECRET
from .respawned import Respawned
from .wire import Wire

#: The actions of the handler, by name.
DEATHS = (
    "os._exit",
    "segmentation fault",
    "SIGKILL to itself",
    "sys.exit",
    "KeyboardInterrupt",
    "GeneratorExit",
    "asyncio.CancelledError",
    "leaked trio.Cancelled",
)

APPLICATION = """
import asyncio, ctypes, os, resource, signal, sys, trio, sdk_trio
from sdk_trio.events import OrderCreatedEvent, OrderPaidEvent, OrderUpdatedEvent

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
handlers = sdk_trio.HandlerRegistry()
ran = os.open(os.environ["RAN"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


async def die(event):
    os.write(ran, b"run\\n")
    match event.data.metadata["death"]:
        case "os._exit":
            os._exit(7)
        case "segmentation fault":
            ctypes.string_at(0)
        case "SIGKILL to itself":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sys.exit":
            sys.exit(3)
        case "KeyboardInterrupt":
            raise KeyboardInterrupt
        case "GeneratorExit":
            raise GeneratorExit
        case "asyncio.CancelledError":
            raise asyncio.CancelledError
        case "leaked trio.Cancelled":
            with trio.CancelScope() as scope:
                scope.cancel()
                try:
                    await trio.sleep(1)
                except trio.Cancelled as cancelled:
                    kept = cancelled
            raise kept


handlers.register(OrderPaidEvent, die, enqueue=True)
handlers.register(OrderCreatedEvent, die)


@handlers.on(OrderUpdatedEvent)
async def harmless(event):
    pass
"""

SETTINGS = {
    "Webhooks:Queue:MaxAttempts": 3,
    "Webhooks:InlineMaxAttempts": 3,
    "Webhooks:Queue:RetryBaseSeconds": 0.01,
    "Webhooks:Queue:RetryCapSeconds": 0.02,
}

#: After accepting deliveries for this many seconds, a daemon counts as stable.
QUIET_SECONDS = 5.0

#: The seconds that a sender waits for a response.
ANSWER_SECONDS = 3.0


@attrs.frozen
class Loop:
    """The result for one event: of the daemon, of the event, and of later deliveries.

    ``statuses`` are those of the processes, in order; ``others`` is the response to a harmless
    delivery at the end.
    """

    death: str
    way: str
    starts: int
    runs: int
    statuses: Sequence[int]
    state: str
    attempts: int
    error: str | None
    others: str


async def crash_loop(directory: Path, death: str, way: str, *, starts: int) -> Loop:
    """Deliver one event that ends the process, and supervise the daemon for ``starts`` starts."""
    directory.mkdir(parents=True)
    ran = directory / "ran"
    daemon = Respawned(directory, APPLICATION, SETTINGS, {"RAN": str(ran)}, most_starts=starts)
    others = "no daemon"
    async with trio.open_nursery() as nursery:
        await nursery.start(daemon.run)
        await daemon.accepting()
        event = "order.paid" if way == "enqueued" else "order.created"
        acknowledged, answer, asked_at, quiet_since = False, "", 0, inf
        while not daemon.ended and time.monotonic() - quiet_since < QUIET_SECONDS:
            if daemon.starts > asked_at:
                asked_at, quiet_since = daemon.starts, inf
                await _accepting_or_over(daemon, asked_at)
                quiet_since, answer = time.monotonic(), "none yet"
            # The sender repeats the delivery until the response is 200.
            if not acknowledged and answer != "connection lost":
                answer = await _answer(daemon, event, death, webhook_id="deadly")
                acknowledged = answer == "200"
            await trio.sleep(0.05)
        if not daemon.ended:
            others = await _answer(daemon, "order.updated", death, webhook_id="harmless")
        daemon.stop()
    record = await _record(daemon)
    runs = len(ran.read_text().split()) if ran.exists() else 0
    return Loop(
        death,
        way,
        daemon.starts,
        runs,
        [one.status for one in daemon.deaths],
        "unknown" if record is None else str(record.state),
        0 if record is None else record.attempts,
        None if record is None else record.last_error,
        others,
    )


async def _accepting_or_over(daemon: Respawned, start: int) -> None:
    """Wait until the process of this start accepts connections or has died."""
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                while daemon.starts == start and not daemon.ended:
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await daemon.accepting()
            nursery.cancel_scope.cancel()


async def _answer(daemon: Respawned, event: str, death: str, *, webhook_id: str) -> str:
    signed = sign_delivery(
        event, {"metadata": {"death": death}}, secret=SECRET, webhook_id=webhook_id
    )
    try:
        with trio.fail_after(ANSWER_SECONDS):
            with await Wire.connect(daemon.url) as wire:
                return str((await wire.post(signed)).status)
    except trio.TooSlowError:
        return "no answer"
    except (OSError, trio.BrokenResourceError):
        return "connection lost"


async def _record(daemon: Respawned) -> DeliveryRecord | None:
    inbox = await SqliteInbox.open(
        daemon.data / "inbox.db",
        LeaseTerms(owner="observer", lease_seconds=1, dedup_seconds=3600, payload_seconds=3600),
    )
    try:
        records = await inbox.find(limit=10)
    finally:
        await inbox.close()
    return next((one for one in records if one.webhook_id == "deadly"), None)


async def crash_loops(directory: Path, *, starts: int) -> list[Sequence[object]]:
    """Return the rows of a table with its head: every kind of death, inline and enqueued."""
    head = ("death", "way", "starts", "runs", "statuses", "state", "attempts", "error", "others")
    rows: list[Sequence[object]] = [head, ("---",) * len(head)]
    for death in DEATHS:
        for way in ("inline", "enqueued"):
            place = directory / f"{way}-{DEATHS.index(death)}"
            rows.append(attrs.astuple(await crash_loop(place, death, way, starts=starts)))
    return rows
