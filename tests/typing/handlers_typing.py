"""Handlers as type checkers see them; checked by ``mypy tests/typing``, never run.

Each line with a remark is refused, by pyright as well (test_client_typing).
"""

import functools
from typing import Any, assert_type

import sdk_trio
from sdk_trio.events import Event, OrderCreatedEvent, OrderPaidEvent, SourceEvent

handlers = sdk_trio.HandlerRegistry()


@handlers.on(OrderPaidEvent)
async def awaits(event: OrderPaidEvent) -> None: ...


@handlers.on(OrderPaidEvent, enqueue=True)
async def awaits_with_services(event: OrderPaidEvent, services: sdk_trio.Services) -> None: ...


@handlers.on(OrderPaidEvent)
def waits(event: OrderPaidEvent) -> None: ...


@handlers.on(OrderPaidEvent)
def waits_with_services(event: OrderPaidEvent, services: sdk_trio.Services) -> None: ...


@handlers.on(OrderPaidEvent)
def of_every_event(event: Event[Any]) -> None: ...


@handlers.on(OrderPaidEvent)
class Grant(sdk_trio.WebhookHandlerBase[OrderPaidEvent]):
    async def handle_core(self, event: OrderPaidEvent) -> None: ...


class WithServices(Grant):
    def __init__(self, services: sdk_trio.Services) -> None: ...


class OfEvery(sdk_trio.WebhookHandlerBase[Event[Any]]): ...


@handlers.fallback
def takes_the_rest(event: Event[Any]) -> None: ...


def make() -> Grant:
    return Grant()


def make_with_services(services: sdk_trio.Services) -> WithServices:
    return WithServices(services)


seen: list[Any] = []
handlers.register(OrderPaidEvent, Grant)
handlers.register(OrderPaidEvent, Grant())
handlers.register(OrderPaidEvent, WithServices)
handlers.register(OrderPaidEvent, OfEvery())
handlers.register(OrderPaidEvent, make)
handlers.register(OrderPaidEvent, make_with_services)
handlers.register(OrderPaidEvent, awaits)
handlers.register(OrderPaidEvent, waits)
handlers.register(OrderPaidEvent, lambda event: seen.append(event.data.id))
handlers.register(OrderPaidEvent, lambda: Grant())
handlers.register(OrderPaidEvent, seen.append)
handlers.register(OrderPaidEvent, functools.partial(print, "paid"))


# -- of a source ---------------------------------------------------------------------------------


class Invoice:
    id: str


stripe = handlers.source("stripe")


@stripe.on("invoice.paid", Invoice, enqueue=True, concurrency=2)
async def awaits_invoice(event: SourceEvent[Invoice]) -> None:
    assert_type(event.data, Invoice)
    assert_type(event.source, str)


@stripe.on("invoice.voided")
def waits_for_any(event: SourceEvent[Any]) -> None: ...


@stripe.on("invoice.sent", enqueue=True, transaction=True)
def writes(event: SourceEvent[Invoice], tx: sdk_trio.Transaction[Any]) -> None: ...


stripe.fallback(waits_for_any, enqueue=True)
stripe.register("invoice.open", OfEvery, max_attempts=3)
stripe.on("a")(7)  # type: ignore[type-var]


# -- refused ------------------------------------------------------------------------------------


class NoHandler: ...


def of_another(event: OrderCreatedEvent) -> None: ...


def returns(event: OrderPaidEvent) -> int:
    return 1


def takes_three(event: OrderPaidEvent, services: sdk_trio.Services, more: int) -> None: ...


handlers.register(OrderPaidEvent, 7)  # type: ignore[arg-type]
handlers.register(OrderPaidEvent, "grant")  # type: ignore[arg-type]
handlers.register(OrderPaidEvent, NoHandler)  # type: ignore[arg-type]
handlers.register(OrderPaidEvent, NoHandler())  # type: ignore[arg-type]
handlers.register(OrderPaidEvent, of_another)  # type: ignore[arg-type]
handlers.register(OrderPaidEvent, returns)  # type: ignore[arg-type]
handlers.register(OrderPaidEvent, takes_three)  # type: ignore[arg-type]
handlers.register(OrderCreatedEvent, Grant)  # type: ignore[arg-type]
handlers.on(OrderPaidEvent)(of_another)  # type: ignore[arg-type]
handlers.on(OrderPaidEvent)(returns)  # type: ignore[type-var]
handlers.on(OrderPaidEvent)(NoHandler)  # type: ignore[type-var]
handlers.on(waits)  # type: ignore[call-overload]
handlers.fallback(7)  # type: ignore[type-var]
