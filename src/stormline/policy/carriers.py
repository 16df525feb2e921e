"""Which carrier the long connection is tried by on each network, and when a better one is tried again.

Carriers have an order, the best first (`RANK`): what is cheaper and tells more stands before what passes through more
networks. A carrier goes behind the others on one network after `limits_carriers.CARRIER_FAILURES_MAX` failures in a
row, once another stands there: where nothing passes, nothing is learned. While a lesser one stands the better ones are
tried beside it, after pauses that double with each trial in vain.

What counts as a failure is the caller's to say: no connection, or one that ended before its session stood. A gateway
that refuses by a code has been reached, and is none.
"""

import math
from collections.abc import Iterable
from typing import Final

from stormline.core import limits_carriers
from stormline.policy.recent import RecentTable
from stormline.policy.snapshot import CarrierRecord

RANK: Final = ("sl-tls", "sl-wss", "sl-short")
"""`wire.plan.Carrier` of long connections, the best first."""


class _State:
    """One carrier on one network."""

    __slots__ = ("behind", "failures", "pause_s", "try_at")

    def __init__(self) -> None:
        self.failures = 0
        self.behind = False
        self.pause_s = limits_carriers.CARRIER_CLIMB_FIRST_S
        self.try_at = math.inf


class CarrierPolicy:
    """What passes where. One for a client; all tables are bounded, what is unused for longest goes first."""

    __slots__ = ("_networks",)

    def __init__(self) -> None:
        self._networks = RecentTable[str, dict[str, _State]](limits_carriers.CARRIER_NETWORKS_MAX, dict)

    def _state(self, network: str, carrier: str) -> _State:
        return self._networks.use(network).setdefault(carrier, _State())

    def order(self, network: str, offered: Iterable[str]) -> tuple[str, ...]:
        """Give the carriers that are offered and known, in the order to try them in."""
        known = self._networks.find(network) or {}
        blank = _State()

        def place(carrier: str) -> tuple[bool, int, int]:
            state = known.get(carrier, blank)
            return state.behind, state.failures // limits_carriers.CARRIER_FAILURES_MAX, RANK.index(carrier)

        return tuple(sorted({each for each in offered if each in RANK}, key=place))

    def failed(self, network: str, carrier: str) -> None:
        """Take note that a session did not come to stand by a carrier."""
        if carrier in RANK:
            self._state(network, carrier).failures += 1

    def stands(self, network: str, carrier: str, now: float) -> None:
        """Take note that a session stands by a carrier: better ones that failed are judged by that."""
        if carrier not in RANK:
            return
        self._networks.use(network)[carrier] = _State()
        for better in RANK[: RANK.index(carrier)]:
            state = self._networks.use(network).get(better)
            if state is None or not (state.failures or state.behind):
                continue
            state.behind = state.behind or state.failures >= limits_carriers.CARRIER_FAILURES_MAX
            state.failures = 0 if state.behind else state.failures
            if state.try_at == math.inf:
                state.try_at = now + state.pause_s

    def stalled(self, network: str, carrier: str) -> None:
        """Take note that what stood by a carrier has fallen silent, and a lesser one takes its place.

        It counts as a failure: the better one is tried again after the first pause, and goes behind where it stalls
        again before it has stood.
        """
        self.failed(network, carrier)

    def climb(self, network: str, standing: str, now: float) -> str | None:
        """Give a better carrier than the standing one that is due to be tried beside it, None where none is."""
        due = self.next_timer(network, standing)
        if due is None or due > now:
            return None
        known = self._networks.find(network) or {}
        return next(each for each in RANK if each in known and known[each].try_at <= now)

    def next_timer(self, network: str, standing: str) -> float | None:
        """Give when `climb` will have something, None where it never will by itself."""
        known = self._networks.find(network) or {}
        better = RANK[: RANK.index(standing)] if standing in RANK else ()
        due = min((known[each].try_at for each in better if each in known), default=math.inf)
        return None if due == math.inf else due

    def tried(self, network: str, carrier: str, now: float, *, good: bool) -> None:
        """Take note how such a trial ended: one that is good is tried first from now on.

        Where it is not used yet, because the standing connection is busy, it comes up again after the first pause.
        """
        state = self._state(network, carrier)
        state.failures = 0
        if good:
            state.behind = False
            state.pause_s = limits_carriers.CARRIER_CLIMB_FIRST_S
        else:
            state.behind = True
            state.pause_s = min(2 * state.pause_s, limits_carriers.CARRIER_CLIMB_MAX_S)
        state.try_at = now + state.pause_s

    # -- between two starts --------------------------------------------------------------------------------------

    def export(self, network: str, wall_s: float) -> tuple[CarrierRecord, ...]:
        """Give what is to be kept of a network.

        Args:
            network: which.
            wall_s: the wall clock less the monotonic one.
        """
        known = self._networks.find(network) or {}
        return tuple(
            CarrierRecord(name, round(state.try_at + wall_s), round(state.pause_s))
            for name, state in known.items()
            if state.behind and state.try_at < math.inf
        )

    def restore(self, network: str, kept: Iterable[CarrierRecord], now: float, wall_s: float) -> None:
        """Give back what was kept; what is known already stands.

        A trial comes no later than the longest pause from now, whatever the clock was set to meanwhile.
        """
        for record in kept:
            if record.name not in RANK or record.name in (self._networks.find(network) or {}):
                continue
            state = self._state(network, record.name)
            state.behind = True
            state.pause_s = min(
                max(float(record.pause_s), limits_carriers.CARRIER_CLIMB_FIRST_S), limits_carriers.CARRIER_CLIMB_MAX_S
            )
            state.try_at = now + min(max(0.0, record.try_at - wall_s - now), state.pause_s)
