"""The gap watch in virtual time: when it looks, and when it begins to catch up."""

from contextlib import asynccontextmanager

import pytest
import trio
from support.deliveries import SECRET
from support.outage import order

from sdk_trio.client.client import UpstreamDeliveries
from sdk_trio.config import Settings
from sdk_trio.errors import SdkError, StoreUnavailableError
from sdk_trio.reconcile.gap_watch import GapWatch
from sdk_trio.records.tenants import EnvironmentVariable, Tenant, TenantCredentials
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.memory.inbox import MemoryInbox
from sdk_trio.testing import SendingUpstream

BEGIN = 1_700_000_000.0
HOUR = 3600.0


def now():
    return BEGIN + trio.current_time()


class Hanging:
    """An upstream that never answers."""

    async def endpoints(self):
        await trio.sleep_forever()


class Tenants:
    """So many tenants, each with an access token of its own."""

    def __init__(self, number):
        token = TenantCredentials(access_token=EnvironmentVariable("TOKEN"))
        names = [f"t{number}" for number in range(number)]
        self.rows = [
            Tenant(id=f"id_{name}", identifier=name, name=name, created_at=1.0, credentials=token)
            for name in names
        ]

    async def all(self):
        await trio.lowlevel.checkpoint()
        return self.rows

    async def find_by_organization(self, organization):
        await trio.lowlevel.checkpoint()

    find_erased = find_by_organization


@pytest.fixture
async def watched():
    """Return an upstream and its inbox, which a gap watch watches from the beginning."""
    async with watching() as world:
        yield world


@asynccontextmanager
async def watching(clock=now, tenants=None, hangs=()):
    """Run a watch; the calls of tenants whose identifier is in ``hangs`` get no answer."""
    upstream = SendingUpstream(secret=SECRET, clock=now)
    upstream.organization.subscribed = ("order.updated",)
    settings = Settings.from_mapping(
        {
            "Mode": "Custom",
            "CustomBaseUrl": "https://upstream.example",
            "AccessToken": "a-token-for-tests",
            "Webhooks:Secret": SECRET,
            "Webhooks:Reconciliation:ReenableEndpoint": True,
            "Webhooks:Reconciliation:Enabled": True,
        }
    )
    inbox = MemoryInbox(
        LeaseTerms(owner="here", lease_seconds=30, dedup_seconds=HOUR, payload_seconds=HOUR)
    )
    async with upstream.client() as client:

        @asynccontextmanager
        async def open_upstream(tenant):
            hanging = tenant is not None and tenant.identifier in hangs
            yield Hanging() if hanging else UpstreamDeliveries(client)

        ready = []
        watch = GapWatch(
            inbox,
            settings,
            open_upstream,
            tenants=tenants,
            clock=clock,
            is_ready=lambda: bool(ready),
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.run)
            yield upstream, inbox, ready, watch
            nursery.cancel_scope.cancel()


async def test_a_catch_up_begins_within_three_minutes_after_the_endpoint_is_enabled(
    watched, autojump_clock
):
    upstream, inbox, *_ = watched
    await trio.sleep(600)
    upstream.organization.enabled = False
    await trio.sleep(3 * HOUR)
    record = order("ord_1", created=now() - HOUR, modified=now() - HOUR)
    upstream.change("orders", record)
    upstream.calls.clear()
    await trio.sleep(30)
    assert ("GET", "/orders/") not in upstream.calls  # still disabled
    upstream.enable()
    await trio.sleep(180)
    assert ("GET", "/orders/") in upstream.calls
    (event,) = await inbox.find()
    assert (event.type, event.subject) == ("order.updated", "ord_1")


@pytest.mark.parametrize("ahead", [-290.0, 290.0])
async def test_what_changes_just_before_the_endpoint_is_enabled_is_caught_up_by_any_clock(
    autojump_clock, ahead
):
    """A receiver accepts deliveries while its clock differs by less than five minutes."""
    async with watching(lambda: now() + ahead) as (upstream, inbox, *_):
        await trio.sleep(600)
        upstream.organization.enabled = False
        await trio.sleep(3 * HOUR)
        upstream.change("orders", order("ord_1", created=now() - 9 * HOUR, modified=now() - 1))
        upstream.change("orders", order("ord_2", created=now() - 1))
        upstream.enable()
        await trio.sleep(300)
        assert {event.subject for event in await inbox.find()} == {"ord_1", "ord_2"}


async def test_accounts_whose_calls_hang_do_not_delay_the_catch_up_of_others(
    autojump_clock, caplog
):
    hangs = [f"t{number}" for number in range(5)]
    async with watching(tenants=Tenants(6), hangs=hangs) as (upstream, inbox, *_):
        await trio.sleep(600)
        upstream.organization.enabled = False
        await trio.sleep(3 * HOUR)
        upstream.change("orders", order("ord_1", created=now() - HOUR, modified=now() - HOUR))
        upstream.enable()
        await trio.sleep(180)
        (event,) = await inbox.find(type="order.updated")
        assert event.subject == "ord_1"
    assert "tenant='t0' error='the upstream did not answer within 30 s'" in caplog.text


async def test_a_receiver_enables_its_endpoint_as_soon_as_it_is_ready_and_once_an_hour(
    watched, autojump_clock
):
    upstream, _, ready, _ = watched
    owner = upstream.organization
    await trio.sleep(600)
    owner.enabled = False
    await trio.sleep(2 * HOUR)
    assert not owner.enabled  # not ready
    ready.append(True)
    await trio.sleep(61)
    assert owner.enabled
    owner.enabled = False
    await trio.sleep(50 * 60)
    assert not owner.enabled
    await trio.sleep(11 * 60)
    assert owner.enabled
    assert upstream.calls.count(("PATCH", f"/webhooks/endpoints/{owner.endpoint_id}")) == 2


async def test_a_check_that_keeps_failing_is_logged_rarely_and_at_once_after_a_change(
    watched, autojump_clock, monkeypatch, caplog
):
    upstream, *_ = watched
    answer, status = upstream.answer, 503

    def fail(method, target, token, body):
        return (status, {}) if status else answer(method, target, token, body)

    monkeypatch.setattr(upstream, "answer", fail)
    await trio.sleep(6 * HOUR)
    # After 15, 30 and 60 minutes and so on, with the number of those in between.
    assert 4 <= caplog.text.count("reconciliation.watch_failed") <= 6
    assert "suppressed=" in caplog.text
    caplog.clear()
    status = 401
    await trio.sleep(70)
    assert caplog.text.count("reconciliation.watch_failed") == 1
    status = None
    await trio.sleep(70)
    status = 401
    caplog.clear()
    await trio.sleep(70)
    assert caplog.text.count("reconciliation.watch_failed") == 1
    status = None
    for _ in range(2):
        caplog.clear()
        upstream.organization.enabled = False
        await trio.sleep(2 * HOUR)
        assert 1 <= caplog.text.count("reconciliation.reenable_postponed") <= 4
        upstream.enable()
        await trio.sleep(70)


async def test_an_endpoint_that_may_be_another_programs_is_not_enabled(watched, autojump_clock):
    upstream, _, ready, _ = watched
    upstream.organization.target = "https://other.example/shop"
    ready.append(True)
    await trio.sleep(600)
    upstream.organization.enabled = False
    await trio.sleep(3 * HOUR)
    assert not upstream.organization.enabled
    assert not [method for method, _ in upstream.calls if method == "PATCH"]


async def test_a_list_that_the_upstream_refuses_does_not_hold_up_the_others(
    watched, autojump_clock, monkeypatch
):
    upstream, inbox, *_ = watched
    upstream.organization.subscribed = ("product.updated", "order.updated")
    answer = upstream.answer

    def refuse(method, target, token, body):
        given = answer(method, target, token, body)
        return (403, {"detail": "no scope"}) if target.startswith("/v1/products") else given

    monkeypatch.setattr(upstream, "answer", refuse)
    await trio.sleep(600)
    upstream.organization.enabled = False
    await trio.sleep(HOUR)
    upstream.change("orders", order("ord_1", created=now() - HOUR, modified=now()))
    await trio.sleep(60)
    upstream.enable()
    await trio.sleep(300)
    assert upstream.calls.count(("GET", "/products/")) == 1
    (event,) = await inbox.find()
    assert (event.type, event.subject) == ("order.updated", "ord_1")


async def test_a_list_that_keeps_failing_does_not_hold_up_the_others_and_is_read_later(
    watched, autojump_clock, monkeypatch, caplog
):
    upstream, inbox, *_ = watched
    upstream.organization.subscribed = ("product.updated", "order.updated")
    answer, failing = upstream.answer, True

    def fail(method, target, token, body):
        given = answer(method, target, token, body)
        return (503, {"error": "Sad"}) if failing and "/products/" in target else given

    monkeypatch.setattr(upstream, "answer", fail)
    await trio.sleep(600)
    upstream.organization.enabled = False
    await trio.sleep(HOUR)
    upstream.change("products", order("prod_1", created=now() - HOUR, modified=now()))
    upstream.change("orders", order("ord_1", created=now() - HOUR, modified=now()))
    await trio.sleep(60)
    upstream.enable()
    await trio.sleep(HOUR)
    assert [event.subject for event in await inbox.find()] == ["ord_1"]
    assert "these lists could not be read to their end: products" in caplog.text
    # After 1, 2, 4 and 8 minutes, and then each quarter of an hour.
    assert 6 <= caplog.text.count("reconciliation.catch_up_failed") <= 8
    failing = False
    await trio.sleep(16 * 60)
    assert {event.subject for event in await inbox.find()} == {"ord_1", "prod_1"}
    assert upstream.calls.count(("GET", "/orders/")) == 1  # only the rest was read again


async def test_a_catch_up_continues_after_the_store_failed(
    watched, autojump_clock, monkeypatch, caplog
):
    upstream, inbox, *_ = watched
    accept, added = inbox.accept, []

    async def fail(delivery, *, leased):
        added.append(delivery.subject)
        if len(added) in range(20, 24):
            raise StoreUnavailableError("the database has not answered for 5 s")
        return await accept(delivery, leased=leased)

    monkeypatch.setattr(inbox, "accept", fail)
    await trio.sleep(600)
    upstream.organization.enabled = False
    await trio.sleep(HOUR)
    for number in range(50):
        upstream.change("orders", order(f"ord_{number}", created=now() - HOUR, modified=now() - 60))
    await trio.sleep(60)
    upstream.enable()
    await trio.sleep(HOUR)
    assert "catch_up_failed error='the database has not answered for 5 s'" in caplog.text
    assert len({event.subject for event in await inbox.find(limit=100)}) == 50
    assert len(await inbox.find(limit=100)) == 50


@pytest.mark.parametrize("cycle", [1, 3])
async def test_a_list_without_an_end_ends_with_an_error_and_the_others_are_read(
    watched, autojump_clock, monkeypatch, caplog, cycle
):
    upstream, inbox, *_ = watched
    upstream.organization.subscribed = ("product.updated", "order.updated")
    answer, pages = upstream.answer, []

    def repeat(method, target, token, body):
        given = answer(method, target, token, body)
        if "/products/" not in target:
            return given
        pages.append(target)
        record = order(f"prod_{len(pages) % cycle}", created=now() - HOUR, modified=BEGIN)
        return 200, {"items": [record], "pagination": {"max_page": 10**9}}

    monkeypatch.setattr(upstream, "answer", repeat)
    await trio.sleep(600)
    upstream.organization.enabled = False
    await trio.sleep(HOUR)
    upstream.change("orders", order("ord_1", created=now() - HOUR, modified=now()))
    await trio.sleep(60)
    upstream.enable()
    await trio.sleep(120)
    assert "ord_1" in {event.subject for event in await inbox.find()}
    assert "repeats an earlier page" in caplog.text
    assert len(pages) < 10 * cycle


async def test_a_watch_without_a_gap_lists_nothing(watched, autojump_clock):
    upstream, *_ = watched
    await trio.sleep(24 * HOUR)
    assert {path for _, path in upstream.calls} == {"/webhooks/endpoints"}


async def test_the_watch_knows_how_many_accounts_have_a_disabled_endpoint(watched, autojump_clock):
    upstream, _, _, watch = watched
    await trio.sleep(10)
    assert (watch.disabled, watch.answers) == (0, True)
    upstream.organization.enabled = False
    await trio.sleep(60)
    assert watch.disabled == 1
    upstream.enable()
    await trio.sleep(60)
    assert watch.disabled == 0


async def test_deliveries_that_cannot_be_requested_hold_up_the_state_for_one_check_only(
    watched, autojump_clock, caplog
):
    upstream, inbox, _, watch = watched

    async def fail():
        await trio.sleep(1)
        raise SdkError("the deliveries cannot be listed")

    watch._deliveries_first = fail
    await trio.sleep(600)
    upstream.organization.enabled = False
    await trio.sleep(HOUR)
    upstream.change("orders", order("ord_1", created=now() - HOUR, modified=now()))
    await trio.sleep(60)
    upstream.enable()
    await trio.sleep(180)
    assert [event.subject for event in await inbox.find()] == ["ord_1"]
    assert "reconciliation.deliveries_not_requested" in caplog.text


async def test_a_new_gap_does_not_wait_for_a_list_that_kept_failing(
    watched, autojump_clock, monkeypatch
):
    upstream, inbox, *_ = watched
    answer, failing = upstream.answer, True

    def fail(method, target, token, body):
        given = answer(method, target, token, body)
        return (503, {"error": "Sad"}) if failing and "/orders/" in target else given

    monkeypatch.setattr(upstream, "answer", fail)
    await trio.sleep(600)
    upstream.organization.enabled = False
    await trio.sleep(HOUR)
    upstream.enable()
    await trio.sleep(50 * 60)
    upstream.organization.enabled = False
    upstream.change("orders", order("ord_1", created=now() - HOUR, modified=now()))
    await trio.sleep(120)
    failing = False
    upstream.enable()
    await trio.sleep(180)
    assert [event.subject for event in await inbox.find()] == ["ord_1"]
