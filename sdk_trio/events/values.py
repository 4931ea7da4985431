"""JSON values without a type: decoded as they are, pure.

The bytes handed to these functions are part of a body that
:func:`~sdk_trio.events.decoding.decode_envelope` has accepted: JSON, or legible as such.
"""

import functools
import json
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

from .legible import legible

#: What decoding of an accepted document may still raise: a value of another kind, or a number
#: that is beyond a float.
UNFIT = (msgspec.MsgspecError, ValueError, RecursionError)


def _build_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


#: Returns the compiled decoder of a type, built at its first use and kept.
decoder_for: Callable[[Any], msgspec.json.Decoder[Any]] = functools.cache(_build_decoder)


def plain(raw: bytes | msgspec.Raw) -> Any:
    """Return the JSON value in ``raw`` as dict, list, str, int, float, bool or None."""
    try:
        return decoder_for(Any).decode(raw)
    except UNFIT:
        # Half a surrogate pair, say, or a number like 1e400, which is read as infinity here: a
        # readable document is worth more than one odd number.
        text, _ = legible(bytes(raw))
        return json.loads(text)


def members_of(raw: bytes | msgspec.Raw) -> dict[str, msgspec.Raw] | None:
    """Return the undecoded members of the JSON object in ``raw``; None when it is no object."""
    decode = decoder_for(dict[str, msgspec.Raw]).decode
    members: dict[str, msgspec.Raw]
    try:
        members = decode(raw)
    except msgspec.ValidationError:
        return None
    except UNFIT:
        try:
            members = decode(legible(bytes(raw))[0])
        except UNFIT:
            return None
    return members


def plain_members(raw: bytes | msgspec.Raw, *, without: AbstractSet[str]) -> dict[str, Any]:
    """Return the members of the object in ``raw`` whose names are not in ``without``.

    Empty when ``raw`` is no object.
    """
    members = members_of(raw) or {}
    return {name: plain(value) for name, value in members.items() if name not in without}
