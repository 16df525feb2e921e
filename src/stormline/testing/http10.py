"""A middlebox that speaks only HTTP/1.0: it ends TLS, takes a request, passes on what it understands, and hangs up.

async with http10_box([gateway], tls) as box:
    box.address                            # POST passes; nothing long-lived and no upgrade does
    box.cuts = iter(["after", "middle"])       # where the next exchanges break
"""

import asyncio
import contextlib
import itertools
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Final

from stormline.core.values import Address
from stormline.web.server import TlsFiles

_OWN: Final = (b"connection", b"keep-alive", b"proxy-connection", b"te", b"transfer-encoding", b"upgrade", b"trailer")
"""Hop-by-hop fields; what it does not know of it drops."""


class Http10Box:
    """Made by `http10_box`.

    Attributes:
        address: where it listens.
        upstreams: where it passes requests on to, one after the other, without TLS.
        cuts: where the next connections break, in order: `before` the request is passed on, `after` it was, `middle` of
            the answer; empty where none does.
        requests: how many it has passed on, by method.
        open: connections that stand.
    """

    def __init__(self, upstreams: Sequence[Address]) -> None:
        self.address = Address("", 0)
        self.upstreams = itertools.cycle(upstreams)
        self.cuts: Iterator[str] = iter(())
        self.requests: Counter[str] = Counter()
        self.open = 0

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        self.open += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            line, *fields = head.rstrip().split(b"\r\n")
            method, target, _ = line.split(b" ")
            kept = [each for each in fields if each.split(b":")[0].lower() not in _OWN]
            size = next((int(each.split(b":")[1]) for each in kept if each.lower().startswith(b"content-length:")), 0)
            body = await reader.readexactly(size)
            self.requests[method.decode()] += 1
            cut = next(self.cuts, "") if method == b"POST" else ""
            if cut == "before":
                return
            there, onward = await asyncio.open_connection(*next(self.upstreams))
            try:
                onward.write(b"\r\n".join([method + b" " + target + b" HTTP/1.0", *kept, b"", body]))
                if cut == "after":
                    await onward.drain()
                    await there.read(1)
                    return
                answer = await self._answer(reader, there)
            finally:
                onward.transport.abort()
            answer = answer.replace(b"HTTP/1.1 ", b"HTTP/1.0 ", 1)
            writer.write(answer[: len(answer) * 2 // 3] if cut == "middle" else answer)
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        except (OSError, EOFError, ValueError):
            pass
        finally:
            self.open -= 1
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, there: asyncio.StreamReader) -> bytes:
        """Give the whole answer; where the client hangs up meanwhile so does it."""
        answer, gone = asyncio.ensure_future(there.read(-1)), asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ConnectionResetError
            return answer.result()
        finally:
            answer.cancel()
            gone.cancel()
            await asyncio.wait([answer, gone])


@contextlib.asynccontextmanager
async def http10_box(upstreams: Sequence[Address], tls: TlsFiles) -> AsyncIterator[Http10Box]:
    """Listen on a free port of 127.0.0.1 for as long as the context lasts.

    Args:
        upstreams: doors of gateways that take connections without TLS.
        tls: its certificate, for the gateway's name.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.certificate, tls.key)
    context.set_alpn_protocols(["http/1.1", "http/1.0"])
    box = Http10Box(upstreams)
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(box.carry(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context)
    box.address = Address(*server.sockets[0].getsockname()[:2])
    try:
        yield box
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
