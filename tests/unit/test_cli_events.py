import errno
import io
import os
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import attrs
import pytest
import trio
from standardwebhooks import Webhook
from support.command_line import ARRIVAL
from support.deliveries import SECRET
from support.keyed import ByKey

from sdk_trio.admin import replay
from sdk_trio.cli.events import Tailer, TailFilter, TailPrinter
from sdk_trio.cli.main import main
from sdk_trio.config import Settings
from sdk_trio.events import DEFAULT_CATALOG
from sdk_trio.records.deliveries import Dead, DeliveryRecord, DeliveryState, Done, NewDelivery
from sdk_trio.storage.open import open_inbox, open_store
from sdk_trio.tenants import TenantService
from sdk_trio.webhooks.signed_request import DeliveryFailedError

OTHER_SECRET = "whsec_nC3T0sW9ZbSxkU1QhQ7m0m2kZV2n8T0w"  # a test value

DEAD, DONE, PARKED, RECEIVED = (
    DeliveryState.DEAD,
    DeliveryState.DONE,
    DeliveryState.PARKED,
    DeliveryState.RECEIVED,
)


class Terminal(io.StringIO):
    """A terminal: with what the user types, or for what is shown."""

    def isatty(self):
        return True


# -- list and show -----------------------------------------------------------------------------


def test_list_is_newest_first_and_whole_where_no_terminal_limits_it(command_line):
    command_line.seed(("msg_old", DONE), (f"msg_{'x' * 200}", DEAD), ("msg_new", RECEIVED))
    answer = command_line("events", "list")
    heading, newest, long, oldest = answer.out.splitlines()
    assert heading.split()[:4] == ["received", "webhook", "id", "type"]
    assert newest.split()[2:5] == ["msg_new", "order.paid", "received"]
    assert f"msg_{'x' * 200}" in long
    assert "ValueError: no such product" in long
    assert oldest.startswith("2027-01-15 08:00:00Z  msg_old")


def test_one_long_id_does_not_widen_a_piped_table(command_line):
    command_line.seed(*((f"msg_{number}", DONE) for number in range(9)), ("x" * 300, DEAD))
    lines = command_line("events", "list").out.splitlines()
    assert "x" * 300 in lines[1]
    assert {line.index("order.paid") for line in lines[2:]} == {lines[0].index("type")}
    assert max(map(len, lines[2:])) < 200


def test_list_filters_and_limits(command_line):
    command_line.seed(("a", DONE), ("b", DEAD), ("c", DEAD), ("d", DEAD))

    def ids(*words):
        rows = command_line("events", "list", "--format", "json", *words).document
        return [row["webhook_id"] for row in rows]

    assert ids("--state", "dead") == ["d", "c", "b"]
    assert ids("--state", "dead", "--limit", "2") == ["d", "c"]
    assert ids("--type", "order.paid") == ["d", "c", "b", "a"]
    assert ids("--since", "2027-01-15T08:00:02Z") == ["d", "c"]
    assert ids("--subject", "order-of-b") == ["b"]
    assert ids("--subject", "order-of-b", "--state", "done") == []
    empty = command_line("events", "list", "--type", "order.created")
    assert (empty.status, empty.out, empty.err) == (0, "", "no events\n")
    assert ids("--type", "order.created") == []


def test_the_json_of_an_event_is_a_stable_contract(command_line):
    body = b'{"type": "order.paid", "data": {"id": "o-1", "name": "\xc3\x85"}}'
    command_line.seed(("msg_1", DEAD, body))
    attributes = {
        "sequence": 1,
        "webhook_id": "msg_1",
        "type": "order.paid",
        "state": "dead",
        "queued": False,
        "attempts": 1,
        "received_at": ARRIVAL,
        "timestamp": int(ARRIVAL),
        "subject": "order-of-msg_1",
        "ordered": False,
        "next_attempt_at": None,
        "started_at": ARRIVAL,
        "finished_at": ARRIVAL + 2,
        "last_error": "ValueError: no such product",
        "tenant_id": None,
        "process_ends": 0,
        "ran_alone": False,
        "earlier_attempts": 0,
        "signer": "",
        "generation": 0,
        "key": "msg_1",
    }
    assert command_line("events", "list", "--format", "json").document == [attributes]
    failed = {
        "number": 1,
        "started_at": ARRIVAL,
        "finished_at": ARRIVAL + 2,
        "error": "ValueError: no such product",
        "place": None,
        "traceback": None,
    }
    shown = command_line("events", "show", "msg_1", "--format", "json").document
    assert shown == {
        **attributes,
        "raw": body.decode(),
        "failed_attempts": [failed],
        "answered_attempts": [],
        "other_bodies": [],
    }


def test_a_body_that_is_not_utf_8_is_base64(command_line):
    command_line.seed(("msg_1", DONE, b"\xff\x00"))
    shown = command_line("events", "show", "msg_1", "--format", "json").document
    assert shown["raw_base64"] == "/wA="
    assert "raw" not in shown


def test_show_prints_the_attempts_and_the_body_indented(command_line):
    command_line.seed(("msg_1", DEAD, b'{"type":"order.paid","data":{"id":"o-1"}}'))
    answer = command_line("events", "show", "msg_1")
    assert answer.status == 0
    assert "1       2027-01-15 08:00:00Z  2.000    ValueError: no such product" in answer.out
    assert answer.out.endswith('  "data": {\n    "id": "o-1"\n  }\n}\n')
    assert answer.err == ""


def test_a_terminal_gets_the_error_once_more_below_the_body(command_line, monkeypatch):
    command_line.seed(("msg_1", DEAD), ("msg_2", DONE))
    monkeypatch.setattr("sdk_trio.cli.events.is_terminal", lambda: True)
    assert command_line("events", "show", "msg_1").err == "\ndead: ValueError: no such product\n"
    assert command_line("events", "show", "msg_2").err == ""


def test_the_line_that_failed_is_whole_in_a_narrow_terminal(command_line, monkeypatch):
    place = f"/srv/{'shop/' * 20}handlers.py:31 in grant"

    async def fail():
        settings = Settings.from_mapping(
            {"Storage:Path": str(command_line.data)}, standalone=True, receiver=False
        )
        async with open_inbox(settings, owner="here") as opened:
            inbox = ByKey(opened)
            raw = b'{"type":"order.paid"}'
            arrived = NewDelivery("msg_1", "order.paid", raw, int(ARRIVAL), ARRIVAL)
            await inbox.accept(arrived, leased=True)
            await inbox.start("msg_1", now=ARRIVAL)
            await inbox.finish("msg_1", Dead("KeyError: 'x'", place=place), now=ARRIVAL)

    trio.run(fail)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert main(["events", "show", "msg_1"]) == 0
    assert re.search(rf"^place +{re.escape(place)}$", sys.stdout.getvalue(), re.MULTILINE)


def test_nothing_that_a_sender_chose_steers_the_terminal(command_line):
    command_line.seed(("msg_1", DONE, '{"type":"order.paid","x":"\x9b31m\u202e"}'.encode()))
    command_line.seed(("msg_\x1b[2J", DONE))
    out = command_line("events", "show", "msg_1").out + command_line("events", "list").out
    assert "\x1b" not in out
    assert "\x9b" not in out
    assert "\u202e" not in out


def test_show_of_an_unknown_event(command_line):
    command_line.seed(("msg_1", DONE))
    answer = command_line("events", "show", "msg_2")
    assert (answer.status, answer.out) == (1, "")
    assert answer.err.startswith("sdk-trio: error: the inbox in sdk-data has no event 'msg_2'")


@pytest.mark.parametrize(
    "words", [["list"], ["show", "x"], ["replay", "x"], ["replay", "--state", "dead"], ["tail"]]
)
def test_without_an_inbox_it_is_an_error_and_none_is_made(command_line, words):
    answer = command_line("events", *words)
    assert answer.status == 69
    assert "there is no store at" in answer.err
    assert os.listdir(command_line.directory) == []


def test_a_directory_of_another_user_is_reported_with_the_remedy(command_line, monkeypatch):
    command_line.seed(("a", DONE))
    look = Path.stat

    def refuse(self, **options):
        if self.name == "inbox.db":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return look(self, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    answer = command_line("events", "list")
    assert answer.status == 69
    assert "run the command as the receiver's user" in answer.err


def test_a_store_in_memory_is_out_of_reach(command_line):
    answer = command_line("events", "list", "--set", "Sdk:Storage:Backend=Memory")
    assert answer.status == 69
    assert "Sdk:Storage:Backend is Memory" in answer.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["list", "--limit", "0"], "--limit takes a whole number from 1"),
        (["list", "--limit", "many"], "--limit takes a whole number from 1"),
        (["list", "--since", "yesterday"], "--since takes a time such as"),
        (["replay"], "give the ids of events, or --state dead, parked or retrying\n"),
        (["replay", "--state", "dead", "--until", "tomorrow"], "--until takes a time such as"),
        (["replay", "a", "--state", "dead"], "not both"),
        (["replay", "a", "--type", "order.paid"], "remove them, or give a --state instead of ids"),
        (["replay", "--state", "done"], "invalid choice: 'done'"),
    ],
)
def test_wrong_arguments_are_a_usage_error(command_line, words, message):
    answer = command_line("events", *words)
    assert (answer.status, answer.out) == (2, "")
    assert message in answer.err


@pytest.mark.parametrize(("width", "lines"), [(130, 1), (80, 2)])
def test_a_terminal_that_is_wide_enough_gets_a_line_for_each_event_with_whole_ids(
    command_line, monkeypatch, width, lines
):
    command_line.seed(("msg_" + "x" * 30, DEAD))
    screen = Terminal()
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", screen)
    assert main(["events", "list"]) == 0
    text = re.sub(r"\x1b\[[01]m", "", screen.getvalue())
    assert "\x1b" not in text  # bold headings are not colours
    assert "msg_" + "x" * 30 in text
    assert re.search(r" dead( |$)", text, re.MULTILINE)
    assert len(text.splitlines()) == 2 * lines
    assert "ValueError: no such product" in text
    assert max(map(len, text.splitlines())) <= width


# -- replay ------------------------------------------------------------------------------------


def states(command_line):
    rows = command_line("events", "list", "--format", "json").document
    return {row["webhook_id"]: row["state"] for row in rows}


def test_replay_of_one_id_asks_nothing(command_line, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal(""))
    command_line.seed(("a", DEAD), ("b", PARKED))
    answer = command_line("events", "replay", "b")
    assert answer.status == 0
    assert "1 replayed" in answer.err
    assert states(command_line) == {"a": "dead", "b": "received"}


def test_replay_says_why_an_id_was_not_replayed(command_line):
    command_line.seed(("a", DONE), ("b", DEAD))
    answer = command_line("events", "replay", "a", "b", "nowhere", "--format", "json")
    assert answer.status == 1
    rows = {row["webhook_id"]: row for row in answer.document}
    assert "is done: only dead, parked and retrying events" in rows["a"]["reason"]
    assert "--again" in rows["a"]["reason"]
    assert rows["nowhere"]["reason"] == "there is no such event in the inbox"
    assert rows["b"] == {
        "key": "b",
        "webhook_id": "b",
        "type": "order.paid",
        "state": "received",
        "reason": None,
        "replayed": True,
    }
    assert states(command_line) == {"a": "done", "b": "received"}


def test_a_terminal_gets_the_whole_reason_below_the_table(command_line, monkeypatch):
    command_line.seed(("a", DONE))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sdk_trio.cli.events.is_terminal", lambda: True)
    answer = command_line("events", "replay", "a")
    assert answer.status == 1
    assert answer.err.startswith("a: is done: only dead, parked and retrying events")
    assert "--again" in answer.err


def test_replay_again_runs_done_events_once_more(command_line):
    command_line.seed(("a", DONE), ("b", DEAD))
    assert command_line("events", "replay", "a", "b", "--again", "--yes").status == 0
    assert states(command_line) == {"a": "received", "b": "received"}
    rows = command_line("events", "list", "--format", "json").document
    assert {row["webhook_id"]: row["generation"] for row in rows} == {"a": 1, "b": 0}
    wrong = command_line("events", "replay", "--state", "dead", "--again")
    assert "named by their ids" in wrong.err


def test_replay_says_how_an_error_is_given_if_none_is_found(command_line):
    command_line.seed(("a", DEAD))
    answer = command_line("events", "replay", "--state", "dead", "--error", "half of it")
    assert answer.status == 0
    assert "0 replayed" in answer.err
    assert "runs them" not in answer.err
    assert "give the whole error" in answer.err


def test_replay_of_a_state_goes_through_every_page(command_line, monkeypatch):
    monkeypatch.setattr(replay, "CHUNK", 3)
    command_line.seed(*((f"dead-{n}", DEAD) for n in range(8)), ("kept", PARKED))
    rehearsal = command_line("events", "replay", "--state", "dead", "--dry-run")
    assert "8 would be replayed" in rehearsal.err
    assert states(command_line)["dead-0"] == "dead"
    answer = command_line("events", "replay", "--state", "dead")
    assert (answer.status, answer.err.split()[0]) == (0, "8")
    assert set(states(command_line).values()) == {"received", "parked"}


def test_replay_since_excludes_older_ones(command_line):
    command_line.seed(("old", DEAD), ("new", DEAD))
    since = "2027-01-15T08:00:01Z"
    assert command_line("events", "replay", "--state", "dead", "--since", since).status == 0
    assert states(command_line) == {"old": "dead", "new": "received"}


def test_replay_until_excludes_later_ones(command_line):
    command_line.seed(("old", DEAD), ("new", DEAD))
    until = "2027-01-15T08:00:01Z"
    assert command_line("events", "replay", "--state", "dead", "--until", until).status == 0
    assert states(command_line) == {"old": "received", "new": "dead"}


def test_replay_of_one_error_excludes_the_others(command_line):
    errors = {
        "a": "KeyError: order 17 of 3f2b1c9d8e7a is gone",
        "b": "KeyError: order 4 of 99aa88bb77cc is gone\nsecond line",
        "c": "TimeoutError: the bank",
    }
    command_line.seed(("old", DEAD))

    async def fail():
        settings = Settings.from_mapping(
            {"Storage:Path": str(command_line.data)}, standalone=True, receiver=False
        )
        async with open_inbox(settings, owner="seed") as inbox:
            for webhook_id, error in errors.items():
                delivery = NewDelivery(webhook_id, "order.paid", b"{}", 1, ARRIVAL)
                lease = (await inbox.accept(delivery, leased=True)).lease
                assert lease is not None
                await inbox.start(lease, now=ARRIVAL)
                await inbox.finish(lease, Dead(error), now=ARRIVAL + 1)

    trio.run(fail)
    chosen = ("events", "replay", "--state", "dead", "--error")
    # As it is shown for one of them, or as the console shows the group.
    for text in (errors["a"], "KeyError: order # of # is gone"):
        rows = command_line(*chosen, text, "--dry-run", "--format", "json").document
        assert [row["webhook_id"] for row in rows] == ["a", "b"]
    assert command_line(*chosen, errors["c"]).status == 0
    assert states(command_line)["c"] == "received"
    assert states(command_line)["old"] == "dead"


def test_a_list_that_stops_at_its_limit_says_that_there_are_more(command_line):
    command_line.seed(*((f"msg_{n}", DONE) for n in range(51)))
    assert "stopped at 50; there are more" in command_line("events", "list").err
    assert "there are more" not in command_line("events", "list", "--limit", "51").err


def test_replay_of_a_subject_excludes_the_others(command_line):
    command_line.seed(("a", DEAD), ("b", DEAD), ("c", PARKED))
    chosen = ("events", "replay", "--state", "dead", "--subject", "order-of-b", "--format", "json")
    assert [row["key"] for row in command_line(*chosen, "--dry-run").document] == ["b"]
    assert states(command_line) == {"a": "dead", "b": "dead", "c": "parked"}
    assert [row["key"] for row in command_line(*chosen).document] == ["b"]
    assert states(command_line) == {"a": "dead", "b": "received", "c": "parked"}
    both = command_line("events", "replay", "a", "--subject", "order-of-a")
    assert (both.status, "--subject" in both.err) == (2, True)


@pytest.mark.parametrize(
    "option", ["--since", "--until", "--error", "--route", "--subject", "--type", "--tenant"]
)
def test_replay_by_a_variable_that_is_not_set_replays_nothing(command_line, option):
    command_line.seed(("a", DEAD))
    command_line("events", "replay", "--state", "dead", option, "")
    assert states(command_line) == {"a": "dead"}
    assert command_line("events", "replay", "a", option, "").status == 2
    assert states(command_line) == {"a": "dead"}


@pytest.mark.parametrize(
    ("typed", "words", "status", "state"),
    [
        ("n\n", [], 1, "dead"),
        ("", [], 1, "dead"),
        ("y\n", [], 0, "received"),
        ("", ["--yes"], 0, "received"),
    ],
)
def test_more_than_one_is_asked_about_on_a_terminal(
    command_line, monkeypatch, typed, words, status, state
):
    command_line.seed(("a", DEAD), ("b", DEAD))
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    answer = command_line("events", "replay", "--state", "dead", *words)
    assert answer.status == status
    assert ("replay 2 events (2 order.paid)? [y/N]" in answer.err) == (not words)
    assert set(states(command_line).values()) == {state}


# -- tail --------------------------------------------------------------------------------------


async def test_tail_reports_arrivals_ends_and_replays_once(tmp_path):
    settings = Settings.from_mapping(
        {"Storage:Path": str(tmp_path)}, standalone=True, receiver=False
    )
    async with open_inbox(settings, owner="w") as opened, open_inbox(settings, owner="t") as inbox:
        writer = ByKey(opened)

        async def accept(webhook_id, event_type="order.paid"):
            delivery = NewDelivery(webhook_id, event_type, b"{}", 1, 1.0)
            await writer.accept(delivery, leased=True)

        async def seen():
            return [(record.webhook_id, str(record.state)) for record in await tailer.changes()]

        await accept("before")
        tailer = Tailer(inbox, "order.paid")
        await tailer.begin()
        assert await seen() == []
        await accept("one")
        await accept("other", "order.created")
        assert await seen() == [("one", "received")]
        assert await seen() == []
        await writer.claim_due(limit=2, now=2.0)
        await writer.start("before", now=2.0)
        await writer.start("one", now=2.0)
        assert await seen() == [("before", "running"), ("one", "running")]
        await writer.finish("before", Done(), now=3.0)
        await writer.finish("one", Dead("no"), now=3.0)
        assert await seen() == [("before", "done"), ("one", "dead")]
        await writer.replay(["one"])
        assert await seen() == [("one", "received")]
        await writer.claim_due(limit=1, now=4.0)
        await writer.start("one", now=4.0)
        await writer.finish("one", Dead("no"), now=5.0)
        assert await seen() == [("one", "dead")]
        # Requeued, run, and dead again between two polls.
        await writer.replay(["one"])
        await writer.claim_due(limit=1, now=6.0)
        await writer.start("one", now=6.0)
        await writer.finish("one", Dead("no"), now=7.0)
        assert await seen() == [("one", "dead")]


def test_an_interrupted_tail_ends_with_130_and_says_nothing_more(command_line, monkeypatch):
    command_line.seed(("first", DONE))

    async def interrupted(_self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Tailer, "changes", interrupted)
    answer = command_line("events", "tail")
    assert (answer.status, answer.out) == (130, "")
    assert answer.err == "waiting for changes; Ctrl-C ends\n"


# -- of one tenant -----------------------------------------------------------------------------


def test_events_of_one_tenant_are_listed_and_replayed(command_line):
    owned = "11111111-1111-4111-8111-111111111111"

    async def fill():
        chosen = Settings.from_mapping(
            {"Storage:Path": str(command_line.data)}, standalone=True, receiver=False
        )
        async with open_store(chosen, owner="seed") as store:
            tenant = await TenantService(chosen, store.tenants).add("acme", name="Acme")
            for number, tenant_id in enumerate((tenant.id, owned, None)):
                delivery = NewDelivery(
                    f"msg_{number}", "order.paid", b"{}", 1, ARRIVAL, tenant_id=tenant_id
                )
                await store.park(delivery)

    trio.run(fill)

    def ids(*words):
        answer = command_line("events", *words, "--format", "json")
        return [row["webhook_id"] for row in answer.document]

    assert ids("list", "--tenant", "acme") == ["msg_0"]
    assert ids("list", "--tenant", owned) == ["msg_1"]  # its tenant was purged
    parked = ("replay", "--state", "parked", "--tenant", "acme")
    assert ids(*parked, "--dry-run") == ["msg_0"]
    assert ids(*parked) == ["msg_0"]
    assert ids("list", "--state", "parked") == ["msg_2", "msg_1"]
    unknown = command_line("events", "list", "--tenant", "unknown")
    assert (unknown.status, "there is no tenant 'unknown'" in unknown.err) == (1, True)
    both = command_line("events", "replay", "msg_1", "--tenant", "acme")
    assert (both.status, "--tenant" in both.err) == (2, True)


# -- types and resend ----------------------------------------------------------------------------


def test_types_are_those_of_the_catalogue_with_their_classes(command_line):
    rows = command_line("events", "types", "--format", "json").document
    assert [row["type"] for row in rows] == [row.wire_type for row in DEFAULT_CATALOG]
    assert sum(row["known"] for row in rows) == 28
    assert all(row["meaning"].endswith(".") for row in rows)
    printed = command_line("events", "types").out
    assert re.search(r"^order\.paid +OrderPaidEvent +An order was paid", printed, re.MULTILINE)


@pytest.fixture
def catcher():
    """A server that records the requests posted to it, and answers by the path."""
    posted = []

    class Catcher(BaseHTTPRequestHandler):
        def do_POST(self):
            posted.append((self.headers, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(int(self.path.strip("/") or 204))
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Catcher) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", posted
        finally:
            server.shutdown()
            thread.join()


def test_an_event_is_resent_to_any_address_with_its_bytes_and_a_new_signature(
    command_line, catcher, monkeypatch
):
    url, posted = catcher
    body = b'{"type":"order.paid",  "timestamp": "2026-11-22T10:00:00Z"}'
    command_line.seed(("msg_1", DEAD, body))
    monkeypatch.setenv("SDK__WEBHOOKS__SECRET", SECRET)
    answer = command_line("events", "resend", "msg_1", "--to", url, "--format", "json")
    assert answer.status == 0
    assert answer.document == [
        {"webhook_id": "msg_1", "type": "order.paid", "to": f"{url}/", "status": 204}
    ]
    ((headers, got),) = posted
    assert got == body
    Webhook(SECRET).verify(got, {name.lower(): value for name, value in headers.items()})
    assert headers["webhook-id"] == "msg_1"
    assert command_line("events", "resend", "msg_1", "--to", f"{url}/500").status == 1
    # The inbox is as it was.
    assert states(command_line) == {"msg_1": "dead"}


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["msg_1", "--to", "localhost:3000"], 2, "--to takes http://HOST:PORT/PATH"),
        (["msg_2", "--to", "http://127.0.0.1:1"], 1, "has no event 'msg_2'"),
        (["msg_1", "--to", "http://127.0.0.1:1"], 78, "there is no webhook secret"),
        (["msg_1"], 2, "required: --to"),
    ],
)
def test_events_that_cannot_be_resent(command_line, words, status, message):
    command_line.seed(("msg_1", DEAD))
    answer = command_line("events", "resend", *words)
    assert (answer.status, answer.out) == (status, "")
    assert message in answer.err


@pytest.mark.parametrize(
    "words",
    [
        ["trigger", "order.paid", "--url", "https://hooks.invalid/in"],
        ["trigger", "order.paid", "--url", "http://192.0.2.1:8080"],
        ["resend", "msg_1", "--to", "https://hooks.invalid/in"],
    ],
)
def test_no_receiver_s_own_secret_signs_for_another_machine(command_line, monkeypatch, words):
    sent = []

    async def posts(url, delivery, **_):
        sent.append((url, delivery))
        raise DeliveryFailedError("no such machine")

    monkeypatch.setattr("sdk_trio.cli.trigger.post", posts)
    command_line.seed(("msg_1", DEAD, b'{"type":"order.paid"}'))
    monkeypatch.setenv("SDK__WEBHOOKS__SECRET", SECRET)
    answer = command_line("events", *words)
    assert (answer.status, "--secret-env" in answer.err) == (2, True), answer.err
    assert sent == []
    monkeypatch.setenv("OTHER", OTHER_SECRET)
    assert command_line("events", *words, "--secret-env", "OTHER").status == 69
    ((_, delivery),) = sent
    assert Webhook(OTHER_SECRET).verify(delivery.body, delivery.headers)


# -- how tail prints ---------------------------------------------------------------------------


RECORD = DeliveryRecord(
    *(1, "msg_1", "order.paid", DeliveryState.DONE, True, 1, 0.0, 0),
    *(None, False, None, None, None, None, None),
)


def _event(**values):
    usual = {"state": "dead", "type": "order.paid", "key": "msg_1", "last_error": "no\nmore"}
    return {**usual, **values}


def test_a_line_of_tail_fits_the_terminal_and_has_the_colour_of_its_state(monkeypatch, capsys):
    monkeypatch.setattr("sdk_trio.cli.events.is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    printer = TailPrinter(as_json=False)
    printer.show(_event(last_error="x" * 200), None)
    line = capsys.readouterr().out.rstrip("\n")
    assert "\x1b[1;31mdead\x1b[0m" in line
    plain = line.replace("\x1b[1;31m", "").replace("\x1b[0m", "")
    assert len(plain) == 80
    assert plain.endswith("x…")


def test_a_pipe_gets_whole_lines_of_tail_and_no_control_characters(capsys):
    printer = TailPrinter(as_json=False)
    printer.show(_event(key="msg_\x1b[2J", last_error="x" * 200), b'{"a": 1}')
    printer.show_rejected(
        {
            "status": 400,
            "cause": "no_match",
            "address": "192.0.2.1",
            "webhook_id": None,
            "type": "order.paid",
            "detail": None,
        }
    )
    first, *body, rejected = capsys.readouterr().out.splitlines()
    assert first.endswith("x" * 200)
    assert "\x1b" not in first
    assert [line.strip() for line in body] == ["{", '"a": 1', "}"]
    assert rejected.split("  ")[1:] == ["rejected", "400 no_match", "192.0.2.1", "order.paid"]


def test_tail_prints_a_body_once_for_people_and_always_as_json(capsys):
    for as_json, times in ((False, 1), (True, 2)):
        printer = TailPrinter(as_json=as_json)
        for state in ("retrying", "dead"):
            record = {**_event(state=state), "webhook_id": "msg_1"}
            printer.show(record, b'{"marker": 1}')
        assert capsys.readouterr().out.count("marker") == times


def test_tail_selects_events_by_its_options():
    record = attrs.evolve(RECORD, type="order.paid", state=DeliveryState.DEAD, tenant_id="t")
    assert TailFilter("order.*", "dead", "t").wants(record)
    assert TailFilter(None, None, None).wants(record)
    assert not TailFilter("refund.*", None, None).wants(record)
    assert not TailFilter(None, "done", None).wants(record)
    assert not TailFilter(None, None, "u").wants(record)
    assert (TailFilter("a.*", None, None).exact_type, TailFilter("a", None, None).exact_type) == (
        None,
        "a",
    )
