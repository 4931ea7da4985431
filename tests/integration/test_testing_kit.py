"""The test kit as its users see it: in their own project, with pytest, and without it."""

import subprocess
import sys
import time

import pytest
import trio
from support.deliveries import SECRET
from support.postgres import running_server
from support.serving import registry, works
from support.waiting import until

from sdk_trio.errors import RetryLater
from sdk_trio.events import OrderCreatedEvent
from sdk_trio.events.samples import UnknownEventTypeError
from sdk_trio.records.deliveries import DeliveryState
from sdk_trio.testing import (
    UnexpectedStateError,
    application,
    running_app,
    sample_types,
    settings_for_tests,
    sign_delivery,
)
from sdk_trio.webhooks import HandlerRegistry
from sdk_trio.webhooks.signature import Keyring
from sdk_trio.webhooks.signed_request import DeliveryFailedError, post
from sdk_trio.webhooks.verdict import Accepted, Delivery, verify_delivery

pytest_plugins = ["pytester"]

APPLICATION = """
import sdk_trio
from sdk_trio.events import OrderCreatedEvent, OrderPaidEvent, RefundUpdatedEvent

handlers = sdk_trio.HandlerRegistry()
granted = []

@handlers.on(OrderPaidEvent)
async def grant(event):
    granted.append(event.data.customer.email)

@handlers.on(OrderCreatedEvent, enqueue=True)
async def remember(event):
    granted.append(event.webhook_id)

@handlers.on(RefundUpdatedEvent)
async def refuse(event):
    raise RuntimeError("no refunds")
"""

CONFTEST = """
import pytest
import application

@pytest.fixture
def sdk_handlers():
    application.granted.clear()
    return application.handlers
"""


@pytest.fixture
def project(pytester):
    """A user's project with an application and a conftest; returns how to run its tests."""
    pytester.makeini(
        "[pytest]\ntrio_mode = true\npythonpath = .\nfilterwarnings = error\n"
        "addopts = -p no:faker\n"
    )
    pytester.makepyfile(application=APPLICATION)
    pytester.makeconftest(CONFTEST)

    def run(tests, **outcomes):
        pytester.makepyfile(test_application=tests)
        # respx has a plugin, which loads httpx into every test run that it is installed for.
        quiet = ("-p", "no:cacheprovider", "-p", "no:respx")
        result = pytester.runpytest_subprocess(*quiet, timeout=300)
        result.assert_outcomes(**outcomes)
        return result

    return run


def test_the_fixtures_are_there_and_deliver_for_real(project):
    project(
        """
        import application
        from sdk_trio.events import OrderCreatedEvent
        from sdk_trio.records.deliveries import DeliveryState

        async def test_paid_order_grants_access(deliver):
            delivered = await deliver("order.paid", {"customer": {"email": "ada@example.com"}})
            assert delivered.status == 200
            assert application.granted == ["ada@example.com"]

        async def test_twice_delivered_is_once_granted(deliver):
            for _ in range(2):
                assert (await deliver("order.paid", webhook_id="msg_1")).status == 200
            assert len(application.granted) == 1

        async def test_enqueued_work_has_ended_when_deliver_returns(sdk_app, deliver):
            delivered = await deliver(OrderCreatedEvent, webhook_id="msg_2")
            assert delivered.state is DeliveryState.DONE
            assert application.granted == ["msg_2"]
            assert sdk_app.runtime.ready

        async def test_failure_is_shown(deliver):
            delivered = await deliver("refund.updated")
            assert (delivered.status, delivered.error) == (500, "RuntimeError: no refunds")

        async def test_type_without_handler_is_parked(deliver):
            assert (await deliver("product.created")).state is DeliveryState.PARKED

        async def test_forged_delivery_is_rejected(sdk_app, deliver):
            import attrs
            forged = attrs.evolve(sdk_app.sign("order.paid"), signature="v1,AAAA")
            delivered = await deliver(forged)
            assert (delivered.status, delivered.record) == (400, None)
        """,
        passed=6,
    )


def test_settings_can_be_overridden(project):
    project(
        """
        import pytest
        from sdk_trio.testing import settings_for_tests

        @pytest.fixture
        def sdk_settings(tmp_path):
            return settings_for_tests({
                "Storage:Backend": "Sqlite",
                "Storage:Path": str(tmp_path / "data"),
                "Webhooks:Path": "/elsewhere",
            })

        async def test_it(sdk_app, deliver, tmp_path):
            assert sdk_app.url.endswith("/elsewhere")
            assert (await deliver("order.paid")).status == 200
            assert list((tmp_path / "data").iterdir())
        """,
        passed=1,
    )


def test_a_failing_test_fails_soon_and_shows_its_own_assertion(project):
    result = project(
        """
        import pytest, trio, sdk_trio
        from sdk_trio.events import OrderPaidEvent

        @pytest.fixture
        def sdk_handlers():
            handlers = sdk_trio.HandlerRegistry()

            @handlers.on(OrderPaidEvent, enqueue=True)
            async def hang(event):
                await trio.sleep_forever()

            return handlers

        async def test_it(deliver):
            delivered = await deliver("order.paid", settle=False)
            assert delivered.status == 201
        """,
        failed=1,
    )
    result.stdout.fnmatch_lines(["*assert 200 == 201*"])
    # The handler that hangs was waited for as long as these settings say.
    assert settings_for_tests().webhooks.graceful_drain_timeout_seconds == 2


def test_a_project_that_uses_none_of_it_does_not_pay_for_it(project, pytester):
    pytester.makeconftest("")
    project(
        """
        import sys

        def test_it():
            loaded = {name.partition(".")[0] for name in sys.modules}
            assert "sdk_trio" in loaded
            assert not loaded & {"hypercorn", "httpx", "apsw", "msgspec"}
        """,
        passed=1,
    )


def test_without_trio_mode_the_marker_serves(project, pytester):
    pytester.makeini("[pytest]\npythonpath = .\nfilterwarnings = error\n")
    project(
        """
        import pytest

        @pytest.mark.trio
        async def test_it(deliver):
            assert (await deliver("order.paid")).status == 200
        """,
        passed=1,
    )


# -- without pytest's fixtures ----------------------------------------------------------------


def test_it_works_without_pytest():
    async def main():
        async with running_app(registry(works)) as app:
            return await app.deliver("order.paid")

    delivered = trio.run(main)
    assert (delivered.status, delivered.body) == (200, b"{}")
    assert delivered.state is DeliveryState.DONE


async def test_an_event_that_waits_for_its_retry_counts_as_settled():
    async def handler(event):
        raise RetryLater(600, "not today")

    with trio.fail_after(60):
        async with running_app(registry(handler, enqueue=True)) as app:
            delivered = await app.deliver("order.paid")
            assert delivered.state is DeliveryState.RETRYING
            assert "not today" in delivered.error
            await app.settle()


def count_polls_of(app, monkeypatch):
    """Return the states of its event that ``deliver`` reads from now on."""
    looks = []
    find = app.store.find_by_id

    async def look(webhook_id):
        found = await find(webhook_id)
        looks.append(found[0].state)
        return found

    monkeypatch.setattr(app.store, "find_by_id", look)
    return looks


async def test_a_handler_that_goes_on_after_its_event_is_done_has_not_ended(tmp_path, monkeypatch):
    gate = trio.Event()
    ended, delivered = [], []

    async def handler(event, services):
        await services.finish(event, lambda transaction: None)
        await gate.wait()
        ended.append(event.webhook_id)

    keys = {"Storage:Backend": "Sqlite", "Storage:Path": str(tmp_path / "data")}
    with trio.fail_after(60):
        async with running_app(registry(handler, enqueue=True), settings_for_tests(keys)) as app:

            async def deliver():
                delivered.append(await app.deliver("order.paid", webhook_id="a", expect="done"))
                assert ended == ["a"]

            looks = count_polls_of(app, monkeypatch)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(deliver)
                await until(lambda: looks[-3:] == ["done"] * 3)
                gate.set()
            assert len(delivered) == 1


async def test_a_retry_that_is_due_is_not_settled(monkeypatch):
    """Not even one that the queue has taken, and that waits for a worker."""
    runs, delivered = [], []
    accepted, gate = trio.Event(), trio.Event()

    async def handler(event):
        runs.append(event.webhook_id)
        if runs == ["a"]:
            await accepted.wait()
            raise RuntimeError("once")
        if event.webhook_id == "b":
            await gate.wait()

    quick = {"Webhooks:Queue:RetryBaseSeconds": 0, "Webhooks:Queue:Workers": 1}
    with trio.fail_after(60):
        async with running_app(registry(handler, enqueue=True), settings_for_tests(quick)) as app:

            async def deliver():
                delivered.append(await app.deliver("order.paid", webhook_id="a", expect="done"))

            looks = count_polls_of(app, monkeypatch)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(deliver)
                await until(lambda: runs)
                await app.deliver("order.paid", webhook_id="b", settle=False)
                accepted.set()
                await until(lambda: runs == ["a", "b"])
                await until(lambda: looks[-3:] == ["retrying"] * 3)
                gate.set()
            assert delivered[0].record.attempts == 2


@pytest.fixture(params=["Memory", "Sqlite", "Postgres"])
def store(request, tmp_path, monkeypatch):
    if request.param == "Postgres":
        monkeypatch.setenv("SDK_POSTGRES_DSN", running_server().fresh())
    return {"Storage:Backend": request.param, "Storage:Path": str(tmp_path / "data")}


async def test_waiting_retries_run_when_the_test_requests_it(store):
    fails = {"a", "b", "c"}

    async def handler(event):
        if event.webhook_id in fails:
            raise RuntimeError("not yet")

    handlers = registry(handler, enqueue=True)
    handlers.register(OrderCreatedEvent, handler)
    with trio.fail_after(60):
        async with running_app(handlers, settings_for_tests(store)) as app:
            for webhook_id in ("a", "b"):
                await app.deliver("order.paid", webhook_id=webhook_id, expect="retrying")
            # It waits for its sender, and is none of those that the queue tries again.
            await app.deliver("order.created", webhook_id="c", expect="retrying")
            fails.remove("a")
            first, second = await app.retry()
            assert (first.key, first.state, first.attempts) == ("a", "done", 2)
            assert (second.key, second.state, second.attempts) == ("b", "retrying", 2)
            with pytest.raises(UnexpectedStateError, match="event is retrying; RuntimeError") as no:
                await app.retry(expect="done")
            assert isinstance(no.value.__cause__, RuntimeError)
            fails.clear()
            (record,) = await app.retry(expect="done")
            assert (record.key, record.attempts, record.earlier_attempts) == ("b", 4, 0)
            assert await app.retry() == []
            delivered = await app.deliver("order.created", webhook_id="c", expect="done")
            assert delivered.record.attempts == 2
            with pytest.raises(ValueError, match="not 'finished'"):
                await app.retry(expect="finished")


async def test_policies_and_pauses_hold_in_the_kit():
    runs = []

    async def handler(event):
        runs.append(event.webhook_id)

    handlers = registry(handler, enqueue=True, concurrency=1, rate_per_minute=6000)
    handlers.register(OrderCreatedEvent, handler)
    with trio.fail_after(60):
        async with running_app(handlers, settings_for_tests()) as app:
            await app.deliver("order.paid", webhook_id="a", expect="done")
            await app.pause("order.*")
            await app.deliver("order.paid", webhook_id="b", expect="received")
            await app.deliver("order.created", webhook_id="c", expect="received")
            assert runs == ["a"]
            await app.resume()
            assert sorted(runs) == ["a", "b", "c"]
            await app.deliver("order.created", webhook_id="d", expect="done")


async def test_an_ordered_event_that_waits_for_the_retry_of_another_counts_as_settled(store):
    fails = {"a"}

    async def handler(event):
        if event.webhook_id in fails:
            raise RuntimeError("not yet")

    handlers = registry(handler, enqueue=True, ordered=True)
    with trio.fail_after(60):
        async with running_app(handlers, settings_for_tests(store)) as app:

            async def deliver(webhook_id, subject, expect):
                data = {"id": subject}
                await app.deliver("order.paid", data, webhook_id=webhook_id, expect=expect)

            await deliver("a", "one", "retrying")
            await deliver("b", "one", "received")
            await deliver("c", "two", "done")
            await app.retry(expect="retrying")
            fails.clear()
            (record,) = await app.retry(expect="done")
            assert (record.key, record.attempts) == ("a", 3)
            assert (await app.store.get("b")).state is DeliveryState.DONE


@pytest.mark.parametrize(
    ("overrides", "waits"),
    [
        ({}, (86_400, 86_400)),
        ({"Webhooks:Queue:RetryBaseSeconds": 0.05}, (0.05, 900)),
        ({"webhooks__queue__retrycapseconds": 5}, (1, 5)),
        ({"Webhooks": {"Queue": {"RetryBaseSeconds": 2, "RetryCapSeconds": 3}}}, (2, 3)),
    ],
)
def test_the_waits_of_retries_are_long_unless_they_are_given(overrides, waits):
    queue = settings_for_tests(overrides).webhooks.queue
    assert (queue.retry_base_seconds, queue.retry_cap_seconds) == waits


async def test_events_that_do_not_settle_are_an_error_after_a_timeout(monkeypatch):
    monkeypatch.setattr(application, "SETTLE_SECONDS", 0.1)

    async def handler(event):
        await trio.sleep_forever()

    with trio.fail_after(60):
        settings = settings_for_tests({"Webhooks:GracefulDrainTimeoutSeconds": 0.1})
        async with running_app(registry(handler, enqueue=True), settings) as app:
            with pytest.raises(trio.TooSlowError):
                await app.deliver("order.paid")
            with pytest.raises(trio.TooSlowError):
                await app.settle()


async def test_an_error_in_the_block_does_not_wait_for_handlers():
    async def handler(event):
        await trio.sleep_forever()

    settings = settings_for_tests({"Webhooks:GracefulDrainTimeoutSeconds": 600})
    with trio.fail_after(60):
        try:
            async with running_app(registry(handler, enqueue=True), settings) as app:
                await app.deliver("order.paid", settle=False)
                raise ZeroDivisionError
        except* ZeroDivisionError:
            pass


async def test_each_app_has_a_secret_and_a_port_of_its_own():
    with trio.fail_after(60):
        async with running_app(registry(works)) as one, running_app(registry(works)) as two:
            assert one.url != two.url
            assert (await two.deliver(two.sign("order.paid"))).status == 200
            assert (await two.deliver(one.sign("order.paid"))).status == 400


@pytest.mark.parametrize("content", [None, "no certificate"])
async def test_a_certificate_that_cannot_be_used_is_a_clear_error(tmp_path, content):
    file = tmp_path / "cert.pem"
    if content is not None:
        file.write_text(content)
    signed = sign_delivery("order.paid", secret=SECRET)
    with pytest.raises(DeliveryFailedError, match=r"the certificate .*cert\.pem"):
        await post("https://127.0.0.1:1/hooks", signed, ca_file=str(file))


async def test_a_receiver_that_is_gone_is_a_clear_error():
    with trio.fail_after(60):
        async with running_app(registry(works)) as app:
            url, signed = app.url, app.sign("order.paid")
        with pytest.raises(DeliveryFailedError, match="Check that the receiver is running there"):
            await post(url, signed)


@pytest.mark.parametrize("event_type", sample_types())
def test_every_sample_is_signed_as_a_receiver_wants_it(event_type):
    delivery = sign_delivery(event_type, secret=SECRET, timestamp=1_700_000_000)
    headers = [(name.encode(), value.encode()) for name, value in delivery.headers.items()]
    webhooks = settings_for_tests({"Webhooks:Secret": SECRET}).webhooks
    keyring = Keyring.from_secrets(webhooks.all_secrets, webhooks.key_derivation)
    verdict = verify_delivery(
        Delivery(headers, delivery.body, 1_700_000_000.0), keyring, tolerance_seconds=0
    )
    assert isinstance(verdict, Accepted)
    assert verdict.webhook_id == delivery.webhook_id


def test_deliveries_differ_unless_they_are_asked_not_to():
    before = int(time.time())
    one, two = (sign_delivery("order.paid", secret=SECRET) for _ in range(2))
    assert one.webhook_id != two.webhook_id
    same = [
        sign_delivery("order.paid", {"id": "x"}, secret=SECRET, webhook_id="a", timestamp=1)
        for _ in range(2)
    ]
    assert same[0] == same[1]
    assert before <= one.timestamp <= time.time()


def test_an_unsignable_event_is_explained():
    with pytest.raises(UnknownEventTypeError, match=r"order\.paid"):
        sign_delivery("order.payed", secret=SECRET)
    with pytest.raises(ValueError, match="event type"):
        sign_delivery(b"{}", {"id": 1}, secret=SECRET)
    for wrong in ({"webhook_id": "a.b"}, {"webhook_id": ""}, {"timestamp": -1}):
        with pytest.raises(ValueError, match=r"."):
            sign_delivery("order.paid", **{"secret": SECRET, **wrong})


async def test_after_a_reload_it_signs_with_the_secret_in_force():
    handled = HandlerRegistry()
    async with running_app(handled) as app:
        app.runtime.reload(settings_for_tests({"Webhooks:Secret": SECRET}))
        assert [secret.reveal() for secret in app.settings.webhooks.all_secrets] == [SECRET]
        assert (await app.deliver("order.paid")).status == 200


def test_an_upstream_answers_the_code_under_test_and_its_handlers(project):
    project(
        """
        import httpx
        import pytest
        import sdk_trio
        from sdk_trio.events import OrderPaidEvent

        @pytest.fixture
        def sdk_handlers():
            handlers = sdk_trio.HandlerRegistry()

            @handlers.on(OrderPaidEvent)
            async def grant(event, services):
                await services.client.orders.get(event.data.id)

            return handlers

        async def test_calls_are_answered_and_seen(sdk_upstream):
            order = sdk_upstream.on("orders.get", "ord/1").gives({"id": "ord/1"})
            created = sdk_upstream.on("refunds.create").gives({"id": "ref_1"}, status=201)
            async with sdk_upstream.client() as client:
                assert (await client.orders.get("ord/1")).id == "ord/1"
                await client.refunds.create(order_id="ord/1", amount=5)
            assert created.call.json == {"order_id": "ord/1", "amount": 5}
            assert created.call.request.headers["authorization"].startswith("Bearer ")
            assert [call.path for call in sdk_upstream.calls] == ["/orders/ord/1", "/refunds/"]
            assert order.call.query == {}

        async def test_failures_in_a_row_cost_no_time_and_end_with_the_last_answer(sdk_upstream):
            route = sdk_upstream.on("orders.get")
            route.fails(httpx.ReadTimeout("slow")).gives(status=503).gives({"id": "o"})
            async with sdk_upstream.client() as client:
                assert (await client.orders.get("any")).id == "o"
            assert len(route.calls) == 3
            with pytest.raises(AssertionError, match="called 3 times"):
                route.call

        async def test_a_list_has_its_pages(sdk_upstream):
            sdk_upstream.on("orders.list").gives_list([{"id": n} for n in range(7)])
            async with sdk_upstream.client() as client:
                orders = client.orders.list(limit=3)
                assert [order.id async for order in orders] == list(range(7))
            assert len(sdk_upstream.calls) == 3

        async def test_calls_that_match_no_operation(sdk_upstream):
            sdk_upstream.on("GET /new/{id}").gives(content=b"exact", headers={"X-A": "1"})
            async with sdk_upstream.client({"MaxRetries": 0}) as client:
                answer = await client.request("GET", "/new/7")
            assert (answer.content, answer.headers["x-a"]) == (b"exact", "1")

        async def test_handlers_find_the_client(sdk_upstream, deliver):
            route = sdk_upstream.on("orders.get", "ord_1").gives({"id": "ord_1"})
            assert (await deliver("order.paid", {"id": "ord_1"})).status == 200
            assert route.call.method == "GET"

        def test_slips_are_explained(sdk_upstream):
            with pytest.raises(LookupError, match="orders get"):
                sdk_upstream.on("orders.gett")
            with pytest.raises(ValueError, match="1 parameters"):
                sdk_upstream.on("orders.get", "a", "b")
            with pytest.raises(ValueError, match="no pages"):
                sdk_upstream.on("orders.get").gives_list([])
            sdk_upstream.routes.clear()
        """,
        passed=6,
    )


def test_a_call_without_a_route_and_a_route_without_a_call_fail_the_test(project):
    result = project(
        """
        import pytest

        async def test_no_route(sdk_upstream):
            sdk_upstream.on("orders.get", "a").gives({})
            async with sdk_upstream.client() as client:
                with pytest.raises(BaseException):
                    await client.orders.get("b")

        def test_no_call(sdk_upstream):
            sdk_upstream.on("refunds.create").gives({})
        """,
        passed=2,
        errors=2,
    )
    result.stdout.fnmatch_lines_random(
        [
            "*no route matches GET /orders/b; the routes are: <route GET /orders/a>*",
            "*<route POST /refunds/> was never called*",
        ]
    )


def test_no_trio_mode_is_needed(pytester):
    pytester.makepyfile(application=APPLICATION)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(
        test_application="""
        import pytest

        async def test_paid(deliver):
            await deliver("order.paid", expect="done")

        @pytest.mark.parametrize("number", [1, 2])
        class TestAll:
            async def test_app(self, sdk_app, number):
                assert sdk_app.runtime.ready

        def test_plain():
            pass
        """
    )
    result = pytester.runpytest_subprocess(
        "-p", "no:cacheprovider", "-p", "no:respx", "-o", "pythonpath=.", timeout=300
    )
    result.assert_outcomes(passed=4)


def test_a_failure_shows_the_line_of_the_handler(project):
    result = project(
        """
        async def test_expected(deliver):
            await deliver("refund.updated", expect="done")

        async def test_compared(deliver):
            delivered = await deliver("refund.updated")
            assert str(delivered.exception) == "no refunds"
            assert delivered.status == 200
        """,
        failed=2,
    )
    text = result.stdout.str()
    line = 1 + APPLICATION.strip().split("\n").index('    raise RuntimeError("no refunds")')
    expected, _, compared = text.partition("_ test_compared _")
    # The cause is chained, with its source.
    assert "The above exception was the direct cause" in expected
    assert "the event is retrying; the response was 500; RuntimeError: no refunds" in expected
    # With a comparison in the test, it is in the log, line by line.
    for part in (expected, compared):
        log = part.partition("Captured log call")[2]
        assert f'application.py", line {line}, in refuse\n' in log
        assert "missing" not in log


def test_handlers_with_transactions_get_a_store_on_disk(pytester):
    pytester.makepyfile(
        test_application="""
        import sdk_trio, pytest
        from sdk_trio.events import OrderPaidEvent
        from sdk_trio.testing import settings_for_tests

        handlers = sdk_trio.HandlerRegistry()

        @handlers.on(OrderPaidEvent, enqueue=True, transaction=True)
        def grant(event, tx):
            tx.connection.execute("CREATE TABLE app_access (id TEXT)")

        @pytest.fixture
        def sdk_handlers():
            return handlers

        class TestAsTheyAre:
            async def test_paid(self, deliver):
                await deliver("order.paid", expect="done")

        class TestOtherSettings:
            @pytest.fixture
            def sdk_settings(self):
                return settings_for_tests({"Webhooks:Queue:MaxAttempts": 2})

            async def test_paid(self, sdk_app, deliver):
                await deliver("order.paid", expect="done")
                assert sdk_app.settings.webhooks.queue.max_attempts == 2
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:respx", timeout=300)
    result.assert_outcomes(passed=2)


def test_a_plain_test_must_be_async_and_harms_no_other(project):
    result = project(
        """
        def test_plain(deliver):
            deliver("order.paid")

        async def test_after_it(deliver):
            await deliver("order.paid", expect="done")

        async def test_no_such_state(deliver):
            await deliver("order.paid", expect="finished")
        """,
        passed=1,
        failed=1,
        errors=1,
    )
    text = result.stdout.str()
    assert "write `async def test_plain`" in text
    assert "Trio fixtures" not in text
    assert (
        "expect must be one of received, running, retrying, done, dead, parked, not 'finished'"
        in text
    )


async def test_a_misspelt_field_is_a_warning_at_the_line_of_the_test():
    async with running_app() as app:
        with pytest.warns(UserWarning, match=r"data\.idd; did you mean 'id'"):
            await app.deliver("order.paid", {"idd": 3})
        with pytest.warns(UserWarning, match=r"customer\.emial; did you mean 'email'") as reported:
            await app.deliver("order.paid", {"customer": {"emial": "a@example.com"}})
        assert reported[0].filename == __file__
        # New fields of the upstream, and what an application attaches, are not mistakes.
        await app.deliver("order.paid", {"brand_new": 3, "metadata": {"idd": 3}})


async def test_a_test_s_exception_leaves_the_block_without_a_group():
    with pytest.raises(ZeroDivisionError):
        async with running_app():
            raise ZeroDivisionError


def test_a_failed_delivery_is_shown_once_and_without_a_group(tmp_path):
    (tmp_path / "test_kit.py").write_text(
        """
import pytest, sdk_trio
from sdk_trio.events import OrderPaidEvent

@pytest.fixture
def sdk_handlers():
    handlers = sdk_trio.HandlerRegistry()

    @handlers.on(OrderPaidEvent)
    async def grant(event, services):
        if event.webhook_id == "client":
            services.client
        raise ValueError("no such product")

    return handlers

async def test_it(deliver):
    await deliver("order.paid", expect="done")

async def test_client(deliver):
    await deliver("order.paid", webhook_id="client", expect="done")
"""
    )
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--show-capture=no", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 failed" in ended.stdout
    assert "Exception Group" not in ended.stdout
    assert "application.py" not in ended.stdout
    assert ended.stdout.count("E       ValueError: no such product") == 1
    assert "fixture sdk_upstream" in ended.stdout
