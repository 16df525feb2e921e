"""Business services as their teams write them: `stormline.Service`, and one in Node, behind a real gateway and NATS."""

import asyncio
import contextlib
import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import msgspec
import nats.errors
import pytest

import stormline
from stormline.assembly.services import discover
from stormline.core import errors
from stormline.core.codes import Code
from stormline.core.errors import CallError

pytestmark = [pytest.mark.loopback, pytest.mark.parametrize("bus", ["nats"], indirect=True)]
EXAMPLE = Path(__file__).parents[3] / "examples/node-service"


@contextlib.asynccontextmanager
async def serving(service, bus):
    """Have a service answer."""
    biz = bus.biz
    stop = asyncio.Event()
    task = asyncio.create_task(service.serve(biz.url, user=biz.user, password=biz.password, stop=stop))
    async with asyncio.timeout(20):
        await service.ready.wait()
    yield task
    stop.set()
    async with asyncio.timeout(20):
        await task


async def device_of(gateway, bus, eventually, **claims):
    await gateway.start(bus.connect)
    device = await gateway.connect(**claims)

    async def connected():
        return (await gateway.admin.get("/healthz")).json()["engine"] == "connected"

    await eventually(connected)
    return device


async def call(device, method, params=None, **fields):
    return json.loads((await device.call("rpc", method, body=json.dumps(params).encode(), **fields)).body)


async def refused(device, method, params=None, **fields):
    with pytest.raises(CallError) as raised:
        await call(device, method, params, **fields)
    return raised.value


class Point(msgspec.Struct):
    x: int
    y: int = 0


@dataclass
class Seen:
    """What handlers saw."""

    calls: list
    begun: asyncio.Event
    cancelled: asyncio.Event


@pytest.fixture(name="points")
def _points():
    seen = Seen([], asyncio.Event(), asyncio.Event())
    service = stormline.Service("points", version="2.1.0", at_once=4)

    @service.method("points.add", Point)
    async def add(given: stormline.ServiceCall):
        seen.calls.append(given)
        return Point(given.params.x + 1, given.params.y)

    @service.method("points.refuse", int)
    def refuse(given: stormline.ServiceCall):
        raise errors.ServiceError(given.params, "not\r\nnow")

    @service.method("points.break")
    def breaks(given: stormline.ServiceCall):
        raise KeyError("secret detail")

    @service.method("points.wait")
    async def wait(given: stormline.ServiceCall):
        seen.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.cancelled.set()
            raise

    service.seen = seen
    return service


async def test_handler_gets_typed_parameters_and_who_calls(gateway, bus, points, eventually):
    async with serving(points, bus):
        device = await device_of(gateway, bus, eventually, device="d1", user="änn")
        answer = await call(device, "points.add", {"x": 1}, headers=(("Idempotency-Key", "k1"),), deadline_s=5.0)
        assert answer == {"x": 2, "y": 0}
        (seen,) = points.seen.calls
        assert (seen.params, seen.app, seen.device, seen.user, seen.key) == (Point(1), "demo", "d1", "änn", "k1")
        assert 0 < seen.deadline_s <= 5


async def test_each_kind_of_no_has_its_code(gateway, bus, points, eventually, caplog):
    async with serving(points, bus):
        device = await device_of(gateway, bus, eventually)
        error = await refused(device, "points.add", {"x": "one"})
        assert (error.code, error.maybe_delivered) == (Code.CALL_FAILED, False)
        assert error.reason.startswith("400 parameters: Expected `int`")
        error = await refused(device, "points.refuse", 409)
        assert (error.code, error.reason, error.maybe_delivered) == (Code.CALL_FAILED, "409 not now", False)
        error = await refused(device, "points.refuse", 503)
        assert (error.code, error.maybe_delivered, bool(error.retry_after_s)) == (Code.CALL_UNAVAILABLE, False, True)
        error = await refused(device, "points.break")
        assert (error.code, error.reason, error.maybe_delivered) == (Code.CALL_FAILED, "500 KeyError", True)
        assert "points.break failed" in caplog.text
        assert points.seen.calls == []


async def test_caller_that_gives_up_cancels_the_handler(gateway, bus, points, eventually):
    async with serving(points, bus):
        device = await device_of(gateway, bus, eventually)
        call_id = device.open("rpc", "points.wait", body=b"null", deadline_s=60.0)
        async with asyncio.timeout(20):
            await points.seen.begun.wait()
            device.machine.send_cancel(call_id)
            device.flush()
            await points.seen.cancelled.wait()


async def test_deadline_of_the_caller_ends_the_handler(gateway, bus, points, eventually):
    async with serving(points, bus):
        device = await device_of(gateway, bus, eventually)
        error = await refused(device, "points.wait", deadline_s=0.3)
        assert (error.code, error.maybe_delivered) in (
            (Code.CALL_DEADLINE, True), (Code.CALL_FAILED, True),
        )  # fmt: skip
        async with asyncio.timeout(20):
            await points.seen.cancelled.wait()


async def test_more_calls_than_it_works_on_are_told_to_come_later(gateway, bus, points, eventually):
    async with serving(points, bus):
        device = await device_of(gateway, bus, eventually)
        waiting = [device.open("rpc", "points.wait", body=b"null", deadline_s=60.0) for _ in range(4)]

        async def busy():
            with contextlib.suppress(CallError):
                await call(device, "points.add", {"x": 1}, deadline_s=5.0)
                return False
            return True

        await eventually(busy)
        error = await refused(device, "points.add", {"x": 1})
        assert (error.code, error.reason) == (Code.CALL_UNAVAILABLE, "503 busy")
        for call_id in waiting:
            device.machine.send_cancel(call_id)
        device.flush()

        async def free():
            return not await busy()

        await eventually(free)


async def test_service_told_to_stop_ends_what_it_has_begun(gateway, bus, eventually):
    service, begun, go = stormline.Service("slow", version="1.0.0"), asyncio.Event(), asyncio.Event()

    @service.method("slow.work")
    async def work(given: stormline.ServiceCall):
        begun.set()
        await go.wait()
        return "done"

    async with serving(service, bus):
        device = await device_of(gateway, bus, eventually)
        task = asyncio.create_task(call(device, "slow.work", deadline_s=30.0))
        async with asyncio.timeout(20):
            await begun.wait()
        asyncio.get_running_loop().call_later(0.2, go.set)
    assert await task == "done"
    assert (await refused(device, "slow.work")).code == Code.CALL_NOT_FOUND


async def test_services_are_found_with_version_methods_and_calls_and_do_not_find_each_other(
    gateway, bus, points, service, eventually
):
    second = stormline.Service("points", version="2.1.0")
    second.method("points.add")(lambda given: None)
    async with serving(points, bus), serving(second, bus):
        device = await device_of(gateway, bus, eventually)
        for _ in range(4):
            await call(device, "points.add", {"x": 1})
        found = await discover(bus.core)
        assert [(each.name, each.version) for each in found] == [("points", "2.1.0")] * 2
        assert sorted(each.methods for each in found) == [
            ("points.add",), ("points.add", "points.refuse", "points.break", "points.wait"),
        ]  # fmt: skip
        assert sum(each.requests for each in found) == 4
        client = service._client  # a service's own credential
        inbox = client.new_inbox()
        answers = await client.subscribe(inbox)
        await client.publish("$SRV.STATS", b"", reply=inbox)
        with pytest.raises(nats.errors.TimeoutError):
            await answers.next_msg(0.5)
    assert await discover(bus.core) == []


async def test_names_that_nats_does_not_have_are_refused(bus):
    with pytest.raises(errors.ConfigError, match="a b"):
        stormline.Service("a b", version="1.0.0")
    with pytest.raises(errors.ConfigError, match="version"):
        stormline.Service("a", version="one")
    service = stormline.Service("a", version="1.0.0")
    service.method("a.b")(print)
    with pytest.raises(errors.ConfigError, match="registered already"):
        service.method("a.b")
    with pytest.raises(errors.ConfigError, match="expected dotted"):
        service.method("A")


@pytest.fixture(scope="session", name="node_service")
def _node_service(tmp_path_factory):
    """Give the example with its packages."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("no node here")
    folder = tmp_path_factory.mktemp("node") / "service"
    shutil.copytree(EXAMPLE, folder)
    done = subprocess.run(
        ["npm", "ci", "--no-audit", "--no-fund"], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        pytest.skip(f"npm could not install the example's packages: {done.stderr[-300:]}")
    return folder


async def test_service_in_node_answers_refuses_and_hears_of_a_caller_that_left(
    gateway, bus, node_service, eventually, monkeypatch
):
    monkeypatch.setenv("NATS_URL", bus.biz.url)
    monkeypatch.setenv("NATS_PASSWORD", bus.biz.password.reveal())
    process = await asyncio.create_subprocess_exec("node", "greeter.mjs", cwd=node_service, stdout=subprocess.PIPE)
    try:
        async with asyncio.timeout(30):
            assert await process.stdout.readline() == b"answering\n"
        device = await device_of(gateway, bus, eventually, device="d1")
        assert await call(device, "greeter.hello", "Ada") == "Hello Ada, on device d1"
        error = await refused(device, "greeter.hello", 7)
        assert (error.code, error.reason) == (Code.CALL_FAILED, "400 expected a name")
        call_id = device.open("rpc", "greeter.slow", body=b"null", deadline_s=60.0)
        assert await call(device, "greeter.stopped") == 0
        device.machine.send_cancel(call_id)
        device.flush()

        async def stopped():
            return await call(device, "greeter.stopped") == 1

        await eventually(stopped)
    finally:
        process.kill()
        await process.wait()
