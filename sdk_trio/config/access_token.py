"""The end of an access token that shows one. Pure."""

import base64
import json
from math import inf, isfinite
from typing import Any

from .secret import Secret


def token_end(token: Secret | None) -> float:
    """Return when a token expires, in Unix seconds; infinity if it does not show that.

    A JSON Web Token has the claim ``exp`` (RFC 7519, 4.1.4). Other tokens are opaque. The signature
    is not verified: only the upstream has the key.
    """
    parts = token.reveal().strip().split(".") if token is not None else []
    if len(parts) != 3:
        return inf
    try:
        padded = parts[1] + "=" * (-len(parts[1]) % 4)
        claims: Any = json.loads(base64.urlsafe_b64decode(padded))
    except (ValueError, RecursionError):
        return inf
    end = claims.get("exp") if isinstance(claims, dict) else None
    if not isinstance(end, int | float) or isinstance(end, bool) or not isfinite(end):
        return inf
    return float(end)
