"""A host with two families of which IPv6 is a hole: what a dial costs, what is learned, and that nothing leaks.

Known from aio-libs/aiohttp #4451, square/okhttp #506 and aio-libs/aiohappyeyeballs PR 101 and 142: two winners at once,
and the runner-up's socket never closed.
"""

import asyncio
import contextlib
import gc
import os
import random
import socket
import ssl

import pytest

from stormline.core import errors, limits
from stormline.core.values import Address
from stormline.net import stream
from stormline.outbound.dial import Dialer, Pace
from stormline.policy.addresses import AddressBook, AddressOutcome, Candidate, Verdict
from stormline.testing import simloop

pytestmark = pytest.mark.loopback

HOST = "dual.a.test"


class BookAdvice:
    """What a dialer is advised on one network, out of an address book."""

    def __init__(self, clock):
        self.book, self.clock, self.connects = AddressBook(), clock, []

    def order(self, host, addresses, left):
        candidates = [Candidate(*address) for address in addresses]
        ranked = self.book.plan("home", host, candidates, self.clock(), left={Candidate(*each) for each in left})
        return [Address(each.candidate.address, each.candidate.port) for each in ranked]

    def pace(self, host):
        return Pace()

    def _observe(self, host, address, verdict, **more):
        outcome = AddressOutcome("home", host, Candidate(*address), verdict, **more)
        self.book.observe(outcome, self.clock())

    def connected(self, host, address, *, connect_s, tls_s):
        self._observe(host, address, Verdict.WORKED, connect_s=connect_s + (tls_s or 0.0))

    def failed(self, host, address, *, tried_s):
        self._observe(host, address, Verdict.FAILED, tried_s=tried_s)

    def outrun(self, host, address):
        self._observe(host, address, Verdict.OUTRUN)


class Names:
    def __init__(self, *addresses):
        self.addresses = addresses

    def doubt(self, host):
        """Nothing to doubt."""

    async def resolve(self, host, port):
        return self.addresses


def _dialer(addresses, **more):
    return Dialer(Names(*addresses), ssl.create_default_context(), **more)


async def _dial(dialer, timeout_s=10.0):
    connection = await dialer.dial(HOST, 443, tls=False, timeout_s=timeout_s)
    connection.close()
    return connection.peer


# -- on virtual time, where seconds can be asserted -------------------------------------------------------------------
V6, V4 = Address("2001:db8::1", 443), Address("192.0.2.1", 443)
RTT_S = 0.05


class Scripted:
    """A stream that is only there."""

    def __init__(self, peer):
        self.peer = peer

    def close(self):
        pass


def test_broken_ipv6_costs_one_stagger_and_heals():
    async def main():
        loop = asyncio.get_running_loop()
        healed = False

        async def open_tcp(address):
            if address == V6 and not healed:
                await loop.create_future()
            await asyncio.sleep(RTT_S)
            return Scripted(address)

        dialer = _dialer([V6, V4], open_tcp=open_tcp, advice=BookAdvice(loop.time))
        took = []
        for _ in range(200):
            began = loop.time()
            assert await _dial(dialer) == V4
            took.append(loop.time() - began)
            await asyncio.sleep(10.0)  # over half an hour, so that IPv6 is tried again now and then
        assert max(took) <= 0.3 + RTT_S
        assert sorted(took)[len(took) * 95 // 100] <= RTT_S + 1e-6  # what was learned holds
        healed = True
        began = loop.time()
        for _ in range(1000):
            if await _dial(dialer) == V6:
                break
            await asyncio.sleep(10.0)
        assert loop.time() - began <= limits.FAMILY_REPROBE_S + 10.0 + 1.0
        for _ in range(5):
            assert await _dial(dialer) == V6

    simloop.run(main)


def test_broken_ipv6_unlearned_costs_one_stagger_each_time():
    async def main():
        loop = asyncio.get_running_loop()

        async def open_tcp(address):
            if address == V6:
                await loop.create_future()
            await asyncio.sleep(RTT_S)
            return Scripted(address)

        dialer = _dialer([V6, V4], open_tcp=open_tcp)
        for _ in range(200):
            began = loop.time()
            assert await _dial(dialer) == V4
            assert loop.time() - began <= 0.3 + RTT_S

    simloop.run(main)


# -- on real sockets --------------------------------------------------------------------------------------------------
def _descriptors():
    return len(os.listdir("/proc/self/fd"))


async def _settled(baseline):
    """Wait until as few descriptors are open as before: the server closes its ends a moment later."""
    async with asyncio.timeout(10):
        while _descriptors() > baseline:  # noqa: ASYNC110  (nobody could set an event)
            await asyncio.sleep(0.01)


@pytest.fixture(name="both")
async def _both():
    """Serve on both families; gives a function that starts one."""
    servers = []

    async def hold(reader, writer):
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()

    async def serve(host):
        try:
            servers.append(await asyncio.start_server(hold, host, 0, backlog=1024))
        except OSError:
            pytest.skip(f"{host} cannot be used here")
        return Address(*servers[-1].sockets[0].getsockname()[:2])

    yield serve
    for server in servers:
        server.close()
        await server.wait_closed()


class Hole:
    """A listening socket on ::1 whose queue is full: the kernel drops what comes, until it is healed."""

    def __init__(self):
        self.sock = socket.socket(socket.AF_INET6)
        try:
            self.sock.bind(("::1", 0))
        except OSError:
            self.sock.close()
            pytest.skip("::1 cannot be used here")
        self.sock.listen(0)
        self.address = Address(*self.sock.getsockname()[:2])
        self.fillers = [socket.socket(socket.AF_INET6) for _ in range(3)]
        for filler in self.fillers:
            filler.setblocking(False)
            filler.connect_ex(self.sock.getsockname())

    def heal(self):
        """Take what waits in the queue and let it go: there is room for one more."""
        for filler in self.fillers:
            filler.close()
        self.sock.setblocking(False)
        while True:
            try:
                self.sock.accept()[0].close()
            except BlockingIOError:
                return

    def close(self):
        for sock in (*self.fillers, self.sock):
            sock.close()


async def test_broken_ipv6_is_learned_leaves_nothing_open_and_is_used_again(both):
    now, started = 1000.0, []

    async def open_tcp(address):
        started.append(address)
        return await stream.open_tcp(address)

    v4 = await both("127.0.0.1")
    with contextlib.closing(Hole()) as hole:
        baseline = _descriptors()
        dialer = _dialer([hole.address, v4], open_tcp=open_tcp, advice=BookAdvice(lambda: now))
        for _ in range(200):
            assert await _dial(dialer) == v4
        await _settled(baseline)
        # Two losses can be chance; from then on IPv4 is alone.
        assert started == [hole.address, v4, hole.address, v4] + [v4] * 198
        now += limits.FAMILY_REPROBE_S
        assert await _dial(dialer) == v4
        hole.heal()
        baseline = _descriptors()
        now += limits.FAMILY_REPROBE_S
        assert await _dial(dialer) == hole.address
        await _settled(baseline)


async def test_both_families_at_once_with_cancellations_leave_nothing(both):
    addresses = [await both("::1"), await both("127.0.0.1")]
    loop = asyncio.get_running_loop()
    unhandled = []
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    rng = random.Random(20045)
    baseline = _descriptors()
    dialer = _dialer(addresses, stagger_s=0.0)
    peers = []

    async def one(cancel_turns):
        task = asyncio.create_task(_dial(dialer))
        for _ in range(cancel_turns):
            await asyncio.sleep(0)
        if cancel_turns:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            peers.append(await task)

    try:
        for _ in range(50):
            await asyncio.gather(*(one(rng.randint(1, 8) if rng.random() < 1 / 3 else 0) for _ in range(20)))
        assert [task for task in asyncio.all_tasks() if task.get_name().startswith("connect ")] == []
        await _settled(baseline)
        gc.collect()
        await asyncio.sleep(0)
        assert unhandled == []
        assert len(peers) > 600
    finally:
        loop.set_exception_handler(None)


async def test_broken_both_families_at_the_deadline_leave_nothing():
    with contextlib.closing(Hole()) as first, contextlib.closing(Hole()) as second:
        baseline = _descriptors()
        dialer = _dialer([first.address, second.address], stagger_s=0.0)
        with pytest.raises(errors.DeadlineExceeded):
            await _dial(dialer, timeout_s=0.05)
        assert _descriptors() == baseline
