"""A table that remembers what was used lately and cannot grow without end."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class RecentTable(Generic[K, V]):
    """Remembers at least the `keep` entries used last, and never more than twice as many.

    Two generations: what is used moves to the young one; when that is full it becomes the old one, and what was in the
    old one is forgotten. No list of uses is kept, which makes an entry 80 bytes smaller than in an `OrderedDict`.
    """

    __slots__ = ("_keep", "_make", "_old", "_young")

    def __init__(self, keep: int, make: Callable[[], V]) -> None:
        self._keep = keep
        self._make = make
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def __len__(self) -> int:
        """Entries remembered."""
        return len(self._young) + len(self._old)

    def items(self) -> Iterator[tuple[K, V]]:
        """Give all entries, those that came into use last at the end."""
        yield from self._old.items()
        yield from self._young.items()

    def find(self, key: K) -> V | None:
        """Give an entry without counting it as used; None where there is none."""
        entry = self._young.get(key)
        return self._old.get(key) if entry is None else entry

    def use(self, key: K) -> V:
        """Give an entry, made where there is none, and count it as used."""
        entry = self._young.get(key)
        if entry is None:
            if len(self._young) >= self._keep:
                self._old, self._young = self._young, {}
            entry = self._old.pop(key, None)
            self._young[key] = entry = self._make() if entry is None else entry
        return entry
