"""A request through a relay: sealed for its gateway, carried over clear HTTP, the answer opened (RFC 9458, in chunks).

Neither a name nor TLS to the origin is needed on the way; whoever stands on it sees sizes and times alone. What comes
back is an answer as any other means would give it, body and all.
"""

import json
import re
from collections.abc import AsyncIterator
from email.utils import formatdate, parsedate_to_datetime
from typing import Final, NamedTuple

from stormline.core import errors, limits_relay
from stormline.core.clock import Clock, Rng
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.outbound.held import Follower
from stormline.outbound.messages import BodySource, HttpRequest, HttpResponse, field_value
from stormline.outbound.pool import HttpPool
from stormline.wire import bhttp, ohttp

_OWN_ERROR: Final = re.compile(rf"{ohttp.RELAY_NAME}(?:;[^,]*)?;\s*error=([a-z_]+)([^,]*)")
_PROBLEM: Final = b"application/problem+json"
_NOT_SENT: Final = bhttp.CONNECTION_FIELDS | {b"host", b"expect"}
_CERTAIN: Final = frozenset({400, 404, 405, 408, 413, 415, 429, 431, 503})
"""Statuses of a relay or gateway that has not opened the request: nobody behind it has it."""


class RelayPlace(NamedTuple):
    """A relay.

    Attributes:
        address: where it is asked, in clear HTTP.
        key: its gateway's.
    """

    address: Address
    key: ohttp.KeyConfig


class UnknownRelayKey(errors.GatewayError):
    """The relay's gateway has not the key that the request was sealed for: a newer plan has another."""


class Sealer:
    """Sends requests through relays. Belongs to one event loop.

    Args:
        clock: for the `Date` of requests that change something.
        rng: seals.
    """

    def __init__(self, *, clock: Clock, rng: Rng) -> None:
        self._clock = clock
        self._rng = rng
        self._ahead_s = 0.0  # the gateway's clock, as far as it has said

    async def request(
        self,
        request: HttpRequest,
        relay: RelayPlace,
        pool: HttpPool,
        *,
        deadline_s: float,
        body_deadline_s: float | None = None,
        connect_timeout_s: float | None = None,
        read_timeout_s: float | None = None,
        newer_than: float | None = None,
        follower: Follower | None = None,
    ) -> HttpResponse:
        """Send one request through a relay and give its answer when the head is there; see `HttpPool.request`.

        Args:
            request: for an `https` origin.
            relay: through whom.
            pool: carries what is sealed.
            deadline_s: seconds to the head of the answer.
            body_deadline_s: seconds until the last byte of the body, default `deadline_s`.
            connect_timeout_s: seconds for the connection to the relay.
            read_timeout_s: longest silence.
            newer_than: only over a connection to the relay that is newer.
            follower: told what happens on the way to the relay.

        Raises:
            UnknownRelayKey: the keys are to be asked for again; nobody has the request.
            GatewayError: the relay or its gateway answered in the origin's place; `maybe_delivered` as they know it.
            TransportError: the relay was not reached or broke off, as `HttpPool.request`.
            LocalProtocolError: the request cannot be sealed.
        """
        ends_at = self._clock.monotonic() + deadline_s
        fresh_clock = isinstance(request.body, bytes | None)  # it may be set right, once
        while True:
            sealer, outer = self._sealed(request, relay)
            carried = await pool.request(
                outer,
                deadline_s=ends_at - self._clock.monotonic(),
                body_deadline_s=body_deadline_s,
                connect_timeout_s=connect_timeout_s,
                read_timeout_s=read_timeout_s,
                newer_than=newer_than,
                follower=follower,
            )
            try:
                response = await _opened(carried, relay, sealer.response)
                own = _own_error(response)
                if own is None:
                    return response
                again = fresh_clock and await self._clock_was_off(response)
                fresh_clock = False
            except BaseException:
                await carried.aclose()
                raise
            await response.aclose()
            if not again:
                raise _gateway_error(relay, *own)

    def _sealed(self, request: HttpRequest, relay: RelayPlace) -> tuple[ohttp.RequestSealer, HttpRequest]:
        try:
            sealer = ohttp.RequestSealer(relay.key, entropy=self._rng.token_bytes(ohttp.ENTROPY_BYTES))
            body = _seal(self._inner(request), request, sealer)
        except ValueError as error:
            raise errors.LocalProtocolError(f"this request cannot go through a relay: {error}") from error
        headers = ((b"content-type", ohttp.CHUNKED_REQUEST_TYPE.encode()), (b"incremental", b"?1"))
        return sealer, HttpRequest("POST", "http", relay.address.host, relay.address.port, b"/", headers, body)

    def _inner(self, request: HttpRequest) -> bhttp.RequestHead:
        host = f"[{request.host}]" if ":" in request.host else request.host
        authority = host if request.port == 443 else f"{host}:{request.port}"
        fields = [(name.lower(), value) for name, value in request.headers if name.lower() not in _NOT_SENT]
        if request.method.encode() not in ohttp.REPEATABLE and not any(name == b"date" for name, _ in fields):
            wall = self._clock.wall() + self._ahead_s
            fields.append((b"date", formatdate(wall, usegmt=True).encode("ascii")))
        return bhttp.RequestHead(
            request.method.encode("ascii"),
            request.scheme.encode("ascii"),
            authority.encode("ascii"),
            request.target,
            tuple(fields),
        )

    async def _clock_was_off(self, response: HttpResponse) -> bool:
        """Say whether a refusal is for our clock alone, and set it right."""
        headers = tuple(response.headers)
        date = field_value(headers, b"date")
        if response.status != 400 or date is None or field_value(headers, b"content-type") != _PROBLEM:
            return False
        try:
            problem = json.loads(await response.read(limits_relay.RELAY_CHUNK_BYTES))
            told = parsedate_to_datetime(date.decode("ascii")).timestamp()
            off = bool(problem["type"] == ohttp.DATE_PROBLEM)
        except (ValueError, TypeError, KeyError, OverflowError):
            return False
        if off:
            self._ahead_s = told - self._clock.wall()
        return off


def _seal(head: bhttp.RequestHead, request: HttpRequest, sealer: ohttp.RequestSealer) -> bytes | AsyncIterator[bytes]:
    """Seal a request: at once where it is here, else as its body comes."""
    body = request.body
    if body is None or isinstance(body, bytes):
        data = bhttp.encode_request(bhttp.Request(*head, body or b""))
        step = limits_relay.RELAY_CHUNK_BYTES
        starts = range(0, len(data), step)
        return b"".join(sealer.chunk(data[at : at + step], last=at + step >= len(data)) for at in starts)
    first = bhttp.request_head(head)

    async def pieces() -> AsyncIterator[bytes]:
        pending = first
        async for piece in body:
            pending += bhttp.chunk(piece)
            while len(pending) >= limits_relay.RELAY_CHUNK_BYTES:
                yield sealer.chunk(pending[: limits_relay.RELAY_CHUNK_BYTES])
                pending = pending[limits_relay.RELAY_CHUNK_BYTES :]
            if pending:
                yield sealer.chunk(pending)
                pending = b""
        yield sealer.chunk(pending + bhttp.end(), last=True)

    return pieces()


async def _opened(carried: HttpResponse, relay: RelayPlace, key: ohttp.ResponseKey) -> HttpResponse:
    media = field_value(tuple((name.lower(), value) for name, value in carried.headers), b"content-type") or b""
    if carried.status != 200 or media.lower() != ohttp.CHUNKED_RESPONSE_TYPE.encode():
        raise await _refused(carried, relay)
    source = _Opened(carried, relay, ohttp.ResponseOpener(key))
    head = await source.head()
    return HttpResponse(
        status=head.status,
        reason=b"",
        http_version="HTTP/1.1",
        headers=list(head.headers),
        peer=carried.peer,
        reused=carried.reused,
        source=source,
    )


def _gateway_error(relay: RelayPlace, error: str, parameters: str) -> errors.GatewayError:
    return errors.GatewayError(
        f"relay {relay.address}: {error}", phase=Phase.FIRST_BYTE, maybe_delivered=ohttp.MAYBE_DELIVERED in parameters
    )


def _own_error(response: HttpResponse) -> tuple[str, str] | None:
    """Give what the gateway says of an answer of its own; None of one that is the origin's."""
    value = field_value(tuple(response.headers), b"proxy-status")
    found = None if value is None else _OWN_ERROR.match(value.decode("latin-1"))
    return None if found is None else (found[1], found[2])


async def _refused(carried: HttpResponse, relay: RelayPlace) -> errors.GatewayError:
    """Read what a relay said in the place of a sealed answer."""
    said = b""
    try:
        said = await carried.read(limits_relay.RELAY_CHUNK_BYTES)
        unknown = carried.status == 400 and json.loads(said)["type"] == ohttp.KEY_PROBLEM
    except (errors.TransportError, ValueError, TypeError, KeyError):
        unknown = False
    kind = UnknownRelayKey if unknown else errors.GatewayError
    return kind(
        f"relay {relay.address}: " + ("it has another key" if unknown else f"HTTP {carried.status}"),
        phase=Phase.FIRST_BYTE,
        maybe_delivered=carried.status not in _CERTAIN,
    )


class _Opened(BodySource):
    """A sealed answer as a body: pieces as they are opened, and no end that was not sealed as one."""

    def __init__(self, carried: HttpResponse, relay: RelayPlace, opener: ohttp.ResponseOpener) -> None:
        self._carried = carried
        self._relay = relay
        self._opener = opener
        self._decoder = bhttp.Decoder()
        self._events: list[bhttp.Event] = []
        self._ended = False
        self._size = 0

    @property
    def complete(self) -> bool:
        """The body has come whole."""
        return self._ended

    def patience(self, silence_s: float) -> None:
        """See `BodySource.patience`."""
        self._carried.source.patience(silence_s)

    async def head(self) -> bhttp.ResponseHead:
        """Give the head of the final answer.

        Raises:
            ProtocolViolation: what came is no sealed answer to the request.
            TransportError: it broke off.
        """
        while True:
            while self._events:
                event = self._events.pop(0)
                if isinstance(event, bhttp.ResponseHead) and event.status >= 200:
                    return event
                if not isinstance(event, bhttp.ResponseHead):
                    raise self._violation("it is no answer")
            if self._ended:
                raise self._violation("it is empty")
            await self._more()

    async def read(self) -> bytes:
        """See `BodySource.read`."""
        while True:
            while self._events:
                event = self._events.pop(0)
                if isinstance(event, bhttp.Data):
                    self._size += len(event.content)
                    if self._size > limits_relay.RELAY_BODY_BYTES_MAX:
                        raise self._violation(f"it has more than {limits_relay.RELAY_BODY_BYTES_MAX} bytes")
                    return event.content
            if self._ended:
                return b""
            await self._more()

    async def _more(self) -> None:
        piece = await self._carried.source.read()
        try:
            opened = self._opener.feed(piece, last=not piece)
            self._events += self._decoder.feed(b"".join(opened), last=not piece)
        except (errors.RemoteProtocolError, errors.SignatureError) as error:
            await self.aclose()
            raise self._violation(str(error)) from error
        self._ended = not piece

    def _violation(self, why: str) -> errors.ProtocolViolation:
        return errors.ProtocolViolation(
            f"the answer through relay {self._relay.address}: {why}", phase=Phase.BODY, maybe_delivered=True
        )

    async def aclose(self) -> None:
        """See `BodySource.aclose`."""
        await self._carried.aclose()
