"""How many segments an SMS takes, each of which is billed. Pure.

A text of the GSM 03.38 alphabet has 7 bits a character (characters of its extension table take
two), any other text 16 bits a unit of UTF-16. A message of several segments loses the room of
7 and 3 characters in each to the header that joins them.
"""

import attrs

_BASIC = frozenset(
    "@£$¥èéùìòÇ\nØø\rÅåΔ_ΦΓΛΩΠΨΣΘΞÆæßÉ !\"#¤%&'()*+,-./0123456789:;<=>?¡"
    "ABCDEFGHIJKLMNOPQRSTUVWXYZÄÖÑÜ§¿abcdefghijklmnopqrstuvwxyzäöñüà"
)
_EXTENSION = frozenset("\f^{}\\[~]|€")

_GSM7_ALONE, _GSM7_JOINED = 160, 153
_UCS2_ALONE, _UCS2_JOINED = 70, 67


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
