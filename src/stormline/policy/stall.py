"""A connection that owes us something is silent: go on waiting, probe, open another beside it, or give up.

    decision = stall.plan(silence, link)     # ask again after decision.look_again_s, or when something arrives

The kernel doubles its retransmission time-out at each loss (RFC 6298 section 5.5), so after a blackout it may wait as
long again before it tries; and it gives a connection up only after 1.5 to 16 minutes (the time-outs article measured
both on phones). An application that sees the back-offs in TCP_INFO can be quicker: data unacknowledged through two
back-offs was lost three times. But a new connection costs its handshake, and on a slow link that crowds out the very
answers that are waited for (on a recorded UMTS dead spot clients that opened new ones fell from 100 % to 68-86 %). So a
fresh connection is opened only where the link is likely to have room.
"""

import enum
import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from stormline.core import limits
from stormline.policy.estimate import sound
from stormline.policy.level import spares_lane
from stormline.policy.quality import State

OVERDUE_RTTS: Final = 2.5
"""Round trips after which an acknowledgement is overdue: one that is delayed takes one and some 40 ms, and a tail loss
probe goes out after two (RFC 8985 section 7.2)."""
LOST_RTTS: Final = 3.5
"""Round trips beyond one RTO after which its retransmission is lost too: two until the tail loss probe from which the
RTO runs, one and a half for what it sent again."""
PROVE_RTTS: Final = 6.0
"""Round trips after which a first answer is overdue, where it usually takes one."""
BLIND_RTO_FACTOR: Final = 7.0
"""Without TCP_INFO: RTO + 2 RTO + 4 RTO is when a packet sent at the start has been lost three times."""
RTO_MIN_S: Final = 0.2
"""Linux' `tcp_rto_min`."""
ALIVE_S: Final = 1.0
"""A path that brought something within this, or within two round trips, is alive."""


class Action(enum.StrEnum):
    """What to do now."""

    WAIT = "wait"
    """Nothing."""
    PROBE = "probe"
    """Ask for a sign of life with one small packet: an HTTP/2 PING, a ping of the long connection; where a fresh
    connection is already being made, a new SYN instead of the kernel's doubled wait."""
    KNOCK = "knock"
    """Ask whether the path is there at all with one SYN: a slow link is dark, and whether it is the link or this
    connection alone nothing else can tell."""
    PROVE = "prove"
    """Ask elsewhere too: this connection has never answered anything, and other addresses of the host are untried."""
    FRESH = "fresh"
    """Open a connection beside this one and send there what may be sent again; reads of both count, first come."""
    GIVE_UP = "give-up"
    """The time-out has come: this attempt has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """How a connection stands. What cannot be known is None; unsound numbers count as None.

    Attributes:
        waited_s: since the answer's last byte, or since the request's last byte where none came.
        heard_age_s: since the connection brought anything, for whomever (an answer to a ping too); None: as `waited_s`.
        limit_s: the time-out that runs (first packet, or packet to packet); infinite: silence is no failure.
        expecting: an answer, or the rest of one, is owed. False: an idle stream.
        unacked_bytes: sent and not acknowledged (TCP_INFO `unacked` times the segment size, or SIOCOUTQ).
        backoffs: RTO back-offs in a row (`tcpi_backoff`).
        rto_s: the kernel's present time-out (`tcpi_rto`), doublings included.
        ack_age_s: since the last acknowledgement (`tcpi_last_ack_recv`).
        rtt_s: smoothed round trip (`tcpi_rtt`), else the learned median.
        network_age_s: since any connection on this network brought anything.
        can_probe: the connection has a ping of its own.
        probe_age_s: since the last unanswered probe; None where none is out.
        fresh_age_s: since a fresh connection was begun beside this one; None where there is none.
        may_fresh: the request may be sent again (two-phase rule) and attempts and budget allow another connection.
        server_cost_s: what the server is known to need.
        unproven: the connection has never answered anything, and its host has other addresses that the request has not
            failed on.
        learned_cost_s: what answers of this kind have been seen to cost the server, at their slowest.
    """

    waited_s: float
    heard_age_s: float | None = None
    limit_s: float = math.inf
    expecting: bool = True
    unacked_bytes: int | None = None
    backoffs: int | None = None
    rto_s: float | None = None
    ack_age_s: float | None = None
    rtt_s: float | None = None
    network_age_s: float | None = None
    can_probe: bool = False
    probe_age_s: float | None = None
    fresh_age_s: float | None = None
    may_fresh: bool = True
    server_cost_s: float | None = None
    unproven: bool = False
    learned_cost_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What is known of the link under it.

    Attributes:
        bytes_per_s: measured rate of the slower direction that counts; None where unknown.
        rtt_s: median round trip; None where unknown.
        queued_bytes: what is under way on the link before a new connection could get through.
        state: how the network does.
    """

    bytes_per_s: float | None = None
    rtt_s: float | None = None
    queued_bytes: int = 0
    state: State = State.EVALUATING


class Decision(NamedTuple):
    """What to do, when to look again at the latest, and why (for the call's story).

    `look_again_s` lies between `limits.STALL_LOOK_S_MIN` and `limits.STALL_LOOK_S_MAX`, except for an idle stream,
    which is looked at when its probe is due.
    """

    action: Action
    look_again_s: float
    why: str


def has_room(link: Link) -> bool:
    """Say whether a second connection would find room: the link's level allows one, and little is under way.

    Judged by `link`'s numbers, which are what it carried at its worst lately, not by its level at this moment: a quick
    moment of a wavering link is no room, and a connection that is stuck makes a good link look bad. Where neither rate
    nor round trip is known there is none: waiting is the safe side.
    """
    rate, rtt = _rate(link.bytes_per_s), _seconds(link.rtt_s)
    if (link.state is State.BAD and rate is None) or not spares_lane(rtt, rate):
        return False
    return rate is None or (sound(link.queued_bytes, 2.0**53) or 0.0) / rate <= limits.STALL_SPARE_QUEUE_S


def overdue(silence: Silence, link: Link) -> bool:
    """Say whether the next request had better not be put on a connection that owes an answer. Raises nothing.

    Where what was sent is not acknowledged after one RTO, and two and a half round trips, a packet was lost, or the
    path is dead; the RTO bears in mind how much the round trips of this connection waver. A connection beside it costs
    a handshake, and nobody's answer where the link has room. Where the kernel does not tell, only a silence in which a
    packet would have been lost three times counts. A peer that has acknowledged everything is working on its answer.
    """
    waited = _seconds(silence.waited_s) or 0.0
    heard = _seconds(silence.heard_age_s)
    quiet = waited if heard is None else min(waited, heard)
    rtt = _seconds(silence.rtt_s)
    if not has_room(link) or quiet < limits.STALL_OVERDUE_S:
        return False
    unacked = sound(silence.unacked_bytes, 2.0**53)
    if unacked is None:
        return quiet >= _doubt_s(silence, _rto(silence, link))
    return unacked > 0.0 and rtt is not None and quiet >= max(OVERDUE_RTTS * rtt, _rto(silence, link))


def plan(silence: Silence, link: Link) -> Decision:
    """Decide what a silent connection calls for. Takes any numbers, raises nothing.

    The rules, first match:

    1. Nothing is owed: wait; after `limits.STALL_LIVENESS_S` of silence a probe, where the connection has one. An idle
       stream never fails by silence; an unanswered probe makes it a connection that owes us something.
    2. The time-out has come; or there is none, and a probe or a fresh connection has had no answer for
       `limits.HEARTBEAT_ANSWER_S`: give up. On a slow link only where the link is not at fault: it brings data to
       others, or nothing is queued on it. Where it is bringing what was queued before this one, wait; where it is dark,
       wait too, and knock: a second connection would be as dark as this one, and would crowd out its answers once
       there is light.
    3. The connection has never answered anything, and neither has this request's wait been so short that a server which
       works would still be at it: the host's other addresses may be asked beside it, once, where there is room.
    4. The connection is silent (below) and another may be opened and finds room: a fresh one beside it, once. If that
       one says nothing either the path is dark: probes at an even pace, so that its end is noticed.
    5. It may be silent, and has a ping: a probe.
    6. Wait.

    Silent means: data unacknowledged through `limits.STALL_BACKOFFS` back-offs, or through one whose retransmission has
    had its round trip; or a probe unanswered for three RTOs;
    or, where neither can be known, no byte for as long as three losses in a row take, on top of the server's time.
    """
    waited = _seconds(silence.waited_s) or 0.0
    heard = _seconds(silence.heard_age_s)
    quiet = waited if heard is None else min(waited, heard)
    if not silence.expecting and silence.probe_age_s is None:
        return _idle(silence, quiet)
    limit = silence.limit_s if silence.expecting and silence.limit_s > 0.0 else math.inf
    room = has_room(link)
    rto = _rto(silence, link)
    probed = _seconds(silence.probe_age_s)
    unanswered = max(probed or 0.0, _seconds(silence.fresh_age_s) or 0.0)
    mute = math.isinf(limit) and unanswered >= max(limits.HEARTBEAT_ANSWER_S, BLIND_RTO_FACTOR * rto)
    silent, why = _silent(silence, quiet, rto)
    if waited >= limit or mute:
        return _past(silence, link, room=room, mute=mute, silent=silent)
    left = limit - waited
    prove_in = math.inf
    if silence.unproven and silence.may_fresh and room and silence.fresh_age_s is None:
        prove_in = _prove_s(silence) - waited
        if prove_in <= 0.0:
            return _decision(Action.PROVE, min(rto, left), f"no first answer for {waited:.1f} s")
    pace = limits.STALL_PROBE_S if room else limits.STALL_PROBE_SLOW_S
    if silent and silence.fresh_age_s is not None:
        since = _seconds(silence.fresh_age_s) or 0.0
        due = pace - (since if probed is None else min(since, probed))
        if due <= 0.0:
            return _decision(Action.PROBE, min(pace, left), f"{why}; the fresh connection is silent too")
        return _decision(Action.WAIT, min(due, left), f"{why}; a fresh connection is under way")
    if silent and silence.may_fresh and room:
        return _decision(Action.FRESH, min(pace, left), why)
    if silence.can_probe and silence.probe_age_s is None and (silent or quiet >= _doubt_s(silence, rto)):
        return _decision(Action.PROBE, min(3.0 * rto, left), f"no byte for {quiet:.1f} s")
    reason = f"{why}; a fresh connection would find no room or may not be made" if silent else "within what it may take"
    again = min(rto, LOST_RTTS * _rtt(silence)) if _losing(silence, quiet) else max(rto, _doubt_s(silence, rto) - quiet)
    return _decision(Action.WAIT, min(again, left, prove_in), reason)


def _idle(silence: Silence, quiet: float) -> Decision:
    if not silence.can_probe:
        return Decision(Action.WAIT, limits.STALL_LIVENESS_S, "idle, and has no ping")
    due = limits.STALL_LIVENESS_S - quiet
    if due <= 0.0:
        return Decision(Action.PROBE, limits.STALL_LOOK_S_MAX, "idle for long")
    # Never a moment so small that the clock does not move within it.
    return Decision(Action.WAIT, max(due, limits.STALL_LOOK_S_MIN), "idle")


def _silent(silence: Silence, quiet: float, rto: float) -> tuple[bool, str]:
    """Say whether the connection is silent, and by what sign."""
    unacked = sound(silence.unacked_bytes, 2.0**53)
    backoffs = sound(silence.backoffs, 1000)
    probe = _seconds(silence.probe_age_s)
    if probe is not None and probe >= 3.0 * rto:
        return True, f"no answer to a probe for {probe:.1f} s"
    if unacked is not None and backoffs is not None:
        lost = backoffs >= 1 and quiet >= rto + LOST_RTTS * _rtt(silence)
        if unacked > 0 and (backoffs >= limits.STALL_BACKOFFS or lost):
            return True, f"{unacked:.0f} bytes unacknowledged after {backoffs:.0f} back-offs"
        return False, ""
    if unacked is None and not silence.can_probe and quiet >= _doubt_s(silence, rto):
        return True, f"no byte for {quiet:.1f} s, and nothing else to go by"
    return False, ""


def _losing(silence: Silence, quiet: float) -> bool:
    """Say whether a packet has been lost already, by its age or by a back-off: the next one decides, and is near."""
    backoffs = sound(silence.backoffs, 1000)
    if not sound(silence.unacked_bytes, 2.0**53) or backoffs is None:
        return False
    return backoffs >= 1.0 or quiet >= OVERDUE_RTTS * _rtt(silence)


def _doubt_s(silence: Silence, rto: float) -> float:
    """Give the silence from which a ping is worth its packet: what path and server may need is over."""
    return BLIND_RTO_FACTOR * rto + (_seconds(silence.server_cost_s) or 0.0)


def _prove_s(silence: Silence) -> float:
    """Give the wait from which the first answer of a connection is overdue."""
    cost = max(_seconds(silence.server_cost_s) or 0.0, _seconds(silence.learned_cost_s) or 0.0)
    return max(limits.STALL_PROVE_S, PROVE_RTTS * _rtt(silence)) + cost


def _rtt(silence: Silence) -> float:
    """Give the round trip, one second where nobody knows it."""
    rtt = _seconds(silence.rtt_s)
    return 1.0 if rtt is None else rtt


def _rto(silence: Silence, link: Link) -> float:
    """Give the time-out without its doublings: round trip and 0.2 s, or what the kernel said before it doubled."""
    rto, backoffs = _seconds(silence.rto_s), sound(silence.backoffs, 1000)
    if rto is not None:
        return max(RTO_MIN_S, rto / math.pow(2.0, min(backoffs or 0.0, 20.0)))
    rtt = _seconds(silence.rtt_s)
    if rtt is None:
        rtt = _seconds(link.rtt_s)
    return 1.0 if rtt is None else max(RTO_MIN_S, 1.5 * rtt + RTO_MIN_S)


def _past(silence: Silence, link: Link, *, room: bool, mute: bool, silent: bool) -> Decision:
    """Decide where the time-out has come."""
    waited = _seconds(silence.waited_s) or 0.0
    give_up = _decision(Action.GIVE_UP, limits.STALL_LOOK_S_MAX, f"silent for {waited:.1f} s")
    if room:
        return give_up
    alive_s = max(ALIVE_S, 2.0 * (_seconds(link.rtt_s) or 0.0))
    network = _seconds(silence.network_age_s)
    heard = _seconds(silence.heard_age_s)
    known = [age for age in (network, heard, _seconds(silence.ack_age_s)) if age is not None]
    if not known:
        return give_up
    if min(known) <= alive_s:
        elsewhere = network is not None and network <= alive_s < (waited if heard is None else heard)
        if link.queued_bytes <= 0 or (silent and elsewhere):
            return give_up
        return _decision(Action.WAIT, limits.STALL_PROBE_S, "past its time-out, but the slow link is bringing data")
    if mute:
        return give_up
    return _decision(Action.KNOCK, limits.STALL_PROBE_SLOW_S, "past its time-out, but the slow link is dark")


def _seconds(value: object) -> float | None:
    return sound(value, limits.SAMPLE_DURATION_S_MAX)


def _rate(value: object) -> float | None:
    return sound(value, limits.SAMPLE_BYTES_PER_S_MAX)


def _decision(action: Action, look_again_s: float, why: str) -> Decision:
    return Decision(action, min(max(look_again_s, limits.STALL_LOOK_S_MIN), limits.STALL_LOOK_S_MAX), why)
