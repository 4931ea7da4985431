"""``call`` and ``events reconcile`` against a scripted upstream in this process."""

import json
import sys
from functools import partial

import pytest
import trio
from support.command_line import CommandLine, clear_environment
from support.deliveries import SECRET
from support.scripted_upstream import TOKEN, scripted_upstream

from sdk_trio.records.deliveries import DeliveryState


class Calls:
    """Runs commands in a thread while the upstream is served here."""

    def __init__(self, upstream, command_line):
        self.upstream = upstream
        self.command_line = command_line

    async def __call__(self, *words):
        command = (*words, "--set", f"Sdk:CustomBaseUrl={self.upstream.url}")
        return await trio.to_thread.run_sync(partial(self.command_line, *command))


@pytest.fixture
async def run(tmp_path, monkeypatch, capsys):
    clear_environment(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "MODE": "Custom",
        "ENVIRONMENT": "Development",
        "ACCESSTOKEN": TOKEN,
        "MAXRETRIES": "0",
        "WEBHOOKS__SECRET": SECRET,
    }.items():
        monkeypatch.setenv(f"SDK__{name}", value)
    async with scripted_upstream() as upstream:
        yield Calls(upstream, CommandLine(tmp_path, capsys))


async def test_a_record_is_printed_as_json(run):
    answer = await run("call", "orders", "get", "ord_3")
    assert (answer.status, answer.err) == (0, "")
    assert answer.document == {"id": "ord_3", "status": "paid", "amount": 3}
    assert run.upstream.calls == [("GET", "/orders/ord_3", {})]


async def test_a_list_is_limited_or_whole(run):
    answer = await run("call", "orders", "list", "--limit", "2", "--status", "paid")
    assert [order["id"] for order in answer.document] == ["ord_1", "ord_2"]
    assert answer.err == "the first 2 of 7; --limit N or --all for more\n"
    assert run.upstream.calls[0][2]["status"] == ["paid"]
    whole = await run("call", "orders.list", "--all")
    assert len(whole.document) == 7
    assert whole.err == ""
    run.upstream.orders *= 5
    shown = await run("call", "orders", "list")
    assert len(shown.document) == 20
    assert "20 of 35" in shown.err
    run.upstream.orders *= 10
    assert len((await run("call", "orders", "list", "--all")).document) == 350


async def test_fields_and_data_become_the_body(run, monkeypatch):
    written = await run(
        "call", "customers", "create", "--email", "a@b.example", "--external-id", "007",
        "--data", '{"metadata": {"n": 5}, "email": "other@b.example"}', "--name=null",
    )  # fmt: skip
    assert written.status == 0
    assert written.document == {
        "id": "cus_1",
        "metadata": {"n": 5},
        "email": "a@b.example",
        "external_id": "007",
        "name": None,
    }


async def test_raw_is_the_answer_as_it_came(run):
    answer = await run("call", "orders", "get", "ord_1", "--raw")
    assert (answer.status, answer.out) == (0, '{"id": "ord_1", "status": "paid", "amount": 1}')


@pytest.mark.parametrize("option", [(), ("--raw",)])
async def test_an_export_writes_no_control_characters_into_a_terminal(run, monkeypatch, option):
    """Customers choose their names, and an export contains them unchanged."""
    run.upstream.export = "name\r\n\x1b]0;owned\x07Ada\u202e\x9b2J\rx\r\n".encode()
    piped = await run("call", "orders", "export", *option)
    assert "\x1b]0;owned" in piped.out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = await run("call", "orders", "export", *option)
    assert shown.out == "name\n\\x1b]0;owned\\x07Ada\\u202e\\x9b2J\\rx\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("orders gte ord_1", "did you mean orders get?"),
        ("ordres list", "did you mean orders list"),
        ("orders get", "needs the path parameter 'id'"),
        ("orders get a b", "got 2 positional arguments"),
        ("orders get a --limit 3", "--limit and --all are for lists"),
        ("orders list --limit 3 --all", "not both"),
        ("orders list --limit x", "whole number"),
        ("orders list --status", "--status takes a value"),
        ("orders list --stauts paid", "has no argument 'stauts'; did you mean 'status'? (--data"),
        ("orders list --data [1]", "JSON object"),
        ("customers create --data {nope}", "--data takes JSON"),
        ("", "name an operation"),
        ("--status paid orders list", "no operation is named 'paid"),
    ],
)
async def test_wrong_words_are_a_usage_error_and_nothing_is_sent(run, words, message):
    answer = await run("call", *words.split())
    assert (answer.status, answer.out) == (2, "")
    assert message in answer.err
    assert run.upstream.calls == []


async def test_a_refusal_of_the_upstream_shows_its_status_and_request_id(run, monkeypatch):
    missing = await run("call", "orders", "get", "ord_99")
    assert missing.status == 1
    assert "GET /orders/ord_99: 404 ResourceNotFound (request id req_7)" in missing.err
    run.upstream.fails = lambda method, path: 503
    assert (await run("call", "orders", "list")).status == 69
    monkeypatch.setenv("SDK__ACCESSTOKEN", f"{TOKEN}-wrong")
    denied = await run("call", "orders", "list")
    assert denied.status == 1
    assert "401" in denied.err
    assert TOKEN not in denied.err + missing.err


async def test_without_a_token_it_names_the_setting(run, monkeypatch):
    monkeypatch.delenv("SDK__ACCESSTOKEN")
    answer = await run("call", "orders", "list")
    assert answer.status == 78
    assert "SDK__ACCESSTOKEN" in answer.err


async def test_the_operations_are_listed_without_settings(run, monkeypatch):
    monkeypatch.delenv("SDK__ACCESSTOKEN")
    answer = await run("call", "--list", "orders", "get", "--format", "json")
    assert {
        "operation": "orders get",
        "arguments": "ID",
        "method": "GET",
        "path": "/orders/{id}",
        "is_list": False,
    } in answer.document
    assert len((await run("call", "--list")).out.splitlines()) == 191
    assert "did you mean" in (await run("call", "--list", "ordres")).err


async def test_reconcile_asks_for_what_is_missing_and_a_dry_run_does_not(run):
    await trio.to_thread.run_sync(run.command_line.seed, ("evt_seen", DeliveryState.DONE))
    upstream = run.upstream
    upstream.redelivers = False
    upstream.missed("evt_seen", "evt_1", ago=3000)
    upstream.missed("evt_archived", ago=2000, archived=True)
    looked = await run("events", "reconcile", "--since", "1h", "--dry-run", "--format", "json")
    assert looked.status == 1
    assert [(row["webhook_id"], row["action"]) for row in looked.document] == [
        ("evt_1", "would ask"),
        ("evt_archived", "lost"),
    ]
    assert upstream.asked == []
    asked = await run("events", "reconcile", "--since", "1h", "--format", "json")
    assert [row["action"] for row in asked.document] == ["asked", "lost"]
    assert asked.err.endswith("1 requested, 1 can no longer be delivered\n")
    assert upstream.asked == ["evt_1"]
    too_far = await run("events", "reconcile", "--since", "8d")
    assert too_far.status == 2
    assert "DedupRetentionHours" in too_far.err
    assert json.dumps(TOKEN) not in asked.out


async def test_reconcile_names_a_disabled_endpoint_and_fails(run):
    await trio.to_thread.run_sync(run.command_line.seed, ("evt_seen", DeliveryState.DONE))
    run.upstream.endpoints[0]["enabled"] = False
    run.upstream.missed("evt_1", ago=3000)
    answer = await run("events", "reconcile", "--since", "1h", "--format", "json")
    assert (answer.status, answer.document) == (1, [])
    assert "has disabled the webhook endpoint ep_here" in answer.err
    assert "skipped while an endpoint was disabled" in answer.err
    assert run.upstream.asked == []


async def test_commands_on_the_store_run_where_reconciliation_is_enabled(run, monkeypatch):
    await trio.to_thread.run_sync(run.command_line.seed, ("evt_seen", DeliveryState.DONE))
    monkeypatch.setenv("SDK__WEBHOOKS__RECONCILIATION__ENABLED", "true")
    answer = await run("events", "list", "--format", "json")
    assert answer.status == 0
    assert [row["webhook_id"] for row in answer.document] == ["evt_seen"]


async def test_reconcile_without_an_inbox_creates_none(run):
    answer = await run("events", "reconcile", "--since", "1h")
    assert answer.status == 69
    assert not run.command_line.data.exists()
