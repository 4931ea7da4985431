"""``run --forward-to`` as people use it: the page's applications in four languages; commands."""

import base64
import hmac
import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import httpx
import pytest
from standardwebhooks import Webhook
from support.daemon import Place
from support.deliveries import SECRET
from support.ports import free_port
from support.programs import node_package, program
from support.tables import STATES
from support.waiting import wait_until

from sdk_trio.testing import sign_delivery

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "forward-to-an-application.md"
LOCAL = "whsec_TJ7sAxr3kVsS6yQd0Zf0fG3bA9UOe5Vh"  # a test value
TENANT_A = "whsec_nC3T0sW9ZbSxkU1QhQ7m0m2kZV2n8T0w"  # a test value
TENANT_B = "whsec_Yw1mJc7QeT5rLx9vB2kNh6sPzD8fGu3a"  # a test value

#: A Django project of one file around the page's view.
DJANGO = """
import sys
from django.conf import settings
settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="x", DEBUG=False)
import django
django.setup()
{view}
from django.core.wsgi import get_wsgi_application
from django.urls import path
urlpatterns = [path("hooks", hooks)]
from wsgiref.simple_server import make_server
make_server("127.0.0.1", int(sys.argv[1]), get_wsgi_application()).serve_forever()
"""

#: A Rails application of one file around the page's controller, with its model in SQLite.
RAILS = """
require "rails"
require "action_controller/railtie"
require "active_record"
require "rack/handler/webrick"
ActiveRecord::Base.establish_connection(adapter: "sqlite3", database: "events.sqlite3")
ActiveRecord::Schema.define do
  create_table(:events) do |table|
    table.string :webhook_id, index: {{unique: true}}
    table.text :body
  end
end
class Event < ActiveRecord::Base
  # Not within the transaction: a locked database rolls it back, and the request comes again.
  after_create_commit {{ warn "#{{JSON.parse(body)["type"]}} #{{webhook_id}}" }}
end
class Application < Rails::Application
  config.eager_load = false
  config.secret_key_base = "x"
  config.logger = Logger.new(nil)
  routes.append {{ post "/hooks", to: "hooks#create" }}
end
{controller}
Application.initialize!
Rack::Handler::WEBrick.run(Application, Host: "127.0.0.1", Port: ENV.fetch("PORT").to_i)
"""


def code(language):
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return found


@contextmanager
def application(words, directory, port, **environ):
    """A process that listens on ``port``; yields the file of what it prints."""
    out = directory / "application"
    with out.open("w") as file:
        process = subprocess.Popen(
            words,
            cwd=directory,
            env={**os.environ, "SDK_FORWARD_SECRET": LOCAL, "PORT": str(port), **environ},
            stdout=file,
            stderr=file,
        )
    try:
        wait_until(lambda: listens(port) or process.poll() is not None, out.read_text)
        yield out
    finally:
        process.kill()
        process.wait()


def listens(port):
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def in_node(directory, port, **environ):
    modules = node_package("standardwebhooks").parent
    (directory / "app.js").write_text(code("javascript"))
    words = [program("node"), "app.js"]
    return application(words, directory, port, NODE_PATH=str(modules), **environ)


def in_django(directory, port, **environ):
    pytest.importorskip("django")
    (directory / "app.py").write_text(DJANGO.format(view=code("python")))
    return application([sys.executable, "app.py", str(port)], directory, port, **environ)


def in_rails(directory, port, **environ):
    words = [program("ruby"), "app.rb"]
    gems = "%w[railties activerecord sqlite3 webrick].each { |name| gem name }"
    if subprocess.run([words[0], "-e", gems], check=False).returncode:
        pytest.skip("Rails is not installed: see .ci/debian-packages")
    (directory / "app.rb").write_text(RAILS.format(controller=code("ruby")))
    return application(words, directory, port, **environ)


def in_php(directory, port, **environ):
    (directory / "app.php").write_text("<?php\n" + code("php"))
    words = [program("php"), "-S", f"127.0.0.1:{port}", "app.php"]
    return application(words, directory, port, **environ)


@pytest.fixture
def place(tmp_path):
    found = Place(tmp_path)
    found.environ["SDK_FORWARD_SECRET"] = LOCAL
    # A shop that has just been restarted should not be waited for by a test.
    found.environ["SDK__WEBHOOKS__QUEUE__RETRYBASESECONDS"] = "0.05"
    found.environ["SDK__WEBHOOKS__QUEUE__RETRYCAPSECONDS"] = "0.2"
    return found


def to(url):
    return ("run", "--forward-to", url)


def deliver(daemon, number, event="order.paid", subject=None, *, secret=SECRET, tenant=""):
    data = {"id": subject or f"o{number}", "organization_id": "org_b"}
    signed = sign_delivery(event, data, secret=secret, webhook_id=f"msg_{number}")
    address = f"{daemon.receiver}/hooks/sdk{tenant and f'/{tenant}'}"
    answer = httpx.post(address, content=signed.body, headers=signed.headers)
    assert answer.status_code == 200, answer


def add_tenant(place, identifier, *words, secret):
    """Add a tenant that signs with a secret of its own; return its id."""
    file = place.directory / f"{identifier}.key"
    file.write_text(secret)
    file.chmod(0o600)
    place.environ["SDK__MULTITENANT__ENABLED"] = "true"
    adding = ("tenant", "add", identifier, "--name", identifier, "--webhook-secret-file", str(file))
    added = place.run(*adding, *words, "--format", "json")
    assert added.returncode == 0, added.stderr
    return json.loads(place.run("tenant", "show", identifier, "--format", "json").stdout)["id"]


def states(place):
    """The number of events in each state, read beside the daemon without the cost of a command."""
    file = f"file:{place.data}/inbox.db?mode=ro"
    with closing(sqlite3.connect(file, uri=True, timeout=30)) as store:
        return dict(store.execute(STATES))


@pytest.mark.parametrize(
    "runs", [in_node, in_django, in_rails, in_php], ids=["node", "django", "rails", "php"]
)
def test_the_applications_of_the_page_accept_only_requests_signed_by_the_gateway(place, runs):
    port = free_port()
    hooks = f"http://127.0.0.1:{port}/hooks"
    with runs(place.directory, port) as printed, place.daemon(start=to(hooks)) as daemon:
        for number in range(3):
            deliver(daemon, number)
        wait_until(lambda: states(place) == {"done": 3}, printed.read_text)

        def answer(secret, seconds=0, event="order.paid"):
            now = int(time.time()) - seconds
            named = {"webhook_id": "x", "timestamp": now}
            signed = sign_delivery(event, {"id": "\u00e9"}, secret=secret, **named)
            return httpx.post(hooks, content=signed.body, headers=signed.headers).status_code

        assert answer(SECRET) == answer(LOCAL, seconds=3600) == 401
        assert httpx.post(hooks, content=b"{}").status_code == 401
        assert answer(LOCAL, event="order.created") == answer(LOCAL, event="order.created") == 200
    reported = printed.read_text()
    assert sorted(re.findall(r"order\.paid (\S+)", reported)) == ["msg_0", "msg_1", "msg_2"]
    assert reported.count("order.created x") == 1


@pytest.mark.parametrize(
    "runs", [in_node, in_django, in_rails, in_php], ids=["node", "django", "rails", "php"]
)
def test_a_tenant_that_reuses_the_id_of_another_tenant_s_event_does_not_replace_it(place, runs):
    attacker = add_tenant(place, "a", secret=TENANT_A)
    owner = add_tenant(place, "b", "--organization-id", "org_b", secret=TENANT_B)
    port = free_port()
    hooks = to(f"http://127.0.0.1:{port}/hooks")
    with runs(place.directory, port) as printed, place.daemon(start=hooks) as daemon:
        # The attacker is first, with the ids and the organization of the other tenant.
        deliver(daemon, 1, secret=TENANT_A, tenant="a")
        deliver(daemon, 2, secret=TENANT_A, tenant="a")
        wait_until(lambda: states(place) == {"done": 2}, printed.read_text)
        deliver(daemon, 1, secret=TENANT_B, tenant="b")
        deliver(daemon, 2)
        wait_until(lambda: states(place) == {"done": 4}, printed.read_text)
    applied = re.findall(r"order\.paid (\S+)", printed.read_text())
    forged = [f"msg_1.{attacker}", f"msg_2.{attacker}"]
    assert sorted(applied) == sorted([*forged, f"msg_1.{owner}", "msg_2"])


def test_a_page_of_php_without_its_secret_takes_no_event_that_is_signed_with_an_empty_key(tmp_path):
    port, body, now = free_port(), b"{}", str(int(time.time()))
    digest = hmac.digest(b"", f"x.{now}.".encode() + body, "sha256")
    signature = "v1," + base64.b64encode(digest).decode()
    named = {"webhook-id": "x", "webhook-timestamp": now, "webhook-signature": signature}
    with in_php(tmp_path, port, SDK_FORWARD_SECRET="") as printed:
        answer = httpx.post(f"http://127.0.0.1:{port}/hooks", content=body, headers=named)
        assert answer.status_code == 500, printed.read_text()
    assert "SDK_FORWARD_SECRET is not set" in printed.read_text()


def test_an_application_with_another_secret_refuses_and_the_events_are_dead_letters(place):
    port = free_port()
    gateway = place.daemon(start=to(f"http://127.0.0.1:{port}/hooks"))
    with in_node(place.directory, port, SDK_FORWARD_SECRET=SECRET) as printed, gateway as daemon:
        deliver(daemon, 1)
        wait_until(lambda: states(place) == {"dead": 1}, printed.read_text)
        assert daemon.wait_for("webhook.dead")["error"] == "answered 401"
        shown = place.run("events", "show", "msg_1").stdout
    assert "answered 401" in shown
    assert "order.paid" not in printed.read_text()


class Scripted(ThreadingHTTPServer):
    """An application of which a test decides the answers."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Answers)
        self.answer = 200
        self.seconds = 0.0
        self.going = Event()  # ends the wait of those who take their time
        self.ids = []
        self.requests = []
        self.at_work = []
        self.most = 0
        Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/"


class _Answers(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.requests.append((dict(self.headers), body))
        subject = json.loads(body)["data"].get("id")
        self.server.at_work.append(subject)
        self.server.most = max(self.server.most, self.server.at_work.count(subject))
        self.server.ids.append(self.headers["webhook-id"])
        self.server.going.wait(self.server.seconds)
        self.server.at_work.remove(subject)
        self.send_response(self.server.answer)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *words):
        pass


@pytest.fixture
def scripted():
    with Scripted() as server:
        yield server
        server.going.set()
        server.shutdown()


#: An application module that traces into a file, as the page on tracing has it.
TRACED = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
import sdk_trio

lines = lambda span: span.to_json(None) + "\\n"
exporter = ConsoleSpanExporter(out=open("spans", "w"), formatter=lines)
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
handlers = sdk_trio.HandlerRegistry()
"""


def test_the_application_gets_the_attempt_the_tenant_and_the_span_of_each_post(place, scripted):
    place.environ["SDK__WEBHOOKS__QUEUE__MAXATTEMPTS"] = "2"
    (place.directory / "traced.py").write_text(TRACED)
    acme = add_tenant(place, "acme", secret=LOCAL)
    scripted.answer = 500
    start = (*to(scripted.url), "--app", "traced:handlers", "--standalone")
    with place.daemon(start=start) as daemon:
        signed = sign_delivery("order.paid", {"id": "o1"}, secret=LOCAL, webhook_id="a")
        path = f"{daemon.receiver}/hooks/sdk/acme"
        assert httpx.post(path, content=signed.body, headers=signed.headers).status_code == 200
        wait_until(lambda: states(place) == {"dead": 1}, daemon.log.read_text)
        scripted.answer = 200
        assert place.run("events", "replay", "--state", "dead", "--yes").returncode == 0
        wait_until(lambda: states(place) == {"done": 1}, daemon.log.read_text)
        deliver(daemon, 2)
        wait_until(lambda: states(place) == {"done": 2}, daemon.log.read_text)
    reported = []
    for headers, body in scripted.requests:
        assert Webhook(LOCAL).verify(body, headers)
        names = ("sdk-attempt", "sdk-will-retry-after", "sdk-tenant")
        reported.append((headers["webhook-id"], *map(headers.get, names)))
    assert reported == [
        (f"a.{acme}", "1", "1", "acme"),
        (f"a.{acme}", "2", None, "acme"),
        (f"a.{acme}", "3", None, "acme"),
        ("msg_2", "1", "1", None),
    ]
    spans = map(json.loads, (place.directory / "spans").read_text().splitlines())
    runs = [one["context"] for one in spans if one["name"].startswith("handle")]
    parents = [headers["traceparent"].split("-") for headers, _ in scripted.requests]
    named = [[one["trace_id"][2:], one["span_id"][2:]] for one in runs]
    assert [parent[1:3] for parent in parents] == named
    assert len({trace for trace, _ in named}) == 4


def test_a_route_whose_application_fails_is_listed_as_waiting(place, scripted):
    place.environ["SDK__FORWARD__ROUTES"] = json.dumps([{"Name": "shop", "Url": scripted.url}])
    place.environ["SDK__ADMIN__BIND"] = f"127.0.0.1:{free_port()}"
    scripted.answer = 500
    with place.daemon() as daemon:
        for number in range(10):
            deliver(daemon, number)
        daemon.wait_for("forward.broken")
        listed = place.run("routes", "list", "--format", "json")
        assert [row["state"] for row in json.loads(listed.stdout)] == ["waiting"]
        assert "shop: the application fails or is unavailable" in listed.stderr
    stopped = place.run("routes", "list")
    assert "the state of the applications is unknown" in stopped.stderr


def test_a_pause_of_the_application_or_of_a_command_survives_a_restart_until_it_is_resumed(
    place, scripted
):
    place.environ["SDK__FORWARD__ROUTES"] = json.dumps([{"Name": "shop", "Url": scripted.url}])
    scripted.answer = 410
    with place.daemon() as daemon:
        deliver(daemon, 1)
        paused = daemon.wait_for("forward.paused")
        assert (paused["level"], paused["route"]) == ("error", "shop")
        wait_until(lambda: states(place) == {"retrying": 1}, daemon.log.read_text)
    listed = place.run("routes", "list")
    assert "paused" in listed.stdout
    assert "by the application: answered 410" in listed.stderr
    assert place.run("routes", "resume", "shop").returncode == 0
    assert place.run("routes", "pause", "shop", "--reason", "migration").returncode == 0
    scripted.answer = 200
    before = len(scripted.ids)
    with place.daemon() as daemon:
        deliver(daemon, 2)
        wait_until(lambda: states(place) == {"retrying": 2}, daemon.log.read_text)
        assert "migration" in place.run("events", "show", "msg_2").stdout
        assert len(scripted.ids) == before
        assert place.run("routes", "resume", "shop").returncode == 0
        daemon.wait_for("forward.resumed")
        wait_until(lambda: states(place) == {"done": 2}, daemon.log.read_text)
    document = json.loads(place.run("routes", "list", "--format", "json").stdout)
    assert [(one["name"], one["state"], one["reason"]) for one in document] == [
        ("shop", "open", None)
    ]
    unknown = place.run("routes", "pause", "shopp")
    assert unknown.returncode == 1
    assert "there are shop" in unknown.stderr


def test_the_dead_letters_of_one_route_are_replayed_together(place, scripted):
    routes = [
        {"Name": "paid", "Url": scripted.url, "Types": ["order.paid"], "Where": ["/data/id=o1"]},
        {"Name": "rest", "Url": scripted.url},
    ]
    place.environ["SDK__FORWARD__ROUTES"] = json.dumps(routes)
    scripted.answer = 400
    with place.daemon() as daemon:
        deliver(daemon, 1)
        deliver(daemon, 2)
        deliver(daemon, 3, event="refund.created")
        wait_until(lambda: states(place) == {"dead": 3}, daemon.log.read_text)
        scripted.answer = 200
        chosen = ("events", "replay", "--state", "dead", "--route", "rest", "--format", "json")
        dry = json.loads(place.run(*chosen, "--dry-run").stdout)
        assert [row["webhook_id"] for row in dry] == ["msg_2", "msg_3"]
        assert place.run(*chosen, "--yes").returncode == 0
        wait_until(lambda: states(place) == {"dead": 1, "done": 2}, daemon.log.read_text)
    # What is left is the other route's.
    chosen = ("events", "replay", "--state", "dead", "--route", "paid", "--format", "json")
    (left,) = json.loads(place.run(*chosen, "--dry-run").stdout)
    assert left["webhook_id"] == "msg_1"


def test_a_gateway_that_is_killed_has_lost_nothing(place, scripted):
    scripted.seconds = 60.0
    with place.daemon(start=to(scripted.url)) as daemon:
        for number in range(40):
            deliver(daemon, number)
        daemon.process.kill()
        daemon.process.wait()
    assert states(place).get("done", 0) < 40
    scripted.going.set()
    with place.daemon(start=to(scripted.url)) as daemon:
        wait_until(lambda: states(place) == {"done": 40}, daemon.log.read_text)
    assert set(scripted.ids) == {f"msg_{number}" for number in range(40)}


def test_missing_settings_are_reported_before_anything_is_accepted(place):
    del place.environ["SDK_FORWARD_SECRET"]
    ended = place.run(*to("http://127.0.0.1:9/"))
    assert ended.returncode == 78
    assert "SDK_FORWARD_SECRET" in ended.stderr
    assert "secrets new" in ended.stderr
    (found,) = place.checked("Sdk:Forward:Url=http://127.0.0.1:9/")
    assert (found["level"], found["key"]) == ("error", "Sdk:Forward:SecretEnvVar")
    ended = place.run(*to("https://93.184.216.34/hooks"))
    assert ended.returncode == 78
    assert "AllowPublicAddresses" in ended.stderr


def test_doctor_shows_whether_an_application_listens(place, scripted):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        routes = [
            {"Name": "up", "Url": scripted.url},
            {"Name": "down", "Url": f"http://127.0.0.1:{unused.getsockname()[1]}/"},
        ]
        place.environ["SDK__FORWARD__ROUTES"] = json.dumps(routes)
        with place.daemon() as daemon:
            daemon.wait_for("runtime.started")
            assert place.run("routes", "pause", "up", "--reason", "migration").returncode == 0
            ran = place.run("doctor", "--standalone", "--format", "json")
            # Its own probe is not forwarded.
            assert scripted.ids == []
    found = [one for one in json.loads(ran.stdout) if one["check"] == "routes"]
    reported = {(one["where"], one["level"]): one["what"] for one in found}
    assert set(reported) == {("route up", "warning"), ("route up", "ok"), ("route down", "problem")}
    assert "migration" in reported["route up", "warning"]


@pytest.mark.skipif(sys.platform == "win32", reason="processes share sockets")
def test_several_processes_keep_the_order_of_a_route_and_its_pause(place, scripted):
    place.environ["SDK__SERVER__PROCESSES"] = "2"
    routes = [{"Name": "shop", "Url": scripted.url, "Ordered": True}]
    place.environ["SDK__FORWARD__ROUTES"] = json.dumps(routes)
    scripted.seconds = 0.02
    with place.daemon() as daemon:

        def reported(event):
            return {entry.get("process") for entry in daemon.logged(event)}

        for number in range(12):
            deliver(daemon, number, subject=f"s{number % 3}")
        wait_until(lambda: states(place) == {"done": 12}, daemon.log.read_text)
        assert place.run("routes", "pause", "shop").returncode == 0
        wait_until(lambda: reported("forward.paused") == {1, 2}, daemon.log.read_text)
        before = len(scripted.ids)
        for number in range(12, 24):
            deliver(daemon, number, subject=f"s{number % 3}")
        wait_until(lambda: states(place).get("retrying", 0) == 3, daemon.log.read_text)
        state = 'sdk_forward_route_state{route="shop"} 2'
        wait_until(lambda: state in httpx.get(f"{daemon.admin}/metrics").text)
        assert len(scripted.ids) == before
        assert place.run("routes", "resume", "shop").returncode == 0
        wait_until(lambda: reported("forward.resumed") == {1, 2}, daemon.log.read_text)
        wait_until(lambda: states(place) == {"done": 24}, daemon.log.read_text)
        # The application says for itself that it wants no more: the other process hears of it, too.
        scripted.answer = 410
        deliver(daemon, 24, subject="s0")
        wait_until(lambda: len(daemon.logged("forward.paused")) == 4, daemon.log.read_text)
        levels = [entry["level"] for entry in daemon.logged("forward.paused")]
        assert sorted(levels) == ["error", "warning", "warning", "warning"]
    assert scripted.most == 1, "two events of one subject were posted at once"
    for subject in range(3):
        posted = [int(name[4:]) for name in scripted.ids[:24] if int(name[4:]) % 3 == subject]
        assert posted == sorted(posted)
