"""HPACK with a memory: whatever heads come in whatever order, it reads and writes what `hpack` alone does."""

import hpack
from hpack import NeverIndexedHeaderTuple
from hypothesis import given
from hypothesis import strategies as st

from stormline.outbound.http2_fields import FieldDecoder, FieldEncoder

NAMES = st.sampled_from([b":method", b"accept", b"cookie", b"x-a", b"x-b"])
VALUES = st.sampled_from([b"", b"GET", b"1", b"2", b"long" * 30])
FIELDS = st.builds(
    lambda name, value, never: NeverIndexedHeaderTuple(name, value) if never else (name, value),
    NAMES, VALUES, st.booleans(),
)  # fmt: skip
STEPS = st.lists(st.lists(FIELDS, min_size=1, max_size=6) | st.sampled_from([0, 64, 200, 4096]), max_size=30)


@given(STEPS)
def test_heads_come_through_unchanged_and_as_hpack_alone_codes_them(steps):
    ours, plain = FieldEncoder(), hpack.Encoder()
    reader, plain_reader = FieldDecoder(max_header_list_size=65_536), hpack.Decoder()
    for step in steps:
        if isinstance(step, int):
            ours.header_table_size = step
            if step != plain.header_table_size:  # it forgets to announce a change where the size is set twice
                plain.header_table_size = step
            continue
        block = ours.encode(step)
        assert block == plain.encode(step)
        read = reader.decode(block, raw=True)
        assert read == plain_reader.decode(block, raw=True) == step
