"""docs/reference/log-events.md has every log event and every exit status."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/log-events.md").read_text("utf-8")
#: The events of the page, by the first cell of each row.
NAMED = set(
    re.findall(r"`([a-z]+\.[a-z_]+)`", "".join(re.findall(r"^\|([^|]*)\|", PAGE, re.MULTILINE)))
)
EVENT = re.compile(rf"({'|'.join(sorted({name.partition('.')[0] for name in NAMED}))})\.[a-z_]+")
#: Texts of the form of a log event that are none.
OTHERS = frozenset(
    [
        "admin.probe",
        "replication.verification",
        "upgrade.lease",
        "upgrade.lock",
        "inbox.claims",
        "inbox.turn",
        "inbox.db",
        "runtime.json",
        "runtime.lock",
        "runtime.pid",
        "runtime.owner",
        "alert.message_",
    ]
)


@cache
def logged() -> dict[str, str]:
    """The events that the package logs, each with a file; computed ones end with a prefix."""
    found = {}
    for file in sorted((ROOT / "sdk_trio").rglob("*.py")):
        # Tables of exports have modules of the same form.
        if "simulation" in file.parts or file.name == "__init__.py":
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
                start = str(node.values[0].value)
                if EVENT.fullmatch(f"{start}x") and len(node.values) == 2:
                    found[f"{start}..."] = file.name
            elif (
                isinstance(node, ast.Constant)
                and EVENT.fullmatch(str(node.value))
                and node.value not in OTHERS
            ):
                found[str(node.value)] = file.name
    return found


def test_every_log_event_has_a_row_with_cause_and_remedy():
    events = logged()
    assert len(events) > 150
    whole = {name: file for name, file in events.items() if not name.endswith("...")}
    assert {name: file for name, file in whole.items() if name not in NAMED} == {}
    for start in events.keys() - whole:
        assert any(name.startswith(start.removesuffix("...")) for name in NAMED), start


def test_no_row_is_about_an_event_that_is_no_longer_logged():
    events = logged()
    computed = tuple(name.removesuffix("...") for name in events if name.endswith("..."))
    stale = {name for name in NAMED - set(events) if not name.startswith(computed)}
    assert stale == set()


def test_an_error_has_a_remedy():
    rows = re.findall(r"^\| (`[^|]*`) \| E \| [^|]* \| *([^|]*) *\|$", PAGE, re.MULTILINE)
    assert len(rows) > 30
    assert [event for event, remedy in rows if not remedy.strip()] == [
        "`reconciliation.checkpoint_unreadable`"
    ]


def test_every_exit_status_has_a_cause():
    reference = (ROOT / "docs/reference/command-line.md").read_text("utf-8")
    statuses = re.findall(r"^\| (\d[\d +N]*) \|", reference, re.MULTILINE)
    assert len(statuses) > 6
    assert statuses == re.findall(r"^\| (\d[\d +N]*) \|", PAGE, re.MULTILINE)
