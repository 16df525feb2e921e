"""How much of one answer a server may have on its way: enough to keep the link busy, and no more on a slow one.

A server hands what HTTP/2's flow control lets it to its kernel, and every later answer on the connection waits behind
that (RFC 9113 section 5.2). On a link of 12.5 KB/s a window of 512 KB lets one answer of 128 KB hold up all others for
ten seconds; with one of 21 KB they wait for less than two. A second connection would part the link as well, but it
costs a handshake, and standing beside the first one it needs to be there before the need shows.

The window is the product of bandwidth and delay (the measured rate, the shortest round trip) with room to spare, so
that a transfer which is held back by it measures a rate that widens it: at least twofold each time.
"""

from typing import Final

from stormline.core import limits
from stormline.policy.estimate import sound

ROUND_TRIPS: Final = 2.0
"""Credit comes back a round trip after the bytes; the second one lets a rate measured too low grow."""
STEP: Final = 2.0
"""A window is changed where it would become so many times larger or smaller: each change is a SETTINGS frame."""


def stream_window_bytes(now_bytes: int, bytes_per_s: float | None, rtt_s: float | None) -> int:
    """Give the window for each stream of a connection. Takes any numbers, raises nothing.

    Args:
        now_bytes: the one it has; kept where the right one is not far off.
        bytes_per_s: what the link is known to bring; None where unknown.
        rtt_s: the shortest usual round trip; None where unknown.

    Returns:
        Between `limits.H2_STREAM_WINDOW_BYTES_MIN` and `limits.H2_STREAM_WINDOW_BYTES`. Where the rate is unknown the
        most, unless the round trips are a slow network's (above `limits.TIMEOUT_FAST_RTT_S`): then the least, which
        the first answers that fill it widen.
    """
    rate = sound(bytes_per_s, limits.SAMPLE_BYTES_PER_S_MAX)
    rtt = sound(rtt_s, limits.SAMPLE_DURATION_S_MAX)
    least, most = limits.H2_STREAM_WINDOW_BYTES_MIN, limits.H2_STREAM_WINDOW_BYTES
    if rate is None:
        right = least if rtt is not None and rtt > limits.TIMEOUT_FAST_RTT_S else most
    elif rtt is None:
        right = most
    else:
        right = min(max(round(rate * (ROUND_TRIPS * rtt + limits.H2_STREAM_QUEUE_S)), least), most)
    if now_bytes < least or now_bytes > most or right in (least, most):
        return right
    return right if right >= STEP * now_bytes or right * STEP <= now_bytes else now_bytes
