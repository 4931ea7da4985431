"""Recognisable values in every place that holds a secret, and a search for them in all output.

Nothing here is a real credential: every value says PLANTED, in plain text or in base64.
"""

import base64
import http.server
import itertools
import json
import os
import re
import signal
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import attrs
import httpx
import pytest
import trustme
from support.command_forker import run_command, start_program
from support.ports import free_port
from support.waiting import PATIENCE_SECONDS, wait_until

from sdk_trio.testing import sign_delivery


def secret(name):
    """A webhook secret whose key says where it was planted."""
    return "whsec_" + base64.b64encode(f"PLANTED-{name}-0123456789abcdef".encode()).decode()


PLANTED_KEYS = ("new", "old", "tenant", "notifying", "file", "changed", "broken")
NEW, OLD, TENANT, NOTIFYING, IN_FILE, CHANGED, BROKEN = (secret(name) for name in PLANTED_KEYS)
TOKEN, TENANT_TOKEN, ADMIN_TOKEN = "PLANTED-token", "PLANTED-tenant-token", "PLANTED-admin-token"

VARIABLES = {
    "SDK__ACCESSTOKEN": TOKEN,
    "SDK__WEBHOOKS__SECRETS__0": NEW,
    "SDK__WEBHOOKS__SECRETS__1": OLD,
    "SDK_ADMIN_TOKEN": ADMIN_TOKEN,
    "ACME_TOKEN": TENANT_TOKEN,
    "ACME_SECRET": TENANT,
    "EMAIL_API_KEY": "PLANTED-email-key",
    "SMS_ACCOUNT_SID": "PLANTED-sms-sid",
    "SMS_AUTH_TOKEN": "PLANTED-sms-token",
    "SDK_WEBHOOK_SECRET": NOTIFYING,
    "OBJECT_STORE_ACCESS_KEY_ID": "PLANTED-access-key",
    "OBJECT_STORE_SECRET_ACCESS_KEY": "PLANTED-secret-key",
}

#: The header of both credentials together, as the SMS provider is shown them.
SMS_PAIR = base64.b64encode(b"PLANTED-sms-sid:PLANTED-sms-token").decode()

#: Secrets that no output may contain.
SECRETS = {
    SMS_PAIR,
    *(value for value in VARIABLES.values() if not value.startswith("whsec_")),
    *(value.removeprefix("whsec_") for value in map(secret, PLANTED_KEYS)),
    *(f"PLANTED-{name}-0123" for name in PLANTED_KEYS),
    *("PLANTED-header", "PLANTED-query", "PLANTED-forged", "PLANTED-customer-secret"),
}

ACME = {"customer": {"organization_id": "org_acme"}}

#: Contents of payloads: only `events show` prints them.
PAYLOAD = "PLANTED-payload"

#: Whom messages go to: commands show it that are asked about a tenant or a message, and the store
#: holds it. Neither logs nor metrics do, nor a list, nor what a provider quotes.
ADDRESS, PHONE = "PLANTED-manager@platform-of-ours.com", "15559990001"

#: What a message says, and why: no file holds the first, the second is for the audit trail.
TEXT, REASON = "text-for-{TenantIdentifier}-PLANTED", "PLANTED-reason"

KINDS = ("good", "refused", "lost")

#: Texts of handlers' own exceptions: the log and the inbox have them, for operators.
SAID = "said-by-the-handler"

APPLICATION = f"""
import sdk_trio
import trio
from sdk_trio.events import *

handlers = sdk_trio.HandlerRegistry()

@handlers.on(OrderPaidEvent)
async def good(event):
    assert "{PAYLOAD}" in event.raw.decode()

@handlers.on(OrderCreatedEvent, enqueue=True)
async def bad(event):
    raise ValueError("{SAID}")

@handlers.on(OrderRefundedEvent)
async def lacks(event):
    local = event.raw
    return {{}}["no such key"]

@handlers.on(RefundCreatedEvent)
def hooked(services):
    class Hooked(sdk_trio.WebhookHandlerBase):
        async def handle_core(self, event):
            raise RuntimeError("{SAID}")

        async def on_error(self, event, error):
            secrets = services.settings.webhooks.all_secrets
            raise RuntimeError("{SAID}, again: " + secrets[0].reveal()) from error
    return Hooked()

@handlers.on(CustomerCreatedEvent, enqueue=True)
def calls(services):
    class Calls(sdk_trio.WebhookHandlerBase):
        async def handle_core(self, event):
            await services.client.request("GET", "/orders/?key=PLANTED-query")
    return Calls()

@handlers.on(CustomerUpdatedEvent, enqueue=True)
def calls_for_the_tenant(services):
    class Calls(sdk_trio.WebhookHandlerBase):
        async def handle_core(self, event):
            async with services.client_for(event.tenant) as client:
                await client.checkouts.client_get("PLANTED-customer-secret")
    return Calls()

@handlers.on(OrderUpdatedEvent, enqueue=True)
def quotes(services):
    class Quotes(sdk_trio.WebhookHandlerBase):
        async def handle_core(self, event):
            settings = services.settings
            known = [settings.access_token, *settings.webhooks.all_secrets]
            errors = [ValueError(secret.reveal()) for secret in known]
            raise ExceptionGroup(f"{{settings!r}}", errors)
    return Quotes()

class Crash(BaseException):
    pass

@handlers.on(CustomerDeletedEvent)
async def crashes(event):
    local = event.raw

    async def ends_the_loop():
        raise Crash("{SAID}")

    trio.lowlevel.spawn_system_task(ends_the_loop)
"""


class Unwelcoming(http.server.BaseHTTPRequestHandler):
    """Answers 401, and repeats the token that it was shown.

    As the provider of messages it does what the tenant's name asks for: it takes a message, refuses
    it and quotes everything, or is silent.
    """

    reported: ClassVar[list] = []

    def do_GET(self):
        self.answer(401, {"error": "Unauthorized", "detail": self.headers["authorization"]})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        self.reported.append(body + str(self.headers))
        if "lost" in body:
            if self.path == "/in":  # longer than the channel waits
                time.sleep(1.4)
            self.close_connection = True
        elif "refused" in body:
            shown = f"{ADDRESS} {ADDRESS.lower()}" if "mail" in self.path else f"+{PHONE} {PHONE}"
            words = f"{self.headers['authorization']} {shown}"
            self.answer(401, {"message": words, "errors": [{"message": words}]})
        else:
            status = {"/in": 200, "/v3/mail/send": 202}.get(self.path, 201)
            self.answer(status, {"sid": "SM1", "status": "queued"})

    def answer(self, status, document):
        body = json.dumps(document)
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        """Print nothing."""


@attrs.define
class Place:
    """A directory in which commands run; all that they print is kept."""

    directory: Path
    environment: dict
    admin: str
    outputs: dict = attrs.Factory(dict)
    numbers: itertools.count = attrs.Factory(itertools.count)
    shown_bodies: str = ""
    daemons: list = attrs.Factory(list)
    sent: list = attrs.Factory(list)
    # One for all requests: each new one would read the authorities' certificates again.
    client: httpx.Client = attrs.Factory(
        lambda: httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
    )
    answers: str = ""

    @property
    def data(self):
        return self.directory / "sdk-data"

    def run(self, *words, bodies=False, **variables):
        ran = run_command(
            words,
            environ={**self.environment, **variables},
            directory=self.directory,
            seconds=PATIENCE_SECONDS,
        )
        everything = ran.stdout + ran.stderr
        if bodies:
            self.shown_bodies += everything
        else:
            self.outputs[f"{next(self.numbers)}: {' '.join(words)}"] = everything
        return everything

    def start(self, name, *words):
        log = (self.directory / f"{name}.log").open("w")
        with log:
            daemon = start_program(
                ["run", "--app", "application:handlers", *words],
                directory=self.directory,
                environ=self.environment,
                stdout=log,
                stderr=log,
            )
        self.daemons.append(daemon)
        self.wait_for(lambda: (self.data / "runtime.json").exists(), daemon)
        return daemon

    def log_of(self, name):
        return (self.directory / f"{name}.log").read_text()

    def wait_for(self, condition, daemon):
        def holds():
            assert daemon.poll() is None, self.logs()
            return condition()

        wait_until(holds, self.logs)

    def logs(self):
        return [path.read_text() for path in self.directory.glob("*.log")]

    def end(self, daemon, number=signal.SIGTERM):
        daemon.send_signal(number)
        return daemon.wait(PATIENCE_SECONDS)

    @property
    def url(self):
        return json.loads((self.data / "runtime.json").read_text())["url"]

    def deliver(self, event, *, key=NEW, data=None, change=None, **headers):
        if isinstance(event, str):
            data = {"metadata": {"note": PAYLOAD}, **(data or {})}
        signed = sign_delivery(event, data, secret=key)
        self.sent.append(signed.signature.partition(",")[2])
        content = signed.body if change is None else change(signed.body)
        sent = {**signed.headers, "authorization": "Bearer PLANTED-header", **headers}
        try:
            answer = self.client.post(
                f"{self.url}?token=PLANTED-query", content=content, headers=sent
            )
        except httpx.TransportError:
            return None
        self.answers += answer.text + str(answer.headers)
        return answer.status_code


@pytest.fixture
def upstream(tmp_path):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    Unwelcoming.reported.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Unwelcoming)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"https://localhost:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def notifications(url):
    return {
        "Enabled": True,
        "MaxAttempts": 1,
        "EnabledChannels": {"Email": True, "Sms": True, "Webhook": True},
        "Email": {
            "FromAddress": "noreply@platform-of-ours.com",
            "EmailProviderA": {"BaseUrl": url},
        },
        "Sms": {"SmsProviderA": {"FromNumber": "+15550000000", "BaseUrl": url}},
        "Webhook": {"Url": f"{url}/in", "TimeoutSeconds": 1, "AllowPrivateAddresses": True},
        "Templates": {"Suspended": {"EmailSubject": TEXT, "EmailBody": TEXT, "SmsBody": TEXT}},
    }


@pytest.fixture
def place(tmp_path, upstream):
    admin = free_port()
    settings = {
        "Mode": "Custom",
        "CustomBaseUrl": upstream,
        "MaxRetries": 0,
        "Server": {"Bind": ["127.0.0.1:0"]},
        "Admin": {"Bind": f"127.0.0.1:{admin}"},
        "Logging": {"Level": "Debug"},
        "Webhooks": {
            "RequireHttps": False,
            "Queue": {"MaxAttempts": 2, "RetryBaseSeconds": 0.01},
        },
        "MultiTenant": {"Enabled": True, "Notifications": notifications(upstream)},
    }
    (tmp_path / "appsettings.json").write_text(json.dumps({"Sdk": settings}))
    (tmp_path / "application.py").write_text(APPLICATION)
    environment = {
        name: value for name, value in os.environ.items() if not name.upper().startswith("SDK_")
    }
    environment |= {**VARIABLES, "SSL_CERT_FILE": str(tmp_path / "ca.pem")}
    (tmp_path / "credentials").mkdir(mode=0o700)
    environment["CREDENTIALS_DIRECTORY"] = str(tmp_path / "credentials")
    made = Place(tmp_path, environment, f"http://127.0.0.1:{admin}")
    yield made
    made.client.close()
    for daemon in made.daemons:
        if daemon.poll() is None:
            daemon.kill()
        daemon.wait()


def drive(place, daemon, name):
    """Make everything happen that has something to say."""
    assert place.deliver("order.paid") == 200
    assert place.deliver("order.paid", key=OLD) == 200
    assert place.deliver("order.paid", key=TENANT, data=ACME) == 200
    assert place.deliver("order.created") == 200
    assert place.deliver("order.refunded") == 500
    assert place.deliver("refund.created") == 500
    assert place.deliver("customer.created") == 200
    assert place.deliver("customer.updated", key=TENANT, data=ACME["customer"]) == 200
    assert place.deliver("order.updated") == 200
    assert place.deliver("benefit.created") == 200
    assert place.deliver("order.paid", data={"status": PAYLOAD, "total_amount": PAYLOAD}) == 200
    assert place.deliver("order.paid", key=secret("forged")) == 400
    assert place.deliver("order.paid", change=lambda body: body + b" ") == 400
    assert place.deliver("order.paid", **{"webhook-signature": "v1,PLANTED-forged"}) == 400
    assert place.deliver("order.paid", **{"webhook-timestamp": "PLANTED-forged"}) == 400
    assert place.deliver(b'{"type": "order.paid", "PLANTED-payload') == 400
    assert place.deliver(b'["PLANTED-payload"]') == 400
    assert place.deliver("order.paid", **{"content-type": "PLANTED-header"}) == 415
    assert place.deliver(b"PLANTED-payload" * 100_000) in (413, None)
    host, _, port = place.url.partition("//")[2].partition("/")[0].rpartition(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"PLANTED-header \x00\xff HTTP/9\r\nPLANTED-header\r\n\r\n")
        place.answers += raw.recv(1000).decode("latin-1")
    place.wait_for(lambda: place.log_of(name).count("webhook.dead") >= 4, daemon)


def send_messages(place, daemon, name):
    """Let messages be taken, refused and lost on every channel; return them, newest first."""
    recipient = ("--email", ADDRESS, "--email-verified", "--phone", f"+{PHONE}")
    for kind in KINDS:
        tenant = f"{kind}-{name}"
        place.run("tenant", "add", tenant, "--name", kind, *recipient, bodies=True)
        place.run("tenant", "suspend", tenant, "--reason", REASON)
    words = [
        *("notification.sent",) * 3,
        *("notification.failed",) * 4,
        *("notification.unknown",) * 2,
    ]
    place.wait_for(
        lambda: all(place.log_of(name).count(w) >= words.count(w) for w in words), daemon
    )
    found = json.loads(place.run("notify", "list", "--format", "json"))
    mine = [m for m in found if m["tenant_identifier"].endswith(name)]
    states = {(m["tenant_identifier"].partition("-")[0], m["channel"]): m["state"] for m in mine}
    assert states == {
        **{("good", channel): "sent" for channel in ("email", "sms", "webhook")},
        **{("refused", channel): "failed" for channel in ("email", "sms", "webhook")},
        ("lost", "email"): "unknown",
        ("lost", "sms"): "unknown",
        ("lost", "webhook"): "failed",
    }
    return mine


def look_at_messages(place, messages):
    """Ask every command that shows messages; the address is in those that were asked for one."""
    for channel in ("email", "sms", "webhook"):
        refused = next(m for m in messages if (m["channel"], m["state"]) == (channel, "failed"))
        assert ADDRESS in place.run("notify", "show", refused["id"], bodies=True)
    place.run("notify", "list")
    place.run("notify", "retry", "--state", "failed", "--dry-run")
    sender = "Sdk:MultiTenant:Notifications:Email:FromAddress"
    for kind, word in (("good", "sent"), ("refused", "refused"), ("lost", "unknown")):
        to = ("--to", ADDRESS, "--set", f"{sender}={kind}@platform-of-ours.com")
        assert place.run("notify", "test", "--channel", "email", *to).startswith(word)
    place.run("notify", "test", "--channel", "sms", "--to", f"+{PHONE}")
    preview = ("notify", "preview", "--transition", "Suspended", "--tenant", "good-json")
    assert text_for("good-json") in place.run(*preview, bodies=True)
    metrics = httpx.get(f"{place.admin}/metrics").text
    for result in ("sent", "failed", "unknown"):
        assert f'sdk_notifications_total{{channel="sms",result="{result}"}} 1' in metrics


def text_for(tenant):
    return TEXT.replace("{TenantIdentifier}", tenant)


def reload(place, daemon):
    """Change a secret in a file while the receiver runs, to a good one and to a broken one."""
    (place.directory / "credentials" / "Sdk__Webhooks__Secret").write_text(CHANGED)
    daemon.send_signal(signal.SIGHUP)
    place.wait_for(lambda: place.deliver("order.paid", key=CHANGED) == 200, daemon)
    before = place.log_of("json").count("runtime.reload_failed")
    (place.directory / "credentials" / "Sdk__Webhooks__Secret").write_text(f" {BROKEN}")
    daemon.send_signal(signal.SIGHUP)
    place.wait_for(lambda: place.log_of("json").count("runtime.reload_failed") > before, daemon)
    assert place.deliver("order.paid", key=CHANGED) == 200
    (place.directory / "credentials" / "Sdk__Webhooks__Secret").write_text(IN_FILE)


def observe(place):
    """Ask everything that shows state."""
    for path in ("/metrics", "/healthz", "/readyz", "/livez", "/", "/api/events"):
        for headers in ({}, {"authorization": f"Bearer {ADMIN_TOKEN}"}):
            answer = place.client.get(place.admin + path, headers=headers)
            place.outputs[f"{path} {bool(headers)}"] = answer.text + str(answer.headers)
    assert "sdk_webhook_deliveries_total" in place.outputs["/metrics True"]
    place.run("config", "show", "--all")
    place.run("config", "check")
    place.run("doctor", "--app", "application:handlers")
    place.run("events", "list", "--format", "json")
    place.run("tenant", "show", "acme")


def test_no_secret_shows_anywhere(place):
    place.run(
        *("tenant", "add", "acme", "--name", "Acme", "--organization-id", "org_acme"),
        *("--access-token-env", "ACME_TOKEN", "--webhook-secret-env", "ACME_SECRET"),
    )
    (place.directory / "credentials" / "Sdk__Webhooks__Secret").write_text(IN_FILE)
    daemon = place.start("json")
    drive(place, daemon, "json")
    look_at_messages(place, send_messages(place, daemon, "json"))
    observe(place)
    listed = json.loads(next(v for k, v in place.outputs.items() if "events list" in k))
    for record in listed:
        if record["state"] == "dead":
            place.run("events", "show", record["webhook_id"], bodies=True)
    called = place.run("call", "orders", "list", "--customer-id", "PLANTED-query")
    assert "401" in called
    place.run("call", "checkouts", "client_get", "PLANTED-customer-secret")
    body = place.directory / "body"
    body.write_text(PAYLOAD)
    headers = place.directory / "headers"
    headers.write_text("webhook-id: 1\nwebhook-timestamp: 1\nwebhook-signature: v1,PLANTED-forged")
    place.run("verify", "--headers", str(headers), str(body))
    reload(place, daemon)
    assert place.end(daemon) == 0

    console = place.start("console", "--set", "Sdk:Logging:Format=Console")
    drive(place, console, "console")
    send_messages(place, console, "console")
    assert place.end(console) == 0
    search(place)

    # The text of a handler's own error is for operators only, in two places.
    assert SAID in place.log_of("json")
    assert SAID in place.shown_bodies
    assert PAYLOAD in place.shown_bodies
    assert SAID not in place.answers
    assert all(SAID not in text for name, text in place.outputs.items() if "metrics" in name)


@pytest.mark.parametrize("environment", ["Production", "Development"])
def test_no_secret_shows_when_the_runtime_crashes(place, environment):
    daemon = place.start("crash", "--set", f"Sdk:Environment={environment}")
    place.deliver("customer.deleted")
    assert daemon.wait(PATIENCE_SECONDS) == 1
    log = place.log_of("crash")
    # The last line says what ended it and where that is, in the words of the application.
    last = log.splitlines()[-1]
    assert last.startswith(f"sdk-trio: error: unexpected Crash: {SAID} ("), last
    assert re.search(r"application\.py:\d+ in .*ends_the_loop\)(; run with|$)", last), last
    assert ("Traceback" in log) is (environment == "Development")
    search(place)


def test_no_secret_shows_when_settings_are_wrong(place):
    commands = []
    for variables in (
        {"SDK__WEBHOOKS__SECRETS__0": f" {NEW} "},
        {"SDK__WEBHOOKS__SECRETS__0": "PLANTED"},
        {"SDK__WEBHOOKS__SECRTS__0": NEW},
        {"SDK__ACCESSTOKEN": f"{TOKEN}\nx"},
        {"SDK__ACCESSTOKEN": NEW, "SDK__WEBHOOKS__SECRETS__0": TOKEN + "-long-enough"},
        {"SDK__WEBHOOKS__SECRETS": NEW, "SDK__WEBHOOKS__SECRETS__X": OLD},
    ):
        for words in (["config", "check"], ["doctor", "--offline"], ["run"]):
            # With these it would start.
            if words == ["run"] and (len(variables) == 2 or "SECRTS" in str(variables)):
                continue
            commands.append((words, variables))
    with ThreadPoolExecutor(max_workers=2) as pool:
        for words, variables in commands:
            pool.submit(place.run, *words, **variables)
    assert len(place.outputs) == len(commands)
    place.run("run", "--set", f"Sdk:Webhooks:Secret={NEW}")
    place.run("sign", "--secret-env", NEW)
    file = place.directory / "appsettings.json"
    for text in (
        json.dumps({"Sdk": {"AccessToken": {"a": TOKEN}}}),
        json.dumps({"Sdk": {"Webhooks": {"Secrets": NEW, "Secret": [OLD]}}}),
        json.dumps({"Sdk": {"AccessToken": TOKEN}}).rstrip("}"),
    ):
        file.write_text(text)
        place.run("config", "check")
    search(place)


def search(place):
    """Look for everything that was planted, wherever text is kept."""
    kept = {
        **place.outputs,
        "answers": place.answers,
        **{file.name: file.read_text() for file in place.directory.glob("*.log")},
    }
    for file in place.data.rglob("*") if place.data.exists() else ():
        if file.is_file():
            content = file.read_bytes().decode("latin-1")
            if "inbox.db" in file.name:
                # Bodies and recipients are what it is for; secrets and signatures are not in it,
                # and no text of a message.
                for allowed in (PAYLOAD, ADDRESS, PHONE, REASON):
                    content = content.replace(allowed, "")
            kept[file.name] = content
    signatures = {part for one in place.sent for part in one.split()}
    signatures |= set(re.findall(r"(?:sha256=|v1,)(\S+)", "".join(Unwelcoming.reported)))
    texts = {text_for(f"{kind}-{name}") for kind in KINDS for name in ("json", "console")}
    texts |= {ADDRESS, ADDRESS.lower(), PHONE, REASON}
    found = {
        (name, planted)
        for name, text in kept.items()
        for planted in {*SECRETS, *signatures, *texts, PAYLOAD}
        if planted in text
    }
    found |= {("events show", p) for p in {*SECRETS, *signatures} if p in place.shown_bodies}
    assert found == set()
