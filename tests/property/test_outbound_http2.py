"""HTTP/2: whatever streams do side by side, bodies are exact, slots come free and windows are restored; and no bytes of
a peer bring anything but our errors."""

import asyncio
import random

import h2.config
import h2.connection
import h2.events as told
import h2.settings
import pytest
from h2.settings import SettingCodes
from hypothesis import given
from hypothesis import strategies as st

from stormline.core import errors, limits
from stormline.core.values import Address
from stormline.outbound import http1_codec
from stormline.outbound.http2 import Http2Connection
from stormline.outbound.http2_codec import ConnectionBroken, Http2Codec, encode
from stormline.outbound.messages import HttpRequest

NOISE = random.Random(7).randbytes(1_500_000)


class MemoryStream:
    """A `Stream` without a socket: what is sent arrives in pieces of `cut` bytes, and blocks at `room` unread ones."""

    peer = local = Address("127.0.0.1", 1)
    alpn = "h2"
    has_unsent = False

    def __init__(self, cut, room):
        self._cut, self._room = cut, room
        self.sent_bytes = 0
        self.inbox, self.outbox = bytearray(), bytearray()
        self.moved = asyncio.Event()
        self.closed = False

    def _move(self):
        self.moved.set()
        self.moved = asyncio.Event()

    def send_nowait(self, data):
        if self.closed:
            raise ConnectionAbortedError
        if len(self.outbox) >= self._room:
            return 0
        piece = data[: self._cut]
        self.outbox += piece
        self.sent_bytes += len(piece)
        self._move()
        return len(piece)

    async def send_all(self, data):
        while data:
            taken = self.send_nowait(data)
            data = data[taken:]
            await (asyncio.sleep(0) if taken else self.moved.wait())

    async def receive(self, size_max=65_536):
        while not self.inbox:
            if self.closed:
                raise ConnectionAbortedError
            await self.moved.wait()
        data = bytes(self.inbox[: min(size_max, self._cut * 16)])
        del self.inbox[: len(data)]
        self._move()
        return data

    def is_readable(self):
        return bool(self.inbox)

    def close(self):
        self.closed = True
        self._move()


class Echo:
    """A server on the other end of a `MemoryStream`: answers each request with as many bytes as its path says."""

    def __init__(self, stream, settings):
        self._stream = stream
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
        self.h2.local_settings = h2.settings.Settings(client=False, initial_values=settings)
        self.h2.initiate_connection()
        self.bodies = {}
        self.whole = {}
        self._paths = {}
        self._to_send = {}

    async def run(self):
        stream = self._stream
        while not stream.closed:
            stream.inbox += self.h2.data_to_send()
            stream._move()
            if not stream.outbox:
                await stream.moved.wait()
            data = bytes(stream.outbox)
            stream.outbox.clear()
            stream._move()
            for event in self.h2.receive_data(data):
                self._take(event)
            self._send()
            await asyncio.sleep(0)

    def _take(self, event):
        if isinstance(event, told.RequestReceived):
            self._paths[event.stream_id] = dict(event.headers)[b":path"]
            self.bodies[event.stream_id] = b""
        elif isinstance(event, told.DataReceived):
            self.bodies[event.stream_id] += event.data
            self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, told.StreamEnded):
            path = self._paths[event.stream_id]
            self.whole[path] = self.bodies[event.stream_id]
            self._to_send[event.stream_id] = memoryview(NOISE[: int(path.split(b"/")[2])])
            self.h2.send_headers(event.stream_id, [(b":status", b"200")])
        elif isinstance(event, told.StreamReset):
            self._to_send.pop(event.stream_id, None)

    def _send(self):
        for stream_id, rest in list(self._to_send.items()):
            size = min(self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size, len(rest))
            if rest and size <= 0:
                continue
            self.h2.send_data(stream_id, rest[:size], end_stream=size == len(rest))
            self._to_send[stream_id] = rest[size:]
            if size == len(rest):
                del self._to_send[stream_id]


_SIZES = st.sampled_from([0, 1, 1000, 16_384, 16_385, 70_000, 700_000])
_PLANS = st.lists(
    st.tuples(
        st.sampled_from(["read", "read", "read slowly", "cancel", "close", "close in the middle"]),
        st.sampled_from([0, 1, 1000, 16_385, 100_000]),  # our body
        st.booleans(),  # in pieces
        _SIZES,  # the answer
        st.integers(0, 40),  # turns of the loop until it begins, or until it is given up
        st.none() | st.integers(limits.H2_STREAM_WINDOW_BYTES_MIN, limits.H2_STREAM_WINDOW_BYTES),  # what fits then
    ),
    min_size=1,
    max_size=14,
)


async def _turns(number):
    for _ in range(number):
        await asyncio.sleep(0)


async def _one(connection, number, plan):
    """Do one request by its plan; give True where it came to its end."""
    action, up, streamed, down, turns, window = plan

    async def source():
        for offset in range(0, up, 7001):
            yield NOISE[offset : min(offset + 7001, up)]

    body = source() if streamed else NOISE[:up]
    request = encode(HttpRequest("POST", "https", "a.test", 443, b"/%d/%d" % (number, down), (), body))
    ended = []
    deadline_at = asyncio.get_running_loop().time() + 50
    task = asyncio.ensure_future(
        connection.exchange(request, deadline_at=deadline_at, done=ended.append, on_stage=lambda _: None)
    )
    await _turns(turns)
    if window is not None:
        connection.fit(window)
    if action == "cancel":
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() or task.done()
        if not task.cancelled():
            await task.result().aclose()
        return False
    response = await task
    if action == "close":
        await response.aclose()
        return False
    got = b""
    async for chunk in response.aiter_raw():
        got += chunk
        if action == "close in the middle":
            await response.aclose()
            return False
        if action == "read slowly":
            await _turns(turns)
    assert got == NOISE[:down]
    assert len(ended) == 1
    return True


@given(
    _PLANS,
    st.sampled_from([1, 3, 100]),
    st.sampled_from([1, 5000, 65_535, 1_000_000]),
    st.sampled_from([977, 4096, 65_536]),
    st.sampled_from([20_000, 10_000_000]),
)
def test_streams_side_by_side_are_exact_and_leave_nothing_behind(plans, streams, window, cut, room):
    window = max(window, 100 if any(plan[1] > 10_000 for plan in plans) else 1)

    async def play():
        stream = MemoryStream(cut, room)
        connection = Http2Connection(stream)
        settings = {SettingCodes.MAX_CONCURRENT_STREAMS: streams, SettingCodes.INITIAL_WINDOW_SIZE: window}
        server = Echo(stream, settings)
        serving = asyncio.create_task(server.run())
        assert await connection.check(20)
        results = await asyncio.gather(
            *[_one(connection, number, plan) for number, plan in enumerate(plans)], return_exceptions=True
        )
        for number, (plan, result) in enumerate(zip(plans, results, strict=True)):
            if isinstance(result, BaseException):
                raise result
            if result:
                assert server.whole[b"/%d/%d" % (number, plan[3])] == NOISE[: plan[1]]
        assert connection.open_streams == 0
        assert connection.usable
        assert connection.idle_since is not None
        for _ in range(2):
            assert await connection.check(20)  # all that was under way has arrived on both sides
        codec = connection._codec
        assert codec.unread_bytes == 0
        assert server.h2.outbound_flow_control_window + codec._owed == limits.H2_CONNECTION_WINDOW_BYTES
        assert server.h2.open_inbound_streams == 0
        connection.close()
        await asyncio.wait([serving], timeout=5)
        await _turns(3)
        left = asyncio.all_tasks() - {asyncio.current_task(), serving}
        assert not left

    asyncio.run(play())


# -- bytes of a peer ---------------------------------------------------------------------------------------------------
_FRAMES = st.builds(
    lambda kind, flags, stream, body: (
        len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body
    ),
    st.integers(0, 11),
    st.sampled_from([0, 1, 4, 5, 8, 9, 0x2D, 255]),
    st.sampled_from([0, 1, 2, 3, 5, 7, 2**31 - 1]),
    st.one_of(
        st.binary(max_size=30),
        st.sampled_from([b"\x88", b"\x88\x5c\x013", b"\x00\x00\x00\x01", b"\x00" * 8, b"\x00\x03\x00\x00\x00\x01"]),
    ),
)


def _events(data, cuts):
    """Give all that can be seen of reading `data` in pieces."""
    codec = Http2Codec()
    request = encode(HttpRequest("GET", "https", "a.test", 443, b"/"))
    for _ in range(3):
        codec.open(request, ended=True)
    codec.data_to_send()
    seen, position = [], 0
    try:
        for cut in [*cuts, len(data)]:
            if cut <= position:
                continue
            for event in codec.receive_data(data[position:cut]):
                seen.append(event)  # noqa: PERF402  (what came before an error counts)
            position = cut
    except ConnectionBroken as error:
        seen.append(str(error))
    return seen, codec.data_to_send()


@given(st.lists(st.one_of(_FRAMES, st.binary(max_size=40)), max_size=12), st.lists(st.integers(0, 300), max_size=5))
def test_codec_reads_any_bytes_the_same_however_they_are_cut(frames, cuts):
    data = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"".join(frames)  # SETTINGS come first
    whole, cut = _events(data, []), _events(data, sorted(cuts))
    assert [str(event) for event in whole[0]] == [str(event) for event in cut[0]]
    assert whole[1] == cut[1]


_HEADERS = st.lists(
    st.tuples(
        st.sampled_from([b"Host", b"X-A", b"Cookie", b"Authorization", b"TE", b"Connection", b"Upgrade", b"bad name",
                         b"Content-Length", b"x\n", b"Keep-Alive"]),
        st.one_of(st.binary(max_size=10), st.sampled_from([b"trailers", b"x-a", b"3", b"a" * 40])),
    ),
    max_size=6,
)  # fmt: skip


@given(
    st.sampled_from(["GET", "POST", "CONNECT", "a b", "PUT"]),
    st.one_of(st.sampled_from([b"/", b"/x?y=1", b"/ b", b""]), st.binary(max_size=8)),
    _HEADERS,
    st.sampled_from([None, b"", b"abc"]),
)
def test_encode_gives_fields_a_server_accepts_or_refuses_before_anything_is_sent(method, target, headers, body):
    message = HttpRequest(method, "https", "a.test", 443, target, tuple(headers), body)
    try:
        request = encode(message)
    except errors.LocalProtocolError as error:
        with pytest.raises(errors.LocalProtocolError) as caught:
            http1_codec.encode(message)  # one set of rules
        assert str(caught.value) == str(error)
        return
    http1_codec.encode(message)
    codec = Http2Codec()
    codec.open(request, ended=not body)
    server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
    server.initiate_connection()
    events = server.receive_data(codec.data_to_send())
    received = next(event for event in events if isinstance(event, told.RequestReceived))
    fields = dict(received.headers)
    assert (fields[b":method"], fields[b":path"]) == (method.encode(), target)
    assert not {b"host", b"connection", b"upgrade", b"keep-alive"} & fields.keys()
