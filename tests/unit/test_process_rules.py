"""The decisions about several processes: how their figures add up, and when one begins again."""

import socket

import pytest
import trio

from sdk_trio.admin.metrics import add_up, lasting
from sdk_trio.base.telemetry import Sample
from sdk_trio.runtime.processes import LONGEST_PAUSE_SECONDS, pause_before, tell_end
from sdk_trio.runtime.worker import FromProcess, MessageSocket, encoded, framed
from sdk_trio.webhooks.rejections import Rejection, RejectionRing


def test_counters_add_up_by_their_labels_and_of_a_state_the_worst_is_shown() -> None:
    handled = (("result", "handled"),)
    one = [
        Sample("sdk_webhook_deliveries_total", handled, 3),
        Sample("sdk_queue_depth", (), 2),
        Sample("sdk_client_circuit_state", (), 1),
    ]
    two = [
        Sample("sdk_webhook_deliveries_total", handled, 4),
        Sample("sdk_webhook_deliveries_total", (("result", "dead"),), 1),
        Sample("sdk_queue_depth", (), 5),
        Sample("sdk_client_circuit_state", (), 0),
    ]
    assert add_up([one, two]) == [
        Sample("sdk_webhook_deliveries_total", handled, 7),
        Sample("sdk_queue_depth", (), 7),
        Sample("sdk_client_circuit_state", (), 1),
        Sample("sdk_webhook_deliveries_total", (("result", "dead"),), 1),
    ]
    assert lasting(one) == one[:1], "what a process that has ended still counts for"


def test_the_first_successor_begins_at_once_and_the_pauses_grow_to_a_bound() -> None:
    pauses = [pause_before(ends) for ends in range(1, 40)]
    assert pauses[:4] == [0.0, 0.5, 1.0, 2.0]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_SECONDS


def test_an_end_is_told_by_its_signal_or_status() -> None:
    assert [tell_end(status) for status in (7, -9, -250)] == [
        "with status 7",
        "by SIGKILL",
        "by signal 250",
    ]


def test_a_rejection_that_cannot_be_written_does_not_keep_a_report_back() -> None:
    ring = RejectionRing(clock=lambda: 5.0)
    ring.add(Rejection("webhook.rejected", "type", 400, None, None, type="\ud800"))
    message = FromProcess("report", rejected=ring.after(0))
    assert b"report" in encoded(message)
    ring.add(Rejection("webhook.rejected", "id", 400, None, None))
    assert [rejection.cause for _, rejection in ring.after(1)] == ["id"]
    assert ring.after(2) == []


@pytest.mark.parametrize("garbage", [b"a line\n", b"\2\0\0\0", b"\0" * 9])
async def test_what_comes_between_messages_is_noticed_at_the_next_one(garbage: bytes) -> None:
    ours, theirs = socket.socketpair()
    messages = MessageSocket(ours)
    with theirs, trio.fail_after(30):
        theirs.sendall(framed(b"first") + garbage + framed(b"second") + framed(b"third"))
        assert await messages.receive() == b"first"
        with pytest.raises(ValueError, match="begins no message"):
            await messages.receive()
    messages.close()
