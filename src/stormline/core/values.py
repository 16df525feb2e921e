"""Small values every room speaks of: where things are, and what must not be shown."""

import ipaddress
from typing import NamedTuple

from stormline.core import errors


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
    """Read `host:port`, `[v6]:port` or a bare host where a default port is given.

    Raises:
        ConfigError: the text is not an address; the message quotes it.
    """
    rest = text.strip()
    if rest.startswith("["):
        host, bracket, tail = rest[1:].partition("]")
        if not bracket:
            raise errors.ConfigError(f"address {text!r}: '[' without ']'")
        port_text = tail.removeprefix(":")
    elif rest.count(":") > 1:
        host, port_text = rest, ""
    else:
        host, _, port_text = rest.partition(":")
    if not host:
        raise errors.ConfigError(f"address {text!r}: no host")
    if not port_text:
        if default_port is None:
            raise errors.ConfigError(f"address {text!r}: no port")
        return Address(host, default_port)
    if not (port_text.isascii() and port_text.isdigit() and len(port_text) <= 5 and 0 < int(port_text) < 65536):
        raise errors.ConfigError(f"address {text!r}: port must be 1 to 65535")
    return Address(host, int(port_text))


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
