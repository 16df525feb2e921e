"""The memory engine on virtual time: hours pass in no time, and runs repeat exactly."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

import pytest

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.engine.memory import MemoryBroker, MemoryEngine
from stormline.engine.port import Message, Reply


class _NoIo(selectors.SelectSelector):
    """Instead of waiting, moves its loop's time."""

    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise AssertionError("nothing is scheduled: the code under test waits for ever")
        self.loop.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 0.0
        selector = _NoIo()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def test_request_times_out_on_virtual_time():
    async def main() -> float:
        engine = MemoryEngine(MemoryBroker())

        async def slow(message: Message) -> Reply:
            await asyncio.sleep(7200)
            return Reply()

        await engine.serve("t", slow)
        with pytest.raises(errors.EngineTimeout, match="no answer on t within 3600 s"):
            await engine.request("t", b"", timeout_s=3600.0)
        spent = asyncio.get_running_loop().time()
        await engine.close()
        return spent

    assert run(main()) == pytest.approx(3600.0)


def test_keys_live_exactly_their_time_and_a_write_renews_it():
    async def main() -> None:
        engine = MemoryEngine(MemoryBroker())
        kv = await engine.kv("b", persistent=False, ttl_s=100.0)
        await kv.put("k", b"1")
        await asyncio.sleep(99)
        await kv.put("k", b"2")
        await asyncio.sleep(99)
        assert await kv.get("k") is not None
        await asyncio.sleep(2)
        assert await kv.get("k") is None

    run(main())


def test_marks_of_deleted_keys_are_forgotten():
    async def main() -> None:
        broker = MemoryBroker()
        kv = await MemoryEngine(broker).kv("b", persistent=True)
        for number in range(100):
            await kv.put(f"k{number}", b"")
            await kv.delete(f"k{number}")
        await asyncio.sleep(limits.ENGINE_DELETED_KEY_LIFE_S + 1)
        assert broker.buckets["b"]._last == {}
        await kv.create("k1", b"")

    run(main())


def test_watch_collapses_the_changes_of_a_key_for_a_slow_reader():
    async def main() -> None:
        engine = MemoryEngine(MemoryBroker())
        kv = await engine.kv("b", persistent=False)
        await kv.put("k", b"first")
        changes = kv.watch()
        assert (await anext(changes)).value == b"first"
        for number in range(10_000):
            await kv.put("k", str(number).encode())
        await kv.put("other", b"")
        assert [(await anext(changes)).value for _ in range(2)] == [b"9999", b""]
        await changes.aclose()

    run(main())


def test_cut_without_restart_keeps_every_bucket():
    async def main() -> None:
        broker = MemoryBroker()
        engine = MemoryEngine(broker)
        kv = await engine.kv("b", persistent=False)
        await kv.put("k", b"1")
        broker.cut()
        with pytest.raises(errors.EngineUnavailable):
            await kv.get("k")
        broker.heal()
        assert await kv.get("k") is not None

    run(main())


def test_queue_members_take_turns():
    async def main() -> list[bytes]:
        broker = MemoryBroker()
        asker = MemoryEngine(broker)
        for name in (b"a", b"b", b"c"):
            await MemoryEngine(broker).serve("t", _named(name), queue="q")
        return [(await asker.request("t", b"", timeout_s=1.0)).data for _ in range(6)]

    assert run(main()) == [b"a", b"b", b"c"] * 2


def _named(name: bytes):
    async def handler(message: Message) -> Reply:
        return Reply(name)

    return handler


def test_close_cancels_handlers_that_do_not_end():
    async def main() -> tuple[float, bool]:
        engine = MemoryEngine(MemoryBroker())
        cancelled = False

        async def stuck(message: Message) -> None:
            nonlocal cancelled
            try:
                await asyncio.sleep(1e9)
            except asyncio.CancelledError:
                cancelled = True
                raise

        await engine.subscribe("t", stuck)
        await engine.publish("t", b"")
        await asyncio.sleep(0)
        await engine.close()
        return asyncio.get_running_loop().time(), cancelled

    assert run(main()) == (pytest.approx(limits.ENGINE_DRAIN_S), True)


def test_runs_repeat_exactly():
    async def main() -> list[tuple[float, bytes]]:
        broker = MemoryBroker()
        engines = [MemoryEngine(broker) for _ in range(4)]
        trace: list[tuple[float, bytes]] = []

        async def listen(message: Message) -> None:
            trace.append((asyncio.get_running_loop().time(), message.data))
            await asyncio.sleep(len(message.data) / 10)

        for engine in engines:
            await engine.subscribe("t.>", listen)
        for number in range(20):
            await engines[number % 4].publish(f"t.{number}", b"x" * number)
            await asyncio.sleep(0.3)
        await asyncio.sleep(100)
        return trace

    assert run(main()) == run(main())
