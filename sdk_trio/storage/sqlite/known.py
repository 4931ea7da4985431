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


#: Keys that the first generation of a filter is made for; each further one is twice as large.
FIRST_GENERATION = 1 << 16

# Bits for each key, of which it sets three. A generation that is full takes 1 of 200 new keys for
# known ones; to be wrong costs no more than a claim that is waited for.
_BITS_FOR_KEY = 16

_BITS = bytes(1 << place for place in range(8))


class KnownKeys:
    """Says of a key that it is surely new, or that it may be known (a Bloom filter).

    It never takes a known key for a new one once the key was added. What was added stays: keys
    that the retention has removed are merely not sure to be new. It belongs to one thread.

    Burton H. Bloom, "Space/Time Trade-offs in Hash Coding with Allowable Errors", 1970; the places
    are made of two halves of one hash, as Kirsch and Mitzenmacher ("Less Hashing, Same
    Performance", 2006) show to be as good.
    """

    def __init__(self) -> None:
        self._generations: list[tuple[bytearray, int]] = []
        #: The number of keys that were added and new.
        self.added: int = 0
        self._grow(FIRST_GENERATION)

    def _grow(self, keys: int) -> None:
        # A power of two, so that a place is found by a mask.
        size = 1 << (keys * _BITS_FOR_KEY - 1).bit_length()
        self._newest = bytearray(size // 8)
        self._mask = size - 1
        self._generations.append((self._newest, self._mask))
        self._room = size // _BITS_FOR_KEY

    def reserve(self, keys: int) -> None:
        """Make room for so many further keys at once: each generation is asked about each key."""
        if keys > self._room:
            self._grow(keys)

    def add(self, hashed: int) -> bool:
        """Add a key by its :func:`key_hash`, and return whether it was surely new."""
        if self.may_hold(hashed):
            return False
        if not self._room:
            self._grow(2 * (self._mask + 1) // _BITS_FOR_KEY)
        bits, mask = self._newest, self._mask
        stride = (hashed >> 32) | 1
        # Not in a loop, here and below: a fifth of the time, which every delivery takes.
        bits[(hashed & mask) >> 3] |= _BITS[hashed & 7]
        hashed += stride
        bits[(hashed & mask) >> 3] |= _BITS[hashed & 7]
        hashed += stride
        bits[(hashed & mask) >> 3] |= _BITS[hashed & 7]
        self._room -= 1
        self.added += 1
        return True

    def may_hold(self, hashed: int) -> bool:
        """Return whether a key may have been added; False: it was surely not."""
        stride = (hashed >> 32) | 1
        second, third = hashed + stride, hashed + 2 * stride
        for bits, mask in self._generations:
            if (
                bits[(hashed & mask) >> 3] & _BITS[hashed & 7]
                and bits[(second & mask) >> 3] & _BITS[second & 7]
                and bits[(third & mask) >> 3] & _BITS[third & 7]
            ):
                return True
        return False
