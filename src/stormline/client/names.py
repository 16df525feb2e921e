"""How a client finds the addresses of a name, and what it does when they turn out wrong.

In this order: what the app has pinned; what is remembered, in memory and from disk; the system's resolver and DNS over
HTTPS (`name_sources`); and at the end what is in reserve: addresses that have shown the name's certificate before, and
those the app has given as backup. Who lies about a name is found out by TLS. See docs/explanation/names.md.
"""

import asyncio
import collections
import contextlib
import functools
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Final

from stormline.client.name_sources import Doh, Sources, is_private, look
from stormline.core import limits, limits_names
from stormline.core.values import Address
from stormline.net.resolve import Found, NameSource, NoName, Resolver, says_absent
from stormline.outbound.dial import quiet

if TYPE_CHECKING:
    from stormline.client.config import Config
    from stormline.client.names_file import NamesFile, StoredName

_LINES_MAX: Final = 8
"""Lines kept of one name for whoever dials it next."""
_LINES_NAMES_MAX: Final = 64
"""Names of which such lines are kept."""


class NameService:
    """Addresses of names, for all connections of one client. Belongs to one event loop.

    Nobody waits for DNS for a name whose addresses have shown the right certificate before: they are given at once, and
    renewed behind. Whoever dials tells what became of them (`proved`, `impostor`) and may ask for others (`more`).

    Args:
        config: pinned hosts, backup addresses, names that may be private.
        system: the system's resolver.
        doh: DNS over HTTPS; None: there is none.
        network: gives the identity of the network the device is on.
        wall_s: the wall clock, for what goes to disk and comes from there; nothing else here looks at it.
        file: where names are kept between starts; None: nowhere.
    """

    def __init__(
        self,
        config: "Config",
        system: NameSource,
        *,
        wall_s: Callable[[], float],
        doh: Doh | None = None,
        network: Callable[[], str] = lambda: "",
        file: "NamesFile | None" = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._pinned = {name.lower(): tuple(given) for name, given in config.pinned.items()}
        self._backup = {name.lower(): tuple(given) for name, given in config.backup_addresses.items()}
        self._network = network
        self._wall_s = wall_s
        self._file = file
        self._doh = doh
        self._sources = Sources(
            system,
            doh,
            network=network,
            private_hosts=config.private_hosts,
            keeps=lambda host: bool(self._reserve(host)),
            on_line=self._tell,
        )
        self._memory = Resolver(self._sources, sure=self._is_sure, on_change=self._changed)
        self._proven: collections.OrderedDict[str, dict[str, float]] = collections.OrderedDict()
        self._networks: dict[str, str] = {}  # where each remembered answer was learned
        self._absent_since: dict[str, float] = {}  # names that the system says do not exist
        self._opinions: dict[str, tuple[asyncio.Task[Found | None], float]] = {}
        self._lines: collections.OrderedDict[str, list[str]] = collections.OrderedDict()
        self._write_timer: asyncio.TimerHandle | None = None
        self._dirty = False
        self._closed = False
        if file is not None:
            self._load(file)

    # -- addresses ----------------------------------------------------------------------------------------------------
    async def resolve(self, host: str, port: int) -> tuple[Address, ...]:
        """Give the addresses of a name; see `find`."""
        return await self.find(host, port)

    async def find(self, host: str, port: int, *, on_note: Callable[[str], None] = quiet) -> tuple[Address, ...]:
        """Give the addresses of `host` with `port`, the best first, each once; an IP literal gives itself.

        Cancellation is safe at any moment.

        Args:
            host: a name or an IP literal.
            port: goes into the addresses.
            on_note: told in words where they come from.

        Raises:
            socket.gaierror: the name has no address, or the resolvers failed, and nothing usable is known.
            OSError: the same for too many lookups, or a service that was closed.
            TimeoutError: nothing is known and no answer came in time.
        """
        if Address(host, port).is_ip:
            return (Address(host, port),)
        key = host.lower()
        pinned = self._pinned.get(key)
        if pinned is not None:
            on_note(f"{host} is pinned to {', '.join(pinned)}")
            return tuple(Address(each, port) for each in pinned)
        timeout_s = limits_names.NAMES_PATIENCE_S if self._reserve(key) else limits.RESOLVE_TIMEOUT_S
        began_at = self._loop.time()
        before = self._memory.remembered(key)
        try:
            found = await self._memory.resolve(host, port, timeout_s=timeout_s)
        except OSError as error:
            reserve = self._after_failure(key, error)
            self._flush(key, on_note)
            if not reserve:
                raise
            on_note(f"{host}: no answer ({error.strerror or error}): addresses in reserve")
            return tuple(Address(each, port) for each in reserve)
        self._absent_since.pop(key, None)
        self._flush(key, on_note)
        on_note(self._story(key, waited_s=self._loop.time() - began_at, known=before is not None))
        return found

    def remembered(self, host: str) -> tuple[str, ...]:
        """Give the addresses that a name is pinned to or had when it was last asked for; empty for none."""
        known = self._memory.remembered(host)
        return self._pinned.get(host.lower(), () if known is None else known.found.addresses)

    async def by_doh(self, host: str, port: int) -> tuple[Address, ...]:
        """Ask DNS over HTTPS alone, past what is remembered and what the system says; of a platform's own names.

        Raises:
            OSError: it has no answer, or there is none to be asked.
        """
        if self._doh is None:
            raise OSError(f"{host}: there is no DNS over HTTPS")
        found = await self._doh.ask(host)
        return tuple(Address(each, port) for each in found.addresses)

    async def prefetch(self, hosts: Iterable[str]) -> dict[str, bool]:
        """Find names before they are needed, all at once; gives which have an address."""
        wanted = list(dict.fromkeys(hosts))[: limits.RESOLVE_WAITING_MAX]

        async def has(host: str) -> bool:
            with contextlib.suppress(OSError):
                return bool(await self.find(host, 443))
            return False

        return dict(zip(wanted, await asyncio.gather(*map(has, wanted)), strict=True))

    def doubt(self, host: str) -> None:
        """Take note that no address of the last answer worked: it is asked for again, and waited for a little where no
        address of it has ever been proven."""
        self._memory.doubt(host)

    # -- what a dial tells, and what it asks for in need --------------------------------------------------------------
    def proved(self, host: str, address: Address) -> None:
        """Take note that an address has shown the certificate of `host`."""
        key = host.lower()
        if key in self._pinned:
            return
        shown = self._proven.setdefault(key, {})
        before = shown.pop(address.host, None)
        shown[address.host] = self._loop.time()
        while len(shown) > limits_names.NAMES_PROVEN_MAX:
            del shown[next(iter(shown))]
        self._proven.move_to_end(key)
        if len(self._proven) > limits.RESOLVE_NAMES_REMEMBERED:
            self._proven.popitem(last=False)
        self._sources.accept(key, address.host)
        if before is None or self._loop.time() - before > limits.RESOLVE_OLD_S:
            self._changed(key)

    def impostor(self, host: str, address: Address) -> None:
        """Take note that an address has shown a certificate that is not that of `host`, or of nobody we trust."""
        key = host.lower()
        if key in self._pinned:
            return
        self._sources.reject(key, address.host)
        self._proven.get(key, {}).pop(address.host, None)
        opinion = self._opinions.get(key)
        if opinion is not None and opinion[0].done():
            del self._opinions[key]  # it was formed before this was known
        self._memory.doubt(key)

    async def more(
        self, host: str, port: int, seen: Collection[Address], *, tls: bool, on_note: Callable[[str], None] = quiet
    ) -> tuple[Address, ...]:
        """Give addresses that a dial in need has not tried: a second opinion's, then those in reserve.

        A second opinion is asked for where an address has shown a wrong certificate, or none of the name's has ever
        shown the right one. Cancellation is safe at any moment; the opinion goes on to be formed.

        Args:
            host: the name.
            port: goes into the addresses.
            seen: what the dial has tried or is trying.
            tls: it checks a certificate: only then are addresses in reserve that one has proven.
            on_note: told in words.

        Returns:
            Addresses that are not in `seen`; none where there are no others.
        """
        key = host.lower()
        tried = {each.host for each in seen}
        reserve = [each for each in self._reserve(key, tls=tls) if each not in tried]
        fresh: tuple[str, ...] = ()
        opinion = None if key in self._pinned else self._opinion(key, on_note)
        if opinion is not None:
            await asyncio.wait((opinion,), timeout=limits_names.NAMES_PATIENCE_S if reserve else None)
            if opinion.done() and not opinion.cancelled() and opinion.exception() is None:
                found = opinion.result()
                fresh = () if found is None else tuple(each for each in found.addresses if each not in tried)
                if found is not None and fresh:
                    on_note(f"{found.source} gives {', '.join(fresh)}")
        self._flush(key, on_note)
        if not fresh and reserve:
            on_note(f"in reserve: {', '.join(reserve)}")
        return tuple(Address(each, port) for each in fresh or reserve)

    def _opinion(self, key: str, on_note: Callable[[str], None]) -> "asyncio.Task[Found | None] | None":
        """Give the second opinion on a name, formed now or a moment ago; None where there is no reason for one."""
        now = self._loop.time()
        running = self._opinions.get(key)
        if running is not None and (not running[0].done() or now - running[1] < limits_names.NAMES_OPINION_S):
            return running[0]
        remembered = self._memory.remembered(key)
        if remembered is None or not self._sources.has_other(key, remembered.found.source):
            return None
        if self._is_sure(key) and not self._sources.rejected(key):
            return None
        on_note(f"asking another than {remembered.found.source} for {key}")
        task = self._loop.create_task(self._form_opinion(key, remembered.found), name=f"second opinion on {key}")
        task.add_done_callback(look)
        self._opinions[key] = (task, now)
        if len(self._opinions) > limits.RESOLVE_WAITING_MAX:
            stale = next(iter(self._opinions))
            self._opinions.pop(stale)[0].cancel()
        return task

    async def _form_opinion(self, key: str, given: Found) -> Found | None:
        try:
            found = await self._sources.other(key, given)
        except OSError as error:
            self._tell(key, f"no second opinion: {error.strerror or error}")
            raise
        if found is not None:
            self._memory.learn(key, found)
        return found

    # -- what is in reserve -------------------------------------------------------------------------------------------
    def _reserve(self, key: str, *, tls: bool = True) -> tuple[str, ...]:
        """Give the addresses to fall back on: those proven, the last one first, then the app's own."""
        since = self._loop.time() - limits_names.NAMES_PROVEN_S
        shown = self._proven.get(key, {}) if tls else {}
        proven = [each for each, at in reversed(shown.items()) if at > since]
        known = dict.fromkeys((*proven, *self._backup.get(key, ())))
        return tuple(each for each in known if not self._sources.is_rejected(key, each))

    def _after_failure(self, key: str, error: OSError) -> tuple[str, ...]:
        """Give what may be used where nobody has an answer."""
        backup = self._backup.get(key, ())
        if isinstance(error, NoName):  # DNS over HTTPS has said so
            self._proven.pop(key, None)
            return backup
        if says_absent(error):
            now = self._loop.time()
            if len(self._absent_since) >= limits.RESOLVE_NAMES_REMEMBERED:
                self._absent_since.clear()
            if now - self._absent_since.setdefault(key, now) >= limits_names.NAMES_ABSENT_DOUBT_S:
                return backup
        return self._reserve(key)

    def _is_sure(self, key: str) -> bool:
        """Say whether an address of the last answer has been proven."""
        remembered = self._memory.remembered(key)
        shown = self._proven.get(key)
        return bool(remembered and shown and not shown.keys().isdisjoint(remembered.found.addresses))

    # -- the story ----------------------------------------------------------------------------------------------------
    def _tell(self, key: str, line: str) -> None:
        """Keep a line on what was decided for a name, for whoever dials it next."""
        lines = self._lines.setdefault(key, [])
        lines.append(line)
        del lines[:-_LINES_MAX]
        self._lines.move_to_end(key)
        if len(self._lines) > _LINES_NAMES_MAX:
            self._lines.popitem(last=False)

    def _flush(self, key: str, on_note: Callable[[str], None]) -> None:
        for line in self._lines.pop(key, ()):
            on_note(line)

    def _story(self, key: str, *, waited_s: float, known: bool) -> str:
        remembered = self._memory.remembered(key)
        if remembered is None:
            return f"{key}: found"
        found, age_s = remembered.found, remembered.age_s
        what = f"{key}: {len(found.addresses)} addresses from {found.source}"
        if not known or age_s < waited_s:
            return f"{what} in {waited_s * 1000:.0f} ms"
        stale = ", stale" if found.ttl_s is not None and age_s >= found.ttl_s else ""
        return f"{what}, remembered for {age_s:.0f} s{stale}{', proven' if self._is_sure(key) else ''}"

    # -- networks -----------------------------------------------------------------------------------------------------
    def network_changed(self) -> None:
        """Take note that the device is on another network now, or on the same one again.

        Answers are renewed behind, private addresses are forgotten: they mean another machine here.
        """
        self._sources.network_changed()
        for each in self._memory.memory():
            if any(map(is_private, each.found.addresses)) and self._networks.get(each.host) != self._network():
                self._memory.forget(each.host)
        for shown in self._proven.values():
            for address in [each for each in shown if is_private(each)]:
                del shown[address]
        self._memory.doubt_all()

    # -- between starts -----------------------------------------------------------------------------------------------
    def _load(self, file: "NamesFile") -> None:
        """Take what was kept. Ages are reckoned by the wall clock; one that was set back makes nothing younger."""
        wall, now = self._wall_s(), self._loop.time()
        for name in file.load():
            elsewhere = name.network != self._network()
            age_s = wall - name.answered_at
            if age_s < 0.0:
                age_s = limits.RESOLVE_FRESH_S
            private = elsewhere and any(map(is_private, name.addresses))
            if name.addresses and age_s < limits.RESOLVE_STALE_S and not private:
                # Learned elsewhere or not: it is asked for again behind the first who uses it.
                age_s = max(age_s, limits.RESOLVE_FRESH_S)
                self._memory.learn(name.host, Found(name.addresses, 0.0, name.source), age_s=age_s)
                self._networks[name.host] = name.network
            shown = {
                address: now - max(0.0, wall - at)
                for address, at in name.proven
                if not (elsewhere and is_private(address))
            }
            if shown:
                self._proven[name.host] = shown
        self._dirty = False
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _changed(self, key: str) -> None:
        remembered = self._memory.remembered(key)
        if remembered is not None and remembered.age_s < limits.RESOLVE_FAILED_S:
            self._networks[key] = self._network()
        if self._file is None or self._closed:
            return
        self._dirty = True
        self._plan_write()

    def _plan_write(self) -> None:
        if self._write_timer is None:
            self._write_timer = self._loop.call_later(limits_names.NAMES_WRITE_PAUSE_S, self._write)

    def _write(self) -> None:
        self._write_timer = None
        if self._file is None or not self._dirty:
            return
        if self._file.busy:
            self._plan_write()
        else:
            self._dirty = not self._file.save_behind(self._stored())

    def _stored(self) -> "list[StoredName]":
        from stormline.client.names_file import StoredName

        wall, now = self._wall_s(), self._loop.time()
        remembered = {each.host: each for each in self._memory.memory()}
        self._networks = {host: at for host, at in self._networks.items() if host in remembered}
        stored = []
        for host in (*(each for each in self._proven if each not in remembered), *remembered):
            each = remembered.get(host)
            shown = self._proven.get(host, {})
            stored.append(
                StoredName(
                    host=host,
                    addresses=() if each is None else each.found.addresses,
                    answered_at=0.0 if each is None else round(wall - each.age_s, 3),
                    source="" if each is None else each.found.source,
                    network=self._networks.get(host, ""),
                    proven=tuple((address, round(wall - (now - at), 3)) for address, at in shown.items()),
                )
            )
        return stored[-limits_names.NAMES_STORED_MAX :]

    # -- life ---------------------------------------------------------------------------------------------------------
    async def aclose(self) -> None:
        """Write down what is new, and end."""
        if self._file is not None and self._dirty and not self._closed:
            self._dirty = False
            done = asyncio.Event()
            if self._file.save_behind(self._stored(), functools.partial(_wake, self._loop, done)):
                await done.wait()
        self.close()

    def close(self) -> None:
        """End what waits; what is new and not yet written is lost. Works also when the loop is closed already."""
        self._closed = True
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        with contextlib.suppress(RuntimeError):  # a closed loop cannot wake who waits
            for task, _ in self._opinions.values():
                task.cancel()
            self._sources.close()
            self._memory.close()


def _wake(loop: asyncio.AbstractEventLoop, done: asyncio.Event) -> None:
    """Set an event from another thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
        loop.call_soon_threadsafe(done.set)
