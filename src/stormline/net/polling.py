"""The network as any system with sockets shows it: by which address of ours a packet would leave.

Connecting a UDP socket sends nothing and makes the kernel choose a route. Looked at every
`limits_network.NETWORK_POLL_S` while requests come, and by each request after a pause; never in an idle app.
"""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from stormline.core import limits_network as limits
from stormline.net import radio
from stormline.net.local import FAR
from stormline.net.probes import Beside
from stormline.net.system import FILES
from stormline.net.ways import default_routes, usable
from stormline.policy.network import NetworkInfo, prefix_of

_DENIED: Final = (errno.EACCES, errno.EPERM)
_TYPICAL_V4_PREFIX: Final = 24


class PollingPort:
    """A `net.network.NetworkPort` for every system.

    Args:
        root: where `sys` and `proc` are, where there are such.
        plain: names of interfaces that are no VPN's, whatever they look like.
    """

    def __init__(self, *, root: Path = FILES, plain: Collection[str] = ()) -> None:
        self._root = root
        self._plain = plain
        self._changed: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._touched_at = 0.0

    def look(self) -> NetworkInfo:
        """See `NetworkPort.look`."""
        own: list[str] = []
        denied = False
        for family, far in FAR:
            try:
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect((far, 9))
                    own.append(probe.getsockname()[0])
            except OSError as error:
                denied |= error.errno in _DENIED
        gateway, interface = _default_route(self._root)
        if not own:
            info = NetworkInfo(routed=False, denied=denied, airplane=radio.airplane(root=self._root))
        else:
            v4 = next((address for address in own if ":" not in address), "")
            # Its true length nobody tells; the usual one makes the same network the same most of the time.
            prefix = prefix_of(v4, _TYPICAL_V4_PREFIX) if v4 else ""
            index = 0
            with contextlib.suppress(OSError):
                index = socket.if_nametoindex(interface) if interface else 0
            kind = radio.kind_of(interface, ethernet=False, root=self._root) if interface else "unknown"
            wifi = kind == "wifi"
            info = NetworkInfo(
                kind=kind,
                interface=interface,
                index=index,
                addresses=tuple(sorted(own)),
                prefixes=(prefix,) if prefix else (),
                gateway=gateway,
                name=radio.ssid(interface) if wifi else None,
                signal_dbm=radio.signal_dbm(interface, root=self._root) if wifi else None,
                airplane=radio.airplane(root=self._root),
                denied=denied,
                routed=True,
            )
        return info

    def ways(self) -> tuple[NetworkInfo, ...]:
        """See `NetworkPort.ways`: what `/proc/net` says of default routes, on Linux."""
        found = [self.look()]
        for name, gateway in default_routes(self._root):
            if all(name != each.interface for each in found) and len(found) < limits.NETWORK_WAYS_MAX:
                kind = radio.kind_of(name, ethernet=False, root=self._root)
                found.append(NetworkInfo(kind=kind, interface=name, gateway=gateway, routed=True))
        return usable(found, self._plain, root=self._root)

    def watch(self, changed: Callable[[], None]) -> None:
        """See `NetworkPort.watch`."""
        self._loop = asyncio.get_running_loop()
        self._changed = changed
        self.touch()

    def touch(self) -> None:
        """See `NetworkPort.touch`."""
        if self._loop is None or self._changed is None:
            return
        self._touched_at = self._loop.time()
        if self._timer is None:
            self._poll()

    def _poll(self) -> None:
        """Have it looked, now and as long as requests come."""
        self._timer = None
        loop, changed = self._loop, self._changed
        if loop is None or changed is None:
            return
        if loop.time() - self._touched_at < limits.NETWORK_POLL_IDLE_S:
            self._timer = loop.call_later(limits.NETWORK_POLL_S, self._poll)
        changed()

    def neighbour(self, index: int, address: str) -> Beside | None:
        """See `NetworkPort.neighbour`: not told."""
        return None

    def close(self) -> None:
        """See `NetworkPort.close`."""
        self._changed = None
        if self._timer is not None:
            with contextlib.suppress(RuntimeError):
                self._timer.cancel()
            self._timer = None


def _default_route(root: Path) -> tuple[str, str]:
    """Give gateway and interface of the IPv4 default route where `/proc/net/route` tells; empty texts else."""
    best: tuple[int, str, str] | None = None
    try:
        with (root / "proc/net/route").open("rb") as file:
            lines = file.read(limits.NETLINK_BYTES_MAX).decode("ascii", "replace").splitlines()[1:]
    except OSError:
        return "", ""
    for line in lines:
        words = line.split()
        if len(words) < 8 or words[1] != "00000000" or words[7] != "00000000":
            continue
        try:
            metric = int(words[6])
            gateway = socket.inet_ntoa(bytes.fromhex(words[2])[::-1]) if words[2] != "00000000" else ""
        except (ValueError, OSError):
            continue
        if best is None or metric < best[0]:
            best = (metric, gateway, words[0])
    return ("", "") if best is None else best[1:]
