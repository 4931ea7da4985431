"""The site of the pages: its check of links, its navigation, and the list for assistants."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"site_{name}", ROOT / f"docs/site/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("target", "is_broken"),
    [
        ("other.html", False),
        ("other.html#there", False),
        ("folder/page.html", False),
        ("#own", False),
        ("https://example.org/x", False),
        ("lost.html", True),
        ("other.html#lost", True),
        ("#lost", True),
        ("picture.svg", True),
    ],
)
def test_a_link_without_a_target_is_found(tmp_path, target, is_broken):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "page.html").write_text('<a href="../other.html">up</a>')
    (tmp_path / "other.html").write_text('<h1 id="there">Other</h1>')
    (tmp_path / "page.html").write_text(f'<h1 id="own">Page</h1><a href="{target}">x</a>')
    found = load("build").broken_links(tmp_path)
    assert found == ([f"page.html: {target}"] if is_broken else [])


def test_the_navigation_has_every_page_and_every_decision():
    index = (ROOT / "docs/README.md").read_text("utf-8")
    shown = set(re.findall(r"^[\w-]+/[\w-]+$", load("conf").navigation(index), re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs"))[:-3] for page in ROOT.glob("docs/*/*.md")}
    assert shown == pages


def test_a_page_that_has_searched_words_is_on_the_site_and_shows_them():
    conf = load("conf")
    for page, searched in conf.SEARCHED.items():
        text = [(ROOT / f"{page}.md").read_text("utf-8")]
        conf._read_source(None, page, text)
        title, index, *_ = text[0].split("\n\n")
        assert title.startswith("# ")
        assert index == f"```{{index}} {', '.join(f'! {words}' for words in searched)}\n```"


def test_assistants_get_rules_and_every_page_as_markdown():
    text = load("build").llms_text((ROOT / "docs/README.md").read_text("utf-8"))
    assert text.startswith("# sdk_trio\n\n> ")
    linked = re.findall(r"^- .*?\]\(([\w/.-]+)\)", text, re.MULTILINE)
    assert "docs/how-to/handlers.md" in linked
    assert [page for page in linked if not (ROOT / page).is_file()] == []
    (handler,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(handler, "llms.txt", "exec"), names)
    (registered,) = names["handlers"].registrations
    assert registered.event_class.wire_type == "order.paid"
