"""Contents of every size are hashed whole: against plain ``hmac``, byte by byte where it is cut."""

import base64
import time
from datetime import UTC, datetime

import pytest
import standardwebhooks
import svix.webhooks
from hypothesis import given
from hypothesis import strategies as st
from support.plain_hmac import AT_ONCE, EDGES, PIECE, around_edges, body_of, entry, key_of

from sdk_trio.config import KeyDerivation, Secret
from sdk_trio.webhooks.signature import Keyring, _in_pieces, parse_signature_header, sign
from sdk_trio.webhooks.verdict import Accepted, Delivery, Rejected, verify_delivery

SECRET = "whsec_" + base64.b64encode(b"made for the tests of sizes").decode()
RING = Keyring.from_secrets([Secret(SECRET)], KeyDerivation.STANDARD)
ID, TIMESTAMP = b"msg_1", b"1700000000"
HEAD = len(ID) + len(TIMESTAMP) + 2

#: Around every edge, and what typical and large events have.
SIZES = sorted({edge + step for edge in EDGES for step in (-1, 0, 1)} | {100, 3000, 50_000, 2**20})

#: Drawn sizes are at an edge as often as anywhere else.
sizes = st.one_of(
    st.builds(int.__add__, st.sampled_from(EDGES), st.integers(-3, 3)),
    st.integers(HEAD, 3 * PIECE),
    st.integers(HEAD, 2 * AT_ONCE),
)


def accepts(header: bytes, body: bytes, ring: Keyring = RING) -> bool:
    return ring.match(ID, TIMESTAMP, body, parse_signature_header(header)) is not None


@pytest.mark.parametrize("size", SIZES)
def test_a_content_of_any_size_is_hashed_whole(size: int) -> None:
    body = body_of(size - HEAD)
    genuine = entry(key_of(SECRET), ID, TIMESTAMP, body)
    assert sign(SECRET, ID.decode(), int(TIMESTAMP), body) == genuine.decode()
    assert accepts(genuine, body)
    for place in around_edges(len(body), 2):
        # The content's positions, and those of the body, which begins behind id and timestamp.
        for position in {place, max(0, place - HEAD)}:
            changed = bytearray(body)
            changed[position] ^= 1 << (position % 8)
            assert not accepts(genuine, bytes(changed)), position


def test_no_byte_of_a_content_in_pieces_is_left_out() -> None:
    body = body_of(3 * PIECE + 2 - HEAD)
    genuine = entry(key_of(SECRET), ID, TIMESTAMP, body)
    changed = bytearray(body)
    for position in range(len(body)):
        changed[position] ^= 0x10
        assert not accepts(genuine, bytes(changed)), position
        changed[position] ^= 0x10
    assert accepts(genuine, bytes(changed))


@given(size=sizes, seed=st.integers(0, 3), data=st.data())
def test_truncated_moved_or_repeated_content_is_detected(
    size: int, seed: int, data: st.DataObject
) -> None:
    body = body_of(max(0, size - HEAD), seed)
    genuine = entry(key_of(SECRET), ID, TIMESTAMP, body)
    assert accepts(genuine, body)
    edges = st.sampled_from([*around_edges(len(body)), 0])
    place = data.draw(st.one_of(edges, st.integers(0, len(body))), "place")
    changes = {
        "one byte more": body[:place] + b"\0" + body[place:],
        "cut": body[:place],
        "one byte less": body[:place] + body[place + 1 :],
        "a piece less": body[:place] + body[place + PIECE :],
        "a piece twice": body[: place + PIECE] + body[place:],
        "two pieces exchanged": body[PIECE : 2 * PIECE] + body[:PIECE] + body[2 * PIECE :],
    }
    for change, forged in changes.items():
        assert accepts(genuine, forged) == (forged == body), change


@given(
    secret=st.one_of(
        st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=60, max_size=70),
        st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=16, max_size=200),
    ),
    size=sizes,
)
def test_keys_of_any_length_with_contents_of_any_size(secret: str, size: int) -> None:
    # 64 bytes are HMAC's block: longer keys are hashed first.
    ring = Keyring.from_secrets([Secret(secret)], KeyDerivation.UTF8)
    body = body_of(max(0, size - HEAD))
    genuine = entry(key_of(secret, utf8=True), ID, TIMESTAMP, body)
    assert accepts(genuine, body, ring)
    assert not accepts(genuine, body + b" ", ring)
    made = sign(secret, ID.decode(), int(TIMESTAMP), body, derivation=KeyDerivation.UTF8)
    assert made == genuine.decode()


@pytest.mark.parametrize("signer", [standardwebhooks.Webhook, svix.webhooks.Webhook])
@pytest.mark.parametrize("size", [size for size in SIZES if size < 2**20])
def test_the_packages_agree_in_both_directions(signer: type, size: int) -> None:
    now = int(time.time())
    text = f'"{body_of(size).hex()[: size - HEAD - 2]}"'
    body = text.encode()
    assert len(body) + HEAD == size
    theirs = signer(SECRET).sign("msg_1", datetime.fromtimestamp(now, UTC), text).encode()
    genuine = Delivery(sent(now, theirs), body, now)
    accepted = verify_delivery(genuine, RING, tolerance_seconds=300)
    assert accepted == Accepted("msg_1", now, 0, KeyDerivation.STANDARD)
    forged = Delivery(genuine.headers, body[:-2] + b'~"', now)
    assert isinstance(verify_delivery(forged, RING, tolerance_seconds=300), Rejected)
    ours = sent(now, sign(SECRET, "msg_1", now, body).encode())
    signer(SECRET).verify(body, {name.decode(): value.decode() for name, value in ours})


def sent(timestamp: int, signature: bytes) -> list[tuple[bytes, bytes]]:
    return [
        (b"webhook-id", ID),
        (b"webhook-timestamp", b"%d" % timestamp),
        (b"webhook-signature", signature),
    ]


@pytest.mark.parametrize("size", [0, 1, *EDGES, AT_ONCE + 1])
def test_hashing_in_pieces_never_releases_the_gil(size: int) -> None:
    # hashlib lets go of the interpreter's lock for 2048 bytes and more.
    content = body_of(size)
    pieces = _in_pieces(content)
    assert b"".join(pieces) == content
    if size <= AT_ONCE:
        assert len(pieces) == max(1, -(-size // PIECE))
        assert all(len(piece) < 2048 for piece in pieces)
    else:
        assert len(pieces) == 1
