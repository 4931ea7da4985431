"""Which forwarding headers are believed: the spoofing matrix."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.config.fields import ForwardedHeaders
from sdk_trio.errors import OptionsValidationError
from sdk_trio.webhooks.origin import AllowedSources, RequestOrigin, TrustedProxies

CLIENT, ATTACKER = "203.0.113.7", "198.51.100.66"
EDGE, INNER = "10.0.0.1", "10.0.0.2"
PROXIES = TrustedProxies(["10.0.0.0/8", "2001:db8:aaaa::/48", "unix"])

Lines = list[tuple[str, str]]


def origin(
    *lines: tuple[str, str],
    peer: str | None = EDGE,
    scheme: str = "http",
    proxies: TrustedProxies = PROXIES,
) -> RequestOrigin:
    headers = [(name.encode(), value.encode("latin-1")) for name, value in lines]
    return proxies.resolve(peer, scheme, headers)


def xff(value: str) -> tuple[str, str]:
    return "x-forwarded-for", value


def proto(value: str) -> tuple[str, str]:
    return "x-forwarded-proto", value


def forwarded(value: str) -> tuple[str, str]:
    return "forwarded", value


class TestDirectPeers:
    @pytest.mark.parametrize(("scheme", "secure"), [("https", True), ("http", False)])
    def test_the_socket_decides_without_headers(self, scheme: str, secure: bool) -> None:
        for peer in (CLIENT, EDGE):
            assert origin(peer=peer, scheme=scheme) == RequestOrigin(peer, secure)

    @pytest.mark.parametrize(
        "lines",
        [
            [proto("https")],
            [xff(CLIENT), proto("https")],
            [forwarded(f"for={CLIENT};proto=https")],
            [xff(EDGE), proto("https, https")],
        ],
    )
    @pytest.mark.parametrize("proxies", [PROXIES, TrustedProxies([])])
    def test_an_untrusted_peer_is_not_believed(self, lines: Lines, proxies: TrustedProxies) -> None:
        assert origin(*lines, peer=ATTACKER, proxies=proxies) == RequestOrigin(
            ATTACKER, secure=False
        )

    def test_an_untrusted_peer_cannot_make_itself_insecure_or_another(self) -> None:
        lines = [xff(CLIENT), proto("http"), forwarded("for=x;proto=http")]
        assert origin(*lines, peer=ATTACKER, scheme="https") == RequestOrigin(ATTACKER, secure=True)

    def test_by_default_no_peer_is_trusted_not_even_this_machine(self) -> None:
        none_trusted = TrustedProxies([])
        for peer in ("127.0.0.1", "::1", None, ""):
            assert origin(
                xff(CLIENT), proto("https"), peer=peer, proxies=none_trusted
            ) == RequestOrigin(peer or None, secure=False)


class TestXForwarded:
    @pytest.mark.parametrize(
        ("senders", "protocols", "expected"),
        [
            # One trusted proxy: its own entry is the last one; it received the earlier ones.
            (CLIENT, "https", RequestOrigin(CLIENT, True)),
            (CLIENT, "HTTPS", RequestOrigin(CLIENT, True)),
            (CLIENT, "http", RequestOrigin(CLIENT, False)),
            (CLIENT, "https, http", RequestOrigin(CLIENT, False)),
            (CLIENT, "http, https", RequestOrigin(CLIENT, True)),
            (f"{CLIENT}, {ATTACKER}", "https", RequestOrigin(ATTACKER, True)),
            (f"{EDGE}, {ATTACKER}", "https, http", RequestOrigin(ATTACKER, False)),
            (f"garbage, {ATTACKER}", "garbage, https", RequestOrigin(ATTACKER, True)),
            # Two trusted proxies: the outer one saw how the sender came.
            (f"{CLIENT}, {INNER}", "https, http", RequestOrigin(CLIENT, True)),
            (f"{CLIENT}, {INNER}", "http, https", RequestOrigin(CLIENT, False)),
            (f"{CLIENT}, {INNER}", "https", RequestOrigin(CLIENT, True)),
            (f"{CLIENT}, {INNER}", "http", RequestOrigin(CLIENT, False)),
            (f"{ATTACKER}, {CLIENT}, {INNER}", "https, http, http", RequestOrigin(CLIENT, False)),
            # Three proxies and two entries: it is unknown which proxy added which entry.
            (f"{CLIENT}, {INNER}, 10.0.0.3", "https, http", RequestOrigin(CLIENT, False)),
            (f"{CLIENT}, {INNER}, 10.0.0.3", "https, https", RequestOrigin(CLIENT, True)),
            # A sender inside the trusted network.
            ("10.9.9.9", "https", RequestOrigin("10.9.9.9", True)),
            # Empty entries do not count.
            (f" , {CLIENT}\t,", ",https,", RequestOrigin(CLIENT, True)),
            # Ports and spellings.
            (f"{CLIENT}:4711", "https", RequestOrigin(CLIENT, True)),
            ("[2001:DB8::1]:4711", "https", RequestOrigin("2001:db8::1", True)),
            ("2001:db8:0::1", "https", RequestOrigin("2001:db8::1", True)),
            (f"::ffff:{CLIENT}", "https", RequestOrigin(CLIENT, True)),
            (f"{CLIENT}, ::ffff:{INNER}", "https, http", RequestOrigin(CLIENT, True)),
            ("unknown", "https", RequestOrigin(None, True)),
        ],
    )
    def test_the_walk(self, senders: str, protocols: str, expected: RequestOrigin) -> None:
        assert origin(xff(senders), proto(protocols)) == expected
        # However the entries are spread over lines.
        lines = [
            *(xff(part) for part in senders.split(",")),
            *(proto(part) for part in protocols.split(",")),
        ]
        assert origin(*lines) == expected

    @pytest.mark.parametrize(
        "lines",
        [
            [xff("garbage"), proto("https")],
            [xff(f"{CLIENT} {CLIENT}"), proto("https")],
            [xff("1.2.3.4.5"), proto("https")],
            [xff("01.2.3.4"), proto("https")],
            [xff(f"{CLIENT}:"), proto("https")],
            [xff(f"{CLIENT}:http"), proto("https")],
            [xff("[2001:db8::1"), proto("https")],
            [xff("\xb2.0.0.1"), proto("https")],
            [xff("1" * 8000), proto("https")],
            [xff(f"garbage, {INNER}"), proto("https")],
            [xff(CLIENT), proto("httpss")],
            [xff(CLIENT), proto("https;")],
            [xff(CLIENT), proto("https http")],
            [xff(CLIENT), proto('"https"')],
            [proto("on")],
        ],
    )
    def test_garbage_that_is_vouched_for_means_the_peer_and_insecure(self, lines: Lines) -> None:
        assert origin(*lines, scheme="https") == RequestOrigin(EDGE, secure=False)

    def test_protocol_alone_is_read_at_the_peer_s_entry(self) -> None:
        assert origin(proto("https")) == RequestOrigin(EDGE, True)
        assert origin(proto("https, http")) == RequestOrigin(EDGE, False)
        assert origin(proto("https"), proto("http")) == RequestOrigin(EDGE, False)

    def test_without_protocol_the_socket_decides(self) -> None:
        assert origin(xff(CLIENT)) == RequestOrigin(CLIENT, False)
        assert origin(xff(CLIENT), scheme="https") == RequestOrigin(CLIENT, True)

    def test_the_proxy_s_word_outweighs_an_encrypted_socket(self) -> None:
        assert origin(xff(CLIENT), proto("http"), scheme="https") == RequestOrigin(CLIENT, False)

    def test_names_count_without_regard_to_case(self) -> None:
        assert origin(("X-Forwarded-For", CLIENT), ("X-FORWARDED-PROTO", "https")) == RequestOrigin(
            CLIENT, True
        )

    def test_the_peer_of_a_unix_socket_can_be_trusted(self) -> None:
        for peer in (None, ""):
            assert origin(xff(CLIENT), proto("https"), peer=peer) == RequestOrigin(CLIENT, True)
            assert origin(peer=peer) == RequestOrigin(None, False)

    def test_a_mapped_peer_is_the_ipv4_address_it_stands_for(self) -> None:
        assert origin(xff(CLIENT), proto("https"), peer=f"::ffff:{EDGE}") == RequestOrigin(
            CLIENT, True
        )
        assert origin(peer=f"::ffff:{CLIENT}") == RequestOrigin(CLIENT, False)

    def test_a_peer_without_an_address_is_not_trusted(self) -> None:
        assert origin(proto("https"), peer="testclient") == RequestOrigin("testclient", False)


class TestForwarded:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ("proto=https", RequestOrigin(EDGE, True)),
            (f"for={CLIENT};proto=https", RequestOrigin(CLIENT, True)),
            (f"For={CLIENT}; Proto=HTTPS; by=10.0.0.1; host=a", RequestOrigin(CLIENT, True)),
            (f"for={CLIENT};proto=http", RequestOrigin(CLIENT, False)),
            (f"for={CLIENT}", RequestOrigin(CLIENT, False)),
            ('for="[2001:db8::1]:4711";proto=https', RequestOrigin("2001:db8::1", True)),
            ('for="[2001:db8::1]";proto=https', RequestOrigin("2001:db8::1", True)),
            (f'for="{CLIENT}:4711";proto="https"', RequestOrigin(CLIENT, True)),
            (f"for={CLIENT}:4711;proto=https", RequestOrigin(CLIENT, True)),
            (f'for="{CLIENT}:_x";proto=https', RequestOrigin(CLIENT, True)),
            ("for=unknown;proto=https", RequestOrigin(None, True)),
            ("for=_hidden;proto=https", RequestOrigin(None, True)),
            (f'host="a,b;c";for={CLIENT};proto=https', RequestOrigin(CLIENT, True)),
            # Only what trusted proxies added counts.
            (
                f"for={CLIENT};proto=https, for={ATTACKER};proto=http",
                RequestOrigin(ATTACKER, False),
            ),
            (f"for={CLIENT};proto=https, for={INNER};proto=http", RequestOrigin(CLIENT, True)),
            (f"for={CLIENT};proto=http, for={INNER};proto=https", RequestOrigin(CLIENT, False)),
            (f"garbage, for={ATTACKER};proto=https", RequestOrigin(ATTACKER, True)),
            (f"for={CLIENT}, for={INNER};proto=https", RequestOrigin(CLIENT, False)),
            (f"proto=https, for={INNER};proto=http", RequestOrigin(INNER, True)),
            # A quote that the sender leaves open swallows nothing.
            (f'for="evil, for={ATTACKER};proto=http', RequestOrigin(ATTACKER, False)),
            (
                f'for={CLIENT};proto=https;x=", for={ATTACKER};proto=http',
                RequestOrigin(ATTACKER, False),
            ),
        ],
    )
    def test_the_walk(self, value: str, expected: RequestOrigin) -> None:
        assert origin(forwarded(value)) == expected

    @pytest.mark.parametrize(
        "value",
        [
            "garbage",
            "for=garbage;proto=https",
            "for=;proto=https",
            f"for={CLIENT};proto=",
            f"for={CLIENT};proto=ftp",
            f"for={CLIENT};for={CLIENT};proto=https",
            f"for={CLIENT};proto=http;proto=https",
            f'for="{CLIENT};proto=https',
            f'for="{CLIENT}\\";proto=https',
            f"for={CLIENT} proto=https",
            f"for = {CLIENT};proto=https",
            f'for="{CLIENT}"x;proto=https',
            ";" * 100,
        ],
    )
    def test_garbage_means_the_peer_and_insecure(self, value: str) -> None:
        assert origin(forwarded(value), scheme="https") == RequestOrigin(EDGE, secure=False)

    def test_lines_are_joined(self) -> None:
        lines = [forwarded(f"for={CLIENT};proto=https"), forwarded(f"for={ATTACKER};proto=http")]
        assert origin(*lines) == RequestOrigin(ATTACKER, False)


class TestBothFamilies:
    def test_agreement(self) -> None:
        lines = [xff(CLIENT), proto("https"), forwarded(f"for={CLIENT};proto=https")]
        assert origin(*lines) == RequestOrigin(CLIENT, True)

    @pytest.mark.parametrize(
        "lines",
        [
            [xff(CLIENT), proto("https"), forwarded(f"for={CLIENT};proto=http")],
            [xff(CLIENT), proto("http"), forwarded(f"for={CLIENT};proto=https")],
            [xff(CLIENT), proto("https"), forwarded(f"for={ATTACKER};proto=https")],
            [xff(CLIENT), proto("https"), forwarded("for=unknown;proto=https")],
            [proto("http"), forwarded("proto=https")],
            [xff(CLIENT), proto("https"), forwarded("garbage")],
        ],
    )
    def test_contradiction_is_the_insecure_reading(self, lines: Lines) -> None:
        assert origin(*lines, scheme="https") == RequestOrigin(EDGE, secure=False)

    @pytest.mark.parametrize(
        "lines",
        [
            [proto("https"), forwarded(f"for={CLIENT}")],
            [proto("https"), forwarded(f"for={CLIENT};proto=https")],
            [xff(CLIENT), forwarded("proto=https")],
        ],
    )
    def test_headers_of_only_one_family_may_be_the_sender_s_own(self, lines: Lines) -> None:
        """A proxy that sets one header of the three passes the sender's others on."""
        assert origin(*lines) == RequestOrigin(EDGE, False)

    def test_an_empty_family_contradicts_nothing(self) -> None:
        assert origin(xff(CLIENT), proto("https"), forwarded("")) == RequestOrigin(CLIENT, True)
        assert origin(xff(" ,"), forwarded(f"for={CLIENT};proto=https")) == RequestOrigin(
            CLIENT, True
        )

    @pytest.mark.parametrize(
        ("family", "expected"),
        [
            (ForwardedHeaders.FORWARDED, RequestOrigin(ATTACKER, True)),
            (ForwardedHeaders.X_FORWARDED, RequestOrigin(CLIENT, False)),
            (ForwardedHeaders.AUTO, RequestOrigin(EDGE, False)),
        ],
    )
    def test_the_family_of_the_settings_is_the_only_one_that_is_read(
        self, family: ForwardedHeaders, expected: RequestOrigin
    ) -> None:
        proxies = TrustedProxies(["10.0.0.0/8"], family)
        lines = [xff(CLIENT), proto("http"), forwarded(f"for={ATTACKER};proto=https")]
        assert origin(*lines, proxies=proxies) == expected

    def test_a_contradiction_is_reported_once_and_garbage_is_none(self) -> None:
        reported: list[str | None] = []
        proxies = TrustedProxies(["10.0.0.0/8"], on_contradiction=reported.append)
        origin(forwarded("garbage"), proxies=proxies)
        origin(xff(CLIENT), proto("https"), proxies=proxies)
        assert reported == []
        for _ in range(2):
            origin(proto("http"), forwarded("proto=https"), proxies=proxies)
        assert reported == [EDGE]


tokens = st.lists(
    st.sampled_from(
        [*'",;=:[] \t\\_', CLIENT, EDGE, INNER, "for", "proto", "https", "http", "::1", "unknown"]
    ),
    max_size=25,
).map("".join)
values = st.one_of(tokens, st.binary(max_size=60).map(lambda value: value.decode("latin-1")))
lines_of_headers = st.lists(
    st.tuples(st.sampled_from(["forwarded", "x-forwarded-for", "x-forwarded-proto"]), values),
    max_size=5,
)


class TestAnyHeaders:
    @given(lines_of_headers, st.sampled_from([EDGE, None, "::1", ATTACKER]))
    def test_no_headers_raise(self, lines: Lines, peer: str | None) -> None:
        found = origin(*lines, peer=peer)
        if peer in ("::1", ATTACKER):
            assert found == RequestOrigin(peer, secure=False)

    @given(values, values, values)
    def test_an_attacker_s_headers_through_an_appending_proxy_change_nothing(
        self, senders: str, protocols: str, elements: str
    ) -> None:
        found = origin(
            xff(f"{senders}, {ATTACKER}"),
            proto(f"{protocols}, http"),
            forwarded(f"{elements}, for={ATTACKER};proto=http"),
        )
        assert found == RequestOrigin(ATTACKER, secure=False)


class TestAllowedSources:
    def test_without_ranges_every_address_is_allowed(self) -> None:
        for address in (CLIENT, None, "testclient"):
            assert AllowedSources([]).allows(address)

    @pytest.mark.parametrize(
        ("address", "allowed"),
        [
            ("203.0.113.0", True),
            ("203.0.113.255", True),
            ("203.0.114.0", False),
            ("::ffff:203.0.113.9", True),
            ("::ffff:203.0.114.9", False),
            ("2001:db8::1", True),
            ("2001:db9::1", False),
            ("192.0.2.1", True),
            ("192.0.2.2", False),
            ("203.0.113.9:80", False),
            ("testclient", False),
            ("", False),
            (None, False),
        ],
    )
    def test_ranges(self, address: str | None, allowed: bool) -> None:
        ranges = ["203.0.113.0/24", "2001:db8::/32", "::ffff:192.0.2.1/128"]
        assert AllowedSources(ranges).allows(address) is allowed

    def test_a_mapped_range_is_the_ipv4_range_it_stands_for(self) -> None:
        mapped = AllowedSources(["::ffff:203.0.113.0/120"])
        assert mapped.allows("203.0.113.200")
        assert not mapped.allows("203.0.114.1")


class TestSettings:
    @pytest.mark.parametrize(
        ("make", "key"),
        [
            (TrustedProxies, "Sdk:Server:TrustedProxies"),
            (AllowedSources, "Sdk:Webhooks:AllowedSourceIpRanges"),
        ],
    )
    def test_every_bad_block_is_listed_with_the_key(
        self, make: type[TrustedProxies | AllowedSources], key: str
    ) -> None:
        with pytest.raises(OptionsValidationError) as caught:
            make(["10.0.0.1/8", "10.0.0.0/8", "proxy.example", ""])
        assert [problem.key for problem in caught.value.problems] == [key] * 3
        assert "10.0.0.1/8" in caught.value.problems[0].message

    def test_unix_is_not_a_source_range(self) -> None:
        with pytest.raises(OptionsValidationError):
            AllowedSources(["unix"])
