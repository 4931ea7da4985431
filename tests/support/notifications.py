"""Transitions to announce, and settings of channels."""

import os
import socket
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer

import attrs
import msgspec
import trio

from sdk_trio.config.options.notifications import (
    EmailOptions,
    EmailProviderAOptions,
    EnabledChannelsOptions,
    NotificationsOptions,
    SmsOptions,
    SmsProviderAOptions,
    WebhookChannelOptions,
)
from sdk_trio.records.tenants import OutboxRecord, TenantStatus, Transition
from sdk_trio.runtime.notifications import make_channels

#: Test values: a public vector of Standard Webhooks, and credentials that no provider issues.
SECRET = "whsec_z6fMa4YWa088j5EP9gJ8LDaGxrBzHpIg"
VARIABLES = {
    "EMAIL_API_KEY": "test-key-of-email",
    "SMS_ACCOUNT_SID": "AC" + "0" * 32,
    "SMS_AUTH_TOKEN": "test-token-of-sms",
    "SDK_WEBHOOK_SECRET": SECRET,
}
#: An address of loopback that no other process of the tests calls.
OWN_HOST = "127.{}.{}.2".format(*divmod(256 + os.getpid() % 60_000, 256))
EMAIL, PHONE = "manager@acme.example", "+15551234567"
OCCURRED_AT = 1_800_000_000.25

_STATUSES = {
    Transition.SUSPENDED: (TenantStatus.ACTIVE, TenantStatus.SUSPENDED),
    Transition.REACTIVATED: (TenantStatus.SUSPENDED, TenantStatus.ACTIVE),
    Transition.DEACTIVATED: (TenantStatus.ACTIVE, TenantStatus.DEACTIVATED),
    Transition.DELETED: (TenantStatus.ACTIVE, TenantStatus.DELETED),
}


def record(transition=Transition.SUSPENDED, **changes):
    previous, new = _STATUSES[transition]
    known = OutboxRecord(
        sequence=7,
        delivery_id="2b6c8a56-6a4f-4f0e-8f4e-0d9a3e1c7b11",
        tenant_id="f2f7a6fe-52a5-4a0b-9d2b-6d1f6e0f3c55",
        tenant_identifier="acme",
        tenant_name="Acme Ltd",
        transition=transition,
        previous_status=previous,
        new_status=new,
        reason="invoice 7 is unpaid",
        actor="kim",
        occurred_at=OCCURRED_AT,
        site_manager_email=EMAIL,
        site_manager_email_verified=True,
        site_manager_phone=PHONE,
    )
    return attrs.evolve(known, **changes)


def options(base, *, webhook_url=None, timeout_seconds=60, **changes):
    """Return options with every channel enabled, all of them at ``base``."""
    known = NotificationsOptions(
        enabled=True,
        enabled_channels=EnabledChannelsOptions(email=True, sms=True, webhook=True),
        email=EmailOptions(
            from_address="noreply@platform.example",
            email_provider_a=EmailProviderAOptions(base_url=base),
        ),
        sms=SmsOptions(
            sms_provider_a=SmsProviderAOptions(from_number="+15550000000", base_url=base)
        ),
        webhook=WebhookChannelOptions(
            url=webhook_url or f"{base}/in", timeout_seconds=timeout_seconds
        ),
    )
    return msgspec.structs.replace(known, **changes)


async def send(channel, chosen, *, variables=VARIABLES, poster=None, what=None):
    """Send through the real sender, on real sockets unless a poster is given."""
    channels = make_channels(chosen, poster=poster, read_variable=variables.get, clock=time.time)
    with trio.fail_after(60):
        return await channels[channel].send(what or record())


@attrs.define
class Request:
    """One request as the fake provider read it."""

    target: str
    headers: dict
    body: bytes


@attrs.define
class FakeProvider:
    """Responds with ``answer`` after reading a request; see :func:`fake_provider`."""

    answer: bytes = b""
    host: str = "127.0.0.1"
    port: int = 0
    requests: list = attrs.Factory(list)
    connections: int = 0

    @property
    def url(self):
        return f"http://{self.host}:{self.port}"


def http_answer(status, body=b"", **headers):
    lines = [f"HTTP/1.1 {status} Some", f"content-length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def read_request(stream):
    buffer = b""
    while b"\r\n\r\n" not in buffer:
        received = await stream.receive_some(65_536)
        if not received:
            return None
        buffer += received
    head, _, body = buffer.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:])}
    while len(body) < int(headers["content-length"]):
        body += await stream.receive_some(65_536)
    return Request(lines[0].split(" ")[1], headers, body)


@asynccontextmanager
async def fake_provider(answer=b"", behave=None, host=None):
    """Serve a provider on loopback; ``behave(provider, stream)`` replaces its behaviour.

    A test that counts connections gives :data:`OWN_HOST`: on the usual address, a test of another
    process that calls a port which was closed there can reach the same port here.
    """
    provider = FakeProvider(answer, host or "127.0.0.1")

    async def handle(stream):
        provider.connections += 1
        try:
            if behave is not None:
                await behave(provider, stream)
                return
            request = await read_request(stream)
            if request is not None:
                provider.requests.append(request)
                await stream.send_all(provider.answer)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            with trio.move_on_after(1, shield=True):
                await trio.aclose_forcefully(stream)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, handle, 0, host=host))
        provider.port = listeners[0].socket.getsockname()[1]
        yield provider
        nursery.cancel_scope.cancel()


async def reset(stream):
    """End a connection with a reset instead of an orderly close."""
    linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    await trio.aclose_forcefully(stream)


@contextmanager
def listening(status, body=b"", **headers):
    """Answer every POST on loopback alike, in a thread; yield the URL and the received requests."""
    arrived = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            content = self.rfile.read(int(self.headers["content-length"]))
            arrived.append((self.path, dict(self.headers.items()), content))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", arrived
        finally:
            server.shutdown()
            thread.join(60)
