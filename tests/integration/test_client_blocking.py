"""The synchronous client: the same answers and errors as the asynchronous one, from any thread."""

import asyncio
import contextvars
import gc
import inspect
import json
import operator
import os
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import httpx
import pytest
import trio
from support.threaded_upstream import ORDERS, threaded_upstream
from support.waiting import PATIENCE_SECONDS, wait_until

from sdk_trio import (
    CallError,
    CircuitOpenError,
    Client,
    ConnectionFailedError,
    NotFoundError,
    OutcomeUnknownError,
    ServerError,
    Settings,
    SyncClient,
)
from sdk_trio.client.operations import OPERATIONS


@pytest.fixture
def upstream():
    with threaded_upstream() as upstream:
        yield upstream


def settings_of(upstream, **more):
    return Settings.from_mapping({**upstream.settings, **more}, receiver=False)


@pytest.fixture
def client(upstream):
    with SyncClient(settings_of(upstream, MaxRetries=0)) as client:
        yield client


# --- answers -------------------------------------------------------------------------------------


def test_a_record_with_what_the_table_does_not_know(client):
    order = client.orders.get("ord_1")
    assert (order.id, order.status, order["new"]) == ("ord_1", "brand_new", 1)
    assert order.total_amount is None
    assert "total_amount" not in order
    assert client.products.delete("prod_1") is None
    assert client.orders.get.raw("ord_2").json()["id"] == "ord_2"


def test_a_result_comes_with_its_answer(client):
    order = client.orders.get.with_response("ord_1")
    assert (order.result.id, order.response.status_code) == ("ord_1", 200)
    page = client.orders.list.with_response()
    assert page.result.items[0].id == page.response.json()["items"][0]["id"]


def test_a_list_is_read_page_by_page(client, upstream):
    listing = client.orders.list(limit=3, status="paid")
    assert [order.id for order in listing] == [order["id"] for order in ORDERS]
    assert [len(page.items) for page in listing.pages()] == [3, 3, 1]
    assert listing.first_page().total_count == len(ORDERS)
    assert len(upstream.requests) == 3 + 3 + 1
    for order in listing:
        assert order.id == "ord_0"
        break
    assert len(upstream.requests) == 3 + 3 + 1 + 1, "a loop that ends early asks no further"


def test_an_export_is_read_row_by_row_and_whole(client):
    with client.orders.export() as rows:
        assert list(rows) == [{"id": f"ord_{n}", "amount": str(n)} for n in (1, 2, 3)]
        assert rows.response.status_code == 200
    with client.orders.export() as rows:
        assert next(rows)["id"] == "ord_1"
    assert client.orders.export().text().splitlines()[0] == "id,amount"
    export = client.orders.export()
    with export, pytest.raises(RuntimeError, match="open already"):
        export.__enter__()
    assert client.orders.get("ord_1").id == "ord_1", "the connection of a half-read export is gone"


def test_an_error_inside_an_export_is_the_programs_own(client):
    with pytest.raises(ZeroDivisionError), client.orders.export() as rows:
        assert len(next(rows)) / 0


def test_requests_streams_and_options(client, upstream):
    assert client.request("GET", "/orders/ord_1", params={"a": [1, 2]}).json()["new"] == 1
    assert upstream.requests[-1] == ("GET", "/v1/orders/ord_1", {"a": ["1", "2"]})
    view = client.with_options(accepts_any_status=True)
    assert view.request("GET", "/status/418").status_code == 418
    assert view.orders.get.raw("other").status_code == 404
    with client.stream("GET", "/orders/export") as answer:
        assert (answer.status_code, answer.headers["Content-Type"]) == (200, "text/csv")
        assert b"".join(answer.iter_bytes()).startswith(b"id,amount")
    with client.stream("GET", "/orders/export") as answer:
        assert b"ord_3" in answer.read()
    assert client.counters.attempts.total() >= 5
    assert "not-a-real-token" not in repr(client.plan) + repr(client)


# --- errors --------------------------------------------------------------------------------------


def described(error):
    fields = ("status", "body", "method", "path", "attempts", "request_id")
    return type(error), str(error), [getattr(error, name, None) for name in fields]


def test_an_open_circuit_is_visible_to_any_thread(client):
    for _ in range(5):
        with pytest.raises(ServerError):
            client.request("GET", "/status/500")
    assert client.breaker.state == "open"


@pytest.mark.parametrize("status", [401, 403, 404, 409, 422, 429, 500, 503])
def test_errors_are_those_of_the_asynchronous_client(client, upstream, status):
    async def ask():
        async with Client(settings_of(upstream, MaxRetries=0)) as other:
            await other.request("GET", f"/status/{status}")

    with pytest.raises(CallError) as theirs:
        trio.run(ask)
    with pytest.raises(CallError) as ours:
        client.request("GET", f"/status/{status}")
    assert described(ours.value) == described(theirs.value)


def test_a_failure_shows_no_body_and_no_token_in_its_variables(client):
    secret = "ada@shop.example-is-personal"
    calls = (
        lambda: client.orders.create(description=secret, product_id="p", customer_id="c"),
        lambda: client.orders.create.raw(description=secret, product_id="p", customer_id="c"),
        lambda: client.request("POST", "/status/500", json={"email": secret}),
    )
    for call in calls:
        with pytest.raises(CallError) as caught:
            call()
        # From the first frame of the package in the caller's thread to where the thread waited.
        frames = traceback.walk_tb(caught.value.__traceback__)
        variables = [
            frame.f_locals
            for frame, _ in frames
            if re.search("/client/(blocking|portal|resources)", frame.f_code.co_filename)
        ]
        assert len(variables) >= 2
        assert secret not in repr(variables)


def test_no_server_listens(upstream):
    settings = settings_of(upstream, MaxRetries=0, CustomBaseUrl="http://127.0.0.1:1")
    with SyncClient(settings) as client, pytest.raises(ConnectionFailedError):
        client.orders.get("1")


def test_a_misspelt_argument_is_refused_before_anything_is_sent(client, upstream):
    with pytest.raises(TypeError, match=r"has no argument 'stauts'; did you mean 'status'\?"):
        client.orders.list(stauts="paid")
    assert upstream.requests == []
    assert list(client.orders.list.unchecked(stauts="paid", limit=10)) != []
    assert upstream.requests[0][2]["stauts"] == ["paid"]


# --- threads and loops ---------------------------------------------------------------------------


def test_many_threads_share_one_client(client):
    def ask(number):
        order = client.orders.get(f"ord_{number}")
        with pytest.raises(NotFoundError):
            client.orders.get(f"none_{number}")
        return order.id, [other.id for other in client.orders.list(limit=4)]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(40)))
    assert answers == [(f"ord_{n}", [order["id"] for order in ORDERS]) for n in range(40)]


def test_it_works_under_a_running_loop_by_blocking_it(client):
    async def in_a_loop():
        return client.orders.get("ord_1").id

    assert asyncio.run(in_a_loop()) == "ord_1"
    assert trio.run(in_a_loop) == "ord_1"


def test_the_context_of_the_caller_holds_in_the_call(client):
    name = contextvars.ContextVar("name", default="unknown")
    seen = []
    client.on_attempt(lambda record: seen.append((name.get(), threading.current_thread().name)))
    name.set("ada")
    client.orders.get("ord_1")
    assert seen == [("ada", "sdk-trio-client")]


def test_a_hook_that_calls_the_client_gets_an_error_instead_of_a_deadlock(client):
    seen = []

    @client.on_attempt
    def hook(record):
        with pytest.raises(RuntimeError, match="the client's own thread") as caught:
            client.orders.get("ord_2")
        seen.append(str(caught.value))

    client.orders.get("ord_1")
    assert len(seen) == 1


# --- its life ------------------------------------------------------------------------------------


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "sdk-trio-client"]


def wait_for_threads():
    """Wait until the threads of unreferenced clients have ended.

    The last one who refers to a client may be its own thread, at the end of a call.
    """

    def ended():
        gc.collect()
        return not threads()

    wait_until(ended, threads)


def test_it_opens_with_its_first_call_and_is_closed_for_good(upstream):
    wait_for_threads()
    client = SyncClient(settings_of(upstream))
    assert threads() == []
    assert client.orders.get("ord_1").id == "ord_1"
    assert len(threads()) == 1
    client.close()
    client.close()
    assert threads() == []
    for call in (client.orders.get, client.orders.get.raw, client.orders.get.unchecked):
        with pytest.raises(RuntimeError, match="the client is closed"):
            call("ord_1")


def test_calls_in_progress_fail_when_the_client_closes(upstream):
    client = SyncClient(settings_of(upstream))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.request, "GET", "/silent")
        assert upstream.silent.acquire(timeout=PATIENCE_SECONDS)
        client.close()
        error = asked.exception(timeout=PATIENCE_SECONDS)
    assert isinstance(error, ConnectionFailedError)
    assert "the client was closed" in str(error)
    assert upstream.gone.wait(PATIENCE_SECONDS)


class Hanging(httpx.AsyncBaseTransport):
    """Never answers, like a foreign connection that closing the client does not end."""

    def __init__(self):
        self.asked = threading.Semaphore(0)

    async def handle_async_request(self, request):
        self.asked.release()
        await trio.sleep_forever()


@pytest.mark.parametrize(
    ("method", "expected"), [("GET", ConnectionFailedError), ("POST", OutcomeUnknownError)]
)
def test_closing_waits_for_no_answer_and_for_no_retry(upstream, method, expected):
    transport = Hanging()
    client = SyncClient(settings_of(upstream), transport)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.request, method, "/orders/", total_timeout=None)
        assert transport.asked.acquire(timeout=PATIENCE_SECONDS)
        client.close()
        error = asked.exception(timeout=PATIENCE_SECONDS)
    assert type(error) is expected
    assert "the client was closed" in f"{error} {error.__cause__}"


def test_many_calls_that_a_closing_client_meets_end_as_calls_of_a_closed_client(upstream):
    ended = Counter()

    def call_on(client):
        try:
            while True:
                client.orders.get("ord_1")
        except ConnectionFailedError:
            ended["under way"] += 1
        except RuntimeError as error:
            ended[str(error)] += 1

    for _ in range(5):
        client = SyncClient(settings_of(upstream))
        client.orders.get("ord_1")
        with ThreadPoolExecutor(8) as pool:
            for _ in range(8):
                pool.submit(call_on, client)
            client.close()
    assert sum(ended.values()) == 40
    assert set(ended) <= {"under way", "the client is closed: create a new one"}


def test_a_body_being_read_ends_with_the_client_and_leaving_it_is_no_error(upstream):
    wait_for_threads()
    client = SyncClient(settings_of(upstream))
    with client.stream("GET", "/orders/export") as answer:
        parts = answer.iter_bytes()
        next(parts)
        client.close()
        with pytest.raises(ConnectionFailedError, match="GET /orders/export"):
            list(parts)
    assert threads() == []


def test_an_unreferenced_client_ends_its_thread(upstream):
    orders = [order.id for order in SyncClient(settings_of(upstream)).orders.list(limit=2)]
    assert len(orders) == len(ORDERS), "a list keeps its client alive"
    wait_for_threads()


def test_a_client_that_cannot_open_gives_the_reason_and_may_be_retried(upstream):
    class Broken(trio.abc.AsyncResource):
        async def __aenter__(self):
            raise OSError("no such luck")

        async def aclose(self): ...

    client = SyncClient(settings_of(upstream), Broken())
    for _ in range(2):
        with pytest.raises(OSError, match="no such luck"):
            client.orders.get("ord_1")


PROGRAM = """
import os, signal, sys, json, warnings
import sdk_trio

warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads: the test's very point

settings = sdk_trio.Settings.from_mapping(json.loads(sys.argv[1]), receiver=False)
client = sdk_trio.SyncClient(settings)
"""

INTERRUPTED = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent may have it ignored
try:
    client.request("POST", "/silent", json={})
except KeyboardInterrupt:
    print("interrupted", client.orders.get("ord_1").id)
"""

FORKED = """
client.orders.get("ord_1")
child = os.fork()
if child == 0:
    try:
        client.orders.get("ord_1")
    except RuntimeError as error:
        print(error, flush=True)
        os._exit(3)
    os._exit(4)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), client.orders.get("ord_2").id)
"""

FORKED_MEANWHILE = """
import threading
opening, forked = threading.Event(), threading.Event()

class Slow(sdk_trio.Transport):
    async def __aenter__(self):
        opening.set()
        forked.wait()
        return await super().__aenter__()

client = sdk_trio.SyncClient(settings, Slow(settings.connection))
thread = threading.Thread(target=client.orders.get, args=["ord_1"])
thread.start()
opening.wait()
child = os.fork()
if child == 0:
    signal.alarm(30)  # a child that waits for a thread of its parent would hang
    try:
        client.orders.get("ord_1")
    except RuntimeError as error:
        print(error, flush=True)
        client.close()
        os._exit(3)
forked.set()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), client.orders.get("ord_2").id)
"""

INTERRUPTED_WHILE_OPENING = """
import threading
signal.signal(signal.SIGINT, signal.default_int_handler)
interrupted = threading.Event()

class Slow(sdk_trio.Transport):
    async def __aenter__(self):
        os.kill(os.getpid(), signal.SIGINT)
        interrupted.wait()
        return await super().__aenter__()

client = sdk_trio.SyncClient(settings, Slow(settings.connection))
try:
    client.orders.get("ord_1")
except KeyboardInterrupt:
    interrupted.set()
    print("interrupted", client.orders.get("ord_1").id)
client.close()
print(threading.active_count())
"""

INTERRUPTED_OFTEN = """
import random
from sdk_trio.client import portal
portal.INTERRUPT_SECONDS = 3600  # a wait for a call that has ended would last that long
# An interrupt may come between the making of a coroutine and its hand-over.
warnings.simplefilter("ignore", RuntimeWarning)
in_call, interrupts = False, 0

def interrupt(*_):
    global in_call
    if in_call:
        in_call = False
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
client.orders.get("ord_1")
while interrupts < 300:
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.004))
    try:
        in_call = True
        client.orders.get("ord_1")
        in_call = False
    except KeyboardInterrupt:
        interrupts += 1
signal.setitimer(signal.ITIMER_REAL, 0)
print("interrupted", client.orders.get("ord_1").id)
"""

FORKED_BEFORE = """
child = os.fork()
found = client.orders.get("ord_1").id
if child == 0:
    os._exit(0 if found == "ord_1" else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), found)
"""

LEFT_OPEN = """
print(client.orders.get("ord_1").id)
"""


def start(upstream, program):
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM + program, json.dumps(upstream.settings)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SDK__LOG__LEVEL": "ERROR"},
    )


def test_an_interrupt_cancels_the_call_and_the_client_goes_on(upstream):
    process = start(upstream, INTERRUPTED)
    assert upstream.silent.acquire(timeout=PATIENCE_SECONDS)
    process.send_signal(signal.SIGINT)
    assert upstream.gone.wait(PATIENCE_SECONDS), "the connection was not closed"
    out, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert (out, process.returncode) == ("interrupted ord_1\n", 0), errors


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (FORKED, "do not exist in process"),
        (FORKED_BEFORE, "0 ord_1\n"),
        (FORKED_MEANWHILE, "3 ord_2\n"),
        (INTERRUPTED_WHILE_OPENING, "interrupted ord_1\n1\n"),
        (INTERRUPTED_OFTEN, "interrupted ord_1\n"),
        (LEFT_OPEN, "ord_1\n"),
    ],
)
def test_forks_and_ends_of_a_program(upstream, program, expected):
    process = start(upstream, program)
    out, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, errors
    assert expected in out
    assert "Traceback" not in errors
    if program is FORKED:
        assert out.endswith("3 ord_2\n"), out


def test_the_program_of_the_how_to_runs(upstream, tmp_path):
    page = (Path(__file__).parents[2] / "docs/how-to/call-the-upstream.md").read_text()
    [program] = [
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Sync" in block
    ]
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, **{f"SDK__{k.upper()}": v for k, v in upstream.settings.items()}},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert ended.stdout.splitlines() == [*(f"ord_{n} paid" for n in range(7)), "3"], ended.stderr


# --- the same table ------------------------------------------------------------------------------


def test_help_shows_the_arguments_of_a_request(client):
    for name in ("request", "stream"):
        ours, theirs = getattr(SyncClient, name), getattr(Client, name)
        assert list(inspect.signature(ours).parameters) == [*inspect.signature(theirs).parameters]
    assert list(inspect.signature(client.request).parameters)[:2] == ["method", "path"]


def test_every_operation_is_there_with_the_same_signature(upstream):
    wait_for_threads()
    client = SyncClient(settings_of(upstream))
    other = Client(settings_of(upstream))
    for row in OPERATIONS.values():
        find = operator.attrgetter(row.full_name)
        ours, theirs = find(client), find(other)
        assert inspect.signature(ours) == inspect.signature(theirs)
        assert ours.__doc__ == theirs.__doc__
    assert threads() == []


def test_a_server_error_is_retried_as_the_settings_say(upstream):
    with SyncClient(settings_of(upstream)) as client, pytest.raises(ServerError) as caught:
        client.with_options(max_retries=1).request("GET", "/status/503")
    assert caught.value.attempts == 2


def test_attributes_are_shared_with_views(client):
    view = client.with_options(max_retries=2)
    assert view.counters is client.counters
    view.breaker.isolate()
    with pytest.raises(CircuitOpenError):
        client.orders.get("ord_1")
    assert client.breaker.state == "isolated"
    client.breaker.close()
    assert client.orders.get("ord_1").id == "ord_1"
    assert view.retry_budget > 0
    assert attrs.asdict(view.plan) == attrs.asdict(client.plan)
