"""What a client does less of in the background, and what it counts of its costs."""

import asyncio
import dataclasses

import httpx2
import pytest

import stormline
from stormline.client.background import BACKGROUND
from stormline.core import errors, limits, limits_heartbeat, limits_means
from stormline.net.recorded import PushedNetwork
from stormline.policy.activity import CONDUCT, Activity
from stormline.testing.gateway import answering
from stormline.testing.origin import plain
from stormline.testing.world import wait_until
from stormline.wire import events as e

pytestmark = pytest.mark.loopback


def line_of(client):
    return client._storm.runtime().longline


def hedges(transport):
    return transport._inner._runtime.conduct.hedges


def network_of(client):
    return line_of(client).beating.network()


def beat(client):
    return line_of(client)._link.machine.heartbeat_s


class TestHeartbeat:
    async def test_background_asks_for_signs_of_life_as_rarely_as_was_proven(self, world):
        here = await world(answering())
        async with here.client() as client, client.channel() as channel:
            await channel.wait_connected()
            heartbeats = line_of(client).beating.heartbeats()
            assert beat(client) == limits_heartbeat.HEARTBEAT_START_S
            heartbeats.observe(network_of(client), 200.0, 0.0, alive=True)
            channel.set_activity("background")
            assert beat(client) == 200.0 * limits_heartbeat.HEARTBEAT_STEP
            client.set_activity("foreground")
            assert beat(client) == limits.HEARTBEAT_S

    async def test_link_made_in_the_background_has_its_heartbeat(self, world):
        here = await world(answering())
        async with here.client() as client:
            client.set_activity("background")
            line_of(client).beating.heartbeats().observe(network_of(client), 80.0, 0.0, alive=True)
            async with client.channel() as channel:
                await channel.wait_connected()
                assert beat(client) == 100.0

    async def test_return_to_the_foreground_asks_a_long_silent_link_at_once(self, world, monkeypatch):
        monkeypatch.setitem(CONDUCT, Activity.FOREGROUND, _with(CONDUCT[Activity.FOREGROUND], heartbeat_s=0.05))
        here = await world(answering())
        async with here.client() as client:
            client.set_activity("background")
            async with client.channel() as channel:
                await channel.wait_connected()
                await asyncio.sleep(0.1)
                woken = client.costs.wakeups
                client.set_activity("foreground")
                await wait_until(lambda: client.costs.wakeups > woken)

    async def test_gateway_that_wants_a_shorter_heartbeat_gets_it(self, world):
        async def script(end):
            await end.welcome(heartbeat_s=20.0)
            await end.stay()

        here = await world(script)
        async with here.client() as client, client.channel() as channel:
            await channel.wait_connected()
            channel.set_activity("inactive")
            assert beat(client) == 20.0


def _with(conduct, **changes):
    return dataclasses.replace(conduct, **changes)


class TestReturn:
    async def test_lost_link_that_only_pushes_need_waits_in_the_background_and_returns_to_the_foreground(self, world):
        async def loses(end):
            await end.welcome()
            await end.next(e.CallReceived)
            end.abort()

        here = await world(loses, answering())
        async with here.client() as client, client.channel() as channel:
            await channel.wait_connected()
            client.set_activity("inactive")
            with pytest.raises(errors.StormlineError):
                await channel.call("a.b", {}, deadline_s=1.0)
            await asyncio.sleep(0.3)
            assert len(here.gateway.ends) == 1
            client.set_activity("foreground")
            await wait_until(lambda: len(here.gateway.ends) == 2)

    async def test_call_in_the_background_opens_a_link_at_once(self, world):
        here = await world(answering())
        async with here.client() as client:
            client.set_activity("inactive")
            assert (await client.get("https://shop.test/")).status_code == 200


class TestHedges:
    @staticmethod
    async def silent_once(origin):
        """Give an origin whose first connection's second request is never answered, and whose others all are."""
        seen = []

        async def answer(request, writer):
            seen.append(writer)
            if seen.count(writer) == 2 and writer is seen[0]:
                await asyncio.sleep(30)
            writer.write(plain())

        return await origin(answer)

    @pytest.mark.parametrize(("activity", "hedged"), [("foreground", 1), ("background", 0)])
    async def test_attempt_beside_a_suspect_is_made_in_the_foreground_only(self, origin, activity, hedged, monkeypatch):
        from stormline.client import steering
        from stormline.policy import stall

        monkeypatch.setattr(limits, "LOOK_FIRST_S", 0.05)
        monkeypatch.setattr(
            steering.Steering, "look", lambda self, *_, **__: stall.Decision(stall.Action.FRESH, "suspect", 5.0)
        )
        there = await self.silent_once(origin)
        async with stormline.AsyncClient(timeout=0.5) as client:
            client.set_activity(activity)
            await client.get(there.url())
            assert (await client.get(there.url())).status_code == 200
            assert client.costs.hedges == hedged
            assert (client.costs.hedge_bytes_up > 0) == bool(hedged)

    @pytest.mark.parametrize(("metered", "room", "hedged"), [(True, 100, 0), (True, 30_000, 1), (False, 100, 1)])
    async def test_attempt_beside_a_suspect_has_its_bytes_asked_for_on_a_metered_network(
        self, origin, metered, room, hedged, monkeypatch
    ):
        from stormline.client import steering
        from stormline.policy import stall

        monkeypatch.setattr(limits, "LOOK_FIRST_S", 0.05)
        monkeypatch.setattr(limits_means, "METERED_FLOAT_BYTES", room)
        monkeypatch.setattr(
            steering.Steering, "look", lambda self, *_, **__: stall.Decision(stall.Action.FRESH, "suspect", 5.0)
        )
        there = await self.silent_once(origin)
        port = PushedNetwork()
        port.push({"kind": "wifi", "metered": metered, "addresses": ["127.0.0.1"]})
        async with stormline.AsyncClient(timeout=0.5, config=stormline.Config(network_port=port)) as client:
            await client.get(there.url())
            assert (await client.get(there.url())).status_code == 200  # what follows the time-out is never refused
            assert client.costs.hedges == hedged
            assert (client.costs.extra_bytes > 0) == (metered and hedged > 0)
            assert client.costs.extras_refused == (hedged == 0)


class TestSetting:
    def test_activity_that_does_not_exist_is_refused(self):
        with stormline.Client() as client, pytest.raises(errors.ConfigError, match="foreground, background, inactive"):
            client.set_activity("asleep")

    def test_synchronous_client_takes_it_before_and_after_its_first_request(self):
        transport = stormline.Transport()
        with httpx2.Client(transport=transport) as client:
            transport.set_activity("background")
            with pytest.raises(httpx2.ConnectError):
                client.get("http://127.0.0.1:1/", extensions={"stormline.deadline_s": 1.0})
            assert not hedges(transport)
            transport.set_activity("foreground")
            assert hedges(transport)
        BACKGROUND.stop()


class TestCosts:
    async def test_bytes_and_connections_are_those_of_the_sockets(self, origin):
        there = await origin(lambda request, writer: asyncio.sleep(0, writer.write(plain(b"x" * 5000))))
        async with stormline.AsyncClient() as client:
            assert client.costs.bytes_up == 0
            for _ in range(3):
                await client.get(there.url())
            costs = client.costs
        assert costs.connections == there.connections == 1
        assert costs.handshakes == 0
        assert 15_000 < costs.bytes_down < 16_000
        assert 200 < costs.bytes_up < 1500

    async def test_tls_is_counted_with_its_handshake(self, world):
        here = await world(answering())
        async with here.client() as client:
            await client.get("https://shop.test/")
            costs = client.costs
        assert costs.handshakes >= 2  # dispatch and the gateway
        assert costs.bytes_down > 1000

    async def test_wake_ups_are_counted_only_while_nothing_is_asked(self, world, monkeypatch):
        monkeypatch.setitem(CONDUCT, Activity.BACKGROUND, _with(CONDUCT[Activity.BACKGROUND], heartbeat_s=0.05))
        here = await world(answering())
        async with here.client() as client, client.channel() as channel:
            await channel.wait_connected()
            before = client.costs.wakeups
            client.set_activity("background")
            await wait_until(lambda: client.costs.wakeups >= before + 3)
