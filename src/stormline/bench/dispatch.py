"""What an answer of dispatch costs, in CPU time of its own process, beside a bare JSON answer of the same server.

Questions and bare requests take turns; a row is the pair of neighbouring turns whose ratio is the median. All go one
after the other over one kept connection of clear HTTP: what TLS costs is the same for each.
"""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from stormline.bench import centre
from stormline.bench.client import median_pair
from stormline.bench.results import Row, row
from stormline.core import errors
from stormline.wire import dns, dns_server
from stormline.wire.plan import PlanRequest

ROUNDS: Final = 9
"""Turns of each; odd, so that one is the median."""
REQUESTS: Final = 1500
"""Requests of one turn."""
GOAL_PLAN_US: Final = 60.0
"""A plan for ten hosts that has been signed before."""
GOAL_DOH_US: Final = 60.0
"""An answer of HTTPS records."""
_QUERY_BLOCK_BYTES: Final = 128
_TIMEOUT_S: Final = 30.0


class _Asked(NamedTuple):
    """One kind of request."""

    path: str
    body: bytes
    media: str


class Centre:
    """The centre in its process, and a connection to it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._socket = socket.create_connection(("127.0.0.1", self._number()), timeout=_TIMEOUT_S)

    def _number(self) -> int:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise errors.PlatformError("bench: the centre failed; what it said stands above")
        return int(line)

    def _used_us(self) -> int:
        if self._process.stdin is not None:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        return self._number()

    def turn(self, asked: _Asked, requests: int = REQUESTS) -> float:
        """Send requests; gives the CPU time of each, in microseconds.

        Raises:
            PlatformError: one was answered with an error.
        """
        head = f"POST {asked.path} HTTP/1.1\r\nhost: centre\r\naccept: {asked.media}\r\ncontent-type: {asked.media}\r\n"
        request = f"{head}content-length: {len(asked.body)}\r\n\r\n".encode() + asked.body
        before = self._used_us()
        for _ in range(requests):
            self._socket.sendall(request)
            self._read(asked.path)
        return (self._used_us() - before) / requests

    def _read(self, path: str) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._more(path)
        head, _, body = data.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            raise errors.PlatformError(f"bench: {path} answered {head[:40]!r}")
        missing = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]) - len(body)
        while missing > 0:
            missing -= len(self._more(path))

    def _more(self, path: str) -> bytes:
        data = self._socket.recv(65536)
        if not data:
            raise errors.PlatformError(f"bench: the centre ended the connection at {path}")
        return data

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


@contextlib.contextmanager
def _running() -> Iterator[Centre]:
    process = subprocess.Popen(
        [sys.executable, "-m", "stormline.bench.centre"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        made = Centre(process)
        try:
            yield made
        finally:
            made.close()
    finally:
        process.communicate()


def run() -> list[Row]:
    """Measure; takes half a minute on a quiet machine."""
    asked = dns.question(centre.HOSTS[0], dns.RecordType.HTTPS)[dns_server.HEADER_BYTES :]
    query = dns_server.forward_query(
        0, asked, dnssec_ok=False, checking_disabled=False, block_bytes=_QUERY_BLOCK_BYTES
    )  # padded, as browsers ask
    doh = _Asked("/dns-query", query, "application/dns-message")
    plan = _Asked("/v1/plan", msgspec.json.encode(PlanRequest(app=centre.APP, hosts=centre.HOSTS)), "application/json")
    bare = _Asked("/bare", query, "application/dns-message")
    with _running() as running:
        return [
            _against("plan_us", running, plan, bare, GOAL_PLAN_US),
            _against("doh_us", running, doh, bare, GOAL_DOH_US),
        ]


def _against(name: str, running: Centre, ours: _Asked, bare: _Asked, goal_us: float) -> Row:
    for each in (ours, bare):
        running.turn(each, REQUESTS // 3)
    figures: dict[str, list[float]] = {ours.path: [], bare.path: []}
    for index in range(ROUNDS):
        for each in (ours, bare) if index % 2 == 0 else (bare, ours):
            figures[each.path].append(running.turn(each))
    value, peer = median_pair(figures[ours.path], figures[bare.path])
    return row(name, value, "us", goal=goal_us, peer="bare JSON answer of the same server", peer_value=peer)
