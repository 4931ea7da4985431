"""The runtime with its client, over real sockets: handlers call the upstream, and it ends well."""

import subprocess
import sys

import pytest
import trio
from support.deliveries import settings as standalone_settings
from support.scripted_upstream import TOKEN, full_stack, scripted_upstream
from support.waiting import until

import sdk_trio
from sdk_trio.events import OrderPaidEvent


def handlers_that(function, **how):
    handlers = sdk_trio.HandlerRegistry()
    handlers.register(OrderPaidEvent, function, **how)
    return handlers


async def test_a_handler_calls_the_upstream_through_its_services():
    seen = []

    async def look_up(event, services):
        order = await services.client.orders.get("ord_3")
        seen.append((event.webhook_id, order.status, order.amount))

    async with scripted_upstream() as upstream, trio.open_nursery() as nursery:
        runtime = sdk_trio.Runtime(full_stack(upstream), handlers_that(look_up))
        assert runtime.client_samples == ()
        started = await nursery.start(runtime.run)
        upstream.target = f"{started.webhook_url}/hooks/sdk"
        assert await upstream.deliver("evt_1") == 200
        assert seen == [("evt_1", "paid", 3)]
        values = {(s.name, s.labels): s.value for s in runtime.client_samples}
        named = (("method", "GET"), ("outcome", "ok"))
        assert values["sdk_client_requests_total", named] == 1
        assert values["sdk_client_circuit_state", ()] == 0
        assert values["sdk_client_attempts_count", ()] == 1
        runtime.client.breaker.isolate()
        with pytest.raises(sdk_trio.CircuitOpenError):
            await runtime.client.orders.get("ord_3")
        assert ("sdk_client_circuit_state", (), 3) in [
            (s.name, s.labels, s.value) for s in runtime.client_samples
        ]
        runtime.client.breaker.close()
        assert (await runtime.client.orders.get("ord_3")).amount == 3
        runtime.shut_down("the test ended")
    assert runtime.client.counters.requests["GET", "ok"] == 2
    with pytest.raises(sdk_trio.NotRunningError, match="not open"):
        await runtime.client.orders.get("ord_3")


async def test_the_client_outlives_the_drain():
    """A handler that is finished during the drain still reaches the upstream."""
    begun, go_on, seen = trio.Event(), trio.Event(), []

    async def slow(event, services):
        begun.set()
        await go_on.wait()
        seen.append((await services.client.orders.get("ord_1")).status)

    async with scripted_upstream() as upstream, trio.open_nursery() as nursery:
        runtime = sdk_trio.Runtime(full_stack(upstream), handlers_that(slow, enqueue=True))
        started = await nursery.start(runtime.run)
        upstream.target = f"{started.webhook_url}/hooks/sdk"
        assert await upstream.deliver("evt_1") == 200
        await begun.wait()
        runtime.shut_down("deploy")
        await until(lambda: not runtime.ready)
        go_on.set()
    assert seen == ["paid"]
    assert runtime.report.drained == 1


async def test_standalone_has_no_client_and_reports_that():
    caught = []

    async def needs_it(event, services):
        try:
            services.client.orders  # noqa: B018 - looking is what fails
        except sdk_trio.NotRunningError as error:
            caught.append(str(error))

    async with scripted_upstream() as upstream, trio.open_nursery() as nursery:
        runtime = sdk_trio.Runtime(standalone_settings(), handlers_that(needs_it))
        started = await nursery.start(runtime.run)
        upstream.target = f"{started.webhook_url}/hooks/sdk"
        assert await upstream.deliver("evt_1") == 200
        runtime.shut_down("the test ended")
        alone = sdk_trio.Runtime(full_stack(upstream), standalone=True)
    assert "standalone" in caught[0]
    assert "Sdk:AccessToken" in caught[0]
    for standalone in (runtime, alone):
        with pytest.raises(sdk_trio.NotRunningError, match="standalone"):
            standalone.client  # noqa: B018 - looking is what fails
        assert standalone.client_samples == ()


async def test_a_client_of_ones_own_is_opened_and_closed():
    async with scripted_upstream() as upstream, trio.open_nursery() as nursery:
        settings = full_stack(upstream)
        client = sdk_trio.Client(settings)
        runtime = sdk_trio.Runtime(settings, client=client)
        assert runtime.client is client
        await nursery.start(runtime.run)
        assert (await client.orders.get("ord_2")).amount == 2
        runtime.shut_down("the test ended")
    with pytest.raises(sdk_trio.NotRunningError):
        await client.orders.get("ord_2")


async def test_parts_without_their_client_or_extra_fail_the_construction(monkeypatch):
    async with scripted_upstream() as upstream:
        reconciling = full_stack(upstream, Webhooks__Reconciliation__Enabled=True)
        with pytest.raises(sdk_trio.OptionsValidationError, match="Reconciliation:Enabled"):
            sdk_trio.Runtime(reconciling, standalone=True)
        http3 = full_stack(upstream, Connection__EnableHttp3=True)
        sdk_trio.Runtime(http3)
        monkeypatch.delitem(sys.modules, "sdk_trio.net.http3", raising=False)
        monkeypatch.delattr("sdk_trio.net.http3", raising=False)
        monkeypatch.setitem(sys.modules, "aioquic", None)
        monkeypatch.setitem(sys.modules, "aioquic.h3.connection", None)
        with pytest.raises(
            sdk_trio.OptionsValidationError, match=r"EnableHttp3.*sdk-trio\[http3\]"
        ):
            sdk_trio.Runtime(http3)
        sdk_trio.Runtime(http3, standalone=True)


async def test_a_cancelled_full_stack_closes_its_client(caplog):
    async with scripted_upstream() as upstream:
        settings = full_stack(upstream, Webhooks__GracefulDrainTimeoutSeconds=1)
        runtime = sdk_trio.Runtime(settings)
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.run)
            nursery.cancel_scope.cancel()
        with pytest.raises(sdk_trio.NotRunningError):
            await runtime.client.orders.get("ord_1")
    assert TOKEN not in caplog.text


def test_a_standalone_receiver_does_not_load_the_client():
    program = (
        "import sys, sdk_trio; sdk_trio.Services; sdk_trio.HandlerRegistry; "
        "settings = sdk_trio.Settings.from_mapping({'Webhooks:Secret': 'a-secret-of-this-test', "
        "'Storage:Backend': 'Memory'}, standalone=True); sdk_trio.Runtime(settings); "
        "print(sorted(n for n in sys.modules if n == 'httpx' or n.startswith('sdk_trio.client')))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert answer.stdout.strip() == "[]", answer.stderr


def test_every_public_name_can_be_had():
    for name in sdk_trio.__all__:
        offered = getattr(sdk_trio, name)
        assert name.isupper() or offered.__name__ == name or name == "load_settings"
    assert issubclass(sdk_trio.NotFoundError, sdk_trio.CallError)
