"""The API gate: a device's HTTP request goes on to the upstream of its host and path, bodies streamed both ways.

Only hosts of the rules and settings are reached, at their addresses: the name a client asks for never decides where we
connect, so this is no open proxy.
"""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from stormline.appgw import api_headers, coding
from stormline.appgw.api_cache import Cache, Entry
from stormline.appgw.api_headers import Target
from stormline.appgw.identity import Signer
from stormline.appgw.port import Exchange
from stormline.appgw.upstreams import Book, Route
from stormline.appgw.upstreams import Target as Endpoint
from stormline.core import errors, limits, limits_api, limits_platform
from stormline.core.clock import Clock
from stormline.core.codes import Code
from stormline.core.errors import CallError, TransportError
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.outbound.dial import Dialer
from stormline.outbound.messages import HttpRequest, HttpResponse
from stormline.outbound.pool import HttpPool
from stormline.policy import compress, httpcache
from stormline.policy.budget import RetryBudget
from stormline.policy.resend import SAFE_METHODS, may_resend
from stormline.wire.messages import Headers

_log = logging.getLogger("stormline.appgw")

_WITHOUT_BODY = frozenset({204, 304})
_CANNOT = frozenset({502, 503, 504})
"""Answers by which an endpoint says that it cannot: another one may."""


class Sender(Protocol):
    """What this gate needs of the HTTP client; `outbound.pool.HttpPool` is one."""

    async def request(
        self,
        request: HttpRequest,
        *,
        deadline_s: float,
        body_deadline_s: float | None = None,
        connect_timeout_s: float | None = None,
        read_timeout_s: float | None = None,
        newer_than: float | None = None,
        addresses: tuple[Address, ...] | None = None,
        server_name: str | None = None,
    ) -> HttpResponse:
        """See `outbound.pool.HttpPool.request`."""
        ...


class _NoNames:
    """The resolver of a pool that is only ever given addresses."""

    async def resolve(self, host: str, port: int) -> tuple[Address, ...]:
        raise OSError(f"{host} is not resolved here")

    def doubt(self, host: str) -> None:
        """There is nothing to doubt."""


def make_pool(clock: Clock, ca: Path | None = None) -> HttpPool:
    """Make the HTTP client for upstreams: no name is ever resolved.

    Args:
        clock: time.
        ca: file of another authority that vouches for upstreams, beside the system's.
    """
    context = ssl.create_default_context()
    if ca is not None:
        context.load_verify_locations(ca)
    return HttpPool(
        Dialer(_NoNames(), context),
        clock,
        connections_max=limits_platform.UPSTREAM_CONNECTIONS_MAX,
        connections_per_origin_max=limits_platform.UPSTREAM_CONNECTIONS_PER_ORIGIN_MAX,
    )


class _Body:
    """A body that is read once, and tells whether that has begun."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self.begun = False

    def __aiter__(self) -> "_Body":
        return self

    async def __anext__(self) -> bytes:
        self.begun = True
        return await anext(self._chunks)


class _Asked(NamedTuple):
    """One request, as every try of it has it.

    Attributes:
        exchange: the call.
        target: its target.
        route: its upstream.
        headers: its own headers, cleaned.
        body: the body.
        has_key: it carries an idempotency key.
        ends_at: by when its answer must have ended, in the loop's time.
    """

    exchange: Exchange
    target: Target
    route: Route
    headers: Headers
    body: bytes | _Body | None
    has_key: bool
    ends_at: float

    @property
    def replayable(self) -> bool:
        """Its body can be sent again."""
        return not isinstance(self.body, _Body) or not self.body.begun


class _Answer(NamedTuple):
    """An answer that has begun, its headers as the device gets them, and who gave it."""

    response: HttpResponse
    headers: Headers
    endpoint: Endpoint


class ApiGate:
    """Gate `api`. The method is HTTP's, the target an absolute URL; header values are the Latin-1 of their bytes.

    The upstream gets the request as the client made it, but for: hop-by-hop fields, which end here; `Host`, which is
    the host of the URL; `Forwarded`, `X-Forwarded-*`, `Via` and `Stormline-*`, which are ours to set
    (`appgw.identity` says whose call it is, `Stormline-Deadline-Ms` how long the caller still waits). The answer comes
    back as it is, without hop-by-hop fields; its body is passed on piece by piece, each held until the device's
    connection has taken the last. It may come from the cache (`policy.httpcache`) or be compressed
    (`policy.compress`).

    What fails before it was handed to an endpoint's socket is sent to another endpoint, whatever it is; what fails
    later, or is answered with 502, 503 or 504, only where it is a read or carries an idempotency key, and its body is
    still whole here. Retries come out of a budget for each upstream (`policy.budget`). An endpoint that fails again and
    again is left alone for a while (`policy.breaker`).

    | what happens                                   | code             | maybe delivered             |
    |------------------------------------------------|------------------|-----------------------------|
    | target, method or headers cannot be sent       | CALL_BAD_REQUEST | no                          |
    | no upstream for the host, path and app         | CALL_NOT_FOUND   | no                          |
    | all endpoints are left alone                   | CALL_UNAVAILABLE | as the tries before know    |
    | too many requests wait for the upstream        | CALL_UNAVAILABLE | as the tries before know    |
    | upstream down, or its HTTP broken              | CALL_UPSTREAM    | as the connections know     |
    | no answer in time                              | CALL_DEADLINE    | as the connections know     |

    The last two also end an answer in the middle of its body.

    Args:
        sender: the HTTP client.
        book: the upstreams.
        clock: the wall clock, for dates of kept answers.
        signer: signs identities; None: they are passed unsigned.
        cache: kept answers.
    """

    name = "api"

    def __init__(
        self, sender: Sender, book: Book, *, clock: Clock, signer: Signer | None = None, cache: Cache | None = None
    ) -> None:
        self._sender = sender
        self._book = book
        self._clock = clock
        self._signer = signer
        self._cache = Cache() if cache is None else cache
        self._budget = RetryBudget()
        self._coding = 0  # bodies being compressed
        self._shelf = coding.Shelf()

    async def handle(self, exchange: Exchange) -> None:
        """See `appgw.port.Gate.handle`."""
        target = api_headers.parse(exchange.target)
        route = self._book.find(target.authority, target.path, exchange.identity.app)
        if route is None:
            raise CallError(Code.CALL_NOT_FOUND, f"no upstream for {target.authority}{target.path[:80]}")
        whole = exchange.whole_body()
        headers = api_headers.cleaned(exchange.headers)
        ends_at = exchange.body_deadline
        if route.rule.timeout_s is not None:
            ends_at = min(ends_at, _now() + route.rule.timeout_s)
        asked = _Asked(
            exchange=exchange,
            target=target,
            route=route,
            headers=headers,
            body=_Body(exchange.body()) if whole is None else whole or None,
            has_key=any(name.lower() == "idempotency-key" and value for name, value in headers),
            ends_at=ends_at,
        )
        try:
            if route.rule.cache and httpcache.may_use(exchange.method, fields := api_headers.lowered(headers)):
                await self._through_cache(asked, fields)
                return
            answer = await self._ask(asked)
            if httpcache.invalidates(exchange.method, answer.response.status):
                self._cache.written(exchange.identity.app, _key(asked))
            await self._pass_on(asked, answer)
        except TransportError as error:
            raise _failure(target.authority, error) from error
        except errors.LocalProtocolError as error:
            _log.info("request for %s cannot be sent: %s", target.authority, error)
            raise CallError(Code.CALL_BAD_REQUEST, str(error)) from error

    # -- asking ------------------------------------------------------------------------------------------------------

    async def _ask(self, asked: _Asked) -> _Answer:
        """Ask endpoints until one answers, by the two-phase rule; the answer must be passed on or closed.

        Raises:
            TransportError: the last failure; `maybe_delivered` counts those before too.
            CallError: all endpoints are left alone, or the deadline has passed.
            LocalProtocolError: the request cannot be sent.
        """
        route, method = asked.route, asked.exchange.method
        retries, tried, delivered = route.rule.retries, set[Endpoint](), False
        endpoint = route.choose(now := _now())
        if endpoint is None:
            raise _left_alone(asked, route.back_s(now))
        self._budget.observe_request(route.rule.name, now)
        while True:
            newer_than = now if endpoint in tried else None
            tried.add(endpoint)
            try:
                answer = await self._ask_one(asked, endpoint, newer_than)
            except TransportError as error:
                again = may_resend(method, maybe_delivered=error.maybe_delivered, has_key=asked.has_key)
                broke = isinstance(error, errors.WriteError | errors.ReadError)
                other = self._other(asked, tried, same=broke) if again and retries else None
                delivered = error.maybe_delivered = delivered or error.maybe_delivered
                if other is None:
                    raise
            else:
                if answer.response.status not in _CANNOT or not (asked.has_key or method in SAFE_METHODS):
                    return answer
                other = self._other(asked, tried) if retries else None
                if other is None:
                    return answer
                delivered = True
                await answer.response.aclose()
            endpoint, now = other, _now()
            retries -= 1

    def _other(self, asked: _Asked, tried: set[Endpoint], *, same: bool = False) -> Endpoint | None:
        """Give an endpoint for a further try, and take it out of the budget; None where there is to be none.

        Args:
            asked: the request.
            tried: where it was.
            same: where there is no other, the same one will do, over another connection.
        """
        now, route = _now(), asked.route
        if not asked.replayable or now >= min(asked.exchange.deadline, asked.ends_at):
            return None
        endpoint = route.choose(now, () if same and len(route.targets) == 1 else tried)
        if endpoint is not None and not self._budget.plan(route.rule.name, now).allowed:
            endpoint.breaker.leave()
            return None
        return endpoint

    async def _ask_one(self, asked: _Asked, endpoint: Endpoint, newer_than: float | None) -> _Answer:
        """Ask one endpoint, and tell its breaker how that went; see `HttpPool.request` for `newer_than`."""
        rule, exchange, place, began = asked.route.rule, asked.exchange, endpoint.place, _now()
        left_s = min(exchange.deadline, asked.ends_at) - began
        try:
            signed = "" if self._signer is None else self._signer.sign(exchange.identity, rule.name)
            response = await self._sender.request(
                HttpRequest(
                    method=exchange.method,
                    scheme=place.scheme,
                    host=asked.target.host,
                    port=place.address.port,
                    target=asked.target.target,
                    headers=api_headers.request_headers(exchange, asked.target, asked.headers, signed, left_s),
                    body=asked.body,
                ),
                deadline_s=left_s,
                body_deadline_s=max(left_s, asked.ends_at - began),
                connect_timeout_s=rule.connect_timeout_s,
                read_timeout_s=rule.first_byte_timeout_s,
                newer_than=newer_than,
                addresses=(place.address,),
                server_name=asked.target.host if place.scheme == "https" else None,
            )
        except TransportError as error:
            if _is_its_fault(error, began, began + left_s):
                endpoint.breaker.observe(False, _now())
            else:
                endpoint.breaker.leave()
            raise
        except BaseException:
            endpoint.breaker.leave()  # it was given up, or cannot be sent
            raise
        endpoint.breaker.observe(response.status not in _CANNOT, _now())
        try:
            headers = api_headers.response_headers(response)
        except CallError:
            await response.aclose()
            raise
        if not response.source.complete:
            # A stream of events may be silent for as long as it likes.
            events = _field(headers, "content-type").startswith("text/event-stream")
            response.source.patience(limits_api.UPSTREAM_TIMEOUT_MAX_S if events else rule.read_timeout_s)
        return _Answer(response, headers, endpoint)

    # -- from the cache ------------------------------------------------------------------------------------------------

    async def _through_cache(self, asked: _Asked, fields: httpcache.Fields) -> None:
        """Answer a GET from what is kept, else keep what comes."""
        app, key, asked_at, began = asked.exchange.identity.app, _key(asked), _now(), self._cache.moment()
        entry, in_error = self._cache.find(app, key, fields), False
        conditions: httpcache.Fields = ()
        if entry is not None:
            use = httpcache.use(entry.kept, fields, asked_at)
            if use.fresh:
                await self._give(asked, fields, entry, "hit")
                return
            in_error, conditions = use.in_error, httpcache.conditions(entry.kept)
        sent = asked
        if conditions:
            own = {name for name, _ in httpcache.unconditional(fields)}
            sent = asked._replace(headers=(*(each for each in asked.headers if each[0].lower() in own), *conditions))
        try:
            answer = await self._ask(sent)
        except (TransportError, CallError) as error:
            ours = isinstance(error, CallError) and error.code == Code.CALL_BAD_REQUEST
            if entry is None or not in_error or ours:
                raise
            await self._give(asked, fields, entry, "hit; detail=stale-if-error")
            return
        response = answer.response
        if entry is not None and in_error and httpcache.is_error(response.status):
            await response.aclose()
            await self._give(asked, fields, entry, f"hit; fwd=stale; fwd-status={response.status}")
            return
        headers = api_headers.lowered(answer.headers)
        clocks = {"asked_at": asked_at, "now": _now(), "wall_s": self._clock.wall()}
        if entry is not None and conditions and response.status == 304:
            await response.aclose()
            kept = httpcache.freshened(entry.kept, fields, headers, **clocks)
            self._cache.drop(app, key)
            if kept is not None:
                entry = Entry(kept, entry.body)
                self._cache.put(app, key, fields, entry, began)
            await self._give(asked, fields, entry, "hit; fwd=stale; fwd-status=304")
            return
        kept = httpcache.keep(fields, response.status, headers, **clocks)
        if kept is None:
            await self._pass_on(asked, answer)
            return
        await self._pass_on(asked, answer, lambda body: self._cache.put(app, key, fields, Entry(kept, body), began))

    async def _give(self, asked: _Asked, fields: httpcache.Fields, entry: Entry, how: str) -> None:
        """Answer with what is kept (RFC 9111 section 5.1, RFC 9211)."""
        kept = entry.kept
        extra = (("age", str(int(kept.age_s(_now())))), ("cache-status", f"stormline; {how}"))
        headers = (*(field for field in kept.headers if field[0] not in ("age", "cache-status")), *extra)
        if httpcache.is_unchanged(kept, fields):
            await asked.exchange.reply(304, tuple(field for field in headers if field[0] != "content-length"))
            return
        chosen = self._choose(asked, kept.status, headers, len(entry.body))
        await self._reply_whole(asked, kept.status, headers, entry.body, chosen)

    # -- to the device -----------------------------------------------------------------------------------------------

    async def _pass_on(self, asked: _Asked, answer: _Answer, keep: Callable[[bytes], None] | None = None) -> None:
        """Give the device an answer; `keep` is told its body where that came whole and is not too large."""
        response, headers = answer.response, answer.headers
        try:
            length = api_headers.length_of(headers)
            if asked.exchange.method == "HEAD" or response.status in _WITHOUT_BODY:
                length = 0
            chosen = self._choose(asked, response.status, headers, length)
            if length is not None and length <= limits.CHUNK_BYTES_MAX:
                # Whole in one message. Also where it should have no body: what comes all the same is an error of the
                # upstream.
                body = await response.read(length)
                if keep is not None:
                    keep(body)
                await self._reply_whole(asked, response.status, headers, body, chosen)
                return
            await self._stream(asked, response, headers, length, chosen, keep)
        except errors.TransportError as error:
            if not isinstance(error, errors.DeadlineExceeded):
                answer.endpoint.breaker.observe(False, _now())
            raise
        finally:
            await response.aclose()

    async def _reply_whole(
        self, asked: _Asked, status: int, headers: Headers, body: bytes, chosen: compress.Coding | None
    ) -> None:
        if chosen is not None:
            body, headers = await coding.whole(chosen, body, self._shelf), coding.relabelled(headers, chosen)
        await asked.exchange.reply(status, headers, body)

    async def _stream(
        self,
        asked: _Asked,
        response: HttpResponse,
        headers: Headers,
        length: int | None,
        chosen: compress.Coding | None,
        keep: Callable[[bytes], None] | None,
    ) -> None:
        exchange = asked.exchange
        held = None if keep is None or not _says_its_end(response, length) else bytearray()
        coder = None
        if chosen is not None:
            coder, headers = coding.Coder(chosen, self._shelf), coding.relabelled(headers, chosen)
            self._coding += 1
        try:
            await exchange.reply(response.status, headers, more=True)
            async for chunk in response.aiter_raw():
                if held is not None:
                    held += chunk
                    if len(held) > limits_api.CACHE_ENTRY_BYTES_MAX:
                        held = None
                if coder is None:
                    await exchange.send(chunk)
                elif coded := await coder.feed(chunk, flush=length is None):
                    await exchange.send(coded)
            if coder is not None:
                await exchange.send(coder.finish())
        finally:
            if coder is not None:
                self._coding -= 1
        if held is not None and keep is not None:
            keep(bytes(held))
        await exchange.finish()

    def _choose(self, asked: _Asked, status: int, headers: Headers, length: int | None) -> compress.Coding | None:
        if length is not None and length < limits_api.COMPRESS_BYTES_MIN:
            return None
        if not asked.route.rule.compress or self._coding >= limits_api.COMPRESS_STREAMS_MAX:
            return None
        accept = _field(asked.headers, "accept-encoding")
        if not accept:
            return None
        network = compress.quality(asked.exchange.network, lambda name: _field(asked.headers, name))
        return compress.choose(
            network, accept=accept, status=status, length=length, header=lambda name: _field(headers, name)
        )


def _now() -> float:
    return asyncio.get_running_loop().time()


def _key(asked: _Asked) -> tuple[str, str, bytes]:
    return (asked.route.rule.name, asked.target.authority, asked.target.target)


def _field(headers: Headers, name: str) -> str:
    """Give a field's value, of repeated lines joined by commas; empty where there is none."""
    found = [value for each, value in headers if each.lower() == name]
    return ", ".join(found)


def _says_its_end(response: HttpResponse, length: int | None) -> bool:
    """Say whether a whole body can be told from one that was cut: not where the connection's end is its own."""
    if length is not None or response.http_version not in ("HTTP/1.1", "HTTP/1.0"):
        return True
    return any(name.lower() == b"transfer-encoding" for name, _ in response.headers)


def _is_its_fault(error: TransportError, began: float, caller_until: float) -> bool:
    """Say whether a failure speaks against the endpoint: not where it was not asked, or its caller had little time."""
    if isinstance(error, errors.QueueFull) or error.phase is Phase.QUEUED:
        return False
    now = _now()
    if isinstance(error, errors.DeadlineExceeded) and now >= caller_until:
        return now - began >= limits_api.BREAKER_CALLER_S
    return True


def _left_alone(asked: _Asked, back_s: float) -> CallError:
    return CallError(
        Code.CALL_UNAVAILABLE,
        f"all endpoints of {asked.target.authority} have failed lately",
        retry_after_s=max(back_s, limits_platform.CALL_RETRY_AFTER_S),
    )


def _failure(host: str, error: TransportError) -> CallError:
    # The reason goes to the device: it names the host it asked for, never the addresses behind us.
    _log.info("upstream of %s: %s", host, error)
    if isinstance(error, errors.DeadlineExceeded):
        return CallError(Code.CALL_DEADLINE, f"{host}: no answer in time", maybe_delivered=error.maybe_delivered)
    retry_after_s = None if error.maybe_delivered else limits_platform.CALL_RETRY_AFTER_S
    if isinstance(error, errors.QueueFull):
        return CallError(
            Code.CALL_UNAVAILABLE,
            f"{host}: too many requests wait",
            retry_after_s=retry_after_s,
            maybe_delivered=error.maybe_delivered,
        )
    what = {
        errors.ConnectError: "cannot be reached",
        errors.TlsError: "did not show the right certificate",
        errors.ProtocolViolation: "answered with broken HTTP",
        errors.DecodeError: "ended its answer too early",
    }.get(type(error), "broke the connection")
    return CallError(
        Code.CALL_UPSTREAM,
        f"the upstream of {host} {what}",
        retry_after_s=retry_after_s,
        maybe_delivered=error.maybe_delivered,
    )
