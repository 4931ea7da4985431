"""The findings of ``doctor`` in settings: HTTPS and proxies in each combination, mixed-up
secrets."""

import pytest
from support.deliveries import SECRET

from sdk_trio.cli.doctor import Finding, Level, Report, ranked
from sdk_trio.cli.doctor.settings import (
    check_endpoints,
    check_handlers,
    check_https,
    check_secrets,
    check_settings,
    check_sources,
)
from sdk_trio.config import Settings, read_settings
from sdk_trio.webhooks.origin import TrustedProxies

PROBLEM, WARNING, NOTE, OK = Level


def found(check, **keys):
    mapping = {"AccessToken": "token", "Webhooks:Secret": SECRET}
    mapping |= {name.replace("__", ":"): value for name, value in keys.items()}
    report = Report("x")
    check(Settings.from_mapping(mapping), report)
    for finding in report.findings:
        assert finding.remedy or finding.level in (NOTE, OK)
        assert SECRET not in repr(finding)
    return report.findings


def test_problem_and_advice_are_separate():
    environ = {"SDK__TIMEOUTMS": "1", "SDK__WEBHOKS__PATH": "/x"}
    report = Report("settings")
    check_settings(read_settings("/dev/null/no.json", environ=environ), report)
    assert ("the file cannot be read", "Not a directory") in said(report)
    report = Report("settings")
    check_settings(read_settings(environ=environ, directory="/nonexistent"), report)
    assert {
        (
            "must be 1000 to 300000 milliseconds, not 1",
            "change it: 'config schema' describes every key",
        ),
        (
            "is required: the receiver needs at least one secret",
            "set the variable SDK__WEBHOOKS__SECRET or use a secret store (a program that only has "
            "a client reads its settings with receiver=False)",
        ),
        ("is not a known key", "did you mean Sdk:Webhooks?"),
    } <= said(report)


def said(report):
    return {(finding.what, finding.remedy) for finding in report.findings}


def worst(check, **keys):
    return ranked(found(check, **keys))[0]


@pytest.mark.parametrize(
    ("keys", "level", "what"),
    [
        ({}, PROBLEM, "no proxy is trusted to report HTTPS"),
        ({"Server__Bind": ["unix:/x.sock"]}, PROBLEM, "no proxy is trusted to report HTTPS"),
        ({"Server__TrustedProxies": ["unix"]}, PROBLEM, "only peers of unix sockets are trusted"),
        ({"Server__TrustedProxies": ["10.0.0.1"]}, PROBLEM, "is 127.0.0.1, which is not"),
        (
            {"Server__TrustedProxies": ["127.0.0.1"], "Server__Bind": ["[::1]:80"]},
            PROBLEM,
            "is ::1, which is not",
        ),
        (
            {"Server__TrustedProxies": ["127.0.0.1"], "Server__Bind": ["unix:/x.sock"]},
            PROBLEM,
            "'unix' is not among",
        ),
        ({"Server__TrustedProxies": ["127.0.0.0/8"]}, NOTE, "passes on unchanged"),
        (
            {"Server__TrustedProxies": ["unix"], "Server__Bind": ["unix:/x.sock"]},
            NOTE,
            "passes on unchanged",
        ),
        (
            {"Server__TrustedProxies": ["10.0.0.0/24"], "Server__Bind": ["10.0.0.9:80"]},
            NOTE,
            "passes on unchanged",
        ),
        ({"Server__CertFile": "a", "Server__KeyFile": "b"}, OK, "TLS ends here"),
        ({"Webhooks__RequireHttps": False}, NOTE, "without HTTPS are accepted"),
    ],
)
def test_whether_a_delivery_can_count_as_https(keys, level, what):
    finding = worst(check_https, **keys)
    assert (finding.level, what in finding.what) == (level, True), finding
    assert finding.where in (
        *("Sdk:Server:TrustedProxies", "Sdk:Server:CertFile", "Sdk:Webhooks:RequireHttps"),
    )


@pytest.mark.parametrize(
    ("bind", "peer", "trusted"),
    [
        ("127.0.0.1:80", "127.0.0.1", []),
        ("127.0.0.1:80", "127.0.0.1", ["10.0.0.1"]),
        ("127.0.0.1:80", "127.0.0.1", ["127.0.0.0/8"]),
        ("127.0.0.1:80", "127.0.0.1", ["unix"]),
        ("[::1]:80", "::1", ["127.0.0.1"]),
        ("[::1]:80", "::1", ["::1"]),
        ("unix:/x", None, ["127.0.0.1"]),
        ("unix:/x", None, ["unix"]),
    ],
)
def test_the_receiver_itself_agrees(bind, peer, trusted):
    findings = found(check_https, Server__Bind=[bind], Server__TrustedProxies=trusted)
    says_400 = any("every delivery" in finding.what for finding in findings)
    headers = [(b"x-forwarded-proto", b"https"), (b"x-forwarded-for", b"192.0.2.1")]
    assert says_400 is not TrustedProxies(trusted).resolve(peer, "http", headers).secure


@pytest.mark.parametrize(
    ("keys", "level", "what"),
    [
        ({"AllowedSourceIpRanges": ["192.0.2.0/24"]}, PROBLEM, "answered 403"),
        ({"RateLimitPerMinute": 5}, WARNING, "count as one"),
        ({"AllowedSourceIpRanges": ["127.0.0.1"]}, OK, "may deliver"),
    ],
)
def test_limits_by_address_behind_a_proxy_that_is_not_trusted(keys, level, what):
    keys = {f"Webhooks__{name}": value for name, value in keys.items()}
    finding = worst(check_sources, **keys)
    assert (finding.level, what in finding.what) == (level, True)
    trusting = found(check_sources, Server__TrustedProxies=["127.0.0.1"], **keys)
    assert all(finding.level is OK for finding in trusting)


@pytest.mark.parametrize(
    ("keys", "where", "what"),
    [
        (
            {"AccessToken": "whsec_" + "B" * 32},
            "Sdk:AccessToken",
            "starts like a webhook secret",
        ),
        (
            {"Webhooks__Secret": "polar_oat_not-a-real-token"},
            "Sdk:Webhooks:Secret",
            "it is an access token",
        ),
        (
            {"Webhooks__Secrets": [SECRET, "token-of-24-characters-x"],
             "AccessToken": "token-of-24-characters-x"},
            "Sdk:Webhooks:Secrets:1",
            "it is an access token",
        ),
    ],
)  # fmt: skip
def test_secrets_and_tokens_that_were_exchanged(keys, where, what):
    finding = worst(check_secrets, **keys)
    assert (finding.level, finding.where) == (PROBLEM, where)
    assert what in finding.what
    for value in ("whsec_B", "0123456789", "of-24"):
        assert value not in repr(finding)


@pytest.mark.parametrize(
    ("derivation", "what"),
    [
        ("Standard", "tries it as base64 of a key of 24 bytes"),
        ("Utf8", "tries it as a text of 38 bytes, used as the key"),
        ("Auto", "base64 of a key of 24 bytes and then as a text of 38 bytes"),
    ],
)
def test_the_form_of_a_secret_is_recognised(derivation, what):
    findings = found(check_secrets, Webhooks__KeyDerivation=derivation)
    assert [finding.level for finding in findings] == [OK, OK]
    assert what in findings[1].what


def test_live_deliveries_without_https():
    finding = worst(check_secrets, Mode="Live", Webhooks__RequireHttps=False)
    assert (finding.level, finding.where) == (WARNING, "Sdk:Webhooks:RequireHttps")


@pytest.mark.parametrize(
    ("missing", "registered", "required", "level"),
    [
        ((), 2, True, OK),
        (("order.paid",), 1, False, NOTE),
        (("order.paid",), 1, True, PROBLEM),
        (("order.paid", "order.created"), 0, False, WARNING),
    ],
)
def test_missing_handlers(missing, registered, required, level):
    report = Report("x")
    check_handlers(missing, 2, registered, required=required, report=report)
    assert [finding.level for finding in report.findings] == [level]


@pytest.mark.parametrize(
    ("endpoint", "level", "what"),
    [
        (None, PROBLEM, "nothing arrives"),
        ({"enabled": False}, PROBLEM, "disabled it"),
        ({"format": "slack"}, PROBLEM, "its format is slack"),
        ({"url": "http://shop.example/hooks"}, WARNING, "not HTTPS"),
        ({"events": []}, WARNING, "does not send these types that have a handler: order.paid"),
        ({"events": ["order.paid", "refund.created"]}, NOTE, "no handler: refund.created"),
        ({"events": ["order.paid"]}, OK, "use /hooks"),
    ],
)
def test_the_endpoint_at_the_upstream(endpoint, level, what):
    report = Report("x")
    ours = [] if endpoint is None else [{"id": "ep_1", "url": "https://a.example", **endpoint}]
    check_endpoints(ours, "/hooks", ("order.paid",), report)
    finding = ranked(report.findings)[0]
    assert (finding.level, what in finding.what) == (level, True), finding


def test_the_worst_comes_first():
    findings = [Finding(level, "x", "y", "z") for level in reversed(Level)]
    assert [finding.level for finding in ranked(findings)] == list(Level)
