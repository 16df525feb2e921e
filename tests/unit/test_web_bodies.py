"""Bodies of requests: whole, in time, or one clear refusal; on the virtual time of `VirtualLoop`."""

import asyncio
from typing import Any

import pytest

from stormline.core.errors import RequestRefused
from stormline.testing import simloop
from stormline.testing.simloop import on_virtual_time
from stormline.web import bodies
from stormline.web.bodies import Reader

TIMEOUT_S = 10.0


class Peer:
    """A client that sends when it is told to."""

    def __init__(self, *headers: tuple[bytes, bytes]) -> None:
        self.scope: dict[str, Any] = {"type": "http", "headers": list(headers)}
        self._sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def send(self, body: bytes, *, more: bool = False) -> None:
        self._sent.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def leave(self) -> None:
        self._sent.put_nowait({"type": "http.disconnect"})

    def read_by(self, reader: Reader, size_max: int = 8) -> asyncio.Task[bytes]:
        return asyncio.create_task(reader.read(self.scope, self._sent.get, size_max))


async def refusal(task: asyncio.Task[bytes]) -> str:
    with pytest.raises(RequestRefused) as caught:
        await task
    return caught.value.code


@on_virtual_time
async def test_body_in_pieces_is_given_whole() -> None:
    peer, reader = Peer(), Reader(TIMEOUT_S)
    task = peer.read_by(reader)
    for piece in (b"ab", b"", b"cd"):
        peer.send(piece, more=True)
    peer.send(b"ef")
    assert await task == b"abcdef"
    reader.stop()


@on_virtual_time
async def test_each_body_has_its_own_absolute_time_with_one_timer_for_all() -> None:
    loop, reader = asyncio.get_running_loop(), Reader(TIMEOUT_S)
    begin, ended = loop.time(), []

    async def read_late(after_s: float) -> None:
        await asyncio.sleep(after_s)
        peer = Peer()
        task = peer.read_by(reader)
        for _ in range(4):  # what dribbles in wins no time
            await asyncio.sleep(1.0)
            peer.send(b"a", more=True)
        assert await refusal(task) == "timeout"
        ended.append(loop.time() - begin - after_s)

    async def read_quickly() -> None:
        for _ in range(100):
            peer = Peer()
            peer.send(b"a")
            assert await peer.read_by(reader) == b"a"
            await asyncio.sleep(0.3)

    await asyncio.gather(read_quickly(), *(read_late(after_s) for after_s in (0.0, 3.0, 3.0, 9.0, 25.0)))
    assert ended == pytest.approx([TIMEOUT_S] * 5)
    reader.stop()


@on_virtual_time
async def test_too_large_is_refused_by_its_length_and_by_its_bytes() -> None:
    reader = Reader(TIMEOUT_S)
    for length in (b"9", b"-1", b"x", b"", b"1" * 19, "٣".encode()):
        assert await refusal(Peer((b"content-length", length)).read_by(reader)) == "too-large"
    peer = Peer()
    peer.send(b"12345", more=True)
    peer.send(b"6789", more=True)
    assert await refusal(peer.read_by(reader)) == "too-large"
    reader.stop()


@on_virtual_time
async def test_peer_that_leaves_is_gone() -> None:
    peer, reader = Peer(), Reader(TIMEOUT_S)
    peer.send(b"ab", more=True)
    peer.leave()
    with pytest.raises(bodies.Gone):
        await peer.read_by(reader)
    reader.stop()


@on_virtual_time
async def test_stop_ends_the_waits_and_still_reads_what_is_here() -> None:
    waiting, reader = Peer(), Reader(TIMEOUT_S)
    task = waiting.read_by(reader)
    await asyncio.sleep(1.0)
    reader.stop()
    assert await refusal(task) == "stopping"
    here, late = Peer(), Peer()
    here.send(b"ab")
    assert await here.read_by(reader) == b"ab"
    assert await refusal(late.read_by(reader)) == "stopping"


@pytest.mark.parametrize("first", [True, False], ids=["before the time is up", "after it"])
def test_cancellation_stays_one_also_in_the_moment_in_which_the_time_is_up(first: bool) -> None:
    async def main() -> None:
        loop, reader, tasks = asyncio.get_running_loop(), Reader(TIMEOUT_S), []
        if first:
            loop.call_later(TIMEOUT_S, lambda: tasks[0].cancel())
        tasks.append(Peer().read_by(reader))
        await asyncio.sleep(0)
        if not first:
            loop.call_later(TIMEOUT_S, lambda: tasks[0].cancel())
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        assert tasks[0].cancelling()
        reader.stop()

    simloop.run(main)
