"""Questions about names the rules do not know, asked of other servers: bounded, timed, asked once, and kept.

A server is asked by UDP, and by TCP where its answer does not fit (RFC 1035 section 4.2), or over HTTPS. Where all
fail or are slow, an answer that has run out stands in for a while (RFC 8767), and a failure is kept for no more than a
moment. "There is no such name" never stands in: a client that hears of a failure has means of its own, and one that
hears of an absence gives up what it has.
"""

import asyncio
import contextlib
import logging
import math
import ssl
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, cast

from stormline.core import errors, limits_names
from stormline.core import limits_platform as limits
from stormline.core.clock import Clock, Rng
from stormline.core.values import Address
from stormline.outbound.dial import Dialer
from stormline.outbound.doh import NoNames
from stormline.outbound.doh_server import DohServer
from stormline.outbound.messages import HttpRequest, field_value
from stormline.outbound.pool import HttpPool
from stormline.wire import dns_server
from stormline.wire.dns import Rcode
from stormline.wire.dns_server import Relayed

_log = logging.getLogger("stormline.dispatch")
_MEDIA_TYPE: Final = b"application/dns-message"
_QUERY_BLOCK_BYTES: Final = 128  # RFC 8467 section 4.1
_FINAL: Final = (Rcode.NOERROR, Rcode.NXDOMAIN)


class Question(NamedTuple):
    """What is asked of another server.

    Attributes:
        wire: name in lower case, type and class.
        dnssec_ok: signatures are wanted.
        checking_disabled: what may be forged is wanted too.
    """

    wire: bytes
    dnssec_ok: bool = False
    checking_disabled: bool = False


class Told(NamedTuple):
    """An answer, and how old it is.

    Attributes:
        relayed: the answer.
        left_s: how long it may be kept from now on, whole seconds; of a "no" what its zone says, within our bound.
        age_s: since it came, whole seconds.
        stale: it has run out and stands in for servers that fail.
    """

    relayed: Relayed
    left_s: int
    age_s: int = 0
    stale: bool = False


class Server(Protocol):
    """One server that can be asked."""

    async def ask(self, question: Question) -> Relayed:
        """Ask it; raises OSError or RemoteProtocolError where it gives no answer. Cancellation is safe."""
        ...

    def close(self) -> None:
        """Give up what is held."""
        ...


class PlainServer:
    """A server asked by UDP from a port of its own for each question, then by TCP."""

    def __init__(self, address: Address, rng: Rng) -> None:
        self._address = address
        self._rng = rng

    def __str__(self) -> str:
        return str(self._address)

    async def ask(self, question: Question) -> Relayed:
        """See `Server.ask`."""
        ident = int.from_bytes(self._rng.token_bytes(2))
        message = dns_server.forward_query(
            ident, question.wire, dnssec_ok=question.dnssec_ok, checking_disabled=question.checking_disabled
        )
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.create_datagram_endpoint(
            lambda: _Datagrams(ident, question.wire), remote_addr=(self._address.host, self._address.port)
        )
        try:
            transport.sendto(message)
            found = await protocol.answer
        finally:
            transport.close()
        return found if not found.truncated else await self._by_tcp(ident, message, question.wire)

    async def _by_tcp(self, ident: int, message: bytes, question: bytes) -> Relayed:
        reader, writer = await asyncio.open_connection(self._address.host, self._address.port)
        try:
            writer.write(len(message).to_bytes(2) + message)
            size = int.from_bytes(await reader.readexactly(2))
            return dns_server.read_relayed(await reader.readexactly(size), ident, question)
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("it ended the connection before its answer") from error
        finally:
            writer.transport.abort()

    def close(self) -> None:
        """Nothing is held."""


class _Datagrams(asyncio.DatagramProtocol):
    """Waits for the datagram that answers; whatever else arrives is passed over, as it may be forged."""

    def __init__(self, ident: int, question: bytes) -> None:
        self._ident = ident
        self._question = question
        self.answer: asyncio.Future[Relayed] = asyncio.get_running_loop().create_future()

    def datagram_received(self, data: bytes, addr: object) -> None:
        with contextlib.suppress(errors.RemoteProtocolError):
            found = dns_server.read_relayed(data, self._ident, self._question)
            if not self.answer.done():
                self.answer.set_result(found)

    def error_received(self, exc: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(exc)


class HttpsServer:
    """A server asked over HTTPS (RFC 8484), by its address and under its certificate's name."""

    def __init__(self, server: DohServer, context: ssl.SSLContext, clock: Clock) -> None:
        self._endpoint = server.endpoint
        self._pool = HttpPool(
            Dialer(NoNames(), context),
            clock,
            connections_per_origin_max=limits_names.DOH_CONNECTIONS_MAX,
            idle_s=limits_names.DOH_IDLE_S,
        )

    def __str__(self) -> str:
        return f"DoH {self._endpoint.host}"

    async def ask(self, question: Question) -> Relayed:
        """See `Server.ask`."""
        message = dns_server.forward_query(
            0,
            question.wire,
            dnssec_ok=question.dnssec_ok,
            checking_disabled=question.checking_disabled,
            block_bytes=_QUERY_BLOCK_BYTES,
        )
        endpoint = self._endpoint
        head = ((b"accept", _MEDIA_TYPE), (b"content-type", _MEDIA_TYPE))
        target = endpoint.path.encode("ascii")
        try:
            response = await self._pool.request(
                HttpRequest("POST", "https", endpoint.host, endpoint.port, target, head, message),
                deadline_s=limits.FORWARD_TIMEOUT_S,
                addresses=endpoint.addresses,
            )
            body = await response.read(limits_names.DNS_MESSAGE_BYTES_MAX)
            await response.aclose()
        except errors.TransportError as error:
            raise ConnectionError(str(error)) from error
        media = field_value(tuple(response.headers), b"content-type") or b""
        if response.status != 200 or media.partition(b";")[0].strip().lower() != _MEDIA_TYPE:
            raise errors.RemoteProtocolError(f"HTTP {response.status}, no DNS message")
        return dns_server.read_relayed(body, 0, question.wire)

    def close(self) -> None:
        """Close its connections."""
        with contextlib.suppress(RuntimeError):  # a closed loop cannot wake who waits
            self._pool.close()


class _Kept(NamedTuple):
    relayed: Relayed
    got_at: float
    ttl_s: int

    def told(self, now: float, *, stale: bool = False) -> Told:
        age_s = int(now - self.got_at)
        return Told(self.relayed, limits.FORWARD_STALE_TTL_S if stale else self.ttl_s - age_s, age_s, stale)


class _Asking(NamedTuple):
    task: asyncio.Task[Relayed]
    began_at: float


class Forwarder:
    """Asks servers in turn and keeps what they say. Belongs to one event loop.

    Equal questions at the same time are asked once. A server that failed is asked last for `limits.FORWARD_BEHIND_S`.

    Args:
        servers: at least one, the best first.
        clock: says how old answers are.
    """

    def __init__(self, servers: Sequence[Server], clock: Clock) -> None:
        self._servers = list(servers)
        self._behind_until = dict.fromkeys(range(len(self._servers)), -math.inf)
        self._clock = clock
        self._kept: OrderedDict[Question, _Kept] = OrderedDict()
        self._bytes_held = 0
        self._failed_until: OrderedDict[Question, float] = OrderedDict()
        self._asking: dict[Question, _Asking] = {}

    async def ask(self, question: Question) -> Told:
        """Give the answer to a question. Cancellation is safe; who else waits for the same answer still gets it.

        Raises:
            OSError: no server has an answer, or too many questions are on their way.
        """
        now = self._clock.monotonic()
        kept = self._kept.get(question)
        if kept is not None and now < kept.got_at + kept.ttl_s:
            self._kept.move_to_end(question)
            return kept.told(now)
        spare = kept if kept is not None and self._may_stand_in(kept, now) else None
        try:
            if now < self._failed_until.get(question, -math.inf):
                raise OSError("no server answered a moment ago")
            asking = self._ask(question, now)
            if spare is not None:
                await asyncio.wait((asking.task,), timeout=asking.began_at + limits.FORWARD_PATIENCE_S - now)
                if not asking.task.done():
                    return spare.told(self._clock.monotonic(), stale=True)
            relayed = await asyncio.shield(asking.task)
        except OSError:
            if spare is not None:
                return spare.told(self._clock.monotonic(), stale=True)
            raise
        return Told(relayed, _ttl_s(relayed))

    @staticmethod
    def _may_stand_in(kept: _Kept, now: float) -> bool:
        return kept.relayed.rcode == Rcode.NOERROR and now < kept.got_at + kept.ttl_s + limits.FORWARD_STALE_S

    def _ask(self, question: Question, now: float) -> _Asking:
        asking = self._asking.get(question)
        if asking is None:
            if len(self._asking) >= limits.FORWARDS_MAX:
                raise OSError("too many questions are on their way")
            task = asyncio.get_running_loop().create_task(self._go(question), name="forward a question")
            asking = self._asking[question] = _Asking(task, now)
            task.add_done_callback(lambda done: self._done(question, done))
        return asking

    def _done(self, question: Question, task: asyncio.Task[Relayed]) -> None:
        del self._asking[question]
        now = self._clock.monotonic()
        if task.cancelled():
            return
        if task.exception() is not None:
            self._failed_until[question] = now + limits.FORWARD_FAILURE_S
            while len(self._failed_until) > limits.FORWARDS_MAX:
                self._failed_until.popitem(last=False)
            return
        self._failed_until.pop(question, None)
        self._keep(question, task.result(), now)

    def _keep(self, question: Question, relayed: Relayed, now: float) -> None:
        self._forget(question)
        ttl_s = _ttl_s(relayed)
        if ttl_s <= 0:
            return
        self._kept[question] = _Kept(relayed, now, ttl_s)
        self._bytes_held += len(relayed.message)
        while len(self._kept) > limits.FORWARD_CACHE_MAX or self._bytes_held > limits.FORWARD_CACHE_BYTES_MAX:
            self._forget(next(iter(self._kept)))

    def _forget(self, question: Question) -> None:
        gone = self._kept.pop(question, None)
        if gone is not None:
            self._bytes_held -= len(gone.relayed.message)

    async def _go(self, question: Question) -> Relayed:
        """Ask server after server, each twice as long as time is left."""
        reason: Exception = OSError("no server answered in time")
        try:
            async with asyncio.timeout(limits.FORWARD_TIMEOUT_S):
                for _ in range(2):
                    now = self._clock.monotonic()
                    behind = self._behind_until
                    for index in sorted(behind, key=lambda each: behind[each] if behind[each] > now else -math.inf):
                        try:
                            async with asyncio.timeout(limits.FORWARD_TRY_S):
                                found = await self._servers[index].ask(question)
                            if found.rcode in _FINAL:
                                self._behind_until[index] = -math.inf
                                return found
                            reason = OSError(f"RCODE {found.rcode}")
                        except (OSError, errors.RemoteProtocolError) as error:
                            reason = error
                        self._behind_until[index] = self._clock.monotonic() + limits.FORWARD_BEHIND_S
                        _log.info("upstream %s: %s", self._servers[index], str(reason) or "no answer in time")
        except TimeoutError:
            pass
        raise OSError(f"no upstream server has an answer: {reason}") from reason

    async def close(self) -> None:
        """End what is on its way and give up connections."""
        tasks = [each.task for each in self._asking.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for server in self._servers:
            server.close()


def _ttl_s(relayed: Relayed) -> int:
    """Give how long an answer is kept from the moment it came."""
    return min(relayed.ttl_s, limits.FORWARD_TTL_S_MAX if relayed.positive else limits.FORWARD_ABSENT_S_MAX)


def servers_of(
    given: Sequence[Address | DohServer], *, clock: Clock, rng: Rng, context: ssl.SSLContext | None
) -> list[Server]:
    """Make the servers of a configuration; `context` is the trust of those over HTTPS, None: the system's."""
    made: list[Server] = []
    for each in given:
        if isinstance(each, DohServer):
            trust = context or ssl.create_default_context()
            trust.set_alpn_protocols(["h2", "http/1.1"])
            made.append(cast("Server", HttpsServer(each, trust, clock)))
        else:
            made.append(cast("Server", PlainServer(each, rng)))
    return made
