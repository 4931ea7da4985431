"""The textual forms of a webhook secret, and the keys inside them. Pure (spec 4.1, 5).

Every error message here describes the secret and never quotes any part of it.
"""

import base64
import binascii

import attrs

from .choices import KeyDerivation

HMAC_PREFIX = "whsec_"
PUBLIC_KEY_PREFIX = "whpk_"
PRIVATE_KEY_PREFIX = "whsk_"

#: 128 bits: below that a key can be searched for; the scheme itself issues 24 to 64 bytes.
MINIMUM_KEY_BYTES = 16
ED25519_KEY_BYTES = 32


@attrs.frozen
class ParsedSecret:
    """The keys that one configured secret stands for.

    ``hmac_keys`` are the candidates in the order in which they are tried, each with the
    derivation that made it (never ``AUTO``). ``ed25519_public_key`` is set for ``whpk_`` keys
    only, and then ``hmac_keys`` is empty. ``warnings`` are sentences for the operator.
    """

    hmac_keys: tuple[tuple[KeyDerivation, bytes], ...] = attrs.field(repr=False)
    ed25519_public_key: bytes | None
    warnings: tuple[str, ...] = ()


def parse_secret(text: str, derivation: KeyDerivation) -> ParsedSecret:
    """Read the keys out of a secret as it was configured.

    Args:
        text: ``whsec_`` + base64, ``whpk_`` + base64 of an ed25519 public key, or any text that
            the upstream uses as a key as it is.
        derivation: which key a text stands for. Under ``AUTO`` the decoded key comes first,
            then the UTF-8 bytes of the whole text.

    Returns:
        The candidates; at least one key.

    Raises:
        ValueError: the secret cannot be used; the message says why and what to do, and completes
            a sentence that begins with the setting's key.
    """
    _check_text(text)
    if text.startswith(PRIVATE_KEY_PREFIX):
        raise ValueError(
            f"is a private signing key ({PRIVATE_KEY_PREFIX}...): a receiver takes the public "
            f"key ({PUBLIC_KEY_PREFIX}...); keep the private one with the sender"
        )
    if text.startswith(PUBLIC_KEY_PREFIX):
        return _public_key(text.removeprefix(PUBLIC_KEY_PREFIX))
    return _hmac_keys(text, derivation)


def _check_text(text: str) -> None:
    if not text.strip():
        raise ValueError("is empty: set the secret that the upstream issued, or remove the key")
    if text != text.strip():
        raise ValueError("begins or ends with white space or a line break: remove it")
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        raise ValueError("holds a control character: copy the secret again")
    try:
        text.encode()
    except UnicodeEncodeError:
        # The codec's own message would quote the secret.
        raise ValueError("is not valid Unicode text: copy the secret again") from None


def _public_key(encoded: str) -> ParsedSecret:
    key = _decode(encoded)
    if key is None or len(key) != ED25519_KEY_BYTES:
        raise ValueError(
            f"must be base64 of a {ED25519_KEY_BYTES}-byte ed25519 public key after "
            f"{PUBLIC_KEY_PREFIX}: copy it again"
        )
    return ParsedSecret(hmac_keys=(), ed25519_public_key=key)


def _hmac_keys(text: str, derivation: KeyDerivation) -> ParsedSecret:
    prefixed = text.startswith(HMAC_PREFIX)
    body = text.removeprefix(HMAC_PREFIX)
    if not body:
        raise ValueError(f"is the prefix {HMAC_PREFIX} alone: copy the whole secret")
    if body.startswith((HMAC_PREFIX, PUBLIC_KEY_PREFIX, PRIVATE_KEY_PREFIX)):
        raise ValueError("has two prefixes: remove the first one")
    candidates: list[tuple[KeyDerivation, bytes]] = []
    if derivation is not KeyDerivation.UTF8:
        decoded = _standard_key(
            body, prefixed=prefixed, required=derivation is KeyDerivation.STANDARD
        )
        if decoded is not None:
            candidates.append((KeyDerivation.STANDARD, decoded))
    if derivation is not KeyDerivation.STANDARD:
        # The prefix is public, so it adds nothing to the strength of the key.
        _check_length(len(body.encode()), "has")
        candidates.append((KeyDerivation.UTF8, text.encode()))
    warnings = (
        () if prefixed else (f"does not begin with {HMAC_PREFIX}: check that it is complete",)
    )
    return ParsedSecret(hmac_keys=tuple(candidates), ed25519_public_key=None, warnings=warnings)


def _standard_key(body: str, *, prefixed: bool, required: bool) -> bytes | None:
    key = _decode(body)
    if key is None:
        if required:
            raise ValueError(
                "is not base64, which KeyDerivation Standard asks for: copy the secret again, or "
                "set Sdk:Webhooks:KeyDerivation to Utf8 if the upstream signs with the text itself"
            )
        return None
    if not prefixed and not required and len(key) < MINIMUM_KEY_BYTES:
        # A plain word is base64 by chance; whoever chose it meant the text itself.
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
    """Decode base64 strictly, but for missing padding; None when the text is not base64."""
    try:
        padded = text + "=" * (-len(text) % 4) if not text.endswith("=") else text
        return base64.b64decode(padded.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error):
        return None
