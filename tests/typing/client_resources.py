"""What type checkers know of the client's resources; checked by ``mypy tests/typing``, never run.

A line with an ignore must be an error: mypy reports ignores that nothing needs.
"""

from datetime import datetime
from typing import assert_type

import httpx

from sdk_trio import CallOptions, Client, Record, SyncClient
from sdk_trio.client.blocking import SyncExport, SyncListing
from sdk_trio.client.export import CsvExport
from sdk_trio.client.models import (
    CustomerOrder,
    CustomerTeam,
    Member,
    MetricDashboardSchema,
    Order,
    OrderStatus,
    Subscription,
    Unlisted,
)
from sdk_trio.client.operations.table import Orders
from sdk_trio.client.pages import Listing, Page


async def check(client: Client) -> None:
    """State each kind of answer once."""
    assert_type(client.orders, Orders)
    assert_type(await client.orders.get(id="1"), Order)
    assert_type(await client.metrics.list_dashboards(), list[MetricDashboardSchema])
    assert_type(client.subscriptions.list(active=True), Listing[Subscription])
    assert_type(await client.subscriptions.list().first_page(), Page[Subscription])
    assert_type(await client.products.delete("1"), None)
    assert_type(client.orders.export(), CsvExport)
    assert_type(await client.orders.get.raw("1"), httpx.Response)
    assert_type((await client.orders.get.with_response("1")).result, Order)
    assert_type((await client.orders.list.with_response()).result, Page[Order])
    assert_type(client.customer_portal.orders.list(), Listing[CustomerOrder])
    async for record in client.customers.members.list("1"):
        assert_type(record, Member)
    async with client.orders.export() as rows:
        async for row in rows:
            assert_type(row, dict[str, str])
    client.orders.gett("1")  # type: ignore[attr-defined]  # no such operation
    client.ordres  # type: ignore[attr-defined]  # noqa: B018 - no such resource
    client.orders.get("1")  # type: ignore[unused-coroutine]  # not awaited
    client.orders.list(options=1)  # type: ignore[arg-type]  # no options


async def check_fields(client: Client) -> None:
    """Fields have their types, and what is newer than this package is readable."""
    order: Record = await client.orders.get("1")
    order.status  # type: ignore[attr-defined]  # noqa: B018 - a record of no model
    known = await client.orders.get("1")
    assert_type(known.status, OrderStatus)
    assert_type(known.customer.email, str | None)
    assert_type(known.seats, int | None)
    assert_type(known.created_at, datetime)
    assert_type(known.modified_at, datetime | None)
    assert_type(known.metadata["plan"], str | int | float | bool)
    known["brand_new"]
    known.satus  # type: ignore[attr-defined]  # noqa: B018 - misspelt
    customer = await client.customers.get("1")
    if customer.type == "team":
        assert_type(customer, CustomerTeam)
    if known.status == "brand_new":  # a text that the list does not have is not a mistake
        assert_type(known.status, Unlisted)
    known.status = "paid"  # type: ignore[misc]  # records are read-only


async def check_arguments(client: Client) -> None:
    """Arguments have names and types; there are ways past them."""
    client.orders.list(status=["paid", "void"], customer_id=["1"], query={"brand_new": 1})
    client.orders.list(stauts="paid")  # type: ignore[call-arg]  # misspelt
    client.orders.list(status="piad")  # type: ignore[arg-type]  # not in the list
    client.orders.list(page="1")  # type: ignore[arg-type]  # no number
    await client.orders.get()  # type: ignore[call-arg]  # no id
    await client.subscriptions.update("1", cancel_at_perod_end=True)  # type: ignore[call-arg]
    await client.products.create(name="Book")  # type: ignore[call-arg]  # prices are required
    await client.customers.create.unchecked(body={"whole": True}, brand_new=1)
    await client.products.create(name="x", prices=[], medias="1")  # type: ignore[arg-type]
    await client.oauth2.request_token(grant_type="refresh_token", anything="else")
    client.orders.list.raw(stauts="paid")  # type: ignore[call-arg, unused-coroutine]
    client.with_options(max_retires=0)  # type: ignore[call-arg]  # misspelt
    client.orders.list(options=CallOptions(max_retries=0))


def check_sync(client: SyncClient) -> None:
    """The synchronous client is typed as the asynchronous one is."""
    assert_type(client.orders.get.with_response("1").result, Order)
    assert_type(client.orders.list.with_response().result, Page[Order])
    assert_type(client.orders.get("1"), Order)
    assert_type(client.orders.list(), SyncListing[Order])
    assert_type(client.orders.export(), SyncExport)
    assert_type(client.orders.get.raw("1"), httpx.Response)
    assert_type(client.products.delete("1"), None)
    for order in client.customer_portal.orders.list():
        assert_type(order, CustomerOrder)
    with client.orders.export() as rows:
        for row in rows:
            assert_type(row, dict[str, str])
    client.orders.list(stauts="paid")  # type: ignore[call-arg]  # misspelt
    client.with_options(max_retires=0)  # type: ignore[call-arg]  # misspelt
