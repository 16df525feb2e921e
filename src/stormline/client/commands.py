"""What a dispatch plan commands for one request, read once and kept as long as the plan stands.

A client obeys within its own means: what it does not know (a preset, a means, a carrier of a later version) it leaves
out, with one line in its log for each name. Which word counts where several speak is `allowance`'s.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar
from urllib.parse import parse_qsl

import msgspec

from stormline.core import limits, limits_means
from stormline.outbound.messages import HttpRequest
from stormline.policy import presets
from stormline.policy.means import SWITCHES, Means
from stormline.policy.presets import Preset
from stormline.wire.plan import Carrier, HostPlan, Plan, Policy, policy_for

_log = logging.getLogger("stormline.client")
_MEANS: Final = {means.value: means for means in Means}
_SWITCHES: Final = frozenset((*SWITCHES, *(carrier.value for carrier in Carrier)))
_MOST: Final = {
    "long": 1,
    "ip-direct": limits_means.MEANS_ADDRESSES_MAX,
    "direct": limits_means.PLAN_ATTEMPTS_MAX,
    "relay": limits_means.MEANS_TRIES_MAX,
    "clear": limits_means.MEANS_TRIES_MAX,
    "original": limits_means.MEANS_TRIES_MAX,
    "attempts": limits_means.PLAN_ATTEMPTS_MAX,
}
"""The largest number of tries that a preset takes; a plan's larger one is as good as this."""
_NOTHING: Final = Policy()
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True, eq=False)
class Command:
    """What a plan says of some requests, in this client's words.

    Attributes:
        policy: what it says in its own.
        preset: how often each means is tried; None where it says nothing.
        order: means that come first.
        off: means, carriers and the like that are switched off.
        words: all of it, for the story of a call.
    """

    policy: Policy
    preset: Preset | None
    order: tuple[Means, ...]
    off: frozenset[str]
    words: str


class Commands:
    """The commands of the plans a client holds. Pure but for its log."""

    def __init__(self) -> None:
        self._of_host: dict[str, tuple[HostPlan, Command | None]] = {}
        self._made: dict[bytes, Command] = {}
        self._unknown: set[str] = set()

    def find(self, host_plan: HostPlan, request: HttpRequest, business: str) -> Command | None:
        """Say what is commanded for a request; None for nothing.

        Args:
            host_plan: what dispatch says of the request's host.
            request: as it is sent.
            business: its tag.
        """
        held = self._of_host.get(request.host)
        if held is not None and held[0] is host_plan:
            return held[1]
        if host_plan.paths:
            policy = policy_for(host_plan, request.method, _path(request), _query(request), _headers(request), business)
            return None if policy == _NOTHING else self._command(policy)
        policy = policy_for(host_plan)
        command = None if policy == _NOTHING else self._command(policy)
        _keep(self._of_host, request.host, (host_plan, command))
        return command

    def read(self, plan: Plan) -> None:
        """Tell the log what a new plan switches off that is not known here."""
        self._off(plan.disabled)

    def _off(self, names: tuple[str, ...]) -> frozenset[str]:
        return frozenset(name for name in names if name in _SWITCHES or self._told_of(name, "disabled"))

    def _command(self, policy: Policy) -> Command:
        """Give the command of a policy; of equal ones the same."""
        said = msgspec.json.encode(policy)
        made = self._made.get(said)
        if made is None:
            made = self._make(policy, said)
            _keep(self._made, said, made)
        return made

    def _make(self, policy: Policy, said: bytes) -> Command:
        off = self._off(policy.disabled)
        if policy.clear is False:
            off |= {Means.CLEAR.value}
        if policy.relay is False:
            off |= {Means.RELAY.value}
        order = tuple(_MEANS[name] for name in policy.order if name in _MEANS or self._told_of(name, "order"))
        words = f"the plan says {said.decode('utf-8')[: limits.REASON_CHARS_MAX]}"
        return Command(policy, self._preset(policy.preset, policy.tries), order, off, words)

    def _preset(self, name: str, tries: Mapping[str, int]) -> Preset | None:
        preset = presets.PRESETS.get(name)
        if preset is None and name:
            self._told_of(name, "preset")
        known = {each: min(number, _MOST[each]) for each, number in tries.items() if each in _MOST}
        for each in tries.keys() - known.keys():
            self._told_of(each, "tries")
        if "attempts" in known:
            known["attempts"] = max(1, known["attempts"])
        if not known:
            return preset
        base = presets.ORDINARY if preset is None else preset
        if base.tls_only:
            known["clear"] = 0
        return base.with_tries(known)

    def _told_of(self, name: str, where: str) -> bool:
        """Say once that a name of the plan's means nothing here; False."""
        if name not in self._unknown and len(self._unknown) < limits_means.PLAN_NAMES_TOLD_MAX:
            self._unknown.add(name)
            _log.warning("the plan names %.40r (%s), which this client does not know", name, where)
        return False


def _keep(table: dict[K, V], key: K, value: V) -> None:
    """Put something into a table that holds no more than a plan may: what came first goes first."""
    if len(table) >= limits.PLAN_HOSTS_MAX:
        del table[next(iter(table))]
    table[key] = value


def _path(request: HttpRequest) -> str:
    return request.target.decode("latin-1").partition("?")[0]


def _query(request: HttpRequest) -> Iterator[tuple[str, str]]:
    """Give the parameters; nothing is decoded before somebody asks for the first."""
    yield from parse_qsl(request.target.decode("latin-1").partition("?")[2], keep_blank_values=True)


def _headers(request: HttpRequest) -> Iterator[tuple[str, str]]:
    for name, value in request.headers:
        yield name.decode("latin-1"), value.decode("latin-1")
