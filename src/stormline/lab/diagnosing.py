"""Does `stormline diagnose` say rightly what is wrong? Each network is made, and a device in it is asked.

A case is a network and what may be said of it. High confidence in anything else is wrong. Cases of one profile share a
stage, one after the other, since building one takes longer than most diagnoses.
"""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from stormline.core import errors, limits_lab
from stormline.lab import faults, interception, profiles, specs
from stormline.lab.faults import Fault
from stormline.lab.interception import PORTS, Way
from stormline.lab.namespaces import WIFI
from stormline.lab.origin_answers import HOME, HOME_PATH
from stormline.lab.profiles_model import Profile, ServerSpec
from stormline.lab.specs import Behaviour, DnsSpec
from stormline.lab.stage import Stage
from stormline.net.clock import SystemClock

DAY_S: Final = 86_400.0
CA_FILE: Final = "ca.pem"
"""The authority of the stage's servers, in the folder where the command runs."""
NOBODY: Final = 65_534
"""A user without rights, on every Linux."""
WITHOUT_RIGHTS: Final = (
    "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs",
    "--bounding-set=-all,+dac_read_search", "--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search",
)  # fmt: skip
"""Runs a program as a user who may do nothing but read files, since its interpreter may lie in another's home."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A network, and what may be said of it."""

    name: str
    right: frozenset[str]
    """Verdicts, as `stormline diagnose` names them."""
    profile: Profile
    faults: Callable[[Stage], Sequence[Fault]] = lambda _: ()
    skew_s: float = 0.0
    """How far the world's clocks are from the device's: of the servers, and of who made their certificates."""
    told_skew_s: float | None = None
    """How far what servers tell as the time is from the device's clock; None: as `skew_s`."""
    scheme: str = "https"
    path: str = HOME_PATH
    host: str = specs.SHOP
    """Empty: the network alone is asked about."""
    airplane: bool = False
    """The device's radios are switched off."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """More of the device's environment."""
    options: tuple[str, ...] = ()
    """More arguments of the command."""
    bare: bool = False
    """Nobody is named who could be asked beside the origin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was said in one case."""

    case: Case
    seed: int
    said: dict[str, Any]
    """The diagnosis, as `--json` gives it."""
    wall_s: float
    """From the start of the process to its end."""
    code: int
    """Its exit code."""

    @property
    def verdict(self) -> str:
        """What it says."""
        return str(self.said["verdict"])

    @property
    def right(self) -> bool:
        """What is said may be said."""
        return self.verdict in self.case.right

    @property
    def surely_wrong(self) -> bool:
        """Something else is said, with high confidence."""
        return not self.right and self.said["confidence"] == "high"

    def data(self, *, whole: bool = True) -> dict[str, Any]:
        """Give it as plain data; `whole`: with all that was looked at."""
        said = {name: value for name, value in self.said.items() if whole or name != "checks"}
        return {
            "case": self.case.name,
            "seed": self.seed,
            "right": self.right,
            "surely_wrong": self.surely_wrong,
            "wall_s": round(self.wall_s, 2),
            "code": self.code,
            **said,
        }


# -- networks ---------------------------------------------------------------------------------------------------------
_WELL: Final = Behaviour(quic=True, date_skew_s=0.0)


def _served(name: str, *, v6: int = 2) -> Profile:
    """Give a network whose origin tells the time, answers QUIC, and has two addresses of each family."""
    return replace(profiles.get(name), server=ServerSpec(v4=2, v6=v6, behaviour=_WELL))


HOME_NETWORK: Final = _served("wifi")
"""Where most cases are made."""
_HOME_V4: Final = replace(_served("wifi", v6=0), name="wifi-v4")
_NO_QUIC: Final = replace(HOME_NETWORK, name="wifi-no-quic", server=ServerSpec(v4=2, v6=2))


_BESIDE: Final = ("--plain-url", f"http://{specs.SHOP}{HOME_PATH}")
_DIGEST: Final = ("--plain-sha256", hashlib.sha256(HOME).hexdigest())


def _fixed(*those: Fault) -> Callable[[Stage], Sequence[Fault]]:
    return lambda _: those


def _case(name: str, right: str, *those: Fault, **more: Any) -> Case:
    more.setdefault("profile", HOME_NETWORK)
    more.setdefault("faults", _fixed(*those))
    return Case(name=name, right=frozenset(right.split()), **more)


def _unwell(**behaviour: Any) -> Callable[[Stage], Sequence[Fault]]:
    """Let all addresses behave so."""
    spec = Behaviour(quic=True, date_skew_s=0.0, **behaviour)
    return lambda stage: [faults.Unwell(behaviour=spec, unit=tuple(range(len(stage.addresses))))]


def _boxed(*ways: tuple[int, Way]) -> Callable[[Stage], Sequence[Fault]]:
    """Let the box have ports."""
    return lambda _: [faults.Seized(port=port, box=PORTS[way]) for port, way in ways]


def _own_box(stage: Stage) -> Sequence[Fault]:
    """Let the box have HTTPS of the origin's addresses alone."""
    return [faults.Seized(port=443, box=PORTS[Way.TLS], hosts=stage.addresses)]


def _portal(way: Way) -> Callable[[Stage], Sequence[Fault]]:
    """Have a portal that lets nothing but its own page through."""
    return lambda _: [faults.Seized(port=80, box=PORTS[way]), faults.Severed(port=443)]


def _refused(stage: Stage) -> Sequence[Fault]:
    v4 = tuple(each for each in stage.addresses if ":" not in each)
    return [faults.Unreachable(hosts=v4, refused=True), faults.V6Dead()]


def _lost_lies(stage: Stage) -> Sequence[Fault]:
    """Let DNS give an address where nobody answers."""
    return [faults.DnsUnwell(dns=DnsSpec(lie_pct=100)), faults.Unreachable(hosts=(stage.captive,))]


def _lies_alone(stage: Stage) -> Sequence[Fault]:
    """Let DNS lie where nobody can be asked beside it."""
    lies = faults.DnsUnwell(dns=DnsSpec(lie_pct=100))
    return [lies, faults.Unreachable(hosts=stage.dns_servers, port=443)]


HEALTHY: Final = (
    _case("wifi", "ok"),
    _case("4g", "ok", profile=_served("4g")),
    _case("3g", "ok slow", profile=_served("3g")),
    _case("edge", "ok slow", profile=_served("edge")),
    _case("syn-umts", "ok slow", profile=_served("syn-umts")),
    _case("v4-only", "ok", profile=_HOME_V4),
    _case("clear", "ok", scheme="http"),
    _case("network", "ok", host=""),
)
"""Networks with nothing wrong, fast and slow."""
FAULTY: Final = (
    _case("no-network", "no_network", faults.Handover()),
    _case("airplane", "airplane", faults.Handover(), airplane=True),
    _case("permission", "permission", faults.Prohibited()),
    _case("router-fault", "router_fault", faults.Cable(), faults.RouterDead(), profile=_HOME_V4),
    _case("dead-wifi", "dead_wifi router_fault", faults.Dark()),
    _case("dead-provider", "dead_wifi", faults.Severed()),
    _case("network-dead", "dead_wifi", faults.Severed(), host=""),
    _case("portal", "captive_portal", faults.CaptivePortal()),
    _case("network-portal", "captive_portal", faults.CaptivePortal(), host=""),
    _case("portal-redirects", "captive_portal", faults=_portal(Way.PORTAL)),
    _case("portal-511", "captive_portal", faults=_portal(Way.REQUIRED)),
    _case("dns-hijack", "dns_hijack", faults.DnsUnwell(dns=DnsSpec(lie_pct=100))),
    _case("dns-hijack-lost", "dns_hijack", faults=_lost_lies, profile=_HOME_V4),
    _case("dns-silent", "dns_broken", faults.DnsUnwell(dns=DnsSpec(drop_pct=100))),
    _case("dns-fails", "dns_broken", faults.DnsUnwell(dns=DnsSpec(servfail_pct=100))),
    _case("dns-denies", "dns_broken dns_hijack", faults.DnsUnwell(dns=DnsSpec(nxdomain_pct=100))),
    _case("tls-box", "tls_interception", faults=_boxed((443, Way.TLS))),
    _case("tls-box-one-host", "tls_interception", faults=_own_box),
    _case("injected-script", "injected_page", faults=_boxed((80, Way.SCRIPT)), scheme="http"),
    _case("injected-ads", "injected_page", faults=_boxed((80, Way.ADS)), scheme="http"),
    _case("injected-beside", "injected_page", faults=_boxed((80, Way.SCRIPT)), options=_BESIDE),
    _case("injected-known", "injected_page", faults=_boxed((80, Way.SCRIPT)), options=(*_BESIDE, *_DIGEST)),
    _case("udp-blocked", "udp_blocked", faults.UdpBlock()),
    _case("firewall", "udp_blocked", faults.OnlyPort(port=443)),
    _case("udp-degraded", "udp_degraded", faults.UdpThinned(port=443, keep=5)),
    _case("ipv6-dead", "ipv6_broken", faults.V6Dead()),
    _case("clock-behind", "clock_wrong", skew_s=400 * DAY_S),
    _case("clock-ahead", "clock_wrong", skew_s=-400 * DAY_S),
    _case("mtu-1400", "mtu_blackhole", faults.MtuCliff(mtu_bytes=1400, uplink=WIFI.name), path="/item/1/30000"),
    _case("mtu-1320", "mtu_blackhole", faults.MtuCliff(mtu_bytes=1320, uplink=WIFI.name), path="/item/1/30000"),
    _case("server-refuses", "server_side", faults=_refused, profile=_HOME_V4),
    _case("server-resets", "server_side", faults=_unwell(reset_pct=100)),
    _case("server-503", "server_side", faults=_unwell(error_pct=100)),
    _case("server-silent", "server_side", faults=_unwell(accept_only_pct=100)),
)
"""Networks with one thing wrong."""
MIXED: Final = (
    _case("lossy4g", "ok slow", profile=_served("lossy4g")),
    _case("syn-drop", "ok slow", faults.SynDrop(pct=30)),
    _case("udp-lossy", "ok slow udp_degraded", faults.UdpLossy(pct=15)),
    _case("dead-addresses", "ok slow server_side", faults.DeadAddress(address=0), faults.DeadAddress(address=2)),
    _case("server-v6-dead", "ipv6_broken", faults.UnitCut(unit=(2, 3))),
    _case("no-quic", "ok", profile=_NO_QUIC),
    _case("no-doh", "ok", faults=lambda stage: [faults.Unreachable(hosts=stage.dns_servers, port=443)]),
    _case("dns-lies-no-doh", "dns_hijack tls_interception captive_portal unknown", faults=_lies_alone),
    _case("no-such-name", "server_side dns_broken unknown", host="nosuch.lab.test"),
    _case("clock-hours-off", "ok slow clock_wrong", skew_s=3 * 3600.0),
    _case("certificates-expired", "server_side unknown tls_interception", skew_s=-400 * DAY_S, told_skew_s=0.0),
    _case("bare-portal", "captive_portal tls_interception", faults.CaptivePortal(), bare=True),
    _case("bare-hijack", "dns_hijack tls_interception", faults.DnsUnwell(dns=DnsSpec(lie_pct=100)), bare=True),
    _case("bare-denial", "dns_broken server_side", faults.DnsUnwell(dns=DnsSpec(nxdomain_pct=100)), bare=True),
    _case("proxy-dead", "proxy_fault", environ={"https_proxy": "http://203.0.113.40:3128"}),
)
"""Networks with little wrong, or of which more than one thing may be said."""
CASES: Final = HEALTHY + FAULTY + MIXED


# -- one device -------------------------------------------------------------------------------------------------------
def radios(folder: Path, *, off: bool) -> Path:
    """Make what the kernel says of a device with a WiFi, as `/sys/class` has it; the laboratory has no radios."""
    (folder / "net" / WIFI.name / "phy80211").mkdir(parents=True)
    radio = folder / "rfkill/rfkill0"
    radio.mkdir(parents=True)
    for name, text in (("type", "wlan"), ("soft", str(int(off))), ("hard", "0")):
        (radio / name).write_text(text + "\n")
    return folder


def arguments(stage: Stage, case: Case) -> list[str]:
    """Give the arguments of `stormline` for a case."""
    url = [f"{case.scheme}://{case.host}{case.path}"] if case.host else []
    beside = ["--captive-url", stage.check_url, "--doh", f"https://{stage.dns_servers[0]}/dns-query"]
    return ["diagnose", *url, "--ca", CA_FILE, *([] if case.bare else beside), *case.options]


def ask(
    stage: Stage, case: Case, folder: Path, *, options: Sequence[str] = ("--json",), prefix: Sequence[str] = ()
) -> tuple[str, int]:
    """Run `stormline diagnose` on a stage's device.

    Args:
        stage: with the case's faults.
        case: what is asked.
        folder: an empty one of its own, where the program runs.
        options: more arguments.
        prefix: a command that runs the rest, such as `setpriv`.

    Returns:
        What it printed, and its exit code.

    Raises:
        PlatformError: it does not end, or says nothing.
    """
    seen = radios(folder / "class", off=case.airplane)
    shutil.copyfile(stage.ca_file, folder / CA_FILE)
    # `ip netns exec` gives each program mounts of its own, so this one is nobody else's.
    words = ["sh", "-c", 'mount --bind "$0" /sys/class && exec "$@"', str(seen), *prefix]
    words += [sys.executable, "-P", "-m", "stormline.cli.main", *arguments(stage, case), *options]
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
    environ = {**kept, "HOME": str(folder), "COLUMNS": "110", **case.environ}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with stage.popen(words, env=environ, cwd=folder, **pipes) as process:
        try:
            out, problems = process.communicate(timeout=limits_lab.LAB_DIAGNOSIS_S)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise errors.PlatformError(f"diagnosis of {case.name}: it does not end") from error
    if not out:
        raise errors.PlatformError(f"diagnosis of {case.name}: {problems.decode('utf-8', 'replace').strip()}")
    return out.decode(), process.returncode


@contextlib.contextmanager
def made(stage: Stage, case: Case) -> Iterator[None]:
    """Have a case's faults on a stage of its profile."""
    with contextlib.ExitStack() as stack:
        for fault in case.faults(stage):
            fault.apply(stage)
            stack.callback(fault.undo, stage)
        yield


@contextlib.contextmanager
def box(stage: Stage) -> Iterator[None]:
    """Have the box in the WiFi's router; nothing is sent to it yet.

    Raises:
        PlatformError: it does not start.
    """
    words = [sys.executable, "-m", "stormline.lab.interception"]
    router = stage.topology.routers[WIFI.name]
    with router.popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        if process.stdout is None or process.stdout.readline() != interception.READY:
            process.kill()
            raise errors.PlatformError("interception: the box does not start")
        try:
            yield
        finally:
            process.kill()


@contextlib.contextmanager
def place(case: Case, seed: int, folder: Path) -> Iterator[Stage]:
    """Build the stage of a case's profile and clocks, without its faults."""

    class Clock(SystemClock):
        def wall(self) -> float:
            return super().wall() + case.skew_s

    told_s = case.skew_s if case.told_skew_s is None else case.told_skew_s
    behaviour = msgspec.structs.replace(case.profile.server.behaviour, date_skew_s=told_s)
    profile = replace(case.profile, server=replace(case.profile.server, behaviour=behaviour))
    with Stage(profile, seed, folder=folder, clock=Clock()) as stage, box(stage):
        stage.begin()
        yield stage
        stage.finish()


def run(cases: Sequence[Case], seed: int, folder: Path, on_outcome: Callable[[Outcome], None]) -> list[Outcome]:
    """Make cases that have profile and clocks in common, one after the other, and ask in each."""
    clock = SystemClock()
    found = []
    with place(cases[0], seed, folder / "keys") as stage:
        for case in cases:
            own = folder / case.name
            own.mkdir()
            with made(stage, case):
                began_s = clock.monotonic()
                text, code = ask(stage, case, own)
                wall_s = clock.monotonic() - began_s
            outcome = Outcome(case=case, seed=seed, said=json.loads(text), wall_s=wall_s, code=code)
            on_outcome(outcome)
            found.append(outcome)
    return found


def shown(case: Case, seed: int, folder: Path) -> str:
    """Make a case and give what the command prints for people, below the command.

    Raises:
        PlatformError: see `run_all`.
    """
    folder.mkdir()
    with place(case, seed, folder / "keys") as stage, made(stage, case):
        text, _ = ask(stage, case, folder, options=())
        words = ["stormline", *arguments(stage, case)]
    return "\n".join([f"$ {' '.join(words)}", *(line.rstrip() for line in text.splitlines())])


def run_all(
    cases: Sequence[Case],
    seeds: Sequence[int],
    *,
    folder: Path,
    jobs: int,
    on_outcome: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Make every case with every seed, on some stages side by side.

    Raises:
        PlatformError: the laboratory cannot work here, or a diagnosis did not end.
    """
    groups: dict[tuple[object, ...], list[Case]] = {}
    for seed in seeds:
        for case in cases:
            groups.setdefault((seed, case.profile.name, case.skew_s, case.told_skew_s), []).append(case)
    size = limits_lab.LAB_DIAGNOSES_MAX
    parts = [
        (seed, those[start : start + size])
        for (seed, *_), those in groups.items()
        for start in range(0, len(those), size)
    ]

    def one(number: int, seed: int, those: Sequence[Case]) -> list[Outcome]:
        own = folder / str(number)
        own.mkdir(parents=True)
        return run(those, seed, own, on_outcome)

    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        found = pool.map(one, itertools.count(), *zip(*parts, strict=True))
        return list(itertools.chain.from_iterable(found))
