"""What is wrong with the network, said from what requests met and from a few probes.

`VerdictMachine` is pure: `observe` takes what requests met, `wanted` says which probes would decide between what is
possible, `take` takes what they found, `judge` gives the verdict. Nothing is probed while requests succeed.

A verdict is said with high confidence only where the evidence leaves nothing else that is likely; how each is told is
in docs/explanation/networks.md.
"""

import enum
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from stormline.core import limits_network as limits
from stormline.core.values import Address
from stormline.policy.hints import hint
from stormline.policy.network import NOTHING_KNOWN, NetworkInfo


class Condition(enum.StrEnum):
    """How the network is."""

    OK = "ok"
    SLOW = "slow"
    NO_NETWORK = "no_network"
    AIRPLANE = "airplane"
    PERMISSION = "permission"
    ROUTER_FAULT = "router_fault"
    CAPTIVE_PORTAL = "captive_portal"
    DNS_ONLY_BROKEN = "dns_only_broken"
    DEAD_WIFI = "dead_wifi"
    SERVER_FAULT = "server_fault"


class Confidence(enum.StrEnum):
    """How sure a verdict is."""

    HIGH = "high"
    LOW = "low"


class Verdict(NamedTuple):
    """What is said of the network.

    Attributes:
        condition: how it is.
        confidence: how sure that is.
        hint: what a person can do, in English; `hints.hint` gives it in other words.
        why: what it is said from, for logs.
        host: the server that a `server_fault` is about.
    """

    condition: Condition
    confidence: Confidence
    hint: str
    why: str = ""
    host: str = ""


class Met(enum.StrEnum):
    """What one attempt of a request met."""

    ANSWERED = "answered"
    """An answer of the server, whatever its status."""
    DNS_FAILED = "dns_failed"
    """The resolver said that it could not find out."""
    DNS_ABSENT = "dns_absent"
    """It said that there is no such name."""
    DNS_SILENT = "dns_silent"
    """It did not answer."""
    UNREACHABLE = "unreachable"
    """The kernel has no way there."""
    DENIED = "denied"
    """The kernel does not let us."""
    REFUSED = "refused"
    """RST to the SYN."""
    SILENT = "silent"
    """Nothing came back."""
    BAD_CERTIFICATE = "bad_certificate"
    """Somebody else answered."""
    BROKEN = "broken"
    """The connection was cut, reset, or TLS failed otherwise."""
    FOREIGN = "foreign"
    """An answer that says it comes from the network itself (511, RFC 6585 section 6)."""


_DNS: Final = frozenset({Met.DNS_FAILED, Met.DNS_ABSENT, Met.DNS_SILENT})
_DARK: Final = frozenset({Met.SILENT, Met.UNREACHABLE, Met.DNS_SILENT, Met.DNS_FAILED})
"""What a network meets that carries nothing; a local forwarder says "failed" where it hears nothing itself."""


_SORTS: Final = {
    Met.BAD_CERTIFICATE: "stranger",
    Met.FOREIGN: "stranger",
    Met.DENIED: "denied",
    Met.REFUSED: "cut",
    Met.BROKEN: "cut",
}
"""What is met for unlike causes; the rest is silence of some kind."""


class ProbeKind(enum.StrEnum):
    """What can be asked for."""

    GATEWAY = "gateway"
    """Does the next router answer on the link?"""
    SERVER = "server"
    """Does a server that answered before take a connection, and show its certificate where it has one?"""
    DNS = "dns"
    """Does the configured name server answer?"""
    CAPTIVE = "captive"
    """Does the configured URL give what it should?"""


class Probe(NamedTuple):
    """One thing to find out.

    Attributes:
        kind: what.
        address: whom; None for the gateway of the day and for the captive URL.
        host: the name: of the server, or to be asked for.
        tls: the server must show a certificate for `host`.
    """

    kind: ProbeKind
    address: Address | None = None
    host: str = ""
    tls: bool = False


class Finding(enum.StrEnum):
    """What a probe found."""

    ANSWERED = "answered"
    """Yes."""
    SILENT = "silent"
    """Nothing came back in time, or the way is closed."""
    REFUSED = "refused"
    """No, said the machine itself: it is there."""
    FAILED = "failed"
    """An answer that does not help (a name server's SERVFAIL)."""
    FOREIGN = "foreign"
    """Somebody else answered: a page, a redirection, a wrong certificate."""
    UNKNOWN = "unknown"
    """It could not be found out."""


class _Found(NamedTuple):
    probe: Probe
    finding: Finding
    at: float


class Known(NamedTuple):
    """A server that has answered: its name, where, and whether it showed a certificate."""

    host: str
    address: Address
    tls: bool


@dataclass(slots=True)
class _Host:
    """What is known of one host: `met` since its latest answer, and how many of these when others were well."""

    met: deque[tuple[Met, float]] = field(default_factory=lambda: deque(maxlen=limits.VERDICT_FAILURES_MAX))
    first_at: float = -math.inf
    last_at: float = -math.inf
    ok_at: float = -math.inf
    others_at: float | None = None  # when another first answered since this one began to fail
    alone: int = 0


class VerdictMachine:
    """Knows one network. Times are monotonic seconds.

    Args:
        captive: there is a URL to tell portals by.
        name_servers: the configured name servers, the first first.
    """

    def __init__(self, *, captive: bool = False, name_servers: Sequence[Address] = ()) -> None:
        self._captive = captive
        self._name_servers = tuple(name_servers[: limits.PROBE_TARGETS_MAX])
        self.info: NetworkInfo = NOTHING_KNOWN
        self._hosts: OrderedDict[str, _Host] = OrderedDict()
        self._known: OrderedDict[Address, Known] = OrderedDict()
        self._times: deque[float] = deque(maxlen=limits.VERDICT_TIMES)
        self._outcomes: deque[tuple[str, bool]] = deque(maxlen=limits.VERDICT_OUTCOMES)
        self._ok_at = -math.inf
        self._heard_at = -math.inf
        self._failing_at: float | None = None  # since when nothing has answered
        self._failed_at = -math.inf
        self._strikes = 0
        self._found: dict[Probe, _Found] = {}
        self._round_at = self._next_round_at = -math.inf
        self._pause_s = limits.PROBE_PAUSE_S
        self._quiet_rounds = 0
        self._dark_rounds = 0
        self._nameless_rounds = 0
        self._lie: str = ""  # a host whose names are known to be answered falsely
        self._sort = ""  # what failures are like at present, and how many in a row were not
        self._unlike = 0

    # -- what is seen -------------------------------------------------------------------------------------------------
    def changed(self, info: NetworkInfo, now: float) -> None:
        """Take the network there is now; on another one, what the old one's requests met says nothing."""
        other = info.id != self.info.id or info.routed != self.info.routed or info.index != self.info.index
        self.info = info
        if other:
            self._hosts.clear()
            self._times.clear()
            self._outcomes.clear()
            self._recover()
            self._next_round_at = now
            self._pause_s = limits.PROBE_PAUSE_S

    def _recover(self) -> None:
        self._failing_at = None
        self._strikes = self._quiet_rounds = self._dark_rounds = self._nameless_rounds = 0
        self._found.clear()
        self._lie = ""
        self._sort, self._unlike = "", 0

    def observe(self, host: str, met: Met, now: float) -> None:
        """Take what one attempt met that failed."""
        self._outcomes.append((host, False))
        self._sort_out(_SORTS.get(met, "silence"))
        entry = self._hosts.pop(host, None) or _Host()
        self._hosts[host] = entry
        if len(self._hosts) > limits.VERDICT_HOSTS_MAX:
            self._hosts.popitem(last=False)
        if not entry.met or now - entry.last_at >= limits.VERDICT_MEMORY_S:
            entry.met.clear()
            entry.first_at = now
            entry.others_at, entry.alone = None, 0
        entry.met.append((met, now))
        if entry.others_at is not None and now - entry.others_at >= limits.VERDICT_SETTLE_S:
            entry.alone += 1
        entry.last_at = self._failed_at = now
        self._strikes += 1
        self._quiet_rounds = 0
        if self._failing_at is None:
            self._failing_at = now

    def _sort_out(self, sort: str) -> None:
        """Begin anew where failures are of another sort than before, twice in a row: it is another fault."""
        if sort == self._sort or not self._sort:
            self._sort, self._unlike = sort, 0
            return
        self._unlike += 1
        if self._unlike < limits.PROBE_STRIKES:
            return
        for entry in self._hosts.values():
            entry.met.clear()
            entry.others_at, entry.alone = None, 0
        self._recover()
        self._sort = sort
        self._strikes = 1  # the one before was of this sort too
        self._shorten_pause()

    def _shorten_pause(self) -> None:
        """Have the next round of probes as early as the first: the long pause was the last trouble's."""
        self._pause_s = limits.PROBE_PAUSE_S
        self._next_round_at = min(self._next_round_at, self._round_at + self._pause_s)

    def answered(
        self, host: str, now: float, *, took_s: float | None = None, server: Address | None = None, tls: bool = False
    ) -> None:
        """Take an answer that is the server's own: over TLS it is certain, in clear it is believed.

        Args:
            host: who answered.
            now: when.
            took_s: from question to answer.
            server: its address.
            tls: it showed a certificate.
        """
        self._outcomes.append((host, True))
        if took_s is not None:
            self._times.append(took_s)
        self._ok_at = self._heard_at = now
        if self._failing_at is not None:
            self._recover()
            self._shorten_pause()
        entry = self._hosts.get(host)
        if entry is not None:
            entry.met.clear()
            entry.ok_at = now
            entry.others_at, entry.alone = None, 0
        elif len(self._hosts) < limits.VERDICT_HOSTS_MAX:
            self._hosts[host] = _Host(ok_at=now)
        if now - self._failed_at < limits.VERDICT_MEMORY_S:
            self._others_are_well(host, now)
        if server is not None and self._known.get(server) is None:
            self._known[server] = Known(host, server, tls)
            if len(self._known) > limits.VERDICT_HOSTS_MAX:
                self._known.popitem(last=False)

    def _others_are_well(self, host: str, now: float) -> None:
        for name, entry in self._hosts.items():
            if name != host and entry.met and entry.others_at is None:
                entry.others_at = now

    def heard(self, now: float) -> None:
        """Take note that something came from far away, though not an answer."""
        self._heard_at = now

    def names_lie(self, host: str) -> None:
        """Take note that a second, trusted resolver contradicts the network's about `host`."""
        self._lie = host

    # -- probes -------------------------------------------------------------------------------------------------------
    def wanted(self, now: float) -> list[Probe]:
        """Give the probes to be made now, and count them as begun; empty where nothing is to be found out.

        At most one round in `limits_network.PROBE_PAUSE_S`, of at most two times `PROBE_TARGETS_MAX` and two probes.
        """
        if self._failing_at is None or self._strikes < limits.PROBE_STRIKES or now < self._next_round_at:
            return []
        if self.info.routed is False or self._denied():
            return []  # there is nobody to ask
        if self._quiet_rounds >= limits.PROBE_ROUNDS_QUIET_MAX:
            return []
        self._quiet_rounds += 1
        self._round_at = now
        self._next_round_at = now + self._pause_s
        self._pause_s = min(2.0 * self._pause_s, limits.PROBE_PAUSE_S_MAX)
        probes = [Probe(ProbeKind.GATEWAY)] if self.info.gateway else []
        failing = [host for host, entry in reversed(self._hosts.items()) if entry.met]
        known = list(reversed(self._known.values()))
        # Others than the failing come first: they tell the network from the server.
        known.sort(key=lambda each: each.host in failing)
        probes += [
            Probe(ProbeKind.SERVER, each.address, each.host, each.tls) for each in known[: limits.PROBE_TARGETS_MAX]
        ]
        if failing:
            probes += [Probe(ProbeKind.DNS, server, failing[0]) for server in self._name_servers]
        if self._captive:
            probes.append(Probe(ProbeKind.CAPTIVE))
        return probes

    def next_round_at(self, now: float) -> float | None:
        """Give when to ask for probes again; None where an event has to come first."""
        failing = self._failing_at is not None and self._strikes >= limits.PROBE_STRIKES
        if not failing or self.info.routed is False or self._quiet_rounds >= limits.PROBE_ROUNDS_QUIET_MAX:
            return None
        return max(now, self._next_round_at)

    def take(self, found: Iterable[tuple[Probe, Finding]], now: float) -> None:
        """Take what one round of probes found."""
        if self._failing_at is None:
            return  # it answered meanwhile
        findings = [_Found(probe, finding, now) for probe, finding in found]
        far = [each for each in findings if self._is_far(each.probe)]
        dark = bool(far) and all(each.finding in (Finding.SILENT, Finding.UNKNOWN) for each in far)
        self._dark_rounds = self._dark_rounds + 1 if dark else 0
        if any(each.finding is not Finding.SILENT and each.finding is not Finding.UNKNOWN for each in far):
            self._heard_at = now
        self._found = {each.probe: each for each in findings}
        well = [each for each in findings if each.finding is Finding.ANSWERED]
        for each in well:
            if each.probe.kind in (ProbeKind.SERVER, ProbeKind.CAPTIVE):
                self._others_are_well(each.probe.host, now)
        asked = [each for each in findings if each.probe.kind is ProbeKind.DNS]
        nameless = bool(asked) and not any(each in well for each in asked)
        nameless &= any(each.probe.kind in (ProbeKind.SERVER, ProbeKind.CAPTIVE) for each in well)
        self._nameless_rounds = self._nameless_rounds + 1 if nameless else 0

    def _is_far(self, probe: Probe) -> bool:
        """Say whether what answers a probe is beyond the next router; a forwarder on the device or router is not."""
        if probe.kind is ProbeKind.GATEWAY:
            return False
        return not (probe.kind is ProbeKind.DNS and self._is_near(probe.address))

    def _is_near(self, address: Address | None) -> bool:
        host = "" if address is None else address.host
        return host == self.info.gateway or host.startswith("127.") or host == "::1"

    # -- the verdict --------------------------------------------------------------------------------------------------
    def judge(self, now: float) -> Verdict:
        """Say how the network is."""
        info = self.info
        failing = [
            (host, entry)
            for host, entry in self._hosts.items()
            if entry.met and now - entry.last_at < limits.VERDICT_MEMORY_S
        ]
        fresh = now - self._ok_at < limits.VERDICT_MEMORY_S
        if info.routed is False and self._failing_at is None and now - self._ok_at < limits.VERDICT_SURE_S:
            return self._fair(now, fresh=fresh)  # what is answered from the machine itself needs no network
        if info.routed is False:
            if info.airplane:
                return self._say(Condition.AIRPLANE, True, "no default route, and all radios are switched off")
            if info.denied:
                return self._say(Condition.PERMISSION, True, "the system lets this program see no network")
            return self._say(Condition.NO_NETWORK, True, "no default route")
        if info.denied or self._denied():
            return self._say(Condition.PERMISSION, True, "sockets are refused by the system")
        if not failing:
            return self._fair(now, fresh=fresh)
        host, entry = failing[-1]
        beside = [each.ok_at for name, each in self._hosts.items() if name != host and each.ok_at > entry.first_at]
        if self._failing_at is None or (beside and now - max(beside) < limits.VERDICT_SURE_S):
            return self._one_host(host, entry, now, others=bool(beside))
        return self._none_answers(host, now)

    def _say(self, condition: Condition, sure: bool, why: str, host: str = "") -> Verdict:
        confidence = Confidence.HIGH if sure else Confidence.LOW
        return Verdict(condition, confidence, hint(condition, self.info.kind), why, host)

    def _met(self) -> list[Met]:
        """Give what was met since nothing answers any more."""
        since = self._failing_at
        if since is None:
            return []
        return [met for entry in self._hosts.values() for met, at in entry.met if at >= since]

    def _denied(self) -> bool:
        met = self._met()
        return len(met) >= limits.PROBE_STRIKES and all(each is Met.DENIED for each in met)

    def _fair(self, now: float, *, fresh: bool) -> Verdict:
        times = sorted(self._times)
        if fresh and len(times) >= 3 and times[len(times) // 2] >= limits.VERDICT_SLOW_S:
            return self._say(Condition.SLOW, True, f"half of the last answers took {times[len(times) // 2]:.1f} s")
        return self._say(Condition.OK, fresh, "requests are answered" if fresh else "nothing is known against it")

    def _one_host(self, host: str, entry: _Host, now: float, *, others: bool) -> Verdict:
        """Others answered since: it is a matter of one host, or of a network that loses much."""
        if not others or len(entry.met) < limits.PROBE_STRIKES:
            return self._fair(now, fresh=True)
        if {met for met, _ in entry.met} <= _DNS:
            return self._say(Condition.DNS_ONLY_BROKEN, False, f"{host} is not resolved, others answer", host)
        # Where others fail now and then too it may be the network, and the host unlucky.
        lonely = all(ok for name, ok in self._outcomes if name != host)
        # One failure alone is chance, however many there were before: the host may have healed since.
        late = sum(now - at < limits.VERDICT_AGAIN_S for _, at in entry.met) >= limits.PROBE_STRIKES
        late &= now - entry.last_at < limits.VERDICT_SETTLE_S
        sure = entry.alone > limits.PROBE_STRIKES and lonely and late
        return self._say(Condition.SERVER_FAULT, sure, f"others answer, {host} does not", host)

    def _finding(self, *kinds: ProbeKind, far: bool = True) -> list[_Found]:
        return [each for each in self._found.values() if each.probe.kind in kinds and self._is_far(each.probe) is far]

    def _none_answers(self, host: str, now: float) -> Verdict:
        """Nothing has answered since requests began to fail."""
        kinds = set(self._met())
        captive = {each.finding for each in self._finding(ProbeKind.CAPTIVE)}
        servers = self._finding(ProbeKind.SERVER)
        if Finding.FOREIGN in captive or Met.FOREIGN in kinds:
            return self._say(Condition.CAPTIVE_PORTAL, True, "a page of somebody else's came instead of the answer")
        genuine = [each for each in servers if each.finding is Finding.ANSWERED]
        opened = Finding.ANSWERED in captive
        if Met.BAD_CERTIFICATE in kinds or any(each.finding is Finding.FOREIGN for each in servers):
            return self._strangers(genuine, opened, host)
        reached = bool(genuine) or opened
        if kinds <= _DNS:
            return self._names(reached, host, now)
        if reached:
            mine = any(each.probe.host == host for each in genuine)
            named = bool(kinds & _DNS)
            if named and mine:
                return self._say(Condition.DNS_ONLY_BROKEN, False, f"{host} answers, its name is not resolved", host)
            sure = self._hosts[host].alone >= limits.PROBE_STRIKES and not mine and not named
            return self._say(Condition.SERVER_FAULT, sure, f"others take connections, {host} does not answer", host)
        answers = [each for each in self._finding(ProbeKind.DNS) if each.finding is not Finding.SILENT]
        if Met.REFUSED in kinds or any(each.finding is Finding.REFUSED for each in servers):
            return self._say(Condition.SERVER_FAULT, False, f"{host} refuses connections", host)
        if any(each.finding in (Finding.ANSWERED, Finding.FAILED, Finding.REFUSED) for each in answers):
            return self._say(Condition.SERVER_FAULT, False, f"a name server answers, {host} does not", host)
        if kinds <= _DARK:
            return self._dark(now)
        return self._say(Condition.SERVER_FAULT, False, f"connections to {host} break", host)

    def _strangers(self, genuine: list[_Found], opened: bool, host: str) -> Verdict:
        """Somebody answers who is not the server: a portal, or whoever a false name leads to."""
        if genuine or self._lie:
            sure = bool(self._lie) or any(each.probe.host == host and each.probe.tls for each in genuine)
            return self._say(
                Condition.DNS_ONLY_BROKEN, sure, f"{host} is genuine at an address it had, and not where its name leads"
            )
        if opened:
            return self._say(Condition.DNS_ONLY_BROKEN, False, f"a stranger answers for {host}, and there is no portal")
        foreign = {each.probe.host for each in self._finding(ProbeKind.SERVER) if each.finding is Finding.FOREIGN}
        return self._say(
            Condition.CAPTIVE_PORTAL, len(foreign) > 1, "wrong certificates at servers that had the right ones"
            if foreign else f"a stranger answers for {host}",
        )  # fmt: skip

    def _names(self, reached: bool, host: str, now: float) -> Verdict:
        """Only names fail."""
        asked = self._finding(ProbeKind.DNS) + self._finding(ProbeKind.DNS, far=False)
        helpful = any(each.finding is Finding.ANSWERED for each in asked)
        if reached:
            sure = self._nameless_rounds >= 2
            why = "servers answer, name servers do not" if sure else "servers answer, names are not resolved"
            return self._say(Condition.DNS_ONLY_BROKEN, sure, why)
        if helpful:
            return self._say(Condition.DNS_ONLY_BROKEN, False, "the name server answers us, and not the system")
        if any(each.finding is not Finding.SILENT for each in self._finding(ProbeKind.DNS)):
            return self._say(Condition.DNS_ONLY_BROKEN, False, "the name server answers, and knows nothing")
        return self._dark(now, names=True)

    def _dark(self, now: float, *, names: bool = False) -> Verdict:
        """Nothing comes back from anywhere."""
        info = self.info
        gateway = {each.finding for each in self._finding(ProbeKind.GATEWAY, far=False)}
        since = max(self._failing_at or now, self._heard_at)
        lasting = now - since >= limits.VERDICT_SURE_S and self._dark_rounds >= 2
        if Finding.SILENT in gateway:
            weak = info.signal_dbm is not None and info.signal_dbm < limits.SIGNAL_GOOD_DBM
            if weak:
                return self._say(Condition.DEAD_WIFI, False, f"the router is silent at {info.signal_dbm} dBm")
            near = info.kind == "wired" or info.signal_dbm is not None
            return self._say(Condition.ROUTER_FAULT, near and lasting, "the router does not answer on its own link")
        far = [each for each in self._found.values() if self._is_far(each.probe)]
        silent = [each for each in far if each.finding is Finding.SILENT]
        if not silent and names:
            return self._say(Condition.DNS_ONLY_BROKEN, False, "names are not resolved, nothing else is known")
        if not silent:
            if info.routed is None and set(self._met()) <= {Met.UNREACHABLE}:
                return self._say(Condition.NO_NETWORK, False, "the system has no way to any server")
            return self._say(Condition.DEAD_WIFI, False, "nothing comes back")
        beyond = Finding.ANSWERED in gateway or Finding.REFUSED in gateway
        # One target that is silent may be down itself; a name server and a server are not both down by chance.
        sure = lasting and len(silent) == len(far) and len({each.probe.address for each in silent}) >= 2
        why = "the router answers, nothing beyond it does" if beyond else "nothing comes back from anywhere"
        return self._say(Condition.DEAD_WIFI, sure, why)
