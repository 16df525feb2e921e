"""The HTTP server of the roles: what it bounds, and how it starts and stops."""

import asyncio
import contextlib
import socket
import ssl
import struct
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from stormline.assembly.authority import ensure_authority
from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.net.clock import SystemClock, SystemRng
from stormline.web import bodies
from stormline.web.server import HttpServer, TlsFiles

pytestmark = pytest.mark.loopback
_DATA_SEGMENTS_IN = 152
"""Where `tcpi_data_segs_in` stands in Linux's `struct tcp_info`."""


async def _app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture(name="server")
async def _server() -> AsyncIterator[HttpServer]:
    server = HttpServer(_app, host="127.0.0.1", port=0, what="test")
    await server.start()
    yield server
    await server.stop()


async def _ask(server: HttpServer, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*server.address)
    try:
        writer.write(data)
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


async def test_server_port_zero_gives_a_free_port_and_answers(server: HttpServer) -> None:
    async with httpx2.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"http://{server.address}/")).text == "ok"


async def test_server_busy_port_is_one_error_naming_part_and_address(server: HttpServer) -> None:
    with pytest.raises(errors.PlatformError, match=rf"dispatch: cannot listen on {server.address}: Address already"):
        HttpServer(_app, host="127.0.0.1", port=server.address.port, what="dispatch")


async def test_server_bad_certificate_is_refused_before_the_port_is_taken(tmp_path: Path) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")
    with pytest.raises(errors.PlatformError, match="certificate"):
        HttpServer(_app, host="127.0.0.1", port=0, what="test", tls=TlsFiles(bad, bad))


@pytest.mark.parametrize("tail", [b"", b"\r\n"], ids=["head unfinished", "head finished"])
async def test_server_head_over_the_bound_is_answered_431_and_closed(server: HttpServer, tail: bytes) -> None:
    head = b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"a" * (limits.REQUEST_HEAD_BYTES_MAX + 1) + b"\r\n" + tail
    assert (await _ask(server, head)).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("start", [b"", b"GET / HT"], ids=["silent", "half a head"])
async def test_server_head_that_does_not_come_is_answered_408_and_closed(
    monkeypatch: pytest.MonkeyPatch, server: HttpServer, start: bytes
) -> None:
    monkeypatch.setattr(limits, "REQUEST_HEAD_TIMEOUT_S", 0.05)
    assert (await _ask(server, start)).startswith(b"HTTP/1.1 408 ")


async def test_server_keep_alive_serves_several_heads_each_with_its_own_bound(server: HttpServer) -> None:
    request = b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"a" * (limits.REQUEST_HEAD_BYTES_MAX // 2) + b"\r\n\r\n"
    reader, writer = await asyncio.open_connection(*server.address)
    for _ in range(5):
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert await reader.readexactly(2) == b"ok"
    writer.close()
    await writer.wait_closed()


async def test_server_end_of_a_large_body_does_not_count_as_the_next_head(server: HttpServer) -> None:
    body = b"b" * (4 * limits.REQUEST_HEAD_BYTES_MAX)
    first = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body + b"GET / HT"
    second = b"TP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(first)
    head = await reader.readuntil(b"\r\n\r\n")
    assert await reader.readexactly(2) == b"ok"
    writer.write(second)
    rest = await reader.read()
    assert (head[:13], rest[:13]) == (b"HTTP/1.1 200 ", b"HTTP/1.1 200 ")
    writer.close()
    await writer.wait_closed()


async def test_server_head_in_pieces_over_the_bound_is_refused_on_a_kept_connection(server: HttpServer) -> None:
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    await reader.readuntil(b"ok")
    head = b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"a" * limits.REQUEST_HEAD_BYTES_MAX + b"\r\n"
    for piece in (head[: len(head) // 2], head[len(head) // 2 :], b"\r\n"):
        writer.write(piece)
        await asyncio.sleep(0.01)
    assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
    writer.close()
    await writer.wait_closed()


async def test_server_late_second_head_is_answered_408_and_closed(
    monkeypatch: pytest.MonkeyPatch, server: HttpServer
) -> None:
    monkeypatch.setattr(limits, "REQUEST_HEAD_TIMEOUT_S", 0.2)
    reader, writer = await asyncio.open_connection(*server.address)
    for _ in range(3):
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        await reader.readuntil(b"ok")
        await asyncio.sleep(0.15)  # the time of a head does not run between requests
    writer.write(b"GET / HT")
    assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
    writer.close()
    await writer.wait_closed()


@pytest.mark.skipif(sys.platform != "linux", reason="needs TCP_INFO of Linux")
async def test_server_head_and_body_of_an_answer_leave_in_one_segment(server: HttpServer) -> None:
    reader, writer = await asyncio.open_connection(*server.address)
    for _ in range(20):
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        await reader.readuntil(b"ok")
    info = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    assert struct.unpack_from("=I", info, _DATA_SEGMENTS_IN)[0] == 20
    writer.close()
    await writer.wait_closed()


async def test_server_head_does_not_wait_for_a_body_that_comes_later() -> None:
    release = asyncio.Event()

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await release.wait()
        for piece in (b"a", b"b"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    server = HttpServer(app, host="127.0.0.1", port=0, what="test")
    await server.start()
    async with (
        httpx2.AsyncClient(trust_env=False) as client,
        client.stream("GET", f"http://{server.address}/") as answer,
    ):
        assert answer.status_code == 200
        release.set()
        assert await answer.aread() == b"ab"
    await server.stop()


class TestBodies:
    """What `bodies.Reader` takes of a real server's requests."""

    @pytest.fixture(name="told")
    async def _told(self) -> AsyncIterator[tuple[HttpServer, "asyncio.Queue[object]"]]:
        told: asyncio.Queue[object] = asyncio.Queue()
        reader = bodies.Reader(60.0)

        async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
            try:
                told.put_nowait(await reader.read(scope, receive, 8))
            except errors.RequestRefused as error:
                told.put_nowait(error.code)
            if scope["path"] == "/wait":
                told.put_nowait(await receive())
            await _app(scope, receive, send)

        server = HttpServer(app, host="127.0.0.1", port=0, what="test")
        await server.start()
        yield server, told
        reader.stop()
        await server.stop()

    @staticmethod
    def _post(path: str, body: bytes, *fields: bytes) -> tuple[bytes, bytes]:
        head = b"\r\n".join([b"POST %s HTTP/1.1" % path.encode(), b"host: a", *fields])
        return head + b"\r\ncontent-length: %d\r\n\r\n" % len(body), body

    async def test_whole_and_in_pieces_and_kept_apart_on_one_connection(
        self, told: tuple[HttpServer, "asyncio.Queue[object]"]
    ) -> None:
        server, seen = told
        reader, writer = await asyncio.open_connection(*server.address)
        for pieces, taken in (
            ((b"abcd",), b"abcd"),
            ((b"", b"ab", b"cd"), b"abcd"),
            ((b"",), b""),
            ((b"12345678",), b"12345678"),
            ((b"123456789",), "too-large"),
            ((b"e",), b"e"),
        ):
            head, body = self._post("/", b"".join(pieces))
            writer.write(head + (body if len(pieces) == 1 else b""))
            for piece in pieces if len(pieces) > 1 else ():
                await asyncio.sleep(0.01)
                writer.write(piece)
            await reader.readuntil(b"ok")
            assert seen.get_nowait() == taken
        head, body = self._post("/", b"1234", b"expect: 100-continue")
        writer.write(head)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        await reader.readuntil(b"ok")
        assert seen.get_nowait() == b"1234"
        writer.close()
        await writer.wait_closed()

    async def test_what_follows_a_whole_body_is_the_end_of_the_connection(
        self, told: tuple[HttpServer, "asyncio.Queue[object]"]
    ) -> None:
        server, seen = told
        _, writer = await asyncio.open_connection(*server.address)
        writer.write(b"".join(self._post("/wait", b"abcd")))
        assert await seen.get() == b"abcd"
        await asyncio.sleep(0.05)
        assert seen.empty()
        writer.close()
        await writer.wait_closed()
        async with asyncio.timeout(10):
            assert await seen.get() == {"type": "http.disconnect"}


class TestTls:
    @pytest.fixture(name="files")
    def _files(self, tmp_path: Path) -> tuple[TlsFiles, str]:
        authority = ensure_authority(tmp_path / "pki", clock=SystemClock(), rng=SystemRng())
        return authority.issue("web", names=["web.test"], ips=["127.0.0.1"]), authority.ca_pem

    @pytest.mark.parametrize(("version", "good"), [(ssl.TLSVersion.TLSv1_2, False), (ssl.TLSVersion.TLSv1_3, True)])
    async def test_tls_older_than_1_3_is_refused(
        self, files: tuple[TlsFiles, str], version: ssl.TLSVersion, *, good: bool
    ) -> None:
        tls, ca_pem = files
        server = HttpServer(_app, host="127.0.0.1", port=0, what="test", tls=tls)
        await server.start()
        context = ssl.create_default_context(cadata=ca_pem)
        context.maximum_version = version
        try:
            async with httpx2.AsyncClient(verify=context, trust_env=False) as client:
                try:
                    answered = (await client.get(f"https://{server.address}/")).status_code == 200
                except httpx2.ConnectError:
                    answered = False
            assert answered is good
        finally:
            await server.stop()

    async def test_handshake_that_does_not_come_is_dropped(
        self, monkeypatch: pytest.MonkeyPatch, files: tuple[TlsFiles, str]
    ) -> None:
        monkeypatch.setattr(limits, "TLS_HANDSHAKE_TIMEOUT_S", 0.05)
        server = HttpServer(_app, host="127.0.0.1", port=0, what="test", tls=files[0])
        await server.start()
        for begin in (b"", b"\x16\x03\x01"):
            reader, writer = await asyncio.open_connection(*server.address)
            writer.write(begin)
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(20):
                    assert await reader.read() == b""
            writer.close()
        await server.stop()

    async def test_stop_with_an_idle_tls_peer_does_not_wait_for_it(self, files: tuple[TlsFiles, str]) -> None:
        tls, ca_pem = files
        server = HttpServer(_app, host="127.0.0.1", port=0, what="test", tls=tls)
        await server.start()
        async with httpx2.AsyncClient(verify=ssl.create_default_context(cadata=ca_pem), trust_env=False) as client:
            assert (await client.get(f"https://{server.address}/")).status_code == 200
            async with asyncio.timeout(limits.HTTP_DRAIN_S):
                await server.stop()


async def test_stop_lets_a_request_in_flight_finish() -> None:
    begun = asyncio.Event()
    release = asyncio.Event()

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        begun.set()
        await release.wait()
        await _app(scope, receive, send)

    server = HttpServer(app, host="127.0.0.1", port=0, what="test")
    await server.start()
    async with httpx2.AsyncClient(trust_env=False) as client:
        answer = asyncio.create_task(client.get(f"http://{server.address}/"))
        await begun.wait()
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0)
        release.set()
        assert (await answer).text == "ok"
        await stopping


async def test_server_bytes_between_requests_that_begin_no_head_do_not_keep_the_connection(
    monkeypatch: pytest.MonkeyPatch, server: HttpServer
) -> None:
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
    monkeypatch.setattr(limits, "REQUEST_HEAD_TIMEOUT_S", 0.05)
    writer.write(b"\r\n")
    async with asyncio.timeout(20):
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
    writer.close()
    assert server.closes == {"late-head": 1}


async def test_server_line_that_owes_too_many_heads_loses_its_oldest_and_good_ones_are_answered(
    monkeypatch: pytest.MonkeyPatch, server: HttpServer
) -> None:
    monkeypatch.setattr(limits, "HTTP_HEADS_PER_LINE_MAX", 20)
    slow = [await asyncio.open_connection(*server.address) for _ in range(30)]
    for reader, _ in slow[:10]:
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
    async with httpx2.AsyncClient(trust_env=False) as client:
        for _ in range(5):
            assert (await client.get(f"http://{server.address}/")).text == "ok"
    assert server.closes == {"crowded-line": 11}  # the good client's own connection took one more place
    for _, writer in slow:
        writer.close()
