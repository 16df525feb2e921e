"""HTTP/2: the peer's limits and windows, and what it may not do to us."""

import asyncio
import logging
import random

import h2.events as told
import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.outbound.http2_codec import encode
from stormline.outbound.messages import HttpRequest
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


# -- the peer's limits -------------------------------------------------------------------------------------------------
async def test_exchange_waits_its_turn_where_the_peer_allows_fewer_streams(connect, peers):
    open_at_once = []

    async def script(peer):
        for number in range(1, 11):
            request = await peer.wait(told.RequestReceived, number)
            open_at_once.append(peer.h2.open_inbound_streams)
            await asyncio.sleep(0.002)
            await peer.answer(request.stream_id, dict(request.headers)[b":path"])

    connection = await connect(script, settings={SettingCodes.MAX_CONCURRENT_STREAMS: 2})
    assert await connection.check(5)
    bodies = await asyncio.gather(*[get(connection, path=b"/%d" % number) for number in range(10)])
    assert bodies == [b"/%d" % number for number in range(10)]
    assert max(open_at_once) <= 2
    paths = [dict(event.headers)[b":path"] for event in peers[0].all(told.RequestReceived)]
    assert paths == bodies


async def test_exchange_settings_that_lower_concurrency_in_flight_hold_new_streams_back(connect, peers, until):
    async def script(peer):
        await peer.wait(told.RequestReceived, 3)
        peer.h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 1})
        await peer.flush()
        await peer.wait(told.SettingsAcknowledged, 2)
        await peer.wait(told.PingReceived)
        for number in (1, 2, 3):
            assert len(peer.all(told.RequestReceived)) == 3
            await peer.answer(number * 2 - 1, b"old")
        request = await peer.wait(told.RequestReceived, 4)
        await peer.answer(request.stream_id, b"new")

    connection = await connect(script)
    old = [asyncio.create_task(get(connection)) for _ in range(3)]
    await until(lambda: peers and len(peers[0].all(told.SettingsAcknowledged)) == 2)
    assert not connection.usable
    new = asyncio.create_task(get(connection))
    with pytest.raises(errors.DeadlineExceeded) as caught:
        await send(connection, deadline_s=0)
    assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.QUEUED, False)
    assert await connection.check(5)
    assert await asyncio.gather(*old, new) == [b"old"] * 3 + [b"new"]


async def test_exchange_queue_is_bounded(connect, until):
    connection = await connect(settings={SettingCodes.MAX_CONCURRENT_STREAMS: 1})
    assert await connection.check(5)
    tasks = [asyncio.create_task(send(connection)) for _ in range(limits.H2_WAITING_MAX + 2)]
    await until(lambda: tasks[-1].done())
    with pytest.raises(errors.QueueFull):
        await tasks[-1]
    for task in tasks[:-1]:
        task.cancel()
    await asyncio.wait(tasks)
    assert connection.open_streams == 0


# -- flow control ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("window", [1000, 65_535, 1_000_000])
async def test_upload_keeps_to_the_peers_windows(connect, peers, streamed, window):
    async def script(peer):
        for number in (1, 2):
            await peer.wait(told.RequestReceived, number)
        for number in (1, 2):
            ended = await peer.wait(told.StreamEnded, number)
            await peer.answer(ended.stream_id, b"%d" % len(peer.bodies[ended.stream_id]))

    size = 300_000 if window > 1000 else 60_000
    body = LARGE[:size]

    async def source():
        for offset in range(0, size, 33_333):
            yield body[offset : offset + 33_333]

    connection = await connect(script, settings={SettingCodes.INITIAL_WINDOW_SIZE: window})
    assert await connection.check(5)
    sizes = await asyncio.gather(*[get(connection, "POST", body=source() if streamed else body) for _ in range(2)])
    assert sizes == [b"%d" % size] * 2
    assert [peers[0].bodies[1] == body, peers[0].bodies[3] == body] == [True, True]


async def test_upload_to_a_server_that_gives_no_credit_is_held_back_and_bounded(connect, peers):
    taken = 0

    async def endless():
        nonlocal taken
        while True:
            taken += 10_000
            yield bytes(10_000)

    async def script(peer):
        peer.credits = False
        request = await peer.wait(told.RequestReceived, 2)
        await peer.answer(request.stream_id, b"well")

    connection = await connect(script)
    upload = asyncio.create_task(send(connection, "POST", body=endless(), read_timeout_s=0.3))
    await asyncio.sleep(0.1)
    assert await get(connection) == b"well"
    with pytest.raises(errors.DeadlineExceeded) as caught:
        await upload
    assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.SEND, True)
    assert taken <= 65_535 + 20_000
    assert (connection.open_streams, connection.usable) == (0, True)


@pytest.mark.parametrize(("status", "after"), [(b"413", "reset"), (b"200", "reset"), (b"200", "no-error")])
async def test_upload_is_stopped_by_an_early_answer(connect, peers, until, status, after):
    given = 0

    async def endless():
        nonlocal given
        while True:
            given += 1
            yield bytes(10_000)

    async def script(peer):
        request = await peer.wait(told.RequestReceived)
        await peer.wait(told.DataReceived, 3)
        await peer.answer(request.stream_id, b"enough", status=status)
        if after == "no-error":
            peer.h2.reset_stream(request.stream_id, ErrorCodes.NO_ERROR)
        await peer.flush()

    connection = await connect(script)
    response = await send(connection, "POST", body=endless())
    assert (response.status, await read(response)) == (int(status), b"enough")
    given_then = given
    await connection.check(5)
    assert given == given_then
    assert (connection.open_streams, connection.usable) == (0, True)
    if after == "reset":
        assert (await peers[0].wait(told.StreamReset)).error_code == ErrorCodes.NO_ERROR


@pytest.mark.parametrize(("given", "length"), [(3, 9), (12, 9)])
async def test_upload_that_breaks_its_length_is_our_fault_and_resets_the_stream(connect, peers, until, given, length):
    async def source():
        yield bytes(given)

    connection = await connect()
    with pytest.raises(errors.LocalProtocolError):
        await send(connection, "POST", body=source(), headers=[(b"Content-Length", b"%d" % length)])
    assert connection.open_streams == 0
    await until(lambda: peers[0].all(told.StreamReset))


async def test_upload_whose_source_fails_raises_its_error(connect):
    async def source():
        yield b"x"
        raise ZeroDivisionError

    connection = await connect()
    with pytest.raises(ZeroDivisionError):
        await send(connection, "POST", body=source())
    assert (connection.open_streams, connection.usable) == (0, True)


async def test_download_slow_readers_do_not_hold_back_the_others_and_memory_is_bounded(connect, peers):
    async def script(peer):
        answers = []
        for number in range(1, 5):
            request = await peer.wait(told.RequestReceived, number)
            answers.append(asyncio.create_task(peer.answer(request.stream_id, LARGE)))
        for answer in answers:
            await answer

    connection = await connect(script)
    slow = [await send(connection) for _ in range(3)]
    assert await get(connection) == LARGE
    assert connection._codec.unread_bytes <= 3 * limits.H2_STREAM_WINDOW_BYTES
    assert [await read(response) for response in slow] == [LARGE] * 3
    assert (connection.open_streams, connection._codec.unread_bytes) == (0, 0)


# -- heads, pings, floods ----------------------------------------------------------------------------------------------
async def test_exchange_large_heads_come_through_and_endless_ones_do_not(connect):
    async def script(peer):
        request = await peer.wait(told.RequestReceived)
        fields = [(b"x-%d" % number, LARGE[:200].hex().encode()) for number in range(100)]
        await peer.answer(request.stream_id, b"well", fields)
        request = await peer.wait(told.RequestReceived, 2)
        await peer.answer(request.stream_id, b"", fields * 4)

    connection = await connect(script)
    response = await send(connection)
    assert (len(response.headers), await read(response)) == (100, b"well")
    with pytest.raises(errors.ProtocolViolation):
        await send(connection)
    assert connection.closed


async def test_exchange_interim_answers_without_end_are_a_violation(connect):
    async def script(peer):
        request = await peer.wait(told.RequestReceived)
        for _ in range(200):
            peer.h2.send_headers(request.stream_id, [(b":status", b"103"), (b"link", LARGE[:400].hex().encode())])
            peer.h2.send_headers(request.stream_id, [(b":status", b"103"), (b"link", LARGE[400:800].hex().encode())])
            for _ in range(4):
                peer.h2.encoder.header_table_size = 0
                peer.h2.encoder.header_table_size = 4096
            await peer.flush()
            await asyncio.sleep(0)

    connection = await connect(script)
    with pytest.raises(errors.ProtocolViolation):
        await send(connection)


@pytest.mark.parametrize("what", ["settings", "data", "unknown"])
async def test_connection_floods_end_it(connect, what):
    async def script(peer):
        request = await peer.wait(told.RequestReceived)
        peer.h2.send_headers(request.stream_id, OK)
        await peer.flush()
        frame = {
            "settings": b"\x00\x00\x00\x04\x00\x00\x00\x00\x00",
            "data": b"\x00\x00\x00\x00\x00" + request.stream_id.to_bytes(4, "big"),
            "unknown": b"\x00\x00\x00\xfa\x00\x00\x00\x00\x00",
        }[what]
        peer.writer.transport.pause_reading()
        for _ in range(3000):
            peer.writer.write(frame * 100)
            await peer.writer.drain()

    connection = await connect(script)
    with pytest.raises(errors.TransportError):
        await get(connection)
    assert connection.closed


async def test_check_tells_a_living_peer_from_a_silent_one(connect, peers, until):
    connection = await connect()
    assert await connection.check(5)
    assert await asyncio.gather(connection.check(5), connection.check(5)) == [True, True]
    peers[0].h2.ping(b"12345678")
    await peers[0].flush()
    await peers[0].wait(told.PingAckReceived)
    peers[0].writer.transport.pause_reading()
    await asyncio.sleep(0.01)
    assert not await connection.check(0.1)
    connection.close()
    assert not await connection.check(1)


async def test_check_ends_with_the_connection(connect, peers, until):
    connection = await connect()
    assert await connection.check(5)
    peers[0].writer.transport.pause_reading()
    checking = asyncio.create_task(connection.check(30))
    await asyncio.sleep(0.05)
    peers[0].writer.transport.abort()
    assert not await checking
    await until(lambda: connection.closed)
    assert connection.retired


async def test_connection_writes_no_secret_to_any_log(connect, caplog):
    caplog.set_level(logging.DEBUG)
    secrets = [b"SECRET-%d" % number for number in range(4)]
    connection = await connect(serving(b""))
    headers = [(b"Authorization", b"Bearer " + secrets[0] * 4), (b"Cookie", secrets[1]), (b"X-Key", secrets[2])]
    await get(connection, "POST", b"/?t=" + secrets[3], headers=headers, body=b"SECRET-9")
    assert "SECRET" not in caplog.text
    message = HttpRequest("GET", "https", "a.test", 443, b"/?" + secrets[0], tuple(headers), b"SECRET-9")
    assert "SECRET" not in repr(encode(message))
