"""`/metrics`: its content, judged by promtool; its bounded size; its access control."""

import json
import re
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
import trio
import trustme
from support.admin import TOKEN, administered
from support.deliveries import SECRET
from support.programs import program
from support.serving import registry, signed, works
from support.wire import Wire

from sdk_trio.admin.metrics import HISTOGRAM_ENDINGS, METRICS, add_up, metric_of
from sdk_trio.admin.status import FRESH_SECONDS
from sdk_trio.base.telemetry import Sample
from sdk_trio.events import OrderPaidEvent
from sdk_trio.records.deliveries import DeliveryState
from sdk_trio.webhooks import HandlerRegistry

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "examples" / "prometheus" / "alerts.yml"
#: Those of the second file look back for hours, and are evaluated less often.
ALERT_TESTS = [
    ROOT / "examples" / "prometheus" / name for name in ("alerts_test.yml", "alerts_slow_test.yml")
]
DASHBOARD = ROOT / "examples" / "grafana" / "sdk_trio.json"
PAGE = ROOT / "docs" / "reference" / "metrics.md"

#: Metrics of parts that only some programs run; every other one is on every `/metrics`.
OF_PARTS = {
    "sdk_notifications_total": (("channel", "email"), ("result", "sent")),
    "sdk_alert_open": (("alert", "silence"),),
    "sdk_alert_messages_total": (("channel", "webhook"), ("result", "sent")),
    "sdk_replication_lag_seconds": (),
    "sdk_replication_databases": (("state", "Healthy"),),
    "sdk_replication_verified_age_seconds": (),
    "sdk_processes": (("state", "serving"),),
    "sdk_process_ends_total": (),
    "sdk_certificate_end_time_seconds": (),
    "sdk_disk_free_bytes": (),
    "sdk_disk_size_bytes": (),
    "sdk_clock_offset_seconds": (),
}
OF_CLIENT = {"sdk_client_requests_total", "sdk_client_circuit_state", "sdk_client_attempts"}
OF_TENANTS = {"sdk_tenants"}

#: How long a step of these tests may take, in seconds: promtool alone needs a minute on a machine
#: with much other work.
PATIENCE_SECONDS = 300

_NAME = re.compile(r"\b(?:sdk|process|up)_[a-z_]+[a-z]\b")


@pytest.fixture(autouse=True)
def token(monkeypatch, tmp_path):
    monkeypatch.setenv("SDK_TEST_ADMIN_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)


def names_in(text):
    """Names of metrics in a text; of a sample of a histogram, the metric's."""
    found = set()
    for name in _NAME.findall(text):
        for ending in HISTOGRAM_ENDINGS:
            if metric_of(name) is not None and name.endswith(ending):
                name = name.removesuffix(ending)
        found.add(name)
    return found


def promtool(*words, text=""):
    ran = subprocess.run(
        [program("promtool"), *words],
        input=text,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


async def test_promtool_finds_nothing_wrong_with_the_live_metrics(tmp_path, monkeypatch):
    monkeypatch.setenv("SDK_FORWARD_SECRET", SECRET)
    keys = {
        "MultiTenant__Enabled": True,
        "Forward__Routes": [{"Url": "http://127.0.0.1:9/"}],
        "Storage__Backend": "Sqlite",
        "Storage__Path": str(tmp_path / "data"),
    }
    async with administered(registry(works, enqueue=True, timeout=60), **keys) as admin:
        sources = admin.runtime.administrator.sources
        sources.samples.append(lambda: [Sample(name, OF_PARTS[name], 3.5) for name in OF_PARTS])
        await admin.app.deliver("order.paid")
        answer = await admin.get("/metrics")
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        said = await trio.to_thread.run_sync(lambda: promtool("check", "metrics", text=answer.text))
        assert said == ""
        shown = set(re.findall(r"^# TYPE (\S+)", answer.text, re.MULTILINE))
        assert shown | OF_CLIENT == {metric.name for metric in METRICS}


def test_the_page_lists_every_metric_with_its_labels_and_meaning():
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    assert {row[0]: row[1:] for row in rows} == {
        metric.name: (
            metric.kind,
            ", ".join(f"`{label}`" for label in metric.labels) or "-",
            metric.help,
        )
        for metric in METRICS
    }


# -- what senders choose ----------------------------------------------------------------------


HOSTILE = 10_000


async def test_ten_thousand_hostile_types_and_ids_add_no_label():
    handled = 0

    async def count(event):
        nonlocal handled
        handled += 1

    handlers = HandlerRegistry()
    handlers.register(OrderPaidEvent, count)
    handlers.fallback(count)
    async with administered(handlers, patience=PATIENCE_SECONDS) as admin:
        await admin.app.deliver("order.paid")
        await admin.app.deliver(b'{"type":"no.such.type","data":{"id":"x"}}')
        before = set(await admin.metrics())
        async with trio.open_nursery() as nursery:
            for sender in range(4):
                nursery.start_soon(flood, admin.app.url, sender)
        assert handled == HOSTILE + 2
        after = await admin.metrics()
        assert set(after) == before
        assert after['sdk_webhook_handler_seconds_count{type="other",mode="inline"}'] == HOSTILE + 1
        assert len(after) < 120
        assert "hostile" not in (await admin.get("/metrics")).text


async def flood(url, sender):
    with await Wire.connect(url) as wire:
        for number in range(HOSTILE // 4):
            name = f"hostile-{sender}-{number}"
            body = json.dumps({"type": f'{name}"\n# TYPE x{{', "data": {"id": name}}).encode()
            answer = await wire.post(signed(body, webhook_id=name))
            assert answer.status == 200


async def test_metrics_ask_the_store_no_more_than_once_in_some_seconds(monkeypatch):
    async with administered() as admin:
        asked = 0
        counts = admin.app.store.counts

        async def counted():
            nonlocal asked
            asked += 1
            return await counts()

        monkeypatch.setattr(admin.app.store, "counts", counted)
        began = trio.current_time()
        for _ in range(40):
            await admin.metrics()
        # On a slow machine the forty requests take longer than one observation counts.
        assert asked <= 1 + (trio.current_time() - began) // FRESH_SECONDS


async def test_counts_are_those_of_the_store():
    async def breaks(event):
        raise ValueError("no such product")

    keys = {"Webhooks__Queue__MaxAttempts": 1}
    async with administered(registry(breaks, enqueue=True), **keys) as admin:
        await admin.app.deliver("order.paid")
        await admin.app.deliver("order.created")
        metrics = await admin.metrics()
        counts = await admin.app.store.counts()
        for state in DeliveryState:
            assert metrics[f'sdk_inbox_events{{state="{state}"}}'] == counts[state]
        assert metrics['sdk_webhook_deliveries_total{result="dead"}'] == 1
        assert metrics['sdk_webhook_deliveries_total{result="parked"}'] == 1
        assert metrics['sdk_webhook_secret_matches_total{index="0"}'] == 2


async def test_the_age_of_the_oldest_waiting_event_is_a_metric():
    release = trio.Event()

    async def waits(event):
        await release.wait()

    async with administered(registry(waits, enqueue=True)) as admin:
        await admin.app.deliver("order.paid", settle=False)
        await trio.sleep(0.05)
        assert 0.02 < (await admin.metrics())["sdk_queue_oldest_seconds"] < 60
        release.set()


async def test_the_end_of_the_certificate_is_that_of_the_one_that_is_shown(tmp_path):
    def issue(name, days):
        # Whole seconds, as a certificate has them.
        end = datetime.now(UTC).replace(microsecond=0) + timedelta(days=days)
        issued = trustme.CA().issue_cert("127.0.0.1", not_after=end)
        issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / name)
        return str(tmp_path / name), end.timestamp()

    expired, first = issue("expired.pem", -1)
    renewed, second = issue("renewed.pem", 90)
    name = "sdk_certificate_end_time_seconds"
    async with administered(Server__CertFile=expired, Server__KeyFile=expired) as admin:
        assert (await admin.metrics())[name] == first
        settings = admin.runtime.settings
        server = msgspec.structs.replace(settings.server, cert_file=renewed, key_file=renewed)
        admin.runtime.reload(msgspec.structs.replace(settings, server=server))
        assert (await admin.metrics())[name] == second
    async with administered() as admin:
        assert name not in await admin.metrics()


async def test_the_free_disk_space_is_a_metric_if_the_store_is_in_files(tmp_path):
    files = {"Storage__Backend": "Sqlite", "Storage__Path": str(tmp_path / "data")}
    async with administered(**files) as admin:
        metrics = await admin.metrics()
        assert metrics["sdk_disk_size_bytes"] == shutil.disk_usage(tmp_path).total
        assert 0 < metrics["sdk_disk_free_bytes"] <= metrics["sdk_disk_size_bytes"]
    async with administered(Storage__Backend="Memory") as admin:
        assert not [name for name in await admin.metrics() if name.startswith("sdk_disk")]


def test_of_several_processes_the_certificate_that_ends_first_is_shown():
    name = "sdk_certificate_end_time_seconds"
    assert add_up([[Sample(name, (), 5.0)], [Sample(name, (), 3.0)], []]) == [Sample(name, (), 3.0)]


# -- who reads them ---------------------------------------------------------------------------


def test_the_alerts_are_right_and_fire_when_they_should(tmp_path):
    assert "SUCCESS" in promtool("check", "rules", str(ALERTS))
    for file in (ALERTS, *ALERT_TESTS):
        shutil.copy(file, tmp_path)
    for file in ALERT_TESTS:
        assert "SUCCESS" in promtool("test", "rules", str(tmp_path / file.name))


def test_every_alert_is_explained_and_has_a_test_in_which_it_fires():
    alerts = set(re.findall(r"- alert: (\w+)", ALERTS.read_text()))
    tests = "".join(file.read_text() for file in ALERT_TESTS)
    fired = set(re.findall(r'ALERTS\{alertname="(\w+)", alertstate="firing", job', tests))
    assert fired == alerts
    page = (ROOT / "docs" / "how-to" / "monitoring.md").read_text()
    assert set(re.findall(r"^\| `(Sdk\w+)` \|", page, re.MULTILINE)) == alerts


@pytest.mark.parametrize(
    "files", [[ALERTS], ALERT_TESTS, [DASHBOARD]], ids=["alerts", "tests", "dashboard"]
)
def test_every_metric_that_is_named_exists(files):
    named = names_in("".join(file.read_text() for file in files)) - {"sdk_trio"}
    assert len(named) > 5
    assert named <= {metric.name for metric in METRICS}


def test_the_dashboard_shows_every_metric():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    assert names_in(expressions) == {metric.name for metric in METRICS}
    assert len({panel["id"] for panel in panels}) == len(panels)
