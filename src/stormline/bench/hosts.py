"""How much memory a client keeps for each host it has met: what the policies learned, and what the pool knows."""

import asyncio
import gc
import tracemalloc
from typing import Any, Final, cast

from stormline.core.values import Address
from stormline.net.clock import SystemClock
from stormline.outbound.messages import HttpRequest
from stormline.outbound.pool import Connector, HttpPool
from stormline.policy import addresses, shape, timeouts
from stormline.policy.budget import RetryBudget
from stormline.policy.strategy import Strategy

HOSTS: Final = 20_000
ADDRESSES: Final = ("192.0.2.7", "2001:db8::7")
"""What each host has."""
_NETWORK: Final = shape.Network("bench", "wifi")
_ANSWER: Final = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class _Stream:
    """`net.stream.Stream` to an origin that answers at once, and is neither sent nor asked anything else."""

    def __init__(self, host: str, port: int) -> None:
        self.peer = Address(host, port)
        self.local = Address("127.0.0.1", 1)
        self.alpn: str | None = "http/1.1"
        self.sent_bytes = 0
        self.heard_at = 0.0
        self._closed = asyncio.Event()
        self._answers = 0

    def send_nowait(self, data: bytes | memoryview) -> int:
        """Answer."""
        self.sent_bytes += len(data)
        self._answers += 1
        return len(data)

    @property
    def has_unsent(self) -> bool:
        """Never."""
        return False

    async def receive(self, size_max: int = 0) -> bytes:
        """Give the answer, or wait for the end."""
        if not self._answers:
            await self._closed.wait()
            raise ConnectionAbortedError
        self._answers -= 1
        return _ANSWER

    def leave_quiet(self) -> None:
        """Do nothing: there is no kernel below."""

    def tcp_info(self) -> None:
        """Nothing: there is no kernel below."""

    def is_readable(self) -> bool:
        """Never of itself."""
        return False

    def close(self) -> None:
        """Wake who waits."""
        self._closed.set()


class _Connector:
    async def dial(self, host: str, port: int, **_: Any) -> _Stream:
        return _Stream(host, port)


async def bytes_per_host(hosts: int = HOSTS) -> float:
    """Meet `hosts` hosts: one answer of each, one round trip, two addresses of which one failed; give bytes a host.

    The pool's connections are closed before it is counted: they are bounded by themselves.
    """
    clock = SystemClock()
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        book, patience, budget = addresses.AddressBook(), timeouts.TimeoutPolicy(), RetryBudget()
        known = Strategy(book.worked_within)
        pool = HttpPool(cast("Connector", _Connector()), clock, idle_s=0.0)
        for number in range(hosts):
            host = f"host-{number}.example.org"
            _learn(host, float(number), book, patience, budget)
            known.observe(_NETWORK.id, host, "h2", float(number), worked=True, pace_s=0.08, tls_port=443)
            response = await pool.request(HttpRequest("GET", "https", host, 443, b"/items"), deadline_s=60.0)
            await response.read(100)
            await asyncio.sleep(0)  # the loop's turn: it forgets the timers that were cancelled
        pool.close()
        del response
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return (after - before) / hosts


def _learn(
    host: str, now: float, book: addresses.AddressBook, patience: timeouts.TimeoutPolicy, budget: RetryBudget
) -> None:
    """Tell the policies what a request over two addresses tells them."""
    candidates = [addresses.Candidate(each, 443, "h2") for each in ADDRESSES]
    book.plan(_NETWORK.id, host, candidates, now)
    for candidate, verdict in zip(candidates, (addresses.Verdict.WORKED, addresses.Verdict.FAILED), strict=True):
        book.observe(addresses.AddressOutcome(_NETWORK.id, host, candidate, verdict, connect_s=0.05), now)
    patience.observe_rtt(_NETWORK, host, 0.05, now)
    patience.observe(
        timeouts.Outcome(
            network=_NETWORK,
            host=host,
            path_class=shape.path_class("GET", "/items"),
            answered=True,
            first_byte_s=0.08,
            body_s=0.01,
            total_s=0.09,
            request_bytes=400,
            answer_bytes=1200,
        ),
        now,
    )
    budget.observe_request(host, now)
