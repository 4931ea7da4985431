"""Catch-up by state after outages in which the upstream disabled the endpoint."""

import random
from typing import Any

import pytest
import trio
from support.deliveries import SECRET
from support.outage import at, disable, order, shop, subscription
from support.postgres import running_server
from support.waiting import until
from support.wire import Wire

from sdk_trio.client.client import UpstreamDeliveries
from sdk_trio.reconcile.catch_up import CatchUp
from sdk_trio.reconcile.gap import CatchUpRun, state_name
from sdk_trio.records.synthetic import synthetic_id
from sdk_trio.records.tenants import EnvironmentVariable, KeyFile, TenantCredentials
from sdk_trio.tenants.purge import Purger
from sdk_trio.testing import SendingUpstream, sign_delivery

HOUR = 3600.0
DAY = 24 * HOUR


class KilledError(Exception):
    """The end of a catch-up, as at a kill."""


async def test_the_states_of_a_gap_are_handled_once_and_running_it_again_changes_nothing():
    async with shop() as place:
        upstream, clock = place.upstream, place.clock
        async with place.running():
            now = clock()
            for number in range(10):
                record = order(f"ord_{number:03}", created=now - 3 * HOUR, modified=now)
                upstream.change("orders", record, "order.created", "order.paid", "order.updated")
            await until(lambda: len(place.got) == 30)
            assert await place.catch_up() is None  # no gap
        await disable(place)
        clock.move(hours=1)
        now = clock()
        for number in range(8):
            for later in (1, 2):  # of several states the last one can be known
                record = order(f"ord_{number:03}", created=now - 4 * HOUR, modified=now + later)
                upstream.change("orders", record, "order.updated")
        for number in range(150):  # two pages
            record = order(f"ord_new_{number:03}", created=now, modified=now + 3)
            upstream.change("orders", record, "order.created", "order.paid", "order.updated")
        assert upstream.organization.skipped_unrecorded == 16 + 450
        place.got.clear()
        clock.move(hours=2)
        async with place.running():
            assert await place.catch_up() is None  # still disabled
            assert place.got == []
            upstream.enable()
            finished = await place.catch_up()
            new = [(f"ord_new_{number:03}", at(now + 3)) for number in range(150)]
            changed = [(f"ord_{number:03}", at(now + 2)) for number in range(8)]
            assert place.states("order.updated", synthetic=True) == sorted(changed + new)
            # The upstream had tried to deliver these, so it delivers them again.
            redelivered = [name for name, _ in place.states("order.updated", synthetic=False)]
            assert redelivered == [f"ord_lost_{number}" for number in range(10)]
            for event_type in ("order.paid", "order.created"):
                names = [name for name, _ in place.states(event_type)]
                assert names == sorted(redelivered + [name for name, _ in new])
            assert finished.uncertain == 0
            count = len(place.got)
            assert await place.catch_up() is None
            clock.move(hours=1)  # without contact: the same states are compared again
            again = await place.catch_up()
            assert (again.added, len(place.got)) == (0, count)


async def put(place, *, since, until=None, types=None, **arguments):
    """Run a catch-up over a time, without a watch; return it."""
    run = CatchUpRun(since, place.clock() if until is None else until, types)

    async def save(progress):
        await trio.lowlevel.checkpoint()

    watch = place.watch()
    runtime = place.runtime
    work = CatchUp(
        runtime.receiver.store,
        place.settings,
        clock=place.clock,
        page_seconds=0.0,
        settle_seconds=0.0,
        wake=runtime.wake,
        **arguments,
    )
    async with watch._open_upstream(None) as upstream:
        return await work.run(upstream, run, save)


async def test_an_older_state_that_waits_does_not_overwrite_a_newer_one_that_arrived():
    async with shop(Webhooks__Queue__Workers=1) as place:
        upstream, begun, go_on = place.upstream, trio.Event(), trio.Event()

        async def block(event):
            begun.set()
            await go_on.wait()

        place.handle = block
        async with place.running():
            now = place.clock()
            upstream.change(
                "orders", order("ord_busy", created=now, status="pending"), "order.created"
            )
            await begun.wait()
            older = order("ord_1", created=now - 5, modified=now - 4)
            upstream.change("orders", older)  # skipped: no event
            finished = await put(place, since=now - 60)
            assert finished.added == 3
            newer = order("ord_1", created=now - 5, modified=now - 1)
            upstream.change("orders", newer, "order.updated", "order.paid")
            await until(lambda: all(not e.pending for e in upstream.organization.events.values()))
            go_on.set()
            await place.idle()
            assert place.states("order.updated") == [("ord_1", at(now - 1))]
            # The delivered payment counts, not that of the state.
            assert place.states("order.paid", synthetic=False) == [("ord_1", at(now - 1))]
            assert place.states("order.paid", synthetic=True) == []
            assert place.states("order.created", synthetic=True) == [("ord_1", at(now - 4))]


async def test_a_refund_that_was_handled_is_not_followed_by_its_payment():
    async with shop() as place, place.running():
        upstream, now = place.upstream, place.clock()
        for name, status in (("ord_whole", "refunded"), ("ord_part", "partially_refunded")):
            record = order(name, created=now - 10, modified=now, status=status)
            upstream.change("orders", record, "order.refunded")
        record = order("ord_both", created=now - 10, modified=now, status="refunded")
        upstream.change("orders", record)
        await until(lambda: len(place.got) == 2)
        await put(place, since=now - 60)
        await place.idle()
        assert [name for name, _ in place.states("order.paid")] == ["ord_both", "ord_part"]
        both = [kind for kind, name, *_ in place.got if name == "ord_both"]
        assert both == ["order.created", "order.paid", "order.refunded", "order.updated"]


async def test_changes_from_before_the_inbox_existed_are_omitted():
    async with shop() as place, place.running():
        upstream, now = place.upstream, place.clock()
        upstream.change("orders", order("ord_first", created=now), "order.created")
        await until(lambda: place.got)
        upstream.change("orders", order("ord_old", created=now - 90 * DAY, modified=now))
        record = subscription("sub_old", created=now - 90 * DAY, modified=now)
        upstream.change("subscriptions", record)
        record = subscription("sub_new", created=now - 90 * DAY, modified=now, ended_at=now)
        upstream.change("subscriptions", record)
        finished = await put(place, since=now - 60)
        await place.idle()
        assert finished.uncertain == 1  # order.paid of ord_old
        made = {(kind, name) for kind, name, _, synthetic, _ in place.got if synthetic}
        assert made == {
            ("order.paid", "ord_first"),
            ("order.updated", "ord_old"),
            ("subscription.updated", "sub_old"),
            ("subscription.revoked", "sub_new"),  # ended in the gap
            ("subscription.updated", "sub_new"),
        }


async def test_events_that_retention_may_have_removed_are_not_put_again():
    async with shop() as place, place.running():
        upstream, now = place.upstream, place.clock()
        upstream.change("orders", order("ord_old", created=now - 50 * DAY))
        upstream.change("orders", order("ord_new", created=now - 20 * DAY))
        finished = await put(place, since=now - 60 * DAY)  # bodies are kept for 30 days
        await place.idle()
        assert finished.uncertain == 2  # order.created and order.paid of ord_old
        assert {(kind, name) for kind, name, *_ in place.got} == {
            ("order.updated", "ord_old"),
            ("order.created", "ord_new"),
            ("order.paid", "ord_new"),
            ("order.updated", "ord_new"),
        }


async def test_a_type_that_the_endpoint_does_not_subscribe_to_is_not_put():
    async with shop() as place:
        upstream, clock = place.upstream, place.clock
        upstream.organization.subscribed = ("order.updated",)
        async with place.running():
            assert await place.catch_up() is None
            clock.move(hours=1)
            now = clock()
            upstream.change("orders", order("ord_1", created=now, modified=now))
            upstream.calls.clear()
            await place.catch_up()
            assert [kind for kind, *_ in place.got] == ["order.updated"]
            # No other list is read.
            lists = {path for _, path in upstream.calls if not path.startswith("/webhooks")}
            assert lists == {"/orders/"}


async def test_a_catch_up_that_was_killed_continues_at_its_page():
    async with shop() as place:
        upstream, clock = place.upstream, place.clock
        upstream.organization.subscribed = ("order.updated",)
        async with place.running():
            await place.watch().check(None)
        clock.move(hours=2)
        now = clock()
        for number in range(450):  # five pages
            upstream.change(
                "orders", order(f"ord_{number:03}", created=now - 450 + number, modified=now)
            )
        async with place.running():
            watch, scope = place.watch(), trio.CancelScope()
            answer = upstream.answer

            def kill_at_page_four(method, target, token, body):
                if "page=4" in target and target.startswith("/v1/orders"):
                    scope.cancel()
                return answer(method, target, token, body)

            upstream.answer = kill_at_page_four
            endpoints = await watch.check(None)
            with scope:
                await watch.catch_up(None, endpoints)
            assert scope.cancelled_caught
            await place.idle()
            assert len(place.got) == 300
            upstream.answer = answer
        async with place.running():
            upstream.calls.clear()
            finished = await place.catch_up()
            # The third page again: records of the fourth may have the time of its last one.
            assert upstream.calls.count(("GET", "/orders/")) == 3
            assert (finished.listed, finished.added) == (550, 450)
            names = [name for name, _ in place.states("order.updated")]
            assert names == [f"ord_{number:03}" for number in range(450)]


async def test_a_delivery_with_the_id_of_a_synthetic_event_does_not_take_its_place():
    async with shop() as place, place.running():
        upstream, now = place.upstream, place.clock()
        state = order("ord_1", created=now - HOUR, modified=now)
        taken = synthetic_id("order.updated", "ord_1", at(now))
        other = order("ord_other", created=now)
        signed = sign_delivery("order.updated", other, secret=SECRET, webhook_id=taken)
        with await Wire.connect(upstream.organization.target) as wire:
            assert (await wire.post(signed)).status == 200
            assert (await wire.post(signed)).status == 200  # a duplicate
        upstream.change("orders", state)
        await put(place, since=now - 60, types="order.updated")
        await place.idle()
        made = [(subject, synthetic, key) for _, subject, _, synthetic, key in place.got]
        assert sorted(made) == [("ord_1", True, taken), ("ord_other", False, f"delivered_{taken}")]


@pytest.mark.parametrize("created", [0, 1, 5])
async def test_a_record_that_disappears_hides_no_other_one(created):
    """Also if as many records or more are created at the same time."""
    async with shop() as place, place.running():
        upstream, now = place.upstream, place.clock()
        for number in range(250):
            upstream.change("orders", order(f"ord_{number:03}", created=now - 300 + number))
        answer, records = upstream.answer, upstream.organization.records["orders"]

        def remove_one(method, target, token, body):
            if "page=2" in target and target.startswith("/v1/orders") and "ord_000" in records:
                del records["ord_000"]
                for number in range(created):
                    upstream.change("orders", order(f"new_{number}", created=now + 60))
            return answer(method, target, token, body)

        upstream.answer = remove_one
        await put(place, since=now - HOUR, types="order.updated")
        await place.idle()
        assert len({name for name, _ in place.states("order.updated")}) == 250


# Across the end of a page, most of a page, and more than a page.
@pytest.mark.parametrize("equal", [2, 90, 220])
@pytest.mark.parametrize("shuffles", ["each time", "by page"])
async def test_records_with_equal_times_that_change_places_hide_no_other_one(
    equal, shuffles, caplog
):
    """Also if the order depends on the page only, and if the catch-up is killed among them."""
    async with shop() as place, place.running():
        upstream, now = place.upstream, place.clock()
        orders = [order(f"ord_{n:04}", created=now - 9000 + n) for n in range(equal + 120)]
        tied = range(99, 99 + equal)
        for number in tied:
            orders[number]["created_at"] = orders[99]["created_at"]
        for record in orders:
            upstream.change("orders", record)
        dice, answer = random.Random(5), upstream.answer

        def shuffle(method, target, token, body):
            rows = upstream.organization.records["orders"]
            kept = [name for name in rows if name not in names]
            if shuffles == "by page":
                dice.seed(target)
            moved = dice.sample(sorted(names), equal)
            order_now = kept[:99] + moved + kept[99:]
            upstream.organization.records["orders"] = {name: rows[name] for name in order_now}
            return answer(method, target, token, body)

        names = {f"ord_{number:04}" for number in tied}
        upstream.answer = shuffle
        killed = False

        async def save(progress):
            await trio.lowlevel.checkpoint()
            saved.append(progress)
            if not killed and len(saved) == 2:
                raise KilledError

        saved = []
        run = CatchUpRun(now - 9 * HOUR, now + HOUR, "order.updated")
        catch_up = CatchUp(
            place.runtime.receiver.store,
            place.settings,
            clock=place.clock,
            page_seconds=0.0,
            settle_seconds=0.0,
            wake=place.runtime.wake,
        )
        client = UpstreamDeliveries(place.runtime.client)
        with pytest.raises(KilledError):
            await catch_up.run(client, run, save)
        killed = True
        await catch_up.run(client, saved[-1], save)
        await place.idle()
        assert len({name for name, _ in place.states("order.updated")}) == equal + 120
        assert "list_unordered" not in caplog.text
        assert "list_shrinks" not in caplog.text


async def test_a_list_that_shrinks_each_time_ends_and_is_logged(caplog):
    async with shop() as place, place.running():
        upstream, now = place.upstream, place.clock()
        for number in range(250):
            upstream.change("orders", order(f"ord_{number:03}", created=now - 300 + number))
        answer, records = upstream.answer, upstream.organization.records["orders"]

        def remove_one(method, target, token, body):
            if target.startswith("/v1/orders"):
                del records[min(records)]
            return answer(method, target, token, body)

        upstream.answer = remove_one
        await put(place, since=now - HOUR, types="order.updated")
        assert "reconciliation.list_shrinks" in caplog.text


async def test_a_record_that_no_event_can_be_made_of_keeps_no_other_one_out(caplog):
    class Upstream:
        async def read_state(self, kind, sorting, page, limit):
            await trio.lowlevel.checkpoint()
            return records, len(records), False

    async def save(run):
        await trio.lowlevel.checkpoint()

    async with shop() as place, place.running():
        now = place.clock()
        names = ("half", "far", "untimed", "good")
        half, far, untimed, good = (order(f"ord_{name}", created=now) for name in names)
        records = [
            half | {"name": "\ud83d"},  # half of a surrogate pair
            far | {"modified_at": "9999-12-31T23:59:59.999999Z"},
            untimed | {"modified_at": int(now)},
            good,
        ]
        run = CatchUpRun(now - 60, now, "order.updated")
        receiver = place.runtime.receiver
        catch_up = CatchUp(
            receiver.store, place.settings, clock=place.clock, page_seconds=0, settle_seconds=0
        )
        finished = await catch_up.run(Upstream(), run, save)
        assert (finished.listed, finished.added) == (4, 2)
        assert {event.subject for event in await receiver.store.find()} == {"ord_good", "ord_half"}
        for name in ("ord_far", "ord_untimed"):
            assert name in caplog.text


async def test_ordinary_deliveries_are_accepted_while_a_catch_up_waits_for_the_workers():
    async with shop(Webhooks__Queue__Workers=1, Webhooks__Queue__Capacity=60) as place:
        upstream = place.upstream

        async def work(event):
            await trio.sleep(0.001)

        place.handle = work
        async with place.running(), trio.open_nursery() as nursery:
            now = place.clock()
            for number in range(300):
                upstream.change("orders", order(f"ord_{number:03}", created=now - 10))
            nursery.start_soon(lambda: put(place, since=now - 60, types="order.updated"))
            await until(lambda: len(place.got) >= 20)
            for number in range(10):
                record = order(f"ord_live_{number:02}", created=now - 9, modified=now)
                upstream.change("orders", record, "order.updated")
            await until(lambda: len(place.states("order.updated", synthetic=False)) == 10)
            assert place.runtime.deliveries.get("full", 0) == 0  # none was refused
        assert upstream.organization.enabled


def give_acme_an_organization(place: Any) -> tuple[Any, Any]:
    """Replace the upstream by one with two organizations; return the host's and the tenant's."""
    organizations = {"a-token-for-tests": "org_host", "token-of-acme": "org_acme"}
    place.upstream = SendingUpstream(organizations=organizations, clock=place.clock)
    host, acme = place.upstream.organizations.values()
    acme.target = "https://receiver.example/hooks/sdk/acme"
    return host, acme


async def test_each_tenant_is_read_with_its_own_token_and_the_host_by_organization(monkeypatch):
    monkeypatch.setenv("ACME_TOKEN", "token-of-acme")
    async with shop(MultiTenant__Enabled=True) as place:
        host, acme = give_acme_an_organization(place)
        upstream = place.upstream
        async with place.running():
            service = place.runtime.receiver.tenancy.service
            credentials = TenantCredentials(access_token=EnvironmentVariable("ACME_TOKEN"))
            own = await service.add(
                "acme", name="Acme", organization_id="org_acme", credentials=credentials
            )
            shared = await service.add("shared", name="Shared", organization_id="org_shared")
            now = place.clock()
            for owner, name in ((host, "org_shared"), (host, "org_acme"), (acme, "org_acme")):
                record = order(
                    f"ord_{owner.id}_{name}", created=now, modified=now, organization=name
                )
                upstream.change("orders", record, organization=owner)
            watch = place.watch()
            for tenant in (None, own):
                await watch.check(tenant)
            place.clock.move(hours=1)
            for tenant in (None, own):
                await watch.catch_up(tenant, await watch.check(tenant))
            await place.idle()
            store = place.runtime.receiver.store
            found = {
                (each.subject, each.tenant_id, each.signer)
                for each in await store.find(type="order.updated")
            }
            assert found == {
                ("ord_org_host_org_shared", shared.id, ""),
                ("ord_org_acme_org_acme", own.id, own.id),
            }


async def test_a_token_that_is_revoked_in_a_catch_up_stops_only_its_tenant(tmp_path, caplog):
    file = tmp_path / "token"
    file.write_text("token-of-acme")
    file.chmod(0o600)
    async with shop(MultiTenant__Enabled=True) as place:
        host, acme = give_acme_an_organization(place)
        upstream = place.upstream
        async with place.running():
            service = place.runtime.receiver.tenancy.service
            credentials = TenantCredentials(access_token=KeyFile(str(file)))
            tenant = await service.add(
                "acme", name="Acme", organization_id="org_acme", credentials=credentials
            )
            watch = place.watch(page_seconds=0.05)
            for account in (None, tenant):
                await watch.check(account)
            place.clock.move(hours=1)
            for owner in (host, acme):
                owner.subscribed = ("order.updated",)
                for number in range(350):
                    name = f"{owner.id}_{number}"
                    upstream.change(
                        "orders",
                        order(name, created=place.clock() - number, organization=owner.id),
                        organization=owner,
                    )

            def handled(owner):
                names = {name for name, _ in place.states("order.updated")}
                return sum(name.startswith(owner.id) for name in names)

            async with trio.open_nursery() as nursery:
                await watch.check_all(nursery)
                await until(lambda: handled(acme) > 0)
                del upstream.organizations["token-of-acme"]
                await until(lambda: handled(host) == 350)
            assert handled(acme) < 350
            assert "list_failed tenant='acme' list='orders'" in caplog.text
            upstream.organizations["token-2"] = acme
            file.write_text("token-2")
            await watch.catch_up(tenant, await watch.check(tenant))
            await until(lambda: handled(acme) == 350)
            await place.idle()
            assert len(place.states("order.updated")) == 700


async def test_the_catch_up_of_a_purged_tenant_ends_and_leaves_no_row(monkeypatch):
    monkeypatch.setenv("ACME_TOKEN", "token-of-acme")
    async with shop(MultiTenant__Enabled=True) as place:
        organizations = {"a-token-for-tests": "org_host", "token-of-acme": "org_acme"}
        place.upstream = SendingUpstream(organizations=organizations, clock=place.clock)
        *_, acme = place.upstream.organizations.values()
        acme.target = "https://receiver.example/hooks/sdk/acme"
        async with place.running():
            service, store = place.runtime.receiver.tenancy.service, place.runtime.receiver.store
            credentials = TenantCredentials(access_token=EnvironmentVariable("ACME_TOKEN"))
            own = await service.add(
                "acme", name="Acme", organization_id="org_acme", credentials=credentials
            )
            name = state_name(own.id)
            watch = place.watch(page_seconds=0.3)
            await watch.check(own)
            place.clock.move(hours=1)
            for number in range(3000):
                record = order(f"ord_{number}", created=place.clock(), organization="org_acme")
                place.upstream.change("products", record, organization=acme)
            async with trio.open_nursery() as nursery:
                await watch.check_all(nursery)
                await until(lambda: ("GET", "/products/") in place.upstream.calls)
                await service.delete(own.id)
                purger = Purger(place.settings, place.runtime.receiver.whole_store)
                candidate = await purger.candidate(own.id, now=True)
                await purger.purge(candidate, actor="test", now=True)

                async def is_written():
                    return await store.read_checkpoint(name) is not None

                await until(is_written)  # the catch-up has not noticed the purge

                async def is_gone():
                    await watch.check_all(nursery)
                    return not await is_written()

                await until(is_gone)
                assert not nursery.child_tasks


async def test_an_endpoint_is_left_disabled_by_default(caplog):
    async with shop() as place, place.running():
        place.upstream.organization.enabled = False
        await place.watch().check(None)
        assert not place.upstream.organization.enabled
        assert "reconciliation.endpoint_disabled" in caplog.text


@pytest.mark.parametrize(
    ("by_state", "backend"), [(True, "Sqlite"), (False, "Sqlite"), (True, "Postgres")]
)
async def test_the_runtime_catches_up_by_itself_after_a_gap(by_state, backend, monkeypatch):
    if backend == "Postgres":
        monkeypatch.setenv("SDK_POSTGRES_DSN", running_server().fresh())
    async with shop(
        Storage__Backend=backend,
        Webhooks__Reconciliation__Enabled=True,
        Webhooks__Reconciliation__ByState=by_state,
    ) as place:
        upstream = place.upstream
        upstream.organization.subscribed = ("order.updated",)
        async with place.running():
            await place.watch().check(None)
        place.clock.move(hours=3)
        now = place.clock() - HOUR
        upstream.change("orders", order("ord_1", created=now, modified=now))
        upstream.calls.clear()
        async with place.running():
            if by_state:
                await until(lambda: place.got)
                key = synthetic_id("order.updated", "ord_1", at(now))
                assert place.got == [("order.updated", "ord_1", at(now), True, key)]
            else:
                await until(lambda: ("GET", "/webhooks/deliveries") in upstream.calls)
        assert by_state is (("GET", "/orders/") in upstream.calls)


async def test_a_failing_upstream_leaves_the_gap_for_the_next_check(caplog):
    async with shop() as place:
        upstream = place.upstream
        upstream.organization.subscribed = ("order.updated",)
        async with place.running():
            await place.watch().check(None)
            place.clock.move(hours=3)
            now = place.clock()
            upstream.change("orders", order("ord_1", created=now, modified=now))
            answer, failing = upstream.answer, True

            def fail(method, target, token, body):
                if failing and target.startswith("/v1/orders"):
                    return 500, {"error": "Sad"}
                return answer(method, target, token, body)

            upstream.answer = fail
            async with trio.open_nursery() as nursery:
                watch = place.watch()
                nursery.start_soon(lambda: watch.run(watch_seconds=0.05))
                await until(lambda: "reconciliation.catch_up_failed" in caplog.text)
                assert place.got == []
                failing = False
                await until(lambda: place.got)
                nursery.cancel_scope.cancel()
