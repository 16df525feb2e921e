"""Where a relay may fetch from: origins that were named, at addresses of the public internet, and nothing else.

Whoever can seal a request could otherwise make the gateway talk to whatever it can reach: its own loopback, a cloud's
metadata, a neighbour's console.

Pure.
"""

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from stormline.core import errors, limits_relay
from stormline.core.values import Address, parse_address
from stormline.wire import bhttp, hostname

_HTTPS_PORT: Final = 443
_CLEAR: Final = "http://"
_NAT64: Final = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48")))
"""RFC 6052, RFC 8215: IPv6 that leads to the IPv4 address in its last bits."""


class Target(NamedTuple):
    """An origin that may be fetched from.

    Attributes:
        host: in its normal form.
        port: TCP port.
        addresses: where it is, as the settings say; empty: by its name.
        scheme: `https`; `http` where the operator says that it is so near that nobody stands between.
    """

    host: str
    port: int
    addresses: tuple[Address, ...] = ()
    scheme: str = "https"

    @property
    def authority(self) -> str:
        """Host, and port where it is not HTTPS' own: what `Host` says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _HTTPS_PORT else f"{host}:{self.port}"


class Refused(Exception):
    """A request that is not for this gateway.

    Attributes:
        status: HTTP status of the answer.
        error: type of the error, for `Proxy-Status` (RFC 9209 section 2.3).
    """

    def __init__(self, status: int, error: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.error = error


class Targets:
    """The origins of one gateway.

    Args:
        origins: addresses by `host` or `host:port`; none: the name is resolved, and only public addresses count. An
            address that is written here may be private, and asked without TLS (`http://192.0.2.1:8080`): the operator
            says so.

    Raises:
        ConfigError: a name or an address is malformed, or there are too many.
    """

    def __init__(self, origins: Mapping[str, Iterable[str]]) -> None:
        if len(origins) > limits_relay.RELAY_ORIGINS_MAX:
            raise errors.ConfigError(f"relay: at most {limits_relay.RELAY_ORIGINS_MAX} origins")
        targets = (_read(name, tuple(addresses)) for name, addresses in origins.items())
        self._targets = {(target.host, target.port): target for target in targets}
        self._spelled = {target.authority.encode("ascii"): target for target in self._targets.values()}

    def find(self, head: bhttp.RequestHead) -> Target:
        """Give the origin a request is for.

        One spelling: the host of the control data, HTTPS, no address unless it was named so. `Host` may only repeat it.

        Raises:
            Refused: the request is for none of the origins, or cannot be relayed.
        """
        if head.method in (b"CONNECT", b"TRACE"):
            raise Refused(405, "http_request_denied", f"{head.method.decode()} is not relayed")
        if head.scheme != b"https":
            raise Refused(403, "http_request_denied", "only https is relayed")
        given = [value for name, value in head.headers if name == b"host"]
        if not given and head.authority in self._spelled:
            return self._spelled[head.authority]
        authority = head.authority or (given[0] if given else b"")
        if len(given) > 1 or any(value.lower() != authority.lower() for value in given):
            raise Refused(400, "http_request_error", "the authority and Host differ")
        try:
            host, port = _split(authority.decode("ascii"))
        except (errors.ConfigError, UnicodeDecodeError):
            raise Refused(400, "http_request_error", "the authority is no host") from None
        target = self._targets.get((host, port))
        if target is None:
            raise Refused(403, "http_request_denied", "this origin is not relayed")
        return target


def reachable(target: Target, resolved: Iterable[Address]) -> tuple[Address, ...]:
    """Give the addresses of a name that may be connected to.

    Args:
        target: the origin.
        resolved: what its name was resolved to.

    Raises:
        Refused: none of them is public.
    """
    found = tuple(address for address in resolved if is_public(address.host))
    if not found:
        raise Refused(502, "destination_ip_prohibited", f"{target.host} has no public address")
    return found[: limits_relay.RELAY_ADDRESSES_MAX]


def is_public(text: str) -> bool:
    """Say whether an IP address is one of the public internet, whatever form it is wrapped in."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if inner is None and any(address in network for network in _NAT64):
            inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        if inner is not None:
            return is_public(str(inner))
    return address.is_global and not address.is_multicast


def _read(name: str, addresses: tuple[str, ...]) -> Target:
    host, port = _split(name)
    if len(addresses) > limits_relay.RELAY_ADDRESSES_MAX:
        raise errors.ConfigError(f"relay: {name!r}: at most {limits_relay.RELAY_ADDRESSES_MAX} addresses")
    clear = {text.startswith(_CLEAR) for text in addresses}
    if len(clear) > 1:
        raise errors.ConfigError(f"relay: {name!r}: some addresses are asked without TLS, and some with it")
    default = 80 if True in clear else port
    places = tuple(parse_address(text.removeprefix(_CLEAR), default_port=default) for text in addresses)
    for place in places:
        if not place.is_ip:
            raise errors.ConfigError(f"relay: {name!r}: {place.host!r} is no IP address")
    return Target(host, port, places, "http" if True in clear else "https")


def _split(authority: str) -> tuple[str, int]:
    """Read `host` or `host:port`.

    Raises:
        ConfigError: it is neither.
    """
    host, separator, digits = authority.rpartition(":")
    if not separator or authority.endswith("]"):
        host, digits = authority, str(_HTTPS_PORT)
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 5 or not 0 < int(digits) < 65536:
        raise errors.ConfigError(f"relay: {authority[:80]!r} is no host with a port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise errors.ConfigError(f"relay: {authority[:80]!r}: write an IPv6 address in brackets")
    return hostname.normalise(host), int(digits)
