"""What a request costs a server, in CPU time of its own process: the server's process, and who asks it.

The process prints its port, then for each line on its standard input the CPU time it has used so far (microseconds),
and ends with that input. Some requests are always under way: a server that has nothing to do between two goes to sleep,
and waking it costs more than an answer.
"""

import contextlib
import itertools
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Final, NamedTuple

from stormline.bench.client import median_pair
from stormline.core import errors

ROUNDS: Final = 45
"""Turns of each kind of request; odd, so that one is the median. Many short ones: the machine is more alike in
neighbouring ones."""
REQUESTS: Final = 320
"""Requests of one turn."""
WARM_UP: Final = 544
"""Requests before the first turn, uncounted."""
IN_FLIGHT: Final = 16
"""Connections, each with one request: the server finds the next when it has answered one."""
_TIMEOUT_S: Final = 30.0


class Asked(NamedTuple):
    """One kind of request.

    Attributes:
        path: where it goes.
        bodies: contents, each in its turn.
        media: what they are; empty: no content, a GET.
        headers: lines beside, each with its end.
    """

    path: str
    bodies: tuple[bytes, ...]
    media: str
    headers: str = ""

    def requests(self) -> list[bytes]:
        """Give the requests as they go on the wire."""
        if not self.media:
            return [f"GET {self.path} HTTP/1.1\r\nhost: server\r\n{self.headers}\r\n".encode()]
        head = f"POST {self.path} HTTP/1.1\r\nhost: server\r\naccept: {self.media}\r\ncontent-type: {self.media}\r\n"
        head += self.headers
        return [f"{head}content-length: {len(body)}\r\n\r\n".encode() + body for body in self.bodies]


class Server:
    """A server in its process, and connections to it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        where = ("127.0.0.1", self._number())
        self._sockets = [socket.create_connection(where, timeout=_TIMEOUT_S) for _ in range(IN_FLIGHT)]

    def _number(self) -> int:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise errors.PlatformError("bench: the server failed; what it said stands above")
        return int(line)

    def _used_us(self) -> int:
        if self._process.stdin is not None:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        return self._number()

    def pair(self, ours: Asked, peer: Asked) -> tuple[float, float]:
        """Let two kinds of requests take turns; gives the pair of neighbouring turns whose ratio is the median.

        Raises:
            PlatformError: one was answered with an error.
        """
        for each in (ours, peer):
            self.turn(each, WARM_UP)
        figures: dict[str, list[float]] = {ours.path: [], peer.path: []}
        for index in range(ROUNDS):
            for each in (ours, peer) if index % 2 == 0 else (peer, ours):
                figures[each.path].append(self.turn(each))
        return median_pair(figures[ours.path], figures[peer.path])

    def turn(self, asked: Asked, requests: int = REQUESTS) -> float:
        """Send requests; gives the CPU time of each, in microseconds.

        Raises:
            PlatformError: one was answered with an error.
        """
        each = itertools.cycle(asked.requests())
        before = self._used_us()
        rounds = requests // IN_FLIGHT
        for sock in self._sockets:
            sock.sendall(next(each))
        for number in range(rounds):
            for sock in self._sockets:
                self._read(sock, asked.path)
                if number < rounds - 1:
                    sock.sendall(next(each))
        return (self._used_us() - before) / (rounds * IN_FLIGHT)

    def ask(self, asked: Asked) -> bytes:
        """Send one request and give the content of its answer.

        Raises:
            PlatformError: it was answered with an error.
        """
        self._sockets[0].sendall(asked.requests()[0])
        return self._read(self._sockets[0], asked.path)

    def _read(self, sock: socket.socket, path: str) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._more(sock, path)
        head, _, body = data.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            raise errors.PlatformError(f"bench: {path} answered {head[:40]!r}")
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        while len(body) < size:
            body += self._more(sock, path)
        return body

    def _more(self, sock: socket.socket, path: str) -> bytes:
        data = sock.recv(65536)
        if not data:
            raise errors.PlatformError(f"bench: the server ended the connection at {path}")
        return data

    def close(self) -> None:
        """Close the connections."""
        for sock in self._sockets:
            sock.close()


@contextlib.contextmanager
def served(module: str, *arguments: str) -> Iterator[Server]:
    """Run a server: `python -m MODULE ARGUMENTS`.

    Raises:
        PlatformError: it did not start.
    """
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        made = Server(process)
        try:
            yield made
        finally:
            made.close()
    finally:
        process.communicate()
