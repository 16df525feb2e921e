"""What the kernel says of real connections: through TCP, TLS and MPTCP, on a path that works and on one cut off."""

import asyncio
import contextlib
import ctypes
import logging
import os
import socket
import struct
import subprocess
import sys

import pytest

from stormline.core.values import Address
from stormline.net import stream as streams
from stormline.net import system, tcpinfo
from stormline.net.stream import open_tcp
from stormline.net.tls import start_tls
from stormline.net.trust import roles_context

pytestmark = pytest.mark.loopback
needs_tcp_info = pytest.mark.skipif(not tcpinfo.available(), reason="this system has no TCP_INFO, or is to do without")
needs_linux = pytest.mark.skipif(not system.LINUX, reason="not Linux, or its own parts are switched off")
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
RECORDS_SENT = 4  # TLS: two flights of its handshake and the byte; each may be probed for once
SOL_MPTCP, MPTCP_INFO = 284, 1


async def _echo(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


@contextlib.contextmanager
def deaf(writer):
    """Let a server's socket hear nothing for a while: a socket filter drops what comes, so nothing is acknowledged."""
    drop = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))  # BPF: return 0, "keep no byte"
    with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as sock:
        sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(drop)))
        try:
            yield
        finally:
            sock.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="socket filters are Linux' own")
async def test_receive_from_a_peer_that_is_gone_without_a_word_ends_by_keep_alive(serve, monkeypatch):
    writers = []

    async def handler(reader, writer):
        writers.append(writer)
        await _echo(reader, writer)

    quick = ((("TCP_KEEPIDLE",), 1), (("TCP_KEEPINTVL",), 1), (("TCP_KEEPCNT",), 1))
    monkeypatch.setattr(streams, "_KEEPALIVE", quick)
    stream = await open_tcp(await serve(handler))
    await stream.send_all(b"x")
    assert await stream.receive() == b"x"
    with deaf(writers[0]), pytest.raises(TimeoutError):
        await stream.receive()
    stream.close()


@pytest.fixture(name="pair", params=["tcp", "tls"])
async def _pair(request, serve, authority):
    """Give a connected stream and the server's writer."""
    writers = []

    async def handler(reader, writer):
        writers.append(writer)
        await _echo(reader, writer)

    if request.param == "tcp":
        stream = await open_tcp(await serve(handler))
    else:
        raw = await open_tcp(await serve(handler, authority.server))
        stream = await start_tls(raw, roles_context(authority.pem, []), "a.test")
    await stream.send_all(b"x")
    await stream.receive()
    yield stream, writers[0]
    stream.close()


@needs_tcp_info
async def test_tcp_info_of_a_path_that_works_shows_nothing_under_way(pair, until):
    stream, _ = pair
    await until(lambda: stream.tcp_info().unacked_bytes == 0)
    info = stream.tcp_info()
    assert (info.backoffs, info.notsent_bytes) == (0, 0)
    # A machine busy for a few milliseconds is answered with tail loss probes (RFC 8985), which count as retransmits.
    assert info.retransmits <= RECORDS_SENT
    assert 0 < info.min_rtt_s <= 1
    assert 0 < info.rtt_s < info.rto_s
    assert info.ack_age_s >= 0
    assert info.heard_age_s >= 0


@needs_tcp_info
async def test_tcp_info_of_a_path_cut_off_shows_what_is_under_way_and_backs_off(pair, until):
    stream, writer = pair
    await until(lambda: stream.tcp_info().unacked_bytes == 0)
    with deaf(writer):
        await stream.send_all(bytes(1000))
        await until(lambda: stream.tcp_info().backoffs >= 2)
        info = stream.tcp_info()
        assert 1000 <= info.unacked_bytes <= 1100
        assert info.retransmits >= 2
        assert info.ack_age_s > 0.2
        assert info.heard_age_s > 0.2
        assert info.rto_s > 0.4
    await until(lambda: stream.tcp_info().unacked_bytes == 0)
    assert stream.tcp_info().backoffs == 0


@needs_tcp_info
async def test_tcp_info_of_a_peer_that_does_not_read_shows_bytes_not_sent(serve, until):
    async def hold(reader, writer):
        reader._transport.pause_reading()
        await asyncio.Event().wait()

    stream = await open_tcp(await serve(hold))
    task = asyncio.create_task(stream.send_all(bytes(20_000_000)))
    await until(lambda: stream.tcp_info().notsent_bytes)
    stream.close()
    with pytest.raises(ConnectionAbortedError):
        await task


async def test_tcp_info_of_a_closed_broken_or_switched_off_stream_is_none(serve, reset, until):
    async def leave(reader, writer):
        await reader.read(1)
        reset(writer)

    address = await serve(leave)
    closed, broken, off = await open_tcp(address), await open_tcp(address), await open_tcp(address, tcp_info=False)
    closed.close()
    await broken.send_all(b"x")
    await until(broken.is_readable)
    assert [stream.tcp_info() for stream in (closed, broken, off)] == [None] * 3
    broken.close()
    off.close()


async def test_heard_at_moves_with_bytes_and_not_with_the_end(pair, until):
    stream, writer = pair
    loop = asyncio.get_running_loop()
    first = stream.heard_at
    assert first <= loop.time()
    await asyncio.sleep(0.02)
    await stream.send_all(b"y")
    assert stream.heard_at == first
    await stream.receive()
    second = stream.heard_at
    assert second > first
    writer.transport.abort()
    await until(stream.is_readable)
    with contextlib.suppress(OSError):
        await stream.receive()
    assert stream.heard_at == second
    stream.close()
    assert stream.heard_at == second


async def test_heard_at_of_a_new_connection_is_when_it_was_made(serve):
    before = asyncio.get_running_loop().time()
    stream = await open_tcp(await serve(_echo))
    assert before <= stream.heard_at <= asyncio.get_running_loop().time()
    stream.close()


# -- MPTCP ------------------------------------------------------------------------------------------------------------


@pytest.fixture(name="mptcp_address")
async def _mptcp_address():
    """Give the address of an echo server that takes MPTCP."""
    if not system.LINUX:
        pytest.skip("not Linux, or its own parts are switched off")
    try:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)
    except OSError as error:
        pytest.skip(f"this kernel has no MPTCP: {error}")
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    accepted = []

    async def work():
        while True:
            peer, _ = await loop.sock_accept(sock)
            accepted.append(asyncio.create_task(echo(peer)))

    async def echo(peer):
        stream = streams.TcpStream(peer, loop)
        with contextlib.suppress(OSError):
            while data := await stream.receive():
                await stream.send_all(data)
        stream.close()

    task = asyncio.create_task(work())
    yield Address(*sock.getsockname())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    if accepted:
        await asyncio.wait(accepted)
    sock.close()


def _is_mptcp(stream):
    """Ask the kernel, whose bit 0 of the flags says that it fell back to TCP."""
    try:
        info = stream._sock.getsockopt(SOL_MPTCP, MPTCP_INFO, 96)
    except OSError:
        return False
    return not int.from_bytes(info[8:12], "little") & 1


async def test_open_tcp_mptcp_is_mptcp_and_tells_of_its_path(mptcp_address, until):
    stream = await open_tcp(mptcp_address, mptcp=True)
    data = bytes(range(256)) * 1000
    sending = asyncio.create_task(stream.send_all(data))
    gathered = b""
    while len(gathered) < len(data):
        gathered += await stream.receive()
    await sending
    assert gathered == data
    assert _is_mptcp(stream)
    await until(lambda: stream.tcp_info().unacked_bytes == 0)
    assert stream.tcp_info().rtt_s > 0
    stream.close()


async def test_open_tcp_mptcp_peer_without_it_is_tcp(serve):
    stream = await open_tcp(await serve(_echo), mptcp=True)
    await stream.send_all(b"x")
    assert await stream.receive() == b"x"
    assert not _is_mptcp(stream)
    assert (stream.tcp_info() is not None) == tcpinfo.available()
    stream.close()


async def test_open_tcp_mptcp_refused_raises(refused):
    with pytest.raises(ConnectionRefusedError):
        await open_tcp(refused, mptcp=True)


async def test_open_tcp_mptcp_cancelled_leaves_nothing(silent):
    task = asyncio.create_task(open_tcp(silent, mptcp=True))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@needs_linux
@pytest.mark.parametrize(
    ("protocol", "said"), [(250, "Protocol not supported"), (300, "Invalid argument")], ids=["unknown", "too-large"]
)
async def test_open_tcp_kernel_without_mptcp_takes_tcp_and_says_so_once(serve, monkeypatch, caplog, protocol, said):
    """A protocol that this kernel does not have either, and one that is as much out of its range as MPTCP's number is
    for an old one: so a real kernel refuses."""
    monkeypatch.setattr(streams, "_IPPROTO_MPTCP", protocol)
    with caplog.at_level(logging.DEBUG, logger="stormline.net"):
        stream = await open_tcp(await serve(_echo), mptcp=True)
    assert [record.message for record in caplog.records if record.name == "stormline.net"] == [
        f"no MPTCP here, TCP instead: {said}"
    ]
    await stream.send_all(b"x")
    assert await stream.receive() == b"x"
    stream.close()


@needs_linux
def test_open_tcp_kernel_with_mptcp_switched_off_takes_tcp():
    program = """
import asyncio, logging, sys
from stormline.core.values import Address
from stormline.net.stream import open_tcp
logging.basicConfig(level="DEBUG", format="%(message)s", stream=sys.stdout)
logging.getLogger("asyncio").disabled = True
async def main():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    stream = await open_tcp(Address(*server.sockets[0].getsockname()), mptcp=True)
    print("came:", await stream.receive())
    stream.close()
    server.close()
asyncio.run(main())
"""
    inside = 'ip link set lo up && echo 0 > /proc/sys/net/mptcp/enabled && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "-rn", "sh", "-c", inside, sys.executable, program], capture_output=True, text=True, check=False
    )
    if done.returncode and "came" not in done.stdout and "Traceback" not in done.stderr:
        pytest.skip(f"no network namespace here: {done.stderr[:200]}")
    assert (done.returncode, done.stdout) == (
        0,
        "no MPTCP here, TCP instead: Protocol not available\ncame: b''\n",
    ), done.stderr
