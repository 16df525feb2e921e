"""How often one peer may do something: a token bucket per key, in a table that cannot grow without end.

Pure: the caller passes `now`.
"""

from collections import OrderedDict


class RateLimiter:
    """Token buckets by key.

    A bucket holds `burst` tokens and gains `rate_per_s`; whoever finds none waits. Only one number is kept per key:
    the moment its bucket will be full again (the virtual scheduling of ITU-T I.371, known as GCRA).

    When the table is full, the key that was silent for longest is forgotten and so starts with a full bucket. With
    the oldest bucket usually full by then this changes nothing; under a flood from more than `keys_max` addresses
    it lets peers in rather than locking all new ones out.
    """

    __slots__ = ("_burst_s", "_full_at", "_interval_s", "_keys_max")

    def __init__(self, *, rate_per_s: float, burst: int, keys_max: int) -> None:
        if not (rate_per_s > 0 and burst >= 1 and keys_max >= 1):
            raise ValueError("rate_per_s must be above 0, burst and keys_max at least 1")
        self._interval_s = 1.0 / rate_per_s
        self._burst_s = burst * self._interval_s
        self._keys_max = keys_max
        self._full_at: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        """Keys remembered."""
        return len(self._full_at)

    def take(self, key: str, now: float) -> float:
        """Take one token of `key`.

        Args:
            key: the peer.
            now: monotonic seconds.

        Returns:
            0.0 where a token was taken; else the seconds until there is one, and nothing was taken.
        """
        full_at = max(self._full_at.get(key, now), now) + self._interval_s
        wait_s = full_at - now - self._burst_s
        # Sums of the interval are not exact: less than a millionth of a token short is not short.
        if wait_s > self._interval_s * 1e-6:
            self._full_at.move_to_end(key)
            return wait_s
        self._full_at[key] = full_at
        self._full_at.move_to_end(key)
        if len(self._full_at) > self._keys_max:
            self._full_at.popitem(last=False)
        return 0.0
