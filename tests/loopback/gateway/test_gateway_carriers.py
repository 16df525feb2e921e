"""One port, several carriers: sessions over TLS, inside WebSockets, without TLS, behind fronts; a real browser."""

import asyncio
import base64
import contextlib
import hashlib
import os
import shutil
import socket
import ssl
import subprocess
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from stormline.core import errors, limits, limits_carriers, limits_platform
from stormline.core.values import Address
from stormline.engine.memory import MemoryEngine
from stormline.engine.port import Reply
from stormline.gateway.listener import listen
from stormline.net.stream import open_tcp
from stormline.net.tls import start_tls
from stormline.outbound.websocket import open_websocket
from stormline.testing.foreign import ForeignServer, find
from stormline.testing.origin import plain, running_origin
from stormline.wire import events as e
from stormline.wire import messages as m
from stormline.wire import proxyprotocol, websocket
from stormline.wire.connection import Connection
from stormline.wire.states import Role

pytestmark = pytest.mark.loopback

NAME = "gateway.test"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def free_address() -> Address:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return Address(*sock.getsockname()[:2])


def trust(authority: Any, alpn: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=authority.pem)
    context.set_alpn_protocols([alpn])
    return context


class Wire:
    """A client's machine over any stream."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.machine = Connection(Role.CLIENT, asyncio.get_running_loop().time())

    async def flush(self) -> None:
        await self.stream.send_all(self.machine.data_to_send())

    async def next(self, kind: Any) -> Any:
        """Give the next event of a kind; the end of the stream gives Closed."""
        async with asyncio.timeout(20):
            while True:
                while (event := self.machine.next_event()) is not None:
                    if isinstance(event, kind | e.Closed):
                        return event
                try:
                    data = await self.stream.receive()
                except OSError:
                    data = b""
                now = asyncio.get_running_loop().time()
                if data:
                    self.machine.receive_data(data, now)
                else:
                    self.machine.receive_eof(now)
                await self.flush() if data else None

    async def hello(self, token: str) -> Any:
        self.machine.send_hello(m.Hello(versions=(1,), app="demo", token=token, client="test"))
        await self.flush()
        return await self.next(e.Welcomed)

    async def echo(self, body: bytes) -> bytes:
        self.machine.send_call("rpc", "big.echo", body=body)
        await self.flush()
        return (await self.next(e.ReplyReceived | e.CallFailed)).body


@pytest.fixture(name="reach")
async def _reach(authority):
    """Give what connects to a gateway by one carrier."""
    streams = []

    async def reach(address: Address, carrier: str, *, first: bytes = b"") -> Wire:
        raw = await open_tcp(address)
        streams.append(raw)
        if first:
            await raw.send_all(first)
        if carrier in ("tls", "wss"):
            alpn = m.ALPN if carrier == "tls" else websocket.ALPN
            raw = await start_tls(raw, trust(authority, alpn), NAME)
            assert raw.alpn == alpn
        if carrier in ("ws", "wss"):
            raw = await open_websocket(raw, f"{NAME}:{address.port}", secure=carrier == "wss")
        return Wire(raw)

    yield reach
    for stream in streams:
        stream.close()


@pytest.fixture(name="echoes")
async def _echoes(gateway):
    """Start a gateway with a service that echoes."""

    async def echoes(**changes: Any) -> None:
        async def echo(message: Any) -> Reply:
            return Reply(message.data)

        await gateway.start(**changes)
        await MemoryEngine(gateway.broker).serve("rpc.big.echo", echo)

    return echoes


class TestOnePort:
    async def test_each_carrier_on_one_port_and_on_several_has_a_session(self, gateway, echoes, reach, mint):
        second, open_door = free_address(), free_address()
        await echoes(listen=(second,), plain=(open_door,))
        body = bytes(range(256)) * 100
        ways = [(at, by) for at in (gateway.address, second) for by in ("tls", "wss")]
        ways += [(open_door, by) for by in ("tls", "wss", "raw", "ws")]
        for number, (address, carrier) in enumerate(ways):
            wire = await reach(address, carrier)
            welcomed = await wire.hello(mint(f"d{number}"))
            assert isinstance(welcomed, e.Welcomed), (carrier, welcomed)
            assert await wire.echo(body[: limits.CHUNK_BYTES_MAX]) == body[: limits.CHUNK_BYTES_MAX], carrier
        assert await gateway.sessions() == len(ways)

    @pytest.mark.parametrize("first", [b"\x00\x00\x00\x05hello", b"GET / HTTP/1.1\r\n\r\n", b"\r\n\r\n", b"SSH-2.0"])
    async def test_what_has_no_tls_is_refused_where_no_door_is_plain(self, gateway, first):
        await gateway.start()
        stream = await open_tcp(gateway.address)
        await stream.send_all(first)
        with contextlib.suppress(OSError):
            assert await asyncio.wait_for(stream.receive(), 8) == b""
        stream.close()

    async def test_silent_connections_make_room_for_those_that_speak(self, gateway, reach, mint, monkeypatch):
        monkeypatch.setattr(limits_carriers, "ARRIVALS_MAX", 5)
        await gateway.start()
        silent = [await open_tcp(gateway.address) for _ in range(12)]
        wire = await reach(gateway.address, "tls")
        assert isinstance(await wire.hello(mint("d1")), e.Welcomed)
        assert await asyncio.wait_for(silent[0].receive(), 8) == b""
        for stream in silent:
            stream.close()

    async def test_late_arrivals_are_dropped(self, gateway, monkeypatch):
        monkeypatch.setattr(limits_platform, "TLS_HANDSHAKE_TIMEOUT_S", 0.3)
        door = free_address()
        await gateway.start(plain=(door,))
        streams = [await open_tcp(door) for _ in range(3)]
        await streams[1].send_all(b"\x16\x03\x01")
        await streams[2].send_all(b"GET /stormline HTTP/1.1\r\n")
        for stream in streams:
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(stream.receive(), 20) == b""
            stream.close()

    async def test_two_processes_share_a_port_only_where_both_want_to(self, gateway, second, reach, mint):
        at = free_address()
        await gateway.start(port=at.port, reuse_port=True)
        await second.start(port=at.port, reuse_port=True, node="n2")
        for number in range(20):
            assert isinstance(await (await reach(at, "tls")).hello(mint(f"d{number}")), e.Welcomed)
        assert await gateway.sessions() + await second.sessions() == 20
        with pytest.raises(errors.PlatformError, match=f"cannot listen on {at}"):
            listen(at)

    async def test_mptcp_client_is_served(self, gateway, mint, authority):
        await gateway.start()
        raw = await open_tcp(gateway.address, mptcp=True)
        wire = Wire(await start_tls(raw, trust(authority, m.ALPN), NAME))
        assert isinstance(await wire.hello(mint("d1")), e.Welcomed)
        wire.stream.close()


def request(*, path: str = websocket.PATH, protocol: str = websocket.SUBPROTOCOL, **headers: str) -> bytes:
    fields = {
        "Host": NAME,
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": base64.b64encode(bytes(16)).decode(),
        "Sec-WebSocket-Protocol": protocol,
        **headers,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode()


class TestWebSocket:
    @pytest.mark.parametrize(
        ("asked", "status"),
        [
            (request(), 101),
            (request(path="/"), 404),
            (request(protocol="mqtt"), 400),
            (request(Upgrade="h2c"), 426),
            (request(Origin=f"https://{NAME}"), 101),
            (request(Origin="https://app.example"), 101),
            (request(Origin=f"http://{NAME}"), 403),
            (request(Origin="https://evil.example"), 403),
            (request(Origin="null"), 403),
            (request(More="x" * limits_platform.REQUEST_HEAD_BYTES_MAX), 431),
        ],
    )
    async def test_request_is_answered_by_what_it_asks(self, gateway, reach, authority, asked, status):
        await gateway.start(origins=("https://app.example",))
        raw = await start_tls(await open_tcp(gateway.address), trust(authority, "http/1.1"), NAME)
        await raw.send_all(asked)
        assert (await raw.receive()).startswith(b"HTTP/1.1 %d " % status)
        raw.close()

    async def test_text_and_oversized_messages_end_it(self, gateway, reach, mint):
        await gateway.start()
        for spoil in ("text", "large"):
            wire = await reach(gateway.address, "wss")
            await wire.hello(mint("d1"))
            ws = wire.stream._ws
            if spoil == "text":
                ws.send_text(b"hello")
            else:
                ws.send_binary(bytes(limits.FRAME_BYTES_MAX + 5))
            await wire.stream._raw.send_all(b"".join(ws.data_to_send()))
            await wire.next(e.Closed)
            assert ws.close_rcvd.code == (1003 if spoil == "text" else 1009)

    async def test_request_with_bytes_behind_it_ends_without_a_fault_of_ours(self, gateway, authority, caplog):
        await gateway.start()
        for asked in (request(path="/"), request(Upgrade="h2c"), request()):
            raw = await start_tls(await open_tcp(gateway.address), trust(authority, "http/1.1"), NAME)
            await raw.send_all(asked + b"abc")
            async with asyncio.timeout(20):
                while await raw.receive():
                    pass
            raw.close()
        assert not [record for record in caplog.records if record.exc_info or "Fatal" in record.message]

    async def test_nothing_behind_a_text_message_reaches_the_session(self, gateway, reach, mint, caplog):
        caplog.set_level("INFO", "stormline.gateway")
        await gateway.start()
        wire = await reach(gateway.address, "wss")
        ws = wire.stream._ws
        wire.machine.send_hello(m.Hello(versions=(1,), app="demo", token=mint("d1"), client="test"))
        ws.send_text(b"hello")
        ws.send_binary(wire.machine.data_to_send())
        await wire.stream._raw.send_all(b"".join(ws.data_to_send()))
        assert isinstance(await wire.next(e.Welcomed), e.Closed)
        assert ws.close_rcvd.code == 1003
        assert "opened" not in caplog.text

    @pytest.mark.parametrize("frame", [b"\x00\x80\0\0\0\0", b"\x89\x80\0\0\0\0"], ids=["continuations", "pings"])
    async def test_flood_of_frames_that_carry_nothing_ends_it(self, gateway, reach, mint, frame):
        await gateway.start()
        wire = await reach(gateway.address, "wss")
        await wire.hello(mint("d1"))
        with contextlib.suppress(OSError):  # a million of them: it is reset under way
            await wire.stream._raw.send_all(b"\x02\x80\0\0\0\0" + frame * 1_000_000)
        await wire.next(e.Closed)
        wire = await reach(gateway.address, "wss")
        await wire.hello(mint("d2"))

    async def test_ping_is_answered_while_a_call_is_under_way(self, gateway, echoes, reach, mint):
        await echoes()
        wire = await reach(gateway.address, "wss")
        await wire.hello(mint("d1"))
        wire.stream._ws.send_ping(b"are you there")
        await wire.stream._raw.send_all(b"".join(wire.stream._ws.data_to_send()))
        assert await wire.echo(b"still here") == b"still here"

    async def test_messages_hold_whole_frames_whatever_is_written(self, gateway, echoes, reach, mint):
        await echoes()
        wire = await reach(gateway.address, "wss")
        hello = m.Hello(versions=(1,), app="demo", token=mint("d1"), client="test")
        wire.machine.send_hello(hello)  # and calls in the same flight
        bodies = [bytes([n]) * 9000 for n in range(8)]
        for body in bodies:
            wire.machine.send_call("rpc", "big.echo", body=body)
        await wire.flush()
        answers = [(await wire.next(e.ReplyReceived)).body for _ in bodies]
        assert sorted(answers) == bodies
        assert sum(map(len, bodies)) < wire.stream.sent_bytes < sum(map(len, bodies)) + 2000


class TestFronts:
    async def test_front_tells_the_peer_and_needs_no_tls(self, gateway, reach, mint, caplog):
        caplog.set_level("INFO")
        await gateway.start(fronts=("127.0.0.0/8",))
        header = proxyprotocol.encode(Address("192.0.2.7", 4711), Address("198.51.100.1", 443))
        for number, carrier in enumerate(("raw", "ws", "tls", "wss")):
            wire = await reach(gateway.address, carrier, first=header)
            assert isinstance(await wire.hello(mint(f"d{number}")), e.Welcomed), carrier
        told = [each.getMessage() for each in caplog.records if "opened from" in each.getMessage()]
        assert len(told) == 4
        assert all("opened from 192.0.2.7:4711" in line for line in told), told

    async def test_front_without_a_header_and_header_from_no_front_are_refused(self, gateway, mint):
        header = proxyprotocol.encode(Address("192.0.2.7", 4711), Address("198.51.100.1", 443))
        door = free_address()
        await gateway.start(plain=(door,))
        stream = await open_tcp(door)
        await stream.send_all(header + b"\x00")
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(stream.receive(), 8) == b""
        stream.close()

    async def test_header_in_pieces_and_damaged(self, gateway, reach, mint):
        await gateway.start(fronts=("127.0.0.1",))
        header = proxyprotocol.encode(Address("2001:db8::1", 1), Address("2001:db8::2", 2))
        stream = await open_tcp(gateway.address)
        for byte in header:
            await stream.send_all(bytes((byte,)))
            await asyncio.sleep(0)
        assert isinstance(await Wire(stream).hello(mint("d1")), e.Welcomed)
        stream.close()
        for bad in (b"\x16\x03\x01\x00\x05hello-hello-hello", header[:12] + b"\x31" + header[13:], b"\x00" * 30):
            stream = await open_tcp(gateway.address)
            await stream.send_all(bad)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(stream.receive(), 8) == b""
            stream.close()

    @pytest.mark.skipif(find("haproxy") is None, reason="haproxy is not installed")
    async def test_haproxy_that_ends_tls_in_front_hides_no_peer(
        self, gateway, reach, mint, authority, tmp_path, caplog
    ):
        caplog.set_level("INFO")
        await gateway.start(fronts=("127.0.0.1",))
        both = tmp_path / "both.pem"
        both.write_text(authority.files.certificate.read_text() + authority.files.key.read_text())
        at = free_address()
        (tmp_path / "haproxy.cfg").write_text(
            "global\n  maxconn 100\n"
            "defaults\n  mode tcp\n  timeout connect 20s\n  timeout client 20s\n  timeout server 20s\n"
            f"frontend here\n  bind {at} ssl crt {both} alpn sl/1,http/1.1 ssl-min-ver TLSv1.3\n"
            "  default_backend there\n"
            f"backend there\n  server one {gateway.address} send-proxy-v2\n"
        )
        program = str(find("haproxy"))
        front = ForeignServer("haproxy", at, tmp_path, "https", [program, "-db", "-f", str(tmp_path / "haproxy.cfg")])
        try:
            await asyncio.to_thread(front.wait_started)
            peers = []
            for number, carrier in enumerate(("tls", "wss")):
                wire = await reach(at, carrier)
                assert isinstance(await wire.hello(mint(f"d{number}")), e.Welcomed), carrier
                peers.append(str(wire.stream.local))
            told = " ".join(each.getMessage() for each in caplog.records)
            assert all(f"opened from {peer} " in told for peer in peers)
        finally:
            await asyncio.to_thread(front.stop)


PAGE = """<!doctype html><title>echo</title><script>
const frames = FRAMES.map(hex => Uint8Array.from(hex.match(/../g), each => parseInt(each, 16)));
const socket = new WebSocket("wss://127.0.0.1:PORT/stormline", "sl.1");
socket.binaryType = "arraybuffer";
let got = "";
const tell = what => fetch("/told", {method: "POST", body: what});
socket.onopen = () => frames.forEach(each => socket.send(each));
socket.onmessage = event => {
  got += Array.from(new Uint8Array(event.data), each => each.toString(16).padStart(2, "0")).join("");
  tell(got);
};
socket.onclose = event => tell("closed " + event.code);
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")
@pytest.mark.parametrize("listed", [True, False])
async def test_chromium_calls_from_a_listed_page_only(gateway, echoes, authority, mint, tmp_path, listed):
    """The page sends what a client's machine wrote, and a client's machine reads what the page got."""
    machine = Connection(Role.CLIENT, asyncio.get_running_loop().time())
    machine.send_hello(m.Hello(versions=(1,), app="demo", token=mint("browser"), client="page"))
    flight = [machine.data_to_send()]
    machine.send_call("rpc", "big.echo", body=b"from a browser")
    flight.append(machine.data_to_send())
    told: asyncio.Queue[str] = asyncio.Queue()

    async def serve(request: Any, writer: Any) -> None:
        if request.method == "POST":
            told.put_nowait(request.body.decode())
            writer.write(plain(b""))
        else:
            page = PAGE.replace("FRAMES", str([each.hex() for each in flight])).replace(
                "PORT", str(gateway.address.port)
            )
            writer.write(plain(page.encode(), content_type="text/html"))

    certificate = x509.load_pem_x509_certificate(authority.pem.encode())
    spki = certificate.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    pin = base64.b64encode(hashlib.sha256(spki).digest()).decode()
    async with running_origin(serve) as origin:
        await echoes(origins=(f"http://127.0.0.1:{origin.address.port}",) if listed else ())
        browser = await asyncio.create_subprocess_exec(
            str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-proxy-server", "--no-first-run",
            f"--user-data-dir={tmp_path / 'profile'}", f"--ignore-certificate-errors-spki-list={pin}",
            "--remote-debugging-port=0", origin.url("/"),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "HOME": str(tmp_path)},
        )  # fmt: skip
        try:
            async with asyncio.timeout(50):
                if not listed:
                    assert await told.get() == "closed 1006"
                    return
                taken = 0
                while True:
                    got = bytes.fromhex(await told.get())
                    machine.receive_data(got[taken:], asyncio.get_running_loop().time())
                    taken = len(got)
                    while (event := machine.next_event()) is not None:
                        if isinstance(event, e.ReplyReceived):
                            assert event.body == b"from a browser"
                            return
        finally:
            browser.terminate()
            await browser.wait()
