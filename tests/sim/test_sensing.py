"""What a client notices of its network: silence that is owed, silence that is not."""

import asyncio
from types import SimpleNamespace

import pytest

from stormline.client.sensing import Sensing
from stormline.core import limits_level
from stormline.net.tcpinfo import TcpInfo
from stormline.policy.level import Level
from stormline.policy.shape import Pattern, RequestShape
from stormline.testing import simloop


class Call:
    def __init__(self, *, asked_at=None, pattern=Pattern.CALL):
        self.asked_at = asked_at
        self.first_byte_s = None
        self.shape = RequestShape(host="a", pattern=pattern)


class Bench:
    """A sensing on virtual time, with a kernel that tells, and a network that was excellent a moment ago."""

    def __init__(self):
        self.calls = {}
        self.network = "home"
        self.costs = {}
        self.sensing = Sensing(
            lambda: self.network, self.calls, lambda shape, share: self.costs.get(shape.host), lambda host: 0.05
        )
        for _ in range(3):
            self.sensing.dialled("a", 0.05, 0.15)
        self.sensing.looked(Call(), SimpleNamespace(heard_at=0.0), TcpInfo())

    def enter(self, call):
        self.calls[call] = None
        self.sensing.entered(call)
        return call

    def leave(self, call):
        self.sensing.left(call)
        self.calls.pop(call)

    def level(self):
        return self.sensing.quality().level


def on_virtual_time(test):
    def run():
        async def main():
            await test(Bench(), asyncio.get_running_loop())

        simloop.run(main)

    run.__name__ = test.__name__
    return run


@on_virtual_time
async def test_silence_of_nobody_who_owes_anything_says_nothing(bench, loop):
    await asyncio.sleep(30.0)
    assert bench.level() is Level.EXCELLENT
    assert bench.sensing.weak() is None


@on_virtual_time
async def test_answer_that_is_owed_and_does_not_come_makes_it_bad(bench, loop):
    await asyncio.sleep(10.0)
    bench.enter(Call(asked_at=loop.time()))
    await asyncio.sleep(limits_level.LEVEL_SILENCE_S - 0.1)
    assert bench.level() is Level.EXCELLENT
    await asyncio.sleep(1.0)
    assert bench.level() is Level.BAD
    assert bench.sensing.weak().level is Level.BAD
    assert bench.sensing.carries() is Level.EXCELLENT


@pytest.mark.parametrize("pattern", [Pattern.LONG_POLL, Pattern.STREAM])
def test_what_may_be_silent_owes_nothing(pattern):
    async def main():
        bench = Bench()
        bench.enter(Call(asked_at=0.0, pattern=pattern))
        await asyncio.sleep(20.0)
        assert bench.level() is Level.EXCELLENT

    simloop.run(main)


@on_virtual_time
async def test_question_that_has_arrived_is_the_servers_to_answer(bench, loop):
    call = bench.enter(Call(asked_at=loop.time()))
    await asyncio.sleep(0.5)
    held = SimpleNamespace(heard_at=0.0)
    bench.sensing.looked(call, held, TcpInfo(unacked_bytes=0, notsent_bytes=0, ack_age_s=0.45))
    await asyncio.sleep(10.0)
    assert bench.level() is Level.EXCELLENT
    bench.sensing.looked(call, held, TcpInfo(unacked_bytes=17, notsent_bytes=0, ack_age_s=10.45))
    assert bench.level() is Level.BAD


@on_virtual_time
async def test_server_is_given_the_time_it_usually_takes(bench, loop):
    bench.costs["a"] = 4.0
    bench.enter(Call(asked_at=loop.time()))
    await asyncio.sleep(4.3)
    assert bench.level() is Level.EXCELLENT
    await asyncio.sleep(1.0)
    assert bench.level() is Level.BAD


@on_virtual_time
async def test_dial_that_shows_nothing_counts_and_one_that_is_refused_does_not(bench, loop):
    await asyncio.sleep(5.0)
    bench.enter(Call())
    bench.sensing.dialling("a")
    await asyncio.sleep(2.0)
    assert bench.level() is Level.BAD
    bench.sensing.dial_failed("a", 2.0)
    assert bench.level() is Level.BAD  # the next address is tried, and still nothing has come
    bench.sensing.dial_failed("a", 0.01)
    assert bench.level() is Level.EXCELLENT


@on_virtual_time
async def test_silence_goes_on_after_the_last_who_waited_gave_up_until_something_is_heard(bench, loop):
    call = bench.enter(Call(asked_at=loop.time()))
    await asyncio.sleep(10.0)
    bench.leave(call)
    assert bench.level() is Level.BAD
    await asyncio.sleep(5.0)
    assert bench.level() is Level.BAD
    bench.sensing.heard(loop.time())
    assert bench.level() is Level.EXCELLENT


@on_virtual_time
async def test_silence_without_traffic_ages_to_unknown(bench, loop):
    call = bench.enter(Call(asked_at=loop.time()))
    await asyncio.sleep(10.0)
    bench.leave(call)
    await asyncio.sleep(limits_level.LEVEL_MEMORY_S + 1.0)
    assert bench.level() is Level.UNKNOWN


@on_virtual_time
async def test_other_network_is_judged_for_itself_and_the_old_one_is_remembered(bench, loop):
    bench.enter(Call(asked_at=loop.time()))
    await asyncio.sleep(5.0)
    assert bench.level() is Level.BAD
    bench.network = "train"
    bench.sensing.changed()
    assert bench.level() is Level.UNKNOWN
    await asyncio.sleep(200.0)
    bench.calls.clear()
    bench.network = "home"
    bench.sensing.changed()
    assert bench.level() is Level.EXCELLENT
    assert bench.sensing.quality().confidence == 0.2
