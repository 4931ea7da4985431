"""The organization of the upstream in a delivery: read from the event, or guessed before. Pure."""

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from .values import UNFIT, decoder_for, members_of

#: Paths at which the upstream's records name the organization, in order of preference.
ORGANIZATION_PATHS: Final = (
    ("organization_id",),
    ("customer", "organization_id"),
    ("product", "organization_id"),
    ("benefit", "organization_id"),
    ("subscription", "customer", "organization_id"),
    ("order", "customer", "organization_id"),
)
#: The type whose ``data`` is the organization itself.
ORGANIZATION_TYPE: Final = "organization.updated"

#: Bytes of an unverified body that are scanned: real ones name it in their first few kilobytes.
SCANNED_BYTES: Final = 64 * 1024
#: Texts and brackets of it that are looked at, which takes about a millisecond. Anybody can send
#: such a body: a scan of all of it once cost 2 s of CPU for 1 MiB.
SCANNED_TOKENS: Final = 2048

#: The next text, with a colon if it is a name, or bracket. What stands between matters not.
_next_token = re.compile(
    rb'[^"\[\]{}]*+(?:"([^"\\]*+(?:\\.[^"\\]*+)*+)"(\s*+:)?+|([\[{])|[\]}])'
).match
_DEEPEST: Final = 1 + max(map(len, ORGANIZATION_PATHS))
_RANKS: Final = {
    tuple(part.encode() for part in ("data", *path)): rank
    for rank, path in enumerate(ORGANIZATION_PATHS)
}
_OWN_ID: Final = (b"data", b"id")


def organization_of(event_type: str, data_raw: bytes | msgspec.Raw) -> str | None:
    """Return the organization that a verified delivery names, None when it names none.

    The first of :data:`ORGANIZATION_PATHS` within ``data`` that holds text counts; of
    ``organization.updated`` also ``data.id``, last.

    Args:
        event_type: the type of the delivery.
        data_raw: its undecoded ``data``.
    """
    data = members_of(data_raw)
    if data is None:
        return None
    own = (("id",),) if event_type == ORGANIZATION_TYPE else ()
    return next(
        (found for path in (*ORGANIZATION_PATHS, *own) if (found := _text_at(data, path))), None
    )


def _text_at(members: dict[str, msgspec.Raw], path: Sequence[str]) -> str | None:
    *parents, name = path
    for parent in parents:
        inner = members_of(members[parent]) if parent in members else None
        if inner is None:
            return None
        members = inner
    if name not in members:
        return None
    try:
        found: str = decoder_for(str).decode(members[name])
    except UNFIT:
        return None
    return found


def claimed_organization(body: bytes) -> str | None:
    """Return the organization that a body claims which nobody has verified, None if none is found.

    It reads at most :data:`SCANNED_BYTES` and :data:`SCANNED_TOKENS`, and decodes nothing: what it
    returns chooses whose keys are tried, and nothing else may depend on it. It agrees with
    :func:`organization_of` for what senders send; names and values that are written with escapes
    are not found.
    """
    scanned = body[:SCANNED_BYTES]
    best: tuple[int, bytes] | None = None
    own_id: bytes | None = None
    event_type: bytes | None = None
    names: list[bytes | None] = []  # of the objects and arrays around the present place
    name: bytes | None = None
    at = 0
    for _ in range(SCANNED_TOKENS):
        token = _next_token(scanned, at)
        if token is None:
            break
        at = token.end()
        text, is_name, opening = token.groups()
        if text is not None:
            if is_name:
                name = text
                continue
            if name is not None and len(names) <= _DEEPEST:
                path = (*names[1:], name)
                rank = _RANKS.get(path)  # type: ignore[arg-type]  # a None among them is no key
                if text and rank is not None and (best is None or rank <= best[0]):
                    best = (rank, text)
                elif path == (b"type",):
                    event_type = text
                elif path == _OWN_ID:
                    own_id = text
            name = None
        elif opening is not None:
            names.append(name)
            name = None
        elif not names:
            break
        else:
            names.pop()
            name = None
    found = best[1] if best is not None else None
    if found is None and event_type == ORGANIZATION_TYPE.encode():
        found = own_id or None
    return found.decode("ascii") if found is not None and found.isascii() else None
