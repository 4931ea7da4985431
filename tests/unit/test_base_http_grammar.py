"""The grammar of HTTP, against the lists of characters in RFC 9110."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.base.http import FIELD_VALUE_BYTES, TOKEN, breaks_value, is_token, is_token_bytes

# RFC 9110, 5.6.2: tchar.
TOKEN_CHARACTERS = set(
    "!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
)


@pytest.mark.parametrize("code", range(0x180))
def test_the_characters_of_a_token_are_those_of_the_standard(code):
    character = chr(code)
    assert bool(is_token(character)) == (character in TOKEN_CHARACTERS)
    assert bool(is_token(f"a{character}b")) == (character in TOKEN_CHARACTERS)
    if code < 0x100:
        assert bool(is_token_bytes(bytes([code]))) == (character in TOKEN_CHARACTERS)


def test_a_token_has_a_character_and_no_line_end():
    for text in ("", "\n", "a\n", "a\r\n"):
        assert not is_token(text)
        assert not is_token_bytes(text.encode())


@given(st.text(), st.text(alphabet=sorted(TOKEN_CHARACTERS), min_size=1))
def test_a_token_is_found_whole_in_a_longer_grammar(rest, token):
    match = re.compile(rf"({TOKEN})=(.*)", re.DOTALL).fullmatch(f"{token}={rest}")
    assert match
    assert match[1] == token


@pytest.mark.parametrize("byte", range(256))
def test_values_that_are_received_and_sent(byte):
    value = b"a" + bytes([byte]) + b"b"
    control = (byte < 0x20 and byte != 9) or byte == 0x7F
    assert bool(re.fullmatch(FIELD_VALUE_BYTES, value)) is not control
    assert bool(breaks_value(value)) == (byte in b"\0\r\n")
