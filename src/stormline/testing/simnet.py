"""A simulated internet: hosts with addresses, access links over `netmodel`, NATs, and TCP between them.

    net = SimNet(loop, SimRng(seed, "net"))
    phone = net.host("phone", "10.0.0.2", link=LinkParams(delay_s=0.05, loss_pct=1))
    server = net.host("server", "198.51.100.1")
    server.listen(443, accept)
    sock = await phone.connect(Address("198.51.100.1", 443))       # a SimSocket, for `net.stream.TcpStream`

Packets pass the sender's link upwards, a core without loss, and the receiver's link downwards; a host without a link
sits in the core. Nothing is decided here about protocols above TCP.
"""

import asyncio
import errno
import functools
import math
import zlib
from collections.abc import Callable
from typing import Final, Protocol

from stormline.core.values import Address
from stormline.netmodel.fades import Fades
from stormline.netmodel.link import LinkModel, Verdict
from stormline.netmodel.params import BlackoutMode, FadeParams, LinkParams
from stormline.testing.simloop import SimRng, VirtualLoop
from stormline.testing.simtcp import ACK, RST, SYN, Segment, TcpEnd

CORE_DELAY_S: Final = 0.002
"""What the way through the core adds to packets of hosts that are in it: data centres of one region."""
_EPHEMERAL_FIRST: Final = 32_768
"""First local port of an outgoing connection."""
_TICK_S: Final = 5e-8
"""Least distance of two arrivals on one link: what is due in the same moment has no order on an asyncio loop."""


class Sites(Protocol):
    """What the network asks before it behaves; `testing.buggify.Buggify` is one."""

    def fires(self, site: str) -> bool:
        """True where the fault called `site` is to happen now."""
        ...

    def size(self, site: str, size: int) -> int:
        """Give how much of `size` bytes one operation does: all of them, or less where `site` fires."""
        ...


class NoFaults:
    """`Sites` where none ever fires."""

    def fires(self, site: str) -> bool:
        """Never."""
        return False

    def size(self, site: str, size: int) -> int:
        """All."""
        return size


class Switch:
    """Sites that can be switched off for good."""

    def __init__(self, sites: Sites) -> None:
        self._sites = sites

    def off(self) -> None:
        """Have none fire any more."""
        self._sites = NoFaults()

    def fires(self, site: str) -> bool:
        """See `Sites`."""
        return self._sites.fires(site)

    def size(self, site: str, size: int) -> int:
        """See `Sites`."""
        return self._sites.size(site, size)


class Pipe:
    """One direction of a link: a `LinkModel` and what is on its way in it."""

    def __init__(self, loop: VirtualLoop, model: LinkModel) -> None:
        self._loop = loop
        self.model = model
        self._under_way: dict[int, tuple[Callable[[], None], list[asyncio.TimerHandle]]] = {}
        self._last_s = -math.inf

    def send(self, size_bytes: int, arrive: Callable[[], None]) -> None:
        """Send a packet; `arrive` is called when (each time) it comes out."""
        self._plan(self.model.offer(size_bytes, self._loop.time()), arrive)

    def become(self, params: LinkParams) -> None:
        """Be another link from now on."""
        self.model.reconfigure(params, self._loop.time())
        self.revise()

    def revise(self) -> None:
        """After a command to the model: what was said of packets on their way may hold no longer."""
        for verdict in self.model.advance(self._loop.time()):
            under_way = self._under_way.pop(verdict.ticket, None)
            if under_way is not None:
                for handle in under_way[1]:
                    handle.cancel()
                self._plan(verdict, under_way[0])

    def _plan(self, verdict: Verdict, arrive: Callable[[], None]) -> None:
        handles = []
        for at_s in verdict.deliver_at:
            if at_s == math.inf:
                continue
            if 0 <= self._last_s - at_s < _TICK_S or 0 <= at_s - self._last_s < _TICK_S:
                at_s = self._last_s + _TICK_S
            self._last_s = at_s
            handles.append(self._loop.call_at(at_s, self._arrived, verdict.ticket, arrive, at_s))
        if verdict.deliver_at:
            self._under_way[verdict.ticket] = (arrive, handles)

    def _arrived(self, ticket: int, arrive: Callable[[], None], at_s: float) -> None:
        under_way = self._under_way.get(ticket)
        if under_way is not None:
            under_way[1][:] = [handle for handle in under_way[1] if handle.when() > at_s]
            if not under_way[1]:
                del self._under_way[ticket]
        arrive()


class Link:
    """A host's access link, both directions."""

    def __init__(
        self,
        loop: VirtualLoop,
        rng: SimRng,
        up: LinkParams,
        down: LinkParams,
        *,
        fades: FadeParams | None = None,
    ) -> None:
        self._loop = loop
        now = loop.time()
        bad = Fades(fades, rng.child("fades"), now) if fades is not None else None
        self.up = Pipe(loop, LinkModel(up, rng.child("up"), now, fades=bad))
        self.down = Pipe(loop, LinkModel(down, rng.child("down"), now, fades=bad))

    def _pipes(self, direction: str) -> list[Pipe]:
        return [pipe for name, pipe in (("up", self.up), ("down", self.down)) if direction in ("both", name)]

    def blackout(self, mode: BlackoutMode, duration_s: float, *, direction: str = "both") -> None:
        """Go dark for a while: `direction` `up`, `down` or `both`."""
        now = self._loop.time()
        for pipe in self._pipes(direction):
            pipe.model.start_blackout(mode, now, until_s=now + duration_s)
            pipe.revise()

    def heal(self, params: LinkParams) -> None:
        """Become a good link: no blackout, no fades, these parameters."""
        now = self._loop.time()
        for pipe in (self.up, self.down):
            pipe.model.end_blackout(now)
            pipe.model.set_fades(None, now)
            pipe.become(params)


class Nat:
    """A carrier's address translation: one outer address, a mapping a connection, forgotten when idle.

    What comes for a forgotten mapping is dropped; what goes out through one gets a new outer port, which the server
    does not know and answers with RST.
    """

    def __init__(self, outer_ip: str, idle_s: float) -> None:
        self.outer_ip = outer_ip
        self.idle_s = idle_s
        self._outer: dict[tuple[Address, Address], tuple[int, float]] = {}
        self._inner: dict[tuple[int, Address], Address] = {}
        self._next_port = 20_000

    def outbound(self, segment: Segment, now: float) -> Segment:
        """Give the packet its outer source."""
        key = (segment.src, segment.dst)
        known = self._outer.get(key)
        if known is None or now - known[1] > self.idle_s:
            if known is not None:
                self._inner.pop((known[0], segment.dst), None)
            port = self._next_port
            self._next_port += 1
            self._inner[(port, segment.dst)] = segment.src
        else:
            port = known[0]
        self._outer[key] = (port, now)
        return segment._replace(src=Address(self.outer_ip, port))

    def inbound(self, segment: Segment, now: float) -> Segment | None:
        """Give the packet its inner destination, None where no mapping leads inside (any more)."""
        inner = self._inner.get((segment.dst.port, segment.src))
        if inner is None or segment.dst.host != self.outer_ip:
            return None
        port, last = self._outer[(inner, segment.src)]
        if port != segment.dst.port or now - last > self.idle_s:
            return None
        self._outer[(inner, segment.src)] = (port, now)
        return segment._replace(dst=inner)

    def forget(self) -> None:
        """Lose every mapping, as on a restart of the box."""
        self._outer.clear()
        self._inner.clear()


class SimSocket:
    """A connected non-blocking socket: what `net.stream.TcpStream` needs of one. The kernel below is `TcpEnd`.

    Attributes:
        on_over: told once when it is closed or broken.
    """

    def __init__(self, end: TcpEnd, loop: VirtualLoop, sites: Sites) -> None:
        self._end = end
        self._loop = loop
        self._sites = sites
        self._closed = False
        self._on_readable: Callable[[], object] | None = None
        self._reader_due = False
        self._may_read: int | None = None
        self._on_writable: Callable[[], object] | None = None
        self.on_over: Callable[[], object] | None = None
        end.user = self

    @property
    def end(self) -> TcpEnd:
        """The connection."""
        return self._end

    @property
    def closed(self) -> bool:
        """Its owner has closed it."""
        return self._closed

    @property
    def readable(self) -> bool:
        """True where `recv` would not block."""
        return self._closed or self._has_more()

    def fileno(self) -> "SimSocket":
        """What the loop knows it by: itself, as the loop takes no real descriptor."""
        return self

    def getpeername(self) -> Address:
        """The peer's address."""
        return self._end.remote

    def getsockname(self) -> Address:
        """Our address."""
        return self._end.local

    def send(self, data: bytes | memoryview) -> int:
        """Hand over what there is room for; raises BlockingIOError where there is none."""
        if not len(data):
            return 0
        taken = self._end.write(memoryview(data)[: self._sites.size("send-short", len(data))])
        if not taken:
            raise BlockingIOError(errno.EAGAIN, "no room")
        return taken

    def recv(self, size_max: int) -> bytes:
        """Give what came; raises BlockingIOError for nothing yet."""
        if self._sites.fires("close-early"):
            self._end.reset()
        if self._may_read is not None:
            size_max = min(size_max, self._may_read)
        data = self._end.read(self._sites.size("receive-short", size_max)) if size_max else None
        if data is None:
            raise BlockingIOError(errno.EAGAIN, "nothing yet")
        if self._may_read is not None:
            self._may_read -= len(data)
        return data

    def let_read(self, size: int | None) -> None:
        """Let its owner take so many bytes from now on, as a slow program takes few; None for all there are."""
        self._may_read = size
        self._plan_reader()

    def _has_more(self) -> bool:
        return self._end.readable and self._may_read != 0

    def close(self) -> None:
        """Close; what was taken is still sent."""
        self._closed = True
        self._on_readable = self._on_writable = None
        self._end.close()
        self._tell_over()

    def _tell_over(self) -> None:
        told, self.on_over = self.on_over, None
        if told is not None:
            told()

    def watch_reading(self, callback: Callable[[], object] | None) -> None:
        """See `simloop.SimDescriptor`."""
        self._on_readable = callback
        self._plan_reader()

    def watch_writing(self, callback: Callable[[], object] | None) -> None:
        """See `simloop.SimDescriptor`."""
        self._on_writable = callback
        if callback is not None and self._end.writable:
            self._loop.call_soon(self._call_writer)

    def tcp_changed(self) -> None:
        """See `simtcp.TcpUser`."""
        if self._end.failed is not None:
            self._tell_over()
        self._plan_reader()
        if self._on_writable is not None and self._end.writable:
            self._loop.call_soon(self._call_writer)

    def _plan_reader(self) -> None:
        if self._on_readable is not None and self._has_more() and not self._reader_due:
            self._reader_due = True
            self._loop.call_soon(self._call_reader)

    def _call_reader(self) -> None:
        self._reader_due = False
        if self._on_readable is not None and self._has_more():
            self._on_readable()
            self._plan_reader()  # as with `poll`: again in every turn until nothing is left, or nobody watches

    def _call_writer(self) -> None:
        if self._on_writable is not None and self._end.writable:
            self._on_writable()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


Accept = Callable[[SimSocket], None]
"""Takes a new connection of a listener."""


class Host:
    """A machine on the network.

    Attributes:
        name: for people.
        addresses: its own addresses, none while it is offline.
        link: its access link, None in the core.
        nat: the translation its packets pass, None for none.
        dark: it neither sends nor takes packets, as after a power cut.
        may_read: bytes that programs here may take of each new connection; None for all.
    """

    def __init__(self, net: "SimNet", name: str, *, link: Link | None, nat: Nat | None) -> None:
        self._net = net
        self.name = name
        self.addresses: list[str] = []
        self.link = link
        self.nat = nat
        self.dark = False
        self.may_read: int | None = None
        self._listeners: dict[int, Accept] = {}
        self._ends: dict[tuple[Address, Address], TcpEnd] = {}
        self._next_port = _EPHEMERAL_FIRST

    # -- servers -----------------------------------------------------------------------------------------------------

    def listen(self, port: int, accept: Accept) -> None:
        """Take connections on a port."""
        self._listeners[port] = accept

    def unlisten(self, port: int) -> None:
        """Take no more; whoever asks gets RST."""
        self._listeners.pop(port, None)

    def kill_connections(self, port: int | None = None) -> None:
        """Reset what a process that was killed had open: all, or those of one local port."""
        for end in list(self._ends.values()):
            if port is None or end.local.port == port:
                end.abort()

    def let_read(self, size: int | None) -> None:
        """Let programs here take so many bytes of each connection, see `SimSocket.let_read`; new ones likewise."""
        self.may_read = size
        for end in list(self._ends.values()):
            if isinstance(end.user, SimSocket):
                end.user.let_read(size)

    def forget_connections(self) -> None:
        """Lose all connections without a word, as a machine that lost its power: later packets are met by RST."""
        for end in list(self._ends.values()):
            end.fail(ConnectionAbortedError(errno.ECONNABORTED, "power cut"))
        self._ends.clear()

    # -- clients -----------------------------------------------------------------------------------------------------

    async def connect(self, address: Address) -> SimSocket:
        """Connect from this host; cancelled or failed, nothing is left.

        Raises:
            OSError: refused, timed out, or no network.
        """
        loop, sites = self._net.loop, self._net.sites
        if not self.addresses:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")
        if sites.fires("dial-refused"):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        if sites.fires("dial-slow"):
            await asyncio.sleep(self._net.rng.uniform(0.01, 2.0))
            if not self.addresses:
                raise OSError(errno.ENETUNREACH, "Network is unreachable")
        local = Address(self.addresses[0], self._next_port)
        self._next_port += 1
        end = TcpEnd(local, address, send=self._send, forget=self._forget)
        self._ends[(local, address)] = end
        sock = SimSocket(end, loop, sites)
        sock.let_read(self.may_read)
        waiter = loop.create_future()
        sock.watch_writing(functools.partial(_wake, waiter))
        try:
            end.start()
            await waiter
            if end.failed is not None:
                raise end.failed
        except BaseException:
            sock.close()
            raise
        finally:
            sock.watch_writing(None)
        return sock

    def leave_network(self, *, kill: bool) -> None:
        """Lose every address.

        Args:
            kill: the system breaks the connections bound to them (as Android does); else they hang, half open.
        """
        self.addresses.clear()
        if kill:
            for end in list(self._ends.values()):
                end.fail(ConnectionAbortedError(errno.ECONNABORTED, "Software caused connection abort"))

    def join_network(self, ip: str, nat: Nat | None) -> None:
        """Get another address, behind another translation."""
        self.addresses[:] = [ip]
        self._net.route(nat.outer_ip if nat is not None else ip, self)
        self.nat = nat

    # -- packets -----------------------------------------------------------------------------------------------------

    def _send(self, segment: Segment) -> None:
        if self.dark or segment.src.host not in self.addresses:
            return  # bound to an address that is gone: no carrier takes it
        if self.nat is not None:
            segment = self.nat.outbound(segment, self._net.loop.time())
        self._net.carry(self, segment)

    def take(self, segment: Segment) -> None:
        """Take a packet that came out of the link."""
        if self.dark:
            return
        if self.nat is not None:
            inner = self.nat.inbound(segment, self._net.loop.time())
            if inner is None:
                return
            segment = inner
        if segment.dst.host not in self.addresses:
            return
        end = self._ends.get((segment.dst, segment.src))
        if end is not None:
            end.receive(segment)
        elif segment.flags & SYN and not segment.flags & ACK and segment.dst.port in self._listeners:
            self._accept(segment)
        elif not segment.flags & RST:
            reset = Segment(segment.dst, segment.src, RST | ACK, segment.ack, segment.seq + len(segment.data), 0)
            self._send(reset)

    def _accept(self, syn: Segment) -> None:
        end = TcpEnd(syn.dst, syn.src, send=self._send, forget=self._forget, passive=True)
        self._ends[(syn.dst, syn.src)] = end
        end.user = _Accepting(self, end, syn.dst.port)
        end.start()

    def accepted(self, end: TcpEnd, port: int) -> None:
        """A connection of a listener stands."""
        accept = self._listeners.get(port)
        if accept is None:
            end.abort()
        else:
            accept(SimSocket(end, self._net.loop, self._net.sites))

    def _forget(self, end: TcpEnd) -> None:
        key = (end.local, end.remote)
        if self._ends.get(key) is end:
            del self._ends[key]

    @property
    def connections(self) -> int:
        """TCP connections this host knows."""
        return len(self._ends)


class _Accepting:
    """Waits for the last step of a handshake."""

    def __init__(self, host: Host, end: TcpEnd, port: int) -> None:
        self._host = host
        self._end = end
        self._port = port

    def tcp_changed(self) -> None:
        """See `simtcp.TcpUser`."""
        if self._end.connected and self._end.failed is None:
            self._end.user = None
            self._host.accepted(self._end, self._port)


class SimNet:
    """All hosts of one world.

    Args:
        loop: virtual time.
        rng: chance of the links.
        sites: small faults.
    """

    def __init__(self, loop: VirtualLoop, rng: SimRng, *, sites: Sites | None = None) -> None:
        self.loop = loop
        self.rng = rng
        self.sites: Sites = sites if sites is not None else NoFaults()
        self._routes: dict[str, Host] = {}
        self._core_last_s = 0.0
        self.packets = 0

    def host(self, name: str, ip: str, *, link: Link | None = None, nat: Nat | None = None) -> Host:
        """Put a host on the network."""
        host = Host(self, name, link=link, nat=nat)
        host.addresses.append(ip)
        self.route(nat.outer_ip if nat is not None else ip, host)
        return host

    def link(
        self, name: str, up: LinkParams, down: LinkParams | None = None, *, fades: FadeParams | None = None
    ) -> Link:
        """Make an access link."""
        return Link(self.loop, self.rng.child(name), up, down if down is not None else up, fades=fades)

    def route(self, ip: str, host: Host) -> None:
        """Bring what is for `ip` to `host`."""
        self._routes[ip] = host

    async def ask(self, host: Host, up_bytes: int, down_bytes: int) -> None:
        """Send one datagram from a host into the core and wait for one that comes back; either may be lost."""
        answered = self.loop.create_future()
        link = host.link

        def back() -> None:
            if link is None:
                _wake(answered)
            else:
                link.down.send(down_bytes, lambda: _wake(answered))

        def forth() -> None:
            self.loop.call_later(2 * CORE_DELAY_S, back)

        if link is None:
            forth()
        else:
            link.up.send(up_bytes, forth)
        await answered

    def carry(self, source: Host, segment: Segment) -> None:
        """Take a packet from its sender."""
        self.packets += 1
        if source.link is None:
            self._core_last_s = max(self.loop.time() + CORE_DELAY_S, self._core_last_s + _TICK_S)
            self.loop.call_at(self._core_last_s, self._through_core, segment)
        else:
            source.link.up.send(segment.size_bytes, lambda: self._through_core(segment))

    def _through_core(self, segment: Segment) -> None:
        target = self._routes.get(segment.dst.host)
        if target is None:
            return  # nobody there: silence, as from most firewalls
        if target.link is None:
            self._arrive(target, segment)
        else:
            target.link.down.send(segment.size_bytes, lambda: self._arrive(target, segment))

    def _arrive(self, target: Host, segment: Segment) -> None:
        self.loop.trace(target.name, segment, zlib.crc32(segment.data))
        target.take(segment)
