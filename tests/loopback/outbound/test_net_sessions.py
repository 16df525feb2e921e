"""TLS resumption against real servers: asyncio's and `openssl s_server`."""

import asyncio
import contextlib
import gc
import shutil
import ssl

import pytest

from stormline.core.values import Address
from stormline.net.sessions import TlsSessions
from stormline.net.stream import open_tcp
from stormline.net.tls import start_tls

pytestmark = pytest.mark.loopback


async def _echo(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


@pytest.fixture(name="context")
def _context(authority):
    """Give the client's context, which speaks TLS 1.2 and up."""
    return _make_context(authority)


def _make_context(authority):
    return ssl.create_default_context(cadata=authority.pem.decode())


def _server(authority, version=ssl.TLSVersion.TLSv1_3):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.certificate, authority.key)
    context.maximum_version = version
    return context


async def exchange(address, context, sessions, *, name="a.test", port=443, close=True):
    """Connect, let something come, and give whether it was resumed."""
    stream = await start_tls(await open_tcp(address), context, name, sessions=sessions, port=port)
    await stream.send_all(b"x")
    assert await stream.receive() == b"x"
    if close:
        stream.close()
    else:
        stream._raw.close()  # as a path that dies: no close_notify
    return stream.resumed


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_start_tls_second_connection_resumes_and_so_do_all_after_it(serve, authority, context, version):
    address, sessions = await serve(_echo, _server(authority, version)), TlsSessions()
    assert [await exchange(address, context, sessions) for _ in range(5)] == [False, True, True, True, True]
    assert len(sessions) == 1


async def test_start_tls_without_sessions_never_resumes(serve, authority, context):
    address = await serve(_echo, _server(authority))
    assert [await exchange(address, context, None) for _ in range(3)] == [False] * 3


async def test_start_tls_each_ticket_is_offered_once(serve, authority, context):
    address, sessions = await serve(_echo, _server(authority)), TlsSessions()
    await exchange(address, context, sessions)
    opened = [
        await start_tls(await open_tcp(address), context, "a.test", sessions=sessions, port=443) for _ in range(2)
    ]
    assert [stream.resumed for stream in opened] == [True, False]
    for stream in opened:
        stream.close()


async def test_start_tls_other_name_port_or_context_does_not_resume(serve, authority, context):
    address, sessions = await serve(_echo, _server(authority)), TlsSessions()
    await exchange(address, context, sessions)
    assert not await exchange(address, context, sessions, port=8443)
    assert not await exchange(address, _make_context(authority), sessions)
    with pytest.raises(ssl.SSLCertVerificationError):  # a resumed handshake would not have looked
        await exchange(address, context, sessions, name="b.test")
    assert await exchange(address, context, sessions, name="A.TEST")


async def test_start_tls_server_that_forgot_makes_a_full_handshake(serve, authority, context):
    sessions = TlsSessions()
    await exchange(await serve(_echo, _server(authority)), context, sessions)
    restarted = await serve(_echo, _server(authority))  # with ticket keys of its own
    assert [await exchange(restarted, context, sessions) for _ in range(2)] == [False, True]


async def test_start_tls_session_of_a_connection_that_died_is_good(serve, authority, context):
    address, sessions = await serve(_echo, _server(authority)), TlsSessions()
    await exchange(address, context, sessions, close=False)
    gc.collect()
    assert await exchange(address, context, sessions)


async def test_start_tls_handshake_that_fails_uses_its_ticket_up(serve, authority, context):
    async def leave(reader, writer):
        await reader.read(1)

    address, sessions = await serve(_echo, _server(authority)), TlsSessions()
    await exchange(address, context, sessions)
    with pytest.raises((ssl.SSLEOFError, ConnectionResetError)):
        await start_tls(await open_tcp(await serve(leave)), context, "a.test", sessions=sessions, port=443)
    assert len(sessions) == 0
    assert not await exchange(address, context, sessions)


async def test_start_tls_server_without_tickets_is_never_resumed(serve, authority, context):
    server = _server(authority)
    server.num_tickets = 0
    address, sessions = await serve(_echo, server), TlsSessions()
    assert [await exchange(address, context, sessions) for _ in range(2)] == [False, False]
    assert len(sessions) == 0


async def test_start_tls_connection_that_brought_nothing_leaves_no_session(serve, authority, context):
    address, sessions = await serve(_echo, _server(authority)), TlsSessions()
    stream = await start_tls(await open_tcp(address), context, "a.test", sessions=sessions, port=443)
    stream.close()
    assert len(sessions) == 0


# -- openssl s_server -------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def s_server(authority, *options):
    """Start `openssl s_server`, which sends back each line reversed."""
    process = await asyncio.create_subprocess_exec(
        "openssl", "s_server", "-accept", "127.0.0.1:0", "-cert", str(authority.certificate),
        "-key", str(authority.key), "-rev", *options,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(10):
            while b"ACCEPT" not in (line := await process.stdout.readline()):
                assert line, "it ended"
        yield Address("127.0.0.1", int(line.rpartition(b":")[2]))
    finally:
        process.kill()
        await process.wait()
        process._transport.close()


async def lines(address, context, sessions):
    """Exchange a line, and give whether it was resumed."""
    stream = await start_tls(await open_tcp(address), context, "a.test", sessions=sessions, port=443)
    await stream.send_all(b"abc\n")
    answer = b""
    while not answer.endswith(b"\n"):
        answer += await stream.receive()
    assert answer == b"cba\n"
    stream.close()
    return stream.resumed


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
@pytest.mark.parametrize(
    ("options", "resumed"),
    [
        ((), [False, True, True]),
        (("-no_ticket",), [False, True, True]),  # TLS 1.3: tickets that name what the server keeps
        (("-num_tickets", "0"), [False, False, False]),
        (("-tls1_2",), [False, True, True]),
        (("-tls1_2", "-no_ticket"), [False, True, True]),  # session ids
    ],
)
async def test_start_tls_openssl_server_resumes(authority, context, options, resumed):
    sessions = TlsSessions()
    async with s_server(authority, *options) as address:
        assert [await lines(address, context, sessions) for _ in range(3)] == resumed


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
async def test_start_tls_openssl_server_restarted_makes_a_full_handshake(authority, context):
    sessions = TlsSessions()
    async with s_server(authority) as address:
        await lines(address, context, sessions)
    async with s_server(authority) as address:
        assert [await lines(address, context, sessions) for _ in range(2)] == [False, True]


async def test_place_where_a_resumed_connection_brought_nothing_is_resumed_at_no_more(serve, authority, context):
    """A path that lets a short handshake pass and swallows what follows: a full one would have failed in the race."""
    address, sessions = await serve(_echo, _server(authority)), TlsSessions()
    await exchange(address, context, sessions)
    await exchange(address, context, sessions, port=444)
    silent = await start_tls(await open_tcp(address), context, "a.test", sessions=sessions, port=443)
    assert silent.resumed
    silent.shun_session()
    silent.close()
    assert [await exchange(address, context, sessions) for _ in range(2)] == [False, False]
    assert await exchange(address, context, sessions, port=444)  # another place is another matter
    sessions.clear()  # another network
    assert [await exchange(address, context, sessions) for _ in range(2)] == [False, True]


async def test_connection_with_a_full_handshake_has_nothing_to_shun(serve, authority, context):
    address, sessions = await serve(_echo, _server(authority)), TlsSessions()
    first = await start_tls(await open_tcp(address), context, "a.test", sessions=sessions, port=443)
    first.shun_session()
    first.close()
    assert [await exchange(address, context, sessions) for _ in range(2)] == [False, True]
