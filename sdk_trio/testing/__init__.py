"""A kit for your own tests: signed deliveries, samples, and a runtime to send them to.

With pytest and pytest-trio the fixtures ``sdk_app`` and ``deliver`` are there without an import::

    @pytest.fixture
    def sdk_handlers():
        return my_application.handlers

    async def test_paid_order_grants_access(deliver):
        delivered = await deliver("order.paid", {"customer_id": "cus_1"})
        assert delivered.status == 200

Without pytest, :func:`running_app` does the same. Everything goes over a real connection on the
loopback address, through the whole verification pipeline.
"""

from ..events.samples import sample, sample_body, sample_types
from ..webhooks.sender import SignedDelivery
from .application import AppUnderTest, Delivered, running_app, settings_for_tests
from .signing import sign_delivery

__all__ = [
    "AppUnderTest",
    "Delivered",
    "SignedDelivery",
    "running_app",
    "sample",
    "sample_body",
    "sample_types",
    "settings_for_tests",
    "sign_delivery",
]
