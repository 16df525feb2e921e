"""What a diagnosis takes from the client, and what it looks at first: this machine and its network."""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stormline.client.config import Config
from stormline.client.findings import Findings
from stormline.client.network import NetworkState
from stormline.client.outside import Outside
from stormline.client.reaching import has_way
from stormline.core import limits_diagnosis as limits
from stormline.core.checks import CheckName, CheckState
from stormline.core.clock import Clock, Rng
from stormline.core.values import Address
from stormline.net import icmp, probes
from stormline.net.local import FAR
from stormline.net.probes import CaptiveUrl
from stormline.outbound.dial import Dialer, OpenTcp
from stormline.outbound.doh import DohNames, NoNames
from stormline.outbound.pool import Connector
from stormline.outbound.proxy_rules import ProxyRules
from stormline.policy.network import NetworkInfo
from stormline.policy.snapshot import HeartbeatRecord
from stormline.policy.verdict import Finding
from stormline.telemetry.diagnosis import Diagnosis

if TYPE_CHECKING:
    from stormline.client.scheduling import Scheduling


@dataclass(frozen=True, kw_only=True)
class Around:
    """What a diagnosis takes from the client and the machine it runs on.

    Attributes:
        outside: the machine.
        config: the client's settings.
        network: what is known of the network.
        foreground: the app is used.
        is_busy: says whether calls are under way.
        open_tcp: connects to one address.
        remembered: addresses that the client has had for the host.
        scheduling: asks the scheduling centres; None: there are none.
        proxies: which proxies requests go by.
        connector: makes what connects as requests do, by a proxy.
        context: whom requests trust.
        h1_context: gives the same trust, with HTTP/1.1 as all that is offered.
        roles_context: gives the trust in the platform's own roles, with what is to be offered.
        heartbeat: gives what the long connection has learned of this network; None: nothing.
        report: takes diagnoses for the platform; None: there is none.
    """

    outside: Outside
    config: Config
    network: NetworkState
    foreground: bool
    is_busy: Callable[[], bool]
    open_tcp: OpenTcp
    remembered: tuple[str, ...] = ()
    scheduling: "Scheduling | None"
    proxies: ProxyRules
    connector: Callable[[], Connector]
    context: ssl.SSLContext
    h1_context: Callable[[], ssl.SSLContext]
    roles_context: Callable[[tuple[str, ...]], ssl.SSLContext]
    heartbeat: Callable[[], HeartbeatRecord | None]
    report: Callable[[Diagnosis], None] | None

    @property
    def info(self) -> NetworkInfo:
        """The network there is."""
        return self.network.info

    @property
    def probes(self) -> bool:
        """The router and the name servers may be asked."""
        return self.network.may_probe

    @property
    def clock(self) -> Clock:
        """Time."""
        return self.outside.clock

    @property
    def rng(self) -> Rng:
        """Chance."""
        return self.outside.rng

    def to_given(self, context: ssl.SSLContext | None = None) -> Dialer:
        """Make what connects to given addresses only; `context`: by another than that of requests."""
        return Dialer(NoNames(), context or self.context, open_tcp=self.open_tcp)

    def doh(self) -> DohNames | None:
        """Make DNS over HTTPS with connections of its own; None: no server is set."""
        servers = [each for each in self.config.doh if not isinstance(each, str)]
        return DohNames(servers, self.to_given(), self.clock) if servers else None

    async def resolve(self, host: str, port: int) -> tuple[Address, ...]:
        """Ask the system for a name's addresses, within `limits_diagnosis.DIAGNOSIS_NAMES_S`.

        Raises:
            OSError: it has none, or does not answer (TimeoutError).
        """
        if Address(host, port).is_ip:
            return (Address(host, port),)
        source = self.outside.names()
        try:
            async with asyncio.timeout(limits.DIAGNOSIS_NAMES_S):
                found = await source.ask(host, refresh=False)
        finally:
            source.withdraw(host)
        return tuple(Address(each, port) for each in found.addresses)


def look_around(around: Around, findings: Findings) -> None:
    """Tell of the interfaces and routes; nothing is sent for it."""
    info = around.info
    families = sorted({6 if ":" in each else 4 for each in info.addresses})
    state = CheckState.UNKNOWN
    if info.routed is not None or info.interface:
        state = CheckState.BAD if info.routed is False else CheckState.OK
    words = f"{info.kind} {info.interface}".strip() if info.interface or info.name else "none that leads out is known"
    if info.airplane:
        words += ", all radios are off"
    if info.denied:
        words += ", the system denies the network to this program"
    findings.add(
        CheckName.INTERFACES, state, words, kind=info.kind, interface=info.interface, families=families,
        metered=info.metered, vpn=info.vpn, airplane=info.airplane, denied=info.denied,
        signal_dbm=info.signal_dbm, network_id=info.id, ways=[each.interface for each in around.network.ways()],
    )  # fmt: skip
    v4, v6 = (has_way(Address(host, 9)) is None for _, host in FAR)
    routed = info.routed if info.routed is not None else None if v4 or v6 else False
    leads = " and ".join([name for name, there in (("IPv4", v4), ("IPv6", v6)) if there])
    state = CheckState.BAD if routed is False else CheckState.OK if v4 or v6 else CheckState.UNKNOWN
    words = f"out over {leads}" if leads else "no way out"
    words += f", by {info.gateway}" if info.gateway else ""
    findings.add(CheckName.ROUTES, state, words, routed=routed, v4=v4, v6=v6, gateway=info.gateway)


async def ask_gateway(around: Around, findings: Findings) -> None:
    """Find out whether the next router answers: on its link, and to echo requests."""
    info = around.info
    if not info.gateway or not around.probes:
        findings.skip(CheckName.GATEWAY, "no router is known" if around.probes else "probes are switched off")
        return
    check = findings.begin(CheckName.GATEWAY, address=info.gateway)
    finding, echo = await asyncio.gather(
        probes.gateway(info, around.network.neighbour),
        icmp.echo(info.gateway, around.rng, index=info.index),
    )
    if echo.answered:
        finding = Finding.ANSWERED
    state = {Finding.ANSWERED: CheckState.OK, Finding.SILENT: CheckState.BAD}.get(finding, CheckState.UNKNOWN)
    words = {Finding.ANSWERED: "answers", Finding.SILENT: "does not answer on its own link"}.get(finding, "unclear")
    if echo.rtt_s is not None:
        words += f", an echo takes {1000 * echo.rtt_s:.1f} ms"
    elif echo.why_not:
        words += f"; no echo was asked for: {echo.why_not}"
    check.end(
        state, words, finding=finding,
        echo={"sent": echo.sent, "answered": echo.answered, "rtt_s": echo.rtt_s, "why_not": echo.why_not},
    )  # fmt: skip


async def ask_check_page(around: Around, findings: Findings) -> None:
    """Find out whether the network wants a login, by the URL that is set for it."""
    if around.config.captive_url is None:
        findings.skip(CheckName.CAPTIVE, "no URL to tell a login page by is set")
        return
    url = CaptiveUrl(around.config.captive_url)
    check = findings.begin(CheckName.CAPTIVE, host=url.address.host)
    lost = False

    async def resolved(host: str, port: int) -> tuple[Address, ...]:
        nonlocal lost
        try:
            return await around.resolve(host, port)
        except OSError:
            lost = True
            raise

    finding = await probes.captive(url, resolved, around.open_tcp)
    if lost:
        finding = Finding.UNKNOWN
    state = {Finding.ANSWERED: CheckState.OK, Finding.FOREIGN: CheckState.BAD}.get(finding, CheckState.UNKNOWN)
    words = {
        Finding.ANSWERED: "the network is open",
        Finding.FOREIGN: "somebody else's page came",
        Finding.SILENT: "nothing came back",
    }.get(finding, "the check page's host is not found" if lost else "the check page is unwell")
    check.end(state, words, finding=finding)
