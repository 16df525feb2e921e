"""HTTP/2 frames against another implementation: whatever a client and `h2` in the server's role do side by side, and
however late their bytes arrive, both see the same streams and end with the same windows and header tables."""

import random

import h2.config
import h2.connection
import h2.events as told
import h2.exceptions
import h2.settings
import pytest
from h2.settings import SettingCodes
from hypothesis import given
from hypothesis import strategies as st

from stormline.core import limits
from stormline.outbound import http2_codec as wire
from stormline.outbound.http2_codec import ErrorCode, Http2Codec, encode
from stormline.outbound.messages import HttpRequest

NOISE = bytes(range(256)) * 400
HEADS = [
    [(b"content-type", b"text/plain")], [(b"date", b"Mon"), (b"server", b"x")],
    [(b"date", b"Tue"), (b"etag", b"1" * 90)], [(b"x-large", b"y" * 20_000)], [],
]  # fmt: skip
REQUESTS = [
    (), ((b"User-Agent", b"x/1"), (b"Accept", b"*/*")), ((b"Authorization", b"Bearer " + b"k" * 30), (b"X-A", b"1")),
    ((b"X-A", b"2"), (b"Range", b"bytes=0-")), ((b"Cookie", b"c" * 17_000), (b"X-B", b"\xe4")),
]  # fmt: skip

WHAT = (
    "open", "open", "upload", "upload", "finish", "cancel", "read", "ping", "to server", "to server", "to client",
    "to client", "head", "head", "interim", "body", "body", "padded", "end", "trailers", "refuse", "credit", "settings",
    "server ping",
)  # fmt: skip
"""What either may do next."""
STEPS = st.lists(st.tuples(st.sampled_from(WHAT), st.integers(0, 9), st.integers(0, 9)), max_size=80)


class Pair:
    """A client's codec, a server's, and the bytes on their way between them."""

    def __init__(self):
        self.codec = Http2Codec()
        self.server = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=False, header_encoding=None, normalize_inbound_headers=False)
        )
        self.server.local_settings = h2.settings.Settings(
            client=False, initial_values={SettingCodes.MAX_CONCURRENT_STREAMS: 100}
        )
        self.server.initiate_connection()
        self.to_server, self.to_client = bytearray(), bytearray()
        self.asked, self.got = {}, {}  # by stream: what the client sent, and what the server saw of it
        self.said, self.heard = {}, {}  # what the server sent, and what the client was told
        self.dropped = set()  # streams that the client gave up
        self.refused = {}
        self.pings = 0
        self.pongs = 0
        self.settings = 1  # not acknowledged

    # -- delivery ---------------------------------------------------------------------------------------------------
    def carry(self):
        """Put on its way what both have to say."""
        self.to_server += self.codec.data_to_send()
        self.to_client += self.server.data_to_send()

    def deliver_to_server(self, size):
        data = bytes(self.to_server[:size])
        del self.to_server[:size]
        for event in self.server.receive_data(data):
            stream = getattr(event, "stream_id", 0)
            if isinstance(event, told.RequestReceived):
                self.got[stream] = {"fields": [tuple(field) for field in event.headers], "body": b"", "ended": False}
                self.said[stream] = []
            elif isinstance(event, told.DataReceived):
                self.got[stream]["body"] += event.data
                if event.flow_controlled_length:
                    self.server.acknowledge_received_data(event.flow_controlled_length, stream)
            elif isinstance(event, told.StreamEnded):
                self.got[stream]["ended"] = True
            elif isinstance(event, told.StreamReset) and event.remote_reset:
                assert stream in self.dropped
            elif isinstance(event, told.PingAckReceived):
                self.pongs += 1
            elif isinstance(event, told.SettingsAcknowledged):
                self.settings -= 1

    def deliver_to_client(self, size):
        data = bytes(self.to_client[:size])
        del self.to_client[:size]
        for event in self.codec.receive_data(data):
            if isinstance(event, wire.Changed):
                continue
            if isinstance(event, wire.PingAck):
                self.pings -= 1
                continue
            assert event.stream_id not in self.dropped
            heard = self.heard[event.stream_id]
            if isinstance(event, wire.Data) and heard and isinstance(heard[-1], wire.Data):
                heard[-1] = wire.Data(event.stream_id, heard[-1].data + event.data, event.ended)
            else:
                heard.append(event)

    # -- steps ------------------------------------------------------------------------------------------------------
    def do(self, what, which, size):
        try:
            self._do(what, which, size)
        except h2.exceptions.ProtocolError:
            # What h2 does not let a server do at this moment. What it receives is never refused.
            assert what not in ("to server", "to client")
        self.carry()

    def _do(self, what, which, size):
        codec, server = self.codec, self.server
        mine = [stream for stream in self.asked if codec.is_open(stream)]
        uploads = [stream for stream in mine if not self.asked[stream]["ended"]]
        stream = mine[which % len(mine)] if mine else 0
        upload = uploads[which % len(uploads)] if uploads else 0
        theirs = [number for number in self.said if number in server.streams and number not in self.refused]
        answer = theirs[which % len(theirs)] if theirs else 0
        if what == "open" and codec.open_streams < codec.streams_max:
            request = encode(HttpRequest("POST", "https", "a.test", 443, b"/%d" % size, REQUESTS[which % 5], b"x"))
            fields = [field for field in request.fields if field[0] != b"content-length"]
            number = codec.open(request._replace(fields=fields), ended=size == 0)
            self.asked[number] = {"fields": [tuple(field) for field in fields], "body": b"", "ended": size == 0}
            self.heard[number] = []
        elif what == "upload" and upload:
            piece = NOISE[: max(0, min(codec.sendable(upload), (0, 1, 100, 5000, 99_999)[size % 5]))]
            if codec.sendable(upload) < 0:  # h2 takes an empty frame for too large then
                return
            codec.send_data(upload, piece, ended=False)
            self.asked[upload]["body"] += piece
        elif what == "finish" and upload and codec.sendable(upload) >= 0:
            codec.send_data(upload, b"", ended=True)
            self.asked[upload]["ended"] = True
        elif what == "cancel" and stream:
            self.dropped.add(stream)
            codec.reset(stream, ErrorCode.CANCEL)
        elif what == "read" and self.asked:
            self._read()
        elif what == "ping":
            codec.ping(b"12345678")
            self.pings += 1
        elif what == "to server":
            self.deliver_to_server((1, 8, 9, 10, 30, 100, 1000, 20_000, 99_999, 99_999)[size])
        elif what == "to client":
            self.deliver_to_client((1, 8, 9, 10, 30, 100, 1000, 20_000, 99_999, 99_999)[size])
        elif what == "server ping":
            server.ping(b"abcdefgh")
            self.pongs -= 1
        elif what == "credit":
            server.increment_flow_control_window((1, 1000, 100_000)[size % 3], answer or None)
        elif what == "settings" and not self.settings:  # h2 takes one acknowledgement for all that wait
            code, value = [
                (SettingCodes.INITIAL_WINDOW_SIZE, (0, 1, 1000, 65_535, 200_000)[which % 5]),
                (SettingCodes.HEADER_TABLE_SIZE, (0, 64, 200, 4096, 100_000)[which % 5]),
                (SettingCodes.MAX_CONCURRENT_STREAMS, (1, 3, 100)[which % 3]),
                (SettingCodes.MAX_FRAME_SIZE, (16_384, 100_000)[which % 2]),
            ][size % 4]
            server.update_settings({code: value})
            self.settings += 1
        elif answer:
            self._answer(what, answer, size)

    def _answer(self, what, stream, size):
        server, said = self.server, self.said[stream]
        has_head = any(isinstance(event, wire.Head) for event in said)
        finished = any(isinstance(event, wire.Ended) or getattr(event, "ended", False) for event in said)
        if (finished or (what in ("head", "interim")) == has_head) and what != "refuse":
            return  # h2 notices when it has closed the stream, or changed its header table
        if what == "head":
            ended = size == 0
            server.send_headers(stream, [(b":status", b"200"), *HEADS[size % 5]], end_stream=ended)
            said.append(wire.Head(stream, 200, HEADS[size % 5], ended))
        elif what == "interim":
            server.send_headers(stream, [(b":status", b"103"), *HEADS[size % 3]])
            said.append(wire.Interim(stream))
        elif what in ("body", "padded", "end"):
            padding = None if what != "padded" else size * 28
            room = min(server.local_flow_control_window(stream) - (padding or -1) - 1, server.max_outbound_frame_size)
            piece = NOISE[: max(0, min(room - (padding or -1) - 1, (0, 1, 50, 3000, 99_999)[size % 5]))]
            server.send_data(stream, piece, end_stream=what == "end", pad_length=padding)
            last = said[-1] if said and isinstance(said[-1], wire.Data) else None
            if last is not None:
                said.pop()
            said.append(wire.Data(stream, (last.data if last else b"") + piece, what == "end"))
        elif what == "trailers":
            server.send_headers(stream, [(b"checksum", b"%d" % size)], end_stream=True)
            said.append(wire.Ended(stream))
        elif what == "refuse":
            server.reset_stream(stream, 7)
            self.refused[stream] = True
            said.append(wire.Reset(stream, 7, finished))

    def _read(self):
        """Give credit for all that has come and was not read."""
        for stream, events in self.heard.items():
            arrived = sum(len(event.data) for event in events if isinstance(event, wire.Data))
            unread = arrived - self.asked[stream].get("read", 0)
            if unread:
                self.asked[stream]["read"] = arrived
                self.codec.consumed(stream, unread)

    # -- the end ----------------------------------------------------------------------------------------------------
    def settle(self):
        self.carry()
        while self.to_server or self.to_client:
            self.deliver_to_server(1 << 30)
            self.deliver_to_client(1 << 30)
            self.carry()

    def compare(self):
        codec, server = self.codec, self.server
        assert self.pings == self.pongs == 0
        for stream, asked in self.asked.items():
            got = self.got[stream]
            assert got["fields"] == asked["fields"]
            if stream in self.refused or stream in self.dropped:
                assert asked["body"].startswith(got["body"])
            else:
                assert (got["body"], got["ended"]) == (asked["body"], asked["ended"])
        for stream, heard in self.heard.items():
            said = self.said[stream]
            if stream in self.dropped:
                assert _flat(said).startswith(_flat(heard))
            elif self.asked[stream]["ended"] and said and isinstance(said[-1], wire.Reset):
                assert heard in (said, said[:-1] if said[-1].finished else said)  # it was over already
            else:
                assert heard == said
        self._compare_windows()
        tables = [
            (codec._encoder.header_table, server.decoder.header_table),
            (server.encoder.header_table, codec._decoder.header_table),
        ]
        for writer, reader in tables:
            announced = writer.maxsize == reader.maxsize  # a change of size is told with the next head
            assert not announced or list(writer.dynamic_entries) == list(reader.dynamic_entries)
        assert codec.open_streams == server.open_inbound_streams

    def _compare_windows(self):
        codec, server = self.codec, self.server
        assert server.outbound_flow_control_window == limits.H2_CONNECTION_WINDOW_BYTES - codec._owed
        assert server.inbound_flow_control_window == codec._window
        for stream, track in codec._streams.items():
            if not track.local_done:
                assert server.remote_flow_control_window(stream) == min(track.window, codec._window)
            if not track.remote_done:
                left = limits.H2_STREAM_WINDOW_BYTES - track.unreturned
                assert server.local_flow_control_window(stream) == min(left, server.outbound_flow_control_window)


def _flat(events):
    """Put events into a text that is a beginning of another's where they are."""
    return "".join(
        f"{event.data!r}"[2:-1] if isinstance(event, wire.Data) else type(event).__name__ for event in events
    )


@given(STEPS)
def test_codec_and_h2_as_its_server_agree_whatever_both_do(steps):
    pair = Pair()
    pair.carry()
    for step in steps:
        pair.do(*step)
    pair.settle()
    pair.compare()


@pytest.mark.parametrize("seed", range(4))
def test_codec_and_h2_agree_over_a_long_busy_connection(seed):
    chance = random.Random(seed)
    pair = Pair()
    pair.settle()
    for number in range(3000):
        pair.do(chance.choice(WHAT), chance.randrange(100), chance.randrange(10))
        if number % 50 == 0:
            pair.do("finish", 0, 0)
            pair.settle()
    pair.settle()
    pair.compare()
    heard = [type(event) for events in pair.heard.values() for event in events]
    assert {wire.Head, wire.Data, wire.Ended, wire.Interim, wire.Reset} <= set(heard)
    assert len(pair.asked) > 40


# -- bytes of a peer ---------------------------------------------------------------------------------------------------
_FRAME = st.builds(
    lambda kind, flags, stream, payload: (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    ),
    st.integers(0, 10),
    st.sampled_from([0, 1, 4, 5, 8, 9, 0xC, 0x2D]),
    st.sampled_from([0, 1, 1, 3, 5, 7, 2]),
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from([
            b"\x88", b"\x88\x5c\x013", b"\x00\x00\x00\x01", b"\x00" * 8, b"\x00\x03\x00\x00\x00\x01", b"abc", b"",
            b"\x00\x04\x00\x00\x00\x00", b"\x40\x01a\x01b", b"\xbe", b"\x89", b"\x01x\x00", bytes(16_384),
            b"\x88" * 3000,
        ]),
    ),
)  # fmt: skip


@given(st.lists(_FRAME, max_size=40), st.booleans())
def test_codec_keeps_its_bounds_and_raises_nothing_else_whatever_comes(frames, bodies):
    codec = Http2Codec()
    for _ in range(3):
        codec.open(encode(HttpRequest("GET", "https", "a.test", 443, b"/")), ended=not bodies)
    codec.data_to_send()
    told_bytes = 0
    over = set()
    data = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"".join(frames)
    broken = None
    try:
        for event in codec.receive_data(data):
            if isinstance(event, wire.Head | wire.Data | wire.Ended | wire.Interim | wire.Malformed | wire.Reset):
                assert event.stream_id not in over
                if isinstance(event, wire.Ended | wire.Malformed | wire.Reset) or getattr(event, "ended", False):
                    over.add(event.stream_id)
            if isinstance(event, wire.Data):
                told_bytes += len(event.data)
    except wire.ConnectionBroken as error:
        broken = error
    assert codec.unread_bytes == told_bytes <= limits.H2_CONNECTION_WINDOW_BYTES
    assert len(codec._buffer) <= 9 + limits.H2_FRAME_BYTES_MAX
    assert len(codec._block) <= limits.HTTP_HEAD_BYTES_MAX + limits.H2_FRAME_BYTES_MAX
    assert codec.waiting_bytes == sum(map(len, codec._out)) <= limits.H2_CONTROL_BYTES_MAX + 1000
    assert codec.open_streams <= 3
    sent = codec.data_to_send()
    assert (b"\x00\x00\x08\x07\x00\x00\x00\x00\x00" in sent) == (broken is not None)
