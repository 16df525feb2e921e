"""HTTP/2's frames, one rule of RFC 9113 after the other, and the floods that servers are known for."""

import struct

import h2.config
import h2.connection
import h2.events as told
import hpack
import pytest

from stormline.core import limits
from stormline.outbound import http2_codec as wire
from stormline.outbound.http2_codec import ConnectionBroken, ErrorCode, encode
from stormline.outbound.messages import HttpRequest

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END, ACK, END_HEADERS, PADDED, PRIORITIZED = 0x1, 0x1, 0x4, 0x8, 0x20
OK = b"\x88"
"""`:status: 200` as a field block."""
CALM = ErrorCode.ENHANCE_YOUR_CALM


def frame(kind, flags=0, stream=0, payload=b""):
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def settings(*pairs):
    return frame(SETTINGS, payload=b"".join(struct.pack(">HL", *pair) for pair in pairs))


NO_SETTINGS = settings()


def head(stream, *fields, ended=False, status=b"200"):
    block = hpack.Encoder().encode([(b":status", status), *fields] if status else fields, huffman=False)
    return frame(HEADERS, END_HEADERS | (END if ended else 0), stream, block)


def credit(size, stream=0):
    return frame(WINDOW_UPDATE, 0, stream, size.to_bytes(4, "big"))


def opened(*methods, bodies=False, told_settings=NO_SETTINGS):
    """Give a codec with streams 1, 3, ... open and nothing to send."""
    codec = wire.Http2Codec()
    if told_settings:
        assert list(codec.receive_data(told_settings)) == [wire.Changed()]
    for method in methods or ("GET",):
        codec.open(encode(HttpRequest(method, "https", "a.test", 443, b"/")), ended=not bodies)
    codec.data_to_send()
    return codec


def receive(codec, *pieces):
    return list(codec.receive_data(b"".join(pieces)))


def frames_of(data):
    """Cut what we send into (type, flags, stream, payload)."""
    found = []
    while data:
        size = int.from_bytes(data[:3], "big")
        found.append((data[3], data[4], int.from_bytes(data[5:9], "big"), data[9 : 9 + size]))
        data = data[9 + size :]
    return found


# -- what breaks the connection ----------------------------------------------------------------------------------------
PROTOCOL, FLOW, SIZE, CLOSED = (
    ErrorCode.PROTOCOL_ERROR, ErrorCode.FLOW_CONTROL_ERROR, ErrorCode.FRAME_SIZE_ERROR, ErrorCode.STREAM_CLOSED,
)  # fmt: skip
BREAKS = {
    "settings-on-a-stream": (frame(SETTINGS, 0, 1), PROTOCOL),
    "settings-cut": (frame(SETTINGS, payload=bytes(7)), SIZE),
    "settings-ack-with-content": (frame(SETTINGS, ACK, payload=bytes(6)), SIZE),
    "settings-push": (settings((2, 1)), PROTOCOL),
    "settings-push-nonsense": (settings((2, 7)), PROTOCOL),
    "settings-window-too-large": (settings((4, 2**31)), FLOW),
    "settings-frame-too-small": (settings((5, 16_383)), PROTOCOL),
    "settings-frame-too-large": (settings((5, 2**24)), PROTOCOL),
    "settings-overflow-a-window": (credit(2**31 - 1 - 65_535, 1) + settings((4, 65_536)), FLOW),
    "ping-on-a-stream": (frame(PING, 0, 1, bytes(8)), PROTOCOL),
    "ping-cut": (frame(PING, payload=bytes(7)), SIZE),
    "goaway-on-a-stream": (frame(GOAWAY, 0, 1, bytes(8)), PROTOCOL),
    "goaway-cut": (frame(GOAWAY, payload=bytes(7)), SIZE),
    "data-on-no-stream": (frame(DATA, payload=b"x"), PROTOCOL),
    "data-on-an-idle-stream": (frame(DATA, 0, 3, b"x"), PROTOCOL),
    "data-on-a-stream-of-the-peers": (frame(DATA, 0, 2, b"x"), PROTOCOL),
    "data-padding-too-long": (head(1) + frame(DATA, PADDED, 1, b"\x04abc"), PROTOCOL),
    "data-padding-missing": (head(1) + frame(DATA, PADDED, 1), PROTOCOL),
    "data-after-the-end": (head(1, ended=True) + frame(DATA, 0, 1, b"x"), CLOSED),
    "headers-on-no-stream": (head(0), PROTOCOL),
    "headers-on-an-idle-stream": (head(3), PROTOCOL),
    "headers-on-a-stream-of-the-peers": (head(2), PROTOCOL),
    "headers-after-the-end": (head(1, ended=True) + head(1), CLOSED),
    "headers-padding-too-long": (frame(HEADERS, END_HEADERS | PADDED, 1, b"\x02" + OK), PROTOCOL),
    "headers-priority-cut": (frame(HEADERS, END_HEADERS | PRIORITIZED, 1, bytes(4)), SIZE),
    "headers-priority-cut-by-padding": (
        frame(HEADERS, END_HEADERS | PRIORITIZED | PADDED, 1, b"\x02" + bytes(6)), SIZE,
    ),
    "headers-bad-index": (frame(HEADERS, END_HEADERS, 1, b"\xff\x10"), ErrorCode.COMPRESSION_ERROR),
    "headers-index-zero": (frame(HEADERS, END_HEADERS, 1, b"\x80"), ErrorCode.COMPRESSION_ERROR),
    "headers-cut-literal": (frame(HEADERS, END_HEADERS, 1, OK + b"\x40\x05ab"), ErrorCode.COMPRESSION_ERROR),
    "headers-table-too-large": (frame(HEADERS, END_HEADERS, 1, b"\x3f\xe2\x1f" + OK), ErrorCode.COMPRESSION_ERROR),
    "headers-bad-on-a-stream-that-is-over": (
        frame(RST_STREAM, 0, 1, bytes(4)) + frame(HEADERS, END_HEADERS, 1, b"\xff\x10"), ErrorCode.COMPRESSION_ERROR,
    ),
    "headers-interrupted": (frame(HEADERS, 0, 1, OK) + frame(PING, payload=bytes(8)), PROTOCOL),
    "headers-interrupted-by-an-unknown-frame": (frame(HEADERS, 0, 1, OK) + frame(0xFA), PROTOCOL),
    "headers-twice-unfinished": (frame(HEADERS, 0, 1, OK) + frame(HEADERS, 0, 1, OK), PROTOCOL),
    "continuation-of-another-stream": (frame(HEADERS, 0, 1, OK) + frame(CONTINUATION, 4, 3), PROTOCOL),
    "continuation-of-nothing": (frame(CONTINUATION, END_HEADERS, 1, OK), PROTOCOL),
    "priority-on-no-stream": (frame(PRIORITY, payload=bytes(5)), PROTOCOL),
    "priority-cut": (frame(PRIORITY, 0, 1, bytes(4)), SIZE),
    "rst-on-no-stream": (frame(RST_STREAM, payload=bytes(4)), PROTOCOL),
    "rst-on-an-idle-stream": (frame(RST_STREAM, 0, 3, bytes(4)), PROTOCOL),
    "rst-cut": (frame(RST_STREAM, 0, 1, bytes(3)), SIZE),
    "push": (frame(PUSH_PROMISE, END_HEADERS, 1, bytes(4) + OK), PROTOCOL),
    "credit-on-an-idle-stream": (credit(1, 3), PROTOCOL),
    "credit-cut": (frame(WINDOW_UPDATE, payload=bytes(3)), SIZE),
    "credit-of-nothing": (credit(0), PROTOCOL),
    "credit-overflow": (credit(2**31 - 1 - 65_534), FLOW),
    "frame-too-large": (b"\x00\x40\x01\x00\x00\x00\x00\x00\x01", SIZE),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_connection_that_breaks_a_rule_ends_with_its_code(name):
    sent, code = BREAKS[name]
    codec = opened(bodies=True)

    with pytest.raises(ConnectionBroken) as raised:
        receive(codec, sent)

    assert raised.value.code is code
    assert str(raised.value)
    last = frames_of(codec.data_to_send())[-1]
    assert (last[0], last[3][4:8]) == (GOAWAY, code.to_bytes(4, "big"))
    with pytest.raises(ConnectionBroken):
        receive(codec, frame(PING, payload=bytes(8)))
    assert not codec.data_to_send()


@pytest.mark.parametrize(
    ("first", "says"),
    [
        (frame(PING, payload=bytes(8)), "SETTINGS"), (frame(SETTINGS, ACK), "SETTINGS"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "HTTP/1"), (b"SSH-2.0-OpenSSH_9.2", "a frame of"),
    ],
)  # fmt: skip
def test_connection_to_a_peer_that_does_not_speak_http2_says_so(first, says):
    with pytest.raises(ConnectionBroken, match=says):
        receive(opened(told_settings=b""), first)


def test_connection_broken_tells_first_what_came_before():
    codec = opened()
    seen = []
    with pytest.raises(ConnectionBroken):
        seen.extend(codec.receive_data(head(1) + frame(DATA, 0, 1, b"abc") + frame(PUSH_PROMISE, 0, 1)))
    assert seen == [wire.Head(1, 200, [], False), wire.Data(1, b"abc", False)]


def test_connection_errors_quote_nothing_of_a_head():
    codec = opened()
    with pytest.raises(ConnectionBroken) as raised:
        receive(codec, frame(HEADERS, END_HEADERS, 1, b"\x0f\xff\xff\xff\xff\xff\xffSECRET"))
    assert "SECRET" not in str(raised.value)
    assert raised.value.__cause__ is None


# -- what breaks one stream --------------------------------------------------------------------------------------------
LENGTH_5 = (b"content-length", b"5")
MALFORMED = {
    "no-status": head(1, (b"a", b"b"), status=None),
    "no-fields": frame(HEADERS, END_HEADERS, 1),
    "status-twice": head(1, (b":status", b"200")),
    "status-late": head(1, (b"a", b"b"), (b":status", b"200"), status=None),
    "status-no-number": head(1, status=b"2x0"),
    "status-too-long": head(1, status=b"0200"),
    "status-of-a-request": head(1, (b":path", b"/")),
    "name-in-upper-case": head(1, (b"X-A", b"b")),
    "name-empty": head(1, (b"", b"")),
    "name-with-space": head(1, (b"a b", b"c")),
    "value-with-newline": head(1, (b"a", b"b\r\nc: d")),
    "value-with-nul": head(1, (b"a", b"\x00")),
    "connection": head(1, (b"connection", b"close")),
    "transfer-encoding": head(1, (b"transfer-encoding", b"chunked")),
    "too-many-fields": head(1, *[(b"a", b"")] * (limits.HTTP_HEADERS_MAX + 1)),
    "length-twice": head(1, LENGTH_5, LENGTH_5),
    "length-no-number": head(1, (b"content-length", b"+5")),
    "length-endless": head(1, (b"content-length", b"9" * 30)),
    "switching-protocols": head(1, status=b"101"),
    "interim-that-ends": head(1, status=b"103", ended=True),
    "body-before-the-head": frame(DATA, 0, 1, b"x"),
    "body-too-long": head(1, LENGTH_5) + frame(DATA, 0, 1, b"123456"),
    "body-too-short": head(1, LENGTH_5) + frame(DATA, END, 1, b"1234"),
    "body-missing": head(1, LENGTH_5, ended=True),
    "body-too-short-before-trailers": head(1, LENGTH_5) + frame(DATA, 0, 1, b"1") + head(1, ended=True, status=None),
    "body-where-there-is-none": head(1, status=b"204") + frame(DATA, 0, 1, b"x"),
    "head-twice": head(1) + head(1, ended=True),
    "trailers-that-do-not-end": head(1) + head(1, (b"a", b"b"), status=None),
    "trailers-with-upper-case": head(1) + head(1, (b"A", b"b"), status=None, ended=True),
    "trailers-of-a-connection": head(1) + head(1, (b"keep-alive", b"5"), status=None, ended=True),
    "credit-of-nothing": credit(0, 1),
    "credit-overflow": credit(2**31 - 1, 1),
}


@pytest.mark.parametrize("bodies", [False, True])
@pytest.mark.parametrize("name", MALFORMED)
def test_stream_that_is_malformed_is_told_once_and_spares_the_others(name, bodies):
    codec = opened("GET", "GET", bodies=bodies)

    events = receive(codec, MALFORMED[name])

    assert isinstance(events[-1], wire.Malformed)
    assert (events[-1].stream_id, bool(events[-1].what)) == (1, True)
    assert events[-1].code is (ErrorCode.FLOW_CONTROL_ERROR if name == "credit-overflow" else ErrorCode.PROTOCOL_ERROR)
    if codec.is_open(1):  # where it is not reset, as resets are few, it runs on untold
        more = () if events_ended(MALFORMED[name]) else (head(1), frame(DATA, 0, 1, b"x"), credit(1, 1))
        assert receive(codec, *more) == []
        assert codec.unread_bytes == sum(len(event.data) for event in events if isinstance(event, wire.Data))
    answer = receive(codec, head(3), frame(DATA, END, 3, b"well"))
    assert answer == [wire.Head(3, 200, [], False), wire.Data(3, b"well", True)]
    assert codec.reset(1, ErrorCode.PROTOCOL_ERROR) == (bodies or not events_ended(MALFORMED[name]))


def events_ended(sent):
    """Say whether the last frame ends its stream."""
    kind, flags, *_ = frames_of(sent)[-1]
    return kind in (DATA, HEADERS) and flags & END != 0


def test_stream_malformed_and_whole_needs_no_reset():
    codec = opened()
    receive(codec, MALFORMED["body-too-short"])
    assert codec.open_streams == 0
    assert not codec.reset(1, ErrorCode.PROTOCOL_ERROR)
    assert not codec.wants_send


def test_stream_malformed_that_is_reset_by_the_peer_is_not_told_of_again():
    codec = opened(bodies=True)
    receive(codec, MALFORMED["name-in-upper-case"])
    assert receive(codec, frame(RST_STREAM, 0, 1, bytes(4))) == []
    assert codec.open_streams == 0


# -- answers -----------------------------------------------------------------------------------------------------------
def test_answer_with_interim_answers_padding_priority_and_trailers_is_read():
    codec = opened()
    block = hpack.Encoder().encode([(b":status", b"200"), (b"content-length", b"5"), (b"a", b" b ")])
    padded = b"\x03" + bytes(5) + block[:2] + b"pad"
    events = receive(
        codec, head(1, status=b"100"), head(1, (b"link", b"x"), status=b"103"),
        frame(HEADERS, PADDED | PRIORITIZED, 1, padded), frame(CONTINUATION, 0, 1, block[2:7]),
        frame(CONTINUATION, 0, 1), frame(CONTINUATION, END_HEADERS, 1, block[7:]),
        frame(DATA, PADDED, 1, b"\x02abcpp"), frame(DATA, PADDED, 1, b"\x00"), frame(DATA, 0, 1, b"de"),
        head(1, (b"checksum", b"1"), status=None, ended=True),
    )  # fmt: skip
    assert events == [
        wire.Interim(1), wire.Interim(1), wire.Head(1, 200, [(b"content-length", b"5"), (b"a", b" b ")], False),
        wire.Data(1, b"abc", False), wire.Data(1, b"", False), wire.Data(1, b"de", False), wire.Ended(1),
    ]  # fmt: skip
    assert codec.open_streams == 0
    assert codec.unread_bytes == 5


@pytest.mark.parametrize(("method", "status"), [("HEAD", b"200"), ("GET", b"304"), ("GET", b"204")])
@pytest.mark.parametrize("ends", [head(1, LENGTH_5, ended=True), None])
def test_answer_without_a_body_may_speak_of_its_length(method, status, ends):
    codec = opened(method)
    answer = head(1, LENGTH_5, status=status, ended=ends is not None)
    events = receive(codec, answer, *(() if ends else (frame(DATA, END, 1),)))
    assert events[0] == wire.Head(1, int(status), [LENGTH_5], ends is not None)
    assert (events[1:], codec.open_streams) == ([] if ends else [wire.Data(1, b"", True)], 0)


def test_answer_that_comes_before_the_request_is_out_leaves_the_stream_open_to_be_reset():
    codec = opened("POST", bodies=True)
    assert receive(codec, head(1, ended=True)) == [wire.Head(1, 200, [], True)]
    assert codec.is_open(1)
    assert receive(codec, frame(RST_STREAM, 0, 1, bytes(4))) == [wire.Reset(1, 0, True)]
    assert not codec.is_open(1)


def test_answer_heads_are_each_callers_own():
    codec = opened("GET", "GET", "GET")
    block = OK + b"\x00\x01a\x01b"
    for stream in (1, 3, 5):
        (event,) = receive(codec, frame(HEADERS, END_HEADERS | END, stream, block))
        assert event.headers == [(b"a", b"b")]
        event.headers.clear()


# -- streams that are over ---------------------------------------------------------------------------------------------
def test_stream_that_was_reset_is_dropped_in_silence_and_its_head_still_changes_the_table():
    codec = opened("GET", "GET")
    codec.reset(1, ErrorCode.CANCEL)
    codec.data_to_send()
    late = (
        frame(HEADERS, END_HEADERS, 1, OK + b"\x40\x01a\x01b"), frame(DATA, 0, 1, bytes(1000)), credit(5, 1),
        credit(0, 1), frame(RST_STREAM, 0, 1, bytes(4)), frame(HEADERS, END_HEADERS | END, 1, b"\xbe"),
        frame(DATA, 0, 1, b"x"),
    )  # fmt: skip
    assert receive(codec, *late) == []
    assert not codec.wants_send
    assert codec.unread_bytes == 0
    assert receive(codec, frame(HEADERS, END_HEADERS | END, 3, OK + b"\xbe")) == [
        wire.Head(3, 200, [(b"a", b"b")], True)
    ]


def test_stream_that_is_over_gives_its_bytes_back_to_the_connection():
    codec = opened("GET", "GET")
    codec.reset(1, ErrorCode.CANCEL)
    codec.data_to_send()
    for _ in range(2 * limits.H2_CONNECTION_WINDOW_BYTES // 16_384):
        assert receive(codec, frame(DATA, 0, 1, bytes(16_384))) == []
    given = [int.from_bytes(payload, "big") for *_, payload in frames_of(codec.data_to_send())]
    assert sum(given) >= limits.H2_CONNECTION_WINDOW_BYTES


def test_goaway_is_told_each_time_and_streams_go_on():
    codec = opened("GET", "GET")
    goaways = [
        frame(GOAWAY, payload=struct.pack(">LL", last, code) + b"why") for last, code in ((2**31 - 1, 0), (1, 2))
    ]
    assert receive(codec, *goaways) == [wire.GoAway(2**31 - 1, 0), wire.GoAway(1, 2)]
    assert receive(codec, head(1, ended=True)) == [wire.Head(1, 200, [], True)]
    assert wire.code_name(2) == "INTERNAL_ERROR"
    assert wire.code_name(99) == "code 99"


# -- settings and windows ----------------------------------------------------------------------------------------------
def test_settings_are_taken_and_acknowledged_and_unknown_ones_ignored():
    codec = wire.Http2Codec()
    codec.data_to_send()
    assert (codec.streams_max, codec.settled) == (limits.H2_STREAMS_UNTOLD, False)
    receive(codec, settings((3, 5), (0xFFFF, 9), (6, 1), (5, 2**24 - 1), (2, 0), (8, 1)), frame(SETTINGS, ACK))
    assert (codec.streams_max, codec.settled) == (5, True)
    assert frames_of(codec.data_to_send()) == [(SETTINGS, ACK, 0, b"")]
    receive(codec, settings((3, 0)), settings((1, 4096)))
    assert codec.streams_max == 0
    receive(codec, settings((3, 2**32 - 1)))
    assert codec.streams_max == limits.H2_STREAMS_MAX


def test_settings_change_the_windows_of_open_streams_below_zero_too():
    codec = opened("POST", bodies=True)
    codec.send_data(1, bytes(16_384), ended=False)
    receive(codec, settings((4, 1000)))
    assert codec.sendable(1) == 1000 - 16_384
    with pytest.raises(ValueError, match="stream 1"):
        codec.send_data(1, b"x", ended=False)
    receive(codec, credit(16_384, 1))
    assert codec.sendable(1) == 1000
    codec.send_data(1, bytes(1000), ended=False)
    assert codec.sendable(1) == 0
    codec.send_data(1, b"", ended=True)
    assert not codec.sendable(3)


def test_windows_of_connection_and_stream_both_bound_what_is_sent():
    codec = opened("POST", "POST", bodies=True)
    receive(codec, credit(100_000, 1))
    sent = 0
    while (room := codec.sendable(1)) > 0:
        assert room <= 16_384
        codec.send_data(1, bytes(room), ended=False)
        sent += room
    assert (sent, codec.sendable(3)) == (65_535, 0)
    receive(codec, credit(10))
    assert (codec.sendable(1), codec.sendable(3)) == (10, 10)


def test_windows_of_ours_are_held_to():
    codec = opened()
    receive(codec, head(1))
    full, rest = divmod(limits.H2_STREAM_WINDOW_BYTES, 16_384)
    receive(codec, *[frame(DATA, 0, 1, bytes(16_384))] * full, frame(DATA, 0, 1, bytes(rest)))
    with pytest.raises(ConnectionBroken, match="window of stream 1") as raised:
        receive(codec, frame(DATA, 0, 1, b"x"))
    assert raised.value.code is FLOW


def test_window_of_the_connection_is_held_to(monkeypatch):
    monkeypatch.setattr(limits, "H2_UNREAD_BYTES", 0)
    codec = opened(*["GET"] * 20)
    sent = [head(stream) + frame(DATA, 0, stream, bytes(16_384)) * 32 for stream in range(1, 40, 2)]
    with pytest.raises(ConnectionBroken, match="window of the connection") as raised:
        receive(codec, *sent)
    assert raised.value.code is FLOW
    assert codec.unread_bytes <= limits.H2_CONNECTION_WINDOW_BYTES


def test_windows_count_padding():
    codec = opened()
    receive(codec, head(1))
    for _ in range(10_000):  # 2.5 MB of padding, nothing of it to be read
        receive(codec, frame(DATA, PADDED, 1, b"\xff" + b"x" + bytes(255)))
        codec.consumed(1, 1)
    assert codec.unread_bytes == 0


def test_requests_that_do_not_fit_a_frame_are_continued():
    server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
    codec = wire.Http2Codec()
    headers = tuple((b"x-%d" % number, bytes([97 + number]) * 9000) for number in range(7))
    codec.open(encode(HttpRequest("GET", "https", "a.test", 443, b"/", headers)), ended=True)
    sent = codec.data_to_send()
    kinds = [(kind, flags) for kind, flags, *_ in frames_of(sent[24:])]
    assert kinds[2:4] == [(HEADERS, END), (CONTINUATION, 0)]
    assert kinds[-1] == (CONTINUATION, END_HEADERS)
    events = server.receive_data(sent)
    request = next(event for event in events if isinstance(event, told.RequestReceived))
    assert [tuple(field) for field in request.headers][4:] == list(headers)
    assert any(isinstance(event, told.StreamEnded) for event in events)


def test_header_table_of_a_peer_that_allows_much_stays_small():
    codec = opened(told_settings=settings((1, 2**32 - 1)))
    for number in range(500):
        request = HttpRequest("GET", "https", "a.test", 443, b"/", ((b"x-a", b"%0100d" % number),))
        codec.open(encode(request), ended=True)
        codec.reset(codec.begun * 2 - 1, ErrorCode.CANCEL)
    assert codec._encoder.header_table._current_size <= limits.H2_HEADER_TABLE_BYTES


# -- floods ------------------------------------------------------------------------------------------------------------
FLOODS = {
    "pings (CVE-2019-9512)": (frame(PING, payload=bytes(8)), 10_000),
    "acknowledged pings": (frame(PING, ACK, payload=bytes(8)), 10_000),
    "priorities (CVE-2019-9513)": (frame(PRIORITY, 0, 1, bytes(5)), 2_000),
    "resets of what is over (CVE-2019-9514)": (frame(RST_STREAM, 0, 3, bytes(4)), 2_000),
    "settings (CVE-2019-9515)": (settings((1, 0), (1, 4096)), 10_000),
    "acknowledged settings": (frame(SETTINGS, ACK), 10_000),
    "empty DATA (CVE-2019-9518)": (frame(DATA, 0, 1), 2_000),
    "padding only": (frame(DATA, PADDED, 1, b"\x09" + bytes(9)), 2_000),
    "empty DATA of what is over": (frame(DATA, 0, 3), 2_000),
    "the end of what is over": (frame(DATA, END, 3), 2_000),
    "heads of what is over": (frame(HEADERS, END_HEADERS, 3, OK), 2_000),
    "unknown frames": (frame(0xFA, 0, 1, bytes(20)), 2_000),
    "credit": (credit(1), 20_000),
    "credit of what is over": (credit(1, 3), 20_000),
    "farewells": (frame(GOAWAY, payload=bytes(8)), 2_000),
}


@pytest.mark.parametrize("name", FLOODS)
def test_flood_ends_the_connection_and_costs_little_memory(name):
    piece, enough = FLOODS[name]
    codec = opened("GET", "GET")
    codec.reset(3, ErrorCode.CANCEL)
    receive(codec, head(1))
    with pytest.raises(ConnectionBroken) as raised:
        receive(codec, piece * enough)
    assert raised.value.code is CALM
    assert codec.waiting_bytes <= limits.H2_CONTROL_BYTES_MAX + 17 + 100
    assert len(codec._encoder.table_size_changes) <= 2


@pytest.mark.parametrize(
    "piece",
    [b"", b"\x40\x00\x00", b"\x00\x00\x00", bytes(1000), b"\x20" * 1000],
    ids=["empty", "no-name-in-table (CVE-2019-9516)", "no-name", "large", "table-sizes"],
)
def test_flood_of_continuations_ends_the_connection(piece):
    """The CONTINUATION flood of 2024 (VU#421644)."""
    codec = opened()
    with pytest.raises(ConnectionBroken) as raised:
        receive(codec, frame(HEADERS, 0, 1, OK), frame(CONTINUATION, 0, 1, piece) * 1000)
    assert raised.value.code is CALM
    assert len(codec._block) <= limits.HTTP_HEAD_BYTES_MAX + 16_384


def test_flood_by_a_small_block_that_becomes_large_ends_the_connection():
    """The HPACK bomb (CVE-2016-6581): one large entry, called upon again and again."""
    codec = opened()
    bomb = OK + b"\x40\x01a\x7f\xa1\x1e" + b"b" * 4000 + b"\xbe" * 10_000
    with pytest.raises(ConnectionBroken) as raised:
        receive(codec, frame(HEADERS, END_HEADERS, 1, bomb))
    assert raised.value.code is CALM


def test_flood_of_interim_answers_is_malformed():
    codec = opened()
    events = []
    while not events or isinstance(events[-1], wire.Interim):
        events = receive(codec, head(1, status=b"103") * 1000)
    assert isinstance(events[[isinstance(event, wire.Interim) for event in events].index(False)], wire.Malformed)


def test_flood_bounds_leave_long_quiet_connections_alone():
    codec = opened("POST", bodies=True)
    receive(codec, credit(2**30), credit(2**30, 1), head(1))
    for _ in range(20_000):  # keep-alive for days
        receive(codec, frame(PING, payload=bytes(8)), frame(SETTINGS))
        codec.ping(bytes(8))
        receive(codec, frame(PING, ACK, payload=bytes(8)))
        codec.data_to_send()
    for _ in range(3000):  # a large upload, given credit for in small pieces
        codec.send_data(1, bytes(1000), ended=False)
        receive(codec, credit(100, 1) * 10, credit(100) * 10)
        codec.data_to_send()
    for _ in range(3000):  # an event stream that is mostly empty frames
        receive(codec, frame(DATA, 0, 1), frame(0xFA), frame(DATA, 0, 1, b"x"))
        codec.consumed(1, 1)
