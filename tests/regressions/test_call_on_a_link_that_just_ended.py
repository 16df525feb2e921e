"""A call that was opened in the moment its connection broke waited for its whole deadline.

Whoever waits for a link to be opened is woken one turn of the loop after it stands. Where the connection broke in
that turn, the wire's machine still took the call (it does not know of sockets), and nobody was left to fail it.
Found by simulation: `clock-steps`, seed 268, by the invariant that no call waits on a dead link.
"""

import asyncio
import errno

import pytest

from stormline.client.link import Link
from stormline.core.errors import LocalProtocolError
from stormline.core.values import Address
from stormline.testing.simloop import on_virtual_time
from stormline.wire import messages


class BrokenStream:
    """A stream whose connection is reset as soon as it is read."""

    peer = Address("203.0.113.1", 443)
    local = Address("10.0.0.1", 1)
    alpn = messages.ALPN
    sent_bytes = 0

    async def send_all(self, data: bytes) -> None:
        raise ConnectionResetError(errno.ECONNRESET, "reset")

    async def receive(self, size_max: int = 0) -> bytes:
        raise ConnectionResetError(errno.ECONNRESET, "reset")

    def is_readable(self) -> bool:
        return True

    def close(self) -> None:
        pass


class Deaf:
    """Listens to nothing."""

    def __getattr__(self, name: str):
        return lambda *_: None


@on_virtual_time
async def test_call_on_a_link_that_has_ended_is_refused_at_once() -> None:
    link = Link(BrokenStream(), Deaf())
    link.start(messages.Hello(versions=(messages.VERSION,), app="shop"))
    await asyncio.sleep(1)
    assert link.closed is not None
    with pytest.raises(LocalProtocolError):
        link.call("rpc", "orders.create")
    await link.close()
