"""Which addresses this machine has, and which names its owner has given addresses."""

import errno
import ipaddress
import socket
from pathlib import Path
from typing import Final

_HOSTS: Final = Path("/etc/hosts")
_HOSTS_BYTES_MAX: Final = 1 << 20
_NO_ROUTE: Final = frozenset(
    {errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
)
FAR: Final = ((socket.AF_INET, "198.51.100.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses that nobody has (RFC 5737, RFC 3849): what goes there would go by the default route."""


def has_route() -> bool:
    """Say whether this machine has a way out: a route to addresses that are not its own.

    Asked of the kernel by connecting a UDP socket, which sends nothing. Where that fails for another reason than a
    missing route the machine counts as having one.
    """
    for family, host in FAR:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((host, 9))
        except OSError as error:
            if error.errno in _NO_ROUTE:
                continue
        return True
    return False


def is_assigned(host: str) -> bool:
    """Say whether an address is one of this machine's now.

    Asked of the kernel by binding to it, which works the same everywhere and sends nothing. Where that fails for
    another reason the address counts as there: whoever asks closes connections on the answer.

    Args:
        host: an IP literal, IPv6 with its `%scope` where it has one.
    """
    try:
        literal = ipaddress.ip_address(host)
    except ValueError:
        return True
    family = socket.AF_INET6 if literal.version == 6 else socket.AF_INET
    scope = getattr(literal, "scope_id", None)
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            if literal.version == 4:
                probe.bind((host, 0))
            else:
                number = 0 if scope is None else int(scope) if scope.isdecimal() else socket.if_nametoindex(scope)
                probe.bind((host.partition("%")[0], 0, 0, number))
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV, errno.ENXIO)
    return True


def in_hosts_file(name: str, path: Path = _HOSTS) -> bool:
    """Say whether a name is in the machine's own table of hosts, hosts(5): then somebody wants it to mean that."""
    try:
        with path.open("rb") as file:
            text = file.read(_HOSTS_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return False
    wanted = name.lower()
    return any(wanted in line.partition("#")[0].lower().split()[1:] for line in text.splitlines())
