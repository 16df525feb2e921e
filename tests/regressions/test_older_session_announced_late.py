"""A session whose node was slow to announce it took the directory's entry from a newer one.

A device left node b for node a while b still waited for a slow engine to announce the session there. When b got to
write, it believed its session to be the newest, because it was new when it came, and raised its epoch above the
other's. Node a was told, believed it, and closed the device's only living session with REPLACED, which means for good.
Seen in simulation (`RefusedError: replaced: the device has a newer session on another node`).
"""

import asyncio
from typing import Self

import pytest

from stormline.appgw.directory import Directory
from stormline.appgw.port import Identity
from stormline.engine.memory import MemoryBroker, MemoryEngine, MemoryKeyValue
from stormline.testing.simloop import SimClock, on_virtual_time


class SlowEngine(MemoryEngine):
    """An engine that takes its time to open a bucket."""

    slow_s = 0.0

    async def kv(self, bucket: str, *, persistent: bool, ttl_s: float | None = None) -> MemoryKeyValue:
        await asyncio.sleep(self.slow_s)
        return await super().kv(bucket, persistent=persistent, ttl_s=ttl_s)


class Node:
    def __init__(self, broker: MemoryBroker, name: str, *, slow_s: float = 0.0, clock_error_s: float = 0.0) -> None:
        self.engine = SlowEngine(broker)
        self.engine.slow_s = slow_s
        self.superseded: list[str] = []
        self.directory = Directory(
            self.engine,
            unit="u1",
            node=name,
            clock=SimClock(asyncio.get_running_loop(), wall_error_s=clock_error_s),
            superseded=lambda identity: self.superseded.append(identity.session),
        )

    async def __aenter__(self) -> Self:
        await self.directory.start(self.engine)
        self.running = asyncio.create_task(self.directory.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.engine.close()


@pytest.mark.parametrize("ended", [True, False])
def test_session_announced_after_a_newer_one_yields_to_it(ended: bool) -> None:
    @on_virtual_time
    async def scene() -> None:
        broker = MemoryBroker()
        async with Node(broker, "a") as a, Node(broker, "b", slow_s=0.9) as b:
            old = Identity("shop", "d1", "", "s-old")
            b.directory.opened(old)
            await asyncio.sleep(0.3)
            a.directory.opened(Identity("shop", "d1", "", "s-new"))
            await asyncio.sleep(0.3)
            if ended:
                b.directory.closed(old)
            await asyncio.sleep(5)
            place = await a.directory.lookup("shop", "d1")
            assert place is not None
            assert (place.node, place.session) == ("a", "s-new")
            assert a.superseded == []
            assert b.superseded == ([] if ended else ["s-old"])

    scene()


@on_virtual_time
async def test_new_session_takes_the_entry_over_from_a_node_whose_clock_is_ahead() -> None:
    broker = MemoryBroker()
    async with Node(broker, "a", clock_error_s=100.0) as a, Node(broker, "b") as b:
        a.directory.opened(Identity("shop", "d1", "", "s-old"))
        await asyncio.sleep(5)
        b.directory.opened(Identity("shop", "d1", "", "s-new"))
        await asyncio.sleep(5)
        place = await a.directory.lookup("shop", "d1")
        assert place is not None
        assert (place.node, place.session) == ("b", "s-new")
        assert (a.superseded, b.superseded) == (["s-old"], [])
