"""A power cut, as far as one machine can show it: the server's disk is an image, and what counts is what is in the
image at the moment of the cut. What the file system still held in memory is lost, as it would be.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stormline.core import errors
from stormline.engine.cluster import start_cluster
from stormline.engine.nats import NatsEngine, connect
from stormline.engine.port import Stream
from stormline.engine.server import start_server
from stormline.net.child import Child
from stormline.net.clock import SystemRng

pytestmark = [
    pytest.mark.loopback,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("mkfs.ext4") is None,
        reason="mounts an image with ext4, which needs root and mkfs.ext4",
    ),
]
RECORDS = 200
WAIT_S = 60.0


class Disk:
    """An ext4 file system in an image."""

    def __init__(self, image: Path, folder: Path) -> None:
        self.image = image
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        mounted = subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True, check=False)
        if mounted.returncode != 0:
            pytest.skip(f"cannot mount an image here: {mounted.stderr.decode().strip()}")

    def cut(self, to: Path) -> None:
        """Copy what a power cut would leave at this moment."""
        subprocess.run(["cp", "--sparse=always", "--reflink=never", self.image, to], check=True)

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", self.folder], check=True)


def make_image(path: Path) -> Path:
    """Make an image of 128 MB with an empty file system."""
    with path.open("wb") as file:
        file.truncate(128 * 1024 * 1024)
    subprocess.run(["mkfs.ext4", "-q", path], check=True)
    return path


@pytest.fixture(name="disk")
def _disk(tmp_path: Path) -> Iterator[Disk]:
    """Give a mounted disk."""
    disk = Disk(make_image(tmp_path / "image"), tmp_path / "disk")
    yield disk
    disk.unmount()


def freeze(child: Child) -> None:
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)


@pytest.mark.parametrize("sync_always", [True, False])
async def test_power_cut_keeps_what_was_acknowledged_where_each_write_is_synced(disk, tmp_path, free_port, sync_always):
    server = await start_server(disk.folder / "e", rng=SystemRng(), port=free_port(), sync_always=sync_always)
    engine = await connect(server.core, rng=SystemRng())
    stream = await engine.stream("s", ["s.>"], persistent=True, max_bytes=32 * 1024 * 1024)
    kv = await engine.kv("b", persistent=True)
    revision = await kv.put("k", b"1")
    acknowledged = [await stream.append("s.a", b"%d" % number) for number in range(RECORDS)]
    freeze(server.child)
    disk.cut(tmp_path / "after")
    server.child.send_signal(signal.SIGKILL)
    await server.child.wait()
    await engine.close()

    left = Disk(tmp_path / "after", tmp_path / "left")
    try:
        server = await start_server(left.folder / "e", rng=SystemRng(), port=free_port(), sync_always=sync_always)
        engine = await connect(server.core, rng=SystemRng())
        stream = await engine.stream("s", ["s.>"], persistent=True, max_bytes=32 * 1024 * 1024)
        kv = await engine.kv("b", persistent=True)
        found = await stream.read("s.a", 0, 1000)
        entry = await kv.get("k")
        assert [record.data for record in found] == [b"%d" % number for number in range(len(found))]
        if sync_always:
            assert [record.sequence for record in found] == acknowledged
            assert entry is not None
            assert (entry.value, entry.revision) == (b"1", revision)
        else:  # so the cut is a real one
            assert len(found) < len(acknowledged)
        await engine.close()
        await server.stop()
    finally:
        await asyncio.to_thread(left.unmount)


async def lead(engine: NatsEngine, stream: str, member: str) -> None:
    """Make a member the stream's leader."""
    async with asyncio.timeout(WAIT_S):
        while True:
            info = await engine.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout_s=WAIT_S)
            if json.loads(info.data).get("cluster", {}).get("leader") == member:
                return
            wanted = json.dumps({"placement": {"preferred": member}}).encode()
            await engine.request(f"$JS.API.STREAM.LEADER.STEPDOWN.{stream}", wanted, timeout_s=WAIT_S)
            await asyncio.sleep(0.5)


async def append(stream: Stream, number: int) -> int:
    """Append until it is acknowledged."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await stream.append("s.a", b"%d" % number, message_id=f"m-{number}")
            except errors.EngineError:
                await asyncio.sleep(0.1)


async def all_there(stream: Stream, acknowledged: list[int]) -> None:
    async with asyncio.timeout(WAIT_S):
        found: list[int] = []
        while not found or found[-1] < acknowledged[-1]:  # a copy may lag, or answer once it has caught up
            try:
                records = await stream.read("s.a", found[-1] if found else 0, 1000)
            except errors.EngineError:
                records = []
            found += [record.sequence for record in records]
            assert all(record.data == b"%d" % (record.sequence - 1) for record in records)
            await asyncio.sleep(0.02)
    assert found == acknowledged


@pytest.mark.timeout(240)
async def test_power_cut_of_a_clusters_leader_loses_nothing_though_it_syncs_late(tmp_path):
    folder = tmp_path / "cluster"
    first = Disk(make_image(tmp_path / "image"), folder / "n0")
    mounted = [first]
    cluster = await start_cluster(folder, rng=SystemRng())
    engine = await connect(cluster.core, rng=SystemRng())
    try:
        stream = await engine.stream("s", ["s.>"], persistent=True, max_bytes=32 * 1024 * 1024)
        await lead(engine, "s", "n0")
        acknowledged = [await append(stream, number) for number in range(RECORDS)]
        freeze(cluster.servers[0].child)
        first.cut(tmp_path / "after")
        await cluster.kill(0)
        await asyncio.to_thread(mounted.pop().unmount)
        mounted.append(Disk(tmp_path / "after", folder / "n0"))
        acknowledged += [await append(stream, number) for number in range(RECORDS, RECORDS + 20)]
        await cluster.start(0)
        await all_there(stream, acknowledged)
        await lead(engine, "s", "n0")  # it has caught up
        await cluster.kill(1)
        acknowledged += [await append(stream, number) for number in range(RECORDS + 20, RECORDS + 40)]
        await all_there(stream, acknowledged)
    finally:
        await engine.close()
        await cluster.stop()
        for each in mounted:
            await asyncio.to_thread(each.unmount)
