"""A real headless browser, controlled over its DevTools protocol with trio-websocket.

The pages of one :class:`Browser` share nothing: each has its own browser context.
"""

import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import attrs
import pytest
import trio
from trio_websocket import open_websocket_url

from .waiting import PATIENCE_SECONDS, wait_until

# Without windows a page takes a tenth of the processor time that it takes in the whole browser.
CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")

#: Parts of the errors of a request while the page changes.
_LEFT = ("navigated or closed", "xecution context", "context with specified id", "was collected")


class PageLeftError(Exception):
    """The page changed before it had answered."""


@attrs.define(eq=False)
class Page:
    """One tab; ``errors`` are its exceptions, refused requests and messages of level error."""

    connection: object
    session: str
    context: str
    errors: list = attrs.field(factory=list)

    async def call(self, method, **parameters):
        return await self.connection.call(method, parameters, self.session)

    async def go(self, url):
        answer = await self.call("Page.navigate", url=url)
        assert "errorText" not in answer, (url, answer)

    async def load_again(self):
        """Reload the page; later calls use the new one."""
        # The old page still answers for a while; the mark distinguishes it from the new one.
        await self.evaluate("window.isLeft = true")
        await self.call("Page.reload")
        await self.until("!window.isLeft && document.readyState === 'complete'")

    async def turn(self, address):
        """Set the fragment of the URL, and wait until the page has handled it."""
        await self.evaluate(f"""new Promise((then) => {{
            const before = location.hash;
            addEventListener("hashchange", () => setTimeout(then), {{once: true}});
            location.hash = {json.dumps(address)};
            if (location.hash === before) then();
        }})""")

    async def evaluate(self, expression):
        """Return the value of a JavaScript expression; a promise is awaited."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression):
        """Wait until a JavaScript expression is true, and return its value."""
        with trio.move_on_after(PATIENCE_SECONDS):
            while True:
                # A page that is being left does not answer; the next one does.
                with suppress(PageLeftError):
                    value = await self.evaluate(expression)
                    # An element arrives as an empty object.
                    if value or value == {}:
                        return value
                await trio.sleep(0.02)
        text = await self.evaluate("document.body.innerText")
        raise AssertionError(f"never true: {expression}\n{self.errors}\n{text[:3000]}")

    async def see(self, text, within="document.body"):
        """Wait until the page shows this text."""
        await self.until(f"{within}?.innerText.includes({json.dumps(text)})")

    async def click(self, selector, text=""):
        """Click the first visible element with this selector and text.

        Wait while another element covers it.
        """
        found = await self.until(f"""(() => {{
            const all = [...document.querySelectorAll({json.dumps(selector)})];
            const open = document.querySelector("dialog[open]");
            const element = all.find((each) => each.innerText.includes({json.dumps(text)})
                && each.getClientRects().length && !each.disabled
                && (!open || open.contains(each)));
            if (!element) return null;
            element.scrollIntoView({{block: "center", inline: "center"}});
            const box = element.getBoundingClientRect();
            const point = [box.x + box.width / 2, box.y + box.height / 2];
            return element.contains(document.elementFromPoint(...point)) && point;
        }})()""")
        for kind in ("mousePressed", "mouseReleased"):
            await self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=found[0],
                y=found[1],
                button="left",
                clickCount=1,
            )

    async def press(self, key):
        """Press one key, such as ``j`` or ``Enter``."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def write(self, selector, text):
        """Set the text of a field, with the events of typing and leaving it."""
        await self.until(f"""(() => {{
            const field = document.querySelector({json.dumps(selector)});
            if (!field) return false;
            field.focus();
            field.value = {json.dumps(text)};
            field.dispatchEvent(new Event("input", {{bubbles: true}}));
            field.dispatchEvent(new Event("change", {{bubbles: true}}));
            return true;
        }})()""")

    async def choose(self, label, value):
        """Choose an option of the list with this label."""
        await self.until(f"""(() => {{
            const labels = [...document.querySelectorAll("label")];
            const list = labels.find((each) => each.firstChild?.data === {json.dumps(label)})
                ?.querySelector("select");
            if (![...(list?.options ?? [])].some((each) => each.value === {json.dumps(value)}))
                return false;
            list.value = {json.dumps(value)};
            list.dispatchEvent(new Event("change", {{bubbles: true}}));
            return true;
        }})()""")

    async def look(self, *, width, height=900, dark=False):
        """Set the size of the window, and whether the system prefers dark colours."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        dressed = f"matchMedia('(prefers-color-scheme: {scheme['value']})').matches"
        await self.until(f"innerWidth === {width} && {dressed}")

    async def network(self, *, offline=False, latency=0):
        """Cut the page off the network, or delay each response by milliseconds."""
        await self.call("Network.enable")
        await self.call(
            "Network.emulateNetworkConditions",
            offline=offline,
            latency=latency,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )
        if latency:
            return
        # The browser process applies the setting asynchronously; test its effect.
        loses = "onerror" if offline else "onload"
        await self.until(f"""new Promise((then) => {{
            const request = new XMLHttpRequest();
            request.onloadend = () => then(false);
            request.{loses} = () => then(true);
            request.open("GET", location.pathname);
            request.send();
        }})""")

    async def clipboard(self):
        """Return the text in the clipboard."""
        allowed = ["clipboardReadWrite", "clipboardSanitizedWrite"]
        await self.call(
            "Browser.grantPermissions", browserContextId=self.context, permissions=allowed
        )
        return await self.evaluate("navigator.clipboard.readText()")

    async def picture(self, path):
        """Write a screenshot as WebP, which has a quarter of the size of PNG."""
        answer = await self.call("Page.captureScreenshot", format="webp", quality=75)
        await trio.Path(path).write_bytes(base64.b64decode(answer["data"]))

    def note(self, method, parameters):
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            entry = parameters["entry"]
            self.errors.append(f"{entry['source']}: {entry['text']} {entry.get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "assert"):
            self.errors.append(str(parameters["args"]))


class _Connection:
    def __init__(self, socket):
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers = {}
        self.pages = {}

    async def call(self, method, parameters=None, session=None):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters or {}}
        if session is not None:
            message["sessionId"] = session
        arrived, answers = trio.open_memory_channel(1)
        self._answers[number] = arrived
        with trio.fail_after(PATIENCE_SECONDS):
            await self._socket.send_message(json.dumps(message))
            answer = await answers.receive()
        if any(part in answer.get("error", {}).get("message", "") for part in _LEFT):
            raise PageLeftError(method)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    async def read(self):
        while True:
            message = json.loads(await self._socket.get_message())
            if "id" in message:
                self._answers.pop(message["id"]).send_nowait(message)
            elif (page := self.pages.get(message.get("sessionId"))) is not None:
                page.note(message["method"], message["params"])


@attrs.define(eq=False)
class Browser:
    """A running browser."""

    connection: object

    async def open(self, url):
        """Return a new page in its own context, at this URL."""
        # A page that is left open would send requests, perhaps to the program of another test.
        context = await self.connection.call(
            "Target.createBrowserContext", {"disposeOnDetach": True}
        )
        target = await self.connection.call(
            "Target.createTarget", {"url": "about:blank", **context}
        )
        attached = await self.connection.call("Target.attachToTarget", {**target, "flatten": True})
        page = Page(self.connection, attached["sessionId"], context["browserContextId"])
        self.connection.pages[page.session] = page
        for domain in ("Page", "Runtime", "Log"):
            await page.call(f"{domain}.enable")
        # Keys go to the page that has the focus, and one that is hidden asks for less.
        await page.call("Emulation.setFocusEmulationEnabled", enabled=True)
        await page.go(url)
        return page


@asynccontextmanager
async def connected(address):
    """The browser that :func:`started_browser` has started, for one event loop."""
    async with open_websocket_url(address, max_message_size=2**26) as socket:
        connection = _Connection(socket)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.read)
            yield Browser(connection)
            nursery.cancel_scope.cancel()


@contextmanager
def started_browser(directory: Path):
    """Start a browser with a profile in ``directory``, and yield its DevTools address."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed: apt-get install chromium-headless-shell")
    profile = directory / "profile"
    command = [
        CHROMIUM,
        "--headless=new",
        # Its sandbox does not work in a container, nor for root.
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-extensions",
        "--no-first-run",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        "about:blank",
    ]
    process = subprocess.Popen(
        command,
        env={**os.environ, "HOME": str(directory)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until(
            lambda: _read_port(profile) or process.poll() is not None,
            lambda: "the browser has not reported its port",
        )
        lines = _read_port(profile)
        assert lines, f"the browser has ended: {process.returncode}"
        yield f"ws://127.0.0.1:{lines[0]}{lines[1]}"
    finally:
        # Including its children, which would continue to write to the profile.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read_port(profile):
    try:
        lines = (profile / "DevToolsActivePort").read_text().splitlines()
    except FileNotFoundError:
        return None
    return lines if len(lines) == 2 else None
