"""Network namespaces of the laboratory: a device with two uplinks, their routers, and the servers' side.

    device                 TUN ~ shaper ~ TUN   router-wifi0  (NAT)   veth
      wifi0 10.71.1.2  ------------------------ lan0   wan0 ----------------- wifi0 \\
      cell0 10.71.2.2  ------------------------ lan0   wan0 ----------------- cell0 -  server: 203.0.113.10, .11, ...
                                                router-cell0                        /           2001:db8:53::10, ...

IPv4 is masqueraded by the routers, IPv6 is routed, as mobile networks do. The device's default route is WiFi; what is
bound to the cellular address uses the cellular link (policy routes). Addresses are from documentation ranges (RFC 5737,
RFC 3849): nothing here can reach anything outside the machine.

Everything has the name of the process that made it and goes with `close`; `cleanup_stale` removes what a killed process
left behind.
"""

import contextlib
import ipaddress
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from stormline.core import errors, limits_lab
from stormline.lab import messages as m
from stormline.lab.tun import NETNS_FOLDER, TUN_DEVICE, inside
from stormline.net.clock import SystemClock

_ETC: Final = Path("/etc/netns")
"""Where `ip netns exec` looks for a namespace's own files of /etc."""
_SBIN: Final = "/usr/sbin:/sbin"
_PREFIX: Final = "stormline"
_NAME: Final = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-(\d+)-[a-z0-9-]+")
_NEEDED: Final = 1 << 12 | 1 << 21  # CAP_NET_ADMIN, CAP_SYS_ADMIN
_numbers = itertools.count(1)
"""Tells apart the topologies of one process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uplink:
    """One of the device's ways out."""

    name: str
    """Of the device's interface and of the link in the shaper."""
    number: int

    @property
    def device_v4(self) -> str:
        """The device's address on it."""
        return f"10.71.{self.number}.2"

    @property
    def router_v4(self) -> str:
        """The router's address towards the device."""
        return f"10.71.{self.number}.1"

    @property
    def device_v6(self) -> str:
        """The device's global IPv6 address."""
        return f"2001:db8:71:{self.number}::2"

    @property
    def router_v6(self) -> str:
        """The router's IPv6 address towards the device."""
        return f"2001:db8:71:{self.number}::1"

    @property
    def wan_v4(self) -> str:
        """The address the server sees."""
        return f"192.0.2.{4 * self.number + 2}"

    @property
    def server_v4(self) -> str:
        """The server's address towards the router."""
        return f"192.0.2.{4 * self.number + 1}"

    @property
    def wan_v6(self) -> str:
        """The router's IPv6 address towards the server."""
        return f"2001:db8:100:{self.number}::2"

    @property
    def server_v6(self) -> str:
        """The server's IPv6 address towards the router."""
        return f"2001:db8:100:{self.number}::1"

    @property
    def table(self) -> int:
        """The device's routing table for what is bound to this uplink."""
        return 100 + self.number


WIFI: Final = Uplink(name="wifi0", number=1)
CELL: Final = Uplink(name="cell0", number=2)
UPLINKS: Final = (WIFI, CELL)


def require_lab() -> None:
    """Make sure that the laboratory can work here.

    Raises:
        PlatformError: no Linux, no root, no TUN, or a program is missing; the message says what to do.
    """
    if not hasattr(os, "geteuid") or not Path("/proc/self/ns/net").exists():
        raise errors.PlatformError("the laboratory needs Linux with network namespaces")
    if os.geteuid() != 0:
        raise errors.PlatformError("the laboratory needs root, to make network namespaces and devices: try with sudo")
    if _capabilities() & _NEEDED != _NEEDED:
        raise errors.PlatformError("the laboratory needs CAP_NET_ADMIN and CAP_SYS_ADMIN, which this container lacks")
    if not TUN_DEVICE.exists():
        raise errors.PlatformError(f"the laboratory needs {TUN_DEVICE}: load the kernel module 'tun'")
    for program, package in (("ip", "iproute2"), ("nft", "nftables")):
        if _find(program) is None:
            raise errors.PlatformError(f"the laboratory needs the program '{program}': install {package}")


def _capabilities() -> int:
    """Give this process's effective capabilities as a set of bits."""
    status = Path("/proc/self/status").read_text()
    return next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:{_SBIN}")


def _run(command: Sequence[str], what: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - our own commands, no shell from outside
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limits_lab.LAB_COMMAND_S,
            check=False,
            env=_environment(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise errors.PlatformError(f"{what}: {error}") from error
    if done.returncode != 0:
        raise errors.PlatformError(f"{what}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{_SBIN}"}


def _started(pid: int) -> str | None:
    """Give a process's start time in ticks, None where there is no such process."""
    try:
        # The name in parentheses may hold anything; fields are counted behind it. Field 22 is the start time.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


class Namespace:
    """A named network namespace."""

    def __init__(self, name: str) -> None:
        """Make it.

        Raises:
            PlatformError: it cannot be made.
        """
        self.name = name
        _run(["ip", "netns", "add", name], f"cannot make namespace {name}")

    @property
    def path(self) -> Path:
        """The file that stands for it."""
        return NETNS_FOLDER / self.name

    def command(self, *words: str) -> list[str]:
        """Give the command line that runs `words` inside; the process that starts has the same pid."""
        return [_find("ip") or "ip", "netns", "exec", self.name, *words]

    def run(self, *words: str) -> str:
        """Run a program inside and give its output.

        Raises:
            PlatformError: it failed or took longer than `limits_lab.LAB_COMMAND_S`; the message has its last words.
        """
        return _run(self.command(*words), f"{words[0]} in {self.name}")

    def shell(self, script: str) -> None:
        """Run shell commands inside until one fails.

        Raises:
            PlatformError: one failed; the message has its words.
        """
        _run(self.command("sh", "-e", "-c", script), f"setting up {self.name}")

    def popen(self, words: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a program inside; it is killed when the namespace is removed."""
        options.setdefault("env", _environment())
        return subprocess.Popen(self.command(*words), **options)  # noqa: S603 - as in `_run`

    def socket(self, family: socket.AddressFamily, kind: socket.SocketKind) -> socket.socket:
        """Make a socket that belongs to this namespace and is used from outside like any other."""
        with inside(self.path):
            return socket.socket(family, kind)

    def set_resolvers(self, addresses: Sequence[str]) -> None:
        """Give programs started from now on a resolv.conf of their own (`ip netns exec` puts it in place).

        Raises:
            PlatformError: it cannot be written.
        """
        folder = _ETC / self.name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "resolv.conf").write_text("".join(f"nameserver {address}\n" for address in addresses))
        except OSError as error:
            raise errors.PlatformError(f"cannot write {folder}: {error.strerror}") from error

    def remove(self) -> None:
        """Kill what runs inside and remove it; again is harmless."""
        _remove(self.name)


def _pids(name: str) -> list[int]:
    """List the processes inside a namespace; ours is never among them."""
    try:
        listed = _run(["ip", "netns", "pids", name], name)
    except errors.PlatformError:  # it is gone
        return []
    return [int(word) for word in listed.split() if int(word) != os.getpid()]


def _remove(name: str) -> None:
    clock = SystemClock()
    end_s = clock.monotonic() + limits_lab.LAB_CLEANUP_S
    while pids := _pids(name):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if clock.monotonic() > end_s:
            break  # dead and not yet collected by its parent
        time.sleep(limits_lab.LAB_CLEANUP_PAUSE_S)
    if (NETNS_FOLDER / name).exists():
        try:
            _run(["ip", "netns", "delete", name], f"cannot remove namespace {name}")
        except errors.PlatformError:
            if (NETNS_FOLDER / name).exists():  # else another stage cleaned up at the same moment
                raise
    shutil.rmtree(_ETC / name, ignore_errors=True)


def cleanup_stale() -> list[str]:
    """Remove namespaces whose maker is gone, with what still runs inside.

    Returns:
        Names of those removed.

    Raises:
        PlatformError: one cannot be removed.
    """
    removed = []
    for path in sorted(NETNS_FOLDER.glob(f"{_PREFIX}-*")) if NETNS_FOLDER.is_dir() else []:
        match = _NAME.fullmatch(path.name)
        if match is not None and _started(int(match[1])) != match[2]:
            _remove(path.name)
            removed.append(path.name)
    return removed


class Topology:
    """The laboratory's networks; a context manager that removes them.

    Packets flow between device and routers only while a shaper holds the TUN devices (`link_setup`). Make a new one for
    each run that shall be repeatable: the kernel goes on closing old connections, and their packets would meet the
    chance that was meant for others.
    """

    def __init__(self, *, server_addresses: int = 4) -> None:
        """Make the namespaces, in a quarter of a second.

        Args:
            server_addresses: how many addresses of each family the server's side has.

        Raises:
            PlatformError: the laboratory cannot work here, or a step failed; then nothing is left behind.
        """
        require_lab()
        if not 1 <= server_addresses <= limits_lab.LAB_SERVER_ADDRESSES_MAX:
            raise errors.ConfigError(f"server addresses: 1 to {limits_lab.LAB_SERVER_ADDRESSES_MAX}")
        cleanup_stale()
        first_v4, first_v6 = ipaddress.ip_address("203.0.113.10"), ipaddress.ip_address("2001:db8:53::10")
        self.server_v4 = tuple(str(first_v4 + n) for n in range(server_addresses))
        """IPv4 addresses of the server's side."""
        self.server_v6 = tuple(str(first_v6 + n) for n in range(server_addresses))
        """IPv6 addresses of the server's side."""
        self.prefix = f"{_PREFIX}-{os.getpid()}-{_started(os.getpid())}-{next(_numbers)}"
        self._made: list[Namespace] = []
        try:
            self.device = self._make("device")
            self.server = self._make("server")
            self.routers: Mapping[str, Namespace] = {up.name: self._make(f"router-{up.name}") for up in UPLINKS}
            self._connect()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what runs inside and remove all; again is harmless.

        Raises:
            PlatformError: something could not be removed; the rest was.
        """
        failed: list[errors.PlatformError] = []
        while self._made:
            try:
                self._made.pop().remove()
            except errors.PlatformError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def link_setup(
        self,
        uplink: Uplink,
        *,
        up: dict[str, Any] | None = None,
        down: dict[str, Any] | None = None,
        fades: dict[str, Any] | None = None,
        seed: int = 0,
    ) -> m.LinkSetup:
        """Describe an uplink for a shaper; parameters are plain data as in `netmodel.params.read_params`."""
        near = m.Port(str(self.device.path), uplink.name)
        far = m.Port(str(self.routers[uplink.name].path), "lan0")
        return m.LinkSetup(name=uplink.name, near=near, far=far, up=up or {}, down=down or {}, fades=fades, seed=seed)

    def set_uplink(self, uplink: Uplink, *, up: bool) -> None:
        """Take an uplink's interface down, as when WiFi is switched off, or up again with its addresses and routes.

        While it is down the device's default route is the other uplink.

        Raises:
            PlatformError: it could not be done.
        """
        self.device.shell(_uplink_script(uplink) if up else f"ip link set {uplink.name} down")

    def kernel_drops(self) -> int:
        """Count packets that the kernel dropped before a shaper read them, on both ends of both links.

        They are not the link model's doing: there was no shaper, or it was far too late and the run is void. Compare
        two counts.

        Raises:
            PlatformError: the counters cannot be read.
        """
        ends = [(self.device, up.name) for up in UPLINKS] + [(router, "lan0") for router in self.routers.values()]
        listed = (json.loads(namespace.run("ip", "-json", "-s", "link", "show", name)) for namespace, name in ends)
        return sum(int(entry[0]["stats64"]["tx"]["dropped"]) for entry in listed)

    def _make(self, role: str) -> Namespace:
        namespace = Namespace(f"{self.prefix}-{role}")
        self._made.append(namespace)
        return namespace

    def _connect(self) -> None:
        for up in UPLINKS:
            router = self.routers[up.name]
            _run(
                ["ip", "link", "add", "wan0", "netns", router.name, "type", "veth", "peer", "name", up.name,
                 "netns", self.server.name],
                f"cannot connect {router.name}",
            )  # fmt: skip
            router.shell(_router_script(up))
        self.server.shell(_server_script(self.server_v4, self.server_v6))
        self.device.shell(_device_script())


_COMMON: Final = """
ip link set lo up
for each in all default; do echo 0 > /proc/sys/net/ipv4/conf/$each/rp_filter; done
echo 0 > /proc/sys/net/ipv6/conf/all/disable_ipv6
for each in /proc/sys/net/ipv6/conf/*; do echo 0 > $each/accept_dad; echo 0 > $each/router_solicitations; done
"""


def _tun_script(name: str) -> str:
    # No link-local address and no multicast: on an idle link there shall be no packet that nobody sent, or the same
    # seed would not meet the same packets.
    return f"""
ip tuntap add dev {name} mode tun
ip link set {name} mtu 1500 txqueuelen {limits_lab.LAB_DEVICE_QUEUE_PACKETS} multicast off addrgenmode none
"""


def _address_script(name: str, v4: str, v6: str) -> str:
    # Without a carrier (no shaper yet) the kernel would not use an address that waits for duplicate detection.
    return f"""
ip link set {name} up
ip address replace {v4}/24 dev {name}
ip address replace {v6}/64 dev {name} nodad
"""


def _router_script(up: Uplink) -> str:
    return f"""{_COMMON}
echo 1 > /proc/sys/net/ipv4/ip_forward
echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
{_tun_script("lan0")}
{_address_script("lan0", up.router_v4, up.router_v6)}
ip link set wan0 up
ip address add {up.wan_v4}/30 dev wan0
ip address add {up.wan_v6}/64 dev wan0 nodad
ip route add default via {up.server_v4}
ip -6 route add default via {up.server_v6}
nft -f - <<END
table ip nat {{
  chain postrouting {{
    type nat hook postrouting priority srcnat
    oifname "wan0" masquerade
  }}
}}
table ip6 filter {{
  chain output {{
    type filter hook output priority filter
    oifname "lan0" ip6 daddr ff02::/16 drop
  }}
}}
END
"""


def _server_script(v4: Sequence[str], v6: Sequence[str]) -> str:
    lines = [_COMMON]
    lines += [f"ip address add {address}/32 dev lo" for address in v4]
    lines += [f"ip address add {address}/128 dev lo nodad" for address in v6]
    for up in UPLINKS:
        lines.append(f"ip link set {up.name} up")
        lines.append(f"ip address add {up.server_v4}/30 dev {up.name}")
        lines.append(f"ip address add {up.server_v6}/64 dev {up.name} nodad")
        lines.append(f"ip -6 route add 2001:db8:71:{up.number}::/64 via {up.wan_v6}")
    return "\n".join(lines)


def _device_script() -> str:
    lines = [_COMMON]
    for up in UPLINKS:
        lines += [_tun_script(up.name), _uplink_script(up)]
        for family, own in (("-4", up.device_v4), ("-6", up.device_v6)):
            lines.append(f"ip {family} rule add from {own} lookup {up.table} priority {1000 + up.number}")
    return "\n".join(lines)


def _uplink_script(up: Uplink) -> str:
    lines = [_address_script(up.name, up.device_v4, up.device_v6)]
    for family, router, own in (("-4", up.router_v4, up.device_v4), ("-6", up.router_v6, up.device_v6)):
        way = f"default via {router} dev {up.name} src {own}"
        lines.append(f"ip {family} route replace {way} metric {100 * up.number}")
        lines.append(f"ip {family} route replace {way} table {up.table}")
    return "\n".join(lines)
