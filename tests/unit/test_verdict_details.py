"""The exact words for operators: causes in the log, and the sentences beside them."""

import base64
import re

import msgspec
import pytest

from sdk_trio.config import KeyDerivation, Secret
from sdk_trio.errors import OptionsValidationError, VerificationError
from sdk_trio.webhooks.signature import (
    Keyring,
    SignatureEntry,
    new_secret,
    parse_signature_header,
    sign,
)
from sdk_trio.webhooks.verdict import Accepted, Cause, Delivery, Rejected, verify_delivery

SECRET = new_secret(b"k" * 32)
# A public test vector of the Svix project.
PUBLIC_KEY = "whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4="
ID, NOW, BODY = "msg_1", 1_700_000_000, b"{}"
SIGNATURE = sign(SECRET, ID, NOW, BODY).encode()
OTHER_V1A = b"v1a," + base64.b64encode(b"s" * 64)

Headers = list[tuple[bytes, bytes]]


def headers(**changes: bytes | None) -> Headers:
    """The three headers, some with another value; None leaves one out."""
    values = {b"id": ID.encode(), b"timestamp": b"%d" % NOW, b"signature": SIGNATURE}
    values |= {name.encode(): value for name, value in changes.items()}
    return [(b"webhook-" + name, value) for name, value in values.items() if value is not None]


def rejected(
    sent: Headers, *secrets: str, body: bytes = BODY, now: float = NOW, tolerance: int = 300
) -> tuple[str, str]:
    ring = Keyring.from_secrets([Secret(text) for text in secrets or (SECRET,)], KeyDerivation.AUTO)
    judged = verify_delivery(Delivery(sent, body, now), ring, tolerance_seconds=tolerance)
    assert isinstance(judged, Rejected)
    return judged.cause.value, judged.detail


def test_the_causes_are_a_closed_set() -> None:
    assert [cause.value for cause in Cause] == [
        "missing_header",
        "repeated_header",
        "bad_id",
        "bad_timestamp",
        "too_old",
        "too_new",
        "bad_signature_header",
        "no_match",
        "not_an_event",
    ]


@pytest.mark.parametrize(
    ("sent", "cause", "detail"),
    [
        (
            headers() + headers(timestamp=None, signature=None),
            "repeated_header",
            "webhook-id was sent more than once: a proxy that adds headers, or an attempt to "
            "confuse.",
        ),
        (
            headers() + headers(id=None, signature=None),
            "repeated_header",
            "webhook-timestamp was sent more than once: a proxy that adds headers, or an attempt "
            "to confuse.",
        ),
        (
            headers(id=b"a.b"),
            "bad_id",
            "webhook-id must be 1 to 256 visible ASCII characters without a dot.",
        ),
        (
            headers(signature=b"v1"),
            "bad_signature_header",
            "webhook-signature holds no well-formed v1 or v1a entry (v1, a comma, base64 of 32 "
            "bytes).",
        ),
        (
            headers(signature=b" " * 8193),
            "bad_signature_header",
            "webhook-signature is longer than 8192 bytes.",
        ),
        (
            headers(signature=b"v1,x " * 33),
            "bad_signature_header",
            "webhook-signature has more than 32 entries.",
        ),
        (
            headers(
                signature=b" ".join(b"v1a," + base64.b64encode(b"%064d" % n) for n in range(5))
            ),
            "bad_signature_header",
            "webhook-signature has more than 4 entries of v1a.",
        ),
        (
            headers(signature=b"v1," + base64.b64encode(b"s" * 32)),
            "no_match",
            "signature made with another secret, or the body was changed in transit: a proxy that "
            "re-encodes JSON does that.",
        ),
        (
            headers(signature=OTHER_V1A),
            "no_match",
            "the signature is an ed25519 (v1a) one, and no whpk_ secret is configured.",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 30 else "",
)
def test_details(sent: Headers, cause: str, detail: str) -> None:
    assert rejected(sent) == (cause, detail)


def test_the_first_repeated_header_is_named() -> None:
    identifier, timestamp, signature = headers()
    both = [identifier, timestamp, signature]
    for sent, first in [
        ([*both, identifier, timestamp], "webhook-id"),
        ([*both, timestamp, identifier], "webhook-timestamp"),
    ]:
        assert rejected(sent)[1].startswith(f"{first} was sent more than once")


def test_a_scheme_that_no_secret_is_for_is_named() -> None:
    missing_hmac = "the signature is an HMAC (v1) one, and no whsec_ secret is configured."
    assert rejected(headers(), PUBLIC_KEY) == ("no_match", missing_hmac)
    # One entry of a kind that a secret is for, and the secret is the wrong one.
    for both in (SIGNATURE + b" " + OTHER_V1A, OTHER_V1A + b" " + SIGNATURE):
        for secrets in (
            (PUBLIC_KEY,),
            (new_secret(b"o" * 32),),
            (new_secret(b"o" * 32), PUBLIC_KEY),
        ):
            cause, detail = rejected(headers(signature=both), *secrets)
            assert (cause, detail[:34]) == ("no_match", "signature made with another secret")


@pytest.mark.parametrize(
    ("timestamp", "milliseconds"),
    [
        (b"1700000000000", True),
        (b"170000000000x", False),
        (b"17000000000000", False),
        (b"017000000000", False),
        (b"x", False),
        (b"", False),
        (b"1700000000.00", False),
    ],
)
def test_milliseconds_are_pointed_out(timestamp: bytes, milliseconds: bool) -> None:
    expected = "webhook-timestamp must be Unix seconds: 1 to 12 digits"
    expected += "; it looks like milliseconds." if milliseconds else "."
    assert rejected(headers(timestamp=timestamp)) == ("bad_timestamp", expected)


@pytest.mark.parametrize(
    ("age", "tolerance", "cause", "detail"),
    [
        (301, 300, "too_old", "301 s behind this machine's clock, and 300 s are tolerated: it was "
         "delayed, replayed, or a clock is wrong."),
        (1, 0, "too_old", "1 s behind this machine's clock, and 0 s are tolerated: it was "
         "delayed, replayed, or a clock is wrong."),
        (-301, 300, "too_new", "301 s ahead of this machine's clock, and 300 s are tolerated: one "
         "of the two clocks is wrong."),
        (-1, 0, "too_new", "1 s ahead of this machine's clock, and 0 s are tolerated: one of the "
         "two clocks is wrong."),
        (float("nan"), 300, "too_old", "nan s behind this machine's clock, and 300 s are "
         "tolerated: it was delayed, replayed, or a clock is wrong."),
    ],
)  # fmt: skip
def test_the_age_is_reported(age: float, tolerance: int, cause: str, detail: str) -> None:
    rejection = rejected(headers(), now=NOW + age, tolerance=tolerance)
    assert rejection == (cause, f"webhook-timestamp is {detail}")


@pytest.mark.parametrize(
    ("sent", "detail"),
    [
        ([], "webhook-id, webhook-timestamp, webhook-signature missing: not a signed webhook, or a "
         "proxy drops the header."),
        (headers(timestamp=None), "webhook-timestamp missing: not a signed webhook, or a proxy "
         "drops the header."),
        ([*headers(id=None), (b"SVIX-ID", b"x")], "webhook-id missing: svix-* headers are not "
         "read, have the sender use webhook-* ones."),
        ([(b"Svix-Signature", b"x"), (b"svix_id", b"x")], "webhook-id, webhook-timestamp, "
         "webhook-signature missing: svix-* headers are not read, have the sender use webhook-* "
         "ones."),
        ([(b"webhook_timestamp", b"x")], "webhook-id, webhook-timestamp, webhook-signature "
         "missing: it was sent with an underscore, which is another name; find the program that "
            "renames it."),
        ([(b"webhook_id", b"x"), *headers(id=None)[1:]], "webhook-id, webhook-timestamp missing: "
         "it was sent with an underscore, which is another name; find the program that renames "
            "it."),
    ],
)  # fmt: skip
def test_missing_headers_are_reported(sent: Headers, detail: str) -> None:
    assert rejected(sent) == ("missing_header", detail)


def test_errors_of_the_header_have_their_code() -> None:
    many_v1a = b" ".join(b"v1a," + base64.b64encode(b"%064d" % number) for number in range(5))
    for header in (b" " * 8193, b"v1 " * 33, many_v1a):
        with pytest.raises(VerificationError) as caught:
            parse_signature_header(header)
        assert caught.value.cause == "bad_signature_header"


def test_problems_of_secrets_say_which_one() -> None:
    with pytest.raises(OptionsValidationError) as caught:
        Keyring.from_secrets([], KeyDerivation.AUTO)
    assert [problem.message for problem in caught.value.problems] == [
        "no secret is configured; nothing could be verified"
    ]
    with pytest.raises(OptionsValidationError) as caught:
        Keyring.from_secrets([Secret(SECRET), Secret("")], KeyDerivation.AUTO)
    assert [problem.message for problem in caught.value.problems] == [
        "secret 2 of 2 (Sdk:Webhooks:Secret counts first) is empty: set the secret that the "
        "upstream issued, or remove the key"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (SECRET, "", 1, b""),
            "webhook_id must be 1 to 256 visible ASCII characters without a dot",
        ),
        ((SECRET, "i", -1, b""), "timestamp must be Unix seconds from 0 to 999999999999"),
        (
            (PUBLIC_KEY, "i", 1, b""),
            "the secret is a public key: signing takes the private one (whsk_...)",
        ),
        (("whsec_", "i", 1, b""), "the secret is only the prefix whsec_: copy the whole secret"),
        (("whsk_*", "i", 1, b""), "the secret is not base64 after whsk_"),
        (
            ("whsk_" + base64.b64encode(b"s" * 33).decode(), "i", 1, b""),
            "the secret must be base64 of 32 bytes (seed) or 64 (seed and public key) after "
            "whsk_, not 33",
        ),
        (
            ("whsk_" + base64.b64encode(b"s" * 64).decode(), "i", 1, b""),
            "the secret's two halves are not one key pair: copy it again",
        ),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_signer_gets_the_reason(arguments: tuple[str, str, int, bytes], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        sign(*arguments)


def test_a_new_secret_of_another_size_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"^a secret is made of 32 random bytes$"):
        new_secret(b"")


def test_neither_signature_nor_body_is_shown_and_nothing_can_be_changed() -> None:
    entry = SignatureEntry(b"v1", b"s" * 32)
    delivery = Delivery(headers(), BODY, 7.5)
    accepted = Accepted(ID, NOW, 0, None)
    refused = Rejected(Cause.BAD_ID, "why")
    assert repr(entry) == "SignatureEntry(version=b'v1')"
    assert repr(delivery) == "Delivery(received_at=7.5)"
    for record in (entry, delivery, accepted, refused):
        first = msgspec.structs.fields(record)[0].name
        with pytest.raises(AttributeError):
            setattr(record, first, None)
