"""A real nats-server, a cluster of three and the memory broker behind one face, so that one suite runs on all."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Protocol

import pytest
import pytest_asyncio

from stormline.engine.cluster import NatsCluster, start_cluster
from stormline.engine.memory import MemoryBroker, MemoryEngine
from stormline.engine.nats import connect
from stormline.engine.port import Engine
from stormline.engine.server import RunningServer, start_server
from stormline.net.clock import SystemRng


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


async def eventually(condition: Callable[[], bool], wait_s: float = 15.0) -> None:
    async with asyncio.timeout(wait_s):
        while not condition():  # noqa: ASYNC110 - the other side is another process
            await asyncio.sleep(0.01)


class Platform(Protocol):
    """What the conformance suite needs of a version of the engine."""

    async def engine(self) -> Engine: ...

    async def cut(self) -> None: ...

    async def heal(self) -> None: ...


class MemoryPlatform:
    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.engines: list[MemoryEngine] = []

    async def engine(self) -> Engine:
        self.engines.append(MemoryEngine(self.broker))
        return self.engines[-1]

    async def cut(self) -> None:
        self.broker.cut()

    async def heal(self) -> None:
        self.broker.heal(restarted=True)

    async def close(self) -> None:
        for engine in self.engines:
            await engine.close()


class NatsPlatform:
    def __init__(self, state_dir: Path, server: RunningServer, port: int) -> None:
        self.state_dir = state_dir
        self.server = server
        self.port = port
        self.engines: list[Engine] = []

    async def engine(self) -> Engine:
        self.engines.append(await connect(self.server.core, rng=SystemRng()))
        return self.engines[-1]

    async def cut(self) -> None:
        await self.server.child.stop(0.0)
        await eventually(lambda: not any(engine.connected for engine in self.engines))

    async def heal(self) -> None:
        self.server = await start_server(self.state_dir, rng=SystemRng(), port=self.port)
        await eventually(lambda: all(engine.connected for engine in self.engines))

    async def close(self) -> None:
        for engine in self.engines:
            await engine.close()
        await self.server.stop()


class ClusterPlatform:
    """A cluster that tests share, one after the other; each finds it empty. It cannot be cut."""

    def __init__(self, cluster: NatsCluster) -> None:
        self.cluster = cluster
        self.engines: list[Engine] = []

    async def engine(self) -> Engine:
        self.engines.append(await connect(self.cluster.core, rng=SystemRng()))
        return self.engines[-1]

    async def close(self) -> None:
        for engine in self.engines:
            await engine.close()
        cleaner = await connect(self.cluster.core, rng=SystemRng())
        names = json.loads((await cleaner.request("$JS.API.STREAM.NAMES", b"", timeout_s=10.0)).data)["streams"]
        for name in names or []:
            await cleaner.request(f"$JS.API.STREAM.DELETE.{name}", b"", timeout_s=10.0)
        await cleaner.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that takes a platform on memory and one server; those of classes marked so on a cluster too.

    On a cluster where `STORMLINE_CLUSTER` is set, as `make soak` does: its servers elect and sync beside all else that
    runs, and two cores do not bear several of them at once. What a cluster is for, `test_engine_cluster`, runs always.
    """
    if "platform" in metafunc.fixturenames:
        clustered = getattr(metafunc.cls, "clustered", False) and bool(os.environ.get("STORMLINE_CLUSTER"))
        metafunc.parametrize("platform", ["memory", "nats"] + ["cluster"] * clustered, indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Start the shared cluster before anything of a test's own, so that it is none of the test's leftovers.

    Three servers elect in real time: on a busy machine an election may outlast a test's patience, so a test of the
    cluster that fails is run once more, and the summary says so. What is wrong in the code fails twice.
    """
    for item in items:
        if item.path.parent == Path(__file__).parent and "cluster" in item.nodeid:
            item.add_marker(pytest.mark.flaky(reruns=1))
        callspec = getattr(item, "callspec", None)
        if callspec is not None and callspec.params.get("platform") == "cluster":
            item.fixturenames.insert(0, "shared_cluster")


@pytest_asyncio.fixture(name="shared_cluster", scope="session", loop_scope="session")
async def _shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NatsCluster]:
    """Give one cluster of three for all tests."""
    cluster = await start_cluster(tmp_path_factory.mktemp("cluster"), rng=SystemRng())
    yield cluster
    await cluster.stop()


@pytest.fixture(name="platform")
async def _platform(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[MemoryPlatform | NatsPlatform | ClusterPlatform]:
    """Give one version of the engine."""
    if request.param == "memory":
        memory = MemoryPlatform()
        yield memory
        await memory.close()
    elif request.param == "cluster":
        cluster = ClusterPlatform(request.getfixturevalue("shared_cluster"))
        yield cluster
        await cluster.close()
    else:
        port = free_port()
        nats = NatsPlatform(tmp_path, await start_server(tmp_path, rng=SystemRng(), port=port), port)
        yield nats
        await nats.close()
        assert nats.server.child.returncode is not None


@pytest.fixture(name="server")
async def _server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    """Give a running embedded server."""
    server = await start_server(tmp_path / "engine", rng=SystemRng(), port=free_port())
    yield server
    await server.stop()


@pytest.fixture(name="free_port")
def _free_port() -> Callable[[], int]:
    """Give what finds a free port."""
    return free_port


@pytest.fixture(name="eventually")
def _eventually() -> Callable[..., Awaitable[None]]:
    """Give what waits for another process."""
    return eventually
