"""HTTP/3's parsers: what is cut anywhere says the same, what is coded is read by others, and no input breaks them."""

import pylsqpack
import pytest
from hpack import NeverIndexedHeaderTuple
from hypothesis import given
from hypothesis import strategies as st

from stormline.core import limits_quic
from stormline.outbound import http3_codec as wire
from stormline.outbound import http3_fields
from stormline.outbound.http3_fields import FieldCoder, FieldsBroken

NAMES = st.one_of(
    st.sampled_from([name for name, _ in http3_fields.STATIC]),
    st.from_regex(r"[a-z][a-z0-9-]{0,40}", fullmatch=True).map(str.encode),
)
VALUES = st.one_of(st.sampled_from([value for _, value in http3_fields.STATIC]), st.binary(max_size=300))
FIELDS = st.lists(st.tuples(NAMES, VALUES), min_size=1, max_size=12)
NUMBERS = st.integers(0, 2**62 - 1)


@given(FIELDS, st.booleans())
def test_heads_are_read_by_us_and_by_others(fields, masked):
    given_ = [NeverIndexedHeaderTuple(*field) for field in fields] if masked else fields
    coder = FieldCoder()
    for _ in range(2):  # the second time from memory
        block = coder.encode(given_)
        assert http3_fields.decode(block) == fields
        assert pylsqpack.Decoder(0, 0).feed_header(0, block)[1] == fields


@given(FIELDS)
def test_heads_of_others_are_read(fields):
    _, block = pylsqpack.Encoder().encode(0, fields)
    assert http3_fields.decode(block) == fields


@given(st.binary(max_size=200))
def test_field_sections_are_read_or_refused(block):
    try:
        fields = http3_fields.decode(block)
    except FieldsBroken:
        return
    assert all(isinstance(part, bytes) for field in fields for part in field)


def test_credentials_are_marked_for_no_table():
    block = FieldCoder().encode([NeverIndexedHeaderTuple(b"authorization", b"secret")])
    assert block[2] & 0xF0 == 0x30
    assert FieldCoder().encode([(b"authorization", b"s" * 30)])[2] & 0xF0 == 0x50


@given(NUMBERS)
def test_numbers_come_back(number):
    coded = wire.varint(number)
    assert wire.read_varint(b"x" + coded + b"y", 1) == (number, 1 + len(coded))
    assert wire.read_varint(coded[:-1], 0) is None


def frame(kind, payload):
    return wire.varint(kind) + wire.varint(len(payload)) + payload


def head(*fields):
    return frame(1, FieldCoder().encode([*fields]))


def told(data, cuts=(), *, is_head=False):
    """Give what an answer of these bytes brings, cut at some places; bodies are joined."""
    codec = wire.Http3Codec()
    codec.opened(0, is_head=is_head)
    events, body, at = [], b"", 0
    for cut in [*sorted(cut for cut in cuts if cut < len(data)), len(data)]:
        last = cut == len(data)
        for event in codec.receive(0, data[at:cut], last):
            if isinstance(event, wire.Data):
                body += event.data
                event = wire.Ended(0) if event.ended else None
            elif isinstance(event, wire.Head) and event.ended:
                events += [event._replace(ended=False), wire.Ended(0)]
                continue
            if event is not None:
                events.append(event)
        at = cut
    return [each for each in events if not isinstance(each, wire.Interim)], body


OK = (b":status", b"200")
PIECES = st.lists(
    st.one_of(st.binary(max_size=50).map(lambda data: frame(0, data)), st.just(frame(0x21, b"grease"))), max_size=6
)


@given(PIECES, st.booleans(), st.booleans(), st.lists(st.integers(0, 400), max_size=8))
def test_answers_say_the_same_however_they_are_cut(pieces, interim, trailers, cuts):
    data = (head((b":status", b"103")) if interim else b"") + head(OK, (b"x-a", b"b")) + b"".join(pieces)
    data += head((b"x-sum", b"1")) if trailers else b""
    events, body = told(data)
    assert events == [wire.Head(0, 200, [(b"x-a", b"b")], False), wire.Ended(0)]
    assert told(data, cuts) == (events, body)
    assert body == b"".join(piece[2:] for piece in pieces if piece[:1] == b"\0")


@given(st.lists(st.tuples(st.sampled_from([0, 4, 3, 7, 11, 15]), st.binary(max_size=60), st.booleans()), max_size=8))
def test_no_input_does_more_than_end_the_connection(arrivals):
    codec = wire.Http3Codec()
    codec.opened(0, is_head=False)
    codec.opened(4, is_head=True)
    try:
        for stream_id, data, ended in arrivals:
            assert all(isinstance(event, tuple) for event in codec.receive(stream_id, data, ended))
    except wire.Http3Broken as error:
        assert wire.code_name(error.code).startswith(("H3_", "QPACK_"))


CONTROL = b"\0" + frame(4, b"")


@pytest.mark.parametrize(
    ("stream_id", "data", "ended", "code"),
    [
        (3, b"\0" + frame(7, b"\0"), False, "H3_MISSING_SETTINGS"),
        (3, CONTROL + frame(4, b""), False, "H3_FRAME_UNEXPECTED"),
        (3, b"\0" + frame(4, b"\x06\x01\x06\x01"), False, "H3_SETTINGS_ERROR"),
        (3, b"\0" + frame(4, b"\x02\x01"), False, "H3_SETTINGS_ERROR"),
        (3, b"\0" + frame(4, b"\x06"), False, "H3_FRAME_ERROR"),
        (3, CONTROL + frame(7, b"\x01"), False, "H3_ID_ERROR"),
        (3, CONTROL + frame(7, b"\x04") + frame(7, b"\x08"), False, "H3_ID_ERROR"),
        (3, CONTROL + frame(7, b"\x04\x04"), False, "H3_FRAME_ERROR"),
        (3, CONTROL + frame(0, b""), False, "H3_FRAME_UNEXPECTED"),
        (3, CONTROL + frame(3, b"\0"), False, "H3_ID_ERROR"),
        (3, CONTROL + b"\x21\x80\x01\x00\x00", False, "H3_EXCESSIVE_LOAD"),
        (3, CONTROL + frame(0x21, b"") * 1100, False, "H3_EXCESSIVE_LOAD"),
        (3, CONTROL, True, "H3_CLOSED_CRITICAL_STREAM"),
        (3, b"\1\0", False, "H3_ID_ERROR"),
        (3, b"\2\x20\x3f\xe1\x1f", False, "QPACK_ENCODER_STREAM_ERROR"),
        (1, b"", False, "H3_STREAM_CREATION_ERROR"),
        (0, frame(0, b"abc"), False, "H3_FRAME_UNEXPECTED"),
        (0, frame(4, b""), False, "H3_FRAME_UNEXPECTED"),
        (0, frame(5, b""), False, "H3_ID_ERROR"),
        (0, b"\1\x80\x02\x00\x00", False, "H3_EXCESSIVE_LOAD"),
        (0, head(OK) + b"\0\x05abc", True, "H3_FRAME_ERROR"),
        (0, head(OK) + frame(0, b"") * 1100, False, "H3_EXCESSIVE_LOAD"),
        (0, frame(1, b"\0\0\x80"), False, "QPACK_DECOMPRESSION_FAILED"),
        (0, frame(1, b"\2\0"), False, "QPACK_DECOMPRESSION_FAILED"),
    ],
)
def test_what_breaks_the_connection(stream_id, data, ended, code):
    codec = wire.Http3Codec()
    codec.opened(0, is_head=False)
    with pytest.raises(wire.Http3Broken) as caught:
        list(codec.receive(stream_id, data, ended))
    assert wire.code_name(caught.value.code) == code


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (head((b"x-a", b"b")), "no status"),
        (head((b":status", b"101")), "101"),
        (head((b":status", b"100")), "interim answer"),
        (head(OK, (b"content-length", b"9")), "9 bytes short"),
        (head(OK, (b"content-length", b"9")) + frame(0, b"abc"), "6 bytes short"),
        (head(OK, (b"content-length", b"2")) + frame(0, b"abc"), "longer than its Content-Length"),
        (head((b":status", b"204")) + frame(0, b"abc"), "where there is none"),
        (head(OK) + head(OK), "a second head"),
        (head(OK, (b"connection", b"x")), "belongs to HTTP/1"),
        (b"", "before its head"),
    ],
)
def test_what_makes_an_answer_malformed(data, words):
    events, _ = told(data)
    assert isinstance(events[-1], wire.Malformed)
    assert words in events[-1].what


def test_one_way_streams_are_bounded_and_unknown_ones_dropped():
    codec = wire.Http3Codec()
    for number in range(limits_quic.H3_UNI_STREAMS_MAX):
        assert not list(codec.receive(4 * number + 3, b"\x21hello", False))
    with pytest.raises(wire.Http3Broken):
        list(codec.receive(4003, b"\x21hello", False))


def test_streams_that_are_needed_may_not_be_reset_or_come_twice():
    codec = wire.Http3Codec()
    list(codec.receive(3, CONTROL, False))
    assert codec.settled
    with pytest.raises(wire.Http3Broken):
        list(codec.receive(7, CONTROL, False))
    with pytest.raises(wire.Http3Broken):
        codec.reset(3)
