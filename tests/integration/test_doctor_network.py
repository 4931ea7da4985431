"""``doctor`` with a running receiver and an upstream, each right and wrong in its ways."""

import json
import time
from contextlib import asynccontextmanager
from email.utils import formatdate
from functools import partial

import httpx
import pytest
import trio
from support.connect_proxies import proxying
from support.daemon import Place
from support.deliveries import SECRET
from support.doctor import Doctor
from support.ports import free_port
from support.scripted_upstream import TOKEN, scripted_upstream
from support.serving import serving
from support.upstreams import Authority, Upstream
from support.upstreams import serving as serving_upstream

from sdk_trio.cli.doctor import run as doctor_command
from sdk_trio.cli.doctor.network import PROBE_ID
from sdk_trio.records.deliveries import DeliveryState
from sdk_trio.runtime.presence import SETTINGS_SECRET, Presence, announced
from sdk_trio.testing import sign_delivery
from sdk_trio.webhooks.signed_request import own_url

OTHER_SECRET = "whsec_" + "A" * 32


@pytest.fixture
def doctor(command_line, monkeypatch):
    made = Doctor(command_line, monkeypatch)
    made.set("Environment", "Development")
    return made


@asynccontextmanager
async def receiver(doctor, **keys):
    """A receiver that ``doctor`` finds on its data directory."""
    doctor.data.mkdir(exist_ok=True, mode=0o700)
    async with serving(**keys) as app:
        url = own_url(app.url.removesuffix("/hooks/sdk"), "/hooks/sdk")
        with announced(doctor.data, Presence(app.url, url, 1, SETTINGS_SECRET)):
            yield app


async def test_the_probe_goes_through_the_whole_pipeline_once(doctor):
    async with receiver(doctor) as app:
        for _ in range(2):
            found = await doctor.beside("--standalone")
            found.one("receiver", "ok", "through the whole pipeline")
        (record,) = await app.store.find(limit=10)
    assert (record.webhook_id, record.state) == (PROBE_ID, DeliveryState.DONE)
    assert found.status == 0


async def test_the_probe_is_not_left_as_a_parked_event(doctor):
    keys = {"Storage__Backend": "Sqlite", "Storage__Path": str(doctor.data)}
    async with receiver(doctor, **keys):
        await doctor.beside("--standalone")
        found = await doctor.beside("--standalone")
    found.one("store", "ok", "none is dead, parked or old")


def test_a_secret_that_differs_from_the_senders_is_explained(tmp_path):
    place = Place(tmp_path)
    place.environ["SDK__ADMIN__BIND"] = f"127.0.0.1:{free_port()}"
    with place.daemon() as daemon:
        forged = sign_delivery("order.paid", secret=OTHER_SECRET)
        url = f"{daemon.receiver}/hooks/sdk"
        answer = httpx.post(url, content=forged.body, headers=forged.headers)
        assert answer.status_code == 400
        ran = place.run("doctor", "--standalone", "--format", "json")
    (found,) = (row for row in json.loads(ran.stdout) if row["where"] == "rejected requests")
    assert (found["level"], found["what"]) == (
        "warning",
        "1 since the receiver started: no_match",
    )
    assert "signs with another secret" in found["remedy"]


def test_the_refusal_of_its_own_probe_is_not_blamed_on_the_sender(tmp_path):
    place = Place(tmp_path)
    place.environ["SDK__ADMIN__BIND"] = f"127.0.0.1:{free_port()}"
    with place.daemon():
        place.environ["SDK__WEBHOOKS__SECRET"] = place.run("secrets", "new").stdout.strip()
        for _ in range(2):
            ran = place.run("doctor", "--standalone", "--format", "json")
    rows = json.loads(ran.stdout)
    assert [row for row in rows if row["where"] == "rejected requests"] == []
    (found,) = (row for row in rows if row["what"].startswith("400: "))
    assert "another secret" in found["what"]
    assert "the receiver's own environment" in found["remedy"]


@pytest.mark.parametrize(
    ("keys", "level", "what"),
    [
        ({"Webhooks__Secret": OTHER_SECRET}, "problem", "another secret"),
        ({"Webhooks__AllowedSourceIpRanges": ["192.0.2.1"]}, "note", "not in Sdk:Webhooks:Allowed"),
        ({"Webhooks__Path": "/elsewhere"}, "problem", "nothing is served"),
    ],
)
async def test_answers_that_are_no_success(doctor, keys, level, what):
    async with receiver(doctor, **keys):
        found = await doctor.beside("--standalone")
    finding = found.one("receiver", level, what)
    assert finding["where"].startswith("http://127.0.0.1:")


async def test_a_used_up_rate_limit_is_no_problem(doctor):
    async with receiver(doctor, Webhooks__RateLimitPerMinute=1):
        await doctor.beside("--standalone")
        (await doctor.beside("--standalone")).one("receiver", "note", "429")


@pytest.mark.parametrize("trusted", [[], ["127.0.0.1"]])
async def test_a_receiver_that_wants_https_and_has_none(doctor, trusted):
    doctor.set("Webhooks__RequireHttps", "true")
    if trusted:
        doctor.set("Server__TrustedProxies__0", trusted[0])
    async with receiver(doctor, Webhooks__RequireHttps=True, Server__TrustedProxies=trusted):
        found = await doctor.beside("--standalone")
    if trusted:
        # The probe comes as a trusted proxy would send it.
        found.one("receiver", "ok", "through the whole pipeline")
    else:
        found.one("receiver", "problem", "RequireHttps is true")
        found.one("https", "problem", "every delivery is answered 400")


async def test_a_receiver_that_is_gone(doctor):
    doctor.data.mkdir(mode=0o700)
    url = "http://127.0.0.1:9/hooks/sdk"
    with announced(doctor.data, Presence(url, url, 1, SETTINGS_SECRET)):
        found = await doctor.beside("--standalone")
    found.one("receiver", "problem", "cannot deliver to")


def full_stack(doctor, url):
    doctor.set("Mode", "Custom")
    doctor.set("CustomBaseUrl", url)
    doctor.set("AccessToken", TOKEN)


async def test_an_upstream_that_is_as_it_should_be(doctor):
    async with scripted_upstream() as upstream:
        answer = upstream.answer
        upstream.answer = lambda method, target, headers, body: (
            (200, {"items": []})
            if "/organizations/" in target
            else answer(method, target, headers, body)
        )
        full_stack(doctor, upstream.url)
        found = await doctor.beside()
        found.one("upstream", "ok", "reached, and the access token is accepted")
        found.one("upstream", "ok", "1 of the upstream's endpoints use /hooks/sdk")
        upstream.endpoints = [{"id": "ep_x", "url": "https://shop.example/other"}]
        (await doctor.beside()).one("upstream", "problem", "nothing arrives")
        upstream.fails = lambda method, path: 403 if "webhooks" in path else None
        (await doctor.beside()).one("upstream", "note", "does not list them")


@pytest.mark.parametrize(
    ("status", "where", "what"),
    [
        (401, "Sdk:AccessToken", "sandbox token with Mode Live"),
        (403, "Sdk:AccessToken", "lacks the scope"),
        (404, "Sdk:BasePath", "no such route below the base path"),
        (500, None, "500 was answered"),
    ],
)
async def test_answers_of_the_upstream_are_distinguished(doctor, status, where, what):
    async with scripted_upstream() as upstream:
        upstream.fails = lambda method, path: status
        full_stack(doctor, upstream.url)
        found = await doctor.beside()
    finding = found.one("upstream", "problem", what)
    assert finding["where"] == (where or upstream.url)
    assert upstream.requests == 1


@pytest.mark.parametrize(
    ("skew", "level", "what"),
    [
        (0, "ok", "agrees with"),
        (100, "warning", "behind the upstream's"),
        (-4000, "problem", "ahead of the upstream's: beyond"),
        (None, "note", "sends no time"),
    ],
)
async def test_the_clock_against_the_upstreams(doctor, skew, level, what):
    async def serve(stream):
        await stream.receive_some(65_536)
        body = json.dumps({"items": []}).encode()
        date = (
            b""
            if skew is None
            else f"date: {formatdate(time.time() + skew, usegmt=True)}\r\n".encode()
        )
        await stream.send_all(
            b"HTTP/1.1 200 OK\r\nconnection: close\r\n%bcontent-length: %d\r\n\r\n%b"
            % (date, len(body), body)
        )

    async with serving_upstream(Upstream(), serve) as upstream:
        full_stack(doctor, f"http://127.0.0.1:{upstream.port}")
        found = await doctor.beside()
    found.one("upstream", level, what)


async def test_an_upstream_that_is_not_reached(doctor):
    full_stack(doctor, "https://upstream.invalid")
    (await doctor.beside()).one("upstream", "problem", "DNS: the name upstream.invalid")
    full_stack(doctor, "https://127.0.0.1:9")
    (await doctor.beside()).one("upstream", "problem", "TCP: no connection to 127.0.0.1 port 9")

    async def never(stream):
        raise AssertionError("no connection gets that far")

    context = Authority().server_context("http/1.1")
    async with serving_upstream(Upstream(), never, context=context) as upstream:
        full_stack(doctor, f"https://127.0.0.1:{upstream.port}")
        found = await doctor.beside()
    found.one("upstream", "problem", "TLS: 127.0.0.1 has no certificate that this machine trusts")
    (await doctor.beside("--offline")).one("upstream", "note", "not reached: offline")


async def test_an_upstream_behind_a_proxy(doctor):
    full_stack(doctor, "http://127.0.0.1:9")
    doctor.monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    finding = (await doctor.beside()).one("upstream", "problem", "TCP: no connection")
    assert "HTTPS_PROXY is set, and is ignored" in finding["remedy"]
    async with scripted_upstream() as upstream, proxying() as proxy:
        upstream.fails = lambda method, path: 401
        full_stack(doctor, upstream.url)
        doctor.set("Connection__ProxyUrl", proxy.url)
        found = await doctor.beside()
        found.one("upstream", "problem", "401: the upstream does not know the access token")
        assert set(proxy.targets) == {f"127.0.0.1:{upstream.port}"}
        proxy.answer = b"HTTP/1.1 403 Forbidden\r\n\r\n"
        finding = (await doctor.beside()).one("upstream", "problem", "answered 403 Forbidden")
        assert "the rules of the proxy" in finding["remedy"]


async def test_an_authority_that_is_none(doctor, tmp_path):
    file = tmp_path / "ca.pem"
    file.write_text("")
    full_stack(doctor, "https://127.0.0.1:9")
    doctor.set("Connection__CaFile", file)
    finding = (await doctor.beside()).one("upstream", "problem", "cannot be used")
    assert finding["where"] == "Sdk:Connection:CaFile"


async def test_a_check_that_breaks_or_hangs_is_reported_and_the_others_continue(
    doctor, monkeypatch
):
    def broken(settings, report):
        raise RuntimeError(SECRET)

    async def hanging(settings, found, report):
        await trio.sleep_forever()

    monkeypatch.setattr(doctor_command, "check_descriptors", broken)
    monkeypatch.setattr(doctor_command, "check_tenants", hanging)
    monkeypatch.setattr(doctor_command, "CHECK_SECONDS", 0.5)
    found = await doctor.beside("--standalone")
    found.one("descriptors", "warning", "this check failed: RuntimeError")
    found.one("tenants", "warning", "did not finish")
    assert found.of("replication") != []
    monkeypatch.setattr(doctor_command, "CHECK_SECONDS", 20.0)
    monkeypatch.setattr(doctor_command, "TOTAL_SECONDS", 0.3)
    found = await trio.to_thread.run_sync(partial(doctor, "--standalone"))
    found.one("doctor", "warning", "not everything was checked")
