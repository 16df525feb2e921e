"""An HTTP/1.1 origin on 127.0.0.1 that counts what it reads and answers as a test says."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from stormline.core.values import Address


class Request(NamedTuple):
    """What came to an origin."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Origin:
    """An HTTP/1.1 server that counts and does what a test says.

    Attributes:
        address: where it listens.
        requests: every request read whole.
        counts: how many, by method.
        connections: how many were accepted.
    """

    address: Address = field(default_factory=lambda: Address("", 0))
    requests: list[Request] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    connections: int = 0

    def url(self, path: str = "/", host: str = "127.0.0.1") -> str:
        """Give a URL of this origin."""
        return f"http://{host}:{self.address.port}{path}"


Answer: TypeAlias = Callable[[Request, asyncio.StreamWriter], Awaitable[None]]


async def read_request(reader: asyncio.StreamReader) -> Request:
    """Read one request; raises IncompleteReadError where the peer has no more."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")[:-2]
    method, target, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = b""
    if headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    elif "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    return Request(method, target, headers, body)


def plain(body: bytes = b"ok", status: str = "200 OK", **headers: str) -> bytes:
    """Give an answer's bytes."""
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{lines}\r\n".encode() + body


async def answer_plainly(request: Request, writer: asyncio.StreamWriter) -> None:
    """Answer 200 with `ok`."""
    writer.write(plain(b"" if request.method == "HEAD" else b"ok"))


@contextlib.asynccontextmanager
async def running_origin(
    answer: Answer = answer_plainly, *, host: str = "127.0.0.1", **options: Any
) -> AsyncIterator[Origin]:
    """Run an origin on this machine alone; `answer` plays each request and may close the writer."""
    origin = Origin()
    writers: set[asyncio.StreamWriter] = set()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        origin.connections += 1
        writers.add(writer)
        try:
            while not writer.is_closing():
                request = await read_request(reader)
                origin.requests.append(request)
                origin.counts[request.method] += 1
                await answer(request, writer)
                await writer.drain()
        except (OSError, EOFError, ValueError):
            pass
        finally:
            writer.close()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(connected, host, 0, **options)
    origin.address = Address(*server.sockets[0].getsockname()[:2])
    try:
        yield origin
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        for writer in writers:
            writer.transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
