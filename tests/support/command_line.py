"""Runs the command line in this process, and returns its result as data."""

import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from sdk_trio.cli.main import main
from sdk_trio.config import Settings
from sdk_trio.records.deliveries import Dead, DeliveryState, Done, NewDelivery
from sdk_trio.storage.open import open_inbox
from sdk_trio.storage.ports import Inbox

from .keyed import ByKey

#: When every event of :meth:`CommandLine.seed` arrived.
ARRIVAL = 1_800_000_000.0


@attrs.frozen
class Answer:
    """The exit status of a command, and its output."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


@attrs.frozen
class CommandLine:
    """Runs commands in its own directory; ``data`` is the data directory there."""

    directory: Path
    capsys: pytest.CaptureFixture[str]

    @property
    def data(self) -> Path:
        return self.directory / "sdk-data"

    def __call__(self, *words: str) -> Answer:
        self.capsys.readouterr()
        umask = os.umask(0)
        os.umask(umask)
        try:
            status = main(words)
        finally:
            os.umask(umask)  # commands of a process of their own may keep theirs
        captured = self.capsys.readouterr()
        return Answer(status, captured.out, captured.err)

    def seed(self, *events: tuple[str, DeliveryState] | tuple[str, DeliveryState, bytes]) -> None:
        """Add events to the store: id, state, and optionally a body."""

        async def fill() -> None:
            settings = Settings.from_mapping(
                {"Storage:Path": str(self.data)}, standalone=True, receiver=False
            )
            async with open_inbox(settings, owner=f"seed-{uuid.uuid4()}") as inbox:
                for number, event in enumerate(events):
                    raw = event[2] if len(event) == 3 else b'{"type":"order.paid"}'
                    await _bring(inbox, event[0], event[1], raw, ARRIVAL + number)

        trio.run(fill)


async def _bring(
    opened: Inbox, webhook_id: str, state: DeliveryState, raw: bytes, now: float
) -> None:
    """Move one event to ``state`` as a receiver would."""
    inbox = ByKey(opened)
    delivery = NewDelivery(
        webhook_id, "order.paid", raw, int(now), now, subject=f"order-of-{webhook_id}"
    )
    if state is DeliveryState.PARKED:
        await inbox.park(delivery)
        return
    await inbox.accept(delivery, leased=state is not DeliveryState.RECEIVED)
    if state is DeliveryState.RECEIVED:
        return
    await inbox.start(webhook_id, now=now)
    if state is DeliveryState.DONE:
        await inbox.finish(webhook_id, Done(), now=now + 1)
    elif state is DeliveryState.DEAD:
        await inbox.finish(webhook_id, Dead("ValueError: no such product"), now=now + 2)


def clear_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the settings in this machine's environment."""
    names: Sequence[str] = [name for name in os.environ if name.upper().startswith("SDK")]
    for name in (*names, "STATE_DIRECTORY", "CREDENTIALS_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
