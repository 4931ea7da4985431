"""The pages on the Python API have every public name, and their examples run."""

import importlib
import re
import sys
from pathlib import Path

import pytest

import sdk_trio

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
EXAMPLES = sorted((ROOT / "examples" / "api").glob("*.py"))
MODULES = (
    "sdk_trio",
    "sdk_trio.events",
    "sdk_trio.testing",
    "sdk_trio.asgi",
    "sdk_trio.monitoring",
)

#: Names that a program only gets or catches; the examples of others show most of them.
NOT_CALLED = re.compile(r"\w+Error|Started|Problem|Settings|Check|FeedReader")


def headings() -> set[str]:
    pages = [*REFERENCE.glob("python-*.md"), REFERENCE / "events.md"]
    text = "".join(page.read_text("utf-8") for page in pages)
    sections = re.findall(r"^##+ (\w+)$", text, re.MULTILINE)
    return {*sections, *re.findall(r"\| `(\w+Event)` \|", text)}


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_on_a_page(module):
    missing = set(importlib.import_module(module).__all__) - headings()
    assert not missing, f"{missing}: run `make generate`"


@pytest.mark.parametrize("module", ["sdk_trio", "sdk_trio.testing", "sdk_trio.asgi"])
def test_every_name_that_a_program_calls_has_an_example(module):
    shown = {
        name.strip()
        for example in EXAMPLES
        for name in example.read_text("utf-8").partition("\n")[0].partition(":")[2].split(",")
    }
    called = {n for n in importlib.import_module(module).__all__ if not NOT_CALLED.fullmatch(n)}
    assert called - shown == set()
    known = headings() | {"database_connections"}
    assert shown <= known, "an example is for a name that is not public"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_prints_what_it_says(example, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = example.read_text("utf-8")
    assert text.startswith("# For: ")
    name = f"example_{example.stem}"
    module = type(sys)(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(text, example, "exec"), vars(module))
    expected = re.findall(r"^# Output: (.*)$", text, re.MULTILINE)
    if expected:
        assert capsys.readouterr().out.splitlines() == expected


def test_the_index_names_each_page_and_where_to_import_from():
    index = (REFERENCE / "python-api.md").read_text("utf-8")
    rows = re.findall(
        r"^\| \[`(\w+)`\]\((python-\w+\.md)#\w+\) \| `([\w.]+)` \|", index, re.MULTILINE
    )
    assert len(rows) > len(sdk_trio.__all__)
    for name, page, module in rows:
        assert getattr(importlib.import_module(module), name) is not None
        assert f"\n## {name}\n" in (REFERENCE / page).read_text("utf-8")
