"""Decodes an answer's body and holds it to its end: what is cut short or damaged is an error, never a short body.

httpx and httpx2 take the codings off themselves, without looking whether a gzip, deflate or br stream ever ended, and
drop all members of a gzip body but the first. So the transport looks (`Verifier.feed`), or decodes in their place
(`Verifier.decode`). Either way the content comes in pieces of bounded size, so a body that grows a millionfold costs
time and no memory.

What counts as whole, by coding:

- gzip (RFC 1952; `x-gzip` is the same, RFC 9110 section 8.4.1.3): one or more members, each with its checksum and size.
  Zeros after a member are padding. Other bytes that cannot begin a member are left out and counted
  (`Verifier.surplus_bytes`): the content before them is proven whole, live servers send such bytes, and browsers and
  urllib3 pass them over.
- deflate: a zlib stream with its checksum (RFC 1950), or the raw stream (RFC 1951) that some servers send; no more.
- br (RFC 7932): one stream, no more.
- zstd (RFC 8878): one or more frames with windows of at most 8 MiB (RFC 9659), no more.

An empty body is whole where its framing says so: servers that have nothing to send do not start an encoder.
"""

import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from stormline.core import errors, limits, zstandard
from stormline.core.phase import Phase
from stormline.outbound.messages import Headers

_BODILESS: Final = frozenset({204, 206, 304})
"""Answers without content, and 206, a part of the coded content that begins and ends anywhere (RFC 9110 section 14)."""

_SAYS_THE_END: Final = frozenset({b"content-length", b"transfer-encoding"})


class _Damaged(Exception):
    """What is wrong with the data."""


class _Stage(Protocol):
    """Takes one coding off."""

    name: str
    surplus_bytes: int

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Give what `data` brings, in pieces of bounded size, none empty. Raises _Damaged."""
        ...

    def complete(self) -> bool:
        """Say whether the data may end here."""
        ...


def _inflate(machine: "zlib._Decompress", data: bytes) -> Iterator[bytes]:
    """Drain a decompressor of zlib, until it has taken all of `data` or has ended."""
    piece_bytes = limits.DECODE_PIECE_BYTES
    while True:
        try:
            piece = machine.decompress(data, piece_bytes)
        except zlib.error as error:
            raise _Damaged(str(error)) from error
        if piece:
            yield piece
        data = machine.unconsumed_tail
        if machine.eof or (not data and len(piece) < piece_bytes):  # a full piece may have left more inside
            return


class _Gzip:
    __slots__ = ("_held", "_machine", "name", "surplus_bytes")

    def __init__(self, name: str) -> None:
        self.name = name
        self.surplus_bytes = 0
        self._held = b""
        self._machine: zlib._Decompress | None = zlib.decompressobj(zlib.MAX_WBITS | 16)

    def decode(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._machine is None:
                data = self._next_member(data)
                if not data:
                    return
                self._machine = zlib.decompressobj(zlib.MAX_WBITS | 16)
            yield from _inflate(self._machine, data)
            if not self._machine.eof:
                return
            data = self._machine.unused_data
            self._machine = None

    def _next_member(self, data: bytes) -> bytes:
        """Give `data` from the next member's first byte on, nothing where none begins in it."""
        if not self.surplus_bytes:
            data = (self._held + data).lstrip(b"\0")
            self._held = b""
            if data.startswith(b"\x1f\x8b"):
                return data
            if data == b"\x1f":  # only its next byte will tell
                self._held = data
                return b""
        self.surplus_bytes += len(data)
        return b""

    def complete(self) -> bool:
        return self._machine is None and not self._held


class _Deflate:
    __slots__ = ("_held", "_machine", "name", "surplus_bytes")

    def __init__(self, name: str) -> None:
        self.name = name
        self.surplus_bytes = 0
        self._held = b""
        self._machine: zlib._Decompress | None = None

    def decode(self, data: bytes) -> Iterator[bytes]:
        if self._machine is None:
            data = self._held + data
            if len(data) < 2:
                self._held = data
                return
            # A raw stream never looks like a zlib header: its low four bits 1000 would be a stored block (RFC 1951
            # section 3.2.4) with a padding bit set, and encoders pad with zeros.
            zlib_header = data[0] & 15 == 8 and int.from_bytes(data[:2], "big") % 31 == 0
            self._machine = zlib.decompressobj(zlib.MAX_WBITS if zlib_header else -zlib.MAX_WBITS)
        elif self._machine.eof:
            raise _Damaged("data after its end")
        yield from _inflate(self._machine, data)
        if self._machine.unused_data:
            raise _Damaged("data after its end")

    def complete(self) -> bool:
        return self._machine is not None and self._machine.eof


class _Brotli:
    __slots__ = ("_error", "_machine", "name", "surplus_bytes")

    def __init__(self, name: str) -> None:
        import brotli  # here and not above: most clients never meet the coding

        self.name = name
        self.surplus_bytes = 0
        self._machine = brotli.Decompressor()
        self._error = brotli.error

    def decode(self, data: bytes) -> Iterator[bytes]:
        machine = self._machine
        if machine.is_finished():
            raise _Damaged("data after its end")
        while True:
            try:
                piece = machine.process(data, output_buffer_limit=limits.DECODE_PIECE_BYTES)
            except self._error as error:
                raise _Damaged("the decoder refuses it") from error  # its own words say no more
            if not piece:
                return
            yield piece
            if machine.is_finished():
                return
            data = b""

    def complete(self) -> bool:
        return bool(self._machine.is_finished())


class _Zstandard:
    __slots__ = ("_error", "_machine", "_make", "name", "surplus_bytes")

    def __init__(self, name: str) -> None:
        zstd = zstandard.zstd()
        options = {zstd.DecompressionParameter.window_log_max: limits.DECODE_WINDOW_LOG_MAX}
        self.name = name
        self.surplus_bytes = 0
        self._error = zstd.ZstdError
        self._make: Callable[[], Any] = functools.partial(zstd.ZstdDecompressor, options=options)
        self._machine: Any = self._make()

    def decode(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._machine is None:
                self._machine = self._make()
            yield from self._frame(self._machine, data)
            if not self._machine.eof:
                return
            data = self._machine.unused_data
            self._machine = None

    def _frame(self, machine: Any, data: bytes) -> Iterator[bytes]:
        while True:
            try:
                piece = machine.decompress(data, limits.DECODE_PIECE_BYTES)
            except self._error as error:
                raise _Damaged(str(error)) from error
            if piece:
                yield piece
            if machine.eof or machine.needs_input:
                return
            data = b""

    def complete(self) -> bool:
        return self._machine is None


_STAGES: Final[dict[str, Callable[[str], _Stage]]] = {
    "gzip": _Gzip,
    "x-gzip": _Gzip,
    "deflate": _Deflate,
    "br": _Brotli,
    "zstd": _Zstandard,
}


class Verifier:
    """Takes the codings off one body and holds it to its end. Not for two threads at once.

    Args:
        codings: in the order in which they were applied.
        empty_ok: an empty body is whole; False where only the end of the connection says that it has ended.
    """

    __slots__ = ("_codings", "_empty_ok", "_fed_bytes", "_stages")

    def __init__(self, codings: tuple[str, ...], *, empty_ok: bool = True) -> None:
        self._codings = codings
        self._empty_ok = empty_ok
        self._fed_bytes = 0
        self._stages: list[_Stage] = []

    @property
    def surplus_bytes(self) -> int:
        """Bytes after the end of a gzip stream that were left out."""
        return sum(stage.surplus_bytes for stage in self._stages)

    def decode(self, chunk: bytes) -> Iterator[bytes]:
        """Give the content that the next chunk of the body brings; the pieces must all be taken before the next call.

        Yields:
            Pieces of about `limits.DECODE_PIECE_BYTES` at most (br: twice that), none empty.

        Raises:
            DecodeError: the data is damaged, or goes on after its end.
        """
        if not self._stages:
            if len(self._codings) > limits.CONTENT_CODINGS_MAX:
                raise _error(f"{len(self._codings)} content codings, more than {limits.CONTENT_CODINGS_MAX}")
            self._stages = [_STAGES[coding](coding) for coding in reversed(self._codings)]
        self._fed_bytes += len(chunk)
        bite_bytes = limits.DECODE_BITE_BYTES
        if len(chunk) <= bite_bytes:
            return self._through(chunk, 0)
        return (
            piece
            for start in range(0, len(chunk), bite_bytes)
            for piece in self._through(chunk[start : start + bite_bytes], 0)
        )

    def _through(self, data: bytes, number: int) -> Iterator[bytes]:
        """Give what `data` becomes in the stages from `number` on."""
        stage = self._stages[number]
        last = number + 1 == len(self._stages)
        try:
            for piece in stage.decode(data):
                if last:
                    yield piece
                else:
                    yield from self._through(piece, number + 1)
        except _Damaged as error:
            raise _error(f"the {stage.name} data is damaged within {self._fed_bytes} bytes: {error}") from error

    def feed(self, chunk: bytes) -> None:
        """Look at the next chunk of the body, and keep nothing.

        Raises:
            DecodeError: as `decode`.
        """
        for _ in self.decode(chunk):
            pass

    def finish(self) -> None:
        """The body has ended.

        Raises:
            DecodeError: it is cut short.
        """
        if not self._fed_bytes and self._empty_ok:
            return
        for stage in self._stages:
            if not stage.complete():
                raise _error(f"the {stage.name} data is cut short after {self._fed_bytes} bytes")
        if not self._stages:
            raise _error(f"no byte of the {self._codings[-1]} data came before the connection ended")


def _error(message: str) -> errors.DecodeError:
    return errors.DecodeError(message, phase=Phase.DECODE, maybe_delivered=True)


def codings_of(headers: Headers) -> list[bytes]:
    """Give the values of `Content-Encoding`; several lines are one list (RFC 9110 section 5.3)."""
    return [value for name, value in headers if len(name) == 16 and name.lower() == b"content-encoding"]


def verifier_for(method: str, status: int, headers: Headers, values: list[bytes], *, framed: bool) -> Verifier | None:
    """Make the verifier of an answer's body; None where there is nothing to verify, or nothing that we know.

    Args:
        method: of the request.
        status: of the answer.
        headers: of the answer.
        values: its codings, see `codings_of`.
        framed: the carrier marks the end of every body, as HTTP/2 does. HTTP/1 may end one with its connection: where
            neither length nor chunks are announced, an empty body proves nothing.
    """
    if not values or status in _BODILESS or method == "HEAD":
        return None
    words = b",".join(values).decode("latin-1").lower().split(",")
    codings = tuple(word for part in words if (word := part.strip()) not in ("", "identity"))
    if not codings or any(coding not in _STAGES for coding in codings):
        return None
    empty_ok = framed or any(name.lower() in _SAYS_THE_END for name, _ in headers)
    return Verifier(codings, empty_ok=empty_ok)
