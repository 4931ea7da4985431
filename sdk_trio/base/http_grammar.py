"""The grammar of HTTP that clients, servers and settings share (RFC 9110). Pure."""

import re
from typing import Final

#: A token (RFC 9110, 5.6.2): the name of a method, a header, a parameter. It takes all that it can
#: and gives nothing back, so that no text makes the engine try twice.
TOKEN: Final = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"  # noqa: S105 - no password
TOKEN_BYTES: Final = TOKEN.encode()

is_token = re.compile(TOKEN).fullmatch
is_token_bytes = re.compile(TOKEN_BYTES).fullmatch

#: What a receiver accepts as the value of a header (RFC 9110, 5.5): no control character but the
#: tab. Bytes beyond ASCII are let through, as the grammar does (``obs-text``).
FIELD_VALUE_BYTES: Final = rb"[^\x00-\x08\x0a-\x1f\x7f]*+"

#: Finds what a sender must not put into a header's value, whatever else it holds: it would end the
#: value, or the head, for some reader on its way.
breaks_value = re.compile(rb"[\x00\r\n]").search

#: Methods whose second execution changes nothing more (RFC 9110, 9.2.2).
IDEMPOTENT_METHODS: Final = frozenset({"GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE"})

#: The port of an address that names none, by its scheme (RFC 9110, 4.2).
DEFAULT_PORTS: Final = {"http": 80, "https": 443}
