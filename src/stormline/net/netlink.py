"""The network as Linux tells it: questions and news over the routing socket (`rtnetlink(7)`)."""

import asyncio
import contextlib
import errno
import itertools
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from stormline.core import limits_network as limits
from stormline.core.values import Secret
from stormline.net import radio, rtnetlink
from stormline.net.local import FAR
from stormline.net.probes import Beside
from stormline.net.system import FILES
from stormline.net.ways import usable
from stormline.policy.network import NetworkInfo, prefix_of

_DENIED: Final = (errno.EACCES, errno.EPERM)


class Asker:
    """Asks the kernel one question after the other. Not for use by several threads.

    Raises:
        OSError: there is no routing socket here, or it is forbidden.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        try:
            self._socket.bind((0, 0))
            self._socket.settimeout(limits.NETLINK_ANSWER_S)
        except OSError:
            self._socket.close()
            raise
        self._numbers = itertools.count(1)

    def close(self) -> None:
        """Close it; again is harmless."""
        self._socket.close()

    def _answers(self, question: bytes, sequence: int, *, many: bool) -> list[rtnetlink.Message]:
        """Give what the kernel answers; empty where it does not."""
        found: list[rtnetlink.Message] = []
        try:
            self._socket.send(question)
            for _ in range(limits.NETLINK_READS_MAX):
                data = self._socket.recv(limits.NETLINK_BYTES_MAX)
                for message in rtnetlink.parse(data, sequence):
                    if isinstance(message, rtnetlink.Failed | rtnetlink.Done):
                        return [*found, message] if isinstance(message, rtnetlink.Failed) else found
                    found.append(message)
                if found and not many:
                    return found
        except OSError:
            return found
        return found

    def route(self, address: str) -> rtnetlink.Route | rtnetlink.Failed | None:
        """Give the route to an address, or why there is none; None where the kernel does not say."""
        number = next(self._numbers)
        for each in self._answers(rtnetlink.ask_route(address, number), number, many=False):
            if isinstance(each, rtnetlink.Route | rtnetlink.Failed):
                return each
        return None

    def default_routes(self) -> list[rtnetlink.Route]:
        """Give the default routes that everything may use, the preferred first."""
        routes: list[rtnetlink.Route] = []
        for family in (socket.AF_INET, socket.AF_INET6):
            number = next(self._numbers)
            routes += [
                each
                for each in self._answers(rtnetlink.ask_routes(family, number), number, many=True)
                if isinstance(each, rtnetlink.Route) and each.default and each.number and each.table == rtnetlink.MAIN
            ]
        return sorted(routes, key=lambda each: each.metric)  # a stable sort: IPv4 first

    def link(self, index: int) -> rtnetlink.Link | None:
        """Give an interface."""
        number = next(self._numbers)
        found = self._answers(rtnetlink.ask_link(index, number), number, many=False)
        return next((each for each in found if isinstance(each, rtnetlink.Link)), None)

    def addresses(self, index: int) -> list[rtnetlink.OwnAddress]:
        """Give the addresses of an interface."""
        number = next(self._numbers)
        found = self._answers(rtnetlink.ask_addresses(number), number, many=True)
        mine = [each for each in found if isinstance(each, rtnetlink.OwnAddress) and each.number == index]
        return mine[: limits.NETWORK_ADDRESSES_MAX]

    def neighbour(self, index: int, address: str) -> rtnetlink.Neighbour | None:
        """Give what the kernel knows of a machine on the link; None: nothing."""
        number = next(self._numbers)
        found = self._answers(rtnetlink.ask_neighbour(index, address, number), number, many=False)
        return next((each for each in found if isinstance(each, rtnetlink.Neighbour)), None)


class NetlinkPort:
    """A `net.network.NetworkPort` for Linux: two descriptors, no timer, no thread.

    Args:
        root: where `sys` and `proc` are.
        plain: names of interfaces that are no VPN's, whatever they look like.

    Raises:
        OSError: there is no routing socket here, or it is forbidden.
    """

    def __init__(self, *, root: Path = FILES, plain: Collection[str] = ()) -> None:
        self._root = root
        self._plain = plain
        self._asker = Asker()
        self._news: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: Callable[[], None] | None = None
        try:
            news = socket.socket(
                socket.AF_NETLINK,
                socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK,
                socket.NETLINK_ROUTE,
            )
            self._news = news
            news.bind((0, rtnetlink.GROUPS))
            if self._asker.link(1) is None and self._asker.route("127.0.0.1") is None:
                raise OSError(errno.EACCES, "the kernel does not answer")
        except OSError:
            self.close()
            raise

    # -- looking ------------------------------------------------------------------------------------------------------
    def look(self) -> NetworkInfo:
        """See `NetworkPort.look`. Asks for the route to an address far away: rules are heeded, nothing is sent."""
        airplane = radio.airplane(root=self._root)
        denied = False
        routed: bool | None = False
        for _, far in FAR:
            try:
                route = self._asker.route(far)
            except OSError:
                route = None
            if isinstance(route, rtnetlink.Route) and route.number:
                return self._through(route, airplane)
            if route is None:
                routed = None
            elif isinstance(route, rtnetlink.Failed):
                denied |= route.errno in _DENIED
        return NetworkInfo(routed=routed, denied=denied or None, airplane=airplane)

    def _through(self, route: rtnetlink.Route, airplane: bool | None) -> NetworkInfo:
        link = self._asker.link(route.number)
        name = "" if link is None else link.name
        ethernet = link is not None and link.ethernet
        what = "" if link is None else link.what
        if link is not None and (name == "lo" or not link.up):
            return NetworkInfo(routed=False, airplane=airplane)  # a default route that leads nowhere
        own = self._asker.addresses(route.number)
        prefixes = {prefix_of(each.address, each.prefix) for each in own} - {""}
        beside = self._asker.neighbour(route.number, route.gateway) if route.gateway and ethernet else None
        kind = radio.kind_of(name, ethernet=ethernet, what=what, root=self._root)
        wifi = kind == "wifi"
        return NetworkInfo(
            kind=kind,
            interface=name,
            index=route.number,
            addresses=tuple(sorted(each.address for each in own)),
            prefixes=tuple(sorted(prefixes)),
            gateway=route.gateway,
            gateway_link=Secret(beside.link) if beside is not None and beside.link else None,
            name=radio.ssid(name) if wifi else None,
            signal_dbm=radio.signal_dbm(name, root=self._root) if wifi else None,
            airplane=airplane,
            vpn=name not in self._plain and radio.is_tunnel(name, what),
            routed=True,
        )

    def ways(self) -> tuple[NetworkInfo, ...]:
        """See `NetworkPort.ways`."""
        first = self.look()
        found = [first]
        for route in self._asker.default_routes():
            if all(route.number != each.index for each in found) and len(found) < limits.NETWORK_WAYS_MAX:
                found.append(self._through(route, first.airplane))
        return usable(found, self._plain, root=self._root)

    # -- news ---------------------------------------------------------------------------------------------------------
    def watch(self, changed: Callable[[], None]) -> None:
        """See `NetworkPort.watch`."""
        self._changed = changed
        if self._news is None:
            return
        loop = asyncio.get_running_loop()
        try:
            loop.add_reader(self._news.fileno(), self._read)
        except RuntimeError:  # a loop that cannot
            return
        self._loop = loop

    def _read(self) -> None:
        news, changed = self._news, self._changed
        if news is None or changed is None:
            return
        matters = False
        for _ in range(limits.NETLINK_READS_MAX):
            try:
                data = news.recv(limits.NETLINK_BYTES_MAX)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                # ENOBUFS: more news than the socket holds. Whatever it was, something has changed.
                matters = True
                if error.errno != errno.ENOBUFS:
                    self._stop()
                    break
                continue
            matters = matters or any(_matters(message) for message in rtnetlink.parse(data))
        if matters:
            changed()

    def touch(self) -> None:
        """See `NetworkPort.touch`: the kernel tells by itself."""

    def _stop(self) -> None:
        news, self._news = self._news, None
        if news is None:
            return
        if self._loop is not None:
            with contextlib.suppress(RuntimeError, ValueError):
                self._loop.remove_reader(news.fileno())
        news.close()

    def neighbour(self, index: int, address: str) -> Beside | None:
        """See `NetworkPort.neighbour`: its table."""
        return self._asker.neighbour(index, address)

    def close(self) -> None:
        """See `NetworkPort.close`."""
        self._changed = None
        self._stop()
        self._asker.close()


def _matters(message: rtnetlink.Message) -> bool:
    """Say whether news may concern the way out: links, addresses, default routes, no other routes."""
    if isinstance(message, rtnetlink.Route):
        return message.default
    return isinstance(message, rtnetlink.Link | rtnetlink.OwnAddress)
