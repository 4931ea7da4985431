"""A kit for your own tests: signed deliveries, a runtime that receives them, a mock upstream.

With pytest and pytest-trio the fixtures ``sdk_app``, ``deliver`` and ``sdk_upstream`` need no
import::

    @pytest.fixture
    def sdk_handlers():
        return my_application.handlers

    async def test_paid_order_grants_access(deliver):
        delivered = await deliver("order.paid", {"customer_id": "cus_1"}, expect="done")
        assert delivered.status == 200

Without pytest, :func:`running_app` does the same. Deliveries are sent over a real connection on the
loopback address and are fully verified. A :class:`MockUpstream` answers the calls of your code to
the upstream. A :class:`SendingUpstream` also sends webhooks, and stops as the real one does.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..base import importing

if TYPE_CHECKING:
    from .application import (
        AppUnderTest,
        Delivered,
        UnexpectedStateError,
        running_app,
        settings_for_tests,
    )
    from .notifications import verify_notification
    from .sending_upstream import SendingUpstream
    from .signing import SignedDelivery, sample, sample_body, sample_types, sign_delivery
    from .simulation.plan import World
    from .simulation.run import SimulationFailedError, simulate
    from .upstream import MockedCall, MockedRoute, MockUpstream

__all__ = [
    "AppUnderTest",
    "Delivered",
    "MockUpstream",
    "MockedCall",
    "MockedRoute",
    "SendingUpstream",
    "SignedDelivery",
    "SimulationFailedError",
    "UnexpectedStateError",
    "World",
    "running_app",
    "sample",
    "sample_body",
    "sample_types",
    "settings_for_tests",
    "sign_delivery",
    "simulate",
    "verify_notification",
]

# The names are imported on first use, because pytest loads the plugin of this package in every
# project in which it is installed.
__getattr__: Callable[[str], Any] = importing(
    __name__,
    {
        **dict.fromkeys(
            (
                "AppUnderTest",
                "Delivered",
                "UnexpectedStateError",
                "running_app",
                "settings_for_tests",
            ),
            "application",
        ),
        **dict.fromkeys(
            ("SignedDelivery", "sample", "sample_body", "sample_types", "sign_delivery"), "signing"
        ),
        "SendingUpstream": "sending_upstream",
        "verify_notification": "notifications",
        "World": "simulation.plan",
        **dict.fromkeys(("SimulationFailedError", "simulate"), "simulation.run"),
        **dict.fromkeys(("MockUpstream", "MockedCall", "MockedRoute"), "upstream"),
    },
)
