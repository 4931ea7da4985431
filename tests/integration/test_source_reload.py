"""Reloads of sources: secrets, routes and places change in a running receiver."""

from typing import Any

import httpx
import msgspec
from msgspec.structs import replace
from support.sources import STRIPE, WHSEC

from sdk_trio import HandlerRegistry
from sdk_trio.config import Secret
from sdk_trio.config.fields import SourceScheme
from sdk_trio.config.options.sources import SourceOptions
from sdk_trio.testing import AppUnderTest, running_app, settings_for_tests
from sdk_trio.webhooks.sources.signing import SourceDelivery

OLD, NEW = (Secret(text) for text in (STRIPE, WHSEC))


class Item(msgspec.Struct):
    id: str = "missing"


def shop(**settings: Any) -> SourceOptions:
    return SourceOptions(name="shop", scheme=SourceScheme.STRIPE, secrets=(OLD,), **settings)


def recording() -> tuple[HandlerRegistry, list[Any]]:
    """Return a handler of the source with a class, and the data that it has got."""
    handlers = HandlerRegistry()
    seen: list[Any] = []
    handlers.source("shop").on("a", Item)(lambda event: seen.append(event.data))
    return handlers, seen


def reload(app: AppUnderTest, *sources: SourceOptions) -> None:
    app.runtime.reload(replace(app.settings, sources=sources))


async def post(app: AppUnderTest, signed: SourceDelivery, path: str = "/hooks/shop") -> int:
    url = app.url.removesuffix(app.settings.webhooks.path) + path
    async with httpx.AsyncClient() as client:
        return (await client.post(url, content=signed.body, headers=signed.headers)).status_code


async def test_a_source_that_a_reload_adds_has_the_data_of_its_scheme() -> None:
    handlers, seen = recording()
    async with running_app(handlers, settings_for_tests()) as app:
        reload(app, shop())
        await app.deliver("a", {"id": "of the object"}, source="shop", expect="done")

    assert seen == [Item("of the object")]


async def test_a_changed_place_of_the_data_is_in_force_at_once() -> None:
    handlers, seen = recording()
    body = b'{"id":"%s","type":"a","data":{"object":{"id":"first"}},"other":{"id":"second"}}'
    async with running_app(handlers, replace(settings_for_tests(), sources=(shop(),))) as app:
        await app.deliver(body % b"1", source="shop", expect="done")
        reload(app, shop(data="/other"))
        await app.deliver(body % b"2", source="shop", expect="done")

    assert seen == [Item("first"), Item("second")]


async def test_a_secret_is_rotated_without_a_restart() -> None:
    handlers, seen = recording()
    async with running_app(handlers, replace(settings_for_tests(), sources=(shop(),))) as app:
        old = [app.sign_as("shop", "a", {"id": "old"}) for _ in range(3)]
        assert await post(app, old[0]) == 200
        reload(app, replace(shop(), secrets=(NEW, OLD)))
        new = [app.sign_as("shop", "a", {"id": "new"}) for _ in range(2)]
        assert [await post(app, each) for each in (old[1], new[0])] == [200, 200]
        reload(app, replace(shop(), secrets=(NEW,)))
        assert [await post(app, each) for each in (old[2], new[1])] == [400, 200]

    assert seen == [Item("old"), Item("old"), Item("new"), Item("new")]


async def test_a_reload_moves_and_removes_routes() -> None:
    async with running_app(None, replace(settings_for_tests(), sources=(shop(),))) as app:
        signed = [app.sign_as("shop", "a", {}) for _ in range(3)]
        reload(app, shop(path="/moved"))
        assert await post(app, signed[0]) == 404
        assert await post(app, signed[1], "/moved") == 200
        reload(app)
        assert await post(app, signed[2], "/moved") == 404
