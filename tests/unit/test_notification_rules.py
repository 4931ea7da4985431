"""Warnings of the start about the settings of notifications."""

import json
import re
from pathlib import Path

import pytest

from sdk_trio.config.bind import bind
from sdk_trio.config.check import Findings, check
from sdk_trio.config.options.notifications import TemplatesOptions, unknown_placeholders
from sdk_trio.config.probe import probe
from sdk_trio.config.sources import read_section

KEY = "MultiTenant:Notifications"
BASE = {
    f"{KEY}:Enabled": True,
    f"{KEY}:EnabledChannels:Webhook": True,
    f"{KEY}:Email:FromAddress": "noreply@platform.example",
    f"{KEY}:Webhook:Url": "https://example.com/in",
}


def findings(**changes):
    named = {f"{KEY}:{key.replace('__', ':')}": value for key, value in changes.items()}
    bound = bind([read_section(BASE | named, None)])
    assert bound.problems == ()
    return check(bound.settings, standalone=True, receiver=False)


def warnings(**changes):
    found = findings(**changes)
    assert found.problems == ()
    return [str(warning) for warning in found.warnings]


def probed(secret, **changes):
    named = {f"{KEY}:{key.replace('__', ':')}": value for key, value in changes.items()}
    bound = bind([read_section(BASE | named, None)])
    variables = {"EMAIL_API_KEY": "k", "SDK_WEBHOOK_SECRET": secret}
    return [str(problem) for problem in probe(bound.settings, variables).problems]


def test_the_defaults_are_beyond_remark():
    assert warnings() == []
    templates = TemplatesOptions()
    for template in (templates.suspended, templates.deleted):
        assert unknown_placeholders(template.email_body) == ()


def test_settings_without_a_channel_cause_a_warning():
    (warning,) = warnings(EnabledChannels__Email=False, EnabledChannels__Webhook=False)
    assert warning.startswith(
        f"Sdk:{KEY}:EnabledChannels: has no channel, so transitions are never announced"
    )


UNKNOWN_WORDS = (
    *("Tenant", "tenantname", "reason", "Name2", "Occurred_At", "0", "", " TenantName "),
    *("TenantName.__class__", "TenantName:>99", "TenantName!r", "Tenant Name"),
)


@pytest.mark.parametrize(
    ("field", "word"),
    [
        *((field, word) for field in ("EmailBody", "SmsBody") for word in (*UNKNOWN_WORDS, "x\ny")),
        *(("EmailSubject", word) for word in UNKNOWN_WORDS),  # a subject is one line anyhow
    ],
)
def test_an_unknown_placeholder_is_a_problem_with_the_known_ones(field, word):
    text = f"{{TenantName}} {{{word}}}"
    changes = {"EnabledChannels__Sms": True, "Sms__SmsProviderA__FromNumber": "+15550000000"}
    found = findings(**changes, **{f"Templates__Deleted__{field}": text})
    (problem,) = map(str, found.problems)
    assert problem.startswith(f"Sdk:{KEY}:Templates:Deleted:{field}: contains {{{word}}}, which is")
    assert "{TenantIdentifier}" in problem


def test_a_template_of_many_segments_is_a_warning():
    (warning,) = warnings(Templates__Suspended__SmsBody="ж" * 300)
    assert "takes 5 SMS segments (UCS-2)" in warning
    assert warnings(Templates__Suspended__SmsBody="x" * 450) == []


def test_a_subject_that_will_be_cut_is_a_warning():
    (warning,) = warnings(Templates__Suspended__EmailSubject="x" * 201)
    assert "EmailSubject: is cut at 200 characters" in warning


TEXTS = [("EmailSubject", "Email"), ("EmailBody", "Email"), ("SmsBody", "Sms")]


@pytest.mark.parametrize(("field", "channel"), TEXTS)
def test_an_empty_text_is_a_problem_of_a_channel_that_is_on(field, channel):
    changes = {f"Templates__Suspended__{field}": " ", "Sms__SmsProviderA__FromNumber": "+1555"}
    changes = {**changes, "EnabledChannels__Email": False}
    (problem,) = findings(**{**changes, f"EnabledChannels__{channel}": True}).problems
    assert "remove the key for the default" in str(problem)
    assert findings(**{**changes, f"EnabledChannels__{channel}": False}).problems == ()


@pytest.mark.parametrize(("field", "channel"), TEXTS)
def test_an_unsent_text_is_not_checked_and_a_webhooks_payload_is_complete(field, channel):
    changes = {f"EnabledChannels__{channel}": False, f"Templates__Deleted__{field}": "{Word}"}
    assert len(findings(**changes).problems) == 1
    assert findings(**changes, EnabledChannels__Webhook=False).problems == ()


def test_the_waits_between_attempts_are_settings_that_fit_each_other():
    assert findings(RetryBaseSeconds=5, RetryCapSeconds=5).problems == ()
    (problem,) = findings(RetryBaseSeconds=5, RetryCapSeconds=4).problems
    assert problem.key == f"Sdk:{KEY}:RetryCapSeconds"


HOOK = "https://prod.example.com:443/workflows/1/in?api-version=2016-06-01&sig=a%2Bb-C_d&sp=%2Fx"


@pytest.mark.parametrize("url", [HOOK, "https://example.com?key=1", "https://example.com/a?"])
def test_a_url_of_the_webhook_may_have_a_query(url):
    assert findings(Webhook__Url=url) == Findings()


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        (f"{HOOK}#top", "holds a fragment"),
        ("https://u:p@example.com/in?sig=1", "holds a user or password"),
        ("https://example.com/in?sig=1 2", "holds white space"),
        ("http://example.com/in?sig=1", "HTTPS"),
    ],
)
def test_parts_that_a_webhook_url_must_not_have(url, wrong):
    (problem,) = map(str, findings(Webhook__Url=url).problems)
    assert wrong in problem
    assert "sig" not in problem


def test_a_base_address_has_no_query():
    (problem,) = findings(Email__EmailProviderA__BaseUrl="https://example.com/?a=1").problems
    assert "query" in str(problem)


def test_a_line_break_in_a_subject_is_a_problem():
    changes = {"Templates__Suspended__EmailSubject": "a\r\nBcc: b"}
    assert len(findings(**changes).problems) == 1


@pytest.mark.parametrize("url", ["https://10.0.0.1/in", "https://localhost/", "https://[::1]/"])
def test_an_address_that_will_be_refused_is_a_warning(url):
    (warning,) = warnings(Webhook__Url=url)
    assert "AllowPrivateAddresses to true" in warning
    assert warnings(Webhook__Url=url, Webhook__AllowPrivateAddresses=True) == []
    assert warnings(Webhook__Url=url, EnabledChannels__Webhook=False) == []


def test_a_url_that_is_none_is_a_problem_and_no_more():
    found = findings(Webhook__Url="https://[::1")
    assert [problem.key for problem in found.problems] == [f"Sdk:{KEY}:Webhook:Url"]
    assert found.warnings == ()


def test_the_documented_settings_are_valid():
    page = Path(__file__).parents[2] / "docs" / "how-to" / "notify-site-managers.md"
    blocks = re.findall(r"```json\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    layers = [read_section(json.loads(block)["Sdk"], None) for block in blocks]
    # The second one stands for the providers, in addition to the first.
    for used in (layers[:1], layers):
        bound = bind(used)
        assert (bound.problems, bound.warnings) == ((), ())
        assert check(bound.settings, standalone=True, receiver=False) == Findings()
    assert len(layers) == 2


def test_nothing_is_remarked_on_while_notifications_are_off():
    changes = {"Templates__Deleted__SmsBody": "{Word}", "Webhook__Url": "https://10.0.0.1"}
    assert warnings(Enabled=False, **changes) == []


def test_names_of_senders_and_subjects_hold_nothing_that_cannot_be_seen():
    for text, named in (("a\x85b", "U+0085"), ("a\u2028b", "U+2028"), ("a\u202eb", "U+202E")):
        for key in ("Email__FromDisplayName", "Templates__Deleted__EmailSubject"):
            (problem,) = map(str, findings(**{key: text}).problems)
            assert named in problem
    (problem,) = map(str, findings(Email__FromAddress="a\u200b@x.example").problems)
    assert "U+200B" in problem


@pytest.mark.parametrize("hidden", [*"\u202e\u00ad\u200b\u200d\ufeff\ufffb", "\U000e0041"])
def test_invisible_characters_are_refused_in_urls_and_lines(hidden):
    for key, text in (
        ("Webhook__Url", f"https://hooks.example/a{hidden}b"),
        ("Email__FromDisplayName", f"a{hidden}b"),
    ):
        (problem,) = map(str, findings(**{key: text}).problems)
        assert f"holds U+{ord(hidden):04X}, which" in problem


@pytest.mark.parametrize("space", [*"\x85\xa0\u2028\u3000"])
def test_white_space_and_controls_of_any_script_are_refused_in_urls(space):
    (problem,) = map(str, findings(Webhook__Url=f"https://hooks.example/a{space}b").problems)
    assert "white space or a control character" in problem


@pytest.mark.parametrize(
    "name",
    [
        "\u0646\u0627\u0645\u0647\u200c\u0627\u06cc",  # Persian: two parts of a word
        "\u0d9a\u0dca\u200d\u0dc2",  # Sinhala: two consonants as one letter
        "\U0001f468\u200d\U0001f469",
        "\u2764\ufe0f\u200d\U0001f525",
        "Ünïcödé Ω 東京",
    ],
)
def test_joiners_are_accepted_where_scripts_and_emoji_need_them(name):
    assert not findings(Email__FromDisplayName=name).problems


@pytest.mark.parametrize("secret", ["short", "whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4="])
def test_a_signing_secret_that_cannot_be_used_is_a_problem_without_it(secret):
    (problem,) = probed(secret)
    assert "SigningSecretEnvVar: names the variable SDK_WEBHOOK_SECRET, whose value" in problem
    assert secret not in problem
    assert probed(secret, EnabledChannels__Webhook=False) == []


@pytest.mark.parametrize("secret", ["a-secret-of-some-length", "whsec_" + "A" * 32])
def test_a_signing_secret_of_any_form_is_accepted(secret):
    assert probed(secret) == []
