"""HPACK with a memory: whatever heads come in whatever order, it reads and writes what `hpack` alone does."""

import hpack
import pytest
from hpack import NeverIndexedHeaderTuple
from hypothesis import given
from hypothesis import strategies as st

from stormline.outbound.http2_fields import FieldDecoder, FieldEncoder, read_answer

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
                # Of several changes between two heads only the smallest and the last need be told (RFC 7541, 4.2).
                told = plain.table_size_changes
                plain.table_size_changes = sorted({min(told), told[-1]})
            continue
        block = ours.encode(step)
        assert block == plain.encode(step)
        answer = reader.answer(block)
        assert plain_reader.decode(block, raw=True) == step
        assert answer == read_answer([(name, value) for name, value in step])


@given(
    st.lists(st.binary(max_size=12) | st.sampled_from([b"\x40\x01a\x011", b"\xbe", b"\x20", b"\x3f\x01"]), max_size=20)
)
def test_answers_to_any_blocks_are_what_hpack_alone_reads(blocks):
    reader, plain = FieldDecoder(max_header_list_size=4096), hpack.Decoder(max_header_list_size=4096)
    for block in blocks:
        try:
            fields = [(name, value) for name, value in plain.decode(block, raw=True)]
        except hpack.HPACKError:
            with pytest.raises(hpack.HPACKError):
                reader.answer(block)
            return
        assert reader.answer(block) == read_answer(fields)


@given(st.binary())
def test_texts_are_coded_as_hpack_codes_them(text):
    plain = hpack.Encoder().huffman_coder.encode(text)
    assert FieldEncoder().huffman_coder.encode(text) == plain
