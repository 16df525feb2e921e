"""Upstreams of the API gate: what the rules say of each, and which endpoint a request goes to.

The rules are one record of the engine, replaced whole (`appgw.upstream_rules`), beside what the node's settings say.
An upstream is found by the host of the URL, then by the first path pattern that fits, in the order of the record; what
the record says of a host goes before the settings.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Final, NamedTuple

import msgspec

from stormline.core import errors, ids
from stormline.core import limits_api as limits
from stormline.core.values import Address, parse_address
from stormline.policy.breaker import Breaker
from stormline.wire import hostname, pathpattern, strictjson

FORMAT: Final = "stormline-upstreams/1"
PORTS: Final = {"http": 80, "https": 443}

_Seconds = Annotated[float, msgspec.Meta(gt=0, le=limits.UPSTREAM_TIMEOUT_MAX_S)]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One process that serves an upstream.

    Attributes:
        origin: `http(s)://ip:port`.
        weight: share of the requests, of the sum of all weights; 0: none, it is drained.
    """

    origin: str
    weight: Annotated[int, msgspec.Meta(ge=0, le=limits.UPSTREAM_WEIGHT_MAX)] = 1


class Upstream(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Where requests for a host, and the paths of a pattern, go, and what they may take.

    Attributes:
        name: a label, unique in the record; the audience of signed identities.
        host: as clients ask for it, `host` or `host:port`.
        path: pattern of paths (`wire.pathpattern`).
        apps: apps that may ask; empty for all.
        endpoints: who serves it; at least one has a weight.
        connect_timeout_s: longest wait for a connection to an endpoint, TLS included.
        first_byte_timeout_s: longest silence before the answer begins; None: until the caller's deadline. While a
            request's body is on its way there is no silence.
        read_timeout_s: longest silence in the answer's body.
        timeout_s: longest time for all of it, None for as long as the caller waits.
        retries: further tries, each at another endpoint.
        cache: answers may be kept, by HTTP's rules (`policy.httpcache`).
        compress: answers may be compressed for a device whose network is worth it (`policy.compress`).
    """

    name: str
    host: str
    path: str = "/**"
    apps: tuple[str, ...] = ()
    endpoints: tuple[Endpoint, ...]
    connect_timeout_s: _Seconds = limits.UPSTREAM_CONNECT_TIMEOUT_S
    first_byte_timeout_s: _Seconds | None = None
    read_timeout_s: _Seconds = limits.UPSTREAM_READ_TIMEOUT_S
    timeout_s: _Seconds | None = None
    retries: Annotated[int, msgspec.Meta(ge=0, le=limits.UPSTREAM_RETRIES_MAX)] = limits.UPSTREAM_RETRIES
    cache: bool = True
    compress: bool = True


class Rules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The record.

    Attributes:
        format: always `FORMAT`.
        revision: which write of the record this is, as it was read; not looked at when it is written.
        upstreams: of one host, those named first are looked at first.
    """

    format: str = FORMAT
    revision: int = 0
    upstreams: tuple[Upstream, ...] = ()


class Place(NamedTuple):
    """Where an endpoint is."""

    scheme: str
    address: Address


_decoder = msgspec.json.Decoder(Rules)


def decode(data: bytes) -> Rules:
    """Read the record and check it.

    Raises:
        ConfigError: too large, malformed, or contradictory; the message names what and where.
    """
    if len(data) > limits.UPSTREAMS_BYTES_MAX:
        raise errors.ConfigError(f"upstreams: {len(data)} bytes, at most {limits.UPSTREAMS_BYTES_MAX}")
    try:
        rules = strictjson.decode(data, _decoder)
    except ValueError as error:
        raise errors.ConfigError(f"upstreams: {error}") from error
    if rules.format != FORMAT:
        raise errors.ConfigError(f"upstreams: format {rules.format[:40]!r}, this version reads {FORMAT!r}")
    if len(rules.upstreams) > limits.UPSTREAMS_MAX:
        raise errors.ConfigError(f"upstreams: {len(rules.upstreams)}, at most {limits.UPSTREAMS_MAX}")
    names: set[str] = set()
    for upstream in rules.upstreams:
        _check(upstream)
        if upstream.name in names:
            raise errors.ConfigError(f"upstreams: {upstream.name!r} is there twice")
        names.add(upstream.name)
    return rules


def encode(rules: Rules) -> bytes:
    """Give the record as JSON."""
    return msgspec.json.encode(rules)


def _check(upstream: Upstream) -> None:
    where = f"upstream {upstream.name[:80]!r}"
    ids.check_label(upstream.name, "upstream")
    read_host(upstream.host)
    for app in upstream.apps:
        ids.check_label(app, f"{where}: app")
    try:
        pathpattern.check(upstream.path)
    except errors.ConfigError as error:
        raise errors.ConfigError(f"{where}: {error}") from None
    if len(upstream.endpoints) > limits.UPSTREAM_ENDPOINTS_MAX:
        raise errors.ConfigError(f"{where}: at most {limits.UPSTREAM_ENDPOINTS_MAX} endpoints")
    if not any(endpoint.weight for endpoint in upstream.endpoints):
        raise errors.ConfigError(f"{where}: no endpoint with a weight")
    places = [read_origin(upstream.name, endpoint.origin) for endpoint in upstream.endpoints]
    if len(set(places)) != len(places):
        raise errors.ConfigError(f"{where}: an endpoint is there twice")


def read_host(name: str) -> str:
    """Give a host as clients ask for it, `host` or `host:port`, in its normal form.

    Raises:
        ConfigError: it is malformed.
    """
    host, separator, port = name.partition(":") if name.count(":") == 1 else (name, "", "")
    if not separator:
        return hostname.normalise(host)
    return str(parse_address(f"{hostname.normalise(host)}:{port}"))


def read_origin(name: str, origin: str) -> Place:
    """Read `http(s)://ip:port`.

    Raises:
        ConfigError: it is something else, or a name in the place of an address.
    """
    scheme, _, rest = origin.partition("://")
    rest = rest.removesuffix("/")
    if scheme not in PORTS or not rest or "/" in rest:
        raise errors.ConfigError(f"upstream of {name!r}: expected 'http(s)://ip:port', not {origin!r}")
    address = parse_address(rest, default_port=PORTS[scheme])
    if not address.is_ip:
        raise errors.ConfigError(f"upstream of {name!r}: {address.host!r} is not an IP address")
    return Place(scheme, address)


def read_upstreams(origins: Mapping[str, str]) -> tuple[Upstream, ...]:
    """Read what the settings say: origin `http(s)://ip:port` by host, `host` or `host:port` as clients ask for it.

    Raises:
        ConfigError: a host or an origin is malformed, or an origin is no address.
    """
    found = []
    for name, origin in origins.items():
        host = read_host(name)
        read_origin(name, origin)
        found.append(Upstream(name=host, host=host, endpoints=(Endpoint(origin=origin),)))
    return tuple(found)


class Target:
    """An endpoint in use: where it is, how it fares, and its turn.

    Attributes:
        place: where it is.
        breaker: how it fares.
        weight: its share.
        turn: what it is owed, by smooth weighted round robin.
    """

    __slots__ = ("breaker", "place", "turn", "weight")

    def __init__(self, place: Place, weight: int, breaker: Breaker) -> None:
        self.place = place
        self.weight = weight
        self.breaker = breaker
        self.turn = 0


class Route:
    """One upstream in use.

    Attributes:
        rule: what the rules say.
        targets: its endpoints.
    """

    __slots__ = ("rule", "targets")

    def __init__(self, rule: Upstream, targets: tuple[Target, ...]) -> None:
        self.rule = rule
        self.targets = targets

    def choose(self, now: float, left: Collection[Target] = ()) -> Target | None:
        """Give the endpoint whose turn it is among those that are well; None where none is.

        The request is under way then: tell the endpoint's breaker how it fared, or `leave` it.

        Args:
            now: monotonic time.
            left: endpoints that this request has tried.
        """
        if len(self.targets) == 1:
            only = self.targets[0]
            return only if only not in left and only.breaker.plan(now) else None
        best, total = None, 0
        for target in self.targets:
            if target.weight and target not in left and target.breaker.allows(now):
                target.turn += target.weight
                total += target.weight
                if best is None or target.turn > best.turn:
                    best = target
        if best is None:
            return None
        best.turn -= total
        return best if best.breaker.plan(now) else None

    def back_s(self, now: float) -> float:
        """Give in how many seconds the first endpoint that is left alone is tried again."""
        times = [target.breaker.next_timer() for target in self.targets if target.weight]
        return max(0.0, min((at for at in times if at is not None), default=now) - now)


class Book:
    """The upstreams in use. Replaced as the rules change; what is known of an endpoint that stays is kept.

    Args:
        configured: upstreams of the settings.
    """

    def __init__(self, configured: Iterable[Upstream]) -> None:
        self._configured = tuple(configured)
        self._routes: dict[str, tuple[Route, ...]] = {}
        self.replace(Rules())

    def replace(self, rules: Rules) -> None:
        """Use these rules from the next request on; those under way go on as they began."""
        known = {(route.rule.name, target.place): target for route in self for target in route.targets}
        routes: dict[str, list[Route]] = {}
        for rule in (*rules.upstreams, *self._configured):
            targets = []
            for endpoint in rule.endpoints:
                place = read_origin(rule.name, endpoint.origin)
                held = known.get((rule.name, place))
                targets.append(Target(place, endpoint.weight, Breaker() if held is None else held.breaker))
            routes.setdefault(read_host(rule.host), []).append(Route(rule, tuple(targets)))
        self._routes = {host: tuple(found) for host, found in routes.items()}

    def find(self, authority: str, path: str, app: str) -> Route | None:
        """Give the upstream of a request; None where there is none for this app.

        Args:
            authority: `host` or `host:port` in its normal form.
            path: as it stands in the URL, without the query.
            app: who asks.
        """
        for route in self._routes.get(authority, ()):
            rule = route.rule
            if pathpattern.fits(rule.path, path) and (not rule.apps or app in rule.apps):
                return route
        return None

    def __iter__(self) -> Iterator[Route]:
        """Give all upstreams."""
        return (route for routes in self._routes.values() for route in routes)
