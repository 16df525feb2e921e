"""Where a client is, and in which order it should try the endpoints there are. Pure.

    nearest = Nearest(rules)
    place = nearest.place("203.0.113.77", device="d1")     # region, operator and unit; the address only truncated
    nearest.order(endpoints, place)                        # best first

An endpoint comes before another by the first of these in which they differ: it has a weight at all; it stands in the
client's unit; how near its region is; it is close to the client's operator; its measured quality, in tenths; it has
room. What is equal in all of them is shared out by weight, and each device keeps its place: rendezvous hashing with
weights (Thaler and Ravishankar 1998; in the logarithmic form of Schindelhauer and Schomaker 2005). An endpoint that
comes or goes moves only the devices that belong to it.
"""

import functools
import hashlib
import ipaddress
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from stormline.core import limits_platform as limits
from stormline.dispatch.rules import Network, RuleSet
from stormline.wire.plan import LONG_CARRIERS, PUSH, Endpoint

PREFIX_V4: Final = 24
"""Of an IPv4 address so much is kept (RFC 7871 section 11.1)."""
PREFIX_V6: Final = 56
"""Of an IPv6 address so much is kept."""
_AnyAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class ClientPlace(NamedTuple):
    """Where a client is.

    Attributes:
        address: network of its address, truncated; empty where it is not known.
        region: region, empty where it is not known.
        operator: network operator, empty where it is not known.
        unit: unit that serves it best, empty for any.
        bucket: one of `limits.PLACEMENT_BUCKETS` groups of devices.
        push: it is a push-only or background device.
    """

    address: str = ""
    region: str = ""
    operator: str = ""
    unit: str = ""
    bucket: int = 0
    push: bool = False


class Found(NamedTuple):
    """What a database says of an address: ISO 3166 code of the country, number of the autonomous system; or nothing."""

    country: str = ""
    asn: int = 0


Locate = Callable[[str], Found]
"""Looks an address up in a database; see `dispatch.geo`."""


class Measures(NamedTuple):
    """What is known of endpoints from measuring.

    Attributes:
        quality: 0 (bad) to 1 (good), by endpoint; one that was not measured counts as good, so that it is tried.
        load: 0 to 1, by endpoint; one that is not known has room.
        revision: grows whenever the two change, so that answers made before are not given out again.
    """

    quality: Mapping[Endpoint, float] = {}
    load: Mapping[Endpoint, float] = {}
    revision: int = 0


NO_MEASURES: Final = Measures()


class Prefixes:
    """Longest-prefix match over networks: one look into a dictionary for each prefix length that is in use."""

    __slots__ = ("_tables",)

    def __init__(self, networks: Mapping[str, Network]) -> None:
        found: dict[tuple[int, int], dict[int, Network]] = {}
        for cidr, place in networks.items():
            network = ipaddress.ip_network(cidr)
            shift = network.max_prefixlen - network.prefixlen
            found.setdefault((network.version, shift), {})[int(network.network_address) >> shift] = place
        self._tables = {
            version: tuple(
                (shift, found[version_of, shift]) for version_of, shift in sorted(found) if version_of == version
            )
            for version in (4, 6)
        }

    def find(self, address: _AnyAddress) -> Network | None:
        """Give the entry of the smallest network that holds an address, None where there is none."""
        number = int(address)
        for shift, table in self._tables[address.version]:  # the longest prefix has the smallest shift
            place = table.get(number >> shift)
            if place is not None:
                return place
        return None


class Nearest:
    """Places and orders under one rule set. The answers depend on the arguments alone.

    Args:
        rules: checked rules.
        locate: asked for addresses that no network of the rules holds, and for what that network leaves open.
        measures: quality and load by endpoint.
    """

    def __init__(self, rules: RuleSet, *, locate: Locate | None = None, measures: Measures = NO_MEASURES) -> None:
        self._prefixes = Prefixes(rules.networks)
        self._locate = locate
        self._measures = measures
        self._units = {name: region.unit for name, region in rules.regions.items()}
        self._by_country = {code: name for name, region in rules.regions.items() for code in region.countries}
        self._by_asn = {number: name for name, numbers in rules.operators.items() for number in numbers}
        self._far = {
            name: {name: 0} | {near: at for at, near in enumerate(region.near, 1) if near != name}
            for name, region in rules.regions.items()
        }
        self._place_of = functools.lru_cache(limits.PLACE_CACHE)(self._find)

    def place(self, address: str, *, device: str = "", role: str = "", prefix: int | None = None) -> ClientPlace:
        """Say where a client is.

        Args:
            address: its IP address as text; anything else is a client of which nothing is known.
            device: device id; its group depends on it, on the truncated address where there is none.
            role: `push` for a push-only or background device.
            prefix: how many bits of the address are true (EDNS Client Subnet, RFC 7871); None for all.
        """
        kept = self._place_of(address, prefix)[0]
        return ClientPlace(kept, *self.group(address, device=device, role=role, prefix=prefix))

    def group(
        self, address: str, *, device: str = "", role: str = "", prefix: int | None = None
    ) -> tuple[str, str, str, int, bool]:
        """Give all of `place` that an order of endpoints depends on: clients with the same group get the same."""
        kept, region, operator, unit = self._place_of(address, prefix)
        return region, operator, unit, bucket(device or kept), role == PUSH

    def _find(self, address: str, prefix: int | None) -> tuple[str, str, str, str]:
        try:
            ip = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return "", "", "", ""
        if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        if prefix is not None:
            ip = _cut(ip, prefix)
        kept = _cut(ip, PREFIX_V4 if ip.version == 4 else PREFIX_V6)
        place = self._prefixes.find(ip)
        region, operator = (place.region, place.operator) if place is not None else ("", "")
        if self._locate is not None and not (region and operator):
            found = self._locate(str(ip))
            region = region or self._by_country.get(found.country, "")
            operator = operator or self._by_asn.get(found.asn, "")
        return str(kept), region, operator, self._units.get(region, "")

    def order(self, endpoints: tuple[Endpoint, ...], place: ClientPlace) -> tuple[Endpoint, ...]:
        """Give the endpoints in the order in which a client there should try them; none is left out."""
        if len(endpoints) < 2:
            return endpoints
        return tuple(sorted(endpoints, key=lambda each: self._rank(each, place)))

    def _rank(self, endpoint: Endpoint, place: ClientPlace) -> tuple[bool, int, int, int, int, bool, float]:
        quality = min(1.0, max(0.0, self._measures.quality.get(endpoint, 1.0)))
        load = self._measures.load.get(endpoint, 0.0)
        far = self._far.get(place.region, {})
        return (
            endpoint.weight == 0,
            _match(endpoint.unit, place.unit),
            far.get(endpoint.region, len(far) + bool(endpoint.region)) if place.region else 0,
            _match(endpoint.operator, place.operator),
            -math.floor(quality / limits.MEASURED_BAND + 1e-9),
            load >= limits.LOAD_FULL,
            _share(endpoint, place.bucket),
        )


def for_role(endpoints: tuple[Endpoint, ...], *, push: bool) -> tuple[Endpoint, ...]:
    """Leave out the gateways that are for other devices, unless there are no others."""
    fitting = tuple(each for each in endpoints if each.carrier not in LONG_CARRIERS or (each.role == PUSH) == push)
    if any(each.carrier in LONG_CARRIERS for each in fitting):
        return fitting
    return endpoints


def bucket(name: str) -> int:
    """Give the group of a device or address: evenly, and the same for ever."""
    return zlib.crc32(name.encode("utf-8", "replace")) % limits.PLACEMENT_BUCKETS


def choose(name: str, weights: Iterable[tuple[str, int]]) -> str:
    """Give one of several by weight, for ever the same for one name as long as it is there; empty without any."""
    ranked = [(_draw(f"{name}\n{each}", weight), each) for each, weight in weights if weight > 0]
    return min(ranked, default=(0.0, ""))[1]


def _share(endpoint: Endpoint, group: int) -> float:
    return _draw(f"{group}\n{endpoint.host}\n{endpoint.port}\n{endpoint.carrier}", endpoint.weight or 1)


def _draw(text: str, weight: int) -> float:
    """Draw from an exponential distribution of mean 1/weight by a hash: the smallest of several wins by its weight."""
    number = int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest())
    return -math.log((number + 1) / (2**64 + 1)) / weight


def _match(theirs: str, wanted: str) -> int:
    """0 where it is the same or nobody minds, 1 where the endpoint has none, 2 where it is another."""
    if not wanted or theirs == wanted:
        return 0
    return 2 if theirs else 1


def _cut(ip: _AnyAddress, prefix: int) -> _AnyAddress:
    shift = ip.max_prefixlen - max(0, min(prefix, ip.max_prefixlen))
    return type(ip)(int(ip) >> shift << shift)
