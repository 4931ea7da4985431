"""Messages of alerts: their channels, their number, their texts, and what happens to them."""

import json
import time

import attrs
import pytest
import trio
from support.alerts import Clock, alerted
from support.deliveries import SECRET, arrival
from support.notifications import SECRET as SIGNING_SECRET
from support.notifications import VARIABLES, fake_provider, http_answer
from support.notified import stores_of
from support.postgres import required_binaries
from support.serving import registry
from support.waiting import until
from support.wire import Wire

from sdk_trio.alerts.conditions import UNREACHABLE_SECONDS, Facts
from sdk_trio.alerts.watch import AlertWatch
from sdk_trio.config.fields import AlertChannel
from sdk_trio.config.options.alerts import AlertsOptions
from sdk_trio.config.options.notifications import (
    EmailOptions,
    EmailProviderAOptions,
    WebhookChannelOptions,
)
from sdk_trio.errors import StoreUnavailableError
from sdk_trio.notifications.send import Again, RetrySchedule, Sent
from sdk_trio.records.alerts import Alert, AlertMessage, AlertName, MessageKind
from sdk_trio.records.deliveries import Dead
from sdk_trio.records.states import NotificationState
from sdk_trio.runtime.alerts import make_alert_senders
from sdk_trio.testing import running_app, settings_for_tests, sign_delivery
from sdk_trio.webhooks import HandlerRegistry

MESSAGE = AlertMessage(
    id="7b0c5a8e-0d2f-4c83-9c5c-0a5b8f1c2d3e",
    channel="webhook",
    alert=AlertName.DEAD_LETTERS,
    kind=MessageKind.OPENED,
    detail="1 events became dead letters within 24 hours.",
    opened_at=1_800_000_000.0,
    closed_at=None,
    created_at=1_800_000_000.0,
)
AT_ONCE = RetrySchedule(base_seconds=0.0, cap_seconds=0.0, max_attempts=3)
CHAT_URL = "SDK_ALERTS_CHAT_URL"


@pytest.fixture(params=["sqlite", "memory", "postgres"])
async def stores(request, tmp_path):
    if request.param == "postgres":
        required_binaries()
    async with stores_of(request.param, tmp_path) as stores:
        yield stores


def options(url="http://127.0.0.1:9", *channels, **changes):
    return AlertsOptions(
        enabled=True,
        channels=channels or tuple(AlertChannel),
        to=("ops@shop.example", "lead@shop.example"),
        email=EmailOptions(
            from_address="noreply@platform.example",
            email_provider_a=EmailProviderAOptions(base_url=url),
        ),
        webhook=WebhookChannelOptions(url=f"{url}/in"),
        **changes,
    )


async def send(channel, chosen, message=MESSAGE, **variables):
    known = {**VARIABLES, CHAT_URL: "", **variables}
    senders = make_alert_senders(chosen, read_variable=known.get, clock=time.time)
    return await senders[channel].send(message)


# -- channels --------------------------------------------------------------------------------------


async def test_our_own_receiver_accepts_the_webhook_through_its_whole_pipeline():
    seen = []
    handlers = HandlerRegistry()

    @handlers.fallback
    async def take(event):
        seen.append(event)

    settings = settings_for_tests({"Webhooks:Secret": SIGNING_SECRET})
    async with running_app(handlers, settings) as app:
        chosen = AlertsOptions(
            channels=(AlertChannel.WEBHOOK,), webhook=WebhookChannelOptions(url=app.url)
        )
        assert (
            await send("webhook", chosen, attrs.evolve(MESSAGE, created_at=time.time())) == Sent()
        )
    (event,) = seen
    assert (event.type, event.webhook_id) == ("alert.opened", MESSAGE.id)
    assert event.json["alert"] == event.data.id == "dead_letters"
    assert event.json["state"] == "open"


async def test_chat_gets_one_text():
    async with fake_provider(http_answer(200, b"ok")) as provider:
        url = f"{provider.url}/services/T0/B0/key"
        assert await send("chat", options(provider.url), **{CHAT_URL: url}) == Sent()
    (request,) = provider.requests
    assert request.target == "/services/T0/B0/key"
    document = json.loads(request.body)
    assert list(document) == ["text"]
    assert "new dead letters" in document["text"]
    assert MESSAGE.detail in document["text"]


async def test_email_goes_to_every_recipient():
    async with fake_provider(http_answer(202, x_message_id="m-1")) as provider:
        assert await send("email", options(provider.url)) == Sent("m-1")
    (request,) = provider.requests
    document = json.loads(request.body)
    recipients = document["personalizations"][0]["to"]
    assert [each["email"] for each in recipients] == ["ops@shop.example", "lead@shop.example"]
    assert document["subject"].startswith("Alert: new dead letters")
    assert [each["type"] for each in document["content"]] == ["text/plain", "text/html"]


@pytest.mark.parametrize(
    ("channel", "variable"),
    [
        ("email", "EMAIL_API_KEY"),
        ("webhook", "SDK_WEBHOOK_SECRET"),
        ("chat", CHAT_URL),
    ],
)
async def test_a_channel_without_its_credential_names_the_variable(channel, variable):
    outcome = await send(channel, options(), **{variable: ""})
    assert outcome.reason == f"the variable {variable} is not set"


async def test_a_chat_that_refuses_is_described_without_its_url():
    async with fake_provider(http_answer(404, b"no_service key-of-the-chat")) as provider:
        url = f"{provider.url}/services/key-of-the-chat"
        outcome = await send("chat", options(provider.url), **{CHAT_URL: url})
    assert outcome.reason == "answered 404"


async def test_a_private_address_of_the_webhook_is_refused_with_the_key_to_set():
    webhook = WebhookChannelOptions(url="https://localhost:9/in")
    chosen = AlertsOptions(channels=(AlertChannel.WEBHOOK,), webhook=webhook)
    outcome = await send("webhook", chosen)
    assert "set Sdk:Alerts:Webhook:AllowPrivateAddresses to true" in outcome.reason


# -- the watch -------------------------------------------------------------------------------------


@attrs.define
class Bench:
    """A watch on a store, with facts and outcomes that the test sets."""

    store: object
    clock: Clock = attrs.Factory(Clock)
    facts: Facts = attrs.Factory(lambda: Facts(store_writes=True))
    outcome: object = attrs.Factory(Sent)
    leads: bool = True
    sent: list = attrs.Factory(list)
    term: int | None = None
    schedule: RetrySchedule = AT_ONCE

    async def observe(self):
        await trio.lowlevel.checkpoint()
        return self.facts

    async def send(self, message):
        await trio.lowlevel.checkpoint()
        self.sent.append(message)
        return self.outcome

    def watch(self, **changes):
        return AlertWatch(
            lambda: self.store,
            self.observe,
            {"webhook": self},
            AlertsOptions(**{"close_after_seconds": 60, "repeat_hours": 48} | changes),
            in_charge=lambda: self.leads,
            term=lambda: self.term,
            clock=self.clock,
            schedule=self.schedule,
            fraction=lambda: 1.0,
        )

    @property
    def kinds(self):
        return [str(message.kind) for message in self.sent]


@attrs.define
class AwayStore:
    """A store of alerts that can be away."""

    store: object
    is_unavailable: bool = False

    def __getattr__(self, name):
        if self.is_unavailable:
            raise StoreUnavailableError("the database is unavailable")
        return getattr(self.store, name)


class Running:
    """Runs a watch; its own checks are far apart, so that the test makes them."""

    def __init__(self, watch):
        self.watch = watch
        self._nursery = trio.open_nursery()

    async def __aenter__(self):
        nursery = await self._nursery.__aenter__()
        await nursery.start(self.watch.run)
        self._scope = nursery.cancel_scope
        return self.watch

    async def __aexit__(self, *error):
        self._scope.cancel()
        return await self._nursery.__aexit__(*error)


async def test_a_thousand_flaps_reach_the_receiver_as_three_messages(tmp_path, monkeypatch):
    """Real senders and sockets; each flap lasts long enough to close the alert."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    async with (
        fake_provider(http_answer(204)) as provider,
        stores_of("memory", tmp_path) as stores,
    ):
        bench = Bench((await stores.open("here")).alerts)
        chosen = options(
            provider.url, AlertChannel.WEBHOOK, close_after_seconds=60, repeat_hours=48
        )
        watch = AlertWatch(
            lambda: bench.store,
            bench.observe,
            make_alert_senders(chosen, clock=time.time),
            chosen,
            clock=bench.clock,
        )
        async with Running(watch):
            for _ in range(1000):
                bench.facts = Facts(store_writes=True, sender_answers=False)
                await watch.check()
                bench.facts = Facts(store_writes=True, sender_answers=True)
                await watch.check()
                bench.clock.ahead += 61
                await watch.check()
            await until(lambda: watch.counts["webhook", "sent"] == 3)
        types = [json.loads(request.body)["type"] for request in provider.requests]
        assert types == ["alert.opened", "alert.closed", "alert.opened"]
        assert "three messages" in json.loads(provider.requests[-1].body)["text"]
        (alert,) = (await bench.store.load()).alerts
        assert (alert.openings, alert.is_open) == (1000, False)


async def test_rows_are_read_as_they_were_written(stores):
    store = (await stores.open("here")).alerts
    alert = Alert(
        name=AlertName.SILENCE, detail="d", opened_at=1.25, clear_since=2.5, sent=(0.1, 1e9 + 0.1)
    )
    later = attrs.evolve(MESSAGE, id="b", channel="chat", created_at=1_800_000_001.0, is_last=True)
    await store.save([alert], [later, MESSAGE], now=0.0)
    book = await store.load()
    assert list(book.alerts) == [alert]
    assert list(book.messages) == [MESSAGE, later]
    closed = attrs.evolve(alert, closed_at=3.0, announced_open=True, openings=2)
    sent = attrs.evolve(
        MESSAGE, state=NotificationState.SENT, attempts=1, finished_at=100.0, reason="r"
    )
    await store.save([closed], [sent], now=100.0)
    book = await store.load()
    assert list(book.alerts) == [closed]
    assert list(book.messages) == [sent, later]
    await store.save([], [], now=100.0 + 91 * 86_400)
    assert list((await store.load()).messages) == [later]


async def test_dead_letters_are_counted_since_a_time(stores):
    inbox = await stores.open("here")
    for number, now in enumerate((10.0, 20.0, 30.0)):
        delivery = arrival(webhook_id=f"evt_{number}", now=now).delivery
        lease = (await inbox.accept(delivery, leased=True)).lease
        await inbox.start(lease, now=now)
        await inbox.finish(lease, Dead("no such product"), now=now)
    assert await inbox.alerts.count_dead_letters(since=20.0) == 2
    assert await inbox.alerts.count_dead_letters(since=31.0) == 0


async def finished_message(store):
    """Return the only message, once its row has its end, which follows the sending."""
    with trio.fail_after(60):
        while (message := (await store.load()).messages[0]).finished_at is None:
            await trio.sleep(0.01)
    return message


async def test_a_message_that_waits_is_sent_after_a_restart(stores):
    bench = Bench((await stores.open("here")).alerts)
    bench.facts = Facts(store_writes=True, sender_answers=False)
    # The process ends between the row and the message.
    await bench.watch().check()
    assert bench.sent == []
    restarted = bench.watch()
    async with Running(restarted):
        message = await finished_message(bench.store)
    assert bench.kinds == ["opened"]
    assert (message.state, message.attempts) == (NotificationState.SENT, 1)
    async with Running(bench.watch()) as again:
        await again.check()
    assert bench.kinds == ["opened"]


async def test_a_message_that_fails_is_retried_and_given_up(tmp_path):
    async with stores_of("memory", tmp_path) as stores:
        bench = Bench((await stores.open("here")).alerts, outcome=Again("answered 503"))
        bench.facts = Facts(store_writes=True, sender_answers=False)
        async with Running(bench.watch()) as watch:
            await until(lambda: watch.counts["webhook", "failed"])
            message = await finished_message(bench.store)
        assert bench.kinds == ["opened"] * 3
        assert (message.state, message.reason) == (NotificationState.FAILED, "answered 503")


async def test_while_the_store_is_unavailable_messages_are_sent_and_rows_written_later(tmp_path):
    async with stores_of("memory", tmp_path) as stores:
        bench = Bench(AwayStore((await stores.open("here")).alerts))
        async with Running(bench.watch()) as watch:
            await watch.check()
            bench.store.is_unavailable = True
            # The leadership ends as well, because no lease can be renewed.
            bench.leads = False
            since = bench.clock() - UNREACHABLE_SECONDS
            bench.facts = Facts(store_writes=False, store_failing_since=since)
            await watch.check()
            await until(lambda: bench.sent)
            assert [str(each.alert) for each in bench.sent] == ["store_unreachable"]
            # Another host leads when the store is back. It finds the alert, and closes it.
            bench.store.is_unavailable = False
            bench.facts = Facts(store_writes=True)
            await watch.check()
            (alert,) = (await bench.store.load()).alerts
            assert alert.is_open
            assert alert.announced_open
        other = attrs.evolve(bench, leads=True, sent=[])
        async with Running(other.watch(close_after_seconds=0)) as watch:
            await watch.check()
            await until(lambda: other.sent)
        assert other.kinds == ["closed"]


async def test_a_host_that_does_not_lead_sends_nothing(tmp_path):
    async with stores_of("memory", tmp_path) as stores:
        bench = Bench((await stores.open("here")).alerts, leads=False)
        bench.facts = Facts(store_writes=False, store_failing_since=0.0, sender_answers=False)
        watch = bench.watch()
        await watch.check()
        assert (await bench.store.load()).alerts == []
        assert not [each for each in watch.samples() if each.name == "sdk_alert_open"]


async def lose_the_store(bench, watch, **facts):
    """Let the store be away for so long that its alert opens, and the term ends."""
    bench.store.is_unavailable = True
    since = bench.clock() - UNREACHABLE_SECONDS
    bench.facts = Facts(store_writes=False, store_failing_since=since, **facts)
    await watch.check()
    bench.leads = False  # no lease can be renewed
    await watch.check()


@pytest.mark.parametrize("stores", ["postgres"], indirect=True)
async def test_a_host_whose_term_is_over_ends_what_it_announced_and_writes_no_row(stores):
    """Only it knows that the store was unavailable. All else belongs to the host that leads now."""
    one, two = await stores.open("one"), await stores.open("two")
    here = Bench(AwayStore(one.alerts), term=await one.lead(seconds=0.0))
    watch = here.watch()
    await watch.check()
    await lose_the_store(here, watch, sender_answers=False)
    other = Bench(two.alerts, term=await two.lead(seconds=60.0))
    assert other.term != here.term
    await other.watch().check()
    here.store.is_unavailable = False
    here.facts = Facts(store_writes=True)
    await watch.check()
    async with Running(watch):
        here.clock.ahead += 61
        await watch.check()
        await until(lambda: len(here.sent) == 2)
        here.clock.ahead += 61
        await watch.check()
        await trio.testing.wait_all_tasks_blocked()
    sent = [(str(each.alert), str(each.kind)) for each in here.sent]
    assert sent == [("store_unreachable", "opened"), ("store_unreachable", "closed")]
    assert (await two.alerts.load()).alerts == []


@pytest.mark.parametrize("stores", ["postgres"], indirect=True)
async def test_outages_between_which_the_term_moves_to_another_host_do_not_flood(stores):
    inboxes = [await stores.open(name) for name in ("one", "two")]
    hosts = [Bench(AwayStore(inbox.alerts), leads=False) for inbox in inboxes]
    watches = [host.watch(close_after_seconds=0) for host in hosts]
    async with Running(watches[0]), Running(watches[1]):
        for number in range(12):
            leader, watch = hosts[number % 2], watches[number % 2]
            for host in hosts:
                host.store.is_unavailable, host.facts = False, Facts(store_writes=True)
            leader.leads, leader.term = True, await inboxes[number % 2].lead(seconds=0.0)
            for each in watches:
                await each.check()
                await trio.testing.wait_all_tasks_blocked()
            for host in hosts:
                host.clock.ahead += 20
            await lose_the_store(leader, watch)
            await trio.testing.wait_all_tasks_blocked()
    sent = [str(each.kind) for host in hosts for each in host.sent]
    assert len(sent) <= 2 * 3


async def test_the_rows_are_read_once_in_a_term(tmp_path):
    @attrs.define
    class CountingStore(AwayStore):
        loads: int = 0

        async def load(self, **arguments):
            self.loads += 1
            return await self.store.load(**arguments)

    async with stores_of("memory", tmp_path) as stores:
        bench = Bench(CountingStore((await stores.open("here")).alerts), term=1)
        watch = bench.watch()
        for _ in range(5):
            await watch.check()
        assert bench.store.loads == 1
        bench.term = 2  # another host may have led meanwhile
        await watch.check()
        assert bench.store.loads == 2


# -- a clock that is set back ----------------------------------------------------------------------


async def test_a_message_is_retried_in_time_after_the_clock_was_set_back(tmp_path):
    async with stores_of("memory", tmp_path) as stores:
        bench = Bench((await stores.open("here")).alerts, outcome=Again("answered 503"))
        bench.schedule = RetrySchedule(base_seconds=0.1, cap_seconds=0.1, max_attempts=2)
        bench.facts = Facts(store_writes=True, sender_answers=False)
        async with Running(bench.watch()) as watch:
            await until(lambda: watch.counts["webhook", "retried"])
            bench.clock.ahead -= 86_400
            await until(lambda: watch.counts["webhook", "failed"])
        assert bench.kinds == ["opened"] * 2


async def test_messages_are_sent_in_their_order_after_the_clock_was_set_back(stores):
    bench = Bench((await stores.open("here")).alerts)
    bench.facts = Facts(store_writes=True, sender_answers=False)
    await bench.watch().check()  # the process ends before it sends the message
    bench.clock.ahead -= 3600
    bench.facts = Facts(store_writes=True, sender_answers=True)
    watch = bench.watch(close_after_seconds=0)
    await watch.check()
    async with Running(watch):
        await until(lambda: len(bench.sent) == 2)
    assert bench.kinds == ["opened", "closed"]


# -- secrets ---------------------------------------------------------------------------------------


async def test_no_message_has_a_body_a_secret_or_a_token(monkeypatch, tmp_path):
    """Every text that must not leave is a canary; none is in any message or row."""
    canary = "canary7c41"
    variables = {
        "EMAIL_API_KEY": f"{canary}-key",
        "SDK_WEBHOOK_SECRET": f"{canary}-signing-secret",
        "SDK_TEST_ADMIN_TOKEN": f"{canary}-admin-token-as-long-as-it-has-to-be",
    }

    async def handle(event):
        raise ValueError(f"{canary}: {event.raw}")

    async with fake_provider(http_answer(202)) as collector:
        variables[CHAT_URL] = f"{collector.url}/{canary}"
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        keys = {
            "Alerts__Channels": ["Email", "Webhook", "Chat"],
            "Alerts__To": ["ops@shop.example"],
            "Alerts__Email__FromAddress": "noreply@platform.example",
            "Alerts__Email__EmailProviderA__BaseUrl": collector.url,
            "Alerts__SilenceMinutes": 1,
            "Alerts__OldestWaitingMinutes": 1,
            "Admin__Enabled": True,
            "Admin__TokenEnvVar": "SDK_TEST_ADMIN_TOKEN",
            "Webhooks__Secrets": [f"{canary}-an-older-secret-of-the-sender"],
            "Webhooks__Queue__MaxAttempts": 1,
            "Storage__Path": str(tmp_path / canary),
        }
        async with alerted(registry(handle, enqueue=True), **keys) as world:
            signed = sign_delivery(
                "order.paid",
                {"id": f"{canary}-id", "note": f"{canary}-body"},
                secret=SECRET,
                webhook_id=f"{canary}-event",
            )
            with await Wire.connect(world.target) as wire:
                assert (await wire.post(signed)).status == 200
            await world.has_sent("dead_letters opened")
            world.clock.ahead += 120
            await world.has_sent("dead_letters opened", "silence opened")
            await until(lambda: len(collector.requests) == 4)
            stored = await world.stored()
            messages = world.provider.requests + collector.requests
    texts = [request.body.decode() for request in messages]
    texts += [
        json.dumps({k: v for k, v in r.headers.items() if k != "authorization"}) for r in messages
    ]
    texts += [str(attrs.asdict(alert)) for alert in stored.values()]
    assert len(messages) == 6
    assert not [text for text in texts if canary in text]
