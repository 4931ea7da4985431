"""The texts of messages to site managers: defaults, placeholders, segments of an SMS. Pure.

The default texts are English, short, and in the 7-bit alphabet of SMS. They say what happened, why,
and what it means; nothing is asked for that a message could be imitated to get, such as a click or
a password.

A template is text with holes such as ``{TenantName}``, and no format string: ``str.format`` would
reach into objects (``{TenantName.__init__}``) and eat memory (``{TenantName:>100000000}``).

Each segment of an SMS is billed. A text of the GSM 03.38 alphabet takes 7 bits a character (14 for
the characters of its extension table), any other text 16 bits a unit of UTF-16. Several segments
lose the room of 7 and 3 characters in each to the header that joins them.
"""

import re
from collections.abc import Mapping

import attrs

PLACEHOLDERS = (
    "TenantName",
    "TenantIdentifier",
    "NewStatus",
    "PreviousStatus",
    "Reason",
    "OccurredAt",
)

_WORD = re.compile(r"\{([A-Za-z][A-Za-z0-9_]*)\}")
_BRACES = re.compile(r"\{([^{}]*)\}")

_BASIC = frozenset(
    "@£$¥èéùìòÇ\nØø\rÅåΔ_ΦΓΛΩΠΨΣΘΞÆæßÉ !\"#¤%&'()*+,-./0123456789:;<=>?¡"
    "ABCDEFGHIJKLMNOPQRSTUVWXYZÄÖÑÜ§¿abcdefghijklmnopqrstuvwxyzäöñüà"
)
_EXTENSION = frozenset("\f^{}\\[~]|€")

# 140 octets a message (GSM 03.40): 160 characters of 7 bits, or 70 units of 16. The header that
# joins segments takes 6 octets of each.
_GSM7_ALONE, _GSM7_JOINED = 160, 153
_UCS2_ALONE, _UCS2_JOINED = 70, 67


@attrs.frozen
class TemplateTexts:
    """The three texts of one transition."""

    email_subject: str
    email_body: str
    sms_body: str


def _texts(happened: str, meaning: str) -> TemplateTexts:
    return TemplateTexts(
        email_subject=f"{{TenantName}} {happened}",
        email_body=(
            "Hello,\n"
            "\n"
            f"{{TenantName}} ({{TenantIdentifier}}) {happened}.\n"
            "\n"
            "Reason: {Reason}\n"
            "When: {OccurredAt}\n"
            "Status: {NewStatus} (it was {PreviousStatus})\n"
            "\n"
            f"{meaning}\n"
            "\n"
            "You receive this message because you are the site manager. If you did not expect it, "
            "please get in touch with us.\n"
        ),
        sms_body=f"{{TenantName}} {happened}. Reason: {{Reason}}",
    )


SUSPENDED = _texts(
    "has been suspended",
    "Access is paused for now. Nothing has been removed, and everything is there again once it "
    "has been reactivated.",
)
REACTIVATED = _texts(
    "has been reactivated",
    "It is active, and everything can be used again. Thank you for your patience.",
)
DEACTIVATED = _texts(
    "has been deactivated",
    "It is switched off. Its data is kept, and it can be reactivated.",
)
DELETED = _texts(
    "has been deleted",
    "Its data is kept for a limited time, in which it can still be restored. After that it is "
    "removed for good. If you want it back, please tell us soon.",
)


def substitute(template: str, values: Mapping[str, str]) -> str:
    """Return ``template`` with each ``{Word}`` of ``values`` replaced; other text stays as it is.

    One pass: a value that holds a placeholder is not looked into.
    """
    return _WORD.sub(lambda found: values.get(found[1], found[0]), template)


def unknown_placeholders(template: str) -> tuple[str, ...]:
    """Return what stands between braces in a template and no value replaces, each text once.

    Also what other kinds of templates take for a placeholder: ``{0}``, ``{TenantName:>9}``.
    """
    found = dict.fromkeys(match[1] for match in _BRACES.finditer(template))
    return tuple(word for word in found if word not in PLACEHOLDERS)


@attrs.frozen
class SmsSize:
    """The size of one SMS: ``encoding`` is ``GSM-7`` or ``UCS-2``.

    ``units`` counts 7-bit or 16-bit units, ``segments`` what they fill; an empty text fills none.
    """

    encoding: str
    units: int
    segments: int


def measure_sms(text: str) -> SmsSize:
    """Return the size of ``text`` as one SMS; any string is accepted."""
    if all(character in _BASIC or character in _EXTENSION for character in text):
        costs = [1 if character in _BASIC else 2 for character in text]
        return _size("GSM-7", costs, _GSM7_ALONE, _GSM7_JOINED)
    costs = [1 if ord(character) < 0x10000 else 2 for character in text]
    return _size("UCS-2", costs, _UCS2_ALONE, _UCS2_JOINED)


def _size(encoding: str, costs: list[int], alone: int, joined: int) -> SmsSize:
    units = sum(costs)
    if units <= alone:
        return SmsSize(encoding, units, 1 if units else 0)
    segments, room = 0, 0
    for cost in costs:
        if cost > room:  # the two halves of a character never lie in different segments
            segments, room = segments + 1, joined
        room -= cost
    return SmsSize(encoding, units, segments)


def cut_sms(text: str, segments: int) -> str:
    """Return ``text``, or the longest beginning of it that fits with ``...`` into ``segments``.

    The dots are three, because the one character that shows them would take the whole message out
    of the 7-bit alphabet.
    """
    text = text[: segments * _GSM7_ALONE + 1]
    if measure_sms(text).segments <= segments:
        return text
    fits, fits_not = 0, len(text)
    while fits_not - fits > 1:
        middle = (fits + fits_not) // 2
        if measure_sms(text[:middle] + "...").segments <= segments:
            fits = middle
        else:
            fits_not = middle
    return text[:fits].rstrip() + "..."
