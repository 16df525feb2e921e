"""What seeds have found, each as a test of its own: a seed means another storm once the code has changed."""

import asyncio

import pytest

from stormline.core import errors, limits
from stormline.core.values import Address
from stormline.netmodel.params import LinkParams
from stormline.outbound.dial import Dialer
from stormline.testing.simloop import SimRng, on_virtual_time
from stormline.testing.simnet import SimNet
from stormline.testing.simplatform import open_tcp_of
from stormline.testing.simtls import SimTlsContext

SERVER = Address("198.51.100.1", 443)


class NoNames:
    async def resolve(self, host, port):
        raise OSError("nobody asks for a name here")


class Phone:
    """A phone whose server is far away, and what it began to connect to."""

    def __init__(self):
        self.net = SimNet(asyncio.get_running_loop(), SimRng(1))
        self.host = self.net.host("phone", "10.0.0.2", link=self.net.link("phone", LinkParams(delay_s=0.05)))
        self.server = self.net.host("server", SERVER.host)
        self.begun = []

    async def open_tcp(self, address):
        self.begun.append(asyncio.get_running_loop().time())
        return await open_tcp_of(self.host)(address)

    async def dial(self, timeout_s):
        dialer = Dialer(NoNames(), SimTlsContext(("h2",)), open_tcp=self.open_tcp)
        return await dialer.dial("a.sim", 443, tls=True, timeout_s=timeout_s, addresses=(SERVER,))


@on_virtual_time
async def test_connections_to_one_address_that_fail_in_the_same_moment_end_the_dial_with_our_error() -> None:
    phone = Phone()
    phone.server.dark = True
    dial = asyncio.create_task(phone.dial(20.0))
    await asyncio.sleep(1.5 * limits.DIAL_REPEAT_S)
    assert len(phone.begun) == 2
    phone.host.leave_network(kill=True)
    with pytest.raises(errors.ConnectError):
        await dial


@on_virtual_time
async def test_address_silent_in_tls_is_not_knocked_at_without_pause_when_the_network_goes() -> None:
    phone = Phone()
    kept = []
    phone.server.listen(SERVER.port, kept.append)
    dial = asyncio.create_task(phone.dial(20.0))
    await asyncio.sleep(1.0)
    phone.host.leave_network(kill=False)
    with pytest.raises(errors.TransportError):
        await dial
    pauses = [later - sooner for sooner, later in zip(phone.begun, phone.begun[1:], strict=False)]
    assert min(pauses) >= limits.DIAL_ROUND_S_MIN
    for sock in kept:
        sock.close()
