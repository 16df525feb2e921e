"""HPACK with a memory: heads are read and written as `hpack` alone would, with less work."""

import hpack
import pytest
from hpack import NeverIndexedHeaderTuple

from stormline.core import limits
from stormline.outbound.http2_fields import FieldDecoder, FieldEncoder, read_answer

HEAD = [(b":method", b"GET"), (b":authority", b"a.test"), (b"user-agent", b"x/1"), (b"accept", b"*/*")]


def test_encoder_repeats_itself_byte_for_byte_where_nothing_changed() -> None:
    ours, theirs = FieldEncoder(), hpack.Encoder()

    for _ in range(3):
        assert ours.encode(HEAD) == theirs.encode(HEAD)


def test_encoder_finds_a_field_at_its_new_place_after_another_came_in() -> None:
    ours, reader = FieldEncoder(), hpack.Decoder()
    for head in (HEAD, HEAD, [(b"x-new", b"1")], HEAD, HEAD):
        assert reader.decode(ours.encode(head), raw=True) == head


def test_encoder_after_the_peer_shrank_its_table_says_so_and_uses_no_lost_entry() -> None:
    ours, reader = FieldEncoder(), hpack.Decoder()
    for _ in range(2):
        reader.decode(ours.encode(HEAD), raw=True)
    reader.max_allowed_table_size = 0
    ours.header_table_size = 0
    ours.header_table_size = 0

    block = ours.encode(HEAD)

    assert block[0] == 0x20
    assert reader.decode(block, raw=True) == HEAD
    assert reader.decode(ours.encode(HEAD), raw=True) == HEAD


def test_decoder_gives_each_caller_a_list_of_its_own() -> None:
    writer, ours = hpack.Encoder(), FieldDecoder(max_header_list_size=4096)
    ours.decode(writer.encode(HEAD), raw=True)
    block = writer.encode(HEAD)

    ours.decode(block, raw=True).clear()
    ours.decode(block, raw=True).clear()

    assert ours.decode(block, raw=True) == HEAD


def test_decoder_forgets_heads_when_the_table_changes() -> None:
    ours = FieldDecoder(max_header_list_size=4096)
    ours.decode(b"\x40\x01a\x011", raw=True)
    assert ours.decode(b"\xbe", raw=True) == [(b"a", b"1")]

    ours.decode(b"\x40\x01b\x012", raw=True)

    assert ours.decode(b"\xbe", raw=True) == [(b"b", b"2")]
    assert ours.decode(b"\xbf", raw=True) == [(b"a", b"1")]


def test_decoder_answers_again_what_the_tables_still_mean() -> None:
    ours, plain = FieldDecoder(max_header_list_size=4096), hpack.Decoder()
    blocks = [
        b"\x88\x40\x01a\x011", b"\x88\xbe", b"\x88\xbe", b"\x40\x01b\x012", b"\x88\xbe", b"\x88\xbf",
        b"\x3f\x0f\x88", b"\x88\xbe", b"\x88\x0f\x0d\x012", b"\x88\x0f\x0d\x012", b"\x20\x88", b"\x88",
    ]  # fmt: skip
    for block in blocks:
        answer = ours.answer(block)
        fields = [(name, value) for name, value in plain.decode(block, raw=True)]
        assert answer == read_answer(fields)


def test_decoder_remembers_literals_that_enter_no_table_and_forgets_in_time() -> None:
    ours = FieldDecoder(max_header_list_size=65_536)
    literal = b"\x88\x00\x01a\x011"
    assert ours.answer(literal) is ours.answer(literal)
    for number in range(3 * limits.H2_FIELDS_KNOWN):
        ours.answer(b"\x88\x00\x01a\x03%03d" % number)
        assert len(ours._known) <= limits.H2_FIELDS_KNOWN
    large = b"\x88\x00\x01a\x7f\xa1\x1e" + bytes(4000)
    ours.answer(large)
    assert large not in ours._known


def test_encoder_keeps_fields_that_enter_no_table_apart_from_their_equals() -> None:
    ours, theirs = FieldEncoder(), hpack.Encoder()
    field, never = (b"x-a", b"1"), NeverIndexedHeaderTuple(b"x-a", b"1")
    for each in (never, field, never, field, never, (b"x-b", b"2"), never, field):
        assert ours.encode([each]) == theirs.encode([each])


@pytest.mark.parametrize("block", [b"\xff\xff\xff", b"\xc0", b"\x80"])
def test_decoder_refuses_a_malformed_block_each_time(block) -> None:
    ours = FieldDecoder(max_header_list_size=4096)

    for _ in range(2):
        with pytest.raises(hpack.HPACKError):
            ours.decode(block, raw=True)
