"""Origins of a simulated world that speak HTTP/1.1 and HTTP/2, and misbehave as real ones do.

An origin has one content and many addresses. Each address is a machine of its own with troubles of its own: it may be
mute, cut its answers, refuse streams, say that it is busy. What a request asks for is in its target:

    /op/ID?size=N&coded=1&range=1       N bytes made from ID; gzip; may be asked for in parts
    /op/ID?size=N&vary=1                N bytes that are others each time it is asked
    /op/ID?events=N&gap=S               N server-sent events, S seconds apart
    /op/ID?hold=S                       answered after S seconds, as a long poll is
"""

import asyncio
import gzip
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Final
from urllib.parse import parse_qsl

from stormline.core.values import Address
from stormline.testing.simhttp import Asked, Connection, Exchange
from stormline.testing.simloop import WALL_START_S, SimRng
from stormline.testing.simnet import Host, SimSocket
from stormline.testing.simplatform import Ledger, answer_text
from stormline.testing.simserver import HttpTasks, SimTransport
from stormline.testing.simtls import SimTlsContext

TLS_PORT: Final = 443
PLAIN_PORT: Final = 80
_COST_FACTOR_MAX: Final = 3.0
"""How much longer than usual an answer may take where nothing is wrong."""
_PIECE_BYTES: Final = 16_384
_BUSY_STATUSES: Final = (429, 503)
"""Answers that say that nothing was done."""
_BROKEN_STATUSES: Final = (500, 502, 503, 504)


@dataclass(slots=True)
class Trouble:
    """What is wrong with one address.

    Attributes:
        kind: what happens; see `OriginHost`.
        pct: how many requests in a hundred it hits.
        seconds: how long it takes, where it takes time.
        places: how many requests a narrow one takes side by side.
        retry_after_s: what a busy server asks for; None for nothing.
        deep: whether it shows only after the request was processed.
    """

    kind: str
    pct: float = 100.0
    seconds: float = 0.0
    places: int = 0
    retry_after_s: float | None = None
    deep: bool = False


@dataclass(slots=True)
class OriginHost:
    """One address of an origin.

    Attributes:
        host: its machine.
        address: where it listens for TLS.
        http2: it speaks HTTP/2 too.
        troubles: what is wrong now, by kind: `refused` (nobody listens), `tls-hang`, `tls-cut`, `mute`, `stall`, `cut`,
            `reset`, `idle-close`, `goaway`, `refuse-stream`, `busy`, `narrow`, `broken`, `damage`, `slow`.
        hits: how often each struck.
        inside: requests it works on now.
    """

    host: Host
    address: Address
    http2: bool
    rng: SimRng
    troubles: dict[str, Trouble] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    inside: int = 0

    def strikes(self, kind: str) -> Trouble | None:
        """Give the trouble of this kind where it hits now."""
        trouble = self.troubles.get(kind)
        share = 0.0 if trouble is None else trouble.pct / 100
        if trouble is not None and trouble.places:
            share *= max(0, self.inside - trouble.places)
        if trouble is None or not self.rng.chance(share):
            return None
        self.hits[kind] = self.hits.get(kind, 0) + 1
        return trouble


class Origin:
    """One origin with all its addresses.

    Args:
        name: host name, also that of its certificate.
        ledger: counts what was done.
        rng: chance of the servers.
        cost_s: mean of what the servers need for an answer, seconds.

    Attributes:
        hosts: its addresses.
        served: answers with status 200 that were begun, by address.
    """

    def __init__(self, name: str, ledger: Ledger, rng: SimRng, *, cost_s: float) -> None:
        self.name = name
        self.hosts: list[OriginHost] = []
        self.served: dict[str, int] = {}
        self._ledger = ledger
        self._rng = rng
        self._cost_s = cost_s
        self._tasks = HttpTasks()
        self._held: list[SimSocket] = []

    def add(self, host: Host, ip: str, *, http2: bool) -> OriginHost:
        """Give the origin another address."""
        made = OriginHost(host, Address(ip, TLS_PORT), http2, self._rng.child(ip))
        self.hosts.append(made)
        self.listen(made)
        return made

    def listen(self, at: OriginHost) -> None:
        """Take connections at an address."""
        alpn = ("h2", "http/1.1") if at.http2 else ("http/1.1",)
        context = SimTlsContext(alpn, names=(self.name,))

        async def handle(asked: Asked, exchange: Exchange) -> None:
            await self._answer(at, asked, exchange)

        def cut(sock: SimSocket) -> None:
            sock.watch_reading(None)
            sock.end.abort()

        def accept(sock: SimSocket) -> None:
            if at.strikes("tls-hang") is not None:
                self._held.append(sock)  # TCP stands, and nobody reads
            elif at.strikes("tls-cut") is not None:
                sock.watch_reading(lambda: cut(sock))  # the hello comes, and the connection goes
                self._held.append(sock)
            else:
                SimTransport(sock, lambda: Connection(handle, self._tasks), context)

        at.host.listen(TLS_PORT, accept)
        at.host.listen(PLAIN_PORT, lambda sock: _plain(sock, lambda: Connection(handle, self._tasks)))

    def deafen(self, at: OriginHost) -> None:
        """Refuse connections at an address from now on; those that stand are reset."""
        at.host.unlisten(TLS_PORT)
        at.host.unlisten(PLAIN_PORT)
        at.host.kill_connections()

    async def stop(self) -> None:
        """End every server."""
        for at in self.hosts:
            self.deafen(at)
        for sock in self._held:
            sock.close()
        await self._tasks.stop()

    # -- answers -----------------------------------------------------------------------------------------------------
    async def _answer(self, at: OriginHost, asked: Asked, exchange: Exchange) -> None:
        at.inside += 1
        try:
            await self._work(at, asked, exchange)
        finally:
            at.inside -= 1

    async def _work(self, at: OriginHost, asked: Asked, exchange: Exchange) -> None:
        path, _, query = asked.target.partition("?")
        call_id = path.rpartition("/")[2]
        if not self._takes(at, exchange):
            return
        narrow = at.strikes("narrow")
        if narrow is not None:
            await asyncio.sleep(narrow.seconds)  # it keeps its place meanwhile
        if self._says_no(at, call_id, asked, exchange, narrow):
            return
        if at.troubles.get("mute") is None or at.rng.chance(0.5):
            self._ledger.work(call_id, asked.headers.get("idempotency-key", ""))
        if at.strikes("mute") is not None:
            await asyncio.Event().wait()
        told = dict(parse_qsl(query))
        slow = at.strikes("slow")
        cost_s = min(at.rng.gap_s(1 / self._cost_s), _COST_FACTOR_MAX * self._cost_s)
        await asyncio.sleep(cost_s + (slow.seconds if slow is not None else 0.0))
        if "hold" in told:
            await asyncio.sleep(float(told["hold"]))
        if at.strikes("reset") is not None:
            exchange.reset()
            return
        self.served[str(at.address)] = self.served.get(str(at.address), 0) + 1
        if "events" in told:
            await self._events(at, call_id, int(told["events"]), float(told["gap"]), exchange)
        else:
            await self._content(at, call_id, told, asked, exchange)
        if (closes := at.strikes("idle-close")) is not None:
            exchange.close(at.rng.uniform(0.0, closes.seconds))

    def _takes(self, at: OriginHost, exchange: Exchange) -> bool:
        """Say whether a request is let in at all."""
        if at.strikes("refuse-stream") is not None:
            exchange.refuse()
        elif at.strikes("goaway") is not None:
            exchange.goaway()
        elif (reset := at.strikes("reset")) is not None and not reset.deep:
            exchange.reset()
        else:
            return True
        return False

    def _says_no(self, at: OriginHost, call_id: str, asked: Asked, exchange: Exchange, narrow: Trouble | None) -> bool:
        """Answer with a status that says that it is busy or broken, where it is."""
        busy, broken = narrow or at.strikes("busy"), at.strikes("broken")
        trouble = busy or broken
        if trouble is None:
            return False
        if broken is not None and at.rng.chance(0.5):
            self._ledger.work(call_id, asked.headers.get("idempotency-key", ""))
        status = at.rng.choice(_BUSY_STATUSES if busy is not None else _BROKEN_STATUSES)
        headers = [("content-type", "text/plain")]
        if trouble.retry_after_s is not None:
            headers.append(("retry-after", self._come_back(at, trouble.retry_after_s)))
        text = b"not now"
        exchange.head(status, headers, len(text))
        exchange.piece(text)
        exchange.end()
        self._ledger.refused(call_id)
        return True

    def _come_back(self, at: OriginHost, after_s: float) -> str:
        """Give a `Retry-After`: seconds, or a date by this server's clock, which is right."""
        if at.rng.chance(0.7):
            return f"{after_s:.0f}"
        return formatdate(WALL_START_S + asyncio.get_running_loop().time() + after_s, usegmt=True)

    async def _content(
        self, at: OriginHost, call_id: str, told: dict[str, str], asked: Asked, exchange: Exchange
    ) -> None:
        version = f"{call_id}.{self._ledger.arrivals(call_id)}" if "vary" in told else call_id
        body = answer_text(version, int(told.get("size", 0)))
        headers = [("content-type", "text/plain")]
        if "vary" not in told or at.rng.chance(0.5):
            headers.append(("etag", f'"{version}"'))
        status = 200
        if "coded" in told:
            body = gzip.compress(body, 1, mtime=0)
            headers.append(("content-encoding", "gzip"))
            body = self._damaged(at, body)
        if "range" in told and asked.headers.get("if-range") == f'"{version}"':
            start = int(asked.headers.get("range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
            headers.append(("content-range", f"bytes {start}-{len(body) - 1}/{len(body)}"))
            body, status = body[start:], 206
        cost_ms = 1000 * self._cost_s
        if at.rng.chance(0.3):
            headers.append(("server-timing", f"db;dur={cost_ms / 2:.1f}, total;dur={cost_ms:.1f}"))
        exchange.head(status, headers, len(body) if at.rng.chance(0.7) else None)
        if asked.method == "HEAD":
            exchange.end()
            return
        stall, cut = at.strikes("stall"), at.strikes("cut")
        stop = at.rng.integer(0, len(body)) if stall is not None or cut is not None else len(body)
        for offset in range(0, stop, _PIECE_BYTES):
            exchange.piece(body[offset : min(stop, offset + _PIECE_BYTES)])
        if cut is not None:
            await asyncio.sleep(at.rng.uniform(0.0, 0.5))
            exchange.reset()
            return
        if stall is not None:
            await asyncio.sleep(stall.seconds)
            exchange.piece(body[stop:])
        exchange.end()

    def _damaged(self, at: OriginHost, body: bytes) -> bytes:
        """Cut a coded body short or flip a bit in it, framing it well all the same."""
        if at.strikes("damage") is None:
            return body
        if at.rng.chance(0.5):
            return body[: at.rng.integer(1, len(body) - 1)]
        place = at.rng.integer(10, len(body) - 1)
        return body[:place] + bytes([body[place] ^ (1 << at.rng.integer(0, 7))]) + body[place + 1 :]

    async def _events(self, at: OriginHost, call_id: str, number: int, gap_s: float, exchange: Exchange) -> None:
        exchange.head(200, [("content-type", "text/event-stream")], None)
        for each in range(number):
            await asyncio.sleep(gap_s)
            if at.strikes("cut") is not None:
                exchange.reset()
                return
            exchange.piece(event_text(call_id, each))
        exchange.end()


def event_text(call_id: str, number: int) -> bytes:
    """Give one event of a stream."""
    return f"id: {number}\ndata: {call_id}\n\n".encode()


def _plain(sock: SimSocket, factory: Callable[[], asyncio.Protocol]) -> None:
    SimTransport(sock, factory, None)
