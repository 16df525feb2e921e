"""Exchanges with scripted servers: the two-phase boundary, early answers, and bodies that end wrongly."""

import asyncio
import os
import random
import socket
import ssl

import pytest

from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.net.clock import SystemClock
from stormline.net.resolve import Resolver
from stormline.net.trust import roles_context
from stormline.outbound.dial import Dialer
from stormline.outbound.messages import HttpRequest
from stormline.outbound.pool import HttpPool
from stormline.testing.follower import Notebook

pytestmark = pytest.mark.loopback
LARGE = random.Random(1).randbytes(8_000_000)


@pytest.fixture(name="pool")
async def _pool(authority):
    pool = HttpPool(Dialer(Resolver(), roles_context(authority.pem, ["http/1.1"])), SystemClock())
    yield pool
    await pool.aclose()
    assert pool.open_connections == 0


@pytest.fixture(name="send")
def _send(pool):
    """Send one request to an address, by the name a.test."""

    async def send(address, method="GET", *, tls=False, body=None, headers=(), deadline_s=10.0, **more):
        request = HttpRequest(method, "https" if tls else "http", "a.test", address.port, b"/", tuple(headers), body)
        return await pool.request(request, deadline_s=deadline_s, addresses=(address,), **more)

    return send


def _says(*pieces, hold=False):
    """Give a server that reads a request's head, sends `pieces` and then closes, or holds the connection."""

    async def handler(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.002)
        if hold:
            await reader.read()

    return handler


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


async def _read(response):
    return b"".join([chunk async for chunk in response.aiter_raw()])


@pytest.mark.parametrize("tls", [False, True])
async def test_exchange_answer_and_stages(serve, authority, send, pool, tls):
    address = await serve(
        _says(OK + b"Content-Length: 5\r\nX: y\r\n\r\nhel", b"lo", hold=True), authority.server if tls else None
    )
    told = Notebook()
    response = await send(address, tls=tls, follower=told)
    assert (response.status, response.reason, response.http_version) == (200, b"OK", "HTTP/1.1")
    assert (response.headers, response.peer, response.reused) == (
        [(b"Content-Length", b"5"), (b"X", b"y")], address, False)  # fmt: skip
    assert await _read(response) == b"hello"
    assert told.stages == ["connect", *(["tls"] if tls else []), "send", "first_byte", "body"]
    assert (pool.open_connections, pool.idle_connections) == (1, 1)


async def test_exchange_chunked_and_close_delimited_bodies(serve, send, pool):
    chunked = await serve(_says(CHUNKED + b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\nT: 1\r\n\r\n", hold=True))
    assert await _read(await send(chunked)) == b"abcde"
    assert pool.idle_connections == 1
    closed = await serve(_says(OK + b"\r\nabc", b"de"))
    assert await _read(await send(closed)) == b"abcde"
    assert pool.open_connections == 1


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], 204),
        ([b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n"], 304),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n",
          OK + b"Content-Length: 0\r\n\r\n"], 200),
    ],
)  # fmt: skip
async def test_exchange_answers_without_body_keep_the_connection(serve, send, pool, pieces, status):
    response = await send(await serve(_says(*pieces, hold=True)))
    assert (response.status, await _read(response), pool.idle_connections) == (status, b"", 1)


async def test_exchange_head_has_no_body(serve, send, pool):
    response = await send(await serve(_says(OK + b"Content-Length: 5\r\n\r\n", hold=True)), "HEAD")
    assert (await _read(response), pool.idle_connections) == (b"", 1)


@pytest.mark.parametrize(
    "pieces",
    [
        [OK + b"Content-Length: 9\r\n\r\nabc"],
        [CHUNKED + b"3\r\nabc\r\n"],
        [CHUNKED + b"3\r\nabc\r\n0\r\n"],
    ],
)
async def test_exchange_body_cut_short_is_a_read_error_never_a_short_body(serve, send, pool, pieces):
    response = await send(await serve(_says(*pieces)))
    for _ in range(2):
        with pytest.raises(errors.ReadError) as caught:
            await response.read(100)
        assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.BODY, True)
    assert pool.open_connections == 0


async def test_exchange_tls_cut_of_a_body_without_length_is_a_read_error(serve, authority, send):
    async def cut(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b"\r\nabc")
        await writer.drain()
        with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as below:
            below.shutdown(socket.SHUT_WR)  # FIN without close_notify
        await reader.read()

    response = await send(await serve(cut, authority.server), tls=True)
    with pytest.raises(errors.ReadError) as caught:
        await response.read(100)
    assert caught.value.phase is Phase.BODY


@pytest.mark.parametrize(
    "piece",
    [b"SSH-2.0-x\r\n", b"HTTP/2.0 200 OK\r\n\r\n", OK + b"Content-Length: x\r\n\r\n", b"HTTP/1.1 101 S\r\n\r\n",
     OK + b"A: " + b"b" * limits.HTTP_HEAD_BYTES_MAX],
)  # fmt: skip
async def test_exchange_bad_head_is_a_violation_after_delivery(serve, send, pool, piece):
    with pytest.raises(errors.ProtocolViolation) as caught:
        await send(await serve(_says(piece, hold=True)))
    assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.FIRST_BYTE, True)
    assert pool.open_connections == 0


async def test_exchange_bad_chunk_is_a_violation_in_the_body(serve, send, pool):
    response = await send(await serve(_says(CHUNKED, b"zz\r\n", hold=True)))
    with pytest.raises(errors.ProtocolViolation) as caught:
        await _read(response)
    assert (caught.value.phase, pool.open_connections) == (Phase.BODY, 0)


# -- the two-phase boundary ----------------------------------------------------------------------------------------


async def test_phase_refused_connection_is_certainly_undelivered(send, refused):
    with pytest.raises(errors.ConnectError) as caught:
        await send(refused)
    assert caught.value.maybe_delivered is False


async def test_phase_bad_request_is_refused_before_anything_happens(serve, send, pool):
    connected = []

    async def handler(reader, writer):
        connected.append(1)

    address = await serve(handler)
    with pytest.raises(errors.LocalProtocolError):
        await send(address, headers=[(b"X", b"a\r\nb")])
    assert (connected, pool.open_connections) == ([], 0)


@pytest.mark.parametrize("tls", [False, True])
async def test_phase_server_that_reads_and_closes_may_have_acted(serve, authority, send, tls):
    async def handler(reader, writer):
        await reader.readuntil(b"\r\n\r\n")

    with pytest.raises(errors.ReadError) as caught:
        await send(await serve(handler, authority.server if tls else None), tls=tls)
    assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.FIRST_BYTE, True)


async def test_phase_reset_after_the_request_may_have_acted(serve, send, reset):
    async def handler(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        reset(writer)

    with pytest.raises(errors.ReadError) as caught:
        await send(await serve(handler))
    assert caught.value.maybe_delivered is True


@pytest.mark.parametrize("tls", [False, True])
async def test_phase_connection_lost_before_the_first_byte_is_certainly_undelivered(serve, authority, pool, send, tls):
    def cut_the_wire(stage):
        nonlocal stream
        if stage == "send":
            stream = next(iter(pool._slots)).connection.stream
            stream.close()

    stream = None
    address = await serve(_says(hold=True), authority.server if tls else None)
    with pytest.raises(errors.WriteError) as caught:
        await send(address, tls=tls, follower=Notebook(cut_the_wire))
    assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.SEND, False)
    assert stream.sent_bytes == 0


async def test_phase_kept_connection_closed_by_the_peer_is_not_used_again(serve, send):
    served = []

    async def one_answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        served.append(1)
        writer.write(OK + b"Content-Length: 0\r\n\r\n")

    address = await serve(one_answer)
    for _ in range(3):
        await send(address)
        await asyncio.sleep(0.02)
    assert served == [1, 1, 1]


async def test_phase_kept_connection_closed_on_the_second_request_may_have_acted(serve, send):
    async def one_answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b"Content-Length: 0\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")

    address = await serve(one_answer)
    await send(address)
    with pytest.raises(errors.ReadError) as caught:
        await send(address)
    assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.FIRST_BYTE, True)


async def test_phase_upload_broken_off_by_the_peer_is_a_write_error(serve, send, reset):
    async def handler(reader, writer):
        await reader.readexactly(100_000)
        reset(writer)

    with pytest.raises((errors.WriteError, errors.ReadError)) as caught:
        await send(await serve(handler), "POST", body=LARGE)
    assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.SEND, True)


async def test_phase_no_answer_ends_at_the_deadline_and_may_have_acted(serve, send, pool):
    with pytest.raises(errors.DeadlineExceeded) as caught:
        await send(await serve(_says(hold=True)), deadline_s=0.1)
    assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.FIRST_BYTE, True)
    assert pool.open_connections == 0


async def test_phase_deadline_already_over_sends_nothing(serve, send, pool):
    with pytest.raises(errors.DeadlineExceeded) as caught:
        await send(await serve(_says(hold=True)), deadline_s=0)
    assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.QUEUED, False)


# -- request bodies ------------------------------------------------------------------------------------------------


async def _take(reader):
    """Read one request; give its head and its body."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"transfer-encoding: chunked" not in head:
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return head, await reader.readexactly(length)
    body = b""
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return head, body


async def _pieces(*pieces):
    for piece in pieces:
        yield piece
        await asyncio.sleep(0)


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("size", [0, 10, 70_000, 1_000_000])
@pytest.mark.parametrize("kind", ["bytes", "chunked", "streamed", "streamed with length"])
async def test_upload_arrives_whole_and_keeps_the_connection(serve, authority, send, pool, tls, size, kind):
    got = []

    async def handler(reader, writer):
        while True:
            got.append(await _take(reader))
            writer.write(OK + b"Content-Length: 2\r\n\r\nok")

    body = LARGE[:size]
    source, headers = body, ()
    if kind == "chunked":
        headers = [(b"Transfer-Encoding", b"chunked")]
    elif kind.startswith("streamed"):
        source = _pieces(body[: size // 3], b"", body[size // 3 :])
        headers = [(b"Content-Length", b"%d" % size)] if "length" in kind else ()
    response = await send(
        await serve(handler, authority.server if tls else None), "POST", tls=tls, body=source, headers=headers
    )
    assert await response.read(10) == b"ok"
    assert got[0][1] == body
    assert pool.open_connections == 1


@pytest.mark.parametrize("pieces", [[b"abc"], [b"abcdef", b"gh"]])
async def test_upload_of_another_length_than_said_is_our_fault(serve, send, pool, pieces):
    with pytest.raises(errors.LocalProtocolError):
        await send(await serve(_says(hold=True)), "POST", body=_pieces(*pieces), headers=[(b"Content-Length", b"7")])
    assert pool.open_connections == 0


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), OSError("disk"), TimeoutError("disk")])
async def test_upload_whose_source_fails_raises_that_error(serve, send, pool, error):
    async def failing():
        yield b"a"
        raise error

    with pytest.raises(type(error), match=str(error)):
        await send(await serve(_says(hold=True)), "POST", body=failing())
    assert pool.open_connections == 0


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("then", ["hold", "close", "reset"])
async def test_upload_answered_early_gives_the_answer_and_drops_the_connection(
    serve, authority, send, pool, reset, tls, then
):
    async def handler(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        await writer.drain()
        if then == "hold":
            await asyncio.sleep(30)
        elif then == "reset":
            await asyncio.sleep(0.05)
            reset(writer)

    response = await send(await serve(handler, authority.server if tls else None), "POST", tls=tls, body=LARGE)
    assert (response.status, await response.read(10)) == (413, b"big")
    assert pool.open_connections == 0


async def test_upload_answered_early_with_success_goes_on(serve, send, pool):
    async def echo(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED)
        while size := int(await reader.readline(), 16):
            data = (await reader.readexactly(size + 2))[:-2]
            writer.write(b"%x\r\n%b\r\n" % (size, data))
        writer.write(b"0\r\n\r\n")
        await reader.read()

    heard = asyncio.Event()

    async def talk():
        yield b"one"
        await heard.wait()
        yield b"two"

    response = await send(await serve(echo), "POST", body=talk())
    chunks = response.aiter_raw()
    assert await anext(chunks) == b"one"
    heard.set()
    assert [chunk async for chunk in chunks] == [b"two"]
    assert pool.open_connections == 0


# -- reading slowly, or not at all ---------------------------------------------------------------------------------


async def test_body_deadline_passes_while_reading(serve, send, pool):
    response = await send(await serve(_says(OK + b"Content-Length: 9\r\n\r\nabc", hold=True)), deadline_s=0.2)
    with pytest.raises(errors.DeadlineExceeded) as caught:
        await response.read(100)
    assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.BODY, True)
    assert pool.open_connections == 0


async def test_body_packet_gap_passes_while_reading(serve, send, pool, monkeypatch):
    monkeypatch.setattr(limits, "PACKET_GAP_S", 0.05)
    response = await send(await serve(_says(OK + b"Content-Length: 9\r\n\r\nabc", hold=True)))
    with pytest.raises(errors.DeadlineExceeded) as caught:
        await response.read(100)
    assert (caught.value.phase, pool.open_connections) == (Phase.BODY, 0)


async def test_body_nobody_reads_frees_its_connection_at_the_deadline(serve, send, pool, until):
    response = await send(await serve(_says(OK + b"Content-Length: 9\r\n\r\nabc", hold=True)), deadline_s=0.1)
    await until(lambda: pool.open_connections == 0)
    assert await anext(response.aiter_raw()) == b"abc"
    with pytest.raises(errors.DeadlineExceeded):
        await response.read(100)


async def test_body_closed_before_its_end_closes_the_connection(serve, send, pool):
    response = await send(await serve(_says(OK + b"Content-Length: 9\r\n\r\nabc", hold=True)))
    await response.aclose()
    await response.aclose()
    assert pool.open_connections == 0


async def test_body_larger_than_asked_for_is_a_violation(serve, send, pool):
    response = await send(await serve(_says(OK + b"Content-Length: 900\r\n\r\n" + bytes(500), hold=True)))
    with pytest.raises(errors.ProtocolViolation):
        await response.read(499)
    assert pool.open_connections == 0


async def test_body_read_cancelled_closes_the_connection(serve, send, pool):
    response = await send(await serve(_says(OK + b"Content-Length: 9\r\n\r\n", hold=True)))
    task = asyncio.create_task(response.read(100))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pool.open_connections == 0


async def test_tls_of_a_foreign_name_is_a_tls_error(serve, authority, pool):
    address = await serve(_says(hold=True), authority.server)
    request = HttpRequest("GET", "https", "b.test", address.port, b"/")
    with pytest.raises(errors.TlsError):
        await pool.request(request, deadline_s=5, addresses=(address,))
    untrusting = HttpPool(Dialer(Resolver(), ssl.create_default_context()), SystemClock())
    with pytest.raises(errors.TlsError):
        await untrusting.request(
            HttpRequest("GET", "https", "a.test", address.port, b"/"), deadline_s=5, addresses=(address,)
        )
    await untrusting.aclose()
