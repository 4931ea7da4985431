"""Routes: their events, the consequences of answers, and their settings."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.deliveries import SECRET

from sdk_trio.config import Settings, load_settings
from sdk_trio.config.bind import bind
from sdk_trio.config.check import check, forward_secret_problem
from sdk_trio.config.options.forward import RouteOptions
from sdk_trio.config.probe import probe
from sdk_trio.config.show import describe, json_schema
from sdk_trio.config.sources import Entry, layer_of, read_section
from sdk_trio.errors import OptionsValidationError
from sdk_trio.webhooks.routes import (
    FEW_ATTEMPTS,
    Condition,
    Pause,
    Route,
    answer_text,
    first_match,
    judge,
    pause_of,
)

URL = "http://127.0.0.1:3000/hooks"


def route(*types, where=(), **options):
    return Route.of(RouteOptions(types=types or ("*",), where=where, url=URL, **options))


def match(routes, event_type, **data):
    return first_match(routes, event_type, json.dumps({"type": event_type, "data": data}).encode())


# -- which events -------------------------------------------------------------------------------


def test_the_first_route_that_matches_takes_an_event():
    routes = [route("order.paid"), route("order.*", "refund.?reated"), route()]
    assert match(routes, "order.paid") == 0
    assert match(routes, "order.refunded") == 1
    assert match(routes, "refund.created") == 1
    assert match(routes, "an.unknown.type.name") == 2
    assert match(routes[:2], "an.unknown.type.name") is None


def test_globs_match_whole_types_and_case_counts():
    assert match([route("order")], "order.paid") is None
    assert match([route("order.*")], "preorder.paid") is None
    assert match([route("order.*")], "Order.paid") is None


def test_all_conditions_of_a_route_have_to_hold():
    routes = [route(where=("/data/status=paid", "/data/amount=500")), route("order.*")]
    assert match(routes, "order.paid", status="paid", amount=500) == 0
    assert match(routes, "order.paid", status="paid", amount=400) == 1
    assert match(routes, "order.paid", status="paid") == 1


@pytest.mark.parametrize(
    ("setting", "document", "holds"),
    [
        ("/a=5", {"a": 5}, True),
        ("/a=5", {"a": "5"}, True),
        ('/a="5"', {"a": 5}, False),
        ("/a=true", {"a": True}, True),
        ("/a=1", {"a": True}, False),
        ("/a=true", {"a": 1}, False),
        ("/a=null", {"a": None}, True),
        ("/a=null", {}, False),
        ("/a=x=y", {"a": "x=y"}, True),
        ("/a/1/b=c", {"a": [0, {"b": "c"}]}, True),
        ("/a/2=c", {"a": [0]}, False),
        ("/a/-1=0", {"a": [0]}, False),
        ("/a~1b=1", {"a/b": 1}, True),
        ("/a~0b=1", {"a~b": 1}, True),
        ("/a~01b=1", {"a~1b": 1}, True),
        ("/=1", {"": 1}, True),
        ("/a/b=1", {"a": "text"}, False),
        ('/a={"b": 1}', {"a": {"b": 1}}, True),
        ("/a=", {"a": ""}, True),
    ],
)
def test_a_condition_is_a_json_pointer_and_a_value(setting, document, holds):
    assert Condition.of(setting).holds(document) is holds


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.text().map(lambda text: f"/{text}"), JSON)
@example("/=NaN", {"": 1})
def test_no_condition_and_no_body_is_an_error(setting, document):
    Condition.of(setting).holds(document)
    assert first_match([route(where=(setting,))], "a", b"\xff{") in (None, 0)


def test_a_route_takes_the_events_of_its_sources_and_without_any_the_upstreams():
    routes = [route("a.*", sources=("stripe", "github")), route("a.*")]
    assert first_match(routes, "a.b", None, "stripe") == 0
    assert first_match(routes, "a.b", None, "github") == 0
    assert first_match(routes, "a.b", None, "shop") is None
    assert first_match(routes, "a.b", None) == 1
    assert first_match(routes, "c", None, "stripe") is None


def test_a_body_is_read_once_and_only_if_a_condition_asks():
    routes = [route(where=("/data/a=1",)), route(where=("/data/a=2",)), route()]
    assert match(routes, "order.paid", a=2) == 1
    assert first_match(routes, "order.paid", None) == 2


# -- what follows an answer ---------------------------------------------------------------------


@given(st.integers(100, 599), st.none() | st.floats(0, 1e9))
def test_every_status_leads_to_one_thing(status, retry_after):
    said = judge(status, retry_after, longest=900.0)
    assert said.done == (200 <= status < 300)
    assert said.pauses == (status == 410)
    ways = [said.done, said.pauses, said.unavailable, said.at_fault, said.most_attempts is not None]
    assert sum(ways) == (0 if status in (408, 425) else 1)
    assert said.retry_after is None or said.retry_after <= 900.0
    assert not said.holds or (said.unavailable and retry_after is not None)


def test_the_table_of_the_page():
    assert judge(429, 7.0, longest=900).retry_after == 7.0
    assert judge(503, 1e6, longest=900).retry_after == 900
    assert judge(429, 7.0, longest=900).holds
    assert not judge(503, None, longest=900).holds
    assert judge(500, None, longest=900).at_fault
    for status in (400, 401, 404, 422, 301, 307):
        assert judge(status, None, longest=900).most_attempts == FEW_ATTEMPTS
    assert "redirect" in judge(302, None, longest=900).text


@given(st.integers(100, 599), st.binary())
def test_a_response_is_described_in_one_bounded_line(status, body):
    text = answer_text(status, body)
    assert text.startswith(f"answered {status}")
    assert len(text.splitlines()) == 1
    assert len(text) < 400


def test_a_pause_survives_its_way_through_the_store_and_damage_is_a_pause():
    pause = Pause("410", 1_700_000_000.0, "kim")
    assert pause_of(pause.as_text()) == pause
    assert "2023-11-14T22:13:20Z, by kim: 410" in str(pause)
    assert pause_of(None) is None
    for damaged in ("", "{}", "[]", "null", '{"reason": 1, "at": 2, "actor": 3, "more": 4}'):
        assert pause_of(damaged) is not None


# -- settings -----------------------------------------------------------------------------------


def bound(mapping, **variables):
    entries = [Entry(tuple(key.split("__")), value, key) for key, value in variables.items()]
    return bind([read_section({"Forward": mapping}, "file"), layer_of(entries, "variables")])


def problems(mapping):
    found = check(bound(mapping).settings, standalone=True, receiver=False).problems
    return [problem.key.removeprefix("Sdk:Forward:") for problem in found]


def test_routes_are_a_list_of_sections_of_which_variables_change_items():
    found = bound(
        {"Routes": [{"Url": URL, "Types": ["a", "b"]}, {"url": "unix:/run/a", "Ordered": True}]},
        Forward__Routes__1__Concurrency="3",
        forward__routes__1__TYPES__0="c.*",
        FORWARD__ROUTES__4__URL="http://10.0.0.1/",
    )
    assert (found.problems, found.warnings) == ((), ())
    first, second, third = found.settings.forward.routes
    assert (first.types, first.url, first.ordered) == (("a", "b"), URL, False)
    assert (second.types, second.concurrency, second.ordered) == (("c.*",), 3, True)
    assert third.url == "http://10.0.0.1/"
    origins = {row.key: row.origin for row in describe(found.settings, found.origins)}
    assert origins["Sdk:Forward:Routes:0:Types"] == "file"
    assert origins["Sdk:Forward:Routes:1:Concurrency"] == "Forward__Routes__1__Concurrency"
    assert origins["Sdk:Forward:Routes:2:Name"] == "default"


def test_a_list_in_one_variable_is_a_json_array():
    (one,) = bound({}, Forward__Routes=f'[{{"Url": "{URL}"}}]').settings.forward.routes
    assert one.url == URL


def test_a_whole_list_replaces_the_one_before_and_its_items():
    layers = [
        read_section({"Forward:Routes": [{"Url": URL}, {"Url": URL}]}, "a"),
        read_section({"Forward:Routes": [{"Url": "unix:/b"}]}, "b"),
    ]
    (one,) = bind(layers).settings.forward.routes
    assert one.url == "unix:/b"


def test_mistakes_in_a_route_name_the_key_and_its_place():
    found = bound({"Routes": [{"Url": URL, "Orderd": True}, 5, {"Url": URL, "TimeoutSeconds": []}]})
    assert [str(warning).split(" (")[0] for warning in found.warnings] == [
        "Sdk:Forward:Routes:0:Orderd: is not a known key: did you mean "
        "Sdk:Forward:Routes:0:Ordered?"
    ]
    keys = [problem.key for problem in found.problems]
    assert keys == ["Sdk:Forward:Routes:2:TimeoutSeconds", "Sdk:Forward:Routes:1"]
    assert problems({"Routes": [{}]}) == ["Routes:0:Url"]
    assert problems({"Routes": [{"Url": URL, "Concurrency": 0}]}) == ["Routes:0:Concurrency"]
    assert problems({"Routes": [{"Url": URL, "Types": []}]}) == ["Routes:0:Types"]
    assert problems({"Routes": [{"Url": URL, "Where": ["data"]}]}) == ["Routes:0:Where:0"]
    twice = [{"Url": URL, "Name": "a"}, {"Url": URL, "Name": "a"}]
    assert problems({"Routes": twice}) == ["Routes:1:Name"]


@pytest.mark.parametrize(
    "header",
    ["no colon", "webhook-id: x", "Host: x", "Content-Length: 1", "a b: c", "a: b\r\nc: d"],
)
def test_headers_that_are_not_the_routes_to_set_are_refused_without_a_quotation(header):
    settings = bound({"Routes": [{"Url": URL, "Headers": [header]}]}).settings
    (problem,) = check(settings, standalone=True, receiver=False).problems
    assert problem.key == "Sdk:Forward:Routes:0:Headers:0"
    assert header not in str(problem)


def test_added_headers_may_be_credentials_and_are_never_shown():
    found = bound({"Routes": [{"Url": URL, "Headers": ["Authorization: Bearer planted"]}]})
    assert check(found.settings, standalone=True, receiver=False).problems == ()
    assert "planted" not in f"{found.settings} {describe(found.settings)}"


def test_a_public_address_is_refused_unless_a_route_allows_it():
    public = "https://93.184.216.34/hooks"
    assert problems({"Url": public}) == ["Url"]
    assert problems({"Routes": [{"Url": public}]}) == ["Routes:0:Url"]
    assert problems({"Routes": [{"Url": public, "AllowPublicAddresses": True}]}) == []


def test_routes_without_a_name_have_their_number_and_the_url_is_the_last_route():
    settings = bound({"Url": URL, "Routes": [{"Url": URL}, {"Url": URL, "Name": "b"}]}).settings
    routes = settings.forward.all_routes
    assert [one.name for one in routes] == ["route-1", "b", "forward-to"]
    assert {one.secret_env_var for one in routes} == {"SDK_FORWARD_SECRET"}


def test_a_secret_that_is_missing_or_unusable_is_a_problem_and_no_warning():
    settings = bound({"Url": URL, "Routes": [{"Url": URL, "SecretEnvVar": "OWN"}]}).settings
    found = probe(settings, {"SDK_FORWARD_SECRET": SECRET})
    assert [problem.key for problem in found.problems] == ["Sdk:Forward:Routes:0:SecretEnvVar"]
    assert "secrets new" in found.problems[0].message
    assert (
        probe(settings, {"SDK_FORWARD_SECRET": f"{SECRET} {SECRET}", "OWN": SECRET}).problems == ()
    )
    for wrong in ("whsec_short", "not base64!", "whpk_" + SECRET[6:], f"{SECRET} x"):
        assert forward_secret_problem(wrong)
    # Nothing is asked of who forwards nothing.
    assert probe(bound({}).settings, {}).problems == ()


def test_a_file_of_settings_has_its_routes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SDK_FORWARD_SECRET", SECRET)
    monkeypatch.setenv(
        "SDK__WEBHOOKS__SECRET", "whsec_z6fMa4YWa088j5EP9gJ8LDaGxrBzHpIg"
    )  # a test value
    (tmp_path / "sdk.toml").write_text(
        '[[Sdk.Forward.Routes]]\nUrl = "http://127.0.0.1:1/"\n'
        '[[Sdk.Forward.Routes]]\nUrl = "unix:/run/app:/in"\nTypes = ["order.*"]\n'
    )
    routes = load_settings(standalone=True).forward.routes
    assert [one.url for one in routes] == ["http://127.0.0.1:1/", "unix:/run/app:/in"]
    (tmp_path / "appsettings.json").write_text('{"Sdk": {"Forward": {"Routes": [{"Url": 1}]}}}')
    (tmp_path / "sdk.toml").unlink()
    with pytest.raises(OptionsValidationError, match=r"Sdk:Forward:Routes:0:Url: must be text"):
        load_settings(standalone=True)


def test_a_wrong_number_is_shown():
    (problem,) = bound({"Routes": [{"Url": URL, "Concurrency": 1.5}]}).problems
    assert problem.message == "must be a whole number, not 1.5"


def test_the_schema_has_the_keys_of_a_route():
    section = json_schema()["properties"]["Sdk"]["properties"]["Forward"]["properties"]["Routes"]
    assert section["type"] == "array"
    assert section["items"]["properties"]["Types"]["items"] == {"type": "string"}
    assert section["items"]["additionalProperties"] is False


def test_settings_made_by_hand_have_routes():
    mapping = {"Webhooks:Secret": SECRET, "Forward:Routes": [{"Url": URL, "Where": ["/a=1"]}]}
    settings = Settings.from_mapping(mapping, standalone=True)
    assert settings.forward.routes[0].where == ("/a=1",)
