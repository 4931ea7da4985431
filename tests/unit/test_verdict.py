"""The verdict on deliveries: what passes, what does not, and what the operator reads in the log."""

import base64
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.config import KeyDerivation, Secret
from sdk_trio.webhooks.signature import Keyring, new_secret, sign
from sdk_trio.webhooks.verdict import (
    Accepted,
    Cause,
    Delivery,
    Rejected,
    signed_positions,
    verify_delivery,
)

SECRET = new_secret(b"k" * 32)
RING = Keyring.from_secrets([Secret(SECRET)], KeyDerivation.AUTO)
ID, NOW, BODY = (
    "msg_1",
    1_700_000_000,
    b'{"type":"order.created","timestamp":"t","data":{"id":"o"}}',
)
SIGNATURE = sign(SECRET, ID, NOW, BODY).encode()

Headers = list[tuple[bytes, bytes]]


def signed(webhook_id: str = ID, timestamp: int = NOW, body: bytes = BODY) -> Headers:
    return [
        (b"host", b"example.com"),
        (b"webhook-id", webhook_id.encode()),
        (b"webhook-timestamp", b"%d" % timestamp),
        (b"webhook-signature", sign(SECRET, webhook_id, timestamp, body).encode()),
    ]


def with_header(name: bytes, value: bytes) -> Headers:
    return [(key, value if key == name else old) for key, old in signed()]


def verdict(
    headers: Headers,
    body: bytes = BODY,
    now: float = NOW,
    ring: Keyring = RING,
    tolerance_seconds: int = 300,
) -> Accepted | Rejected:
    return verify_delivery(Delivery(headers, body, now), ring, tolerance_seconds=tolerance_seconds)


def cause(judged: Accepted | Rejected) -> Cause | None:
    return judged.cause if isinstance(judged, Rejected) else None


class TestPlacesThatAreKnown:
    @pytest.mark.parametrize("turn", range(5))
    def test_single_headers_are_found_at_any_position(self, turn: int) -> None:
        headers = [*signed(), (b"x", b"y")]
        headers = headers[turn:] + headers[:turn]
        places = signed_positions(headers)
        assert places is not None
        values = [headers[place] for place in places]
        assert values == signed()[1:]

    @pytest.mark.parametrize("name", [b"webhook-id", b"webhook-timestamp", b"webhook-signature"])
    def test_a_repeated_or_missing_header_is_not_found(self, name: bytes) -> None:
        others = [header for header in signed() if header[0] != name]
        assert signed_positions(others) is None
        assert signed_positions([*signed(), (name, b"x")]) is None
        assert signed_positions([*signed(), (name, b"x"), (name, b"y")]) is None

    def test_values_that_are_known_are_not_looked_for(self) -> None:
        values = (ID.encode(), b"%d" % NOW, SIGNATURE)
        known = Delivery([], BODY, NOW, values)
        assert verify_delivery(known, RING, tolerance_seconds=300) == verdict(signed())
        for wrong in (
            (b"msg_2", values[1], values[2]),
            (values[0], b"%d" % (NOW + 1), values[2]),
            (values[0], values[1], b"v1,x"),
        ):
            judged = verify_delivery(
                Delivery(signed(), BODY, NOW, wrong), RING, tolerance_seconds=300
            )
            assert isinstance(judged, Rejected)


class TestAccepted:
    def test_it_returns_the_signed_content_and_the_secret(self) -> None:
        assert verdict(signed()) == Accepted(ID, NOW, 0, KeyDerivation.STANDARD)

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"\xff\xfe",
            b"\xef\xbb\xbf{}",
            b'{"a":1,"a":2}',
            b"NaN",
            b"[" * 100_000,
            b"9" * 5000,
            b'"\\ud800"',
            b"null",
            b"\x1f\x8b\x08\0",
            bytes(2**20),
        ],
        ids=lambda body: repr(body[:12]),
    )
    def test_any_body_is_judged_only_by_its_bytes(self, body: bytes) -> None:
        assert isinstance(verdict(signed(body=body), body), Accepted)
        assert cause(verdict(signed(body=body), body + b" ")) is Cause.NO_MATCH

    def test_names_of_headers_count_without_regard_to_case(self) -> None:
        shouting = [(name.upper(), value) for name, value in signed()]
        assert isinstance(verdict(shouting), Accepted)

    def test_foreign_headers_do_not_disturb(self) -> None:
        foreign: Headers = [
            (prefix + name, b"x")
            for prefix in (b"svix-", b"webhook_", b"x-webhook-", b"webhook-x-")
            for name in (b"id", b"timestamp", b"signature")
        ]
        assert isinstance(verdict(foreign + signed() + foreign), Accepted)

    def test_repeated_signature_headers_are_one_list(self) -> None:
        *others, genuine = signed()
        wrong = (b"webhook-signature", b"v1," + base64.b64encode(b"w" * 32))
        for order in ([wrong, genuine], [genuine, wrong], [wrong, genuine, wrong]):
            assert isinstance(verdict(others + order), Accepted)

    def test_an_ed25519_delivery_has_no_derivation(self) -> None:
        # Public test vector of the Svix project.
        ring = Keyring.from_secrets(
            [Secret("whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4=")], KeyDerivation.AUTO
        )
        headers = [
            (b"webhook-id", b"msg_p5jXN8AQM9LWM0D4loKWxJek"),
            (b"webhook-timestamp", b"1614265330"),
            (
                b"webhook-signature",
                b"v1a,hnO3f9T8Ytu9HwrXslvumlUpqtNVqkhqw/enGzPCXe5BdqzCInXqYXFymVJaA7AZ"
                b"dpXwVLPo3mNl8EM+m7TBAg==",
            ),
        ]
        judged = verdict(headers, b'{"test": 2432232314}', 1614265330, ring)
        assert judged == Accepted("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, 0, None)

    def test_repr_of_a_delivery_shows_neither_signature_nor_body(self) -> None:
        text = repr(Delivery(signed(), BODY, NOW))
        assert "order.created" not in text
        assert SIGNATURE.decode() not in text


class TestTolerance:
    @pytest.mark.parametrize("offset", [-300, -299, 0, 299, 300])
    @pytest.mark.parametrize("fraction", [0.0, 0.25, 0.999])
    def test_300_seconds_pass(self, offset: int, fraction: float) -> None:
        # A timestamp has no fraction: the second in which a delivery arrives counts as a whole.
        assert isinstance(verdict(signed(), now=NOW + offset + fraction), Accepted)

    @pytest.mark.parametrize(("offset", "expected"), [(301, Cause.TOO_OLD), (-301, Cause.TOO_NEW)])
    def test_301_seconds_do_not(self, offset: int, expected: Cause) -> None:
        judged = verdict(signed(), now=NOW + offset)
        assert isinstance(judged, Rejected)
        assert judged.cause is expected
        assert "301 s" in judged.detail
        assert "300 s" in judged.detail

    def test_the_setting_decides(self) -> None:
        assert isinstance(verdict(signed(), now=NOW + 5, tolerance_seconds=5), Accepted)
        assert cause(verdict(signed(), now=NOW + 6, tolerance_seconds=5)) is Cause.TOO_OLD
        assert isinstance(verdict(signed(), now=NOW, tolerance_seconds=0), Accepted)
        assert cause(verdict(signed(), now=NOW - 1, tolerance_seconds=0)) is Cause.TOO_NEW

    @pytest.mark.parametrize("now", [math.nan, math.inf, -math.inf])
    def test_a_broken_clock_rejects(self, now: float) -> None:
        assert cause(verdict(signed(), now=now)) in {Cause.TOO_OLD, Cause.TOO_NEW}

    def test_the_epoch_itself_is_a_time(self) -> None:
        assert isinstance(verdict(signed(timestamp=0), now=12.5), Accepted)


class TestHostileHeaders:
    @pytest.mark.parametrize(
        "value",
        [
            b"",
            b"a.b",
            b".",
            b"../",
            b"a\r\nb",
            b"a\n",
            b"\0",
            b"a b",
            b" a",
            b"a\t",
            b"\x7f",
            b"\xc3\xa9",
            b"i" * 257,
            b"i" * 10_240,
        ],
        ids=lambda value: repr(value[:12]),
    )
    def test_ids(self, value: bytes) -> None:
        assert cause(verdict(with_header(b"webhook-id", value))) is Cause.BAD_ID

    def test_an_id_of_256_characters_passes(self) -> None:
        assert isinstance(verdict(signed(webhook_id="i" * 256)), Accepted)

    def test_the_same_id_with_another_body_is_rejected(self) -> None:
        assert cause(verdict(signed(), BODY.replace(b"order", b"Order"))) is Cause.NO_MATCH

    @pytest.mark.parametrize(
        "value",
        [
            b"",
            b"%d.0" % NOW,
            b"%d.9" % NOW,
            b"1.7e9",
            b"%de0" % NOW,
            b"+%d" % NOW,
            b"-%d" % NOW,
            b"1_700_000_000",
            b" %d" % NOW,
            b"%d " % NOW,
            b"\t%d" % NOW,
            b"%d\n" % NOW,
            b"0%d" % NOW,
            b"000%d" % NOW,
            b"00",
            "".join(chr(0x660 + int(digit)) for digit in str(NOW)).encode(),
            "\u00b2".encode("latin-1"),
            b"nan",
            b"inf",
            b"1" * 13,
            b"9" * 400,
            b"%d000" % NOW,
            b"2023-11-14T22:13:20Z",
            b"123abc",
            b"0x6553f100",
        ],
        ids=lambda value: repr(value[:20]),
    )
    def test_timestamps(self, value: bytes) -> None:
        assert cause(verdict(with_header(b"webhook-timestamp", value))) is Cause.BAD_TIMESTAMP

    def test_milliseconds_are_named(self) -> None:
        judged = verdict(with_header(b"webhook-timestamp", b"%d000" % NOW))
        assert isinstance(judged, Rejected)
        assert "milliseconds" in judged.detail

    @pytest.mark.parametrize(
        "value",
        [
            b"",
            b"v1",
            b"v1,",
            b",x",
            b"v1," + base64.b64encode(b"s" * 31),
            b"v2," + SIGNATURE[3:],
            SIGNATURE[3:],
            b"V" + SIGNATURE[1:],
            SIGNATURE[:-8],
            b"v1,x " * 1000 + SIGNATURE,
            b"A" * 2**20,
            b"\xa0" + SIGNATURE,
        ],
        ids=lambda value: repr(value[:16]),
    )
    def test_signatures(self, value: bytes) -> None:
        judged = verdict(with_header(b"webhook-signature", value))
        assert cause(judged) is Cause.BAD_SIGNATURE_HEADER

    def test_the_cap_counts_all_lines_of_a_repeated_signature(self) -> None:
        line = (b"webhook-signature", b"v1,x " * 20)
        assert cause(verdict([*signed(), line])) is None
        assert cause(verdict([*signed(), line, line])) is Cause.BAD_SIGNATURE_HEADER

    @pytest.mark.parametrize("name", [b"webhook-id", b"webhook-timestamp"])
    @pytest.mark.parametrize("spelling", [bytes.lower, bytes.title, bytes.upper])
    @pytest.mark.parametrize("first", [True, False])
    @pytest.mark.parametrize("same", [True, False])
    def test_a_repeated_header_is_rejected_wherever_and_however_it_is_spelled(
        self, name: bytes, spelling: type[bytes], first: bool, same: bool
    ) -> None:
        value = dict(signed())[name] if same else b"7"
        extra = (spelling(name), value)
        headers = [extra, *signed()] if first else [*signed(), extra]
        assert cause(verdict(headers)) is Cause.REPEATED_HEADER

    @pytest.mark.parametrize("name", [b"webhook-id", b"webhook-timestamp", b"webhook-signature"])
    def test_a_missing_header_is_named(self, name: bytes) -> None:
        judged = verdict([pair for pair in signed() if pair[0] != name])
        assert isinstance(judged, Rejected)
        assert judged.cause is Cause.MISSING_HEADER
        assert judged.detail.startswith(f"{name.decode()} missing")

    @pytest.mark.parametrize(
        ("replaced", "hint"), [((b"webhook-", b"svix-"), "svix"), ((b"-", b"_"), "underscore")]
    )
    def test_other_names_do_not_stand_in_and_are_pointed_out(
        self, replaced: tuple[bytes, bytes], hint: str
    ) -> None:
        renamed = [(name.replace(*replaced), value) for name, value in signed()]
        for headers in (renamed, [signed()[1], *renamed]):
            judged = verdict(headers)
            assert isinstance(judged, Rejected)
            assert judged.cause is Cause.MISSING_HEADER
            assert hint in judged.detail

    def test_no_headers_at_all(self) -> None:
        assert cause(verdict([])) is Cause.MISSING_HEADER


class TestOrder:
    def test_an_old_delivery_is_old_with_any_signature(self) -> None:
        headers = with_header(b"webhook-signature", b"v1,x")
        assert cause(verdict(headers, now=NOW + 301)) is Cause.TOO_OLD

    def test_the_three_headers_come_first(self) -> None:
        headers = with_header(b"webhook-id", b"a.b")[:-1]
        assert cause(verdict(headers, now=NOW + 301)) is Cause.MISSING_HEADER


class TestDetails:
    def test_a_foreign_signature_points_at_secret_and_body(self) -> None:
        judged = verdict(signed(), BODY + b" ")
        assert isinstance(judged, Rejected)
        assert "another secret" in judged.detail
        assert "proxy that re-encodes JSON" in judged.detail

    def test_a_scheme_without_a_key_is_named(self) -> None:
        judged = verdict(with_header(b"webhook-signature", b"v1a," + b"A" * 86 + b"=="))
        assert isinstance(judged, Rejected)
        assert judged.cause is Cause.NO_MATCH
        assert "whpk_" in judged.detail
        key = "whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4="  # published
        ring = Keyring.from_secrets([Secret(key)], KeyDerivation.AUTO)
        judged = verdict(signed(), ring=ring)
        assert isinstance(judged, Rejected)
        assert "whsec_" in judged.detail

    @given(st.sampled_from([name for name, _ in signed()[1:]]), st.binary(max_size=60))
    def test_nothing_that_was_sent_is_quoted(self, name: bytes, value: bytes) -> None:
        judged = verdict(with_header(name, b"~~" + value), b"hidden-body")
        assert isinstance(judged, Rejected)
        for text in ("~~", SIGNATURE.decode(), SECRET, "hidden-body"):
            assert text not in judged.detail
