"""What type checkers know of the client's resources; checked by ``mypy tests/typing``, never run.

A line with an ignore must be an error: mypy reports ignores that nothing needs.
"""

from typing import assert_type

import httpx

from sdk_trio.client.client import Client
from sdk_trio.client.export import CsvExport
from sdk_trio.client.listing import Listing
from sdk_trio.client.operations.sales import Orders
from sdk_trio.client.pages import Page
from sdk_trio.client.records import Record


async def check(client: Client) -> None:
    """State each kind of answer once."""
    assert_type(client.orders, Orders)
    assert_type(await client.orders.get(id="1"), Record)
    assert_type(await client.metrics.list_dashboards(), list[Record])
    assert_type(client.subscriptions.list(active=True), Listing)
    assert_type(await client.subscriptions.list().first_page(), Page)
    assert_type(await client.products.delete("1"), None)
    assert_type(client.orders.export(), CsvExport)
    assert_type(await client.orders.get.raw("1"), httpx.Response)
    assert_type(client.customer_portal.orders.list(), Listing)
    async for record in client.customers.members.list("1"):
        assert_type(record, Record)
    async with client.orders.export() as rows:
        async for row in rows:
            assert_type(row, dict[str, str])
    client.orders.gett("1")  # type: ignore[attr-defined]  # no such operation
    client.ordres  # type: ignore[attr-defined]  # noqa: B018 - no such resource
    client.orders.get("1")  # type: ignore[unused-coroutine]  # not awaited
    client.orders.list(options=1)  # type: ignore[arg-type]  # no options
