"""Who a peer is, for bounds of how often one may do something."""

import ipaddress


def line_of(host: str) -> str:
    """Name what one subscriber's line has: an IPv4 address, or an IPv6 /64. What is no address is its own name."""
    if ":" not in host and "%" not in host:
        return host
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))
