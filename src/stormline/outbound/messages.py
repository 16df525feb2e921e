"""A request to send and its answer, as the pool and the connections speak of them."""

from collections.abc import AsyncIterable, AsyncIterator
from typing import NamedTuple, Protocol

from stormline.core import errors
from stormline.core.phase import Phase
from stormline.core.values import Address

Headers = tuple[tuple[bytes, bytes], ...]
"""Field lines in their order: (name, value)."""


def field_value(headers: Headers, name: bytes) -> bytes | None:
    """Give the first value of a field, None where it is absent.

    Args:
        headers: field lines.
        name: in lower case.
    """
    for each, value in headers:
        if each.lower() == name:
            return value
    return None


class HttpRequest(NamedTuple):
    """One HTTP request. Its `repr` shows neither target, headers nor body: they carry credentials.

    Attributes:
        method: `GET`, `POST`, ...
        scheme: `http` or `https`.
        host: the origin's name or IP literal, without brackets.
        port: the origin's port.
        target: path and query as they go on the wire, beginning with `/` (or `*` for OPTIONS).
        headers: field lines; `Host` and the framing of the body are added where they are absent.
        body: all of it, or a source of chunks that is read once, or None.
    """

    method: str
    scheme: str
    host: str
    port: int
    target: bytes
    headers: Headers = ()
    body: bytes | AsyncIterable[bytes] | None = None

    def __repr__(self) -> str:
        """Show what is no secret."""
        return f"<HttpRequest {self.method} {self.scheme}://{self.host}:{self.port}>"


class BodySource(Protocol):
    """Where an answer's body comes from; a connection of any HTTP version brings its own."""

    @property
    def complete(self) -> bool:
        """The body has come whole; pieces of it may be unread."""
        ...

    def patience(self, silence_s: float) -> None:
        """Bear silences in the body for `silence_s` seconds from now on, in the place of the request's bound."""
        ...

    async def read(self) -> bytes:
        """Give the next piece as it came, `b""` at the end and ever after.

        Raises:
            TransportError: the body ends too early, breaks HTTP or stalls; phase BODY.
        """
        ...

    async def aclose(self) -> None:
        """Give the connection back, or close it where the body has not been received whole. May be called again."""
        ...


class HttpResponse:
    """The head of an answer, and the way to its body.

    The body must be read to its end or `aclose` called, else the connection stays taken until the request's deadline.

    Attributes:
        status: 200 to 999; interim answers (1xx) never get here.
        reason: the reason phrase as it came.
        http_version: `HTTP/1.1` or `HTTP/1.0`.
        headers: field lines in their order, names as they came.
        peer: the address that answered.
        reused: the connection had served a request before.
    """

    __slots__ = ("_source", "headers", "http_version", "peer", "reason", "reused", "status")

    def __init__(
        self,
        status: int,
        reason: bytes,
        http_version: str,
        headers: list[tuple[bytes, bytes]],
        peer: Address,
        reused: bool,
        source: BodySource,
    ) -> None:
        self.status = status
        self.reason = reason
        self.http_version = http_version
        self.headers = headers
        self.peer = peer
        self.reused = reused
        self._source = source

    def __repr__(self) -> str:
        """Show what is safe to log."""
        return f"<HttpResponse {self.status} from {self.peer}>"

    @property
    def source(self) -> BodySource:
        """Where the body comes from, for a consumer that reads it piece by piece."""
        return self._source

    def aiter_raw(self) -> AsyncIterator[bytes]:
        """Iterate over the body as it comes, content codings untouched; breaking off loses nothing read so far.

        Each step raises like `BodySource.read`. Leaving the loop early does not free the connection: `aclose` does.
        """
        return _Chunks(self._source)

    async def read(self, size_max: int) -> bytes:
        """Give the whole body, at most `size_max` bytes.

        Raises:
            ProtocolViolation: the body is larger; the connection is closed.
            TransportError: as `aiter_raw`.
        """
        chunks: list[bytes] = []
        size = 0
        while chunk := await self._source.read():
            size += len(chunk)
            if size > size_max:
                await self._source.aclose()
                raise errors.ProtocolViolation(
                    f"{self.peer}: the body has more than {size_max} bytes", phase=Phase.BODY, maybe_delivered=True
                )
            chunks.append(chunk)
        return b"".join(chunks)

    async def aclose(self) -> None:
        """Give the connection back, or close it where the body was not read to its end. May be called again."""
        await self._source.aclose()


class _Chunks:
    """An iterator object, not an async generator: nothing to close when a loop over it is left."""

    __slots__ = ("_source",)

    def __init__(self, source: BodySource) -> None:
        self._source = source

    def __aiter__(self) -> "_Chunks":
        return self

    async def __anext__(self) -> bytes:
        chunk = await self._source.read()
        if not chunk:
            raise StopAsyncIteration
        return chunk
