"""What the network under the device is, and what a change of it means.

Pure: the edges (`net.netlink`, `net.polling`, `net.recorded`) look, this module names and compares. Names of networks
are private (they say where a person is), so nothing here shows one: a network is known by a hash under a key that each
installation draws for itself.
"""

import enum
import hashlib
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from stormline.core import limits_network as limits
from stormline.core.values import Secret

KINDS: Final = ("wifi", "cell", "wired", "unknown")
"""What a network may be."""
NO_NETWORK_ID: Final = "none"
"""The id where there is no network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkInfo:
    """One look at the network that requests go out by: that of the default route.

    Attributes:
        kind: one of `KINDS`.
        interface: name of the default route's interface, empty where unknown.
        index: its number, 0 where unknown.
        addresses: its IP literals, sorted.
        prefixes: the IPv4 networks they are in (`192.168.1.0/24`), sorted; empty where unknown.
        gateway: address of the next router; empty on links that need none (cellular, tunnels) or where unknown.
        gateway_link: link-layer address of that router; masked.
        name: what people call the network: SSID of a WiFi, operator of a cellular network; masked.
        signal_dbm: strength of the radio signal.
        metered: its bytes cost money.
        airplane: all radios are switched off.
        denied: this program may not use the network at all.
        vpn: the default route is a tunnel's.
        routed: there is a default route. None for each of these six: nobody can tell.
        id: see `identify`; empty before.
    """

    kind: str = "unknown"
    interface: str = ""
    index: int = 0
    addresses: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    gateway: str = ""
    gateway_link: Secret | None = None
    name: Secret | None = None
    signal_dbm: int | None = None
    metered: bool | None = None
    airplane: bool | None = None
    denied: bool | None = None
    vpn: bool = False
    routed: bool | None = None
    id: str = ""


_CELL_NAMES: Final = ("wwan", "rmnet", "ccmni", "pdp_ip", "cell")
"""What drivers of cellular modems call their interfaces, where nothing else tells their kind."""
NOTHING_KNOWN: Final = NetworkInfo()
"""Where nobody can look."""


def identify(key: bytes, info: NetworkInfo) -> str:
    """Give the id of a network: a keyed hash over what tells it from others.

    Its name where it is known, else its gateway's link-layer address, else gateway and prefix. Never the device's own
    addresses: the same network gives others tomorrow. The same network has the same id as long as the key is the same.

    Args:
        key: of this installation, `limits_network.NETWORK_KEY_BYTES` random bytes.
        info: what was seen.

    Returns:
        16 hexadecimal digits; `NO_NETWORK_ID` where there is no network.
    """
    if info.routed is False:
        return NO_NETWORK_ID
    parts: tuple[str, ...]
    if info.name:
        parts = ("name", info.kind, info.name.reveal())
    elif info.gateway_link:
        parts = ("link", info.gateway_link.reveal())
    elif info.gateway:
        parts = ("gateway", info.interface, info.gateway.partition("%")[0], *info.prefixes)
    elif info.kind == "cell" or info.interface:
        parts = ("interface", info.kind, info.interface)
    else:
        parts = ("unknown", info.kind, *info.prefixes)
    hashed = hashlib.blake2b(key=key[:64], digest_size=limits.NETWORK_ID_BYTES)
    for part in (("vpn",) if info.vpn else ()) + parts:
        data = part.encode("utf-8", "surrogatepass")
        hashed.update(len(data).to_bytes(4, "big") + data)
    return hashed.hexdigest()


def is_metered(info: NetworkInfo, told: str = "unknown") -> bool:
    """Say whether bytes cost money: as the system or the app says, else where the network is cellular.

    Args:
        info: the network.
        told: its kind where the app says it.
    """
    if info.metered is not None:
        return info.metered
    kind = info.kind if told == "unknown" else told
    return kind == "cell" or (kind == "unknown" and info.interface.startswith(_CELL_NAMES))


def prefix_of(address: str, length: int) -> str:
    """Give the network of an IPv4 address; empty for another address."""
    if ":" in address or not 0 <= length <= 32:
        return ""
    try:
        return str(ipaddress.ip_network((address, length), strict=False))
    except ValueError:
        return ""


class Change(enum.StrEnum):
    """What has become of the network."""

    LOST = "lost"
    """There is none any more."""
    NEW = "new"
    """It is another one."""
    SAME = "same"
    """It is the one that was there before it was lost."""
    ROAMED = "roamed"
    """The same one by name, met at another place: other addresses, another interface."""
    WOKEN = "woken"
    """The machine slept; the network may be what it was, its connections are not to be believed."""


class NetworkChange(NamedTuple):
    """One change, as it is told.

    Attributes:
        change: what.
        before: the last network there was.
        after: what there is now.
        gone: addresses that the device had and has no more.
    """

    change: Change
    before: NetworkInfo
    after: NetworkInfo
    gone: frozenset[str] = frozenset()


class NetworkTracker:
    """Compares looks, names networks, and tells what has changed; a loss only when it lasts.

    Args:
        key: see `identify`.
        first: what there is at the start.
    """

    def __init__(self, key: bytes, first: NetworkInfo) -> None:
        self._key = key
        self.info = replace(first, id=identify(key, first))
        """The latest look."""
        self._told = self.info  # the latest network that was told, not counting a loss
        self._lost_at: float | None = None
        self._lost_told = self.info.routed is False

    @property
    def look_again_s(self) -> float | None:
        """Seconds after which the same network will show more of itself; None where nothing is missing."""
        info = self.info
        missing = info.routed and info.gateway and not (info.gateway_link or info.name)
        return limits.NETWORK_REFINE_S if missing else None

    def observe(
        self, seen: NetworkInfo, now: float, assigned: Callable[[str], bool] = lambda address: False
    ) -> NetworkChange | None:
        """Take a look; say what has changed, None where nothing of interest has.

        A loss is told by the look that comes `NETWORK_LOST_HOLD_S` after it.

        Args:
            seen: what is there now.
            now: monotonic seconds.
            assigned: says of an address of before whether the device still has it.
        """
        seen = self._complete(seen)
        before, self.info = self.info, seen
        gone = frozenset(each for each in before.addresses if each not in seen.addresses and not assigned(each))
        if seen.routed is False:
            if self._lost_at is None:
                self._lost_at = now
            if not self._lost_told and now - self._lost_at >= limits.NETWORK_LOST_HOLD_S:
                self._lost_told = True
                return NetworkChange(Change.LOST, self._told, seen, frozenset(self._told.addresses) | gone)
            return None
        told, was_told_lost = self._told, self._lost_told
        self._lost_at, self._lost_told = None, False
        self._told = seen
        gone |= frozenset(each for each in told.addresses if each not in seen.addresses and not assigned(each))
        if seen.id != told.id and not _refines(told, seen):
            return NetworkChange(Change.NEW, told, seen, gone)
        if was_told_lost:
            return NetworkChange(Change.SAME, told, seen, gone)
        if _place(told) != _place(seen) and not set(told.addresses) <= set(seen.addresses):
            return NetworkChange(Change.ROAMED, told, seen, gone)
        return None

    @property
    def lost_due_at(self) -> float | None:
        """When a loss is to be told, if it lasts; None where there is none to tell."""
        if self._lost_at is None or self._lost_told:
            return None
        return self._lost_at + limits.NETWORK_LOST_HOLD_S

    def named(self, seen: NetworkInfo) -> NetworkInfo:
        """Give a look at any network with the id it has here."""
        return self._complete(seen)

    def _complete(self, seen: NetworkInfo) -> NetworkInfo:
        """Name it; the gateway's link-layer address that the kernel has forgotten is the one it had."""
        known = self._told
        if known.gateway_link and not seen.gateway_link and _place(known) == _place(seen):
            seen = replace(seen, gateway_link=known.gateway_link)
        return replace(seen, id=identify(self._key, seen))


def _place(info: NetworkInfo) -> tuple[object, ...]:
    return (info.index, info.interface, info.gateway, info.addresses, info.name)


def _refines(before: NetworkInfo, after: NetworkInfo) -> bool:
    """Say whether a look shows more of the same network than the one before: another id, no other network."""
    return (
        _place(before) == _place(after)
        and before.gateway_link is None
        and after.gateway_link is not None
        and bool(after.gateway)
    )


class Jump(NamedTuple):
    """What the clocks did between two looks.

    Attributes:
        slept_s: how long the machine slept.
        stepped_s: how far the wall clock was set forward (negative: back), sleep not counted.
    """

    slept_s: float = 0.0
    stepped_s: float = 0.0


class ClockWatch:
    """Tells sleep from a wall clock that was set.

    Linux has a clock that goes on in sleep (`CLOCK_BOOTTIME`) beside one that does not (`CLOCK_MONOTONIC`): their
    difference is the sleep. Elsewhere a wall clock that went ahead of the monotonic one may mean either, and counts as
    sleep: to doubt a connection costs little. No time-out or age anywhere is measured by the wall clock.
    """

    __slots__ = ("_boottime", "_monotonic", "_wall")

    def __init__(self, monotonic: float, wall: float, boottime: float | None) -> None:
        self._monotonic, self._wall, self._boottime = monotonic, wall, boottime

    def observe(self, monotonic: float, wall: float, boottime: float | None) -> Jump:
        """Look at the clocks again (seconds; `boottime` None where there is no such clock)."""
        passed_s = monotonic - self._monotonic
        wall_s = wall - self._wall
        slept_s = 0.0
        if boottime is not None and self._boottime is not None:
            slept_s = boottime - self._boottime - passed_s
            known = True
        else:
            known = False
        self._monotonic, self._wall, self._boottime = monotonic, wall, boottime
        least_s = max(limits.SLEEP_S_MIN, abs(passed_s) * limits.CLOCK_DRIFT_MAX)
        ahead_s = wall_s - passed_s
        if not known:
            if ahead_s >= least_s:
                return Jump(slept_s=ahead_s)
            return Jump(stepped_s=ahead_s) if ahead_s <= -least_s else Jump()
        stepped_s = ahead_s - max(0.0, slept_s)
        return Jump(
            slept_s=slept_s if slept_s >= least_s else 0.0,
            stepped_s=stepped_s if abs(stepped_s) >= least_s else 0.0,
        )
