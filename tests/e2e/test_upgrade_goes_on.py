"""A single-tenant installation continues as the default tenant: daemon, deliveries, steps."""

import json
import signal
from datetime import UTC, datetime
from pathlib import Path

import apsw
import httpx
import pytest
from support.command_forker import start_program
from support.daemon import Daemon, Place
from support.deliveries import SECRET
from support.waiting import PATIENCE_SECONDS, wait_until

from sdk_trio.events.samples import sample_body
from sdk_trio.testing import sign_delivery

APPLICATION = """
import json
from sdk_trio.events import OrderPaidEvent
from sdk_trio.tenants.upgrade import SqliteTenantIds
from sdk_trio.tenants.upgrade import HostUpgrade
from sdk_trio.webhooks import HandlerRegistry

handlers = HandlerRegistry()

@handlers.on(OrderPaidEvent)
async def note(event):
    with open("seen", "a") as seen:
        tenant = event.tenant and event.tenant.identifier
        seen.write(json.dumps([event.webhook_id, tenant]) + "\\n")

upgrade = HostUpgrade(steps=[SqliteTenantIds("host.db", "orders")])
"""

TENANTS = "--set=Sdk:MultiTenant:Enabled=true"
KEY = "Sdk:MultiTenant:SingleTenantUpgrade:LiteralDefaultTenantOrganizationId"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "single.py").write_text(APPLICATION)
    return Place(tmp_path)


def deliver(daemon: Daemon, webhook_id: str, organization: str = "org-1") -> None:
    """Deliver a realistic order of one organization, as the upstream sends it."""
    document = json.loads(sample_body("order.paid", now=datetime.now(UTC)))
    found = document["data"]["customer"]["organization_id"]
    raw = json.dumps(document).replace(found, organization).encode()
    signed = sign_delivery(raw, secret=SECRET, webhook_id=webhook_id)
    url = f"{daemon.receiver}/hooks/sdk"
    answer = httpx.post(url, content=signed.body, headers=dict(signed.headers), timeout=30)
    assert answer.status_code == 200, answer.text


def seen(place: Place) -> dict[str, str | None]:
    return dict(json.loads(line) for line in (place.directory / "seen").read_text().splitlines())


def tenants(place: Place) -> list[tuple[str, str | None]]:
    store = apsw.Connection(str(place.data / "inbox.db"))
    try:
        return list(store.execute("SELECT identifier, organization_id FROM tenant"))
    finally:
        store.close()


def start(place: Place, *words: str):
    return place.daemon("--app", "single:handlers", *words)


def test_a_delivery_after_the_first_multi_tenant_boot_is_the_default_tenants(place):
    with start(place) as daemon:
        deliver(daemon, "before")
    with start(place, TENANTS) as daemon:
        deliver(daemon, "after")
        deliver(daemon, "of-a-stranger", "org-2")
    assert seen(place) == {"before": None, "after": "default", "of-a-stranger": None}
    assert tenants(place) == [("default", "org-1")]


def test_deliveries_of_several_organizations_give_none_and_are_named(place):
    with start(place) as daemon:
        deliver(daemon, "one", "org-1")
        deliver(daemon, "two", "org-2")
    planned = json.loads(place.run("upgrade", "--dry-run", TENANTS, "--format", "json").stdout)
    (step,) = [step for step in planned["steps"] if step["step"] == "organization"]
    assert "org-1, org-2" in step["remark"]
    with start(place, TENANTS) as daemon:
        (entry,) = daemon.logged("upgrade.organization_unclear")
        assert entry["organizations"] == ["org-1", "org-2"]
    assert tenants(place) == [("default", None)]


def test_the_configured_organization_counts_before_what_the_deliveries_name(place):
    with start(place) as daemon:
        deliver(daemon, "one", "org-1")
        deliver(daemon, "two", "org-2")
    with start(place, TENANTS, f"--set={KEY}=org-2") as daemon:
        deliver(daemon, "after", "org-2")
    assert tenants(place) == [("default", "org-2")]
    assert seen(place)["after"] == "default"


def write_orders(place: Place) -> None:
    host = apsw.Connection(str(place.directory / "host.db"))
    host.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, tenant_id TEXT)")
    host.executemany("INSERT INTO orders (id) VALUES (?)", [(i,) for i in range(20)])
    host.close()


def orders_left(place: Place) -> int:
    host = apsw.Connection(str(place.directory / "host.db"))
    try:
        return host.execute("SELECT count(*) FROM orders WHERE tenant_id IS NULL").get
    finally:
        host.close()


def test_the_daemon_takes_the_hosts_steps_at_its_start(place):
    write_orders(place)
    with start(place) as daemon:
        deliver(daemon, "before")
    with start(place, TENANTS, "--upgrade-host", "single:upgrade"):
        assert orders_left(place) == 0


@pytest.mark.parametrize("older", [False, True])
def test_a_step_that_was_never_seen_runs_after_the_rest_is_done(place, older):
    write_orders(place)
    with start(place) as daemon:
        deliver(daemon, "before")
    with start(place, TENANTS):
        pass
    if older:  # the marker of a version that knew nothing but DONE
        store = apsw.Connection(str(place.data / "inbox.db"))
        store.execute("DELETE FROM checkpoint WHERE name = 'upgrade.finished'")
        store.execute("UPDATE upgrade SET step = 'deliveries'")
        store.close()
    host = ("--host", "single:upgrade", "--format", "json", TENANTS)
    planned = json.loads(place.run("upgrade", "--dry-run", *host).stdout)
    assert {step["step"]: step["rows"] for step in planned["steps"]} == {
        "host:host.orders.tenant_id": 20
    }
    assert orders_left(place) == 20
    ran = json.loads(place.run("upgrade", *host).stdout)
    assert (ran["already_done"], orders_left(place)) == (False, 0)
    again = json.loads(place.run("upgrade", *host).stdout)
    assert again["already_done"]
    assert len(tenants(place)) == 1


def test_a_fresh_host_gets_no_tenant_and_a_later_step_with_rows_does(place):
    with start(place, TENANTS):
        pass
    assert tenants(place) == []
    (place.directory / "host.db").unlink(missing_ok=True)
    write_orders(place)
    ran = json.loads(
        place.run("upgrade", "--host", "single:upgrade", "--format", "json", TENANTS).stdout
    )
    assert ran["steps"][-1]["done"] == 20
    assert orders_left(place) == 0
    assert [identifier for identifier, _ in tenants(place)] == ["default"]


def test_a_host_is_refused_where_there_are_no_tenants(place):
    ended = place.run("run", "--standalone", "--upgrade-host", "single:upgrade")
    assert ended.returncode == 2
    assert "MultiTenant:Enabled" in ended.stderr


def test_a_step_that_returns_no_batch_is_named(place):
    with start(place) as daemon:
        deliver(daemon, "before")
    (place.directory / "broken.py").write_text(
        "from sdk_trio.tenants.upgrade import HostUpgrade\n"
        "class Orders:\n"
        "    name = 'orders'\n"
        "    async def count(self): return 1\n"
        "    async def run_batch(self, tenant, position): pass\n"
        "upgrade = HostUpgrade(steps=[Orders()])\n"
    )
    ended = place.run("run", "--standalone", "--upgrade-host", "broken:upgrade", TENANTS)
    assert ended.returncode == 1
    assert "the upgrade step 'orders' returned NoneType" in ended.stderr


@pytest.mark.parametrize("kind", ["block", "shield"])
def test_a_step_that_does_not_end_is_named_when_the_daemon_ends_without_it(place, kind):
    with start(place) as daemon:
        deliver(daemon, "before")
    (place.directory / "endless.py").write_text(ENDLESS)
    log = place.directory / "log"
    words = ("run", "--standalone", "--upgrade-host", f"endless:{kind}", TENANTS)
    drain = "--set=Sdk:Webhooks:GracefulDrainTimeoutSeconds=1"
    with log.open("w") as err:
        process = start_program(
            [*words, drain],
            directory=place.directory,
            environ=place.environ,
            stdout=err,
            stderr=err,
        )
    try:
        wait_until((place.directory / "in-step").exists)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 1
    finally:
        process.kill()
        process.wait()
    (left,) = Daemon(process, log).logged("runtime.left_behind")
    assert left["upgrade_step"] == "host:orders"
    assert "disk" not in left["hint"]


ENDLESS = """
import time, trio
from sdk_trio.tenants.upgrade import HostUpgrade

class Orders:
    name = "orders"

    def __init__(self, kind):
        self.kind = kind

    async def count(self):
        return 1

    async def run_batch(self, tenant, position):
        open("in-step", "w").close()
        if self.kind == "block":
            time.sleep(600)
        with trio.CancelScope(shield=True):
            await trio.sleep(600)

block = HostUpgrade(steps=[Orders("block")])
shield = HostUpgrade(steps=[Orders("shield")])
"""
