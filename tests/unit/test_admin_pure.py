"""The admin address's pure parts: exposition, access, queries, probes, histograms."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.admin.access import Access, header_map, host_name, is_address, is_of_this_machine
from sdk_trio.admin.app import checks_document, is_ready, status_of
from sdk_trio.admin.metrics import METRICS, UnknownMetricError, expose, metric_of
from sdk_trio.admin.query import LARGEST_LIMIT, BadQueryError, parse_list, parse_replay, parse_show
from sdk_trio.base.telemetry import Check, Histogram, Sample
from sdk_trio.records.deliveries import REPLAYABLE
from sdk_trio.webhooks.counters import CAUSES, RESULTS, Counters

LOCAL = Access("secret", ("http://127.0.0.1:8081",))

# -- exposition -------------------------------------------------------------------------------

#: One line of a sample, parsed by the reverse of the format's rules.
_LINE = re.compile(r'sdk_check_ok\{check="((?:[^"\\\n]|\\[\\n"])*)"\} (\S+)')


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])), st.floats())
def test_any_label_and_value_can_be_read_back(label, value):
    text = expose([Sample("sdk_check_ok", (("check", label),), value)]).decode()
    head, kind, rest = text.split("\n", 2)
    assert head.startswith("# HELP sdk_check_ok ")
    assert kind == "# TYPE sdk_check_ok gauge"
    match = _LINE.fullmatch(rest.removesuffix("\n"))
    unescaped = re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], match[1])
    assert unescaped == label
    read = float(match[2])
    assert read == value or (math.isnan(read) and math.isnan(value))


def test_non_finite_values_have_the_names_of_the_format():
    values = (math.inf, -math.inf, math.nan)
    text = expose([Sample("sdk_queue_depth", (), value) for value in values]).decode()
    assert [line.split()[1] for line in text.splitlines()[2:]] == ["+Inf", "-Inf", "NaN"]


def test_samples_are_grouped_by_metric_with_one_help_and_type():
    text = expose(
        [
            Sample("sdk_inbox_events", (("state", "done"),), 2),
            Sample("sdk_queue_depth", (), 1.5),
            Sample("sdk_inbox_events", (("state", "dead"),), 1),
        ]
    ).decode()
    assert [line for line in text.splitlines() if not line.startswith("# HELP")] == [
        "# TYPE sdk_queue_depth gauge",
        "sdk_queue_depth 1.5",
        "# TYPE sdk_inbox_events gauge",
        'sdk_inbox_events{state="done"} 2',
        'sdk_inbox_events{state="dead"} 1',
    ]


@pytest.mark.parametrize(
    "name", ["sdk_invented", "sdk_queue_depth_sum", "sdk_client_attempts", "_bucket", ""]
)
def test_an_undocumented_metric_is_not_exposed(name):
    assert metric_of(name) is None
    with pytest.raises(UnknownMetricError):
        expose([Sample(name, (), 1)])


def test_names_follow_the_conventions():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith(("sdk_", "process_"))
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert metric.help.endswith(".")


# -- histograms and counters ------------------------------------------------------------------


@given(st.lists(st.floats(min_value=0, max_value=1000)))
def test_a_histogram_counts_each_value_in_every_bucket_that_it_fits(values):
    bounds = (0.1, 1.0, 10.0)
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    found = {(s.name, *s.labels): s.value for s in histogram.samples("x", (("type", "t"),))}
    for bound in (*bounds, math.inf):
        name = "+Inf" if bound == math.inf else repr(bound)
        expected = sum(value <= bound for value in values)
        assert found["x_bucket", ("type", "t"), ("le", name)] == expected
    assert found["x_count", ("type", "t")] == len(values)
    assert found["x_sum", ("type", "t")] == pytest.approx(sum(values))


@given(st.lists(st.text(), max_size=50))
def test_unknown_types_share_one_label(types):
    counters = Counters(["order.paid", "other.known"])
    for event_type in ["order.paid", *types]:
        counters.observe(event_type, 0.1)
    labels = {dict(s.labels)["type"] for s in counters.samples() if "_seconds" in s.name}
    assert labels <= {"order.paid", "other.known", "other"}


def test_every_result_is_shown_before_it_has_happened():
    found = {s.labels[0]: s.value for s in Counters().samples()}
    results = [("result", result) for result in RESULTS]
    assert found == dict.fromkeys([*results, *(("cause", cause) for cause in CAUSES)], 0)


# -- probes -----------------------------------------------------------------------------------

_CHECKS = st.lists(st.builds(Check, st.text(), st.booleans(), st.text(), st.booleans()))


@given(_CHECKS)
def test_one_failed_check_is_enough(checks):
    failed = any(not check.ok for check in checks)
    degraded = any(check.degraded for check in checks)
    assert is_ready(checks) is not failed
    assert status_of(checks) == ("failing" if failed else "degraded" if degraded else "ok")
    for details in (True, False):
        shown = checks_document(checks, details=details)
        assert [c["name"] for c in shown] == [c.name for c in checks]
        assert all(("detail" in c) is details for c in shown)


# -- access -----------------------------------------------------------------------------------


@given(st.text())
def test_only_the_token_is_the_token(given_text):
    headers = {"authorization": f"Bearer {given_text}"}
    assert LOCAL.has_token(headers) is (given_text.strip() == "secret")
    assert not Access(None).has_token(headers)


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ("Bearer secret", True),
        ("bearer secret", True),
        ("Basic secret", False),
        ("secret", False),
        ("Bearer", False),
        ("", False),
    ],
)
def test_the_token_comes_as_bearer(value, fits):
    assert LOCAL.has_token({"authorization": value}) is fits


def test_the_token_is_in_no_description():
    assert "secret" not in repr(LOCAL)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("localhost:8081", "localhost"),
        ("LOCALHOST.", "localhost"),
        ("[::1]:8081", "[::1]"),
        ("[::1]", "[::1]"),
        ("a:b", ""),
        ("a:1:2", ""),
        ("user@localhost", "user@localhost"),
        ("localhost:8081/x", "localhost"),
        ("", ""),
    ],
)
def test_a_host_is_read_without_its_port(host, name):
    assert host_name(host) == name


@given(st.text())
def test_any_host_is_either_known_or_refused(host):
    refusal = LOCAL.check_host({"host": host})
    name = host_name(host)
    known = is_address(name) or name == "localhost" or name.endswith(".localhost")
    assert (refusal is None) is known


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("http://127.0.0.1:8081", True),
        ("http://127.1.2.3:8081", True),
        ("http://[::1]:8081", True),
        ("unix:/run/admin.sock", True),
        ("http://0.0.0.0:8081", False),
        ("http://[::]:8081", False),
        ("http://10.0.0.1:8081", False),
    ],
)
def test_loopback_and_unix_sockets_are_of_this_machine(address, local):
    assert is_of_this_machine(address) is local
    assert Access(None, (address,)).is_local is local


def test_nothing_is_local_before_the_address_is_known():
    assert not Access(None).is_local
    assert not Access(None, ("http://127.0.0.1:1", "http://10.0.0.1:1")).is_local


@pytest.mark.parametrize(
    ("origin", "host", "passes"),
    [
        (None, "localhost:8081", True),
        ("http://localhost:8081", "localhost:8081", True),
        ("http://LOCALHOST:8081", "localhost:8081", True),
        ("http://localhost:9999", "localhost:8081", False),
        ("http://evil.example", "localhost:8081", False),
        ("null", "localhost:8081", False),
        ("", "localhost:8081", False),
    ],
)
def test_a_change_comes_from_our_own_page_or_from_none(origin, host, passes):
    headers = {"host": host, "content-type": "application/json; charset=utf-8"}
    if origin is not None:
        headers["origin"] = origin
    assert (LOCAL.check_change(headers) is None) is passes


def test_a_repeated_header_counts_as_missing():
    twice = [(b"Authorization", b"Bearer secret"), (b"authorization", b"Bearer secret")]
    assert header_map(twice) == {"authorization": ""}


# -- queries ----------------------------------------------------------------------------------


@given(st.binary(max_size=60))
def test_any_query_is_understood_or_refused(query):
    for parse in (parse_list, parse_show, parse_replay):
        try:
            parsed = parse(query)
        except BadQueryError:
            continue
        if parse is parse_list:
            assert 1 <= parsed.limit <= LARGEST_LIMIT


@pytest.mark.parametrize(
    "body",
    [
        b'{"ids": ["a"], "sate": "dead"}',
        b'{"state": "dead", "ids": null}',
        b'{"ids": ["\\ud800"]}',
        b'{"ids": "msg_1"}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_a_request_with_a_misspelt_field_is_refused(body):
    with pytest.raises(BadQueryError):
        parse_replay(body)


def test_a_whole_number_may_have_a_fraction_of_zero():
    """A JSON Schema counts such numbers as integers, and so does the OpenAPI document."""
    assert parse_replay(b'{"state": "dead", "after": 636935.0}').after == 636935
    for number in (b"5.5", b"-1.0", b"1e19", b"1e400"):
        with pytest.raises(BadQueryError):
            parse_replay(b'{"state": "dead", "after": %b}' % number)


@pytest.mark.parametrize("state", REPLAYABLE)
def test_every_state_that_can_be_replayed_can_be_ordered(state):
    assert parse_replay(b'{"state": "%s"}' % state.encode()).state == state
