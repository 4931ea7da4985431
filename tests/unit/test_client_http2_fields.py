"""The encoder of HTTP/2's fields: the other side always decodes the original fields."""

from hpack import Decoder, NeverIndexedHeaderTuple
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.net.http2_protocol import FieldEncoder

SECRET = (b"cookie", b"authorization")
NAMES = st.sampled_from(
    [b":path", b":authority", b"accept", b"user-agent", b"content-length", b"x-own", *SECRET]
)
VALUES = st.sampled_from([b"", b"a", b"/orders/1", b"/orders/2", b"x" * 200]) | st.binary(
    max_size=20
)
#: A request, or another size of the table that the server asks for in between.
STEPS = st.lists(
    st.lists(st.tuples(NAMES, VALUES), max_size=8) | st.sampled_from([0, 60, 128, 4096, 65_536]),
    max_size=12,
)


def fields(pairs):
    return [NeverIndexedHeaderTuple(*pair) if pair[0] in SECRET else pair for pair in pairs]


@given(STEPS)
def test_the_other_side_reads_the_same_fields(steps):
    encoder, decoder = FieldEncoder(), Decoder()
    for step in steps:
        if isinstance(step, int):
            encoder.header_table_size = decoder.max_allowed_table_size = step
            continue
        read = decoder.decode(encoder.encode(fields(step)), raw=True)
        assert [tuple(each) for each in read] == step
        for each in read:
            assert isinstance(each, NeverIndexedHeaderTuple) == (each[0] in SECRET)


def test_the_table_settles_and_holds_no_token():
    encoder = FieldEncoder()

    def encode(path):
        pairs = [(b":method", b"GET"), (b":path", path), (b"user-agent", b"sdk-trio")]
        return encoder.encode(fields([*pairs, (b"authorization", b"Bearer secret")]))

    first = encode(b"/orders/0")
    entries = list(encoder.header_table.dynamic_entries)
    lengths = [len(encode(b"/orders/%d" % number)) for number in range(300)]
    assert list(encoder.header_table.dynamic_entries) == entries
    assert b"authorization" not in [name for name, _ in entries]
    assert lengths[0] < len(first)
    assert max(lengths) < len(b"/orders/999" + b"Bearer secret") + 10
