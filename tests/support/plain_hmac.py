"""A second, simple implementation of the signature scheme, as a reference for tests.

It uses nothing of the package. ``hmac`` hashes the whole content at once.
"""

import base64
import hashlib
import hmac
import random
from collections.abc import Iterator

#: hashlib keeps the GIL for shorter inputs, so the package hashes in such pieces ...
PIECE = 2047
#: ... and longer contents than this at once.
AT_ONCE = 16 * 1024

#: Sizes of the signed content at which the split into pieces changes.
EDGES = (*range(PIECE, AT_ONCE + PIECE, PIECE), AT_ONCE, 2 * AT_ONCE)


def key_of(secret: str, *, utf8: bool = False) -> bytes:
    """Return the HMAC key in a ``whsec_`` secret: decoded, or the text itself."""
    return secret.encode() if utf8 else base64.b64decode(secret.removeprefix("whsec_"))


def entry(key: bytes, webhook_id: bytes, timestamp: bytes, body: bytes) -> bytes:
    """Return the ``v1`` entry of a delivery, whatever its id and timestamp look like."""
    content = b".".join([webhook_id, timestamp, body])
    return b"v1," + base64.b64encode(hmac.new(key, content, hashlib.sha256).digest())


def body_of(size: int, seed: int = 0) -> bytes:
    """Return bytes in which no two pieces are equal."""
    return random.Random(f"{size} {seed}").randbytes(size)


def around_edges(size: int, reach: int = 2) -> Iterator[int]:
    """Yield the positions in ``size`` bytes next to both ends and to every edge."""
    near = {edge + step for edge in (0, size, *EDGES) for step in range(-reach, reach)}
    yield from sorted(position for position in near if 0 <= position < size)
