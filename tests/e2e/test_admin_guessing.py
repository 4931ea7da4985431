"""The admin address of a real process: guessed tokens, and the record of who did what."""

import json
import time

import httpx
import pytest
import trio
from support.daemon import Place
from support.deliveries import SECRET
from support.waiting import until

from sdk_trio.testing import sign_delivery

TOKEN = "a-token-of-these-tests-that-is-long-enough"  # a test value

#: More than may come at once without waiting.
GUESSES = 30


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path)
    place.environ["SDK_ADMIN_TOKEN"] = TOKEN
    return place


def bearer(token):
    return {"authorization": f"Bearer {token}"}


async def test_wrong_tokens_wait_are_counted_and_delay_no_other_request(place):
    with trio.fail_after(120), place.daemon() as daemon:
        url, statuses = f"{daemon.admin}/api/status", []

        async def guess(client):
            statuses.append((await client.get(url, headers=bearer("wrong"))).status_code)

        async with httpx.AsyncClient(timeout=None) as client:
            begun = time.monotonic()
            for _ in range(GUESSES):
                await guess(client)
            # Ten at once and then five a second: a lower bound, which no load can break.
            assert time.monotonic() - begun > (GUESSES - 10) / 5 - 0.5
            assert statuses == [401] * GUESSES
            # While sixteen requests wait, others are refused, and a request with the token does not
            # wait.
            async with trio.open_nursery() as nursery:
                for _ in range(60):
                    nursery.start_soon(guess, client)
                await until(lambda: statuses.count(429) >= 1)
                answered = len(statuses)
                right = await client.get(url, headers=bearer(TOKEN))
                assert right.status_code == 200
                assert len(statuses) < GUESSES + 60, answered
                nursery.cancel_scope.cancel()
            assert set(statuses) == {401, 429}
            await client.get(url)
            metrics = (await client.get(f"{daemon.admin}/metrics")).text
        counted = {
            line.partition(" ")[0]: float(line.rpartition(" ")[2])
            for line in metrics.splitlines()
            if line.startswith("sdk_admin_token_refusals_total")
        }
        assert counted['sdk_admin_token_refusals_total{reason="missing"}'] == 1
        assert counted['sdk_admin_token_refusals_total{reason="wrong"}'] >= GUESSES
        [refused] = daemon.logged("admin.refused")[:1]
        assert refused["address"] == "127.0.0.1"
        assert TOKEN not in daemon.log.read_text()


async def test_a_probe_is_no_way_to_try_tokens_out(place):
    """Off loopback its details need the token, so they would show whether it is right."""
    place.environ["SDK__ADMIN__BIND"] = "0.0.0.0:0"
    with trio.fail_after(120), place.daemon() as daemon:
        url = f"http://127.0.0.1:{daemon.admin.rpartition(':')[2]}/readyz"
        async with httpx.AsyncClient(timeout=None) as client:

            async def ask(path="", **headers):
                answer = await client.get(f"{url}{path}", headers=headers)
                return answer.status_code, "detail" in answer.text

            begun = time.monotonic()
            for _ in range(GUESSES):
                assert await ask(**bearer("wrong")) == (401, False)
            assert time.monotonic() - begun > (GUESSES - 10) / 5 - 0.5
            assert await ask() == (200, False)
            assert await ask(**bearer(TOKEN)) == (200, True)
            metrics = await client.get(url.replace("readyz", "metrics"), headers=bearer(TOKEN))
            line = f'sdk_admin_token_refusals_total{{reason="wrong"}} {GUESSES}\n'
            assert line in metrics.text


@pytest.mark.parametrize("actor", [None, "mia@example.com"])
def test_a_replay_records_its_actor_address_and_events(place, actor):
    with place.daemon() as daemon:
        sent = [sign_delivery("order.paid", secret=SECRET) for _ in range(2)]
        for delivery in sent:
            httpx.post(
                f"{daemon.receiver}/hooks/sdk", content=delivery.body, headers=delivery.headers
            )
        ids = [delivery.webhook_id for delivery in sent]
        order = {"ids": [*ids, "unknown"]} | ({} if actor is None else {"actor": actor})
        answer = httpx.post(f"{daemon.admin}/api/events/replay", json=order, headers=bearer(TOKEN))
        assert answer.json()["replayed"] == 2
        record = daemon.wait_for("admin.replayed")
        assert record["actor"] == (actor or "admin token")
        assert record["address"] == "127.0.0.1"
        assert sorted(record["webhook_ids"]) == sorted(ids)
        for wrong in ("", 7, "x" * 101):
            refused = httpx.post(
                f"{daemon.admin}/api/events/replay",
                content=json.dumps({"ids": ids, "actor": wrong}),
                headers={**bearer(TOKEN), "content-type": "application/json"},
            )
            assert refused.status_code == 400


def test_a_forwarding_contradiction_is_logged_once_and_counts_as_not_secure(place):
    place.environ["SDK__WEBHOOKS__REQUIREHTTPS"] = "true"
    place.environ["SDK__SERVER__TRUSTEDPROXIES__0"] = "127.0.0.1"

    def statuses(daemon, **headers):
        delivery = sign_delivery("order.paid", secret=SECRET)
        sent = {**delivery.headers, **{n.replace("_", "-"): v for n, v in headers.items()}}
        url = f"{daemon.receiver}/hooks/sdk"
        return httpx.post(url, content=delivery.body, headers=sent).status_code

    spoofed = {"x_forwarded_proto": "https", "forwarded": "for=192.0.2.1;proto=https"}
    only_the_address = {"x_forwarded_for": "198.51.100.1", "forwarded": "proto=https"}
    with place.daemon() as daemon:
        assert statuses(daemon, x_forwarded_proto="https") == 200
        assert statuses(daemon, forwarded="for=192.0.2.1;proto=https") == 200
        assert [statuses(daemon, **spoofed), statuses(daemon, **only_the_address)] == [400, 400]
        [warning] = daemon.logged("webhook.forwarding_contradiction")
        assert "Sdk:Server:ForwardedHeaders" in warning["hint"]
    place.environ["SDK__SERVER__FORWARDEDHEADERS"] = "XForwarded"
    with place.daemon() as daemon:
        assert statuses(daemon, forwarded="for=192.0.2.1;proto=https") == 400
        assert [statuses(daemon, **spoofed), statuses(daemon, **only_the_address)] == [200, 400]
