"""When a long connection that a call is not answered over is asked for a sign of life, and how long that may take.

A connection that a NAT has forgotten, or whose peer lost power, looks like one that is idle until something is sent.
The first call that finds no answer says so within seconds: its link is asked for a sign of life, ever more rarely while
a call goes on waiting, and at last left to its heartbeat. Any frame is one. A link that answers keeps all its calls,
also the one that waits: a server may take its time over one call and serve the others.
"""

from stormline.core import limits, limits_heartbeat


def doubt_after_s(rtt_s: float | None, asked: int = 0) -> float:
    """Give the silence of a link with unanswered calls after which it is asked.

    Args:
        rtt_s: its round trip, None where it is not known.
        asked: how often it was asked, and answered, since one of them was.
    """
    first_s = max(limits_heartbeat.DOUBT_FIRST_S, limits_heartbeat.DOUBT_ROUND_TRIPS * (rtt_s or 0.0))
    return min(first_s * 2.0 ** min(asked, 16), limits.HEARTBEAT_S)


def answer_within_s(rtt_s: float | None, unacked_bytes: int | None, ack_age_s: float | None) -> float:
    """Give how long the answer may take before the link counts as dead.

    Short only where the peer's kernel is as silent as the peer: on a slow way up, where a PING waits behind a body, it
    acknowledges all the while; and one that has acknowledged everything is reached, and busy at most.

    Args:
        rtt_s: the link's round trip.
        unacked_bytes: what was sent and not acknowledged.
        ack_age_s: since when nothing was. None in any of them where it is not known.
    """
    dark = bool(unacked_bytes) and ack_age_s is not None and ack_age_s >= doubt_after_s(rtt_s)
    if not dark or rtt_s is None:
        return limits.HEARTBEAT_ANSWER_S
    short_s = max(limits_heartbeat.ANSWER_S_MIN, limits_heartbeat.ANSWER_ROUND_TRIPS * rtt_s)
    return min(short_s, limits.HEARTBEAT_ANSWER_S)


def beside_after_s(rtt_s: float | None) -> float:
    """Give how long after the question another way is tried beside a link that has not answered it.

    Args:
        rtt_s: its round trip, None where it is not known.
    """
    return max(limits_heartbeat.BESIDE_FIRST_S, limits_heartbeat.BESIDE_ROUND_TRIPS * (rtt_s or 0.0))


def stalls(unacked_bytes: int | None, ack_age_s: float | None) -> bool:
    """Say whether a link whose peer says nothing stands still: not where its kernel takes what we send, piece by piece.

    Args:
        unacked_bytes: what was sent and not acknowledged.
        ack_age_s: since when nothing was. None in any of them where it is not known.
    """
    return not unacked_bytes or ack_age_s is None or ack_age_s >= limits_heartbeat.BESIDE_FIRST_S
