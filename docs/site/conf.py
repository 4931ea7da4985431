"""The site of the pages, which `make docs` builds with Sphinx; `build.py` calls it.

The source directory is the repository, so links between pages and to files are those of the
repository. The index, `docs/README.md`, is the root document. Its lists become the navigation.
"""

import os
import re
import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
INDEX = "docs/README"

project = "sdk_trio"
author = "sdk_trio"
version = release = runpy.run_path(str(ROOT / "sdk_trio" / "_version.py"))["__version__"]

extensions = ["myst_parser"]
root_doc = INDEX
include_patterns = [
    "docs/*.md",
    "docs/**/*.md",
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
]
include_patterns += ["benchmarks/README.md"]
# Folders that Sphinx would otherwise walk through to find no page.
exclude_patterns = [".*", "build", "dist", "console", "sdk_trio", "tests", "generate", "examples"]
exclude_patterns += ["sdk-data", "docs/site", "docs/console"]

source_suffix = {".md": "markdown"}
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]
highlight_language = "text"

html_theme = "furo"
html_title = f"sdk_trio {version}"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "scorer.js")
#: The address of the repository's files for "Edit this page", with `{filename}`; without it, each
#: page links to its own Markdown, which names the file.
html_theme_options = {
    "source_edit_link": os.environ.get("SDK_DOCS_EDIT_LINK") or "{filename}",
    "top_of_page_buttons": ["view", "edit"],
    "source_view_link": "{filename}",
}

#: The pages beside those that the index lists, by the caption of the navigation.
_OTHERS = {"Project": ["README", "CHANGELOG", "CONTRIBUTING", "SECURITY", "benchmarks/README"]}

#: What users search for, by the page that answers it, where its title has other words. The search
#: leaves out numbers elsewhere.
SEARCHED = {
    "docs/how-to/alerts": ["alerts", "be alerted"],
    "docs/how-to/back-up-the-receiver": ["backup", "backups"],
    "docs/how-to/handlers": ["first handler", "write a handler"],
    "docs/how-to/incidents": ["400", "503", "events get 400", "400 signature", "missing event"],
    "docs/how-to/policies": ["pause a type", "limit concurrency"],
    "docs/how-to/postgresql": ["several hosts", "several hosts postgresql", "high availability"],
    "docs/how-to/source-stripe": ["receive stripe webhooks"],
    "docs/how-to/test-handlers": ["test a handler", "test handler", "testing"],
    "docs/reference/cli-events": ["replay dead letters", "dead letter", "replay"],
}

#: A picture for light and dark, as code hosts show it; the site's own switch needs two images.
_PICTURE = re.compile(
    r'<picture>\s*<source [^>]*>\s*<img alt="([^"]*)" src="([^"]*)-light\.svg">\s*</picture>'
)


#: The navigation of a page that no list has, by that page and the options.
_NAVIGATION: dict[tuple[str, tuple[tuple[str, Any], ...]], str] = {}


def setup(app: Any) -> dict[str, bool]:
    """Let Sphinx call the functions below."""
    app.connect("env-get-outdated", _read_again)
    app.connect("source-read", _read_source)
    app.connect("html-page-context", _link_to_source)
    app.connect("html-page-context", _reuse_navigation, priority=400)  # before the theme
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _read_again(*_: object) -> list[str]:
    """Return the pages that change with this file, or with the folder of decisions."""
    return [INDEX, *SEARCHED]


def _read_source(_: Any, document: str, source: list[str]) -> None:
    """Point links to decisions at their list; give pages searched words, the index navigation."""
    if document == "README":
        source[0] = source[0].replace("](docs/adr/)", "](docs/README.md#decisions)")
    source[0] = _PICTURE.sub(
        r"![\1](\2-light.svg){.only-light}\n![\1](\2-dark.svg){.only-dark}", source[0]
    )
    if searched := SEARCHED.get(document):
        title, _, text = source[0].partition("\n")
        entries = ", ".join(f"! {words}" for words in searched)
        source[0] = f"{title}\n\n```{{index}} {entries}\n```\n{text}"
    if document == INDEX:
        text = source[0].replace("](adr/)", "](#decisions)")
        source[0] = f"{text}\n{navigation(text)}"


def navigation(index: str) -> str:
    """Return the hidden tables of contents for the text of the index."""
    trees = {}
    for title, part in re.findall(r"^## (.+?)$(.*?)(?=^## |\Z)", index, re.DOTALL | re.MULTILINE):
        pages = re.findall(r"^- .*?\]\(([\w/.-]+)\.md\)", part, re.MULTILINE)
        trees[title.partition(":")[0]] = pages
    decisions = sorted((ROOT / "docs" / "adr").glob("*.md"))
    trees["Decisions"] = [f"adr/{page.stem}" for page in decisions]
    for caption, pages in _OTHERS.items():
        trees[caption] = [f"/{page}" for page in pages]
    return "\n".join(
        "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"])
        for caption, pages in trees.items()
    )


def _reuse_navigation(
    app: Any, page: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    """Make the navigation once for each folder: for each page it takes a third of the build."""
    # A page of the same folder that no list has.
    neighbour = f"{page[: page.rfind('/') + 1]}-"

    def toctree(**options: Any) -> str:
        key = (neighbour, tuple(sorted(options.items())))
        if key not in _NAVIGATION:
            _NAVIGATION[key] = app.builder._get_local_toctree(neighbour, **options)
        own = app.builder.get_relative_uri(neighbour, page)
        return _with_current(_NAVIGATION[key], own)

    if "toctree" in context:
        context["toctree"] = toctree


def _with_current(navigation: str, link: str) -> str:
    """Mark the item with this link, and its list, as Sphinx does; the tree has one level."""
    item = f'<li class="toctree-l1"><a class="reference internal" href="{link}">'
    before, found, after = navigation.partition(item)
    if not found:
        return navigation
    before, _, rest = before.rpartition("<ul>")
    marked = '<li class="toctree-l1 current"><a class="current reference internal" href="#">'
    return f'{before}<ul class="current">{rest}{marked}{after}'


def _link_to_source(
    app: Any, page: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    """Make the links to a page's own file relative where no address of the repository is given."""
    if context.get("page_source_suffix"):
        own = f"{page.rpartition('/')[2]}.md"
        context["theme_source_view_link"] = own
        if not os.environ.get("SDK_DOCS_EDIT_LINK"):
            context["theme_source_edit_link"] = own
