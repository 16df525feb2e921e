"""Races of random connections on virtual time (`simloop.VirtualLoop`).

One winner or an error, nothing left open, order and gate respected.
"""

import asyncio
import contextlib
import math
import ssl

from hypothesis import example, given
from hypothesis import strategies as st

from stormline.core import errors, limits, limits_means
from stormline.core.values import Address
from stormline.outbound.race import Pace, Race
from stormline.testing import simloop

EPSILON_S = 1e-6
_TIMES = st.sampled_from([0.0, 0.01, 0.1, 0.25, 0.3, 0.5, 0.6, 1.0, 2.0, 2.5, 5.0]) | st.integers(0, 6000).map(
    lambda ms: ms / 1000.0
)
_PARTS = st.integers(0, 10).map(lambda tenths: tenths / 10.0)
_TCP = st.tuples(st.sampled_from(["up", "up", "up", "refused", "silent", "timed out"]), _TIMES)
_TLS = st.tuples(
    st.sampled_from(["done", "done", "cut", "refused", "silent", "timed out"]),
    _TIMES,
    st.lists(_PARTS, max_size=3),  # when bytes come, in parts of the time
)
_WAYS = st.lists(st.tuples(_TCP, _TLS), min_size=1, max_size=4)  # of one address: the tries in turn, the last for ever
_PACES = st.builds(
    Pace,
    stagger_s=st.sampled_from([0.0, 0.1, 0.25, 1.0]),
    repeat_s=st.sampled_from([0.3, 1.0, 2.0, math.inf]),
    connect_s=st.sampled_from([0.0, 0.2, 1.0, 3.0, 10.0]),
    tls_s=st.sampled_from([0.2, 1.0, 3.0, 10.0]),
    beside=st.sampled_from([lambda: True, lambda: False]),
)
_ERRORS = {
    "refused": lambda: ConnectionRefusedError(111, "Connection refused"),
    "cut": lambda: ssl.SSLEOFError(8, "EOF occurred in violation of protocol"),
    "timed out": lambda: TimeoutError(110, "Connection timed out"),
}


class Try:
    """One connection: script, and what happened to it when."""

    def __init__(self, address, tcp, tls, now):
        self.address, self.tcp, self.tls = address, tcp, tls
        self.began_at = now
        self.up_at = self.tls_at = self.ended_at = None
        self.outcome = "dismissed"
        self.heard = []
        self.open = False

    @property
    def heard_at(self):
        return self.heard[-1] if self.heard else self.up_at

    def close(self):
        self.open = False


class Run:
    """A race with scripted addresses, watched; checks what holds at every moment while it runs."""

    def __init__(self, ways, pace, *, tls):
        self.ways = {Address(f"192.0.2.{number}", 443): way for number, way in enumerate(ways)}
        self.order = list(self.ways)
        self.pace, self.with_tls = pace, tls
        self.tries, self.told, self.notes = [], [], []
        self.winner = self.error = None

    # -- the network --------------------------------------------------------------------------------------------------
    def now(self):
        return asyncio.get_running_loop().time()

    async def _end(self, one, kind, wait_s):
        if kind == "silent":
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(wait_s)
        if kind in _ERRORS:
            one.outcome = kind
            raise _ERRORS[kind]()

    async def open_tcp(self, address):
        way = self.ways[address]
        before = [one for one in self.tries if one.address == address]
        one = Try(address, *way[min(len(before), len(way) - 1)], self.now())
        self._check_start(one, before)
        self.tries.append(one)
        try:
            await self._end(one, *one.tcp)
            one.up_at, one.open = self.now(), True
            return one
        finally:
            if one.up_at is None:
                one.ended_at = self.now()

    async def shake(self, one):
        self._check_gate(one)
        one.tls_at = self.now()
        kind, wait_s, parts = one.tls
        try:
            passed = 0.0
            for at in sorted(part * wait_s for part in parts):
                await asyncio.sleep(at - passed)
                passed = at
                one.heard.append(self.now())
            await self._end(one, kind, wait_s - passed)
            one.outcome = "done"
            return one
        except BaseException:
            one.close()
            raise
        finally:
            one.ended_at = self.now()

    # -- what holds at every moment -----------------------------------------------------------------------------------
    def _gate_at(self, shaking, silent_s=0.0):
        """When the gate opens, by what could be known a moment ago: who decides at an instant may be first in it."""
        repeat_s = max(self.pace.repeat_s, limits.DIAL_REPEAT_S_MIN)
        opens_at = -math.inf
        for one in shaking:
            if self.now() >= one.tls_at + self.pace.tls_s - EPSILON_S:
                continue  # given up in this instant
            sign_at = max([one.tls_at, *(at for at in one.heard if at < self.now() - EPSILON_S)])
            head_s = max(limits.TLS_HEAD_START_S, 2.0 * (one.up_at - one.began_at))
            opens_at = max(opens_at, sign_at + max(silent_s, min(head_s, repeat_s)))
        return opens_at

    def _check_gate(self, one):
        shaking = [each for each in self.tries if each.tls_at is not None and each.ended_at is None]
        silent_s = 0.0 if self.pace.beside() else limits_means.METERED_SILENCE_S
        assert self.now() >= self._gate_at(shaking, silent_s) - EPSILON_S, "TLS was begun in another's head start"

    def _check_start(self, one, before):
        now = one.began_at
        running = [each for each in self.tries if each.ended_at is None]
        assert len([each for each in running if each.address == one.address]) < limits.DIAL_KNOCKS_MAX
        assert len(running) < limits.DIAL_RACERS_MAX
        if before:
            return
        first = list(dict.fromkeys(each.address for each in self.tries))
        assert [*first, one.address] == self.order[: len(first) + 1], "not in the order given"
        # What ended just now, by a failure or a bound, lets it start at once.
        if first and all(each.ended_at is None or each.ended_at < now - EPSILON_S for each in self.tries):
            last = min(each.began_at for each in self.tries if each.address == first[-1])
            assert now >= last + self.pace.stagger_s - EPSILON_S, "started before its turn"
            shaking = [each for each in running if each.tls_at is not None and each.tls_at < now - EPSILON_S]
            assert now >= self._gate_at(shaking) - EPSILON_S, "started in a handshake's head start"

    # -- the advice ---------------------------------------------------------------------------------------------------
    def connected(self, host, address, *, connect_s, tls_s):
        assert connect_s >= 0.0
        assert (tls_s is None) != self.with_tls
        self.told.append(("connected", address))

    def failed(self, host, address, *, tried_s):
        assert tried_s >= 0.0
        self.told.append(("failed", address))

    def outrun(self, host, address):
        self.told.append(("outrun", address))

    # -- running ------------------------------------------------------------------------------------------------------
    async def main(self, timeout_s, cancel_s):
        async def dial():
            shake = self.shake if self.with_tls else None
            race = Race("a.test", self, self.open_tcp, shake, on_stage=str, on_note=self.notes.append)
            try:
                async with asyncio.timeout(timeout_s) as timeout:
                    self.winner = await race.run(self.order, self.pace)
            except TimeoutError:
                assert timeout.expired()
                race.tell_timed_out()
                self.error = "time over"
                assert race.story()
            except errors.TransportError as error:
                self.error = error

        task = asyncio.create_task(dial())
        if cancel_s is not None:
            await asyncio.sleep(cancel_s)
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        left = [one for one in self.tries if one.ended_at is None and one is not self.winner and one.open]
        assert left == []
        assert all(not one.open or one is self.winner for one in self.tries)
        self.ended_at = self.now()


def _run(ways, pace, *, tls=True, timeout_s=20.0, cancel_s=None):
    """Run a race to its end; the loop fails where tasks or untaken exceptions are left, or time would stand still."""
    run = Run(ways, pace, tls=tls)
    simloop.run(lambda: run.main(timeout_s, cancel_s), steps_max=10_000)
    return run


@given(st.lists(_WAYS, min_size=1, max_size=6), _PACES, st.booleans(), st.sampled_from([0.5, 5.0, 20.0]))
def test_race_has_one_winner_or_an_error_and_leaves_nothing(ways, pace, tls, timeout_s):
    run = _run(ways, pace, tls=tls, timeout_s=timeout_s)
    assert (run.winner is None) != (run.error is None)
    assert run.ended_at <= timeout_s + EPSILON_S
    kinds = [kind for kind, _ in run.told]
    failed = [address for kind, address in run.told if kind == "failed"]
    outrun = [address for kind, address in run.told if kind == "outrun"]
    assert len(failed) == len(set(failed))
    assert len(outrun) == len(set(outrun))
    assert not set(failed) & set(outrun)
    assert {address for _, address in run.told} <= {one.address for one in run.tries}
    if run.winner is not None:
        assert run.winner.open
        assert run.winner.outcome == "done" or not tls
        assert ("connected", run.winner.address) in run.told
        assert run.winner.address not in outrun
        assert kinds.count("connected") == 1
    else:
        assert "connected" not in kinds
        assert outrun == []
    if isinstance(run.error, errors.TransportError):
        assert {one.address for one in run.tries} == set(run.order)
        for address in run.order:
            tries = [one for one in run.tries if one.address == address]
            last = max(one.ended_at for one in tries)
            outcomes = {one.outcome for one in tries if one.ended_at >= last - EPSILON_S}
            assert outcomes & {"refused", "cut"}, "given up though one was only silent"
        assert all(str(address) in str(run.error) for address in run.order)
    # One line for each address that failed with each of its reasons, is knocked at, waits; never one for each knock.
    assert len(run.notes) <= 3 + len(run.order) * 8 + sum("waits" in note for note in run.notes)


@given(st.lists(_WAYS, min_size=1, max_size=5), _PACES, st.booleans(), _TIMES)
def test_race_cancelled_at_any_moment_leaves_nothing(ways, pace, tls, cancel_s):
    run = _run(ways, pace, tls=tls, cancel_s=cancel_s)
    if run.winner is not None:
        run.winner.close()
    assert all(not one.open for one in run.tries)


@given(st.lists(_WAYS, max_size=5), st.integers(0, 5), _PACES)
@example([], 0, Pace())
def test_race_with_a_sound_address_is_won(ways, place, pace):
    sound = [(("up", 0.05), ("done", 0.05, []))]
    ways = [*ways[:place], sound, *ways[place:]]
    pace = pace._replace(connect_s=max(pace.connect_s, 0.2))
    run = _run(ways, pace, timeout_s=120.0)
    assert run.winner is not None


@given(st.lists(_WAYS, min_size=1, max_size=6), _PACES)
def test_race_of_the_same_addresses_runs_the_same(ways, pace):
    first, second = (_run(ways, pace) for _ in range(2))
    assert (first.told, first.notes, first.ended_at) == (second.told, second.notes, second.ended_at)
