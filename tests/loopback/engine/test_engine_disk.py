"""A disk that fills up: a clear no, nothing lost of what was acknowledged, and writing again once there is room."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.engine.nats import connect
from stormline.engine.server import start_server
from stormline.net.clock import SystemRng

pytestmark = [
    pytest.mark.loopback,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, which only root may"),
]
MEGABYTE = 1024 * 1024
WAIT_S = 30.0


@pytest.fixture(name="small_disk")
def _small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a folder with room for 64 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", disk], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


async def test_full_disk_refuses_clearly_keeps_what_was_acknowledged_and_recovers(
    small_disk, free_port, eventually, monkeypatch, caplog
):
    monkeypatch.setattr(limits, "ENGINE_KV_TIMEOUT_S", 2.0)
    monkeypatch.setattr(limits, "ENGINE_DISK_LOOK_S", 0.05)
    ballast = small_disk / "ballast"
    port = free_port()
    server = await start_server(small_disk / "engine", rng=SystemRng(), port=port)
    waiting = asyncio.create_task(server.wait())
    engine = await connect(server.core, rng=SystemRng())
    kv = await engine.kv("b", persistent=True)
    stream = await engine.stream("s", ["s.>"], persistent=True, max_bytes=1024 * MEGABYTE)
    await kv.put("k", b"1")
    with ballast.open("wb") as file:
        file.write(bytes(40 * MEGABYTE))

    taken: list[int] = []

    async def fill() -> None:
        while len(taken) < 64:
            number = len(taken)
            taken.append(await stream.append("s.a", bytes([number]) * MEGABYTE, message_id=f"m-{number}"))

    with pytest.raises(errors.EngineError, match="disk is full") as caught:
        await fill()
    assert caught.value.maybe_delivered is True
    assert 10 < len(taken) < 64
    await eventually(lambda: "is full: streams take nothing" in caplog.text)
    assert not waiting.done()

    async def kept() -> list[int]:
        found: list[int] = []
        while records := await stream.read("s.a", found[-1] if found else 0, 100):
            assert all(set(record.data) == {record.sequence - 1} for record in records)
            found += [record.sequence for record in records]
        return found

    assert await kept() == taken
    entry = await kv.get("k")
    assert entry is not None
    assert entry.value == b"1"

    ballast.unlink()
    async with asyncio.timeout(WAIT_S):
        assert await waiting == "its disk was full and has room again"
    server = await start_server(small_disk / "engine", rng=SystemRng(), port=port)  # as its supervisor does
    await eventually(lambda: engine.connected)
    number = len(taken)
    taken.append(await stream.append("s.a", bytes([number]) * MEGABYTE, message_id=f"m-{number}"))
    assert await stream.append("s.a", b"", message_id="m-0") == taken[0]
    assert await kept() == taken
    await kv.put("k", b"2")
    await engine.close()
    await server.stop()


async def test_server_that_ends_by_itself_has_no_reason_of_ours(server):
    waiting = asyncio.create_task(server.wait())
    await asyncio.sleep(0)
    await server.child.stop(0.0)
    assert await waiting == ""
    waiting = asyncio.create_task(server.wait())
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
