"""Fixtures for pytest with pytest-trio: ``sdk_app``, ``deliver`` and ``sdk_upstream``.

Override ``sdk_handlers`` to return your registry, and ``sdk_settings`` for other settings. The
package is imported only when a fixture is used, so other test runs are not slower.
"""

from collections.abc import AsyncIterator, Iterator
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import trio

    from ..client.client import Client
    from ..config import Settings
    from ..webhooks import HandlerRegistry
    from . import AppUnderTest, MockUpstream
    from .application import RecordedHandlers

try:
    # pytest loads this file in every project with the package, even without pytest-trio.
    from pytest_trio import trio_fixture
except ImportError:  # pragma: no cover - without pytest-trio there is nothing to run them in

    def trio_fixture(function: Any) -> Any:
        """Return the fixture unchanged; pytest then reports that an async test has no runner."""
        return pytest.fixture(function)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that use these fixtures as Trio tests, so that ``trio_mode`` is not needed."""
    for item in items:
        function = getattr(item, "obj", None)
        if (
            "sdk_app" in getattr(item, "fixturenames", ())
            and iscoroutinefunction(function)
            and item.get_closest_marker("trio") is None
        ):
            item.add_marker(pytest.mark.trio)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a plain test that uses these fixtures, with a message that says how to write it."""
    # Otherwise pytest-trio reports an error of an inner fixture. With pytest 9 it also fails every
    # later test.
    if (
        "sdk_app" in getattr(item, "fixturenames", ())
        and item.get_closest_marker("trio") is None
        and not iscoroutinefunction(getattr(item, "obj", None))
    ):
        pytest.fail(
            f"{item.name} uses the fixture deliver or sdk_app, which need an async test; write "
            f"`async def {getattr(item, 'originalname', item.name)}`",
            pytrace=False,
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> "Iterator[None]":
    """Show the exception of a test of these fixtures without the group of pytest-trio."""
    failed: BaseException | None = None
    try:
        return (yield)
    except BaseExceptionGroup as group:
        if "sdk_app" not in getattr(item, "fixturenames", ()):
            raise
        failed = group
    from ..errors import only_member

    raise only_member(failed)


@pytest.fixture
def sdk_handlers() -> "HandlerRegistry":
    """Return the handlers under test; override it in your ``conftest.py``."""
    from ..webhooks import HandlerRegistry

    return HandlerRegistry()


@pytest.fixture
def sdk_settings() -> "Settings":
    """Return the settings of ``sdk_app``; override the fixture to change them."""
    from . import settings_for_tests

    return settings_for_tests()


@pytest.fixture
def sdk_upstream() -> "Iterator[MockUpstream]":
    """Return an upstream in memory; handlers in ``sdk_app`` get its client in their services.

    The test fails if a route was not called, or a call had no route.
    """
    from . import MockUpstream

    upstream = MockUpstream()
    yield upstream
    upstream.assert_expected()


@pytest.fixture
def _sdk_client(request: pytest.FixtureRequest) -> "Client | None":
    """Return the client of ``sdk_upstream`` for tests that ask for it."""
    # A fixture cannot request another one conditionally. Without this check every test would need
    # httpx.
    if "sdk_upstream" not in request.fixturenames:
        return None
    upstream: MockUpstream = request.getfixturevalue("sdk_upstream")
    return upstream.client()


@pytest.fixture
def _sdk_recorded(sdk_handlers: "HandlerRegistry") -> "Iterator[RecordedHandlers]":
    """Return the handlers with recorders, and run an asyncio loop if a handler needs one."""
    from .application import RecordedHandlers

    recorded = RecordedHandlers(sdk_handlers)
    # Not in the fixture of the app, which ends before the drain: the loop must last until then.
    with recorded.beside_asyncio():
        yield recorded


@pytest.fixture
def _sdk_stored(
    _sdk_recorded: "RecordedHandlers", sdk_settings: "Settings"
) -> "Iterator[Settings]":
    """Return the settings, with a store that has transactions if the handlers need them."""
    with _sdk_recorded.stored(sdk_settings) as settings:
        yield settings


@trio_fixture  # type: ignore[untyped-decorator]  # pytest-trio has no types
async def sdk_app(  # noqa: ASYNC900,ASYNC911 - pytest-trio runs it in a task of its own
    nursery: "trio.Nursery",
    _sdk_recorded: "RecordedHandlers",
    _sdk_stored: "Settings",
    _sdk_client: "Client | None",
) -> AsyncIterator["AppUnderTest"]:
    """Run the handlers in a real runtime on a free port; it is drained after the test."""
    from ..runtime import Runtime
    from . import AppUnderTest

    runtime = Runtime(_sdk_stored, _sdk_recorded, client=_sdk_client)
    await nursery.start(runtime.run)
    yield AppUnderTest(runtime, _sdk_recorded.raised)
    runtime.shut_down("the test ended")


@pytest.fixture
def deliver(sdk_app: "AppUnderTest") -> Any:
    """Return ``await deliver("order.paid", {...})``: see :meth:`AppUnderTest.deliver`."""
    return sdk_app.deliver
