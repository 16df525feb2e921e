"""Who is asked for a name: the system's resolver and DNS over HTTPS, in an order that follows their conduct.

The system goes first: it costs nothing, and knows the names of the network it is on. DNS over HTTPS is asked as well
where the system is slow, fails, or gives what cannot be right; and first on networks whose resolver has lied or was too
slow, for a time. See docs/explanation/names.md.
"""

import asyncio
import collections
import ipaddress
import math
import socket
from collections.abc import Callable, Collection
from typing import Any, Final, NamedTuple, Protocol

from stormline.core import limits_names
from stormline.net.local import in_hosts_file
from stormline.net.resolve import SYSTEM, Found, NameSource, NoName, says_absent

_LOCAL_SUFFIXES: Final = ("localhost", "local", "home.arpa", "internal", "lan", "onion")
"""Names that DNS at large does not have: RFC 6761, RFC 6762, RFC 7686, RFC 8375, ICANN's `internal`, and common use."""


class Doh(Protocol):
    """What is needed of DNS over HTTPS; `outbound.doh.DohNames` is one."""

    async def ask(self, host: str, *, avoid: Collection[str] = (), on_note: Callable[[str], None] = ...) -> Found:
        """Give the addresses of a name; see `DohNames.ask`."""
        ...

    def shun(self, source: str) -> None:
        """Put the server that is `Found.source` behind the others."""
        ...

    def doubt(self) -> None:
        """The network has changed."""
        ...

    def close(self) -> None:
        """Close every connection."""
        ...


class _Conduct:
    """How the resolver of one network has done."""

    __slots__ = ("behind_until", "lies", "overtaken", "pace_s")

    def __init__(self) -> None:
        self.behind_until = -math.inf
        self.lies = 0
        self.overtaken = 0
        self.pace_s: float | None = None

    def answered(self, took_s: float) -> None:
        self.overtaken = 0
        self.pace_s = took_s if self.pace_s is None else self.pace_s + (took_s - self.pace_s) / 4.0

    def was_overtaken(self, now: float) -> bool:
        """Count it; True where it goes behind for that."""
        self.overtaken += 1
        if self.overtaken < limits_names.NAMES_BEHIND_MAX:
            return False
        self.overtaken = 0
        self.behind_until = max(self.behind_until, now + limits_names.NAMES_BEHIND_S)
        return True

    def lied(self, now: float) -> float:
        """Put it behind; give for how long."""
        span_s = min(limits_names.NAMES_REJECTED_S * 2.0 ** min(self.lies, 8), limits_names.NAMES_REJECTED_S_MAX)
        self.lies += 1
        self.behind_until = max(self.behind_until, now + span_s)
        return span_s

    @property
    def head_start_s(self) -> float:
        if self.pace_s is None:
            return limits_names.NAMES_HEAD_START_S
        usual_s = max(limits_names.NAMES_HEAD_START_S_MIN, 2.0 * self.pace_s)
        return min(usual_s, limits_names.NAMES_HEAD_START_S_MAX)


class _Sifted(NamedTuple):
    """An answer taken apart.

    Attributes:
        good: addresses that nothing speaks against.
        doubtful: those set aside for this name, and private ones of a public name.
    """

    good: tuple[str, ...]
    doubtful: tuple[str, ...]


class Sources:
    """`net.resolve.NameSource` over the system and DNS over HTTPS. Belongs to one event loop.

    Without DNS over HTTPS it is the system alone, and all its answers are taken as they come.

    Args:
        system: the system's resolver.
        doh: DNS over HTTPS; None: there is none.
        network: gives the identity of the network the device is on.
        private_hosts: names that may have private addresses, and all names below them.
        keeps: says of a name that a question about it shall go on where nobody waits for it any more.
        on_line: told, by name, what was decided.
    """

    def __init__(
        self,
        system: NameSource,
        doh: Doh | None,
        *,
        network: Callable[[], str],
        private_hosts: Collection[str] = (),
        keeps: Callable[[str], bool] = lambda host: False,
        on_line: Callable[[str, str], None] = lambda host, line: None,
    ) -> None:
        self._system = system
        self._doh = doh
        self._network = network
        self._private_hosts = frozenset(private_hosts)
        self._keeps = keeps
        self._on_line = on_line
        self._tasks: dict[str, asyncio.Task[Found]] = {}
        self._conduct: collections.OrderedDict[str, _Conduct] = collections.OrderedDict()
        self._rejected: collections.OrderedDict[tuple[str, str, str], float] = collections.OrderedDict()

    # -- `NameSource` -------------------------------------------------------------------------------------------------
    def ask(self, host: str, *, refresh: bool) -> asyncio.Future[Found]:
        """See `NameSource.ask`."""
        host = host.lower()
        if self._doh is None or not is_public(host):
            return self._system.ask(host, refresh=refresh)
        task = self._tasks.get(host)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._find(host, self._doh, refresh), name=f"find {host}")
            self._tasks[host] = task
            task.add_done_callback(lambda _: self._tasks.pop(host, None))
        return task

    def withdraw(self, host: str) -> None:
        """See `NameSource.withdraw`."""
        host = host.lower()
        if self._keeps(host):
            return
        task = self._tasks.get(host)
        if task is not None:
            task.cancel()
        self._system.withdraw(host)

    # -- what is known of answers -------------------------------------------------------------------------------------
    def reject(self, host: str, address: str) -> None:
        """Set an address aside for a name, for a time: it has shown another's certificate."""
        self._rejected[self._network(), host, address] = _now() + limits_names.NAMES_REJECTED_S
        if len(self._rejected) > limits_names.NAMES_REJECTED_MAX:
            self._rejected.popitem(last=False)

    def is_rejected(self, host: str, address: str) -> bool:
        """Say whether it is set aside now."""
        return self._rejected.get((self._network(), host, address), -math.inf) > _now()

    def rejected(self, host: str) -> frozenset[str]:
        """Give the addresses of a name that are set aside now."""
        here, now = (self._network(), host), _now()
        return frozenset(key[2] for key, until in self._rejected.items() if key[:2] == here and until > now)

    def accept(self, host: str, address: str) -> None:
        """Take an address back: it has shown the right certificate."""
        self._rejected.pop((self._network(), host, address), None)

    def network_changed(self) -> None:
        """Judge the resolver anew, and the servers: they are reached by another way."""
        self._conduct.pop(self._network(), None)
        if self._doh is not None:
            self._doh.doubt()

    def close(self) -> None:
        """End what runs."""
        for task in list(self._tasks.values()):
            task.cancel()
        if self._doh is not None:
            self._doh.close()

    # -- a second opinion ---------------------------------------------------------------------------------------------
    def has_other(self, host: str, source: str) -> bool:
        """Say whether somebody else than `source` can be asked for a name."""
        return self._doh is not None and is_public(host) and source != ""

    async def other(self, host: str, given: Found) -> Found | None:
        """Ask somebody else than who gave an answer that did not do, and draw the conclusions.

        Returns:
            The other's answer without what is set aside; None where it says the same, so that the fault is not the
            name's.

        Raises:
            OSError: nobody else has an answer.
        """
        if self._doh is None:
            raise OSError("nobody else can be asked")
        if given.source == SYSTEM:
            found = await self._doh.ask(host, on_note=lambda line: self._on_line(host, line))
        else:
            found = await self._other_than_server(host, self._doh, given.source)
        rejected = self.rejected(host)
        good = tuple(each for each in found.addresses if each not in rejected)
        if good and rejected.intersection(given.addresses):
            if given.source == SYSTEM:
                span_s = self._conduct_here().lied(_now())
                self._on_line(host, f"the system's resolver gave another's address: asked last for {span_s:.0f} s")
            else:
                self._doh.shun(given.source)
                self._on_line(host, f"{given.source} gave another's address: asked last for a while")
        if good:
            return found._replace(addresses=good)
        for address in rejected.intersection(found.addresses):
            self.accept(host, address)
        self._on_line(host, f"{found.source} gives the same: the certificate is the server's own")
        return None

    async def _other_than_server(self, host: str, doh: Doh, source: str) -> Found:
        try:
            return await doh.ask(host, avoid=(source,), on_note=lambda line: self._on_line(host, line))
        except OSError:
            return await asyncio.shield(self._ask_system(host, refresh=False))

    # -- one question -------------------------------------------------------------------------------------------------
    async def _find(self, host: str, doh: Doh, refresh: bool) -> Found:
        """Ask both, one after the other where the first does well, and give the first answer that will do."""
        conduct = self._conduct_here()
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        system_first = began_at >= conduct.behind_until

        def ask_system() -> asyncio.Future[Found]:
            return self._ask_system(host, refresh=refresh and system_first)

        def ask_doh() -> asyncio.Future[Found]:
            task = loop.create_task(doh.ask(host, on_note=lambda line: self._on_line(host, line)), name=f"DoH {host}")
            task.add_done_callback(look)
            return task

        starts = [ask_system, ask_doh] if system_first else [ask_doh, ask_system]
        head_s = conduct.head_start_s if system_first else limits_names.DOH_STAGGER_S
        system: asyncio.Future[Found] | None = None
        pending: set[asyncio.Future[Found]] = set()
        outcome = _Outcome()
        try:
            async with asyncio.timeout(limits_names.NAMES_TIMEOUT_S):
                while starts or pending:
                    if starts and not (pending and loop.time() < began_at + head_s):
                        start = starts.pop(0)
                        pending.add(asked := start())
                        system = asked if start is ask_system else system
                    left_s = max(0.0, began_at + head_s - loop.time()) if starts else None
                    done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                    for asked in done:
                        good = self._weigh(host, asked, outcome, is_system=asked is system, refresh=refresh)
                        if asked is system and good is not None:
                            conduct.answered(loop.time() - began_at)
                        elif good is not None and system_first and conduct.was_overtaken(loop.time()):
                            self._on_line(host, "the system's resolver is slow here: asked last for a while")
                        if good is not None:
                            return good
        except TimeoutError:
            self._on_line(host, f"nobody answered within {limits_names.NAMES_TIMEOUT_S:.3g} s")
        finally:
            for asked in pending:
                if asked is system:
                    self._system.withdraw(host)  # it is shared, and its answer comes anyway
                else:
                    asked.cancel()
        return outcome.settle()

    def _weigh(
        self, host: str, asked: "asyncio.Future[Found]", outcome: "_Outcome", *, is_system: bool, refresh: bool
    ) -> Found | None:
        """Take an answer that is in; give it where it will do."""
        error = None if asked.cancelled() else asked.exception()
        if asked.cancelled() or error is not None:
            if error is not None and not isinstance(error, OSError):
                raise error
            outcome.failed(error, is_system=is_system)
            if is_system and error is not None:
                self._on_line(host, f"the system's resolver failed: {error.strerror or error}")
            return None
        found = asked.result()
        sifted = self.sift(host, found.addresses)
        # What is in doubt goes behind: it is used where nothing else is left.
        ordered = found._replace(addresses=(*sifted.good, *sifted.doubtful))
        if sifted.good:
            return ordered
        self._on_line(host, f"{found.source} gives {', '.join(sifted.doubtful)}, which is doubtful: asking elsewhere")
        if not refresh or not self.rejected(host).issuperset(found.addresses):  # a known lie takes no answer away
            outcome.doubtful = outcome.doubtful or ordered
        return None

    def sift(self, host: str, addresses: Collection[str]) -> _Sifted:
        """Take an answer apart."""
        wrong = self.rejected(host)
        private = [each for each in addresses if is_private(each)]
        if private and (not is_public(host) or self._may_be_private(host)):
            private = []
        good = tuple(each for each in addresses if each not in wrong and each not in private)
        return _Sifted(good, tuple(each for each in addresses if each not in good))

    def _may_be_private(self, host: str) -> bool:
        labels = host.split(".")
        told = any(".".join(labels[at:]) in self._private_hosts for at in range(len(labels)))
        return told or in_hosts_file(host)

    def _ask_system(self, host: str, *, refresh: bool) -> asyncio.Future[Found]:
        try:
            asked = self._system.ask(host, refresh=refresh)
        except OSError as error:
            asked = asyncio.get_running_loop().create_future()
            asked.set_exception(error)
        asked.add_done_callback(look)
        return asked

    def _conduct_here(self) -> _Conduct:
        network = self._network()
        conduct = self._conduct.get(network)
        if conduct is None:
            conduct = self._conduct[network] = _Conduct()
            if len(self._conduct) > limits_names.NAMES_NETWORKS_MAX:
                self._conduct.popitem(last=False)
        return conduct


class _Outcome:
    """What a question brought so far, where nothing will do yet."""

    __slots__ = ("doh_error", "doubtful", "system_error")

    def __init__(self) -> None:
        self.doubtful: Found | None = None
        self.system_error: OSError | None = None
        self.doh_error: OSError | None = None

    def failed(self, error: OSError | None, *, is_system: bool) -> None:
        error = error or OSError("not asked to the end")
        if is_system:
            self.system_error = error
        else:
            self.doh_error = error

    def settle(self) -> Found:
        """Give what is in doubt where there is nothing else.

        Raises:
            NoName: DNS over HTTPS says so, and the system has no address either.
            OSError: nobody has an answer.
        """
        if self.doubtful is not None:
            return self.doubtful
        if isinstance(self.doh_error, NoName):
            raise self.doh_error
        if self.system_error is not None and says_absent(self.system_error):
            # Some systems say so when they are offline. That nobody else can be reached speaks for that.
            raise socket.gaierror(
                socket.EAI_AGAIN, f"the system knows no such name, and nobody else can be asked ({self.doh_error})"
            )
        raise self.system_error or self.doh_error or OSError("nobody was asked")


def is_public(host: str) -> bool:
    """Say whether DNS at large may have the name: others are asked of the system alone."""
    name = host.removesuffix(".").lower()
    return "." in name and not any(name == each or name.endswith(f".{each}") for each in _LOCAL_SUFFIXES)


def is_private(address: str) -> bool:
    """Say whether an address is of no use beyond this machine or its own network."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None)
    ip = ip if mapped is None else mapped
    if ip.is_loopback or ip.is_unspecified or ip.is_link_local or ip.is_multicast:
        return True
    return any(ip in each for each in _OWN if each.version == ip.version)


_OWN: Final = tuple(
    ipaddress.ip_network(each) for each in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
)
"""RFC 1918, RFC 4193. Not what `is_private` of the library says: it counts documentation and test networks in."""


def look(asked: "asyncio.Future[Any]") -> None:
    """Look at what became of something that nobody may wait for."""
    if not asked.cancelled():
        asked.exception()  # else asyncio would report that nobody looked


def _now() -> float:
    return asyncio.get_running_loop().time()
