from datetime import date, time, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdk_trio.config import KeyDerivation, Mode, Secret, Settings, describe
from sdk_trio.config.bind import bind
from sdk_trio.config.check import check
from sdk_trio.config.sources import Entry, Layer, Pairs, read_mapping, read_section
from sdk_trio.config.table import table
from sdk_trio.errors import OptionsValidationError, Problem

# A test value.
SECRET = "whsec_z6fMa4YWa088j5EP9gJ8LDaGxrBzHpIg"


def bound(mapping: Any) -> Settings:
    result = bind([read_section(mapping, None)])
    assert result.problems == ()
    return result.settings


def problems(*mappings: Any) -> tuple[Problem, ...]:
    return bind([read_section(mapping, None) for mapping in mappings]).problems


def test_nothing_gives_the_defaults() -> None:
    assert bind([]).settings == Settings()


@pytest.mark.parametrize(
    "mapping",
    [
        {"Sdk": {"Webhooks": {"Path": "/in"}}},
        {"sdk": {"WEBHOOKS": {"path": "/in"}}},
        {"Webhooks": {"Path": "/in"}},
        {"Sdk:Webhooks:Path": "/in"},
        {"SDK__WEBHOOKS__PATH": "/in"},
        {"Webhooks.Path": "/in"},
        {"Sdk": {"Webhooks:Path": "/in"}, "Other": {"Path": "/out"}},
    ],
)
def test_keys_in_every_form(mapping: Any) -> None:
    assert bound(mapping).webhooks.path == "/in"


@pytest.mark.parametrize(
    ("mapping", "read", "value"),
    [
        ({"TimeoutMs": "1500"}, lambda s: s.timeout_ms, 1500),
        ({"TimeoutMs": " 1500 "}, lambda s: s.timeout_ms, 1500),
        ({"TimeoutMs": 1500.0}, lambda s: s.timeout_ms, 1500),
        ({"Mode": "custom"}, lambda s: s.mode, Mode.CUSTOM),
        ({"Webhooks:RequireHttps": "off"}, lambda s: s.webhooks.require_https, False),
        ({"Webhooks:RequireHttps": "YES"}, lambda s: s.webhooks.require_https, True),
        (
            {"Webhooks:Queue:RetryBaseSeconds": "0.25"},
            lambda s: s.webhooks.queue.retry_base_seconds,
            0.25,
        ),
        ({"Webhooks:Queue:RetryBaseSeconds": 2}, lambda s: s.webhooks.queue.retry_base_seconds, 2),
        ({"Resilience:HedgeAfterMs": None}, lambda s: s.resilience.hedge_after_ms, None),
        ({"Resilience:HedgeAfterMs": ""}, lambda s: s.resilience.hedge_after_ms, None),
        ({"Server:CertFile": ""}, lambda s: s.server.cert_file, None),
        ({"ApiVersion": date(2026, 4, 1)}, lambda s: s.api_version, "2026-04-01"),
        (
            {"MultiTenant:SingleTenantUpgrade:MaxRunDuration": "1.00:00:00"},
            lambda s: s.multi_tenant.single_tenant_upgrade.max_run_duration,
            timedelta(days=1),
        ),
        (
            {"MultiTenant:SingleTenantUpgrade:MaxRunDuration": time(1, 0)},
            lambda s: s.multi_tenant.single_tenant_upgrade.max_run_duration,
            timedelta(hours=1),
        ),
        ({"Webhooks:Secret": SECRET}, lambda s: s.webhooks.secret, Secret(SECRET)),
        (
            {"Webhooks:KeyDerivation": "utf8"},
            lambda s: s.webhooks.key_derivation,
            KeyDerivation.UTF8,
        ),
        (
            {"MultiTenant:Notifications:EnabledChannels.Sms": True},
            lambda s: s.multi_tenant.notifications.enabled_channels.sms,
            True,
        ),
    ],
)
def test_values_are_converted(mapping: Any, read: Any, value: Any) -> None:
    assert read(bound(mapping)) == value


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("TimeoutMs", "30s", "whole number, not '30s'"),
        ("TimeoutMs", 1.5, "whole number"),
        ("TimeoutMs", True, "whole number, not true"),
        ("TimeoutMs", None, "not null"),
        ("TimeoutMs", {}, "not an object"),
        ("TimeoutMs", "1_000", "whole number"),
        ("TimeoutMs", "٣", "whole number"),
        ("Mode", "Custm", "one of Test, Live, Custom"),
        ("Mode", 1, "one of Test, Live, Custom"),
        ("BasePath", 5, "text in quotes"),
        ("AccessToken", 12345, "text in quotes"),
        ("BasePath", Secret("text"), "text in quotes, not a value of type Secret"),
        ("Webhooks:RequireHttps", "maybe", "true or false"),
        ("Webhooks:RequireHttps", 1, "true or false"),
        ("Webhooks:InlineTimeoutSeconds", float("nan"), "a number"),
        ("Webhooks:InlineTimeoutSeconds", "inf", "a number"),
        ("Webhooks:InlineTimeoutSeconds", 10**400, "a number"),
        (
            "MultiTenant:SingleTenantUpgrade:MaxRunDuration",
            "30",
            "30m, 2h or [d.]hh:mm:ss[.fffffff], not '30'",
        ),
        ("MultiTenant:SingleTenantUpgrade:MaxRunDuration", 30, "time span"),
        ("Webhooks:Secrets", 5, "list of text"),
        ("Webhooks", "text", "is a section"),
        ("Webhooks", [], "is a section"),
    ],
)
def test_invalid_values_are_reported_with_their_full_key(
    key: str, value: Any, message: str
) -> None:
    (problem,) = problems({key: value})
    assert problem.key == f"Sdk:{key}"
    assert message in problem.message


def test_every_problem_is_reported_at_once() -> None:
    found = problems({"Mode": "x", "TimeoutMs": "y", "Webhooks": {"Secrets": [1, SECRET, None]}})
    assert [problem.key for problem in found] == [
        "Sdk:Mode",
        "Sdk:TimeoutMs",
        "Sdk:Webhooks:Secrets:0",
        "Sdk:Webhooks:Secrets:2",
    ]


def test_a_value_has_nothing_below_it() -> None:
    (problem,) = problems({"Mode": {"Name": "Live"}})
    assert problem.key == "Sdk:Mode:Name"
    assert "single value" in problem.message


def test_list_items_have_numbers() -> None:
    (problem,) = problems({"Webhooks": {"Secrets": {"first": SECRET}}})
    assert problem.key == "Sdk:Webhooks:Secrets:first"


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("Webhooks:TolerenceSeconds", "Sdk:Webhooks:ToleranceSeconds"),
        ("Webhook:Path", "Sdk:Webhooks"),
        ("ToleranceSeconds", "Sdk:Webhooks:ToleranceSeconds"),
    ],
)
def test_unknown_keys_are_warnings_with_a_suggestion(key: str, suggestion: str) -> None:
    result = bind([read_section({key: 1}, None)])
    assert result.problems == ()
    (warning,) = result.warnings
    assert f"did you mean {suggestion}?" in warning.message


def test_an_unknown_key_like_nothing_is_a_warning_without_its_value() -> None:
    (warning,) = bind([read_section({"Zzz": SECRET}, None)]).warnings
    assert warning.key == "Sdk:Zzz"
    assert "did you mean" not in warning.message
    assert SECRET not in str(warning)


@pytest.mark.parametrize(
    "pairs",
    [
        (("Mode", "Test"), ("Mode", "Live")),
        (("Mode", "Test"), ("mode", "Live")),
        (("Webhooks", Pairs((("Path", "/a"),))), ("webhooks", Pairs((("RequireHttps", True),)))),
        (("Webhooks:Path", "/a"), ("Webhooks", Pairs((("Path", "/b"),)))),
    ],
)
def test_duplicate_keys_are_problems(pairs: Any) -> None:
    layer = read_mapping(Pairs((("Sdk", Pairs(pairs)),)), "file.json")
    (problem,) = layer.problems
    assert "given twice" in problem.message
    assert problem.origin == "file.json"


def test_the_root_given_twice_is_a_problem() -> None:
    (problem,) = read_mapping(Pairs((("Sdk", Pairs(())), ("sdk", Pairs(())))), None).problems
    assert problem.key == "Sdk"


A, B, C = (Secret(text) for text in ("secret-a", "secret-b", "secret-c"))


@pytest.mark.parametrize(
    ("later", "secrets"),
    [
        ({"Webhooks:Secrets": ["secret-c"]}, (C,)),
        ({"Webhooks:Secrets": []}, ()),
        ({"Webhooks:Secrets:0": "secret-c"}, (C, B)),
        ({"Webhooks:Secrets:1": "secret-c"}, (A, C)),
        ({"Webhooks:Secrets:2": "secret-c"}, (A, B, C)),
        ({"Webhooks:Secrets": '["secret-c"]'}, (C,)),
        ({"Webhooks:Secrets": ""}, ()),
        ({"Webhooks:Secrets": "secret-c,secret-b"}, (Secret("secret-c,secret-b"),)),
        ({"Webhooks:Secrets": "whsec_c, whsec_b"}, (Secret("whsec_c"), Secret("whsec_b"))),
    ],
)
def test_later_lists_replace_the_whole_or_one_item(later: Any, secrets: Any) -> None:
    earlier = {"Webhooks": {"Secrets": ["secret-a", "secret-b"]}}
    result = bind([read_section(earlier, "one"), read_section(later, "two")])
    assert result.settings.webhooks.secrets == secrets


def test_a_whole_list_replaces_earlier_items() -> None:
    layers: list[dict[str, Any]] = [
        {"Webhooks:Secrets:3": "secret-a"},
        {"Webhooks:Secrets": ["secret-b"]},
    ]
    result = bind(read_section(layer, None) for layer in layers)
    assert result.settings.webhooks.secrets == (B,)


def test_an_ipv6_address_is_not_a_json_array() -> None:
    assert bound({"Server:Bind": "[::1]:80,[::1]"}).server.bind == ("[::1]:80", "[::1]")


def test_each_value_remembers_its_origin() -> None:
    layers = [
        Layer((Entry(("Mode",), "Live", "a.json"), Entry(("TimeoutMs",), 2000, "a.json"))),
        Layer((Entry(("mode",), "Test", "variable SDK__MODE"),)),
        Layer((Entry(("Webhooks", "Secrets"), ["a", "b"], "a.json"),)),
        Layer((Entry(("Webhooks", "Secrets", "1"), "c", "variable SDK__WEBHOOKS__SECRETS__1"),)),
        Layer(
            (Entry(("Forward", "Routes"), [], "b.json"), Entry(("Server", "Bind"), [], "b.json"))
        ),
    ]
    origins = bind(layers).origins
    assert origins["Sdk:Mode"] == "variable SDK__MODE"
    assert origins["Sdk:TimeoutMs"] == "a.json"
    assert origins["Sdk:Webhooks:Secrets"] == "a.json, variable SDK__WEBHOOKS__SECRETS__1"
    assert origins["Sdk:Webhooks:Secrets:0"] == "a.json"
    assert origins["Sdk:Webhooks:Secrets:1"] == "variable SDK__WEBHOOKS__SECRETS__1"
    assert origins["Sdk:Forward:Routes"] == origins["Sdk:Server:Bind"] == "b.json"
    assert "Sdk:BasePath" not in origins


def test_secret_then_secrets() -> None:
    webhooks = bound({"Webhooks": {"Secret": "secret-c", "Secrets": ["secret-a"]}}).webhooks
    assert webhooks.all_secrets == (C, A)


def test_a_mapping_that_contains_itself_ends() -> None:
    loop: dict[str, Any] = {}
    loop["Webhooks"] = loop
    assert bind([read_section(loop, None)]).warnings


KEYS = st.one_of(
    st.sampled_from(sorted({part for setting in table() for part in setting.path} | {"Sdk"})),
    st.sampled_from([setting.key for setting in table()]),
    st.text(max_size=6),
    st.integers(0, 3).map(str),
    st.integers(),
    st.none(),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.just("whsec_"),
    st.just("Custom"),
    st.just(10**400),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=20,
)


@settings(max_examples=300)
@given(st.dictionaries(KEYS, VALUES, max_size=6))
def test_any_mapping_is_settings_or_problems_with_keys(mapping: Any) -> None:
    result = settings_or_problems(mapping)
    if isinstance(result, Settings):
        assert describe(result)
        return
    assert result
    assert all(p.key.split(":")[0] == "Sdk" and p.message for p in result)
    assert all(p.key.isprintable() for p in result)


def settings_or_problems(mapping: Any) -> Settings | tuple[Problem, ...]:
    try:
        return Settings.from_mapping(mapping)
    except OptionsValidationError as error:
        return error.problems


LONG_SECRETS = st.text(
    st.characters(min_codepoint=33, max_codepoint=126), min_size=13, max_size=60
).map(lambda text: f"Qz{text}")


@settings(max_examples=200)
@given(st.data(), LONG_SECRETS)
def test_a_secret_under_any_key_is_in_no_message_and_no_display(data: Any, secret: str) -> None:
    setting = data.draw(st.sampled_from(table()))
    layers = [read_section({"AccessToken": secret, setting.key: secret}, "file")]
    result = bind(layers)
    found = check(result.settings)
    problems = (*result.problems, *result.warnings, *found.problems, *found.warnings)
    reported = [str(problem) for problem in problems]
    assert not [text for text in reported if secret in text]
    if setting.kind is Secret:
        rows = describe(result.settings, result.origins)
        assert secret not in f"{result.settings!r} {result.settings} {rows}"
    assert secret not in repr(layers)
