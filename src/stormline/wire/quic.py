"""Whether a server speaks QUIC, found out by one datagram each way: the part of QUIC that is the same in all versions.

A server answers a long header of a version it does not know with the versions it knows (RFC 8999 section 6, RFC 9000
section 6). That takes no handshake, no keys and no state on either side.
"""

import struct
from typing import Final

VERSIONS: Final = frozenset({0x00000001, 0x6B3343CF})
"""QUIC version 1 (RFC 9000 section 15) and 2 (RFC 9369 section 3.1)."""
DATAGRAM_BYTES: Final = 1200
"""A datagram that begins something has this many bytes: servers pass over smaller ones (RFC 9000 section 14.1)."""
ID_BYTES: Final = 8
"""A client's first destination id has at least this many bytes (RFC 9000 section 7.2)."""
_LONG: Final = 0x80
_FIXED: Final = 0x40
_UNKNOWN: Final = 0x1A2A3A4A
"""One of the versions that stay unknown for ever (RFC 9000 section 15)."""
_HEAD: Final = struct.Struct("!BI")


def question(destination: bytes, source: bytes) -> bytes:
    """Give the datagram that asks a server for its versions.

    Args:
        destination: `ID_BYTES` nobody can guess, by which the answer is known.
        source: as many more of them.
    """
    ids = b"".join(bytes((len(each),)) + each for each in (destination, source))
    return (_HEAD.pack(_LONG | _FIXED, _UNKNOWN) + ids).ljust(DATAGRAM_BYTES, b"\0")


def read_answer(datagram: bytes, destination: bytes, source: bytes) -> frozenset[int] | None:
    """Give the versions that a server says it speaks; None for anything but the answer to `question`.

    Args:
        datagram: what came, of any content.
        destination: as it was asked.
        source: as it was asked.
    """
    ids = b"".join(bytes((len(each),)) + each for each in (source, destination))  # each comes back as the other one
    versions = datagram[_HEAD.size + len(ids) :]
    if len(datagram) < _HEAD.size or not versions or len(versions) % 4:
        return None
    first, version = _HEAD.unpack_from(datagram)
    if not first & _LONG or version != 0 or datagram[_HEAD.size : _HEAD.size + len(ids)] != ids:
        return None
    return frozenset(number for (number,) in struct.iter_unpack("!I", versions))
