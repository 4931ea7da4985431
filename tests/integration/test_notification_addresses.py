"""The webhook channel connects only to public addresses, whatever its URL's name resolves to."""

import time
from functools import partial

import msgspec
import pytest
import trio
from support.notifications import fake_provider, http_answer, options, send
from support.waiting import PATIENCE_SECONDS

from sdk_trio.net import poster as public_dialer
from sdk_trio.net.poster import HttpPoster, NoAllowedAddressError, dial_public
from sdk_trio.notifications.send import Again, Refused, Sent

KEY = "Sdk:MultiTenant:Notifications:Webhook:AllowPrivateAddresses"
PUBLIC = "93.184.216.34"


def https(url):
    """Only Development sends plain HTTP, and only to this machine."""
    return url.replace("http:", "https:")


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0.0.0.0",
        "localhost",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[::]",
    ],
)
async def test_this_machine_is_refused_however_it_is_written(host):
    async with fake_provider(http_answer(200)) as provider:
        url = f"https://{host}:{provider.port}/in"
        outcome = await send("webhook", options("http://127.0.0.1:9", webhook_url=url))
        assert isinstance(outcome, Refused)
        assert KEY in outcome.reason
        assert provider.connections == 0


async def test_a_url_that_cannot_be_read_connects_nowhere():
    async with fake_provider(http_answer(200)) as provider:
        url = f"https://0177.0.0.1:{provider.port}/in"
        outcome = await send("webhook", options("x", webhook_url=url))
        assert isinstance(outcome, Refused)
        assert provider.connections == 0


@pytest.mark.parametrize("address", ["10.0.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"])
async def test_private_networks_are_refused_without_a_packet(address):
    with trio.fail_after(PATIENCE_SECONDS):
        outcome = await send("webhook", options("x", webhook_url=f"https://{address}/in"))
    assert isinstance(outcome, Refused)


async def test_a_private_address_can_be_allowed():
    async with fake_provider(http_answer(200)) as provider:
        chosen = options(provider.url)
        chosen = msgspec.structs.replace(
            chosen,
            webhook=msgspec.structs.replace(
                chosen.webhook,
                url=f"http://0.0.0.0:{provider.port}/in",
                allow_private_addresses=True,
            ),
        )
        assert isinstance(await send("webhook", chosen), Sent)


async def test_providers_may_be_private():
    async with fake_provider(http_answer(202)) as provider:
        assert isinstance(await send("email", options(provider.url)), Sent)


class Names:
    """A resolver whose answers are scripted, and connections that go to one port."""

    def __init__(self, *answers, port=9):
        self.answers = list(answers)
        self.asked = []
        self.connected = []
        self.port = port

    async def resolve(self, host, port):
        await trio.lowlevel.checkpoint()
        self.asked.append(host)
        answer = self.answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def connect(self, address, port):
        self.connected.append(address)
        return await trio.open_tcp_stream("127.0.0.1", self.port)

    def poster(self):
        dial = partial(dial_public, resolve=self.resolve, connect=self.connect)
        return HttpPoster(clock=time.time, dial_public=dial)


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "::1", "::ffff:10.1.2.3", "fe80::1"])
async def test_a_name_that_resolves_to_a_private_address_is_refused(address):
    names = Names([address])
    chosen = options("x", webhook_url="https://innocent.example/in")
    outcome = await send("webhook", chosen, poster=names.poster())
    assert isinstance(outcome, Refused)
    assert "innocent.example" in outcome.reason
    assert names.connected == []


async def test_the_checked_address_is_the_one_connected_to():
    async with fake_provider(http_answer(200)) as provider:
        # A second look-up would give the private address.
        names = Names(["10.0.0.1", PUBLIC, "::1"], ["127.0.0.1"], port=provider.port)
        with trio.fail_after(60):
            answer = await names.poster().post(
                "http://rebinding.example/in",
                headers={},
                body=b"{}",
                timeout_seconds=60,
                public_only=True,
            )
        assert answer.status == 200
        assert names.asked == ["rebinding.example"]
        assert names.connected == [PUBLIC]
        assert provider.requests[0].headers["host"] == "rebinding.example"


async def test_every_message_is_resolved_and_checked_again():
    async with fake_provider(http_answer(200)) as provider:
        names = Names([PUBLIC], ["127.0.0.1"], port=provider.port)
        poster = names.poster()
        # Plain HTTP to a public name is possible only past the settings' validation.
        chosen = options("x", webhook_url="http://rebinding.example/in")
        assert isinstance(await send("webhook", chosen, poster=poster), Sent)
        assert isinstance(await send("webhook", chosen, poster=poster), Refused)
        assert len(provider.requests) == 1


async def test_a_name_server_that_fails_is_asked_again_later():
    names = Names(OSError("no answer"))
    chosen = options("x", webhook_url="https://gone.example/in")
    assert isinstance(await send("webhook", chosen, poster=names.poster()), Again)


@pytest.mark.parametrize("public_only", [True, False])
@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".example", "xn--zzzzzz99999999.example"])
async def test_a_host_that_is_no_name_is_refused_for_good(host, public_only):
    webhook = msgspec.structs.replace(
        options("x", webhook_url=f"https://{host}/in").webhook,
        allow_private_addresses=not public_only,
    )
    outcome = await send("webhook", options("x", webhook=webhook))
    assert isinstance(outcome, Refused)
    assert "no message can be sent to this address" in outcome.reason
    assert "AllowPrivateAddresses" not in outcome.reason


async def test_a_redirect_to_a_private_address_is_not_followed():
    async with fake_provider(http_answer(200)) as inside:
        answer = http_answer(302, location=f"{inside.url}/metadata")
        async with fake_provider(answer) as outside:
            names = Names([PUBLIC], port=outside.port)
            chosen = options("x", webhook_url="http://redirecting.example/in")
            assert isinstance(await send("webhook", chosen, poster=names.poster()), Refused)
        assert inside.connections == 0


async def test_the_next_address_is_tried_when_one_does_not_answer(monkeypatch):
    monkeypatch.setattr(public_dialer, "PATIENCE_SECONDS", 0.05)
    tried = []

    async def connect(address, port):
        tried.append(address)
        if address == "1.1.1.1":
            raise OSError("refused")
        if address == "1.1.1.2":
            await trio.sleep_forever()
        return "connected"

    async def resolve(host, port):
        await trio.lowlevel.checkpoint()
        return ["1.1.1.1", "10.0.0.1", "1.1.1.2", "1.1.1.3"]

    with trio.fail_after(PATIENCE_SECONDS):
        assert await dial_public("x", 443, resolve=resolve, connect=connect) == "connected"
    assert tried == ["1.1.1.1", "1.1.1.2", "1.1.1.3"]


async def test_a_name_without_addresses_is_refused():
    names = Names([])
    with pytest.raises(NoAllowedAddressError):
        await dial_public("x", 443, resolve=names.resolve, connect=names.connect)


async def test_the_real_resolver_gives_each_address_once():
    with trio.fail_after(60):
        found = await public_dialer.resolve("localhost", 443)
    assert "127.0.0.1" in found
    assert len(set(found)) == len(found)
