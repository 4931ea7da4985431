"""``Runtime.reload``: in an embedding program, without signals, all at once."""

import signal
import ssl
from functools import partial

import msgspec
import pytest
import trio
import trustme
from support.deliveries import SECRET, settings
from support.scripted_upstream import TOKEN, full_stack, scripted_upstream
from support.serving import delivery_request, exchange, registry, serving, signed, works
from support.waiting import until

import sdk_trio
from sdk_trio.cli.run import SettingsReloader
from sdk_trio.config import Secret
from sdk_trio.config.load import Loaded
from sdk_trio.errors import OptionsValidationError, Problem
from sdk_trio.runtime import Reloaded, Runtime
from sdk_trio.runtime.systemd import SystemdNotifier
from sdk_trio.testing import AppUnderTest
from sdk_trio.webhooks.signature import new_secret

NEW_SECRET = new_secret(b"a secret of this test, 32 bytes.")


def wanted(running, **changes):
    """``running`` with the new secret instead of its own, and with ``changes``."""
    new = Secret(NEW_SECRET, made_for_tests=True)
    changes = {"secret": None, "secrets": (new,), **changes}
    return msgspec.structs.replace(
        running, webhooks=msgspec.structs.replace(running.webhooks, **changes)
    )


async def status_of(app, **options):
    return (await exchange(app, delivery_request(signed(**options)))).status


async def test_new_secrets_count_from_the_next_delivery_on():
    async with serving(registry(works)) as app:
        runtime = app.runtime
        assert await status_of(app) == 200
        assert await status_of(app, secret=NEW_SECRET) == 400
        done = runtime.reload(wanted(app.settings, rate_limit_per_minute=3))
        assert done == Reloaded(
            (
                "Sdk:Webhooks:Secret",
                "Sdk:Webhooks:Secrets",
                "Sdk:Webhooks:RateLimitPerMinute",
            )
        )
        assert await status_of(app, secret=NEW_SECRET) == 200
        assert await status_of(app) == 400
        # An unchanged rate keeps its count.
        runtime.reload(msgspec.structs.replace(runtime.settings))
        assert await status_of(app, secret=NEW_SECRET) == 200
        assert await status_of(app, secret=NEW_SECRET) == 429
        # The simulator signs with the current secret.
        runtime.reload(wanted(app.settings, rate_limit_per_minute=None))
        assert runtime.settings.webhooks.secrets[0].reveal() == NEW_SECRET
        simulate = b"POST /test/webhook/simulate/order.paid HTTP/1.1\r\nHost: localhost\r\n"
        answer = await exchange(app, simulate + b"Content-Length: 0\r\n\r\n")
        assert b'"status":200' in answer.body.replace(b" ", b"")


async def test_a_delivery_in_progress_ends_by_the_old_settings():
    entered, go_on = trio.Event(), trio.Event()

    async def waits(event):
        entered.set()
        await go_on.wait()

    async with serving(registry(waits)) as app, trio.open_nursery() as nursery:
        answers = []

        async def deliver():
            answers.append(await status_of(app))

        nursery.start_soon(deliver)
        await entered.wait()
        app.runtime.reload(wanted(app.settings))
        go_on.set()
        await until(lambda: answers)
        assert answers == [200]


async def test_unusable_settings_change_nothing():
    async with serving(registry(works)) as app:
        before = app.settings

        def refuse(_settings):
            raise OptionsValidationError([Problem("Sdk:Part", "refuses")])

        app.runtime.on_reload(refuse, ())
        with pytest.raises(OptionsValidationError) as caught:
            app.runtime.reload(wanted(before))
        assert [problem.key for problem in caught.value.problems] == ["Sdk:Part"]
        assert app.runtime.settings is before
        assert await status_of(app) == 200
        assert await status_of(app, secret=NEW_SECRET) == 400


async def test_embedded_no_signal_handler_is_ever_installed():
    def handlers():
        numbers = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
        return {number: signal.getsignal(number) for number in numbers}

    before = handlers()
    async with serving(registry(works)) as app:
        assert handlers() == before
        app.runtime.reload(wanted(app.settings))
        assert await status_of(app, secret=NEW_SECRET) == 200
        assert handlers() == before
    assert handlers() == before


def issue(authority, directory, name="localhost"):
    certificate = authority.issue_cert(name)
    files = directory / "cert.pem", directory / "key.pem"
    certificate.cert_chain_pems[0].write_to_path(files[0])
    certificate.private_key_pem.write_to_path(files[1])
    return {"Server__CertFile": str(files[0]), "Server__KeyFile": str(files[1])}


async def certificate_of(app, authority):
    context = ssl.create_default_context()
    authority.configure_trust(context)
    port = int(app.runtime.started.receiver[0].rpartition(":")[2])
    stream = await trio.open_ssl_over_tcp_stream("localhost", port, ssl_context=context)
    async with stream:
        await stream.do_handshake()
        return stream.getpeercert(binary_form=True)


async def test_a_renewed_certificate_is_served_to_new_connections_and_a_bad_one_to_none(tmp_path):
    authority = trustme.CA()
    files = issue(authority, tmp_path)
    async with serving(registry(works), **files, Server__Bind=["localhost:0"]) as app:
        first = await certificate_of(app, authority)
        assert app.runtime.reload(app.settings) == Reloaded()
        assert await certificate_of(app, authority) == first
        issue(authority, tmp_path)
        app.runtime.reload(app.settings)
        second = await certificate_of(app, authority)
        assert second != first
        # The certificate of one pair with the key of another, as while files are being copied.
        authority.issue_cert("localhost").private_key_pem.write_to_path(files["Server__KeyFile"])
        with pytest.raises(OptionsValidationError, match="Sdk:Server:CertFile"):
            app.runtime.reload(wanted(app.settings))
        assert await certificate_of(app, authority) == second
        assert app.runtime.settings == app.settings


async def test_calls_that_begin_after_a_reload_carry_the_new_access_token():
    async with scripted_upstream() as upstream, trio.open_nursery() as nursery:
        wrong = "polar_oat_also-not-a-real-token"
        runtime = Runtime(full_stack(upstream, AccessToken=wrong))
        await nursery.start(runtime.run)
        with pytest.raises(sdk_trio.ApiError) as caught:
            await runtime.client.orders.get("ord_3")
        assert caught.value.status == 401
        done = runtime.reload(msgspec.structs.replace(runtime.settings, access_token=Secret(TOKEN)))
        assert done == Reloaded(("Sdk:AccessToken",))
        assert (await runtime.client.orders.get("ord_3")).amount == 3
        for unusable in (None, Secret("two words\r\n")):
            with pytest.raises(OptionsValidationError, match="Sdk:AccessToken"):
                runtime.reload(msgspec.structs.replace(runtime.settings, access_token=unusable))
        assert (await runtime.client.orders.get("ord_3")).amount == 3
        runtime.shut_down("test")


async def test_a_reload_that_is_cancelled_anywhere_leaves_the_old_or_the_new_as_a_whole():
    seen = set()
    # Beyond the first ones only until one was long enough for a whole reload.
    for steps in (*range(40), 200, 1000, 5000, 25_000):
        if steps > 40 and True in seen:
            break
        runtime = Runtime(settings(), registry(works))
        old = runtime.settings
        new = wanted(old, rate_limit_per_minute=9, tolerance_seconds=5)
        part = []
        runtime.on_reload(lambda given, part=part: partial(part.append, given), ())
        reloader = SettingsReloader(
            lambda new=new: Loaded(new, (), (), {}), lambda loaded: loaded.require(), environ={}
        )
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                await nursery.start(runtime.run)
                async with trio.open_nursery() as reloading:
                    reloader.request()
                    reloading.start_soon(reloader.run, runtime, SystemdNotifier(None), "")
                    for _ in range(steps):
                        await trio.sleep(0.0002)
                    reloading.cancel_scope.cancel()
                in_force = {
                    runtime.settings == new,
                    runtime.receiver.settings == new,
                    part == [new],
                    await status_of(AppUnderTest(runtime), secret=NEW_SECRET) == 200,
                    await status_of(AppUnderTest(runtime), secret=SECRET) == 400,
                }
                assert len(in_force) == 1
                seen |= in_force
                runtime.shut_down("test")
    assert True in seen
    assert False in seen
