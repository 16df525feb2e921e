"""The origin that client benches ask: the smallest servers that keep connections, in a process of their own.

`python -m stormline.bench.origin CERTIFICATE KEY` prints the ports of its servers of HTTP/1.1 without TLS, HTTP/2 and
HTTP/1.1 with it, and serves until its standard input ends. It answers every request with the same 27 bytes; what it is
asked it never reads.
"""

import asyncio
import ssl
import sys
from typing import Final, cast

import uvloop

BODY: Final = b'{"items": [1, 2, 3, 4, 5]}\n'
_H1_ANSWER: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 27\r\n\r\n" + BODY
_H2_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_H2_SETTINGS: Final = b"\x00\x00\x06\x04\x00\x00\x00\x00\x00" + b"\x00\x03\x00\x00\x00\x64"
"""Up to 100 streams at once."""
_H2_SETTINGS_ACK: Final = b"\x00\x00\x00\x04\x01\x00\x00\x00\x00"
_H2_FIRST_HEAD: Final = b"\x88\x5f\x10application/json\x5c\x0227"
"""`:status: 200`, `content-type` and `content-length`; the last two enter the header table (RFC 7541 section 6.2.1)."""
_H2_NEXT_HEAD: Final = b"\x88\xbf\xbe"
"""The same out of the tables, as every answer but the first of a usual server."""
_HEADERS, _SETTINGS, _PING = 0x1, 0x4, 0x6


class _Origin1(asyncio.Protocol):
    def __init__(self) -> None:
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's do not inherit from it

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            self._buffer = self._buffer[end + 4 :]
            if self._transport is not None:
                self._transport.write(_H1_ANSWER)


class _Origin2(asyncio.Protocol):
    def __init__(self) -> None:
        self._buffer = b""
        self._head = _H2_FIRST_HEAD
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's do not inherit from it
        self._transport.write(_H2_SETTINGS)

    def data_received(self, data: bytes) -> None:
        self._buffer = (self._buffer + data).removeprefix(_H2_PREFACE)
        answers = b""
        while len(self._buffer) >= 9 and len(self._buffer) >= 9 + (size := int.from_bytes(self._buffer[:3], "big")):
            frame, self._buffer = self._buffer[: 9 + size], self._buffer[9 + size :]
            answers += self._answer(frame[3], frame[4], frame[5:9], frame[9:])
        if answers and self._transport is not None:
            self._transport.write(answers)

    def _answer(self, kind: int, flags: int, stream: bytes, payload: bytes) -> bytes:
        if kind == _HEADERS:
            head, self._head = self._head, _H2_NEXT_HEAD
            return _frame(0x1, 0x4, stream, head) + _frame(0x0, 0x1, stream, BODY)
        if kind == _SETTINGS and not flags & 1:
            return _H2_SETTINGS_ACK
        return _frame(_PING, 1, stream, payload) if kind == _PING and not flags & 1 else b""


def _frame(kind: int, flags: int, stream: bytes, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream + payload


def _context(certificate: str, key: str, alpn: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols([alpn])
    return context


async def _serve(certificate: str, key: str) -> None:
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(_Origin1, "127.0.0.1", 0),
        await loop.create_server(_Origin2, "127.0.0.1", 0, ssl=_context(certificate, key, "h2")),
        await loop.create_server(_Origin1, "127.0.0.1", 0, ssl=_context(certificate, key, "http/1.1")),
    ]
    sys.stdout.write(" ".join(str(server.sockets[0].getsockname()[1]) for server in servers) + "\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.read)
    for server in servers:
        server.close()


if __name__ == "__main__":
    uvloop.run(_serve(*sys.argv[1:]))
