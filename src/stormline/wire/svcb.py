"""SVCB and HTTPS records (RFC 9460): where and how a service is reached, as the data of one record.

With the keys of DNS servers (RFC 9461: `dohpath`) and of oblivious HTTP (RFC 9540: `ohttp`).
"""

import enum
import ipaddress
import struct
from typing import Final, NamedTuple

from stormline.wire import dns


class Key(enum.IntEnum):
    """Service parameters (RFC 9460 section 14.3.2)."""

    MANDATORY = 0
    ALPN = 1
    NO_DEFAULT_ALPN = 2
    PORT = 3
    IPV4HINT = 4
    IPV6HINT = 6
    DOHPATH = 7
    OHTTP = 8


class Service(NamedTuple):
    """One record.

    Attributes:
        priority: the lower the earlier; 0 is AliasMode, which has a target and nothing else.
        target: name of the place, empty: the owner's own.
        alpn: protocols beside the default one, by ALPN id.
        default_alpn: the default one (HTTP/1.1 for HTTPS records) is spoken too; False needs `alpn`.
        port: None: the one asked for.
        ipv4hint: IPv4 literals.
        ipv6hint: IPv6 literals.
        dohpath: URI template of a server for DNS, `/dns-query{?dns}`; empty: none.
        ohttp: can be asked by oblivious HTTP.
        mandatory: keys without which the record must not be used.
    """

    priority: int
    target: str = ""
    alpn: tuple[str, ...] = ()
    default_alpn: bool = True
    port: int | None = None
    ipv4hint: tuple[str, ...] = ()
    ipv6hint: tuple[str, ...] = ()
    dohpath: str = ""
    ohttp: bool = False
    mandatory: tuple[Key, ...] = ()


_PARAM: Final = struct.Struct("!HH")
_U16: Final = struct.Struct("!H")


def encode(service: Service) -> bytes:
    """Give the data of the record; names in it are not compressed (RFC 9460 section 2.2).

    Raises:
        ValueError: the record would be malformed: no name, an alias with parameters, an ALPN id that is empty or too
            long, `mandatory` naming itself or what is not there, no protocol at all.
    """
    target = b"".join(bytes((len(each),)) + each for each in dns.labels_of(service.target)) if service.target else b""
    values = _values(service)
    if service.priority == 0 and values:
        raise ValueError("an alias has no parameters")
    if not service.default_alpn and not service.alpn:
        raise ValueError("a service that speaks no protocol")
    if service.mandatory:
        keys = sorted(set(service.mandatory))
        if Key.MANDATORY in keys or not set(keys) <= values.keys():
            raise ValueError("a mandatory parameter that is not there")
        values[Key.MANDATORY] = b"".join(map(_U16.pack, keys))
    params = b"".join(_PARAM.pack(key, len(values[key])) + values[key] for key in sorted(values))
    return _U16.pack(service.priority) + target + b"\0" + params


def _values(service: Service) -> dict[Key, bytes]:
    values: dict[Key, bytes] = {}
    if service.alpn:
        ids = [each.encode("ascii") for each in service.alpn]
        if not all(0 < len(each) < 256 for each in ids):
            raise ValueError("an ALPN id has 1 to 255 bytes")
        values[Key.ALPN] = b"".join(bytes((len(each),)) + each for each in ids)
    if not service.default_alpn:
        values[Key.NO_DEFAULT_ALPN] = b""
    if service.port is not None:
        values[Key.PORT] = _U16.pack(service.port)
    if service.ipv4hint:
        values[Key.IPV4HINT] = b"".join(ipaddress.IPv4Address(each).packed for each in service.ipv4hint)
    if service.ipv6hint:
        values[Key.IPV6HINT] = b"".join(ipaddress.IPv6Address(each).packed for each in service.ipv6hint)
    if service.dohpath:
        values[Key.DOHPATH] = service.dohpath.encode()
    if service.ohttp:
        values[Key.OHTTP] = b""
    return values
