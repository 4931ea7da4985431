"""What start-up remarks on in the settings of notifications."""

import json
import re
from pathlib import Path

import pytest

from sdk_trio.config.binding import bind
from sdk_trio.config.layers import read_section
from sdk_trio.config.notification_options import TemplatesOptions
from sdk_trio.config.placeholders import unknown_placeholders
from sdk_trio.config.prober import probe
from sdk_trio.config.rules import Findings, check

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
    return [str(warning) for warning in probe(bound.settings, variables).warnings]


def test_the_defaults_are_beyond_remark():
    assert warnings() == []
    templates = TemplatesOptions()
    for template in (templates.suspended, templates.deleted):
        assert unknown_placeholders(template.email_body) == ()


def test_no_channel_at_all_is_a_way_to_tell_nobody_and_is_remarked_on():
    (warning,) = warnings(EnabledChannels__Email=False, EnabledChannels__Webhook=False)
    assert warning.startswith(f"Sdk:{KEY}:EnabledChannels: has no channel, so nobody is told")


@pytest.mark.parametrize("field", ["EmailSubject", "EmailBody", "SmsBody"])
@pytest.mark.parametrize("word", ["Tenant", "tenantname", "reason", "Name2", "Occurred_At"])
def test_an_unknown_placeholder_is_a_warning_with_the_known_ones(field, word):
    (warning,) = warnings(**{f"Templates__Deleted__{field}": f"{{TenantName}} {{{word}}}"})
    assert warning.startswith(f"Sdk:{KEY}:Templates:Deleted:{field}: holds {{{word}}}, which stays")
    assert "{TenantIdentifier}" in warning


def test_a_template_of_many_segments_is_a_warning():
    (warning,) = warnings(Templates__Suspended__SmsBody="ж" * 300)
    assert "takes 5 SMS segments (UCS-2)" in warning
    assert warnings(Templates__Suspended__SmsBody="x" * 450) == []


def test_a_subject_that_will_be_cut_is_a_warning():
    (warning,) = warnings(Templates__Suspended__EmailSubject="x" * 201)
    assert "EmailSubject: is cut at 200 characters" in warning


@pytest.mark.parametrize("field", ["EmailSubject", "EmailBody", "SmsBody"])
def test_an_empty_text_is_a_problem(field):
    (problem,) = findings(**{f"Templates__Suspended__{field}": " "}).problems
    assert "remove the key for the default" in str(problem)


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


@pytest.mark.parametrize("secret", ["short", "whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4="])
def test_a_signing_secret_that_cannot_be_used_is_a_warning_without_it(secret):
    (warning,) = probed(secret)
    assert "SigningSecretEnvVar: names the variable SDK_WEBHOOK_SECRET, whose value" in warning
    assert secret not in warning
    assert probed(secret, EnabledChannels__Webhook=False) == []


@pytest.mark.parametrize("secret", ["a-secret-of-some-length", "whsec_" + "A" * 32])
def test_a_signing_secret_of_any_form_is_taken(secret):
    assert probed(secret) == []
