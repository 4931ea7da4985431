"""The output of commands: tables that fit, cells without control characters, questions,
progress."""

import io
import json
import re
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.cli import terminal
from sdk_trio.cli.events import LIST_COLUMNS

COLUMNS = ("webhook_id", "state", "subject", "last_error")
ROW = {"webhook_id": "msg_1", "state": "dead", "subject": "order-1", "last_error": None}


class Screen(io.StringIO):
    def isatty(self):
        return True


def on_a_terminal(monkeypatch, typed=""):
    """Give this process a terminal, and return what it shows on standard error.

    No fixture: pytest puts its own streams in place between the fixtures and the test.
    """
    shown = Screen()
    monkeypatch.setattr(sys, "stdin", Screen(typed))
    monkeypatch.setattr(sys, "stderr", shown)
    return shown


widths = st.lists(st.integers(1, 60), min_size=len(COLUMNS), max_size=len(COLUMNS))


@given(widths, st.integers(20, 250))
def test_a_row_of_several_lines_has_every_column_in_its_terminal(needed, available):
    lines = terminal._lines_of(COLUMNS, needed, available)
    assert [index for line in lines for index in line] == list(range(len(COLUMNS)))
    for number, line in enumerate(lines):
        used = sum(line.values()) + 2 * (len(line) - 1) + (2 if number else 0)
        # A column that cannot be shortened and is wider than the terminal gets its own line.
        assert used <= available or len(line) == 1
        for index, width in line.items():
            whole = COLUMNS[index] not in ("subject", "last_error")
            assert width == needed[index] or (not whole and 12 <= width < needed[index])


def test_a_list_of_events_fits_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    row = {
        "received_at": 1_795_341_658.0,
        "key": "msg_3868af5cf89b4e61995b377614f2a2d2",
        "type": "subscription.canceled",
        "state": "retrying",
        "attempts": 1,
        "subject": "7f1367cf-808d-47cc-bf21-ce9bd72dd06b",
        "last_error": "KeyError: 'missing', which is as long as errors are, or somewhat longer",
    }
    terminal.print_rows([row, row], LIST_COLUMNS, as_json=False)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue()).splitlines()
    assert len(lines) == 3 * 2
    assert max(map(len, lines)) <= 80
    assert row["key"] in lines[2].split()
    assert row["type"] in " ".join(lines).split()
    assert "KeyError: 'missing'" in lines[3]
    assert lines[3].startswith("  ")
    assert "\x1b[33mretrying\x1b[0m" in screen.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    screen.truncate(0)
    terminal.print_rows([row], LIST_COLUMNS, as_json=False)
    assert "\x1b" not in screen.getvalue()


@given(st.text())
def test_a_cell_is_one_line_that_steers_no_terminal(text):
    shown = terminal.cell(text)
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")]


@pytest.mark.parametrize(("value", "shown"), [(None, "-"), (True, "yes"), (False, "no"), (0, "0")])
def test_values_without_text_have_a_visible_cell(value, shown):
    assert terminal.cell(value) == shown


def test_without_a_terminal_every_cell_is_complete(capsys):
    row = ROW | {"last_error": "E" * 300}
    terminal.print_rows([ROW, row], COLUMNS, as_json=False)
    heading, first, second = capsys.readouterr().out.splitlines()
    assert heading.split() == ["webhook", "id", "state", "subject", "last", "error"]
    assert first == "msg_1       dead   order-1  -"
    assert second.endswith(" " + "E" * 300)
    assert {line.index("dead") for line in (first, second)} == {heading.index("state")}


def test_json_has_every_field_of_every_row(capsys):
    terminal.print_rows([ROW], ("state",), as_json=True)
    assert json.loads(capsys.readouterr().out) == [ROW]
    terminal.print_rows([], ("state",), as_json=True)
    assert json.loads(capsys.readouterr().out) == []
    terminal.print_rows([], ("state",), as_json=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("answer", ["y\n", "YES\n", " yes \n"])
def test_a_yes_is_a_yes(monkeypatch, answer):
    screen = on_a_terminal(monkeypatch, answer)
    assert terminal.confirmed("replay 3 events?")
    assert screen.getvalue() == "replay 3 events? [y/N] "


@pytest.mark.parametrize("answer", ["", "\n", "n\n", "yess\n"])
def test_anything_else_is_a_no(monkeypatch, answer):
    on_a_terminal(monkeypatch, answer)
    assert not terminal.confirmed("replay 3 events?")


def test_a_script_is_not_asked(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    assert terminal.confirmed("replay 3 events?")
    assert capsys.readouterr().err == ""


def test_progress_is_one_line_of_a_terminal(monkeypatch):
    screen = on_a_terminal(monkeypatch)
    progress = terminal.Progress("replayed", 40)
    progress.advance(39)
    progress.advance()
    assert screen.getvalue() == "\rreplayed: 39 of 40\rreplayed: 40 of 40\n"


def test_little_work_and_pipes_get_no_progress(monkeypatch):
    screen = on_a_terminal(monkeypatch)
    terminal.Progress("replayed", 19).advance(19)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    terminal.Progress("replayed", 40).advance(40)
    terminal.ByteProgress().show("copying", 1)
    assert screen.getvalue() + sys.stderr.getvalue() == ""


def test_a_shorter_step_leaves_nothing_of_the_longer_one(monkeypatch):
    screen = on_a_terminal(monkeypatch)
    progress = terminal.ByteProgress()
    progress.show("downloading", 12_345_678)
    progress.show("checking", 0)
    progress.end()
    first, second, last, rest = screen.getvalue().split("\r")[1:]
    assert first == "downloading: 12.3 MB"
    assert second == "checking".ljust(len(first))
    assert last == " " * len("checking")
    assert rest == ""


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "body.json").write_bytes(b"{}")
    assert terminal.read_bytes(str(tmp_path / "body.json")) == b"{}"
    with pytest.raises(terminal.UnreadableFileError, match=r"none\.json cannot be read: No such"):
        terminal.read_bytes(str(tmp_path / "none.json"))
