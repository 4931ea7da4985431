"""The dashboard and the alerts as Grafana and a real Prometheus see them."""

import json
import re
import subprocess
import time
from pathlib import Path

import httpx
import trio
import yaml
from support.deliveries import SECRET
from support.notifications import EMAIL, VARIABLES, fake_provider, http_answer
from support.programs import node_package, program
from support.prometheus import prometheus
from support.serving import signed
from support.wire import Wire

from sdk_trio.base.telemetry import Sample
from sdk_trio.config import Settings
from sdk_trio.events import OrderPaidEvent, OrderRefundedEvent
from sdk_trio.runtime import Runtime
from sdk_trio.webhooks import HandlerRegistry

EXAMPLES = Path(__file__).parents[2] / "examples"
ALERTS = EXAMPLES / "prometheus" / "alerts.yml"
DASHBOARD = json.loads((EXAMPLES / "grafana" / "sdk_trio.json").read_text())

#: How long a step of this test may take in all, in seconds: a machine may be busy.
PATIENCE_SECONDS = 300

#: Variables that Grafana replaces in an expression before it queries Prometheus.
INTERPOLATED = {
    "$job": "sdk_trio",
    "$instance": ".*",
    "$__rate_interval": "10s",
    "${datasource}": "prometheus",
}

#: Samples that need a replicator, several processes or a certificate are invented here; other tests
#: have the real ones.
REPLICATION = (
    Sample("sdk_replication_lag_seconds", (), 1.5),
    Sample("sdk_alert_open", (("alert", "silence"),), 1),
    Sample("sdk_alert_messages_total", (("channel", "webhook"), ("result", "sent")), 1),
    Sample("sdk_replication_databases", (("state", "Healthy"),), 2),
    Sample("sdk_replication_verified_age_seconds", (), 3600.0),
    Sample("sdk_processes", (("state", "serving"),), 2),
    Sample("sdk_process_ends_total", (), 1),
    Sample("sdk_certificate_end_time_seconds", (), 4e9),
    Sample("sdk_clock_offset_seconds", (), 0.2),
)

_SELECTOR = re.compile(r"\b(?:sdk|process)_[a-z_]+(?:\{[^}]*\})?|\bup\{[^}]*\}")


def interpolated(expression):
    for name, value in INTERPOLATED.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, f"what Grafana replaces is not known here: {expression}"
    return expression


def expressions():
    """Every expression of the dashboard under the name of its place."""
    found = {
        f"{panel['title']}, {target['refId']}": target["expr"]
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    }
    for annotation in DASHBOARD["annotations"]["list"]:
        found[annotation["name"]] = annotation["target"]["expr"]
    return {name: interpolated(expression) for name, expression in found.items()}


def rules():
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for rule in group["rules"]}


def test_promtool_understands_every_expression_of_the_dashboard(tmp_path):
    file = tmp_path / "rules.yml"
    records = [
        {"record": f"expression:{number}", "expr": expression}
        for number, expression in enumerate(expressions().values())
    ]
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": records}]}))
    ran = subprocess.run(
        [program("promtool"), "check", "rules", str(file)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{len(records)} rules found" in ran.stdout


def test_the_page_shows_a_configuration_that_prometheus_takes(tmp_path):
    page = (EXAMPLES.parent / "docs" / "how-to" / "monitoring.md").read_text()
    whole, within_job = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    for number, text in enumerate((whole, whole + within_job)):
        file = tmp_path / f"{number}.yml"
        file.write_text(text)
        ran = subprocess.run(
            [program("promtool"), "check", "config", "--syntax-only", str(file)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        (job,) = yaml.safe_load(text)["scrape_configs"]
        assert ("authorization" in job) == bool(number)


# -- Grafana ----------------------------------------------------------------------------------

#: Enumerations are written as their plain values in JSON.
_PLAIN = """
type Plain<T> = T extends string ? `${T}`
  : T extends number
    ? (number extends T ? T : `${T}` extends `${infer N extends number}` ? N : never)
  : T extends readonly (infer U)[] ? Plain<U>[]
  : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
"""


def type_check(directory, dashboard):
    """Return TypeScript's findings in a dashboard, by Grafana's own types of it and of its
    panels."""
    types = node_package("@grafana/schema") / "dist" / "types" / "raw"
    kinds = sorted({panel["type"] for panel in dashboard["panels"]})
    lines = [f'import type {{ Dashboard }} from "{types}/dashboard/x/types.gen";']
    lines += [
        f'import type * as {kind} from "{types}/composable/{kind}/panelcfg/x/types.gen";'
        for kind in kinds
    ]
    lines += [_PLAIN, f"export const all: Plain<Dashboard> = {json.dumps(dashboard)};"]
    lines += [
        f"export const panel{panel['id']}: Plain<Partial<{panel['type']}.Options>> = "
        f"{json.dumps(panel['options'])};"
        for panel in dashboard["panels"]
    ]
    file = directory / "dashboard.ts"
    file.write_text("\n".join(lines))
    words = ["--noEmit", "--strict", "--skipLibCheck", "--module", "esnext", "--target", "es2022"]
    ran = subprocess.run(
        [program("tsc"), *words, "--moduleResolution", "bundler", str(file)],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    return ran.stdout + ran.stderr


def test_the_dashboard_is_what_grafana_calls_one(tmp_path):
    dashboard = json.loads(json.dumps(DASHBOARD))
    for annotation in dashboard["annotations"]["list"]:
        # Prometheus has fields of its own: the types are those of Grafana's own store.
        assert set(annotation.pop("target")) == {"refId", "expr"}
        assert annotation.pop("titleFormat")
    assert type_check(tmp_path, dashboard) == ""
    # The check is effective: it finds an error.
    dashboard["panels"][0]["gridPos"]["w"] = "12"
    dashboard["panels"][1]["options"]["colourMode"] = "value"
    dashboard["panels"][3]["options"]["legend"]["placement"] = "left"
    found = type_check(tmp_path, dashboard)
    assert len(re.findall("error TS", found)) == 3, found


def test_panels_neither_overlap_nor_leave_the_grid():
    taken = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


# -- Prometheus -------------------------------------------------------------------------------


def registry():
    handlers = HandlerRegistry()

    async def calls(event, services):
        await services.client.request("POST", "/orders", json={})

    async def breaks(event):
        raise ValueError("no such product")

    handlers.register(OrderPaidEvent, calls)
    handlers.register(OrderRefundedEvent, breaks, enqueue=True, max_attempts=8)
    return handlers


def settings_with(provider, directory):
    notifications = "MultiTenant:Notifications"
    return Settings.from_mapping(
        {
            "Environment": "Development",
            "Mode": "Custom",
            "CustomBaseUrl": provider.url,
            "AccessToken": "not-a-real-token",
            "Server:Bind": ["127.0.0.1:0"],
            "Admin:Bind": "127.0.0.1:0",
            "Storage:Path": str(directory / "data"),
            "Webhooks:RequireHttps": False,
            "Webhooks:Secret": SECRET,
            "Webhooks:Queue:MaxAttempts": 1,
            "MultiTenant:Enabled": True,
            f"{notifications}:Enabled": True,
            f"{notifications}:Email:FromAddress": "noreply@platform.example",
            f"{notifications}:Email:EmailProviderA:BaseUrl": provider.url,
            "Forward:Routes": [{"Url": provider.url, "Types": ["refund.created"]}],
        }
    )


async def traffic(runtime):
    """Some of everything, without end."""
    tenants = runtime.receiver.tenancy.service
    await tenants.add(
        "acme", name="A", site_manager_email=EMAIL, site_manager_email_verified=True, actor="kim"
    )
    while True:
        await tenants.suspend("acme", reason="unpaid", actor="kim")
        await tenants.reactivate("acme", reason="paid", actor="kim")
        with await Wire.connect(f"{runtime.started.webhook_url}/hooks/sdk") as wire:
            for kind in ("order.paid", "order.refunded", "order.created", "refund.created"):
                assert (await wire.post(signed(kind))).status == 200
        await trio.sleep(0.1)


def is_number(series):
    return series["value"][1] != "NaN"


async def test_a_real_prometheus_finds_something_behind_every_expression(tmp_path, monkeypatch):
    program("prometheus")
    monkeypatch.chdir(tmp_path)
    for name, value in {**VARIABLES, "SDK_FORWARD_SECRET": SECRET}.items():
        monkeypatch.setenv(name, value)
    with trio.fail_after(PATIENCE_SECONDS):
        async with fake_provider(http_answer(202, X_Message_Id="m1")) as provider:
            runtime = Runtime(settings_with(provider, tmp_path), registry())
            runtime.administrator.sources.samples.append(lambda: REPLICATION)
            async with trio.open_nursery() as nursery:
                started = await nursery.start(runtime.run)
                nursery.start_soon(traffic, runtime)
                await runtime.receiver.store.pause(
                    "product.*", actor="me", reason="", until=None, now=time.time()
                )
                target = httpx.URL(started.admin[0]).netloc.decode()
                async with prometheus(tmp_path, target, ALERTS) as scraper:
                    await everything_is_there(scraper)
                    await alerts_are_evaluated(scraper)
                    await variables_have_values(scraper, target)
                nursery.cancel_scope.cancel()


async def everything_is_there(scraper):
    """Wait until every expression except the annotation has a number as its value."""
    waiting = expressions()
    restarts = waiting.pop("Restarts")
    with trio.move_on_after(PATIENCE_SECONDS / 2):
        while waiting:
            for name, expression in list(waiting.items()):
                if any(map(is_number, await scraper.query(expression))):
                    del waiting[name]
            await trio.sleep(0.2)
    assert waiting == {}
    assert await scraper.query(restarts) == []
    assert await scraper.query(restarts.replace("> 0", ">= 0"))


async def alerts_are_evaluated(scraper):
    for name, expression in rules().items():
        for selector in _SELECTOR.findall(expression):
            assert await scraper.query(selector), f"{name}: nothing is {selector}"
    while True:
        (group,) = (await scraper.api("rules"))["groups"]
        if all(rule["health"] != "unknown" for rule in group["rules"]):
            firing = {rule["name"] for rule in group["rules"] if rule["state"] == "firing"}
            if firing:
                break
        await trio.sleep(0.2)
    assert {rule["name"]: rule["lastError"] for rule in group["rules"] if "lastError" in rule} == {}
    assert {rule["name"] for rule in group["rules"]} == set(rules())
    assert firing <= {"SdkDeadLetters", "SdkParked"}


async def variables_have_values(scraper, target):
    values = {"job": "sdk_trio", "instance": target}
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] != "query":
            continue
        form = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        found = await scraper.api(f"label/{form[2]}/values", **{"match[]": interpolated(form[1])})
        assert found == [values[variable["name"]]]
