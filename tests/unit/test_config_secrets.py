import base64
import random

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.config import KeyDerivation, ParsedSecret, Secret, parse_secret
from sdk_trio.config.secret import is_forgeable, is_public_key

# A test value, and a published key.
SECRET = "whsec_z6fMa4YWa088j5EP9gJ8LDaGxrBzHpIg"
PUBLIC_KEY = "whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4="

AUTO, STANDARD, UTF8 = KeyDerivation.AUTO, KeyDerivation.STANDARD, KeyDerivation.UTF8


def encoded(size: int) -> str:
    return base64.b64encode(bytes(range(size))).decode()


def test_auto_tries_the_decoded_key_and_then_the_whole_text() -> None:
    keys = parse_secret(SECRET, AUTO).hmac_keys
    decoded = base64.b64decode(SECRET.removeprefix("whsec_"))
    assert keys == ((STANDARD, decoded), (UTF8, SECRET.encode()))


@pytest.mark.parametrize("derivation", [STANDARD, UTF8])
def test_one_derivation_gives_one_key(derivation: KeyDerivation) -> None:
    assert [kind for kind, _ in parse_secret(SECRET, derivation).hmac_keys] == [derivation]


def test_a_public_key_is_not_an_hmac_key() -> None:
    parsed = parse_secret(PUBLIC_KEY, AUTO)
    assert parsed.hmac_keys == ()
    assert parsed.ed25519_public_key == base64.b64decode(PUBLIC_KEY.removeprefix("whpk_"))


def test_padding_may_be_missing() -> None:
    text = "whsec_" + encoded(25)
    keys = parse_secret(text.rstrip("="), STANDARD).hmac_keys
    assert keys == parse_secret(text, STANDARD).hmac_keys


def test_junk_inside_base64_is_not_skipped() -> None:
    text = f"whsec_{encoded(24)[:8]}----{encoded(24)[8:]}"
    assert parse_secret(text, AUTO).hmac_keys == ((UTF8, text.encode()),)


def test_text_that_is_not_base64_is_the_key_itself_under_auto() -> None:
    text = "whsec_not base64 but long enough!"
    assert parse_secret(text, AUTO).hmac_keys == ((UTF8, text.encode()),)
    with pytest.raises(ValueError, match="not base64"):
        parse_secret(text, STANDARD)


def test_a_missing_prefix_is_a_warning() -> None:
    assert not parse_secret(SECRET, AUTO).warnings
    assert "whsec_" in parse_secret("an-old-secret-of-some-length", AUTO).warnings[0]


@pytest.mark.parametrize("derivation", [AUTO, STANDARD])
def test_a_version_before_the_prefix_is_dropped(derivation: KeyDerivation) -> None:
    shown = parse_secret(f"v1,{SECRET}", derivation)
    assert shown == parse_secret(SECRET, derivation)
    assert not shown.warnings


@pytest.mark.parametrize(
    ("text", "derivation", "reason"),
    [
        (f"v1,{SECRET}", UTF8, "KeyDerivation to Auto or Standard"),
        (f"v1a,{PUBLIC_KEY}", AUTO, "version"),
        (f"v1,{PUBLIC_KEY}", AUTO, "version"),
        (f"v1,{SECRET}|v1,{SECRET}", AUTO, "several secrets"),
        (f"{SECRET},{SECRET}", AUTO, "several secrets"),
    ],
)
def test_a_version_that_would_spoil_the_key_is_named(
    text: str, derivation: KeyDerivation, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_secret(text, derivation)


def test_a_text_of_the_merchants_own_is_no_warning_under_utf8() -> None:
    assert not parse_secret("an-old-secret-of-some-length", UTF8).warnings
    (warning,) = parse_secret("an-old-secret-of-some-length", AUTO).warnings
    assert "KeyDerivation to Utf8" in warning


def test_a_plain_word_that_happens_to_be_base64_is_the_key_itself() -> None:
    assert parse_secret("correcthorsebattery", AUTO).hmac_keys == ((UTF8, b"correcthorsebattery"),)


@pytest.mark.parametrize("derivation", KeyDerivation)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        (" \t", "empty"),
        ("whsec_", "is only the prefix"),
        ("whsec_whsec_" + encoded(24), "two prefixes"),
        (SECRET + "\n", "line break"),
        (" " + SECRET, "white space"),
        ("whsec_" + "a" * 20 + "\0" + "a" * 20, "control"),
        ("whsk_" + encoded(64), "private"),
        ("whpk_" + encoded(31), "32-byte"),
        ("whpk_", "32-byte"),
        ("whsec_" + encoded(8), "at least 16"),
        ("whsec_" + "\ud800" * 20, "Unicode"),
    ],
)
def test_unusable_secrets(text: str, reason: str, derivation: KeyDerivation) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_secret(text, derivation)


@pytest.mark.parametrize("derivation", [AUTO, STANDARD])
def test_the_least_key_is_sixteen_bytes(derivation: KeyDerivation) -> None:
    assert parse_secret("whsec_" + encoded(16), derivation).hmac_keys
    with pytest.raises(ValueError, match="15 bytes"):
        parse_secret("whsec_" + encoded(15), derivation)


@given(st.text(), st.sampled_from(KeyDerivation))
def test_any_text_gives_keys_or_a_reason_that_does_not_quote_it(
    text: str, derivation: KeyDerivation
) -> None:
    parsed = parsed_or_reason(text, derivation)
    if isinstance(parsed, str):
        assert len(text) < 8 or text not in parsed
        return
    assert parsed.hmac_keys or parsed.ed25519_public_key
    assert all(len(key) >= 16 for _, key in parsed.hmac_keys)
    assert len(text) < 8 or text not in repr(parsed)


def parsed_or_reason(text: str, derivation: KeyDerivation) -> ParsedSecret | str:
    try:
        return parse_secret(text, derivation)
    except ValueError as error:
        return str(error)


def test_a_secret_does_not_show_itself() -> None:
    secret = Secret(SECRET)
    shown = f"{secret!r} {secret!s} {secret} {secret:>20} {[secret]} {'%s' % secret}"  # noqa: UP031 - one of the ways to leak
    assert "z6fMa4Y" not in shown
    assert secret.reveal() == SECRET
    assert secret == Secret(SECRET)
    assert hash(secret) == hash(Secret(SECRET))
    assert secret != Secret("other")
    assert secret != SECRET


def raw_public_key(seed: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


#: Every encoding of a point of small order (RFC 7748, section 7, has the reason for refusing them).
SMALL_ORDER = [
    bytes([1, *[0] * 31]),
    bytes(32),
    bytes([*[0] * 31, 0x80]),
    (2**255 - 20).to_bytes(32, "little"),
    *(
        bytes.fromhex(f"{start}{end}")
        for start in (
            "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc",
            "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03",
        )
        for end in (("05", "85") if start.startswith("26") else ("7a", "fa"))
    ),
]


@given(st.binary(min_size=32, max_size=32))
def test_a_public_key_is_identified_by_its_point(seed: bytes) -> None:
    """Compare keys with those of an independent library, which has its own curve arithmetic."""
    key = raw_public_key(seed)
    assert is_public_key(key)
    assert not is_forgeable(key)
    parsed = parse_secret(f"whpk_{base64.b64encode(key).decode()}", AUTO)
    assert parsed.ed25519_public_key == key
    for derivation in (AUTO, STANDARD):
        with pytest.raises(ValueError, match="write whpk_"):
            parse_secret(base64.b64encode(key).decode(), derivation)
    assert parse_secret(base64.b64encode(key).decode(), UTF8).hmac_keys


@pytest.mark.parametrize("key", SMALL_ORDER, ids=bytes.hex)
def test_a_key_of_small_order_is_refused(key: bytes) -> None:
    assert is_forgeable(key)
    assert not is_public_key(key)
    with pytest.raises(ValueError, match="is not a valid ed25519 public key"):
        parse_secret(f"whpk_{base64.b64encode(key).decode()}", AUTO)


@given(st.binary(max_size=40))
def test_any_bytes_are_judged(encoded: bytes) -> None:
    assert not (is_public_key(encoded) and is_forgeable(encoded))
    if len(encoded) != 32:
        assert is_forgeable(encoded)


@given(st.integers(16, 64), st.integers())
def test_a_key_of_chance_is_not_guessable(length: int, seed: int) -> None:
    text = base64.b64encode(random.Random(seed).randbytes(length)).decode()
    parsed = parse_secret(f"whsec_{text}", AUTO)
    assert parsed.guessable is None
    assert any("bytes of key" in warning for warning in parsed.warnings) is (length < 24)


@given(st.binary(min_size=1, max_size=15), st.integers(16, 64))
def test_a_repeated_key_is_guessable(part: bytes, length: int) -> None:
    key = (part * 64)[: max(length, 2 * len(part))]
    parsed = parse_secret(f"whsec_{base64.b64encode(key).decode()}", STANDARD)
    assert "pattern" in (parsed.guessable or "")


@pytest.mark.parametrize("form", ["{}", "whsec_{}"])
@pytest.mark.parametrize("derivation", [AUTO, STANDARD, UTF8])
def test_a_published_secret_is_guessable(form: str, derivation: KeyDerivation) -> None:
    for body in ("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "C2FVsBQIhrscChlQIMV+b5sSYspob7oD"):
        parsed = parse_secret(form.format(body), derivation)
        assert "published" in (parsed.guessable or "")


@pytest.mark.parametrize("quote", ["'", '"', "`"])
def test_quotes_of_some_other_syntax_are_named(quote: str) -> None:
    for text in (f"{quote}{SECRET}{quote}", f"{quote}a text of some length{quote}"):
        with pytest.raises(ValueError, match="remove both quotes"):
            parse_secret(text, AUTO)
    assert parse_secret(f"{quote}a text of some length", AUTO).hmac_keys
