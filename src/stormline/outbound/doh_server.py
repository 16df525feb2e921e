"""Where DNS over HTTPS is asked: one server as an app names it."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from stormline.core import errors, limits_names
from stormline.core.values import Address
from stormline.wire import hostname


@dataclass(frozen=True)
class Endpoint:
    """Where questions go.

    Attributes:
        host: the name, or IP address, that the certificate must carry.
        port: TCP.
        path: of the URL.
        addresses: where to connect.
    """

    host: str
    port: int
    path: str
    addresses: tuple[Address, ...]


@dataclass(frozen=True)
class DohServer:
    """A server for DNS over HTTPS.

    Attributes:
        url: its address for questions, `https://dns.example/dns-query`; a `{?dns}` at its end (RFC 8484 section 4.1)
            may be left in.
        addresses: IP addresses it is reached at, the best first. Needed unless the URL's host is one.
    """

    url: str
    addresses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check it.

        Raises:
            ConfigError: the URL is not https, has no path or holds more than host, port and path; no address; an
                address is a name.
        """
        _ = self.endpoint

    @property
    def endpoint(self) -> Endpoint:
        """What the URL says, taken apart."""
        shown = f"DNS over HTTPS {self.url[:80]!r}"
        try:
            parts = urlsplit(self.url.removesuffix("{?dns}"))
            port = 443 if parts.port is None else parts.port
        except ValueError as error:
            raise errors.ConfigError(f"{shown}: {error}") from None
        if parts.scheme != "https" or not parts.hostname:
            raise errors.ConfigError(f"{shown}: expected https://host/path")
        if parts.username is not None or parts.query or parts.fragment or not parts.path.isascii() or not port:
            raise errors.ConfigError(f"{shown}: expected https://host/path and nothing else")
        host = hostname.normalise(parts.hostname)
        given = (host,) if hostname.is_address(host) and not self.addresses else self.addresses
        places = tuple(Address(each, port) for each in given)
        if not places:
            raise errors.ConfigError(f"{shown}: give its IP addresses; its name cannot be asked for by itself")
        if len(places) > limits_names.NAMES_CONFIGURED_MAX or not all(each.is_ip for each in places):
            raise errors.ConfigError(
                f"{shown}: addresses: expected 1 to {limits_names.NAMES_CONFIGURED_MAX} IP addresses"
            )
        return Endpoint(host, port, parts.path or "/", places)
