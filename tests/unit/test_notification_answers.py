import math

from hypothesis import given
from hypothesis import strategies as st
from support.notifications import SECRET, record

from sdk_trio.config.options.notifications import NotificationsOptions
from sdk_trio.net.poster import PostAnswer
from sdk_trio.notifications.channels.webhook import body_signature, payload
from sdk_trio.notifications.send import (
    MAX_WAIT_SECONDS,
    Again,
    Ambiguous,
    Refused,
    classify_response,
    document_of,
    explained,
)
from sdk_trio.notifications.templates import render

headers = st.fixed_dictionaries(
    {}, optional={"x-ratelimit-reset": st.text(max_size=20) | st.integers().map(str)}
)
answers = st.builds(
    PostAnswer,
    st.integers(200, 599),
    headers,
    st.binary(max_size=200) | st.text().map(str.encode),
    st.none() | st.floats(min_value=0),
)


@given(answers, st.floats(0, 1e12), st.booleans())
def test_any_answer_is_judged_by_its_status(answer, now, repeatable):
    outcome = classify_response(answer, repeatable=repeatable, explanation="x", advice="y", now=now)
    assert isinstance(document_of(answer), dict)
    status = answer.status
    if not repeatable and status in (502, 504, *range(520, 531), 598, 599):
        assert isinstance(outcome, Ambiguous)
    elif status >= 500 or status in (408, 425, 429):
        assert isinstance(outcome, Again)
        wait = outcome.after_seconds
        assert wait is None or 0 < wait <= MAX_WAIT_SECONDS
        assert wait is None or math.isfinite(wait)
    else:
        assert isinstance(outcome, Ambiguous if status < 300 else Refused)
    assert f"answered {status}: x" in outcome.reason


@given(
    st.text(st.characters()),
    st.text(st.characters()),
    st.none() | st.integers() | st.lists(st.text()),
)
def test_explanations_are_one_bounded_line_without_secrets(before, after, other):
    shown = explained(f"{before}test-key{after}", ("test-key", ""))
    assert len(shown) <= 300
    assert shown.splitlines() in ([], [shown])
    assert "test-key" not in shown
    shown.encode()
    assert explained(other, ("test-key",)) == ""
    assert explained("No TEST-Key, nor x.(y)", ("test-key", "x.(y)")) == "No ***, nor ***"


def test_payload_and_signature_are_what_they_were():
    """Receivers depend on both: a change here is a change of the contract."""
    message = render(NotificationsOptions().templates.suspended, record())
    body = payload(record(), message)
    assert body.startswith(b'{"type":"tenant.suspended","timestamp":"2027-01-15T08:00:00.250Z"')
    # Computed with: printf '{}' | openssl dgst -sha256 -hmac whsec_...
    assert body_signature(SECRET, b"{}") == (
        "sha256=7d32e1920b95c097413913fa478a32d0211cca71e9aaae71ee10a71e725751d6"
    )
