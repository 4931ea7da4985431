"""Points of the curve of ed25519, as far as public keys have to be judged. Pure (RFC 8032, 5.1).

Libraries verify with any 32 bytes that are a point. Of a point of small order signatures can be
made without a private key, so such a key must never be configured.
"""

from typing import Final

_P: Final = 2**255 - 19
_D: Final = -121665 * pow(121666, -1, _P) % _P
_SQRT_OF_MINUS_1: Final = pow(2, (_P - 1) // 4, _P)

#: The order of the group that every real public key lies in; the whole curve has eight times that.
_ORDER: Final = 2**252 + 27742317777372353535851937790883648493
_COFACTOR: Final = 8

#: X, Y, Z and T of RFC 8032, 5.1.4: x = X/Z, y = Y/Z, xy = T/Z.
_Point = tuple[int, int, int, int]
_NEUTRAL: Final[_Point] = (0, 1, 1, 0)


def is_public_key(encoded: bytes) -> bool:
    """Say whether these 32 bytes can be somebody's public key: a point of the group in use.

    Of 32 random bytes one in sixteen is.
    """
    point = _decode(encoded)
    return (
        point is not None
        and not _is_neutral(_times(_COFACTOR, point))
        and _is_neutral(_times(_ORDER, point))
    )


def is_forgeable(encoded: bytes) -> bool:
    """Say whether these 32 bytes are no point, or one of small order: nobody's public key."""
    point = _decode(encoded)
    return point is None or _is_neutral(_times(_COFACTOR, point))


def _decode(encoded: bytes) -> _Point | None:
    """Return the point that this encodes in the one correct way, or None (RFC 8032, 5.1.3)."""
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
    while factor:
        if factor & 1:
            result = _add(result, point)
        point = _add(point, point)
        factor >>= 1
    return result


def _add(one: _Point, other: _Point) -> _Point:
    x1, y1, z1, t1 = one
    x2, y2, z2, t2 = other
    a = (y1 - x1) * (y2 - x2) % _P
    b = (y1 + x1) * (y2 + x2) % _P
    c = 2 * t1 * t2 * _D % _P
    d = 2 * z1 * z2 % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _is_neutral(point: _Point) -> bool:
    x, y, z, _ = point
    return x == 0 and (y - z) % _P == 0
