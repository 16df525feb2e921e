"""The probes of a diagnosis on this machine's own kernel, and where the kernel does not let them."""

import asyncio
import contextlib
import errno
import itertools
import socket

import pytest

from stormline.core import limits_diagnosis as limits
from stormline.core.values import Address
from stormline.net import icmp, quicping, tracing
from stormline.net.clock import SystemRng
from stormline.net.system import LINUX

pytestmark = pytest.mark.loopback
RNG = SystemRng()
needs_linux = pytest.mark.skipif(not LINUX, reason="only Linux has a queue of errors")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    for name, value in (("ECHO_PAUSE_S", 0.01), ("ECHO_S", 3.0), ("QUIC_PAUSE_S", 0.02), ("QUIC_S", 0.5),
                        ("TRACE_S", 0.2), ("MTU_S", 0.1)):  # fmt: skip
        monkeypatch.setattr(limits, f"DIAGNOSIS_{name}", value)


def has_ipv6():
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        probe.connect(("::1", 9))
        return True
    return False


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_echo_comes_back_or_says_why_none_was_asked_for(host):
    if ":" in host and not has_ipv6():
        pytest.skip("no IPv6 here")
    found = await icmp.echo(host, RNG)
    if found.why_not:
        assert (found.sent, found.answered) == (0, 0)
    else:
        assert (found.sent, found.answered) == (limits.DIAGNOSIS_ECHOES,) * 2
        assert found.rtt_s < 5.0


@pytest.mark.parametrize("denied", [(socket.SOCK_DGRAM,), (socket.SOCK_DGRAM, socket.SOCK_RAW)])
async def test_echo_falls_back_to_a_raw_socket_and_then_to_a_word(monkeypatch, denied):
    real = socket.socket

    class Refusing(real):
        def __init__(self, family=-1, type=-1, proto=-1, fileno=None):
            if proto == socket.IPPROTO_ICMP and type in denied:
                raise PermissionError(errno.EPERM, "Operation not permitted")
            super().__init__(family, type, proto, fileno)

    monkeypatch.setattr(socket, "socket", Refusing)
    found = await icmp.echo("127.0.0.1", RNG)
    if len(denied) == 2 or found.why_not:  # a raw socket needs privileges
        assert "no ICMP socket" in found.why_not
    else:
        assert found.answered == limits.DIAGNOSIS_ECHOES


async def test_cancelled_probes_leave_nothing_behind():
    async def hold(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    address = Address(*server.sockets[0].getsockname()[:2])
    async with server:
        for probe in (icmp.echo("127.0.0.1", RNG), quicping.ping(address, RNG), tracing.trace(address)):
            task = asyncio.create_task(probe)
            await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await task


@needs_linux
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_way_to_this_machine_is_its_end_and_knows_its_size(host):
    if ":" in host and not has_ipv6():
        pytest.skip("no IPv6 here")
    server = await asyncio.start_server(lambda _, writer: writer.close(), host, 0)
    address = Address(host, server.sockets[0].getsockname()[1])
    async with server:
        [hop] = await tracing.trace(address)
        assert (hop.ttl, hop.host, hop.end) == (1, host, True)
        assert await tracing.path_mtu(address) >= 1280


async def test_system_that_tells_nothing_is_said_so(monkeypatch):
    monkeypatch.setattr(tracing, "LINUX", False)
    for probe in (tracing.trace, tracing.path_mtu):
        with pytest.raises(OSError, match="Linux"):
            await probe(Address("127.0.0.1", 9))


class Udp(asyncio.DatagramProtocol):
    """Answers with version negotiation when `answers` says so."""

    def __init__(self, answers):
        self._answers = answers

    def connection_made(self, transport):
        self.transport = transport

    def datagram_received(self, data, peer):
        if next(self._answers):
            ids = bytes((8,)) + data[15:23] + bytes((8,)) + data[6:14]
            self.transport.sendto(b"\xc0\0\0\0\0" + ids + bytes.fromhex("000000016b3343cf"), peer)


@contextlib.asynccontextmanager
async def speaking(*answers):
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: Udp(itertools.chain(answers, itertools.repeat(answers[-1]))), local_addr=("127.0.0.1", 0)
    )
    with contextlib.closing(transport):
        yield Address(*transport.get_extra_info("sockname"))


async def test_quic_that_answers_is_asked_no_longer_than_needed(monkeypatch):
    for name in ("PAUSE_S", "PAUSE_S_MAX"):  # an answer ends the wait: a busy machine is no loss
        monkeypatch.setattr(limits, f"DIAGNOSIS_QUIC_{name}", 5.0)
    async with speaking(True) as address:
        found = await quicping.ping(address, RNG)
    assert (found.sent, found.answered) == (limits.DIAGNOSIS_QUIC_ENOUGH,) * 2
    assert found.versions == {1, 0x6B3343CF}


async def test_quic_that_loses_is_asked_all_along_and_counted():
    async with speaking(False, True, False) as address:
        found = await quicping.ping(address, RNG)
    assert (found.sent, found.answered) == (limits.DIAGNOSIS_QUIC_DATAGRAMS, 1)


async def test_quic_on_a_slow_network_is_asked_little():
    async with speaking(False) as address:
        found = await quicping.ping(address, RNG, limits.DIAGNOSIS_SLOW_RTT_S)
    assert (found.sent, found.answered) == (limits.DIAGNOSIS_QUIC_ENOUGH, 0)


async def test_quic_where_nobody_listens_is_refused_at_once():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        address = Address(*taken.getsockname())
    found = await quicping.ping(address, RNG)
    assert found.refused
    assert found.sent < limits.DIAGNOSIS_QUIC_DATAGRAMS
