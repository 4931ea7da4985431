"""The console in a real browser, beside a running program, as an operator uses it."""

import base64
import json
import shutil
import subprocess
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial
from pathlib import Path

import attrs
import httpx
import pytest
import trio
from support import admin
from support.admin import TOKEN
from support.browser import connected, started_browser
from support.daemon import Place
from support.deliveries import SECRET
from support.ports import free_port
from support.postgres import running_server
from support.replica_host import ReplicaHost
from support.replica_targets import local_disk
from support.serving import registry, running, works
from support.waiting import PATIENCE_SECONDS, until

from sdk_trio import Runtime
from sdk_trio.admin import api
from sdk_trio.admin.feed import Feed
from sdk_trio.events import OrderPaidEvent
from sdk_trio.replication import health_check, verification_schedule
from sdk_trio.testing import sign_delivery
from sdk_trio.webhooks import HandlerRegistry

ROOT = Path(__file__).parents[2]
OTHER_SECRET = "whsec_" + base64.b64encode(b"another secret, of this test alone").decode()
#: No test takes as long, on a machine with twenty others that run.
WHOLE_SECONDS = 5 * PATIENCE_SECONDS
administered = partial(admin.administered, patience=WHOLE_SECONDS)
AXE = ROOT / "tests" / "emulators" / "node_modules" / "axe-core" / "axe.min.js"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """One browser for all tests of this file; each has a context of its own in it."""
    with started_browser(tmp_path_factory.mktemp("browser")) as address:
        yield address


@pytest.fixture(autouse=True)
def token(monkeypatch, tmp_path):
    monkeypatch.setenv("SDK_TEST_ADMIN_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)


@attrs.frozen
class Watched:
    """A running program, and a page of its console that is let in."""

    program: object
    page: object
    browser: object

    async def view(self, name):
        await self.page.turn(f"#/{name}")
        await self.page.until("document.querySelector('main h1, main header h1')")
        await self.page.until("!document.querySelector('main [aria-busy]')")


@asynccontextmanager
async def watched(address, handlers=None, **keys):
    keys = {"Environment": "Development", **keys}
    async with administered(handlers, **keys) as program, connected(address) as browser:
        page = await browser.open(f"{program.url}/#token={TOKEN}")
        await page.until("document.querySelector('.live-live')")
        yield Watched(program, page, browser)
        assert page.errors == []


class Ledger:
    """A handler that fails until it is repaired."""

    def __init__(self):
        self.repaired = False

    async def __call__(self, event):
        if not self.repaired:
            raise KeyError("customer_id")


def failing(**options):
    ledger = Ledger()
    handlers = HandlerRegistry()

    async def book(event):
        await ledger(event)

    handlers.register(OrderPaidEvent, book, enqueue=True, **options)
    return ledger, handlers


async def dead_letters(program, number):
    for _ in range(number):
        await program.app.deliver("order.paid", expect="dead")


async def views(page):
    """The names of the views that this program has."""
    links = "[...document.querySelectorAll('nav.views a')].map((link) => link.hash.slice(2))"
    found = await page.evaluate(links)
    assert {"overview", "deliveries", "rejected", "dead", "settings"} <= set(found)
    return found


async def violations(page):
    """Return the accessibility problems that axe-core finds."""
    rules = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
    options = json.dumps({"resultTypes": ["violations"], "runOnly": rules})
    return await page.evaluate(f"""axe.run(document, {options}).then((found) =>
        found.violations.map((each) => [each.id, each.nodes.map((node) => node.html)]))""")


async def test_every_view_is_without_errors_and_barriers(address):
    if not AXE.exists():
        pytest.skip("axe-core is not installed: make emulators")
    _, handlers = failing()
    keys = {"MultiTenant__Enabled": True, "Webhooks__Queue__MaxAttempts": 1}
    async with watched(address, handlers, **keys) as console:
        await console.page.evaluate(AXE.read_text() + ";0")
        await console.view("deliveries")
        await console.page.see("No delivery has arrived yet")
        assert await violations(console.page) == []
        await dead_letters(console.program, 1)
        await console.program.runtime.receiver.tenancy.service.add("acme", name="A", actor="test")
        one = (await console.program.api("/events"))[0]["key"]
        names = [*await views(console.page), f"deliveries/{one}", "tenants/acme"]
        for dark, width in ((False, 1600), (True, 360)):
            await console.page.look(width=width, dark=dark)
            for name in names:
                await console.view(name)
                assert await violations(console.page) == [], (name, dark, width)
                # Of 320 pixels are 1280 at 400 %.
                await console.page.look(width=min(width, 320), dark=dark)
                # Charts take the new width when they are drawn next.
                await console.page.until("document.documentElement.scrollWidth <= innerWidth")
                await console.page.look(width=width, dark=dark)


async def test_an_axe_that_finds_nothing_is_looking(address):
    if not AXE.exists():
        pytest.skip("axe-core is not installed: make emulators")
    async with watched(address) as console:
        await console.page.evaluate(AXE.read_text() + ";0")
        await console.page.evaluate("document.querySelector('main').append(new Image())")
        assert [name for name, _ in await violations(console.page)] == ["image-alt"]


async def test_deliveries_arrive_and_a_failed_one_shows_its_reason(address):
    ledger, handlers = failing()
    async with watched(address, handlers, Webhooks__Queue__MaxAttempts=1) as console:
        page, app = console.page, console.program.app
        await console.view("deliveries")
        await page.see("No delivery has arrived yet")
        await app.deliver("order.paid", {"amount": 12345678901234567890}, webhook_id="first")
        await page.see("first")
        await app.deliver("order.created", webhook_id="second")
        await page.see("second")
        await page.write("input[name=type]", "order.paid")
        await page.until("!document.querySelector('.rows').innerText.includes('second')")
        assert "type=order.paid" in await page.evaluate("location.hash")
        await page.load_again()
        await page.see("first")
        await page.press("/")
        await page.click(".row", "first")
        await page.see("KeyError: 'customer_id'")
        await page.see("in Ledger.__call__")
        await page.see("12345678901234567890", "document.querySelector('.tree')")
        ledger.repaired = True
        await page.click("button", "Replay")
        await page.click("dialog button.strong", "Replay")
        await page.see("It is in the queue again.")
        await page.see("done", "document.querySelector('header.title')")


async def test_deliveries_before_the_feed_is_open_are_shown(address, monkeypatch):
    opened = trio.Event()
    begin = Feed._begin

    async def begin_late(feed):
        await opened.wait()
        await begin(feed)

    monkeypatch.setattr(Feed, "_begin", begin_late)
    async with administered(registry(works)) as program, connected(address) as browser:
        page = await browser.open(f"{program.url}/#token={TOKEN}")
        dot = "getComputedStyle(document.querySelector('.live .dot')).backgroundColor"
        colour = await page.until(f"document.querySelector('.live-connecting') && {dot}")
        # The list is read before the delivery comes, and arrives after the feed is open.
        await page.evaluate("""(() => {
            const ask = window.fetch;
            window.held = [];
            window.fetch = async (...given) => {
                const answer = await ask(...given);
                if (given[0].startsWith("api/events?"))
                    await new Promise((then) => window.held.push(then));
                return answer;
            };
        })()""")
        await page.turn("#/deliveries")
        await page.until("window.held.length === 1")
        await program.app.deliver("order.paid", webhook_id="early")
        opened.set()
        await page.until("document.querySelector('.live-live')")
        assert await page.evaluate(dot) != colour
        await page.evaluate("new Promise((then) => setTimeout(then, 100))")
        await page.evaluate("window.held[0]()")
        await page.until("window.held.length === 2")
        await page.evaluate("window.held[1]()")
        await page.see("early")
        assert page.errors == []


async def test_an_event_that_the_feed_reports_as_dead_is_a_dead_letter(address, monkeypatch):
    looks = trio.Event()
    look = Feed._poll

    async def look_late(feed):
        await looks.wait()
        await look(feed)

    monkeypatch.setattr(Feed, "_poll", look_late)
    _, handlers = failing()
    async with watched(address, handlers, Webhooks__Queue__MaxAttempts=1) as console:
        await console.view("dead")
        await console.page.see("There are no dead letters.")
        await dead_letters(console.program, 1)
        looks.set()
        await console.page.see("KeyError")


async def test_the_difference_to_the_delivery_before_is_shown(address, tmp_path):
    keys = {"Storage__Backend": "Sqlite", "Storage__Path": str(tmp_path / "data")}
    async with watched(address, registry(works), **keys) as console:
        data = {"id": "one-order"}
        await console.program.app.deliver("order.paid", {**data, "status": "pending"})
        later = await console.program.app.deliver("order.paid", {**data, "status": "paid"})
        await console.view(f"deliveries/{later.webhook_id}")
        await console.page.click("[role=tab]", "Difference")
        await console.page.see("/data/status", "document.querySelector('table.difference')")
        rows = "[...document.querySelectorAll('.difference tbody tr')].map((row) => row.innerText)"
        assert '/data/status\t"pending"\t"paid"' in await console.page.evaluate(rows)


async def test_dead_letters_are_counted_before_they_are_put_back(address):
    ledger, handlers = failing()
    async with watched(address, handlers, Webhooks__Queue__MaxAttempts=1) as console:
        page = console.page
        await dead_letters(console.program, 3)
        ledger.repaired = True
        await console.view("dead")
        await page.click("td button", "Replay")
        await page.click("dialog button", "Dry run")
        await page.see("3 deliveries would run again")
        states = {each["state"] for each in await console.program.api("/events")}
        assert states == {"dead"}
        # Another operator is faster with one of them.
        one = (await console.program.api("/events"))[1]["key"]
        assert (await console.program.replay({"ids": [one]})).json()["replayed"] == 1
        await page.click("dialog button", "Replay 3")
        await page.see(
            "in the queue again. Left out, because they are no longer dead letters: 1 of 3."
        )
        await page.see("There are no dead letters.")

        async def done():
            return {each["state"] for each in await console.program.api("/events")} == {"done"}

        await until(done)


async def test_the_focus_stays_with_the_pressed_button_or_its_result(address):
    ledger, handlers = failing()
    focused = "document.activeElement.innerText"

    async def press(page, selector, text):
        """Press a button as by the keyboard: it has the focus."""
        buttons = f"[...document.querySelectorAll('{selector}')]"
        button = f"{buttons}.find((one) => one.innerText.startsWith('{text}'))"
        await page.until(button)
        await page.evaluate(f"{button}.focus()")
        await page.evaluate("document.activeElement.click()")

    async with watched(address, handlers, Webhooks__Queue__MaxAttempts=1) as console:
        page = console.page
        await dead_letters(console.program, 2)
        ledger.repaired = True
        await console.view("dead")
        await press(page, "td button", "Replay")
        await press(page, "dialog[open] button", "Dry run")
        await page.see("2 deliveries would run again")
        assert await page.evaluate(focused) == "Replay 2"
        await press(page, "dialog[open] button", "Replay 2")
        await page.see("in the queue again")
        await page.until(f"{focused}.includes('in the queue again')")
        ledger.repaired = False
        await dead_letters(console.program, 1)
        (event,) = await console.program.api("/events?state=dead")
        await console.view(f"deliveries/{event['key']}")
        await press(page, "main button", "Replay")
        await press(page, "dialog[open] button", "Replay")
        await page.until(f"{focused}.includes('in the queue again')")


async def test_the_overview_is_not_green_beside_dead_letters(address):
    _, handlers = failing()
    async with watched(address, handlers, Webhooks__Queue__MaxAttempts=1) as console:
        await console.view("overview")
        await console.page.until("document.querySelector('.card.ok')")
        await dead_letters(console.program, 2)
        await console.page.see("2 deliveries were given up")
        assert not await console.page.evaluate("document.querySelector('.card.ok') !== null")
        assert await console.page.evaluate(
            "document.querySelector('.card.degraded').innerText.includes('2 dead')"
        )


async def test_a_pause_and_an_open_alert_are_seen_and_the_pause_is_resumed(address, monkeypatch):
    monkeypatch.setenv("SDK_WEBHOOK_SECRET", OTHER_SECRET)
    monkeypatch.setattr("sdk_trio.admin.status.FRESH_SECONDS", 0.1)
    monkeypatch.setattr("sdk_trio.admin.status.COUNTING_SHARE", 1.0)
    _, handlers = failing()
    keys = {"Alerts__Enabled": True, "Alerts__Channels": ["Webhook"]}
    keys |= {"Alerts__Webhook__Url": "http://127.0.0.1:9/in", "Webhooks__Queue__MaxAttempts": 1}
    async with watched(address, handlers, **keys) as console:
        page, runtime = console.page, console.program.runtime
        await console.view("alerts")
        await page.see("No alert has opened yet.")
        await console.view("pauses")
        await page.see("Nothing is paused.")
        await page.write("input[name=type]", "order.*")
        await page.write("input[name=reason]", "database migration")
        await page.click("form button", "Pause")
        await page.see("order.* is paused.")
        row = "document.querySelector('main tbody tr')"
        await page.see("database migration", row)
        (pause,) = await runtime.receiver.store.pauses(now=runtime.clock())
        shown = await page.evaluate(f"{row}.querySelector('time').dateTime")
        assert datetime.fromisoformat(shown).timestamp() == pytest.approx(pause.since, abs=1)
        await until(lambda: runtime.receiver.pauses.active)
        await console.program.app.deliver("order.paid", expect="received")
        await page.click("td button", "Resume")
        await page.see("order.* is resumed.")
        await page.see("Nothing is paused.")

        async def is_dead():
            return (await runtime.receiver.store.counts())["dead"] == 1

        await until(is_dead)  # the event has run

        async def is_open():
            await runtime.alerts.watch.check()
            return (await runtime.receiver.whole_store.alerts.load()).alerts

        await until(is_open)
        await console.view("alerts")
        await page.see("dead_letters", row)
        await page.see("1 event became a dead letter", row)
        await page.see("open", row)


async def test_a_suspended_tenant_appears_in_the_audit_trail_and_the_messages(address, monkeypatch):
    monkeypatch.setenv("EMAIL_API_KEY", "a-test-value")
    status = "MultiTenant__TenantStatus__SuspendUnverifiedTenantsAnyway"
    keys = {"MultiTenant__Enabled": True, status: True}
    keys["MultiTenant__Notifications__Enabled"] = True
    keys["MultiTenant__Notifications__Email__FromAddress"] = "noreply@platform.example"
    async with watched(address, **keys) as console:
        page = console.page
        service = console.program.runtime.receiver.tenancy.service
        await service.add("acme", name="Acme Ltd", actor="test")
        await console.view("tenants")
        await page.click("td a", "acme")
        await page.click("button", "Suspend")
        await page.write("dialog input[name=reason]", "unpaid invoice 4711")
        await page.click("dialog button.strong", "Suspend")
        # A refusal of the program is shown where the action was started.
        await page.see("email is not verified; verify it", "document.querySelector('dialog')")
        page.errors.clear()
        await page.click("dialog input[name=bypass]")
        await page.click("dialog button.strong", "Suspend")
        await page.see("The tenant is Suspended now.")
        await page.see("unpaid invoice 4711", "document.querySelector('main section')")
        await page.see("Active to Suspended")
        for verb, status in (("Reactivate", "Active"), ("Deactivate", "Deactivated")):
            await page.click("header button", verb)
            await page.click("dialog button.strong", verb)
            await page.see(f"The tenant is {status} now.")
        await page.see("Active to Deactivated")
        await console.view("notifications")
        again = "[...document.querySelectorAll('td button')].length"
        await page.until(f"{again} === 3")
        await page.click("td button", "Send again")
        await page.see("It will be sent again.")
        # It is given up once more; no change of a tenant announces that.
        await page.until(f"{again} === 3")
        await page.choose("Preview of", "Suspended")
        await page.see("Example Ltd (example) has been", "document.querySelector('dialog pre')")
        await page.click("dialog button", "Close")
        await page.choose("Channel", "sms")
        await page.see("No message fits")


async def test_the_page_goes_on_after_a_restart(address, tmp_path):
    keys = {"Admin__Bind": f"127.0.0.1:{free_port()}", "Storage__Path": str(tmp_path / "data")}
    keys |= {"Storage__Backend": "Sqlite", "Environment": "Development"}
    async with connected(address) as browser:
        async with administered(registry(works), **keys) as program:
            page = await browser.open(f"{program.url}/#token={TOKEN}")
            await page.until("document.querySelector('.live-live')")
            await page.evaluate("location.hash = '#/deliveries'")
            await program.app.deliver("order.paid", webhook_id="before")
            await page.see("before")
        await page.see("connection lost")
        async with administered(registry(works), **keys) as program:
            await page.until("document.querySelector('.live-live')")
            await program.app.deliver("order.paid", webhook_id="after")
            await page.see("after")
            await page.see("before")


async def test_data_of_strangers_is_shown_as_text(address):
    script = "</script><img src=x onerror=\"document.title='owned'\"><b>bold</b>"
    async with watched(address) as console:
        page = console.page
        large = {"note": script, "filler": ["x" * 100] * 9_000}
        kept = await console.program.app.deliver("order.paid", large)
        hostile = b'{"type": "a<b>///</b>", "timestamp": "2026-01-01T00:00:00Z", "data": {}}'
        await console.program.app.deliver(hostile)
        await console.view("deliveries")
        await page.see("a<b>")
        await console.view(f"deliveries/{kept.webhook_id}")
        await page.see(json.dumps(script))
        await page.click("[role=tab]", "Raw")
        await page.see("Show more")
        assert await page.evaluate("document.querySelectorAll('main img, main b b').length") == 0
        assert "owned" not in await page.evaluate("document.title")
        # A type that looks like another one, and words that turn around what follows them.
        twin = {"type": "order.paid\u200b", "timestamp": "2026-01-01T00:00:00Z"}
        twin["data"] = {"id": "sub\u202eject", "\u2066key": "\u202eeulav"}
        kept = await console.program.app.deliver(json.dumps(twin).encode())
        await console.view("deliveries")
        await page.see("order.paid⟨U+200B⟩")
        await console.view(f"deliveries/{kept.webhook_id}")
        for shown in ("order.paid⟨U+200B⟩", "sub⟨U+202E⟩ject", "⟨U+2066⟩key", "⟨U+202E⟩eulav"):
            await page.see(shown, "document.querySelector('main')")
        made = "try {document.body.innerHTML = '<b>x</b>'; 'made'} catch (error) {error.name}"
        assert await page.evaluate(made) == "TypeError"
        page.errors.clear()


async def test_the_command_that_is_copied_sends_the_same_bytes(address, tmp_path):
    for tool in ("curl", "sh", "base64"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    long = {"id": "it's 100 % `long`: $HOME\\n", "filler": "ü" * 100_000}
    async with watched(address) as console:
        page, here = console.page, console.program.runtime.started.receiver[0]
        kept = await console.program.app.deliver("order.paid", long)
        # Bytes that a terminal takes for its own: they are white space of JSON.
        body = sign_delivery("order.created", secret=SECRET).body
        others = [
            await console.program.app.deliver(sign_delivery(body + white, secret=SECRET))
            for white in (b"\r\n", b"\t")
        ]
        for webhook_id in (kept.webhook_id, *(other.webhook_id for other in others)):
            await console.view(f"deliveries/{webhook_id}")
            await page.click("button", "Copy as curl")

            async def copied(webhook_id=webhook_id):
                text = await page.clipboard()
                return text if webhook_id in text else None

            command = await until(copied)
            assert "\t" not in command
            script = tmp_path / "copied.sh"
            script.write_bytes(command.replace("http://127.0.0.1:8080", here).encode())
            ended = await trio.run_process(["sh", script], capture_stdout=True)
            # A signature is of the very bytes.
            assert b"HTTP/1.1 200" in ended.stdout, ended.stdout


async def test_an_address_that_was_cut_off_or_made_up_breaks_nothing(address):
    async with watched(address) as console:
        for place, shown in (
            ("deliveries/%E0%A4%A", "there is no such event"),
            ("__proto__", "There is no such page"),
            ("constructor", "There is no such page"),
            ("deliveries?since=abc", "since takes Unix seconds"),
            ("deliveries?until=99999999999999999", "until takes Unix seconds"),
            ("deliveries?__proto__=1", "the query takes type"),
        ):
            await console.page.turn(f"#/{place}")
            await console.page.load_again()
            await console.page.see(shown)
        asked = [each for each in console.page.errors if not each.startswith("network: ")]
        console.page.errors[:] = asked


async def test_a_link_with_a_token_is_taken_where_the_page_is_open(address):
    async with watched(address) as console:
        page = console.page
        await page.evaluate("location.hash = 'token=of-another-program'")
        await page.see("The receiver no longer accepts this token.")
        assert "token" not in await page.evaluate("location.href")
        assert await page.evaluate("sessionStorage.length") == 0
        await page.evaluate(f"location.hash = 'token={TOKEN}'")
        await page.until("document.querySelector('.live-live')")
        # The answer that refuses an earlier token arrives when there is another token.
        await page.evaluate("""(() => {
            const ask = window.fetch;
            window.fetch = async (...given) => {
                const answer = await ask(...given);
                if (answer.status !== 401) return answer;
                await new Promise((then) => { window.refuse = then; });
                setTimeout(() => { window.refused = true; }, 100);
                return answer;
            };
        })()""")
        await page.evaluate("location.hash = 'token=of-another-program'")
        await page.until("window.refuse")
        await page.evaluate(f"location.hash = 'token={TOKEN}'")
        await page.until("document.querySelector('.live-live')")
        await page.evaluate("window.refuse()")
        await page.until("window.refused")
        assert await page.evaluate("sessionStorage.length") == 1
        await page.see("Overview", "document.querySelector('main')")
        page.errors.clear()


async def test_no_one_gets_in_without_the_token(address):
    async with administered(registry(works)) as program, connected(address) as browser:
        page = await browser.open(f"{program.url}/")
        for wrong, said in (
            (f"“{TOKEN}”", "This is not a token"),
            ("a-wrong-one", "This is not the token of this program."),
        ):
            await page.write("input[name=token]", wrong)
            await page.click("button", "Enter")
            await page.see(said)
        assert await page.evaluate("sessionStorage.length") == 0
        await page.write("input[name=token]", TOKEN)
        await page.click("button", "Enter")
        await page.see("Overview")
        assert TOKEN not in await page.evaluate("location.href + document.cookie")


async def test_buttons_are_disabled_with_a_reason_where_nothing_may_be_changed(address):
    _, handlers = failing()
    keys = {"Admin__ReadOnly": True, "Webhooks__Queue__MaxAttempts": 1}
    async with watched(address, handlers, **keys) as console:
        await dead_letters(console.program, 1)
        await console.view("dead")
        disabled = "[...document.querySelectorAll('main button')].every((each) => each.disabled)"
        await console.page.see("KeyError")
        await console.page.until(disabled)


#: Counts the requests of a page, and those that are not answered yet.
COUNTED = """(() => {
    const ask = window.fetch;
    window.asked = window.pending = 0;
    window.fetch = (...given) => {
        window.asked += 1;
        window.pending += 1;
        return ask(...given).finally(() => { window.pending -= 1; });
    };
})()"""


async def test_a_paused_page_reads_nothing(address):
    async with watched(address, registry(works)) as console:
        page = console.page
        await page.evaluate(COUNTED)
        await console.view("deliveries")
        await page.press("p")
        await page.until("document.querySelector('.live-paused')")
        # Requests from before the pause are still answered, and perhaps repeated once.
        (before,) = await page.until("""(() => {
            const before = window.asked;
            const rests = () => window.pending === 0 && window.asked === before && [before];
            return rests() && new Promise((then) => setTimeout(() => then(rests()), 500));
        })()""")
        await console.program.app.deliver("order.paid", webhook_id="unseen")
        # Twice the time in which a page that is not paused would have sent a request.
        await page.evaluate("new Promise((then) => setTimeout(then, 2000))")
        assert await page.evaluate("window.asked") == before
        await page.press("p")
        await page.see("unseen")


async def test_a_list_without_a_connection_waits(address):
    async with watched(address) as console:
        page = console.page
        for number in range(230):
            await console.program.app.deliver("order.created", webhook_id=f"number-{number}")
        await console.view("deliveries")
        await page.see("200 deliveries read, more below")
        await page.evaluate(COUNTED)
        await page.network(offline=True)
        await page.evaluate("document.querySelector('.scroll').scrollTop = 1e6")
        await page.see("The program does not answer.")
        # Each answer would be followed by the next question at once.
        await page.evaluate("new Promise((then) => setTimeout(then, 500))")
        assert await page.evaluate("window.asked") <= 3
        await page.network(offline=False)
        await page.click("button", "Try again")
        await page.see("230 deliveries")
        await page.evaluate("document.querySelector('.scroll').focus()")
        await page.press("End")
        await page.press("Enter")
        await page.see("number-0", "document.querySelector('dl.facts')")
        page.errors.clear()


async def test_a_list_that_is_longer_than_browsers_draw_ends_with_a_word(address):
    async with watched(address) as console:
        page = console.page
        await page.evaluate("""(() => {
            const ask = window.fetch;
            const headers = {link: '</api/events?before=1&limit=200>; rel="next"'};
            const row = (_, at) => `{"key": "${at}", "sequence": ${400100 - at}}`;
            const rows = `[${Array.from({length: 400000}, row)}]`;
            window.pages = 0;
            window.fetch = (...given) => {
                if (!given[0].startsWith("api/events?")) return ask(...given);
                window.pages += 1;
                return Promise.resolve(new Response(rows, {headers}));
            };
        })()""")
        await console.view("deliveries")
        await page.see("400,000 deliveries read. Browsers draw no longer list")
        await page.evaluate("document.querySelector('.scroll').focus()")
        await page.press("End")
        last = "document.querySelector('.row.chosen a')"
        assert await page.until(f"{last}?.hash") == "#/deliveries/399999"
        # It is visible, and nothing follows it in the list.
        await page.until(f"""(() => {{
            const box = {last}.getBoundingClientRect();
            return {last}.contains(document.elementFromPoint(box.x + 5, box.y + 5));
        }})()""")
        assert await page.evaluate("window.pages") == 1


async def test_the_back_link_and_unsent_input_are_kept(address):
    async with watched(address) as console:
        page = console.page
        for name in ("first", "second", "third"):
            await console.program.app.deliver("order.created", webhook_id=name)
        await console.view("deliveries?type=order.created")
        await page.see("first")
        await page.evaluate("document.querySelector('.scroll').focus()")
        for key in ("j", "j", "Enter"):
            await page.press(key)
        await page.see("second", "document.querySelector('dl.facts')")
        await page.press("Escape")
        await page.see("second", "document.querySelector('.row.chosen')")
        assert await page.evaluate("location.hash") == "#/deliveries?type=order.created"
        # A key that comes with the view, before anything else of it has run, is of this view.
        await page.evaluate("""new Promise((then) => {
            addEventListener("hashchange", () => queueMicrotask(() => {
                const key = new KeyboardEvent("keydown", {key: "Escape", bubbles: true});
                document.body.dispatchEvent(key);
                then();
            }), {once: true});
            location.hash = "#/deliveries/first";
        })""")
        await page.until("location.hash === '#/deliveries?type=order.created'")
        await page.see("first", "document.querySelector('.row.chosen')")
        await page.evaluate("""(() => {
            const field = document.querySelector("input[name=subject]");
            field.value = "half";
            field.dispatchEvent(new Event("input", {bubbles: true}));
        })()""")
        # The dialog renders the page again, as each poll of the overview does.
        await page.press("?")
        await page.click("dialog button", "Close")
        assert await page.evaluate("document.querySelector('input[name=subject]').value") == "half"


async def test_answers_that_are_slow_arrive(address):
    async with watched(address) as console:
        page = console.page
        await console.view("settings")
        # The overview asks every two seconds.
        await page.network(latency=2200)
        await page.evaluate("location.hash = '#/overview'")
        await page.see("nothing waits")


async def test_a_sample_is_sent_with_data_as_they_were_written_and_once(address):
    async with watched(address) as console:
        page = console.page
        await console.view("trigger")
        await page.choose("Type", "order.paid")
        await page.write("textarea", '{"subtotal_amount": 12345678901234567890}')
        await page.evaluate("""(() => {
            const send = document.querySelector("form.trigger button");
            for (let press = 0; press < 3; press += 1) send.click();
        })()""")
        await page.see("200", "document.querySelector('form.trigger [role=status]')")
        assert len(await console.program.api("/events")) == 1
        await page.click("form.trigger [role=status] a")
        await page.see("12345678901234567890", "document.querySelector('.tree')")


async def test_a_rejected_request_says_why(address):
    async with watched(address) as console:
        page = console.page
        await console.view("rejected")
        await page.see("Nothing was rejected")
        forged = sign_delivery("order.paid", secret=OTHER_SECRET)
        await console.program.app.deliver(forged, settle=False)
        await page.see("signature", "document.querySelector('main table')")
        await page.choose("Cause", "no_match")
        await page.see("1 since the start")


async def test_a_replay_goes_on_after_the_connection_was_lost(address, monkeypatch):
    # The deliveries of one call, of which a replay makes as many as it needs.
    monkeypatch.setattr(api, "LARGEST_REPLAY", 1)
    ledger, handlers = failing()
    async with watched(address, handlers, Webhooks__Queue__MaxAttempts=1) as console:
        page = console.page
        await dead_letters(console.program, 3)
        ledger.repaired = True
        await console.view("dead")
        await page.click("td button", "Replay")
        await page.click("dialog button", "Dry run")
        await page.see("3 deliveries would run again")
        # The second order waits until the connection is lost.
        await page.evaluate("""(() => {
            const ask = window.fetch;
            let orders = 0;
            window.fetch = async (...given) => {
                if (given[1].method === "POST" && (orders += 1) === 2)
                    await new Promise((then) => { window.send = then; });
                return ask(...given);
            };
        })()""")
        await page.click("dialog button", "Replay 3")
        await page.see("1 put back so far")
        await page.network(offline=True)
        await page.evaluate("window.send()")
        await page.see("The program does not answer.", "document.querySelector('dialog')")
        await page.network(offline=False)
        await page.click("dialog button", "Go on")
        await page.see("deliveries are in the queue again.")
        await page.see("There are no dead letters.")
        page.errors.clear()


async def test_the_page_notices_another_store_and_another_token(address, tmp_path, monkeypatch):
    keys = {"Admin__Bind": f"127.0.0.1:{free_port()}", "Environment": "Development"}
    async with connected(address) as browser:
        async with administered(registry(works), **keys) as program:
            page = await browser.open(f"{program.url}/#token={TOKEN}")
            await page.until("document.querySelector('.live-live')")
            for number in range(3):
                await program.app.deliver("order.paid", webhook_id=f"before-{number}")
            await page.evaluate("location.hash = '#/deliveries'")
            await page.see("before-2")
        await page.see("connection lost")
        # A store in memory starts empty.
        async with administered(registry(works), **keys) as program:
            await page.until("document.querySelector('.live-live')")
            await page.see("No delivery has arrived yet")
            await program.app.deliver("order.paid", webhook_id="after")
            await page.see("after")
        monkeypatch.setenv("SDK_TEST_ADMIN_TOKEN", f"{TOKEN}-of-today")
        async with administered(registry(works), **keys):
            await page.evaluate("location.hash = '#/settings'")
            await page.see("The receiver no longer accepts this token.")
            assert await page.evaluate("sessionStorage.length") == 0


def test_the_bundle_is_what_its_sources_make(tmp_path):
    if not (ROOT / "console" / "node_modules").exists():
        pytest.skip("the console's tools are not installed: make emulators")
    subprocess.run(
        ["node", "build.mjs", str(tmp_path)],
        cwd=ROOT / "console",
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    shipped = ROOT / "sdk_trio" / "admin" / "static"
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in shipped.iterdir()}
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (shipped / file.name).read_bytes(), file.name


def running_daemon(place, **environ):
    place.environ.update({f"SDK__{name}": value for name, value in environ.items()})
    place.environ["SDK_ADMIN_TOKEN"] = TOKEN
    (place.directory / "app.py").write_text(APPLICATION)
    return place.daemon("--app", "app:handlers")


APPLICATION = """
import pathlib
import sdk_trio
from sdk_trio.events import OrderPaidEvent

handlers = sdk_trio.HandlerRegistry()


@handlers.on(OrderPaidEvent, enqueue=True)
async def book(event):
    if not pathlib.Path("repaired").exists():
        raise KeyError("customer_id")
"""


async def test_settings_show_their_origins_and_doctor_its_findings(address, tmp_path):
    with running_daemon(Place(tmp_path)) as daemon:
        async with connected(address) as browser:
            page = await browser.open(f"{daemon.admin}/#token={TOKEN}")
            await page.until("document.querySelector('.live-live')")
            await page.evaluate("location.hash = '#/settings'")
            await page.write("input[name=word]", "webhooks:secret")
            await page.see("SDK__WEBHOOKS__SECRET", "document.querySelector('main td.faint')")
            shown = await page.evaluate("document.documentElement.outerHTML")
            assert SECRET not in shown
            assert SECRET.removeprefix("whsec_")[:8] not in shown
            assert TOKEN not in shown
            await page.evaluate("location.hash = '#/doctor'")
            await page.see("Sdk", "document.querySelector('.findings')")
            levels = "[...document.querySelectorAll('.findings li')].map((each) => each.className)"
            order = [
                ["problem", "warning", "note", "ok"].index(each)
                for each in await page.evaluate(levels)
            ]
            assert order == sorted(order)
            await page.click("button", "Look again")
            await page.see("Sdk", "document.querySelector('.findings')")
            assert page.errors == []


async def test_two_processes_on_a_database_server_are_one_console(address, tmp_path):
    dsn = running_server().fresh()
    place = Place(tmp_path)
    place.environ["SDK_POSTGRES_DSN"] = dsn
    keys = {"SERVER__PROCESSES": "2", "STORAGE__BACKEND": "Postgres"}
    keys["WEBHOOKS__QUEUE__MAXATTEMPTS"] = "1"
    with running_daemon(place, **keys) as daemon:
        async with connected(address) as browser, httpx.AsyncClient() as client:
            page = await browser.open(f"{daemon.admin}/#token={TOKEN}")
            await page.until("document.querySelector('.live-live')")
            await page.evaluate("location.hash = '#/deliveries'")
            await page.see("No delivery has arrived yet")

            async def deliver(secret=SECRET):
                signed = sign_delivery("order.paid", secret=secret)
                url = f"{daemon.receiver}/hooks/sdk"
                answer = await client.post(url, content=signed.body, headers=signed.headers)
                return answer.status_code

            for _ in range(4):
                assert await deliver() == 200
            await page.see("4 deliveries")
            assert await deliver(OTHER_SECRET) == 400
            await page.evaluate("location.hash = '#/rejected'")
            await page.see("signature")
            await page.evaluate("location.hash = '#/dead'")
            await page.see("4 dead letters")
            (tmp_path / "repaired").touch()
            await page.click("td button", "Replay")
            await page.click("dialog button", "Dry run")
            await page.click("dialog button", "Replay 4")
            await page.see("There are no dead letters.")
            await page.evaluate("location.hash = '#/deliveries?state=done'")
            await page.see("4 deliveries")
            assert page.errors == []


async def test_a_replica_shows_the_age_of_its_verification(address, tmp_path, monkeypatch):
    monkeypatch.setattr(verification_schedule, "LOOK_SECONDS", 1.0)
    monkeypatch.setattr(health_check, "CHECK_SECONDS", 0.3)
    section = "MultiTenant:FileDb:Replication:"
    keys = {
        f"{section}AutoRegenerateOnTenantChange": True,
        f"{section}Supervise": True,
        "Server:Bind": ["127.0.0.1:0"],
        "Admin:Bind": "127.0.0.1:0",
        "Admin:TokenEnvVar": "SDK_TEST_ADMIN_TOKEN",
        "Webhooks:RequireHttps": False,
    }
    with local_disk(tmp_path / "target") as target:
        host = ReplicaHost(tmp_path / "host", target, keys)
        runtime = Runtime(host.settings, standalone=True)
        async with running(runtime, WHOLE_SECONDS) as started, connected(address) as browser:
            page = await browser.open(f"{started.admin[0]}/#token={TOKEN}")
            await page.until("document.querySelector('.live-live')")
            await page.evaluate("location.hash = '#/replication'")
            await page.see("never")
            await trio.to_thread.run_sync(host.verify)
            await page.see("nothing to verify")
            await page.see("no active tenant had a database")
            tenants = runtime.receiver.tenancy.service
            host.tenants["acme"] = await tenants.add("acme", name="Acme")
            await trio.to_thread.run_sync(host.write, "acme", 10)
            await page.see(str(host.database("acme")))
            # Before that there is no replica that a verification could restore.
            await trio.to_thread.run_sync(host.wait_synced, "acme")
            card = "document.querySelectorAll('.card')[2]"
            await trio.to_thread.run_sync(host.verify)
            await page.see("0 failed", card)
            await page.see("s ago", card)
            # The target is emptied in one step, because the replicator may be writing there.
            (target.directory / "replica").rename(target.directory / "taken-away")
            await trio.to_thread.run_sync(host.verify)
            await page.see("1 failed", card)
            await page.click(".findings a", host.tenants["acme"].id)
            await page.see("Acme")
            assert page.errors == []
