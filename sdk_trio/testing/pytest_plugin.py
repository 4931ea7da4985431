"""Fixtures for pytest with pytest-trio: ``sdk_app`` and ``deliver``.

Override ``sdk_handlers`` to return your registry, and ``sdk_settings`` for other settings. The
package is imported when a fixture is used, so that a test run without them does not pay for it.
"""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import trio

    from ..config import Settings
    from ..webhooks import HandlerRegistry
    from . import AppUnderTest

try:
    from pytest_trio import trio_fixture
except ImportError:  # pragma: no cover - without pytest-trio there is nothing to run them in

    def trio_fixture(function: Any) -> Any:
        """Leave the fixture to pytest, which reports that an async test has no runner."""
        return pytest.fixture(function)


@pytest.fixture
def sdk_handlers() -> "HandlerRegistry":
    """Return the handlers under test; override it in your ``conftest.py``."""
    from ..webhooks import HandlerRegistry

    return HandlerRegistry()


@pytest.fixture
def sdk_settings() -> "Settings":
    """Return the settings of ``sdk_app``; override it to test with others."""
    from . import settings_for_tests

    return settings_for_tests()


@trio_fixture  # type: ignore[untyped-decorator]  # pytest-trio has no types
async def sdk_app(  # noqa: ASYNC900,ASYNC911 - pytest-trio runs it in a task of its own
    nursery: "trio.Nursery", sdk_handlers: "HandlerRegistry", sdk_settings: "Settings"
) -> AsyncIterator["AppUnderTest"]:
    """Run the handlers in a real runtime on a free port; it is drained after the test."""
    from ..runtime import Runtime
    from . import AppUnderTest

    runtime = Runtime(sdk_settings, sdk_handlers)
    await nursery.start(runtime.run)
    yield AppUnderTest(runtime)
    runtime.shut_down("the test ended")


@pytest.fixture
def deliver(sdk_app: "AppUnderTest") -> Any:
    """Return ``await deliver("order.paid", {...})``: see :meth:`AppUnderTest.deliver`."""
    return sdk_app.deliver
