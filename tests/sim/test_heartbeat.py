"""The real client and gateway through a NAT, over days of virtual time: what its heartbeat settles at, and what dies.

A link counts as lost when the NAT's limit took it. Between the two real processes nothing is replaced but sockets,
clocks and chance.
"""

import asyncio

import pytest

from stormline.core import errors, limits, limits_heartbeat
from stormline.core.codes import Code
from stormline.core.values import Address
from stormline.engine.port import Reply
from stormline.netmodel.params import BlackoutMode
from stormline.policy.activity import Activity
from stormline.policy.shape import Network
from stormline.testing import simloop
from stormline.testing.history import History
from stormline.testing.scenario import Scenario, Workload
from stormline.testing.simdevice import Device
from stormline.testing.simloop import SimRng
from stormline.testing.simnet import Nat, NoFaults, SimNet
from stormline.testing.simplatform import APP, FaultyEngine, Platform
from stormline.testing.simtcp import SYN

FOUND_S = limits_heartbeat.DOUBT_FIRST_S + limits_heartbeat.ANSWER_S_MIN
"""From a call on a half-open link to its end, where round trips are short."""
NOWHERE = Address("192.0.2.254", 9)


class MuteNat(Nat):
    """A translator that drops what it has forgotten, instead of beginning anew: nobody answers with RST."""

    def outbound(self, segment, now):
        known = self._outer.get((segment.src, segment.dst))
        if not segment.flags & SYN and (known is None or now - known[1] > self.idle_s):
            return segment._replace(dst=NOWHERE)
        return super().outbound(segment, now)


class Phone:
    """A device behind a NAT, with its platform."""

    def __init__(self, limit_s, *, mute=True, seed=1):
        loop = asyncio.get_running_loop()
        rng = SimRng(seed, "heartbeat")
        self.history = History(scenario="heartbeat", seed=seed)
        net = SimNet(loop, rng.child("net"))
        self.platform = Platform(loop, net, rng.child("platform"), NoFaults(), self.history, gateways=1)
        scenario = Scenario(about="One device, hardly used.", link={"delay_s": 0.04}, workload=Workload(devices=1))
        self.device = Device(
            1, loop=loop, net=net, platform=self.platform, scenario=scenario, history=self.history,
            rng=rng.child("device"), sites=NoFaults(),
        )  # fmt: skip
        if limit_s is not None:
            self.device.host.nat = (MuteNat if mute else Nat)("100.64.0.1", limit_s)
            net.route("100.64.0.1", self.device.host)
        self.cuts = []  # when, and how, a session lost its connection

    @property
    def nat(self):
        return self.device.host.nat

    @property
    def runtime(self):
        return self.device._transport.runtime()

    @property
    def line(self):
        return self.runtime.longline

    @property
    def beat_s(self):
        return self.line.link.machine.heartbeat_s

    @property
    def lost(self):
        return len(self.history.links) + len(self.cuts)

    async def start(self, activity=Activity.BACKGROUND):
        await self.platform.start()
        await self.device.start()
        loop, told = asyncio.get_running_loop(), self.line.link_detached

        def detached(link, closed):
            self.cuts.append((loop.time(), closed))
            told(link, closed)

        self.line.link_detached = detached
        await asyncio.sleep(5.0)
        self.runtime.set_activity(activity)

    async def stop(self):
        await self.device.stop()
        await self.platform.stop()


def play(limit_s, story, *, mute=True, activity=Activity.BACKGROUND):
    async def main():
        phone = Phone(limit_s, mute=mute)
        await phone.start(activity)
        result = await story(phone)
        await phone.stop()
        return result

    return simloop.run(main, time_max_s=40 * 24 * 3600.0).result


@pytest.mark.parametrize(
    ("limit_s", "mute"), [(45.0, True), (120.0, True), (300.0, True), (300.0, False), (480.0, True)]
)
def test_heartbeat_settles_below_what_the_nat_stands_with_three_links_lost_at_most(limit_s, mute):
    async def story(phone):
        await asyncio.sleep(3 * 3600.0)
        found = phone.lost, phone.beat_s
        wakeups = phone.runtime.costs.wakeups
        await asyncio.sleep(3 * 3600.0)
        return *found, phone.lost, phone.runtime.costs.wakeups - wakeups

    lost, beat_s, lost_later, wakeups = play(limit_s, story, mute=mute)
    assert 1 <= lost == lost_later <= 3
    assert 0.8 * limit_s <= beat_s < limit_s
    assert wakeups <= 3 * 3600.0 / (0.8 * limit_s) + 2  # one for each beat, and none for its answer


def test_traffic_puts_the_beat_off_and_wakes_nobody():
    async def story(phone):
        await asyncio.sleep(3 * 3600.0)
        await phone.device.call("rpc-key")
        fired, link = [], phone.line.link
        link.woke = lambda: fired.append(link)
        for _ in range(20):
            await asyncio.sleep(phone.beat_s * 0.8)
            assert (await phone.device.call("rpc-key")).error == ""
        return len(fired)

    assert play(300.0, story) == 0


def test_foreground_keeps_it_short_and_the_background_goes_on_searching():
    async def story(phone):
        await asyncio.sleep(3600.0)
        short_s = phone.beat_s
        phone.runtime.set_activity(Activity.BACKGROUND)
        await asyncio.sleep(4 * 3600.0)
        return short_s, phone.beat_s, phone.lost

    short_s, long_s, lost = play(300.0, story, activity=Activity.FOREGROUND)
    assert short_s == limits.HEARTBEAT_S
    assert 240.0 <= long_s < 300.0
    assert lost <= 3


def test_gateway_bounds_the_search():
    async def story(phone):
        await asyncio.sleep(2 * 3600.0)
        return phone.beat_s, phone.lost

    assert play(3000.0, story) == (limits_heartbeat.HEARTBEAT_ASKED_S, 0)


def test_push_after_the_longest_silence_gets_through():
    async def story(phone):
        await asyncio.sleep(3 * 3600.0)
        device_id = phone.device.look()
        node = phone.platform.gateways[0].node
        results = []
        for number in range(10):
            await asyncio.sleep(977.0)  # no multiple of the heartbeat: at any point of the silence
            results.append(await node.push.push(APP, device_id, b"x", topic="t", push_id=f"h{number}"))
        phone.history.strange_pushes.clear()
        return [each.delivery.value for each in results]

    assert play(300.0, story) == ["acked"] * 10


def test_carrier_that_shortens_its_memory_is_followed():
    async def story(phone):
        await asyncio.sleep(3 * 3600.0)
        before = phone.lost
        phone.nat.idle_s = 60.0
        await asyncio.sleep(3 * 3600.0)
        return phone.lost - before, phone.beat_s

    lost, beat_s = play(300.0, story)
    assert lost <= 3
    assert 48.0 <= beat_s < 60.0


def test_links_lost_by_chance_do_not_end_the_search():
    async def story(phone):
        for _ in range(3):
            await asyncio.sleep(400.0)
            phone.nat.forget()
        await asyncio.sleep(3 * 3600.0)
        phone.nat.forget()  # and one of what was found
        await asyncio.sleep(3600.0)
        return phone.beat_s

    assert 240.0 <= play(300.0, story) < 300.0


def test_dead_network_is_not_taken_for_a_nat():
    async def story(phone):
        await asyncio.sleep(2 * 3600.0)
        before = phone.beat_s
        for _ in range(5):
            phone.device.host.link.blackout(BlackoutMode.DROP, 900.0)
            await asyncio.sleep(2000.0)
        proven_s = phone.line.beating.heartbeats().proven_s(phone.line.beating.network())
        return before, phone.beat_s, proven_s

    before, after, proven_s = play(None, story)
    assert before <= after
    assert proven_s >= before


def test_change_of_network_says_nothing_of_the_one_before():
    async def story(phone):
        await asyncio.sleep(3 * 3600.0)
        before = phone.beat_s
        for _ in range(10):
            await asyncio.sleep(before / 2)
            phone.device.leave_network(kill=False)
            await asyncio.sleep(2.0)
            phone.device.join_network()
            phone.runtime.network_changed()
            await asyncio.sleep(30.0)
        return before, phone.beat_s

    before, after = play(300.0, story)
    assert after == pytest.approx(before)


def test_network_that_gets_a_name_keeps_what_was_found():
    async def story(phone):
        await asyncio.sleep(3 * 3600.0)
        before = phone.beat_s
        phone.runtime.steering.rename(Network("wifi-home", "wifi"))
        return before, phone.line.beating.silence_s(), phone.line.beating.heartbeats().settled("wifi-home")

    before, after, settled = play(300.0, story)
    assert after == pytest.approx(before, rel=1e-3)
    assert settled


class TestHalfOpen:
    def test_first_unanswered_call_finds_it_within_seconds_and_is_answered_elsewhere(self):
        async def story(phone):
            await asyncio.sleep(100.0)
            phone.nat.forget()
            loop = asyncio.get_running_loop()
            began = loop.time()
            entry = await phone.device.call("rpc-key")
            [(_, closed)] = phone.cuts
            return entry.error, closed, loop.time() - began

        error, closed, took_s = play(400.0, story)
        assert error == ""
        assert closed.code == Code.HEARTBEAT_TIMEOUT
        assert FOUND_S - 2.0 <= took_s <= FOUND_S + limits.RECONNECT_FIRST_S + 1.0

    def test_link_whose_packets_vanish_ends_by_its_first_call(self):
        async def story(phone):
            await asyncio.sleep(100.0)
            began = asyncio.get_running_loop().time()
            phone.device.host.link.blackout(BlackoutMode.DROP, 60.0)
            await phone.device.call("rpc")
            return phone.cuts[0][0] - began

        assert play(None, story) <= FOUND_S + 0.5

    def test_call_that_is_not_answered_kills_neither_the_link_nor_the_others(self):
        async def story(phone):
            asked = []

            async def mute(message):
                asked.append(message.subject)
                await asyncio.sleep(3600.0)

            service = FaultyEngine(phone.platform.broker, SimRng(1, "mute"), NoFaults())
            await service.serve("rpc.mute.*", mute, queue="mute")
            link = phone.line.link
            call = asyncio.create_task(_outcome(phone.device._channel.call("mute.x", {}, deadline_s=40.0)))
            errors_seen = []
            for _ in range(30):
                errors_seen.append((await phone.device.call("rpc-key")).error)
                await asyncio.sleep(1.0)
            alone = await call
            await asyncio.sleep(60.0)
            same = link is phone.line.link and link.closed is None
            await service.close()
            return asked, alone, errors_seen, same, phone.lost

        asked, alone, errors_seen, same, lost = play(None, story, activity=Activity.FOREGROUND)
        assert len(asked) == 1
        assert isinstance(alone, errors.DeadlineExceeded)
        assert errors_seen == [""] * 30
        assert same
        assert lost == 0

    def test_long_wait_alone_on_a_link_keeps_it_and_asks_ever_more_rarely(self):
        async def story(phone):
            async def slow(message):
                await asyncio.sleep(100.0)
                return Reply(b"1")

            service = FaultyEngine(phone.platform.broker, SimRng(1, "slow"), NoFaults())
            await service.serve("rpc.slow.*", slow, queue="slow")
            link = phone.line.link
            fired, ping = [], link.machine.ping
            link.machine.ping = lambda *args: fired.append(args) or ping(*args)
            answer = await phone.device._channel.call("slow.x", {}, deadline_s=200.0)
            await service.close()
            return (
                answer,
                link is phone.line.link,
                [len(args) for args in fired].count(2),
            )  # those of its heartbeat have one

        answer, same, pings = play(None, story)
        assert answer == 1
        assert same
        assert 3 <= pings <= limits_heartbeat.DOUBTS_MAX

    def test_call_beside_one_that_waits_for_long_finds_a_dead_link_as_soon(self):
        async def story(phone):
            async def slow(message):
                await asyncio.sleep(1000.0)
                return Reply(b"1")

            service = FaultyEngine(phone.platform.broker, SimRng(1, "slow"), NoFaults())
            await service.serve("rpc.slow.*", slow, queue="slow")
            waits = asyncio.create_task(_outcome(phone.device._channel.call("slow.x", {}, deadline_s=900.0)))
            await asyncio.sleep(40.0)
            phone.nat.forget()
            loop = asyncio.get_running_loop()
            began = loop.time()
            error = (await phone.device.call("rpc-key")).error
            took_s = loop.time() - began
            await waits
            await service.close()
            return error, took_s

        error, took_s = play(400.0, story)
        assert error == ""
        assert took_s <= FOUND_S + limits.RECONNECT_FIRST_S + 1.0


async def _outcome(call):
    try:
        return await call
    except errors.StormlineError as error:
        return error
