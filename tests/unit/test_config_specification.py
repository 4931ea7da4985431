"""The settings against the tables of the specification, which lies beside the repository."""

import re
from collections.abc import Iterator
from datetime import timedelta
from enum import StrEnum
from typing import Any

import attrs
import pytest
from support.shared import shared

from sdk_trio.config import Settings
from sdk_trio.config.table import Setting, fold, full_key, sections, table
from sdk_trio.events import DEFAULT_CATALOG
from sdk_trio.webhooks.signed_request import SignedDelivery
from sdk_trio.webhooks.simulator import PREFIX

#: The specification is outside the repository, so a clone alone cannot be compared with it.
pytestmark = pytest.mark.may_skip

SPECIFICATION = shared("spec.md")

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


def test_a_key_without_a_range_has_no_upper_limit() -> None:
    for row in specified():
        known = setting(row.key)
        if known.kind is int and not re.search(r"[Rr]ange", " ".join(row.columns.values())):
            # A port has the limit that ports have.
            limit = 65535 if row.key.endswith(":Port") else None
            assert known.about.maximum == limit, row.key


def lines_of(chapter: str) -> str:
    specified()  # skips without the specification
    text = SPECIFICATION.read_text("utf-8")
    start = text.index(f"## {chapter}")
    return text[start : text.find("\n## ", start)]


def test_the_limits_of_chapter_8_are_those_of_the_settings() -> None:
    limits = lines_of("8. Limits")
    ranges = dict(re.findall(r"(\w+) (\d+-\d+)", limits))
    ranges |= dict(re.findall(r"^\| (\w+) \| (\d+-\d+), default", limits, re.MULTILINE))
    by_name = {s.path[-1]: s for s in table() if full_key(s.path) in {r.key for r in specified()}}
    assert len(ranges) == 7
    for name, written in ranges.items():
        assert by_name[name].bounds == tuple(map(int, written.split("-"))), name
    settings = Settings()
    resilience = settings.resilience
    assert "5 failures / 30 s window / 15 s open" in limits
    assert resilience.circuit_breaker_failure_threshold == 5
    assert resilience.circuit_breaker_sampling_seconds == 30
    assert resilience.circuit_breaker_break_seconds == 15
    assert "| Queue drain timeout | 30 s default |" in limits
    assert settings.webhooks.graceful_drain_timeout_seconds == 30


def test_the_named_event_types_have_their_classes() -> None:
    events = lines_of("6. Events")
    named = re.findall(r"`([a-z_]+\.[a-z_]+)` \(`(\w+)`\)", events)
    assert len(named) == 4
    known = {row.wire_type: row.event_class.__name__ for row in DEFAULT_CATALOG.known}
    assert len(known) == 28
    assert "There are 28 known event types" in events
    for wire_type, name in named:
        assert known[wire_type] == name


def test_the_names_on_the_wire_are_the_specified_ones() -> None:
    endpoints = lines_of("4. Endpoints")
    assert f"POST `{PREFIX}{{eventType}}`" in endpoints
    signed = SignedDelivery("msg_1", 1, "v1,AAAA", b"{}")
    assert all(f"`{name}`" in endpoints for name in signed.headers.keys() - {"content-type"})
    assert f"named `{Settings().upstream.version_header}`" in lines_of("9. Versioning")


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
