"""The start's check of the handlers: a warning line for each known type without one."""

import logging
from secrets import token_bytes

import pytest
from support.deliveries import settings
from support.serving import registry, running, works

from sdk_trio import HandlerRegistry, Runtime
from sdk_trio.errors import MissingHandlersError
from sdk_trio.events import DEFAULT_CATALOG, OrderPaidEvent, SubscriptionActiveEvent
from sdk_trio.testing import running_app
from sdk_trio.webhooks.signature import new_secret


async def warnings_of(caplog, handlers, **keys):
    caplog.clear()
    caplog.set_level(logging.INFO)
    async with running(Runtime(settings(**keys), handlers)):
        pass
    lines = [r for r in caplog.records if r.getMessage().startswith("webhook.handler_missing")]
    assert {line.levelname for line in lines} <= {"WARNING"}
    return [line.getMessage() for line in lines]


async def test_each_known_type_without_a_handler_is_a_warning_line_of_its_own(caplog):
    lines = await warnings_of(caplog, registry(works))
    lacking = [row for row in DEFAULT_CATALOG.known if row.event_class is not OrderPaidEvent]
    assert len(lines) == len(lacking) == 27
    for line, row in zip(lines, lacking, strict=True):
        assert "27 of 28 known event types" in line
        assert f"type='{row.wire_type}'" in line
        assert f"handlers.register({row.event_class.__name__}, YourHandler)" in line
        assert "\n" not in line


async def test_a_complete_application_logs_no_such_line(caplog):
    handlers = registry(works)
    for row in DEFAULT_CATALOG.known:
        if row.event_class is not OrderPaidEvent:
            handlers.register(row.event_class, works)
    assert await warnings_of(caplog, handlers) == []


async def test_only_ignore_silences_the_check(caplog):
    handlers = registry(works)
    handlers.fallback(works)
    assert len(await warnings_of(caplog, handlers)) == 27
    handlers.ignore(SubscriptionActiveEvent)
    lines = await warnings_of(caplog, handlers)
    assert len(lines) == 26
    assert not any("subscription.active" in line for line in lines)
    assert all("26 of 28" in line for line in lines)
    handlers.ignore()
    assert await warnings_of(caplog, handlers) == []


@pytest.mark.parametrize(
    ("keys", "lines"),
    [
        ({"Forward__Url": "http://127.0.0.1:9/"}, 0),
        (
            {
                "Forward__Routes__0__Types": "order.*",
                "Forward__Routes__0__Url": "http://127.0.0.1:9/",
            },
            24,
        ),
    ],
)
async def test_a_route_of_the_gateway_counts_as_the_handler_of_its_types(
    caplog, monkeypatch, keys, lines
):
    monkeypatch.setenv("SDK_FORWARD_SECRET", new_secret(token_bytes(32)))
    found = await warnings_of(caplog, HandlerRegistry(), **keys)
    assert len(found) == lines
    strict = settings(Webhooks__FailOnMissingHandlers=True, **keys)
    if lines:
        with pytest.raises(MissingHandlersError, match=f"{lines} of 28"):
            Runtime(strict, HandlerRegistry())
    else:
        Runtime(strict, HandlerRegistry())


async def test_the_test_kit_does_not_report_what_a_test_has_left_out(caplog):
    caplog.set_level(logging.INFO)
    async with running_app(registry(works)):
        pass
    assert "webhook.handler_missing" not in caplog.text
