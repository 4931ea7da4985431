"""The verdict against a model of the rules: whole deliveries, of which any part may be wrong.

The model knows which entries were made by which secret over which bytes, because it made them, with
plain ``hmac``. Every rule is aimed at: ages are drawn next to the tolerance, lists hold several
entries and several secrets in every order, headers are repeated, renamed and left out.
"""

import base64
from collections.abc import Sequence
from itertools import pairwise

import attrs
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import assume, event, example, given
from hypothesis import strategies as st
from support.plain_hmac import EDGES, body_of, entry, key_of

from sdk_trio.config import KeyDerivation, Secret
from sdk_trio.webhooks.signature import Keyring
from sdk_trio.webhooks.verdict import Accepted, Cause, Delivery, Rejected, verify_delivery

NAMES = (b"webhook-id", b"webhook-timestamp", b"webhook-signature")
NOW = 1_700_000_000
BODY = b'{"type":"order.paid"}'

HMAC = [f"whsec_{base64.b64encode(letter * 24).decode()}" for letter in (b"a", b"b", b"c")]
PRIVATE = [Ed25519PrivateKey.from_private_bytes(letter * 32) for letter in (b"x", b"y")]
PUBLIC = [
    f"whpk_{base64.b64encode(key.public_key().public_bytes_raw()).decode()}" for key in PRIVATE
]
ALL = (*HMAC, *PUBLIC)

#: How a list's entries are kept apart: as the scheme has it, as others read it, as proxies join it.
separators = st.sampled_from([b" ", b"  ", b",", b", ", b"\t", b" ,\t"])
#: Bodies small and large; sizes at which the content is cut otherwise are aimed at.
bodies = st.one_of(
    st.binary(max_size=60),
    st.builds(
        lambda edge, step, seed: body_of(edge + step, seed),
        st.sampled_from(EDGES[:3]),
        st.integers(-60, 3),
        st.integers(0, 9),
    ),
)
ids = st.from_regex(r"[!-\-/-~]{1,256}", fullmatch=True).map(str.encode)
tolerances = st.sampled_from([0, 1, 5, 300, 3600])


@attrs.frozen
class Entry:
    """One entry: its text, and the secret and key that made it if it is genuine."""

    text: bytes
    secret: str | None = None
    derivation: KeyDerivation | None = None


def genuine(secret: str, utf8: bool, webhook_id: bytes, timestamp: bytes, body: bytes) -> Entry:
    if secret in PUBLIC:
        content = b".".join([webhook_id, timestamp, body])
        made = PRIVATE[PUBLIC.index(secret)].sign(content)
        return Entry(b"v1a," + base64.b64encode(made), secret)
    derivation = KeyDerivation.UTF8 if utf8 else KeyDerivation.STANDARD
    made = entry(key_of(secret, utf8=utf8), webhook_id, timestamp, body)
    return Entry(made, secret, derivation)


def spoiled(good: Entry, how: str) -> Entry:
    """An entry that looks much like a genuine one, and must not count."""
    version, _, value = good.text.partition(b",")
    digest = base64.b64decode(value)
    one_bit = bytes([digest[0] ^ 1, *digest[1:]])
    last_bit = bytes([*digest[:-1], digest[-1] ^ 0x80])
    texts = {
        "one bit": version + b"," + base64.b64encode(one_bit),
        "last byte": version + b"," + base64.b64encode(last_bit),
        "other version": b"v2," + value,
        "later version": version + b"b," + value,
        "capital": version.upper() + b"," + value,
        "unversioned": value,
        "of the other kind": (b"v1a" if version == b"v1" else b"v1") + b"," + value,
        "shorter": version + b"," + base64.b64encode(digest[:-1]),
        "longer": version + b"," + base64.b64encode(digest + b"\0"),
        "half": version + b"," + value[: len(value) // 2],
        "hexadecimal": version + b"," + digest.hex().encode(),
        "foreign character": version + b",!" + value,
        "empty": version + b",",
    }
    return Entry(texts[how])


SPOILED = (
    "one bit",
    "last byte",
    "other version",
    "later version",
    "capital",
    "unversioned",
    "of the other kind",
    "shorter",
    "longer",
    "half",
    "hexadecimal",
    "foreign character",
    "empty",
)


def expected_match(
    entries: Sequence[Entry], configured: Sequence[str], derivation: KeyDerivation
) -> tuple[int, KeyDerivation | None] | None:
    """The first configured secret that made an entry; its decoded key counts before its text."""
    found = [
        (configured.index(made.secret), made.derivation == KeyDerivation.UTF8, made.derivation)
        for made in entries
        if made.secret in configured
        and (made.derivation in {None, derivation} or derivation is KeyDerivation.AUTO)
    ]
    if not found:
        return None
    index, _, how = min(found, key=lambda match: match[:2])
    return index, how


def judged(
    headers: Sequence[tuple[bytes, bytes]],
    body: bytes,
    ring: Keyring,
    now: float = NOW,
    **more: int,
) -> Accepted | Rejected:
    return verify_delivery(
        Delivery(headers, body, now), ring, **({"tolerance_seconds": 300} | more)
    )


def ring_of(configured: Sequence[str], derivation: KeyDerivation) -> Keyring:
    return Keyring.from_secrets([Secret(text) for text in configured], derivation)


@st.composite
def lists_of_entries(draw: st.DrawFn, webhook_id: bytes, timestamp: bytes, body: bytes) -> list:
    """Entries of several secrets, genuine and spoiled, in any order; four ed25519 ones at most."""
    made: list[Entry] = []
    for _ in range(draw(st.integers(1, 6), "entries")):
        secret = draw(st.sampled_from(ALL))
        good = genuine(secret, draw(st.booleans()), webhook_id, timestamp, body)
        how = draw(st.sampled_from([None, None, "other bytes", *SPOILED]))
        if how == "other bytes":
            other = genuine(secret, False, webhook_id, timestamp, body + b" ")
            made.append(Entry(other.text))
        else:
            made.append(good if how is None else spoiled(good, how))
    # "v1," and a bare signature behind it are one genuine entry with a space after its comma.
    assume(not any(a.text.endswith(b",") and b"," not in b.text for a, b in pairwise(made)))
    return made if sum(one.text.startswith(b"v1a") for one in made) <= 4 else made[:4]


@given(
    configured=st.lists(st.sampled_from(ALL), min_size=1, max_size=5, unique=True),
    derivation=st.sampled_from(KeyDerivation),
    webhook_id=ids,
    body=bodies,
    data=st.data(),
)
def test_the_first_secret_that_made_any_entry_is_named(
    configured: list[str],
    derivation: KeyDerivation,
    webhook_id: bytes,
    body: bytes,
    data: st.DataObject,
) -> None:
    timestamp = b"%d" % NOW
    entries = data.draw(lists_of_entries(webhook_id, timestamp, body), "entries")
    separator = data.draw(separators, "separator")
    # One line, or several: a proxy may do either.
    cut = data.draw(st.integers(0, len(entries)), "cut")
    lines = [part for part in (entries[:cut], entries[cut:]) if part]
    headers = [(NAMES[0], webhook_id), (NAMES[1], timestamp)]
    headers += [(NAMES[2], separator.join(one.text for one in line)) for line in lines]
    verdict = judged(headers, body, ring_of(configured, derivation))
    match = expected_match(entries, configured, derivation)
    event("accepted" if match else "rejected")
    if match is None:
        assert isinstance(verdict, Rejected)
        assert verdict.cause in {Cause.NO_MATCH, Cause.BAD_SIGNATURE_HEADER}
    else:
        index, how = match
        assert verdict == Accepted(webhook_id.decode(), NOW, index, how)


@given(
    places=st.lists(st.integers(0, 31), min_size=1, max_size=3, unique=True),
    count=st.integers(1, 40),
    separator=separators,
    filler=st.sampled_from(["one bit", "other version", "half", "of the other kind", "empty"]),
)
@example(places=[31], count=32, separator=b" ", filler="one bit")
@example(places=[0], count=33, separator=b" ", filler="one bit")
def test_a_genuine_entry_counts_at_every_place_of_a_list_that_is_not_too_long(
    places: list[int], count: int, separator: bytes, filler: str
) -> None:
    good = genuine(HMAC[0], False, b"msg_1", b"%d" % NOW, BODY)
    bad = spoiled(good, filler).text
    texts = [good.text if place in places else bad for place in range(count)]
    headers = list(zip(NAMES, (b"msg_1", b"%d" % NOW, separator.join(texts)), strict=True))
    verdict = judged(headers, BODY, ring_of(HMAC[:2], KeyDerivation.AUTO))
    accepted = isinstance(verdict, Accepted)
    assert accepted == (count <= 32 and any(place < count for place in places))
    if count > 32:
        assert isinstance(verdict, Rejected)
        assert verdict.cause is Cause.BAD_SIGNATURE_HEADER


@given(
    different=st.integers(1, 6),
    repeated=st.integers(0, 3),
    others=st.integers(0, 6),
    data=st.data(),
)
def test_four_different_ed25519_entries_are_allowed_beside_any_others(
    different: int, repeated: int, others: int, data: st.DataObject
) -> None:
    good = genuine(PUBLIC[0], False, b"msg_1", b"%d" % NOW, BODY).text
    wrong = [b"v1a," + base64.b64encode(b"%064d" % number) for number in range(different - 1)]
    hmac = [b"v1," + base64.b64encode(b"%032d" % number) for number in range(others)]
    texts = data.draw(st.permutations([good, *wrong, *hmac, *[good] * repeated]), "texts")
    headers = list(zip(NAMES, (b"msg_1", b"%d" % NOW, b" ".join(texts)), strict=True))
    verdict = judged(headers, BODY, ring_of([HMAC[0], PUBLIC[0]], KeyDerivation.AUTO))
    if different <= 4:
        assert verdict == Accepted("msg_1", NOW, 1, None)
    else:
        assert isinstance(verdict, Rejected)
        assert verdict.cause is Cause.BAD_SIGNATURE_HEADER


@given(
    tolerance=tolerances,
    side=st.sampled_from([-1, 1]),
    beyond=st.one_of(st.integers(-2, 2), st.integers(-400, 400)),
    fraction=st.floats(0, 1, exclude_max=True),
    timestamp=st.one_of(st.integers(10_000, 10**12 - 1), st.just(NOW)),
)
def test_the_tolerance_is_inclusive_on_both_sides(
    tolerance: int, side: int, beyond: int, fraction: float, timestamp: int
) -> None:
    age = side * (tolerance + beyond)
    # A fraction that the sum rounds up to the next second would be another age.
    now = float(timestamp + age) + fraction
    age = int(now // 1) - timestamp
    made = entry(key_of(HMAC[0]), b"msg_1", b"%d" % timestamp, BODY)
    headers = list(zip(NAMES, (b"msg_1", b"%d" % timestamp, made), strict=True))
    ring = ring_of(HMAC[:1], KeyDerivation.STANDARD)
    verdict = judged(headers, BODY, ring, now, tolerance_seconds=tolerance)
    event("inside" if abs(age) <= tolerance else "outside")
    if abs(age) <= tolerance:
        assert verdict == Accepted("msg_1", timestamp, 0, KeyDerivation.STANDARD)
    else:
        assert isinstance(verdict, Rejected)
        assert verdict.cause is (Cause.TOO_OLD if age > 0 else Cause.TOO_NEW)
        assert f"{abs(age)} s" in verdict.detail
        assert f"{tolerance} s" in verdict.detail


@given(
    before=ids,
    after=st.binary(max_size=80),
    second=st.integers(0, 10**12 - 1),
    dots=st.lists(st.integers(0, 256), max_size=2),
)
def test_an_id_with_a_dot_is_refused_although_it_was_signed(
    before: bytes, after: bytes, second: int, dots: list[int]
) -> None:
    # Bytes moved between the parts: the same content, the same signature, another id and body.
    body = b"%d.%b" % (second, after)
    made = entry(key_of(HMAC[0]), before, b"%d" % NOW, body)
    ring = ring_of(HMAC[:1], KeyDerivation.STANDARD)
    assert isinstance(
        judged(list(zip(NAMES, (before, b"%d" % NOW, made), strict=True)), body, ring), Accepted
    )
    moved = before + b".%d" % NOW
    headers = list(zip(NAMES, (moved, b"%d" % second, made), strict=True))
    verdict = judged(headers, after, ring, second)
    assert isinstance(verdict, Rejected)
    assert verdict.cause is Cause.BAD_ID
    for place in (0, len(before), *dots):
        dotted = before[:place] + b"." + before[place:]
        made = entry(key_of(HMAC[0]), dotted, b"%d" % NOW, body)
        verdict = judged(list(zip(NAMES, (dotted, b"%d" % NOW, made), strict=True)), body, ring)
        assert isinstance(verdict, Rejected)
        assert verdict.cause is Cause.BAD_ID


@given(
    webhook_id=st.one_of(
        ids,
        st.integers(250, 260).map(lambda size: b"i" * size),
        st.builds(
            lambda start, odd, end: start + bytes([odd]) + end,
            st.from_regex(rb"[a-z]{0,5}", fullmatch=True),
            st.one_of(st.sampled_from(b"\x20\x21\x2d\x2e\x2f\x7e\x7f\x80"), st.integers(0, 255)),
            st.from_regex(rb"[a-z]{0,5}", fullmatch=True),
        ),
    )
)
def test_ids_are_1_to_256_visible_characters_although_they_were_signed(webhook_id: bytes) -> None:
    made = entry(key_of(HMAC[0]), webhook_id, b"%d" % NOW, BODY)
    headers = list(zip(NAMES, (webhook_id, b"%d" % NOW, made), strict=True))
    verdict = judged(headers, BODY, ring_of(HMAC[:1], KeyDerivation.STANDARD))
    visible = all(0x21 <= code <= 0x7E and code != 0x2E for code in webhook_id)
    if visible and 1 <= len(webhook_id) <= 256:
        assert verdict == Accepted(webhook_id.decode(), NOW, 0, KeyDerivation.STANDARD)
    else:
        assert isinstance(verdict, Rejected)
        assert verdict.cause is Cause.BAD_ID


@given(
    seconds=st.one_of(st.sampled_from([0, 9, 10, NOW, 10**12 - 1]), st.integers(0, 10**12 - 1)),
    spelling=st.sampled_from(
        [
            b"%d",
            b"0%d",
            b"00%d",
            b"+%d",
            b"-%d",
            b" %d",
            b"%d ",
            b"%d\n",
            b"%d.0",
            b"%d000000000000",
        ]
    ),
)
def test_a_timestamp_has_one_spelling_although_another_was_signed(
    seconds: int, spelling: bytes
) -> None:
    timestamp = spelling % seconds
    made = entry(key_of(HMAC[0]), b"msg_1", timestamp, BODY)
    headers = list(zip(NAMES, (b"msg_1", timestamp, made), strict=True))
    verdict = judged(headers, BODY, ring_of(HMAC[:1], KeyDerivation.STANDARD), seconds)
    if spelling == b"%d":
        assert verdict == Accepted("msg_1", seconds, 0, KeyDerivation.STANDARD)
    else:
        assert isinstance(verdict, Rejected)
        assert verdict.cause is Cause.BAD_TIMESTAMP


cases = st.sampled_from([bytes.lower, bytes.title, bytes.upper, bytes.swapcase])


@given(
    repeated=st.sampled_from(NAMES[:2]),
    other=st.one_of(st.none(), st.binary(max_size=9), st.just(b"%d" % (NOW + 1))),
    spellings=st.tuples(cases, cases, cases, cases),
    noise=st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=5)), max_size=3),
    data=st.data(),
)
def test_a_repeated_id_or_timestamp_is_refused_in_any_order(
    repeated: bytes,
    other: bytes | None,
    spellings: tuple,
    noise: list[tuple[bytes, bytes]],
    data: st.DataObject,
) -> None:
    noise = [(name, value) for name, value in noise if name.lower() not in NAMES]
    values = dict(
        zip(NAMES, (b"msg_1", b"%d" % NOW, genuine_text(b"msg_1", b"%d" % NOW)), strict=True)
    )
    pairs = [*values.items(), (repeated, values[repeated] if other is None else other)]
    spelled = [(spell(name), value) for spell, (name, value) in zip(spellings, pairs, strict=True)]
    headers = data.draw(st.permutations([*spelled, *noise]), "headers")
    ring = ring_of(HMAC[:1], KeyDerivation.STANDARD)
    verdict = judged(headers, BODY, ring)
    assert isinstance(verdict, Rejected)
    assert verdict.cause is Cause.REPEATED_HEADER
    assert repeated.decode() in verdict.detail
    # Without the repetition it is unchanged.
    single = [pair for pair in headers if pair is not spelled[-1]]
    assert isinstance(judged(single, BODY, ring), Accepted)


def genuine_text(webhook_id: bytes, timestamp: bytes) -> bytes:
    return genuine(HMAC[0], False, webhook_id, timestamp, BODY).text


@given(
    kept=st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
    spelling=cases,
    renamed=st.sampled_from([None, (b"webhook-", b"svix-"), (b"-", b"_"), (b"webhook-", b"x-")]),
    data=st.data(),
)
def test_every_missing_header_is_named_with_a_renamed_one(
    kept: list[bytes],
    spelling: type[bytes],
    renamed: tuple[bytes, bytes] | None,
    data: st.DataObject,
) -> None:
    values = dict(
        zip(NAMES, (b"msg_1", b"%d" % NOW, genuine_text(b"msg_1", b"%d" % NOW)), strict=True)
    )
    missing = [name for name in NAMES if name not in kept]
    pairs = [(spelling(name), values[name]) for name in kept]
    if renamed is not None:
        pairs += [(spelling(name.replace(*renamed)), values[name]) for name in missing]
    headers = data.draw(st.permutations(pairs), "headers")
    verdict = judged(headers, BODY, ring_of(HMAC[:1], KeyDerivation.STANDARD))
    hint = {
        (b"webhook-", b"svix-"): "svix-* headers are not read, have the sender use webhook-* ones",
        (
            b"-",
            b"_",
        ): "it was sent with an underscore, which is another name; find the program that "
        "renames it",
    }.get(renamed, "not a signed webhook, or a proxy drops the header")
    listed = ", ".join(name.decode() for name in missing)
    assert verdict == Rejected(Cause.MISSING_HEADER, f"{listed} missing: {hint}.")


@pytest.mark.parametrize("part", range(4))
@given(
    webhook_id=ids,
    body=bodies.filter(bool),
    ed25519=st.booleans(),
    bit=st.integers(0, 7),
    data=st.data(),
)
def test_no_bit_of_a_genuine_delivery_can_be_changed(
    part: int, webhook_id: bytes, body: bytes, ed25519: bool, bit: int, data: st.DataObject
) -> None:
    secret = PUBLIC[0] if ed25519 else HMAC[0]
    parts = [webhook_id, b"%d" % NOW, b"", body]
    parts[2] = genuine(secret, False, webhook_id, parts[1], body).text
    ring = ring_of([secret], KeyDerivation.AUTO)
    assert isinstance(judged(list(zip(NAMES, parts, strict=False)), parts[3], ring), Accepted)
    last = len(parts[part]) - 1
    position = data.draw(st.one_of(st.just(0), st.just(last), st.integers(0, last)), "position")
    changed = bytearray(parts[part])
    changed[position] ^= 1 << bit
    parts[part] = bytes(changed)
    # A tolerance that a changed bit cannot exceed: only the signature can detect it.
    verdict = judged(
        list(zip(NAMES, parts, strict=False)), parts[3], ring, tolerance_seconds=10**12
    )
    assert isinstance(verdict, Rejected)
