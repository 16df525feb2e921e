"""Host names in the one form in which plans, rules and certificates hold them."""

import ipaddress
import re

from stormline.core import errors
from stormline.core import limits_platform as limits

_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


def normalise(text: str) -> str:
    """Give a host name in lower case, without the root's dot; IP addresses in their canonical form.

    `_` is allowed: it is common in internal names, though RFC 1123 knows no such host. A name outside ASCII must
    come as its A-label (`xn--...`, RFC 5890 section 2.3.2.1): how to map it is the caller's decision, not ours.

    Raises:
        ConfigError: not a host name: a port, a scheme, a wildcard, an empty or overlong label, a false A-label.
    """
    shown = f"host {text[:80]!r}"
    if not text.isascii():
        raise errors.ConfigError(f"{shown}: write it as its A-label (xn--...)")
    host = text.lower()
    if ":" in host:
        return _ipv6(host, shown)
    host = host.removesuffix(".")
    if not 0 < len(host) <= limits.HOST_CHARS_MAX:
        raise errors.ConfigError(f"{shown}: a host name has 1 to {limits.HOST_CHARS_MAX} characters")
    labels = host.split(".")
    for label in labels:
        if not _LABEL.fullmatch(label):
            raise errors.ConfigError(f"{shown}: expected a host name alone, such as 'api.example.com'")
        if label.startswith("xn--"):
            _check_a_label(label, shown)
    if _NUMBER.fullmatch(labels[-1]):
        return _ipv4(host, shown)
    return host


def is_address(host: str) -> bool:
    """True where a normal form is an IP address, not a name."""
    return ":" in host or _NUMBER.fullmatch(host.rpartition(".")[2]) is not None


def _ipv6(host: str, shown: str) -> str:
    try:
        if "%" in host:  # a zone means something on one machine only
            raise ValueError
        return str(ipaddress.IPv6Address(host))
    except ValueError:
        raise errors.ConfigError(f"{shown}: expected a host name alone, without scheme or port") from None


def _ipv4(host: str, shown: str) -> str:
    # A name whose last label is a number is an address to every URL parser (WHATWG URL, "ends in a number"), so
    # it must not pass for a name here.
    try:
        return str(ipaddress.IPv4Address(host))
    except ValueError:
        raise errors.ConfigError(f"{shown}: it ends in a number and is no IPv4 address") from None


def _check_a_label(label: str, shown: str) -> None:
    # Only the Punycode round trip (RFC 3492) is checked here: a label that no Unicode text encodes to could
    # never be asked for by a browser, and shows a typing fault.
    try:
        text = label[4:].encode("ascii").decode("punycode")
        valid = not text.isascii() and text.encode("punycode").decode("ascii") == label[4:]
    except (UnicodeError, ValueError):
        valid = False
    if not valid:
        raise errors.ConfigError(f"{shown}: {label!r} is no valid A-label")
