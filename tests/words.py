"""Finds retired words in texts and code: ``python tests/words.py [PATH ...]``.

``docs/reference/glossary.md`` has one word for each concept; ``RETIRED`` has the words that it
replaces, and what to write instead. Without arguments the script checks ``CHECKED``, as
``tests/unit/test_words.py`` does in ``make check``. A name of Python is read as its words, so
``_look_at_clock`` is found like "look at clock".
"""

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: Files and folders, as patterns, that must have none of the retired words.
CHECKED = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "benchmarks/*.md",
    "benchmarks/*.py",
    "benchmarks/servers",
    "console/src",
    "docs",
    "examples",
    "generate",
    "sdk_trio",
    "tests/*.py",
    "tests/*.toml",
    "tests/e2e",
    "tests/integration",
    "tests/support",
    "tests/trio",
    "tests/typing",
    "tests/unit",
)

#: Regular expressions of whole words, and what to write instead. A space stands for any white
#: space, so a phrase is found across lines.
RETIRED = {
    r"a look|(each|every|first|next|last|one|two) looks?": "poll, or check",
    r"looks at": "checks, reads or polls",
    r"tells?|told|telling": "log, report, notify, raise; for a difference: distinguish",
    r"says? whether": "return whether, or show whether",
    r"for ever": "forever, or without end",
    r"(say|says|said|saying) so": "name the message: log, warn, report",
    r"bury|buries|buried|condemns?|condemned": "dead-letter",
    r"mend|mends|mended|mending": "fix",
    r"anew|afresh": "again; for generated files: regenerate",
    r"nobody|nobodys|nobody's": "no one, or name the subject",
    r"somebody|somebody's|everybody|everybody's": "someone, everyone, or name the subject",
    r"whoever|whomever": "name the subject",
    r"so as": "to",
    r"of before": "earlier, previous or stale",
    r"(is|are|was|were) to be": "must be, or will be",
    r"the house|rooms?": "package",
    r"lands?|landed|landing": "end, arrive; for a run: in-flight run",
    r"in the place of": "instead of",
    r"puts? off|putting off": "postpone",
    r"(gets|get|got) company": "name what runs beside it",
    r"next to nothing": "name the amount",
    r"stands? still|stood still|standing still": "hangs, is stopped or does not respond",
    r"it was so already": "no change",
    r"without a word": "without a log line",
    r"any more": "no longer",
    r"of then": "current",
    r"hardly": "almost no, or rarely",
    r"(works?|worked) off": "process",
    r"turns? of the (event )?loop": "iteration",
    r"(is|are|was|were|been) away": "is unavailable, or is disconnected",
    r"(go|goes|went) on by (itself|themselves)": "continue",
    r"in step with": "in sync with",
    r"looks? (whether|if)": "check whether",
    r"heirs?": "successor",
    r"blows?": "name the fault or the signal",
    r"errand|hereupon|whereupon|thereupon|henceforth|thereof|therein": "plain words",
}

#: Files that may use a retired word, the word, and why.
ALLOWED: dict[tuple[str, str], str] = {
    ("tests/e2e/test_foreign_files.py", "nobody"): "the name of a system user",
    ("tests/support/power_cut.py", "tell"): "the method of files",
    ("tests/unit/test_source_schemes.py", "everybody"): "the secret of a published vector",
    ("tests/unit/test_words.py", "mend"): "an example of a retired word",
    ("tests/unit/test_words.py", "nobody"): "an example of a retired word",
    ("tests/unit/test_words.py", "told"): "an example of a retired word",
}

#: In a page: blocks and spans of code, and the addresses of links.
_CODE = re.compile(r"```.*?```|^    .*?$|`[^`]*`|\]\([^)]*\)", re.DOTALL | re.MULTILINE)
_TEXT = {".md", ".py", ".toml", ".ts", ".js", ".css", ".html", ".c"}
_TEXT |= {".yaml", ".yml", ".json", ".conf", ".service", ""}
_SPACE = r"[\s#:>*|]+"
#: One pattern for a single pass over a text in lower case; each group is an entry of ``RETIRED``.
_PATTERN = re.compile(
    r"\b(?:{})\b".format(
        "|".join(rf"({re.sub(r'[(](?![?])', '(?:', words)})" for words in RETIRED)
    ).replace(" ", _SPACE)
)
_INSTEAD = list(RETIRED.values())


def findings(paths: Iterable[str]) -> Iterator[tuple[str, int, str, str]]:
    """Yield the file, the line, the retired word and its replacement.

    ``paths`` are patterns of files and folders below ``ROOT``.
    """
    for path in paths:
        files = {
            each
            for place in ROOT.glob(path)
            for each in (place.rglob("*") if place.is_dir() else [place])
        }
        for file in sorted(files):
            name = file.relative_to(ROOT).as_posix()
            if file.suffix in _TEXT and file.is_file() and name != "tests/words.py":
                for line, word, instead in _in_text(file.read_text("utf-8"), file.suffix):
                    yield name, line, word, instead


def _in_text(text: str, suffix: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the retired word and its replacement.

    In Markdown, code and addresses of links do not count: they quote what other files have.
    """
    if suffix == ".md":
        text = re.sub(_CODE, _blank, text)
    else:
        text = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text.replace("_", " "))
    for found in _PATTERN.finditer(text.lower()):
        line = text.count("\n", 0, found.start()) + 1
        assert found.lastindex is not None
        yield line, re.sub(_SPACE, " ", found.group()), _INSTEAD[found.lastindex - 1]


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found.group())


def main() -> int:
    """Print the retired words of the files named, or of ``CHECKED``; 1 if there are any."""
    found = 0
    for file, line, word, instead in findings(sys.argv[1:] or CHECKED):
        if (file, word) not in ALLOWED:
            found += 1
            print(f"{file}:{line}: {word!r}: write {instead}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
