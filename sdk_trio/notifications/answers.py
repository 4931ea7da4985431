"""What an answer means for the message: taken, to be tried again, refused. Pure (contracts 6)."""

import json
import re
from collections.abc import Iterable
from typing import Any

from .outcome import Again, Ambiguous, Outcome, Refused, Sent
from .ports import Answer
from .templates import cut, one_line

#: How much of a provider's explanation is kept.
MAX_EXPLANATION_CHARACTERS = 300

#: A provider that asks for a longer wait is asked again all the same.
MAX_WAIT_SECONDS = 86_400.0

#: Beside the 5xx: the request did not arrive whole, came too early, or was one too many.
_TRY_AGAIN = frozenset({408, 425, 429})

#: Said by something between us and the provider, which has passed the request on or not and does
#: not know what became of it: 502, 504, and the numbers that content networks have made up.
_SAID_BY_A_GATEWAY = frozenset({502, 504, 598, 599, *range(520, 531)})


def judge(
    answer: Answer,
    *,
    repeatable: bool,
    explanation: str = "",
    advice: str = "",
    now: float = 0,
) -> Outcome:
    """Return what became of a message whose answer is no success.

    Args:
        answer: of any status but those that the channel takes for success.
        repeatable: whether the receiver can tell a repetition. Where it cannot, a gateway's answer
            leaves the outcome open as a silence does (ADR 0014).
        explanation: what the provider says, already bounded and without secrets.
        advice: what to do about 401 and 403.
        now: Unix seconds, for ``X-RateLimit-Reset``.
    """
    status = answer.status
    reason = f"answered {status}"
    if explanation:
        reason += f": {explanation}"
    if status in _SAID_BY_A_GATEWAY and not repeatable:
        return Ambiguous(f"{reason}: a gateway's answer, look there whether it was sent")
    if status in _TRY_AGAIN or status >= 500:
        return Again(reason, _wait(answer, now))
    if 300 <= status < 400:
        return Refused(f"{reason} (redirects are not followed)")
    if status in (401, 403) and advice:
        return Refused(f"{reason}; {advice}")
    if 200 <= status < 300:
        return Ambiguous(f"{reason}, which is not documented: look there whether it was sent")
    return Refused(reason)


def accepted(answer: Answer, provider_id: Any = None) -> Sent:
    """Return the success, with the provider's id if it is one that can be shown."""
    shown = one_line(provider_id)[:128] if isinstance(provider_id, str) else ""
    return Sent(shown or None)


def document_of(answer: Answer) -> dict[str, Any]:
    """Return the answer's JSON object; an empty one if it is none."""
    try:
        found = json.loads(answer.body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def explained(text: Any, hidden: Iterable[str]) -> str:
    """Return a provider's words as one bounded line, without the ``hidden`` texts in any case."""
    if not isinstance(text, str):
        return ""
    shown = one_line(text)
    for secret in hidden:
        if secret:
            shown = re.sub(re.escape(secret), "***", shown, flags=re.IGNORECASE)
    return cut(shown, MAX_EXPLANATION_CHARACTERS)


def _wait(answer: Answer, now: float) -> float | None:
    """Return the longer of the waits that the answer asks for, in seconds, None for none."""
    asked = [] if answer.retry_after is None else [answer.retry_after]
    reset = answer.headers.get("x-ratelimit-reset", "").strip()
    if answer.status == 429 and reset.isascii() and reset.isdigit() and len(reset) <= 12:
        asked.append(int(reset) - now)
    waits = [wait for wait in asked if wait > 0]
    return min(max(waits), MAX_WAIT_SECONDS) if waits else None
