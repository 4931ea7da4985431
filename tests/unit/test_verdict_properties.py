"""For any request the verdict is Accepted or Rejected, and only the signed bytes are accepted."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.config import KeyDerivation, Secret
from sdk_trio.webhooks.signature import Keyring, new_secret, sign
from sdk_trio.webhooks.verdict import Accepted, Delivery, Rejected, verify_delivery

NAMES = [b"webhook-id", b"webhook-timestamp", b"webhook-signature"]
SECRETS = [new_secret(b"a" * 32), new_secret(b"b" * 32)]
RING = Keyring.from_secrets(
    # A public test vector of the Svix project, so that ed25519 is tried as well.
    [*map(Secret, SECRETS), Secret("whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4=")],
    KeyDerivation.AUTO,
)
NOW = 1_700_000_000

names = st.one_of(
    st.sampled_from(NAMES), st.sampled_from(NAMES).map(bytes.title), st.binary(max_size=20)
)
values = st.one_of(
    st.binary(max_size=100),
    st.integers(NOW - 400, NOW + 400).map(lambda seconds: b"%d" % seconds),
    st.sampled_from([b"msg_1", b"v1," + b"A" * 43 + b"=", b"v1a," + b"A" * 86 + b"=="]),
)


@given(st.lists(st.tuples(names, values), max_size=12), st.binary(max_size=100))
def test_arbitrary_headers_and_bodies_are_rejected(
    headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    judged = verify_delivery(Delivery(headers, body, NOW), RING, tolerance_seconds=300)
    assert isinstance(judged, Rejected)
    assert judged.detail.endswith(".")


@given(webhook_id=values, timestamp=values, signature=values, body=st.binary(max_size=100))
def test_three_arbitrary_values_are_rejected(
    webhook_id: bytes, timestamp: bytes, signature: bytes, body: bytes
) -> None:
    headers = list(zip(NAMES, (webhook_id, timestamp, signature), strict=True))
    assert isinstance(
        verify_delivery(Delivery(headers, body, NOW), RING, tolerance_seconds=300), Rejected
    )


@given(
    secret=st.integers(0, 1),
    derivation=st.sampled_from([KeyDerivation.STANDARD, KeyDerivation.UTF8]),
    webhook_id=st.from_regex(r"[!-\-/-~]{1,256}", fullmatch=True),
    age=st.integers(-1000, 1000),
    body=st.binary(max_size=300),
    noise=st.lists(st.tuples(st.binary(max_size=9), st.binary(max_size=9)), max_size=5),
    data=st.data(),
)
def test_signed_deliveries_are_accepted_within_the_tolerance(
    secret: int,
    derivation: KeyDerivation,
    webhook_id: str,
    age: int,
    body: bytes,
    noise: list[tuple[bytes, bytes]],
    data: st.DataObject,
) -> None:
    timestamp = NOW - age
    signature = sign(SECRETS[secret], webhook_id, timestamp, body, derivation=derivation)
    genuine = zip(NAMES, (webhook_id.encode(), b"%d" % timestamp, signature.encode()), strict=True)
    headers = data.draw(st.permutations([*genuine, *noise]))
    judged = verify_delivery(Delivery(headers, body, NOW), RING, tolerance_seconds=300)
    if abs(age) <= 300:
        assert judged == Accepted(webhook_id, timestamp, secret, derivation)
    else:
        assert isinstance(judged, Rejected)


def flipped(value: bytes) -> Iterator[bytes]:
    for position in range(len(value) * 8):
        changed = bytearray(value)
        changed[position // 8] ^= 1 << position % 8
        yield bytes(changed)


@pytest.mark.parametrize("derivation", [KeyDerivation.STANDARD, KeyDerivation.UTF8])
@pytest.mark.parametrize("part", [*NAMES, b"body"])
def test_any_flipped_bit_is_rejected(part: bytes, derivation: KeyDerivation) -> None:
    body = bytes(range(256))
    for number in range(3):
        signature = sign(SECRETS[1], f"msg_{number}", NOW, body, derivation=derivation).encode()
        genuine = dict(zip(NAMES, (b"msg_%d" % number, b"%d" % NOW, signature), strict=True))
        genuine[b"body"] = body
        for value in flipped(genuine[part]):
            sent = {**genuine, part: value}
            raw = sent.pop(b"body")
            delivery = Delivery(list(sent.items()), raw, NOW)
            # A tolerance that a flipped bit cannot exceed: only the signature can detect it.
            assert isinstance(verify_delivery(delivery, RING, tolerance_seconds=10**12), Rejected)
