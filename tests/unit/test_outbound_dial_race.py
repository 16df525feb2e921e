"""The race of one dial on virtual time (`simloop.VirtualLoop`).

Who starts when, who may begin TLS, what is done about silence.
"""

import asyncio
import math
import ssl

import pytest

from stormline.core import errors, limits, limits_means
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.outbound.dial import Dialer, Pace
from stormline.outbound.race import Race
from stormline.testing import simloop

A, B, C = (Address(f"192.0.2.{number}", 443) for number in (1, 2, 3))
SILENT = math.inf
REFUSED = ConnectionRefusedError(111, "Connection refused")
CUT = ssl.SSLEOFError(8, "EOF occurred in violation of protocol")
QUIET = Pace(repeat_s=math.inf)


class Raw:
    """A scripted connection."""

    def __init__(self, net, address):
        self.net, self.address = net, address
        self.heard_at = asyncio.get_running_loop().time()
        self.closed = False

    def hear(self):
        self.heard_at = asyncio.get_running_loop().time()

    def close(self):
        if not self.closed:
            self.closed = True
            self.net.open -= 1


class Net:
    """Scripted addresses: each is asked by (address, how often it was tried before) for seconds or an error."""

    def __init__(self, tcp, tls=None):
        self.tcp, self.tls = tcp, tls
        self.started, self.shaken = [], []
        self.tries = {}
        self.live = self.live_max = self.open = 0

    def now(self):
        return round(asyncio.get_running_loop().time(), 6)

    async def _play(self, what):
        for step in what if isinstance(what, tuple) else (what,):
            if isinstance(step, Exception):
                raise step
            if callable(step):
                step()
            elif step == SILENT:
                await asyncio.get_running_loop().create_future()
            else:
                await asyncio.sleep(step)

    async def open_tcp(self, address):
        number = self.tries[address] = self.tries.get(address, -1) + 1
        self.started.append((self.now(), address))
        self.live += 1
        self.live_max = max(self.live_max, self.live)
        try:
            await self._play(self.tcp(address, number))
        finally:
            self.live -= 1
        self.open += 1
        raw = Raw(self, address)
        raw.number = number
        return raw

    async def shake(self, raw):
        self.shaken.append((self.now(), raw.address))
        try:
            await self._play(self.tls(raw))
        except BaseException:
            raw.close()
            raise
        return raw


class Told:
    """An advice that takes the addresses as they come and keeps what it is told."""

    def __init__(self, pace=QUIET):
        self.given, self.told = pace, []

    def order(self, host, addresses, left):
        self.told.append(("order", tuple(addresses), tuple(left)))
        return [address for address in addresses if address not in left] + list(left)

    def pace(self, host):
        return self.given

    def connected(self, host, address, *, connect_s, tls_s):
        self.told.append(("connected", address, round(connect_s, 6), None if tls_s is None else round(tls_s, 6)))

    def failed(self, host, address, *, tried_s):
        self.told.append(("failed", address, round(tried_s, 6)))

    def outrun(self, host, address):
        self.told.append(("outrun", address))


class Ran:
    """What became of a race: the winner's address or the error, when, and what was told meanwhile."""

    def __init__(self, net, order, pace, timeout_s, more=None):
        self.net, self.advice, self.notes = net, Told(), []
        self.winner = self.error = None

        async def main():
            shake = None if net.tls is None else net.shake
            race = Race("a.test", self.advice, net.open_tcp, shake, on_stage=str, on_note=self.notes.append, more=more)
            try:
                async with asyncio.timeout(timeout_s):
                    stream = await race.run(order, pace)
            except TimeoutError as error:
                race.tell_timed_out()
                self.error, self.story = error, race.story()
            except errors.TransportError as error:
                self.error = error
            else:
                self.winner = stream.address
                stream.close()
            self.at = net.now()

        simloop.run(main)
        assert (net.open, net.live) == (0, 0)


def race(order, tcp, tls=None, *, pace=QUIET, timeout_s=30.0, more=None):
    return Ran(Net(tcp, tls), order, pace, timeout_s, more)


def by(**scripts):
    """Give a script of TCP by address: A, B, C."""
    named = {A: scripts.get("A"), B: scripts.get("B"), C: scripts.get("C")}
    return lambda address, number: named[address]


def tls_by(**scripts):
    plain = by(**scripts)
    return lambda raw: plain(raw.address, raw.number)


# -- who starts when --------------------------------------------------------------------------------------------------
def test_race_first_answers_alone_is_tried():
    ran = race([A, B], by(A=0.1))
    assert (ran.winner, ran.at, ran.net.started) == (A, 0.1, [(0.0, A)])
    assert ran.advice.told == [("connected", A, 0.1, None)]
    assert ran.notes == [f"connected to {A}, 0 failed before"]


def test_race_slow_first_gets_its_head_start():
    ran = race([A, B, C], by(A=SILENT, B=SILENT, C=0.05))
    assert (ran.winner, ran.at) == (C, 0.55)
    assert ran.net.started == [(0.0, A), (0.25, B), (0.5, C)]
    assert ran.advice.told == [("connected", C, 0.05, None), ("outrun", A), ("outrun", B)]


def test_race_refusal_starts_the_next_at_once():
    ran = race([A, B, C], by(A=(0.01, REFUSED), B=(0.02, REFUSED), C=0.05))
    assert (ran.winner, ran.net.started) == (C, [(0.0, A), (0.01, B), (0.03, C)])
    assert ran.advice.told == [("failed", A, 0.01), ("failed", B, 0.02), ("connected", C, 0.05, None)]


def test_race_all_refused_ends_at_once():
    ran = race([A, B], by(A=(0.1, REFUSED), B=(0.1, REFUSED)))
    assert isinstance(ran.error, errors.ConnectError)
    assert (ran.at, len(ran.net.started)) == (0.2, 2)
    assert str(A) in str(ran.error)
    assert str(B) in str(ran.error)


def test_race_last_cut_in_tls_is_a_tls_error():
    ran = race([A, B], by(A=(0.1, REFUSED), B=0.1), tls_by(B=(0.1, CUT)))
    assert isinstance(ran.error, errors.TlsError)
    assert (ran.error.phase, ran.at) == (Phase.TLS, 0.3)


def test_race_two_winners_at_once_one_is_kept():
    ran = race([A, B, C], by(A=0.1, B=0.1, C=0.1), pace=QUIET._replace(stagger_s=0.0))
    assert (ran.winner, ran.net.started) == (A, [(0.0, A), (0.0, B), (0.0, C)])
    assert ran.advice.told == [("connected", A, 0.1, None), ("outrun", B), ("outrun", C)]


# -- the gate ---------------------------------------------------------------------------------------------------------
def test_gate_no_further_address_while_tls_has_its_head_start():
    ran = race([A, B], by(A=0.1, B=0.1), tls_by(A=SILENT, B=0.1))
    assert (ran.winner, ran.net.started) == (B, [(0.0, A), (0.4, B)])
    assert ran.net.shaken == [(0.1, A), (0.5, B)]


def test_gate_slow_link_head_start_is_two_round_trips():
    ran = race([A, B], by(A=0.6, B=0.4), tls_by(A=SILENT, B=0.1))
    # B started first its TLS at 0.65, as A came at 0.6: A has it until 0.6 + 1.2.
    assert ran.net.shaken == [(0.6, A), (1.8, B)]
    assert ran.advice.told == [("connected", B, 0.4, 0.1), ("outrun", A)]
    assert any(f"{B} is connected and waits" in note for note in ran.notes)


def test_gate_failed_handshake_lets_the_next_in():
    ran = race([A, B], by(A=0.6, B=0.4), tls_by(A=(0.3, CUT), B=0.1))
    assert (ran.winner, ran.net.shaken) == (B, [(0.6, A), (0.9, B)])


def test_gate_finished_handshake_wins_and_none_is_begun_beside_it():
    ran = race([A, B], by(A=0.6, B=0.4), tls_by(A=0.9, B=0.1))
    assert (ran.winner, ran.net.shaken) == (A, [(0.6, A)])
    assert ran.advice.told == [("connected", A, 0.6, 0.9), ("outrun", B)]


def test_gate_opens_for_one_at_a_time_in_the_order_they_came():
    ran = race([A, B, C], by(A=0.6, B=0.4, C=0.2), tls_by(A=SILENT, B=SILENT, C=0.1))
    # A's head start is 2 x 0.6 s, B's 2 x 0.4 s; C's connection came before A's handshake was over.
    assert ran.net.shaken == [(0.6, A), (1.8, B), (2.6, C)]


def test_gate_handshake_that_moves_keeps_its_head_start():
    steps = lambda raw: (0.25, raw.hear, 0.25, raw.hear, 0.25) if raw.address == A else SILENT  # noqa: E731
    ran = race([A, B], by(A=0.2, B=0.2), steps)
    assert (ran.winner, ran.at, ran.net.started) == (A, 0.95, [(0.0, A)])


def never():
    return False


THRIFTY = QUIET._replace(beside=never)


def test_gate_where_no_bytes_are_left_a_second_handshake_waits_for_a_long_silence_of_the_first():
    ran = race([A, B], by(A=0.6, B=0.4), tls_by(A=SILENT, B=0.1), pace=THRIFTY)
    assert (ran.winner, ran.net.shaken) == (B, [(0.6, A), (0.6 + limits_means.METERED_SILENCE_S, B)])


def test_gate_where_no_bytes_are_left_a_failed_handshake_lets_the_next_in_at_once():
    ran = race([A, B], by(A=0.6, B=0.4), tls_by(A=(0.3, CUT), B=0.1), pace=THRIFTY)
    assert (ran.winner, ran.net.shaken) == (B, [(0.6, A), (0.9, B)])
    ran = race([A, B], by(A=0.1, B=0.1), tls_by(A=SILENT, B=0.1), pace=THRIFTY._replace(tls_s=1.0))
    assert ran.winner == B
    assert ran.at < limits_means.METERED_SILENCE_S


def test_gate_bytes_are_asked_for_only_where_another_handshake_is_under_way():
    asked = []

    def beside():
        asked.append(True)
        return True

    pace = QUIET._replace(beside=beside)
    assert race([A, B], by(A=0.6, B=0.4), tls_by(A=(0.3, CUT), B=0.1), pace=pace).winner == B
    assert not asked
    assert race([A, B], by(A=0.6, B=0.4), tls_by(A=SILENT, B=0.1), pace=pace).net.shaken == [(0.6, A), (1.8, B)]
    assert len(asked) == 1


# -- silence ----------------------------------------------------------------------------------------------------------
def _blackout(end_s, rtt_s=0.05):
    """Give a script as of a kernel whose SYNs before `end_s` are lost: it repeats them after 1, 3, 7, 15 s."""

    def tcp(address, number):
        began_s = asyncio.get_running_loop().time()
        heard = [wait_s for wait_s in (0.0, 1.0, 3.0, 7.0, 15.0) if began_s + wait_s >= end_s]
        return heard[0] + rtt_s if heard else SILENT

    return tcp


@pytest.mark.parametrize("order", [[A], [A, B, C]])
@pytest.mark.parametrize("pace", [Pace(), Pace(connect_s=6.0), Pace(connect_s=1.8), Pace(repeat_s=1.0)])
def test_silence_end_of_a_blackout_is_noticed_within_a_second(order, pace):
    for tenths in range(1, 250, 7):
        end_s = tenths / 10.0
        ran = race(order, _blackout(end_s), pace=pace)
        assert ran.winner in order
        assert ran.at <= end_s + 1.0 + 0.05 + 1e-6


def test_silence_of_one_address_is_knocked_at_evenly_by_three_at_most():
    ran = race([A], by(A=SILENT), pace=Pace(connect_s=math.inf), timeout_s=9.0)
    assert ran.net.started == [(at, A) for at in (0.0, 2.0, 4.0, 6.0, 8.0)]
    assert ran.net.live_max == limits.DIAL_KNOCKS_MAX
    assert ran.story == f"{A}: no answer yet"
    assert ran.advice.told == [("failed", A, 9.0)]


def test_silence_in_tls_is_knocked_at_and_the_second_connection_wins():
    tls = lambda raw: SILENT if raw.number == 0 else 0.1  # noqa: E731
    ran = race([A], by(A=0.1), tls, pace=Pace())
    assert (ran.winner, ran.at, ran.net.started) == (A, 2.3, [(0.0, A), (2.1, A)])
    assert ran.advice.told == [("connected", A, 0.1, 0.1)]
    assert any("1 repeats" in note for note in ran.notes)


def test_silence_older_connection_begins_to_hear_and_the_repeat_waits():
    # The first hears at 2.0 + 0.4 s, just before the repeat of 2.1 s stands.
    tls = lambda raw: (2.3, raw.hear, 0.25) if raw.number == 0 else SILENT  # noqa: E731
    ran = race([A], by(A=0.1), tls, pace=Pace(repeat_s=2.25))
    assert (ran.winner, ran.at, ran.net.started) == (A, 2.65, [(0.0, A), (2.35, A)])
    assert ran.net.shaken == [(0.1, A)]


def test_silence_in_tls_repeats_that_are_refused_at_once_keep_the_pace():
    tcp = lambda address, number: REFUSED if number else 0.1  # noqa: E731
    ran = race([A], tcp, tls_by(A=SILENT), pace=Pace(), timeout_s=9.0)
    assert [at for at, _ in ran.net.started] == [0.0, 2.1, 4.1, 6.1, 8.1]


def test_silence_broken_by_one_connection_is_none_for_the_repeats_beside_it():
    tcp = lambda address, number: SILENT if number else 1.5  # noqa: E731
    ran = race([A], tcp, tls_by(A=2.0), pace=Pace(repeat_s=1.0, connect_s=3.0))
    assert (ran.winner, ran.at) == (A, 3.5)
    assert ran.advice.told == [("connected", A, 1.5, 2.0)]


def test_silence_of_many_addresses_holds_few_sockets():
    order = [Address(f"192.0.2.{number}", 443) for number in range(limits.DIAL_CANDIDATES_MAX)]
    ran = race(order, lambda address, number: SILENT, pace=Pace(), timeout_s=60.0)
    assert ran.net.live_max <= limits.DIAL_RACERS_MAX
    assert len({address for _, address in ran.net.started}) == len(order)
    assert len(ran.notes) < 5 * len(order)


def test_silence_longer_than_the_bound_fails_and_the_next_is_tried_at_once():
    ran = race([A, B], by(A=SILENT, B=0.1), pace=QUIET._replace(stagger_s=5.0, connect_s=3.0))
    assert (ran.winner, ran.net.started) == (B, [(0.0, A), (3.0, B)])
    assert ran.advice.told == [("failed", A, 3.0), ("connected", B, 0.1, None)]
    assert f"{A} failed: no connection within 3 s" in ran.notes


def test_silence_in_tls_longer_than_the_bound_fails_and_the_next_is_tried_at_once():
    ran = race([A, B], by(A=0.1, B=0.1), tls_by(A=SILENT, B=0.1), pace=QUIET._replace(stagger_s=5.0, tls_s=3.0))
    assert (ran.winner, ran.net.started) == (B, [(0.0, A), (3.1, B)])
    assert ran.advice.told == [("failed", A, 3.1), ("connected", B, 0.1, 0.1)]


def test_silence_of_the_last_address_begins_all_again_until_the_time_is_over():
    ran = race([A, B], by(A=(0.1, REFUSED), B=SILENT), pace=QUIET._replace(connect_s=3.0), timeout_s=8.0)
    assert isinstance(ran.error, TimeoutError)
    assert ran.net.started == [(0.0, A), (0.1, B), (3.1, A), (3.2, B), (6.2, A), (6.3, B)]
    assert ran.story == f"{A}: connection refused; {B}: no connection within 3 s, tried again"
    assert ran.advice.told == [("failed", A, 0.1), ("failed", B, 3.0)]
    assert len(ran.notes) == 3


def test_silence_of_all_each_is_begun_again_by_its_turn():
    ran = race([A, B, C], by(A=SILENT, B=SILENT, C=SILENT), pace=QUIET._replace(connect_s=3.0), timeout_s=8.0)
    again = [(3.0, A), (4.0, B), (4.25, C), (6.0, A), (7.0, B)]
    assert ran.net.started == [(0.0, A), (0.25, B), (0.5, C), *again]


def test_silence_that_turns_into_refusal_by_all_ends_the_race():
    tcp = lambda address, number: (0.1, REFUSED) if address == A or number else SILENT  # noqa: E731
    ran = race([A, B], tcp, pace=QUIET._replace(connect_s=3.0))
    assert isinstance(ran.error, errors.ConnectError)
    assert ran.at == 3.3


def test_silence_refusal_of_a_repeat_ends_the_wait_of_the_older_ones():
    tcp = lambda address, number: (0.1, REFUSED) if number else SILENT  # noqa: E731
    ran = race([A], tcp, pace=Pace())
    assert isinstance(ran.error, errors.ConnectError)
    assert ran.at == 2.1


def test_silence_refusal_of_all_tries_in_one_moment_ends_the_race():
    tcp = lambda address, number: (2.0 * (3 - number), REFUSED)  # noqa: E731
    ran = race([A], tcp, pace=Pace())
    assert isinstance(ran.error, errors.ConnectError)
    assert (ran.at, len(ran.net.started)) == (6.0, 3)


def test_silence_that_the_kernel_reports_at_once_is_no_busy_loop():
    ran = race([A, B], lambda *_: TimeoutError(110, "Connection timed out"), pace=Pace(stagger_s=0.0), timeout_s=10.0)
    assert isinstance(ran.error, TimeoutError)
    assert len(ran.net.started) == 2 * 10  # rounds begin a second apart; that of the tenth second is too late


def test_silence_pace_of_zero_is_bounded():
    ran = race([A], by(A=SILENT), pace=Pace(repeat_s=0.0, stagger_s=0.0, connect_s=0.0), timeout_s=10.0)
    assert len(ran.net.started) <= 11
    ran = race([A], by(A=SILENT), pace=Pace(repeat_s=0.0), timeout_s=10.0)
    assert len(ran.net.started) <= 10.0 / limits.DIAL_REPEAT_S_MIN + 1


def test_silence_cut_short_by_the_caller_is_not_charged():
    ran = race([A, B], by(A=SILENT, B=SILENT), pace=Pace(), timeout_s=2.1)
    assert ran.advice.told == [("failed", A, 2.1)]  # B had 1.85 s


# -- the dialer and its advice ----------------------------------------------------------------------------------------
class Names:
    def doubt(self, host):
        """Nothing to doubt."""

    async def resolve(self, host, port):
        return (A, B, A, C)


async def _dial(net, advice, **more):
    notes = []
    options = {"timeout_s": 5.0, "on_note": notes.append} | more
    stream = await Dialer(Names(), ssl.create_default_context(), open_tcp=net.open_tcp, advice=advice).dial(
        "a.test", 443, tls=False, **options
    )
    stream.close()
    return stream.address, notes


@simloop.on_virtual_time
async def test_dial_advice_orders_and_paces_and_is_told():
    net, advice = Net(by(A=0.1, B=SILENT, C=(0.2, REFUSED))), Told(QUIET._replace(stagger_s=1.0))
    assert (await _dial(net, advice, left=[A]))[0] == A
    assert net.started == [(0.0, B), (1.0, C), (1.2, A)]
    assert advice.told == [
        ("order", (A, B, C), (A,)),
        ("failed", C, 0.2),
        ("connected", A, 0.1, None),
        ("outrun", B),
    ]


@simloop.on_virtual_time
async def test_dial_without_advice_takes_what_was_left_last():
    net = Net(by(A=0.3, B=SILENT, C=SILENT))
    assert (await _dial(net, None, left=[A]))[0] == A
    assert net.started == [(0.0, B), (0.25, C), (0.5, A)]


@simloop.on_virtual_time
async def test_dial_advice_with_too_many_addresses_is_cut():
    class Many(Told):
        def order(self, host, addresses, left):
            return [Address(f"192.0.2.{number}", 443) for number in range(100)]

    net = Net(lambda address, number: (0.0, REFUSED))
    with pytest.raises(errors.ConnectError):
        await _dial(net, Many())
    assert len(net.started) == limits.DIAL_CANDIDATES_MAX


@simloop.on_virtual_time
async def test_dial_time_over_tells_the_advice_and_the_story():
    net, advice = Net(by(A=SILENT, B=(0.1, REFUSED), C=SILENT)), Told()
    with pytest.raises(errors.DeadlineExceeded) as caught:
        await _dial(net, advice, timeout_s=12.0)
    assert f"{A}: no connection within 10 s, tried again" in str(caught.value)
    assert f"{B}: connection refused" in str(caught.value)
    assert [told[:2] for told in advice.told[1:]] == [("failed", B), ("failed", A), ("failed", C)]
    assert (net.open, net.live) == (0, 0)


@pytest.mark.parametrize("method", ["order", "pace", "connected", "outrun", "failed"])
def test_dial_failing_advice_reaches_the_caller_and_leaves_nothing(method):
    async def main():
        advice = Told()

        def explode(*_, **__):
            raise ZeroDivisionError(method)

        setattr(advice, method, explode)
        net = Net(by(A=(0.1, REFUSED), B=SILENT, C=0.1))
        with pytest.raises(ZeroDivisionError):
            await _dial(net, advice)
        assert (net.open, net.live) == (0, 0)

    simloop.run(main)


def test_dial_failing_connect_reaches_the_caller_and_leaves_nothing():
    async def main():
        net = Net(by(A=SILENT, B=(0.1, ZeroDivisionError("a bug")), C=0.3))
        with pytest.raises(ZeroDivisionError):
            await _dial(net, None)
        assert (net.open, net.live) == (0, 0)

    simloop.run(main)


# -- reinforcements ---------------------------------------------------------------------------------------------------
class More:
    """Gives addresses in batches, each after a time."""

    def __init__(self, *batches):
        self.batches, self.seen, self.impostors = list(batches), [], []

    def impostor(self, address):
        self.impostors.append(address)

    async def more(self, seen):
        self.seen.append(tuple(seen))
        if not self.batches:
            return ()
        after_s, batch = self.batches.pop(0)
        await asyncio.sleep(after_s)
        if isinstance(batch, Exception):
            raise batch
        return batch


def forged(code=62):
    error = ssl.SSLCertVerificationError("certificate verify failed")
    error.verify_code, error.verify_message = code, "not for this name"
    return error


def test_more_nobody_is_asked_while_all_goes_well():
    more = More((0.0, [B]))
    ran = race([A, C], by(A=1.0, C=SILENT), more=more)
    assert (ran.winner, more.seen) == (A, [])


def test_more_wrong_certificate_has_others_asked_for_and_started_at_once():
    more = More((0.3, [B]))
    ran = race([A], by(A=0.1, B=0.1), tls_by(A=(0.1, forged()), B=0.1), more=more)
    assert (ran.winner, round(ran.at, 6)) == (B, 0.7)
    assert (more.impostors, more.seen) == ([A], [(A,)])


@pytest.mark.parametrize("error", [forged(9), forged(10), CUT])
def test_more_other_failures_of_tls_make_nobody_an_impostor(error):
    more = More((0.0, [B]))
    ran = race([A], by(A=0.1, B=0.1), tls_by(A=(0.1, error), B=0.1), more=more)
    assert (ran.winner, more.impostors) == (B, [])


def test_more_those_that_came_go_before_those_that_wait():
    more = More((0.0, [C]))
    ran = race([A, B], by(A=(0.1, REFUSED), B=0.05, C=0.05), more=more)
    # B was started at once, before anybody could say more; C has its turn after B's head start.
    assert (ran.winner, ran.net.started[:2]) == (B, [(0.0, A), (0.1, B)])


def test_more_silence_has_others_asked_for():
    more = More((0.5, [B]))
    ran = race([A], by(A=SILENT, B=0.1), pace=Pace(), more=more)
    assert (ran.winner, round(ran.at, 6)) == (B, limits.DIAL_REPEAT_S + 0.6)


def test_more_is_asked_for_until_there_are_none():
    more = More((0.0, [B]), (0.0, [C]))
    ran = race([A], by(A=(0.1, REFUSED), B=(0.1, REFUSED), C=(0.1, REFUSED)), more=more)
    assert isinstance(ran.error, errors.ConnectError)
    assert more.seen == [(A,), (A, B), (A, B, C)]
    assert all(str(each) in str(ran.error) for each in (A, B, C))


def test_more_that_takes_time_is_waited_for_where_nothing_else_is_left():
    ran = race([A], by(A=(0.1, REFUSED), B=0.1), more=More((4.0, [B])))
    assert (ran.winner, round(ran.at, 6)) == (B, 4.2)


def test_more_of_the_same_is_nothing():
    ran = race([A], by(A=(0.1, REFUSED)), more=More((0.0, [A])))
    assert (type(ran.error), ran.at) == (errors.ConnectError, 0.1)


def test_more_that_is_under_way_ends_with_the_race():
    ran = race([A, B], by(A=(0.1, REFUSED), B=0.1), more=More((9.0, [C])))
    assert (ran.winner, ran.at) == (B, 0.2)
    ran = race([A], by(A=(0.1, REFUSED)), more=More((9.0, [C])), timeout_s=1.0)
    assert (type(ran.error), ran.at) == (TimeoutError, 1.0)


def test_more_addresses_are_bounded():
    crowd = [Address(f"198.51.100.{number}", 443) for number in range(99)]
    more = More((0.0, crowd))
    ran = race([A], lambda address, number: (0.01, REFUSED), more=more)
    assert len({address for _, address in ran.net.started}) == limits.DIAL_CANDIDATES_MAX
