"""The index of the pages names every page of `docs/`, each once and under its kind."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
INDEX = (DOCS / "README.md").read_text("utf-8")
#: The headings of the index, by the folder that they are about.
HEADINGS = {
    "tutorial": "Tutorial",
    "how-to": "How-to",
    "reference": "Reference",
    "explanation": "Explanation",
}


def test_every_page_is_named_once_under_its_kind():
    for folder, heading in HEADINGS.items():
        (part,) = re.findall(rf"^## {heading}.*?$(.*?)(?=^## |\Z)", INDEX, re.DOTALL | re.MULTILINE)
        pages = sorted(f"{folder}/{page.name}" for page in (DOCS / folder).glob("*.md"))
        assert pages
        assert sorted(re.findall(r"\]\(([\w/.-]+\.md)\)", part)) == pages


def test_every_folder_with_pages_has_a_heading():
    folders = {page.parent.name for page in DOCS.glob("*/*.md")}
    assert folders == {*HEADINGS, "adr"}


def test_each_page_has_its_own_line_that_fits_a_screen():
    lines = [line for line in INDEX.splitlines() if line.startswith("- ")]
    assert [line for line in lines if line.count(".md)") != 1 or len(line) > 150] == []


def test_the_readme_leads_to_the_index():
    assert "](docs/README.md)" in (ROOT / "README.md").read_text("utf-8")


def test_the_source_distribution_has_what_the_readme_links_to():
    packed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    included = packed["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    linked = re.findall(r"\]\(([\w-][\w.-]*)[/)#]", (ROOT / "README.md").read_text("utf-8"))
    assert len(set(linked)) > 4
    # The licence and the README itself always are.
    assert {f"/{name}" for name in linked} - {"/LICENSE"} <= set(included)
