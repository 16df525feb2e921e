"""Whom a client asks for a plan: in which order, when the next one beside a silent one, and who is left alone how long.

The ladder: through the long connection that stands; the centres of the own unit; those of other units; the addresses of
the bundle; all of these again in clear HTTP, for the signature protects a plan there too; then a centre's name, by DNS
over HTTPS and by the system's DNS. Who fails or lies sinks below all that are well, and is tried again (`sniff`) beside
an answered question, after pauses that grow. Pure: time and chance come as arguments.
"""

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from stormline.core import limits_network as limits
from stormline.policy.estimate import DurationSketch, sound


class Rung(enum.IntEnum):
    """Where a way to a centre is known from, the best first."""

    LINE = 0
    """The long connection that stands."""
    OWN = 1
    """A centre of the own unit, named by a plan or the bundle."""
    OTHER = 2
    """A centre of another unit."""
    BOOTSTRAP = 3
    """An address of the bundle without a unit."""
    DOH = 4
    """A centre's name, found by DNS over HTTPS."""
    DNS = 5
    """A centre's name, found by the system's resolver."""


class Way(NamedTuple):
    """One way to ask.

    Attributes:
        rung: where it is known from.
        host: IP literal, or a name on the rungs `DOH` and `DNS`; empty for the long connection.
        port: TCP port.
        secure: over TLS; False: clear HTTP, for plans alone, never for what holds a secret.
    """

    rung: Rung
    host: str = ""
    port: int = 0
    secure: bool = True

    @property
    def key(self) -> tuple[str, int, bool, int]:
        """What is remembered of it is remembered under this, from whomever it is known."""
        return self.host, self.port, self.secure, max(self.rung, Rung.BOOTSTRAP) if self.host else 0

    @property
    def rank(self) -> tuple[int, int]:
        """Its place in the ladder: addresses in clear HTTP come after all addresses over TLS, and before names."""
        by_name = self.rung >= Rung.DOH
        return (2 if by_name else 0 if self.secure else 1), self.rung

    def __str__(self) -> str:
        """Name it for people."""
        if not self.host:
            return "the long connection"
        host = f"[{self.host}]" if ":" in self.host else self.host
        how = {Rung.DOH: " by DNS over HTTPS", Rung.DNS: " by DNS"}.get(self.rung, "")
        return f"{host}:{self.port}{how}{'' if self.secure else ' in clear HTTP'}"


def ladder(ways: Iterable[Way]) -> tuple[Way, ...]:
    """Put ways in order, each once, on its best rung; at most `limits.CENTRES_MAX`. Equal ones stay as they stand."""
    best: dict[tuple[str, int, bool, int], Way] = {}
    for way in ways:
        held = best.get(way.key)
        if held is None or way.rank < held.rank:
            best[way.key] = way
    return tuple(sorted(best.values(), key=lambda way: way.rank)[: limits.CENTRES_MAX])


class _Sunk:
    """A way that failed last time."""

    __slots__ = ("failures", "until")

    def __init__(self) -> None:
        self.failures = 0
        self.until = 0.0


class Centres:
    """What a client has learned of the ways to ask; one for all its questions."""

    __slots__ = ("_sunk", "_waits")

    def __init__(self) -> None:
        self._sunk: dict[tuple[str, int, bool, int], _Sunk] = {}
        self._waits = DurationSketch()

    @property
    def stagger_s(self) -> float:
        """Head start of each way before the next is asked beside it: what most answers took, within bounds."""
        known = self._waits.quantile(limits.ASK_STAGGER_QUANTILE)
        if known is None or len(self._waits) < limits.ASK_STAGGER_SAMPLES_MIN:
            return limits.ASK_STAGGER_S
        return min(max(known, limits.ASK_STAGGER_S_MIN), limits.ASK_STAGGER_S_MAX)

    def plan(self, ways: Iterable[Way]) -> tuple[Way, ...]:
        """Give the order in which to ask: those that are well by the ladder, then the sunk, the first due first."""
        ordered = ladder(ways)
        well = [way for way in ordered if way.key not in self._sunk]
        sunk = [way for way in ordered if way.key in self._sunk]
        sunk.sort(key=lambda way: self._sunk[way.key].until)
        return (*well, *sunk)

    def sniff(self, ways: Iterable[Way], answered: Way, now: float) -> Way | None:
        """Give one sunk way above the one that answered whose pause is over, to be asked beside; None for none."""
        for way in ladder(ways):
            sunk = self._sunk.get(way.key)
            if sunk is not None and sunk.until <= now and way.rank < answered.rank:
                return way
            if sunk is not None and sunk.until <= now and way.rank == answered.rank and way.key != answered.key:
                return way
        return None

    def observe_answer(self, way: Way, took_s: float, now: float) -> None:
        """It gave an answer that may be trusted."""
        self._sunk.pop(way.key, None)
        if (took := sound(took_s, limits.ASK_TRY_S_MAX)) is not None:
            self._waits.observe(took, now)

    def observe_failure(self, way: Way, now: float, chance: float) -> None:
        """It failed, lied, or was silent for the whole of its time.

        Args:
            way: which.
            now: monotonic seconds.
            chance: 0 to 1, spreads the clients of a centre that came back.
        """
        sunk = self._sunk.pop(way.key, None) or _Sunk()
        self._sunk[way.key] = sunk
        while len(self._sunk) > limits.CENTRES_MAX:
            del self._sunk[next(iter(self._sunk))]
        pause_s = min(limits.SNIFF_PAUSE_S * 2.0 ** min(sunk.failures, 16), limits.SNIFF_PAUSE_S_MAX)
        sunk.failures += 1
        sunk.until = now + pause_s * (0.5 + 0.5 * chance)

    def next_timer(self) -> float | None:
        """Give when the first sunk way may be sniffed again, None where none is sunk."""
        return min((sunk.until for sunk in self._sunk.values()), default=None)

    def reset(self) -> None:
        """The network has changed: what failed there may work here."""
        self._sunk.clear()


class Question:
    """One question that runs down an order: the next way at once where one failed, and beside a silent one in time."""

    __slots__ = ("_begin_at", "_live", "_stagger_s", "_waiting")

    def __init__(self, order: Sequence[Way], stagger_s: float, now: float) -> None:
        self._waiting = list(order)
        self._live: set[Way] = set()
        self._stagger_s = stagger_s
        self._begin_at = now

    @property
    def over(self) -> bool:
        """Nothing is under way and nobody is left to be asked."""
        return not self._live and not self._waiting

    def plan(self, now: float) -> tuple[Way, ...]:
        """Give the ways to be asked from now on; they count as under way."""
        if not self._waiting or now < self._begin_at or len(self._live) >= limits.ASK_BESIDE_MAX:
            return ()
        way = self._waiting.pop(0)
        self._live.add(way)
        self._begin_at = now + self._stagger_s
        return (way,)

    def observe(self, way: Way, now: float) -> None:
        """One that was under way has failed."""
        self._live.discard(way)
        self._begin_at = min(self._begin_at, now)

    def next_timer(self) -> float | None:
        """Give when `plan` has something next; None where only an outcome can change that."""
        if not self._waiting or len(self._live) >= limits.ASK_BESIDE_MAX:
            return None
        return self._begin_at
