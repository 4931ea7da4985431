"""Signatures of the Standard Webhooks scheme: read, made and checked. Pure.

A signature covers ``{webhook-id}.{webhook-timestamp}.{body}``, byte for byte as sent. ``v1`` is
HMAC-SHA256, ``v1a`` is ed25519 and needs the extra ``sdk-trio[ed25519]``. While a secret is
rotated, a sender signs with both and sends several entries, and a receiver accepts any of its
configured secrets. The source is https://www.standardwebhooks.com.
"""

import base64
import hashlib
import re
from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Iterable, Sequence
from hmac import compare_digest
from typing import TYPE_CHECKING, Final

import msgspec

from ..config import KeyDerivation, Secret
from ..config.secret import HMAC_PREFIX, PRIVATE_KEY_PREFIX, parse_secret
from ..errors import OptionsValidationError, Problem, VerificationError
from ..records.deliveries import key_of

if TYPE_CHECKING:
    from _hashlib import HASH

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

HMAC_VERSION: Final = b"v1"
ED25519_VERSION: Final = b"v1a"

#: A sender has one entry for each active secret. Both limits allow far more than a rotation needs,
#: and bound the work that an unauthenticated caller can cause.
MAX_HEADER_BYTES: Final = 8 * 1024
MAX_ENTRIES: Final = 32
#: Each different ``v1a`` entry costs a hash of the whole body for each ed25519 key, while all HMAC
#: entries together cost one. A rotation needs two.
MAX_ED25519_ENTRIES: Final = 4
MAX_ID_BYTES: Final = 256
#: Twelve digits last until the year 33658; thirteen are milliseconds sent by mistake.
MAX_TIMESTAMP_DIGITS: Final = 12
NEW_SECRET_BYTES: Final = 32

_SIGNATURE_BYTES: Final = {HMAC_VERSION: 32, ED25519_VERSION: 64}
#: A header with one ``v1`` entry, as nearly all are: ``v1,`` and base64 of 32 bytes.
_LONE_ENTRY_LENGTH: Final = 47
_SEPARATORS_TO_SPACES: Final = bytes.maketrans(b",\t", b"  ")
_LETTER_V: Final = ord("v")
_opens_entry = re.compile(rb"v\d+[a-z]?").fullmatch

# The dot separates the signed parts, so an id that held one could move bytes into the timestamp.
# The translation changes every other character; deleting the allowed ones and testing for a rest
# would take twice as long.
_ID_CHARACTERS: Final = frozenset(range(0x21, 0x7F)) - {ord(".")}
_ONLY_ID_CHARACTERS: Final = bytes(
    code if code in _ID_CHARACTERS else ord("_") for code in range(256)
)

_SHA256_BLOCK_BYTES: Final = 64
#: hashlib releases the interpreter's lock for 2048 bytes and more. While another thread is busy,
#: such as the store's, acquiring the lock again takes ten times as long as hashing a few kilobytes.
#: Therefore bodies up to ``_LONGEST_IN_PIECES`` are hashed in pieces below that size.
_PIECE_BYTES: Final = 2047
_LONGEST_IN_PIECES: Final = 16 * 1024
_INNER_PAD: Final = bytes(byte ^ 0x36 for byte in range(256))
_OUTER_PAD: Final = bytes(byte ^ 0x5C for byte in range(256))

_SEED_BYTES: Final = 32


def is_valid_id(webhook_id: bytes) -> bool:
    """Return whether this is 1 to 256 visible ASCII characters without a dot."""
    return (
        0 < len(webhook_id) <= MAX_ID_BYTES
        and webhook_id.translate(_ONLY_ID_CHARACTERS) == webhook_id
    )


def is_valid_timestamp(timestamp: bytes) -> bool:
    """Return whether this is 1 to 12 ASCII digits without a leading zero (``0`` itself is
    valid)."""
    return (
        len(timestamp) <= MAX_TIMESTAMP_DIGITS
        and timestamp.isdigit()
        and (timestamp[0] != ord("0") or len(timestamp) == 1)
    )


class SignatureEntry(msgspec.Struct, frozen=True, gc=False):
    """One well-formed entry: ``version`` is ``v1`` or ``v1a``, ``value`` its 32 or 64 bytes."""

    version: bytes
    value: bytes

    def __repr__(self) -> str:
        return f"SignatureEntry(version={self.version!r})"


def parse_signature_header(value: bytes) -> tuple[SignatureEntry, ...]:
    """Read the entries of a ``webhook-signature`` header.

    Entries may be separated by spaces, tabs, commas or any run of them, because proxies join
    repeated headers with a comma. A version such as ``v1`` starts an entry, and the next token is
    its value; a version without a value does not hide later entries. Values are base64 of the
    standard alphabet; the padding may be missing. Encodings whose unused last bits are not zero are
    malformed, so that one signature has one spelling and no bit of it can be changed unnoticed.
    Entries that are malformed, of another version, or without a version are ignored, so that a
    sender may add new schemes.

    Args:
        value: the header as it was sent; lines of a repeated header joined with a space.

    Returns:
        The usable entries in their order; possibly none.

    Raises:
        VerificationError: the header is over 8 KiB, opens more than 32 entries of any kind, or has
            more than 4 different ones of ``v1a``. It is refused instead of truncated, so that the
            order of entries never matters.
    """
    if len(value) > MAX_HEADER_BYTES:
        raise VerificationError(
            "bad_signature_header", f"webhook-signature is longer than {MAX_HEADER_BYTES} bytes"
        )
    # Fast path for the form of nearly all deliveries. If it does not decode, the general path below
    # decides, so both give the same result.
    if len(value) == _LONE_ENTRY_LENGTH and value.startswith(b"v1,"):
        lone = _decode_strictly(value[3:])
        if lone is not None and len(lone) == _SIGNATURE_BYTES[HMAC_VERSION]:
            return (SignatureEntry(HMAC_VERSION, lone),)
    entries: list[SignatureEntry] = []
    opened = 0
    version: bytes | None = None
    for token in value.translate(_SEPARATORS_TO_SPACES).split(b" "):
        if not token:
            continue
        if token in _SIGNATURE_BYTES or (token[0] == _LETTER_V and _opens_entry(token)):
            version = token
            opened += 1
            if opened > MAX_ENTRIES:
                raise VerificationError(
                    "bad_signature_header",
                    f"webhook-signature has more than {MAX_ENTRIES} entries",
                )
        elif version is not None:
            decoded = _decode_strictly(token)
            if decoded is not None and len(decoded) == _SIGNATURE_BYTES.get(version):
                entries.append(SignatureEntry(version, decoded))
            version = None
    if len({entry.value for entry in entries if entry.version == ED25519_VERSION}) > (
        MAX_ED25519_ENTRIES
    ):
        raise VerificationError(
            "bad_signature_header",
            f"webhook-signature has more than {MAX_ED25519_ENTRIES} entries of v1a",
        )
    return tuple(entries)


def _decode_strictly(text: bytes) -> bytes | None:
    """Return the bytes whose only correct base64 is ``text``, or None."""
    if len(text) % 4:
        text += b"=" * (-len(text) % 4)
    try:
        decoded = a2b_base64(text)
    except Base64Error:
        return None
    # The decoder skips foreign characters and ignores unused bits. Encoding the result again and
    # comparing finds both.
    return decoded if b2a_base64(decoded, newline=False) == text else None


class Match(msgspec.Struct, frozen=True):
    """The configured secret that made a signature.

    ``index`` is its position in the configured order, ``version`` the scheme (``v1``, ``v1a``),
    ``derivation`` how the secret became the key; None for ed25519.
    """

    index: int
    version: str
    derivation: KeyDerivation | None


class _HmacKey(msgspec.Struct, frozen=True):
    """An HMAC-SHA256 key with both padded blocks hashed in advance (RFC 2104, 4).

    That saves a quarter of the work for each delivery.
    """

    inner: "HASH"
    outer: "HASH"

    @classmethod
    def of(cls, key: bytes) -> "_HmacKey":
        if len(key) > _SHA256_BLOCK_BYTES:
            key = hashlib.sha256(key).digest()
        block = key.ljust(_SHA256_BLOCK_BYTES, b"\0")
        return cls(
            inner=hashlib.sha256(block.translate(_INNER_PAD)),
            outer=hashlib.sha256(block.translate(_OUTER_PAD)),
        )

    def digest(self, head: bytes, pieces: Iterable[bytes]) -> bytes:
        inner = self.inner.copy()
        inner.update(head)
        for piece in pieces:
            inner.update(piece)
        outer = self.outer.copy()
        outer.update(inner.digest())
        return outer.digest()


def _in_pieces(body: bytes) -> Sequence[bytes]:
    """Cut ``body`` into pieces for which hashlib keeps the interpreter's lock."""
    if not _PIECE_BYTES < len(body) <= _LONGEST_IN_PIECES:
        return (body,)
    return [body[start : start + _PIECE_BYTES] for start in range(0, len(body), _PIECE_BYTES)]


class _Ed25519Key(msgspec.Struct, frozen=True):
    """A public key; ``check`` raises ``failure`` for a signature that its private key did not
    make."""

    check: Callable[[bytes, bytes], None]
    failure: type[Exception]

    def made(self, signature: bytes, content: bytes) -> bool:
        try:
            self.check(signature, content)
        except self.failure:
            return False
        return True


class Keyring:
    """The keys of every configured secret, prepared once and used for every delivery.

    Build it with :meth:`from_secrets`. Its keys never change, and ``repr`` shows none of them. It
    remembers the last match, because nearly always the same key matches again.
    """

    __slots__ = ("_ed25519_keys", "_hmac_keys", "_last_matched_first")

    def __init__(
        self,
        hmac_keys: Iterable[tuple[Match, bytes]],
        ed25519_keys: Iterable[tuple[Match, bytes]] = (),
    ) -> None:
        self._hmac_keys = tuple((match, _HmacKey.of(key)) for match, key in hmac_keys)
        self._last_matched_first = self._hmac_keys
        self._ed25519_keys = tuple((match, _load_public_key(key)) for match, key in ed25519_keys)

    @classmethod
    def from_secrets(cls, secrets: Sequence[Secret], derivation: KeyDerivation) -> "Keyring":
        """Prepare the keys of ``secrets``, in the configured order.

        Args:
            secrets: at least one: ``whsec_...``, ``whpk_...``, or any text under ``Utf8``/``Auto``.
            derivation: ``Sdk:Webhooks:KeyDerivation``. Under ``Auto`` an HMAC secret stands for up
                to two keys and each delivery costs one HMAC more.

        Raises:
            OptionsValidationError: there is no secret, one cannot be used, or one is an ed25519
                key and the extra ``sdk-trio[ed25519]`` is not installed; every problem is listed.
        """
        problems: list[Problem] = []
        hmac_keys: list[tuple[Match, bytes]] = []
        ed25519_keys: list[tuple[Match, bytes]] = []
        if not secrets:
            problems.append(_problem("no secret is configured; nothing could be verified"))
        for index, secret in enumerate(secrets):
            where = f"secret {index + 1} of {len(secrets)} (Sdk:Webhooks:Secret counts first)"
            try:
                parsed = parse_secret(secret.reveal(), derivation)
                if parsed.ed25519_public_key is not None:
                    # Loaded here as well, so that a missing package is listed with the other
                    # problems.
                    _load_public_key(parsed.ed25519_public_key)
                    match = Match(index, ED25519_VERSION.decode(), None)
                    ed25519_keys.append((match, parsed.ed25519_public_key))
            except (ValueError, ImportError) as error:
                problems.append(_problem(f"{where} {error}"))
                continue
            hmac_keys += [
                (Match(index, HMAC_VERSION.decode(), how), key) for how, key in parsed.hmac_keys
            ]
        if problems:
            raise OptionsValidationError(problems)
        return cls(hmac_keys, ed25519_keys)

    def __repr__(self) -> str:
        return f"Keyring({len(self._hmac_keys)} HMAC, {len(self._ed25519_keys)} ed25519 keys)"

    @property
    def versions(self) -> frozenset[bytes]:
        """Return the versions of signatures that these keys can check, of ``v1`` and ``v1a``."""
        hmac = {HMAC_VERSION} if self._hmac_keys else set()
        ed25519 = {ED25519_VERSION} if self._ed25519_keys else set()
        return frozenset(hmac | ed25519)

    def match(
        self, webhook_id: bytes, timestamp: bytes, body: bytes, entries: Sequence[SignatureEntry]
    ) -> Match | None:
        """Find the secret that made one of ``entries`` over this delivery.

        Each comparison takes constant time, and a delivery without a match is compared with every
        key: the time reveals to a forger neither matching bytes nor the secret. A match ends the
        search, so the time of a valid delivery depends on the secret that made it; its sender knows
        that already.

        Args:
            webhook_id: the header's bytes, already validated: without a dot.
            timestamp: the header's bytes, already validated.
            body: the exact bytes of the body.
            entries: the result of :func:`parse_signature_header`.

        Returns:
            The first configured secret that matches, or None.
        """
        head = b"%b.%b." % (webhook_id, timestamp)
        found: Match | None = None
        values = [entry.value for entry in entries if entry.version == HMAC_VERSION]
        if values:
            found = self._match_hmac(head, body, values)
        if self._ed25519_keys:
            found = self._match_ed25519(head + body, entries, found)
        return found

    def _match_hmac(self, head: bytes, body: bytes, values: Sequence[bytes]) -> Match | None:
        pieces = _in_pieces(body)
        # One signature has one maker, in whatever order the keys are tried; of equal keys, the
        # first configured one precedes the others. If there are several signatures, as during a
        # rotation, the first configured secret that made any of them is named: otherwise the report
        # of unused secrets would never name the old one.
        lone = len(values) == 1
        for keyed in self._last_matched_first if lone else self._hmac_keys:
            match, key = keyed
            expected = key.digest(head, pieces)
            for value in values:
                if compare_digest(expected, value):
                    if keyed is not self._last_matched_first[0]:
                        others = [other for other in self._hmac_keys if other is not keyed]
                        self._last_matched_first = (keyed, *others)
                    return match
        return None

    def _match_ed25519(
        self, content: bytes, entries: Sequence[SignatureEntry], found: Match | None
    ) -> Match | None:
        # Equal entries prove the same, so each value is checked once.
        values = {entry.value for entry in entries if entry.version == ED25519_VERSION}
        for match, key in self._ed25519_keys:
            if found is not None and found.index < match.index:
                break
            if any(key.made(value, content) for value in values):
                return match
        return found


def _problem(message: str) -> Problem:
    return Problem(key="Sdk:Webhooks:Secrets", message=message)


_NEEDS_EXTRA = (
    "is an ed25519 key, and the package for these keys is missing: pip install 'sdk-trio[ed25519]'"
)


def _load_public_key(key: bytes) -> _Ed25519Key:
    # Imported here: the package is optional, and loading it takes about 10 ms and 6 MB that most
    # receivers do not need.
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        raise ImportError(_NEEDS_EXTRA) from None
    return _Ed25519Key(Ed25519PublicKey.from_public_bytes(key).verify, InvalidSignature)


def _load_private_key(encoded: str) -> "Ed25519PrivateKey":
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError:
        raise ImportError(f"the secret {_NEEDS_EXTRA}") from None
    try:
        key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except ValueError:
        raise ValueError(f"the secret is not base64 after {PRIVATE_KEY_PREFIX}") from None
    if len(key) not in (_SEED_BYTES, 2 * _SEED_BYTES):
        raise ValueError(
            f"the secret must be base64 of 32 bytes (seed) or 64 (seed and public key) after "
            f"{PRIVATE_KEY_PREFIX}, not {len(key)}"
        )
    private = Ed25519PrivateKey.from_private_bytes(key[:_SEED_BYTES])
    if key[_SEED_BYTES:] not in (b"", private.public_key().public_bytes_raw()):
        raise ValueError("the secret's two halves are not one key pair: copy it again")
    return private


def sign(
    secret: Secret | str,
    webhook_id: str,
    timestamp: int,
    body: bytes,
    *,
    derivation: KeyDerivation = KeyDerivation.STANDARD,
    signer: str = "",
) -> str:
    """Make the ``webhook-signature`` entry of one delivery.

    Args:
        secret: ``whsec_...`` (or any text under ``Utf8``), or ``whsk_...`` for ed25519.
        webhook_id: 1 to 256 visible ASCII characters without a dot.
        timestamp: Unix seconds of this attempt, 0 to 999999999999.
        body: the exact bytes that are sent.
        derivation: how the secret becomes the HMAC key; under ``Auto`` the decoded key if there is
            one. Ignored for ``whsk_`` secrets.
        signer: a tenant's id: the delivery's key for that tenant is signed instead of its id; see
            :func:`~sdk_trio.records.deliveries.key_of`. Our own receivers refuse such an id.

    Returns:
        ``v1,<base64>``, or ``v1a,<base64>`` for a ``whsk_`` secret.

    Raises:
        ValueError: a receiver would refuse an argument; the message names it and never quotes the
            secret.
        ImportError: a ``whsk_`` secret, and the extra ``sdk-trio[ed25519]`` is not installed.
    """
    text = secret.reveal() if isinstance(secret, Secret) else secret
    head = _signed_head(webhook_id, signer, timestamp)
    if text.startswith(PRIVATE_KEY_PREFIX):
        private = _load_private_key(text.removeprefix(PRIVATE_KEY_PREFIX))
        return f"v1a,{_encode(private.sign(head + body))}"
    try:
        parsed = parse_secret(text, derivation)
    except ValueError as error:
        raise ValueError(f"the secret {error}") from None
    if parsed.ed25519_public_key is not None:
        raise ValueError(
            f"the secret is a public key: signing takes the private one ({PRIVATE_KEY_PREFIX}...)"
        )
    _, key = parsed.hmac_keys[0]
    return f"v1,{_encode(_HmacKey.of(key).digest(head, _in_pieces(body)))}"


def _signed_head(webhook_id: str, signer: str, timestamp: int) -> bytes:
    if not is_valid_id(webhook_id.encode("utf-8", "surrogatepass")):
        raise ValueError(
            f"webhook_id must be 1 to {MAX_ID_BYTES} visible ASCII characters without a dot"
        )
    if not is_valid_timestamp(b"%d" % timestamp):
        raise ValueError("timestamp must be Unix seconds from 0 to 999999999999")
    # Unambiguous: an id holds no dot, and no tenant's id is a timestamp.
    return b"%b.%d." % (key_of(webhook_id, signer).encode(), timestamp)


def _encode(signature: bytes) -> str:
    return base64.b64encode(signature).decode("ascii")


def new_secret(random_bytes: bytes) -> str:
    """Encode 32 bytes from a cryptographic source of randomness as a ``whsec_`` secret.

    Raises:
        ValueError: there are not exactly 32 of them.
    """
    if len(random_bytes) != NEW_SECRET_BYTES:
        raise ValueError(f"a secret is made of {NEW_SECRET_BYTES} random bytes")
    return HMAC_PREFIX + _encode(random_bytes)
