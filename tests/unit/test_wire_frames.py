"""Frames and messages: what is read, what is refused, and when."""

import msgspec
import pytest

from stormline.core import limits
from stormline.core.codes import Code
from stormline.core.errors import RemoteProtocolError
from stormline.wire import frames
from stormline.wire import messages as m

_pack = msgspec.msgpack.encode


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


def read(data: bytes, frame_bytes_max: int = limits.FRAME_BYTES_MAX) -> m.Message | None:
    buffer = frames.FrameBuffer(frame_bytes_max)
    buffer.feed(data)
    return buffer.next_message()


def test_encode_any_message_puts_its_length_in_front():
    data = frames.encode(m.Ping(7))
    assert data == b"\x00\x00\x00\x03\x92\x0b\x07"


def test_encode_message_over_the_bound_is_refused():
    with pytest.raises(ValueError, match="at most"):
        frames.encode(m.Push(1, "p", body=bytes(limits.FRAME_BYTES_MAX)))


def test_tags_of_all_messages_are_their_place_in_the_list():
    assert [kind.__struct_config__.tag for kind in m.ALL] == list(range(len(m.ALL)))


def test_buffer_two_frames_and_a_half_gives_two_messages():
    buffer = frames.FrameBuffer(limits.FRAME_BYTES_MAX)
    third = frames.encode(m.Ping(3))
    buffer.feed(frames.encode(m.Ping(1)) + frames.encode(m.Ping(2)) + third[:3])
    assert [buffer.next_message(), buffer.next_message(), buffer.next_message()] == [m.Ping(1), m.Ping(2), None]
    assert len(buffer) == 3
    buffer.feed(third[3:])
    assert buffer.next_message() == m.Ping(3)
    assert len(buffer) == 0


@pytest.mark.parametrize("length", [2**16 + 1, 2**31 - 1, 2**31, 2**32 - 1])
def test_buffer_oversized_length_is_refused_before_any_of_it_comes(length: int):
    with pytest.raises(RemoteProtocolError) as caught:
        read(length.to_bytes(4, "big"))
    assert caught.value.code is Code.FRAME_TOO_LARGE


def test_buffer_frame_of_exactly_the_bound_is_read():
    filler = limits.FRAME_BYTES_MAX - len(_pack([9, 1, "p", "", [], b""])) - 3  # bin16 has a head of 3, bin8 of 2
    data = frames.encode(m.Push(1, "p", body=bytes(filler + 1)))
    assert int.from_bytes(data[:4], "big") == limits.FRAME_BYTES_MAX
    assert isinstance(read(data), m.Push)


@pytest.mark.parametrize(
    ("payload", "what"),
    [
        (b"", "empty frame"),
        (b"\x90", "no tag"),
        (b"\x91\x0b", "a required field is missing"),
        (b"\x92\x10\x01", "unknown tag"),
        (b"\x92\xcd\x01\x00\x01", "unknown tag 256"),
        (b"\x92\xff\x01", "negative tag"),
        (b"\x92\xa4ping\x01", "tag is a text"),
        (b"\x81\xa4ping\x01", "a map"),
        (b"\xc0", "nil"),
        (b"\x05", "a number"),
        (b"\x92\x0b\xa11", "text for a number"),
        (b"\x92\x0b\xc3", "true for a number"),
        (b"\x92\x0b\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00", "a float for an integer"),
        (b"\x92\x0b\xc0", "nil for a number"),
        (b"\x93\x02\x00\xc4\x01A", "bytes for a text"),
        (b"\x93\x04\x01\xa1A", "text for bytes"),
        (b"\x93\x02\x00\xa1\xff", "a text that is not UTF-8"),
        (b"\x93\x02\x00\xa3\xed\xa0\x80", "a surrogate in a text"),
        (b"\x92\x0b\x01\x00", "bytes after the message"),
        (b"\x92\x0b", "cut short"),
        (b"\x92\x0b\xc1", "the byte that MessagePack never uses"),
        (b"\x92\x0a\xdd\xff\xff\xff\xff", "an array of 2^32 - 1 that is not there"),
        (b"\x93\x04\x01\xc6\xff\xff\xff\xff", "4 GiB of bytes that are not there"),
        (b"\x93\x0b\x01" + b"\x91" * 50_000 + b"\xc0", "a nest of 50,000 arrays in an unknown field"),
        (_pack([3, 1, "rpc", "a.b", "", [["x"]]]), "a header without a value"),
        (_pack([3, 1, "rpc", "a.b", "", [["x", "y", "z"]]]), "a header of three"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_message_malformed_is_refused_as_protocol_error(payload: bytes, what: str):
    with pytest.raises(RemoteProtocolError) as caught:
        read(frame(payload))
    assert caught.value.code is Code.PROTOCOL_ERROR, what


@pytest.mark.parametrize(
    "extra",
    [None, 5, -1, 1.5, "text", b"bytes", True, [1, [2, {"a": 3}]], {"map": [1]}, msgspec.msgpack.Ext(1, b"ext")],
    ids=lambda value: type(value).__name__,
)
def test_message_with_fields_of_a_later_version_reads_as_without(extra: object):
    known = m.Fail(1, 500, "no such thing", 20, True)
    assert read(frame(_pack([6, 1, 500, "no such thing", 20, True, extra, extra]))) == known


def test_message_without_trailing_fields_takes_their_defaults():
    assert read(frame(_pack([0, [1], "shop"]))) == m.Hello(versions=(1,), app="shop")
    assert read(frame(_pack([3, 1, "rpc", "a.b"]))) == m.Call(1, "rpc", "a.b")
    assert read(frame(_pack([1, 1, "s", "d"]))) == m.Welcome(1, "s", "d")


def test_message_whole_number_for_a_float_is_read():
    assert read(frame(_pack([1, 1, "s", "d", "", "", 0, "", 30, False, 60]))) == m.Welcome(
        1, "s", "d", resume_window_s=30.0, heartbeat_s=60.0
    )


def test_message_in_a_longer_encoding_of_the_same_values_is_read():
    payload = b"\xdc\x00\x02" + b"\xcc\x0b" + b"\xcf" + (7).to_bytes(8, "big")
    assert read(frame(payload)) == m.Ping(7)


def test_hello_repr_hides_the_credentials():
    hello = m.Hello(versions=(1,), app="shop", token="eyJ.secret.sig", resume="r-secret")
    assert "secret" not in repr(hello)
