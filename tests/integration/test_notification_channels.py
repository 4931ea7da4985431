"""The channels against a scripted provider, on real sockets."""

import base64
import hashlib
import hmac
import json
import logging
import time
from email.utils import formatdate
from urllib.parse import parse_qs

import msgspec
import pytest
import trio
from support.notifications import (
    EMAIL,
    OWN_HOST,
    PHONE,
    SECRET,
    VARIABLES,
    fake_provider,
    http_answer,
    options,
    read_request,
    record,
    reset,
    send,
)
from support.upstreams import Authority

from sdk_trio.config.options.notifications import EnabledChannelsOptions
from sdk_trio.errors import AnswerLostError, NotSentError
from sdk_trio.net.poster import MAX_ANSWER_BYTES, HttpPoster
from sdk_trio.notifications.send import Again, Ambiguous, Refused, Sent, Skipped

CHANNELS = ("email", "sms", "webhook")
SUCCESS = {"email": 202, "sms": 201, "webhook": 204}
HIDDEN = (EMAIL, PHONE, *VARIABLES.values())


async def outcome_of(channel, answer):
    async with fake_provider(answer) as provider:
        return await send(channel, options(provider.url))


# What is sent


async def test_the_email_request():
    async with fake_provider(http_answer(202, x_message_id="abc.123")) as provider:
        assert await send("email", options(provider.url)) == Sent("abc.123")
    (request,) = provider.requests
    assert request.target == "/v3/mail/send"
    assert request.headers["authorization"] == f"Bearer {VARIABLES['EMAIL_API_KEY']}"
    document = json.loads(request.body)
    assert document["personalizations"][0]["to"] == [{"email": EMAIL}]
    assert document["from"] == {"email": "noreply@platform.example", "name": "Platform"}
    assert document["subject"] == "Acme Ltd has been suspended"
    assert [part["type"] for part in document["content"]] == ["text/plain", "text/html"]


async def test_a_display_name_cannot_break_its_line():
    async with fake_provider(http_answer(202)) as provider:
        chosen = options(provider.url)
        email = msgspec.structs.replace(
            chosen.email, from_display_name="Us\r\nBcc: x@example.com\x00"
        )
        await send("email", msgspec.structs.replace(chosen, email=email))
    (request,) = provider.requests
    assert json.loads(request.body)["from"]["name"] == "Us Bcc: x@example.com"


async def test_the_sms_request():
    answer = http_answer(201, b'{"sid": "SM1", "status": "queued"}')
    async with fake_provider(answer) as provider:
        what = record(tenant_name="A&B=ü €", reason=None)
        assert await send("sms", options(provider.url), what=what) == Sent("SM1")
    (request,) = provider.requests
    account, token = VARIABLES["SMS_ACCOUNT_SID"], VARIABLES["SMS_AUTH_TOKEN"]
    assert request.target == f"/2010-04-01/Accounts/{account}/Messages.json"
    scheme, _, pair = request.headers["authorization"].partition(" ")
    assert (scheme, base64.b64decode(pair).decode()) == ("Basic", f"{account}:{token}")
    assert parse_qs(request.body.decode(), strict_parsing=True) == {
        "To": [PHONE],
        "From": ["+15550000000"],
        "Body": ["A&B=ü € has been suspended. Reason: none was given"],
    }


async def test_an_account_id_names_no_other_resource():
    async with fake_provider(http_answer(404)) as provider:
        variables = {**VARIABLES, "SMS_ACCOUNT_SID": "../x?y#z"}
        await send("sms", options(provider.url), variables=variables)
    assert provider.requests[0].target.startswith("/2010-04-01/Accounts/..%2Fx%3Fy%23z/")


async def test_the_webhook_request_is_the_same_bytes_each_time_and_signed():
    async with fake_provider(http_answer(204)) as provider:
        for _ in range(2):
            assert await send("webhook", options(provider.url)) == Sent(None)
    first, second = provider.requests
    assert first.target == "/in"
    assert first.body == second.body
    assert first.headers["content-type"] == "application/json"
    assert first.headers["webhook-id"] == record().delivery_id
    signature = hmac.new(SECRET.encode(), first.body, hashlib.sha256).hexdigest()
    assert first.headers["x-sdk-signature"] == f"sha256={signature}"
    document = json.loads(first.body)
    assert document == {
        "type": "tenant.suspended",
        "timestamp": "2027-01-15T08:00:00.250Z",
        "data": {"id": record().tenant_id},
        "deliveryId": record().delivery_id,
        "tenantId": record().tenant_id,
        "tenantIdentifier": "acme",
        "tenantName": "Acme Ltd",
        "previousStatus": "Active",
        "newStatus": "Suspended",
        "transition": "Suspended",
        "reason": "invoice 7 is unpaid",
        "actor": "kim",
        "occurredAt": "2027-01-15T08:00:00.250Z",
        "email": {"subject": document["email"]["subject"], "body": document["email"]["body"]},
        "sms": {"body": "Acme Ltd has been suspended. Reason: invoice 7 is unpaid"},
    }


async def test_a_missing_reason_is_null_in_the_webhook():
    async with fake_provider(http_answer(200)) as provider:
        await send("webhook", options(provider.url), what=record(reason=None))
    assert json.loads(provider.requests[0].body)["reason"] is None


# What answers mean


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
async def test_a_webhook_receiver_takes_it_with_any_2xx(status):
    assert await outcome_of("webhook", http_answer(status)) == Sent(None)


async def test_an_email_that_was_only_checked_was_not_sent(caplog):
    with caplog.at_level(logging.WARNING, "sdk_trio"):
        outcome = await outcome_of("email", http_answer(200))
    assert isinstance(outcome, Skipped)
    assert "sandbox" in outcome.reason
    assert "notification.not_queued" in caplog.text


@pytest.mark.parametrize(("channel", "status"), [("email", 204), ("sms", 200), ("sms", 202)])
async def test_a_success_that_is_not_documented_is_neither_sent_nor_repeated(channel, status):
    assert isinstance(await outcome_of(channel, http_answer(status)), Ambiguous)


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_redirects_are_refused_and_not_followed(channel, status):
    async with fake_provider(http_answer(200)) as elsewhere:
        answer = http_answer(status, location=f"{elsewhere.url}/stolen")
        outcome = await outcome_of(channel, answer)
        assert isinstance(outcome, Refused)
        assert "redirects are not followed" in outcome.reason
        assert elsewhere.connections == 0


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 413, 422])
async def test_refusals(channel, status):
    outcome = await outcome_of(channel, http_answer(status))
    assert isinstance(outcome, Refused)
    assert f"answered {status}" in outcome.reason


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("status", [408, 425, 429, 500, 501, 503, 507])
async def test_outcomes_that_may_be_retried(channel, status):
    assert await outcome_of(channel, http_answer(status)) == Again(f"answered {status}", None)


@pytest.mark.parametrize("status", [502, 504, 520, 522, 524, 530, 599])
async def test_a_gateway_does_not_know_whether_a_message_was_taken(status):
    for channel in ("email", "sms"):
        outcome = await outcome_of(channel, http_answer(status))
        assert isinstance(outcome, Ambiguous)
        assert f"answered {status}: a gateway's answer" in outcome.reason
    assert await outcome_of("webhook", http_answer(status)) == Again(f"answered {status}", None)


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize(
    ("asked", "seconds"),
    [("7", 7), ("0", None), ("-1", None), ("soon", None), ("999999", 86_400), ("", None)],
)
async def test_retry_after_is_honoured(channel, asked, seconds):
    outcome = await outcome_of(channel, http_answer(503, retry_after=asked))
    assert outcome == Again("answered 503", seconds)


async def test_retry_after_may_be_a_date():
    now = int(time.time())
    headers = {
        "date": formatdate(now, usegmt=True),
        "retry_after": formatdate(now + 90, usegmt=True),
    }
    outcome = await outcome_of("sms", http_answer(429, **headers))
    assert outcome == Again("answered 429", 90)


async def test_the_reset_of_a_rate_limit_is_waited_for():
    at = str(int(time.time()) + 60)
    outcome = await outcome_of("email", http_answer(429, x_ratelimit_reset=at))
    assert isinstance(outcome, Again)
    assert 50 < outcome.after_seconds <= 60
    past = http_answer(429, x_ratelimit_reset="1", retry_after="3")
    assert await outcome_of("email", past) == Again("answered 429", 3)


async def test_the_provider_s_text_is_stored_truncated_and_without_secrets():
    words = f"no {EMAIL}\r\n\x1b[2J {VARIABLES['EMAIL_API_KEY']} " + "x" * 5000
    body = json.dumps({"errors": [{"message": words, "field": "to"}]}).encode()
    outcome = await outcome_of("email", http_answer(400, body))
    assert outcome.reason.startswith("answered 400: no *** [2J *** xxx")
    assert len(outcome.reason) < 350
    message = (
        f"The 'To' number {PHONE.removeprefix('+')} is not valid for {VARIABLES['SMS_ACCOUNT_SID']}"
    )
    body = json.dumps({"code": 21211, "message": message}).encode()
    outcome = await outcome_of("sms", http_answer(400, body))
    assert outcome == Refused("answered 400: The 'To' number *** is not valid for ***")


async def test_a_receiver_s_words_are_not_kept():
    outcome = await outcome_of("webhook", http_answer(500, b"a stack trace with secrets"))
    assert outcome == Again("answered 500", None)


@pytest.mark.parametrize("channel", ["email", "sms"])
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"null", b"[" * 100_000, b"\xff", b'{"errors": 1, "message": []}',
     b'{"errors": [1, {"message": {}, "field": 2}], "sid": 7}'],
)  # fmt: skip
async def test_strange_answers_are_judged_by_their_status(channel, body):
    assert isinstance(await outcome_of(channel, http_answer(400, body)), Refused)
    assert isinstance(await outcome_of(channel, http_answer(SUCCESS[channel], body)), Sent)


@pytest.mark.parametrize("channel", CHANNELS)
async def test_an_endless_answer_is_read_so_far_and_no_further(channel):
    sent = 0

    async def endless(provider, stream):
        nonlocal sent
        await read_request(stream)
        status = SUCCESS["sms" if channel == "sms" else "email"]
        await stream.send_all(b"HTTP/1.1 %d OK\r\ncontent-length: 99999999999\r\n\r\n" % status)
        while True:
            await stream.send_all(b"x" * 65_536)
            sent += 65_536

    async with fake_provider(behave=endless) as provider:
        assert isinstance(await send(channel, options(provider.url)), Sent)
    assert sent < 100 * MAX_ANSWER_BYTES


# What goes wrong


@pytest.mark.parametrize("channel", CHANNELS)
async def test_an_unreachable_server_is_retried(channel):
    async with fake_provider() as provider:
        url = provider.url
    outcome = await send(channel, options(url))
    assert isinstance(outcome, Again)
    assert "cannot connect" in outcome.reason


@pytest.mark.parametrize("channel", CHANNELS)
async def test_a_name_that_does_not_exist_is_tried_again(channel):
    outcome = await send(channel, options("http://no-such-host.invalid"))
    # The webhook's name may resolve to a public address the next time.
    assert isinstance(outcome, Again)


async def hang(provider, stream):
    await trio.sleep_forever()


async def read_and_hang(provider, stream):
    await read_request(stream)
    await trio.sleep_forever()


async def reset_at_once(provider, stream):
    await reset(stream)


async def reset_in_the_middle(provider, stream):
    await stream.receive_some(10)
    await reset(stream)


async def reset_after(provider, stream):
    await read_request(stream)
    await reset(stream)


async def close_after(provider, stream):
    await read_request(stream)


async def half_a_head(provider, stream):
    await read_request(stream)
    await stream.send_all(b"HTTP/1.1 20")


async def no_http(provider, stream):
    await read_request(stream)
    await stream.send_all(b"220 mail.example ESMTP\r\n")


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize(
    "behave",
    [reset_at_once, reset_in_the_middle, reset_after, close_after, half_a_head, no_http],
)
async def test_an_answer_that_never_came_leaves_it_unknown(channel, behave):
    async with fake_provider(behave=behave, host=OWN_HOST) as provider:
        assert isinstance(await send(channel, options(provider.url)), Ambiguous)
    assert provider.connections == 1  # there was no silent retry


@pytest.mark.parametrize("behave", [hang, read_and_hang])
async def test_a_timeout_after_sending_leaves_it_unknown(behave):
    async with fake_provider(behave=behave) as provider:
        started = trio.current_time()
        outcome = await send("webhook", options(provider.url, timeout_seconds=2))
        assert outcome == Ambiguous("no complete answer within 2 s")
        assert trio.current_time() - started > 1.9


async def test_a_timeout_before_sending_is_tried_again():
    # The connection is taken, and the agreement on TLS, which comes before the request, is not.
    async with fake_provider(behave=hang) as provider:
        chosen = options(provider.url.replace("http:", "https:"), timeout_seconds=2)
        webhook = msgspec.structs.replace(chosen.webhook, allow_private_addresses=True)
        outcome = await send("webhook", msgspec.structs.replace(chosen, webhook=webhook))
        # An attempt to connect that hangs is raced by another one; no request was in any of them.
        assert outcome == Again("no complete answer within 2 s")


@pytest.mark.parametrize("channel", ["email", "sms"])
async def test_half_a_body_of_a_success_leaves_it_unknown(channel):
    half = http_answer(SUCCESS["sms" if channel == "sms" else "email"], b"x" * 100)[:-50]
    assert isinstance(await outcome_of(channel, half), Ambiguous)


async def answer_and_drip(provider, stream):
    await read_request(stream)
    await stream.send_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:  # as many receivers do that think before they end their answer
        await stream.send_all(b"1\r\n.\r\n")
        await trio.sleep(0.05)


async def answer_and_break(provider, stream):
    await read_request(stream)
    await stream.send_all(b"HTTP/1.1 202 OK\r\ncontent-length: 100\r\n\r\nhalf")
    await reset(stream)


async def answer_and_garble(provider, stream):
    await read_request(stream)
    await stream.send_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nno chunk\r\n")


@pytest.mark.parametrize("behave", [answer_and_drip, answer_and_break, answer_and_garble])
async def test_a_2xx_head_means_accepted_regardless_of_the_body(behave):
    async with fake_provider(behave=behave, host=OWN_HOST) as provider:
        assert await send("webhook", options(provider.url, timeout_seconds=20)) == Sent()
    assert provider.connections == 1


async def test_the_query_of_the_url_arrives_as_it_was_written_and_nowhere_else(caplog):
    query = "api-version=2016-06-01&sig=a%2Bb-C_d&sp=%2Ftriggers%2Frun&x=a+b"
    for status in (204, 302, 404, 503):
        async with fake_provider(http_answer(status)) as provider:
            outcome = await send(
                "webhook", options(provider.url, webhook_url=f"{provider.url}/in?{query}")
            )
        assert provider.requests[0].target == f"/in?{query}"
        assert "sig" not in repr(outcome)
    gone = await send("webhook", options(provider.url, webhook_url=f"{provider.url}/in?{query}"))
    assert isinstance(gone, Again)
    assert "sig" not in repr(gone) + caplog.text


@pytest.mark.parametrize("channel", ["email", "sms"])
async def test_the_patience_with_a_provider_is_a_setting(channel):
    async with fake_provider(behave=read_and_hang) as provider:
        chosen = options(provider.url)
        impatient = msgspec.structs.replace(getattr(chosen, channel), timeout_seconds=1)
        outcome = await send(channel, msgspec.structs.replace(chosen, **{channel: impatient}))
    assert outcome == Ambiguous("no complete answer within 1 s")


@pytest.mark.parametrize("channel", CHANNELS)
async def test_half_a_body_of_a_refusal_is_a_refusal(channel):
    outcome = await outcome_of(channel, http_answer(400, b"x" * 100)[:-50])
    assert isinstance(outcome, Refused)
    outcome = await outcome_of(channel, http_answer(503, b"x" * 100, retry_after=4)[:-50])
    assert outcome == Again("answered 503", 4)


@pytest.mark.parametrize("channel", CHANNELS)
async def test_cancelling_ends_at_once_and_leaves_no_connection(channel):
    arrived = trio.Event()
    ended = trio.Event()
    raised = []

    async def attempt(url):
        try:
            await send(channel, options(url))
        except BaseException as error:
            raised.append(type(error))
            raise

    async def watch(provider, stream):
        await read_request(stream)
        arrived.set()
        await stream.receive_some(1)
        ended.set()

    async with fake_provider(behave=watch) as provider:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(attempt, provider.url)
                await arrived.wait()
                nursery.cancel_scope.cancel()
            await ended.wait()
    # Unwrapped: the ``except trio.Cancelled`` that records the attempt does not see a group.
    assert raised == [trio.Cancelled]


@pytest.mark.parametrize("fault", [NotSentError("x"), AnswerLostError("x"), ValueError("secret")])
@pytest.mark.parametrize("channel", CHANNELS)
async def test_any_exception_of_a_poster_becomes_an_outcome(channel, fault, caplog):
    class Faulty:
        async def post(self, *args, **others):
            await trio.lowlevel.checkpoint()
            raise fault

    outcome = await send(channel, options("http://127.0.0.1:9"), poster=Faulty())
    assert isinstance(outcome, Again if isinstance(fault, NotSentError) else Ambiguous)
    assert "secret" not in outcome.reason + caplog.text
    assert ("notification.answer_not_understood" in caplog.text) == isinstance(fault, ValueError)


async def test_a_record_that_cannot_be_signed_is_refused_and_not_raised(caplog):
    outcome = await send("webhook", options("http://127.0.0.1:9"), what=record(delivery_id="a.b"))
    assert outcome == Refused("unexpected ValueError while the message was prepared")
    assert "notification.not_prepared" in caplog.text


async def test_certificates_are_verified():
    authority = Authority()

    async def handle(provider, stream):
        secure = trio.SSLStream(
            stream, authority.server_context("http/1.1"), server_side=True, https_compatible=True
        )
        request = await read_request(secure)
        provider.requests.append(request)
        await secure.send_all(http_answer(202))

    async with fake_provider(behave=handle) as provider:
        chosen = options(provider.url.replace("http:", "https:"))
        outcome = await send("email", chosen)
        assert isinstance(outcome, Again)
        assert "certificate" in outcome.reason
        assert provider.requests == []
        trusting = HttpPoster(clock=time.time, verify=authority.client_context())
        assert isinstance(await send("email", chosen, poster=trusting), Sent)


# What is not sent


NOT_SENT = [
    ("email", {}, {"EMAIL_API_KEY": ""}, "variable EMAIL_API_KEY is not set"),
    ("sms", {}, {"SMS_ACCOUNT_SID": " "}, "variable SMS_ACCOUNT_SID is not set"),
    ("sms", {}, {"SMS_AUTH_TOKEN": ""}, "variable SMS_AUTH_TOKEN is not set"),
    ("webhook", {}, {"SDK_WEBHOOK_SECRET": ""}, "variable SDK_WEBHOOK_SECRET is not set"),
    ("webhook", {}, {"SDK_WEBHOOK_SECRET": "short"}, "SDK_WEBHOOK_SECRET, whose value"),
    ("webhook", {}, {"SDK_WEBHOOK_SECRET": "a" * 20 + "\x00"}, "SDK_WEBHOOK_SECRET, whose value"),
    ("email", {}, {"EMAIL_API_KEY": "a\r\nX-Evil: 1"}, "variable EMAIL_API_KEY contains"),
    ("email", {"site_manager_email": None}, {}, "no site manager's email address"),
    ("email", {"site_manager_email": ""}, {}, "no site manager's email address"),
    ("sms", {"site_manager_phone": None}, {}, "no site manager's phone number"),
    ("email", {"site_manager_email_verified": False}, {}, "Notifications:SendToUnverifiedEmail"),
]


@pytest.mark.parametrize(("channel", "changes", "variables", "reason"), NOT_SENT)
async def test_a_missing_value_skips_the_message_and_is_named(channel, changes, variables, reason):
    async with fake_provider(http_answer(200)) as provider:
        outcome = await send(
            channel,
            options(provider.url),
            variables=VARIABLES | variables,
            what=record(**changes),
        )
        assert isinstance(outcome, Skipped)
        assert reason in outcome.reason
        assert not [hidden for hidden in HIDDEN if hidden in outcome.reason]
        assert provider.connections == 0


@pytest.mark.parametrize("channel", CHANNELS)
async def test_a_channel_that_is_not_enabled_skips_with_its_key(channel):
    none = EnabledChannelsOptions(email=False, sms=False, webhook=False)
    outcome = await send(channel, options("http://127.0.0.1:9", enabled_channels=none))
    key = f"Sdk:MultiTenant:Notifications:EnabledChannels:{channel.title()}"
    assert outcome == Skipped(f"{key} is false")


async def test_unverified_email_concerns_email_alone_and_can_be_allowed():
    unverified = record(site_manager_email_verified=False)
    async with fake_provider(http_answer(202)) as provider:
        chosen = options(provider.url)
        assert isinstance(await send("webhook", chosen, what=unverified), Sent)
        allowing = msgspec.structs.replace(chosen, send_to_unverified_email=True)
        assert isinstance(await send("email", allowing, what=unverified), Sent)
        provider.answer = http_answer(201)
        assert isinstance(await send("sms", chosen, what=unverified), Sent)


async def test_variables_are_read_at_each_message():
    variables = dict(VARIABLES)
    async with fake_provider(http_answer(202)) as provider:
        for key in ("one", "two"):
            variables["EMAIL_API_KEY"] = key
            await send("email", options(provider.url), variables=variables)
    assert [r.headers["authorization"] for r in provider.requests] == ["Bearer one", "Bearer two"]
