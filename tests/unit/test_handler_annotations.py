"""A handler whose annotation cannot be its event is refused at the line that registers it."""

import functools
import re
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import pytest

from sdk_trio.errors import HandlerRegistrationError
from sdk_trio.events import Event, OrderPaidEvent, OrderRefundedEvent, UnknownEvent
from sdk_trio.events.payloads import Order
from sdk_trio.webhooks import HandlerRegistry

if TYPE_CHECKING:
    from elsewhere import OnlyForCheckers

E = TypeVar("E", bound=Event[Any])


class HasKey(Protocol):
    key: str


def unannotated(event): ...
def exact(event: OrderPaidEvent): ...
def base(event: Event[Order]): ...
def bare(event: Event): ...
def anything(event: Any): ...
def an_object(event: object): ...
def either(event: OrderRefundedEvent | OrderPaidEvent): ...
def variable(event: E): ...
def protocol(event: HasKey): ...
def annotated(event: Annotated[OrderPaidEvent, "paid"]): ...
def text(event: "OrderPaidEvent"): ...
def for_checkers(event: "OnlyForCheckers"): ...
async def coroutine(event: OrderPaidEvent): ...


def other(event: OrderRefundedEvent): ...
def a_dict(event: dict): ...
def a_typed_dict(event: dict[str, Any]): ...
def a_payload(event: Order): ...
def other_text(event: "OrderRefundedEvent"): ...
def neither(event: OrderRefundedEvent | None): ...
def other_annotated(event: Annotated[OrderRefundedEvent, "x"]): ...
def narrower(event: "Narrower"): ...
async def other_coroutine(event: OrderRefundedEvent): ...
def writes(event: OrderRefundedEvent, tx): ...


class Narrower(OrderPaidEvent): ...


class Callable:
    def __call__(self, event: OrderRefundedEvent): ...


class Methods:
    def method(self, event: "OrderRefundedEvent"): ...


def with_order(function):
    @functools.wraps(function)
    def wrapper(*arguments):
        return function(arguments[0].data)

    return wrapper


@with_order
def decorated(order: Order): ...


GOOD = (
    unannotated,
    exact,
    base,
    bare,
    anything,
    an_object,
    either,
    variable,
    protocol,
    annotated,
    text,
    for_checkers,
    coroutine,
    decorated,
    lambda event: None,
)
WRONG = (
    other,
    a_dict,
    a_typed_dict,
    a_payload,
    other_text,
    neither,
    other_annotated,
    narrower,
    other_coroutine,
    Callable(),
    Methods().method,
    functools.partial(other),
)


@pytest.mark.parametrize("handler", GOOD)
def test_matching_annotations_are_accepted(handler):
    HandlerRegistry().register(OrderPaidEvent, handler)


@pytest.mark.parametrize("handler", WRONG)
def test_other_annotations_are_refused_with_the_line(handler):
    handlers = HandlerRegistry()
    with pytest.raises(HandlerRegistrationError, match=rf"^{re.escape(__file__)}:\d+: ") as caught:
        handlers.register(OrderPaidEvent, handler)
    assert "registered for OrderPaidEvent" in str(caught.value)
    assert len(handlers) == 0


def test_the_decorator_and_a_transaction_are_refused_too():
    handlers = HandlerRegistry()
    with pytest.raises(HandlerRegistrationError, match="takes OrderRefundedEvent"):
        handlers.on(OrderPaidEvent)(other)
    with pytest.raises(HandlerRegistrationError, match="takes OrderRefundedEvent"):
        handlers.register(OrderPaidEvent, writes, enqueue=True, transaction=True)


def test_a_fallback_takes_any_event_and_nothing_else():
    def unknown(event: UnknownEvent): ...

    HandlerRegistry().fallback(unknown)
    HandlerRegistry().fallback(base)
    with pytest.raises(HandlerRegistrationError, match="registered for every type"):
        HandlerRegistry().fallback(a_dict)
