"""The usual mocks of httpx work with the client, as the page on testing describes."""

import httpx
import pytest

from sdk_trio import Client
from sdk_trio.testing import settings_for_tests

respx = pytest.importorskip("respx")

SETTINGS = settings_for_tests({"AccessToken": "a-token-for-tests"})


async def test_respx_stands_in_for_a_transport_of_httpx():
    # respx replaces httpx's own transports, which the client has none of unless it is given one.
    with respx.mock(base_url="https://sandbox-api.polar.sh/v1") as upstream:
        route = upstream.get("/orders/o").mock(
            side_effect=[httpx.Response(503), httpx.Response(200, json={"id": "o"})]
        )
        async with Client(SETTINGS, httpx.AsyncHTTPTransport()) as client:
            assert (await client.orders.get("o")).id == "o"
        assert route.call_count == 2


async def test_a_router_of_respx_is_a_transport():
    router = respx.Router(assert_all_called=False)
    router.post("/v1/refunds/").respond(201, json={"id": "ref_1"})
    async with Client(SETTINGS, httpx.MockTransport(router.async_handler)) as client:
        refund = await client.refunds.create(order_id="o", amount=1)
    assert refund.id == "ref_1"
    assert b"amount" in router.calls.last.request.content
