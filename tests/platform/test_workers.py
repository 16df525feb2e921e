"""A gateway of several processes on the same ports: devices spread over them, and the death of one is no one's loss."""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from stormline import AsyncClient, Config
from stormline.assembly import layout
from stormline.client.channel import Channel, Push
from stormline.testing.platform import RunningPlatform, running_platform
from stormline.wire import bundle as wire_bundle

pytestmark = [pytest.mark.platform, pytest.mark.timeout(150)]

DEVICES = 16
"""That all fall to one of two workers has a chance of one in 30,000."""


@pytest.fixture(name="two")
def _two(state: Path) -> Iterator[RunningPlatform]:
    with running_platform(
        state,
        "--only", "dispatch", "--only", "gateway", "--only", "shop",
        environ={"STORMLINE_GATEWAY__WORKERS": "2"},
    ) as platform:  # fmt: skip
        yield platform


class Device:
    """One device and what came to it."""

    def __init__(self, channel: Channel, name: str) -> None:
        self.channel = channel
        self.name = name
        self.taken: Counter[str] = Counter()

    async def take(self) -> None:
        push: Push
        async for push in self.channel.pushes():
            self.taken[push.id] += 1
            push.ack()


@asynccontextmanager
async def _devices(platform: RunningPlatform) -> AsyncIterator[list[Device]]:
    bundle = wire_bundle.decode(layout.Layout(platform.state).bundle.read_bytes())
    async with AsyncExitStack() as stack:
        devices = []
        for _ in range(DEVICES):
            client = await stack.enter_async_context(AsyncClient(config=Config(bundle=bundle)))
            channel = await stack.enter_async_context(client.channel())
            async with asyncio.timeout(20):
                welcome = await channel.wait_connected()
            devices.append(Device(channel, welcome.device))
        tasks = [asyncio.create_task(device.take()) for device in devices]
        try:
            yield devices
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Business:
    """The business API of the first worker."""

    def __init__(self, platform: RunningPlatform) -> None:
        admin = platform.admin
        self._http = httpx2.AsyncClient(
            base_url=f"http://{platform.addresses['admin']}",
            headers={"authorization": f"Bearer {admin.business_key.reveal()}"},
            timeout=30,
            trust_env=False,
        )

    async def push(self, device: Device, push_id: str) -> dict[str, Any]:
        answer = await self._http.post("/v1/push", json={"device": device.name, "id": push_id, "body": 1, "ttl_s": 5})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def close(self) -> None:
        await self._http.aclose()


def _worker_pid(platform: RunningPlatform) -> int:
    run = layout.read(layout.Layout(platform.state).role("gateway-2"), layout.RoleRun)
    assert run is not None
    return run.pid


async def test_devices_are_spread_over_the_workers_and_reached_wherever_they_are(two: RunningPlatform) -> None:
    business = Business(two)
    async with _devices(two) as devices:
        results = await asyncio.gather(*(business.push(device, f"p-{device.name}") for device in devices))
        assert {result["state"] for result in results} == {"acked"}
        assert {result["node"] for result in results} == {"n1", "n2"}
        assert all(device.taken == {f"p-{device.name}": 1} for device in devices)
        replies = await asyncio.gather(*(device.channel.call("orders.create", {"item": 7}) for device in devices))
        assert len(replies) == DEVICES
    await business.close()
    parts = json.loads((await asyncio.to_thread(two.command, "status", "--json")).stdout)["parts"]
    gateways = [part for part in parts if part["part"] == "gateway"]
    assert [part["role"] for part in gateways] == ["gateway", "gateway-2"]
    assert len({part["pid"] for part in gateways}) == 2
    assert len({part["address"] for part in gateways}) == 1
    assert {part["health"] for part in parts} == {"ok"}


async def test_worker_killed_in_traffic_costs_reconnects_alone(two: RunningPlatform) -> None:
    business = Business(two)
    async with _devices(two) as devices:
        acked: list[tuple[Device, str]] = []
        progress, over = asyncio.Event(), asyncio.Event()

        async def push_on(device: Device) -> None:
            number = 0
            while not over.is_set():
                push_id = f"{device.name}-{number}"
                result = await business.push(device, push_id)
                if result["state"] == "acked":
                    acked.append((device, push_id))
                    progress.set()
                    number += 1
                else:  # said so, and sent again under the same id: that it comes twice is the device's to see
                    await asyncio.sleep(0.05)

        pushing = [asyncio.create_task(push_on(device)) for device in devices]
        async with asyncio.timeout(60):
            while len(acked) < 10 * DEVICES:
                progress.clear()
                await progress.wait()
            before = _worker_pid(two)
            os.kill(before, signal.SIGKILL)
            count = len(acked)
            while len({id(device) for device, _ in acked[count:]}) < DEVICES:  # all are back
                progress.clear()
                await progress.wait()
            over.set()
            await asyncio.gather(*pushing)
        assert all(device.taken[push_id] == 1 for device, push_id in acked)
        assert all(count == 1 for device in devices for count in device.taken.values())
    await asyncio.to_thread(two.wait_event, "back", part="gateway-2")
    assert _worker_pid(two) != before
    async with _devices(two) as devices:
        assert {(await business.push(device, f"p-{device.name}"))["node"] for device in devices} == {"n1", "n2"}
    await business.close()


def test_state_folder_tells_nothing_of_workers_of_an_earlier_run(tmp_path: Path) -> None:
    state = tmp_path / "state"
    (state / "run").mkdir(parents=True, mode=0o700)
    left = layout.RoleRun(role="gateway-9", pid=1, addresses={"gateway": "127.0.0.1:1"})
    layout.write(state / "run" / "gateway-9.json", left)
    with running_platform(state, "--only", "dispatch", demo=False) as platform:
        parts = json.loads(platform.command("status", "--json").stdout)["parts"]
        assert [part["role"] for part in parts] == ["dispatch"]
