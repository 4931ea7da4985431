"""Places: where a delivery of a source has its id, its type, its time and its subject. Pure.

A place is a header, an entry of a header such as ``t`` in ``t=1614265330,v1=...``, or a JSON
pointer (RFC 6901) into the body.
"""

import re
from typing import Any, Final

import msgspec

from ...base.http import Headers
from ...events.values import identifier_in, members_of

#: The most bytes of a header that is read, as for a signature of Standard Webhooks.
MAX_HEADER_BYTES: Final = 8 * 1024

_split_entries = re.compile(rb"[,; \t]+").split


class DeliveryPlace(msgspec.Struct, frozen=True):
    """One place: a header with ``part`` or without, otherwise the members of a JSON pointer."""

    header: bytes | None = None
    part: bytes | None = None
    pointer: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> "DeliveryPlace":
        """Read a checked setting: ``HEADER``, ``HEADER:PART`` or ``/a/pointer``."""
        if text.startswith("/"):
            return cls(pointer=pointer_of(text))
        header, _, part = text.lower().partition(":")
        # The name of an entry is case-sensitive.
        part = text[len(header) + 1 :]
        return cls(header.encode(), part.encode() or None)

    def in_headers(self, headers: Headers) -> bytes | None:
        """Return the header's value, or its entry; None unless it was sent exactly once.

        Another program in between might use the other one of two.
        """
        values = [value for name, value in headers if name.lower() == self.header]
        if len(values) != 1 or len(values[0]) > MAX_HEADER_BYTES:
            return None
        if self.part is None:
            return values[0].strip(b" \t")
        start = self.part + b"="
        found = [entry for entry in entries_of(values[0]) if entry.startswith(start)]
        return found[0][len(start) :] if len(found) == 1 else None

    def read(self, headers: Headers, body: bytes) -> str | None:
        """Return the text at this place, a number as it was sent; None without one.

        The body is verified.
        """
        if self.header is None:
            found = member_at(body, self.pointer)
            return None if found is None else identifier_in(found)
        sent = self.in_headers(headers)
        try:
            return None if sent is None else sent.decode()
        except UnicodeDecodeError:
            return None


def entries_of(value: bytes) -> list[bytes]:
    """Return the entries of a header: commas, semicolons and blanks separate them."""
    return [entry for entry in _split_entries(value) if entry]


def pointer_of(text: str) -> tuple[str, ...]:
    """Return the members that a JSON pointer names."""
    # In this order, so that ~01 is ~1 and not a slash.
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:])


def member_at(body: bytes, pointer: tuple[str, ...]) -> bytes | msgspec.Raw | None:
    """Return the undecoded JSON value at a pointer, None if there is none; arrays have none."""
    found: bytes | msgspec.Raw = body
    for name in pointer:
        members = members_of(found)
        if members is None or name not in members:
            return None
        found = members[name]
    return found


def with_member(document: Any, pointer: tuple[str, ...], value: Any) -> Any:
    """Return a JSON document with the member at ``pointer`` set; objects are made on the way."""
    if not pointer:
        return value
    first, *rest = pointer
    members = document if isinstance(document, dict) else {}
    return {**members, first: with_member(members.get(first), tuple(rest), value)}
