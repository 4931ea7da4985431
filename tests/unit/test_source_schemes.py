"""Schemes of sources: whose deliveries pass, and that no changed one does."""

import base64
import hashlib
import json
import math
import time
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.sources import BY_NAME, SENDERS, Sender, as_asgi

from sdk_trio.config.fields import HmacAlgorithm, HmacEncoding, SourceScheme
from sdk_trio.config.options.sources import SourceOptions
from sdk_trio.config.secret import Secret
from sdk_trio.webhooks.signature import MAX_ENTRIES
from sdk_trio.webhooks.sources.schemes import Genuine, Keys, Scheme
from sdk_trio.webhooks.sources.signing import make_body, sign_as
from sdk_trio.webhooks.verdict import Cause, Rejected

NOW = 1_700_000_000
ID = "evt_1"

Headers = list[tuple[bytes, bytes]]

EACH = pytest.mark.parametrize("sender", SENDERS, ids=lambda sender: sender.name)


def verify(
    options: SourceOptions, headers: Headers, body: bytes, now: float = NOW
) -> Genuine | Rejected:
    return Scheme.of(options).verify(
        headers, body, now=now, keys=Keys.of(options), tolerance=options.tolerance_seconds
    )


def cause(verdict: Genuine | Rejected) -> Cause | None:
    return verdict.cause if isinstance(verdict, Rejected) else None


def delivery(sender: Sender, at: int = NOW, secret: str | None = None) -> tuple[Headers, bytes]:
    body = sender.body(ID, 7)
    return as_asgi(sender.headers(ID, at, body, secret)), body


def changed(headers: Headers, name: str, value: bytes) -> Headers:
    return [(key, value if key == name.encode() else old) for key, old in headers]


# -- what passes ---------------------------------------------------------------------------------


@EACH
def test_a_delivery_that_its_sender_signed_passes_with_its_id_and_type(sender: Sender) -> None:
    verdict = verify(sender.options, *delivery(sender))

    assert isinstance(verdict, Genuine)
    assert (verdict.webhook_id, verdict.type) == (ID, sender.type)
    assert verdict.timestamp == (NOW if sender.signs_timestamp else None)


SUBJECTS = {
    "ai": "resp_7",
    "mail": "mail_7",
    "stripe": "in_7",
    "github": None,
    "shop": "1007",
    "paddle": "txn_7",
}


@EACH
def test_the_subject_is_read_where_the_scheme_has_it(sender: Sender) -> None:
    verdict = verify(sender.options, *delivery(sender))

    assert isinstance(verdict, Genuine)
    assert verdict.subject == SUBJECTS[sender.name]


@EACH
def test_any_of_several_secrets_verifies_while_one_is_rotated(sender: Sender) -> None:
    other = Secret(sender.secret[:-4] + "AAAA")
    options = replace(sender.options, secrets=(other, *sender.options.secrets))

    assert isinstance(verify(options, *delivery(sender)), Genuine)


@EACH
@pytest.mark.parametrize(
    ("age", "passes"), [(300, True), (301, False), (-300, True), (-301, False)]
)
def test_the_signed_time_counts_where_there_is_one(sender: Sender, age: int, passes: bool) -> None:
    verdict = verify(sender.options, *delivery(sender, NOW - age))

    assert isinstance(verdict, Genuine) == (passes or not sender.signs_timestamp)


@EACH
def test_a_clock_that_is_no_number_rejects_every_signed_time(sender: Sender) -> None:
    verdict = verify(sender.options, *delivery(sender), now=math.nan)

    assert isinstance(verdict, Genuine) == (not sender.signs_timestamp)


def test_the_published_vector_of_github_passes() -> None:
    secret = "It's a Secret to Everybody"
    options = replace(BY_NAME["github"].options, secrets=(Secret(secret),))
    headers = [
        (b"x-github-event", b"push"),
        (b"x-github-delivery", b"72d3162e-cc78-11e3-81ab-4c9367dc0958"),
        (
            b"x-hub-signature-256",
            b"sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17",
        ),
    ]

    # The signature matches; the body of the vector is no JSON.
    assert cause(verify(options, headers, b"Hello, World!")) is Cause.NOT_AN_EVENT
    assert cause(verify(options, headers, b"Hello, World?")) is Cause.NO_MATCH


def test_the_published_vector_of_standard_webhooks_passes_under_both_names() -> None:
    body = b'{"test": 2432232314}'
    values = (
        b"msg_p5jXN8AQM9LWM0D4loKWxJek",
        b"1614265330",
        b"v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    )
    for prefix, scheme in (
        ("webhook-", SourceScheme.STANDARD_WEBHOOKS),
        ("svix-", SourceScheme.SVIX),
    ):
        options = SourceOptions(
            name="one",
            scheme=scheme,
            secrets=(Secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"),),
            type="/test",
        )
        names = (f"{prefix}{name}".encode() for name in ("id", "timestamp", "signature"))
        headers = list(zip(names, values, strict=True))

        verdict = verify(options, headers, body, now=1_614_265_330)

        assert isinstance(verdict, Genuine)
        assert verdict.type == "2432232314"


def test_the_published_vector_of_slack_passes_with_a_timestamp_in_the_signed_text() -> None:
    options = SourceOptions(
        name="slack",
        scheme=SourceScheme.HMAC,
        secrets=(Secret("8f742231b10e8888abcd99yyyzzz85a5"),),
        header="X-Slack-Signature",
        prefix="v0=",
        signed_content="v0:{timestamp}:{body}",
        timestamp="X-Slack-Request-Timestamp",
        type="X-Kind",
    )
    body = (
        b"token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow"
        b"&channel_id=G8PSS9T3V&channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner"
        b"&command=%2Fwebhook-collect&text=&response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands"
        b"%2FT1DC2JH3J%2F397700885554%2F96rGlfmibIGlgcZRskXaIFfN"
        b"&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c"
    )
    headers = [
        (b"x-slack-request-timestamp", b"1531420618"),
        (
            b"x-slack-signature",
            b"v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503",
        ),
        (b"x-kind", b"command"),
    ]

    # The signature matches; the body of the vector is a form.
    assert cause(verify(options, headers, body, now=1_531_420_618)) is Cause.NOT_AN_EVENT
    assert cause(verify(options, headers, body + b"0", now=1_531_420_618)) is Cause.NO_MATCH


# -- what this package signs, the senders' own libraries accept ----------------------------------


def test_the_senders_own_libraries_accept_what_is_signed_as_they_do() -> None:
    from standardwebhooks import Webhook as StandardWebhook
    from stripe import WebhookSignature
    from svix.webhooks import Webhook as SvixWebhook

    now = time.time()  # the libraries compare with their own clock

    def signed(name: str) -> tuple[dict[str, str], bytes]:
        sender = BY_NAME[name]
        made = make_body(
            sender.options, sender.type, {"id": "x"}, webhook_id=ID, timestamp=int(now)
        )
        sent = sign_as(sender.options, sender.type, made, webhook_id=ID, timestamp=int(now))
        return dict(sent.headers), sent.body

    headers, body = signed("ai")
    StandardWebhook(BY_NAME["ai"].secret).verify(body, headers)
    headers, body = signed("mail")
    SvixWebhook(BY_NAME["mail"].secret).verify(body, headers)
    headers, body = signed("stripe")
    WebhookSignature.verify_header(
        body.decode(), headers["stripe-signature"], BY_NAME["stripe"].secret, 300
    )


@EACH
def test_a_delivery_that_is_signed_here_equals_the_senders(sender: Sender) -> None:
    body = sender.body(ID)

    made = sign_as(sender.options, sender.type, body, webhook_id=ID, timestamp=NOW)

    assert made.webhook_id == ID
    assert made.headers == {
        # A list of entries may be separated by either.
        name.lower(): value.replace(";", ",")
        for name, value in sender.headers(ID, NOW, body).items()
    }


# -- forgeries -----------------------------------------------------------------------------------

#: The headers that no signature covers: a stranger who has a delivery can change them.
UNSIGNED = {
    "github": {b"x-github-event", b"x-github-delivery"},
    "shop": {b"x-shopify-topic", b"x-shopify-webhook-id"},
}


def forgeries(sender: Sender) -> Iterator[tuple[str, Headers, bytes]]:
    """Yield changed deliveries of one sender, each with its name."""
    headers, body = delivery(sender)
    signed = [
        (name, value)
        for name, value in headers
        if name != b"content-type" and name not in UNSIGNED.get(sender.name, ())
    ]
    for position in range(0, len(body) * 8, max(1, len(body) * 8 // 120)):
        changed_body = bytearray(body)
        changed_body[position // 8] ^= 1 << position % 8
        yield f"bit {position} of the body", headers, bytes(changed_body)
    for name, value in signed:
        for position in range(0, len(value) * 8, max(1, len(value) * 8 // 120)):
            flipped = bytearray(value)
            flipped[position // 8] ^= 1 << position % 8
            yield (
                f"bit {position} of {name!r}",
                changed(headers, name.decode(), bytes(flipped)),
                body,
            )
        for text, other in (
            ("empty", b""),
            ("cut", value[:-2]),
            ("longer", value + b"0"),
            ("in capitals", value.swapcase()),
            ("only a prefix", value[: value.find(b"=") + 1] or b"v1,"),
            ("a NUL", value + b"\0"),
            ("not ASCII", "é".encode() + value),
            ("a megabyte", value * (2**20 // len(value))),
            ("many entries", b",".join([b"v1=00,sha256=00,h1=00"] * 40)),
        ):
            yield f"{text}: {name!r}", changed(headers, name.decode(), other), body
        yield f"without {name!r}", [pair for pair in headers if pair[0] != name], body
    for size in (0, 1, len(body) - 1):
        yield f"{size} bytes of the body", headers, body[:size]
    yield "more body", headers, body + b" "
    for secret in (sender.secret[:-1] + "x", sender.secret.swapcase(), "another secret of 24"):
        try:
            yield "another secret", *delivery(sender, secret=secret)
        except Exception:
            continue
    for other_sender in SENDERS:
        if other_sender is not sender:
            yield f"of {other_sender.name}", delivery(other_sender)[0], body


@EACH
def test_no_forgery_passes(sender: Sender) -> None:
    headers, body = delivery(sender)
    genuine = verify(sender.options, headers, body)
    assert isinstance(genuine, Genuine)

    tried = 0
    for name, forged, forged_body in forgeries(sender):
        if (forged, forged_body) == (headers, body):
            continue
        tried += 1
        verdict = verify(sender.options, forged, forged_body)
        assert isinstance(verdict, Rejected), f"{sender.name}: {name}"
    assert tried >= 200


@EACH
def test_a_header_that_is_sent_twice_is_refused(sender: Sender) -> None:
    headers, body = delivery(sender)
    for name, value in headers[1:]:
        if name in (b"webhook-signature", b"svix-signature", b"x-github-event", b"x-shopify-topic"):
            continue  # a longer list of entries, or a type, of which there is none then
        assert cause(verify(sender.options, [*headers, (name, value)], body)) is (
            Cause.REPEATED_HEADER
        ), name


def test_a_header_has_at_most_as_many_entries_as_for_the_upstream() -> None:
    stripe = BY_NAME["stripe"]
    headers, body = delivery(stripe)
    sent = dict(headers)[b"stripe-signature"]

    def passes(others: int) -> bool:
        value = sent + b",v1=00" * others
        return isinstance(
            verify(stripe.options, changed(headers, "stripe-signature", value), body), Genuine
        )

    assert passes(MAX_ENTRIES - 1)
    assert not passes(MAX_ENTRIES)


def test_two_timestamps_in_one_header_are_refused() -> None:
    stripe = BY_NAME["stripe"]
    headers, body = delivery(stripe)
    value = dict(headers)[b"stripe-signature"] + b",t=%d" % (NOW + 1)

    verdict = verify(stripe.options, changed(headers, "stripe-signature", value), body)

    assert cause(verdict) is Cause.BAD_SIGNATURE_HEADER


def test_svix_reads_no_headers_of_another_name() -> None:
    mail = BY_NAME["mail"]
    headers, body = delivery(mail)
    renamed = [(name.replace(b"svix-", b"webhook-"), value) for name, value in headers]

    assert cause(verify(mail.options, renamed, body)) is Cause.MISSING_HEADER


def test_an_id_of_github_is_not_signed() -> None:
    # As docs/how-to/source-github.md says, only deduplication stops a replay, and only of the
    # same id.
    github = BY_NAME["github"]
    headers, body = delivery(github)

    verdict = verify(github.options, changed(headers, "x-github-delivery", b"other"), body)

    assert isinstance(verdict, Genuine)
    assert verdict.webhook_id == "other"
    assert not Scheme.of(github.options).signs_id


@EACH
@given(
    headers=st.lists(
        st.tuples(
            st.sampled_from(
                [
                    b"webhook-id",
                    b"webhook-timestamp",
                    b"webhook-signature",
                    b"svix-id",
                    b"svix-signature",
                    b"stripe-signature",
                    b"x-hub-signature-256",
                    b"x-github-event",
                    b"x-shopify-hmac-sha256",
                    b"paddle-signature",
                ]
            ),
            st.one_of(st.binary(max_size=90), st.sampled_from([b"t=1700000000,v1=", b"sha256="])),
        ),
        max_size=6,
    ),
    body=st.one_of(st.binary(max_size=60), st.sampled_from([b'{"type":1}', b"[" * 3000, b"null"])),
)
@example(headers=[], body=b"")
def test_any_bytes_are_rejected_and_nothing_is_raised(
    sender: Sender, headers: Headers, body: bytes
) -> None:
    assert isinstance(verify(sender.options, headers, body), Rejected)


@given(
    sender=st.sampled_from(SENDERS),
    body=st.one_of(
        st.binary(max_size=80),
        st.recursive(
            st.one_of(st.none(), st.integers(), st.text(max_size=9)),
            lambda inner: st.dictionaries(
                st.sampled_from(["id", "type", "data", "object", "event_id", "event_type"]), inner
            ),
            max_leaves=8,
        ).map(lambda value: json.dumps(value).encode()),
    ),
)
def test_any_signed_body_gives_an_event_or_a_rejection(sender: Sender, body: bytes) -> None:
    # Whatever a sender signs, nothing but the two verdicts may come of it.
    sent = sign_as(sender.options, sender.type, body, webhook_id=ID, timestamp=NOW)

    verdict = verify(sender.options, as_asgi(sent.headers), body)

    if isinstance(verdict, Rejected):
        assert verdict.cause in (Cause.NOT_AN_EVENT, Cause.BAD_ID)


NOT_JSON = (b"", b"payload=%7B%7D", b"{'a':1}", b'{"a":"\xff"}', b'{"a":"\\x"}', b"{}{}")


@EACH
@pytest.mark.parametrize("body", NOT_JSON)
def test_a_signed_body_that_no_handler_can_read_is_refused(sender: Sender, body: bytes) -> None:
    sent = sign_as(sender.options, sender.type, body, webhook_id=ID, timestamp=NOW)

    assert cause(verify(sender.options, as_asgi(sent.headers), body)) is Cause.NOT_AN_EVENT


ODD_JSON = (b'{"a":NaN}', b'{"a":"\\ud800"}', b'\xef\xbb\xbf{"a":1}', b"[" * 9000 + b"]" * 9000)


@pytest.mark.parametrize("body", ODD_JSON, ids=lambda body: repr(body[:16]))
def test_json_that_strict_decoders_refuse_is_an_event(body: bytes) -> None:
    github = BY_NAME["github"]
    sent = sign_as(github.options, "push", body, webhook_id=ID, timestamp=NOW)

    assert isinstance(verify(github.options, as_asgi(sent.headers), body), Genuine)


# -- places and forms of Scheme Hmac -------------------------------------------------------------


def custom(**settings: object) -> SourceOptions:
    usual = SourceOptions(
        name="own",
        scheme=SourceScheme.HMAC,
        secrets=(Secret("a secret that has twenty-four bytes"),),
        header="X-Signature",
    )
    return replace(usual, **settings)


@pytest.mark.parametrize("algorithm", HmacAlgorithm)
@pytest.mark.parametrize("encoding", HmacEncoding)
def test_each_hash_and_each_form_verifies_only_itself(
    algorithm: HmacAlgorithm, encoding: HmacEncoding
) -> None:
    own = custom(algorithm=algorithm, encoding=encoding)
    sent = sign_as(own, "a", b'{"type":"a"}', timestamp=NOW)
    for other in HmacAlgorithm:
        for form in HmacEncoding:
            verdict = verify(
                custom(algorithm=other, encoding=form), as_asgi(sent.headers), sent.body
            )
            assert isinstance(verdict, Genuine) == ((other, form) == (algorithm, encoding))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (str(NOW), NOW),
        (f"{NOW}123", NOW),
        ("2023-11-14T22:13:20Z", NOW),
        ("2023-11-14T22:13:20.123456789Z", NOW),
        ("2023-11-14T23:13:20+01:00", NOW),
        *(
            (text, None)
            for text in (
                "",
                "now",
                f"{NOW}.5",
                f" {NOW}",
                f"0{NOW}",
                f"+{NOW}",
                f"{NOW}e0",
                "१७०००००००००",
                "9" * 400,
                "2023-11-14T22:13:20",
                "2023-11-14 22:13:20Z",
                "2023-13-14T22:13:20Z",
                "0001-01-01T00:00:00+23:59",
                "nan",
            )
        ),
    ],
)
def test_a_time_is_seconds_milliseconds_or_rfc_3339(text: str, seconds: int | None) -> None:
    own = custom(timestamp="/at")
    body = json.dumps({"type": "a", "at": text}).encode()
    sent = sign_as(own, "a", body, timestamp=NOW)

    verdict = verify(own, as_asgi(sent.headers), body)

    assert (verdict.timestamp if isinstance(verdict, Genuine) else None) == seconds


@pytest.mark.parametrize(
    ("sent", "stored"),
    [
        ("evt-1", "evt-1"),
        ("a.b", "sha256-" + hashlib.sha256(b"a.b").hexdigest()),
        ("", None),
        ("x" * 1025, None),
    ],
)
def test_an_id_that_cannot_be_one_here_is_its_digest(sent: str, stored: str | None) -> None:
    own = custom(id="/id")
    body = json.dumps({"type": "a", "id": sent}).encode()
    signed = sign_as(own, "a", body, timestamp=NOW)

    verdict = verify(own, as_asgi(signed.headers), body)

    assert (verdict.webhook_id if isinstance(verdict, Genuine) else None) == stored


@EACH
def test_an_id_of_catch_up_is_taken_from_no_sender(sender: Sender) -> None:
    webhook_id = "sdkstate_0123456789abcdef"
    body = sender.body(webhook_id)
    headers = as_asgi(sender.headers(webhook_id, NOW, body))

    verdict = verify(sender.options, headers, body)

    assert isinstance(verdict, Genuine)
    assert verdict.webhook_id.startswith("sha256-")


def test_without_a_place_for_it_the_id_is_a_digest_of_the_body() -> None:
    own = custom()
    one, two = (
        sign_as(own, "a", text, timestamp=NOW) for text in (b'{"type":"a"}', b'{"type":"b"}')
    )

    assert one.webhook_id != two.webhook_id
    verdict = verify(own, as_asgi(one.headers), one.body)
    assert isinstance(verdict, Genuine)
    assert verdict.webhook_id == one.webhook_id


def test_a_signed_id_cannot_be_changed() -> None:
    own = custom(signed_content="{id}.{timestamp}.{body}", id="X-Id", timestamp="X-Time")
    sent = sign_as(own, "a", b'{"type":"a"}', webhook_id=ID, timestamp=NOW)
    headers = as_asgi(sent.headers)

    assert isinstance(verify(own, headers, sent.body), Genuine)
    assert cause(verify(own, changed(headers, "x-id", b"evt_2"), sent.body)) is Cause.NO_MATCH


def test_a_pointer_follows_escapes_and_enters_objects_only() -> None:
    own = custom(type="/a~1b/c~0d")
    sent = sign_as(own, "x", b'{"a/b":{"c~d":"found"}}', timestamp=NOW)

    verdict = verify(own, as_asgi(sent.headers), sent.body)

    assert isinstance(verdict, Genuine)
    assert verdict.type == "found"
    listed = sign_as(own, "x", b'{"a/b":["found"]}', timestamp=NOW)
    assert cause(verify(own, as_asgi(listed.headers), listed.body)) is Cause.NOT_AN_EVENT


def test_the_signature_of_base64_is_compared_with_its_padding() -> None:
    shop = BY_NAME["shop"]
    headers, body = delivery(shop)
    sent = dict(headers)[b"x-shopify-hmac-sha256"]
    assert base64.b64decode(sent)

    for other in (sent.rstrip(b"="), sent.replace(b"+", b"-").replace(b"/", b"_").rstrip(b"=")):
        verdict = verify(shop.options, changed(headers, "x-shopify-hmac-sha256", other), body)
        assert cause(verdict) is Cause.NO_MATCH
