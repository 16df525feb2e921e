"""One timer for all connections: when entries are told, what becomes of those taken back, and how much at once."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormline.core import limits_platform
from stormline.gateway.wheel import Wheel
from stormline.testing import simloop

TICK_S = limits_platform.WHEEL_TICK_S


class Entry:
    def __init__(self, wheel=None, again_s=()):
        self.told = []
        self._wheel = wheel
        self._again_s = list(again_s)

    def on_timer(self):
        now = asyncio.get_running_loop().time()
        self.told.append(now)
        if self._again_s:
            self._wheel.add(self, now + self._again_s.pop(0))


def play(story):
    async def main():
        wheel = Wheel(asyncio.get_running_loop())
        return await story(wheel)

    return simloop.run(main).result


@given(st.lists(st.tuples(st.floats(0.0, 5000.0), st.booleans(), st.floats(0.0, 100.0)), max_size=60))
def test_each_entry_is_told_once_never_early_and_at_most_a_tick_late(plan):
    async def story(wheel):
        loop, seen = asyncio.get_running_loop(), []
        for after_s, taken_back, passed_s in plan:
            entry, due = Entry(), loop.time() + after_s
            wheel.add(entry, due)
            if taken_back:
                wheel.cancel(entry, due)
                wheel.cancel(entry, due)
            seen.append((entry, due, taken_back))
            await asyncio.sleep(passed_s)
        await asyncio.sleep(5002.0)
        assert len(wheel) == 0
        return seen

    for entry, due, taken_back in play(story):
        if taken_back:
            assert entry.told == []
        else:
            [at] = entry.told
            assert due <= at <= due + TICK_S + 1e-6


def test_entry_may_be_added_again_when_it_is_told_also_for_now():
    async def story(wheel):
        entry = Entry(wheel, again_s=(0.0, 10.0, 0.5))
        wheel.add(entry, 3.0)
        await asyncio.sleep(60.0)
        return entry.told

    told = play(story)
    assert len(told) == 4
    assert told == sorted(told)


def test_entry_taken_back_by_another_in_the_same_tick_is_not_told():
    async def story(wheel):
        other = Entry()

        class First(Entry):
            def on_timer(self):
                super().on_timer()
                wheel.cancel(other, 5.0)

        first = First()
        wheel.add(first, 5.0)
        wheel.add(other, 5.0)
        await asyncio.sleep(10.0)
        return first.told, other.told, len(wheel)

    first, other, left = play(story)
    assert len(first) == 1
    assert other == []
    assert left == 0


def test_full_tick_leaves_room_for_others_between_its_parts():
    async def story(wheel):
        entries = [Entry() for _ in range(3 * limits_platform.WHEEL_TURN_MAX)]
        for entry in entries:
            wheel.add(entry, 1.0)
        counts, loop = [], asyncio.get_running_loop()

        def look():
            counts.append(sum(len(each.told) for each in entries))
            if counts[-1] < len(entries):
                loop.call_soon(look)

        loop.call_at(1.0, look)
        await asyncio.sleep(3.0)
        return counts

    counts = play(story)
    assert counts[-1] == 3 * limits_platform.WHEEL_TURN_MAX
    assert {limits_platform.WHEEL_TURN_MAX, 2 * limits_platform.WHEEL_TURN_MAX} <= set(counts)


def test_entry_that_raises_keeps_no_other_from_being_told():
    async def story(wheel):
        loop, told = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda loop, context: told.append(context["exception"]))

        class Broken:
            def on_timer(self):
                raise ValueError("broken")

        entry = Entry()
        wheel.add(Broken(), 1.0)
        wheel.add(entry, 1.0)
        await asyncio.sleep(3.0)
        return told, entry.told

    errors, told = play(story)
    assert [str(each) for each in errors] == ["broken"]
    assert len(told) == 1


async def test_wheel_that_is_empty_holds_no_timer(monkeypatch: pytest.MonkeyPatch):
    loop = asyncio.get_running_loop()
    wheel, handles, entry, due = Wheel(loop), [], Entry(), loop.time() + 100.0
    call_at = loop.call_at
    monkeypatch.setattr(loop, "call_at", lambda *args: handles.append(call_at(*args)) or handles[-1])
    wheel.add(entry, due)
    wheel.cancel(entry, due + 100.0)  # another moment: not there
    assert len(wheel) == 1
    wheel.cancel(entry, due)
    assert len(wheel) == 0
    assert [each.cancelled() for each in handles] == [True]
