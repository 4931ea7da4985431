"""Both ways with the PyPI packages ``standardwebhooks`` and ``svix``, over rotated secrets.

``svix`` verifies and signs by way of ``standardwebhooks``: its part here is its own headers' names.
Both read the wall clock, so these deliveries are stamped with the real time.
"""

import time
from datetime import UTC, datetime

import pytest
import standardwebhooks
import svix.webhooks
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.config import KeyDerivation, Secret
from sdk_trio.webhooks.signature import Keyring, new_secret, sign
from sdk_trio.webhooks.verdict import Accepted, Delivery, verify_delivery

OLD, NEW, FOREIGN = (new_secret(letter * 32) for letter in (b"o", b"n", b"f"))
BODY = '{"type":"order.created","data":{"id":"é"}}'
SIGNERS = [standardwebhooks.Webhook, svix.webhooks.Webhook]
REFUSALS = (standardwebhooks.WebhookVerificationError, svix.webhooks.WebhookVerificationError)


def headers(webhook_id: str, timestamp: int, signature: str) -> dict[str, str]:
    return {
        "webhook-id": webhook_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature,
    }


def verdict(sent: dict[str, str], body: bytes, secrets: list[str], now: float) -> Accepted | None:
    ring = Keyring.from_secrets([Secret(text) for text in secrets], KeyDerivation.AUTO)
    pairs = [(name.encode(), value.encode()) for name, value in sent.items()]
    judged = verify_delivery(Delivery(pairs, body, now), ring, tolerance_seconds=300)
    return judged if isinstance(judged, Accepted) else None


@pytest.mark.parametrize("signer", SIGNERS)
@pytest.mark.parametrize(("secret", "index"), [(NEW, 0), (OLD, 1)])
def test_their_signatures_are_accepted_here(signer: type, secret: str, index: int) -> None:
    now = time.time()
    signature = signer(secret).sign("msg_1", datetime.fromtimestamp(int(now), UTC), BODY)
    accepted = verdict(headers("msg_1", int(now), signature), BODY.encode(), [NEW, OLD], now)
    assert accepted == Accepted("msg_1", int(now), index, KeyDerivation.STANDARD)


@pytest.mark.parametrize("signer", SIGNERS)
def test_our_signatures_are_accepted_there(signer: type) -> None:
    now = int(time.time())
    body = BODY.encode()
    signatures = " ".join(sign(secret, "msg_1", now, body) for secret in (OLD, NEW))
    for secret in (OLD, NEW):
        signer(secret).verify(body, headers("msg_1", now, signatures))
    with pytest.raises(REFUSALS):
        signer(FOREIGN).verify(body, headers("msg_1", now, signatures))


def test_svix_reads_its_own_names_and_this_project_does_not() -> None:
    now = int(time.time())
    renamed = {
        name.replace("webhook-", "svix-"): value
        for name, value in headers("msg_1", now, sign(NEW, "msg_1", now, BODY.encode())).items()
    }
    svix.webhooks.Webhook(NEW).verify(BODY.encode(), renamed)
    assert verdict(renamed, BODY.encode(), [NEW], now) is None


@given(
    webhook_id=st.from_regex(r"[A-Za-z0-9_-]{1,60}", fullmatch=True),
    # Distances from the tolerance that the time of one example cannot bridge.
    age=st.one_of(st.integers(-290, 290), st.integers(310, 2000), st.integers(-2000, -310)),
    body=st.text(st.characters(exclude_categories=["Cs"]), max_size=200),
    signers=st.lists(st.sampled_from([OLD, NEW, FOREIGN]), min_size=1, max_size=4),
    configured=st.sampled_from([OLD, NEW]),
    changed=st.booleans(),
)
def test_same_verdict_as_standardwebhooks_on_well_formed_deliveries(
    webhook_id: str, age: int, body: str, signers: list[str], configured: str, changed: bool
) -> None:
    now = time.time()
    timestamp = int(now) - age
    signed = (body + "!" if changed else body).encode()
    signature = " ".join(sign(secret, webhook_id, timestamp, signed) for secret in signers)
    sent = headers(webhook_id, timestamp, signature)
    try:
        standardwebhooks.Webhook(configured).verify(body, sent, json_parse=False)
        theirs = True
    except standardwebhooks.WebhookVerificationError:
        theirs = False
    ours = verdict(sent, body.encode(), [configured], now) is not None
    assert ours == theirs == (abs(age) <= 300 and not changed and configured in signers)


def test_a_secret_as_supabase_shows_it_verifies_what_its_key_signed() -> None:
    now = time.time()
    signature = standardwebhooks.Webhook(NEW).sign(
        "msg_1", datetime.fromtimestamp(int(now), UTC), BODY
    )
    sent = headers("msg_1", int(now), signature)
    assert verdict(sent, BODY.encode(), [f"v1,{NEW}"], now)
