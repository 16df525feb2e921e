"""The body of an answer on its way to the caller: measured, and continued elsewhere where it breaks off.

A body that stalls or breaks in its middle need not fail the call: what the caller has so far is remembered (its
beginning, or a digest of it), the request is sent once more, and the new body goes on where the old one ended. It does
so only where it is the same: the server sends the rest by range under the same strong validator (RFC 9110 sections
13.1.5 and 14), or the whole again, whose beginning is compared byte for byte with what was handed out.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Final

from stormline.client.lanes import Reply
from stormline.core import errors, limits
from stormline.outbound.messages import BodySource, Headers, field_value

Resume = Callable[[errors.TransportError, Headers], Awaitable[Reply]]
"""Sends the request again, with these fields more; raises the error that was given where it may not or cannot."""


class MemoryBody:
    """`BodySource` of a body that is there already."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def complete(self) -> bool:
        """See `BodySource.complete`."""
        return True

    def patience(self, silence_s: float) -> None:
        """See `BodySource.patience`; nothing is waited for."""

    async def read(self) -> bytes:
        """See `BodySource.read`."""
        data, self._data = self._data, b""
        return data

    async def aclose(self) -> None:
        """See `BodySource.aclose`."""
        self._data = b""


class FollowedBody:
    """`BodySource` that counts what passes, and goes on elsewhere where the answer breaks off.

    Args:
        reply: whose body it is.
        ended: called once, with the bytes that passed and whether they were all, and came from one answer.
        resume: sends the request again; None where the body must not be continued.
        moved: told now and then of a body that takes long how many bytes came in how many seconds.

    Attributes:
        waiting_since: the loop's time since when the reader waits for the next piece; None where it does not.
    """

    __slots__ = ("_began_at", "_beginning", "_digest", "_ended", "_loop", "_measure_at", "_moved", "_reply",
                 "_resume", "_source", "_taken", "_together", "waiting_since")  # fmt: skip

    def __init__(
        self,
        reply: Reply,
        ended: Callable[[int, bool], None],
        resume: Resume | None,
        moved: Callable[[int, float], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._began_at = self._loop.time()
        self._measure_at = self._began_at + limits.MEASURE_BODY_S
        self._moved = moved
        self._reply: Final = reply
        self._source: BodySource = reply.source
        self._ended: Callable[[int, bool], None] | None = ended
        self._resume = resume
        self._taken = 0
        self._together = True  # it came from one answer, so that its time says something of the link
        self.waiting_since: float | None = None
        self._beginning: list[bytes] = []
        self._digest: hashlib.blake2b | None = None

    @property
    def complete(self) -> bool:
        """See `BodySource.complete`."""
        return self._source.complete

    def patience(self, silence_s: float) -> None:
        """See `BodySource.patience`."""
        self._source.patience(silence_s)

    async def read(self) -> bytes:
        """See `BodySource.read`."""
        self.waiting_since = self._loop.time()
        try:
            data = await self._source.read()
        except errors.TransportError as error:
            if self._resume is None:
                self._end(whole=False)
                raise
            self._together, self._moved = False, None
            data = await self._go_on(error, self._resume)
        finally:
            self.waiting_since = None
        if data:
            self._keep(data)
        else:
            self._end(whole=self._together)
        return data

    async def aclose(self) -> None:
        """See `BodySource.aclose`."""
        self._end(whole=False)
        await self._source.aclose()

    def _end(self, *, whole: bool) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(self._taken, whole)

    def _keep(self, data: bytes) -> None:
        """Remember what the caller has."""
        self._taken += len(data)
        if self._moved is not None and self._taken >= limits.MEASURE_BODY_BYTES:
            now = self._loop.time()
            if now >= self._measure_at:
                self._measure_at = now + (now - self._began_at)
                self._moved(self._taken, now - self._began_at)
        if self._resume is None:
            return
        if self._digest is None:
            self._beginning.append(data)
            if self._taken <= limits.RESUME_KEPT_BYTES:
                return
            data, self._digest = b"".join(self._beginning), hashlib.blake2b()
            self._beginning.clear()
        self._digest.update(data)

    # -- going on ---------------------------------------------------------------------------------------------------
    async def _go_on(self, error: errors.TransportError, resume: Resume) -> bytes:
        """Give the piece after what the caller has, from another answer."""
        while True:
            await self._source.aclose()
            reply = await resume(error, self._range())
            self._source = reply.source
            try:
                if reply.status == 206:
                    self._check_range(reply, error)
                    return await self._source.read()
                return await self._skip(reply, error)
            except _Changed:
                await self._source.aclose()
                raise error from None
            except errors.TransportError as again:
                error = again

    def _range(self) -> Headers:
        """Give the fields that ask for the rest; none where the whole has to come again."""
        tag = field_value(self._reply.headers, b"etag")
        if self._taken < limits.RANGE_BYTES_MIN or tag is None or tag.startswith(b"W/"):
            return ()
        return ((b"Range", b"bytes=%d-" % self._taken), (b"If-Range", tag))

    def _check_range(self, reply: Reply, error: errors.TransportError) -> None:
        said = field_value(reply.headers, b"content-range") or b""
        start = said.removeprefix(b"bytes ").partition(b"-")[0].strip()
        if not self._range() or start != b"%d" % self._taken or not self._same(reply):
            raise _Changed from error

    def _same(self, reply: Reply) -> bool:
        """Say whether an answer looks like the same one: equal in coding and, where both have them, in validators."""
        for name in (b"content-encoding", b"etag", b"last-modified"):
            first, second = field_value(self._reply.headers, name), field_value(reply.headers, name)
            if first != second and (name == b"content-encoding" or None not in (first, second)):
                return False
        return True

    async def _skip(self, reply: Reply, error: errors.TransportError) -> bytes:
        """Read past what the caller has, comparing; give the rest of the last piece, `b""` at the end."""
        if reply.status != self._reply.status or not self._same(reply):
            raise _Changed from error
        digest = None if self._digest is None else hashlib.blake2b()
        known = memoryview(b"".join(self._beginning))
        passed, rest = 0, b""
        while passed < self._taken:
            data = await self._source.read()
            if not data:
                raise _Changed from error
            part = data[: self._taken - passed]
            if digest is not None:
                digest.update(part)
            elif known[passed : passed + len(part)] != part:
                raise _Changed from error
            passed += len(part)
            rest = data[len(part) :]
        if digest is not None and self._digest is not None and digest.digest() != self._digest.digest():
            raise _Changed from error
        return rest or await self._source.read()


class _Changed(Exception):
    """What came now is not what the caller has the beginning of."""
