"""A gateway of several processes on the same ports: devices spread over them, and the death of one is no one's loss."""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

import httpx2
import nats
import pytest
from nats.aio.msg import Msg

from stormline import AsyncClient, Config, errors
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
        if answer.status_code == 503:  # it has just started, and has not found its engine yet
            return {"state": "unavailable"}
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def close(self) -> None:
        await self._http.aclose()


def _worker_pid(platform: RunningPlatform, name: str = "gateway-2") -> int:
    run = layout.read(layout.Layout(platform.state).role(name), layout.RoleRun)
    assert run is not None
    return run.pid


class Traffic:
    """Calls and pushes without a pause, and what became of each.

    Attributes:
        worked: how often the service did each call.
        answered: calls whose answer came.
        unknown: calls that may have been done, says the client, and its error.
        undone: calls that certainly were not, says the client, and its error.
        acked: pushes that the platform says a device has taken over.
    """

    def __init__(self, platform: RunningPlatform, business: Business, devices: list[Device]) -> None:
        self._platform = platform
        self._business = business
        self._devices = devices
        self._over = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.worked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.unknown: dict[str, str] = {}
        self.undone: dict[str, str] = {}
        self.acked: list[tuple[Device, str]] = []

    async def __aenter__(self) -> Self:
        resolved = layout.read(layout.Layout(self._platform.state).resolved, layout.Resolved)
        assert resolved is not None
        engine = resolved.settings.nats
        self._nats = await nats.connect(engine.url, user=engine.biz_user, password=engine.biz_password)
        await self._nats.subscribe("rpc.work.do", queue="work", cb=self._begin)
        for device in self._devices:
            self._tasks += [asyncio.create_task(self._call(device)), asyncio.create_task(self._push(device))]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        await asyncio.gather(*self._tasks)
        await self._nats.close()

    async def _begin(self, message: Msg) -> None:
        self._tasks.append(asyncio.create_task(self._work(message)))

    async def _work(self, message: Msg) -> None:
        """Half of the calls take a moment, so that some are always under way."""
        name = json.loads(message.data)
        self.worked[name] += 1
        await asyncio.sleep(1.5 if int(name.rpartition("-")[2]) % 2 else 0.02)
        await message.respond(json.dumps(name).encode())

    async def _call(self, device: Device) -> None:
        number = 0
        while not self._over.is_set():
            name = f"{device.name}-{number}"
            number += 1
            try:
                assert await device.channel.call("work.do", name, deadline_s=30) == name
                self.answered[name] += 1
            except errors.TransportError as error:
                (self.unknown if error.maybe_delivered else self.undone)[name] = repr(error)

    async def _push(self, device: Device) -> None:
        number = 0
        while not self._over.is_set():
            push_id = f"{device.name}-{number}"
            try:
                state = (await self._business.push(device, push_id))["state"]
            except httpx2.TransportError:  # the first worker has the business API; its sender asks again
                state = "unknown"
            if state == "acked":
                self.acked.append((device, push_id))
                number += 1
            await asyncio.sleep(0.05)

    async def flows(self) -> None:
        """Wait until every device has had an answer and a push anew."""
        answered, acked = set(self.answered), len(self.acked)
        async with asyncio.timeout(60):
            while True:
                calls = {name.rpartition("-")[0] for name in set(self.answered) - answered}
                pushed = {device.name for device, _ in self.acked[acked:]}
                if len(calls) == len(pushed) == len(self._devices):
                    return
                await asyncio.sleep(0.05)

    def check(self) -> None:
        """Nothing was doubled, and nothing lost that somebody was told is done."""
        assert all(self.worked[name] == 1 for name in self.answered)
        assert all(self.worked[name] <= 1 for name in self.unknown)
        assert not any(self.worked[name] for name in self.undone)
        assert all(device.taken[push_id] == 1 for device, push_id in self.acked)
        assert all(count == 1 for device in self._devices for count in device.taken.values())


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


async def test_short_http_of_a_device_may_come_to_any_worker(two: RunningPlatform, tmp_path: Path) -> None:
    file = tmp_path / "rules.json"
    await asyncio.to_thread(two.command, "dispatch", "show", "--out", str(file))
    rules = json.loads(file.read_text())
    rules["disabled"] = ["sl-tls", "sl-wss"]
    file.write_text(json.dumps(rules))
    answer = await asyncio.to_thread(two.command, "dispatch", "set", str(file))
    assert answer.returncode == 0, answer.stderr
    business = Business(two)
    async with _devices(two) as devices:
        links = [device.channel._longline.link for device in devices]
        assert {link.carrier for link in links if link is not None} == {"sl-short"}
        for number in range(3):
            results = await asyncio.gather(*(business.push(device, f"{device.name}-{number}") for device in devices))
            assert {result["state"] for result in results} == {"acked"}
            calls = [device.channel.call("orders.create", {"item": 7}) for device in devices for _ in range(3)]
            assert len(await asyncio.gather(*calls)) == 3 * DEVICES
        assert {result["node"] for result in results} == {"n1", "n2"}
        assert all(sum(device.taken.values()) == 3 for device in devices)
    await business.close()


async def test_rolling_restart_in_traffic_loses_no_call_and_no_push(state: Path) -> None:
    """Two nodes on one port, one after the other; what takes 1.5 s of its 4 s of drain is under way at each moment."""
    with running_platform(
        state, "--only", "dispatch", "--only", "gateway",
        demo=False, environ={"STORMLINE_GATEWAY__WORKERS": "2", "STORMLINE_GATEWAY__DRAIN_S": "4"},
        stop_timeout_s=15.0,
    ) as platform:  # fmt: skip
        business = Business(platform)
        async with _devices(platform) as devices, Traffic(platform, business, devices) as traffic:
            await traffic.flows()
            for name in ("gateway", "gateway-2"):
                os.kill(_worker_pid(platform, name), signal.SIGTERM)
                os.kill(_worker_pid(platform, name), signal.SIGTERM)  # supervisors say it twice
                await asyncio.to_thread(platform.wait_event, "back", part=name)
                await traffic.flows()
        await business.close()
        traffic.check()
        assert not traffic.unknown | traffic.undone
        assert set(traffic.worked) == set(traffic.answered)


async def test_worker_killed_in_traffic_costs_reconnects_and_says_of_each_call_whether_it_may_be_done(
    state: Path,
) -> None:
    with running_platform(
        state, "--only", "dispatch", "--only", "gateway", demo=False, environ={"STORMLINE_GATEWAY__WORKERS": "2"}
    ) as platform:
        business = Business(platform)
        before = _worker_pid(platform)
        async with _devices(platform) as devices, Traffic(platform, business, devices) as traffic:
            await traffic.flows()
            os.kill(before, signal.SIGKILL)
            await traffic.flows()
        traffic.check()
        assert traffic.unknown  # some were under way there
        assert not traffic.undone  # what certainly was not done was sent again
        await asyncio.to_thread(platform.wait_event, "back", part="gateway-2")
        assert _worker_pid(platform) != before
        async with _devices(platform) as devices:
            nodes = {(await business.push(device, f"p-{device.name}"))["node"] for device in devices}
            assert nodes == {"n1", "n2"}
        await business.close()


def test_state_folder_tells_nothing_of_workers_of_an_earlier_run(tmp_path: Path) -> None:
    state = tmp_path / "state"
    (state / "run").mkdir(parents=True, mode=0o700)
    left = layout.RoleRun(role="gateway-9", pid=1, addresses={"gateway": "127.0.0.1:1"})
    layout.write(state / "run" / "gateway-9.json", left)
    with running_platform(state, "--only", "dispatch", demo=False) as platform:
        parts = json.loads(platform.command("status", "--json").stdout)["parts"]
        assert [part["role"] for part in parts] == ["dispatch"]
