"""Which proxy a request goes through, from the environment or from what the app says. No I/O.

The variables mean what they mean to httpx and curl: `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`, in lower
case first. They are written by people and by host tools, so nothing in them makes a client fail: what cannot be used
is skipped and told, without the credentials that may stand in it.
"""

import base64
import functools
import ipaddress
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote

from stormline.core import errors, limits
from stormline.core.values import Address, Secret
from stormline.wire import hostname

_log = logging.getLogger("stormline.outbound")

_DEFAULT_PORTS: Final = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}
"""The schemes that proxies may have here, with the ports that httpx takes for them."""
_ALIASES: Final = {"socks": "socks5h"}
"""What desktops write into the environment."""
_URL: Final = re.compile(
    r"(?:(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,31})://)?(?P<authority>[^/?#]*)(?P<rest>.*)", re.DOTALL
)
_PLACE: Final = re.compile(r"(?:\[(?P<bracketed>[^\[\]:]*:[^\[\]]*)\]|(?P<bare>[^\[\]:]*))(?::(?P<port>[0-9]*))?")
_ENTRY: Final = re.compile(r"(?:(?P<scheme>http|https|all)://)?(?P<dot>\*?\.)?(?P<place>.+)", re.DOTALL)
_NETWORK: Final = re.compile(r"\[?(?P<address>[0-9a-f:.]+)\]?/(?P<prefix>[0-9.]+)\]?")
_SEPARATORS: Final = re.compile(r"[,\s]+")
_CREDENTIAL_BYTES_MAX: Final = 255
"""RFC 1929 section 2: each length is one byte; more is no user name for an HTTP proxy either."""

_NO_PASSWORD: Final = Secret("")

_Where = tuple[str, int]
"""Where an exemption holds: a scheme, `""` for all, and a port, 0 for all."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """One proxy. `str` and `repr` show no credentials.

    Attributes:
        scheme: `http`, `https` (the same inside TLS), `socks5` (names are resolved here) or `socks5h` (the proxy
            resolves them).
        address: where it is: a name or an IP literal, and the port.
        username: percent-decoded; None where the URL has no credentials.
        password: percent-decoded.
    """

    scheme: str
    address: Address
    username: Secret | None = None
    password: Secret = _NO_PASSWORD

    def __str__(self) -> str:
        """Give what is safe to log."""
        return f"proxy {self.scheme}://{self.address}"

    @property
    def is_http(self) -> bool:
        """It speaks HTTP: it makes tunnels by CONNECT, and forwards requests for `http` origins."""
        return self.scheme in ("http", "https")

    @property
    def credentials(self) -> tuple[bytes, bytes] | None:
        """User name and password as bytes, None where there are none."""
        if self.username is None:
            return None
        return _bytes(self.username), _bytes(self.password)

    @property
    def authorization(self) -> bytes | None:
        """The value of `Proxy-Authorization` (Basic, RFC 7617), None where there are no credentials."""
        pair = self.credentials
        return None if pair is None else b"Basic " + base64.b64encode(b":".join(pair))


def parse_proxy(url: str) -> Proxy:
    """Read a proxy's URL: `[http://|https://|socks5://|socks5h://][user[:password]@]host[:port]`, a path is ignored.

    Raises:
        ConfigError: it is none; the message says why and quotes nothing that may be a credential.
    """
    text = Secret.reveal(url) if isinstance(url, Secret) else url
    if len(text) > limits.PROXY_URL_CHARS_MAX:
        raise errors.ConfigError(f"a proxy URL of more than {limits.PROXY_URL_CHARS_MAX} characters")
    match = _URL.fullmatch(text.strip())
    if match is None:  # cannot be: every part may be empty
        raise errors.ConfigError("a proxy URL is http://[user:password@]host[:port]")
    given = (match["scheme"] or "http").lower()
    scheme = _ALIASES.get(given, given)
    if scheme not in _DEFAULT_PORTS:
        raise errors.ConfigError(f"proxies of scheme {given!r} are not spoken here; {', '.join(_DEFAULT_PORTS)} are")
    if "@" in match["rest"]:
        raise errors.ConfigError("'/', '?' and '#' in a proxy's user name or password are written %2F, %3F and %23")
    userinfo, at, place = match["authority"].rpartition("@")
    username, password = (_decoded(part) for part in userinfo.partition(":")[::2])
    proxy = Proxy(
        scheme,
        _proxy_address(place, _DEFAULT_PORTS[scheme]),
        username if at and (username or password) else None,
        password,
    )
    try:
        sizes = [len(part) for part in proxy.credentials or ()]
    except UnicodeEncodeError:
        raise errors.ConfigError("a proxy's user name or password holds what is no text") from None
    if any(size > _CREDENTIAL_BYTES_MAX for size in sizes):
        raise errors.ConfigError(f"a proxy's user name and password have at most {_CREDENTIAL_BYTES_MAX} bytes each")
    if proxy.is_http and ":" in username:
        raise errors.ConfigError("the user name of an HTTP proxy cannot hold ':' (RFC 7617)")
    return proxy


def _decoded(text: str) -> Secret:
    return Secret(unquote(text, errors="surrogateescape"))


def _bytes(secret: Secret) -> bytes:
    return secret.reveal().encode("utf-8", "surrogateescape")


def _proxy_address(place: str, default_port: int) -> Address:
    match = _PLACE.fullmatch(place)
    if match is None:
        raise errors.ConfigError("a proxy URL needs host[:port], an IPv6 address in brackets")
    try:
        host = hostname.normalise(match["bracketed"] or match["bare"] or "")
    except errors.ConfigError:
        raise errors.ConfigError("the proxy's host is neither a host name nor an IP address") from None
    if not match["port"]:
        return Address(host, default_port)
    return Address(host, _port(match["port"]))


def _port(text: str) -> int:
    port = int(text) if len(text) <= 5 else 0
    if not 0 < port < 65536:
        raise errors.ConfigError("a port is 1 to 65535")
    return port


@dataclass(frozen=True, slots=True)
class Exemptions:
    """Who is reached without a proxy. What one look-up costs does not grow with the number of entries.

    Attributes:
        names: a name and all names under it; `""` is everything.
        below: all names under a name, not itself.
        networks: by IP version and prefix length: the leading bits of an address. A single address is one too.
    """

    names: Mapping[str, frozenset[_Where]] = field(default_factory=dict)
    below: Mapping[str, frozenset[_Where]] = field(default_factory=dict)
    networks: Mapping[tuple[int, int], Mapping[int, frozenset[_Where]]] = field(default_factory=dict)

    def cover(self, scheme: str, host: str, port: int) -> bool:
        """Say whether a host is exempt.

        Args:
            scheme: `http` or `https`.
            host: a name, with or without the root's dot, or an IP literal with or without brackets.
            port: where it is asked.
        """
        wheres = {("", 0), ("", port), (scheme, 0), (scheme, port)}
        if _meet(self.names.get(""), wheres):
            return True
        host = host.lower().strip("[]").removesuffix(".")
        address = _ip(host.partition("%")[0])
        if address is not None:
            mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
            return self._cover_address(address, wheres) or (mapped is not None and self._cover_address(mapped, wheres))
        if _meet(self.names.get(host), wheres):
            return True
        _, dot, parent = host.partition(".")
        while dot:
            if _meet(self.names.get(parent), wheres) or _meet(self.below.get(parent), wheres):
                return True
            _, dot, parent = parent.partition(".")
        return False

    def _cover_address(self, address: ipaddress.IPv4Address | ipaddress.IPv6Address, wheres: set[_Where]) -> bool:
        number = int(address)
        for (version, prefix), table in self.networks.items():
            if version == address.version and _meet(table.get(number >> (address.max_prefixlen - prefix)), wheres):
                return True
        return False


def _meet(there: frozenset[_Where] | None, wheres: set[_Where]) -> bool:
    return there is not None and not wheres.isdisjoint(there)


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def parse_no_proxy(text: str) -> tuple[Exemptions, str]:
    """Read a `NO_PROXY` list: items between commas or white space, empty ones ignored.

    An item is `*` (everything), a name (with all under it), `.name` or `*.name` (only those under it), an IP address,
    a network (`10.0.0.0/8`, `fd00::/8`), each with `:port` where it means one port (an IPv6 address in brackets then;
    networks have none), and with `http://` or `https://` where it means one scheme.

    Returns:
        What it exempts; and one sentence about what had to be skipped, empty where nothing was.
    """
    names: dict[str, set[_Where]] = {}
    below: dict[str, set[_Where]] = {}
    networks: dict[tuple[int, int], dict[int, set[_Where]]] = {}
    skipped, first = 0, ""
    items = _SEPARATORS.split(text[: limits.NO_PROXY_CHARS_MAX])
    if len(text) > limits.NO_PROXY_CHARS_MAX:
        items.pop()  # it may be cut
        skipped, first = 1, f"all after {limits.NO_PROXY_CHARS_MAX} characters"
    for item in items:
        if not item:
            continue
        try:
            _add(item, names, below, networks)
        except (errors.ConfigError, ValueError):  # UnicodeError too
            skipped += 1
            first = first or repr(("***@" + item.rpartition("@")[2] if "@" in item else item)[:80])
    exemptions = Exemptions(
        {name: frozenset(wheres) for name, wheres in names.items()},
        {name: frozenset(wheres) for name, wheres in below.items()},
        {
            key: {number: frozenset(wheres) for number, wheres in table.items()}
            for key, table in networks.items()
        },
    )  # fmt: skip
    more = f" and {skipped - 1} more" if skipped > 1 else ""
    return exemptions, f"skipped {first}{more}: not a host, address or network" if skipped else ""


def _add(
    item: str,
    names: dict[str, set[_Where]],
    below: dict[str, set[_Where]],
    networks: dict[tuple[int, int], dict[int, set[_Where]]],
) -> None:
    """Add one item; raises ConfigError or ValueError where it is none."""
    match = _ENTRY.fullmatch(item.lower())
    if match is None:
        raise ValueError("empty")
    scheme = "" if match["scheme"] in (None, "all") else match["scheme"]
    place = match["place"]
    if (network := _NETWORK.fullmatch(place)) is not None:
        _add_network(networks, ipaddress.ip_network(f"{network['address']}/{network['prefix']}", False), (scheme, 0))
        return
    host, port = place, 0
    if _ip(place) is None:  # an IPv6 address without brackets has colons, and no port
        found = _PLACE.fullmatch(place)
        if found is None:
            raise ValueError("not a host and a port")
        host = found["bracketed"] or found["bare"] or ""
        port = 0 if found["port"] is None else _port(found["port"])
    if (address := _ip(host)) is not None:
        if match["dot"]:
            raise ValueError("nothing is under an address")
        _add_network(networks, ipaddress.ip_network(address), (scheme, port))
    elif host == "*" and not match["dot"]:
        names.setdefault("", set()).add((scheme, port))
    else:
        if not host.isascii():
            host = host.encode("idna").decode("ascii")  # URLs come with A-labels
        target = below if match["dot"] else names
        target.setdefault(hostname.normalise(host), set()).add((scheme, port))


def _add_network(
    networks: dict[tuple[int, int], dict[int, set[_Where]]],
    network: ipaddress.IPv4Network | ipaddress.IPv6Network,
    where: _Where,
) -> None:
    leading = int(network.network_address) >> (network.max_prefixlen - network.prefixlen)
    table = networks.setdefault((network.version, network.prefixlen), {})
    table.setdefault(leading, set()).add(where)


@dataclass(frozen=True, slots=True)
class ProxyRules:
    """Says which proxy a host is reached through. False where there is none at all.

    Attributes:
        proxies: by the scheme of what is asked for: `http`, `https`.
        exemptions: who is reached directly all the same.
        explicit: the app itself named the proxies, not the environment.
        warnings: what could not be used, one sentence each, without credentials.
    """

    proxies: Mapping[str, Proxy] = field(default_factory=dict)
    exemptions: Exemptions = field(default_factory=Exemptions)
    explicit: bool = False
    warnings: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """True where some host may have a proxy."""
        return bool(self.proxies)

    def proxy_for(self, scheme: str, host: str, port: int) -> Proxy | None:
        """Give the proxy for an origin, None to reach it directly; for the arguments see `Exemptions.cover`."""
        proxy = self.proxies.get(scheme)
        if proxy is None or self.exemptions.cover(scheme, host, port):
            return None
        return proxy


DIRECT: Final = ProxyRules()
"""No proxy for anybody."""


def explicit(given: str | Mapping[str, str]) -> ProxyRules:
    """Give the rules for proxies that the app names; the environment then says nothing, `NO_PROXY` included.

    Args:
        given: one URL for everything, or URLs by `http`, `https` and `all` (`http://` and so on are the same keys).

    Raises:
        ConfigError: a URL or a key is none.
    """
    urls = {"all": given} if isinstance(given, str) else {key.removesuffix("://"): url for key, url in given.items()}
    if not urls.keys() <= {"http", "https", "all"}:
        raise errors.ConfigError("proxies are named for 'http', 'https' and 'all'")
    parsed = {key: parse_proxy(url) for key, url in urls.items()}
    return ProxyRules(_by_scheme(parsed), explicit=True)


def from_environment(environ: Mapping[str, str]) -> ProxyRules:
    """Give the rules that the environment sets; what cannot be used is logged, once for the same values.

    `HTTP_PROXY` in upper case is ignored where `REQUEST_METHOD` is set: there, whoever sends the web server a header
    named `Proxy` would choose it (httpoxy).
    """
    values = []
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        upper = "" if name == "http_proxy" and "REQUEST_METHOD" in environ else environ.get(name.upper(), "")
        values.append(environ.get(name, upper))
    return _remembered(*values)


@functools.lru_cache(maxsize=limits.PROXY_RULES_KEPT)
def _remembered(http: str, https: str, every: str, no: str) -> ProxyRules:
    rules = _from_values(http, https, every, no)
    for warning in rules.warnings:
        _log.warning("%s", warning)
    return rules


def _from_values(http: str, https: str, every: str, no: str) -> ProxyRules:
    proxies: dict[str, Proxy] = {}
    warnings: list[str] = []
    for key, variable, url in (
        ("http", "HTTP_PROXY", http),
        ("https", "HTTPS_PROXY", https),
        ("all", "ALL_PROXY", every),
    ):
        if not url.strip():
            continue
        try:
            proxies[key] = parse_proxy(url)
        except errors.ConfigError as error:
            warnings.append(f"{variable} is not used: {error}")
    by_scheme = _by_scheme(proxies)
    if not by_scheme:
        return ProxyRules(warnings=tuple(warnings))
    exemptions, skipped = parse_no_proxy(no)
    if skipped:
        warnings.append(f"NO_PROXY: {skipped}")
    return ProxyRules(by_scheme, exemptions, warnings=tuple(warnings))


def _by_scheme(proxies: Mapping[str, Proxy]) -> dict[str, Proxy]:
    found = {scheme: proxies.get(scheme, proxies.get("all")) for scheme in ("http", "https")}
    return {scheme: proxy for scheme, proxy in found.items() if proxy is not None}
