"""Lists and exports: every record once and in order, under any pages, cancellation and tasks."""

import csv
import gc
import io
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any

import httpx
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from sdk_trio.client.call import Call, CallOptions
from sdk_trio.client.errors import UnexpectedAnswerError
from sdk_trio.client.operations import Resources
from sdk_trio.client.records import Record


class Upstream:
    """A sender whose pages are scripted: page n of ``pages`` holds these records."""

    def __init__(self, pages: list[list[int]], *, cursor: bool = False) -> None:
        self.pages = pages
        self.cursor = cursor
        self.calls: list[Call] = []
        self.delay = 0.0

    async def send(self, call: Call) -> httpx.Response:
        self.calls.append(call)
        await trio.sleep(self.delay)
        number = int(dict(call.query)["page"])
        items = self.pages[number - 1] if number <= len(self.pages) else []
        pagination: dict[str, Any] = {
            "total_count": sum(map(len, self.pages)),
            "max_page": len(self.pages),
        }
        if self.cursor:
            pagination = {"has_next_page": number < len(self.pages)}
        body = {"items": [{"id": item} for item in items], "pagination": pagination}
        return httpx.Response(200, json=body)

    def stream(self, call: Call) -> Any:
        raise NotImplementedError


class Fixed:
    """A sender that answers every call with the same bytes, in the given pieces."""

    def __init__(self, *pieces: bytes, headers: dict[str, str] | None = None) -> None:
        self.pieces = pieces
        self.headers = headers
        self.calls: list[Call] = []
        self.open = 0

    async def send(self, call: Call) -> httpx.Response:
        self.calls.append(call)
        await trio.lowlevel.checkpoint()
        return httpx.Response(200, content=b"".join(self.pieces), headers=self.headers)

    @asynccontextmanager
    async def stream(self, call: Call) -> AsyncIterator[httpx.Response]:
        self.calls.append(call)
        self.open += 1
        try:
            yield httpx.Response(200, stream=Pieces(self.pieces), headers=self.headers)
        finally:
            self.open -= 1


class Pieces(httpx.AsyncByteStream):
    def __init__(self, pieces: tuple[bytes, ...]) -> None:
        self.pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            await trio.lowlevel.checkpoint()
            yield piece


def orders(sender: Any) -> Any:
    return Resources(sender).orders


async def ids(listing: Any) -> list[int]:
    return [record.id async for record in listing]


def run(function: Any) -> Any:
    return trio.run(function, clock=trio.testing.MockClock(autojump_threshold=0))


def _pages(sizes: list[int]) -> list[list[int]]:
    numbers = itertools.count()
    return [[next(numbers) for _ in range(size)] for size in sizes]


scripts = st.lists(st.integers(1, 4), max_size=6).map(_pages)


@settings(deadline=None)  # an example is a whole run of Trio
@given(scripts)
def test_every_record_of_numbered_pages_once_and_in_order(pages: list[list[int]]) -> None:
    async def main() -> None:
        upstream = Upstream(pages)
        listing = orders(upstream).list(status=["paid", "refunded"])
        assert await ids(listing) == [item for page in pages for item in page]
        asked = [dict(call.query) for call in upstream.calls]
        assert [query["page"] for query in asked] == [str(n + 1) for n in range(max(1, len(pages)))]
        assert all(query["limit"] == "100" for query in asked)
        assert all(
            call.query[:2] == (("status", "paid"), ("status", "refunded"))
            for call in upstream.calls
        )
        assert [page.number async for page in listing.pages()] == list(range(1, len(asked) + 1))

    run(main)


@settings(deadline=None)  # an example is a whole run of Trio
@given(scripts)
def test_every_record_of_cursor_pages_once_and_in_order(pages: list[list[int]]) -> None:
    async def main() -> None:
        upstream = Upstream(pages, cursor=True)
        listing = Resources(upstream).events.list(cursor_pagination=True)
        assert await ids(listing) == [item for page in pages for item in page]
        assert len(upstream.calls) == max(1, len(pages))

    run(main)


async def test_a_cursor_whose_flag_is_stuck_ends_at_the_empty_page() -> None:
    upstream = Upstream([[1], [2]], cursor=True)

    class Stuck(Upstream):
        async def send(self, call: Call) -> httpx.Response:
            document = json.loads((await upstream.send(call)).content)
            document["pagination"]["has_next_page"] = True
            return httpx.Response(200, json=document)

    assert await ids(Resources(Stuck([])).events.list()) == [1, 2]
    assert len(upstream.calls) == 3


@pytest.mark.parametrize(
    "pagination",
    [
        {},
        {"total_count": None, "max_page": None},
        {"total_count": "3", "max_page": 2.0},
        {"max_page": 1_000_000_000, "total_count": 3},
    ],
)
async def test_a_list_without_counts_or_with_wild_ones_is_read_to_its_end(pagination: Any) -> None:
    upstream = Upstream([[1, 2], [3]])

    class Uncounted(Upstream):
        async def send(self, call: Call) -> httpx.Response:
            document = json.loads((await upstream.send(call)).content)
            document["pagination"] = pagination
            document["items"].insert(0, None)  # and a null is not a record
            return httpx.Response(200, json=document)

    listing = orders(Uncounted([])).list()
    assert await ids(listing) == [1, 2, 3]
    assert len(upstream.calls) == 3
    page = await listing.first_page()
    assert len(page.items) == 2
    assert page.total_count in (None, 3)


async def test_a_list_that_knows_no_pages_is_read_once() -> None:
    body = json.dumps({"items": [{"id": 1}], "pagination": {}}).encode()
    sender = Fixed(body)
    assert await ids(orders(sender).list()) == [1]
    assert len(sender.calls) == 2


@settings(deadline=None)  # an example is a whole run of Trio
@given(pages=scripts, cuts=st.lists(st.floats(0.1, 9), max_size=8))
def test_cancelling_loses_and_repeats_nothing(pages: list[list[int]], cuts: list[float]) -> None:
    async def main() -> None:
        upstream = Upstream(pages)
        upstream.delay = 1
        iterator = aiter(orders(upstream).list())
        got: list[int] = []
        for cut in [*cuts, float("inf")]:
            with trio.move_on_after(cut):
                async for record in iterator:
                    got.append(record.id)
        assert got == [item for page in pages for item in page]

    run(main)


@settings(deadline=None)  # an example is a whole run of Trio
@given(pages=scripts, at=st.integers(0, 30))
def test_cancelling_at_every_checkpoint_loses_nothing(pages: list[list[int]], at: int) -> None:
    async def main() -> None:
        iterator = aiter(orders(Upstream(pages)).list())
        got: list[int] = []
        for _ in range(at):
            # Already cancelled: the first checkpoint of each step raises.
            with trio.CancelScope() as scope:
                scope.cancel()
                got.append((await anext(iterator)).id)
                raise AssertionError("a step did not checkpoint")
            if at % 2 and (record := await anext(iterator, None)):
                got.append(record.id)
        got += [record.id async for record in iterator]
        assert got == [item for page in pages for item in page]

    run(main)


async def test_iterating_checkpoints_on_every_path() -> None:
    iterator = aiter(orders(Upstream([[1, 2]])).list())
    for _ in range(2):
        with trio.testing.assert_checkpoints():
            await anext(iterator)
    for _ in range(2):
        with trio.testing.assert_checkpoints():
            assert await anext(iterator, None) is None


async def test_a_loop_that_ends_early_asks_for_no_further_page() -> None:
    upstream = Upstream([[1, 2], [3], [4]])
    async for record in orders(upstream).list():
        if record.id == 2:
            break
    assert len(upstream.calls) == 1


async def test_two_loops_over_one_listing_are_independent() -> None:
    listing = orders(Upstream([[1], [2]])).list()
    assert await ids(listing) == await ids(listing) == [1, 2]
    assert repr(listing) == "<listing orders.list>"


async def test_one_iterator_serves_one_task(autojump_clock: trio.testing.MockClock) -> None:
    upstream = Upstream([[1], [2]])
    upstream.delay = 1
    iterator = aiter(orders(upstream).list())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(anext, iterator)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await anext(iterator)
    assert (await anext(iterator)).id == 2


async def test_a_page_fails_and_is_asked_for_again() -> None:
    class Flaky(Upstream):
        async def send(self, call: Call) -> httpx.Response:
            if len(self.calls) == 1:
                self.calls.append(call)
                return httpx.Response(200, content=b"<html>")
            return await super().send(call)

    iterator = aiter(orders(Flaky([[1], [2]])).list())
    assert (await anext(iterator)).id == 1
    with pytest.raises(
        UnexpectedAnswerError, match=r"GET /orders/: the answer \(200\) is not JSON"
    ):
        await anext(iterator)
    assert (await anext(iterator)).id == 2


async def test_first_page_and_where_it_starts() -> None:
    upstream = Upstream([[1], [2], [3]])
    page = await orders(upstream).list(page=2, limit=1).first_page()
    assert [record.id for record in page.items] == [2]
    assert (page.number, page.total_count, page.max_page, page.has_next) == (2, 3, 3, True)
    assert repr(page).startswith("Page(number=2, items=<1 records>")
    assert await ids(orders(upstream).list(page=2, limit=1)) == [2, 3]
    with pytest.raises(ValueError, match="page is '0'"):
        orders(upstream).list(page=0)


# --- other answers -------------------------------------------------------------------------------


async def test_answers_of_each_kind() -> None:
    async def answer(body: bytes, call: Any) -> Any:
        return await call(Resources(Fixed(body)))

    order = await answer(b'{"id": "1", "new": {"x": 1}}', lambda c: c.orders.get("1"))
    assert isinstance(order, Record)
    assert order.new.x == 1
    boards = await answer(b'[{"id": "1"}]', lambda c: c.metrics.list_dashboards())
    assert [board.id for board in boards] == ["1"]
    assert await answer(b"", lambda c: c.orders.generate_invoice("1")) is None
    assert await answer(b"null", lambda c: c.orders.generate_invoice("1")) is None
    assert (await answer(b'{"a": 1}', lambda c: c.orders.generate_invoice("1"))).a == 1
    assert await answer(b"whatever", lambda c: c.products.delete("1")) is None
    raw = await answer(b"\xff", lambda c: c.orders.get.raw("1"))
    assert raw.content == b"\xff"


@pytest.mark.parametrize("body", [b"", b"[]", b"1", b"{", b'"x"', b"null"])
async def test_an_answer_of_another_kind_is_an_error_that_says_which_call(body: bytes) -> None:
    client = Resources(Fixed(body))
    with pytest.raises(UnexpectedAnswerError, match=r"^GET /orders/1: the answer"):
        await client.orders.get("1")
    if body != b"[]":
        with pytest.raises(UnexpectedAnswerError, match=r"^GET /metrics/dashboards: the answer"):
            await client.metrics.list_dashboards()
    with pytest.raises(UnexpectedAnswerError, match=r"^GET /orders/: (the answer|a page is)"):
        await client.orders.list().first_page()


async def test_a_result_comes_with_its_answer() -> None:
    headers = {"x-request-id": "rq7"}
    order = await Resources(Fixed(b'{"id": "1"}', headers=headers)).orders.get.with_response("1")
    assert isinstance(order.result, Record)
    assert (order.result.id, order.response.headers["x-request-id"]) == ("1", "rq7")
    page = await Resources(Upstream([[1], [2]])).orders.list.with_response(status="paid")
    assert [record.id for record in page.result.items] == [1]
    assert page.result.has_next
    assert page.response.status_code == 200
    gone = await Resources(Fixed(b"")).products.delete.with_response("1")
    assert (gone.result, gone.response.status_code) == (None, 200)
    with pytest.raises(TypeError, match=r"its rows have \.response"):
        await Resources(Fixed(b"")).orders.export.with_response()
    with pytest.raises(TypeError, match=r"orders\.get"):
        await Resources(Fixed(b"")).orders.get.with_response()


async def test_an_answer_of_another_form_is_kept_in_the_error() -> None:
    body = b'{"id": "ord_9", "x": [1, 2'
    client = Resources(Fixed(body))
    with pytest.raises(UnexpectedAnswerError) as caught:
        await client.orders.get("1")
    error = caught.value
    assert (error.status, error.content) == (200, body)
    assert error.__cause__ is error.__context__ is None  # whose frames would hold the body


async def test_legal_json_of_any_kind_is_an_answer() -> None:
    digits = "9" * 5000
    body = f'\ufeff{{"id": "1", "x": 1e400, "n": {digits}, "s": "\\ud800"}}'.encode()
    order = await Resources(Fixed(body)).orders.get("1")
    assert (order.id, order.x, str(order.n), order.s) == ("1", Decimal("1e400"), digits, "\ud800")
    deep = b"[" * 50_000 + b"]" * 50_000
    whole = await Resources(Fixed(deep)).orders.generate_invoice("1")
    assert isinstance(whole, list)


async def test_options_of_client_resource_and_call_are_joined() -> None:
    sender = Fixed(b"{}")
    client = Resources(sender, CallOptions(max_retries=1, total_timeout=9))
    portal = client.customer_portal.with_options(access_token="session", max_retries=2)
    await portal.orders.get("1", options=CallOptions(total_timeout=3))
    options = sender.calls[0].options
    assert (options.max_retries, options.total_timeout, options.access_token) == (2, 3, "session")
    await client.orders.get("1")
    assert sender.calls[1].options == CallOptions(max_retries=1, total_timeout=9)


# --- exports -------------------------------------------------------------------------------------


async def test_an_export_is_read_row_by_row() -> None:
    text = io.StringIO()
    csv.writer(text).writerows([["email", "note"], ["a@b.c", 'x, "y"\r\nz'], ["d@e.f", "ü"]])
    data = text.getvalue().encode()
    sender = Fixed(*(data[n : n + 3] for n in range(0, len(data), 3)))
    async with orders(sender).export(timezone="UTC") as rows:
        assert [row async for row in rows] == [
            {"email": "a@b.c", "note": 'x, "y"\r\nz'},
            {"email": "d@e.f", "note": "ü"},
        ]
        assert rows.response.status_code == 200
    assert sender.open == 0
    assert dict(sender.calls[0].query) == {"timezone": "UTC"}
    assert sender.calls[0].options.headers["Accept-Encoding"] == "identity"
    assert await orders(sender).export().text() == data.decode()


async def test_leaving_an_export_early_closes_it_without_a_leak() -> None:
    sender = Fixed(b"a\n1\n", b"2\n", b"3\n")
    export = orders(sender).export()
    async with export as rows:
        assert await anext(rows) == {"a": "1"}
        with pytest.raises(RuntimeError, match="open already"):
            await export.__aenter__()
    assert sender.open == 0
    gc.collect()  # a generator that was left open would be a ResourceWarning, an error here
    assert await anext(rows, None) is None


async def test_cancelling_an_export_closes_it(autojump_clock: trio.testing.MockClock) -> None:
    sender = Fixed(b"a\n1\n", b"2\n")
    with trio.CancelScope() as scope:
        async with orders(sender).export() as rows:
            await anext(rows)
            scope.cancel()
            await anext(rows)
    assert scope.cancelled_caught
    assert sender.open == 0


@pytest.mark.parametrize("pieces", [(b"a,b\n1\n",), (b'a\n"1\n',), (b"a\n", b"\xff\n")])
async def test_an_export_that_is_no_csv_is_an_error_that_says_where(pieces: Any) -> None:
    async with orders(Fixed(*pieces)).export() as rows:
        with pytest.raises(UnexpectedAnswerError, match=r"GET /orders/export: .* not valid CSV"):
            await anext(rows)


async def test_a_compressed_export_is_refused_and_closed() -> None:
    sender = Fixed(b"", headers={"Content-Encoding": "br"})
    with pytest.raises(UnexpectedAnswerError, match="'br'"):
        async with orders(sender).export():
            pass
    assert sender.open == 0
