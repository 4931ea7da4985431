"""The machine's wall clock is set while a daemon runs, or between two of its runs."""

from pathlib import Path

import httpx
import pytest
from support.clock_steps import ClockSteps
from support.daemon import Daemon, Place
from support.deliveries import SECRET
from support.waiting import PATIENCE_SECONDS, wait_until

from sdk_trio.testing import sign_delivery

HOURS = 3600

#: Each event of an order fails once, and asks for a few seconds before it is tried again.
APPLICATION = """
import os, sdk_trio
from sdk_trio.events import OrderPaidEvent

handlers = sdk_trio.HandlerRegistry()
handled = os.open("handled", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

@handlers.on(OrderPaidEvent, enqueue=True, ordered=True)
async def paid(event):
    if event.webhook_id == "first" and event.attempt == 1:
        raise sdk_trio.RetryLater(4)
    os.write(handled, event.webhook_id.encode() + b"\\n")
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "application.py").write_text(APPLICATION)
    return Place(tmp_path)


@pytest.fixture
def clock(place: Place) -> ClockSteps:
    clock = ClockSteps(place.directory)
    place.environ.update(clock.environment)
    return clock


def deliver(daemon: Daemon, clock: ClockSteps, webhook_id: str) -> None:
    signed = sign_delivery(
        b'{"type":"order.paid","data":{"id":"order-1"}}',
        secret=SECRET,
        webhook_id=webhook_id,
        timestamp=int(clock.now()),
    )
    answer = httpx.post(
        f"{daemon.receiver}/hooks/sdk",
        content=signed.body,
        headers=dict(signed.headers),
        timeout=PATIENCE_SECONDS,
    )
    assert answer.status_code == 200, answer.text


def handled(place: Place) -> list[str]:
    return (place.directory / "handled").read_text().splitlines()


def wait_for_both(place: Place) -> None:
    wait_until(lambda: handled(place) == ["first", "second"], lambda: handled(place))


@pytest.mark.parametrize("step", [-2 * HOURS, 2 * HOURS], ids=["back", "forward"])
def test_a_retry_and_the_line_behind_it_go_on_when_the_clock_is_set(place, clock, step):
    clock.set(-step)  # the machine booted with a wrong clock, and now it is corrected
    with place.daemon("--app", "application:handlers") as daemon:
        deliver(daemon, clock, "first")
        deliver(daemon, clock, "second")
        daemon.wait_for("webhook.postponed")
        assert handled(place) == []
        clock.set(0)
        wait_for_both(place)
        stepped = daemon.wait_for("runtime.clock_stepped")
        assert abs(stepped["seconds"] - step) < HOURS


def test_they_go_on_when_the_clock_was_set_back_between_two_lives(place, clock):
    clock.set(2 * HOURS)
    with place.daemon("--app", "application:handlers") as daemon:
        deliver(daemon, clock, "first")
        deliver(daemon, clock, "second")
        daemon.wait_for("webhook.postponed")
        daemon.process.kill()
    clock.set(0)
    with place.daemon("--app", "application:handlers"):
        wait_for_both(place)
