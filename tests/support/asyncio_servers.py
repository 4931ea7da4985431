"""Applications of asyncio frameworks under uvicorn, each in its own process."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import attrs

from sdk_trio.testing import sign_delivery

from .command_forker import run_command
from .deliveries import SECRET
from .ports import free_port
from .tables import STATE_OF_EACH
from .waiting import wait_until

#: Three kinds of handlers; each writes the id of its event to a file.
HANDLERS = """
import asyncio, os, threading, time
import trio
import sdk_trio, sdk_trio.asgi
from sdk_trio.events import OrderCreatedEvent, OrderPaidEvent, OrderRefundedEvent

handlers = sdk_trio.HandlerRegistry()
ledger = os.open(os.environ["RUNS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(event):
    os.write(ledger, f"{event.webhook_id}\\n".encode())


@handlers.on(OrderPaidEvent, enqueue=True)
def in_a_thread(event):
    time.sleep(0.005)
    note(event)


@handlers.on(OrderCreatedEvent, asyncio=True)
async def on_asyncio(event):
    await asyncio.sleep(0.001)
    note(event)


@handlers.on(OrderRefundedEvent)
async def on_trio(event):
    await trio.sleep(0.001)
    note(event)


receiver = sdk_trio.asgi.Threaded(sdk_trio.load_settings(standalone=True), handlers)


def kill_the_thread():
    def die():
        raise RuntimeError("killed by the test")

    receiver._thread._token.run_sync_soon(die)
"""

_STARLETTE = """
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route


async def hello(request):
    return JSONResponse({"ready": receiver.ready})


app = Starlette(
    routes=[Route("/hello", hello), Mount("/hooks", receiver)], lifespan=receiver.lifespan
)
"""

_FASTAPI = """
from fastapi import FastAPI

app = FastAPI(lifespan=receiver.lifespan)
app.mount("/hooks", receiver)


@app.get("/hello")
async def hello():
    return {"ready": receiver.ready}


@app.get("/kill")
async def kill():
    kill_the_thread()
    return {}
"""

_LITESTAR = """
from litestar import Litestar, asgi, get


@get("/hello")
async def hello() -> dict[str, bool]:
    return {"ready": receiver.ready}


app = Litestar(
    [hello, asgi("/hooks/sdk", copy_scope=True)(receiver)], lifespan=[receiver.lifespan]
)
"""

_DJANGO = """
import django
from django.conf import settings

settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], DEBUG=False, SECRET_KEY="x" * 50)
django.setup()

from django.core.asgi import get_asgi_application
from django.http import JsonResponse
from django.urls import path


def hello(request):
    return JsonResponse({"ready": receiver.ready})


urlpatterns = [path("hello", hello)]
app = receiver.in_front_of(get_asgi_application())
"""

APPLICATIONS = {
    "fastapi": _FASTAPI,
    "starlette": _STARLETTE,
    "litestar": _LITESTAR,
    "django": _DJANGO,
}


@attrs.define
class Uvicorn:
    """``uvicorn app:app`` in its own directory."""

    directory: Path
    framework: str = "fastapi"
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = attrs.Factory(dict)
    port: int = attrs.Factory(free_port)
    process: "subprocess.Popen[bytes] | None" = None

    def begin(self) -> None:
        """Start the process and return at once."""
        (self.directory / "app.py").write_text(HANDLERS + APPLICATIONS[self.framework])
        command = [sys.executable, "-m", "uvicorn", "app:app", "--port", str(self.port)]
        with (self.directory / "log").open("a") as log:
            self.process = subprocess.Popen(
                [*command, "--no-access-log", *self.arguments],
                cwd=self.directory,
                env=self.environ,
                stdout=log,
                stderr=log,
            )

    @property
    def environ(self) -> dict[str, str]:
        """The variables of the process, and of commands on the same data."""
        return {
            **os.environ,
            "SDK__WEBHOOKS__SECRET": SECRET,
            "SDK__WEBHOOKS__REQUIREHTTPS": "false",
            "SDK__STORAGE__PATH": str(self.directory / "data"),
            "SDK__ADMIN__ENABLED": "false",
            "RUNS": str(self.directory / "runs"),
            **self.environment,
        }

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a command of the package on the same data."""
        return run_command(words, environ=self.environ, directory=self.directory, seconds=60)

    def start(self) -> None:
        """Start it and wait until the application answers."""
        self.begin()
        wait_until(lambda: self.hello() is not None, self.log)

    def hello(self) -> bool | None:
        """Return the response of the application's own route; None without one."""
        _, body = self.ask("GET", "/hello")
        return json.loads(body)["ready"] if body else None

    def ask(self, method: str, path: str, *content: Any) -> tuple[int | None, bytes]:
        """Send a request on a new connection; return status and body, None without a response."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, *content)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, HTTPException):
            return None, b""
        finally:
            connection.close()

    def deliver(self, event_type: str, webhook_id: str, path: str = "/hooks/sdk") -> int | None:
        """Send a delivery; return the status, None without a response."""
        signed = sign_delivery(event_type, secret=SECRET, webhook_id=webhook_id)
        return self.ask("POST", path, signed.body, signed.headers)[0]

    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def handled(self) -> list[str]:
        with suppress(FileNotFoundError):
            return (self.directory / "runs").read_text().split()
        return []

    def states(self) -> dict[str, str]:
        """The state of each event in the store."""
        with closing(sqlite3.connect(self.directory / "data" / "inbox.db")) as store:
            return dict(store.execute(STATE_OF_EACH))

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

    def __enter__(self) -> "Uvicorn":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def sending(server: Uvicorn, acknowledged: list[str], stop: threading.Event, name: str) -> None:
    """Deliver until stopped; repeat each event until it is acknowledged."""
    types = ("order.paid", "order.created", "order.refunded")
    number = 0
    while not stop.is_set():
        webhook_id = f"{name}-{number}"
        if server.deliver(types[number % 3], webhook_id) == 200:
            acknowledged.append(webhook_id)
            number += 1
        else:
            time.sleep(0.02)
