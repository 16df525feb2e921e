"""The heartbeat over real sockets: what the kernel does beside it, what is kept of it, and how a dead link is found."""

import asyncio
import socket

import pytest

from stormline.core import errors, limits, limits_heartbeat
from stormline.testing.gateway import answering
from stormline.testing.world import wait_until

pytestmark = pytest.mark.loopback


def line_of(client):
    return client._storm.runtime().longline


async def test_kernel_does_not_wake_the_device_beside_the_heartbeat(world):
    here = await world(answering())
    async with here.client() as client, client.channel() as channel:
        await channel.wait_connected()
        stream = line_of(client).link.stream
        assert stream._raw._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0


async def test_what_a_network_stands_is_kept_for_the_next_start(world, tmp_path):
    here = await world(answering())
    async with here.client(store=tmp_path) as client, client.channel() as channel:
        await channel.wait_connected()
        line = line_of(client)
        line.beating._survived(line.link, 200.0)
    async with here.client(store=tmp_path) as client:
        client.set_activity("background")
        async with client.channel() as channel:
            await channel.wait_connected()
            assert line_of(client).link.machine.heartbeat_s == 200.0 * limits_heartbeat.HEARTBEAT_STEP


async def test_answered_ping_and_traffic_leave_no_timer_that_fires_for_nothing(world):
    here = await world(answering())
    async with here.client() as client, client.channel() as channel:
        await channel.wait_connected()
        link, loop = line_of(client).link, asyncio.get_running_loop()
        link.check()
        assert link._timer_at <= loop.time() + limits.HEARTBEAT_ANSWER_S
        await wait_until(lambda: link._timer_at > loop.time() + limits.HEARTBEAT_ANSWER_S)


async def test_link_whose_peer_hears_nothing_ends_by_one_call_and_the_next_call_goes_elsewhere(world, monkeypatch):
    monkeypatch.setattr(limits_heartbeat, "DOUBT_FIRST_S", 0.1)
    monkeypatch.setattr(limits, "HEARTBEAT_ANSWER_S", 0.3)

    async def deaf(end):
        await end.welcome()
        await asyncio.sleep(60)

    here = await world(deaf, answering())
    async with here.client() as client, client.channel() as channel:
        first = await channel.wait_connected()
        with pytest.raises(errors.ChannelLost) as caught:
            await channel.call("a.b", {}, deadline_s=30.0)
        assert caught.value.maybe_delivered
        await wait_until(lambda: channel.session is not None and channel.session.session != first.session)
        await channel.call("a.b", {}, deadline_s=30.0)


async def test_unanswered_call_leaves_the_link_and_all_others_alone(world, monkeypatch):
    monkeypatch.setattr(limits_heartbeat, "DOUBT_FIRST_S", 0.05)
    monkeypatch.setattr(limits, "HEARTBEAT_ANSWER_S", 5.0)

    async def handle(end, call):
        if call.method != "a.mute":
            end.reply(call, b"{}")

    here = await world(answering(handle))
    async with here.client() as client, client.channel() as channel:
        await channel.wait_connected()
        mute = asyncio.create_task(channel.call("a.mute", {}, deadline_s=1.0))
        while not mute.done():
            await channel.call("a.fine", {}, deadline_s=30.0)
            await asyncio.sleep(0.02)
        with pytest.raises(errors.DeadlineExceeded):
            await mute
        await channel.call("a.fine", {}, deadline_s=30.0)
    assert len(here.gateway.ends) == 1
    assert here.gateway.calls["a.mute"] == 1
