"""The simulator: signed samples to our own endpoint, only in Development."""

import json

import httpx
import pytest
import trio
from support.deliveries import SECRET
from support.serving import registry, serving, works

from sdk_trio.events import DEFAULT_CATALOG
from sdk_trio.records.deliveries import DeliveryState
from sdk_trio.testing import sample_types
from sdk_trio.webhooks import HandlerRegistry
from sdk_trio.webhooks.signature import sign


async def simulate(app, event_type, content=b"", method="POST"):
    url = app.url.replace("/hooks/sdk", f"/test/webhook/simulate/{event_type}")
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.request(method, url, content=content)


async def test_it_signs_posts_and_returns_the_answer():
    seen = []

    async def handler(event):
        seen.append(event)

    async with serving(registry(handler)) as app:
        answer = await simulate(app, "order.paid")
        simulated = answer.json()
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        assert list(simulated) == [
            "eventType",
            "webhookId",
            "timestamp",
            "signature",
            "targetUrl",
            "status",
            "body",
        ]
        assert (simulated["status"], simulated["body"]) == (200, "{}")
        assert (simulated["eventType"], simulated["targetUrl"]) == ("order.paid", app.url)
        [event] = seen
        assert event.webhook_id == simulated["webhookId"]
        expected = sign(SECRET, simulated["webhookId"], simulated["timestamp"], event.raw)
        assert simulated["signature"] == expected
        assert (await app.store.get(simulated["webhookId"])).state is DeliveryState.DONE


async def test_every_known_and_additional_type_can_be_simulated():
    handled, handlers = [], HandlerRegistry()

    async def handler(event):
        handled.append(event.type)

    for row in DEFAULT_CATALOG:
        handlers.register(row.event_class, handler)
    async with serving(handlers) as app:

        async def one(event_type):
            answer = await simulate(app, event_type)
            assert answer.json()["status"] == 200

        async with trio.open_nursery() as nursery:
            for row in DEFAULT_CATALOG:
                nursery.start_soon(one, row.wire_type)
        assert app.runtime.receiver.counters.values["drift"] == 0
    assert sorted(handled) == sorted(sample_types())


async def test_a_body_is_merged_into_the_data_of_the_sample():
    seen = []

    async def handler(event):
        seen.append(json.loads(event.raw)["data"])

    patch = {"id": "ord_7", "customer": {"email": "x@example.com"}, "currency": None, "new": [1]}
    async with serving(registry(handler)) as app:
        answer = await simulate(app, "order.paid", json.dumps(patch).encode())
        assert answer.json()["status"] == 200
    [data] = seen
    assert (data["id"], data["new"]) == ("ord_7", [1])
    assert data["customer"]["email"] == "x@example.com"
    assert data["customer"]["name"]
    assert "currency" not in data


async def test_the_receiver_s_answer_is_passed_on():
    async def handler(event):
        raise RuntimeError("broken")

    async with serving(registry(handler)) as app:
        simulated = (await simulate(app, "order.paid")).json()
    assert (simulated["status"], simulated["body"]) == (500, '{"error":"webhook handler failed"}')


@pytest.mark.parametrize(
    "content", [b"{", b"\xff", b"[" * 100_000, b"9" * 5000], ids=["cut", "bytes", "deep", "long"]
)
async def test_a_body_that_is_no_json_is_400(content):
    async with serving(registry(works)) as app:
        answer = await simulate(app, "order.paid", content)
        assert answer.status_code == 400
        assert answer.json()["error"]


@pytest.mark.parametrize("content", [b"[]", b'"x"', b"null", b"7"])
async def test_a_body_that_is_no_object_is_400_and_says_why(content):
    async with serving(registry(works)) as app:
        answer = await simulate(app, "order.paid", content)
        assert answer.status_code == 400
        assert "merged into data" in answer.json()["error"]


async def test_overrides_that_cannot_be_sent_are_no_server_error():
    """JSON that only Python reads: NaN, lone surrogates."""
    async with serving(registry(works)) as app:
        nested = [b'{"a":' * depth + b"1" + b"}" * depth for depth in range(900, 1000, 10)]
        for content in (b'{"amount": NaN}', b'{"id": "\\ud800"}', b'{"amount": 1e999}', *nested):
            assert (await simulate(app, "order.paid", content)).status_code < 500


@pytest.mark.parametrize("event_type", ["order.payed", "nonsense", "", "order.paid/x", "%00"])
async def test_an_unknown_type_is_404(event_type):
    async with serving(registry(works)) as app:
        answer = await simulate(app, event_type)
        assert answer.status_code == 404
        if event_type == "order.payed":
            assert "order.paid" in answer.json()["error"]


async def test_other_methods_are_405_and_too_large_a_body_413():
    async with serving(registry(works), Webhooks__MaxPayloadBytes=1024) as app:
        answer = await simulate(app, "order.paid", method="GET")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert (await simulate(app, "order.paid", b" " * 2000)).status_code == 413


@pytest.mark.parametrize("environment", ["Production", "Staging"])
async def test_outside_development_there_is_none(environment):
    async with serving(registry(works), Environment=environment) as app:
        answer = await simulate(app, "order.paid")
        assert (answer.status_code, answer.json()) == (404, {"error": "not found"})


async def test_it_signs_with_the_first_secret_and_the_derivation_of_the_settings():
    for derivation in ("Standard", "Utf8", "Auto"):
        async with serving(registry(works), Webhooks__KeyDerivation=derivation) as app:
            assert (await simulate(app, "order.paid")).json()["status"] == 200
