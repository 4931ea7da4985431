"""Each record of a decision (ADR) has its sections, a short title, and fits a page."""

import re
from pathlib import Path

import pytest

RECORDS = sorted((Path(__file__).parents[2] / "docs" / "adr").glob("*.md"))
#: The most records, the most lines of one, and the most words of a title.
MOST_RECORDS = 40
MOST_LINES = 60
MOST_WORDS = 8


def test_there_are_not_too_many_records():
    assert 0 < len(RECORDS) <= MOST_RECORDS


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: file.stem[:4])
def test_a_record_has_its_sections_and_fits_a_page(file):
    text = file.read_text("utf-8")
    number, title = re.match(r"# (\d+)\. (.+)\n\n\*\*Status:\*\* \w+", text).groups()
    assert number.zfill(4) == file.name[:4]
    assert len(title.split()) <= MOST_WORDS
    sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert [each for each in sections if each != "Alternatives"] == [
        "Context",
        "Decision",
        "Consequences",
    ]
    assert len(text.splitlines()) <= MOST_LINES
