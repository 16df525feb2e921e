"""Small values every room speaks of: where things are, and what must not be shown."""

import ipaddress
import re
from typing import NamedTuple

from stormline.core import errors

_ADDRESS = re.compile(
    r"(?:\[(?P<bracketed>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<bare>(?:[0-9A-Fa-f.]*:){2}[0-9A-Fa-f:.]*)"
    r"|(?P<name>[^\s:\[\]/@]+))(?::(?P<port>[0-9]+))?",
    re.ASCII,
)


class Address(NamedTuple):
    """A host (name or IP literal, no brackets) and a TCP or UDP port."""

    host: str
    port: int

    def __str__(self) -> str:
        """Give `host:port`, an IPv6 host in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_ip(self) -> bool:
        """True where `host` is an IP literal, so that no name has to be resolved."""
        try:
            ipaddress.ip_address(self.host.partition("%")[0])
        except ValueError:
            return False
        return True


def parse_address(text: str, *, default_port: int | None = None) -> Address:
    """Read `host:port`, `[v6]:port` or a bare host (a v6 one with or without brackets) where a default port is given.

    Raises:
        ConfigError: the text is not an address; the message quotes it.
    """
    shown = f"address {text[:80]!r}"
    match = _ADDRESS.fullmatch(text.strip())
    if match is None:
        raise errors.ConfigError(f"{shown}: expected host:port or [IPv6]:port")
    host = match["bracketed"] or match["bare"] or match["name"]
    if match["port"] is None:
        if default_port is None:
            raise errors.ConfigError(f"{shown}: no port")
        return Address(host, default_port)
    port = int(match["port"]) if len(match["port"]) <= 5 else 0
    if not 0 < port < 65536:
        raise errors.ConfigError(f"{shown}: port must be 1 to 65535")
    return Address(host, port)


class Secret(str):
    """A text that must not reach a log: `repr` masks it; `str()` and formatting by name stay explicit.

    `f"{secret}"` and `str(secret)` mask too; call `reveal()` where the value itself is meant.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        """Mask the value."""
        return "Secret('***')"

    def __str__(self) -> str:
        """Mask the value."""
        return "***"

    def __format__(self, spec: str) -> str:
        """Mask the value."""
        return format("***", spec)

    def reveal(self) -> str:
        """Give the plain text."""
        return str.__str__(self)
