"""The message about one transition: subject, text, HTML, SMS. Pure.

Names and reasons may be hostile. The rendered texts always have a bounded size. A value is never
treated as a placeholder, a header, HTML, or a change of writing direction. Sizes, in characters,
with an ellipsis where text was cut:

=========  =====  =======  ==========================
in         name   reason   altogether
=========  =====  =======  ==========================
subject    100    100      200
email      200    2000     20000
SMS        100    200      10 segments
=========  =====  =======  ==========================
"""

import html
import unicodedata

import attrs

from ..base.times import rfc3339
from ..config.check_tenants import MAX_SUBJECT_CHARACTERS
from ..config.options.notifications import TemplateOptions, TemplatesOptions, cut_sms, substitute
from ..records.tenants import OutboxRecord, Transition

MAX_EMAIL_CHARACTERS = 20_000
#: The provider refuses more than 1600 characters; ten segments have at most 1530.
MAX_SMS_SEGMENTS = 10

#: The text for a missing reason, so that "Reason: {Reason}" still reads well.
NO_REASON = "none was given"

#: Invisible characters that are kept: they join the parts of an emoji, and separate letters in
#: several scripts.
_JOINERS = frozenset("\u200c\u200d")


@attrs.frozen
class _Bounds:
    name: int
    reason: int
    ellipsis: str = "…"


_SUBJECT = _Bounds(name=100, reason=100)
_EMAIL = _Bounds(name=200, reason=2000)
# Three dots: the ellipsis character is not in the GSM 03.38 alphabet, and one character outside of
# it makes the whole message cost 16 bits a character.
_SMS = _Bounds(name=100, reason=200, ellipsis="...")


@attrs.frozen(kw_only=True)
class Message:
    """One transition in words, ready for every channel."""

    email_subject: str
    email_text: str
    email_html: str
    sms_text: str


def template_of(templates: TemplatesOptions, transition: Transition) -> TemplateOptions:
    """Return the template of a transition."""
    found: TemplateOptions = getattr(templates, transition.name.lower())
    return found


def render(template: TemplateOptions, record: OutboxRecord) -> Message:
    """Return the message about ``record``; raises for no value and no template.

    The HTML form is generated from the text: every character is escaped, and blank lines separate
    paragraphs.
    """
    subject = cut(
        one_line(substitute(template.email_subject, _values(record, _SUBJECT))),
        MAX_SUBJECT_CHARACTERS,
    )
    body = template.email_body[:MAX_EMAIL_CHARACTERS]
    text = cut(lines(substitute(body, _values(record, _EMAIL))), MAX_EMAIL_CHARACTERS)
    body = template.sms_body[:MAX_EMAIL_CHARACTERS]
    sms = _without_controls(lines(substitute(body, _values(record, _SMS)))).strip()
    return Message(
        email_subject=subject,
        email_text=text,
        email_html=html_of(subject, text),
        sms_text=cut_sms(sms, MAX_SMS_SEGMENTS),
    )


def _values(record: OutboxRecord, bounds: _Bounds) -> dict[str, str]:
    name = cut(one_line(record.tenant_name), bounds.name, bounds.ellipsis)
    reason = cut(one_line(record.reason or ""), bounds.reason, bounds.ellipsis)
    identifier = cut(one_line(record.tenant_identifier), bounds.name, bounds.ellipsis)
    return {
        "TenantName": name or identifier,
        "TenantIdentifier": identifier,
        "NewStatus": str(record.new_status),
        "PreviousStatus": str(record.previous_status),
        "Reason": reason or NO_REASON,
        "OccurredAt": rfc3339(record.occurred_at, timespec="seconds"),
    }


def cut(text: str, characters: int, ellipsis: str = "…") -> str:
    """Return ``text``, or its beginning and an ellipsis, together at most ``characters`` long."""
    if len(text) <= characters:
        return text
    return text[: characters - len(ellipsis)].rstrip() + ellipsis


def one_line(text: str) -> str:
    """Return ``text`` as one line: for subjects, display names, and values of placeholders.

    Control characters, including line breaks, become spaces, and runs of spaces one space.
    Characters that change the writing direction or are invisible are removed. At most 10000
    characters are read.
    """
    return " ".join(_without_controls(text[:10_000].replace("\n", " ")).split())


def lines(text: str) -> str:
    """Return ``text`` as valid Unicode whose only control character is the line feed."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(_visible(c) if unicodedata.category(c) in ("Cc", "Cs") else c for c in text)


def _without_controls(text: str) -> str:
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    category = unicodedata.category(character)
    if character == "\n" or character in _JOINERS:
        return character
    if category in ("Cc", "Zl", "Zp"):
        return " "
    if category == "Cs":  # half of a pair: no encoder takes it
        return "\N{REPLACEMENT CHARACTER}"
    return "" if category == "Cf" else character


def html_of(subject: str, text: str) -> str:
    """Return an HTML page of ``text``; every character is escaped."""
    paragraphs = "".join(
        f"<p>{'<br>'.join(html.escape(line) for line in paragraph.splitlines())}</p>\n"
        for paragraph in text.strip().split("\n\n")
        if paragraph.strip()
    )
    return (
        '<!doctype html>\n<html>\n<head><meta charset="utf-8">'
        f"<title>{html.escape(subject)}</title></head>\n"
        f'<body style="font-family: sans-serif; line-height: 1.5">\n{paragraphs}</body>\n</html>\n'
    )
