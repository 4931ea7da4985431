"""The console in a real browser, beside a running program: what an operator sees and does."""

import json
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import pytest
from support.admin import TOKEN, administered
from support.browser import connected, started_browser
from support.ports import free_port
from support.serving import registry, works
from support.waiting import PATIENCE_SECONDS

from sdk_trio.events import OrderPaidEvent
from sdk_trio.webhooks import HandlerRegistry

ROOT = Path(__file__).parents[2]
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
        await self.page.evaluate(f"location.hash = '#/{name}'")
        await self.page.until("document.querySelector('main h1, main header h1')")
        await self.page.until("!document.querySelector('main [aria-busy]')")


@asynccontextmanager
async def watched(address, handlers=None, **keys):
    keys = {"Environment": "Development", **keys}
    async with administered(handlers, **keys) as program, connected(address) as browser:
        page = await browser.open(f"{program.url}/#token={TOKEN}")
        await page.until("document.querySelector('.live.live')")
        yield Watched(program, page, browser)
        assert page.errors == []


class Ledger:
    """A handler that fails until it is mended."""

    def __init__(self):
        self.mended = False

    async def __call__(self, event):
        if not self.mended:
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
    """What axe-core finds that people with a screen reader or weak eyes would run into."""
    return await page.evaluate("""axe.run(document, {resultTypes: ["violations"]}).then((found) =>
        found.violations.filter((each) => ["serious", "critical"].includes(each.impact))
            .map((each) => [each.id, each.nodes.map((node) => node.html)]))""")


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
        for dark, width in ((False, 1600), (True, 360)):
            await console.page.look(width=width, dark=dark)
            for name in await views(console.page):
                await console.view(name)
                assert await violations(console.page) == [], (name, dark, width)
                wider = "document.documentElement.scrollWidth > innerWidth"
                assert not await console.page.evaluate(wider), (name, width)


async def test_an_axe_that_finds_nothing_is_looking(address):
    if not AXE.exists():
        pytest.skip("axe-core is not installed: make emulators")
    async with watched(address) as console:
        await console.page.evaluate(AXE.read_text() + ";0")
        await console.page.evaluate("document.querySelector('main').append(new Image())")
        assert [name for name, _ in await violations(console.page)] == ["image-alt"]


async def test_deliveries_come_in_and_one_tells_why_it_failed(address):
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
        await page.call("Page.reload")
        await page.see("first")
        await page.press("/")
        await page.click(".row", "first")
        await page.see("KeyError: 'customer_id'")
        await page.see("in Ledger.__call__")
        await page.see("12345678901234567890", "document.querySelector('.tree')")
        ledger.mended = True
        await page.click("button", "Replay")
        await page.click("dialog button.strong", "Replay")
        await page.see("It is in the queue again.")
        await page.see("done", "document.querySelector('header.title')")


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
        ledger.mended = True
        await console.view("dead")
        await page.click("td button", "Replay")
        await page.click("dialog button", "Dry run")
        await page.see("3 deliveries would run again")
        states = {each["state"] for each in await console.program.api("/events")}
        assert states == {"dead"}
        await page.click("dialog button", "Replay 3")
        await page.see("3 deliveries are in the queue again.")
        await page.see("There are no dead letters.")
        states = {each["state"] for each in await console.program.api("/events")}
        assert states == {"done"}


async def test_a_tenant_is_suspended_and_the_audit_says_so(address):
    status = "MultiTenant__TenantStatus__SuspendUnverifiedTenantsAnyway"
    keys = {"MultiTenant__Enabled": True, status: True}
    async with watched(address, **keys) as console:
        page = console.page
        service = console.program.runtime.receiver.tenancy.service
        await service.add("acme", name="Acme Ltd", actor="test")
        await console.view("tenants")
        await page.click("td a", "acme")
        await page.click("button", "Suspend")
        await page.write("dialog input[name=reason]", "unpaid invoice 4711")
        await page.click("dialog button.strong", "Suspend")
        # What the program refuses is said where it was asked, and not lost.
        await page.see("email is not verified; verify it", "document.querySelector('dialog')")
        page.errors.clear()
        await page.click("dialog input[name=bypass]")
        await page.click("dialog button.strong", "Suspend")
        await page.see("The tenant is Suspended now.")
        await page.see("unpaid invoice 4711", "document.querySelector('main section')")
        await page.see("Active to Suspended")


async def test_the_page_goes_on_after_a_restart(address, tmp_path):
    keys = {"Admin__Bind": f"127.0.0.1:{free_port()}", "Storage__Path": str(tmp_path / "data")}
    keys |= {"Storage__Backend": "Sqlite", "Environment": "Development"}
    async with connected(address) as browser:
        async with administered(registry(works), **keys) as program:
            page = await browser.open(f"{program.url}/#token={TOKEN}")
            await page.until("document.querySelector('.live.live')")
            await page.evaluate("location.hash = '#/deliveries'")
            await program.app.deliver("order.paid", webhook_id="before")
            await page.see("before")
        await page.see("connection lost")
        async with administered(registry(works), **keys) as program:
            await page.until("document.querySelector('.live.live')")
            await program.app.deliver("order.paid", webhook_id="after")
            await page.see("after")
            await page.see("before")


async def test_what_strangers_send_is_text(address):
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


async def test_nobody_gets_in_without_the_token(address):
    async with administered(registry(works)) as program, connected(address) as browser:
        page = await browser.open(f"{program.url}/")
        await page.write("input[name=token]", "a wrong one")
        await page.click("button", "Enter")
        await page.see("This is not the token of this program.")
        assert await page.evaluate("sessionStorage.length") == 0
        await page.write("input[name=token]", TOKEN)
        await page.click("button", "Enter")
        await page.see("Overview")
        assert TOKEN not in await page.evaluate("location.href + document.cookie")


async def test_where_nothing_may_be_changed_the_buttons_say_so(address):
    _, handlers = failing()
    keys = {"Admin__ReadOnly": True, "Webhooks__Queue__MaxAttempts": 1}
    async with watched(address, handlers, **keys) as console:
        await dead_letters(console.program, 1)
        await console.view("dead")
        disabled = "[...document.querySelectorAll('main button')].every((each) => each.disabled)"
        await console.page.see("KeyError")
        await console.page.until(disabled)


async def test_a_paused_page_reads_nothing(address):
    async with watched(address, registry(works)) as console:
        page = console.page
        await console.view("deliveries")
        await page.press("p")
        await page.until("document.querySelector('.live.paused')")
        asked = "performance.getEntriesByType('resource').length"
        # What was asked before the pause is still answered.
        before = await page.until(f"""new Promise((then) => {{
            const before = {asked};
            setTimeout(() => then({asked} === before && before), 500);
        }})""")
        await console.program.app.deliver("order.paid", webhook_id="unseen")
        await page.evaluate("new Promise((then) => setTimeout(then, 2500))")
        assert await page.evaluate(asked) == before
        await page.press("p")
        await page.see("unseen")


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
