"""HTTP/2: what a request becomes, what frames mean, and the two-phase boundary to the byte."""

import asyncio

import h2.config
import h2.connection
import pytest
from hpack import NeverIndexedHeaderTuple

from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.outbound import http2_codec as wire
from stormline.outbound.http2 import Http2Connection
from stormline.outbound.messages import HttpRequest
from stormline.testing.http2 import send


def encode(*headers, method="GET", target=b"/", host="a.test", port=443, body=None):
    return wire.encode(HttpRequest(method, "https", host, port, target, headers, body))


def fields(*headers, **more):
    return [tuple(field) for field in encode(*headers, **more).fields]


def test_encode_puts_pseudo_fields_first_and_names_in_lower_case():
    assert fields((b"X-Ab", b"C"), (b"Cookie", b"a=1"), (b"Cookie", b"b=2"), target=b"/x?y") == [
        (b":method", b"GET"), (b":scheme", b"https"), (b":authority", b"a.test"), (b":path", b"/x?y"),
        (b"x-ab", b"C"), (b"cookie", b"a=1"), (b"cookie", b"b=2"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("host", "port", "headers", "authority"),
    [
        ("a.test", 8443, (), b"a.test:8443"),
        ("::1", 443, (), b"[::1]"),
        ("1.2.3.4", 443, ((b"Host", b"b.test"),), b"b.test"),
    ],
)
def test_encode_authority_is_the_host_header_or_the_origin(host, port, headers, authority):
    assert fields(*headers, host=host, port=port)[2:] == [(b":authority", authority), (b":path", b"/")]


def test_encode_leaves_out_what_belongs_to_a_connection_of_http1():
    given = [
        (b"Connection", b"close, X-Hop"), (b"X-Hop", b"1"), (b"Keep-Alive", b"5"), (b"Upgrade", b"h2c"),
        (b"Proxy-Connection", b"x"), (b"TE", b"gzip"), (b"Transfer-Encoding", b"chunked"),
    ]  # fmt: skip
    assert fields(*given, method="POST", body=b"x")[4:] == []
    assert fields((b"TE", b"trailers"))[4:] == [(b"te", b"trailers")]


@pytest.mark.parametrize(
    ("method", "body", "length"),
    [("GET", None, None), ("POST", None, b"0"), ("PUT", b"abc", b"3"), ("GET", b"a", b"1")],
)
def test_encode_says_the_length_of_a_body(method, body, length):
    assert dict(fields(method=method, body=body)).get(b"content-length") == length


def test_encode_keeps_what_changes_and_what_can_be_guessed_out_of_the_header_tables():
    request = encode((b"Authorization", b"short"), (b"Range", b"bytes=0-9"), (b"X-A", b"b"), target=b"/secret")
    never = {field[0] for field in request.fields if isinstance(field, NeverIndexedHeaderTuple)}
    assert never == {b":path", b"authorization", b"range"}
    long = encode((b"Authorization", b"Bearer " + b"x" * 40))
    assert {field[0] for field in long.fields if isinstance(field, NeverIndexedHeaderTuple)} == {b":path"}


@pytest.mark.parametrize(
    ("headers", "more"),
    [
        (((b"a b", b"c"),), {}), (((b"a", b"b\r\nc: d"),), {}), (((b"a", b"b\x00"),), {}), (((b":path", b"/"),), {}),
        (((b"Host", b"a"), (b"Host", b"b")), {}), (((b"Content-Length", b"2"),), {"body": b"abc"}),
        (((b"Content-Length", b"-2"),), {}), ((), {"target": b"/ b"}), ((), {"target": b""}),
        ((), {"method": "CONNECT"}), ((), {"method": "A B"}), ((), {"host": "a b"}),
    ],
)  # fmt: skip
def test_encode_refuses_what_could_break_out_of_its_place(headers, more):
    with pytest.raises(errors.LocalProtocolError):
        encode(*headers, **more)


# -- frames -----------------------------------------------------------------------------------------------------------
def _pair():
    codec = wire.Http2Codec()
    server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
    server.initiate_connection()
    server.receive_data(codec.data_to_send())
    list(codec.receive_data(server.data_to_send()))
    server.receive_data(codec.data_to_send())
    return codec, server


def test_codec_repeated_requests_become_small():
    codec, _ = _pair()
    sizes = []
    for _ in range(2):
        codec.open(encode((b"Authorization", b"Bearer " + b"x" * 400), (b"X-A", b"y" * 60)), ended=True)
        sizes.append(len(codec.data_to_send()))
    assert sizes[0] > 300
    assert sizes[1] < 25


def test_codec_refuses_push_and_announces_its_bounds():
    server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
    server.initiate_connection()
    server.receive_data(wire.Http2Codec().data_to_send())
    settings = server.remote_settings
    assert (settings.enable_push, settings.initial_window_size) == (0, limits.H2_STREAM_WINDOW_BYTES)
    assert settings.max_header_list_size == limits.HTTP_HEAD_BYTES_MAX
    assert server.outbound_flow_control_window == limits.H2_CONNECTION_WINDOW_BYTES


def test_codec_gives_credit_of_the_connection_on_arrival_and_of_the_stream_when_read():
    codec, server = _pair()
    stream_id = codec.open(encode(), ended=True)
    server.receive_data(codec.data_to_send())
    server.send_headers(stream_id, [(b":status", b"200")])
    got = 0
    while (room := server.local_flow_control_window(stream_id)) > 0:
        server.send_data(stream_id, bytes(min(room, 16_384)))
        for event in codec.receive_data(server.data_to_send()):
            got += len(event.data) if isinstance(event, wire.Data) else 0
        server.receive_data(codec.data_to_send())
    assert got == codec.unread_bytes == limits.H2_STREAM_WINDOW_BYTES
    assert server.outbound_flow_control_window >= limits.H2_CONNECTION_WINDOW_BYTES * 3 // 4
    codec.consumed(stream_id, got)
    server.receive_data(codec.data_to_send())
    assert server.local_flow_control_window(stream_id) == limits.H2_STREAM_WINDOW_BYTES
    assert codec.unread_bytes == 0


def test_codec_window_that_fits_the_link_holds_for_streams_that_are_open_and_for_later_ones():
    codec, server = _pair()
    stream_id = codec.open(encode(), ended=True)
    server.receive_data(codec.data_to_send())
    least = limits.H2_STREAM_WINDOW_BYTES_MIN
    codec.fit(least)
    server.receive_data(codec.data_to_send())
    later = codec.open(encode(), ended=True)
    list(codec.receive_data(server.data_to_send()))
    server.receive_data(codec.data_to_send())
    assert [server.local_flow_control_window(each) for each in (stream_id, later)] == [least, least]
    server.send_headers(stream_id, [(b":status", b"200")])
    for _ in range(8):  # credit comes back in quarters of the window, as its bytes are read
        server.send_data(stream_id, bytes(least // 4))
        list(codec.receive_data(server.data_to_send()))
        codec.consumed(stream_id, least // 4)
        server.receive_data(codec.data_to_send())
        assert server.local_flow_control_window(stream_id) == least
    codec.fit(4 * least)
    server.receive_data(codec.data_to_send())
    assert server.local_flow_control_window(later) == 4 * least
    codec.fit(4 * least)
    assert codec.data_to_send() == b""


@pytest.mark.parametrize("end", [b"", b"end"])
def test_codec_window_that_shrinks_gives_no_credit_to_an_answer_that_ends(end):
    codec, server = _pair()
    stream_id = codec.open(encode(), ended=True)
    server.receive_data(codec.data_to_send())
    server.send_headers(stream_id, [(b":status", b"200")])
    server.send_data(stream_id, bytes(limits.H2_STREAM_WINDOW_BYTES_MIN // 2))
    list(codec.receive_data(server.data_to_send()))
    codec.consumed(stream_id, limits.H2_STREAM_WINDOW_BYTES_MIN // 2)  # too little yet to be given back
    codec.fit(limits.H2_STREAM_WINDOW_BYTES_MIN)
    server.send_data(stream_id, end, end_stream=True)
    events = list(codec.receive_data(server.data_to_send()))
    assert [(event.data, event.ended) for event in events if isinstance(event, wire.Data)] == [(end, True)]
    codec.consumed(stream_id, len(end))
    assert codec.open_streams == 0


def test_codec_holds_the_credit_of_the_connection_back_when_too_much_is_unread(monkeypatch):
    monkeypatch.setattr(limits, "H2_UNREAD_BYTES", 0)
    codec, server = _pair()
    sent = 0
    for _ in range(limits.H2_STREAMS_MAX):
        stream_id = codec.open(encode(), ended=True)
        server.receive_data(codec.data_to_send())
        server.send_headers(stream_id, [(b":status", b"200")])
        while (room := server.local_flow_control_window(stream_id)) > 0:
            server.send_data(stream_id, bytes(min(room, 16_384)))
            sent += min(room, 16_384)
            list(codec.receive_data(server.data_to_send()))
            server.receive_data(codec.data_to_send())
    assert sent == codec.unread_bytes == limits.H2_CONNECTION_WINDOW_BYTES


# -- the boundary -----------------------------------------------------------------------------------------------------
class _Breaks:
    """A stream that takes a number of bytes in all, then breaks."""

    peer = local = Address("127.0.0.1", 1)
    alpn = "h2"
    has_unsent = False

    def __init__(self, takes):
        self._takes = takes
        self.broken_at_once = False
        self.sent = b""
        self._broken = asyncio.get_running_loop().create_future()

    @property
    def sent_bytes(self):
        return len(self.sent)

    def send_nowait(self, data):
        if self.broken_at_once:
            self.close()
            raise BrokenPipeError
        room = self._takes - len(self.sent)
        self.sent += data[:room]
        return min(room, len(data))

    async def send_all(self, data):
        if self.send_nowait(data) < len(data):
            self.close()
            raise ConnectionResetError

    async def receive(self, size_max=0):
        await asyncio.shield(self._broken)
        raise ConnectionResetError

    def is_readable(self):
        return False

    def close(self):
        if not self._broken.done():
            self._broken.set_result(None)


async def _outcomes(takes):
    stream = _Breaks(takes)
    connection = Http2Connection(stream)
    outcomes = await asyncio.gather(
        *[send(connection, "PUT", b"/%d" % number, body=b"abc") for number in range(4)], return_exceptions=True
    )
    connection.close()
    await asyncio.sleep(0)
    return stream.sent, outcomes


def _heads(data):
    """Give the offset of each HEADERS frame after a client's preface."""
    offsets, position = [], 24
    while position < len(data):
        if data[position + 3] == 1:
            offsets.append(position)
        position += 9 + int.from_bytes(data[position : position + 3], "big")
    return offsets


async def test_exchange_is_maybe_delivered_from_the_first_byte_of_its_stream():
    codec = wire.Http2Codec()
    for number in range(4):
        stream_id = codec.open(encode(method="PUT", target=b"/%d" % number, body=b"abc"), ended=False)
        if number == 0:  # it finds the connection at rest and goes at once, the others in one piece after it
            codec.send_data(stream_id, b"abc", ended=True)
    heads = _heads(codec.data_to_send())
    assert len(heads) == 4
    for takes in [offset + more for offset in heads for more in (0, 1, 9, 20)]:
        sent, outcomes = await _outcomes(takes)
        assert len(sent) == takes
        assert [outcome.maybe_delivered for outcome in outcomes] == [takes > offset for offset in heads]
        first_is_out = takes >= heads[1]
        assert type(outcomes[0]) is (errors.ReadError if first_is_out else errors.WriteError)
        assert outcomes[0].phase is (Phase.FIRST_BYTE if first_is_out else Phase.SEND)
        assert {type(outcome) for outcome in outcomes[1:]} == {errors.WriteError}
        assert {outcome.phase for outcome in outcomes[1:] if outcome.maybe_delivered} <= {Phase.SEND}


async def test_exchange_that_finds_the_connection_broken_at_once_fails_undelivered():
    stream = _Breaks(1_000)
    connection = Http2Connection(stream)
    await asyncio.sleep(0)  # the writer sends the preface
    stream.broken_at_once = True
    with pytest.raises(errors.WriteError) as raised:
        await send(connection, "PUT", b"/", body=b"abc")
    assert (raised.value.maybe_delivered, raised.value.phase) == (False, Phase.SEND)
    assert connection.closed


async def test_exchange_at_rest_is_with_the_kernel_before_anything_else_runs():
    stream = _Breaks(1_000)
    connection = Http2Connection(stream)
    task = asyncio.create_task(send(connection, "GET", b"/"))
    await asyncio.sleep(0)  # the turn in which the task begins
    assert len(_heads(stream.sent)) == 1
    task.cancel()
    await asyncio.wait([task])
    connection.close()
    await asyncio.sleep(0)
