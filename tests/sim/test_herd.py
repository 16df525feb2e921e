"""2,000 clients that lost their gateway in the same moment, and the gateway that is back 2 s later, on made-up time.

Both sides' real policies, and a model of one core between them: each client costs it 2.5 ms (a handshake and a costly
token), in the order in which they are begun. `stormline bench herd` is the same with processes and TLS.
"""

import heapq
import itertools
import random
from collections import Counter, deque

import pytest

from stormline.core import limits, limits_carriers
from stormline.policy.intake import Intake
from stormline.policy.reconnect import Reconnect

CLIENTS = 2000
AWAY_S = 2.0
COST_S = 0.0025
TICK_S = limits_carriers.INTAKE_PAUSE_S


class Herd:
    """The clients, the gateway, and what happened.

    Attributes:
        firsts: moments of first tries.
        tries: all of them.
        back: moments at which clients were back.
        lag_s: how late the gateway's loop was at worst.
    """

    def __init__(self, seed: int, *, advised: bool = True, paced: bool = True) -> None:
        self.chance = random.Random(seed)
        self.paced = paced
        self.intake = Intake(AWAY_S)
        self.spread_s = self.intake.return_spread_s(CLIENTS) if advised else 0.0
        self.lines = [Reconnect() for _ in range(CLIENTS)]
        self.due: list[tuple[float, int]] = []
        self.firsts: list[float] = []
        self.tries = 0
        self.back: dict[int, float] = {}
        self.lag_s = 0.0
        for number, line in enumerate(self.lines):
            line.observe_success(-100.0, spread_s=self.spread_s)
            line.observe_loss(0.0, self.chance.random())
            self._again(number)
        self.waiting: deque[tuple[float, int]] = deque()
        self.served: deque[tuple[float, float, int]] = deque()  # when done, since when it is tried, by whom
        self.busy_until = AWAY_S

    def _again(self, number: int) -> None:
        due = self.lines[number].keep_timer()
        assert due is not None, "gave up for good"
        heapq.heappush(self.due, (due, number))

    def _failed(self, number: int, now: float, retry_after_s: float | None = None) -> None:
        self.lines[number].observe_failure(now, self.chance.random(), retry_after_s=retry_after_s)
        self._again(number)

    def run(self, until_s: float) -> None:
        looks = itertools.count(AWAY_S, limits_carriers.INTAKE_LOOK_S)
        look, tried, now = next(looks), set(), 0.0
        while now < until_s and len(self.back) < CLIENTS:
            now += TICK_S
            while self.due and self.due[0][0] <= now:
                at, number = heapq.heappop(self.due)
                self.tries += 1
                if number not in tried:
                    tried.add(number)
                    self.firsts.append(at)
                if now < AWAY_S:
                    self._failed(number, now)
                else:
                    self.waiting.append((at, number))
            if now >= look and now >= self.busy_until:
                lag_s = now - look
                self.lag_s = max(self.lag_s, lag_s)
                self.intake.look(lag_s)
                while look <= now:
                    look = next(looks)
            if now >= AWAY_S:
                self._serve(now)

    def _serve(self, now: float) -> None:
        while self.served and self.served[0][0] <= now:
            done, since, number = self.served.popleft()
            self.intake.finished()
            if done - since > limits.LINK_CONNECT_TIMEOUT_S:
                self._failed(number, now)
            elif self.paced and self.intake.overloaded:
                self._failed(number, now, Intake.retry_after_s(self.chance.random()))
            else:
                self.back[number] = now
        if now < self.busy_until:  # one loop: it begins nobody while it works
            return
        while self.waiting:
            since, number = self.waiting[0]
            if self.paced and now - since > limits_carriers.INTAKE_WAIT_S:
                self.waiting.popleft()
                self._failed(number, now)
                continue
            if self.paced and not self.intake.room(now):
                return
            self.waiting.popleft()
            self.intake.began()
            self.busy_until = max(self.busy_until, now) + COST_S
            self.served.append((self.busy_until, since, number))


def crowded(herd: Herd) -> float:
    """Give the largest share of the first tries in any tenth of a second."""
    return max(Counter(int(at * 10) for at in herd.firsts).values()) / CLIENTS


@pytest.mark.parametrize("seed", range(10))
def test_all_are_back_soon_without_a_crush_and_nobody_is_held_up(seed):
    herd = Herd(seed)
    herd.run(60.0)
    assert crowded(herd) <= 0.05
    assert len(herd.back) == CLIENTS
    assert herd.tries <= 2 * CLIENTS
    assert herd.lag_s <= 0.5


def test_without_the_advice_they_come_in_a_crush():
    herd = Herd(1, advised=False)
    herd.run(60.0)
    assert crowded(herd) > 0.05


def test_without_the_pace_those_who_are_connected_are_held_up():
    herd = Herd(1, paced=False, advised=False)
    herd.run(60.0)
    assert herd.lag_s > 0.5
