"""The first thing a QUIC server says: which versions it speaks, to whoever asks for one it does not know.

Version negotiation (RFC 8999 section 6, RFC 9000 section 6) is all of QUIC that this is: enough to find out whether
QUIC passes, and how well, and nothing more.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import Final, cast

from stormline.wire import quic

_HEAD: Final = struct.Struct("!BIB")
_LONG: Final = 0x80


def answer(datagram: bytes) -> bytes | None:
    """Give the versions, in answer to a datagram that asks for another one; None where there is nothing to say."""
    if len(datagram) < quic.DATAGRAM_BYTES:
        return None  # RFC 9000 section 5.2.2
    first, version, length = _HEAD.unpack_from(datagram)
    destination, rest = datagram[_HEAD.size : _HEAD.size + length], datagram[_HEAD.size + length :]
    if not first & _LONG or version == 0 or version in quic.VERSIONS:
        return None
    source = rest[1 : 1 + rest[0]]  # both ids fit, however long they say they are
    ids = b"".join(bytes((len(each),)) + each for each in (source, destination))
    return struct.pack("!BI", _LONG, 0) + ids + b"".join(struct.pack("!I", each) for each in sorted(quic.VERSIONS))


class _Versions(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)  # Python 3.11's is none by inheritance

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        versions = answer(data)
        if versions is not None and self._transport is not None:
            self._transport.sendto(versions, addr)


async def serve(host: str, port: int) -> Callable[[], None]:
    """Answer on a UDP port of an address.

    Returns:
        What ends it.

    Raises:
        OSError: the port cannot be bound.
    """
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(_Versions, (host, port))
    return transport.close
