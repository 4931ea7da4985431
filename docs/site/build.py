"""Build the site of the pages: ``python docs/site/build.py``, which is ``make docs``.

Writes `build/site/html`: the pages as HTML, each page as plain Markdown beside it, and
`llms.txt`. A warning of Sphinx and a link that leads nowhere are errors.
"""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SITE = ROOT / "build" / "site"
HTML = SITE / "html"
INDEX = ROOT / "docs" / "README.md"


def main() -> int:
    """Build everything; 1 for a broken link, else the exit status of Sphinx."""
    ended = subprocess.run([sys.executable, "-m", "sphinx", *_arguments()], cwd=ROOT)
    if ended.returncode:
        return ended.returncode
    _write_start_page()
    pages = _copy_pages()
    (HTML / "llms.txt").write_text(llms_text(INDEX.read_text("utf-8")), "utf-8")
    broken = list(broken_links(HTML))
    for problem in broken:
        print(f"broken link: {problem}", file=sys.stderr)
    print(f"{len(pages)} pages, {len(broken)} broken links: {HTML / 'index.html'}")
    return 1 if broken else 0


def _arguments() -> list[str]:
    jobs = str(min(os.cpu_count() or 1, 4))
    places = ["-c", str(HERE), "-d", str(SITE / "doctrees"), str(ROOT), str(HTML)]
    return ["--quiet", "--fail-on-warning", "--builder", "html", "--jobs", jobs, *places]


def _write_start_page() -> None:
    """Lead from the root of the site to the index of the pages."""
    (HTML / "index.html").write_text(
        '<!doctype html><meta charset="utf-8"><title>sdk_trio</title>'
        '<meta http-equiv="refresh" content="0; url=docs/README.html">'
        '<p><a href="docs/README.html">The pages of sdk_trio</a></p>\n',
        "utf-8",
    )


def _copy_pages() -> list[Path]:
    """Copy the Markdown of each built page to its place beside the HTML; return the copies."""
    copies = []
    for built in HTML.rglob("*.html"):
        page = built.relative_to(HTML).with_suffix(".md")
        if (ROOT / page).exists():
            copies.append(HTML / page)
            shutil.copyfile(ROOT / page, HTML / page)
    return copies


def llms_text(index: str) -> str:
    """Return `llms.txt`: rules for a correct handler, and every page in one line."""
    body = index.partition("\n## ")
    lists = re.sub(r"\]\((?!#)", "](docs/", f"## {body[2]}").replace("](docs/adr/)", "](docs/adr)")
    lists = re.sub(r"\n## Decisions.*", "\n", lists, flags=re.DOTALL)
    guide = (HERE / "handlers.txt").read_text("utf-8")
    return f"{guide}\n{lists}"


class _Links(HTMLParser):
    """The targets that one page links to, and the anchors that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value and tag != "use":
                self.targets.add(value)


def broken_links(folder: Path) -> list[str]:
    """Return each link of the HTML below ``folder`` to a file or an anchor that is not there."""
    read = {}
    for page in sorted(folder.rglob("*.html")):
        read[page] = _Links()
        read[page].feed(page.read_text("utf-8"))
    broken = []
    for page, links in read.items():
        for target in sorted(links.targets):
            place = urlsplit(target)
            if place.scheme or place.netloc:
                continue
            file = page.parent / unquote(place.path) if place.path else page
            file = Path(os.path.normpath(file))
            missing_anchor = file in read and place.fragment not in {"", *read[file].anchors}
            if not file.exists() or missing_anchor:
                broken.append(f"{page.relative_to(folder)}: {target}")
    return broken


if __name__ == "__main__":
    sys.exit(main())
