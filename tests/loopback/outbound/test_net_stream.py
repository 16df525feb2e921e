"""Streams on real sockets: sizes, ends, cancellation, and the moment the kernel takes a byte."""

import asyncio
import contextlib
import os
import random
import socket
import ssl

import pytest

from stormline.core import errors
from stormline.core.values import Address
from stormline.net.stream import open_tcp, start_tls
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
