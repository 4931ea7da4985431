"""CSV in pieces: rows come out whole, wherever the pieces were cut."""

import csv
import io
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.client.export import LONGEST_ROW, CsvParser

cells = st.text(
    st.one_of(
        st.sampled_from("\",\n\r\t ;'\u2028\x85\x0b"),
        st.characters(exclude_categories=["Cs"], exclude_characters="\x00"),
    ),
    max_size=6,
)


def parse(data: bytes, cuts: list[int]) -> list[dict[str, str]]:
    parser = CsvParser()
    rows: list[dict[str, str]] = []
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        rows += parser.feed(data[start:end])
    return rows + parser.finish()


@given(
    table=st.integers(1, 4).flatmap(
        lambda width: st.lists(st.lists(cells, min_size=width, max_size=width), max_size=5)
    ),
    cuts=st.lists(st.integers(0, 10_000), max_size=8),
    end=st.sampled_from(["\n", "\r\n"]),
    bom=st.booleans(),
)
def test_rows_are_the_same_for_any_split_of_the_bytes(
    table: list[list[str]], cuts: list[int], end: str, bom: bool
) -> None:
    header = [f"c{n}" for n in range(len(table[0]) if table else 1)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator=end, quoting=csv.QUOTE_ALL)
    writer.writerows([header, *table])
    data = text.getvalue().encode("utf-8-sig" if bom else "utf-8")
    assert parse(data, cuts) == [dict(zip(header, row, strict=True)) for row in table]


@pytest.mark.parametrize(
    ("data", "rows"),
    [
        (b"", []),
        (b"a,b", []),
        (b"a,b\n1,2", [{"a": "1", "b": "2"}]),
        (b"a,b\r\n\r\n1,2\r\n\r\n", [{"a": "1", "b": "2"}]),
        (b'a\n"x""y"\n', [{"a": 'x"y'}]),
        (b'a\n"x\r\ny"\n', [{"a": "x\r\ny"}]),
    ],
)
def test_forms_of_files(data: bytes, rows: list[dict[str, str]]) -> None:
    assert parse(data, []) == rows
    assert parse(data, list(range(len(data)))) == rows


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a,b\n1\n", "row 2 has 1 cells for 2 columns"),
        (b"a\n1,2\n", "row 2 has 2 cells for 1 columns"),
        (b'a\n"x\n', "ends inside a quoted cell of row 2"),
        (b"a\n\xff\n", "utf-8"),
        (b"a\n\xc3", "utf-8"),
        (b'a\n"x"y\n', "row 2"),
        (b'a\n"' + b"x\n" * LONGEST_ROW, "longer"),
        (b"x" * (LONGEST_ROW + 1), "longer"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_an_invalid_csv_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(data, [])


def test_a_cell_may_be_as_long_as_a_row() -> None:
    # The csv module stops at 131072 characters, its limit for the whole process.
    for cell in ("x" * 1_000_000, '"' * 300_000, "a,\n" * 300_000):
        quoted = cell.replace('"', '""')
        assert parse(f'a,b\n"{quoted}",2\n'.encode(), []) == [{"a": cell, "b": "2"}]
    assert parse(b"a\n" + b"y" * 1_000_000, []) == [{"a": "y" * 1_000_000}]


@pytest.mark.parametrize(
    ("header", "names"),
    [
        ("a,a", ["a", "a_2"]),
        ("a,a,b,a", ["a", "a_2", "b", "a_3"]),
        ("a,a_2,a", ["a", "a_2", "a_3"]),
        ("a,a,a_2", ["a", "a_3", "a_2"]),
        (",,", ["", "_2", "_3"]),
    ],
)
def test_columns_of_the_same_name_lose_nothing(header: str, names: list[str]) -> None:
    values = [str(n) for n in range(len(names))]
    data = f"{header}\n{','.join(values)}\n".encode()
    assert parse(data, []) == [dict(zip(names, values, strict=True))]


@given(st.text(alphabet='ab,"', max_size=12))
def test_cells_are_those_of_the_standard_reader(row: str) -> None:
    if row.count('"') % 2 or not row:
        return
    try:
        expected = next(csv.reader([row], strict=True))
    except csv.Error:
        with pytest.raises(ValueError, match="row 2"):
            parse(b"a\n" + row.encode(), [])
        return
    header = ",".join(f"c{n}" for n in range(len(expected)))
    [parsed] = parse(f"{header}\n{row}\n".encode(), [])
    assert list(parsed.values()) == expected
