"""The pure parts of the admin API: charts, groups of errors, positions of the feed, the ring."""

import base64
import itertools
from math import inf

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.admin.access import Access
from sdk_trio.admin.feed import FeedQuery, clusters, parse_feed, without_holes
from sdk_trio.admin.replay import error_group
from sdk_trio.admin.series import STEPS, Series, quantile
from sdk_trio.base.telemetry import Histogram, Sample
from sdk_trio.records.deliveries import DeliveryRecord, DeliveryState
from sdk_trio.webhooks.rejections import KEPT, Rejection, RejectionRing, claimed_type

RECORD = DeliveryRecord(
    *(1, "msg_1", "order.paid", DeliveryState.DONE, True, 1, 0.0, 0),
    *(None, False, None, None, None, None, None),
)


def arrived(sequence, at=0.0):
    return attrs.evolve(RECORD, sequence=sequence, received_at=at)


# -- positions -----------------------------------------------------------------------------------


@given(st.sets(st.integers(1, 2000), min_size=1))
def test_clusters_cover_every_sequence_and_lie_apart(sequences):
    ranges = list(clusters(sorted(sequences)))
    assert all(any(first <= each <= last for first, last in ranges) for each in sequences)
    assert {end for pair in ranges for end in pair} <= sequences
    assert all(after[0] - before[1] > 1 for before, after in itertools.pairwise(ranges))


@pytest.mark.parametrize(
    ("sequences", "age", "reached"),
    [
        ([], 0.0, 7),
        ([8, 9, 10], 0.0, 10),
        # A transaction that has taken 9 may commit yet, or was given up.
        ([8, 10], 0.0, 8),
        ([8, 10], 9.9, 8),
        ([8, 10], 10.0, 10),
        ([9], 0.0, 7),
    ],
)
def test_a_missing_number_holds_the_feed_until_it_can_no_longer_appear(sequences, age, reached):
    records = [arrived(sequence, 100.0 - age) for sequence in sequences]
    assert without_holes(7, records, 100.0) == reached


@given(st.permutations(range(1, 13)), st.data())
def test_no_commit_is_skipped_in_any_order(order, data):
    """Numbers are taken in order and appear in any; looks happen between, and time passes."""
    position, seen, reported = 0, set(), []
    for count in range(len(order) + 1):
        seen = set(order[:count])
        if data.draw(st.booleans()):
            records = [arrived(each, 0.0) for each in sorted(seen) if each > position]
            reached = without_holes(position, records, 9.0)
            reported += [each.sequence for each in records if each.sequence <= reached]
            position = reached
    records = [arrived(each, 0.0) for each in sorted(seen) if each > position]
    reported += [
        each.sequence for each in records if each.sequence <= without_holes(position, records, 9)
    ]
    assert reported == list(range(1, 13))


def test_a_query_is_read_and_its_filter_applied():
    query = parse_feed(b"after=5&types=order.*,refund.created&state=done&kinds=delivery&most=10")
    assert query == FeedQuery(
        after=5,
        kinds=("delivery",),
        types=("order.*", "refund.created"),
        state=DeliveryState.DONE,
        most=10,
    )
    assert query.wants(RECORD, None)
    assert not query.wants(attrs.evolve(RECORD, type="refund.updated"), None)
    assert not query.wants(attrs.evolve(RECORD, state=DeliveryState.DEAD), None)
    assert not query.wants(RECORD, "a tenant")


@given(st.binary(max_size=60))
def test_a_token_in_a_subprotocol_is_the_token_or_nothing(text):
    access = Access(token="the right token")
    encoded = base64.urlsafe_b64encode(text).decode().rstrip("=")
    refusal = access.check_feed(
        {"sec-websocket-protocol": f"sdk-trio.feed, sdk-trio.token.{encoded}"}
    )
    assert (refusal is None) == (text == b"the right token")
    garbled = text.decode("latin-1")
    refusal = access.check_feed({"sec-websocket-protocol": f"sdk-trio.token.{garbled}"})
    assert refusal is not None
    assert refusal.status == 401


# -- charts, groups, ring ------------------------------------------------------------------------


def test_a_step_is_the_difference_of_two_polls():
    series, seconds = Series(), Histogram((0.1, 1.0))

    def samples(handled):
        yield Sample("sdk_webhook_deliveries_total", (("result", "handled"),), handled - 3)
        of_source = (("result", "handled"), ("source", "stripe"))
        yield Sample("sdk_webhook_deliveries_total", of_source, 3)
        yield from seconds.samples("sdk_webhook_handler_seconds", (("type", "order.paid"),))
        yield Sample("sdk_queue_depth", (), 4)

    series.note((), 0.0)
    series.note(samples(10), 1.0)
    assert series.steps[-1]["handled"] == 10
    for value in (0.05, 0.05, 0.5, 7.0):
        seconds.observe(value)
    series.note(samples(14), 6.0)
    step = series.steps[-1]
    assert (step["at"], step["handled"], step["runs"], step["queue_depth"]) == (6.0, 4, 4, 4)
    assert (step["p50_seconds"], step["p95_seconds"]) == (0.1, 1.0)
    for number in range(2 * STEPS):
        series.note(samples(14), float(number))
    assert len(series.steps) == STEPS
    assert series.steps[-1]["p50_seconds"] is None


@given(st.lists(st.floats(0, 10), min_size=1), st.floats(0.01, 1))
def test_a_quantile_lies_in_the_bucket_of_its_value(values, share):
    bounds = (1.0, 2.0, 5.0)
    buckets = {bound: sum(value <= bound for value in values) for bound in (*bounds, inf)}
    found = quantile(buckets, share)
    wanted = next(bound for bound in (*bounds, inf) if buckets[bound] >= share * len(values))
    lower = max((bound for bound in (0.0, *bounds) if bound < wanted), default=0.0)
    assert lower <= found <= (5.0 if wanted == inf else wanted)


@pytest.mark.parametrize(
    ("text", "group"),
    [
        (None, ""),
        ("ValueError: no product 17", "ValueError: no product #"),
        ("KeyError: 'deadbeef'\nmore", "KeyError: '#'"),
        ("at 0x7f01 of 3e4a9b1c77", "at # of #"),
        ("Timeout after 8 s", "Timeout after # s"),
        ("KeyError: '13f30b71-28e4-434b-b252-572baeb7cfd8'", "KeyError: '#'"),
        ("no customer cus_8xTq2ab of v2", "no customer # of v#"),
    ],
)
def test_errors_that_differ_in_numbers_are_one_group(text, group):
    assert error_group(text) == group


def test_the_ring_is_bounded_and_counts_all():
    ring = RejectionRing(lambda: 1.0)
    for number in range(KEPT + 10):
        ring.add(Rejection("webhook.rejected", "no_match", 400, None, f"msg_{number}"))
    rows = ring.newest(cause=None, before=None, limit=10_000)
    assert (len(rows), ring.total, ring.causes) == (KEPT, KEPT + 10, {"no_match": KEPT + 10})
    assert (rows[0]["seq"], rows[-1]["seq"]) == (KEPT + 10, 11)


def test_the_ring_counts_what_other_processes_no_longer_keep():
    ring = RejectionRing(lambda: 1.0)
    kept = Rejection("webhook.rejected", "no_match", 400, None, "msg_9")
    ring.add(kept)
    ring.add_reported({"no_match": 7, "path": 2}, [(0.5, kept), (0.6, kept)])
    rows = ring.newest(cause=None, before=None, limit=10)
    assert [(row["seq"], row["at"]) for row in rows] == [(10, 0.6), (9, 0.5), (1, 1.0)]
    assert (ring.total, ring.causes) == (10, {"no_match": 8, "path": 2})
    assert ring.after(9) == [(0.6, kept)]
    assert ring.after(5) == [(0.5, kept), (0.6, kept)]


@given(st.binary(max_size=2000))
def test_no_body_makes_the_claimed_type_anything_but_a_short_text(body):
    found = claimed_type(b'{"type":"' + body)
    assert found is None or (1 <= len(found) <= 256 and found.isprintable())


def test_the_claimed_type_is_found_only_at_the_beginning():
    assert claimed_type(b'{"type": "order.paid", "data": {"type": "x"}}') == "order.paid"
    assert claimed_type(b'{"data":"' + b"x" * 2000 + b'","type":"order.paid"}') is None
