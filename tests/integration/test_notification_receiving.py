"""Receivers of notification webhooks: our own, the documentation's, and the scheme's libraries."""

import json
import re
import subprocess
import time
from pathlib import Path

import pytest
import standardwebhooks
import trio
from support.notifications import (
    SECRET,
    VARIABLES,
    fake_provider,
    http_answer,
    options,
    record,
    send,
)
from support.programs import program

from sdk_trio.errors import VerificationError
from sdk_trio.notifications.send import Again, Sent
from sdk_trio.records.deliveries import DeliveryState
from sdk_trio.records.tenants import Transition
from sdk_trio.testing import running_app, settings_for_tests, verify_notification
from sdk_trio.webhooks import HandlerRegistry

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "receive-notifications.md"

#: Texts that are not base64, and text that is base64 without the prefix.
SECRETS = [SECRET, "an-ordinary-secret-of-a-shop!", "z6fMa4YWa088j5EP9gJ8LDaGxrBzHpIg"]


async def sent_request(secret=SECRET, **changes):
    async with fake_provider(http_answer(204)) as provider:
        variables = VARIABLES | {"SDK_WEBHOOK_SECRET": secret}
        await send("webhook", options(provider.url), variables=variables, what=record(**changes))
    (request,) = provider.requests
    return request


async def test_our_own_receiver_accepts_them_through_its_whole_pipeline():
    seen = []
    handlers = HandlerRegistry()

    @handlers.fallback
    async def take(event):
        seen.append(event)

    settings = settings_for_tests({"Webhooks:Secret": SECRET})
    async with running_app(handlers, settings) as app:
        for transition in Transition:
            what = record(
                transition,
                tenant_name="{Reason}\r\n<b>\u202eÄ😀",
                delivery_id=f"2b6c8a56-6a4f-4f0e-8f4e-{transition.lower():0<12}",
            )
            chosen = options("http://127.0.0.1:9", webhook_url=app.url)
            assert await send("webhook", chosen, what=what) == Sent(None)
            # A repetition is recognised by its id: the handler does not run again.
            assert await send("webhook", chosen, what=what) == Sent(None)
            kept = await app.store.get(what.delivery_id)
            assert kept.state is DeliveryState.DONE
    assert [event.type for event in seen] == [f"tenant.{t.lower()}" for t in Transition]
    assert [event.data.id for event in seen] == [record().tenant_id] * 4
    assert seen[0].json["tenantName"].startswith("{Reason}")


async def test_our_own_receiver_takes_a_secret_of_any_form():
    for secret in SECRETS:
        settings = settings_for_tests({"Webhooks:Secret": secret})
        async with running_app(None, settings) as app:
            chosen = options("http://127.0.0.1:9", webhook_url=app.url)
            variables = VARIABLES | {"SDK_WEBHOOK_SECRET": secret}
            assert await send("webhook", chosen, variables=variables) == Sent(None)
            # And one that does not match is refused by it.
            other = VARIABLES | {"SDK_WEBHOOK_SECRET": "another-secret-of-a-shop"}
            outcome = await send(
                "webhook", chosen, variables=other, what=record(delivery_id="other")
            )
            assert outcome.reason == "answered 400"


async def test_a_receiver_that_drains_is_asked_again_later():
    async with fake_provider(http_answer(503, retry_after=5)) as provider:
        assert await send("webhook", options(provider.url)) == Again("answered 503", 5)


async def test_the_library_of_the_scheme_accepts_them():
    request = await sent_request()
    payload = standardwebhooks.Webhook(SECRET).verify(request.body, request.headers)
    assert payload["deliveryId"] == request.headers["webhook-id"]


@pytest.mark.parametrize("secret", SECRETS)
async def test_verify_notification_returns_the_payload(secret):
    request = await sent_request(secret)
    headers = {name.title(): value for name, value in request.headers.items()}
    assert verify_notification(headers, request.body, secret) == json.loads(request.body)


async def test_verify_notification_refuses_what_is_changed_old_or_incomplete():
    request = await sent_request()

    def cause(body=request.body, secret=SECRET, now=None, **changes):
        headers = request.headers | {k.replace("_", "-"): v for k, v in changes.items()}
        headers = {name: value for name, value in headers.items() if value is not None}
        with pytest.raises(VerificationError) as caught:
            verify_notification(headers, body, secret, now=now)
        return caught.value.cause

    assert cause(body=request.body + b" ") == "no_match"
    assert cause(secret="whsec_ZYi2SptnRGqVWE69YmXzhwe3HB3GHULU") == "no_match"
    assert cause(now=time.time() + 400) == "too_old"
    assert cause(now=time.time() - 400) == "too_new"
    assert cause(x_sdk_signature=None) == "missing_header"
    assert cause(x_sdk_signature="sha256=" + "0" * 64) == "no_match"
    assert cause(x_sdk_signature="ä") == "no_match"
    assert cause(webhook_signature=None) == "missing_header"
    assert cause(webhook_timestamp=str(int(time.time()) - 100)) == "no_match"


def code(language, containing):
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (found,) = (block for block in blocks if containing in block)
    return found


async def test_the_documented_python_verifies_and_refuses():
    request = await sent_request()
    names = {}
    exec(code("python", "def is_authentic"), names)
    is_authentic = names["is_authentic"]
    assert is_authentic(request.headers, request.body, SECRET)
    assert not is_authentic(request.headers, request.body + b" ", SECRET)
    assert not is_authentic(request.headers, request.body, "other")
    assert not is_authentic({}, request.body, SECRET)


def test_the_documented_javascript_verifies_and_refuses():
    request = trio.run(sent_request)
    script = (
        code("javascript", "function isAuthentic")
        + "const {headers, body, secret} = JSON.parse(require('fs').readFileSync(0, 'utf8'));"
        "const bytes = Buffer.from(body, 'latin1');"
        "console.log(JSON.stringify([isAuthentic(headers, bytes, secret),"
        "isAuthentic(headers, Buffer.concat([bytes, Buffer.from(' ')]), secret),"
        "isAuthentic(headers, bytes, 'other'), isAuthentic({}, bytes, secret)]));"
    )
    given = {"headers": request.headers, "body": request.body.decode("latin-1"), "secret": SECRET}
    ran = subprocess.run(
        [program("node"), "-e", script],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.stderr, json.loads(ran.stdout)) == ("", [True, False, False, False])


async def test_the_documented_payload_has_the_members_that_are_sent():
    request = await sent_request()
    documented = json.loads(code("json", "deliveryId"))
    sent = json.loads(request.body)
    assert list(documented) == list(sent)
    for filled in (documented, sent):
        filled.update(email=sorted(filled["email"]), sms=sorted(filled["sms"]))
    assert documented == sent
