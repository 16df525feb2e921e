"""Requests that were seen before. A sealed request can be sent again by whoever saw it (RFC 9458 section 6.5).

Pure: the caller passes `now`.
"""

from collections import deque
from email.utils import parsedate_to_datetime

from stormline.core import limits_relay
from stormline.wire import bhttp, ohttp


class Replay(Exception):
    """The request was seen before, or may have been.

    Attributes:
        status: HTTP status of the answer.
        problem: its type.
    """

    def __init__(self, status: int, reason: str, problem: str = "about:blank") -> None:
        super().__init__(reason)
        self.status = status
        self.problem = problem


class Replays:
    """Remembers requests that are not safe, by the key each was sealed with, which no two share.

    A request says when it was made; what is older than the window is refused, so that what is remembered for twice as
    long is all that could pass.
    """

    def __init__(
        self,
        *,
        window_s: float = limits_relay.RELAY_REPLAY_WINDOW_S,
        remembered_max: int = limits_relay.RELAY_REPLAYS_MAX,
    ) -> None:
        self._window_s = window_s
        self._max = remembered_max
        self._seen: set[bytes] = set()
        self._order: deque[tuple[float, bytes]] = deque()

    def __len__(self) -> int:
        """Requests remembered."""
        return len(self._seen)

    def take(self, head: bhttp.RequestHead, enc: bytes, wall: float) -> None:
        """Take note of a request, and refuse one that may be another's repetition.

        Args:
            head: what it begins with.
            enc: the ephemeral key it was sealed with.
            wall: seconds since 1970.

        Raises:
            Replay: it was seen before, its `Date` is missing or not of now, or no more can be remembered.
        """
        if head.method in ohttp.REPEATABLE:
            return
        made_at = _date(head.headers)
        if made_at is None or abs(wall - made_at) > self._window_s:
            raise Replay(400, "a request that changes something says when it was made", ohttp.DATE_PROBLEM)
        while self._order and self._order[0][0] <= wall:
            self._seen.discard(self._order.popleft()[1])
        if enc in self._seen:
            raise Replay(409, "this request was here before")
        if len(self._seen) >= self._max:
            raise Replay(503, "too many requests that change something")
        self._seen.add(enc)
        # What was made at the window's far end passes until then.
        self._order.append((wall + 2 * self._window_s, enc))


def _date(headers: bhttp.Fields) -> float | None:
    found = [value for name, value in headers if name == b"date"]
    if len(found) != 1 or len(found[0]) > 64:
        return None
    try:
        return parsedate_to_datetime(found[0].decode("ascii")).timestamp()
    except (ValueError, OverflowError, UnicodeDecodeError):
        return None
