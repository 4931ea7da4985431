"""The decisions about several processes: sums of their metrics, and restarts."""

import socket

import pytest
import trio

from sdk_trio.admin.metrics import add_up, lasting
from sdk_trio.base.telemetry import Sample
from sdk_trio.runtime.restarts import LONGEST_PAUSE_SECONDS, describe_end, pause_before
from sdk_trio.runtime.worker import FromProcess, MessageSocket, encoded, framed
from sdk_trio.webhooks.rejections import Rejection, RejectionRing


def test_counters_are_summed_by_labels_and_states_are_the_worst() -> None:
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


def test_the_first_restart_is_immediate_and_pauses_grow_to_a_limit() -> None:
    pauses = [pause_before(ends) for ends in range(1, 40)]
    assert pauses[:4] == [0.0, 0.5, 1.0, 2.0]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_SECONDS


def test_an_end_is_described_by_its_signal_or_status() -> None:
    assert [describe_end(status) for status in (7, -9, -250)] == [
        "with status 7",
        "by SIGKILL",
        "by signal 250",
    ]


def test_a_rejection_that_cannot_be_encoded_does_not_prevent_a_report() -> None:
    ring = RejectionRing(clock=lambda: 5.0)
    ring.add(Rejection("webhook.rejected", "type", 400, None, None, type="\ud800"))
    message = FromProcess("report", rejected=ring.after(0))
    assert b"report" in encoded(message)
    ring.add(Rejection("webhook.rejected", "id", 400, None, None))
    assert [rejection.cause for _, rejection in ring.after(1)] == ["id"]
    assert ring.after(2) == []


@pytest.mark.parametrize("garbage", [b"a line\n", b"\2\0\0\0", b"\0" * 9])
async def test_bytes_between_messages_are_detected_at_the_next_message(garbage: bytes) -> None:
    ours, theirs = socket.socketpair()
    messages = MessageSocket(ours)
    with theirs, trio.fail_after(30):
        theirs.sendall(framed(b"first") + garbage + framed(b"second") + framed(b"third"))
        assert await messages.receive() == b"first"
        with pytest.raises(ValueError, match="is not the beginning of a message"):
            await messages.receive()
    messages.close()
