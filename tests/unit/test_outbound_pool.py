"""The pool where servers allow little, end connections early or fall silent: who is served, when, and over how many.

On virtual time (`VirtualLoop`), with servers in memory. Real servers and sockets are in
`tests/loopback/outbound/test_outbound_pool*.py`, everything at once in `tests/property/test_outbound_pool.py`.
"""

import asyncio
import functools
import math

import pytest

from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.outbound.messages import HttpRequest
from stormline.outbound.pool import HttpPool
from stormline.testing import simloop
from stormline.testing.follower import Notebook
from stormline.testing.memory import MemoryNet
from stormline.testing.simloop import SimClock

PEER = Address("192.0.2.7", 443)


class Client:
    """A pool on a network in memory.

    Attributes:
        server: of the place that is asked where nothing else is said.
    """

    def __init__(self, **options):
        self.loop = asyncio.get_running_loop()
        self.net = MemoryNet()
        self.server = self.net.server("https", "a.test")
        self.pool = HttpPool(self.net, SimClock(self.loop), **options)

    async def ask(self, path=b"/", *, host="a.test", scheme="https", deadline_s=30.0, read=True, **more):
        request = HttpRequest("GET", scheme, host, 443 if scheme == "https" else 80, path)
        response = await self.pool.request(request, deadline_s=deadline_s, **more)
        if read:
            assert await response.read(10) == b"ok"
        return response

    def begin(self, number, **more):
        return [asyncio.create_task(self.ask(b"/%d" % index, **more)) for index in range(number)]

    async def burst(self, number, **more):
        """Give how many were answered, and how each of the others failed."""
        results = await asyncio.gather(*self.begin(number, **more), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        return number - len(failures), failures

    @property
    def targets(self):
        return [target for stream in self.net.made for target in stream.targets]

    @property
    def refused(self):
        return sum(stream.refused for stream in self.net.made)


def virtual(test=None, **options):
    """Run a test of a `Client` on virtual time; nothing of it may be left when it has closed its pool."""
    if test is None:
        return functools.partial(virtual, **options)

    def run():
        async def main():
            client = Client(**options)
            await test(client)
            client.pool.close()
            for _ in range(5):
                await asyncio.sleep(0)
            assert (client.pool.open_connections, client.pool.idle_connections, client.net.open) == (0, 0, set())

        simloop.run(main)

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


# -- how many at once --------------------------------------------------------------------------------------------------
@virtual
async def test_pool_before_settings_came_few_streams_are_opened_then_as_many_as_allowed(client):
    tasks = client.begin(60)
    await asyncio.sleep(0.035)  # connected; SETTINGS are on their way
    assert len(client.targets) == limits.H2_STREAMS_UNTOLD
    await asyncio.sleep(0.01)
    assert len(client.targets) == 60
    await asyncio.gather(*tasks)
    assert (client.net.dials, client.refused) == (1, 0)


@virtual
async def test_pool_peer_that_allows_few_streams_gets_more_connections_and_refuses_only_the_first_surplus(client):
    client.server.streams = 4
    answered, failures = await client.burst(100)
    assert (answered, client.net.dials) == (96, limits.H2_CONNECTIONS_MAX)
    assert [(type(each), each.maybe_delivered) for each in failures] == [(errors.ReadError, False)] * 4
    assert await client.burst(100) == (100, [])
    assert (client.net.dials, client.refused) == (limits.H2_CONNECTIONS_MAX, 4)


@virtual
async def test_pool_remembers_how_many_streams_a_place_allows_when_its_connections_are_gone(client):
    client.server.streams = 2
    await client.burst(2)
    await asyncio.sleep(2 * limits.POOL_IDLE_S)
    assert client.pool.open_connections == 0
    assert await client.burst(30) == (30, [])
    assert client.refused == 0


@virtual
async def test_pool_peer_that_allows_many_streams_has_one_connection_and_the_rest_waits_in_turn(client):
    answered, failures = await client.burst(500)
    assert (answered, failures, client.net.dials) == (500, [], 1)
    assert client.targets == [b"/%d" % number for number in range(500)]


@virtual
async def test_pool_that_is_asked_by_very_many_at_once_serves_all_in_their_order(client):
    client.net.server("https", "old.test").dials = "h1"
    assert await client.burst(3000) == (3000, [])
    assert await client.burst(3000, host="old.test") == (3000, [])
    old = [stream for stream in client.net.made if stream.alpn == "http/1.1"]
    assert len(old) == limits.POOL_CONNECTIONS_PER_ORIGIN_MAX
    for stream in old:
        numbers = [int(target[1:]) for target in stream.targets]
        assert numbers == sorted(numbers)


@virtual
async def test_pool_queue_is_bounded_whatever_the_place_speaks(client):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "POOL_WAITING_MAX", 20)
        _, failures = await client.burst(50)
    assert [(type(each), each.phase, each.maybe_delivered) for each in failures] == [
        (errors.QueueFull, Phase.QUEUED, False)
    ] * 30


@virtual
async def test_pool_streams_that_stay_taken_get_a_connection_beside_them(client):
    client.server.answer_s = 1000.0  # long polls
    polls = client.begin(100, deadline_s=2000.0)
    await asyncio.sleep(1.0)
    client.server.answer_s = 0.05
    began = client.loop.time()
    await client.ask()
    assert limits.H2_STREAM_WAIT_S <= client.loop.time() - began < limits.H2_STREAM_WAIT_S + 0.5
    assert client.net.dials == 2
    await asyncio.gather(*polls)


@virtual
async def test_pool_peer_that_allows_no_stream_is_not_dialled_again_and_again(client):
    client.server.streams = 0
    await client.burst(1)
    answered, failures = await client.burst(20, deadline_s=10.0)
    assert (answered, {type(each) for each in failures}) == (0, {errors.DeadlineExceeded})
    assert client.net.dials == 1


# -- connections that end early ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("lasts", "surplus"), [(1, limits.H2_STREAMS_UNTOLD - 1), (10, 90)])
def test_pool_learns_after_how_many_requests_connections_end(lasts, surplus):
    @virtual
    async def learns(client):
        client.server.lasts = lasts
        answered, failures = await client.burst(100)
        while failures:
            assert not any(each.maybe_delivered for each in failures)
            again, failures = await client.burst(len(failures))
            answered += again
        refused = client.refused
        assert answered == 100
        assert refused <= surplus  # none where the first goes out alone
        for _ in range(3):
            assert await client.burst(100) == (100, [])
        assert client.refused == refused
        assert client.net.dials == 400 // lasts

    learns()


@virtual
async def test_pool_forgets_it_when_a_connection_goes_on(client):
    client.server.lasts = 5
    await client.burst(20)
    client.server.lasts = None
    await client.burst(50)
    dials = client.net.dials
    assert await client.burst(90) == (90, [])
    assert await client.burst(90) == (90, [])
    assert client.net.dials == dials


@virtual
async def test_pool_who_waits_for_a_stream_is_not_touched_by_the_end_of_the_connection(client):
    tasks = client.begin(300)
    await asyncio.sleep(0.06)
    client.net.made[0].go_away()
    await asyncio.gather(*tasks)
    assert (len(client.targets), client.net.dials) == (300, 2)


# -- making connections ------------------------------------------------------------------------------------------------
@virtual
async def test_pool_failure_of_a_connection_is_that_of_each_who_waited_for_it(client):
    client.server.dials = "refused"
    _, failures = await client.burst(5)
    assert {type(each) for each in failures} == {errors.ConnectError}
    assert (len({id(each) for each in failures}), client.net.dials) == (5, 1)


@virtual
async def test_pool_failure_of_a_further_connection_is_nobodys(client):
    client.server.streams = 1
    await client.burst(1)
    client.server.dials = "refused"
    assert await client.burst(60) == (60, [])
    fives = 1 + int(client.loop.time() / limits.POOL_BESIDE_PAUSE_S)
    assert client.net.dials <= 1 + fives * (limits.H2_CONNECTIONS_MAX - 1)


@virtual
async def test_pool_connection_that_nobody_waits_for_any_more_is_given_up(client):
    client.server.dials = "silent"
    tasks = client.begin(3)
    await asyncio.sleep(1.0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (client.pool.open_connections, +client.net.dialling) == (0, {})


@virtual
async def test_pool_closed_before_a_connection_was_begun_counts_none(client):
    task = asyncio.create_task(client.ask())
    await asyncio.sleep(0)
    client.pool.close()
    with pytest.raises(errors.LocalProtocolError, match="closed"):
        await task


@virtual
async def test_pool_connection_made_for_nobody_in_the_end_is_closed_after_its_time(client):
    client.server.streams = 4
    await client.burst(4)
    tasks = client.begin(9)
    await asyncio.sleep(0.01)
    assert client.pool.open_connections > 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(limits.POOL_OPENING_BESIDE_S + 2 * limits.POOL_IDLE_S)
    assert client.pool.open_connections == 0


@virtual
async def test_pool_request_that_left_the_only_address_gets_one_new_connection_to_it(client):
    await client.ask()
    await client.ask(left={PEER})
    assert client.net.dials == 2
    await client.ask(left={PEER})
    assert client.net.dials == 3
    await client.ask()
    assert client.net.dials == 3


@virtual
async def test_pool_connect_timeout_is_not_that_of_waiting_for_a_stream(client):
    client.server.streams = 1
    client.server.answer_s = 1.0
    answered, _ = await client.burst(7)
    assert answered + client.refused == 7
    assert await client.burst(12, connect_timeout_s=0.2) == (12, [])
    client.server.dials = "silent"
    with pytest.raises(errors.DeadlineExceeded) as caught:
        await client.ask(connect_timeout_s=0.2, newer_than=client.loop.time())
    assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.TLS, False)


# -- doubt -------------------------------------------------------------------------------------------------------------
@virtual
async def test_pool_who_waits_on_a_connection_that_is_doubted_gets_another(client):
    told = Notebook()
    held = told.held
    client.server.streams = limits.H2_STREAMS_FEW
    await client.ask(follower=told)
    client.server.dead = True
    lost = client.begin(limits.H2_STREAMS_FEW, deadline_s=5.0)
    await asyncio.sleep(0.1)
    waiting = asyncio.create_task(client.ask())
    await asyncio.sleep(0.1)
    client.server.dead = False
    held[0].doubt()
    await waiting
    assert client.net.dials == 2
    await asyncio.gather(*lost, return_exceptions=True)


@virtual
async def test_pool_connection_that_was_doubted_and_answers_serves_again(client):
    await client.ask()
    client.server.dials = "silent"
    client.pool.doubt()
    began = client.loop.time()
    await client.ask()
    assert client.loop.time() - began < 1.0
    await asyncio.sleep(0)
    assert (client.pool.open_connections, client.net.made[0].targets) == (1, [b"/", b"/"])


class Late:
    """A `Sense` that calls a silence overdue after `after_s`, of a link that has room for others or not."""

    def __init__(self, after_s=math.inf, *, room=False):
        self.after_s = after_s
        self.room = room

    def window_bytes(self, host, now_bytes):
        return now_bytes

    def overdue(self, held, quiet_s):
        return quiet_s >= self.after_s

    def may_spread(self, host):
        return self.room


@virtual(sense=Late(0.2))
async def test_pool_request_is_not_put_on_a_connection_that_is_overdue_with_an_answer(client):
    await client.ask()
    client.server.dead = True
    lost = asyncio.create_task(client.ask(b"/lost", deadline_s=5.0))
    await asyncio.sleep(0.15)
    beside = asyncio.create_task(client.ask(b"/beside", deadline_s=5.0))  # too early to tell
    await asyncio.sleep(0.1)
    client.server.dead = False
    await client.ask(b"/elsewhere")
    assert (client.net.dials, client.net.made[1].targets) == (2, [b"/elsewhere"])
    await client.ask(b"/again")  # and nothing more is put where nothing comes
    assert client.net.made[1].targets == [b"/elsewhere", b"/again"]
    await asyncio.gather(lost, beside, return_exceptions=True)


@virtual(sense=Late(0.2))
async def test_pool_connection_that_was_overdue_and_answers_serves_those_who_wait_for_another(client):
    client.server.answer_s = 0.5
    first = asyncio.create_task(client.ask(b"/first"))
    await asyncio.sleep(0.4)
    client.server.dials = "silent"
    client.server.answer_s = 0.05
    await client.ask(b"/second")
    await first
    await asyncio.sleep(0)
    assert (client.net.made[0].targets, client.pool.open_connections) == ([b"/first", b"/second"], 1)


@virtual(sense=Late(0.2))
async def test_pool_tells_of_an_answer_that_came_beside_a_connection(client):
    told = Notebook()
    held = told.held
    await client.ask(follower=told)
    since = client.loop.time()
    held[0].doubt()
    assert not client.pool.answered_beside(held[0], since)
    await client.ask(follower=told)
    assert client.pool.answered_beside(held[0], since)
    assert not client.pool.answered_beside(held[1], since)


# -- room for other places ---------------------------------------------------------------------------------------------
@virtual(connections_max=1)
async def test_pool_shared_connection_that_comes_to_rest_makes_room_for_who_waits(client):
    first = asyncio.create_task(client.ask())
    await asyncio.sleep(0.04)
    second = asyncio.create_task(client.ask(host="b.test"))
    third = asyncio.create_task(client.ask(host="c.test", scheme="http"))
    await asyncio.gather(first, second, third)
    assert client.loop.time() < 1.0


@virtual(connections_max=2)
async def test_pool_slot_of_an_evicted_connection_is_given_once(client):
    await client.ask()
    await client.ask(host="b.test")
    tasks = [task for host in ("c.test", "d.test", "e.test") for task in client.begin(2, host=host)]
    while not all(task.done() for task in tasks):
        assert client.pool.open_connections <= 2
        await asyncio.sleep(0.001)
    await asyncio.gather(*tasks)


@virtual(connections_max=1)
async def test_pool_places_whose_connections_take_nothing_do_not_push_each_other_out_for_ever(client):
    for host in ("a.test", "b.test"):
        server = client.net.server("https", host)
        server.streams, server.dial_s = 0, 0.0
        await client.burst(1, host=host)  # refused, and known from now on
    outcomes = await asyncio.gather(client.burst(1, deadline_s=5.0), client.burst(1, host="b.test", deadline_s=9.0))
    assert [type(failures[0]) for _, failures in outcomes] == [errors.DeadlineExceeded] * 2
    assert client.net.dials == 4


@virtual(connections_max=1)
async def test_pool_request_whose_connection_goes_in_the_moment_of_its_grant_gets_another(client):
    def stage(name):
        if name == "body":  # the stream is given on in this very step, to one who wakes after these two
            client.loop.call_soon(client.pool.leave, lambda _: True)
            later.append(asyncio.create_task(client.ask()))

    later = []
    client.server.streams = 1
    await client.ask()
    first = asyncio.create_task(client.ask(follower=Notebook(stage)))
    await asyncio.sleep(0.01)
    waiting = asyncio.create_task(client.ask())
    await asyncio.gather(first, waiting)
    await asyncio.gather(*later)
    assert client.net.dials == 2


@virtual(connections_max=1)
async def test_pool_cancelled_in_the_moment_of_its_grant_gives_the_stream_to_the_next(client):
    client.server.streams = 1
    await client.ask()
    first = asyncio.create_task(
        client.ask(follower=Notebook(lambda name: client.loop.call_soon(second.cancel) if name == "body" else None))
    )
    await asyncio.sleep(0.01)
    second, third = client.begin(2)
    await asyncio.gather(first, third)
    assert second.cancelled()
    assert (client.net.dials, client.pool.idle_connections) == (1, 1)


# -- large answers -----------------------------------------------------------------------------------------------------
@virtual
async def test_pool_large_answer_on_its_way_has_a_second_connection_made_for_what_comes(client):
    client.server.large_bytes = 2 * limits.H2_LARGE_BYTES
    large = [await client.ask(read=False) for _ in range(2)]  # the second may not wait for a connection
    client.server.large_bytes = None
    assert client.net.dials == 2
    await asyncio.sleep(0.1)
    assert await client.burst(20) == (20, [])
    assert (len(client.net.made[0].targets), len(client.net.made[1].targets), client.net.dials) == (2, 20, 2)
    for answer in large:
        await answer.aclose()
    await client.ask()
    assert (len(client.net.made[0].targets), client.net.dials) == (3, 2)


@virtual
async def test_pool_answers_that_are_not_large_share_one_connection(client):
    client.server.large_bytes = limits.H2_LARGE_BYTES
    answers = [await client.ask(read=False) for _ in range(5)]
    assert client.net.dials == 1
    for answer in answers:
        await answer.aclose()


# -- many at once on a link that has room ------------------------------------------------------------------------------
async def crowd(client, number, answer_s=5.0):
    """Have requests under way, one after the other, on connections that stand; give their tasks."""
    client.server.answer_s = answer_s
    tasks = []
    for _ in range(number):
        tasks += client.begin(1)
        await asyncio.sleep(0.05)
    return tasks


def loads(client):
    return [len(stream.targets) for stream in client.net.made]


@virtual(sense=Late(room=True))
async def test_pool_fewer_than_a_crowd_share_one_connection(client):
    await client.ask()
    for _ in range(3):
        await asyncio.gather(*await crowd(client, limits.H2_STREAMS_CROWDED))
    assert client.net.dials == 1


@virtual(sense=Late(room=True))
async def test_pool_crowd_has_another_connection_made_and_does_not_wait_for_it(client):
    tasks = await crowd(client, limits.H2_STREAMS_CROWDED)
    client.server.dial_s = 2.0
    tasks += await crowd(client, 9)
    assert (client.net.dials, loads(client)) == (2, [limits.H2_STREAMS_CROWDED + 9])  # sent, while one is dialled
    await asyncio.gather(*tasks)
    assert client.net.dials == 2


@virtual(sense=Late(room=True))
async def test_pool_crowd_is_spread_over_few_connections_each_next_request_on_the_least_loaded(client):
    tasks = await crowd(client, 60)
    assert client.net.dials == limits.H2_CONNECTIONS_SPREAD
    assert loads(client) == [20, 20, 20]
    await asyncio.gather(*tasks)


@virtual(sense=Late(room=False))
async def test_pool_crowd_stays_on_one_connection_where_the_link_has_no_room(client):
    await asyncio.gather(*await crowd(client, 60))
    assert client.net.dials == 1


@virtual(sense=Late(room=True), connections_per_origin_max=2)
async def test_pool_crowd_is_spread_within_the_bound_of_its_origin(client):
    tasks = await crowd(client, 30)
    assert (client.net.dials, client.pool.open_connections, loads(client)) == (2, 2, [15, 15])
    await asyncio.gather(*tasks)


@virtual(sense=Late(room=True), connections_max=2)
async def test_pool_crowd_pushes_no_other_place_out(client):
    client.net.server("https", "b.test").answer_s = 0.05
    await client.ask(host="b.test")
    tasks = await crowd(client, 12)
    assert client.net.dials == 2
    await client.ask(host="b.test")
    assert client.net.dials == 2
    await asyncio.gather(*tasks)


@virtual(sense=Late(room=True))
async def test_pool_crowd_whose_further_connection_fails_is_served_all_the_same(client):
    tasks = await crowd(client, limits.H2_STREAMS_CROWDED)
    client.server.dials = "refused"
    tasks += await crowd(client, 40)
    await asyncio.gather(*tasks)
    assert client.net.dials <= 2 + client.loop.time() / limits.POOL_BESIDE_PAUSE_S
    assert loads(client) == [limits.H2_STREAMS_CROWDED + 40]


@virtual(sense=Late(room=True))
async def test_pool_connections_of_a_crowd_end_when_it_is_gone_and_one_serves_what_comes_now_and_then(client):
    await asyncio.gather(*await crowd(client, 30))
    assert client.pool.open_connections == limits.H2_CONNECTIONS_SPREAD
    client.server.answer_s = 0.05
    first = loads(client)[0]
    for number in range(1, 5):
        await asyncio.sleep(0.4 * limits.POOL_IDLE_S)
        await client.ask()
        assert loads(client)[0] == first + number
    assert (client.pool.open_connections, client.net.dials) == (1, limits.H2_CONNECTIONS_SPREAD)


@virtual(sense=Late(0.2, room=True))
async def test_pool_crowd_leaves_a_connection_that_is_overdue_to_those_it_holds_up(client):
    tasks = await crowd(client, 16, answer_s=1000.0)
    held_up = loads(client)
    client.server.answer_s = 0.05
    await asyncio.sleep(0.3)
    await client.ask(b"/next")
    assert loads(client)[: len(held_up)] == held_up
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
