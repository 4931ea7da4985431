"""Lines of the log for people, and how often strangers may cause one."""

import io
import json
import re
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.base import logs
from sdk_trio.base.logs import Throttle, render_console


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def test_a_kind_has_its_lines_and_then_is_left_out_until_the_while_is_over():
    clock = Clock()
    throttle = Throttle(lines=2, seconds=10, clock=clock)
    assert [throttle.admit("a") for _ in range(4)] == [0, 0, None, None]
    assert throttle.admit("b") == 0
    clock.now += 9.9
    assert throttle.admit("a") is None
    clock.now += 0.1
    assert [throttle.admit("a") for _ in range(3)] == [3, 0, None]


def test_what_was_left_out_is_told_once():
    throttle = Throttle(lines=1, seconds=10, clock=Clock())
    for kind in "aabbbc":
        throttle.admit(kind)
    assert throttle.take_left_out() == {"a": 1, "b": 2}
    assert throttle.take_left_out() == {}
    assert throttle.admit("a") is None
    assert throttle.take_left_out() == {"a": 1}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 20), st.booleans())))
def test_nothing_is_lost_and_no_while_has_more_lines_than_allowed(steps):
    clock = Clock()
    throttle = Throttle(lines=3, seconds=10, clock=clock)
    told = 0
    lines: dict[str, list[float]] = {}
    for kind, pause, asked in steps:
        clock.now += pause
        left_out = throttle.admit(kind)
        if left_out is not None:
            told += 1 + left_out
            lines.setdefault(kind, []).append(clock.now)
        if asked:
            told += sum(throttle.take_left_out().values())
    assert told + sum(throttle.take_left_out().values()) == len(steps)
    for times in lines.values():
        while times:
            inside = [moment for moment in times if moment < times[0] + 10]
            assert len(inside) <= 3
            times = times[len(inside) :]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def written(monkeypatch):
    """Configures the logs for a stream, has a function log something, and returns what came."""
    monkeypatch.delenv("NO_COLOR", raising=False)

    def write(log, stream, **options):
        logs.configure(stream=stream, **options)
        log(logs.get_logger("webhooks"))
        return stream.getvalue()

    return write


def test_a_terminal_shows_colors_and_the_fields_in_their_order(written):
    text = written(lambda log: log.info("webhook.accepted", key="a b", count=3), Terminal())
    assert "\x1b[36mcount\x1b[0m=\x1b[35m3\x1b[0m \x1b[36mkey\x1b[0m=\x1b[35m'a b'" in text
    bare = re.sub(r"\x1b\[[0-9;]*m", "", text)
    time, level, rest = bare.split(maxsplit=2)
    assert time.endswith("Z")
    datetime.fromisoformat(time)
    assert level == "[info"
    assert re.fullmatch(r"\] webhook\.accepted +\[sdk_trio\.webhooks\] count=3 key='a b'\n", rest)


def test_colors_can_be_turned_off_and_files_have_none(written, monkeypatch):
    stream = io.StringIO()
    assert "\x1b" not in written(lambda log: log.error("x"), stream, format="Console")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in written(lambda log: log.error("x"), Terminal())


def test_what_is_no_terminal_gets_json_lines(written):
    def fail(log):
        try:
            raise ValueError("boom")
        except ValueError:
            log.exception("x.failed", value={"a": 1})

    line = json.loads(written(fail, io.StringIO()))
    assert (line["event"], line["level"], line["logger"]) == (
        "x.failed",
        "error",
        "sdk_trio.webhooks",
    )
    assert line["value"] == {"a": 1}
    assert line["exception"].endswith("ValueError: boom")


def test_the_traceback_stands_below_its_line(written):
    def fail(log):
        try:
            raise ValueError("boom\x1b[2J")
        except ValueError:
            log.exception("x.failed", key="k")

    lines = written(fail, io.StringIO(), format="Console").splitlines()
    assert lines[0].endswith("[sdk_trio.webhooks] key=k")
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: boom\\x1b[2J"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain", "plain"),
        ("a/b:1.5", "a/b:1.5"),
        ("", "''"),
        ("a b", "'a b'"),
        ("a=b", "'a=b'"),
        ("\x1b[31m", r"\x1b[31m"),
        ("\u202eevil", r"\u202eevil"),
        ("one\ntwo", r"'one\ntwo'"),
        (3, "3"),
        (None, "None"),
        (["a b"], "['a b']"),
    ],
)
def test_values_are_quoted_where_they_could_be_taken_for_something_else(value, shown):
    assert _shown(key=value).endswith(f"key={shown}")


@given(st.text(), st.text(), st.text())
def test_whatever_strangers_send_is_one_line_that_can_be_seen(event, value, name):
    text = _shown(event=event, value=value, wrapped=[name])
    assert text.isprintable()


@given(st.text(), st.text())
def test_a_traceback_cannot_move_the_cursor(value, message):
    text = _shown(value=value, exception=f"Traceback\nValueError: {message}")
    assert text.replace("\n", "").isprintable()


def _shown(*, event="x", **fields):
    head = {"event": event, "level": "info", "logger": "sdk_trio.x", "timestamp": "now"}
    return render_console({**head, **fields}, colors=False)


def test_a_store_that_cannot_be_asked_is_one_event_with_its_caller_in_the_record(caplog):
    with caplog.at_level("ERROR", logger=logs.ROOT):
        logs.get_logger("webhooks").store_unavailable(OSError("disk full"), retry_in=5.0)
    [record] = caplog.records
    assert record.getMessage() == "store.unavailable error='disk full' retry_in=5.0"
    assert record.sdk == ("store.unavailable", {"error": "disk full", "retry_in": 5.0})
    assert record.funcName.startswith("test_a_store_that_cannot_be_asked")
