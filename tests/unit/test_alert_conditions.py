"""Facts and thresholds decide which conditions hold."""

import base64
from math import inf
from typing import Any

import pytest

from sdk_trio.alerts.conditions import (
    BEHIND_SECONDS,
    UNREACHABLE_SECONDS,
    Facts,
    evaluate,
    token_end,
)
from sdk_trio.alerts.messages import TITLES
from sdk_trio.config.options.alerts import AlertsOptions
from sdk_trio.records.alerts import AlertName
from sdk_trio.records.policies import EventPause

NOW = 1_800_000_000.0
OPTIONS = AlertsOptions(dead_letters=3, silence_minutes=30)
DAY = 86_400.0


def holding(facts: Facts, options: AlertsOptions = OPTIONS) -> list[str]:
    return [str(each.name) for each in evaluate(facts, options, NOW) if each.holds]


def pause(since: float) -> EventPause:
    return EventPause("order.*", since, "ann", "a secret reason")


@pytest.mark.parametrize(
    ("name", "just", "not_yet"),
    [
        ("dead_letters", {"new_dead_letters": 3}, {"new_dead_letters": 2}),
        ("endpoint_disabled", {"disabled_endpoints": 1}, {"disabled_endpoints": 0}),
        ("silence", {"last_delivery_at": NOW - 1801}, {"last_delivery_at": NOW - 1800}),
        ("oldest_waiting", {"oldest_waiting_at": NOW - 901}, {"oldest_waiting_at": NOW - 900}),
        ("oldest_waiting", {"oldest_waiting_at": NOW - 901}, {"oldest_waiting_at": inf}),
        ("events_paused", {"pauses": [pause(NOW - 901)]}, {"pauses": [pause(NOW - 900)]}),
        ("events_paused", {"pauses": [pause(NOW), pause(1.0)]}, {"pauses": []}),
        (
            "store_unreachable",
            {"store_writes": False, "store_failing_since": NOW - UNREACHABLE_SECONDS},
            {"store_writes": False, "store_failing_since": NOW - UNREACHABLE_SECONDS + 1},
        ),
        ("sender_unreachable", {"sender_answers": False}, {"sender_answers": True}),
        (
            "replication_lag",
            {"replication_lags": True, "replication_lags_since": NOW - BEHIND_SECONDS},
            {"replication_lags": True, "replication_lags_since": NOW - BEHIND_SECONDS + 1},
        ),
        (
            "certificate_expiry",
            {"certificate_ends_at": NOW + 14 * DAY - 1},
            {"certificate_ends_at": NOW + 14 * DAY},
        ),
        ("token_expiry", {"token_ends_at": NOW - 1}, {"token_ends_at": inf}),
        ("clock_offset", {"clock_differs": True}, {"clock_differs": False}),
        ("secret_unused", {"unused_secrets": (1,)}, {"unused_secrets": ()}),
    ],
)
def test_a_condition_holds_from_its_threshold_on(
    name: str, just: dict[str, Any], not_yet: dict[str, Any]
) -> None:
    assert holding(Facts(**just)) == [name]
    assert holding(Facts(**not_yet)) == []


def test_without_facts_every_condition_is_unknown() -> None:
    assert {each.holds for each in evaluate(Facts(), OPTIONS, NOW)} == {None}
    assert [each.name for each in evaluate(Facts(), OPTIONS, NOW)] == list(AlertName)
    assert set(TITLES) == set(AlertName)


def test_silence_is_no_condition_unless_it_is_configured() -> None:
    found = evaluate(Facts(last_delivery_at=0.0), AlertsOptions(), NOW)
    assert {each.name: each.holds for each in found}[AlertName.SILENCE] is False


@pytest.mark.parametrize(
    ("token", "end"),
    [
        # {"exp": 1800000000}
        ("eyJhbGciOiJIUzI1NiJ9.eyJleHAiOjE4MDAwMDAwMDB9.c2lnbmF0dXJl", 1_800_000_000.0),
        ("an_opaque_token", inf),
        ("a.b.c", inf),
        ("a.e30.c", inf),
        ("a.W10.c", inf),
        ("a.eyJleHAiOiAiMSJ9.c", inf),
        ("ä.ö.ü", inf),
        (None, inf),
        ("a." + base64.urlsafe_b64encode(b'{"exp": 1%b}' % (b"0" * 400)).decode() + ".c", inf),
    ],
)
def test_the_end_of_a_token_is_read_where_it_shows_one(token: str | None, end: float) -> None:
    assert token_end(token) == end
