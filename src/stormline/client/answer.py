"""The answer to a call, and the body of a request: what passes between the executor and the httpx adapters."""

import asyncio
import math
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Final

from stormline.client.decoding import Verifier, codings_of, verifier_for
from stormline.client.trace import CallTrace
from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.outbound.messages import BodySource, Headers

if TYPE_CHECKING:
    from stormline.client.link import LinkCall


class RequestBody:
    """A request body that knows whether it can be sent again.

    Args:
        source: all of it, or where it comes from, or None.
        taken: told the size of each piece that is read from a stream.

    Attributes:
        whole: the body where it is in memory, None where it is a stream.
        spent: it is a stream and has been read from.
    """

    __slots__ = ("_stream", "_taken", "spent", "whole")

    def __init__(self, source: bytes | AsyncIterable[bytes] | None, taken: Callable[[int], None]) -> None:
        self._taken = taken
        self.whole = source if isinstance(source, bytes) else b"" if source is None else None
        self._stream = None if source is None or isinstance(source, bytes) else source
        self.spent = False

    @property
    def present(self) -> bool:
        """True where there is a body, if only an empty stream."""
        return self._stream is not None or bool(self.whole)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Give the body in pieces; a stream can be read once."""
        if self._stream is None:
            yield self.whole or b""
            return
        self.spent = True
        async for chunk in self._stream:
            self._taken(len(chunk))
            yield chunk


class LongBody:
    """`BodySource` of an answer over the long connection."""

    __slots__ = ("_call", "_read_timeout_s")

    def __init__(self, call: "LinkCall", read_timeout_s: float | None) -> None:
        self._call = call
        self._read_timeout_s = read_timeout_s

    @property
    def complete(self) -> bool:
        """See `BodySource.complete`."""
        return False

    def patience(self, silence_s: float) -> None:
        """See `BodySource.patience`."""
        self._read_timeout_s = silence_s if silence_s != math.inf else None

    async def read(self) -> bytes:
        """See `BodySource.read`; a silence longer than the bound is DeadlineExceeded."""
        try:
            if self._call.readable:
                return await self._call.read()
            async with asyncio.timeout(self._read_timeout_s) as timeout:
                return await self._call.read()
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise errors.DeadlineExceeded(
                f"no data for {self._read_timeout_s:.3g} s in the middle of the body",
                phase=Phase.BODY,
                maybe_delivered=True,
            ) from error
        except errors.CallError as error:
            raise gateway_error(error, Phase.BODY) from error
        except errors.ChannelLost as error:
            raise errors.ChannelLost(str(error), phase=Phase.BODY, maybe_delivered=True) from error

    async def aclose(self) -> None:
        """Give the call up where it still runs."""
        self._call.cancel()


class KeptBody:
    """`BodySource` of what has been read already, and of what is still to come behind it."""

    __slots__ = ("_begun", "_rest")

    def __init__(self, begun: bytes, rest: BodySource | None = None) -> None:
        self._begun = begun
        self._rest = rest

    @property
    def complete(self) -> bool:
        """See `BodySource.complete`."""
        return self._rest is None

    def patience(self, silence_s: float) -> None:
        """See `BodySource.patience`."""
        if self._rest is not None:
            self._rest.patience(silence_s)

    async def read(self) -> bytes:
        """See `BodySource.read`."""
        begun, self._begun = self._begun, b""
        return begun if begun or self._rest is None else await self._rest.read()

    async def aclose(self) -> None:
        """See `BodySource.aclose`."""
        self._begun = b""
        if self._rest is not None:
            await self._rest.aclose()


def gateway_error(error: errors.CallError, phase: Phase) -> errors.GatewayError:
    """Say of an HTTP request what the gateway said of the call that carried it."""
    return errors.GatewayError(
        f"the gateway answers: {error}",
        phase=phase,
        maybe_delivered=error.maybe_delivered,
        code=error.code,
        retry_after_s=error.retry_after_s,
    )


class Answer:
    """The head of an answer, and the way to its body: read it to its end, or close it.

    Attributes:
        status: HTTP status.
        reason: reason phrase, often empty.
        http_version: `HTTP/1.1` and the like.
        headers: names and values as they came.
        trace: the call's trace; it is finished when the body ends, fails or is closed, unless it is `held`.
        coded: it has a content coding, known or not.
        verifier: takes the content codings off and holds the body to its end; None where it has none that we know.
    """

    __slots__ = ("_ended", "_reader_decodes", "_source", "coded", "headers", "http_version", "reason", "status",
                 "trace", "verifier")  # fmt: skip

    def __init__(
        self,
        trace: CallTrace,
        source: BodySource,
        *,
        status: int,
        headers: Headers,
        reason: bytes = b"",
        http_version: str = "HTTP/1.1",
    ) -> None:
        self.trace = trace
        self._source = source
        self._ended = False
        self.status = status
        self.reason = reason
        self.http_version = http_version
        self.headers = headers
        self._reader_decodes = False
        values = codings_of(headers)
        self.coded: Final = bool(values)
        self.verifier: Verifier | None = None
        if values:
            framed = http_version == "HTTP/2" or isinstance(source, LongBody)
            self.verifier = verifier_for(trace.record.method, status, headers, values, framed=framed)

    async def read(self) -> bytes:
        """Give the next piece of the body as it came, `b""` at its end; it ends only where it is whole.

        Raises:
            DecodeError: the coded content is cut short or damaged; the chunk that shows it is not given.
            TransportError: it broke off (`phase` BODY).
        """
        if self._ended:
            return b""
        trace, source = self.trace, self._source
        trace.pulled()
        try:
            chunk = await source.read()
            if self.verifier is not None:
                await self._verify(self.verifier, chunk)
        except BaseException as error:  # cancelled too: whoever waited for it did not get it
            await self.fail(error)
            raise
        if chunk:
            trace.handed_out(len(chunk))
        elif source.complete:  # and read: there is nothing to let go
            self._ended = True
            trace.body_ended()
        else:
            await self.aclose()
        return chunk

    async def keep(self, size_max: int) -> bytes | None:
        """Take the body into memory, coded as it came; it is read from there then.

        Args:
            size_max: bytes; of a larger one the beginning is kept, and the rest comes as it would have.

        Returns:
            The body; None where it is too large.

        Raises:
            TransportError: it broke off; the call has failed.
        """
        pieces: list[bytes] = []
        size = 0
        try:
            while size <= size_max and (chunk := await self._source.read()):
                pieces.append(chunk)
                size += len(chunk)
        except BaseException as error:
            await self.fail(error)
            raise
        body = b"".join(pieces)
        self._source = KeptBody(body, self._source if size > size_max else None)
        return None if size > size_max else body

    async def _verify(self, verifier: Verifier, chunk: bytes) -> None:
        if not chunk:
            verifier.finish()
            if verifier.surplus_bytes:
                self.trace.note(f"{verifier.surplus_bytes} bytes after the end of the content left out")
        elif not self._reader_decodes:
            decoded_bytes = 0
            for piece in verifier.decode(chunk):
                decoded_bytes += len(piece)
                if decoded_bytes >= limits.DECODE_TURN_BYTES:
                    decoded_bytes = 0
                    await asyncio.sleep(0)

    def decoder(self) -> Callable[[bytes], Iterator[bytes]]:
        """Leave the decoding to the reader: it gives this each chunk that it reads, and takes all that comes of it,
        before it reads on; where that raises DecodeError it calls `fail`. `read` still holds the body to its end.

        Raises:
            LocalProtocolError: the answer has no coding that we know.
        """
        if self.verifier is None:
            raise errors.LocalProtocolError("the body has no content coding")
        self._reader_decodes = True
        return self.verifier.decode

    async def fail(self, error: BaseException) -> None:
        """Let the body go and end the call as failed; harmless where it has ended."""
        if not self._ended:
            self._ended = True
            if isinstance(error, errors.TransportError):
                error.trace = self.trace
            self.trace.pulled()
            self.trace.attempt_failed(error)
            self.trace.failed(error)
            await self._source.aclose()

    async def aclose(self) -> None:
        """Let the body go, read or not; harmless a second time."""
        if not self._ended:
            self._ended = True
            self.trace.body_ended()
            await self._source.aclose()
