# For: sign_delivery, SignedDelivery, sample, sample_body, sample_types
from datetime import UTC, datetime

from sdk_trio.testing import sample, sample_body, sample_types, sign_delivery

secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
signed = sign_delivery("order.paid", {"id": "ord_1"}, secret=secret, webhook_id="m_1")
print(sorted(signed.headers))

now = datetime(2026, 1, 1, tzinfo=UTC)
document = sample("order.paid", now=now, overrides={"customer": {"id": "cus_1"}})
print(document["data"]["customer"]["id"], "order.paid" in sample_types())
print(len(sample_body("order.paid", now=now)) > 1000)
# Output: ['content-type', 'webhook-id', 'webhook-signature', 'webhook-timestamp']
# Output: cus_1 True
# Output: True
