"""Wake-ups and lost links of a heartbeat that learns, beside a fixed one and Mars's, in virtual time.

Each lives through a network that forgets a connection after a silence, and loses others by chance. Mars's smart
heartbeat is written from a description of its rules as they were meant (`stn/src/smart_heartbeat.cc`): 210 s until
three beats were answered on a connection, five equal ones in a row add 60 s up to 580 s, two losses take 80 s off and
end the search; after a week 20 s more are tried. As it stands in its last version the search does not end at all.
"""

import random
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from stormline.bench.results import Row, row
from stormline.core import limits
from stormline.policy.heartbeat import Bounds, Heartbeats

LIMITS_S: Final = (45.0, 60.0, 120.0, 240.0, 300.0, 600.0, 1200.0, 1800.0)
"""After what silence the networks of the bench forget a connection."""
DAY_S: Final = 24 * 3600.0
CHANCE: Final = 0.02
"""Share of beats that are lost by chance on a noisy network."""
_DIAL_S: Final = 1.0
_NETWORK: Final = "n"


class Pace(Protocol):
    """What decides how long a connection is left silent."""

    def next_s(self, now: float) -> float:
        """Give the silence before the next beat."""
        ...

    def answered(self, silence_s: float, now: float) -> None:
        """A beat after this silence was answered."""
        ...

    def lost(self, silence_s: float, now: float) -> None:
        """It was not; another connection stands a second later."""
        ...


class Learned:
    """Ours."""

    def __init__(self, start_s: float | None = None) -> None:
        self.heartbeats = Heartbeats(None if start_s is None else Bounds(start_s=start_s))

    def next_s(self, now: float) -> float:
        """See `Pace`."""
        return self.heartbeats.plan(_NETWORK, now)

    def answered(self, silence_s: float, now: float) -> None:
        """See `Pace`."""
        self.heartbeats.observe(_NETWORK, silence_s, now, alive=True)

    def lost(self, silence_s: float, now: float) -> None:
        """See `Pace`."""
        self.heartbeats.observe(_NETWORK, silence_s, now, alive=False)
        self.heartbeats.dialled(_NETWORK, now + _DIAL_S, worked=True)

    @property
    def settled(self) -> bool:
        """The search is over."""
        return self.heartbeats.settled(_NETWORK)


class Fixed:
    """The same silence for ever."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s

    def next_s(self, now: float) -> float:
        """See `Pace`."""
        return self._silence_s

    def answered(self, silence_s: float, now: float) -> None:
        """See `Pace`."""

    def lost(self, silence_s: float, now: float) -> None:
        """See `Pace`."""


class Mars:
    """The rules of Mars's smart heartbeat, as they were meant."""

    MIN_S, MAX_S, STEP_S, BACK_S, AGAIN_S = 210.0, 580.0, 60.0, 80.0, 20.0
    GUARD, GROWS, SHRINKS, LIFE_S = 3, 5, 2, 7 * DAY_S

    def __init__(self) -> None:
        self._current_s = self.MIN_S
        self._before_s = 0.0
        self._on_this = self._good = self._bad = 0
        self._stable_at: float | None = None

    def next_s(self, now: float) -> float:
        """See `Pace`."""
        return self.MIN_S if self._on_this < self.GUARD else self._current_s

    def answered(self, silence_s: float, now: float) -> None:
        """See `Pace`."""
        self._on_this += 1
        equal, self._before_s = silence_s == self._before_s, silence_s
        if self._on_this <= self.GUARD or (not equal and self._current_s != self.MIN_S):
            return
        self._good += 1
        if self._stable_at is not None:
            if now - self._stable_at >= self.LIFE_S and self._current_s < self.MAX_S:
                self._stable_at, self._current_s = None, self._current_s + self.AGAIN_S
                self._good = self._bad = 0
        elif self._good >= self.GROWS:
            if self._current_s >= self.MAX_S:
                self._stable_at = now
            self._current_s = min(self._current_s + self.STEP_S, self.MAX_S)
            self._good = self._bad = 0

    def lost(self, silence_s: float, now: float) -> None:
        """See `Pace`."""
        guarded, self._on_this, self._good, self._before_s = self._on_this < self.GUARD, 0, 0, 0.0
        if guarded:
            return
        self._bad += 1
        if self._bad >= self.SHRINKS:
            self._bad = 0
            if self._stable_at is None:
                self._current_s, self._stable_at = max(self.MIN_S, self._current_s - self.BACK_S), now
            else:
                self._current_s, self._stable_at = self.MIN_S, None


class Life(NamedTuple):
    """What became of a pace on a network.

    Attributes:
        beats: wake-ups.
        losses: links lost to silence.
        chance_losses: links lost by chance.
        low_s: time spent in silences of less than half of what the network stands.
        last_s: the silence at the end.
        history: each beat: its moment, its silence, and whether it was lost.
    """

    beats: int
    losses: int
    chance_losses: int
    low_s: float
    last_s: float
    history: list[tuple[float, float, bool]]


def live(
    pace: Pace, limit_s: Callable[[float], float], lasts_s: float, *, chance: float = 0.0, seed: int = 1,
    until: Callable[[], bool] = lambda: False,
) -> Life:  # fmt: skip
    """Let a pace live on a network.

    Args:
        pace: what decides.
        limit_s: gives, for a moment, the silence after which the network forgets a connection.
        lasts_s: for how long.
        chance: share of beats that are lost whatever the silence.
        seed: of those.
        until: ends it earlier.
    """
    rng = random.Random(seed)  # noqa: S311
    now = low_s = 0.0
    losses = chance_losses = 0
    history: list[tuple[float, float, bool]] = []
    while now < lasts_s and not until():
        silence_s = pace.next_s(now)
        now += silence_s
        stands_s = limit_s(now)
        forgotten, unlucky = silence_s >= stands_s, rng.random() < chance
        history.append((now, silence_s, forgotten or unlucky))
        low_s += silence_s if silence_s < 0.5 * stands_s else 0.0
        if not forgotten and not unlucky:
            pace.answered(silence_s, now)
            continue
        losses += forgotten
        chance_losses += not forgotten
        now += limits.HEARTBEAT_ANSWER_S
        pace.lost(silence_s, now)
        now += _DIAL_S
    return Life(len(history), losses, chance_losses, low_s, pace.next_s(now), history)


def run() -> list[Row]:
    """Compare the three over a day on each network, and on noisy ones over a week."""
    rows = []
    for limit_s in LIMITS_S:
        ours, mars, fixed = (
            live(pace, _always(limit_s), DAY_S) for pace in (Learned(), Mars(), Fixed(Mars.MIN_S))
        )  # fmt: skip
        rows += [
            _row(f"wake-ups of a day, limit {limit_s:.0f} s", ours.beats, mars.beats, _goal(limit_s, DAY_S)),
            _row(f"links lost in a day, limit {limit_s:.0f} s", ours.losses, mars.losses, 3, unit="links"),
            _row(
                f"links lost in a day, limit {limit_s:.0f} s, fixed", ours.losses, fixed.losses, 3,
                unit="links", peer="fixed 210 s",
            ),
        ]  # fmt: skip
    for limit_s in LIMITS_S:
        ours, mars = (
            live(pace, _always(limit_s), 7 * DAY_S, chance=CHANCE, seed=7) for pace in (Learned(), Mars())
        )  # fmt: skip
        goal = 1.2 * _goal(limit_s, 7 * DAY_S)
        rows += [
            _row(f"wake-ups of a noisy week, limit {limit_s:.0f} s", ours.beats, mars.beats, goal),
            _row(
                f"links lost in a noisy week, limit {limit_s:.0f} s", _all(ours), _all(mars), CHANCE * goal + 7, "links"
            ),
        ]
    return rows


def _goal(limit_s: float, lasts_s: float) -> float:
    """Give the beats of who stays at 0.8 of a limit, and searches before."""
    return lasts_s / (0.8 * limit_s) + 25


def _always(limit_s: float) -> Callable[[float], float]:
    return lambda now: limit_s


def _all(life: Life) -> int:
    return life.losses + life.chance_losses


def _row(name: str, ours: float, peer_value: float, goal: float, unit: str = "beats", peer: str = "Mars") -> Row:
    return row(name, ours, unit, goal=goal, peer=peer, peer_value=peer_value)
