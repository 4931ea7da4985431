"""The formats of texts in settings: an accepted text means the same to every part that uses it."""

import ipaddress
import os
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sdk_trio.config.fields import (
    SOCKET_MODES,
    UNIX_PATH_BYTES,
    Form,
    check_form,
    is_plain_loopback,
    split_unix,
)

ACCEPTED = {
    Form.URL: ["http://a", "https://a.example:443/x", "http://[::1]:8080/"],
    Form.HTTPS_URL: ["https://api.example.com/v1"],
    Form.HOOK_URL: ["https://hooks.example/in?key=1"],
    Form.API_VERSION: ["2026-04", "2026-04-01"],
    Form.ROUTE: ["/", "/hooks/sdk", "/a//b", "/%7Eme"],
    Form.RECEIVER_ROUTE: ["/", "/hooks/sdk", "/a//b", "/~me"],
    Form.FORWARD_URL: ["http://127.0.0.1:3000/in?a=1", "unix:/run/a:/in", "unix:/a"],
    Form.CONDITION: ["/data/status=paid", "/data/n=1", "/a=", '/a~1b="x=y"'],
    Form.HEADER: ["X-Real-IP", "a"],
    Form.ENVIRONMENT_NAME: ["Production", "a_b-1", "x" * 64],
    Form.ENV_VAR: ["TOKEN", "_t1"],
    Form.PLACE: ["X-Id", "Stripe-Signature:t", "/data/id", "/"],
    Form.POINTER: ["/data/object", "/"],
    Form.SLUG: ["a", "acme-eu", "0" * 64],
    Form.SCHEMA: ["sdk_trio", "_a1", "a" * 63],
    Form.PHONE: ["+15551234567", "+49"],
    Form.EMAIL: ["ops@example.com", "Zoë@exämple.com"],
    Form.HEADER_TEXT: ["Acme", "Zoë 🎁", "שלום"],
    Form.HOST: ["api.example.com", "10.0.0.1"],
    Form.BIND: ["0.0.0.0:8080", "[::]:0", "localhost:65535", "unix:/run/s", "fd:3", "fd:web.sock"],
    Form.CIDR: ["10.0.0.0/8", "192.0.2.1", "2001:db8::/32"],
    Form.PROXY: ["unix", "10.0.0.1"],
    Form.ABSOLUTE_PATH: ["/usr/bin/x", "C:\\x"],
}  # fmt: skip

REFUSED = {
    Form.URL: [
        "a", "//a", "ftp://a", "http://", "http://a b", "http://u:p@a", "http://a/?x", "http://a/#",
    ],
    Form.HTTPS_URL: [
        "http://api.example.com", "https://a?x=1", "https://a:0", "https://a..b", "example.com",
        "/v1", "ftp://example.com", "https://", "https:///v1", "https://user:pass@example.com",
        "https://exa mple.com", "https://ex%00ample.com", "https://example.com\n", "https://[::1",
        "https://a:99999", "http://localhost:9000", "http://127.0.0.1.example.com",
        f"https://{'a' * 64}.b", f"https://{'a.' * 127}b/",
    ],
    Form.HOOK_URL: ["https://a/#x", "https://u@a"],
    Form.API_VERSION: [
        "2026", "2026-13", "2026-02-30", "26-01", "2026-04-01T00", "2025-1-1", "latest",
        "2025-01-01\n",
    ],
    Form.ROUTE: ["hooks", "/a b", "/a?b", "/a#b", "/ä", ""],
    Form.RECEIVER_ROUTE: ["hooks", "/a b", "/a?b", "/a#b", "/ä", "", "/%7Eme"],
    Form.FORWARD_URL: ["localhost:3000", "http://u:p@a", "unix:", "unix::/a", "unix:/a:b"],
    Form.CONDITION: ["/data/status", "data/status=paid", "=paid", ""],
    Form.HEADER: ["X Real", "a:", "ä"],
    Form.ENVIRONMENT_NAME: ["a b", "x" * 65, "ä"],
    Form.ENV_VAR: ["1T", "A-B", "whsec_a/b="],
    Form.PLACE: ["X Id", "a:", "a:b:c", "data/id", "a:" + "b" * 33, "ä"],
    Form.POINTER: ["data", "a/b"],
    Form.SLUG: ["-a", "a-", "A", "a" * 65, "a_b", "a b", "\u00e4", "a\n"],
    Form.SCHEMA: ["1a", "A", "a-b", "pg_a", 'a"b', "a" * 64],
    Form.PHONE: ["15557654321", "+0123", "+1 555", "+١٢٣", "", "+1555123456789012", "+1\n"],
    Form.EMAIL: ["ops", "Ops <ops@a.b>", "a@b,c@d", "a@b\u200b.c"],
    Form.HEADER_TEXT: ["a\nb", "a\r\nBcc: x@y.z", "a\u202eb", "\u3164", " \u2800"],
    Form.HOST: ["a:80", "-a", "a_b"],
    Form.BIND: [
        "8080", "a:", "a:70000", "::1:80", "[::1:80", "unix:", "unix:/s?mode=777", "fd:/", ":8080",
        "localhost", "localhost:", "localhost:x", "unix:/x?mode=0777", "unix:/x?mode=",
        "unix:?mode=0660", "[::1]", "[zz]:80", "fd:", "fd:1234567", "fd:a b", "a b:80",
        "unix:/" + "a" * 107,
    ],
    Form.CIDR: ["10.0.0.1/8", "10.0.0.0/33", "a"],
    Form.PROXY: ["unix:/s", "10.0.0.1/8"],
    Form.ABSOLUTE_PATH: ["x", "./x", "C:x"],
}  # fmt: skip


def pairs(table):
    return [(form, text) for form, texts in table.items() for text in texts]


@pytest.mark.parametrize(("form", "text"), pairs(ACCEPTED))
def test_accepted_values(form, text):
    assert check_form(form, text, development=False) is None


@pytest.mark.parametrize(("form", "text"), pairs(REFUSED))
def test_refused_values(form, text):
    assert check_form(form, text, development=False)


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize(
    "text", ["planted", "whsec_planted/=", "http://u:planted@a b", "planted\n"]
)
def test_a_credential_instead_of_its_name_is_not_quoted(form, text):
    assert "planted" not in (check_form(form, text, development=False) or "")


def test_every_form_has_its_examples():
    assert {*ACCEPTED, Form.SIGNING} == set(Form) == {*REFUSED, Form.SIGNING}


@pytest.mark.parametrize("url", ["http://localhost:1", "http://127.0.0.1/x", "http://[::1]:80"])
def test_plain_http_stays_on_this_machine_and_in_development(url):
    assert check_form(Form.HTTPS_URL, url, development=True) is None
    assert "Development only" in (check_form(Form.HTTPS_URL, url, development=False) or "")
    assert is_plain_loopback(url)


@pytest.mark.parametrize("url", ["http://127.0.0.1.example.com", "http://localhost.a", "http://a"])
def test_addresses_that_resemble_loopback_are_remote(url):
    assert check_form(Form.HTTPS_URL, url, development=True)
    assert not is_plain_loopback(url)


# -- an accepted text means the same to every part that uses it ----------------------------------

# Names in ASCII alone: what else is a host differs between the IDNA of 2003 and that of 2008.
hosts = st.text("abcA.-_:[]@/?#%\u2024 \\", max_size=20)


@given(st.builds("{}://{}".format, st.sampled_from(["http", "https"]), hosts))
@example("https://a\\@b")
@example("http://_ä")
@example("http://300.1.1.1")
@example("http://1.2.3.04")
@example("http://-ä")
@example("http://ä-.a")
@example("http://ab--ä")
@example("https://a.:1/")
def test_a_url_that_is_taken_leads_the_client_to_the_same_host(url):
    if check_form(Form.URL, url, development=False) is not None:
        return
    used = httpx.URL(url)
    assert used.raw_host == (urlsplit(url).hostname or "").encode("idna")
    assert not used.userinfo
    assert not used.query


@given(st.text("0123456789abcdefx:./[]- ", max_size=24))
def test_an_address_that_is_taken_is_one_that_can_be_bound_to(text):
    if check_form(Form.BIND, text, development=False) is not None:
        return
    host, _, port = text.rpartition(":")
    assert 0 <= int(port) <= 65_535
    if host.startswith("["):
        ipaddress.IPv6Address(host[1:-1])
    else:
        assert ":" not in host
        assert "/" not in host


@given(st.text(min_size=1).filter(lambda path: "?mode=" not in path), st.sampled_from(SOCKET_MODES))
def test_the_path_and_the_mode_of_a_socket_come_back_as_they_were_written(path, mode):
    assert split_unix(f"unix:{path}?mode={mode}") == (path, mode)
    assert split_unix(f"unix:{path}") == (path, "0600")
    fits = "\0" not in path and len(os.fsencode(path)) <= UNIX_PATH_BYTES
    assert (check_form(Form.BIND, f"unix:{path}?mode={mode}", development=False) is None) == fits


@given(st.ip_addresses(), st.integers(0, 128))
def test_a_block_is_taken_as_it_would_be_written(address, prefix):
    text = f"{address}/{prefix}"
    try:
        exact = str(ipaddress.ip_network(text, strict=False)) == text
        possible = True
    except ValueError:
        exact = possible = False
    wrong = check_form(Form.CIDR, text, development=False)
    assert (wrong is None) == exact
    if possible and not exact:
        written = wrong.rpartition(" ")[2]  # the remedy is one that is taken
        assert check_form(Form.CIDR, written, development=False) is None


@given(st.sampled_from(list(Form)), st.text(max_size=40), st.booleans())
def test_any_text_is_taken_or_refused_with_a_sentence(form, text, development):
    wrong = check_form(form, text, development=development)
    assert wrong is None or wrong.split()[0] in ("must", "holds", "has")
