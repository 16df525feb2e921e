"""Where a client gets its knowledge of the network from: one port, and who provides it on this machine.

Three provide it: the kernel's routing socket on Linux (`net.netlink`), looking now and then elsewhere (`net.polling`),
and whoever else knows (`net.recorded`): a phone's host language, or a recorded story in tests.
"""

import socket
from collections.abc import Callable, Collection
from typing import Final, Protocol

from stormline.core.errors import ConfigError
from stormline.net.probes import Beside
from stormline.net.system import LINUX
from stormline.policy.network import NOTHING_KNOWN, NetworkInfo

WATCHES: Final = ("auto", "netlink", "polling", "off")
"""Ways to watch the network: the best there is, one of them, or none."""


class NetworkPort(Protocol):
    """Looks at the network and tells when to look again. Belongs to the event loop `watch` is called on."""

    def look(self) -> NetworkInfo:
        """Give what is there now; takes less than a millisecond, as a rule, and never raises."""
        ...

    def ways(self) -> tuple[NetworkInfo, ...]:
        """Give the ways out that a socket can be bound to, by interface: the system's own first, then as it has them.

        Empty where there is only one, where nobody can tell, and where the first is a VPN's: nothing goes around it.
        """
        ...

    def watch(self, changed: Callable[[], None]) -> None:
        """Begin to call `changed`, which must not raise, whenever something may have changed; often it has not."""
        ...

    def touch(self) -> None:
        """A request begins: who looks by the clock goes on doing so for a while."""
        ...

    def neighbour(self, index: int, address: str) -> Beside | None:
        """Give what the kernel knows of a machine on the link of that number; None: nothing, or it does not tell."""
        ...

    def close(self) -> None:
        """End it; again is harmless, also where the loop is closed."""
        ...


class NoNetworkPort:
    """Knows nothing and tells nothing."""

    def look(self) -> NetworkInfo:
        """Give `NOTHING_KNOWN`."""
        return NOTHING_KNOWN

    def ways(self) -> tuple[NetworkInfo, ...]:
        """Give none."""
        return ()

    def watch(self, changed: Callable[[], None]) -> None:
        """Nothing to watch."""

    def touch(self) -> None:
        """Nothing to do."""

    def neighbour(self, index: int, address: str) -> Beside | None:
        """Give None."""
        return None

    def close(self) -> None:
        """Nothing to close."""


def open_port(how: str, *, plain: Collection[str] = ()) -> NetworkPort:
    """Give the port of this machine.

    Args:
        how: one of `WATCHES`.
        plain: names of interfaces that are no VPN's, whatever they look like.

    Raises:
        ConfigError: `how` is none of them, or `netlink` where there is none.
    """
    from stormline.net.polling import PollingPort

    if how not in WATCHES:
        raise ConfigError(f"network watch {how!r}: expected one of {', '.join(WATCHES)}")
    if how == "off":
        return NoNetworkPort()
    if how != "polling" and LINUX and hasattr(socket, "AF_NETLINK"):
        from stormline.net.netlink import NetlinkPort

        try:
            return NetlinkPort(plain=plain)
        except OSError as error:  # forbidden by a sandbox, or by Android from its 11th version on
            if how == "netlink":
                raise ConfigError(f"network watch netlink: {error.strerror or error}") from error
    if how == "netlink":
        raise ConfigError("network watch netlink: this system has none, or STORMLINE_PORTABLE is set")
    return PollingPort(plain=plain)
