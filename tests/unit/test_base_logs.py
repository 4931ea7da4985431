"""Lines of the log for people, and how often strangers may cause one."""

import enum
import io
import json
import logging
import re
from datetime import UTC, datetime

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.base import clock, logs
from sdk_trio.base.logs import Throttle, render_console, render_terminal
from sdk_trio.base.times import rfc3339_of


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


def test_a_period_doubles_while_lines_are_omitted_and_starts_over_after_quiet():
    clock = Clock()
    throttle = Throttle(lines=1, seconds=10, longest=60, clock=clock)
    reported = []
    for second in range(400):
        if not 300 <= second < 380 and throttle.admit("a") is not None:
            reported.append(second)
        clock.now += 1
    assert reported == [0, 10, 30, 70, 130, 190, 250, 380, 390]


def test_a_store_retried_each_second_is_logged_at_growing_intervals(caplog):
    clock = Clock()
    log = logs.Logger(logs.get_logger("webhooks")._logger, clock=clock)
    outage = logs.Outage(log)
    with caplog.at_level("INFO", logger="sdk_trio"):
        for _ in range(3600):
            outage.fail(1)
            log.store_unavailable(OSError("away"), retry_in=1.0)
            clock.now += 1.0
        # A failure without an automatic retry is logged each time.
        log.store_unavailable(OSError("away"), ids=["a"])
        outage.end()
        outage.end()
        # The next outage is logged at once.
        log.store_unavailable(OSError("away again"), retry_in=1.0)
    reported = [record.sdk for record in caplog.records]
    assert len(reported) < 70
    assert [fields.get("suppressed", 0) for _, fields in reported[:5]] == [0, 9, 19, 39, 59]
    (*_, released, (event, answers), again) = reported
    assert released == ("store.unavailable", {"error": "away", "ids": ["a"]})
    assert (event, answers["failed"], answers["seconds"] >= 0) == ("store.answers", 3600, True)
    assert again == ("store.unavailable", {"error": "away again", "retry_in": 1.0})


def test_omitted_lines_are_reported_once():
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
    reported = 0
    lines: dict[str, list[float]] = {}
    for kind, pause, asked in steps:
        clock.now += pause
        left_out = throttle.admit(kind)
        if left_out is not None:
            reported += 1 + left_out
            lines.setdefault(kind, []).append(clock.now)
        if asked:
            reported += sum(throttle.take_left_out().values())
    assert reported + sum(throttle.take_left_out().values()) == len(steps)
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
    assert "\x1b[36mkey\x1b[0m=\x1b[35m'a b'\x1b[0m \x1b[36mcount\x1b[0m=\x1b[35m3" in text
    bare = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert re.fullmatch(r"\d\d:\d\d:\d\dZ info    webhook\.accepted key='a b' count=3\n", bare)


def test_a_terminal_of_80_columns_cuts_no_word(written, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    fields = {
        "webhook_id": "msg_3868af5cf89b4e61995b377614f2a2d2",
        "error": "KeyError: 'missing'",
        "place": "/home/ada/shop/app.py:7 in grant",
        "admin": ("http://127.0.0.1:8081", "http://[::1]:8081"),
        "hint": "such events are parked; doctor lists the types that nothing handles " * 2,
        "traceback": "Traceback (most recent call last):\n  File 1\nKeyError: 'missing'\n",
    }
    lines = written(lambda log: log.warning("webhook.failed", **fields), Terminal()).splitlines()
    bare = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    assert max(map(len, bare)) <= 80
    assert bare[-3:] == fields["traceback"].splitlines()
    assert all(line.startswith(" " * 10) for line in bare[1:-3])
    text = " ".join(line.strip() for line in bare)
    assert "webhook_id=msg_3868af5cf89b4e61995b377614f2a2d2 " in text
    assert "admin=http://127.0.0.1:8081,http://[::1]:8081 " in text
    assert fields["hint"].strip() in text


@given(
    st.dictionaries(st.text("abc_", min_size=1), st.text() | st.integers() | st.lists(st.text())),
    st.integers(0, 200),
)
def test_lines_are_broken_between_words_alone(fields, width):
    head = {"event": "webhook.failed", "level": "info", "timestamp": "2026-11-22T08:58:17.1Z"}
    text = render_terminal({**head, **fields}, colors=False, width=width)
    lines = text.split("\n")
    for line in lines[1:]:
        # Only a single word is longer than its line.
        assert len(line) <= max(width, 30) or " " not in line.strip()
    # A sender's text cannot begin a line that looks like another event.
    assert all(line.startswith(" " * 10) for line in lines[1:])
    assert "".join(lines).isprintable()


def test_colors_can_be_turned_off_and_files_have_none(written, monkeypatch):
    stream = io.StringIO()
    assert "\x1b" not in written(lambda log: log.error("x"), stream, format="Console")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in written(lambda log: log.error("x"), Terminal())


def test_without_a_terminal_lines_are_json(written):
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
        (["a b"], "'a b'"),
        (("http://127.0.0.1:8080", "unix:/run/x"), "http://127.0.0.1:8080,unix:/run/x"),
        ((), "-"),
    ],
)
def test_values_are_quoted_where_they_could_be_taken_for_something_else(value, shown):
    assert _shown(key=value).endswith(f"key={shown}")


@given(st.text(), st.text(), st.text())
def test_any_input_of_clients_is_one_visible_line(event, value, name):
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
        logs.get_logger("a-full-disk").store_unavailable(OSError("disk full"), retry_in=5.0)
    [record] = caplog.records
    assert record.getMessage() == "store.unavailable error='disk full' retry_in=5.0"
    assert record.sdk == ("store.unavailable", {"error": "disk full", "retry_in": 5.0})
    assert record.funcName.startswith("test_a_store_that_cannot_be_asked")


class Word(enum.StrEnum):
    ONE = "one"


class Number(enum.IntEnum):
    TWO = 2


NAMES = st.text(st.characters(codec="utf-8"), max_size=8)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary(max_size=5)
    | st.sampled_from([Word.ONE, Number.TWO, {1}, object, "x" * 200, '"%s\x7f\\\ud800 é'])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3)
)
HEAD = ("event", "level", "logger", "timestamp", "exception")
FIELDS = st.dictionaries(
    NAMES | st.sampled_from([*HEAD, "%s", "webhook_id"]),
    VALUES,
    max_size=5,
)
# Until 2100: seconds are floats, which are exact to the microsecond then.
MICROSECONDS = st.integers(0, 4_102_444_800_000_000) | st.integers(0, 4_102_444_800).map(
    lambda second: second * 1_000_000
)


def as_the_standard_library_writes_it(level, event, fields, microseconds):
    """A line as the formatter of old made it: the format that readers of these logs parse."""
    second, fraction = divmod(microseconds, 1_000_000)
    moment = datetime.fromtimestamp(second, UTC).replace(microsecond=fraction)
    return {
        "event": event,
        "level": level,
        "logger": "sdk_trio.webhooks",
        **fields,
        "timestamp": rfc3339_of(moment),
    }


@pytest.mark.parametrize("through", ["directly", "as a record"])
@given(
    event=st.text(),
    fields=FIELDS,
    microseconds=MICROSECONDS,
    level=st.sampled_from(["debug", "info", "warning", "error"]),
    shape=st.sampled_from(["Json", "Console"]),
)
def test_a_line_has_the_same_members_as_json_dumps_makes_it(
    through, event, fields, microseconds, level, shape
):
    if shape == "Console":
        # A value that is not text could not replace one of these.
        fields = {name: value for name, value in fields.items() if name not in HEAD}
    with clock.use(clock.Clock(wall=lambda: microseconds / 1e6)):
        stream = io.StringIO()
        logs.configure(level="Debug", format=shape, stream=stream)
        if through == "as a record":
            logging.getLogger("sdk_trio.webhooks").addFilter(let_pass)
        try:
            getattr(logs.get_logger("webhooks"), level)(event, **fields)
        finally:
            logging.getLogger("sdk_trio.webhooks").removeFilter(let_pass)
    expected = as_the_standard_library_writes_it(level, event, fields, microseconds)
    if shape == "Json":
        (line,) = stream.getvalue().splitlines()
        assert line.isascii()
        members = [
            (without_surrogates(name), json.loads(strict(value)))
            for name, value in expected.items()
        ]
        pairs = json.loads(line, object_pairs_hook=list, parse_constant=pytest.fail)
        assert repr(pairs) == repr([(name, as_pairs(value)) for name, value in members])
    else:
        assert stream.getvalue() == render_console(expected, colors=False) + "\n"


def as_pairs(value):
    """A value of JSON, with its objects as lists of pairs."""
    match value:
        case list():
            return [*map(as_pairs, value)]
        case dict():
            return [(name, as_pairs(each)) for name, each in value.items()]
    return value


def strict(value):
    """A value as JSON, if JSON has it and every reader takes it, else its repr."""
    try:
        return json.dumps(without_surrogates(value), default=repr, allow_nan=False)
    except ValueError:
        return json.dumps(repr(value))


def without_surrogates(value):
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case list():
            return [*map(without_surrogates, value)]
        case dict():
            return {name: without_surrogates(each) for name, each in value.items()}
    return value


def let_pass(record):
    return True


def test_the_seconds_of_many_lines_are_those_of_the_clock():
    micros = 1_775_000_000_999_998
    seen = []
    with clock.use(clock.Clock(wall=lambda: micros / 1e6)):
        for _ in range(5):
            seen.append(logs._now())
            micros += 1
        micros -= 3_000_000  # a clock that is set back
        assert logs._now() == "2026-03-31T23:33:18.000003Z"
    assert [text[17:] for text in seen] == [
        "20.999998Z",
        "20.999999Z",
        "21Z",
        "21.000001Z",
        "21.000002Z",
    ]


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


@pytest.mark.parametrize("name", ["sdk_trio", "sdk_trio.webhooks"])
def test_a_handler_that_is_added_later_gets_its_records(name):
    stream, kept = io.StringIO(), Kept()
    logs.configure(stream=stream)
    log = logs.get_logger("webhooks")
    log.info("without", key=1)
    logging.getLogger(name).addHandler(kept)
    try:
        log.info("with", key=2)
    finally:
        logging.getLogger(name).removeHandler(kept)
    log.info("without", key=3)
    [record] = kept.records
    assert record.sdk == ("with", {"key": 2})
    assert record.funcName == "test_a_handler_that_is_added_later_gets_its_records"
    assert [json.loads(line)["key"] for line in stream.getvalue().splitlines()] == [1, 2, 3]


def test_a_handler_in_the_path_of_all_records_sees_them(monkeypatch):
    """As the SDK of Sentry does."""
    logs.configure(stream=io.StringIO())
    seen = []
    call_handlers = logging.Logger.callHandlers

    def patched(self, record):
        seen.append(record.getMessage())
        return call_handlers(self, record)

    monkeypatch.setattr(logging.Logger, "callHandlers", patched)
    logs.get_logger("webhooks").info("seen", key=1)
    assert seen == ["seen key=1"]


def test_filters_and_levels_that_are_set_later_hold():
    stream = io.StringIO()
    logs.configure(stream=stream)
    logger, log = logging.getLogger("sdk_trio.webhooks"), logs.get_logger("webhooks")
    handler = logging.getLogger("sdk_trio").handlers[0]
    for filterer in (logger, handler):
        filterer.addFilter(refuse)
        log.info("filtered")
        filterer.removeFilter(refuse)
    logger.setLevel("ERROR")
    log.warning("below")
    logger.setLevel(logging.NOTSET)
    handler.setLevel("ERROR")
    log.warning("below")
    handler.setLevel(logging.NOTSET)
    logging.disable(logging.ERROR)
    log.error("disabled")
    logging.disable(logging.NOTSET)
    logger.propagate = False
    log.info("nowhere")
    logger.propagate = True
    assert stream.getvalue() == ""
    handler.setFormatter(logging.Formatter("<%(message)s>"))
    log.info("formatted", key="k")
    assert stream.getvalue() == "<formatted key='k'>\n"


def refuse(record):
    return False


def test_a_record_of_another_library_is_a_line_as_well():
    stream = io.StringIO()
    logs.configure(stream=stream)
    logging.getLogger("sdk_trio.application").info("of %s", "mine")
    line = json.loads(stream.getvalue())
    assert (line["event"], line["logger"]) == ("of mine", "sdk_trio.application")


class MuteError(Exception):
    def __repr__(self):
        raise RuntimeError("no text")

    __str__ = __repr__


@attrs.frozen(repr=False)
class HidesItsField:
    hidden: str

    def __repr__(self):
        return "HidesItsField(...)"


def circle():
    found = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({(1, 2): 3}, "{(1, 2): 3}"),
        (float("nan"), "nan"),
        ([1.5, float("-inf")], "[1.5, -inf]"),
        (HidesItsField("secret"), "HidesItsField(...)"),
        ([HidesItsField("secret")], ["HidesItsField(...)"]),
        (circle(), "[[...]]"),
        (MuteError(), "(no text: its repr raised RuntimeError)"),
        ([MuteError()], ["(no text: its repr raised RuntimeError)"]),
        ({MuteError(): 1}, "(no text: its repr raised RuntimeError)"),
        pytest.param(10**5000, "(no text: its repr raised ValueError)", id="5000 digits"),
        ("a\ud800b\U0001f600", "a\\ud800b\U0001f600"),
        ("\\ud800", "\\ud800"),
    ],
)
def test_any_value_makes_a_line_of_strict_json(value, shown, capsys):
    stream = io.StringIO()
    logs.configure(stream=stream)
    log = logs.get_logger("webhooks")
    log.info("directly", value=value)
    log._log(logging.WARNING, "as a record", {"value": value})
    lines = [json.loads(x, parse_constant=pytest.fail) for x in stream.getvalue().splitlines()]
    assert [(line["event"], line["value"]) for line in lines] == [
        ("directly", shown),
        ("as a record", shown),
    ]
    assert capsys.readouterr().err == ""


def test_a_message_that_cannot_be_made_does_not_fail_who_logs(capsys):
    stream = io.StringIO()
    logs.configure(stream=stream)
    logging.getLogger("sdk_trio.application").info("%d", "no number")
    assert stream.getvalue() == ""
    assert "TypeError" in capsys.readouterr().err
    logs.get_logger("webhooks").info("next")
    assert json.loads(stream.getvalue())["event"] == "next"


def test_a_second_configuration_of_a_stream_keeps_what_waits(tmp_path):
    with (tmp_path / "log").open("w") as stream:
        logs.configure(stream=stream)
        output = logging.getLogger("sdk_trio").handlers[0].output
        logs.configure(level="Error", stream=stream)
        assert logging.getLogger("sdk_trio").handlers[0].output is output
        logs.configure(stream=io.StringIO())
        assert output._closed
