"""Names by DNS over HTTPS (RFC 8484): a few servers, asked over connections of our own, the best one first.

A server is reached by IP address, never by asking for its name; its certificate is checked against the name all the
same. So who lies in DNS cannot lead us astray here, only keep us from getting through.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NoReturn

from stormline.core import errors, limits_names
from stormline.core.clock import Clock
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net.resolve import Found, NoName, no_name
from stormline.outbound.dial import quiet
from stormline.outbound.doh_server import DohServer, Endpoint
from stormline.outbound.held import Held, Unfollowed
from stormline.outbound.messages import HttpRequest, field_value
from stormline.outbound.pool import Connector, HttpPool
from stormline.wire import dns

_MEDIA_TYPE: Final = b"application/dns-message"
_KINDS: Final = (dns.RecordType.AAAA, dns.RecordType.A)


class _Server:
    """A server and how it has done."""

    __slots__ = ("behind_until", "endpoint", "failures")

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.failures = 0
        self.behind_until = -math.inf

    @property
    def label(self) -> str:
        return f"DoH {self.endpoint.host}"


class _Try:
    """One server being asked.

    Attributes:
        server: who.
        kept: the questions went over a connection that had stood before.
        task: does it.
    """

    __slots__ = ("kept", "server", "task")

    def __init__(self, server: _Server) -> None:
        self.server = server
        self.kept = False
        self.task: asyncio.Task[Found]


class _Asking(Unfollowed):
    """Finds out over which connection a question goes."""

    __slots__ = ("_try",)

    def __init__(self, one: _Try) -> None:
        super().__init__()
        self._try = one

    def on_held(self, held: Held) -> None:
        """See `Follower.on_held`."""
        self._try.kept = not self.phase.reached(Phase.CONNECT)


class DohNames:
    """Asks servers for addresses. Keeps its connections, one to each that speaks HTTP/2; belongs to one loop.

    A server that fails goes behind the others for `limits_names.DOH_BACKOFF_S`, doubled each time; where all have
    failed they are asked all the same. One that says nothing for `DOH_STAGGER_S` has the next one asked beside it; and
    where it was asked over a connection that had stood before, itself once more over another.

    Args:
        servers: at least one, the best first.
        connector: makes connections, with the trust that they need; it is always given addresses.
        clock: for the pool.
    """

    def __init__(self, servers: Sequence[DohServer], connector: Connector, clock: Clock) -> None:
        self._servers = [_Server(each.endpoint) for each in servers]
        self._pool = HttpPool(
            connector,
            clock,
            connections_per_origin_max=limits_names.DOH_CONNECTIONS_MAX,
            idle_s=limits_names.DOH_IDLE_S,
        )

    async def ask(self, host: str, *, avoid: Collection[str] = (), on_note: Callable[[str], None] = quiet) -> Found:
        """Give the addresses of a name, both families.

        Cancellation is safe at any moment.

        Args:
            host: the name.
            avoid: sources (`Found.source`) not to ask.
            on_note: told which server failed and why.

        Raises:
            NoName: a server says that the name does not exist, or has no address.
            TimeoutError: none answered within `limits_names.DOH_TIMEOUT_S`.
            OSError: none could be asked, or none has an answer.
        """
        now = asyncio.get_running_loop().time()
        order = [each for each in self._servers if each.label not in avoid]
        order.sort(key=lambda each: each.behind_until if each.behind_until > now else -math.inf)
        if not order:
            raise OSError("no other DNS over HTTPS is configured")
        tries: dict[asyncio.Task[Found], _Try] = {}
        try:
            async with asyncio.timeout(limits_names.DOH_TIMEOUT_S):
                return await self._race(host, order, tries, on_note)
        finally:
            await _end(tries)

    async def _race(
        self,
        host: str,
        order: list[_Server],
        tries: dict[asyncio.Task[Found], _Try],
        on_note: Callable[[str], None],
    ) -> Found:
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        waiting = list(order)
        pending: set[asyncio.Task[Found]] = set()
        failure: OSError = OSError("no DNS over HTTPS answered")
        while waiting or pending:
            if waiting:
                server = waiting.pop(0)
                again = any(each.server is server for each in tries.values())
                pending.add(self._begin(host, server, tries, newer_than=began_at if again else None))
            done, pending = await asyncio.wait(
                pending, timeout=limits_names.DOH_STAGGER_S, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                error = task.exception()
                if error is None:
                    tries[task].server.failures = 0
                    tries[task].server.behind_until = -math.inf
                    return task.result()
                if not isinstance(error, OSError):
                    raise error
                if isinstance(error, _NoAnswer):
                    self._put_behind(tries[task].server)
                on_note(f"{tries[task].server.label}: {error}")
                if isinstance(error, NoName):
                    raise error
                failure = error
            if not done and not waiting:
                waiting += self._stale(tries, pending)
        raise failure

    def _stale(self, tries: dict[asyncio.Task[Found], _Try], pending: Collection[asyncio.Task[Found]]) -> list[_Server]:
        """Give the servers asked once, over a connection that had stood before and says nothing."""
        asked = [each.server for each in tries.values()]
        return [tries[task].server for task in pending if tries[task].kept and asked.count(tries[task].server) == 1]

    def _put_behind(self, server: _Server) -> None:
        pause_s = min(limits_names.DOH_BACKOFF_S * 2.0**server.failures, limits_names.DOH_BACKOFF_S_MAX)
        server.failures = min(server.failures + 1, 16)
        server.behind_until = asyncio.get_running_loop().time() + pause_s

    def _begin(
        self, host: str, server: _Server, tries: dict[asyncio.Task[Found], _Try], *, newer_than: float | None
    ) -> asyncio.Task[Found]:
        one = _Try(server)
        one.task = asyncio.get_running_loop().create_task(
            self._both(host, one, newer_than), name=f"ask {server.label} for {host}"
        )
        tries[one.task] = one
        return one.task

    async def _both(self, host: str, one: _Try, newer_than: float | None) -> Found:
        """Ask one server for both families."""
        loop = asyncio.get_running_loop()
        asked = [loop.create_task(self._one(host, kind, one, newer_than)) for kind in _KINDS]
        try:
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            if any(task.done() and not task.exception() and task.result().addresses for task in asked):
                await asyncio.wait(asked, timeout=limits_names.DOH_OTHER_FAMILY_S)
            else:
                await asyncio.wait(asked)
            return self._join(one.server, [task for task in asked if task.done()])
        finally:
            await _end(asked)

    @staticmethod
    def _join(server: _Server, answered: Sequence[asyncio.Task[dns.Reply]]) -> Found:
        replies = [task.result() for task in answered if task.exception() is None]
        full = [each for each in replies if each.addresses]
        if full:
            addresses = tuple(address for each in full for address in each.addresses)
            return Found(addresses, float(min(each.ttl_s for each in full)), server.label)
        for task in answered:
            error = task.exception()
            if error is not None:
                raise error
        if any(each.rcode not in (dns.Rcode.NOERROR, dns.Rcode.NXDOMAIN) for each in replies):
            raise OSError(f"it has no answer (RCODE {max(each.rcode for each in replies)})")
        absent = any(each.rcode == dns.Rcode.NXDOMAIN for each in replies)
        reason = "the name does not exist" if absent else "the name has no address"
        raise no_name(reason, float(min(each.ttl_s for each in replies)))

    async def _one(self, host: str, kind: dns.RecordType, one: _Try, newer_than: float | None) -> dns.Reply:
        """Ask one server for one family."""
        endpoint = one.server.endpoint
        try:
            question = dns.question(host, kind)
        except ValueError as error:
            raise no_name(str(error)) from error
        request = HttpRequest(
            "POST",
            "https",
            endpoint.host,
            endpoint.port,
            endpoint.path.encode("ascii"),
            ((b"accept", _MEDIA_TYPE), (b"content-type", _MEDIA_TYPE)),
            question,
        )
        try:
            response = await self._pool.request(
                request,
                deadline_s=limits_names.DOH_TIMEOUT_S,
                addresses=endpoint.addresses,
                newer_than=newer_than,
                follower=_Asking(one),
            )
            body = await response.read(limits_names.DNS_MESSAGE_BYTES_MAX)
            await response.aclose()
            if response.status != 200:
                _refuse(f"HTTP {response.status}")
            media = field_value(tuple(response.headers), b"content-type") or b""
            if media.partition(b";")[0].strip().lower() != _MEDIA_TYPE:
                _refuse("an answer that is no DNS message")
            reply = dns.parse_reply(body, host, kind)
        except errors.TransportError as error:
            raise _NoAnswer(str(error)) from error
        except errors.RemoteProtocolError as error:
            raise _NoAnswer(str(error)) from error
        age = field_value(tuple(response.headers), b"age") or b"0"
        age_s = int(age) if age.isdigit() and len(age) < 10 else 0  # RFC 8484 section 5.1
        return reply._replace(ttl_s=max(0, reply.ttl_s - age_s))

    def shun(self, source: str) -> None:
        """Put the server that is `Found.source` behind the others for a while: what it said did not do."""
        for server in self._servers:
            if server.label == source:
                self._put_behind(server)

    def doubt(self) -> None:
        """Ask nothing over a connection that stands until it has shown that it lives: the network has changed."""
        self._pool.doubt()
        for server in self._servers:
            server.failures = 0
            server.behind_until = -math.inf

    def close(self) -> None:
        """Close every connection; works also when the loop is closed already."""
        with contextlib.suppress(RuntimeError):  # a closed loop cannot wake who waits
            self._pool.close()


class NoNames:
    """The resolver of a dialer that is only ever given addresses."""

    async def resolve(self, host: str, port: int) -> tuple[Address, ...]:
        """Refuse: a server for names is never looked up."""
        raise OSError(f"{host} is to be reached by address")

    def doubt(self, host: str) -> None:
        """Nothing was given, so nothing is doubted."""


class _NoAnswer(OSError):
    """The server could not be asked, or did not answer as one."""


async def _end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """End tasks whose outcome nobody wants any more; they are gone when this returns."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # else asyncio would report that nobody looked


def _refuse(reason: str) -> NoReturn:
    raise _NoAnswer(reason)
