"""Reconciliation against a scripted upstream over real sockets."""

import time
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from support.scripted_upstream import full_stack, scripted_upstream
from support.waiting import until

import sdk_trio
from sdk_trio.client.client import UpstreamDeliveries
from sdk_trio.events import OrderPaidEvent
from sdk_trio.reconcile.plan import (
    CHECKPOINT_NAME,
    FIRST_WAIT_SECONDS,
    Checkpoint,
    Requests,
    UnknownEndpointError,
)
from sdk_trio.reconcile.reconciler import ASK_SECONDS, Reconciler

HOUR = 3600.0


class Here:
    """A running receiver, its upstream, and reconcilers that share its inbox."""

    def __init__(self, upstream, runtime, handled):
        self.upstream = upstream
        self.runtime = runtime
        self.handled = handled
        self.inbox = runtime.receiver.store

    def reconciler(self, *, ahead=0.0, ask_seconds=0.0):
        """A new one, as after a restart, whose clock is ``ahead`` seconds from now."""
        return Reconciler(
            UpstreamDeliveries(self.runtime.client),
            self.inbox,
            self.runtime.settings,
            clock=lambda: time.time() + ahead,
            ask_seconds=ask_seconds,
        )

    async def reconcile(self, *, ahead=0.0):
        report = await self.reconciler(ahead=ahead).reconcile()
        await self.arrived()
        return report

    async def arrived(self):
        """Wait until every redelivery that was asked for has been answered."""
        await until(lambda: not self.upstream.redelivering)

    async def began_earlier(self):
        """Let the first pass have been long ago, so that the inbox is trusted since then."""
        now = time.time()
        checkpoint = Checkpoint(began=now - 20 * HOUR, until=now - 20 * HOUR)
        await self.inbox.write_checkpoint(CHECKPOINT_NAME, checkpoint.as_text())

    async def checkpoint(self):
        return Checkpoint.from_text(await self.inbox.read_checkpoint(CHECKPOINT_NAME))


@asynccontextmanager
async def here(prepare=lambda upstream: None, **keys):
    handled = []
    handlers = sdk_trio.HandlerRegistry()

    @handlers.on(OrderPaidEvent)
    async def handle(event):
        handled.append(event.webhook_id)

    async with scripted_upstream() as upstream, trio.open_nursery() as nursery:
        prepare(upstream)
        runtime = sdk_trio.Runtime(full_stack(upstream, **keys), handlers)
        started = await nursery.start(runtime.run)
        upstream.target = f"{started.webhook_url}/hooks/sdk"
        yield Here(upstream, runtime, handled)
        runtime.shut_down("the test ended")


async def test_after_an_outage_every_missed_event_comes_once_and_nothing_else():
    async with here() as place:
        upstream = place.upstream
        for name in ("evt_seen_1", "evt_seen_2"):
            assert await upstream.deliver(name) == 200
        missed = [f"evt_{n:03}" for n in range(230)]  # three pages
        upstream.missed(*missed, ago=2 * HOUR, succeeded=False)
        report = await place.reconcile()
        assert (report.asked, report.waiting, report.lost) == (230, 0, 0)
        assert upstream.asked == missed  # the oldest first, none that was seen
        assert sorted(place.handled) == sorted(["evt_seen_1", "evt_seen_2", *missed])
        again = await place.reconcile()
        assert (again.asked, again.waiting) == (0, 0)
        assert len(upstream.asked) == 230
        assert again.until == pytest.approx(time.time(), abs=60)


async def test_the_checkpoint_stays_before_what_has_not_arrived():
    async with here() as place:
        upstream = place.upstream
        upstream.redelivers = False
        upstream.missed("evt_old", ago=5 * HOUR)
        upstream.missed("evt_new", ago=2 * HOUR)
        report = await place.reconcile()
        assert report.asked == 2
        assert report.until == pytest.approx(time.time() - 5 * HOUR, abs=60)
        # Not asked for again at once, and then with growing waits.
        assert (await place.reconcile(ahead=60)).waiting == 2
        assert upstream.asked == ["evt_old", "evt_new"]
        await place.reconcile(ahead=FIRST_WAIT_SECONDS + 5)
        await place.reconcile(ahead=2 * FIRST_WAIT_SECONDS + 5)
        assert len(upstream.asked) == 4
        await upstream.deliver("evt_old")
        moved = await place.reconcile(ahead=2 * FIRST_WAIT_SECONDS + 6)
        assert moved.until == pytest.approx(time.time() - 2 * HOUR, abs=60)
        assert set((await place.checkpoint()).asked) == {"evt_new"}


async def test_an_upstream_that_fails_midway_leaves_the_checkpoint_and_what_was_asked():
    async with here() as place:
        upstream = place.upstream
        await place.began_earlier()
        upstream.missed("evt_1", "evt_2", "evt_3", ago=3 * HOUR)
        upstream.missed("evt_4", ago=1.5 * HOUR)
        upstream.fails = lambda method, path: 500 if len(upstream.asked) == 2 else None
        with pytest.raises(sdk_trio.ServerError):
            await place.reconcile()
        await place.arrived()
        kept = await place.checkpoint()
        assert set(kept.asked) == {"evt_1", "evt_2"}
        assert kept.until <= time.time() - 3 * HOUR + 5
        upstream.fails = lambda method, path: None
        await place.reconcile()
        assert upstream.asked == ["evt_1", "evt_2", "evt_3", "evt_4"]
        assert sorted(place.handled) == ["evt_1", "evt_2", "evt_3", "evt_4"]


async def test_a_crash_between_pages_resumes():
    """After a cancellation in the middle of the list, a new reconciler continues from the last
    complete window."""
    async with here() as place:
        upstream = place.upstream
        await place.began_earlier()
        upstream.missed("evt_1", ago=18 * HOUR)
        upstream.missed(*[f"evt_{n}" for n in range(2, 152)], ago=4 * HOUR)
        scope = trio.CancelScope()

        def crash(method, path):
            if path == "/webhooks/deliveries" and upstream.calls[-1][2]["page"] == ["2"]:
                scope.cancel()

        upstream.fails = crash
        with scope:
            await place.reconciler().reconcile()
        assert scope.cancelled_caught
        await place.arrived()
        assert upstream.asked == ["evt_1"]
        upstream.fails = lambda method, path: None
        await place.reconcile()
        assert upstream.asked == [f"evt_{n}" for n in range(1, 152)]
        assert sorted(place.handled) == sorted(upstream.asked)


async def test_losses_from_before_the_first_pass_are_ignored_and_later_ones_are_not():
    async with here() as place:
        upstream = place.upstream
        upstream.missed("evt_elsewhere", ago=HOUR, succeeded=True)
        upstream.missed("evt_failed", ago=HOUR, succeeded=False)
        assert (await place.reconcile()).asked == 1
        assert place.handled == ["evt_failed"]
        # Answered with success, and gone from the inbox: a backup was restored, for example.
        await place.began_earlier()
        await place.reconcile()
        assert place.handled == ["evt_failed", "evt_elsewhere"]


async def test_refused_redeliveries_are_logged_and_do_not_delay_the_others(caplog):
    async with here() as place:
        upstream = place.upstream
        upstream.missed("evt_archived", ago=HOUR, archived=True)
        upstream.missed("evt_gone", "evt_there", ago=HOUR)
        ask = upstream.redeliver
        upstream.redeliver = lambda name: (404, {}) if name == "evt_gone" else ask(name)
        report = await place.reconcile()
        assert (report.asked, report.lost) == (1, 2)
        assert place.handled == ["evt_there"]
        assert (await place.reconcile()).until == pytest.approx(time.time(), abs=60)
    for name in ("evt_archived", "evt_gone"):
        assert f"reconciliation.lost webhook_id='{name}'" in caplog.text


async def test_deliveries_of_other_endpoints_are_not_ours(caplog):
    async with here() as place:
        upstream = place.upstream
        upstream.endpoints.append({"id": "ep_else", "url": "https://shop.example/other"})
        upstream.missed("evt_else", ago=HOUR, endpoint="ep_else")
        upstream.missed("evt_here", ago=HOUR)
        await place.reconcile()
        assert upstream.asked == ["evt_here"]
        upstream.endpoints[1]["url"] = "https://staging.example/hooks/sdk?token=hidden"
        with pytest.raises(UnknownEndpointError, match=r"EndpointIds.*ep_here.*ep_else") as caught:
            await place.reconcile()
        assert "hidden" not in str(caught.value)


async def test_the_endpoint_can_be_named_and_a_disabled_one_is_left_alone(caplog):
    async with here(Webhooks__Reconciliation__EndpointIds=["ep_2"]) as place:
        upstream = place.upstream
        with pytest.raises(UnknownEndpointError, match="'ep_2'"):
            await place.reconcile()
        upstream.endpoints.append({"id": "ep_2", "url": "https://else.example", "enabled": False})
        upstream.missed("evt_1", ago=HOUR, endpoint="ep_2")
        assert await place.reconcile() is None
        assert upstream.asked == []
        upstream.endpoints[1]["enabled"] = True
        await place.reconcile()
        assert place.handled == ["evt_1"]
    assert "reconciliation.endpoint_disabled" in caplog.text


async def test_nothing_older_than_the_lookback_is_looked_at(caplog):
    async with here(Webhooks__Reconciliation__MaxLookbackHours=2) as place:
        await place.began_earlier()
        place.upstream.missed("evt_old", ago=3 * HOUR)
        place.upstream.missed("evt_new", ago=HOUR)
        await place.reconcile()
        assert place.upstream.asked == ["evt_new"]
    assert "reconciliation.shortened hours=18.0" in caplog.text


async def test_a_survey_changes_nothing():
    async with here() as place:
        upstream = place.upstream
        await upstream.deliver("evt_seen")
        upstream.missed("evt_1", ago=30 * HOUR, succeeded=True)
        upstream.missed("evt_2", ago=HOUR)
        found = (await place.reconciler().survey(time.time() - 31 * HOUR)).missing
        assert [sighting.webhook_id for sighting in found] == ["evt_1", "evt_2"]
        assert upstream.asked == []
        assert await place.inbox.read_checkpoint(CHECKPOINT_NAME) is None


async def test_the_runtime_reconciles_by_itself_and_survives_a_failing_upstream(caplog):
    def prepare(upstream):
        upstream.missed("evt_1", ago=HOUR)

    async with here(prepare, Webhooks__Reconciliation__Enabled=True) as place:
        await until(lambda: place.handled)
        assert place.handled == ["evt_1"]
    async with here() as place:
        place.upstream.fails = lambda method, path: 500
        async with trio.open_nursery() as nursery:
            nursery.start_soon(place.reconciler().run)
            await until(lambda: "reconciliation.failed" in caplog.text)
            nursery.cancel_scope.cancel()


async def test_an_unreadable_checkpoint_is_replaced(caplog):
    async with here() as place:
        await place.inbox.write_checkpoint(CHECKPOINT_NAME, '{"asked": 7}')
        place.upstream.missed("evt_1", ago=HOUR)
        await place.reconcile()
        assert place.handled == ["evt_1"]
    assert "reconciliation.checkpoint_unreadable" in caplog.text


async def test_a_delivery_that_is_listed_late_is_found_behind_the_checkpoint():
    async with here() as place:
        await place.reconcile()
        place.upstream.missed("evt_late", ago=300)
        await place.reconcile()
        assert place.handled == ["evt_late"]


async def test_events_that_never_arrive_within_the_lookback_are_given_up_and_logged(caplog):
    async with here() as place:
        long_ago = time.time() - 25 * HOUR
        asked = {"evt_never": Requests(7, long_ago), "evt_young": Requests(1, time.time() - HOUR)}
        checkpoint = Checkpoint(long_ago, time.time() - HOUR, asked)
        await place.inbox.write_checkpoint(CHECKPOINT_NAME, checkpoint.as_text())
        await place.reconcile()
        assert set((await place.checkpoint()).asked) == {"evt_young"}
    assert "reconciliation.abandoned webhook_id='evt_never' asked=7" in caplog.text


async def test_a_request_is_repeated_because_a_second_delivery_does_no_harm():
    async with here(MaxRetries=1) as place:
        place.upstream.missed("evt_1", ago=HOUR)
        failures = [500]
        place.upstream.fails = lambda method, path: (
            failures.pop() if method == "POST" and failures else None
        )
        await place.reconcile()
        assert place.handled == ["evt_1"]


async def test_requests_are_apart():
    async with here() as place:
        place.upstream.missed("evt_1", "evt_2", "evt_3", ago=HOUR)
        began = trio.current_time()
        await place.reconciler(ask_seconds=0.1).reconcile()
        assert trio.current_time() - began >= 0.3
        await place.arrived()


async def test_nothing_is_asked_for_during_a_drain():
    begun, go_on = trio.Event(), trio.Event()
    handlers = sdk_trio.HandlerRegistry()

    @handlers.on(OrderPaidEvent, enqueue=True)
    async def handle(event):
        begun.set()
        await go_on.wait()

    async with scripted_upstream() as upstream, trio.open_nursery() as nursery:
        # One each second; a busy machine may request several before its drain begins.
        names = [f"evt_{number}" for number in range(1, 61)]
        upstream.missed(*names, ago=HOUR)
        settings = full_stack(upstream, Webhooks__Reconciliation__Enabled=True)
        runtime = sdk_trio.Runtime(settings, handlers)
        started = await nursery.start(runtime.run)
        upstream.target = f"{started.webhook_url}/hooks/sdk"
        await begun.wait()
        runtime.shut_down("the test ended")
        await trio.testing.wait_all_tasks_blocked(0.05)  # what is on its way arrives
        asked = len(upstream.asked)
        assert asked < len(names)
        await trio.sleep(1.2 * ASK_SECONDS)
        assert upstream.asked == names[:asked]
        go_on.set()
