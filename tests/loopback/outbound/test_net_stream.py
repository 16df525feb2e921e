"""Streams on real sockets: sizes, ends, cancellation, and the moment the kernel takes a byte."""

import asyncio
import contextlib
import os
import random
import socket
import ssl

import pytest
import uvloop

from stormline.core import errors, limits
from stormline.core.values import Address
from stormline.net import stream as streams
from stormline.net import system
from stormline.net.stream import TcpStream, open_tcp
from stormline.net.tls import start_tls
from stormline.net.trust import roles_context

pytestmark = pytest.mark.loopback
LARGE = random.Random(1).randbytes(3_000_000)


async def _echo(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


async def _hold(reader, writer):
    """Read nothing, say nothing."""
    reader._transport.pause_reading()
    await asyncio.Event().wait()


@pytest.fixture(name="connect", params=["tcp", "tls"])
async def _connect(request, serve, authority):
    """Start a server with a handler and connect to it, by TCP or TLS."""
    streams = []

    async def connect(handler):
        if request.param == "tcp":
            stream = await open_tcp(await serve(handler))
        else:
            raw = await open_tcp(await serve(handler, authority.server))
            stream = await start_tls(raw, roles_context(authority.pem, ["http/1.1"]), "a.test")
        streams.append(stream)
        return stream

    yield connect
    for stream in streams:
        stream.close()


async def test_stream_large_data_both_ways_arrives_whole(connect):
    stream = await connect(_echo)
    sender = asyncio.create_task(stream.send_all(LARGE))
    got = bytearray()
    while len(got) < len(LARGE):
        got += await stream.receive(100_000)
    await sender
    assert got == LARGE
    assert stream.sent_bytes == len(LARGE)


async def test_stream_end_of_peer_is_empty_bytes_again_and_again(connect):
    async def say_and_end(reader, writer):
        writer.write(b"bye")
        writer.close()

    stream = await connect(say_and_end)
    async with asyncio.timeout(15):  # half of what a server waits for an answer to its close_notify
        assert [await stream.receive() for _ in range(3)] == [b"bye", b"", b""]


async def test_stream_reset_by_peer_raises_oserror(connect, reset):
    async def after_first_byte(reader, writer):
        await reader.read(1)
        reset(writer)

    stream = await connect(after_first_byte)
    await stream.send_all(b"x")
    with pytest.raises(ConnectionResetError):
        await stream.receive()


async def test_stream_receive_cancelled_again_and_again_loses_no_byte(connect):
    async def drip(reader, writer):
        for value in range(200):
            writer.write(bytes([value]) * 100)
            await asyncio.sleep(0)

    stream = await connect(drip)
    got = bytearray()
    while len(got) < 20_000:
        task = asyncio.create_task(stream.receive(7))
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            data = await task
            if not data:
                break
            got += data
        if task.cancelled():
            await asyncio.sleep(0)
    assert got == b"".join(bytes([value]) * 100 for value in range(200))


async def test_stream_send_cancelled_closes_and_counts_what_is_out(connect, until):
    stream = await connect(_hold)
    task = asyncio.create_task(stream.send_all(bytes(20_000_000)))
    await until(lambda: stream.sent_bytes)
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert 0 < stream.sent_bytes < 20_000_000
    with pytest.raises(ConnectionAbortedError):
        await stream.receive()


async def test_stream_close_wakes_receiver_and_sender(connect):
    stream = await connect(_hold)
    tasks = [asyncio.create_task(stream.receive()), asyncio.create_task(stream.send_all(bytes(20_000_000)))]
    await asyncio.sleep(0.05)
    stream.close()
    stream.close()
    for task in tasks:
        with pytest.raises(ConnectionAbortedError):
            await task
    with pytest.raises(ConnectionAbortedError):
        await stream.send_all(b"x")


async def test_stream_two_receivers_or_senders_at_once_are_refused(connect):
    stream = await connect(_hold)
    tasks = [asyncio.create_task(stream.receive()), asyncio.create_task(stream.send_all(bytes(20_000_000)))]
    await asyncio.sleep(0.01)
    with pytest.raises(errors.LocalProtocolError):
        await stream.receive()
    with pytest.raises(errors.LocalProtocolError):
        await stream.send_all(b"x")
    stream.close()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_stream_at_rest_is_readable_only_when_something_came(connect, until):
    async def on_demand(reader, writer):
        while data := await reader.read(1):
            writer.write(data)
        writer.close()

    stream = await connect(on_demand)
    await asyncio.sleep(0.02)  # TLS 1.3 tickets come now: they are not data
    assert not stream.is_readable()
    await stream.send_all(b"x")
    await until(stream.is_readable)
    assert await stream.receive() == b"x"
    assert not stream.is_readable()


async def test_stream_peer_gone_at_rest_is_readable(connect, until):
    async def leave(reader, writer):
        await reader.read(1)

    stream = await connect(leave)
    await stream.send_all(b"x")
    await until(stream.is_readable)
    assert await stream.receive() == b""


async def test_stream_fast_peer_leaves_turns_to_other_tasks(connect):
    async def flood(reader, writer):
        with contextlib.suppress(OSError):
            while True:
                writer.write(bytes(65536))
                await writer.drain()

    stream = await connect(flood)
    turns = 0

    async def other():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    for _ in range(1000):
        await stream.receive()
    task.cancel()
    assert turns > 8


async def test_stream_nobody_reads_the_peer_is_stopped_and_the_loop_rests(connect, monkeypatch, until):
    sent, events = 0, 0

    async def flood(reader, writer):
        nonlocal sent
        with contextlib.suppress(OSError):
            while True:
                writer.write(bytes(65536))
                await writer.drain()
                sent += 65536

    def count(stream, on_readable=TcpStream._on_readable):
        nonlocal events
        events += 1
        on_readable(stream)

    monkeypatch.setattr(TcpStream, "_on_readable", count)
    stream = await connect(flood)
    assert await stream.receive()
    before = -1
    while sent != before:
        before = sent
        await asyncio.sleep(0.1)
    events = 0
    await asyncio.sleep(0.1)
    assert (sent, events) == (before, 0)
    got = 0
    while got <= before:
        got += len(await stream.receive())
    assert sent > before


async def test_stream_send_nowait_gives_what_is_taken_and_nothing_is_lost_or_sent_twice(connect, until):
    read, got, data = asyncio.Event(), bytearray(), LARGE * 7

    async def later(reader, writer):
        reader._transport.pause_reading()
        await read.wait()
        reader._transport.resume_reading()
        while piece := await reader.read(65536):
            got.extend(piece)

    stream = await connect(later)
    offset = 0
    while taken := stream.send_nowait(data[offset : offset + 100_000]):
        offset += taken
    assert 0 < stream.sent_bytes <= offset < len(data)
    assert offset - stream.sent_bytes < 16_385
    read.set()
    await stream.send_all(b"")
    assert (stream.has_unsent, stream.sent_bytes) == (False, offset)
    await stream.send_all(data[offset:])
    await until(lambda: len(got) == len(data))  # before the close, which resets the connection: tickets are unread
    stream.close()
    assert got == data
    assert stream.sent_bytes == len(data)


async def test_stream_send_nowait_beside_another_sender_is_refused(connect):
    stream = await connect(_hold)
    task = asyncio.create_task(stream.send_all(bytes(20_000_000)))
    await asyncio.sleep(0.01)
    with pytest.raises(errors.LocalProtocolError):
        stream.send_nowait(b"x")
    stream.close()
    await asyncio.wait([task])
    assert stream.closed
    with pytest.raises(ConnectionAbortedError):
        stream.send_nowait(b"x")


async def test_stream_receive_nowait_gives_bytes_the_end_and_nothing_meanwhile(connect, until):
    async def on_demand(reader, writer):
        while data := await reader.read(1):
            writer.write(data * 3)
        writer.close()

    stream = await connect(on_demand)
    assert stream.receive_nowait() is None
    await stream.send_all(b"x")
    await until(stream.is_readable)
    assert [stream.receive_nowait(2), await stream.receive(2), stream.receive_nowait()] == [b"xx", b"x", None]
    stream.close()
    with pytest.raises(ConnectionAbortedError):
        stream.receive_nowait()


async def test_tcp_bytes_taken_for_a_task_that_was_cancelled_are_the_next_ones(serve, until):
    async def say(reader, writer):
        writer.write(b"0123456789")
        await reader.read()

    stream = await open_tcp(await serve(say))
    task = asyncio.create_task(stream.receive(8))
    await asyncio.sleep(0)
    await until(lambda: stream.is_readable() or task.done())
    if not task.done():
        stream._on_readable()  # the loop's event, and the cancellation comes before the task's turn
        task.cancel()
        await asyncio.wait([task])
        assert stream.is_readable()
    got = task.result() if not task.cancelled() else b""
    while len(got) < 10:
        got += await stream.receive(3)
    assert got == b"0123456789"
    assert not stream.is_readable()
    stream.close()


async def test_tcp_descriptor_of_a_closed_stream_serves_the_next_one(serve):
    address = await serve(_echo)
    for value in range(20):
        stream = await open_tcp(address)
        task = asyncio.create_task(stream.receive())
        await asyncio.sleep(0)  # it waits: the loop watches
        await stream.send_all(bytes([value]))
        assert await task == bytes([value])
        stream.close()


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_tcp_close_after_its_loop_is_closed_frees_the_descriptor(factory):
    with socket.create_server(("127.0.0.1", 0)) as server, asyncio.Runner(loop_factory=factory) as runner:

        async def wait_in_vain():
            stream = await open_tcp(Address(*server.getsockname()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await stream.receive()
            return stream

        stream = runner.run(wait_in_vain())
        runner.close()
        stream.close()
        assert stream.closed


async def test_stream_addresses_and_alpn_are_known(connect):
    stream = await connect(_hold)
    assert (stream.peer.host, stream.local.host) == ("127.0.0.1", "127.0.0.1")
    assert stream.peer != stream.local
    assert stream.alpn == ("http/1.1" if type(stream).__name__ == "TlsStream" else None)


async def test_open_tcp_refused_raises_and_leaves_nothing(refused):
    with pytest.raises(ConnectionRefusedError):
        await open_tcp(refused)


async def test_open_tcp_cancelled_leaves_nothing(silent):
    task = asyncio.create_task(open_tcp(silent))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1%lo", "", "1.2.3"])
async def test_open_tcp_name_is_refused(host):
    with pytest.raises(errors.LocalProtocolError):
        await open_tcp(Address(host, 1))


async def test_open_tcp_ipv6_with_unknown_scope_is_an_oserror():
    with pytest.raises(OSError, match="interface"):
        await open_tcp(Address("fe80::1%nosuchif", 1))


@pytest.mark.skipif(system.PORTABLE, reason="the pace of keep-alive is left to the system (STORMLINE_PORTABLE)")
@pytest.mark.parametrize("mptcp", [False, True])
async def test_open_tcp_asks_a_silent_peer_for_signs_of_life(serve, mptcp):
    stream = await open_tcp(await serve(_hold), mptcp=mptcp)
    sock = stream._sock
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    assert [sock.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [
        limits.TCP_KEEPALIVE_IDLE_S, limits.TCP_KEEPALIVE_INTERVAL_S, limits.TCP_KEEPALIVE_PROBES,
    ]  # fmt: skip
    stream.close()


async def test_open_tcp_by_an_interface_that_is_not_there_fails_and_leaves_nothing(serve):
    with pytest.raises(OSError, match=r"(?i)no such device|interface"):
        await open_tcp(await serve(_hold), device="nosuchif")


async def test_open_tcp_system_that_binds_no_interface_refuses_to_go_another_way(serve, monkeypatch):
    monkeypatch.setattr(streams, "_SO_BINDTODEVICE", None)
    with pytest.raises(OSError, match="interface"):
        await open_tcp(await serve(_hold), device="lo")


async def test_open_tcp_system_without_the_options_connects_all_the_same(serve, monkeypatch):
    monkeypatch.setattr(streams, "_KEEPALIVE", ((("TCP_OF_ANOTHER_SYSTEM",), 1),))
    (await open_tcp(await serve(_hold))).close()
    monkeypatch.setattr(streams, "_KEEPALIVE", ((("TCP_KEEPIDLE",), -1),))
    stream = await open_tcp(await serve(_hold))
    assert not stream._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    stream.close()


async def test_start_tls_wrong_name_is_refused_and_peer_told(serve, authority):
    raw = await open_tcp(await serve(_echo, authority.server))
    with pytest.raises(ssl.SSLCertVerificationError):
        await start_tls(raw, roles_context(authority.pem, []), "b.test")
    assert raw.is_readable()


async def test_start_tls_peer_that_speaks_no_tls_is_an_ssl_error(serve):
    async def ssh(reader, writer):
        writer.write(b"SSH-2.0-OpenSSH\r\n")
        await reader.read()

    raw = await open_tcp(await serve(ssh))
    with pytest.raises(ssl.SSLError):
        await start_tls(raw, ssl.create_default_context(), "a.test")


async def test_start_tls_peer_hangs_up_is_an_eof_error(serve):
    async def leave(reader, writer):
        await reader.read(1)

    raw = await open_tcp(await serve(leave))
    with pytest.raises((ssl.SSLEOFError, ConnectionResetError)):
        await start_tls(raw, ssl.create_default_context(), "a.test")


async def test_start_tls_cancelled_leaves_nothing(serve):
    raw = await open_tcp(await serve(_hold))
    task = asyncio.create_task(start_tls(raw, ssl.create_default_context(), "a.test"))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_roles_context_refuses_tls_1_2(serve, authority):
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    old.load_cert_chain(authority.certificate, authority.key)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    raw = await open_tcp(await serve(_echo, old))
    with pytest.raises(ssl.SSLError):
        await start_tls(raw, roles_context(authority.pem, []), "a.test")


async def test_tls_end_without_close_notify_is_told_from_an_end(serve, authority):
    async def cut(reader, writer):
        await reader.read(1)
        writer.write(b"half")
        await writer.drain()
        with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as below:
            below.shutdown(socket.SHUT_WR)  # FIN without close_notify
        await reader.read()

    raw = await open_tcp(await serve(cut, authority.server))
    stream = await start_tls(raw, roles_context(authority.pem, []), "a.test")
    await stream.send_all(b"x")
    assert await stream.receive() == b"half"
    with pytest.raises(ssl.SSLEOFError):
        await stream.receive()
    stream.close()


async def test_tls_close_says_close_notify(serve, authority):
    ended = asyncio.get_running_loop().create_future()

    async def listen(reader, writer):
        try:
            ended.set_result(await reader.read())
        except Exception as error:
            ended.set_exception(error)

    raw = await open_tcp(await serve(listen, authority.server))
    stream = await start_tls(raw, roles_context(authority.pem, []), "a.test")
    await stream.send_all(b"last words")
    stream.close()
    assert await asyncio.wait_for(ended, 5) == b"last words"


async def test_tls_sent_bytes_counts_nothing_for_the_handshake(serve, authority):
    raw = await open_tcp(await serve(_hold, authority.server))
    stream = await start_tls(raw, roles_context(authority.pem, []), "a.test")
    assert (stream.sent_bytes, raw.sent_bytes > 0) == (0, True)
    await stream.send_all(b"x")
    assert stream.sent_bytes == 1
    stream.close()
    with pytest.raises(ConnectionAbortedError):
        await stream.send_all(b"yy")
    assert stream.sent_bytes == 1
