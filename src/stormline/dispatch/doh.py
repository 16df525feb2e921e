"""DNS over HTTPS (RFC 8484), as a plain ASGI application: from the rules, else from upstream servers, else refused.

    GET  /dns-query?dns=BASE64URL        -> application/dns-message
    POST /dns-query (application/dns-message) -> the same
    HEAD as GET, without the body

`Cache-Control` gives the least TTL of the answer. What is no DNS question is an HTTP error, what is a wrong one is a
DNS answer that says so.
"""

import base64
import binascii
import functools
import ipaddress
import ssl
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.core.clock import Clock, Rng
from stormline.core.values import Address
from stormline.dispatch import upstream
from stormline.dispatch.planner import Standing
from stormline.dispatch.rules import RuleSet
from stormline.dispatch.zone import Answer, ClientNetwork, Order, Resolver, Zone
from stormline.outbound.doh_server import DohServer
from stormline.web import bodies
from stormline.wire import dns, dns_server
from stormline.wire.dns import Rcode, RecordType
from stormline.wire.dns_server import EMPTY, Query, Record, Sections

PATH: Final = "/dns-query"
_MEDIA: Final = b"application/dns-message"
_ID_BYTES: Final = 2
_TYPE: Final = (b"content-type", _MEDIA)
_UNKEPT: Final = b"no-store"
_NO_STORE: Final = (b"cache-control", _UNKEPT)
_GET_CHARS_MAX: Final = len("dns=") + (limits.DOH_QUESTION_BYTES_MAX * 4 + 2) // 3


@dataclass(frozen=True, kw_only=True)
class DohConfig:
    """How DNS over HTTPS is served.

    Attributes:
        upstream: who is asked about names the rules do not know: `Address` by UDP and TCP, `DohServer` over HTTPS;
            empty: those names are refused.
        upstream_trust: TLS trust for `DohServer`; None: the system's.
        resolver: how this server is found (RFC 9462); without addresses or port it gets those it listens on.
        ohttp: hosts that take oblivious HTTP (RFC 9540).
        ohttp_only: those of them that take nothing else.

    Raises:
        ConfigError: too many servers, one that is a name, or a host of `ohttp_only` that is not in `ohttp`.
    """

    upstream: tuple[Address | DohServer, ...] = ()
    upstream_trust: ssl.SSLContext | None = None
    resolver: Resolver = field(default_factory=Resolver)
    ohttp: frozenset[str] = frozenset()
    ohttp_only: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Check it."""
        if len(self.upstream) > limits.FORWARD_SERVERS_MAX:
            raise errors.ConfigError(f"dispatch: at most {limits.FORWARD_SERVERS_MAX} upstream servers for DNS")
        for each in self.upstream:
            if isinstance(each, Address) and not (each.is_ip and each.port):
                raise errors.ConfigError(f"dispatch: upstream server {each}: expected an IP address and a port")
        if self.ohttp_only - self.ohttp:
            raise errors.ConfigError("dispatch: ohttp_only names a host that is not in ohttp")


class _Made(NamedTuple):
    """An answer from the rules, encoded.

    Attributes:
        answer: what it was made from.
        content: its records.
    """

    answer: Answer
    content: Sections


class _Reply(NamedTuple):
    """An answer on its way; `cache_control` is what HTTP's caches are told."""

    message: bytes
    cache_control: bytes = _UNKEPT


class _Refused(Exception):
    """An HTTP error."""

    def __init__(self, status: int, reason: str, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(reason)
        self.status = status
        self.headers = headers


class Doh:
    """The application. One instance serves any number of listeners of one event loop.

    Args:
        config: what to serve.
        rules: gives the rules in force.
        clock: age of forwarded answers.
        rng: ids of forwarded questions.
        standing: which endpoints may be handed out.
        order: which is best for a client.
    """

    def __init__(
        self,
        config: DohConfig,
        rules: Callable[[], RuleSet],
        *,
        clock: Clock,
        rng: Rng,
        standing: Standing | None = None,
        order: Order | None = None,
    ) -> None:
        self._rules = rules
        self._standing = standing
        self._order = order
        self._zone = Zone(
            rules=rules(),
            resolver=config.resolver,
            ohttp=config.ohttp,
            ohttp_only=config.ohttp_only,
            standing=standing,
            order=order if self._places() else None,
        )
        self._revision = standing.revision if standing is not None else 0
        self._replies: OrderedDict[tuple[bytes, str], _Reply] = OrderedDict()
        self._forwarder: upstream.Forwarder | None = None
        if config.upstream:
            servers = upstream.servers_of(config.upstream, clock=clock, rng=rng, context=config.upstream_trust)
            self._forwarder = upstream.Forwarder(servers, clock)
        self._ra = dns_server.RA if config.upstream else 0
        self._bodies = bodies.Reader(limits.REQUEST_BODY_TIMEOUT_S)

    def listens(self, address: Address) -> None:
        """Say where it is reached, for those who ask for that (RFC 9462), as far as the configuration does not."""
        given = self._zone.resolver
        if given.name and not given.addresses and not ipaddress.ip_address(address.host).is_unspecified:
            self._zone = replace(self._zone, resolver=replace(given, addresses=(address.host,), port=address.port))
            self._replies.clear()

    def in_front(self, app: ASGIApp) -> ASGIApp:
        """Answer `PATH`, and let `app` answer the rest."""

        def both(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
            return (self if scope["type"] == "http" and scope["path"] == PATH else app)(scope, receive, send)

        return both

    def stop_reading(self) -> None:
        """End the wait for bodies that are still coming."""
        self._bodies.stop()

    async def close(self) -> None:
        """Give up what is asked of upstream servers."""
        self._bodies.stop()
        if self._forwarder is not None:
            await self._forwarder.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            data = await self._question(scope, receive)
            reply = self._kept(data, scope) or await self._fresh(data, scope)
        except _Refused as refused:
            body = f"{refused}\n".encode()
            await _send(
                send, scope, refused.status, body, [(b"content-type", b"text/plain"), _NO_STORE, *refused.headers]
            )
            return
        await _send(send, scope, 200, reply.message, [_TYPE, (b"cache-control", reply.cache_control)])

    # -- HTTP ---------------------------------------------------------------------------------------------------------
    async def _question(self, scope: Scope, receive: Receive) -> bytes:
        method = scope["method"]
        if method == "POST":
            media = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
            if media != _MEDIA and media.partition(b";")[0].strip().lower() != _MEDIA:
                raise _Refused(415, "expected a body of application/dns-message", (b"accept", _MEDIA))
            try:
                return await self._bodies.read(scope, receive, limits.DOH_QUESTION_BYTES_MAX)
            except bodies.Gone:
                raise _Refused(400, "the peer went away") from None
            except errors.RequestRefused as error:
                if error.code == "too-large":
                    raise _Refused(413, f"a question has at most {limits.DOH_QUESTION_BYTES_MAX} bytes") from None
                raise _Refused(408, "the question did not come in time") from None
        if method not in ("GET", "HEAD"):
            raise _Refused(405, "expected GET, HEAD or POST", (b"allow", b"GET, HEAD, POST"))
        query: bytes = scope["query_string"]
        if len(query) > _GET_CHARS_MAX:
            raise _Refused(414, f"a question has at most {limits.DOH_QUESTION_BYTES_MAX} bytes")
        values = [each[4:] for each in query.split(b"&") if each.startswith(b"dns=")]
        if len(values) != 1:
            raise _Refused(400, "expected ?dns= with a question in base64url, once")
        try:
            # Padding is not used (RFC 8484 section 4.1) but does no harm; what is not of the alphabet does.
            text = values[0].replace(b"%3D", b"").rstrip(b"=")
            if b"+" in text or b"/" in text:
                raise ValueError("of another alphabet")
            return base64.b64decode(text + b"=" * (-len(text) % 4), b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise _Refused(400, "dns: expected base64url") from None

    # -- answers that were given before ------------------------------------------------------------------------------
    def _kept(self, data: bytes, scope: Scope) -> _Reply | None:
        """Give again what was answered from the rules that hold, to the same bytes but for their id."""
        rules = self._rules()
        revision = self._standing.revision if self._standing is not None else 0
        if rules is not self._zone.rules or revision != self._revision:
            self._zone = replace(self._zone, rules=rules, order=self._order if self._places() else None)
            self._revision = revision
            self._replies.clear()
        key = (data[_ID_BYTES:], self._network_of(scope))
        reply = self._replies.get(key)
        if reply is None:
            return None
        self._replies.move_to_end(key)
        return _Reply(data[:_ID_BYTES] + reply.message[_ID_BYTES:], reply.cache_control)

    async def _fresh(self, data: bytes, scope: Scope) -> _Reply:
        try:
            query = dns_server.read_query(data)
        except errors.RemoteProtocolError as error:
            raise _Refused(400, str(error)) from None
        network = self._network_of(scope)
        reply = self._known(query, network)
        if reply is None:
            return await self._forward(query)
        # What caches may keep comes from the rules. Names nobody knows are without number: their refusals are not kept.
        if reply.cache_control != _UNKEPT and len(data) <= limits.DOH_MADE_QUESTION_BYTES_MAX:
            self._replies[data[_ID_BYTES:], network] = reply
            while len(self._replies) > limits.DOH_MADE_MAX:
                self._replies.popitem(last=False)
        return reply

    # -- the rules ----------------------------------------------------------------------------------------------------
    def _known(self, query: Query, network: str) -> _Reply | None:
        """Answer what needs nobody else; None: upstream servers are to be asked."""
        if query.fault:
            return _Reply(dns_server.answer(query, query.fault, flags=self._ra))
        place, bits = self._place(query, network)
        made = None if query.name is None else self._from_rules(query.name, query.kind, place)
        if made is None or (made.answer.elsewhere and self._forwarder is not None):
            if self._forwarder is not None:
                return None
            return _Reply(dns_server.answer(query, Rcode.REFUSED, extended=dns_server.NOT_AUTHORITATIVE))
        if made.answer.alias and self._forwarder is not None:
            return None
        flags = dns_server.AA | self._ra
        message = dns_server.answer(query, made.answer.rcode, made.content, flags=flags, scope_bits=bits)
        return _Reply(message, _max_age(made.answer.ttl_s, private=self._places() and not bits))

    def _places(self) -> bool:
        """Say whether answers depend on where the client is; where they do not they are everybody's."""
        rules = self._rules()
        return self._order is not None and bool(rules.regions or rules.networks or rules.operators)

    def _network_of(self, scope: Scope) -> str:
        """Give the network from which a question comes, empty where answers do not depend on it."""
        client = scope.get("client")
        return _network(client[0]) if client and self._places() else ""

    def _place(self, query: Query, network: str) -> tuple[ClientNetwork, int]:
        """Say where the client is, and for how many bits of the subnet it told the answer holds."""
        subnet = query.edns.subnet if query.edns is not None and self._places() else None
        return (ClientNetwork(network), 0) if subnet is None else (ClientNetwork(subnet.network), subnet.scope_bits)

    def _from_rules(self, name: str, kind: int, place: ClientNetwork) -> _Made | None:
        """Encode what the rules say of a name, with what they say of the name it leads to; None: nothing."""
        answer = self._zone.answer(name, kind, place)
        if answer is None:
            return None
        answers, target = answer.answers, answer.alias
        if target and (more := self._zone.answer(target, kind, place)) is not None and not more.alias:
            answers += tuple(each._replace(owner=target) for each in more.answers)
            answer = answer._replace(ttl_s=min(answer.ttl_s, more.ttl_s), alias="")
        return _Made(answer, dns_server.sections(answers, answer.authorities))

    # -- other servers ------------------------------------------------------------------------------------------------
    async def _forward(self, query: Query) -> _Reply:
        assert self._forwarder is not None  # noqa: S101  see `_known`
        made = None if query.name is None else self._from_rules(query.name, query.kind, ClientNetwork())
        try:
            if made is not None and made.answer.alias:
                return await self._aliased(query, made.answer)
            question = upstream.Question(
                query.question[:-4].lower() + query.question[-4:],
                query.edns is not None and query.edns.dnssec_ok,
                bool(query.flags & dns_server.CD),
            )
            told = await self._forwarder.ask(question)
        except OSError:
            failed = dns_server.answer(
                query, Rcode.SERVFAIL, EMPTY, flags=self._ra, extended=dns_server.NO_REACHABLE_AUTHORITY
            )
            return _Reply(failed)
        relayed = told.relayed
        # No record outlives the whole, above all not the authority of a "no" (RFC 2308 section 5).
        content = relayed.aged(query.question, 0 if told.stale else told.age_s, ttl_s_max=told.left_s)
        extended = dns_server.STALE if told.stale else None
        message = dns_server.answer(query, relayed.rcode, content, flags=self._ra, extended=extended)
        return _Reply(message, _max_age(told.left_s))

    async def _aliased(self, query: Query, answer: Answer) -> _Reply:
        """Answer with another name and the addresses upstream servers have for it."""
        assert self._forwarder is not None  # noqa: S101  see `_known`
        kind = RecordType(query.kind)
        question = dns.question(answer.alias, kind)
        told = await self._forwarder.ask(upstream.Question(question[dns_server.HEADER_BYTES :]))
        try:
            found = dns.parse_reply(told.relayed.message, answer.alias, kind)
        except errors.RemoteProtocolError as error:
            raise OSError(str(error)) from error
        ttl_s = min(answer.ttl_s, told.left_s)
        more = tuple(Record(kind, ttl_s, ipaddress.ip_address(each).packed, answer.alias) for each in found.addresses)
        content = dns_server.sections((*answer.answers, *more))
        extended = dns_server.STALE if told.stale else None
        message = dns_server.answer(query, found.rcode, content, flags=self._ra, extended=extended)
        return _Reply(message, _max_age(ttl_s))


@functools.lru_cache(maxsize=limits.ENROL_ADDRESSES_MAX)
def _network(host: str) -> str:
    """Give the network of a peer's address that is looked at."""
    try:
        address: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    bits = limits.ECS_V4_BITS if address.version == 4 else limits.ECS_V6_BITS
    return str(ipaddress.ip_network((address, bits), strict=False))


def _max_age(ttl_s: int, *, private: bool = False) -> bytes:
    return b"%smax-age=%d" % (b"private, " if private else b"", ttl_s)


async def _send(send: Send, scope: Scope, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
