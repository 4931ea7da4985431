"""Events posted to real applications: bytes, headers, addresses, and connections that end badly."""

import json
import os
import socket

import pytest
import standardwebhooks
import trio
from support.notifications import fake_provider, http_answer, read_request, reset
from support.waiting import until

from sdk_trio.errors import OptionsValidationError
from sdk_trio.events import OrderPaidEvent
from sdk_trio.records.deliveries import DeliveryState
from sdk_trio.testing import running_app, settings_for_tests
from sdk_trio.webhooks import HandlerRegistry

SECRET = "whsec_TJ7sAxr3kVsS6yQd0Zf0fG3bA9UOe5Vh"  # a test value
OTHER = "whsec_nC3T0sW9ZbSxkU1QhQ7m0m2kZV2n8T0w"  # a test value
QUICK = {"Webhooks:Queue:RetryBaseSeconds": 0.01, "Webhooks:Queue:RetryCapSeconds": 0.05}


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("SDK_FORWARD_SECRET", SECRET)


def gateway(url="", handlers=None, **keys):
    overrides = {"Forward:Url": url, **QUICK, **keys}
    return running_app(handlers, settings_for_tests(overrides))


def route(url, **options):
    return {"Url": url, **options}


async def ended(app, delivered):
    """Wait until an event is done or dead, and return its record."""

    async def look():
        record = await app.store.get(delivered.webhook_id)
        return record if record.state in (DeliveryState.DONE, DeliveryState.DEAD) else None

    return await until(look)


async def failed(app, delivered):
    """Wait until an event has an error, and return its record."""

    async def look():
        record = await app.store.get(delivered.webhook_id)
        return record if record.last_error else None

    return await until(look)


async def test_the_application_gets_the_exact_bytes_and_a_library_of_the_scheme_accepts_them():
    body = b'{ "type": "order.paid",\n "data": {"id": "\\u00e9", "n": 1e2, "big": 12345678901234}}'
    async with fake_provider(http_answer(200)) as target, gateway(f"{target.url}/in?a=1") as app:
        delivered = await app.deliver(body, webhook_id="msg_1")
    assert (delivered.status, delivered.state) == (200, DeliveryState.DONE)
    (request,) = target.requests
    assert (request.target, request.body) == ("/in?a=1", body)
    assert standardwebhooks.Webhook(SECRET).verify(request.body, request.headers)
    assert request.headers["webhook-id"] == "msg_1"
    assert request.headers["sdk-attempt"] == "1"
    assert request.headers["content-type"] == "application/json"
    # The sender's own signature is no use to it.
    with pytest.raises(standardwebhooks.WebhookVerificationError):
        standardwebhooks.Webhook(OTHER).verify(request.body, request.headers)


async def test_an_unknown_type_is_forwarded(monkeypatch):
    async with fake_provider(http_answer(204)) as target, gateway(target.url) as app:
        delivered = await app.deliver(b'{"type": "x.y", "data": {"id": 5}}')
    assert delivered.state is DeliveryState.DONE
    assert len(target.requests) == 1


async def test_while_the_local_secret_is_rotated_both_sign(monkeypatch):
    monkeypatch.setenv("SDK_FORWARD_SECRET", f"{SECRET} {OTHER}")
    async with fake_provider(http_answer(200)) as target, gateway(target.url) as app:
        await app.deliver("order.paid")
    (request,) = target.requests
    for secret in (SECRET, OTHER):
        assert standardwebhooks.Webhook(secret).verify(request.body, request.headers)


async def test_added_headers_are_sent_and_replace_none_of_ours():
    headers = ["Authorization: Bearer local", "X-Team: a, b"]
    async with fake_provider(http_answer(200)) as target:
        routes = [route(target.url, Headers=headers)]
        async with gateway(**{"Forward:Routes": routes}) as app:
            await app.deliver("order.paid")
    (request,) = target.requests
    assert request.headers["authorization"] == "Bearer local"
    assert request.headers["x-team"] == "a, b"


async def test_one_takes_an_event_handler_then_routes_then_url_then_fallback():
    handled = []
    handlers = HandlerRegistry()

    async def note(event):
        handled.append(event.type)

    handlers.register(OrderPaidEvent, note)
    handlers.fallback(note)
    async with fake_provider(http_answer(200)) as first, fake_provider(http_answer(200)) as second:
        routes = [
            route(first.url, Types=["order.*"], Where=["/data/status=open"]),
            route(second.url, Types=["order.*", "x.*"]),
        ]
        async with gateway(handlers=handlers, **{"Forward:Routes": routes}) as app:
            await app.deliver("order.paid", {"status": "open"})
            await app.deliver(b'{"type": "order.new", "data": {"id": "a", "status": "open"}}')
            await app.deliver(b'{"type": "order.new", "data": {"id": "b", "status": "shut"}}')
            await app.deliver("refund.created")
    assert handled == ["order.paid", "refund.created"]
    assert [json.loads(one.body)["data"]["id"] for one in first.requests] == ["a"]
    assert [json.loads(one.body)["data"]["id"] for one in second.requests] == ["b"]


async def test_a_connection_that_ends_before_the_answer_leads_to_another_attempt():
    tries = []

    async def behave(target, stream):
        target.requests.append(await read_request(stream))
        tries.append(len(tries))
        if len(tries) == 1:
            await stream.send_all(b"HTTP/1.1 20")
        elif len(tries) == 2:
            await reset(stream)
        else:
            await stream.send_all(http_answer(200))

    async with fake_provider(behave=behave) as target, gateway(target.url) as app:
        delivered = await app.deliver("order.paid")
        record = await ended(app, delivered)
        attempts = await app.store.attempts(delivered.webhook_id)
    assert record.state is DeliveryState.DONE
    assert [bool(attempt.error) for attempt in attempts] == [True, True, False]
    assert attempts[0].error.startswith("gave no complete answer")
    assert {one.headers["webhook-id"] for one in target.requests} == {delivered.webhook_id}
    assert [one.headers["sdk-attempt"] for one in target.requests] == ["1", "2", "3"]


async def test_a_success_counts_although_its_body_never_ends():
    async def behave(target, stream):
        target.requests.append(await read_request(stream))
        await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")

    async with fake_provider(behave=behave) as target, gateway(target.url) as app:
        delivered = await app.deliver("order.paid")
        (attempt,) = await app.store.attempts(delivered.webhook_id)
    assert delivered.state is DeliveryState.DONE
    assert attempt.place == "answered 200: half"
    assert len(target.requests) == 1


async def test_an_application_that_does_not_answer_in_time_is_asked_again():
    asked = 0

    async def behave(target, stream):
        nonlocal asked
        asked += 1
        await read_request(stream)
        if asked == 1:
            await trio.sleep_forever()
        await stream.send_all(http_answer(200))

    async with fake_provider(behave=behave) as target:
        routes = [route(target.url, TimeoutSeconds=0.3)]
        async with gateway(**{"Forward:Routes": routes}) as app:
            delivered = await app.deliver("order.paid")
            record = await ended(app, delivered)
            attempts = await app.store.attempts(delivered.webhook_id)
    assert record.state is DeliveryState.DONE
    assert "no complete answer within 0.3 s" in attempts[0].error


async def test_redirects_are_not_followed():
    async with fake_provider(http_answer(200)) as elsewhere:
        moved = http_answer(307, location=f"{elsewhere.url}/")
        async with fake_provider(moved) as target, gateway(target.url) as app:
            record = await ended(app, await app.deliver("order.paid"))
    assert record.state is DeliveryState.DEAD
    assert "redirect" in record.last_error
    assert elsewhere.requests == []


async def test_a_unix_socket_is_an_address(tmp_path):
    path = str(tmp_path / "app.sock")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
        sock.listen()
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
        seen = []

        async def handle(stream):
            seen.append(await read_request(stream))
            await stream.send_all(http_answer(200))
            await stream.aclose()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, handle, [listener])
            async with gateway(f"unix:{path}:/hooks") as app:
                delivered = await app.deliver("order.paid")
            nursery.cancel_scope.cancel()
    assert delivered.state is DeliveryState.DONE
    assert seen[0].target == "/hooks"


@pytest.mark.parametrize("address", ["93.184.216.34", "169.254.169.254"])
async def test_a_name_without_internal_addresses_is_not_connected_to(monkeypatch, address):
    asked = []

    async def resolves(host, *rest, **options):
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80))]

    monkeypatch.setattr(trio.socket, "getaddrinfo", resolves)
    async with gateway("http://app.internal/") as app:
        delivered = await app.deliver("order.paid", settle=False)
        record = await failed(app, delivered)
    assert "app.internal" in asked
    assert "this machine or a private network" in record.last_error
    assert "AllowPublicAddresses" in record.last_error
    assert record.attempts == 0


async def test_tls_is_verified(tmp_path):
    # No certificate: a server that answers plain HTTP to a TLS client is not the intended one.
    async with fake_provider(http_answer(200)) as target:
        routes = [route(target.url.replace("http:", "https:"), TimeoutSeconds=0.5)]
        async with gateway(**{"Forward:Routes": routes}) as app:
            delivered = await app.deliver("order.paid", settle=False)
            record = await failed(app, delivered)
    assert record.attempts == 0
    assert target.requests == []


async def test_without_a_listener_the_event_waits_and_is_sent_once_there_is_one():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        async with gateway(f"http://127.0.0.1:{port}/") as app:
            delivered = await app.deliver("order.paid", settle=False)
            record = await failed(app, delivered)
            assert "cannot be reached" in record.last_error
            held.listen()
            accepted, _ = await trio.to_thread.run_sync(held.accept)
            with accepted:
                stream = trio.SocketStream(trio.socket.from_stdlib_socket(accepted))
                assert await read_request(stream)
                await stream.send_all(http_answer(200))
            await app.settle()
            record = await app.store.get(delivered.webhook_id)
    assert (record.state, record.attempts) == (DeliveryState.DONE, 1)


async def test_without_a_secret_an_embedded_runtime_does_not_start(monkeypatch):
    monkeypatch.delenv("SDK_FORWARD_SECRET")
    with pytest.RaisesGroup(
        pytest.RaisesExc(OptionsValidationError, match="SDK_FORWARD_SECRET"),
        allow_unwrapped=True,
        flatten_subgroups=True,
    ):
        async with gateway("http://127.0.0.1:1/"):
            pass
    assert "SDK_FORWARD_SECRET" not in os.environ


async def test_no_body_of_an_answer_and_no_secret_is_logged(capfd):
    words = b"planted in an answer"
    async with fake_provider(http_answer(500, words)) as target:
        keys = {"Webhooks:Queue:MaxAttempts": 2, "Logging:Level": "Debug"}
        async with gateway(target.url, **keys) as app:
            delivered = await app.deliver("order.paid")
            await ended(app, delivered)
            attempts = await app.store.attempts(delivered.webhook_id)
    assert [attempt.place for attempt in attempts] == [f"answered 500: {words.decode()}"] * 2
    reported = "".join(capfd.readouterr())
    assert "planted" not in reported
    assert SECRET not in reported
