"""The receiver behind real nginx and Caddy, which run the examples that are shipped.

``127.0.0.0/8`` is this machine, so senders with different addresses are had on loopback.
"""

import pytest
import trio
from support.proxies import running
from support.serving import delivery_request, exchange, registry, serving, signed
from support.upstreams import Upstream
from support.upstreams import serving as serving_upstream

ALLOWED, STRANGER = "127.0.0.2", "127.0.0.3"

PROXIES = pytest.mark.parametrize("kind", ["nginx", "caddy"])


async def _nothing(event):
    """A handler."""


def behind(**keys):
    """A receiver that trusts a proxy on this machine and wants HTTPS."""
    defaults = {"Webhooks__RequireHttps": True, "Server__TrustedProxies": ["127.0.0.1"]}
    return serving(registry(_nothing), **(defaults | keys))


def address_of(app):
    return app.url.removeprefix("http://").partition("/")[0]


@PROXIES
async def test_the_senders_address_and_scheme_are_known_and_cannot_be_forged(kind, tmp_path):
    async with (
        behind(Webhooks__AllowedSourceIpRanges=[ALLOWED]) as app,
        running(kind, tmp_path, address_of(app)) as proxy,
    ):
        accepted = await proxy.post(signed(), source=ALLOWED)
        assert (accepted.status_code, accepted.json()) == (200, {})
        assert (await proxy.post(signed(), source=STRANGER)).status_code == 403
        forgeries = [
            {"X-Forwarded-For": ALLOWED},
            {"X-Forwarded-For": f"{ALLOWED}, 127.0.0.1"},
            {"Forwarded": f"for={ALLOWED};proto=https"},
            {"Forwarded": f"for={ALLOWED}", "X-Forwarded-For": ALLOWED},
            {"X-Forwarded-Proto": "https", "X-Real-IP": ALLOWED},
        ]
        for headers in forgeries:
            assert (await proxy.post(signed(), headers, source=STRANGER)).status_code == 403
        # A sender's own forwarding headers do not keep it out either.
        for headers in ({"X-Forwarded-Proto": "http"}, {"Forwarded": "for=x;;;"}, *forgeries):
            assert (await proxy.post(signed(), headers, source=ALLOWED)).status_code == 200


@PROXIES
async def test_rates_are_counted_for_each_sender(kind, tmp_path):
    async with (
        behind(Webhooks__RateLimitPerMinute=1) as app,
        running(kind, tmp_path, address_of(app)) as proxy,
    ):
        statuses = [
            (await proxy.post(signed(), source=source)).status_code
            for source in (ALLOWED, STRANGER, ALLOWED)
        ]
        assert statuses == [200, 200, 429]
        forged = await proxy.post(signed(), {"X-Forwarded-For": "127.0.0.9"}, source=STRANGER)
        assert forged.status_code == 429
        assert int(forged.headers["retry-after"]) > 0


@PROXIES
async def test_forwarding_headers_of_a_client_that_is_no_proxy_are_ignored(kind, tmp_path):
    # The proxy has the same address as every client on this machine, so the stranger needs another
    # address.
    async with (
        behind(Server__TrustedProxies=["127.0.0.1"], Server__Bind=["0.0.0.0:0"]) as app,
        running(kind, tmp_path, address_of(app)) as proxy,
    ):
        assert (await proxy.post(signed())).status_code == 200
        port = int(address_of(app).rpartition(":")[2])
        for header in (("X-Forwarded-Proto", "https"), ("Forwarded", "proto=https")):
            stream = await trio.open_tcp_stream("127.0.0.1", port, local_address=STRANGER)
            async with stream:
                await stream.send_all(delivery_request(signed(), header))
                assert (await stream.receive_some(100)).startswith(b"HTTP/1.1 400 ")


@PROXIES
async def test_without_trust_every_delivery_is_400(kind, tmp_path):
    async with (
        behind(Server__TrustedProxies=[]) as app,
        running(kind, tmp_path, address_of(app)) as proxy,
    ):
        assert (await proxy.post(signed())).status_code == 400


@PROXIES
async def test_ipv6_on_both_sides(kind, tmp_path):
    keys = {
        "Server__Bind": ["[::1]:0"],
        "Server__TrustedProxies": ["::1"],
        "Webhooks__AllowedSourceIpRanges": ["::1/128"],
    }
    async with behind(**keys) as app, running(kind, tmp_path, address_of(app)) as proxy:
        assert (await proxy.post(signed(), source="::1")).status_code == 200
        assert (await proxy.post(signed(), source=ALLOWED)).status_code == 403
        forged = {"X-Forwarded-For": "::1", "Forwarded": 'for="[::1]"'}
        assert (await proxy.post(signed(), forged, source=ALLOWED)).status_code == 403


@PROXIES
async def test_a_unix_socket_behind_the_proxy(kind, tmp_path):
    path = tmp_path / "receiver.sock"
    keys = {
        "Server__Bind": [f"unix:{path}"],
        "Server__TrustedProxies": ["unix"],
        "Webhooks__AllowedSourceIpRanges": [ALLOWED],
    }
    async with behind(**keys), running(kind, tmp_path, f"unix:{path}") as proxy:
        assert (await proxy.post(signed(), source=ALLOWED)).status_code == 200
        forged = {"X-Forwarded-For": ALLOWED}
        assert (await proxy.post(signed(), forged, source=STRANGER)).status_code == 403


@PROXIES
async def test_bodies_arrive_as_they_were_signed_or_are_refused(kind, tmp_path):
    async with behind() as app, running(kind, tmp_path, address_of(app)) as proxy:
        large = signed("order.paid", {"filler": "é" * 400_000})
        assert 800_000 < len(large.body) < 2**20

        async def pieces():
            for start in range(0, len(large.body), 50_000):
                yield large.body[start : start + 50_000]

        assert (await proxy.post(large, content=pieces())).status_code == 200
        over = signed("order.paid", {"filler": "x" * 1_100_000})
        answer = await proxy.exchange(delivery_request(over))
        # Caddy closes before it has read the body, so its answer can be lost on the way; and it may
        # notice the end of our connection, to which it still writes the body, before our answer.
        refused = [b"HTTP/1.1 413 "] + ([b"HTTP/1.1 502 "] if kind == "caddy" else [])
        assert answer.startswith(tuple(refused)) or (kind == "caddy" and not answer)
        assert await app.store.get(over.webhook_id) is None
        assert (await proxy.post(signed())).status_code == 200


@PROXIES
async def test_http_2_in_front_and_connections_that_are_kept_behind(kind, tmp_path):
    async with behind() as app:
        host, _, port = address_of(app).rpartition(":")

        async def relay(stream):
            behind_it = await trio.open_tcp_stream(host, int(port))
            async with behind_it, trio.open_nursery() as nursery:
                nursery.start_soon(_pump, stream, behind_it)
                await _pump(behind_it, stream)
                nursery.cancel_scope.cancel()

        counted = Upstream()
        async with (
            serving_upstream(counted, relay),
            running(kind, tmp_path, f"127.0.0.1:{counted.port}") as proxy,
            proxy.client(http2=True) as client,
        ):
            for _ in range(10):
                delivery = signed()
                answer = await client.post(
                    "/hooks/sdk", content=delivery.body, headers=delivery.headers
                )
                assert (answer.status_code, answer.http_version) == (200, "HTTP/2")
            statuses = []

            async def post():
                delivery = signed()
                answer = await client.post(
                    "/hooks/sdk", content=delivery.body, headers=delivery.headers
                )
                statuses.append(answer.status_code)

            assert counted.connections == 1
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(post)
            assert statuses == [200] * 20
            assert (await client.get("/")).status_code == 404
            assert (await client.get("/hooks/sdk")).status_code == 405


async def _pump(source, target):
    async for chunk in source:
        await target.send_all(chunk)


async def test_the_proxys_own_word_counts_when_it_was_reached_without_tls(tmp_path):
    async with behind() as app:
        plain = await exchange(app, delivery_request(signed(), ("X-Forwarded-Proto", "http")))
        assert plain.status == 400
