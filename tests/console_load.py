"""Open the console beside a busy receiver with many events, and measure what both feel.

    python tests/console_load.py [--events 100000] [--rate 500] [--seconds 20]
    python tests/console_load.py --pictures DIRECTORY

It fills the inbox of a real daemon, opens the console in a real browser, and prints as JSON: the
time to the first rows, the memory of the page before and after a way through the whole list, the
longest pause of the page while deliveries come in live, and how many deliveries the receiver takes
with and without an open console, in turns. It stops by itself.

``--pictures`` takes one picture of each view, light and dark, of a smaller inbox, instead.
"""

import argparse
import base64
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
import trio
from support.browser import Page, connected, started_browser
from support.deliveries import SECRET
from support.ports import free_port
from support.replicating import write
from support.wire import Wire

from sdk_trio.testing import sign_delivery

APPLICATION = """
import sdk_trio
from sdk_trio.events import OrderCreatedEvent, OrderPaidEvent, RefundCreatedEvent

handlers = sdk_trio.HandlerRegistry()


@handlers.on(OrderPaidEvent, enqueue=True)
async def book(event):
    pass


@handlers.on(OrderCreatedEvent)
async def note(event):
    pass


@handlers.on(RefundCreatedEvent, enqueue=True)
async def pay_back(event):
    raise KeyError(event.data.order_id)
"""

TOKEN = "token-of-a-test-as-long-as-it-has-to-be"  # a test value
ENVIRONMENT = {
    **os.environ,
    "SDK__WEBHOOKS__SECRET": SECRET,
    "SDK_ADMIN_TOKEN": TOKEN,
    "SDK_ENVIRONMENT": "Development",
    "EMAIL_API_KEY": "a-test-value",
}
OTHER_SECRET = "whsec_" + base64.b64encode(b"another secret, of this program alone").decode()
CONNECTIONS = 16
WIDE = (1280, 800)


@attrs.frozen
class Daemon:
    """A running daemon."""

    receiver: str
    admin: str
    directory: Path
    settings: Sequence[str]

    def run(self, *words: str) -> str:
        """Run a command on its store; return what it printed."""
        command = [sys.executable, "-m", "sdk_trio", *words, *self.settings]
        ran = subprocess.run(
            command, cwd=self.directory, env=ENVIRONMENT, capture_output=True, text=True
        )
        return ran.stdout


#: The replica of each tenant's database, in a directory, by a replicator of the daemon's own.
REPLICATION = {
    "UseReplication": "true",
    "ReplicaTargetType": "LocalDisk",
    "LocalDisk:Path": "replica",
    "ConfigOutputPath": "replicator.yml",
    "ReplicatorPidFilePath": "replicator.pid",
    "AutoRegenerateOnTenantChange": "true",
    "Supervise": "true",
}


@contextmanager
def running(directory: Path, replication: Mapping[str, str]) -> Iterator[Daemon]:
    (directory / "app.py").write_text(APPLICATION)
    receiver, admin = free_port(), free_port()
    keys = {
        "Server:Bind": f"127.0.0.1:{receiver}",
        "Admin:Bind": f"127.0.0.1:{admin}",
        "Webhooks:RequireHttps": "false",
        "Webhooks:RateLimitPerMinute": "10000000",
        "Webhooks:Queue:MaxAttempts": "1",
        "MultiTenant:Enabled": "true",
        "MultiTenant:TenantStatus:SuspendUnverifiedTenantsAnyway": "true",
        "MultiTenant:Notifications:Enabled": "true",
        "MultiTenant:Notifications:Email:FromAddress": "noreply@platform.example",
        "Storage:Path": "data",
        **{f"MultiTenant:FileDb:Replication:{key}": each for key, each in replication.items()},
    }
    words = [word for key, value in keys.items() for word in ("--set", f"Sdk:{key}={value}")]
    command = [sys.executable, "-m", "sdk_trio", "run", "--standalone", "--app", "app:handlers"]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, *words], cwd=directory, env=ENVIRONMENT, stdout=log, stderr=log
        )
    try:
        addresses = (f"http://127.0.0.1:{receiver}", f"http://127.0.0.1:{admin}")
        yield Daemon(*addresses, directory, words)
    finally:
        process.terminate()
        process.wait(60)


async def started(daemon: Daemon) -> None:
    with trio.fail_after(30):
        while True:
            try:
                (await Wire.connect(daemon.receiver)).__exit__()
            except OSError:
                await trio.sleep(0.05)
            else:
                return


async def deliver(url: str, number: int, *, until: float | None = None, rate: float = 0.0) -> int:
    """Send ``number`` deliveries, at ``rate`` a second if it is given; return how many arrived."""
    numbers = itertools.count()
    begun = trio.current_time()
    sent = 0

    async def send() -> None:
        nonlocal sent
        with await Wire.connect(url) as wire:
            for index in numbers:
                now = trio.current_time()
                if index >= number or (until is not None and now >= until):
                    return
                if rate:
                    await trio.sleep_until(begun + index / rate)
                kind = ("order.paid", "order.created", "order.paid", "refund.created")[index % 4]
                answer = await wire.post(sign_delivery(kind, secret=SECRET))
                assert answer.status == 200, answer
                sent += 1

    async with trio.open_nursery() as nursery:
        for _ in range(CONNECTIONS):
            nursery.start_soon(send)
    return sent


async def memory(page: Page) -> float:
    """The megabytes of the page's objects, after a collection."""
    await page.call("HeapProfiler.collectGarbage")
    used = await page.call("Runtime.getHeapUsage")
    return round(used["usedSize"] / 1e6, 1)


async def measure(arguments: argparse.Namespace, daemon: Daemon, address: str) -> None:
    result: dict[str, object] = {"events": await deliver(daemon.receiver, arguments.events)}
    async with connected(address) as browser:
        page = await browser.open(f"{daemon.admin}/#token={TOKEN}")
        await page.look(width=WIDE[0], height=WIDE[1])
        await page.until("document.querySelector('.live-live')")
        result["first rows, s"] = await first_rows(page)
        result["memory at first, MB"] = await memory(page)
        result["rows on the way down"] = await way_down(page)
        result["memory after the whole list, MB"] = await memory(page)
        result.update(await live(page, daemon, arguments))
        assert not page.errors, page.errors
    result["with to without an open console"] = await rates(daemon, address, arguments)
    print(json.dumps(result, indent=2))


async def first_rows(page: Page) -> float:
    """Seconds from the beginning of the page to its first rows; the median of five."""
    await page.evaluate("location.hash = '#/deliveries'")
    times = []
    for _ in range(5):
        await page.call("Page.reload")
        shown = "document.querySelector('.rows .row .cover') && performance.now()"
        times.append(await page.until(shown))
    return round(statistics.median(times) / 1000, 3)


async def way_down(page: Page) -> int:
    """Scroll to the end of the list; return how many rows it has."""
    await page.until("document.querySelector('.rows .row .cover')")
    return await page.evaluate("""new Promise((done) => {
        const box = document.querySelector(".scroll");
        const end = () => document.querySelector("main > p.faint:last-child").innerText;
        const down = () => {
            box.scrollTop = box.scrollHeight;
            if (end().includes("more below")) setTimeout(down, 10);
            else done(Math.round(document.querySelector(".rows").clientHeight / 40));
        };
        down();
    })""")


async def live(page: Page, daemon: Daemon, arguments: argparse.Namespace) -> dict[str, object]:
    """Watch the list while deliveries come in; return the longest time for which the page was
    blocked."""
    await page.evaluate("""(() => {
        document.querySelector(".scroll").scrollTop = 0;
        window.longest = 0;
        let last = performance.now();
        const beat = () => {
            const now = performance.now();
            window.longest = Math.max(window.longest, now - last);
            last = now;
            setTimeout(beat, 5);
        };
        beat();
    })()""")
    number = round(arguments.rate * arguments.seconds)
    sent = await deliver(daemon.receiver, number, rate=arguments.rate)
    longest = await page.evaluate("Math.round(window.longest)")
    return {"live deliveries": sent, "longest pause of the page, ms": longest}


async def rates(daemon: Daemon, address: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Deliveries in equal times with and without a console, in turns; the median of the ratios."""
    ratios = []
    seconds = arguments.seconds / 4
    for _ in range(5):
        taken = {}
        for opened in (False, True):
            async with connected(address) as browser:
                page = await browser.open("about:blank")
                if opened:
                    await page.go(f"{daemon.admin}/#token={TOKEN}")
                    await page.until("document.querySelector('.live-live')")
                    await page.evaluate("location.hash = '#/deliveries'")
                until = trio.current_time() + seconds
                taken[opened] = await deliver(daemon.receiver, 10**9, until=until)
                await page.call("Page.close")
        ratios.append(taken[True] / taken[False])
    return {
        "median": round(statistics.median(ratios), 2),
        "least": round(min(ratios), 2),
        "most": round(max(ratios), 2),
    }


def fill(daemon: Daemon) -> None:
    """Bring tenants, a message, rejected requests, and replicas that are verified."""
    for name in ("acme", "bolt", "corner"):
        daemon.run("tenant", "add", name, "--name", f"{name.title()} Ltd")
    for tenant in json.loads(daemon.run("tenant", "list", "--format", "json")):
        database = daemon.directory / "data" / "tenants" / f"{tenant['id']}.db"
        database.parent.mkdir(mode=0o700, exist_ok=True)
        write(str(database), 5)
    order = ("--reason", "invoice 2026-117 is unpaid", "--bypass-email-verification")
    daemon.run("tenant", "suspend", "corner", *order)
    for _ in range(30):
        reported = json.loads(
            daemon.run("replication", "verify", "--all", "--format", "json") or "[]"
        )
        if reported and all(each["ok"] for each in reported):
            break


async def refuse(url: str) -> None:
    """Send deliveries that the receiver rejects."""
    old = int(time.time()) - 3600
    for made in (
        sign_delivery("order.paid", secret=OTHER_SECRET),
        sign_delivery("refund.created", secret=SECRET, timestamp=old),
        sign_delivery(b"{no JSON", secret=SECRET),
    ):
        with await Wire.connect(url) as wire:
            await wire.post(made)


async def picture(daemon: Daemon, address: str, directory: Path) -> None:
    """Write a picture of each view, light and dark."""
    await deliver(daemon.receiver, 400)
    await refuse(daemon.receiver)
    async with connected(address) as browser:
        page = await browser.open(f"{daemon.admin}/#token={TOKEN}")
        await page.until("document.querySelector('.live-live')")
        links = "[...document.querySelectorAll('nav.views a')].map((link) => link.hash.slice(2))"
        await page.until(f"{links}.includes('trigger')")
        names = await page.evaluate(links)
        await page.evaluate("location.hash = '#/deliveries?state=dead'")
        await page.until("document.querySelector('.rows .row .cover')")
        link = "document.querySelector('.rows .row .cover').hash.slice(2)"
        views = {name: name for name in names} | {"delivery": await page.evaluate(link)}
        await trio.Path(directory).mkdir(parents=True, exist_ok=True)
        for dark in (False, True):
            await page.look(width=WIDE[0], height=WIDE[1], dark=dark)
            for name, view in views.items():
                await page.evaluate(f"location.hash = '#/{view}'")
                await page.until("!document.querySelector('main [aria-busy]')")
                # Charts are drawn a moment later, and the figures of the store every five seconds.
                await trio.sleep(6 if name == "overview" else 0.7)
                await page.picture(directory / f"{name}-{'dark' if dark else 'light'}.webp")


async def main(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        directory = Path(name)
        if arguments.pictures is not None:
            with running(directory, REPLICATION) as daemon:
                await started(daemon)
                await trio.to_thread.run_sync(fill, daemon)
        replication = {} if arguments.pictures is None else REPLICATION
        with started_browser(directory) as address, running(directory, replication) as daemon:
            await started(daemon)
            if arguments.pictures is None:
                await measure(arguments, daemon, address)
            else:
                await picture(daemon, address, arguments.pictures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=500.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--pictures", type=Path)
    trio.run(main, parser.parse_args())
