"""HTTP/2 exchanges with scripted servers: no stream hurts another, and the two-phase boundary is exact."""

import asyncio
import random

import h2.config
import h2.events as told
import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.testing.http2 import read, send

pytestmark = pytest.mark.loopback
LARGE = random.Random(1).randbytes(3_000_000)
OK = [(b":status", b"200")]


async def get(connection, *arguments, **more):
    return await read(await send(connection, *arguments, **more))


def serving(*bodies):
    """Give a script that answers the requests in turn."""

    async def script(peer):
        for number, body in enumerate(bodies, 1):
            request = await peer.wait(told.RequestReceived, number)
            await peer.answer(request.stream_id, body)

    return script


@pytest.mark.parametrize("tls", [False, True])
async def test_exchange_answer_stages_and_reuse(connect, peers, tls):
    connection = await connect(serving(b"hello", LARGE), tls=tls)
    stages, ended = [], []
    response = await send(connection, stages=stages, ended=ended, headers=[(b"X-A", b"b"), (b"Connection", b"x")])
    assert (response.status, response.http_version, response.reused) == (200, "HTTP/2", False)
    assert await read(response) == b"hello"
    assert (stages, ended, connection.open_streams) == (["send", "first_byte", "body"], [True], 0)
    assert connection.idle_since is not None
    response = await send(connection, path=b"/2")
    assert response.reused
    assert connection.idle_since is None
    assert await read(response) == LARGE
    assert dict(peers[0].all(told.RequestReceived)[0].headers) == {
        b":method": b"GET", b":scheme": b"https", b":authority": b"a.test", b":path": b"/", b"x-a": b"b",
    }  # fmt: skip


async def test_exchange_many_at_once_are_answered_out_of_order(connect):
    async def script(peer):
        await peer.wait(told.RequestReceived, 50)
        for request in reversed(peer.all(told.RequestReceived)):
            await peer.answer(request.stream_id, dict(request.headers)[b":path"])

    connection = await connect(script)
    bodies = await asyncio.gather(*[get(connection, path=b"/%d" % number) for number in range(50)])
    assert bodies == [b"/%d" % number for number in range(50)]
    assert (connection.open_streams, connection.usable) == (0, True)


async def test_exchange_skips_interim_answers_and_drops_trailers(connect):
    async def script(peer):
        request = await peer.wait(told.RequestReceived)
        for status in (b"100", b"103"):
            peer.h2.send_headers(request.stream_id, [(b":status", status), (b"link", b"x")])
        peer.h2.send_headers(request.stream_id, [*OK, (b"content-length", b"3")])
        peer.h2.send_data(request.stream_id, b"abc")
        peer.h2.send_headers(request.stream_id, [(b"x-sum", b"1")], end_stream=True)
        await peer.flush()

    connection = await connect(script)
    response = await send(connection)
    assert (response.headers, await read(response)) == ([(b"content-length", b"3")], b"abc")
    assert connection.open_streams == 0


@pytest.mark.parametrize(
    ("method", "status", "in_head"),
    [("HEAD", b"200", True), ("HEAD", b"200", False), ("GET", b"204", True), ("GET", b"304", False)],
)
async def test_exchange_answers_without_body_keep_the_connection(connect, method, status, in_head):
    async def script(peer):
        for number in (1, 2):
            stream_id = (await peer.wait(told.RequestReceived, number)).stream_id
            fields = [] if status == b"204" else [(b"content-length", b"5")]
            peer.h2.send_headers(stream_id, [(b":status", status), *fields], end_stream=in_head)
            if not in_head:
                peer.h2.end_stream(stream_id)
            await peer.flush()

    connection = await connect(script)
    for _ in range(2):
        response = await send(connection, method)
        assert (response.status, await read(response)) == (int(status), b"")
    assert (connection.open_streams, connection.usable) == (0, True)


@pytest.mark.parametrize(
    ("length", "body", "trailers", "words"),
    [
        (b"9", b"abc", False, "6 bytes short"),
        (b"9", b"abc", True, "6 bytes short"),
        (b"9", b"", False, "9 bytes short"),
        (b"2", b"abc", False, "longer than its Content-Length, 2"),
    ],
)
async def test_exchange_body_of_a_wrong_length_is_an_error_and_hurts_no_other(connect, length, body, trailers, words):
    async def script(peer):
        first = (await peer.wait(told.RequestReceived, 2)).stream_id - 2
        peer.h2.send_headers(first, [*OK, (b"content-length", length)], end_stream=not body)
        if body:
            peer.h2.send_data(first, body, end_stream=not trailers)
        if body and trailers:
            peer.h2.send_headers(first, [(b"x-sum", b"1")], end_stream=True)
        await peer.flush()
        await peer.answer(first + 2, b"well")

    connection = await connect(script)
    wrong, well = await asyncio.gather(get(connection), get(connection), return_exceptions=True)
    assert well == b"well"
    assert isinstance(wrong, errors.ProtocolViolation)
    assert words in str(wrong)
    assert (wrong.maybe_delivered, connection.open_streams, connection.usable) == (True, 0, True)


@pytest.mark.parametrize(
    "fields",
    [
        [(b":status", b"20")], [(b"x-a", b"b")], [*OK, (b"X-A", b"b")], [*OK, (b"x-a", b"a\r\nb: c")],
        [*OK, (b"transfer-encoding", b"chunked")], [*OK, (b":path", b"/")], [*OK, (b"connection", b"close")],
        [*OK, *[(b"x-%d" % number, b"1") for number in range(limits.HTTP_HEADERS_MAX + 1)]],
        [*OK, (b"content-length", b"3"), (b"content-length", b"3")],
    ],
)  # fmt: skip
async def test_exchange_malformed_head_is_a_violation_of_its_stream_alone(connect, peers, fields):
    async def script(peer):
        peer.h2.config = h2.config.H2Configuration(
            client_side=False, header_encoding=None, validate_outbound_headers=False, normalize_outbound_headers=False
        )
        first = (await peer.wait(told.RequestReceived, 2)).stream_id - 2
        peer.h2.streams[first].config = peer.h2.config
        peer.h2.send_headers(first, fields)
        await peer.flush()
        await peer.answer(first + 2, b"well")

    connection = await connect(script)
    wrong, well = await asyncio.gather(get(connection), get(connection), return_exceptions=True)
    assert well == b"well"
    assert isinstance(wrong, errors.ProtocolViolation)
    assert (wrong.phase, wrong.maybe_delivered) == (Phase.FIRST_BYTE, True)
    assert (connection.open_streams, connection.usable) == (0, True)
    await peers[0].wait(told.StreamReset)


# -- the peer ends streams ---------------------------------------------------------------------------------------------
async def test_exchange_goaway_spares_what_the_peer_goes_on_with(connect, until):
    async def script(peer):
        await peer.wait(told.RequestReceived, 3)
        first, second, _ = (event.stream_id for event in peer.all(told.RequestReceived))
        peer.h2.send_headers(first, OK)
        await peer.flush()
        goaway = b"\x00\x00\x08\x07\x00\x00\x00\x00\x00" + second.to_bytes(4, "big") + bytes(4)
        peer.writer.write(goaway)
        for stream_id in (first, second):
            if stream_id == second:
                peer.h2.send_headers(stream_id, OK)
            peer.h2.send_data(stream_id, b"late %d" % stream_id, end_stream=True)
            await peer.flush()

    connection = await connect(script)
    first, second, third = await asyncio.gather(*[get(connection) for _ in range(3)], return_exceptions=True)
    assert (first, second) == (b"late 1", b"late 3")
    assert isinstance(third, errors.ReadError)
    assert (third.phase, third.maybe_delivered) == (Phase.FIRST_BYTE, False)
    assert (connection.retired, connection.usable, connection.open_streams) == (True, False, 0)
    await until(lambda: connection.closed)
    with pytest.raises(errors.LocalProtocolError):
        await send(connection)


async def test_exchange_goaway_fails_those_that_wait_as_not_sent(connect):
    async def script(peer):
        request = await peer.wait(told.RequestReceived)
        peer.writer.write(b"\x00\x00\x08\x07\x00\x00\x00\x00\x00" + request.stream_id.to_bytes(4, "big") + bytes(4))
        await peer.answer(request.stream_id, b"well")

    connection = await connect(script, settings={SettingCodes.MAX_CONCURRENT_STREAMS: 1})
    assert await connection.check(5)
    well, refused = await asyncio.gather(get(connection), get(connection), return_exceptions=True)
    assert well == b"well"
    assert (type(refused), refused.phase, refused.maybe_delivered) == (errors.WriteError, Phase.QUEUED, False)


@pytest.mark.parametrize(
    ("code", "delivered"),
    [(ErrorCodes.REFUSED_STREAM, False), (ErrorCodes.INTERNAL_ERROR, True), (ErrorCodes.ENHANCE_YOUR_CALM, True)],
)
async def test_exchange_reset_before_the_head_says_whether_it_was_processed(connect, code, delivered):
    async def script(peer):
        request = await peer.wait(told.RequestReceived, 2)
        peer.h2.reset_stream(request.stream_id, code)
        await peer.answer(request.stream_id - 2, b"well")

    connection = await connect(script)
    well, reset = await asyncio.gather(get(connection), get(connection, "POST"), return_exceptions=True)
    assert well == b"well"
    assert isinstance(reset, errors.ReadError)
    assert (reset.phase, reset.maybe_delivered) == (Phase.FIRST_BYTE, delivered)
    assert code.name in str(reset)
    assert connection.retired == (code is ErrorCodes.ENHANCE_YOUR_CALM)


async def test_exchange_reset_in_the_body_is_a_read_error_again_and_again(connect):
    async def script(peer):
        request = await peer.wait(told.RequestReceived)
        peer.h2.send_headers(request.stream_id, OK)
        peer.h2.send_data(request.stream_id, b"abc")
        peer.h2.reset_stream(request.stream_id, ErrorCodes.REFUSED_STREAM)
        await peer.flush()

    connection = await connect(script)
    response = await send(connection)
    source = response.source
    assert await source.read() == b"abc"
    for _ in range(2):
        with pytest.raises(errors.ReadError) as caught:
            await source.read()
        assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.BODY, True)
    assert connection.usable


async def test_exchange_push_is_refused(connect):
    async def script(peer):
        request = await peer.wait(told.RequestReceived)
        block = b"\x82\x84"
        promise = request.stream_id.to_bytes(4, "big") + (2).to_bytes(4, "big") + block
        peer.writer.write((len(promise) - 4).to_bytes(3, "big") + b"\x05\x04" + promise)

    connection = await connect(script)
    with pytest.raises(errors.ProtocolViolation) as caught:
        await send(connection)
    assert caught.value.maybe_delivered
    assert connection.closed


# -- the connection ends -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rst", [False, True])
async def test_exchange_lost_connection_fails_every_stream(connect, reset, rst):
    async def script(peer):
        request = await peer.wait(told.RequestReceived, 3)
        peer.h2.send_headers(request.stream_id, OK)
        peer.h2.send_data(request.stream_id, b"abc")
        await peer.flush()
        await asyncio.sleep(0.05)
        reset(peer.writer) if rst else peer.writer.close()

    connection = await connect(script)
    ended = []
    failures = await asyncio.gather(*[get(connection, ended=ended) for _ in range(3)], return_exceptions=True)
    assert [type(failure) for failure in failures] == [errors.ReadError] * 3
    assert [failure.phase for failure in failures] == [Phase.FIRST_BYTE, Phase.FIRST_BYTE, Phase.BODY]
    assert all(failure.maybe_delivered for failure in failures)
    assert (ended, connection.closed) == ([False] * 3, True)


async def test_exchange_never_handed_to_the_kernel_is_certainly_not_delivered(connect, until):
    """O02: the server takes nothing, the kernel's buffers fill; what waits behind is proven unsent by the close."""

    async def handler(peer):
        peer.credits = False
        await peer.wait(told.RequestReceived)
        peer.h2.increment_flow_control_window(2**30)
        peer.h2.increment_flow_control_window(2**30, 1)
        await peer.flush()
        peer.writer.transport.pause_reading()
        await asyncio.sleep(3600)

    connection = await connect(handler)
    body = bytes(64_000_000)
    big = asyncio.create_task(send(connection, "POST", body=body))
    sent = -1
    while connection.stream.sent_bytes != sent or sent < 300_000:
        sent = connection.stream.sent_bytes
        await asyncio.sleep(0.05)
    waiting = [asyncio.create_task(send(connection, "PUT")) for _ in range(3)]
    late = asyncio.create_task(send(connection, "PUT", head_within_s=0.05))
    with pytest.raises(errors.DeadlineExceeded) as caught:
        await late
    assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.QUEUED, False)
    connection.close()
    for task in waiting:
        with pytest.raises(errors.WriteError) as caught:
            await task
        assert caught.value.maybe_delivered is False
    with pytest.raises(errors.TransportError) as caught:
        await big
    assert caught.value.maybe_delivered is True


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
async def test_exchange_closed_after_or_amid_the_request_may_be_delivered(connect, method):
    """O02 scripts 1 and 2: read all, or half, then close without an answer; on a reused connection too."""

    async def script(peer):
        first = await peer.wait(told.RequestReceived)
        await peer.answer(first.stream_id)
        await peer.wait(told.RequestReceived, 2)
        peer.writer.close()

    connection = await connect(script)
    await get(connection)
    with pytest.raises(errors.TransportError) as caught:
        await send(connection, method, body=None if method == "GET" else LARGE)
    assert caught.value.maybe_delivered
    assert caught.value.phase in (Phase.SEND, Phase.FIRST_BYTE)


async def test_close_says_goaway_and_fails_what_is_under_way(connect, peers, until):
    connection = await connect()
    task = asyncio.create_task(send(connection))
    await until(lambda: peers and peers[0].all(told.RequestReceived))
    connection.close()
    connection.close()
    with pytest.raises(errors.ReadError):
        await task
    await until(lambda: peers[0].gone)
    assert [event.error_code for event in peers[0].all(told.ConnectionTerminated)] == [ErrorCodes.NO_ERROR]


async def test_retire_closes_after_the_last_request(connect, until, peers):
    async def script(peer):
        await peer.wait(told.PingReceived)
        await peer.answer(1, b"last")

    connection = await connect(script)
    task = asyncio.create_task(get(connection))
    await until(lambda: connection.open_streams)
    connection.retire()
    assert not connection.usable
    assert not connection.closed
    assert await connection.check(5)
    assert await task == b"last"
    assert connection.closed


# -- giving up ---------------------------------------------------------------------------------------------------------
async def test_exchange_cancelled_resets_its_stream_alone(connect, peers, until):
    async def script(peer):
        await peer.wait(told.StreamReset)
        await peer.answer(3, b"well")

    connection = await connect(script)
    ended = []
    first, second = asyncio.create_task(send(connection, ended=ended)), asyncio.create_task(get(connection))
    await until(lambda: peers and len(peers[0].all(told.RequestReceived)) == 2)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert ended == [True]
    assert await second == b"well"
    assert peers[0].all(told.StreamReset)[0].error_code == ErrorCodes.CANCEL
    assert (connection.open_streams, connection.usable) == (0, True)


async def test_exchange_cancelled_before_it_is_sent_leaves_no_trace(connect, peers, until):
    async def script(peer):
        await peer.wait(told.PingReceived, 2)
        await peer.answer(1, b"first")
        await peer.wait(told.RequestReceived, 2)
        await peer.answer(3, b"third")

    connection = await connect(script, settings={SettingCodes.MAX_CONCURRENT_STREAMS: 1})
    assert await connection.check(5)
    first, second, third = [asyncio.create_task(get(connection, path=b"/%d" % number)) for number in range(3)]
    await until(lambda: peers[0].all(told.RequestReceived))
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert await connection.check(5)
    assert (await first, await third) == (b"first", b"third")
    paths = [dict(event.headers)[b":path"] for event in peers[0].all(told.RequestReceived)]
    assert (paths, peers[0].all(told.StreamReset)) == ([b"/0", b"/2"], [])


async def test_exchange_closed_early_resets_and_frees_the_stream(connect, peers):
    async def script(peer):
        request = await peer.wait(told.RequestReceived)
        peer.h2.send_headers(request.stream_id, OK)
        peer.h2.send_data(request.stream_id, bytes(16_000))
        await peer.flush()
        await peer.wait(told.StreamReset)
        for _ in range(4):  # sent before the reset got there, say
            peer.writer.write(b"\x00\x3e\x80\x00\x00" + request.stream_id.to_bytes(4, "big") + bytes(16_000))
        request = await peer.wait(told.RequestReceived, 2)
        await peer.answer(request.stream_id, LARGE)

    connection = await connect(script)
    response = await send(connection)
    assert await response.source.read()
    await response.aclose()
    await response.aclose()
    with pytest.raises(errors.ReadError):
        await response.source.read()
    assert connection.open_streams == 0
    assert await get(connection) == LARGE
    assert len(peers[0].all(told.StreamReset)) == 1


async def test_exchange_deadline_and_silence_end_one_stream_only(connect, peers, until):
    async def script(peer):
        await peer.wait(told.RequestReceived, 3)
        peer.h2.send_headers(3, OK)
        peer.h2.send_data(3, b"abc")
        await peer.flush()
        await peer.wait(told.StreamReset, 2)
        await peer.answer(5, b"well")

    connection = await connect(script)
    late, silent, well = await asyncio.gather(
        get(connection, head_within_s=0.1), get(connection, read_timeout_s=0.15), get(connection),
        return_exceptions=True,
    )  # fmt: skip
    assert well == b"well"
    assert (type(late), late.phase, late.maybe_delivered) == (errors.DeadlineExceeded, Phase.FIRST_BYTE, True)
    assert (type(silent), silent.phase, silent.maybe_delivered) == (errors.DeadlineExceeded, Phase.BODY, True)
    assert (connection.open_streams, connection.usable) == (0, True)


async def test_exchange_unread_answer_frees_its_stream_at_the_deadline(connect, until):
    async def script(peer):
        request = await peer.wait(told.RequestReceived)
        peer.h2.send_headers(request.stream_id, OK)
        await peer.flush()

    connection = await connect(script)
    response = await send(connection, deadline_s=0.1)
    await until(lambda: connection.open_streams == 0)
    with pytest.raises(errors.DeadlineExceeded):
        await response.source.read()


async def test_exchange_ten_thousand_cancelled_leave_every_slot_free_and_no_server_provoked(connect, peers, until):
    async def connect_and_settle():
        connection = await connect()
        await until(lambda: connection.streams_max)
        return connection

    connection = await connect_and_settle()
    resets, used = [], []
    for _ in range(100):
        if not connection.usable:
            used.append(connection)
            connection = await connect_and_settle()
        tasks = [asyncio.create_task(send(connection)) for _ in range(100)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
    assert all(each.closed for each in used)
    connection.close()
    await until(lambda: all(peer.gone for peer in peers))
    resets = [len(peer.all(told.StreamReset)) for peer in peers]
    assert max(resets) <= limits.H2_RESETS_BURST + limits.H2_RESETS_PER_S
    assert sum(len(peer.all(told.RequestReceived)) for peer in peers) == 10_000


async def test_exchange_past_the_bound_of_resets_retires_and_spares_the_others(connect, peers, until):
    async def script(peer):
        await peer.wait(told.RequestReceived, 60)
        await peer.wait(told.StreamReset, limits.H2_RESETS_BURST)
        await peer.answer(1, LARGE)

    connection = await connect(script)
    well = asyncio.create_task(get(connection))
    given_up = [asyncio.create_task(send(connection)) for _ in range(59)]
    await until(lambda: peers and len(peers[0].all(told.RequestReceived)) == 60)
    for task in given_up:
        task.cancel()
    await asyncio.wait(given_up)
    assert (connection.retired, connection.closed) == (True, False)
    assert await well == LARGE
    assert connection.closed
    await until(lambda: peers[0].gone)
    assert len(peers[0].all(told.StreamReset)) == limits.H2_RESETS_BURST
