"""What the resolver remembers, and whom it keeps waiting: on the simulator's VirtualLoop, where DNS takes as long as
it is told."""

import asyncio
import errno
import socket

import pytest

from stormline.core import limits, limits_names
from stormline.core.values import Address
from stormline.net.resolve import Found, Resolver, no_name
from stormline.testing import simloop
from stormline.testing.simloop import on_virtual_time

FRESH, OLD, STALE = limits.RESOLVE_FRESH_S, limits.RESOLVE_OLD_S, limits.RESOLVE_STALE_S
PATIENCE, FAILED = limits.RESOLVE_PATIENCE_S, limits.RESOLVE_FAILED_S
AGAIN = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
NO_NAME = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


class Names:
    """A source whose answers take `delay_s`, and which notes every question."""

    def __init__(self, answer=("192.0.2.1",), delay_s=0.02):
        self.answer = answer
        self.delay_s = delay_s
        self.asked = []
        self.withdrawn = []
        self.full = False

    def ask(self, host, *, refresh):
        if self.full:
            raise BlockingIOError(errno.EAGAIN, "full")
        self.asked.append((host, refresh))
        return asyncio.get_running_loop().create_task(self._answer(self.delay_s, self.answer))

    async def _answer(self, delay_s, answer):
        await asyncio.sleep(delay_s)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Found) else Found(answer)

    def withdraw(self, host):
        self.withdrawn.append(host)


def now():
    return asyncio.get_running_loop().time()


async def ask(resolver, host="a.test", **more):
    """Give the IPs, or the error, and the seconds it took."""
    began = now()
    try:
        found = [address.host for address in await resolver.resolve(host, 443, **more)]
    except OSError as error:
        return error, round(now() - began, 3)
    return found, round(now() - began, 3)


async def learned(age_s=0.0, **more):
    """Give a resolver that learned a name `age_s` ago, and its source."""
    names = Names(**more)
    resolver = Resolver(names)
    await resolver.resolve("a.test", 443)
    await asyncio.sleep(age_s)
    names.asked.clear()
    return resolver, names


@on_virtual_time
async def test_resolve_first_time_waits_and_then_remembers():
    names = Names(("192.0.2.1", "2001:db8::1"))
    resolver = Resolver(names)
    assert await resolver.resolve("a.test", 7) == (Address("192.0.2.1", 7), Address("2001:db8::1", 7))
    assert await resolver.resolve("A.TEST", 8) == (Address("192.0.2.1", 8), Address("2001:db8::1", 8))
    assert (names.asked, round(now(), 3)) == ([("a.test", False)], 0.02)


@on_virtual_time
async def test_resolve_fresh_answer_asks_nobody():
    resolver, names = await learned(FRESH - 1)
    assert await ask(resolver) == (["192.0.2.1"], 0)
    assert names.asked == []


@on_virtual_time
async def test_resolve_older_answer_is_given_at_once_and_renewed_behind():
    resolver, names = await learned(FRESH + 1)
    names.answer = ("192.0.2.2",)
    assert [await ask(resolver) for _ in range(3)] == [(["192.0.2.1"], 0)] * 3
    await asyncio.sleep(0.1)
    assert await ask(resolver) == (["192.0.2.2"], 0)
    assert names.asked == [("a.test", True)]


@on_virtual_time
async def test_resolve_old_answer_waits_a_little_for_a_new_one():
    resolver, names = await learned(OLD + 1)
    names.answer = ("192.0.2.2",)
    assert await ask(resolver) == (["192.0.2.2"], 0.02)


@on_virtual_time
async def test_resolve_old_answer_while_dns_hangs_is_given_after_the_patience():
    resolver, names = await learned(OLD + 1)
    names.delay_s = 8
    assert await ask(resolver) == (["192.0.2.1"], PATIENCE)
    assert await ask(resolver) == (["192.0.2.1"], 0), "the patience is counted from the question, not from each call"
    assert await ask(resolver, timeout_s=0.1) == (["192.0.2.1"], 0)
    assert names.asked == [("a.test", True)]
    await asyncio.sleep(8)


@on_virtual_time
async def test_resolve_patience_is_cut_by_the_callers_timeout():
    resolver, names = await learned(OLD + 1)
    names.delay_s = 8
    assert await ask(resolver, timeout_s=0.1) == (["192.0.2.1"], 0.1)
    await asyncio.sleep(8)


def test_resolve_answer_beyond_a_day_is_not_used():
    async def scene():
        resolver, names = await learned(STALE + 1)
        names.answer = AGAIN
        error, took_s = await ask(resolver)
        assert (error.errno, took_s) == (socket.EAI_AGAIN, 0.02)
        assert names.asked == [("a.test", False)]

    simloop.run(scene, time_max_s=2 * STALE)


@on_virtual_time
async def test_resolve_failure_takes_no_answer_away():
    resolver, names = await learned(OLD + 1)
    names.answer = AGAIN
    for _ in range(5):
        found, _ = await ask(resolver)
        assert found == ["192.0.2.1"]
        await asyncio.sleep(3600)
    assert len(names.asked) == 5


@on_virtual_time
async def test_resolve_name_that_is_gone_takes_its_answer_with_it():
    resolver, names = await learned(FRESH + 1)
    names.answer = NO_NAME
    assert await ask(resolver) == (["192.0.2.1"], 0)
    await asyncio.sleep(0.1)
    error, _ = await ask(resolver)
    assert error.errno == socket.EAI_NONAME


@on_virtual_time
async def test_resolve_old_name_that_turns_out_to_be_gone_fails_at_once():
    resolver, names = await learned(OLD + 1)
    names.answer = NO_NAME
    error, took_s = await ask(resolver)
    assert (error.errno, took_s) == (socket.EAI_NONAME, 0.02)


@on_virtual_time
async def test_resolve_name_said_to_be_gone_keeps_an_answer_that_is_fresh():
    resolver, names = await learned(FAILED + 1)
    names.answer = NO_NAME
    resolver.doubt("a.test")
    assert await ask(resolver) == (["192.0.2.1"], 0.02)


@on_virtual_time
async def test_resolve_failure_is_remembered_so_that_a_storm_is_one_query():
    names = Names(AGAIN)
    resolver = Resolver(names)
    errors = [(await ask(resolver))[0] for _ in range(50)]
    assert {error.errno for error in errors} == {socket.EAI_AGAIN}
    assert len({id(error) for error in errors}) == 50, "one exception raised again and again gathers tracebacks"
    assert len(names.asked) == 1
    await asyncio.sleep(FAILED + 1)
    names.answer = ("192.0.2.1",)
    assert await ask(resolver) == (["192.0.2.1"], 0.02)
    assert len(names.asked) == 2


@on_virtual_time
async def test_resolve_known_name_whose_renewal_failed_is_not_asked_for_a_while():
    resolver, names = await learned(OLD + 1)
    names.answer = AGAIN
    assert await ask(resolver) == (["192.0.2.1"], 0.02)
    assert [await ask(resolver) for _ in range(20)] == [(["192.0.2.1"], 0)] * 20
    assert len(names.asked) == 1


@on_virtual_time
async def test_resolve_many_at_once_share_one_query():
    names = Names()
    resolver = Resolver(names)
    answers = await asyncio.gather(*(ask(resolver) for _ in range(100)))
    assert answers == [(["192.0.2.1"], 0.02)] * 100
    assert len(names.asked) == 1


@on_virtual_time
async def test_resolve_joins_a_query_that_began_before_it():
    names = Names(delay_s=4)
    resolver = Resolver(names)
    error, took_s = await ask(resolver, timeout_s=1)
    assert isinstance(error, TimeoutError)
    assert took_s == 1
    assert await ask(resolver) == (["192.0.2.1"], 3)
    assert len(names.asked) == 1


@on_virtual_time
async def test_resolve_query_nobody_waits_for_is_withdrawn_but_what_it_brings_is_kept():
    names = Names(delay_s=4)
    resolver = Resolver(names)
    tasks = [asyncio.create_task(resolver.resolve("a.test", 1)) for _ in range(2)]
    await asyncio.sleep(1)
    tasks[0].cancel()
    await asyncio.sleep(0)
    assert names.withdrawn == []
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert names.withdrawn == ["a.test"]
    await asyncio.sleep(4)
    assert await ask(resolver) == (["192.0.2.1"], 0)


@on_virtual_time
async def test_resolve_renewal_nobody_waits_for_is_not_withdrawn():
    resolver, names = await learned(OLD + 1)
    names.delay_s = 2
    await ask(resolver)
    await asyncio.sleep(2)
    assert (names.withdrawn, len(names.asked)) == ([], 1)


@on_virtual_time
async def test_doubt_asks_again_with_patience_and_falls_back():
    resolver, names = await learned(FAILED + 1)
    names.answer = ("192.0.2.2",)
    resolver.doubt("A.test")
    assert await ask(resolver) == (["192.0.2.2"], 0.02)
    assert await ask(resolver) == (["192.0.2.2"], 0)
    await asyncio.sleep(FAILED + 1)
    names.delay_s = 8
    resolver.doubt("a.test")
    assert await ask(resolver) == (["192.0.2.2"], PATIENCE)
    await asyncio.sleep(8)


@on_virtual_time
async def test_doubt_of_an_answer_just_in_does_not_ask_again():
    resolver, names = await learned(FAILED / 2)
    resolver.doubt("a.test")
    assert await ask(resolver) == (["192.0.2.1"], 0)
    assert names.asked == []


@on_virtual_time
async def test_doubt_of_an_unknown_name_is_nothing():
    resolver = Resolver(Names())
    resolver.doubt("a.test")
    resolver.doubt("192.0.2.1")
    assert await ask(resolver) == (["192.0.2.1"], 0.02)


@on_virtual_time
async def test_resolve_source_without_room_gives_what_is_known_or_its_error():
    resolver, names = await learned(OLD + 1)
    names.full = True
    assert await ask(resolver) == (["192.0.2.1"], 0)
    error, _ = await ask(resolver, "b.test")
    assert isinstance(error, BlockingIOError)
    names.full = False
    assert await ask(resolver, "b.test") == (["192.0.2.1"], 0.02), "no room is no failure of the name"


@on_virtual_time
async def test_resolve_answer_that_is_there_already_is_remembered():
    class Ready(Names):
        def ask(self, host, *, refresh):
            answer = super().ask(host, refresh=refresh)
            answer.cancel()
            answer = asyncio.get_running_loop().create_future()
            answer.set_result(Found(("192.0.2.3",)))
            return answer

    resolver = Resolver(Ready())
    assert await ask(resolver) == (["192.0.2.3"], 0)


@on_virtual_time
async def test_resolve_fault_of_the_source_reaches_the_caller_and_is_not_remembered():
    names = Names(RuntimeError("a bug"))
    resolver = Resolver(names)
    with pytest.raises(RuntimeError, match="a bug"):
        await resolver.resolve("a.test", 1)
    names.answer = ("192.0.2.1",)
    assert await ask(resolver) == (["192.0.2.1"], 0.02)


@on_virtual_time
async def test_resolve_names_remembered_are_bounded_and_the_unused_go_first():
    names = Names()
    resolver = Resolver(names)
    await resolver.resolve("first.test", 1)
    await resolver.resolve("second.test", 1)
    await resolver.resolve("first.test", 1)
    for number in range(limits.RESOLVE_NAMES_REMEMBERED - 1):
        await resolver.resolve(f"n{number}.test", 1)
    names.asked.clear()
    await resolver.resolve("first.test", 1)
    await resolver.resolve("second.test", 1)
    assert names.asked == [("second.test", False)]


@on_virtual_time
async def test_close_ends_who_waits_and_leaves_no_query():
    names = Names(delay_s=60)
    resolver = Resolver(names)
    waiting = asyncio.create_task(ask(resolver))
    await asyncio.sleep(1)
    resolver.close()
    resolver.close()
    error, took_s = await waiting
    assert (type(error), took_s) == (ConnectionAbortedError, 1)
    error, _ = await ask(resolver)
    assert isinstance(error, ConnectionAbortedError)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@on_virtual_time
async def test_close_during_a_renewal_that_fails_is_silent():
    resolver, names = await learned(FRESH + 1)
    names.answer = AGAIN
    await ask(resolver)
    resolver.close()
    await asyncio.sleep(1)


# -- what sources say of time -----------------------------------------------------------------------------------------
@on_virtual_time
async def test_resolve_answer_is_fresh_as_long_as_its_ttl_within_bounds():
    for ttl_s, fresh_s in (
        (0.0, limits_names.NAMES_TTL_S_MIN),
        (5.0, 5.0),
        (200.0, 200.0),
        (86_400.0, limits_names.NAMES_TTL_S_MAX),
    ):
        names = Names(Found(("192.0.2.1",), ttl_s, "a test"))
        resolver = Resolver(names)
        await ask(resolver)
        await asyncio.sleep(fresh_s - 0.1)
        await ask(resolver)
        assert len(names.asked) == 1
        await asyncio.sleep(0.2)
        await ask(resolver)
        assert len(names.asked) == 2
        await asyncio.sleep(1)


@on_virtual_time
async def test_resolve_absence_stands_as_long_as_it_says_within_bounds():
    for ttl_s, stands_s in ((0.0, FAILED), (20.0, 20.0), (86_400.0, limits_names.NAMES_ABSENT_S_MAX)):
        names = Names(no_name("no such name", ttl_s))
        resolver = Resolver(names)
        await ask(resolver)
        await asyncio.sleep(stands_s - 0.1)
        error, took_s = await ask(resolver)
        assert (error.errno, str(error.strerror), took_s) == (socket.EAI_NONAME, "no such name", 0)
        assert len(names.asked) == 1
        await asyncio.sleep(0.1)
        await ask(resolver)
        assert len(names.asked) == 2


@on_virtual_time
async def test_resolve_sure_answer_is_never_waited_for():
    names = Names()
    resolver = Resolver(names, sure=lambda host: host == "a.test")
    await ask(resolver)
    names.delay_s = 8
    await asyncio.sleep(OLD + 1)
    resolver.doubt("a.test")
    assert await ask(resolver) == (["192.0.2.1"], 0)
    assert names.asked == [("a.test", False), ("a.test", True)]
    await asyncio.sleep(8)


@on_virtual_time
async def test_learned_answer_is_as_good_as_one_asked_for_and_can_be_told_and_forgotten():
    told = []
    resolver = Resolver(Names(), on_change=told.append)
    resolver.learn("A.test", Found(("192.0.2.7",), 100.0, "a test"), age_s=40.0)
    assert await ask(resolver) == (["192.0.2.7"], 0)
    assert resolver.remembered("a.TEST") == ("a.test", Found(("192.0.2.7",), 100.0, "a test"), 40.0)
    assert [each.host for each in resolver.memory()] == told == ["a.test"]
    resolver.forget("a.test")
    assert (resolver.remembered("a.test"), resolver.memory()) == (None, [])
    assert await ask(resolver) == (["192.0.2.1"], 0.02)


@on_virtual_time
async def test_doubt_of_all_asks_again_for_every_name():
    resolver, names = await learned()
    names.answer = AGAIN
    await ask(resolver, "b.test")
    names.answer = ("192.0.2.2",)
    resolver.doubt_all()
    assert await ask(resolver) == (["192.0.2.2"], 0.02)
    assert await ask(resolver, "b.test") == (["192.0.2.2"], 0.02)
