"""Which way out of the machine a request takes, where there is more than one: WiFi, and cellular beside it.

    policy.routes((Way("wlan0"), Way("wwan0", metered=True)), now)      # in the order the system prefers them
    policy.plan(now)                                                     # ("wlan0", "wwan0"): where a request starts
    policy.beside("wlan0", dark_s=1.4, now=now)                          # "wwan0": the WiFi is dark, try there too

The system moves everything to another interface only when the first goes away. A WiFi that stays up and carries nothing
is not left for minutes. So: where nothing at all comes over the first way although something is owed, one more attempt
is made over the second. Where that brings an answer while the first is still dark, the first is dead: what begins from
then on takes the second, and the first is asked now and then, with one TCP connection, whether it is back. Whatever
comes over it, to that question or to anybody, makes it first again. One that keeps relapsing is asked less and less.

A metered way carries no more than a bound of bytes (a leaky bucket); where that is used up it is no way out.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from stormline.core import limits
from stormline.policy.budget import FlowLimit

_NOTHING: Final = ""


class Way(NamedTuple):
    """One way out.

    Attributes:
        name: of the interface.
        metered: its bytes cost somebody money.
    """

    name: str
    metered: bool = False


class _State:
    """What is known of one way."""

    __slots__ = ("back_at", "dark_since", "dark_told_at", "dead", "flow", "pause_s", "probe_at", "probing", "way")

    def __init__(self, way: Way, flow: FlowLimit | None) -> None:
        self.way = way
        self.flow = flow
        self.dark_since: float | None = None
        self.dark_told_at = 0.0  # when somebody last waited in it
        self.dead = False
        self.probe_at = 0.0
        self.probing = False
        self.pause_s = limits.PATH_PROBE_S
        self.back_at: float | None = None  # when it was last believed to be back


class PathPolicy:
    """The ways out of one machine, for one client. Memory: `limits.PATHS_MAX` ways.

    Args:
        metered_bytes: what a metered way may carry at once where it is not the system's own choice.
        metered_bytes_per_s: how fast that room comes back.
    """

    __slots__ = ("_bytes", "_bytes_per_s", "_ways")

    def __init__(
        self,
        *,
        metered_bytes: int = limits.PATH_METERED_BYTES,
        metered_bytes_per_s: float = limits.PATH_METERED_BYTES_PER_S,
    ) -> None:
        self._bytes = metered_bytes
        self._bytes_per_s = metered_bytes_per_s
        self._ways: dict[str, _State] = {}

    def routes(self, ways: Sequence[Way]) -> None:
        """Take the ways there are now, in the system's order; more than `limits.PATHS_MAX` are left out.

        What was known of one that is still there stays.
        """
        found: dict[str, _State] = {}
        for way in ways[: limits.PATHS_MAX]:
            known = self._ways.get(way.name)
            if known is None or known.way != way:
                flow = FlowLimit(bytes_per_s=self._bytes_per_s, burst_bytes=self._bytes) if way.metered else None
                known = _State(way, flow)
            found.setdefault(way.name, known)
        self._ways = found

    def plan(self, now: float) -> tuple[str, ...]:
        """Give the ways in the order in which a request should take them; empty where the system has none.

        The dead come last, and so do those whose bytes are used up; the system's first choice is always among them.
        """
        first = next(iter(self._ways), _NOTHING)
        good = [name for name, way in self._ways.items() if not way.dead and (name == first or _has_room(way, now))]
        return (*good, first) if first and first not in good else tuple(good)

    def beside(self, name: str, *, dark_s: float, now: float) -> str | None:
        """Say where to make one more attempt for a request that waits in the dark, None for nowhere.

        Args:
            name: the way it is on.
            dark_s: for how long nothing at all has come over that way although something was owed.
            now: monotonic seconds.
        """
        way = self._ways.get(name)
        if way is None or dark_s < limits.PATH_DARK_S:
            return None
        since = now - dark_s
        way.dark_since = since if way.dark_since is None else min(way.dark_since, since)
        way.dark_told_at = now
        others = [state for other, state in self._ways.items() if other != name and _has_room(state, now)]
        # Darkness of which nobody has told for a while may be over; a dead way may be back before it is asked.
        maybe = [each for each in others if each.dark_since is None or now - each.dark_told_at >= limits.PATH_PROBE_S]
        return next((each.way.name for each in sorted(maybe, key=lambda each: each.dead)), None)

    def heard(self, name: str, now: float) -> None:
        """Something came over a way, whatever it was."""
        way = self._ways.get(name)
        if way is None:
            return
        way.dark_since = None
        if way.dead:
            way.dead = way.probing = False
            way.back_at = now
        elif way.back_at is not None and now - way.back_at >= limits.PATH_STEADY_S:
            way.pause_s, way.back_at = limits.PATH_PROBE_S, None

    def answered(self, name: str, now: float) -> str | None:
        """A request was answered over a way; give the one that is dead by that, None for none.

        Args:
            name: the way.
            now: monotonic seconds.
        """
        if name not in self._ways:
            return None  # it went away meanwhile: it can take nobody's place
        self.heard(name, now)
        for other, state in self._ways.items():
            if other != name and state.dark_since is not None and not state.dead:
                relapsed = state.back_at is not None and now - state.back_at < limits.PATH_STEADY_S
                state.pause_s = min(2.0 * state.pause_s, limits.PATH_PROBE_S_MAX) if relapsed else limits.PATH_PROBE_S
                state.dead = True
                state.probing = False
                state.probe_at = now + state.pause_s
                return other
        return None

    def probe(self, now: float) -> str | None:
        """Give a dead way that should be asked now whether it is back; it counts as being asked until `probed`."""
        for name, way in self._ways.items():
            if way.dead and not way.probing and now >= way.probe_at:
                way.probing = True
                return name
        return None

    def probed(self, name: str, now: float, *, alive: bool) -> None:
        """A way was asked."""
        way = self._ways.get(name)
        if way is None or not way.dead:
            return
        way.probing = False
        way.probe_at = now + way.pause_s
        if alive:
            self.heard(name, now)

    def carried(self, name: str, size_bytes: int, now: float) -> None:
        """A way that was not the system's first choice carried so many bytes for us."""
        way = self._ways.get(name)
        if way is not None and way.flow is not None and name != next(iter(self._ways)):
            way.flow.add(size_bytes, now)

    @property
    def troubled(self) -> bool:
        """A way is dark or dead: what comes over any should be told."""
        return any(way.dead or way.dark_since is not None for way in self._ways.values())

    def next_timer(self) -> float | None:
        """Give the moment of the next question to a dead way, None where there is none to ask."""
        return min((way.probe_at for way in self._ways.values() if way.dead and not way.probing), default=None)


def _has_room(way: _State, now: float) -> bool:
    return way.flow is None or way.flow.take(0, now) == 0.0
