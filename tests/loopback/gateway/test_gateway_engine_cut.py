"""The engine cut off for a while: what needs none goes on, the rest says no at once, and all comes back by itself.

`STORMLINE_CUT_S=60` lets the cut last a minute, with the engine's own pings as they are in production.
"""

import asyncio
import os
import signal

import pytest

from stormline.core import limits
from stormline.core import limits_platform as platform_limits
from stormline.core.codes import Code
from stormline.core.errors import CallError
from stormline.engine.port import Reply
from stormline.wire import events as e

CUT_S = float(os.environ.get("STORMLINE_CUT_S", "2"))
pytestmark = [pytest.mark.loopback, pytest.mark.timeout(60 + 3 * CUT_S)]

HOST = "api.shop.example"
QUICK_S = 2.0
"""What counts as at once: it takes milliseconds, and nothing here waits for less than `limits.PUSH_ACK_TIMEOUT_S`."""


async def shop(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


class Interactive:
    """What an app does all the time and needs no engine for: API requests and pings, timed."""

    def __init__(self, device):
        self.device = device
        self.waits_s: list[float] = []
        self.pongs = 0
        self._stop = False

    async def run(self):
        loop = asyncio.get_running_loop()
        while not self._stop:
            start = loop.time()
            assert (await self.device.get(f"https://{HOST}/")).body == b"ok"
            self.waits_s.append(loop.time() - start)
            self.device.machine.ping(loop.time())
            self.device.flush()
            await self.device.next(e.PongReceived)
            self.pongs += 1
            await asyncio.sleep(0.02)

    def stop(self):
        self._stop = True


async def cut(bus, how):
    if how == "killed":
        await bus.cut()
        return
    child = bus._server.child
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)  # noqa: ASYNC222 - a moment: threads stop one after another


async def heal(bus, how):
    if how == "killed":
        await bus.heal()
    else:
        bus._server.child.send_signal(signal.SIGCONT)


async def engine_is(gateway, wanted):
    return (await gateway.admin.get("/healthz")).json()["engine"] == wanted


async def at(gateway, device, node):
    answer = await gateway.admin.get(f"/v1/devices/{device}")
    return answer.status_code == 200 and answer.json()["node"] == node


@pytest.mark.parametrize("bus", ["nats"], indirect=True)
@pytest.mark.parametrize("how", ["frozen", "killed"])
async def test_engine_cut_leaves_interactive_calls_alone(
    gateway, second, bus, service, upstream, eventually, monkeypatch, how, capsys
):
    if CUT_S < 60:
        monkeypatch.setattr(platform_limits, "ENGINE_PING_S", 0.2)
    loop = asyncio.get_running_loop()

    async def echo(message):
        return Reply(message.data)

    await service.serve("rpc.a.echo", echo)
    await gateway.start(bus.connect, api_upstreams={HOST: await upstream(shop)})
    await second.start(bus.connect, node="n2")
    here = await gateway.connect("here")
    await second.connect("there")
    await eventually(lambda: at(gateway, "there", "n2"))
    await eventually(lambda: at(second, "here", "n1"))
    assert (await here.call("rpc", "a.echo", body=b"1")).body == b"1"

    interactive = Interactive(here)
    async with asyncio.TaskGroup() as group:
        group.create_task(interactive.run())
        await cut(bus, how)
        begin = loop.time()
        flying = asyncio.create_task(here.call("rpc", "a.echo", body=b"2", deadline_s=limits.CALL_DEADLINE_MAX_S))
        with pytest.raises(CallError) as raised:  # also what was under way ends, long before its deadline
            await flying
        assert raised.value.code == Code.CALL_UNAVAILABLE
        noticed_s = loop.time() - begin
        await eventually(lambda: engine_is(gateway, "unavailable"))
        refusals = 0
        while loop.time() < begin + CUT_S or refusals < 3:
            start = loop.time()
            with pytest.raises(CallError) as raised:
                await here.call("rpc", "a.echo", body=b"3")
            assert (raised.value.code, raised.value.maybe_delivered) == (Code.CALL_UNAVAILABLE, False)
            assert raised.value.retry_after_s
            refused = await gateway.admin.post("/v1/push", json={"device": "there", "body": 1})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            assert int(refused.headers["retry-after"]) >= 1
            assert loop.time() - start < QUICK_S
            refusals += 1
            await asyncio.sleep(0.05)
        taken = await gateway.admin.post("/v1/push", json={"device": "here", "body": 1})
        assert taken.json()["state"] == "acked"
        late = await gateway.connect("late")  # sessions come, and are announced when they can be
        await heal(bus, how)
        mend = loop.time()
        await eventually(lambda: engine_is(gateway, "connected"), wait_s=30.0)
        connected_s = loop.time() - mend

        async def answered():
            try:
                return (await here.call("rpc", "a.echo", body=b"4")).body == b"4"
            except CallError:
                return False

        await eventually(answered, wait_s=30.0)
        await eventually(lambda: at(gateway, "there", "n2"), wait_s=30.0)
        await eventually(lambda: at(second, "late", "n1"), wait_s=30.0)
        healed_s = loop.time() - mend
        pushed = await second.admin.post("/v1/push", json={"device": "late", "body": 2})
        assert pushed.json()["state"] == "acked"
        await late.next(e.PushReceived)
        interactive.stop()
    assert interactive.pongs == len(interactive.waits_s) > 10
    assert max(interactive.waits_s) < QUICK_S
    waits = sorted(interactive.waits_s)
    with capsys.disabled():
        if CUT_S >= 60:
            print(f"\n{how} for {CUT_S:.0f} s: {len(waits)} API requests, none failed,", end=" ")
            print(f"p50 {waits[len(waits) // 2]:.4f} s, max {waits[-1]:.4f} s;", end=" ")
            print(f"{refusals} calls and pushes refused; call under way told after {noticed_s:.2f} s;", end=" ")
            print(f"connected {connected_s:.2f} s, all found {healed_s:.2f} s after the end")
