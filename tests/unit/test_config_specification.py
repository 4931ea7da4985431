"""The settings against the tables of the specification, which lies beside the repository."""

import re
from collections.abc import Iterator
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

import attrs
import pytest

from sdk_trio.config import Settings
from sdk_trio.config.table import Setting, fold, full_key, sections, table

#: The specification is no part of the repository: a clone without it cannot be compared with it.
pytestmark = pytest.mark.may_skip

SPECIFICATION = Path(__file__).resolve().parents[2].parent / "shared" / "spec.md"

#: Rows of the settings tables in 2.1 to 2.9, counted by hand: a parser that misses some fails.
ROWS = 81


@attrs.frozen
class Row:
    """One row of a settings table."""

    key: str
    columns: dict[str, str]


def specified() -> list[Row]:
    if not SPECIFICATION.exists():
        pytest.skip("the specification (../shared/spec.md) is not beside this repository")
    return list(rows_of(SPECIFICATION.read_text("utf-8")))


def rows_of(text: str) -> Iterator[Row]:
    chapter = text[text.index("## 2. ") : text.index("## 3. ")]
    section = ""
    heading: list[str] = []
    for line in chapter.splitlines():
        if named := re.search(r"\(`((?:Sdk|\.\.\.)[A-Za-z:]*)`\)", line):
            section = full_section(named[1])
        if line.startswith("### 2.5"):
            section = ""  # the event record: no settings
        cells = [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells and cells[0] in ("Key", "Member"):
            heading = cells
        elif cells and section and not cells[0].startswith("---"):
            key = f"{section}:{cells[0]}".replace(".", ":")
            yield Row(key, dict(zip(heading, cells, strict=True)))


def full_section(name: str) -> str:
    if name.startswith("Sdk"):
        return name
    ends = name.removeprefix("...")
    (section,) = (s for s in map(full_key, sections().values()) if s.endswith(ends))
    return section


def setting(key: str) -> Setting:
    by_key = {s.key: s for s in table()}
    assert key in by_key, f"{key} of the specification is missing"
    return by_key[key]


def written_default(known: Setting) -> str:
    default: Any = known.default
    if default is None:
        return "null"
    if default in ("", ()):
        return "empty"
    if isinstance(default, timedelta):
        return "0" + str(default) if len(str(default)) < 8 else str(default)
    return str(default).lower() if isinstance(default, bool) else str(default)


def test_every_row_is_found() -> None:
    assert len(specified()) == ROWS


def test_every_key_has_its_default() -> None:
    for row in specified():
        default = row.columns["Default"]
        quoted = re.match(r"`([^`]*)`", default)
        expected = quoted[1] if quoted else re.split(r"[ ,]", default)[0]
        if row.key == "Sdk:AccessToken":
            expected = "null"
        assert written_default(setting(row.key)) == expected, row.key


def test_every_key_has_its_type() -> None:
    names = {"int": int, "bool": bool, "string": str, "time": timedelta}
    for row in specified():
        known = setting(row.key)
        kind = row.columns["Type"]
        if kind.startswith("enum"):
            assert issubclass(known.kind, StrEnum), row.key
            values = re.findall(r"`([^`]+)`", kind) or [known.default.value]
            assert [member.value for member in known.kind] == values, row.key
            continue
        assert known.many == kind.startswith("list of"), row.key
        assert known.nullable == (kind.endswith("or null") or row.key == "Sdk:AccessToken"), row.key
        name = kind.removeprefix("list of ").split()[0]
        text = names[name] is str and known.kind.__name__ == "Secret"
        assert text or known.kind is names[name], row.key


def test_every_range_is_the_specified_one() -> None:
    ranges = 0
    for row in specified():
        found = re.search(r"[Rr]ange (\d+)-(\d+)", " ".join(row.columns.values()))
        if found:
            ranges += 1
            assert setting(row.key).bounds == (int(found[1]), int(found[2])), row.key
    assert ranges == 8


def test_every_required_sub_option_is_required() -> None:
    for row in specified():
        known = setting(row.key)
        if row.columns.get("Required") == "yes" and known.kind is str:
            assert known.about.required, row.key
        if row.columns.get("Required") == "no":
            assert not known.about.required, row.key


def test_each_template_has_its_texts() -> None:
    specified()
    templates = ("MultiTenant", "Notifications", "Templates")
    paths = {s.path[3:] for s in table() if s.path[:3] == templates}
    transitions = ("Suspended", "Reactivated", "Deactivated", "Deleted")
    texts = ("EmailSubject", "EmailBody", "SmsBody")
    assert paths == {(transition, text) for transition in transitions for text in texts}


def test_keys_differ_in_more_than_case() -> None:
    assert len({fold(s.path) for s in table()}) == len(table())


def test_the_order_of_sections_is_that_of_the_specification() -> None:
    rows = [row.key for row in specified()]
    ours = [s.key for s in table() if s.key in rows]
    for section in {key.rpartition(":")[0] for key in rows}:
        here = [key for key in rows if key.rpartition(":")[0] == section]
        assert [key for key in ours if key.rpartition(":")[0] == section] == here
    assert Settings().multi_tenant.single_tenant_upgrade.max_run_duration == timedelta(minutes=30)
