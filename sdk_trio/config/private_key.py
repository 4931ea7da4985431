"""Says what kind of file an SSH private key is, as far as its form tells. Pure."""

import base64
import binascii
import enum
from typing import Final

_OPENSSH_MAGIC: Final = b"openssh-key-v1\0"


class KeyForm(enum.Enum):
    """Whether a program that cannot ask for a passphrase can use a private key."""

    PLAIN = "plain"
    ENCRYPTED = "encrypted"
    UNKNOWN = "unknown"


def key_form(content: bytes) -> KeyForm:
    """Return the form of a private key in OpenSSH's or a PEM format; anything else is unknown."""
    lines = [line.strip() for line in content.splitlines()]
    begins = [i for i, line in enumerate(lines) if _label(line) is not None]
    if not begins:
        return KeyForm.UNKNOWN
    label = _label(lines[begins[0]])
    body = lines[begins[0] + 1 :]
    if label == b"OPENSSH PRIVATE KEY":
        return _openssh_form(body)
    if label == b"ENCRYPTED PRIVATE KEY":
        return KeyForm.ENCRYPTED
    if label is None or not label.endswith(b"PRIVATE KEY"):
        return KeyForm.UNKNOWN
    # The traditional PEM format says so in a header above the key.
    encrypted = any(line.startswith(b"Proc-Type:") and line.endswith(b"ENCRYPTED") for line in body)
    return KeyForm.ENCRYPTED if encrypted else KeyForm.PLAIN


def _label(line: bytes) -> bytes | None:
    if line.startswith(b"-----BEGIN ") and line.endswith(b"-----"):
        return line[len(b"-----BEGIN ") : -len(b"-----")]
    return None


def _openssh_form(body: list[bytes]) -> KeyForm:
    """Read the name of the cipher, which is the first field after the magic."""
    end = next((i for i, line in enumerate(body) if line.startswith(b"-----END")), len(body))
    try:
        blob = base64.b64decode(b"".join(body[:end]), validate=True)
    except binascii.Error:
        return KeyForm.UNKNOWN
    if not blob.startswith(_OPENSSH_MAGIC):
        return KeyForm.UNKNOWN
    rest = blob[len(_OPENSSH_MAGIC) :]
    length = int.from_bytes(rest[:4], "big")
    cipher = rest[4 : 4 + length]
    if len(rest) < 4 or len(cipher) < length or not cipher:
        return KeyForm.UNKNOWN
    return KeyForm.PLAIN if cipher == b"none" else KeyForm.ENCRYPTED
