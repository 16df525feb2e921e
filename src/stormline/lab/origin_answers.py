"""What the origin answers to a request, and what goes wrong with an answer by order of a `specs.Behaviour`."""

import asyncio
import base64
import binascii
import gzip
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from typing import Final, Protocol
from urllib.parse import parse_qs, urlsplit

from stormline.core import limits_lab
from stormline.core.clock import Rng
from stormline.lab import workload
from stormline.lab.specs import Behaviour
from stormline.net.clock import SystemClock

PAGE: Final = b"<!doctype html><title>Sign in</title><p>Welcome to this network. Accept the terms to go on.\n"
"""What captive portals and injecting proxies answer to everything."""
HOME: Final = b"<!doctype html><html><title>Shop</title><body><h1>The shop</h1></body></html>\n"
"""A page of the origin, at `HOME_PATH`."""
HOME_PATH: Final = "/home"
CHECK_PATH: Final = "/generate_204"
"""What is asked for to find out whether a captive portal is in the way."""
DNS_MESSAGE: Final = "application/dns-message"
_ITEM: Final = re.compile(r"/item/(\d{1,9})/(\d{1,8})")
_FATES: Final = ("accept-only", "reset", "cut", "mute")


@dataclass(slots=True)
class Request:
    """One request, whole."""

    method: str
    target: str
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes


class Answer(Protocol):
    """Where an answer goes: a stream of HTTP/2 or a turn of HTTP/1.1."""

    def start(self, status: int, headers: Sequence[tuple[str, str]]) -> None:
        """Send the head; a body follows."""

    async def write(self, data: bytes) -> None:
        """Send a piece of the body; waits while the client takes no more."""

    def end(self) -> None:
        """The body is whole."""


class _Headed:
    """An answer with some headers more."""

    def __init__(self, answer: Answer, headers: Sequence[tuple[str, str]]) -> None:
        self._answer = answer
        self._headers = headers
        self.write = answer.write
        self.end = answer.end

    def start(self, status: int, headers: Sequence[tuple[str, str]]) -> None:
        self._answer.start(status, [*headers, *self._headers])


@dataclass(slots=True)
class Counters:
    """What all addresses of the origin saw together."""

    requests_by_id: Counter[str]
    connections: int = 0
    captive_requests: int = 0
    in_flight: int = 0


class Site:
    """One address of the servers' side: what it serves, and how it fails."""

    def __init__(
        self,
        behaviour: Behaviour,
        counters: Counters,
        rng: Rng,
        *,
        counted: bool = True,
        doh: Callable[[bytes], bytes | None] | None = None,
    ) -> None:
        """Make a site.

        Args:
            behaviour: what goes wrong.
            counters: where it counts; `in_flight` is shared by all sites.
            rng: chance of its own.
            counted: its connections and requests are the origin's.
            doh: answers DNS questions at `/dns-query`.
        """
        self.behaviour = behaviour
        """May be changed at any time."""
        self._counters = counters
        self._rng = rng
        self._counted = counted
        self._doh = doh

    def connection_fate(self) -> str:
        """Say what befalls a new connection; empty: nothing."""
        behaviour, draw = self.behaviour, self._rng.random() * 100
        chances = (behaviour.accept_only_pct, behaviour.reset_pct, behaviour.cut_pct, behaviour.mute_pct)
        for pct, fate in zip(chances, _FATES, strict=True):
            if draw < pct:
                return fate
            draw -= pct
        return ""

    def count_connection(self) -> None:
        """Count a connection that was accepted."""
        if self._counted:
            self._counters.connections += 1

    def count_request(self, request: Request) -> None:
        """Count a request that was read whole."""
        if not self._counted:
            self._counters.captive_requests += self.behaviour.page
            return
        item = _ITEM.fullmatch(urlsplit(request.target).path)
        if item is not None:
            self._counters.requests_by_id[item[1]] += 1

    async def answer(self, request: Request, answer: Answer) -> None:
        """Answer a request, or do what the behaviour has instead; may never return."""
        self.count_request(request)
        counters = self._counters
        counters.in_flight += 1
        try:
            await self._answer(request, _Headed(answer, self._usual_headers()))
        finally:
            counters.in_flight -= 1

    def _usual_headers(self) -> list[tuple[str, str]]:
        """Give what every answer has."""
        headers = []
        if self.behaviour.date_skew_s is not None:
            headers.append(("date", formatdate(SystemClock().wall() + self.behaviour.date_skew_s, usegmt=True)))
        if self.behaviour.quic:
            headers.append(("alt-svc", 'h3=":443"; ma=60'))
        return headers

    async def _answer(self, request: Request, answer: Answer) -> None:
        behaviour = self.behaviour
        if behaviour.page:
            await _whole(answer, 200, "text/html", PAGE)
            return
        url = urlsplit(request.target)
        if self._doh is not None and url.path == "/dns-query":
            await self._answer_doh(request, url.query, answer)
            return
        if url.path == CHECK_PATH:
            answer.start(204, ())
            answer.end()
            return
        if url.path == HOME_PATH:
            if self._rng.random() * 100 < behaviour.error_pct:
                await self._unwell(answer)
            else:
                await _whole(answer, 200, "text/html", HOME)
            return
        item = _ITEM.fullmatch(url.path)
        if item is None or int(item[2]) > workload.SIZE_BYTES_MAX or request.method != "GET":
            await _whole(answer, 404, "text/plain", b"no such item\n")
            return
        if self._overloaded():
            await asyncio.sleep(behaviour.in_flight_stall_s)
            await _whole(answer, 503, "text/plain", b"too much at once\n")
            return
        await asyncio.sleep(behaviour.in_flight_hold_s)
        draw = self._rng.random() * 100
        if draw < behaviour.error_pct:
            await self._unwell(answer)
            return
        zipped = parse_qs(url.query).get("z") == ["gzip"]
        await self._item(answer, workload.body(int(item[1]), int(item[2])), zipped, draw - behaviour.error_pct)

    async def _unwell(self, answer: Answer) -> None:
        await _whole(answer, self.behaviour.error_status, "text/plain", b"the server is unwell\n")

    def _overloaded(self) -> bool:
        behaviour = self.behaviour
        if behaviour.in_flight_free is None:
            return False
        beyond = self._counters.in_flight - behaviour.in_flight_free
        return beyond > 0 and self._rng.random() * 100 < beyond * behaviour.in_flight_pct

    async def _item(self, answer: Answer, body: bytes, zipped: bool, draw: float) -> None:
        behaviour = self.behaviour
        stalled = draw < behaviour.stall_pct
        draw -= behaviour.stall_pct
        truncated = not stalled and draw < behaviour.truncate_pct
        draw -= behaviour.truncate_pct
        slow = not (stalled or truncated) and draw < behaviour.slow_pct
        headers = []
        if zipped or truncated:
            body = gzip.compress(body, mtime=0)
            headers.append(("content-encoding", "gzip"))
        if truncated:
            body = body[: len(body) // 2]
        headers += [("content-type", "application/octet-stream"), ("content-length", str(len(body)))]
        answer.start(200, headers)
        stop = len(body) // 2 if stalled else len(body)
        if behaviour.body_bytes_max is not None:
            stop = min(stop, behaviour.body_bytes_max)
        await _pour(answer, body[:stop], behaviour.slow_bps if slow else None)
        if stop < len(body):
            await asyncio.Event().wait()
        answer.end()

    async def _answer_doh(self, request: Request, query: str, answer: Answer) -> None:
        # RFC 8484 section 4.1: the question is the body of a POST, or base64url without padding in a GET.
        question = request.body
        if request.method == "GET":
            text = "".join(parse_qs(query).get("dns", [""]))
            try:
                question = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
            except (binascii.Error, ValueError):
                question = b""
        reply = self._doh(question) if self._doh is not None else None
        if reply is None:
            await _whole(answer, 400, "text/plain", b"no question\n")
        else:
            await _whole(answer, 200, DNS_MESSAGE, reply)


async def _whole(answer: Answer, status: int, kind: str, body: bytes) -> None:
    answer.start(status, [("content-type", kind), ("content-length", str(len(body)))])
    await answer.write(body)
    answer.end()


async def _pour(answer: Answer, body: bytes, bps: float | None) -> None:
    step = limits_lab.LAB_CHUNK_BYTES if bps is None else max(1, int(bps / 8 / 10))
    for start in range(0, len(body), step):
        piece = body[start : start + step]
        if bps is not None:
            await asyncio.sleep(len(piece) * 8 / bps)
        await answer.write(piece)
