"""``/api/events`` page by page, in both directions, and its parameters."""

from datetime import UTC, datetime, timedelta, timezone
from urllib.parse import urlencode

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.admin import TOKEN, administered

from sdk_trio.admin.query import (
    LARGEST_SEQUENCE,
    ListQuery,
    link_header,
    page_of,
    parse_list,
    reads_oldest_first,
)
from sdk_trio.records.deliveries import DeliveryRecord, DeliveryState


@pytest.fixture(autouse=True)
def token(monkeypatch, tmp_path):
    monkeypatch.setenv("SDK_TEST_ADMIN_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)


def record(sequence):
    values = {field.name: None for field in attrs.fields(DeliveryRecord)}
    return DeliveryRecord(**values | {"sequence": sequence, "webhook_id": f"msg_{sequence}"})


class Shelf:
    """Events, some of them purged, read through the interface of a store."""

    def __init__(self, sequences):
        self.sequences = sorted(sequences)

    def page(self, query):
        chosen = [
            sequence
            for sequence in self.sequences
            if (query.after is None or sequence > query.after)
            and (query.before is None or sequence < query.before)
        ]
        if not reads_oldest_first(query):
            chosen.reverse()
        page = page_of(query, [record(sequence) for sequence in chosen[: query.limit + 1]])
        return [shown.sequence for shown in page.records], page.links

    def walk(self, query, relation):
        """The sequences of every page from that of ``query`` on."""
        seen, links = self.page(query)
        while relation in links:
            page, links = self.page(parse_list(links[relation].encode()))
            # A page that is behind the last one is allowed to be empty, and ends the walk.
            seen = seen + page if relation == "next" else page + seen
        return seen


sequences = st.sets(st.integers(1, 60), max_size=30)
cursors = st.none() | st.integers(0, 61)
orders = st.sampled_from(["newest", "oldest"])


@given(sequences, st.integers(1, 8), orders, cursors, cursors)
def test_following_next_shows_everything_once_in_order(kept, limit, order, after, before):
    query = ListQuery(limit=limit, order=order, after=after, before=before)
    shelf = Shelf(kept)
    seen = shelf.walk(query, "next")
    assert seen == sorted(seen, reverse=order == "newest")
    first = shelf.page(query)[0]
    if not first:
        return
    on_from_here = [
        each
        for each in shelf.sequences
        if (each <= first[0] if order == "newest" else each >= first[0])
        and (after is None or before is None or after < each < before)
    ]
    assert sorted(seen) == on_from_here


@given(sequences, st.integers(1, 8), orders, st.integers(0, 61), st.booleans())
def test_going_back_shows_everything_before_in_the_same_order(kept, limit, order, cursor, above):
    cursors = {"after": cursor} if above else {"before": cursor}
    query = ListQuery(limit=limit, order=order, **cursors)
    shelf = Shelf(kept)
    page, links = shelf.page(query)
    if not page:
        assert links == {}
        return
    assert len(page) <= limit
    seen = shelf.walk(query, "prev")
    assert seen == sorted(seen, reverse=order == "newest")
    assert set(seen) == {
        each
        for each in shelf.sequences
        if (each >= page[-1] if order == "newest" else each <= page[-1])
    }


@given(
    st.builds(
        ListQuery,
        type=st.none() | st.text(max_size=10),
        state=st.none() | st.sampled_from(DeliveryState),
        tenant=st.none() | st.text(max_size=10),
        subject=st.none() | st.text(max_size=10),
        since=st.none() | st.integers(0, 2_000_000_000_000).map(lambda n: n / 1000),
        limit=st.integers(1, 500),
        order=orders,
    ),
    st.integers(1, LARGEST_SEQUENCE - 1),
)
def test_a_link_keeps_all_that_was_asked_for(query, sequence):
    page = page_of(query, [record(sequence), *[record(sequence + 1)] * query.limit])
    header = link_header("/api/events", page.links)
    text = header.partition("<")[2].partition(">")[0]
    assert header.isascii()
    again = parse_list(text.partition("?")[2].encode())
    assert msgspec.structs.replace(again, after=None, before=None) == query


@pytest.mark.parametrize(
    "moment",
    ["0001-01-01T00:00:00Z", "1969-12-31T23:59:59Z", "9999-12-31T23:59:59Z", "99999999999.999999"],
)
def test_a_link_keeps_a_moment_that_is_far_away(moment):
    query = parse_list(f"since={moment}".encode())
    links = page_of(query, [record(sequence) for sequence in range(query.limit + 1, 0, -1)]).links
    assert parse_list(links["next"].encode()).since == query.since


async def test_pages_lead_to_each_other_over_http(store):
    async with administered(patience=60, **store) as admin:
        for number in range(1, 8):
            await admin.app.deliver("order.paid", webhook_id=f"msg_{number}")
            await admin.app.deliver("order.created", webhook_id=f"other_{number}")

        async def page(path):
            answer = await admin.get(path, TOKEN)
            assert answer.status_code == 200, answer.text
            return [event["webhook_id"] for event in answer.json()], answer.links

        newest, links = await page("/api/events?type=order.paid&limit=3")
        assert newest == ["msg_7", "msg_6", "msg_5"]
        assert set(links) == {"next"}
        # New arrivals do not shift the pages.
        await admin.app.deliver("order.paid", webhook_id="msg_8")
        second, links = await page(links["next"]["url"])
        assert second == ["msg_4", "msg_3", "msg_2"]
        last, far = await page(links["next"]["url"])
        assert last == ["msg_1"]
        assert set(far) == {"prev"}
        back, links = await page(links["prev"]["url"])
        assert back == ["msg_7", "msg_6", "msg_5"]
        newer, links = await page(links["prev"]["url"])
        assert newer == ["msg_8"]
        assert set(links) == {"next"}


async def test_events_are_chosen_by_tenant_subject_and_time(store):
    async with administered(patience=60, MultiTenant__Enabled=True, **store) as admin:
        tenants = admin.runtime.receiver.tenancy.service
        acme = await tenants.add("acme", name="A", organization_id="org_a", actor="test")
        await tenants.add("bolt", name="B", organization_id="org_b", actor="test")
        for number, organization in enumerate(["org_a", "org_b", "org_a"]):
            data = {"id": f"ord_{number}", "customer": {"organization_id": organization}}
            await admin.app.deliver("order.paid", data, webhook_id=f"msg_{number}")

        async def found(**query):
            answer = await admin.get(f"/api/events?{urlencode(query)}", TOKEN)
            assert answer.status_code == 200, answer.text
            return [event["webhook_id"] for event in answer.json()]

        assert await found(tenant="acme") == ["msg_2", "msg_0"]
        assert await found(tenant=acme.id, order="oldest") == ["msg_0", "msg_2"]
        assert await found(subject="ord_1") == ["msg_1"]
        answer = await admin.get("/api/events?tenant=unknown", TOKEN)
        assert answer.status_code == 404
        assert "there is no tenant 'unknown'" in answer.json()["error"]
        records = {each["webhook_id"]: each["received_at"] for each in await admin.api("/events")}
        at = records["msg_1"]
        assert await found(since=f"{at:.6f}", until=f"{at + 0.000002:.6f}") in (["msg_1"], [])
        assert await found(since=f"{at - 0.000002:.6f}") == ["msg_2", "msg_1"]
        assert await found(until=f"{at - 0.000002:.6f}") == ["msg_0"]
        # The same moment in other words; an unescaped plus sign is understood.
        zone = timezone(timedelta(hours=2))
        before = (datetime.fromtimestamp(at, zone) - timedelta(hours=1)).isoformat()
        assert len(await found(since=before)) == 3
        answer = await admin.get(f"/api/events?since={before}", TOKEN)
        assert len(answer.json()) == 3
        later = datetime.fromtimestamp(at, UTC) + timedelta(hours=1)
        assert await found(since=f"{later:%Y-%m-%dT%H:%MZ}") == []
