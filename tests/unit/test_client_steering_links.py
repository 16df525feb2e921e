"""What a client has learned of its network, asked on behalf of connections: virtual time, no sockets."""

import asyncio

import pytest

from stormline.client.steering import Steering
from stormline.core import limits
from stormline.core.values import Address
from stormline.net.tcpinfo import TcpInfo
from stormline.outbound.held import Held, Key, Origin
from stormline.policy.shape import Network
from stormline.testing.simloop import on_virtual_time

HOST = "a.test"
ONE, TWO, THREE, FOUR = (Address(f"192.0.2.{number}", 443) for number in range(1, 5))


class Connection:
    """A `Held` that leads to `ONE`, and of which the kernel says what it is told to."""

    def __init__(self, info=None):
        self.key = Key(Origin("https", HOST, 443), None, None)
        self.peer = ONE
        self._info = info

    def tcp_info(self):
        return self._info


def steering():
    return Steering(Network("n", "cell"))


@on_virtual_time
async def test_steering_dark_slow_link_is_asked_at_other_addresses_too():
    known = steering()
    assert known.knocked_at(Connection()) == [ONE]
    known.order(HOST, [TWO, ONE, THREE, FOUR], [])
    assert known.knocked_at(Connection()) == [ONE, TWO, THREE]
    known.order(HOST, [ONE], [])
    assert known.knocked_at(Connection()) == [ONE]


@on_virtual_time
async def test_steering_remembers_addresses_of_few_hosts():
    known = steering()
    known.order(HOST, [ONE, TWO], [])
    for number in range(limits.DIALLED_HOSTS_MAX):
        known.order(f"{number}.test", [ONE, TWO], [])
    assert known.knocked_at(Connection()) == [ONE]
    assert len(known._dialled) == limits.DIALLED_HOSTS_MAX


@pytest.mark.parametrize(("rtt_s", "window"), [(0.05, limits.H2_STREAM_WINDOW_BYTES),
                                               (0.6, limits.H2_STREAM_WINDOW_BYTES_MIN)])  # fmt: skip
def test_steering_window_follows_what_was_measured(rtt_s, window):
    @on_virtual_time
    async def run():
        known = steering()
        known.connected(HOST, ONE, connect_s=rtt_s, tls_s=None)
        assert known.window_bytes(HOST, limits.H2_STREAM_WINDOW_BYTES) == window
        known.moved(64 * 1024, 1.0, HOST)  # 64 KB in a second, and a round trip before it
        assert limits.H2_STREAM_WINDOW_BYTES_MIN < known.window_bytes(HOST, window) < limits.H2_STREAM_WINDOW_BYTES

    run()


@on_virtual_time
async def test_steering_connection_is_overdue_by_what_the_kernel_says():
    known = steering()
    known.connected(HOST, ONE, connect_s=0.06, tls_s=None)
    owed = TcpInfo(rtt_s=0.06, rto_s=0.26, backoffs=0, unacked_bytes=100)
    assert known.overdue(Connection(owed), 0.3)
    assert not known.overdue(Connection(owed), 0.2)
    assert not known.overdue(Connection(owed._replace(unacked_bytes=0)), 5.0)
    await asyncio.sleep(0)


def test_held_set_aside_is_mute_until_it_answers_and_not_for_good():
    held = Held(Key(Origin("https", HOST, 443), None, None), None)

    @on_virtual_time
    async def run():
        held.set_aside()
        assert held.aside
        held.distrust()
        assert not held.aside

    run()
