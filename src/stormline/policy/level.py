"""The quality of a network in five levels: what it would carry now, from what a client sees of it for free.

    book = LevelBook()
    book.at(network.id, now).observe_round_trip(0.064, now)        # a handshake, a first byte less the server's time
    quality = book.at(network.id, now).quality(now, silent_s=0.0)  # .level, .since_s, .confidence, .evidence
    behaviour(quality.carries).second_lane                         # what follows from it

The names are the five grades of absolute category rating (ITU-T P.800): excellent, good, fair, poor, bad. They are the
words radio and speech engineers grade with, the upper four are those of Facebook's connection class (there "moderate"
for fair), and none of them claims a technology: a crowded 4G cell is poor, and Chromium's "2g" would be a lie there.

One function, `level_of`, says what a round trip, a rate and a loss are worth; it is both the truth of a modelled link
and the judgement of what was measured. `docs/explanation/quality.md` has its thresholds with their sources.

`quality.State` is something else: how requests went (Mars), not what the link could do.
"""

import enum
import math
from collections import deque
from typing import Final, NamedTuple

from stormline.core import limits, limits_level
from stormline.policy.estimate import sound
from stormline.policy.recent import RecentTable

# -- levels -----------------------------------------------------------------------------------------------------------


class Level(enum.StrEnum):
    """What a network would carry."""

    UNKNOWN = "unknown"
    """Nothing was measured lately."""
    BAD = "bad"
    """Dark, or hardly anything: one small request at a time."""
    POOR = "poor"
    """2G: text, slowly."""
    FAIR = "fair"
    """3G: pages, one after another."""
    GOOD = "good"
    """4G: pages with pictures."""
    EXCELLENT = "excellent"
    """Nobody notices the network."""

    @property
    def rank(self) -> int:
        """0 for unknown, then 1 (bad) to 5 (excellent)."""
        return _RANKS[self]

    @property
    def weak(self) -> bool:
        """True for bad and poor: what can wait should, and nothing should be asked for twice."""
        return self is Level.BAD or self is Level.POOR


LEVELS: Final = (Level.UNKNOWN, Level.BAD, Level.POOR, Level.FAIR, Level.GOOD, Level.EXCELLENT)
"""By rank."""
_RANKS: Final = {level: rank for rank, level in enumerate(LEVELS)}

RESPONSE_S: Final = (2.0, 0.8, 0.272, 0.1)
"""A small exchange in less than that is poor, fair, good, excellent; else bad. 2 s and 272 ms: Chromium's edges of
slow-2G and of 4G (`net/nqe`: 2010 and 272 ms); 0.8 s: both ways of the 400 ms that ITU-T G.114 allows a conversation;
0.1 s: what people take for immediate (Miller 1968)."""
BYTES_PER_S: Final = (8 * 1024.0, 32 * 1024.0, 128 * 1024.0, 512 * 1024.0)
"""From that on poor, fair, good, excellent: 64 kbit/s and thrice the fourfold. Between them lie what Chromium calls
typical of slow-2G, 2G, 3G and 4G (40, 75, 400, 1600 kbit/s) and the edges of Facebook's classes (150, 550, 2000)."""
SEGMENT_BYTES: Final = 1400.0
MATHIS: Final = 1.22
"""TCP carries at most 1.22 segments a round trip by the root of the loss (Mathis, Semke, Mahdavi, Ott 1997)."""
RTO_LEAST_S: Final = 0.3
RTO_VARIANCE_S: Final = 0.2
"""A loss costs a retransmission time-out: the round trip and 0.2 s, at least 0.3 s (as `timeouts` reckons)."""
FIRST_FLIGHT_BYTES: Final = 10 * SEGMENT_BYTES
SLOW_START_SLACK: Final = 1.5
"""A body within this factor of what slow start alone needs was not held up by the link."""
SLACK: Final = 1.2
"""A level is left only where a threshold is passed by a fifth (Facebook's class does the same)."""


def response_s(rtt_s: float, loss: float) -> float:
    """Give what a small exchange takes in the mean, seconds: a round trip, and a time-out for each loss of either way.

    Args:
        rtt_s: round trip without loss.
        loss: share of packets lost in each direction, 0 to 1; 1 (dark) gives infinity.
    """
    if loss >= 1.0:
        return math.inf
    return rtt_s + 2.0 * loss / (1.0 - loss) * max(RTO_LEAST_S, rtt_s + RTO_VARIANCE_S)


def bulk_bytes_per_s(bytes_per_s: float, rtt_s: float | None, loss_events: float) -> float:
    """Give what TCP gets out of a link: its rate, less where losses hold it back (Mathis).

    Args:
        bytes_per_s: of the link.
        rtt_s: round trip; None: losses are not reckoned with.
        loss_events: share of packets with which a loss begins: TCP slows down once for all that are lost together.
    """
    if loss_events <= 0.0 or not rtt_s:
        return bytes_per_s
    return min(bytes_per_s, MATHIS * SEGMENT_BYTES / (rtt_s * math.sqrt(loss_events)))


def level_of(
    rtt_s: float | None,
    bytes_per_s: float | None,
    loss: float = 0.0,
    *,
    loss_events: float | None = None,
    slack: float = 1.0,
) -> Level:
    """Say what a link is worth: the worse of what small exchanges and what large ones would find.

    Pure, and monotone: a shorter round trip, a higher rate or less loss never gives a worse level.

    Args:
        rtt_s: round trip of a small packet without loss; None where nobody knows.
        bytes_per_s: rate towards the device; None where nobody knows.
        loss: share of packets lost in each direction, 0 to 1; 1: dark.
        loss_events: share with which a loss begins, where several are lost at once; None: as `loss`.
        slack: above 1 lenient, below 1 strict, by this factor in each threshold.

    Returns:
        `Level.UNKNOWN` where neither round trip nor rate is known, and not all is lost.
    """
    if loss >= 1.0:
        return Level.BAD
    ranks = []
    if rtt_s is not None:
        took = response_s(rtt_s, loss) / slack
        ranks.append(1 + sum(took < edge for edge in RESPONSE_S))
    if bytes_per_s is not None:
        rate = bulk_bytes_per_s(bytes_per_s, rtt_s, loss if loss_events is None else loss_events) * slack
        ranks.append(1 + sum(rate >= edge for edge in BYTES_PER_S))
    return LEVELS[min(ranks, default=0)]


SIGNAL_DBM: Final = {"wifi": (-88, -77, -66, -55), "cell": (-128, -118, -108, -98)}
"""From that on one bar, two, three, four; Android's for the RSSI of WiFi and the RSRP of LTE."""


def bars(kind: str, signal_dbm: int | None) -> int | None:
    """Give the bars, 0 to 4, that people see for a radio signal; None where nobody can tell.

    Args:
        kind: of the network, one of `policy.network.KINDS`.
        signal_dbm: its strength, None where unknown.
    """
    edges = SIGNAL_DBM.get(kind)
    return None if edges is None or signal_dbm is None else sum(signal_dbm >= edge for edge in edges)


# -- what a level changes ---------------------------------------------------------------------------------------------
class Behaviour(NamedTuple):
    """What a client does at one level.

    Attributes:
        requests_max: requests on their way at once, over all hosts, before others wait: about what the level's lowest
            rate answers in a second, at 4 KB an answer.
        concurrency: share of a host's own bound of requests at once that may be used.
        second_lane: another connection may be opened beside a silent one, and a read be asked for twice: its
            handshake (6 KB) and the second answer cost nobody an answer.
        patience: factor on the path's part of time-outs, at least. Measured round trips and Mars's states have their
            own; the larger counts.
        stagger_s: least head start of an address before the next is tried beside it.
        prefetch: what nobody has asked for yet may be fetched.
        large_wait: large bodies wait until no key request is under way.
        heartbeat_answer: factor on how long a ping's answer may take before the connection is given up.
    """

    requests_max: int
    concurrency: float
    second_lane: bool
    patience: float
    stagger_s: float
    prefetch: bool
    large_wait: bool
    heartbeat_answer: float


BEHAVIOUR: Final = {
    Level.EXCELLENT: Behaviour(64, 1.0, True, 1.0, limits.CONNECT_STAGGER_S_MIN, True, False, 1.0),
    Level.GOOD: Behaviour(32, 1.0, True, 1.0, limits.CONNECT_STAGGER_S_MIN, True, False, 1.0),
    Level.FAIR: Behaviour(8, 0.5, True, 1.25, 0.25, False, True, 1.5),
    Level.POOR: Behaviour(4, 0.25, False, 1.5, 0.5, False, True, 2.0),
    Level.BAD: Behaviour(2, 0.125, False, 2.0, limits.CONNECT_STAGGER_S_MAX, False, True, 3.0),
    # Nothing known: what costs others nothing if the guess is wrong either way.
    Level.UNKNOWN: Behaviour(16, 1.0, False, 1.0, limits.CONNECT_STAGGER_S_MIN, False, False, 1.0),
}
"""The one place that says what a level changes."""


def behaviour(level: Level) -> Behaviour:
    """Give what a client does at a level."""
    return BEHAVIOUR[level]


def requests_max(level: Level) -> int:
    """Give how many requests may be on their way at once over all hosts; for an admission control."""
    return BEHAVIOUR[level].requests_max


def spares_lane(rtt_s: float | None, bytes_per_s: float | None) -> bool:
    """Say whether a link has room for a second connection beside one that is in use.

    Where no rate was measured the round trip must speak for it, so it has to be a level better.
    """
    level = level_of(rtt_s, bytes_per_s)
    if bytes_per_s is None:
        level = LEVELS[max(0, level.rank - 1)]
    return BEHAVIOUR[level].second_lane


def silence_level(silent_s: float, rtt_s: float | None) -> Level:
    """Give the best that a network can be which has been silent although something is owed.

    A packet and its first repetition lost is rare where a network is well: poor. Lost once more: bad, as in the dark.
    Where no round trip is known the silence itself is the least that an exchange takes.

    Args:
        silent_s: how long, the server's time taken off.
        rtt_s: round trip as it was; None where unknown.
    """
    if rtt_s is None or not math.isfinite(rtt_s):
        return level_of(silent_s, None, slack=SLACK)
    rto_s = rtt_s + RTO_VARIANCE_S
    if silent_s < rto_s + rtt_s:
        return Level.EXCELLENT
    return Level.POOR if silent_s < 3.0 * rto_s + rtt_s else Level.BAD


def body_rate(size_bytes: int, seconds: float, rtt_s: float | None) -> float | None:
    """Give the rate that a body shows, bytes per second.

    TCP sends ten segments at once and twice as many with each round trip (RFC 6928, RFC 5681). A body that took hardly
    longer than that found no bound of the link's, and one that fits into the first flight could find none.

    Args:
        size_bytes: of the body.
        seconds: from its first byte to its last.
        rtt_s: round trip; None where unknown, then slow start is not reckoned with.

    Returns:
        Infinity where the link was not the bound, None where the body is too small to tell.
    """
    if size_bytes < limits_level.LEVEL_BODY_BYTES_MIN:
        return None
    rtt = rtt_s or 0.0
    flights = math.ceil(math.log2(size_bytes / FIRST_FLIGHT_BYTES + 1.0))
    if seconds <= SLOW_START_SLACK * (flights - 1) * rtt:
        return math.inf
    # The first flight came before the clock ran, and a round trip with it.
    return size_bytes / max(seconds + rtt, 0.001)


# -- estimation -------------------------------------------------------------------------------------------------------
class Quality(NamedTuple):
    """How good a network is.

    Attributes:
        level: what it would carry at this moment; bad where it is dark.
        carries: the same while it brings anything: silence left out. A slow link needs patience, a dark one needs
            another way; who decides between them asks here.
        since_s: for how long the level has held (seconds).
        confidence: 0 (nothing known) to 1.
        evidence: what speaks for it, in words; no secrets.
    """

    level: Level = Level.UNKNOWN
    carries: Level = Level.UNKNOWN
    since_s: float = 0.0
    confidence: float = 0.0
    evidence: str = "nothing measured"


class _Sample(NamedTuple):
    at: float
    value: float
    weight: float
    signal: int | None


class _Window:
    """The last samples of one thing, each worth half as much after a half-life."""

    __slots__ = ("_doubt", "_half_life_s", "_samples")

    def __init__(self, half_life_s: float, doubt: float = 0.0) -> None:
        """Args: half_life_s: seconds; doubt: weight of an infinite value that never ages, so that old ones fade."""
        self._half_life_s = half_life_s
        self._doubt = doubt
        self._samples: deque[_Sample] = deque(maxlen=limits_level.LEVEL_SAMPLES_MAX)

    def add(self, at: float, value: float, weight: float, signal: int | None) -> None:
        self._samples.append(_Sample(at, value, weight, signal))

    def forget(self, now: float) -> None:
        """Forget what is old, and what is from a future that a stepping clock took back."""
        kept = [each for each in self._samples if abs(now - each.at) <= limits_level.LEVEL_MEMORY_S]
        if len(kept) < len(self._samples):
            self._samples = deque(kept, maxlen=limits_level.LEVEL_SAMPLES_MAX)

    def __len__(self) -> int:
        return len(self._samples)

    def weights(self, now: float, signal: int | None) -> list[float]:
        return [
            each.weight
            * 2.0 ** (-max(0.0, now - each.at) / self._half_life_s)
            * limits_level.LEVEL_SIGNAL_FACTOR
            ** (0 if signal is None or each.signal is None else abs(signal - each.signal))
            for each in self._samples
        ]

    def median(self, now: float, signal: int | None) -> float | None:
        """Give the weighted median: the least value with half of the weight at or below it."""
        if not self._samples:
            return None
        weighed = sorted(zip((each.value for each in self._samples), self.weights(now, signal), strict=True))
        weighed.append((math.inf, self._doubt))
        half = sum(weight for _, weight in weighed) / 2.0 * (1.0 - 1e-9)  # sums round, each in its own way
        seen = 0.0
        for value, weight in weighed:
            seen += weight
            if seen >= half:
                return value
        return weighed[-1][0]


class LevelEstimator:
    """The level of one network. At most 2 * `limits_level.LEVEL_SAMPLES_MAX` samples are kept.

    Guarantees: any samples in any order give a level; unsound numbers are dropped and counted; asking changes nothing
    that later answers depend on but `since_s`; of two networks with samples at the same moments, of which one has the
    shorter or equal round trips and the quicker or equal bodies, that one never has the worse level.
    """

    __slots__ = ("_least", "_rates", "_shown", "_shown_at", "_spell_end", "_trip_at", "_trips", "dropped", "held",
                 "prior", "prior_at")  # fmt: skip

    def __init__(self) -> None:
        self._trips = _Window(limits_level.LEVEL_HALF_LIFE_S)
        self._rates = _Window(limits_level.LEVEL_RATE_HALF_LIFE_S, limits_level.LEVEL_RATE_DOUBT)
        self._trip_at = -math.inf
        self._spell_end = -math.inf
        self._least: deque[tuple[float, Level]] = deque(maxlen=limits_level.LEVEL_SAMPLES_MAX)
        self._shown = Level.UNKNOWN
        self._shown_at = -math.inf
        self.held = Level.UNKNOWN
        """The level after the last sample, hysteresis included; old samples are not looked at."""
        self.prior = Level.UNKNOWN
        self.prior_at = -math.inf
        self.dropped = 0
        """Samples that were not sound."""

    # -- samples ------------------------------------------------------------------------------------------------------
    def observe_round_trip(
        self,
        rtt_s: object,
        now: float,
        *,
        sent_at: float | None = None,
        queued: bool = False,
        signal: int | None = None,
    ) -> None:
        """Take a round trip: a TCP handshake's, a PING's, TCP_INFO's, a first byte's less the server's time.

        Args:
            rtt_s: seconds.
            now: monotonic seconds.
            sent_at: when it began, which is the moment it tells of; None: just now.
            queued: others were under way on the same link; then it says less.
            signal: bars of the radio, 0 to 4, where readable.
        """
        sample = self._sound(rtt_s, limits.SAMPLE_DURATION_S_MAX)
        if sample is None:
            return
        at = now if sent_at is None else min(now, sent_at)
        if at < self._spell_end:
            return  # it waited through a dark spell that counts already
        self._trips.add(at, sample, limits_level.LEVEL_QUEUED_WEIGHT if queued else 1.0, signal)
        self._update(now, signal)

    def observe_rate(
        self,
        bytes_per_s: object,
        now: float,
        *,
        sent_at: float | None = None,
        queued: bool = False,
        signal: int | None = None,
    ) -> None:
        """Take a rate towards the device, as `body_rate` gives it; infinity where a body found no bound.

        Args:
            bytes_per_s: bytes per second.
            now: monotonic seconds.
            sent_at: when its request left; None: just now.
            queued: others shared the link; then it says less.
            signal: bars of the radio, 0 to 4, where readable.
        """
        sample = math.inf if bytes_per_s == math.inf else self._sound(bytes_per_s, limits.SAMPLE_BYTES_PER_S_MAX)
        if sample is None or (now if sent_at is None else sent_at) < self._spell_end:
            return
        self._rates.add(now, sample, limits_level.LEVEL_QUEUED_WEIGHT if queued else 1.0, signal)
        self._update(now, signal)

    def observe_silence(self, silent_s: object, now: float) -> None:
        """Take a dark spell that ended now: nothing came for so long although something was owed.

        What waited through it and is answered afterwards is not counted again.
        """
        sample = self._sound(silent_s, limits.SAMPLE_DURATION_S_MAX)
        if sample is None or sample < limits_level.LEVEL_SILENCE_S:
            return
        self._trips.add(now - sample, sample, 1.0, None)
        self._spell_end = now
        self._update(now, None)

    def remember(self, level: Level, now: float) -> None:
        """Take what is known from before: the network has just come back. It holds until something is measured."""
        self.prior, self.prior_at = level, now

    def age_s(self, now: float) -> float:
        """Give how long ago the last sample came; infinity where there was none."""
        return abs(now - self._trip_at)

    def rtt_s(self, now: float) -> float | None:
        """Give the round trip as it is now, None where none was measured."""
        return self._trips.median(now, None)

    # -- the answer ---------------------------------------------------------------------------------------------------
    def quality(self, now: float, *, silent_s: object = 0.0, signal: int | None = None) -> Quality:
        """Give the quality at `now`.

        Args:
            now: monotonic seconds.
            silent_s: for how long nothing has come although something is owed, the servers' own time taken off; 0
                where nothing is owed.
            signal: bars of the radio, 0 to 4, where readable.
        """
        fresh = self._fresh(now)
        carries = self.held if fresh else Level.UNKNOWN
        words = self._words(now, signal) if fresh else "nothing measured lately"
        # The weight of recent samples, and not less for a while after the last: three good ones make 0.75.
        weight = sum(self._trips.weights(now, signal)) if fresh else 0.0
        confidence = max(weight / (weight + 1.0), 0.3) if fresh else 0.0
        if carries is Level.UNKNOWN:
            carries, words, confidence = self._guess(now, signal, words)
        level = carries
        quiet = sound(silent_s, limits.SAMPLE_DURATION_S_MAX) or 0.0
        if quiet >= limits_level.LEVEL_SILENCE_S:
            worst = silence_level(quiet, self._trips.median(now, signal) if fresh else None)
            if level is Level.UNKNOWN or worst.rank < level.rank:
                level, confidence = worst, quiet / (quiet + limits_level.LEVEL_SILENCE_S)
            words = f"silent for {quiet:.1f} s although something is owed; before: {words}"
        if level is not self._shown:
            self._shown, self._shown_at = level, now
        return Quality(level, carries, max(0.0, now - self._shown_at), round(confidence, 2), words)

    def _guess(self, now: float, signal: int | None, words: str) -> tuple[Level, str, float]:
        """Give what is to be believed where nothing was measured."""
        age = now - self.prior_at
        if self.prior is not Level.UNKNOWN and 0.0 <= age <= limits_level.LEVEL_MEMORY_S:
            return self.prior, f"as it was when this network was left ({self.prior})", 0.2
        if signal is not None:
            level = LEVELS[min(max(signal, 0), 4) + 1]
            return level, f"{signal} of 4 bars, and nothing measured", 0.1
        return Level.UNKNOWN, words, 0.0

    def _fresh(self, now: float) -> bool:
        return self.age_s(now) <= limits_level.LEVEL_MEMORY_S

    def _update(self, now: float, signal: int | None) -> None:
        """Move the level after a sample: down at once where it must, up where all of a while agree."""
        known = self._fresh(now)
        self._trip_at = now
        self._trips.forget(now)
        self._rates.forget(now)
        rtt, rate = self._trips.median(now, signal), self._rates.median(now, signal)
        if not known or self.held is Level.UNKNOWN:
            self.held = level_of(rtt, rate)
            self._least.clear()
            self._least.append((now, self.held))
            return
        most, least = level_of(rtt, rate, slack=SLACK), level_of(rtt, rate, slack=1.0 / SLACK)
        while len(self._least) > 1 and self._least[1][0] <= now - limits_level.LEVEL_RISE_S:
            self._least.popleft()
        rise = min([least, *(level for _, level in self._least)], key=_rank)
        self._least.append((now, least))
        self.held = min(most, max(rise, self.held, key=_rank), key=_rank)

    def _words(self, now: float, signal: int | None) -> str:
        parts = []
        rtt, rate = self._trips.median(now, signal), self._rates.median(now, signal)
        if rtt is not None:
            parts.append(f"round trip {rtt * 1000:.0f} ms ({len(self._trips)} samples)")
        if rate is not None and not math.isinf(rate):
            parts.append(f"{rate * 8 / 1000:.0f} kbit/s")
        return ", ".join(parts) or "nothing measured lately"

    def _sound(self, value: object, largest: float) -> float | None:
        sample = sound(value, largest)
        self.dropped += sample is None
        return sample


def _bars_apart(now: int | None, then: int | None) -> int:
    return 0 if now is None or then is None else abs(now - then)


def _rank(level: Level) -> int:
    return level.rank


class LevelBook:
    """The levels of the networks a client has been on; those unused for longest are forgotten."""

    __slots__ = ("_id", "_networks")

    def __init__(self) -> None:
        self._networks = RecentTable[str, LevelEstimator](limits_level.LEVEL_NETWORKS_MAX, LevelEstimator)
        self._id: str | None = None

    def at(self, network_id: str, now: float) -> LevelEstimator:
        """Give the estimator of the network the client is on; one that has come back starts with what it was.

        Args:
            network_id: names the network; `policy.shape.Network.id`.
            now: monotonic seconds.
        """
        found = self._networks.use(network_id)
        if network_id != self._id:
            if (
                self._id is not None
                and found.held is not Level.UNKNOWN
                and found.age_s(now) <= limits_level.LEVEL_PRIOR_S
            ):
                found.remember(found.held, now)
            self._id = network_id
        return found
