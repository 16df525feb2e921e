"""Compresses answers on their way to a device, in bounded steps; whether and how is said by `policy.compress`."""

import asyncio
from typing import Any, Final

import brotli

from stormline.core import limits_api as limits
from stormline.core import zstandard
from stormline.policy.compress import Coding
from stormline.wire.messages import Headers

_WINDOW_BITS: Final = 18
"""256 KiB: the compressors' own windows take 2 to 4 MB a stream, and gain little on bodies of this size."""


class Shelf:
    """Compressors of zstd that have ended one body and wait for the next: their memory costs more than most bodies."""

    def __init__(self) -> None:
        self._idle: dict[Coding, list[Any]] = {}

    def take(self, coding: Coding) -> Any:
        """Give one that waits, or a new one."""
        idle = self._idle.get(coding)
        if idle:
            return idle.pop()
        kinds = zstandard.zstd().CompressionParameter
        options = {kinds.compression_level: coding.level, kinds.window_log: _WINDOW_BITS}
        return zstandard.zstd().ZstdCompressor(options=options)

    def put(self, coding: Coding, machine: Any) -> None:
        """Take one back that has ended its body."""
        idle = self._idle.setdefault(coding, [])
        if len(idle) < limits.COMPRESSORS_KEPT:
            idle.append(machine)


class Coder:
    """One body being coded.

    Args:
        coding: how.
        shelf: where compressors come from, and go back to.
    """

    __slots__ = ("_coding", "_machine", "_shelf", "_zstd")

    def __init__(self, coding: Coding, shelf: Shelf) -> None:
        self._coding = coding
        self._shelf = shelf
        self._zstd = coding.name == "zstd"
        self._machine: Any = (
            shelf.take(coding) if self._zstd else brotli.Compressor(quality=coding.level, lgwin=_WINDOW_BITS)
        )

    async def feed(self, data: bytes, *, flush: bool) -> bytes:
        """Give what of the coded body can leave now, nothing where the machine wants more first.

        The loop is given back after each step of `limits_api.COMPRESS_STEP_BYTES`.

        Args:
            data: more of the body.
            flush: let the receiver have all of it, for bodies that come as they are made.
        """
        coded: list[bytes] = []
        for start in range(0, len(data), limits.COMPRESS_STEP_BYTES):
            if start:
                await asyncio.sleep(0)
            step = data[start : start + limits.COMPRESS_STEP_BYTES]
            coded.append(self._machine.compress(step) if self._zstd else self._machine.process(step))
        if flush:
            coded.append(self._machine.flush(self._machine.FLUSH_BLOCK) if self._zstd else self._machine.flush())
        return b"".join(coded)

    def finish(self) -> bytes:
        """Give the end of the coded body. Nothing may be fed afterwards."""
        machine, self._machine = self._machine, None
        coded: bytes = machine.flush() if self._zstd else machine.finish()
        if self._zstd:
            self._shelf.put(self._coding, machine)
        return coded


async def whole(coding: Coding, body: bytes, shelf: Shelf) -> bytes:
    """Code a whole body."""
    coder = Coder(coding, shelf)
    return await coder.feed(body, flush=False) + coder.finish()


def relabelled(headers: Headers, coding: Coding) -> Headers:
    """Give an answer's headers as they are for its coded body.

    Its bytes are others now: a strong validator becomes a weak one (RFC 9110 section 8.8.3), and neither lengths nor
    ranges hold.
    """
    dropped = ("content-length", "accept-ranges", "vary", "content-md5", "digest", "content-digest")
    vary = [value for name, value in headers if name.lower() == "vary"]
    fields = []
    for name, value in headers:
        lower = name.lower()
        if lower in dropped:
            continue
        weak = lower == "etag" and not value.startswith("W/")
        fields.append((name, f"W/{value}" if weak else value))
    return (*fields, ("content-encoding", coding.name), ("vary", ", ".join([*vary, "accept-encoding"])))
