"""PROXY protocol, version 2: who a front in between speaks for.

The header is 16 bytes with its length in them, then addresses, then values that are skipped here. Version 1, a line of
text, is not taken.
"""

import ipaddress
from typing import Final

from stormline.core import limits_carriers
from stormline.core.errors import RemoteProtocolError
from stormline.core.values import Address

SIGNATURE: Final = b"\r\n\r\n\x00\r\nQUIT\n"
HEAD_BYTES: Final = 16
_ADDRESS_BYTES: Final = {1: 4, 2: 16}
"""Of one address, by family: AF_INET, AF_INET6."""


def size_of(head: bytes) -> int:
    """Give the size of the whole header.

    Args:
        head: its first `HEAD_BYTES` bytes.

    Raises:
        RemoteProtocolError: they do not begin a header of version 2, or it is too large.
    """
    if len(head) != HEAD_BYTES or not head.startswith(SIGNATURE):
        raise RemoteProtocolError("no PROXY protocol header of version 2")
    if head[12] >> 4 != 2 or head[12] & 15 > 1:
        raise RemoteProtocolError(f"PROXY protocol: version and command {head[12]:#04x}")
    size = HEAD_BYTES + int.from_bytes(head[14:16], "big")
    if size > limits_carriers.PROXY_HEADER_BYTES_MAX:
        raise RemoteProtocolError(f"PROXY protocol header of {size} bytes")
    return size


def parse(header: bytes) -> Address | None:
    """Give the address the connection came from, None where the front speaks for itself or does not say.

    Args:
        header: `size_of` bytes.

    Raises:
        RemoteProtocolError: it is malformed.
    """
    if len(header) < HEAD_BYTES or size_of(header[:HEAD_BYTES]) != len(header):
        raise RemoteProtocolError("PROXY protocol header cut short")
    if header[12] & 15 == 0:  # LOCAL: the front's own look at us
        return None
    family, transport = header[13] >> 4, header[13] & 15
    width = _ADDRESS_BYTES.get(family)
    if width is None or transport != 1:  # UNSPEC, a local socket, or no stream: to be taken as not said
        return None
    if len(header) < HEAD_BYTES + 2 * width + 4:
        raise RemoteProtocolError("PROXY protocol: addresses cut short")
    source = ipaddress.ip_address(header[HEAD_BYTES : HEAD_BYTES + width])
    port = int.from_bytes(header[HEAD_BYTES + 2 * width : HEAD_BYTES + 2 * width + 2], "big")
    return Address(str(source), port)


def encode(source: Address, destination: Address) -> bytes:
    """Write the header of a connection from `source`; both are IP addresses of one family."""
    ends = [ipaddress.ip_address(each.host) for each in (source, destination)]
    ports = b"".join(each.port.to_bytes(2, "big") for each in (source, destination))
    body = b"".join(each.packed for each in ends) + ports
    family = 0x11 if ends[0].version == 4 else 0x21
    return SIGNATURE + bytes((0x21, family)) + len(body).to_bytes(2, "big") + body
