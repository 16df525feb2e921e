"""Tunnels through real proxies that were not written here, and through ones that behave badly."""

import asyncio
import contextlib
import socket

import pytest

from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net.clock import SystemClock
from stormline.net.resolve import Resolver
from stormline.net.trust import roles_context
from stormline.outbound.dial import Dialer
from stormline.outbound.messages import HttpRequest
from stormline.outbound.pool import HttpPool
from stormline.outbound.proxy import ProxyDialer, forwarded
from stormline.outbound.proxy_rules import explicit, from_environment
from stormline.testing import proxies

pytestmark = pytest.mark.loopback

USERINFO, PASSWORD = "someone:p%61ss@", "pass"  # tinyproxy takes letters and digits only
PROGRAMS = {"tinyproxy": proxies.running_tinyproxy, "microsocks": proxies.running_microsocks}


@pytest.fixture(scope="module", name="started")
def _started(tmp_path_factory):
    """Run each real proxy, with and without credentials; skip where one is wanted that is not installed."""
    with contextlib.ExitStack() as stack:
        running = {
            (program, bool(options)): stack.enter_context(run(tmp_path_factory.mktemp(program), **options))
            for program, run in PROGRAMS.items()
            if proxies.installed(program)
            for options in ({}, {"userinfo": USERINFO, "password": PASSWORD})
        }

        def get(program, *, locked=False):
            if (program, locked) not in running:
                pytest.skip(f"{program} is not installed")
            return running[program, locked]

        yield get


@pytest.fixture(name="real", params=["tinyproxy", "microsocks"])
def _real(request, started):
    return started(request.param)


@pytest.fixture(name="locked", params=["tinyproxy", "microsocks"])
def _locked(request, started):
    return started(request.param, locked=True)


@pytest.fixture(name="behind")
def _behind(authority):
    """Make dialers behind a proxy."""

    def make(rules, *, by_name=True, resolver=None):
        context, resolver = roles_context(authority.pem, ["http/1.1"]), resolver or Resolver()
        rules = explicit(rules) if isinstance(rules, str) else rules
        return ProxyDialer(Dialer(resolver, context), rules, context=context, resolver=resolver, by_name=by_name)

    return make


class Names:
    """A resolver that knows what it is told, and keeps what it is asked."""

    def __init__(self, **known):
        self.known = known
        self.asked = []

    def doubt(self, host):
        """Nothing to doubt."""

    async def resolve(self, host, port):
        self.asked.append(host)
        if Address(host, port).is_ip:
            return (Address(host, port),)
        if host not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return tuple(Address(ip, port) for ip in self.known[host].split())


async def _echo(reader, writer):
    while data := await reader.read(1000):
        writer.write(data)


async def _hold(reader, writer):
    await reader.read()


async def _dial(dialer, host, port, *, tls=True, timeout_s=10.0, **more):
    return await dialer.dial(host, port, tls=tls, timeout_s=timeout_s, **more)


async def _said(stream, data=b"ping"):
    await stream.send_all(data)
    answer = b""
    while len(answer) < len(data):
        answer += await stream.receive()
    stream.close()
    return answer


async def _error(dialer, *target, **options):
    with pytest.raises(errors.TransportError) as caught:
        await _dial(dialer, *target, **options)
    assert caught.value.maybe_delivered is False
    return caught.value


class TestTunnel:
    async def test_tls_to_an_address_is_verified_by_the_origin_s_name(self, real, behind, serve, authority):
        origin = await serve(_echo, authority.server)
        stages, notes = [], []
        stream = await _dial(
            behind(real.url, by_name=False), "a.test", 1, addresses=(origin,), on_stage=stages.append,
            on_note=notes.append,
        )  # fmt: skip
        assert (stream.peer, stream.alpn) == (real.address, "http/1.1")
        assert stages == ["resolve", "connect", "tls"]
        assert f"tunnel through proxy {real.scheme}://{real.address} to {origin}" in notes
        assert await _said(stream, bytes(100_000)) == bytes(100_000)

    async def test_name_goes_to_the_proxy_and_given_addresses_do_not(self, real, behind, serve, authority, refused):
        origin = await serve(_echo, authority.server)
        names = Names()
        dialer = behind(real.url, resolver=names)
        error = await _error(dialer, "localhost", origin.port, addresses=(refused,), server_name="a.test")
        assert isinstance(error, errors.TlsError)
        assert "localhost through proxy" in str(error)
        assert "certificate refused" in str(error)
        assert "localhost" not in names.asked
        assert real.lines("localhost")

    async def test_credentials_are_decoded_and_open_the_proxy(self, locked, behind, serve, authority):
        origin = await serve(_echo, authority.server)
        stream = await _dial(behind(locked.url, by_name=False), "a.test", 1, addresses=(origin,))
        assert await _said(stream) == b"ping"

    @pytest.mark.parametrize("userinfo", ["", "someone:hush@", "hush:pass@"])
    async def test_wrong_credentials_are_a_proxy_error_that_does_not_name_them(self, locked, behind, serve, userinfo):
        origin = await serve(_hold)
        error = await _error(behind(f"{locked.scheme}://{userinfo}{locked.address}"), "localhost", origin.port)
        assert isinstance(error, errors.ProxyError)
        assert error.phase is Phase.CONNECT
        assert "user name and password" in str(error) or "wants credentials" in str(error)
        assert "hush" not in str(error)

    async def test_origin_that_refuses_is_a_proxy_error(self, real, behind, refused):
        error = await _error(behind(real.url), "127.0.0.1", refused.port)
        assert isinstance(error, errors.ProxyError)
        assert (error.phase, str(refused) in str(error)) == (Phase.CONNECT, True)

    async def test_role_that_refuses_gives_way_to_its_next_address(self, real, behind, serve, authority, refused):
        origin = await serve(_echo, authority.server)
        notes = []
        dialer = behind(real.url, by_name=False)
        stream = await _dial(dialer, "a.test", 1, addresses=(refused, origin), on_note=notes.append)
        assert await _said(stream) == b"ping"
        assert any(str(refused) in note and "does not connect" in note for note in notes)
        error = await _error(dialer, "a.test", 1, addresses=(refused, Address("127.0.0.2", refused.port)))
        assert isinstance(error, errors.ProxyError)
        assert "127.0.0.2" in str(error)

    async def test_origin_without_tls_is_a_tls_error(self, real, behind, serve):
        async def plain(reader, writer):
            await reader.read(1)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        origin = await serve(plain)
        error = await _error(behind(real.url), "127.0.0.1", origin.port)
        assert isinstance(error, errors.TlsError)
        assert error.phase is Phase.TLS

    async def test_silent_origin_ends_at_the_deadline_in_tls(self, real, behind, serve):
        origin = await serve(_hold)
        error = await _error(behind(real.url), "127.0.0.1", origin.port, timeout_s=0.3)
        assert isinstance(error, errors.DeadlineExceeded)
        assert error.phase is Phase.TLS

    async def test_cancelled_dial_leaves_nothing(self, real, behind, serve, until):
        origin = await serve(_hold)
        stages = []
        task = asyncio.create_task(_dial(behind(real.url), "127.0.0.1", origin.port, on_stage=stages.append))
        await until(lambda: "tls" in stages)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


class TestSocks:
    async def test_plain_http_goes_through_a_tunnel(self, started, behind, serve):
        socks = started("microsocks")
        origin = await serve(_echo)
        assert await _said(await _dial(behind(socks.url), "localhost", origin.port, tls=False)) == b"ping"
        assert socks.lines(f"localhost:{origin.port}")

    async def test_socks5_resolves_here(self, started, behind, serve, refused):
        socks = started("microsocks")
        origin = await serve(_echo)
        names = Names(**{"shop.test": "127.0.0.3 127.0.0.1"})
        stages = []
        dialer = behind(f"socks5://{socks.address}", resolver=names)
        stream = await _dial(dialer, "shop.test", origin.port, tls=False, on_stage=stages.append)
        assert await _said(stream) == b"ping"
        assert names.asked[0] == "shop.test"
        assert stages[0] == "resolve"
        assert socks.lines(f"127.0.0.1:{origin.port}")
        error = await _error(dialer, "other.test", 80, tls=False)
        assert isinstance(error, errors.ResolveError)
        assert "other.test" in str(error)

    async def test_socks5h_lets_the_proxy_resolve(self, started, behind, serve):
        origin = await serve(_echo)
        names = Names()
        dialer = behind(started("microsocks").url, resolver=names)
        assert await _said(await _dial(dialer, "localhost", origin.port, tls=False)) == b"ping"
        assert names.asked == ["127.0.0.1"]  # the proxy's own

    @pytest.mark.parametrize(
        ("script", "reason"),
        [
            ([b"HT"], "not answer like a SOCKS5"),
            ([b"\x04\x00"], "not answer like a SOCKS5"),
            ([b"\x05\xff"], "wants credentials"),
            ([b"\x05\x02"], "was not offered"),
            ([b"\x05\x01"], "was not offered"),
            ([b"\x05"], "closed the connection"),
            ([b""], "closed the connection"),
            ([b"\x05\x00", b"\x05\x05\x00\x01"], "connection refused"),
            ([b"\x05\x00", b"\x05\x63\x00\x01"], "reply 99"),
            ([b"\x05\x00", b"\x04\x00\x00\x01"], "not answer like a SOCKS5"),
            ([b"\x05\x00", b"\x05\x00\x00\x07"], "not answer like a SOCKS5"),
            ([b"\x05\x00", b"\x05\x00\x00\x01\x7f"], "closed the connection"),
        ],
    )
    async def test_bad_socks_server_is_a_proxy_error(self, behind, serve, script, reason):
        async def handler(reader, writer):
            for piece in script:
                await reader.read(1000)
                writer.write(piece)
            await writer.drain()

        error = await _error(behind(f"socks5h://{await serve(handler)}"), "a.test", 443)
        assert isinstance(error, errors.ProxyError)
        assert reason in str(error)

    async def test_socks_answer_with_a_name_in_pieces_opens_the_tunnel(self, behind, serve):
        async def handler(reader, writer):
            assert await reader.readexactly(3) == b"\x05\x01\x00"
            for byte in b"\x05\x00":
                writer.write(bytes((byte,)))
                await asyncio.sleep(0.001)
            assert await reader.readexactly(4 + 1 + 6 + 2) == b"\x05\x01\x00\x03\x06a.test\x01\xbb"
            for byte in b"\x05\x00\x00\x03\x01x\x00\x01":
                writer.write(bytes((byte,)))
                await asyncio.sleep(0.001)
            await _echo(reader, writer)

        dialer = behind(f"socks5h://{await serve(handler)}")
        assert await _said(await _dial(dialer, "a.test", 443, tls=False)) == b"ping"


class TestConnect:
    async def test_request_line_host_and_credentials_are_as_rfc_9110_wants(self, behind, serve):
        heads = []

        async def handler(reader, writer):
            heads.append(await reader.readuntil(b"\r\n\r\n"))

        address = await serve(handler)
        await _error(behind(f"http://u:p%40ss@{address}"), "a.test", 8443)
        await _error(behind(f"http://{address}"), "::1", 443)
        assert heads == [
            b"CONNECT a.test:8443 HTTP/1.1\r\nHost: a.test:8443\r\nProxy-Authorization: Basic dTpwQHNz\r\n\r\n",
            b"CONNECT [::1]:443 HTTP/1.1\r\nHost: [::1]:443\r\n\r\n",
        ]

    @pytest.mark.parametrize(
        "head",
        [
            b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"HTTP/1.0 200 Connection established\n\n",
            b"HTTP/1.1 200\r\n\r\n",
            b"HTTP/1.1 103 Early\r\nA: b\r\n\r\nHTTP/1.1 204 x\r\n\r\n",
        ],
    )
    @pytest.mark.parametrize("piece_bytes", [1, 1000])
    async def test_any_good_answer_opens_the_tunnel_however_it_is_cut(
        self, behind, serve, authority, head, piece_bytes
    ):
        async def handler(reader, writer):
            target = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode()
            for at in range(0, len(head), piece_bytes):
                writer.write(head[at : at + piece_bytes])
                await asyncio.sleep(0)
            host, _, port = target.rpartition(":")
            there, back = await asyncio.open_connection(host, int(port))
            await asyncio.gather(_pump(reader, back), _pump(there, writer))

        origin = await serve(_echo, authority.server)
        dialer = behind(f"http://{await serve(handler)}", by_name=False)
        assert await _said(await _dial(dialer, "a.test", 443, addresses=(origin,))) == b"ping"

    @pytest.mark.parametrize(
        ("answer", "reason"),
        [
            (b"HTTP/1.1 403 Not \x1b[31mhere\r\n\r\n<html>", "403 Not ?[31mhere"),
            (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 3\r\n\r\nabc", "502 Bad Gateway"),
            (b"HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Negotiate\r\n\r\n", "407, it wants"),
            (b"HTTP/1.1 302 Found\r\nLocation: http://portal/\r\n\r\n", "302 Found"),
            (b"HTTP/1.1 200 OK\r\n\r\nsurprise", "more than its answer"),
            (b"HTTP/1.1 2000 OK\r\n\r\n", "not answer like an HTTP proxy"),
            (b"HTTP/2 200 OK\r\n\r\n", "not answer like an HTTP proxy"),
            (b"\x15\x03\x01", "not answer like an HTTP proxy"),
            (b"SSH-2.0-x\r\n", "not answer like an HTTP proxy"),
            (b"", "closed the connection"),
            (b"HTTP/1.1 200 OK\r\n", "in the middle"),
            (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * limits.PROXY_HEAD_BYTES_MAX, "head has more than"),
            (b"HTTP/1.1 100 x\r\n\r\n" * limits.PROXY_HEAD_BYTES_MAX, "head has more than"),
        ],
    )
    async def test_bad_answer_is_a_proxy_error_with_its_reason(self, behind, serve, answer, reason):
        async def handler(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()

        error = await _error(behind(f"http://u:hush@{await serve(handler)}"), "a.test", 443)
        assert isinstance(error, errors.ProxyError)
        assert error.phase is Phase.CONNECT
        assert reason in str(error)
        assert "hush" not in str(error)

    async def test_connection_reset_is_a_proxy_error(self, behind, serve, reset):
        async def handler(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            reset(writer)

        error = await _error(behind(f"http://{await serve(handler)}"), "a.test", 443)
        assert isinstance(error, errors.ProxyError)
        assert "reset" in str(error)

    async def test_silent_proxy_ends_at_the_deadline_in_connect(self, behind, serve):
        error = await _error(behind(f"http://{await serve(_hold)}"), "a.test", 443, timeout_s=0.2)
        assert isinstance(error, errors.DeadlineExceeded)
        assert error.phase is Phase.CONNECT

    async def test_endless_answer_ends_at_the_deadline(self, behind, serve):
        async def handler(reader, writer):
            while True:
                writer.write(b"HTTP/1.1 200 OK\r\n"[:1])
                await asyncio.sleep(10)

        error = await _error(behind(f"http://{await serve(handler)}"), "a.test", 443, timeout_s=0.2)
        assert isinstance(error, errors.DeadlineExceeded)

    async def test_proxy_that_cannot_be_reached_is_a_connect_error_that_names_it(self, behind, refused, silent):
        error = await _error(behind(f"http://u:hush@{refused}"), "a.test", 443)
        assert type(error) is errors.ConnectError
        assert f"proxy http://{refused}" in str(error)
        assert "hush" not in str(error)
        error = await _error(behind("http://proxy.test:1", resolver=Names()), "a.test", 443)
        assert type(error) is errors.ConnectError
        assert (error.phase, "proxy.test" in str(error)) == (Phase.CONNECT, True)
        error = await _error(behind(f"http://{silent}"), "a.test", 443, timeout_s=0.2)
        assert isinstance(error, errors.DeadlineExceeded)
        assert (error.phase, str(silent) in str(error)) == (Phase.CONNECT, True)

    async def test_proxy_s_addresses_are_raced(self, behind, serve, authority, started):
        real = started("tinyproxy")
        origin = await serve(_echo, authority.server)
        names = Names(**{"proxy.test": f"127.0.0.7 {real.address.host}"})
        dialer = behind(f"http://proxy.test:{real.address.port}", by_name=False, resolver=names)
        assert await _said(await _dial(dialer, "a.test", 1, addresses=(origin,))) == b"ping"

    async def test_host_that_could_break_out_of_the_line_is_refused(self, behind, serve):
        dialer = behind(f"http://{await serve(_hold)}")
        for host in ("a.test\r\nX: y", "a test", "", "a" * 300):
            with pytest.raises(errors.LocalProtocolError):
                await _dial(dialer, host, 443)


class TestExempt:
    async def test_exempt_host_is_dialled_directly_with_all_that_was_given(self, behind, serve, authority, refused):
        origin = await serve(_echo, authority.server)
        dialer = behind(from_environment({"ALL_PROXY": f"http://{refused}", "NO_PROXY": "a.test"}))
        stream = await _dial(dialer, "x.a.test", 1, addresses=(origin,), server_name="a.test")
        assert stream.peer == origin
        assert await _said(stream) == b"ping"

    async def test_role_at_an_exempt_address_is_reached_directly(self, behind, serve, authority, refused):
        origin = await serve(_echo, authority.server)
        environ = {"ALL_PROXY": f"http://{refused}", "NO_PROXY": "127.0.0.0/8"}
        dialer = behind(from_environment(environ), by_name=False)
        assert await _said(await _dial(dialer, "a.test", 1, addresses=(origin,))) == b"ping"

    async def test_role_on_this_machine_needs_no_proxy_of_the_environment(self, behind, serve, authority, refused):
        origin = await serve(_echo, authority.server)
        dialer = behind(from_environment({"ALL_PROXY": f"http://{refused}"}), by_name=False)
        assert await _said(await _dial(dialer, "a.test", 1, addresses=(origin,))) == b"ping"
        error = await _error(behind(f"http://{refused}", by_name=False), "a.test", 1, addresses=(origin,))
        assert f"proxy http://{refused}" in str(error)

    async def test_roles_of_which_some_are_exempt_are_tried_directly_first(self, behind, serve, authority, refused):
        origin = await serve(_echo, authority.server)
        far = Address("192.0.2.1", 443)
        dialer = behind(from_environment({"ALL_PROXY": f"http://{refused}"}), by_name=False)
        stream = await _dial(dialer, "a.test", 1, addresses=(far, origin))
        assert stream.peer == origin
        stream.close()
        error = await _error(dialer, "a.test", 1, addresses=(far, refused))
        assert type(error) is errors.ConnectError
        assert f"proxy http://{refused}" in str(error)
        assert f"{refused}: connection refused" in str(error)

    async def test_further_arguments_reach_the_dialer_below(self, authority, serve):
        seen = []

        class Below:
            async def dial(self, host, port, **options):
                seen.append((host, port, options["left"]))
                raise errors.ConnectError("x", phase=Phase.CONNECT, maybe_delivered=False)

        rules = from_environment({"ALL_PROXY": "http://proxy.test:1", "NO_PROXY": "b.test"})
        dialer = ProxyDialer(Below(), rules, context=roles_context(authority.pem, []), resolver=Names())
        left = (Address("192.0.2.1", 1),)
        for host in ("a.test", "b.test"):
            await _error(dialer, host, 443, left=left)
        assert seen == [("proxy.test", 1, left), ("b.test", 443, left)]

    async def test_roles_beyond_the_number_that_is_tried_are_not_dialled_past_the_proxy(self, behind, refused):
        many = tuple(Address(f"192.0.2.{number}", 443) for number in range(1, limits.DIAL_CANDIDATES_MAX + 5))
        error = await _error(behind(f"http://{refused}", by_name=False), "a.test", 1, addresses=many)
        assert str(error).count("192.0.2.") == 0
        assert str(error).count(f"proxy http://{refused}") == limits.DIAL_CANDIDATES_MAX


class TestForward:
    async def test_http_requests_share_a_connection_to_the_proxy(self, started, behind, serve):
        real = started("tinyproxy", locked=True)
        seen = []

        async def handler(reader, writer):
            seen.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok")

        origin = await serve(handler)
        rules = explicit(real.url)
        pool = HttpPool(behind(rules), SystemClock())
        request = HttpRequest("GET", "http", "localhost", origin.port, b"/a?b=c")
        response = await pool.request(forwarded(request, rules), deadline_s=10)
        assert (response.status, await response.read(10), response.peer) == (200, b"ok", real.address)
        await pool.aclose()
        (head,) = seen
        assert head.startswith(b"GET /a?b=c HTTP/1.")
        assert b"tinyproxy" in head
        assert b"roxy-Auth" not in head

    async def test_forwarding_needs_no_tunnel(self, behind, serve):
        address = await serve(_echo)
        notes = []
        stream = await _dial(behind(f"http://{address}"), "shop.test", 80, tls=False, on_note=notes.append)
        assert stream.peer == address
        assert await _said(stream) == b"ping"
        assert f"requests go to proxy http://{address}" in notes


async def _pump(reader, writer):
    try:
        while data := await reader.read(1000):
            writer.write(data)
    finally:
        writer.close()
