"""The gateway of a relay: opens sealed requests, fetches the origin over verified TLS, seals its answers (RFC 9458).

    POST message/ohttp-req            -> message/ohttp-res
    POST message/ohttp-chunked-req    -> message/ohttp-chunked-res
    GET                               -> application/ohttp-keys

Errors before a request is open are plain: 4xx with a problem (RFC 9457), and a client whose key is not known fetches
the keys again. Whatever happens behind that is told inside a sealed answer, so that the relay learns nothing of it;
where the answer is the gateway's own and not the origin's, its `Proxy-Status` (RFC 9209) says so, why, and whether the
origin may have the request.
"""

import asyncio
import json
import logging
import types
from collections.abc import AsyncIterator, Coroutine, Generator
from email.utils import formatdate
from typing import Any, Final, Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from stormline.core import errors, limits_relay
from stormline.core.clock import Clock, Rng
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.outbound.held import Follower, Unfollowed
from stormline.outbound.messages import HttpRequest, HttpResponse
from stormline.relay.keys import Keys
from stormline.relay.replays import Replay, Replays
from stormline.relay.targets import Refused, Target, Targets, reachable
from stormline.wire import bhttp, ohttp

_log = logging.getLogger("stormline.relay")
T = TypeVar("T")

_NO_STORE: Final = (b"cache-control", b"no-store")
_NOT_PASSED: Final = bhttp.CONNECTION_FIELDS | {b"host", b"expect", b"forwarded", b"via"}
_NOT_PASSED_BACK: Final = bhttp.CONNECTION_FIELDS | {b"proxy-status"}
"""Whose answer one is must be told by us alone."""
_FAILED: Final = (
    (errors.QueueFull, 503, "connection_limit_reached"),
    (errors.ResolveError, 502, "dns_error"),
    (errors.ConnectError, 502, "destination_unavailable"),
    (errors.TlsError, 502, "tls_certificate_error"),
    (errors.DeadlineExceeded, 504, "http_response_timeout"),
    (errors.ProtocolViolation, 502, "http_protocol_error"),
)


class Sender(Protocol):
    """What a gateway needs of the HTTP client; `outbound.pool.HttpPool` is one."""

    async def request(
        self,
        request: HttpRequest,
        *,
        deadline_s: float,
        body_deadline_s: float | None = None,
        connect_timeout_s: float | None = None,
        addresses: tuple[Address, ...] | None = None,
        server_name: str | None = None,
        follower: Follower | None = None,
    ) -> HttpResponse:
        """See `outbound.pool.HttpPool.request`."""
        ...


class Names(Protocol):
    """Where origins are; `net.resolve.Resolver` is one."""

    async def resolve(self, host: str, port: int) -> tuple[Address, ...]:
        """See `net.resolve.Resolver.resolve`."""
        ...


class _Outside(Exception):
    """An error that the relay sees: the request could not be opened."""

    def __init__(self, status: int, reason: str, problem: str = "about:blank") -> None:
        super().__init__(reason)
        self.status = status
        self.problem = problem


class Gateway:
    """The ASGI application. Any number of requests at once; belongs to one event loop.

    Args:
        keys: its keys.
        targets: where it may fetch from.
        sender: fetches.
        names: finds origins that have no address in the settings.
        clock: time of replays.
        rng: nonces of answers.
        replays: requests seen before.
    """

    def __init__(
        self,
        keys: Keys,
        targets: Targets,
        sender: Sender,
        names: Names,
        *,
        clock: Clock,
        rng: Rng,
        replays: Replays | None = None,
    ) -> None:
        self.use(keys)
        self._targets = targets
        self._sender = sender
        self._names = names
        self._clock = clock
        self._rng = rng
        self._replays = Replays() if replays is None else replays

    def use(self, keys: Keys) -> None:
        """Open and offer with these keys from now on."""
        self._keys = keys.by_id
        self._listed = keys.listed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            if scope["method"] == "GET":
                await _whole(send, 200, ohttp.KEYS_TYPE, self._listed, (b"cache-control", b"max-age=3600"))
                return
            if scope["method"] != "POST":
                raise _Outside(405, "expected POST, or GET for the keys")
            media = _media(scope)
            if media == ohttp.REQUEST_TYPE:
                await self._exchange_whole(receive, send)
            elif media == ohttp.CHUNKED_REQUEST_TYPE:
                await self._exchange_chunked(receive, send)
            else:
                raise _Outside(415, f"expected {ohttp.REQUEST_TYPE} or {ohttp.CHUNKED_REQUEST_TYPE}")
        except _Outside as refused:
            _log.info("a sealed request was refused: %d %s", refused.status, refused)
            problem = {"type": refused.problem, "title": str(refused), "status": refused.status}
            await _whole(send, refused.status, "application/problem+json", json.dumps(problem).encode())

    # -- whole messages -----------------------------------------------------------------------------------------------
    async def _exchange_whole(self, receive: Receive, send: Send) -> None:
        data = b""
        try:
            async with asyncio.timeout(limits_relay.RELAY_HEAD_S):
                last = False
                while not last:
                    piece, last = await _piece(receive)
                    data += piece
                    if len(data) > limits_relay.RELAY_REQUEST_BYTES_MAX:
                        raise _Outside(413, f"a request has at most {limits_relay.RELAY_REQUEST_BYTES_MAX} bytes")
        except TimeoutError:
            raise _Outside(408, "the request did not come in time") from None
        try:
            content, key = ohttp.open_request(self._keys, data)
        except errors.StormlineError as error:
            raise _unopened(error) from error
        response = await self._answer_whole(content, key)
        try:
            answer = bhttp.encode_response(response)
        except ValueError:
            answer = bhttp.encode_response(_own(502, "http_protocol_error", maybe_delivered=True))
        sealed = ohttp.seal_response(key, answer, nonce=self._rng.token_bytes(ohttp.NONCE_BYTES))
        await _whole(send, 200, ohttp.RESPONSE_TYPE, sealed, _NO_STORE)

    async def _answer_whole(self, content: bytes, key: ohttp.ResponseKey) -> bhttp.Response:
        try:
            request = bhttp.decode_request(content)
        except errors.RemoteProtocolError as error:
            return _own(400, "http_request_error", str(error))
        head = bhttp.RequestHead(*request[:5])
        try:
            response = await self._fetch(head, request.content or None, key.enc)
            try:
                body = await response.read(limits_relay.RELAY_RESPONSE_BYTES_MAX)
            finally:
                await response.aclose()
        except _Inside as refused:
            return refused.response
        except errors.TransportError as error:
            return _failed(error)
        return bhttp.Response(response.status, _passed_back(response), body)

    # -- chunks -------------------------------------------------------------------------------------------------------
    async def _exchange_chunked(self, receive: Receive, send: Send) -> None:
        reader = _Reader(ohttp.RequestOpener(self._keys), receive)
        try:
            head = await _in_time(reader.head(), limits_relay.RELAY_HEAD_S)
        except TimeoutError:
            raise _Outside(408, "the head of the request did not come in time") from None
        except errors.StormlineError as error:
            raise _unopened(error) from error
        key = reader.key
        sealer = ohttp.ResponseSealer(key, nonce=self._rng.token_bytes(ohttp.NONCE_BYTES))
        try:
            if head is None:
                raise _Inside(_own(400, "http_request_error", "no request"))
            response = await self._fetch(head, reader.body(), key.enc)
        except _Inside as refused:
            await _small(send, sealer, refused.response)
        except errors.TransportError as error:
            await _small(send, sealer, _failed(error))
        else:
            try:
                await _pass_on(send, sealer, response)
            finally:
                await response.aclose()

    # -- the origin ---------------------------------------------------------------------------------------------------
    async def _fetch(
        self, head: bhttp.RequestHead, body: bytes | AsyncIterator[bytes] | None, enc: bytes
    ) -> HttpResponse:
        """Give the head of the origin's answer.

        Raises:
            _Inside: the request is refused.
            TransportError: the origin gave none.
        """
        try:
            target = self._targets.find(head)
            self._replays.take(head, enc, self._clock.wall())
            addresses = target.addresses or reachable(target, await self._resolve(target))
        except Refused as refused:
            raise _Inside(_own(refused.status, refused.error, str(refused))) from refused
        except Replay as replay:
            raise _Inside(self._replayed(replay)) from replay
        request = HttpRequest(
            head.method.decode("ascii"),
            target.scheme,
            target.host,
            target.port,
            head.path,
            (
                (b"host", target.authority.encode("ascii")),
                *[each for each in head.headers if each[0] not in _NOT_PASSED],
            ),
            body,
        )
        follower = Unfollowed()
        try:
            return await self._sender.request(
                request,
                deadline_s=limits_relay.RELAY_DEADLINE_S,
                body_deadline_s=2 * limits_relay.RELAY_DEADLINE_S,
                connect_timeout_s=limits_relay.RELAY_CONNECT_S,
                addresses=addresses,
                server_name=target.host if target.scheme == "https" else None,
                follower=follower,
            )
        except errors.LocalProtocolError as error:
            sent = follower.phase.reached(Phase.SEND)
            raise _Inside(_own(400, "http_request_error", str(error), maybe_delivered=sent)) from error

    async def _resolve(self, target: Target) -> tuple[Address, ...]:
        try:
            return await self._names.resolve(target.host, target.port)
        except OSError as error:  # TimeoutError too
            raise errors.ResolveError(f"{target.host}: {error}", phase=Phase.RESOLVE, maybe_delivered=False) from error

    def _replayed(self, replay: Replay) -> bhttp.Response:
        problem = json.dumps({"type": replay.problem, "title": str(replay), "status": replay.status}).encode()
        refusal = _own(replay.status, "http_request_denied", str(replay))
        now = (b"date", formatdate(self._clock.wall(), usegmt=True).encode("ascii"))
        return refusal._replace(
            headers=(*refusal.headers, (b"content-type", b"application/problem+json"), now), content=problem
        )


class _Inside(Exception):
    """An answer of the gateway's own in the place of the origin's."""

    def __init__(self, response: bhttp.Response) -> None:
        super().__init__(response.status)
        self.response = response


class _Reader:
    """A request in chunks, as it comes."""

    def __init__(self, opener: ohttp.RequestOpener, receive: Receive) -> None:
        self._opener = opener
        self._receive = receive
        self._decoder = bhttp.Decoder()
        self._events: list[bhttp.Event] = []
        self._whole = False
        self._invalid: errors.RemoteProtocolError | None = None

    @property
    def key(self) -> ohttp.ResponseKey:
        """What seals the answer; there once `head` gave something."""
        assert self._opener.response is not None  # noqa: S101  `head` opened it
        return self._opener.response

    async def head(self) -> bhttp.RequestHead | None:
        """Give the head, None where what was sealed is no request.

        Raises:
            StormlineError: it cannot be opened.
        """
        while not self._events and not self._whole and self._invalid is None:
            await self._more()
        first = self._events.pop(0) if self._events else None
        return first if isinstance(first, bhttp.RequestHead) else None

    def body(self) -> bytes | AsyncIterator[bytes] | None:
        """Give the content: what is here already where that is all, else a source of it."""
        if not self._whole:
            return self._stream()
        return b"".join(event.content for event in self._events if isinstance(event, bhttp.Data)) or None

    async def _stream(self) -> AsyncIterator[bytes]:
        # What breaks off here breaks off the request: the origin never takes a part of a body for the whole.
        size = 0
        while True:
            for event in self._events:
                if isinstance(event, bhttp.Data):
                    size += len(event.content)
                    if size > limits_relay.RELAY_BODY_BYTES_MAX:
                        raise errors.LocalProtocolError(
                            f"a body has at most {limits_relay.RELAY_BODY_BYTES_MAX} bytes here"
                        )
                    yield event.content
            self._events = []
            if self._invalid is not None:
                raise errors.LocalProtocolError(str(self._invalid))
            if self._whole:
                return
            try:
                await self._more()
            except errors.StormlineError as error:
                raise errors.LocalProtocolError(f"the sealed request broke off: {error}") from error

    async def _more(self) -> None:
        piece, self._whole = await _piece(self._receive)
        opened = self._opener.feed(piece, last=self._whole)
        try:
            self._events += self._decoder.feed(b"".join(opened), last=self._whole)
        except errors.RemoteProtocolError as error:
            self._invalid = error


async def _in_time(work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Do something within a time. What is done without a wait sets no timer, which would cost a twentieth of all.

    Raises:
        TimeoutError: it was not done in time.
    """
    try:
        waits_for = work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    async with asyncio.timeout(timeout_s):
        return await _resumed(work, waits_for)


@types.coroutine
def _resumed(work: Coroutine[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
    """Go on with what waits for something."""
    while True:
        try:
            try:
                came = yield waits_for
            except BaseException as error:
                waits_for = work.throw(error)
            else:
                waits_for = work.send(came)
        except StopIteration as done:
            result: T = done.value
            return result


async def _piece(receive: Receive) -> tuple[bytes, bool]:
    """Give the next bytes of a request, and whether they are the last.

    Raises:
        RemoteProtocolError: the peer went away.
    """
    message = await receive()
    if message["type"] == "http.disconnect":
        raise errors.RemoteProtocolError("the peer went away")
    return message.get("body", b""), not message.get("more_body", False)


def _media(scope: Scope) -> str:
    value = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    return str(value.partition(b";")[0].strip().lower().decode("latin-1"))


def _unopened(error: errors.StormlineError) -> _Outside:
    if isinstance(error, errors.SignatureError):  # the key's id may be known, and the key another
        return _Outside(400, "this was not sealed for a key of this gateway's", ohttp.KEY_PROBLEM)
    return _Outside(400, "this is no sealed request of this gateway's")


# -- answers ----------------------------------------------------------------------------------------------------------
def _own(status: int, error: str, details: str = "", *, maybe_delivered: bool = False) -> bhttp.Response:
    """Make an answer of the gateway's own."""
    shown = "".join(each for each in details if " " <= each <= "~" and each not in '"\\')[:200]
    value = f"{ohttp.RELAY_NAME}; error={error}" + (f'; details="{shown}"' if shown else "")
    value += f"; {ohttp.MAYBE_DELIVERED}" if maybe_delivered else ""
    return bhttp.Response(status, ((b"proxy-status", value.encode("ascii")), _NO_STORE))


def _failed(error: errors.TransportError) -> bhttp.Response:
    _log.info("no answer of an origin: %s", error)
    status, name = next(
        ((status, name) for kind, status, name in _FAILED if isinstance(error, kind)), (502, "connection_terminated")
    )
    return _own(status, name, maybe_delivered=error.maybe_delivered)


def _passed_back(response: HttpResponse) -> bhttp.Fields:
    fields = [(name.lower(), value.strip(b" \t")) for name, value in response.headers]
    dropped = _NOT_PASSED_BACK
    for name, value in fields:
        if name == b"connection":
            dropped = dropped | {token.strip().lower() for token in value.split(b",")}
    return tuple([each for each in fields if each[0] not in dropped])


async def _small(send: Send, sealer: ohttp.ResponseSealer, response: bhttp.Response) -> None:
    sealed = _seal(sealer, bhttp.encode_response(response), last=True)
    await _whole(send, 200, ohttp.CHUNKED_RESPONSE_TYPE, sealed, _NO_STORE)


async def _pass_on(send: Send, sealer: ohttp.ResponseSealer, response: HttpResponse) -> None:
    """Seal an origin's answer as it comes; one that is here already is sent whole."""
    source = response.source
    try:
        piece = await source.read()
        if source.complete:
            while more := await source.read():
                piece += more
            await _small(send, sealer, bhttp.Response(response.status, _passed_back(response), piece))
            return
        pending = bhttp.response_head(bhttp.ResponseHead(response.status, _passed_back(response)))
    except errors.TransportError as error:
        await _small(send, sealer, _failed(error))
        return
    except ValueError:
        await _small(send, sealer, _own(502, "http_protocol_error", maybe_delivered=True))
        return
    fields = [(b"content-type", ohttp.CHUNKED_RESPONSE_TYPE.encode()), _NO_STORE, (b"incremental", b"?1")]
    await send({"type": "http.response.start", "status": 200, "headers": fields})
    size = 0
    # A failure from here on ends the connection before the last chunk: so the client knows that this is not all.
    while piece:
        size += len(piece)
        if size > limits_relay.RELAY_BODY_BYTES_MAX:
            raise errors.ProtocolViolation(
                f"a body has at most {limits_relay.RELAY_BODY_BYTES_MAX} bytes here",
                phase=Phase.BODY,
                maybe_delivered=True,
            )
        sealed = _seal(sealer, pending + bhttp.chunk(piece))
        await send({"type": "http.response.body", "body": sealed, "more_body": True})
        pending = b""
        piece = await source.read()
    await send({"type": "http.response.body", "body": _seal(sealer, pending + bhttp.end(), last=True)})


def _seal(sealer: ohttp.ResponseSealer, data: bytes, *, last: bool = False) -> bytes:
    step = limits_relay.RELAY_CHUNK_BYTES
    return b"".join(
        sealer.chunk(data[at : at + step], last=last and at + step >= len(data)) for at in range(0, len(data), step)
    )


async def _whole(send: Send, status: int, media: str, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    fields = [(b"content-type", media.encode()), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})
