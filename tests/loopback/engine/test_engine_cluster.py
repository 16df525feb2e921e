"""A cluster of three whose members are killed and frozen in traffic: nothing acknowledged is lost or doubled."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.engine.cluster import NatsCluster, start_cluster
from stormline.engine.nats import NatsEngine, connect
from stormline.engine.port import KeyValue, Message, Record, Reply, Stream
from stormline.net.child import Child
from stormline.net.clock import SystemRng

pytestmark = [pytest.mark.loopback, pytest.mark.timeout(180)]

WAIT_S = 60.0
"""Far above the slowest election: 4 to 9 s of silence, and another vote."""


@pytest.fixture(name="cluster")
async def _cluster(tmp_path: Path) -> AsyncIterator[NatsCluster]:
    """Give a cluster of one's own."""
    cluster = await start_cluster(tmp_path, rng=SystemRng())
    yield cluster
    await cluster.stop()


@pytest.fixture(name="dial")
async def _dial(cluster: NatsCluster):
    """Give what connects to one member first, knowing all."""
    engines: list[NatsEngine] = []

    async def dial(first: int | None = None, *, only: bool = False) -> NatsEngine:
        urls = [server.core.url for server in cluster.servers]
        at = urls if first is None else urls[first : first + 1]
        config = dataclasses.replace(cluster.core, url=",".join(at))
        engines.append(await connect(config, rng=SystemRng(), wait_s=WAIT_S))
        if first is not None and not only:
            engines[-1]._urls = urls
        return engines[-1]

    yield dial
    for engine in engines:
        await engine.close()


async def leader(engine: NatsEngine, cluster: NatsCluster, stream: str) -> int:
    async with asyncio.timeout(WAIT_S):
        while True:
            answer = await engine.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout_s=WAIT_S)
            name = json.loads(answer.data).get("cluster", {}).get("leader")
            if name:
                return cluster.number(name)
            await asyncio.sleep(0.1)


def freeze(child: Child) -> None:
    """Stop a process; its threads stop one after another, and until then they answer."""
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)


def place(engine: NatsEngine) -> str:
    url = engine.link().client.connected_url
    assert url is not None
    return f"nats://{url.netloc.rpartition('@')[2]}"


class Traffic:
    """Appends, increments and requests without end, and remembers how each ended."""

    def __init__(self, stream: Stream, kv: KeyValue, asker: NatsEngine) -> None:
        self.stream = stream
        self.kv = kv
        self.asker = asker
        self.acknowledged: dict[bytes, int] = {}
        self.increments = 0
        self.doubtful = 0
        self.outcomes: Counter[str] = Counter()
        self.stop = False

    async def append(self, writer: int) -> None:
        """Repeat each record under its id until it is acknowledged."""
        number = 0
        while not self.stop:
            number += 1
            text = f"{writer}-{number}"
            while text.encode() not in self.acknowledged:
                try:
                    sequence = await self.stream.append(f"s.{writer}", text.encode(), message_id=text)
                except errors.EngineError as error:
                    self.outcomes[type(error).__name__] += 1
                    await asyncio.sleep(0.05)
                    continue
                self.acknowledged[text.encode()] = sequence
            await asyncio.sleep(0)

    async def increment(self) -> None:
        """Count up by compare-and-set."""
        while not self.stop:
            try:
                entry = await self.kv.get("n")
                assert entry is not None
                await self.kv.update("n", b"%d" % (int(entry.value) + 1), entry.revision)
                self.increments += 1
            except errors.Conflict:
                pass
            except errors.EngineError as error:
                self.doubtful += error.maybe_delivered
                await asyncio.sleep(0.05)

    async def ask(self) -> None:
        """Ask a queue group."""
        while not self.stop:
            try:
                reply = await self.asker.request("t.work", b"x", timeout_s=2.0)
                assert reply.data == b"x"
                self.outcomes["answered"] += 1
            except errors.EngineError as error:
                self.outcomes[f"ask {type(error).__name__}"] += 1
            await asyncio.sleep(0.005)

    async def progress(self, appends: int, increments: int, answers: int) -> None:
        """Wait until so many more of each have succeeded."""
        wanted = [now + more for now, more in zip(self._counts(), (appends, increments, answers), strict=True)]
        async with asyncio.timeout(WAIT_S):
            while any(now < want for now, want in zip(self._counts(), wanted, strict=True)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def _counts(self) -> tuple[int, int, int]:
        return len(self.acknowledged), self.increments, self.outcomes["answered"]


async def echo(message: Message) -> Reply:
    return Reply(message.data)


async def eventual_value(kv: KeyValue, key: str) -> bytes | None:
    """Read once somebody answers."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                entry = await kv.get(key)
            except errors.EngineError:
                await asyncio.sleep(0.05)
                continue
            return None if entry is None else entry.value


async def all_records(stream: Stream, end: int) -> list[Record]:
    found: list[Record] = []
    async with asyncio.timeout(WAIT_S):
        while not found or found[-1].sequence < end:
            found += await stream.read("s.>", found[-1].sequence if found else 0, 1000)
    return found


async def test_leader_killed_in_traffic_loses_and_doubles_nothing_that_was_acknowledged(cluster, dial):
    engines = [await dial(number) for number in range(3)]
    stream = await engines[0].stream("s", ["s.>"], persistent=True, max_bytes=256 * 1024 * 1024)
    kv = await engines[1].kv("b", persistent=True)
    await kv.put("n", b"0")
    volatile = await engines[1].kv("volatile", persistent=False)
    await volatile.put("k", b"1")
    for engine in engines:
        await engine.serve("t.work", echo, queue="workers")
    worked: list[bytes] = []

    async def worker(records: Sequence[Record]) -> None:
        worked.extend(record.data for record in records)

    for engine in engines[:2]:
        opened = await engine.stream("s", ["s.>"], persistent=True, max_bytes=256 * 1024 * 1024)
        await opened.consume("c", worker, batch=50, ack_wait_s=2.0)
    traffic = Traffic(stream, kv, engines[2])
    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(traffic.append(number))
        for _ in range(2):
            group.create_task(traffic.increment())
            group.create_task(traffic.ask())
        await traffic.progress(100, 20, 20)
        killed = await leader(engines[0], cluster, "s")
        await cluster.kill(killed)
        await traffic.progress(100, 20, 20)  # the other two go on by themselves
        assert await eventual_value(volatile, "k") == b"1"
        await cluster.start(killed)
        await traffic.progress(100, 20, 20)
        other = await leader(engines[0], cluster, "KV_b")
        await cluster.kill(other)
        await traffic.progress(100, 20, 20)
        traffic.stop = True
    assert all(engine.connected for engine in engines)
    assert set(traffic.outcomes) <= {
        "answered",
        *("EngineUnavailable", "EngineTimeout", "EngineError"),
        *("ask EngineUnavailable", "ask EngineTimeout", "ask NoResponders"),
    }
    found = await all_records(stream, max(traffic.acknowledged.values()))
    places = {record.data: record.sequence for record in found}
    assert len(places) == len(found)  # none twice
    assert {text: places.get(text) for text in traffic.acknowledged} == traffic.acknowledged
    entry = await kv.get("n")
    async with asyncio.timeout(WAIT_S):
        while entry is None or int(entry.value) < traffic.increments:  # a copy may lag
            entry = await kv.get("n")
    assert traffic.increments <= int(entry.value) <= traffic.increments + traffic.doubtful
    async with asyncio.timeout(WAIT_S):
        while set(worked) != set(places):  # noqa: ASYNC110 - at least once each
            await asyncio.sleep(0.05)


async def test_client_goes_to_another_member_by_the_list_and_by_gossip(cluster, dial):
    listed, gossiped, worker = await dial(0), await dial(0, only=True), await dial(1)
    await worker.serve("t.work", echo, queue="workers")
    heard: list[bytes] = []

    async def listen(message: Message) -> None:
        heard.append(message.data)

    await gossiped.subscribe("t.news", listen)
    assert place(listed) == place(gossiped) == cluster.servers[0].core.url
    await cluster.kill(0)
    async with asyncio.timeout(WAIT_S):
        while not (listed.connected and gossiped.connected):  # noqa: ASYNC110 - the other side is another process
            await asyncio.sleep(0.01)
    others = {server.core.url for server in cluster.servers[1:]}
    assert place(listed) in others
    assert place(gossiped) in others
    assert (await listed.request("t.work", b"1", timeout_s=WAIT_S)).data == b"1"
    async with asyncio.timeout(WAIT_S):
        while not heard:  # interest travels between members
            await worker.publish("t.news", b"2")
            await asyncio.sleep(0.02)


async def test_frozen_member_is_left_by_its_clients_and_by_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "ENGINE_PING_S", 0.5)
    monkeypatch.setattr(limits, "ENGINE_CONNECT_TIMEOUT_S", 2)
    cluster = await start_cluster(tmp_path, rng=SystemRng())
    frozen = cluster.servers[0].child
    at = [dataclasses.replace(cluster.core, url=server.core.url) for server in cluster.servers]
    engines = [await connect(config, rng=SystemRng()) for config in at]  # the first one's way back leads to all

    async def answered(times: int) -> None:
        """Wait until so many requests in a row are."""
        good = 0
        async with asyncio.timeout(WAIT_S):
            while good < times:
                try:
                    good += (await engines[1].request("t.work", b"x", timeout_s=1.0)).data == b"x"
                except errors.EngineError:
                    good = 0
                    await asyncio.sleep(0.02)

    try:
        for engine in (engines[0], engines[2]):
            await engine.serve("t.work", echo, queue="workers")
        await answered(1)
        freeze(frozen)
        async with asyncio.timeout(WAIT_S):
            while not engines[0].connected or place(engines[0]) == at[0].url:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await answered(50)  # its share of the queue is nobody's until the others have left it
    finally:
        frozen.send_signal(signal.SIGCONT)
        for engine in engines:
            await engine.close()
        await cluster.stop()


async def test_without_a_majority_messages_go_on_writes_say_no_and_all_comes_back(cluster, dial, monkeypatch):
    engine, other = await dial(2), await dial(2)
    stream = await engine.stream("s", ["s.>"], persistent=True, max_bytes=1024 * 1024)
    kv = await engine.kv("b", persistent=True)
    await other.serve("t.work", echo)
    sequence = await stream.append("s.a", b"1")
    await kv.put("k", b"1")
    monkeypatch.setattr(limits, "ENGINE_KV_TIMEOUT_S", 1.0)
    for number in (0, 1):
        await cluster.kill(number)
    assert (await engine.request("t.work", b"x", timeout_s=WAIT_S)).data == b"x"
    refused = 0
    for attempt in (stream.append("s.a", b"2", message_id="m-2"), kv.put("k", b"2")):
        with pytest.raises((errors.EngineUnavailable, errors.EngineTimeout)):
            await attempt
        refused += 1
    assert refused == 2
    assert engine.connected
    with contextlib.suppress(errors.EngineUnavailable):  # a copy that had just been made answers once it has a leader
        assert [record.sequence for record in await stream.read("s.a", 0, 10)] == [sequence]
    await cluster.start(0)
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                await stream.append("s.a", b"2", message_id="m-2")
                await kv.put("k", b"3")
                break
            except errors.EngineError:
                await asyncio.sleep(0.1)
    async with asyncio.timeout(WAIT_S):
        while len(found := await stream.read("s.a", 0, 10)) < 2:  # noqa: ASYNC110 - a copy may lag
            await asyncio.sleep(0.05)
    assert (found[0].sequence, found[0].data) == (sequence, b"1")
    assert found[1].data == b"2"
