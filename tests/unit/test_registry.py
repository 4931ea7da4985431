"""Registering handlers: accepted ones, refused ones, and the errors."""

import functools
import inspect
import sys
import types
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.deliveries import memory_inbox, settings

from sdk_trio.errors import EXIT_CONFIGURATION, HandlerRegistrationError, MissingHandlersError
from sdk_trio.events import (
    DEFAULT_CATALOG,
    DiscountCreatedEvent,
    Event,
    OrderCreatedEvent,
    OrderPaidEvent,
    RefundUpdatedEvent,
)
from sdk_trio.records.policies import Backoff
from sdk_trio.webhooks import HandlerRegistry, Services, WebhookHandlerBase, WebhookReceiver
from sdk_trio.webhooks.handler import ThreadHandler

E = TypeVar("E", bound=Event[Any])

KNOWN = [row.event_class for row in DEFAULT_CATALOG.known]


class Grant(WebhookHandlerBase[OrderPaidEvent]):
    def __init__(self, services=None):
        self.services = services

    async def handle_core(self, event):
        self.event = event


class NeedsServices(Grant):
    def __init__(self, services):
        super().__init__(services)


class Unfinished(WebhookHandlerBase[OrderPaidEvent]):
    pass


class Callable_:  # noqa: N801 - what it is
    async def __call__(self, event):
        self.event = event


async def function(event):
    function.event = event


async def with_services(event, services):
    with_services.seen = (event, services)


def make_grant():
    return Grant()


def make_with_services(services):
    return Grant(services)


def annotated_factory(given: Services):
    return Grant(given)


def declared_factory(given) -> Grant:
    return Grant(given)


def declared_in_words(given) -> "Grant":
    return Grant(given)


class NotAHandler:
    pass


def services_of():
    options = settings()
    return Services(options, memory_inbox())


def run(handler, event):
    """Run a coroutine function that never waits."""
    coroutine = handler.handle_core(event)
    with pytest.raises(StopIteration):
        coroutine.send(None)


def bound(handler, event_class=OrderPaidEvent, services=None):
    handlers = HandlerRegistry()
    handlers.register(event_class, handler)
    return handlers.bind(services or services_of()).find(event_class.wire_type).handler


# -- kinds of handlers ------------------------------------------------------------------------


def test_an_instance_is_used_as_it_is():
    handler = Grant()
    assert bound(handler) is handler


@pytest.mark.parametrize("factory", [Grant, make_grant, lambda: Grant()])
def test_a_factory_without_parameters_is_called_once(factory):
    assert isinstance(bound(factory), Grant)


@pytest.mark.parametrize(
    "factory", [NeedsServices, make_with_services, lambda services: Grant(services)]
)
def test_a_factory_with_a_parameter_gets_the_services(factory):
    services = services_of()
    assert bound(factory, services=services).services is services


def test_every_binding_builds_new_handlers():
    handlers = HandlerRegistry()
    handlers.register(OrderPaidEvent, Grant)
    one, two = (handlers.bind(services_of()).find("order.paid").handler for _ in range(2))
    assert one is not two


def test_functions_of_the_event_and_of_event_and_services():
    services = services_of()
    run(bound(function), "event 1")
    assert function.event == "event 1"
    run(bound(with_services, services=services), "event 2")
    assert with_services.seen == ("event 2", services)


def test_other_things_that_are_awaited_when_called():
    seen = []

    class Shop:
        async def on_paid(self, event):
            seen.append((self, event))

    shop = Shop()
    run(bound(shop.on_paid), 1)
    assert seen == [(shop, 1)]

    async def with_option(prefix, event):
        seen.append((prefix, event))

    run(bound(functools.partial(with_option, "x")), 2)
    assert seen[-1] == ("x", 2)
    caller = Callable_()
    run(bound(caller), 3)
    assert caller.event == 3


def test_a_function_with_an_optional_second_parameter_gets_the_event_alone():
    seen = []

    async def handler(event, log=None):
        seen.append((event, log))

    run(bound(handler), 1)
    assert seen == [(1, None)]


def test_as_a_decorator_it_leaves_the_function_as_it_was():
    handlers = HandlerRegistry()

    @handlers.on(OrderPaidEvent, enqueue=True, ordered=True)
    async def handle(event):
        pass

    @handlers.on(OrderCreatedEvent)
    class Handle(WebhookHandlerBase[OrderCreatedEvent]):
        async def handle_core(self, event):
            pass

    assert isinstance(handle, types.FunctionType)
    assert isinstance(Handle, type)
    found = handlers.bind(services_of())
    paid, created = found.find("order.paid"), found.find("order.created")
    assert (paid.enqueue, paid.ordered) == (True, True)
    assert (created.enqueue, created.ordered) == (False, False)
    assert "handle" in paid.name
    assert set(handlers) == {"order.paid", "order.created"}
    assert len(handlers) == 2


# -- refusals ---------------------------------------------------------------------------------


def test_one_handler_per_type_and_the_error_names_both_ways_out():
    handlers = HandlerRegistry()
    handlers.register(OrderPaidEvent, Grant)
    with pytest.raises(HandlerRegistrationError) as caught:
        handlers.register(OrderPaidEvent, function)
    for part in ("OrderPaidEvent", "order.paid", "Grant"):
        assert part in str(caught.value)
    assert caught.value.exit_code == EXIT_CONFIGURATION
    # The first one stays.
    assert isinstance(handlers.bind(services_of()).find("order.paid").handler, Grant)


class Invoice(Event[dict]):
    wire_type = "acme.invoice_sent"


@pytest.mark.parametrize("event_class", [Invoice, Event, dict, "order.paid", None])
def test_only_classes_of_the_catalogue_can_be_registered(event_class):
    with pytest.raises(HandlerRegistrationError, match=r"catalog|a type's name"):
        HandlerRegistry().register(event_class, function)


def test_an_application_adds_its_own_types():
    handlers = HandlerRegistry(catalog=DEFAULT_CATALOG.with_event(Invoice))
    handlers.register(Invoice, function)
    assert handlers.bind(services_of()).find("acme.invoice_sent") is not None
    assert len(handlers.missing()) == 28


@pytest.mark.parametrize("handler", [None, "handler", 7, object(), [], {}])
def test_an_invalid_handler_is_refused_at_once(handler):
    with pytest.raises(HandlerRegistrationError, match="is not a handler"):
        HandlerRegistry().register(OrderPaidEvent, handler)


def test_a_class_without_handle_core_is_refused_at_once_and_an_instance_at_the_latest_at_start():
    with pytest.raises(HandlerRegistrationError, match="handle_core"):
        HandlerRegistry().register(OrderPaidEvent, Unfinished)
    for handler in (Unfinished(), lambda: Unfinished()):
        with pytest.raises(HandlerRegistrationError, match="handle_core"):
            bound(handler)


def test_a_handler_whose_handle_core_is_synchronous_is_refused():
    class Synchronous(WebhookHandlerBase[OrderPaidEvent]):
        def handle_core(self, event):
            return None

    with pytest.raises(HandlerRegistrationError, match="async def"):
        bound(Synchronous)


def test_a_decorator_around_handle_core_is_allowed():
    def decorated(function):
        @functools.wraps(function)
        def wrapper(*arguments):
            return function(*arguments)

        return wrapper

    class Decorated(Grant):
        handle_core = decorated(Grant.handle_core)

    handler = bound(Decorated)
    run(handler, "event")
    assert handler.event == "event"


@pytest.mark.parametrize(
    "factory", [lambda: None, lambda: "x", lambda services: 7, dict, NotAHandler]
)
def test_a_factory_of_something_else_is_refused(factory):
    with pytest.raises(HandlerRegistrationError):
        bound(factory)


def test_a_factory_that_fails_is_named_with_its_error():
    def broken():
        raise LookupError("no database")

    with pytest.raises(
        HandlerRegistrationError, match=r"broken.*LookupError: no database"
    ) as caught:
        bound(broken)
    assert isinstance(caught.value.__cause__, LookupError)


@pytest.mark.parametrize("parameters", [0, 3])
def test_a_function_of_another_number_of_parameters_is_refused_before_the_first_event(parameters):
    async def none():
        pass

    async def three(event, services, more):
        pass

    with pytest.raises(HandlerRegistrationError, match="event"):
        bound(none if parameters == 0 else three)


def test_ordered_needs_enqueue():
    handlers = HandlerRegistry()
    with pytest.raises(HandlerRegistrationError, match="enqueue=True"):
        handlers.register(OrderPaidEvent, Grant, ordered=True)
    with pytest.raises(HandlerRegistrationError, match="enqueue=True"):
        handlers.fallback(function, ordered=True)
    assert len(handlers) == 0


# -- fallback ---------------------------------------------------------------------------------


def test_the_fallback_handles_types_without_a_handler():
    handlers = HandlerRegistry()
    handlers.register(OrderPaidEvent, Grant)
    assert handlers.fallback(function, enqueue=True) is function
    found = handlers.bind(services_of())
    assert isinstance(found.find("order.paid").handler, Grant)
    for event_type in ("order.created", "never.heard_of", ""):
        assert found.find(event_type) is found.fallback
    assert found.fallback.enqueue


def test_without_a_fallback_nothing_is_found():
    assert HandlerRegistry().bind(services_of()).find("order.paid") is None


def test_there_is_one_fallback():
    handlers = HandlerRegistry()
    handlers.fallback(function)
    with pytest.raises(HandlerRegistrationError, match="function"):
        handlers.fallback(Grant)


# -- completeness -----------------------------------------------------------------------------


@given(st.sets(st.sampled_from(KNOWN)))
def test_there_is_a_line_for_each_known_type_without_a_handler(registered):
    handlers = HandlerRegistry()
    for event_class in registered:
        handlers.register(event_class, function)
    lines = [str(each) for each in handlers.missing()]
    lacking = [event_class for event_class in KNOWN if event_class not in registered]
    assert len(lines) == len(lacking)
    for line, event_class in zip(lines, lacking, strict=True):
        assert line.startswith(f"{len(lacking)} of 28 ")
        assert "\n" not in line
        name = event_class.__name__
        for part in (f" {event_class.wire_type} ", f"({name})", f"handlers.register({name}, "):
            assert part in line


def test_additional_types_and_the_fallback_do_not_count():
    handlers = HandlerRegistry()
    handlers.register(DiscountCreatedEvent, function)
    handlers.fallback(function)
    assert len(handlers.missing()) == 28


def test_types_that_are_left_out_on_purpose_are_not_missing():
    handlers = HandlerRegistry()
    handlers.ignore(*(each for each in KNOWN if each is not OrderPaidEvent))
    assert [(each.count, each.type) for each in handlers.missing()] == [("1 of 28", "order.paid")]
    with pytest.raises(HandlerRegistrationError, match="not in the catalogue"):
        handlers.ignore(Event)
    handlers.register(OrderPaidEvent, function)
    assert handlers.missing() == ()
    handlers.require_complete()


def test_ignore_without_arguments_settles_all_known_types():
    handlers = HandlerRegistry()
    handlers.ignore()
    assert handlers.missing() == ()
    handlers.require_complete()


@pytest.mark.parametrize(
    "factory",
    [
        lambda: Grant(),
        lambda services: Grant(services),
        make_grant,
        make_with_services,
        annotated_factory,
        declared_factory,
        declared_in_words,
        lambda services=None: Grant(services),
        functools.partial(make_with_services, "given"),
    ],
)
def test_a_factory_is_called_once_at_the_start(factory):
    handler = bound(factory)
    assert isinstance(handler, Grant)


# -- functions in threads -----------------------------------------------------------------------


class Shop:
    def on_paid(self, event):
        """Nothing."""

    @staticmethod
    def on_created(event):
        """Nothing."""

    def __call__(self, event):
        """Nothing."""


def wrapped(function):
    @functools.wraps(function)
    def wrapper(*arguments):
        return function(*arguments)

    return wrapper


def takes_both(event, services):
    """Nothing."""


def with_default(event=None):
    """Nothing."""


@pytest.mark.parametrize(
    ("plain", "name"),
    [
        (lambda event: None, "<lambda>"),
        (lambda paid: None, "<lambda>"),
        (takes_both, "takes_both"),
        (with_default, "with_default"),
        (Shop().on_paid, "Shop.on_paid"),
        (Shop.on_created, "Shop.on_created"),
        (staticmethod(takes_both), "takes_both"),
        (Shop(), "Shop"),
        (functools.partial(takes_both, services=None), "takes_both"),
        (functools.partial(functools.partial(takes_both), services=None), "takes_both"),
        ([].append, "list.append"),
        (lambda *arguments: None, "<lambda>"),
        (wrapped(takes_both), "takes_both"),
    ],
)
def test_a_plain_function_of_an_event_runs_in_a_thread_and_is_not_called_at_the_start(plain, name):
    handlers = HandlerRegistry()
    handlers.register(OrderPaidEvent, plain)
    found = handlers.bind(services_of()).find("order.paid")
    assert isinstance(found.handler, ThreadHandler)
    assert name in found.name
    assert found.threads.total_tokens == 16


@pytest.mark.parametrize(
    "awaited", [function, Callable_(), wrapped(function), functools.partial(with_services)]
)
def test_a_coroutine_function_runs_in_the_loop(awaited):
    handlers = HandlerRegistry()
    handlers.register(OrderPaidEvent, awaited)
    assert handlers.bind(services_of()).find("order.paid").threads is None


def generates(event):
    yield


async def generates_later(event):
    yield


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (generates, "generates is a generator function"),
        (generates_later, "generates_later is a generator function"),
        (functools.partial(generates), "generates is a generator function"),
        (lambda a, b, c: None, "takes the event, or the event and the services"),
        (lambda event, *, other: None, "takes the event, or the event and the services"),
        (classmethod(takes_both), "is not a handler"),
        (iter, "the signature of iter is unknown"),
    ],
)
def test_a_callable_that_cannot_take_an_event_is_refused_at_once(handler, message):
    with pytest.raises(HandlerRegistrationError, match=message):
        HandlerRegistry().register(OrderPaidEvent, handler)
    with pytest.raises(HandlerRegistrationError, match=message):
        HandlerRegistry().fallback(handler)


def test_a_complete_registry_lacks_nothing():
    handlers = HandlerRegistry()
    for event_class in KNOWN:
        handlers.register(event_class, function)
    assert handlers.missing() == ()
    handlers.require_complete()
    WebhookReceiver(settings(Webhooks__FailOnMissingHandlers=True), handlers)


def test_fail_on_missing_handlers_names_all_of_them():
    handlers = HandlerRegistry()
    for event_class in KNOWN:
        if event_class not in (OrderPaidEvent, RefundUpdatedEvent):
            handlers.register(event_class, function)
    with pytest.raises(MissingHandlersError) as caught:
        WebhookReceiver(settings(Webhooks__FailOnMissingHandlers=True), handlers)
    assert caught.value.missing == ("order.paid", "refund.updated")
    text = str(caught.value)
    assert "Sdk:Webhooks:FailOnMissingHandlers" in text
    assert text.count("2 of 28") == 2
    assert caught.value.exit_code == EXIT_CONFIGURATION
    # By default it is a warning only.
    WebhookReceiver(settings(), handlers)


class OfPaid(WebhookHandlerBase[OrderPaidEvent]):
    async def handle_core(self, event):
        """Nothing."""


class Shared(WebhookHandlerBase[E]):
    async def handle_core(self, event):
        """Nothing."""


class OfPaidToo(Shared[OrderPaidEvent]):
    """Its event class comes from a base of the application's own."""


class OfAll(WebhookHandlerBase[Event[Any]]):
    async def handle_core(self, event):
        """Nothing."""


@pytest.mark.parametrize("handler", [OfPaid, OfPaid(), OfPaidToo])
def test_a_handler_of_another_event_class_is_refused_with_the_line_that_registers_it(handler):
    handlers = HandlerRegistry()
    line = inspect.currentframe().f_lineno + 2
    with pytest.raises(HandlerRegistrationError, match="OrderPaidEvent") as caught:
        handlers.register(OrderCreatedEvent, handler)
    assert f"{__file__}:{line}: " in str(caught.value)
    assert "OrderCreatedEvent" in str(caught.value)
    handlers.register(OrderPaidEvent, handler)


def test_a_factory_of_a_handler_of_another_event_class_is_refused_at_the_start():
    handlers = HandlerRegistry()
    line = inspect.currentframe().f_lineno + 1
    handlers.register(OrderCreatedEvent, lambda: OfPaid())
    with pytest.raises(HandlerRegistrationError, match=f"{__file__}:{line}: .*OrderPaidEvent"):
        handlers.bind(services_of())


def test_handlers_of_every_event_are_registered_for_any():
    handlers = HandlerRegistry()
    handlers.register(OrderCreatedEvent, OfAll)
    handlers.register(OrderPaidEvent, Shared)
    assert len(handlers) == 2


def test_a_factory_that_ends_programs_is_refused_as_any_that_fails():
    handlers = HandlerRegistry()
    handlers.register(OrderPaidEvent, lambda: sys.exit(3))
    with pytest.raises(HandlerRegistrationError, match="SystemExit: 3"):
        handlers.bind(services_of())


# -- policies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "reported"),
    [
        ({"max_attempts": 0}, "max_attempts=0 is not a whole number from 1 to 1000"),
        ({"max_attempts": True}, "max_attempts=True"),
        ({"timeout": -1}, "timeout=-1 is not a number of seconds from 0.01 to 604800"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"concurrency": 1.5}, "concurrency=1.5"),
        ({"timeout": 10**400}, "is not a number of seconds from 0.01 to 604800"),
        ({"rate_per_minute": -(10**400)}, "is not a number from 0.01 to 1e+06"),
        ({"rate_per_minute": 0}, "rate_per_minute=0"),
        ({"retry": 5}, "write retry=Backoff(base=1, cap=900)"),
        ({"retry": Backoff(10, 1)}, "cap=1, which is less than its base=10"),
        ({"retry": Backoff(-1, 1)}, "retry has base=-1"),
        ({"coalesce": 1}, "coalesce=1 is neither True nor False"),
        ({"priority": 1}, "there is no policy priority"),
        ({"enqueue": False, "concurrency": 1}, "concurrency needs enqueue=True"),
        ({"enqueue": False, "coalesce": True}, "coalesce needs enqueue=True"),
        ({"enqueue": False, "timeout": 10}, "from 0.01 to 9, as the sender waits 10 seconds"),
    ],
)
def test_a_policy_that_cannot_be_kept_is_refused_at_the_users_line(policy, reported):
    handlers = HandlerRegistry()
    line = inspect.currentframe().f_lineno + 2
    with pytest.raises(HandlerRegistrationError) as refused:
        handlers.register(OrderPaidEvent, Grant, **{"enqueue": True, **policy})
    assert reported in str(refused.value)
    assert str(refused.value).startswith(f"{__file__}:{line}: ")
    assert refused.value.exit_code == EXIT_CONFIGURATION


def test_a_handler_that_coalesces_is_ordered():
    handlers = HandlerRegistry()
    handlers.register(OrderPaidEvent, Grant, enqueue=True, coalesce=True, max_attempts=3)
    (registration,) = handlers.registrations
    assert registration.ordered
    assert str(registration.policy) == "max_attempts=3, coalesce=True"
