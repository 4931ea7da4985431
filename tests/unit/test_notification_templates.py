import html
import json
import re
import unicodedata

import attrs
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.notifications import record

from sdk_trio.config.options.notifications import (
    PLACEHOLDERS,
    TemplateOptions,
    TemplatesOptions,
    measure_sms,
    unknown_placeholders,
)
from sdk_trio.notifications.channels.webhook import payload
from sdk_trio.notifications.templates import (
    MAX_EMAIL_CHARACTERS,
    MAX_SMS_SEGMENTS,
    NO_REASON,
    render,
    template_of,
)
from sdk_trio.records.tenants import Transition

ALL = "|".join(f"{{{word}}}" for word in PLACEHOLDERS)
TEMPLATES = TemplatesOptions()
SUSPENDED = TEMPLATES.suspended
BIDI = "\u202e\u202d\u202a\u202b\u202c\u2066\u2067\u2068\u2069\u200e\u200f\u061c"
MEGABYTE = "x" * 1_000_000

# Lone surrogates too: nothing that a database or a caller can hold may raise.
anything = st.text(st.characters(), max_size=300)
hostile = st.lists(
    st.sampled_from(
        [
            *(f"{{{word}}}" for word in PLACEHOLDERS),
            "{Unknown}",
            "{TenantName.__init__.__globals__}",
            "{TenantName:>100000000}",
            "{0}",
            "{}",
            "{{",
            "%s",
            "%n",
            "\\1",
            r"\g<0>",
            "$Reason",
            "<script>alert(1)</script>",
            "&amp;",
            '"',
            "\r\n",
            "\nBcc: all@example.com",
            "\x00",
            "\x1b[2J",
            "\u2028",
            "\ud800",
            "😀",
            "e\u0301",
            *BIDI,
        ]
    ),
    max_size=20,
).map("".join)
texts = anything | hostile


def template(text):
    return TemplateOptions(email_subject=text, email_body=text, sms_body=text)


def visible(page):
    """Return the text that a reader of the HTML sees."""
    return html.unescape(re.sub(r"<[^>]*>", "", page))


@pytest.mark.parametrize("transition", Transition)
def test_default_texts_name_the_tenant_the_reason_and_the_time(transition):
    message = render(template_of(TEMPLATES, transition), record(transition))
    assert message.email_subject == f"Acme Ltd has been {transition.lower()}"
    for part in ("Acme Ltd (acme)", "invoice 7 is unpaid", "2027-01-15T08:00:00Z"):
        assert part in message.email_text
        assert part in message.email_html
    assert (
        message.sms_text == f"Acme Ltd has been {transition.lower()}. Reason: invoice 7 is unpaid"
    )
    assert "{" not in message.email_subject + message.email_text + message.sms_text


@pytest.mark.parametrize("transition", Transition)
def test_default_short_messages_take_one_segment(transition):
    # Of the longest names and reasons that are usual.
    what = record(transition, tenant_name="A" * 40, reason="b" * 70)
    size = measure_sms(render(template_of(TEMPLATES, transition), what).sms_text)
    assert (size.encoding, size.segments) == ("GSM-7", 1)


@pytest.mark.parametrize("reason", [None, "", "  ", "\r\n", "\u202e"])
def test_a_missing_reason_reads_well(reason):
    message = render(SUSPENDED, record(reason=reason))
    for text in (message.email_text, message.email_html, message.sms_text):
        assert f"Reason: {NO_REASON}" in text
        assert "None" not in text


@pytest.mark.parametrize("field", ["email_subject", "email_body", "sms_body"])
def test_any_single_field_can_be_overridden(field):
    message = render(
        msgspec.structs.replace(SUSPENDED, **{field: "ours: {TenantIdentifier}"}), record()
    )
    default = render(SUSPENDED, record())
    changed = [
        name
        for name in ("email_subject", "email_text", "sms_text")
        if getattr(message, name) != getattr(default, name)
    ]
    assert changed == [{"email_body": "email_text"}.get(field, field.replace("body", "text"))]
    assert getattr(message, changed[0]) == "ours: acme"


def test_every_placeholder_is_substituted_and_others_stay():
    message = render(template(f"{ALL}|{{Word}}|{{reason}}|{{ Reason }}|{{}}"), record())
    assert message.sms_text == (
        "Acme Ltd|acme|Suspended|Active|invoice 7 is unpaid|2027-01-15T08:00:00Z"
        "|{Word}|{reason}|{ Reason }|{}"
    )


def test_a_value_that_holds_a_placeholder_stays_as_it_is():
    what = record(tenant_name="{Reason}{TenantName}", reason="{TenantIdentifier}")
    message = render(template("{TenantName} {Reason}"), what)
    for text in (message.email_subject, message.email_text, message.sms_text):
        assert text == "{Reason}{TenantName} {TenantIdentifier}"


@pytest.mark.parametrize(
    "attack",
    [
        "{TenantName.__init__.__globals__}",
        "{TenantName:>100000000}",
        "{0}",
        "{TenantName!r}",
        "%s%n",
    ],
)
def test_format_strings_are_text(attack):
    assert render(template(attack), record(tenant_name=attack)).sms_text == attack


def test_line_breaks_in_names_reach_no_header():
    name = "Acme\r\nBcc: all@example.com\x00\x0b\u2028X"
    message = render(SUSPENDED, record(tenant_name=name, reason="a\r\n.\r\nb"))
    assert message.email_subject == "Acme Bcc: all@example.com X has been suspended"
    assert "Reason: a . b\n" in message.email_text
    assert render(template("a\r\nb\x07c"), record()).email_subject == "a b c"


def test_html_in_names_and_reasons_is_shown_as_text():
    name = "<img src=x onerror=alert(1)>&amp;\"'"
    page = render(SUSPENDED, record(tenant_name=name, reason="</p><script>")).email_html
    assert "<img" not in page
    assert "<script" not in page
    assert visible(page).count(name) == 2


def test_html_in_a_template_is_text_too_and_lines_are_kept():
    page = render(template("<b>a</b>\nb\n\nc"), record()).email_html
    assert "<p>&lt;b&gt;a&lt;/b&gt;<br>b</p>\n<p>c</p>" in page


@pytest.mark.parametrize("place", ["tenant_name", "reason"])
def test_direction_and_control_characters_are_stripped_from_short_messages(place):
    what = record(**{place: f"a{BIDI}b\x1b[2J\u200bc\ufeff"})
    text = render(template("{TenantName} {Reason}" + BIDI + "\x07"), what).sms_text
    assert "ab [2Jc" in text
    assert not [c for c in text if unicodedata.category(c) in ("Cc", "Cf")]


def test_emoji_of_several_parts_stay_whole():
    family = "👨\u200d👩\u200d👧"
    assert family in render(SUSPENDED, record(tenant_name=family)).sms_text


def test_a_reason_of_a_megabyte_goes_out_bounded():
    what = record(reason=MEGABYTE)
    message = render(SUSPENDED, what)
    assert len(message.email_text) < 3000
    assert "xxx…\nWhen: " in message.email_text  # what follows the reason is still there
    assert measure_sms(message.sms_text).segments <= 2
    assert message.sms_text.endswith("xxx...")
    subject = render(template("{Reason}: {TenantIdentifier}"), what).email_subject
    assert subject.endswith("…: acme")
    assert len(subject) < 120
    assert len(payload(what, message)) < 20_000


@given(text=texts, name=texts, reason=st.none() | texts, actor=texts, at=st.floats())
@example(text="{Reason}" * 3000, name=MEGABYTE, reason=MEGABYTE, actor="", at=float("nan"))
@example(text="{TenantName}" * 3000, name="😀" * 300, reason=None, actor="", at=1e300)
def test_rendering_never_raises_and_is_bounded(text, name, reason, actor, at):
    what = record(tenant_name=name, reason=reason, actor=actor, occurred_at=at)
    message = render(template(text), what)
    assert len(message.email_subject) <= 200
    assert len(message.email_text) <= MAX_EMAIL_CHARACTERS
    assert len(message.email_html) <= 20 * MAX_EMAIL_CHARACTERS
    assert measure_sms(message.sms_text).segments <= MAX_SMS_SEGMENTS
    assert all(
        c.isprintable() or unicodedata.category(c) in ("Zs", "Cn", "Co") or c in "\u200c\u200d"
        for c in message.email_subject
    )
    assert not [c for c in message.email_text if unicodedata.category(c) == "Cc" and c != "\n"]
    assert json.loads(payload(what, message))["sms"] == {"body": message.sms_text}
    for shown in attrs.asdict(message).values():
        shown.encode()  # no half of a pair


@given(name=hostile, reason=hostile)
def test_rendering_is_one_pass(name, reason):
    marked = template("[{TenantName}][{Reason}][{TenantIdentifier}]")
    found = render(marked, record(tenant_name=f"n{name}", reason=f"r{reason}"))
    alone = render(template("{TenantName}"), record(tenant_name=f"n{name}")).email_text
    because = render(template("{Reason}"), record(reason=f"r{reason}")).email_text
    assert found.email_text == f"[{alone}][{because}][acme]"
    kept = [c for c in name if c in "{}"]
    shown = [c for c in alone if c in "{}"]
    assert shown == (kept[: len(shown)] if alone.endswith("\u2026") else kept)  # a long one is cut


@given(texts)
def test_unknown_placeholders_stay_in_the_text(text):
    for word in unknown_placeholders(text):
        assert f"{{{word}}}" in text
        assert word not in PLACEHOLDERS
