"""Bodies are decompressed within their bound, in whichever pieces they come."""

import contextlib
import gzip
import random
import tracemalloc
import zlib

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.client.answers import BoundedBody, TooLargeError


def raw_deflate(data):
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def twice(data):
    return zlib.compress(gzip.compress(data))


FORMS = {
    "identity": (["identity"], bytes),
    "gzip": (["GZip"], gzip.compress),
    "members": (["x-gzip"], lambda data: gzip.compress(data[:3]) + gzip.compress(data[3:])),
    "padded": (["gzip"], lambda data: gzip.compress(data) + bytes(5)),
    "deflate": (["deflate"], zlib.compress),
    "raw deflate": (["deflate"], raw_deflate),
    "twice": (["gzip", "deflate"], twice),
}


def fed(body, data, size):
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    whole = b"".join(piece for part in parts for piece in body.feed(part))
    body.end()
    return whole


@given(
    st.sampled_from(sorted(FORMS)),
    st.binary(max_size=500) | st.integers(0, 200_000).map(bytes),
    st.integers(1, 70_000),
)
def test_every_form_gives_back_what_was_packed(name, data, size):
    codings, pack = FORMS[name]
    assert fed(BoundedBody(codings, limit=1 << 20), pack(data), size) == data


@pytest.mark.parametrize("name", ["gzip", "deflate", "raw deflate", "twice"])
def test_a_bomb_takes_no_more_memory_than_the_bound(name):
    codings, pack = FORMS[name]
    bomb = pack(bytes(64 << 20))
    body = BoundedBody(codings, limit=1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(TooLargeError):
            fed(body, bomb, 65_536)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_the_bound_is_the_last_size_that_passes_and_the_beginning_is_kept():
    for pack, codings in [(bytes, []), (gzip.compress, ["gzip"])]:
        assert fed(BoundedBody(codings, limit=1000), pack(b"x" * 1000), 100) == b"x" * 1000
        body = BoundedBody(codings, limit=1000, keeps_beginning=True)
        with pytest.raises(TooLargeError) as caught:
            fed(body, pack(b"x" * 1001), 10_000)
        assert caught.value.beginning == b"x" * 1000
    noise = random.Random(1).randbytes(100_000)
    assert fed(BoundedBody(["gzip"], limit=len(noise)), gzip.compress(noise), 999) == noise
    with pytest.raises(TooLargeError) as caught:
        fed(BoundedBody(["gzip"], limit=100), gzip.compress(b"x" * 101), 10_000)
    assert caught.value.beginning == b""


def test_compressed_bytes_that_stand_for_nothing_count_too():
    with pytest.raises(TooLargeError):
        fed(BoundedBody(["gzip"], limit=1000), gzip.compress(b"") * 200, 100)


@pytest.mark.parametrize(
    ("codings", "data"),
    [
        (["br"], b"x"),
        (["zstd"], b"x"),
        (["gzip"] * 4, b"x"),
        (["gzip"], b"not gzip"),
        (["deflate"], b"not deflate"),
        (["gzip"], gzip.compress(b"x" * 100, mtime=0)[:-9]),
    ],
)
def test_data_that_cannot_be_decompressed_is_an_error(codings, data):
    with pytest.raises(httpx.DecodingError):
        fed(BoundedBody(codings, limit=None), data, 10)


def test_no_body_at_all_is_whole():
    assert fed(BoundedBody(["gzip"], limit=None), b"", 1) == b""


@given(st.sampled_from(["gzip", "deflate"]), st.binary(max_size=100), st.integers(1, 50))
def test_any_bytes_are_decompressed_or_refused(coding, data, size):
    with contextlib.suppress(httpx.DecodingError):
        fed(BoundedBody([coding], limit=1 << 20), data, size)
