"""``events catch-up`` against a sending upstream on loopback."""

from functools import partial

import pytest
import trio
from support.command_line import CommandLine, clear_environment
from support.deliveries import SECRET
from support.outage import Clock, at, order
from support.scripted_upstream import answer_requests
from support.upstreams import Upstream, serving

from sdk_trio.cli import catch_up
from sdk_trio.reconcile.catch_up import CatchUp
from sdk_trio.records.deliveries import DeliveryState
from sdk_trio.testing import SendingUpstream

TOKEN = "a-token-for-tests"
HOUR = 3600.0


@pytest.fixture
async def run(tmp_path, monkeypatch, capsys):
    """Return a function that runs a command in a thread; ``run.upstream`` is the upstream."""
    clear_environment(monkeypatch)
    monkeypatch.chdir(tmp_path)
    # No receiver runs the waiting events, and the upstream needs no pause after each page.
    monkeypatch.setattr(catch_up, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setitem(CatchUp.__init__.__kwdefaults__, "page_seconds", 0.01)
    for name, value in {
        "MODE": "Custom",
        "ENVIRONMENT": "Development",
        "ACCESSTOKEN": TOKEN,
        "MAXRETRIES": "0",
        "WEBHOOKS__SECRET": SECRET,
    }.items():
        monkeypatch.setenv(f"SDK__{name}", value)
    upstream, command_line = SendingUpstream(), CommandLine(tmp_path, capsys)

    def answer(method, target, headers, body):
        return upstream.answer(
            method, target, headers["authorization"].removeprefix("Bearer "), body
        )

    async def run(*words):
        command = (*words, "--set", f"Sdk:CustomBaseUrl=http://127.0.0.1:{server.port}")
        return await trio.to_thread.run_sync(partial(command_line, *command))

    run.upstream, run.command_line = upstream, command_line
    server = Upstream()
    with trio.fail_after(60):
        async with serving(server, lambda stream: answer_requests(stream, answer)):
            yield run


async def test_it_puts_each_change_once_and_a_dry_run_puts_nothing(run):
    await trio.to_thread.run_sync(run.command_line.seed, ("evt_seen", DeliveryState.DONE))
    upstream, now = run.upstream, Clock()()
    upstream.organization.subscribed = ("order.paid", "order.updated")
    upstream.change("orders", order("ord_old", created=now - 9 * HOUR, modified=now - 3 * HOUR))
    upstream.change("orders", order("ord_new", created=now - HOUR, modified=now - HOUR))
    words = ("events", "catch-up", "--since", "2h", "--format", "json")
    shown = await run(*words, "--dry-run")
    assert [(row["type"], row["subject"], row["action"]) for row in shown.document] == [
        ("order.paid", "ord_new", "would add"),
        ("order.updated", "ord_new", "would add"),
    ]
    assert shown.err.endswith("1 of 2 records changed; 2 events would be added\n")
    listed = await run("events", "list", "--format", "json", "--type", "order.updated")
    assert listed.document == []
    added = await run(*words)
    assert (added.status, [row["action"] for row in added.document]) == (0, ["added", "added"])
    listed = await run("events", "list", "--format", "json", "--type", "order.updated")
    (row,) = listed.document
    assert (row["subject"], row["state"]) == ("ord_new", "received")
    again = await run(*words)
    assert (again.status, again.document) == (0, [])
    assert f'"modified_at": "{at(now - HOUR)}"' not in added.out  # no body is printed


async def test_it_names_what_is_wrong(run):
    await trio.to_thread.run_sync(run.command_line.seed, ("evt_seen", DeliveryState.DONE))
    backwards = await run("events", "catch-up", "--since", "1h", "--until", "2h")
    assert (backwards.status, "--since must be before" in backwards.err) == (2, True)
    unknown = await run("events", "catch-up", "--since", "1h", "--types", "benefit.*")
    assert (unknown.status, "matches no type" in unknown.err) == (2, True)
    run.upstream.organization.subscribed = ("order.updated",)
    run.upstream.organization.enabled = False
    disabled = await run("events", "catch-up", "--since", "1h")
    assert "is disabled: enable it at the upstream" in disabled.err
    run.upstream.organizations.clear()
    refused = await run("events", "catch-up", "--since", "1h")
    assert (refused.status, "could not be read" in refused.err) == (1, True)


async def test_an_interrupted_command_continues_at_its_page(run):
    await trio.to_thread.run_sync(run.command_line.seed, ("evt_seen", DeliveryState.DONE))
    upstream, now = run.upstream, Clock()()
    upstream.organization.subscribed = ("order.updated",)
    for number in range(150):
        upstream.change("orders", order(f"ord_{number:03}", created=now - HOUR + number))
    answer = upstream.answer

    def fail_at_page_two(method, target, token, body):
        if "page=2" in target and "orders" in target:
            return 500, {"error": "Sad"}
        return answer(method, target, token, body)

    upstream.answer = fail_at_page_two
    words = ("events", "catch-up", "--since", f"{now - 2 * HOUR:.0f}", "--format", "json")
    failed = await run(*words)
    assert (failed.status, len(failed.document)) == (1, 100)
    assert "could not be read to their end: orders" in failed.err
    assert "100 of 100 records changed" in failed.err
    upstream.answer = answer
    rest = await run(*words)
    assert (rest.status, len(rest.document)) == (0, 50)
    assert "continuing with orders, page 2" in rest.err
