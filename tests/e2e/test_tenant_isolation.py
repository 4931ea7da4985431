"""Two tenants with their own secrets on one daemon, as their senders and the operator see it."""

import json
import re
import secrets
from pathlib import Path
from typing import Any

import pytest
import trio
from support.daemon import Daemon, Place
from support.waiting import wait_until

from sdk_trio.config import Secret
from sdk_trio.testing import sign_delivery
from sdk_trio.webhooks.signature import new_secret
from sdk_trio.webhooks.signed_request import own_url, post

APPLICATION = """
import json, os
from sdk_trio import HandlerRegistry
from sdk_trio.events import OrderCreatedEvent, OrderPaidEvent

handlers = HandlerRegistry()

def note(event):
    ran = [event.tenant.identifier, event.webhook_id, event.json["data"]["note"]]
    with open("ran", "a") as file:
        file.write(json.dumps(ran) + "\\n")

@handlers.on(OrderPaidEvent, enqueue=True, ordered=True)
async def paid(event):
    note(event)
    if event.json["data"]["note"] == "fails":
        raise ValueError("not today")

@handlers.on(OrderCreatedEvent)
async def created(event):
    note(event)
"""

TENANTS = ("a", "b")


class Host:
    """A daemon's directory with both tenants in it."""

    def __init__(self, directory: Path) -> None:
        self.place = Place(directory)
        self.place.environ.update(
            SDK__MULTITENANT__ENABLED="true", SDK__WEBHOOKS__QUEUE__RETRYBASESECONDS="900"
        )
        (directory / "app.py").write_text(APPLICATION)
        self.secrets = {name: new_secret(secrets.token_bytes(32)) for name in TENANTS}
        for name, secret in self.secrets.items():
            file = directory / f"{name}.key"
            file.write_text(secret)
            file.chmod(0o600)
            words = ("--name", name, "--organization-id", f"org-{name}")
            added = self.place.run(
                "tenant", "add", name, *words, "--webhook-secret-file", str(file)
            )
            assert added.returncode == 0, added.stderr

    def send(
        self, daemon: Daemon, tenant: str, note: str, *, type_: str = "order.paid", at: str = ""
    ) -> int:
        data = {"id": "ord_1", "note": note, "customer": {"organization_id": f"org-{tenant}"}}
        body = json.dumps({"type": type_, "data": data}).encode()
        signed = sign_delivery(body, secret=Secret(self.secrets[tenant]), webhook_id="evt_1")
        url = own_url(daemon.receiver, f"/hooks/sdk{at}")
        return trio.run(post, url, signed).status

    def ran(self) -> list[list[str]]:
        file = self.place.directory / "ran"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def json(self, *words: str) -> Any:
        done = self.place.run(*words, "--format", "json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_sample_is_sent_as_the_tenant_s_own_sender_would(host: Host) -> None:
    host.json("tenant", "add", "plain", "--name", "P", "--organization-id", "org-plain")
    note = ("--data", '{"note": "a sample"}')
    with host.place.daemon("--app", "app:handlers"):
        wait_until((host.place.data / "runtime.json").exists)
        for name in ("a", "plain"):
            (sent,) = host.json("events", "trigger", "order.created", "--tenant", name, *note)
            assert (sent["status"], sent["state"], sent["attempts"]) == (200, "done", 1)
            ids = {row["identifier"]: row["id"] for row in host.json("tenant", "list")}
            signer = ids["a"] if name == "a" else ""
            key = f"{sent['webhook_id']}.{signer}" if signer else sent["webhook_id"]
            event = host.json("events", "show", key)
            assert (event["signer"], event["tenant_id"]) == (signer, ids[name])
            customer = json.loads(event["raw"])["data"]["customer"]
            assert customer["organization_id"] == f"org-{name}"
        refused = host.place.run("events", "trigger", "order.paid", "--tenant", "unknown")
        assert "there is no tenant 'unknown'" in refused.stderr
        (host.place.directory / "b.key").unlink()
        unreadable = host.place.run("events", "trigger", "order.paid", "--tenant", "b")
    assert [row[:1] for row in host.ran()] == [["a"], ["plain"]]
    assert (refused.returncode, unreadable.returncode) == (1, 78)
    assert "cannot be read from the key file" in unreadable.stderr


def test_a_tenant_s_event_that_is_resent_stays_that_tenant_s(host: Host) -> None:
    """A body may name the organization of another tenant, and the host's address believes it."""
    with host.place.daemon("--app", "app:handlers") as daemon:
        body = json.dumps(
            {"type": "order.paid", "data": {"id": "o", "note": "x", "organization_id": "org-b"}}
        ).encode()
        secret = Secret(host.secrets["a"])
        signed = sign_delivery(body, secret=secret, webhook_id="evt_1")
        assert trio.run(post, own_url(daemon.receiver, "/hooks/sdk/a"), signed).status == 200
        wait_until(lambda: host.ran() == [["a", "evt_1", "x"]])

        def resend(path: str) -> Any:
            to = own_url(daemon.receiver, path)
            words = ("events", "resend", "evt_1", "--to", to, "--format", "json")
            return json.loads(host.place.run(*words).stdout)[0]["status"]

        # The host's address tries the host's secret and that of the tenant which the body names.
        assert resend("/hooks/sdk") == 400
        assert resend("/hooks/sdk/b") == 400
        assert resend("/hooks/sdk/a") == 200
        (host.place.directory / "a.key").unlink()
        to = own_url(daemon.receiver, "/hooks/sdk/a")
        ended = host.place.run("events", "resend", "evt_1", "--to", to)
        assert (ended.returncode, "key file" in ended.stderr) == (78, True), ended.stderr
    assert host.ran() == [["a", "evt_1", "x"]]


@pytest.mark.parametrize("type_", ["order.paid", "order.created"])
def test_a_tenant_that_uses_an_id_first_takes_no_other_tenant_s_event_away(
    host: Host, type_: str
) -> None:
    with host.place.daemon("--app", "app:handlers") as daemon:
        for name in TENANTS:
            assert host.send(daemon, name, f"of {name}", type_=type_) == 200
        wait_until(lambda: len(host.ran()) == 2)
    assert sorted(host.ran()) == [[name, "evt_1", f"of {name}"] for name in TENANTS]


def test_a_tenant_that_parks_an_id_first_takes_no_other_tenant_s_event_away(host: Host) -> None:
    with host.place.daemon("--app", "app:handlers") as daemon:
        assert host.send(daemon, "a", "of a", type_="no.handler") == 200
        assert host.send(daemon, "b", "of b") == 200
        wait_until(host.ran)
    assert host.ran() == [["b", "evt_1", "of b"]]
    states = {row["type"]: row["state"] for row in host.json("events", "list")}
    assert states == {"no.handler": "parked", "order.paid": "done"}


def test_a_failed_ordered_event_delays_no_lane_of_another_tenant(host: Host) -> None:
    with host.place.daemon("--app", "app:handlers") as daemon:
        assert host.send(daemon, "a", "fails") == 200
        wait_until(host.ran)
        assert host.send(daemon, "b", "of b") == 200
        wait_until(lambda: len(host.ran()) == 2)
    assert host.ran()[1] == ["b", "evt_1", "of b"]


def test_an_operator_gets_the_address_and_must_choose_the_sender_of_the_event(
    host: Host,
) -> None:
    shown = host.place.run("tenant", "show", "a")
    assert re.search("^webhook path +/hooks/sdk/a ", shown.stdout, re.MULTILINE)
    described = host.json("tenant", "show", "a")
    assert (described["webhook_path"], described["own_webhook_path"]) == ("/hooks/sdk/a", True)
    with host.place.daemon("--app", "app:handlers") as daemon:
        for name in TENANTS:
            sent = {"type_": "no.handler", "at": f"/{name}"}
            assert host.send(daemon, name, f"of {name}", **sent) == 200
        assert host.send(daemon, "a", "another", type_="no.handler") == 200
        (warned,) = daemon.logged("webhook.duplicate")
    ids = {row["identifier"]: row["id"] for row in host.json("tenant", "list")}
    keys = [f"evt_1.{ids[name]}" for name in TENANTS]
    assert (warned["tenant_id"], warned["address"]) == (ids["a"], "127.0.0.1")
    listed = host.json("events", "list")
    assert [(row["key"], row["signer"], row["webhook_id"]) for row in listed] == [
        (keys[1], ids["b"], "evt_1"),
        (keys[0], ids["a"], "evt_1"),
    ]
    asked = host.place.run("events", "show", "evt_1")
    assert asked.returncode == 1
    assert all(key in asked.stderr for key in keys)
    whole = host.json("events", "show", keys[0])
    assert json.loads(whole["raw"])["data"]["note"] == "of a"
    (other,) = whole["other_bodies"]
    assert json.loads(other["raw"])["data"]["note"] == "another"
    table = host.place.run("events", "show", keys[0]).stdout
    assert "another body, received" in table
    assert host.place.run("events", "replay", "evt_1").returncode == 1
    assert host.place.run("events", "replay", keys[0]).returncode == 0
    states = {row["key"]: row["state"] for row in host.json("events", "list")}
    assert states == {keys[0]: "received", keys[1]: "parked"}
