"""Secrets: text that is always masked, and the keys inside a webhook secret. Pure.

:class:`Secret` keeps a text out of logs and tracebacks. :func:`parse_secret` reads the forms of a
webhook secret; its messages never quote any part of it.

Points of ed25519 (RFC 8032, 5.1) are computed only to check public keys. A library verifies with
any 32 bytes that are a point, but for a point of small order anyone can make valid signatures
without a private key. Such a key must never be configured.
"""

import base64
import binascii
import itertools
from collections.abc import Iterable
from typing import Final, final

import attrs

from .fields import KeyDerivation

MASK: Final = "********"

#: The shortest secret, in characters, that is masked in messages. A shorter text is not a real
#: secret, and masking it would garble every word that contains it.
LEAST_MASKED = 8


@final
class Secret:
    """A secret text: ``repr``, ``str`` and ``format`` show a mask, ``reveal()`` the text.

    Two secrets are equal if their texts are. Do not compare a sender's claims with it: those need a
    constant-time comparison of signatures.

    ``made_for_tests`` marks a webhook secret that no other installation verifies with; the
    simulator signs only with such a secret.
    """

    __slots__ = ("_text", "made_for_tests")

    def __init__(self, text: str, *, made_for_tests: bool = False) -> None:
        self._text = text
        self.made_for_tests: bool = made_for_tests

    def reveal(self) -> str:
        """Return the text; every caller is a possible leak."""
        return self._text

    def __repr__(self) -> str:
        return f"Secret('{MASK}')"

    def __str__(self) -> str:
        return MASK

    def __format__(self, specification: str) -> str:
        # Formatted as text, so that an f-string with a width does not raise while a log line is
        # built.
        return format(MASK, specification)

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, Secret) else NotImplemented

    def __hash__(self) -> int:
        return hash((Secret, self._text))


_P: Final = 2**255 - 19
# d of RFC 8032, 5.1: the curve is -x^2 + y^2 = 1 + d x^2 y^2.
_D: Final = -121665 * pow(121666, -1, _P) % _P
# For the square root of 5.1.3, correct up to this factor, as p is 5 modulo 8.
_SQRT_OF_MINUS_1: Final = pow(2, (_P - 1) // 4, _P)

#: The order of the subgroup of all real public keys; the whole curve has eight times as many
#: points.
_ORDER: Final = 2**252 + 27742317777372353535851937790883648493
_COFACTOR: Final = 8

#: X, Y, Z and T of RFC 8032, 5.1.4: x = X/Z, y = Y/Z, xy = T/Z.
_Point = tuple[int, int, int, int]
_NEUTRAL: Final[_Point] = (0, 1, 1, 0)


def is_public_key(encoded: bytes) -> bool:
    """Return whether these 32 bytes can be a real public key: a point of the prime subgroup.

    Of 32 random bytes, one in sixteen is.
    """
    point = _decode_point(encoded)
    return (
        point is not None
        # Small order: eight times such a point is the neutral element.
        and not _is_neutral(_times(_COFACTOR, point))
        # In the prime subgroup: its order times any of its points is the neutral element.
        and _is_neutral(_times(_ORDER, point))
    )


def is_forgeable(encoded: bytes) -> bool:
    """Return whether these 32 bytes are not a valid public key: no point, or of small order."""
    point = _decode_point(encoded)
    return point is None or _is_neutral(_times(_COFACTOR, point))


def _decode_point(encoded: bytes) -> _Point | None:
    """Return the point in canonical encoding, or None (RFC 8032, 5.1.3)."""
    # 255 bits of y, then the parity of x.
    number = int.from_bytes(encoded, "little")
    sign, y = number >> 255, number & (1 << 255) - 1
    if len(encoded) != 32 or y >= _P:
        return None
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if (x * x - square) % _P:
        x = x * _SQRT_OF_MINUS_1 % _P
    if (x * x - square) % _P or (x == 0 and sign):
        return None
    if x & 1 != sign:
        x = _P - x
    return x, y, 1, x * y % _P


def _times(factor: int, point: _Point) -> _Point:
    result = _NEUTRAL
    # Double-and-add is not constant-time; these points are public, so that reveals nothing.
    while factor:
        if factor & 1:
            result = _add(result, point)
        point = _add(point, point)
        factor >>= 1
    return result


def _add(one: _Point, other: _Point) -> _Point:
    x1, y1, z1, t1 = one
    x2, y2, z2, t2 = other
    # The complete addition of 5.1.4: no special case for equal or neutral points.
    a = (y1 - x1) * (y2 - x2) % _P
    b = (y1 + x1) * (y2 + x2) % _P
    c = 2 * t1 * t2 * _D % _P
    d = 2 * z1 * z2 % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _is_neutral(point: _Point) -> bool:
    x, y, z, _ = point
    # x = 0 and y = 1, in projective coordinates.
    return x == 0 and (y - z) % _P == 0


HMAC_PREFIX = "whsec_"
PUBLIC_KEY_PREFIX = "whpk_"
PRIVATE_KEY_PREFIX = "whsk_"

#: A secret as Supabase shows it, with its signature version. The key is base64.
VERSIONED_PREFIX = f"v1,{HMAC_PREFIX}"

#: 128 bits: a shorter key can be brute-forced; the scheme issues 24 to 64 bytes.
MINIMUM_KEY_BYTES = 16
ED25519_KEY_BYTES = 32

#: The scheme issues 24 to 64 bytes (Standard Webhooks, "Signature scheme").
ISSUED_KEY_BYTES = 24

#: Published in the documentation or test vectors of Standard Webhooks and its first service, so
#: everyone knows them. The last one is a public key whose private half is published with it.
_PUBLISHED = frozenset(
    {
        "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        "MfKQ9r8GKYqrTwUPD8ILPZIo2LaLaSw",
        "C2FVsBQIhrscChlQIMV+b5sSYspob7oD",
        "plJ3nmyCDGBKInavdOK15jsl",
        "1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4=",
    }
)

#: Fewer distinct bytes cannot be random: 16 random bytes have 15 or 16, 16 random decimal digits
#: have 8.
_FEWEST_DIFFERENT = 5

#: Prefixes of public keys in other formats: base64 of DER, PEM, and SSH. Such a text must not be
#: used as a shared secret: it is public.
_PUBLIC_KEY_FORMS = ("MCowBQYDK2Vw", "-----BEGIN PUBLIC KEY", "ssh-ed25519 ")


@attrs.frozen
class ParsedSecret:
    """The keys of one configured secret.

    ``hmac_keys`` are the candidates in the order tried, each with its derivation (never ``AUTO``).
    ``ed25519_public_key`` is set for ``whpk_`` keys only; ``hmac_keys`` is then empty. ``warnings``
    are sentences for the operator. ``guessable`` says why strangers can know the key, or is None:
    do not use such a secret outside of Development.
    """

    hmac_keys: tuple[tuple[KeyDerivation, bytes], ...] = attrs.field(repr=False)
    ed25519_public_key: bytes | None
    warnings: tuple[str, ...] = ()
    guessable: str | None = None


def is_quoted(text: str) -> bool:
    """Return whether a text is enclosed in quotes, which belong to some file's syntax."""
    return len(text) > 1 and text[0] == text[-1] and text[0] in "'\"`"


#: The fault of a quoted text.
QUOTED = (
    "begins and ends with a quote, which would be part of the secret: remove both quotes (the "
    "env files of containers and units keep them)"
)


def first_signing(secrets: Iterable[Secret]) -> Secret | None:
    """Return the first secret that can sign; a public key can only verify."""
    return next((s for s in secrets if not s.reveal().startswith(PUBLIC_KEY_PREFIX)), None)


def parse_secret(text: str, derivation: KeyDerivation) -> ParsedSecret:
    """Read the keys of a configured secret.

    Args:
        text: ``whsec_`` + base64, ``whpk_`` + base64 of an ed25519 public key, or any text that the
            upstream uses as a key. The version in ``v1,whsec_`` is dropped.
        derivation: how a text becomes a key. With ``AUTO`` the decoded key comes first, then the
            UTF-8 bytes of the whole text.

    Returns:
        The candidates; at least one key.

    Raises:
        ValueError: the secret cannot be used. The message names the reason and the fix, and
            completes a sentence that starts with the setting's key.
    """
    _check_text(text)
    text = _without_version(text, derivation)
    if text.startswith(PRIVATE_KEY_PREFIX):
        raise ValueError(
            f"is a private signing key ({PRIVATE_KEY_PREFIX}...): a receiver takes the public "
            f"key ({PUBLIC_KEY_PREFIX}...); keep the private one with the sender"
        )
    # By the prefix only: KeyDerivation applies to shared secrets.
    if text.startswith(PUBLIC_KEY_PREFIX):
        return _public_key(text.removeprefix(PUBLIC_KEY_PREFIX))
    return _hmac_keys(text, derivation)


def _check_text(text: str) -> None:
    if not text.strip():
        raise ValueError("is empty: set the secret that the upstream issued, or remove the key")
    # Not stripped silently: the sender's copy may end with a blank, and then nothing would match.
    if text != text.strip():
        raise ValueError("begins or ends with white space or a line break: remove it")
    if is_quoted(text):
        raise ValueError(QUOTED)
    for prefix in (HMAC_PREFIX, PUBLIC_KEY_PREFIX, PRIVATE_KEY_PREFIX):
        if text[: len(prefix)].casefold() == prefix and not text.startswith(prefix):
            # It would be used as the text itself, and a public key is public.
            raise ValueError(f"has its prefix in capitals: write {prefix}")
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        raise ValueError("holds a control character: copy the secret again")
    try:
        text.encode()
    except UnicodeEncodeError:
        # The codec's message would quote the secret.
        raise ValueError("is not valid Unicode text: copy the secret again") from None


def _without_version(text: str, derivation: KeyDerivation) -> str:
    if text.startswith(("v1a,", f"v1,{PUBLIC_KEY_PREFIX}", f"v1,{PRIVATE_KEY_PREFIX}")):
        raise ValueError("begins with the version of a signature: remove all up to its comma")
    if text.startswith(VERSIONED_PREFIX):
        if derivation is KeyDerivation.UTF8:
            # Such a sender signs with the decoded key, not with the text.
            raise ValueError(
                f"begins with {VERSIONED_PREFIX}, which is followed by a base64 key: set "
                "Sdk:Webhooks:KeyDerivation to Auto or Standard"
            )
        return text.removeprefix("v1,")
    return text


def _public_key(encoded: str) -> ParsedSecret:
    key = _decode(encoded)
    if key is None or len(key) != ED25519_KEY_BYTES:
        raise ValueError(
            f"must be base64 of a {ED25519_KEY_BYTES}-byte ed25519 public key after "
            f"{PUBLIC_KEY_PREFIX}: copy it again"
        )
    if is_forgeable(key):
        raise ValueError(
            "is not a valid ed25519 public key (not a point of the curve, or one of small "
            "order), so anyone could sign for it: copy the public key again"
        )
    guessable = _PUBLISHED_REASON if _encoded(key) in _PUBLISHED else None
    return ParsedSecret(hmac_keys=(), ed25519_public_key=key, guessable=guessable)


def _hmac_keys(text: str, derivation: KeyDerivation) -> ParsedSecret:
    prefixed = text.startswith(HMAC_PREFIX)
    body = text.removeprefix(HMAC_PREFIX)
    if not body:
        raise ValueError(f"is only the prefix {HMAC_PREFIX}: copy the whole secret")
    if body.startswith((HMAC_PREFIX, PUBLIC_KEY_PREFIX, PRIVATE_KEY_PREFIX)):
        raise ValueError("has two prefixes: remove the first one")
    if prefixed and HMAC_PREFIX in body and derivation is not KeyDerivation.UTF8:
        raise ValueError(
            "holds several secrets: list them separately, as "
            "Sdk:Webhooks:Secrets:0 and Sdk:Webhooks:Secrets:1"
        )
    if not prefixed:
        _refuse_public_key(text, derivation)
    candidates: list[tuple[KeyDerivation, bytes]] = []
    if derivation is not KeyDerivation.UTF8:
        decoded = _standard_key(
            body, prefixed=prefixed, required=derivation is KeyDerivation.STANDARD
        )
        if decoded is not None:
            # First, because the scheme derives keys this way: most deliveries match at the first
            # try.
            candidates.append((KeyDerivation.STANDARD, decoded))
    if derivation is not KeyDerivation.STANDARD:
        # The prefix is public, so it adds no strength to the key.
        _check_length(len(body.encode()), "has")
        candidates.append((KeyDerivation.UTF8, text.encode()))
    warnings = []
    if not prefixed and derivation is not KeyDerivation.UTF8:
        warnings.append(
            f"does not begin with {HMAC_PREFIX}: check that it is complete; if you chose it as a "
            "text yourself, set Sdk:Webhooks:KeyDerivation to Utf8"
        )
    elif derivation is KeyDerivation.AUTO and len(candidates) == 1:
        warnings.append(
            f"is not base64 after {HMAC_PREFIX}, and is used as text: check that it is complete"
        )
    # The prefix is public and does not count.
    shortest = min(len(_without_prefix(key)) for _, key in candidates)
    if shortest < ISSUED_KEY_BYTES:
        warnings.append(
            f"has {shortest} bytes of key, and the scheme issues {ISSUED_KEY_BYTES} to 64: have "
            "the upstream issue a longer one ('secrets new' makes one for services of your own)"
        )
    return ParsedSecret(
        hmac_keys=tuple(candidates),
        ed25519_public_key=None,
        warnings=tuple(warnings),
        guessable=_why_guessable(body, [key for _, key in candidates]),
    )


def _refuse_public_key(text: str, derivation: KeyDerivation) -> None:
    """Refuse a public key without its prefix: anyone who knows it could sign with it.

    With ``UTF8`` the operator states that the upstream signs with the text itself.
    """
    bare = _decode(text)
    if text.startswith(_PUBLIC_KEY_FORMS) or (
        derivation is not KeyDerivation.UTF8
        and bare is not None
        and len(bare) == ED25519_KEY_BYTES
        and is_public_key(bare)
    ):
        raise ValueError(
            "has no prefix and is a public key of ed25519, or looks like one: write "
            f"{PUBLIC_KEY_PREFIX} and the base64 of its {ED25519_KEY_BYTES} bytes; if it is a "
            f"shared secret, write {HMAC_PREFIX} before it, or set Sdk:Webhooks:KeyDerivation to "
            "Utf8 if the upstream signs with the text itself"
        )


_PUBLISHED_REASON = (
    "is an example of published documentation, so anyone can sign with it: set the secret that "
    "the upstream issued for this endpoint"
)


def _why_guessable(body: str, keys: list[bytes]) -> str | None:
    if body in _PUBLISHED or any(_encoded(key) in _PUBLISHED for key in keys):
        return _PUBLISHED_REASON
    if any(_is_regular(_without_prefix(key)) for key in keys):
        return (
            "has a guessable pattern (equal, repeated or counting bytes): set the "
            "secret that the upstream issued, or one of 'secrets new'"
        )
    return None


def _is_regular(key: bytes) -> bool:
    """Return whether a key consists of equal, repeated or counting bytes."""
    # Equal bytes have step 0, counting ones 1, 255, or any other.
    steps = {(later - earlier) % 256 for earlier, later in itertools.pairwise(key)}
    # Up to half of the key: otherwise every key would be one period of itself.
    repeated = any(
        key[period:] == key[:-period]
        for period in range(1, min(MINIMUM_KEY_BYTES - 1, len(key) // 2) + 1)
    )
    return repeated or len(steps) == 1 or len(set(key)) < _FEWEST_DIFFERENT


def _without_prefix(key: bytes) -> bytes:
    return key.removeprefix(HMAC_PREFIX.encode())


def _encoded(key: bytes) -> str:
    return base64.b64encode(key).decode("ascii")


def _standard_key(body: str, *, prefixed: bool, required: bool) -> bytes | None:
    key = _decode(body)
    if key is None:
        if required:
            raise ValueError(
                "is not base64, which KeyDerivation Standard requires: copy the secret again, or "
                "set Sdk:Webhooks:KeyDerivation to Utf8 if the upstream signs with the text itself"
            )
        return None
    if not prefixed and not required and len(key) < MINIMUM_KEY_BYTES:
        # A plain word may be base64 by chance; its author meant the text itself.
        return None
    _check_length(len(key), "decodes to")
    return key


def _check_length(length: int, verb: str) -> None:
    if length < MINIMUM_KEY_BYTES:
        raise ValueError(
            f"{verb} {length} bytes of key, and at least {MINIMUM_KEY_BYTES} are needed: "
            "copy the whole secret, or have the upstream issue a longer one"
        )


def _decode(text: str) -> bytes | None:
    """Decode base64 strictly, except for missing padding; None if the text is not base64."""
    try:
        # Shells and people drop the padding, which the length implies anyway.
        padded = text + "=" * (-len(text) % 4) if not text.endswith("=") else text
        return base64.b64decode(padded.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error):
        return None
