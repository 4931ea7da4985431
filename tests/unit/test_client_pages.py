"""Pages: reading an answer, and the number of the next page."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.client.pages import NotAPageError, read_page, start_page, with_page

pairs = st.lists(st.tuples(st.sampled_from(["a", "b", "sorting"]), st.text()), max_size=5)


def numbered(items: int, max_page: int) -> dict[str, Any]:
    return {
        "items": [{"id": n} for n in range(items)],
        "pagination": {"total_count": items, "max_page": max_page},
    }


@given(number=st.integers(1, 50), max_page=st.integers(0, 50), items=st.integers(0, 3))
def test_a_numbered_list_ends_with_its_last_page(number: int, max_page: int, items: int) -> None:
    page = read_page(numbered(items, max_page), number)
    assert page.has_next == (number < max_page and items > 0)
    assert (page.number, page.max_page, page.total_count) == (number, max_page, items)
    assert [record.id for record in page.items] == list(range(items))


@pytest.mark.parametrize(
    ("items", "flag", "has_next"),
    [(1, True, True), (1, False, False), (0, True, False), (0, False, False), (1, None, False)],
)
def test_a_cursor_continues_while_its_flag_is_true_and_it_has_records(
    items: int, flag: object, has_next: bool
) -> None:
    document = {"items": [{}] * items, "pagination": {"has_next_page": flag}}
    page = read_page(document, 3)
    assert page.has_next is has_next
    assert page.total_count is None
    assert page.max_page is None


@pytest.mark.parametrize(
    ("document", "lacking"),
    [
        ([], "an array"),
        (None, "null"),
        ({}, "'items'"),
        ({"items": [1], "pagination": {"total_count": 1, "max_page": 1}}, "'items'"),
        ({"items": [], "pagination": None}, "'pagination'"),
        ({"items": []}, "'pagination'"),
    ],
)
def test_an_invalid_page_is_refused_with_the_missing_part(document: Any, lacking: str) -> None:
    with pytest.raises(NotAPageError, match=lacking):
        read_page(document, 1)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from(["items", "pagination", "max_page"]), inner)
        ),
    )
)
def test_any_answer_is_a_page_or_refused(document: Any) -> None:
    try:
        page = read_page(document, 1)
    except NotAPageError:
        return
    assert isinstance(document["items"], list)
    assert isinstance(document["pagination"], dict)
    assert page.has_next in (True, False)


def test_a_page_without_a_count_goes_on_until_one_is_empty() -> None:
    for counts in ({}, {"max_page": None}, {"max_page": True}, {"max_page": "9"}):
        assert read_page({"items": [{}], "pagination": counts}, 7).has_next
        assert not read_page({"items": [], "pagination": counts}, 7).has_next


@given(query=pairs, number=st.integers(1, 10**6))
def test_the_query_asks_for_the_page_and_keeps_the_rest(
    query: list[tuple[str, str]], number: int
) -> None:
    asked = with_page([*query, ("page", "99")], number, default_limit=50)
    assert [pair for pair in asked if pair[0] not in ("page", "limit")] == query
    assert [value for key, value in asked if key == "page"] == [str(number)]
    assert [value for key, value in asked if key == "limit"] == ["50"]
    assert with_page(asked, number) == asked
    assert start_page(asked) == number


def test_a_limit_that_was_given_stays() -> None:
    assert ("limit", "7") in with_page([("limit", "7")], 1)
    assert len(with_page([("limit", "7")], 1)) == 2


def test_a_list_starts_at_its_first_page() -> None:
    assert start_page([]) == 1


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", "", "²", "٣"])
def test_a_page_is_a_whole_number_from_one(text: str) -> None:
    with pytest.raises(ValueError, match="integer from 1"):
        start_page([("page", text)])
