"""The plan of the client: addresses, headers and policies out of the settings."""

import pytest

from sdk_trio.base.breaker import BreakerPolicy
from sdk_trio.client.pipeline import join_base, origin_of, plan_of, token_problem, token_warning
from sdk_trio.config import BUNDLED_API_VERSION, Mode, Secret, Settings
from sdk_trio.config.options.client import ResilienceOptions, UpstreamOptions
from sdk_trio.errors import OptionsValidationError

TOKEN = Secret("polar_oat_not-a-real-token")


@pytest.mark.parametrize(
    ("mode", "base"),
    [
        (Mode.TEST, "https://sandbox-api.polar.sh/v1"),
        (Mode.LIVE, "https://api.polar.sh/v1"),
        (Mode.CUSTOM, "https://api.example:8443/v1"),
    ],
)
def test_the_mode_chooses_the_address(mode, base):
    settings = Settings(mode=mode, access_token=TOKEN, custom_base_url="https://api.example:8443")
    assert plan_of(settings).base_url == base


def test_every_setting_is_used():
    settings = Settings(
        access_token=TOKEN,
        base_path="/v2/",
        api_version="2025-01-01",
        timeout_ms=1500,
        total_timeout_ms=20_000,
        max_retries=7,
        upstream=UpstreamOptions(sandbox_url="https://s.example/", version_header="Polar-Version"),
        resilience=ResilienceOptions(
            circuit_breaker_failure_threshold=9,
            circuit_breaker_sampling_seconds=8,
            circuit_breaker_break_seconds=7,
            hedge_after_ms=250,
        ),
    )
    plan = plan_of(settings)
    assert plan.base_url == "https://s.example/v2"
    assert plan.origin == "https://s.example:443"
    assert (plan.attempt_timeout, plan.total_timeout, plan.hedge_after) == (1.5, 20.0, 0.25)
    assert plan.retry.max_retries == 7
    assert plan.breaker == BreakerPolicy(9, 8, 7)
    assert (b"Polar-Version", b"2025-01-01") in plan.headers(user_agent="x")


def test_the_bundled_version_is_sent_when_none_is_set():
    headers = plan_of(Settings(access_token=TOKEN)).headers(user_agent="x")
    assert (b"Sdk-Version", BUNDLED_API_VERSION.encode()) in headers


def test_the_bundled_version_has_the_form_that_its_header_knows():
    upstream = UpstreamOptions(version_header="polar-version")
    plan = plan_of(Settings(access_token=TOKEN, upstream=upstream))
    assert plan.api_version == BUNDLED_API_VERSION[:7]
    chosen = plan_of(Settings(access_token=TOKEN, upstream=upstream, api_version="2026-10"))
    assert chosen.api_version == "2026-10"


@pytest.mark.parametrize(
    ("attempt_timeout", "max_retries", "seconds"),
    [(30, 3, 144), (1, 0, 120), (300, 10, 3380), (300, 10**9, 308 * 10**9 + 300)],
)
def test_the_default_total_time_cuts_no_attempt_short(attempt_timeout, max_retries, seconds):
    plan = plan_of(Settings(access_token=TOKEN))
    assert plan.total_timeout is None
    assert (
        plan.total_timeout_of(attempt_timeout=attempt_timeout, max_retries=max_retries) == seconds
    )


def test_nothing_to_log_or_print_holds_the_token():
    plan = plan_of(Settings(access_token=TOKEN))
    assert TOKEN.reveal() not in f"{plan!r} {plan.summary()}"


@pytest.mark.parametrize("token", [None, Secret("")])
def test_without_a_token_there_is_no_client(token):
    with pytest.raises(OptionsValidationError, match="Sdk:AccessToken"):
        plan_of(Settings(access_token=token))


@pytest.mark.parametrize("token", ["a b", "a\nb", "a\r\nX: y", "tökén", "a\x00"])
def test_a_token_that_would_break_a_header_is_refused_unquoted(token):
    problem = token_problem(token)
    assert problem
    assert token not in problem


def test_custom_without_an_address_is_refused_with_everything_else():
    with pytest.raises(OptionsValidationError) as caught:
        plan_of(Settings(mode=Mode.CUSTOM))
    assert [problem.key for problem in caught.value.problems] == [
        "Sdk:AccessToken",
        "Sdk:CustomBaseUrl",
    ]


@pytest.mark.parametrize(
    ("token", "mode", "warns"),
    [
        ("polar_oat_abc", Mode.LIVE, False),
        ("polar_oat_abc", Mode.TEST, False),
        ("polar_sandbox_oat_abc", Mode.LIVE, True),
        ("sk_test_abc", Mode.LIVE, True),
        ("sk_live_abc", Mode.TEST, True),
        ("sk_live_abc", Mode.CUSTOM, False),
        ("abc_live", Mode.TEST, False),
        ("polar_oat_prodigy", Mode.TEST, False),
    ],
)
def test_a_token_that_looks_like_the_other_environments_is_warned_of(token, mode, warns):
    warning = token_warning(token, mode)
    assert (warning is not None) is warns
    assert token not in (warning or "")


@pytest.mark.parametrize(
    ("url", "path", "joined"),
    [
        ("https://a", "/v1", "https://a/v1"),
        ("https://a/", "v1/", "https://a/v1"),
        ("https://a/x", "/", "https://a/x"),
    ],
)
def test_joining_base_and_path(url, path, joined):
    assert join_base(url, path) == joined


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("https://Api.Example/v1", "https://api.example:443"),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://[::1]/x", "http://[::1]:80"),
    ],
)
def test_origins(url, origin):
    assert origin_of(url) == origin
