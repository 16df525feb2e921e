"""One diagnosis: everything that may be wrong is looked at, side by side, within `limits_diagnosis.DIAGNOSIS_S`.

Its sockets are its own: it uses no connection of the client's, and remembers nothing. What the checks find is judged by
`policy.diagnosis`. Cancelled, it leaves nothing behind.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from stormline.client import clearpages, namings
from stormline.client.clearpages import ClearPage
from stormline.client.findings import Findings, Open, reason_in_words
from stormline.client.reaching import Origin, Reaching, reason_of_tcp, reason_of_tls, skew_of
from stormline.client.surroundings import Around, ask_check_page, ask_gateway, look_around
from stormline.core import errors
from stormline.core import limits_diagnosis as limits
from stormline.core.checks import CheckName, CheckState
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net import quicping, tracing
from stormline.net.stream import Stream
from stormline.net.tls import start_tls
from stormline.outbound.held import Unfollowed
from stormline.outbound.messages import HttpRequest, field_value
from stormline.outbound.pool import HttpPool
from stormline.outbound.proxy import forwarded
from stormline.outbound.proxy_rules import Proxy
from stormline.policy import diagnosis as policy
from stormline.policy import natlife
from stormline.telemetry.diagnosis import Diagnosis, NatProgress
from stormline.wire import messages
from stormline.wire.plan import Carrier, Endpoint

_log = logging.getLogger("stormline.client")
_ALT_H3: Final = re.compile(r'h3="(?P<host>[^":]*):(?P<port>[0-9]{1,5})"')


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What is wanted of a diagnosis.

    Attributes:
        trace: ask the routers on the way, and for the size of packets.
        nat: find out how long the way back stays open.
        nat_limit_s: the longest silence that is tried for it.
        nat_told: told how far that is; None: nobody wants to know.
        plain: a page in clear HTTP to look at; None: the origin's own, where it may have one.
        automatic: nobody waits for it: it sends less.
    """

    trace: bool = True
    nat: bool = False
    nat_limit_s: float = limits.DIAGNOSIS_NAT_LIMIT_S
    nat_told: Callable[[NatProgress], None] | None = None
    plain: ClearPage | None = None
    automatic: bool = False


async def diagnose(origin: Origin | None, around: Around, wishes: Wishes) -> Diagnosis:
    """Look at everything, and say what it means. Safe to cancel.

    Args:
        origin: what is asked about; None: the network alone.
        around: the client's own.
        wishes: what is wanted.
    """
    loop = asyncio.get_running_loop()
    began, started_at = loop.time(), around.clock.wall()
    run = _Run(origin, around, wishes)
    try:
        async with asyncio.timeout(limits.DIAGNOSIS_S) as timeout:
            await run.all()
    except TimeoutError:
        if not timeout.expired():
            raise
    finally:
        await run.end()
    checks = run.conclude()
    if wishes.nat:
        checks = await run.nat()
    said = policy.conclude(checks)
    shown = ""
    if origin is not None:
        shown = f"{origin.scheme}://{origin.field}{origin.target.partition('?')[0]}"
    return Diagnosis(
        url=shown,
        host="" if origin is None else origin.host,
        network=around.info.kind,
        automatic=wishes.automatic,
        started_at=started_at,
        took_s=round(loop.time() - began, 3),
        verdict=said.cause,
        confidence=said.confidence,
        hint=said.hint,
        why=said.why,
        checks=checks,
    )


class _Timed(Unfollowed):
    """Notes when a request had left."""

    __slots__ = ("_time", "sent_at")

    def __init__(self, time: Callable[[], float]) -> None:
        super().__init__()
        self._time = time
        self.sent_at = time()

    def stage(self, stage: Phase) -> None:
        """See `Follower.stage`."""
        super().stage(stage)
        if stage in (Phase.SEND, Phase.FIRST_BYTE):
            self.sent_at = self._time()


@dataclass(slots=True)
class _Stall:
    """What became of asking in small pieces beside a silence."""

    address: Address
    began: float
    took_s: float | None = None


@dataclass(slots=True)
class _Heard:
    """How an answer came."""

    at: float
    bytes: int = 0
    status: int = 0
    first_byte_s: float | None = None
    alt: set[int] = field(default_factory=set)


class _Run:
    """The checks of one diagnosis, while it lasts."""

    def __init__(self, origin: Origin | None, around: Around, wishes: Wishes) -> None:
        self._origin = origin
        self._around = around
        self._wishes = wishes
        self._loop = asyncio.get_running_loop()
        self._findings = Findings()
        self._tasks: set[asyncio.Task[None]] = set()
        self._places: dict[Address, list[str]] = {}
        self._producing = 0
        self._usable: asyncio.Future[Address | None] = self._loop.create_future()
        self._placed = asyncio.Event()  # an address is known, or there will be none
        self._proxy: Proxy | None = None
        self._reaching: Reaching | None = None
        self._stall: _Stall | None = None
        self._heard: _Heard | None = None
        self._quiet_s = 0.0  # how long an answer was silent in the end
        self._path_mtu: int | None = None
        self._mtu_why = "not asked for"
        self._skews: dict[str, float] = {}
        self._quic: list[tuple[Open, quicping.QuicPing]] = []
        self._planned_quic: set[int] = set()

    # -- the frame ----------------------------------------------------------------------------------------------------
    async def all(self) -> None:
        """Look at everything."""
        look_around(self._around, self._findings)
        self._spawn(ask_gateway(self._around, self._findings))
        self._spawn(ask_check_page(self._around, self._findings))
        if self._origin is None:
            self._spawn(namings.ask_servers_alone(self._around, self._findings))
        else:
            self._begin(self._origin)
        while self._tasks:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            self._tasks = {task for task in self._tasks if not task.done()}

    def _spawn(self, work: Coroutine[Any, Any, None], *, produces: bool = False) -> None:
        """Do something beside the rest; `produces`: it may bring an address that can be used."""

        async def run() -> None:
            try:
                await work
            except Exception:
                _log.exception("a part of a diagnosis failed")
            finally:
                if produces:
                    self._producing -= 1
                    self._produced()

        self._producing += produces
        self._tasks.add(self._loop.create_task(run(), name="diagnosis"))

    def _produced(self) -> None:
        """Tell who waits for an address where none can come any more."""
        if self._producing:
            return
        self._placed.set()
        if not self._usable.done():
            self._usable.set_result(None)

    async def end(self) -> None:
        """Stop what is still under way."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if not self._usable.done():
            self._usable.set_result(None)

    # -- addresses ----------------------------------------------------------------------------------------------------
    def _begin(self, origin: Origin) -> None:
        """Begin with what concerns the origin."""
        self._proxy = self._around.proxies.proxy_for(origin.scheme, origin.host, origin.port)
        self._reaching = Reaching(
            origin,
            context=self._around.context,
            h1_context=self._around.h1_context,
            open_tcp=self._around.open_tcp,
            findings=self._findings,
            clock=self._around.clock,
            rng=self._around.rng,
            stalls=self._stalls,
        )
        self._producing += 1  # until all have begun
        if self._proxy is None:
            self._findings.skip(CheckName.PROXY, "requests go by none")
        else:
            self._spawn(self._ask_proxy(self._proxy))
        if Address(origin.host, origin.port).is_ip:
            for name in (CheckName.DNS_SYSTEM, CheckName.DNS_DOH, CheckName.DNS_DISPATCH):
                self._findings.skip(name, "the host is an address")
            self._found("literal", (origin.host,), origin.port)
        else:
            self._spawn(namings.ask_system(origin, self._around, self._findings, self._found), produces=True)
            self._spawn(namings.ask_doh(origin, self._around, self._findings, self._found), produces=True)
            self._spawn(self._ask_dispatch(origin), produces=True)
            self._found("remembered", self._around.remembered, origin.port)
        self._spawn(self._http_and_more(origin))
        self._spawn(self._clear(origin))
        self._producing -= 1
        self._produced()

    async def _ask_dispatch(self, origin: Origin) -> None:
        endpoints = await namings.ask_dispatch(origin, self._around, self._findings, self._found)
        self._planned_quic |= {each.port for each in endpoints if each.carrier in namings.QUIC_CARRIERS}
        gateways = [each for each in endpoints if not namings.is_direct(each, origin.host)]
        for each in gateways[: limits.DIAGNOSIS_GATEWAYS_MAX]:
            self._spawn(self._knock(each))

    async def _knock(self, gateway: Endpoint) -> None:
        """Connect to an endpoint of the plan that is not the origin's own, and see that it is one of the platform's."""
        address, carrier = Address(gateway.host, gateway.port), gateway.carrier
        if not address.is_ip or carrier in namings.QUIC_CARRIERS:
            return
        check = self._findings.begin(
            CheckName.TCP, address=address.host, port=address.port, family=6 if ":" in address.host else 4,
            role="gateway", carrier=carrier,
        )  # fmt: skip
        began = self._loop.time()
        try:
            async with asyncio.timeout(limits.DIAGNOSIS_TCP_S):
                raw = await self._around.open_tcp(address)
        except OSError as error:
            check.end(CheckState.BAD, reason_in_words(error), reason=reason_of_tcp(error))
            return
        check.data["rtt_s"] = round(self._loop.time() - began, 4)
        context = self._around.roles_context((messages.ALPN,) if carrier == Carrier.LONG_TLS else ("http/1.1",))
        try:
            async with asyncio.timeout(limits.DIAGNOSIS_TLS_S):
                (await start_tls(raw, context, gateway.server_name or gateway.host)).close()
        except (OSError, ValueError) as error:
            check.end(CheckState.BAD, reason_in_words(error), reason=reason_of_tls(error))
        else:
            check.end(CheckState.OK, f"a gateway, by {carrier}")
        finally:
            raw.close()

    def _found(self, source: str, hosts: Sequence[str], port: int) -> None:
        """Take addresses, and reach those that are new."""
        origin, reaching = self._origin, self._reaching
        if origin is None or reaching is None:
            return
        automatic = self._wishes.automatic
        most = limits.DIAGNOSIS_AUTOMATIC_ADDRESSES_MAX if automatic else limits.DIAGNOSIS_ADDRESSES_MAX
        for host in hosts[: limits.DIAGNOSIS_SOURCE_ADDRESSES_MAX]:
            address = Address(host, port)
            if not address.is_ip:
                continue
            if address in self._places:
                self._places[address].append(source)
                continue
            alike = sum((":" in each.host) == (":" in host) for each in self._places)
            if self._proxy is not None or alike >= most // 2:
                continue
            self._places[address] = sources = [source]
            self._placed.set()
            self._spawn(self._reach(reaching, address, sources), produces=True)

    async def _reach(self, reaching: Reaching, address: Address, sources: list[str]) -> None:
        if await reaching.reach(address, sources) and not self._usable.done():
            self._usable.set_result(address)

    async def _ask_proxy(self, proxy: Proxy) -> None:
        check = self._findings.begin(CheckName.PROXY, proxy=str(proxy))
        began = self._loop.time()
        try:
            address = (await self._around.resolve(*proxy.address))[0]
            async with asyncio.timeout(limits.DIAGNOSIS_TCP_S):
                stream = await self._around.open_tcp(address)
        except (OSError, IndexError) as error:
            check.end(CheckState.BAD, f"{proxy}: {reason_in_words(error)}")
            return
        stream.close()
        check.end(CheckState.OK, f"{proxy} takes connections", rtt_s=round(self._loop.time() - began, 4))

    # -- HTTP ---------------------------------------------------------------------------------------------------------
    async def _http_and_more(self, origin: Origin) -> None:
        """Ask for the page; then, so that they do not make it slow, for QUIC and the way."""
        address = None if self._proxy is not None else await self._usable
        if address is None and self._proxy is None:
            self._findings.skip(CheckName.HTTP, "no address could be reached")
        else:
            await self._http(origin, address)
        if self._proxy is None:
            self._spawn(self._trace(origin))
            self._ask_quic(origin)

    async def _http(self, origin: Origin, address: Address | None) -> None:
        check = self._findings.begin(CheckName.HTTP)
        if address is not None:
            check.data["address"] = address.host
        pool = HttpPool(self._around.connector() if address is None else self._around.to_given(), self._around.clock)
        self._heard = heard = _Heard(self._loop.time())
        stalled = self._loop.call_later(limits.DIAGNOSIS_STALL_S, self._answer_stalls, address)
        try:
            async with asyncio.timeout(limits.DIAGNOSIS_HTTP_S):
                await self._exchange(pool, origin, address, heard, check)
        except (errors.TransportError, errors.LocalProtocolError, OSError) as error:
            self._quiet_s = self._loop.time() - heard.at
            check.end(CheckState.BAD, reason_in_words(error))
        finally:
            stalled.cancel()
            pool.close()

    async def _exchange(
        self, pool: HttpPool, origin: Origin, address: Address | None, heard: _Heard, check: Open
    ) -> None:
        request = HttpRequest(
            "GET", origin.scheme, origin.host, origin.port, origin.target.encode("ascii"),
            ((b"host", origin.field.encode("ascii")), (b"user-agent", b"stormline-diagnose"), (b"accept", b"*/*"),
             (b"cache-control", b"no-cache")), None,
        )  # fmt: skip
        if address is None:
            request = forwarded(request, self._around.proxies)
        follower = _Timed(self._loop.time)
        response = await pool.request(
            request,
            deadline_s=limits.DIAGNOSIS_HTTP_S,
            addresses=None if address is None else (address,),
            follower=follower,
        )
        heard.at = self._loop.time()
        heard.status = response.status
        heard.first_byte_s = heard.at - follower.sent_at
        headers = tuple(response.headers)
        date = (field_value(headers, b"date") or b"").decode("latin-1")
        self._dated(origin.host, date, heard.first_byte_s)
        alt = (field_value(headers, b"alt-svc") or b"").decode("latin-1")
        heard.alt = {int(each["port"]) for each in _ALT_H3.finditer(alt) if 0 < int(each["port"]) < 65536}
        check.data.update(
            status=response.status,
            http_version=response.http_version,
            first_byte_s=round(heard.first_byte_s, 4),
            server_date=date[: limits.DIAGNOSIS_TEXT_CHARS_MAX],
            alt_svc=sorted(heard.alt),
        )
        most = limits.DIAGNOSIS_AUTOMATIC_BODY_BYTES_MAX if self._wishes.automatic else limits.DIAGNOSIS_BODY_BYTES_MAX
        async for piece in response.aiter_raw():
            heard.at = self._loop.time()
            heard.bytes += len(piece)
            if heard.bytes >= most:
                break
        await response.aclose()
        check.data["body_bytes"] = heard.bytes
        bad = response.status >= 500 or response.status == 407
        check.end(
            CheckState.BAD if bad else CheckState.OK,
            f"status {response.status}, first byte after {1000 * heard.first_byte_s:.0f} ms",
        )

    def _ask_quic(self, origin: Origin) -> None:
        """Ask for QUIC at one address of each family that TCP reaches, where the origin may speak it."""
        reaching = self._reaching
        if reaching is None or origin.scheme != "https":
            return
        ports = (self._heard.alt if self._heard is not None else set()) | self._planned_quic
        if not self._wishes.automatic:
            ports = ports or {origin.port}
        for six in (False, True):
            reached = next((each for each in reaching.rtt_s if (":" in each.host) is six), None)
            for port in sorted(ports)[: limits.DIAGNOSIS_QUIC_PORTS_MAX]:
                if reached is not None:
                    self._spawn(self._ping_quic(Address(reached.host, port), reaching.rtt_s[reached]))

    async def _ping_quic(self, address: Address, rtt_s: float) -> None:
        check = self._findings.begin(
            CheckName.QUIC, address=address.host, port=address.port, family=6 if ":" in address.host else 4
        )
        self._quic.append((check, await quicping.ping(address, self._around.rng, rtt_s)))

    async def _clear(self, origin: Origin) -> None:
        page = self._wishes.plain
        if page is None and origin.scheme == "http":
            page = ClearPage(origin, secure=origin._replace(scheme="https", port=443))
        elif page is None and origin.port == 443 and not self._wishes.automatic:
            page = ClearPage(Origin("http", origin.host, 80, "/"))
        if page is None or self._proxy is not None:
            self._findings.skip(CheckName.CLEAR_HTTP, "no page in clear HTTP is known")
            return
        if page.origin.host == origin.host:
            await self._placed.wait()
            if not self._places:
                self._findings.skip(CheckName.CLEAR_HTTP, "the host has no address")
                return
        check = self._findings.begin(CheckName.CLEAR_HTTP, host=page.origin.host, port=page.origin.port)

        async def dial(what: Origin) -> Stream:
            known = tuple(each._replace(port=what.port) for each in self._places) if what.host == origin.host else ()
            return await self._around.to_given(self._around.h1_context()).dial(
                what.host,
                what.port,
                tls=what.scheme == "https",
                timeout_s=limits.DIAGNOSIS_TCP_S,
                addresses=known or await self._around.resolve(what.host, what.port),
            )

        await clearpages.look(check, page, dial, lambda date, took_s: self._dated(page.origin.host, date, took_s))

    def _dated(self, host: str, date: str, took_s: float) -> None:
        skew_s = skew_of(date, took_s, self._around.clock)
        if skew_s is not None:
            self._skews.setdefault(host, skew_s)

    # -- silence ------------------------------------------------------------------------------------------------------
    def _stalls(self, address: Address) -> None:
        """A handshake is silent: find out whether small packets pass."""
        if self._stall is None:
            self._stall = _Stall(address, self._loop.time())
            self._spawn(self._ask_small(self._stall))

    def _answer_stalls(self, address: Address | None) -> None:
        if address is not None and self._heard is not None:
            self._stalls(address)

    async def _ask_small(self, stall: _Stall) -> None:
        if self._reaching is not None:
            stall.took_s = await self._reaching.in_small_pieces(stall.address)

    # -- the way ------------------------------------------------------------------------------------------------------
    async def _trace(self, origin: Origin) -> None:
        """Find the routers on the way to the first address, and what size of packets they pass on."""
        address = next(iter(self._places), None)
        if address is None or not self._wishes.trace:
            why = "there is no address to trace" if self._wishes.trace else "not asked for"
            self._findings.skip(CheckName.TRACE, why)
            return
        self._spawn(self._measure_path(address))
        check = self._findings.begin(CheckName.TRACE, address=address.host)
        try:
            hops = await tracing.trace(address)
        except OSError as error:
            check.end(CheckState.SKIPPED, reason_in_words(error))
            return
        reached = bool(hops) and hops[-1].end
        told = [
            {"ttl": each.ttl, "address": each.host, "rtt_s": None if each.rtt_s is None else round(each.rtt_s, 3)}
            for each in hops
        ]
        words = f"{len(hops)} hop{'s' if len(hops) != 1 else ''}" + ("" if reached else ", then nothing answers")
        check.end(CheckState.OK if reached else CheckState.UNKNOWN, words, hops=told, reached=reached)

    async def _measure_path(self, address: Address) -> None:
        try:
            self._path_mtu = await tracing.path_mtu(address)
        except OSError as error:
            self._mtu_why = reason_in_words(error)

    # -- silence that is kept -----------------------------------------------------------------------------------------
    async def nat(self) -> list[Any]:
        """Find out how long the network keeps a silent connection, after all else; give all checks."""
        known = self._around.heartbeat()
        learned: dict[str, Any] | None = None
        words = ""
        if known is not None:
            good_s, bad_s = known.good_ms / 1000.0, known.bad_ms / 1000.0 or None
            learned = {"answered_s": good_s, "lost_s": bad_s, "settled": known.settled}
            lost = "" if bad_s is None else f" and lost after {bad_s:.0f} s"
            words = f"the long connection here was answered after {good_s:.0f} s of silence{lost}"
        origin, address = self._origin, self._usable.result() if self._usable.done() else None
        if origin is None or address is None:
            why = "no origin was reached that could be left in silence" if self._proxy is None else "a proxy is between"
            state = CheckState.SKIPPED if known is None else CheckState.OK
            self._findings.add(CheckName.NAT, state, words or why, learned=learned)
            return self._findings.finish()
        check = self._findings.begin(CheckName.NAT, address=address.host, port=address.port, learned=learned)
        from stormline.client.natlife import Measuring  # few ask for it

        limit_s = self._wishes.nat_limit_s
        measuring = Measuring(origin, address, self._around, limit_s=limit_s, told=self._wishes.nat_told)
        await measuring.run()
        found = natlife.judge(measuring.tried)
        said = natlife.in_words(found, limit_s)
        keep_s = found.keep_alive_s
        check.end(
            CheckState.OK if said else CheckState.UNKNOWN,
            "; ".join(filter(None, (said or "no connection could be left in silence", words))),
            limit_s=limit_s, answered_s=found.answered_s, lost_s=found.lost_s, closed_s=found.closed_s,
            reset=found.reset, sure=found.sure, by_chance=found.by_chance,
            keep_alive_s=None if keep_s is None else round(keep_s, 1),
            tried=[{"silence_s": each.silence_s, "fate": each.fate} for each in sorted(measuring.tried)],
        )  # fmt: skip
        return self._findings.finish()

    # -- the end ------------------------------------------------------------------------------------------------------
    def conclude(self) -> list[Any]:
        """Say what was found over several checks, and give all of them."""
        self._conclude_quic()
        self._conclude_mtu()
        self._conclude_clock()
        return self._findings.finish()

    def _conclude_quic(self) -> None:
        told = self._heard.alt if self._heard is not None else set()
        speaks = any(ping.answered for _, ping in self._quic)
        for check, ping in self._quic:
            port = check.data["port"]
            expected = "alt-svc" if port in told else "plan" if port in self._planned_quic else ""
            expected = expected or ("answers" if speaks else "")
            state = CheckState.OK if ping.answered else CheckState.BAD if expected else CheckState.UNKNOWN
            words = f"{ping.answered} of {ping.sent} datagrams answered"
            if ping.refused:
                words = "nobody listens there"
            elif ping.why_not:
                words = ping.why_not
            elif not ping.answered and not expected:
                words += "; nothing says that the server speaks QUIC"
            check.end(
                state, words, sent=ping.sent, answered=ping.answered, refused=ping.refused, expected=expected,
                rtt_s=None if ping.rtt_s is None else round(ping.rtt_s, 4),
                versions=[f"{each:08x}" for each in sorted(ping.versions)],
            )  # fmt: skip
        if not self._quic and self._origin is not None:
            self._findings.skip(CheckName.QUIC, "nothing says that the server speaks it")

    def _conclude_mtu(self) -> None:
        stall, small = self._stall, False
        if stall is not None and stall.took_s is not None:
            silent_s = 0.0 if self._reaching is None else self._reaching.silent_s.get(stall.address, 0.0)
            # What is only slow would have brought something in twice the time.
            small = max(silent_s, self._quiet_s) >= 2.0 * stall.took_s + 1.0
        data = {"path_mtu": self._path_mtu, "stalled": stall is not None, "small_works": small}
        if small:
            self._findings.add(CheckName.MTU, CheckState.BAD, "only small packets get through", **data)
        elif self._path_mtu is None:
            self._findings.skip(CheckName.MTU, self._mtu_why, **data)
        else:
            self._findings.add(CheckName.MTU, CheckState.OK, f"packets of {self._path_mtu} bytes pass", **data)

    def _conclude_clock(self) -> None:
        skews = list(self._skews.values())
        if not skews and self._reaching is not None:
            skews = self._reaching.skews[:1]
        if not skews:
            self._findings.skip(CheckName.CLOCK, "no server told its time")
            return
        least = min(skews, key=abs)
        off = abs(least) >= limits.DIAGNOSIS_CLOCK_S
        words = f"our clock is {abs(least):.0f} s {'ahead of' if least > 0 else 'behind'} the server's"
        self._findings.add(
            CheckName.CLOCK,
            CheckState.BAD if off else CheckState.OK,
            words if abs(least) >= 2.0 else "our clock agrees with the server's",
            skew_s=round(least, 1),
            witnesses=len(skews),
        )
