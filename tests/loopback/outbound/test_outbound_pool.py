"""The pool: sharing, bounds, fairness, idle connections, and cancellation at every turn."""

import asyncio
import random

import pytest

from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.net.clock import SystemClock
from stormline.net.resolve import Resolver
from stormline.net.trust import roles_context
from stormline.outbound.dial import Dialer
from stormline.outbound.messages import HttpRequest
from stormline.outbound.pool import HttpPool
from stormline.testing.follower import Notebook

pytestmark = pytest.mark.loopback
EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class SetClock:
    """A clock that stands where it is put."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def wall(self):
        return self.now


class Gate:
    """A server that answers one request per `open`, in the order in which they came."""

    def __init__(self):
        self.targets = []
        self._tickets = asyncio.Semaphore(0)
        self._news = asyncio.Condition()

    async def __call__(self, reader, writer):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            async with self._news:
                self.targets.append(head.split(b" ", 2)[1])
                self._news.notify_all()
            await self._tickets.acquire()
            writer.write(EMPTY)

    def open(self, number=1):
        for _ in range(number):
            self._tickets.release()

    async def arrived(self, number):
        async with asyncio.timeout(10), self._news:
            await self._news.wait_for(lambda: len(self.targets) >= number)


@pytest.fixture(name="make_pool")
async def _make_pool(authority):
    pools = []

    def make(clock=None, **options):
        dialer = Dialer(Resolver(), roles_context(authority.pem, ["http/1.1"]))
        pools.append(HttpPool(dialer, clock or SystemClock(), **options))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.aclose()
        assert (pool.open_connections, pool.idle_connections) == (0, 0)


def _get(address, target=b"/", host="a.test", scheme="http"):
    return HttpRequest("GET", scheme, host, address.port, target)


async def _fetch(pool, address, target=b"/", *, deadline_s=10.0, **more):
    response = await pool.request(_get(address, target), deadline_s=deadline_s, addresses=(address,), **more)
    await response.read(1000)
    return response


async def _answer(reader, writer, first=False):
    while first or await reader.readuntil(b"\r\n\r\n"):
        first = False
        writer.write(EMPTY)


async def test_pool_requests_in_a_row_share_one_connection(serve, make_pool):
    pool, address = make_pool(), await serve(_answer)
    assert [(await _fetch(pool, address)).reused for _ in range(4)] == [False, True, True, True]
    assert pool.open_connections == 1


async def test_pool_other_addresses_names_or_schemes_share_nothing(serve, make_pool, authority):
    pool, address = make_pool(), await serve(_answer)
    tls = await serve(_answer, authority.server)
    for options in (
        {"addresses": (address,)},
        {"addresses": (address, address._replace(host="127.0.0.2"))},
        {"addresses": (address,), "server_name": "other.test"},
    ):
        assert not (await pool.request(_get(address), deadline_s=5, **options)).reused
    assert not (await pool.request(_get(address, host="localhost"), deadline_s=5)).reused
    first = await pool.request(_get(tls, scheme="https"), deadline_s=5, addresses=(tls,))
    again = await pool.request(_get(tls, scheme="https"), deadline_s=5, addresses=(tls,))
    assert (first.reused, again.reused) == (False, True)


async def test_pool_tls_name_is_part_of_what_is_shared(serve, make_pool, authority):
    pool, tls = make_pool(), await serve(_answer, authority.server)
    await pool.request(_get(tls, scheme="https"), deadline_s=5, addresses=(tls,))
    with pytest.raises(errors.TlsError):
        await pool.request(_get(tls, scheme="https"), deadline_s=5, addresses=(tls,), server_name="b.test")


async def test_pool_full_origin_waits_first_come_first_served(serve, make_pool):
    gate = Gate()
    pool, address = make_pool(connections_per_origin_max=2), await serve(gate)
    tasks = [asyncio.create_task(_fetch(pool, address, b"/%d" % number)) for number in range(8)]
    await gate.arrived(2)
    assert pool.open_connections == 2
    for number in range(3, 9):
        gate.open()
        await gate.arrived(number)
    gate.open(2)
    await asyncio.gather(*tasks)
    assert sorted(gate.targets[:2]) == [b"/0", b"/1"]
    assert gate.targets[2:] == [b"/%d" % number for number in range(2, 8)]
    assert (pool.open_connections, pool.idle_connections) == (2, 2)


async def test_pool_nobody_waits_behind_another_full_origin(serve, make_pool):
    gate = Gate()
    pool, full, free = make_pool(connections_per_origin_max=1), await serve(gate), await serve(_answer)
    tasks = [asyncio.create_task(_fetch(pool, full)) for _ in range(3)]
    await gate.arrived(1)
    await _fetch(pool, free, deadline_s=5)
    gate.open(3)
    await asyncio.gather(*tasks)


async def test_pool_waiting_ends_at_the_deadline_in_queued(serve, make_pool):
    gate = Gate()
    pool, address = make_pool(connections_per_origin_max=1), await serve(gate)
    task = asyncio.create_task(_fetch(pool, address))
    await gate.arrived(1)
    with pytest.raises(errors.DeadlineExceeded) as caught:
        await _fetch(pool, address, deadline_s=0.05)
    assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.QUEUED, False)
    gate.open()
    await task
    assert not pool._waiting


async def test_pool_queue_is_bounded(serve, make_pool, monkeypatch):
    monkeypatch.setattr(limits, "POOL_WAITING_MAX", 2)
    gate = Gate()
    pool, address = make_pool(connections_per_origin_max=1), await serve(gate)
    tasks = [asyncio.create_task(_fetch(pool, address)) for _ in range(3)]
    await gate.arrived(1)
    with pytest.raises(errors.QueueFull) as caught:
        await _fetch(pool, address)
    assert caught.value.maybe_delivered is False
    gate.open(3)
    await asyncio.gather(*tasks)


async def test_pool_failed_request_hands_its_slot_on(serve, make_pool):
    async def first_hangs_up(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        if not seen:
            seen.append(1)
            return
        await _answer(reader, writer, first=True)

    seen = []
    pool, address = make_pool(connections_per_origin_max=1), await serve(first_hangs_up)
    outcomes = await asyncio.gather(*[_fetch(pool, address) for _ in range(3)], return_exceptions=True)
    assert isinstance(outcomes[0], errors.ReadError)
    assert [outcome.status for outcome in outcomes[1:]] == [200, 200]


async def test_pool_idle_connection_makes_room_for_another_origin(serve, make_pool):
    pool = make_pool(connections_max=2)
    first, second, third = [await serve(_answer) for _ in range(3)]
    for address in (first, second, third):
        await _fetch(pool, address)
    assert pool.open_connections == 2
    assert (await _fetch(pool, second)).reused
    assert not (await _fetch(pool, first)).reused


async def test_pool_total_full_waits_for_any_connection(serve, make_pool):
    gate = Gate()
    pool, busy, other = make_pool(connections_max=1), await serve(gate), await serve(_answer)
    tasks = [asyncio.create_task(_fetch(pool, busy)), asyncio.create_task(_fetch(pool, other))]
    await gate.arrived(1)
    gate.open()
    await asyncio.gather(*tasks)
    assert pool.open_connections == 1


async def test_pool_idle_connection_expires(serve, make_pool):
    clock = SetClock()
    pool, address = make_pool(clock, idle_s=20.0), await serve(_answer)
    await _fetch(pool, address)
    clock.now += 19.9
    assert (await _fetch(pool, address)).reused
    clock.now += 20.0
    assert not (await _fetch(pool, address)).reused
    assert pool.open_connections == 1


async def test_pool_expired_connections_are_closed_unasked(serve, make_pool, until):
    pool, address = make_pool(idle_s=0.05), await serve(_answer)
    await _fetch(pool, address)
    await until(lambda: pool.open_connections == 0)


async def test_pool_unasked_bytes_on_a_kept_connection_drop_it(serve, make_pool):
    async def chatty(reader, writer):
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(EMPTY)
            await asyncio.sleep(0.01)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison")

    pool, address = make_pool(), await serve(chatty)
    await _fetch(pool, address)
    await asyncio.sleep(0.05)
    response = await pool.request(_get(address), deadline_s=5, addresses=(address,))
    assert (response.reused, await response.read(10)) == (False, b"")


@pytest.mark.parametrize("header", [b"Connection: close\r\n", b"HTTP/1.0"])
async def test_pool_connection_that_ends_is_not_kept(serve, make_pool, header):
    async def last(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        if header == b"HTTP/1.0":
            writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n")
        else:
            writer.write(EMPTY[:-2] + header + b"\r\n")
        await reader.read()

    pool, address = make_pool(), await serve(last)
    await _fetch(pool, address)
    assert pool.open_connections == 0


async def test_pool_request_that_asks_to_close_is_not_kept(serve, make_pool):
    pool, address = make_pool(), await serve(_answer)
    request = HttpRequest("GET", "http", "a.test", address.port, b"/", ((b"Connection", b"close"),))
    await (await pool.request(request, deadline_s=5, addresses=(address,))).read(1)
    assert pool.open_connections == 0


async def test_pool_closed_fails_what_runs_and_what_waits_and_takes_no_more(serve, make_pool):
    gate = Gate()
    pool, address = make_pool(connections_per_origin_max=1), await serve(gate)
    tasks = [asyncio.create_task(_fetch(pool, address)) for _ in range(3)]
    await gate.arrived(1)
    await pool.aclose()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [errors.ReadError, *[errors.LocalProtocolError] * 2]
    with pytest.raises(errors.LocalProtocolError):
        await _fetch(pool, address)


async def test_pool_closed_while_connecting_closes_that_connection(serve, make_pool, silent):
    pool = make_pool()
    task = asyncio.create_task(_fetch(pool, silent, deadline_s=0.3))
    await asyncio.sleep(0.02)
    await pool.aclose()
    with pytest.raises((errors.LocalProtocolError, errors.DeadlineExceeded)):
        await task


async def test_pool_unknown_scheme_is_refused(make_pool, serve):
    with pytest.raises(errors.LocalProtocolError):
        await make_pool().request(HttpRequest("GET", "ftp", "a.test", 1, b"/"), deadline_s=5)


async def test_pool_resolve_stage_is_told(make_pool, serve):
    address = await serve(_answer)
    told = Notebook()
    await make_pool().request(_get(address, host="localhost"), deadline_s=5, follower=told)
    assert told.stages == ["resolve", "connect", "send", "first_byte", "body"]


async def test_pool_thousands_cancelled_at_every_turn_leave_every_slot_free(serve, make_pool, authority, refused):
    """What the peers break on (100 cancelled requests, then none succeeds): here every slot comes back."""

    async def slow(reader, writer):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if b"chunked" in head:
                await reader.readuntil(b"\r\n0\r\n\r\n")
            await asyncio.sleep(rng.random() * 0.004)
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
            await asyncio.sleep(rng.random() * 0.004)
            writer.write(b"0\r\n\r\n")

    rng = random.Random(7)
    pool = make_pool(connections_max=6, connections_per_origin_max=4)
    plain, tls = await serve(slow), await serve(slow, authority.server)

    async def body():
        for _ in range(3):
            yield b"x" * 1000
            await asyncio.sleep(0.001)

    async def one(number):
        address, scheme = ((plain, "http"), (tls, "https"), (refused, "http"))[number % 3]
        source = body() if number % 5 == 0 else None
        request = HttpRequest("POST", scheme, "a.test", address.port, b"/", (), source)
        response = await pool.request(request, deadline_s=20, addresses=(address,))
        if number % 7:
            await response.read(100)
        else:
            await response.aclose()

    outcomes, cut = [], 0
    for begin in range(0, 2400, 40):
        tasks = [asyncio.create_task(one(number)) for number in range(begin, begin + 40)]
        for task in rng.sample(tasks, 30):
            await asyncio.sleep(0 if rng.random() < 0.6 else rng.random() * 0.003)
            cut += task.cancel()
        outcomes += await asyncio.gather(*tasks, return_exceptions=True)
    assert cut > 600
    unexpected = [
        outcome
        for outcome in outcomes
        if outcome is not None and not isinstance(outcome, (asyncio.CancelledError, errors.ConnectError))
    ]
    assert unexpected == []
    assert (len(pool._slots), pool._waiting) == (0, 0)
    assert pool.open_connections == pool.idle_connections <= 6
    await asyncio.gather(*[one(number) for number in range(1, 60) if number % 3 != 2])
