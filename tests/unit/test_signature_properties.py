"""Round trips, and that nothing but the signed bytes passes."""

import base64
import hmac
import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.config import KeyDerivation, Secret
from sdk_trio.errors import VerificationError
from sdk_trio.records.deliveries import key_of
from sdk_trio.webhooks.signature import (
    Keyring,
    is_valid_id,
    is_valid_timestamp,
    new_secret,
    parse_signature_header,
    sign,
)
from sdk_trio.webhooks.signed_request import sign_body

secrets = st.binary(min_size=32, max_size=32).map(new_secret)
ids = st.from_regex(r"[!-\-/-~]{1,256}", fullmatch=True)
timestamps = st.integers(0, 10**12 - 1)
signing = st.sampled_from([KeyDerivation.STANDARD, KeyDerivation.UTF8])
header_text = st.lists(
    st.sampled_from(
        [b"v1", b"v1a", b"v2", b",", b" ", b"\t", b"=", b"v", b"A" * 43, b"A" * 42, b"B", b"\xa0"]
    ),
    max_size=60,
).map(b"".join)


@given(
    configured=st.lists(secrets, min_size=1, max_size=4, unique=True),
    webhook_id=ids,
    timestamp=timestamps,
    body=st.binary(max_size=300),
    derivation=signing,
    data=st.data(),
)
def test_any_rotated_secret_verifies_what_it_signed_and_is_named(
    configured: list[str],
    webhook_id: str,
    timestamp: int,
    body: bytes,
    derivation: KeyDerivation,
    data: st.DataObject,
) -> None:
    index = data.draw(st.integers(0, len(configured) - 1))
    header = sign(configured[index], webhook_id, timestamp, body, derivation=derivation)
    entries = parse_signature_header(header.encode())
    arguments = (webhook_id.encode(), b"%d" % timestamp, body, entries)
    held = [Secret(text) for text in configured]
    for accepted in (derivation, KeyDerivation.AUTO):
        found = Keyring.from_secrets(held, accepted).match(*arguments)
        assert found is not None
        assert (found.index, found.derivation) == (index, derivation)
    del held[index]
    if held:
        assert Keyring.from_secrets(held, KeyDerivation.AUTO).match(*arguments) is None


@given(st.one_of(st.binary(max_size=400), header_text))
def test_any_header_is_read_or_refused(value: bytes) -> None:
    try:
        entries = parse_signature_header(value)
    except VerificationError:
        return
    kinds = {(entry.version, len(entry.value)) for entry in entries}
    assert kinds <= {(b"v1", 32), (b"v1a", 64)}


def read_by_the_rule(value: bytes) -> list[bytes]:
    """The rule of the wire format in regular expressions, for ``v1`` entries alone."""
    tokens = [token for token in re.split(rb"[ \t,]+", value) if token]
    return [
        digits
        for opener, digits in itertools.pairwise(tokens)
        if opener == b"v1" and re.fullmatch(rb"[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=?", digits)
    ]


@given(header_text)
def test_the_entries_are_those_of_the_rule(value: bytes) -> None:
    try:
        entries = parse_signature_header(value)
    except VerificationError:
        return
    assert len([entry for entry in entries if entry.version == b"v1"]) == len(
        read_by_the_rule(value)
    )


lone_entries = st.one_of(
    st.builds(
        lambda opener, value, end: opener + value + end,
        st.sampled_from(
            [
                b"v1,",
                b"v1 ",
                b"v2,",
                b"V1,",
                b"v1a,",
                b"1,",
                b"1,x",
                b"v1x",
                b"xv1",
                b",v1,",
                b"v1,,",
            ]
        ),
        st.binary(min_size=31, max_size=33).map(base64.b64encode),
        st.sampled_from([b"", b"", b"", b"=", b"v1,", b"A"]),
    ),
    st.builds(
        lambda value, place, code: value[:place] + bytes([code]) + value[place + 1 :],
        st.binary(min_size=32, max_size=32).map(lambda digest: b"v1," + base64.b64encode(digest)),
        st.integers(0, 46),
        st.integers(0, 255),
    ),
)


@given(lone_entries)
def test_an_entry_alone_is_read_as_it_is_among_others(value: bytes) -> None:
    alone = parse_signature_header(value)
    # One separator more: the short cut for a lone entry does not see it.
    assert parse_signature_header(value + b" ") == parse_signature_header(b" " + value) == alone
    tokens = [token for token in re.split(rb"[ \t,]+", value) if token]
    genuine = len(tokens) == 2 and tokens[0] == b"v1" and len(read_by_the_rule(value)) == 1
    if genuine:
        digits = tokens[1].rstrip(b"=")
        assert [entry.value for entry in alone] == [base64.b64decode(digits + b"=")]


@given(
    digests=st.lists(st.one_of(st.integers(0, 2**256 - 1), st.none()), max_size=5),
    prefix=st.sampled_from([b"", b"v", b"v1", b"w", b"/"]),
    separator=st.sampled_from([b" ", b",", b", ", b"\t"]),
)
def test_values_that_look_like_openers_are_values(
    digests: list[int | None], prefix: bytes, separator: bytes
) -> None:
    # An opener without a value hides nothing that follows.
    texts, values = [], []
    for digest in digests:
        if digest is None:
            texts.append(b"v1")
            continue
        text = base64.b64encode(digest.to_bytes(32))
        text = prefix + text[len(prefix) :]
        texts.append(b"v1," + text)
        values.append(base64.b64decode(text))
    entries = parse_signature_header(separator.join(texts))
    assert [entry.value for entry in entries] == values
    assert {entry.version for entry in entries} <= {b"v1"}


@given(st.one_of(st.binary(max_size=300), ids.map(str.encode)))
def test_ids_are_visible_ascii_without_a_dot(value: bytes) -> None:
    assert is_valid_id(value) == (re.fullmatch(rb"[!-\-/-~]{1,256}", value) is not None)


@given(st.one_of(st.binary(max_size=14), st.from_regex(rb"[0-9]{1,14}", fullmatch=True)))
def test_timestamps_are_digits_without_leading_zero(value: bytes) -> None:
    assert is_valid_timestamp(value) == (re.fullmatch(rb"0|[1-9][0-9]{0,11}", value) is not None)


#: Ids that try to be the key of a tenant's delivery, and others.
tenants = st.uuids(version=4).map(str)
near_keys = st.one_of(ids, tenants, st.sampled_from(["x", "x-1", "1700000000", "{}"]))


@given(webhook_id=near_keys, signer=st.one_of(st.just(""), tenants), timestamp=timestamps)
def test_a_gateway_s_signature_covers_one_sender_one_id_and_one_time(
    webhook_id: str, signer: str, timestamp: int
) -> None:
    """Both can be taken apart again, so no two deliveries have the same id or the same bytes."""
    key = key_of(webhook_id, signer)
    assert key.partition(".")[::2] == (webhook_id, signer)
    secret = new_secret(bytes(32))
    signed = sign_body(
        b'{"a": 1.5}', secret=secret, webhook_id=webhook_id, timestamp=timestamp, signer=signer
    )
    assert signed.webhook_id == key
    content = f'{key}.{timestamp}.{{"a": 1.5}}'.encode()
    expected = base64.b64encode(hmac.digest(bytes(32), content, "sha256")).decode()
    assert signed.signature == f"v1,{expected}"
    first, second, rest = content.decode().split(".", 2)
    if is_valid_timestamp(second.encode()):
        taken = (first, "", second, rest)
    else:
        taken = (first, second, *rest.split(".", 1))
    assert taken == (webhook_id, signer, str(timestamp), '{"a": 1.5}')


@given(webhook_id=ids, signer=tenants)
def test_no_sender_can_choose_the_id_of_another_ones_event(webhook_id: str, signer: str) -> None:
    assert not is_valid_id(key_of(webhook_id, signer).encode())
