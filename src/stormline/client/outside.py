"""What a client takes from the machine it runs on. Simulation brings another machine; nothing else differs."""

import asyncio
import contextlib
import functools
import os
import ssl
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from stormline.core.clock import Clock, Rng
from stormline.core.values import Address
from stormline.net import trust
from stormline.net.clock import SystemClock, SystemRng
from stormline.net.local import has_route, is_assigned
from stormline.net.network import NetworkPort, open_port
from stormline.net.resolve import NameSource, SystemNames
from stormline.net.stream import TcpStream, open_tcp
from stormline.outbound.dial import AddressSource, OpenTcp


class Trust(Protocol):
    """Makes TLS contexts; the module `net.trust` is one."""

    def foreign_context(self, alpn: Sequence[str] = ("http/1.1",)) -> ssl.SSLContext:
        """See `net.trust.foreign_context`."""
        ...

    def roles_context(self, ca_pem: bytes | str, alpn: Sequence[str]) -> ssl.SSLContext:
        """See `net.trust.roles_context`."""
        ...


async def on_thread(work: Callable[[], None]) -> None:
    """Do something that may block on a thread of its own, which nobody waits for at the interpreter's end.

    Cancelled, the work goes on; who waits does not.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish() -> None:
        if not done.done():
            done.set_result(None)

    def run() -> None:
        try:
            work()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(finish)

    threading.Thread(target=run, name="stormline-aside", daemon=True).start()
    await done


_open_mptcp: Final[OpenTcp] = functools.partial(open_tcp, mptcp=True)


async def _open_over(device: str, address: Address) -> TcpStream:
    return await open_tcp(address, device=device)


class Names(AddressSource, Protocol):
    """Turns names into addresses for one client; `client.names.NameService` is one."""

    def close(self) -> None:
        """End what waits and forget what is known."""
        ...


@dataclass(frozen=True, kw_only=True)
class Outside:
    """The machine.

    Attributes:
        clock: time.
        rng: chance.
        open_tcp: connects to one address.
        open_over: the same over the interface of a name.
        open_mptcp: the same by Multipath TCP where there is any.
        trust: makes TLS contexts.
        is_assigned: says whether an address is one of the machine's own now.
        has_route: says whether it has a way out at all.
        names: makes the resolver that the system has; each client has one of its own.
        resolver: makes what turns names into addresses in the place of `client.names`; None: nothing does.
        environ: its environment variables, for the proxies they name.
        aside: does what may block elsewhere than on the loop.
        logs: it has threads of its own that write the network log.
        network: gives what watches its network, by one of `net.network.WATCHES`; each client has one of its own.
    """

    clock: Clock = field(default_factory=SystemClock)
    rng: Rng = field(default_factory=SystemRng)
    open_tcp: OpenTcp = open_tcp
    open_mptcp: OpenTcp = _open_mptcp
    open_over: Callable[[str, Address], Awaitable[TcpStream]] = _open_over
    trust: Trust = trust
    is_assigned: Callable[[str], bool] = is_assigned
    has_route: Callable[[], bool] = has_route
    names: Callable[[], NameSource] = SystemNames
    resolver: Callable[[], Names] | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    aside: Callable[[Callable[[], None]], Awaitable[None]] = on_thread
    logs: bool = True
    network: Callable[[str], NetworkPort] = open_port


REAL = Outside()
"""This machine."""
