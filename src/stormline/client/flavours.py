"""httpx and httpx2 have the same shape and different classes: answers and errors must come from the caller's own.

Errors inherit from both trees: `except httpx.ConnectError` and `except stormline.errors.ConnectError` both catch.
"""

import asyncio
import contextlib
import functools
import importlib
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final, Protocol

from stormline.client.answer import Answer
from stormline.core import errors, limits
from stormline.core.phase import Phase

_MODULES = ("httpx2", "httpx")


class Wait(Protocol):
    """Runs a coroutine of the client's loop from another thread and gives its result."""

    def __call__(self, coroutine: Any) -> Any:
        """Wait for `coroutine`."""
        ...


def _their_error(error: errors.TransportError | errors.LocalProtocolError) -> str:
    match error:
        case errors.LocalProtocolError():
            return "LocalProtocolError"
        case errors.QueueFull():
            return "PoolTimeout"
        case errors.DeadlineExceeded():
            if error.phase is Phase.QUEUED:
                return "PoolTimeout"
            if not error.phase.reached(Phase.SEND):
                return "ConnectTimeout"
            return "WriteTimeout" if error.phase is Phase.SEND else "ReadTimeout"
        case errors.ProxyError():
            return "ProxyError"
        case errors.ResolveError() | errors.ConnectError() | errors.TlsError():
            return "ConnectError"
        case errors.WriteError():
            return "WriteError"
        case errors.ProtocolViolation():
            return "RemoteProtocolError"
        case errors.DecodeError():
            return "DecodingError"
        case _:
            return "ReadError"


class Flavour:
    """One of the two modules, with what is made from it once."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._errors: dict[tuple[type, str], Any] = {}
        flavour = self

        class AsyncBody(module.AsyncByteStream):  # type: ignore[misc]
            def __init__(self, answer: Answer, request: Any) -> None:
                self._answer = answer
                self._request = request

            def __aiter__(self) -> AsyncIterator[bytes]:
                return self  # not a generator: it would be one more thing to close, and costs more

            async def __anext__(self) -> bytes:
                try:
                    chunk = await self._answer.read()
                except errors.TransportError as error:
                    raise flavour.convert(error, self._request) from error
                if not chunk:
                    raise StopAsyncIteration
                return chunk

            async def aclose(self) -> None:
                await self._answer.aclose()

        class SyncBody(module.SyncByteStream):  # type: ignore[misc]
            def __init__(self, answer: Answer, request: Any, wait: Wait) -> None:
                self._answer = answer
                self._request = request
                self._wait = wait
                self._ended = False

            def __iter__(self) -> Iterator[bytes]:
                try:
                    while chunk := self._wait(self._answer.read()):
                        yield chunk
                except errors.TransportError as error:
                    raise flavour.convert(error, self._request) from error
                self._ended = True

            def close(self) -> None:
                if not self._ended:  # else it is closed, and the way to the loop and back costs more than a read
                    self._wait(self._answer.aclose())

        self._async_body = AsyncBody
        self._sync_body = SyncBody
        self._decoded = _decoded_response(self)
        self._plain = _plain_response(module, AsyncBody)

    def response(self, answer: Answer, request: Any, wait: Wait | None = None) -> Any:
        """Make the caller's response; its body is asynchronous where `wait` is None."""
        body = self._async_body(answer, request) if wait is None else self._sync_body(answer, request, wait)
        extensions: dict[str, Any] = {"http_version": answer.http_version.encode("ascii"), "stormline": answer.trace}
        if answer.trace.untrusted:
            extensions["stormline.untrusted"] = True
        if answer.reason:
            extensions["reason_phrase"] = answer.reason
        if answer.verifier is not None:
            made = functools.partial(self._decoded, answer, wait)
        else:
            made = self.module.Response if answer.coded else self._plain
        return made(answer.status, headers=list(answer.headers), stream=body, extensions=extensions, request=request)

    def convert(self, error: errors.TransportError | errors.LocalProtocolError, request: Any) -> Exception:
        """Make the error the caller expects: of our kind and of theirs at once, with the same attributes."""
        key = (type(error), _their_error(error))
        made = self._errors.get(key)
        if made is None:
            made = type(key[0].__name__, (key[0], getattr(self.module, key[1])), {"__module__": key[0].__module__})
            self._errors[key] = made
        extra: dict[str, Any] = (
            {"code": error.code, "retry_after_s": error.retry_after_s} if isinstance(error, errors.GatewayError) else {}
        )
        if isinstance(error, errors.TransportError):
            extra |= {"phase": error.phase, "maybe_delivered": error.maybe_delivered}
        converted = made(str(error), **extra)
        converted.request = request
        if isinstance(error, errors.TransportError):
            converted.trace = error.trace
        return converted  # type: ignore[no-any-return]

    def unsupported(self, request: Any) -> Exception:
        """Make the error for a URL that is neither http nor https."""
        scheme = request.url.scheme
        message = f"unsupported scheme {scheme!r}: expected http or https"
        return self.module.UnsupportedProtocol(message, request=request)  # type: ignore[no-any-return]

    def body_in_memory(self, request: Any) -> bytes | None:
        """Give the request's body where it is in memory, None where it is a stream."""
        # Not `request.content`: a request that follows a redirect has the stream alone.
        return b"".join(request.stream) if isinstance(request.stream, self.module.ByteStream) else None


class _Resize:
    """Cuts and joins content to pieces of one size, the last one excepted; None leaves them as they are."""

    __slots__ = ("_held", "_size")

    def __init__(self, size: int | None) -> None:
        self._held = bytearray()
        self._size = size

    def take(self, piece: bytes) -> list[bytes]:
        if self._size is None:
            return [piece]
        held, size = self._held, self._size
        held += piece
        whole = len(held) - len(held) % size
        pieces = [bytes(held[start : start + size]) for start in range(0, whole, size)]
        del held[:whole]
        return pieces

    def rest(self) -> list[bytes]:
        return [bytes(self._held)] if self._held else []


def _plain_response(module: Any, async_body: type) -> Any:
    """Make the module's response with a body that has no content coding: as it comes is as it is.

    The module would take each piece through a decoder that decodes nothing and a cutter that cuts nothing, and a body
    that is read whole through three generators, one in the other.
    """

    client_module = f"{module.__name__}._client"

    class Response(module.Response):  # type: ignore[misc]
        __slots__ = ()

        async def aread(self) -> bytes:
            this: Any = self  # so that it may be given what is the module's
            stream = this.stream
            fresh = not (hasattr(this, "_content") or this.is_stream_consumed or this.is_closed)
            if not fresh or not isinstance(stream, module.AsyncByteStream):
                return await super().aread()  # type: ignore[no-any-return]
            this.is_stream_consumed = True
            # The client has put our body into a stream of its own, which hands it on through one more generator.
            inner: Any = getattr(stream, "_stream", None)
            ours = type(inner) is async_body and type(stream).__module__ == client_module
            try:
                content = b"".join([piece async for piece in (inner if ours else stream)])
            finally:
                await self.aclose()
            this._num_bytes_downloaded, this._content = len(content), content
            return content

        def aiter_bytes(self, chunk_size: int | None = None) -> AsyncIterator[bytes]:
            if chunk_size is not None or self.is_stream_consumed or self.is_closed:
                return super().aiter_bytes(chunk_size)  # type: ignore[no-any-return]
            return self.aiter_raw()  # type: ignore[no-any-return]

        def __reduce__(self) -> Any:
            return _unpickled, (module.__name__,), self.__getstate__()

    return Response


def _decoded_response(flavour: Flavour) -> Any:
    """Make the module's response with a body that stormline decodes.

    Only the two public iterators over the decoded body are replaced; `read`, `iter_text` and `iter_lines` go by them.
    Should they cease to, the module decodes for itself what `Answer.read` has verified, and nothing is lost but the
    later members of a gzip body.
    """

    class Response(flavour.module.Response):  # type: ignore[misc, name-defined]
        __slots__ = ("_answer", "_wait")  # apart from what is pickled

        def __init__(self, answer: Answer, wait: Wait | None, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._answer = answer
            self._wait = wait

        def iter_bytes(self, chunk_size: int | None = None) -> Iterator[bytes]:
            if self.is_stream_consumed or self.is_closed:  # its content is there, or the module says what is wrong
                yield from super().iter_bytes(chunk_size)
                return
            decode, resize = self._answer.decoder(), _Resize(chunk_size)
            for chunk in self.iter_raw():
                try:
                    for piece in decode(chunk):
                        yield from resize.take(piece)
                except errors.DecodeError as error:
                    if self._wait is not None:
                        self._wait(self._answer.fail(error))
                    raise flavour.convert(error, self.request) from error
            yield from resize.rest()

        async def aiter_bytes(self, chunk_size: int | None = None) -> AsyncIterator[bytes]:
            if self.is_stream_consumed or self.is_closed:
                async for piece in super().aiter_bytes(chunk_size):
                    yield piece
                return
            decode, resize = self._answer.decoder(), _Resize(chunk_size)
            async with contextlib.aclosing(self.aiter_raw()) as chunks:
                async for chunk in chunks:
                    decoded_bytes = 0
                    try:
                        for piece in decode(chunk):
                            for sized in resize.take(piece):
                                yield sized
                            decoded_bytes += len(piece)
                            if decoded_bytes >= limits.DECODE_TURN_BYTES:
                                decoded_bytes = 0
                                await asyncio.sleep(0)
                    except errors.DecodeError as error:
                        await self._answer.fail(error)
                        raise flavour.convert(error, self.request) from error
            for sized in resize.rest():
                yield sized

        def __reduce__(self) -> Any:
            return _unpickled, (flavour.module.__name__,), self.__getstate__()

    return Response


def _unpickled(name: str) -> Any:
    """Give an empty response of the module's own class, for its `__setstate__`."""
    kind = importlib.import_module(name).Response
    return kind.__new__(kind)


_KINDS: Final[dict[type, Flavour]] = {}


@functools.cache
def _flavour(name: str) -> Flavour:
    return Flavour(sys.modules[name])


def flavour_of(request: Any) -> Flavour:
    """Find the module a request comes from.

    Raises:
        LocalProtocolError: it is no request of httpx or httpx2.
    """
    known = _KINDS.get(type(request))
    if known is not None:
        return known
    for kind in type(request).__mro__:
        name = kind.__module__.partition(".")[0]
        if name in _MODULES and kind.__name__ == "Request":
            if kind is type(request):  # a class of the caller's own may be one of many
                _KINDS[kind] = _flavour(name)
            return _flavour(name)
    raise errors.LocalProtocolError(f"{type(request).__name__} is not a request of httpx or httpx2")
