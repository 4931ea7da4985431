"""Keys of deliveries as the store in SQLite compares them: by a hash of 64 bits.

A text index of random ids changes a page of its own for nearly every delivery. A hash is short, and
with the text compared on every hit, two keys of one hash are still two keys.
"""

import hashlib


def key_hash(key: str) -> int:
    """Return the hash of a delivery's key (:func:`key_of`), a signed number of 64 bits.

    The senders choose the keys, so it is a cryptographic one: nobody can make many keys of one hash
    at less than the price of finding them by trial. It is stored, so it never changes.
    """
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
