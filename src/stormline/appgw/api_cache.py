"""Answers that the API gate keeps: by app, bounded in bytes; what may be kept is said by `policy.httpcache`.

Each app has a share of its own, and where all together are too much, the app that holds most gives: no app can drive
out another's answers, nor be given them.
"""

from collections import OrderedDict
from typing import NamedTuple

from stormline.core import limits_api as limits
from stormline.policy.httpcache import Fields, Kept
from stormline.policy.recent import RecentTable

Key = tuple[str, str, bytes]
"""Upstream, authority and target."""


class Entry(NamedTuple):
    """A kept answer.

    Attributes:
        kept: its head, and how long it is good.
        body: as it came.
    """

    kept: Kept
    body: bytes

    @property
    def size(self) -> int:
        """Bytes it is counted for."""
        text = sum(len(name) + len(value) for name, value in (*self.kept.headers, *self.kept.selecting))
        return len(self.body) + text + limits.CACHE_ENTRY_OVERHEAD_BYTES


class _Shelf:
    """One app's answers, those used last at the end."""

    __slots__ = ("entries", "size")

    def __init__(self) -> None:
        self.entries: OrderedDict[Key, tuple[Entry, ...]] = OrderedDict()
        self.size = 0

    def set(self, key: Key, entries: tuple[Entry, ...]) -> None:
        self.size += sum(entry.size for entry in entries) - sum(entry.size for entry in self.entries.pop(key, ()))
        if entries:
            self.entries[key] = entries


class _Write:
    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at = 0


class Cache:
    """The cache of one process.

    Args:
        bytes_max: for all apps together.
    """

    def __init__(self, bytes_max: int = limits.CACHE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._shelves: dict[str, _Shelf] = {}
        self._writes = RecentTable[tuple[str, Key], _Write](limits.CACHE_WRITES_REMEMBERED, _Write)
        self._moment = 0

    @property
    def size(self) -> int:
        """Bytes kept."""
        return sum(shelf.size for shelf in self._shelves.values())

    def moment(self) -> int:
        """Give a moment, later than every one before: clocks give the same one twice."""
        self._moment += 1
        return self._moment

    def find(self, app: str, key: Key, request: Fields) -> Entry | None:
        """Give the answer kept for a request, fresh or not; of several that fit by Vary the newest."""
        shelf = self._shelves.get(app)
        entries = shelf.entries.get(key) if shelf is not None else None
        if shelf is None or entries is None:
            return None
        shelf.entries.move_to_end(key)
        return next((entry for entry in entries if entry.kept.fits(request)), None)

    def put(self, app: str, key: Key, request: Fields, entry: Entry, asked_at: int) -> None:
        """Keep an answer in the place of those that fit the same request.

        Not one that is too large, nor one that was asked for before the last write to its URL (`asked_at`, a moment).
        """
        write = self._writes.find((app, key))
        if len(entry.body) > limits.CACHE_ENTRY_BYTES_MAX or (write is not None and asked_at < write.at):
            return
        shelf = self._shelves.setdefault(app, _Shelf())
        others = tuple(each for each in shelf.entries.get(key, ()) if not each.kept.fits(request))
        shelf.set(key, (entry, *others)[: limits.CACHE_VARIANTS_MAX])
        while shelf.size > self._bytes_max * limits.CACHE_APP_SHARE:
            self._give_way(shelf)
        while self.size > self._bytes_max:
            self._give_way(max(self._shelves.values(), key=lambda each: each.size))

    def written(self, app: str, key: Key) -> None:
        """Forget what is kept for a URL, and what is on its way: it was written to."""
        self._writes.use((app, key)).at = self.moment()
        self.drop(app, key)

    def drop(self, app: str, key: Key) -> None:
        """Forget what is kept for a URL."""
        shelf = self._shelves.get(app)
        if shelf is not None:
            shelf.set(key, ())

    def clear(self) -> None:
        """Forget everything."""
        self._shelves.clear()

    @staticmethod
    def _give_way(shelf: _Shelf) -> None:
        shelf.set(next(iter(shelf.entries)), ())
