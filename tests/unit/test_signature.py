"""Reading, checking and making signatures: vectors, hostile inputs, secrets that cannot be used."""

import base64
import hashlib
import hmac
import sys

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sdk_trio.config import KeyDerivation, Secret
from sdk_trio.errors import OptionsValidationError, VerificationError
from sdk_trio.webhooks.signature import (
    Keyring,
    Match,
    SignatureEntry,
    new_secret,
    parse_signature_header,
    sign,
)

# Public test vectors of the Standard Webhooks and Svix projects; nothing is protected by them.
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
ID, TIMESTAMP, BODY = b"msg_p5jXN8AQM9LWM0D4loKWxJek", b"1614265330", b'{"test": 2432232314}'
STANDARD_SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
UTF8_SIGNATURE = "v1,TcxlhK9b6UD6iVI1ZU2tTqp8PEVfYRseNNfa6b+LcUg="
PUBLIC_KEY = "whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4="
PRIVATE_KEY = (
    "whsk_6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbfVKIDij2HKpMKkioLlX0dRqSKJp4AJ6p9lMicMFs6Kvg=="
)
ED25519_SIGNATURE = (
    "v1a,hnO3f9T8Ytu9HwrXslvumlUpqtNVqkhqw/enGzPCXe5BdqzCInXqYXFymVJaA7AZdpXwVLPo3mNl8EM+m7TBAg=="
)

GOOD = STANDARD_SIGNATURE.encode()
GOOD_VALUE = GOOD.removeprefix(b"v1,")
GOOD_DIGEST = base64.b64decode(GOOD_VALUE)
GOOD_ENTRY = SignatureEntry(b"v1", GOOD_DIGEST)
OTHER_SECRET = new_secret(b"another secret, of 32 bytes size")


def keyring(*secrets: str, derivation: KeyDerivation = KeyDerivation.STANDARD) -> Keyring:
    return Keyring.from_secrets([Secret(text) for text in secrets], derivation)


def match(ring: Keyring, header: str) -> Match | None:
    return ring.match(ID, TIMESTAMP, BODY, parse_signature_header(header.encode()))


class TestVectors:
    def test_decoded_key(self) -> None:
        assert match(keyring(SECRET), STANDARD_SIGNATURE) == Match(0, "v1", KeyDerivation.STANDARD)
        assert sign(SECRET, ID.decode(), int(TIMESTAMP), BODY) == STANDARD_SIGNATURE

    def test_utf8_key(self) -> None:
        ring = keyring(SECRET, derivation=KeyDerivation.UTF8)
        assert match(ring, UTF8_SIGNATURE) == Match(0, "v1", KeyDerivation.UTF8)
        made = sign(SECRET, ID.decode(), int(TIMESTAMP), BODY, derivation=KeyDerivation.UTF8)
        assert made == UTF8_SIGNATURE

    def test_auto_accepts_both_and_reports_which(self) -> None:
        ring = keyring(SECRET, derivation=KeyDerivation.AUTO)
        assert match(ring, STANDARD_SIGNATURE) == Match(0, "v1", KeyDerivation.STANDARD)
        assert match(ring, UTF8_SIGNATURE) == Match(0, "v1", KeyDerivation.UTF8)

    def test_one_derivation_does_not_accept_the_other(self) -> None:
        assert match(keyring(SECRET), UTF8_SIGNATURE) is None
        utf8 = keyring(SECRET, derivation=KeyDerivation.UTF8)
        assert match(utf8, STANDARD_SIGNATURE) is None

    def test_ed25519(self) -> None:
        assert match(keyring(PUBLIC_KEY), ED25519_SIGNATURE) == Match(0, "v1a", None)
        assert sign(PRIVATE_KEY, ID.decode(), int(TIMESTAMP), BODY) == ED25519_SIGNATURE

    def test_ed25519_seed_alone_signs_the_same(self) -> None:
        seed = base64.b64decode(PRIVATE_KEY.removeprefix("whsk_"))[:32]
        secret = "whsk_" + base64.b64encode(seed).decode()
        assert sign(Secret(secret), ID.decode(), int(TIMESTAMP), BODY) == ED25519_SIGNATURE

    def test_padding_may_be_missing(self) -> None:
        (entry,) = parse_signature_header(ED25519_SIGNATURE.rstrip("=").encode())
        assert keyring(PUBLIC_KEY).match(ID, TIMESTAMP, BODY, [entry]) is not None
        seed = base64.b64encode(base64.b64decode(PRIVATE_KEY.removeprefix("whsk_"))[:32])
        for key in (PRIVATE_KEY.rstrip("="), "whsk_" + seed.decode().rstrip("=")):
            assert sign(key, ID.decode(), int(TIMESTAMP), BODY) == ED25519_SIGNATURE

    def test_second_hmac(self) -> None:
        secret = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"
        body = b'{"email":"test@example.com","username":"test_user"}'
        made = sign(secret, "msg_27UH4WbU6Z5A5EzD8u03UvzRbpk", 1649367553, body)
        assert made == "v1,tZ1I4/hDygAJgO5TYxiSd6Sd0kDW6hPenDe+bTa3Kkw="


class TestWellFormedHeaders:
    @pytest.mark.parametrize(
        "header",
        [
            GOOD,
            GOOD.rstrip(b"="),
            GOOD.replace(b",", b" "),
            GOOD.replace(b",", b"\t"),
            GOOD.replace(b",", b", \t ,"),
            b" \t " + GOOD + b" \t ",
            b"," + GOOD + b",",
            b"v1,x " + GOOD,
            b"v1,x," + GOOD,
            b"v1,x, " + GOOD,
            b"v1,x\t" + GOOD,
            b"v1,x  " + GOOD,
            b"v1 " + GOOD,
            b"v1, " + GOOD,
            b"v2," + GOOD_VALUE + b" " + GOOD,
            b"v1a," + GOOD_VALUE + b" " + GOOD,
            b"stray " + GOOD + b" stray",
            b"\xa0 \xff,\xfe v1,\xff " + GOOD,
            b"v1,AAA= " + GOOD,
        ],
        ids=repr,
    )
    def test_the_good_entry_is_found(self, header: bytes) -> None:
        assert parse_signature_header(header) == (GOOD_ENTRY,)

    @pytest.mark.parametrize("start", [b"v1", b"v1a", b"v22", b"v", b"vv", b"w1", b"u1", b"1"])
    def test_a_value_that_begins_like_a_version_is_a_value(self, start: bytes) -> None:
        value = start.ljust(43, b"A") + b"="
        entry = SignatureEntry(b"v1", base64.b64decode(value))
        assert parse_signature_header(b"v1," + value) == (entry,)
        # Among others as well: not every token that begins with a v opens an entry.
        assert parse_signature_header(GOOD + b" v1," + value) == (GOOD_ENTRY, entry)
        assert parse_signature_header(b"v1," + value + b" " + GOOD) == (entry, GOOD_ENTRY)

    @pytest.mark.parametrize("separator", [b" ", b",", b", ", b"\t", b"  ", b" , "])
    def test_every_usable_entry_is_kept_in_order(self, separator: bytes) -> None:
        header = separator.join([GOOD, UTF8_SIGNATURE.encode(), ED25519_SIGNATURE.encode()])
        entries = parse_signature_header(header)
        assert [entry.version for entry in entries] == [b"v1", b"v1", b"v1a"]
        assert entries[0] == GOOD_ENTRY
        assert entries[2].value == base64.b64decode(ED25519_SIGNATURE.removeprefix("v1a,"))


class TestHostileHeaders:
    def test_more_than_four_different_ed25519_entries_are_refused_whole(self) -> None:
        values = [base64.b64encode(bytes([number]) * 64) for number in range(5)]
        four = b" ".join(b"v1a," + value for value in values[:4])
        assert len(parse_signature_header(four + b" " + four)) == 8
        with pytest.raises(VerificationError, match="more than 4 entries of v1a"):
            parse_signature_header(GOOD + b" " + four + b" v1a," + values[4])

    def test_equal_ed25519_entries_are_checked_once_a_key(self) -> None:
        checks = []

        class Counting:
            def made(self, signature: bytes, content: bytes) -> bool:
                checks.append(signature)
                return False

        ring = keyring(PUBLIC_KEY, PUBLIC_KEY)
        ring._ed25519_keys = tuple((match, Counting()) for match, _ in ring._ed25519_keys)
        entry = SignatureEntry(b"v1a", bytes(64))
        assert ring.match(b"id", b"1", b"body", [entry] * 30) is None
        assert len(checks) == 2

    @pytest.mark.parametrize(
        "header",
        [
            b"",
            b" ",
            b",",
            b"v1",
            b"v1,",
            b"v1,,",
            b",x",
            GOOD_VALUE,
            b"," + GOOD_VALUE,
            b"V1," + GOOD_VALUE,
            b"v2," + GOOD_VALUE,
            b"v1b," + GOOD_VALUE,
            b"v1aa," + GOOD_VALUE,
            b"v," + GOOD_VALUE,
            b"v01," + GOOD_VALUE,
            b"v1=" + GOOD_VALUE,
            b"v1:" + GOOD_VALUE,
            b"v1" + GOOD_VALUE,
            "v\u0661,".encode() + GOOD_VALUE,
            b"v1,x " + GOOD_VALUE,
            b"v1," + GOOD_VALUE[:-2],
            b"v1," + GOOD_VALUE[:-4],
            b"v1," + GOOD_VALUE + b"=",
            b"v1," + GOOD_VALUE + b"===",
            b"v1," + GOOD_VALUE + b"AAAA",
            b"v1,=" + GOOD_VALUE,
            b"v1,====",
            b"v1,!" + GOOD_VALUE,
            b"v1," + GOOD_VALUE[:20] + b"!" + GOOD_VALUE[20:],
            b"v1," + GOOD_VALUE[:20] + b"\n" + GOOD_VALUE[20:],
            b"v1," + GOOD_VALUE + b"\n",
            b"v1\n," + GOOD_VALUE,
            b"v1\x0b" + GOOD_VALUE,
            b"v1\xa0" + GOOD_VALUE,
            b"v1,\xa0" + GOOD_VALUE,
            b"v1," + GOOD_VALUE + b"\xa0",
            b"v1," + GOOD_VALUE.replace(b"+", b"-").replace(b"/", b"_"),
            # As long as "v1," and its value, and something else.
            b"1,x" + GOOD_VALUE,
            b"xv1" + GOOD_VALUE,
            b"v1x" + GOOD_VALUE,
            b"v,1" + GOOD_VALUE,
            b",,," + GOOD_VALUE,
            b"v1," + base64.b64encode(GOOD_DIGEST[:31]),
            b"v1," + base64.b64encode(GOOD_DIGEST + b"\0"),
            b"v1," + GOOD_DIGEST.hex().encode(),
            b"v1a," + GOOD_VALUE,
            ED25519_SIGNATURE.replace("v1a", "v1").encode(),
        ],
        ids=repr,
    )
    def test_no_entry_is_usable(self, header: bytes) -> None:
        assert parse_signature_header(header) == ()

    def test_only_the_canonical_last_digit_is_accepted(self) -> None:
        # "E=" and "F=" end in the same four bits; a lenient decoder takes both for one signature.
        assert base64.b64decode(GOOD_VALUE[:-2] + b"F=") == GOOD_DIGEST
        assert parse_signature_header(b"v1," + GOOD_VALUE[:-2] + b"F=") == ()
        assert parse_signature_header(b"v1," + GOOD_VALUE[:-2] + b"F") == ()

    def test_32_entries_are_read_and_33_are_refused(self) -> None:
        assert parse_signature_header(b"v1,x " * 31 + GOOD) == (GOOD_ENTRY,)
        with pytest.raises(VerificationError, match="more than 32 entries"):
            parse_signature_header(b"v1,x " * 32 + GOOD)

    @pytest.mark.parametrize("filler", [b"v1,x ", b"v2,x ", b"v1 ", b"v999z,x "])
    def test_entries_of_every_kind_count_at_any_position(self, filler: bytes) -> None:
        for header in (filler * 40 + GOOD, GOOD + b" " + filler * 40):
            with pytest.raises(VerificationError, match="more than 32 entries"):
                parse_signature_header(header)

    def test_a_good_entry_after_1000_bad_ones_is_refused(self) -> None:
        with pytest.raises(VerificationError, match="bad_signature_header"):
            parse_signature_header(b"v1,x " * 1000 + GOOD)

    def test_8_kib_are_read_and_a_byte_more_is_refused(self) -> None:
        padding = b" " * (8192 - len(GOOD))
        assert parse_signature_header(padding + GOOD) == (GOOD_ENTRY,)
        with pytest.raises(VerificationError, match="longer than 8192 bytes"):
            parse_signature_header(b" " + padding + GOOD)

    def test_a_header_of_a_megabyte_is_refused(self) -> None:
        with pytest.raises(VerificationError, match="longer than 8192 bytes"):
            parse_signature_header(b"v1," + b"A" * 2**20)


class TestKeyring:
    def test_the_index_is_the_position_in_the_configured_order(self) -> None:
        assert match(keyring(OTHER_SECRET, SECRET), STANDARD_SIGNATURE) == Match(
            1, "v1", KeyDerivation.STANDARD
        )

    def test_the_first_of_two_matching_secrets_is_named(self) -> None:
        both = f"{ED25519_SIGNATURE} {STANDARD_SIGNATURE}"
        for secrets, index, version in [
            ((PUBLIC_KEY, SECRET), 0, "v1a"),
            ((SECRET, PUBLIC_KEY), 0, "v1"),
            ((OTHER_SECRET, SECRET, SECRET), 1, "v1"),
        ]:
            found = match(keyring(*secrets), both)
            assert found is not None
            assert (found.index, found.version) == (index, version)

    def test_many_different_v1_entries_are_not_too_many_of_the_other_kind(self) -> None:
        others = [b"v1," + base64.b64encode(b"%032d" % number) for number in range(6)]
        header = b" ".join([*others, ED25519_SIGNATURE.encode(), GOOD])
        assert len(parse_signature_header(header)) == 8
        for secret, version in ((SECRET, "v1"), (PUBLIC_KEY, "v1a")):
            found = match(keyring(secret), header.decode())
            assert found is not None
            assert found.version == version

    def test_a_good_entry_last_of_many_matches(self) -> None:
        wrong = sign(OTHER_SECRET, ID.decode(), int(TIMESTAMP), BODY)
        assert match(keyring(SECRET), f"{wrong} " * 31 + STANDARD_SIGNATURE) is not None

    @pytest.mark.parametrize("version", [b"v0", b"v", b"v1a", b"v1b", b"v2", b"V1", b""])
    def test_the_entry_s_version_decides_not_its_length(self, version: bytes) -> None:
        assert keyring(SECRET).match(ID, TIMESTAMP, BODY, [GOOD_ENTRY]) is not None
        mislabelled = SignatureEntry(version, GOOD_DIGEST)
        assert keyring(SECRET).match(ID, TIMESTAMP, BODY, [mislabelled]) is None

    @pytest.mark.parametrize("version", [b"v0", b"v1", b"v1b", b"v2", b"V1a", b""])
    def test_the_same_holds_for_ed25519(self, version: bytes) -> None:
        (entry,) = parse_signature_header(ED25519_SIGNATURE.encode())
        assert keyring(PUBLIC_KEY).match(ID, TIMESTAMP, BODY, [entry]) is not None
        mislabelled = SignatureEntry(version, entry.value)
        assert keyring(PUBLIC_KEY).match(ID, TIMESTAMP, BODY, [mislabelled]) is None

    def test_a_key_longer_than_a_block_is_hashed_first(self) -> None:
        # More than 64 bytes: HMAC's own rule for long keys, checked against the standard library.
        for size in (63, 64, 65, 200):
            text = "k" * size
            expected = hmac.digest(
                text.encode(), b"%b.%b.%b" % (ID, TIMESTAMP, BODY), hashlib.sha256
            )
            header = f"v1,{base64.b64encode(expected).decode()}"
            assert match(keyring(text, derivation=KeyDerivation.UTF8), header) is not None

    def test_one_ring_serves_many_deliveries(self) -> None:
        ring = keyring(SECRET, OTHER_SECRET, derivation=KeyDerivation.AUTO)
        for number in range(50):
            body = b"%d" % number
            header = sign(OTHER_SECRET, "id", number, body)
            found = ring.match(b"id", b"%d" % number, body, parse_signature_header(header.encode()))
            assert found == Match(1, "v1", KeyDerivation.STANDARD)

    @pytest.fixture
    def compared(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, bytes]]:
        """The pairs of compared values."""
        pairs: list[tuple[bytes, bytes]] = []

        def recording(one: bytes, other: bytes) -> bool:
            pairs.append((one, other))
            return hmac.compare_digest(one, other)

        monkeypatch.setattr("sdk_trio.webhooks.signature.compare_digest", recording)
        return pairs

    @pytest.mark.parametrize("entries", [1, 4])
    def test_a_forged_delivery_is_compared_with_every_key_whichever_has_matched_last(
        self, compared: list[tuple[bytes, bytes]], entries: int
    ) -> None:
        ring = keyring(SECRET, OTHER_SECRET, SECRET)
        forged = " ".join(
            sign("whsec_Zm9yZ2VkIG9mIHRoaXMgbGVuZ3Ro", ID.decode(), int(TIMESTAMP), b"%d" % number)
            for number in range(entries)
        )
        for matched_before in (None, SECRET, OTHER_SECRET):
            if matched_before is not None:
                assert match(ring, sign(matched_before, ID.decode(), int(TIMESTAMP), BODY))
            compared.clear()
            assert match(ring, forged) is None
            assert len(compared) == 3 * entries
            assert len(set(compared)) == 2 * entries, "one of the keys is there twice"

    def test_the_key_that_matched_last_is_tried_first_and_ends_the_search(
        self, compared: list[tuple[bytes, bytes]]
    ) -> None:
        ring = keyring(OTHER_SECRET, SECRET)
        others = sign(OTHER_SECRET, ID.decode(), int(TIMESTAMP), BODY)
        for header, index, comparisons in [
            (STANDARD_SIGNATURE, 1, 2),
            (STANDARD_SIGNATURE, 1, 1),
            (STANDARD_SIGNATURE, 1, 1),
            (others, 0, 2),
            (others, 0, 1),
        ]:
            compared.clear()
            found = match(ring, header)
            assert found is not None
            assert (found.index, len(compared)) == (index, comparisons)

    def test_the_last_match_changes_no_result(self) -> None:
        ring = keyring(OTHER_SECRET, SECRET, SECRET, PUBLIC_KEY)
        others = sign(OTHER_SECRET, ID.decode(), int(TIMESTAMP), BODY)
        both = f"{STANDARD_SIGNATURE} {others}"
        expected = [
            (both, 0),
            (STANDARD_SIGNATURE, 1),
            (f"{ED25519_SIGNATURE} {STANDARD_SIGNATURE}", 1),
            (ED25519_SIGNATURE, 3),
            (both, 0),
            (others, 0),
        ]
        for header, index in [*expected, *reversed(expected)]:
            found = match(ring, header)
            assert found is not None
            assert found.index == index

    def test_every_ed25519_key_is_tried_on_its_entries(self) -> None:
        other = sign("whsk_" + base64.b64encode(b"s" * 32).decode(), "id", 1, b"")
        assert match(keyring(PUBLIC_KEY), f"{other} {ED25519_SIGNATURE}") is not None
        assert match(keyring(PUBLIC_KEY), other) is None
        assert match(keyring(SECRET), ED25519_SIGNATURE) is None
        assert match(keyring(PUBLIC_KEY), STANDARD_SIGNATURE) is None

    def test_the_first_of_two_matching_ed25519_secrets_is_named(self) -> None:
        private = Ed25519PrivateKey.from_private_bytes(b"s" * 32)
        other_key = "whpk_" + base64.b64encode(private.public_key().public_bytes_raw()).decode()
        seed = "whsk_" + base64.b64encode(b"s" * 32).decode()
        both = f"{sign(seed, ID.decode(), int(TIMESTAMP), BODY)} {ED25519_SIGNATURE}"
        for secrets in [(PUBLIC_KEY, other_key), (other_key, PUBLIC_KEY)]:
            found = match(keyring(*secrets), both)
            assert found is not None
            assert found.index == 0

    def test_repr_shows_no_key(self) -> None:
        text = repr(keyring(SECRET, PUBLIC_KEY))
        assert text == "Keyring(1 HMAC, 1 ed25519 keys)"
        assert "g0hM" not in repr(GOOD_ENTRY)

    def test_nothing_can_be_added_to_a_ring(self) -> None:
        assert not hasattr(keyring(SECRET), "__dict__")


class TestHostileSecrets:
    @pytest.mark.parametrize(
        "text",
        [
            "",
            "   ",
            "whsec_",
            "whsec_" + base64.b64encode(b"k" * 9).decode(),
            "whsec_" + SECRET,
            SECRET + "\n",
            " " + SECRET,
            "whpk_",
            "whpk_" + base64.b64encode(b"k" * 31).decode(),
            PRIVATE_KEY,
        ],
        ids=repr,
    )
    @pytest.mark.parametrize("derivation", KeyDerivation)
    def test_startup_fails_with_the_key_s_path(self, text: str, derivation: KeyDerivation) -> None:
        with pytest.raises(OptionsValidationError) as caught:
            keyring(SECRET, text, derivation=derivation)
        (problem,) = caught.value.problems
        assert problem.key == "Sdk:Webhooks:Secrets"
        assert "secret 2 of 2" in problem.message
        assert SECRET not in str(caught.value)

    @pytest.mark.parametrize("derivation", [KeyDerivation.STANDARD, KeyDerivation.AUTO])
    def test_15_bytes_of_decoded_key_are_too_few(self, derivation: KeyDerivation) -> None:
        with pytest.raises(OptionsValidationError, match="15 bytes"):
            keyring("whsec_" + base64.b64encode(b"k" * 15).decode(), derivation=derivation)
        keyring("whsec_" + base64.b64encode(b"k" * 16).decode(), derivation=derivation)

    def test_no_secret_at_all_fails(self) -> None:
        with pytest.raises(OptionsValidationError, match="no secret is configured"):
            keyring()

    def test_every_bad_secret_is_listed(self) -> None:
        with pytest.raises(OptionsValidationError) as caught:
            keyring("", SECRET, "whsec_")
        assert len(caught.value.problems) == 2

    def test_text_that_is_not_base64_fails_under_standard_and_is_utf8_under_auto(self) -> None:
        text = "whsec_not*base64*but*long*enough"
        with pytest.raises(OptionsValidationError, match="not base64"):
            keyring(text, derivation=KeyDerivation.STANDARD)
        made = sign(text, ID.decode(), int(TIMESTAMP), BODY, derivation=KeyDerivation.UTF8)
        found = match(keyring(text, derivation=KeyDerivation.AUTO), made)
        assert found == Match(0, "v1", KeyDerivation.UTF8)

    def test_a_secret_without_prefix_and_a_duplicate_work(self) -> None:
        bare = SECRET.removeprefix("whsec_")
        found = match(keyring(bare, bare), STANDARD_SIGNATURE)
        assert found == Match(0, "v1", KeyDerivation.STANDARD)


class TestSigning:
    @pytest.mark.parametrize(
        "webhook_id", ["", "a.b", "a b", "a\r\nb", "\0", "é", "\ud800", "i" * 257]
    )
    def test_an_id_that_no_receiver_accepts_is_refused(self, webhook_id: str) -> None:
        with pytest.raises(ValueError, match="webhook_id"):
            sign(SECRET, webhook_id, 1, b"")

    @pytest.mark.parametrize("timestamp", [-1, 10**12])
    def test_a_timestamp_out_of_range_is_refused(self, timestamp: int) -> None:
        with pytest.raises(ValueError, match="timestamp"):
            sign(SECRET, "id", timestamp, b"")

    @pytest.mark.parametrize(
        ("secret", "complaint"),
        [
            ("whsec_", "the secret is only the prefix"),
            ("", "the secret is empty"),
            (PUBLIC_KEY, "the secret is a public key"),
            ("whsk_*", "not base64"),
            ("whsk_AAAA", "32 bytes"),
            ("whsk_" + base64.b64encode(b"s" * 64).decode(), "not one key pair"),
        ],
    )
    def test_a_secret_that_cannot_sign_is_refused(self, secret: str, complaint: str) -> None:
        with pytest.raises(ValueError, match=complaint):
            sign(secret, "id", 1, b"")

    def test_auto_signs_with_the_decoded_key_if_there_is_one(self) -> None:
        auto = KeyDerivation.AUTO
        made = sign(Secret(SECRET), ID.decode(), int(TIMESTAMP), BODY, derivation=auto)
        assert made == STANDARD_SIGNATURE

    def test_a_new_secret_is_32_bytes_with_the_prefix(self) -> None:
        secret = new_secret(bytes(range(32)))
        assert secret == "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
        for size in (0, 31, 33):
            with pytest.raises(ValueError, match="32 random bytes"):
                new_secret(bytes(size))


class TestWithoutTheExtra:
    @pytest.fixture(autouse=True)
    def _without_cryptography(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "cryptography", None)

    def test_hmac_needs_no_extra(self) -> None:
        assert match(keyring(SECRET), STANDARD_SIGNATURE) is not None

    def test_a_public_key_fails_at_startup_and_names_the_extra(self) -> None:
        with pytest.raises(OptionsValidationError) as caught:
            keyring(SECRET, PUBLIC_KEY, "")
        first, second = (problem.message for problem in caught.value.problems)
        assert first == (
            "secret 2 of 3 (Sdk:Webhooks:Secret counts first) is an ed25519 key, and the package "
            "for these keys is missing: pip install 'sdk-trio[ed25519]'"
        )
        assert second.startswith("secret 3 of 3")

    def test_signing_names_the_extra(self) -> None:
        message = (
            "the secret is an ed25519 key, and the package for these keys is missing: pip install"
        )
        with pytest.raises(ImportError, match=rf"^{message} 'sdk-trio\[ed25519\]'$"):
            sign(PRIVATE_KEY, "id", 1, b"")
