"""The origin that client benches ask: the smallest HTTP/1.1 server that keeps connections, in its own process.

`python -m stormline.bench.origin` prints its port and serves until its standard input ends.
"""

import asyncio
import sys
from typing import Final

ANSWER: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 27\r\n\r\n" + b'{"items": [1, 2, 3, 4, 5]}\n'
)


class _Origin(asyncio.Protocol):
    def __init__(self) -> None:
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            self._buffer = self._buffer[end + 4 :]
            if self._transport is not None:
                self._transport.write(ANSWER)


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Origin, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(_serve())
