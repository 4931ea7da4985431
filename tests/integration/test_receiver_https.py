"""RequireHttps: who may say that a request came by HTTPS."""

import ssl
import sys

import httpx
import pytest
import trio
import trustme
from support.serving import (
    RawWire,
    delivery_request,
    exchange,
    registry,
    request,
    serving,
    signed,
    works,
)

from sdk_trio.errors import OptionsValidationError
from sdk_trio.testing import running_app, settings_for_tests
from sdk_trio.webhooks.signed_request import own_url, post

LOOPBACK = ["127.0.0.1/32"]
OPAQUE = b'{"error":"invalid webhook"}'


@pytest.mark.parametrize(
    ("trusted", "headers", "status"),
    [
        # Headers of an unlisted proxy are never trusted.
        ([], [], 400),
        ([], [("X-Forwarded-Proto", "https")], 400),
        ([], [("Forwarded", "proto=https")], 400),
        (["192.0.2.1"], [("X-Forwarded-Proto", "https")], 400),
        # A listed proxy is believed.
        (LOOPBACK, [("X-Forwarded-Proto", "https")], 200),
        (LOOPBACK, [("X-Forwarded-Proto", "HTTPS")], 200),
        (LOOPBACK, [("Forwarded", "for=192.0.2.7;proto=https")], 200),
        (LOOPBACK, [("X-Forwarded-Proto", "http")], 400),
        (LOOPBACK, [], 400),
        # Only the entry that the proxy itself added is trusted: the rightmost one.
        (LOOPBACK, [("X-Forwarded-Proto", "https, http")], 400),
        (LOOPBACK, [("X-Forwarded-Proto", "http, https")], 200),
        (LOOPBACK, [("X-Forwarded-Proto", "https"), ("X-Forwarded-Proto", "http")], 400),
        (LOOPBACK, [("X-Forwarded-Proto", "http"), ("X-Forwarded-Proto", "https")], 200),
        # Unreadable or contradictory headers count as not secure.
        (LOOPBACK, [("X-Forwarded-Proto", "https;")], 400),
        (LOOPBACK, [("X-Forwarded-Proto", "")], 400),
        (LOOPBACK, [("Forwarded", "proto=https"), ("X-Forwarded-Proto", "http")], 400),
        (LOOPBACK, [("X_Forwarded_Proto", "https")], 400),
        (LOOPBACK, [("X-Forwarded-Ssl", "on"), ("Front-End-Https", "on")], 400),
    ],
)
async def test_requests_that_count_as_https_behind_a_proxy(trusted, headers, status):
    async with serving(
        registry(works), Webhooks__RequireHttps=True, Server__TrustedProxies=trusted
    ) as app:
        answer = await exchange(app, delivery_request(signed(webhook_id="a"), *headers))
        assert answer.status == status
        assert "location" not in answer.headers
        assert answer.body in (OPAQUE, b"{}")
        assert (await app.store.get("a") is None) == (status == 400)


async def test_not_https_is_the_same_bytes_as_any_rejection_and_comes_before_the_path():
    async with serving(registry(works), Webhooks__RequireHttps=True) as app:
        insecure = await exchange(app, delivery_request(signed(), path="/elsewhere"))
        trace = await exchange(app, request(method="TRACE"))
    async with serving(registry(works)) as app:
        rejected = await exchange(app, request(b"{}"))
    assert insecure.head == trace.head == rejected.head
    assert insecure.body == trace.body == rejected.body == OPAQUE


async def test_the_rate_and_the_ranges_go_by_the_address_that_a_trusted_proxy_reports():
    async with serving(
        registry(works),
        Server__TrustedProxies=LOOPBACK,
        Webhooks__AllowedSourceIpRanges=["198.51.100.0/24"],
        Webhooks__RateLimitPerMinute=1,
    ) as app:

        async def status_from(sender):
            forwarded = ("X-Forwarded-For", sender)
            return (await exchange(app, delivery_request(signed(), forwarded))).status

        assert await status_from("198.51.100.1") == 200
        assert await status_from("198.51.100.1") == 429
        assert await status_from("198.51.100.2") == 200
        assert await status_from("203.0.113.1") == 403
        # First the entry spoofed by the sender, then the proxy's own entry.
        assert await status_from("198.51.100.3, 203.0.113.1") == 403


# -- TLS of its own ---------------------------------------------------------------------------


@pytest.fixture
def authority():
    return trustme.CA()


@pytest.fixture
def certificate(authority, tmp_path):
    """Settings with a certificate for localhost."""
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    for number, part in enumerate(issued.cert_chain_pems):
        part.write_to_path(tmp_path / "certificate.pem", append=number > 0)
    return {
        "Server:CertFile": str(tmp_path / "certificate.pem"),
        "Server:KeyFile": str(tmp_path / "key.pem"),
        "Webhooks:RequireHttps": True,
    }


async def test_tls_of_its_own_satisfies_require_https(authority, certificate):
    verify = ssl.create_default_context()
    authority.configure_trust(verify)
    settings = settings_for_tests(certificate)
    with trio.fail_after(60):
        async with running_app(registry(works), settings) as app:
            assert app.url.startswith("https://127.0.0.1:")
            async with httpx.AsyncClient(verify=verify, timeout=60) as client:
                for number in range(3):
                    delivery = app.sign("order.paid", webhook_id=f"m{number}")
                    answer = await client.post(
                        app.url, content=delivery.body, headers=delivery.headers
                    )
                    assert (answer.status_code, answer.content) == (200, b"{}")
                # An untrusted peer cannot make it less than it is, either.
                answer = await client.post(
                    app.url,
                    content=delivery.body,
                    headers={**delivery.headers, "x-forwarded-proto": "http"},
                )
                assert answer.status_code == 200


@pytest.mark.parametrize(
    "noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01" + b"\xff" * 600]
)
async def test_a_connection_that_speaks_no_tls_ends_alone(authority, certificate, noise):
    verify = ssl.create_default_context()
    authority.configure_trust(verify)
    with trio.fail_after(60):
        async with running_app(registry(works), settings_for_tests(certificate)) as app:
            with await RawWire.connect(app.url.replace("https", "http")) as wire:
                await wire.send(noise)
                await wire.end_of_sending()
                assert b"HTTP/" not in await wire.rest()
            async with httpx.AsyncClient(verify=verify, timeout=60) as client:
                delivery = app.sign("order.paid")
                answer = await client.post(app.url, content=delivery.body, headers=delivery.headers)
                assert answer.status_code == 200


async def test_the_simulator_reaches_a_receiver_with_tls(authority, certificate):
    verify = ssl.create_default_context()
    authority.configure_trust(verify)
    with trio.fail_after(60):
        async with running_app(registry(works), settings_for_tests(certificate)) as app:
            url = app.url.replace("/hooks/sdk", "/test/webhook/simulate/order.paid")
            async with httpx.AsyncClient(verify=verify, timeout=60) as client:
                simulated = (await client.post(url)).json()
            assert simulated["status"] == 200
            assert simulated["targetUrl"] == app.url
            assert (await app.deliver("order.paid")).status == 200


async def test_a_certificate_that_is_none_stops_the_start_and_names_the_key(certificate, tmp_path):
    (tmp_path / "certificate.pem").write_text("no certificate")
    with trio.fail_after(60):
        with pytest.raises(OptionsValidationError, match="Sdk:Server:CertFile") as caught:
            await _run(settings_for_tests(certificate))
    assert caught.value.exit_code == 78
    assert "certificate.pem" in str(caught.value)


async def _run(settings):
    from sdk_trio.runtime import Runtime

    await Runtime(settings).run()


# -- unix socket ------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="unix sockets")
@pytest.mark.parametrize(
    ("trusted", "proto", "status"),
    [([], "https", 400), (["unix"], "https", 200), (["unix"], "http", 400), (["unix"], None, 400)],
)
async def test_a_unix_socket_is_a_proxys_and_believed_only_when_listed(
    tmp_path, trusted, proto, status
):
    socket_path = str(tmp_path / "receiver.sock")
    settings = settings_for_tests(
        {
            "Server:Bind": [f"unix:{socket_path}"],
            "Server:TrustedProxies": trusted,
            "Webhooks:RequireHttps": True,
        }
    )
    with trio.fail_after(60):
        async with running_app(registry(works), settings) as app:
            assert app.runtime.started.receiver == (f"unix:{socket_path}",)
            delivery = app.sign("order.paid")
            transport = httpx.AsyncHTTPTransport(uds=socket_path)
            async with httpx.AsyncClient(transport=transport, timeout=60) as client:
                headers = {**delivery.headers, **({"x-forwarded-proto": proto} if proto else {})}
                answer = await client.post(
                    "http://receiver/hooks/sdk", content=delivery.body, headers=headers
                )
            assert answer.status_code == status


async def test_the_kit_delivers_over_a_unix_socket(tmp_path):
    settings = settings_for_tests({"Server:Bind": [f"unix:{tmp_path / 'receiver.sock'}"]})
    with trio.fail_after(60):
        async with running_app(registry(works), settings) as app:
            assert (await app.deliver("order.paid")).status == 200
            url = own_url(app.runtime.started.receiver[0], "/elsewhere")
            assert (await post(url, app.sign("order.paid"))).status == 404
