"""The demo shop's order book: what its HTTP and its RPC side share. Plain memory, no I/O."""

import msgspec

from stormline.core import limits_platform as limits


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """An order.

    Attributes:
        id: counts from 1.
        item: number of the item ordered.
        user: who ordered, as the platform says; empty where it does not.
        via: `http` or `rpc`.
    """

    id: int
    item: int
    user: str
    via: str


class KeyReused(Exception):
    """An idempotency key came again with another order."""


class OrderBook:
    """Orders, each made once: the same idempotency key of the same user gives the same order again."""

    def __init__(self) -> None:
        self.created = 0
        """Orders ever made. Tests compare it with what clients were told."""
        self.repeated = 0
        """Times an order was given again for its key instead of being made."""
        self._orders: dict[int, Order] = {}
        self._by_key: dict[tuple[str, str], Order] = {}

    def create(self, item: int, *, user: str, via: str, key: str = "") -> tuple[Order, bool]:
        """Make an order, or give the one made for this key. The flag says whether it was made now.

        Raises:
            KeyReused: the key belongs to an order of another item.
        """
        if key and (known := self._by_key.get((user, key))) is not None:
            if known.item != item:
                raise KeyReused
            self.repeated += 1
            return known, False
        self.created += 1
        order = Order(id=self.created, item=item, user=user, via=via)
        self._orders[order.id] = order
        if key:
            self._by_key[user, key] = order
        if len(self._orders) > limits.DEMO_ORDERS_MAX:
            del self._orders[next(iter(self._orders))]
        if len(self._by_key) > limits.DEMO_ORDERS_MAX:
            del self._by_key[next(iter(self._by_key))]
        return order, True

    def get(self, ident: int) -> Order | None:
        """Give an order, None where there is none (or no longer)."""
        return self._orders.get(ident)

    def newest(self) -> list[Order]:
        """Give the newest orders, newest first, at most `limits.DEMO_ORDERS_LISTED_MAX`."""
        numbers = range(self.created, max(0, self.created - limits.DEMO_ORDERS_LISTED_MAX), -1)
        return [self._orders[number] for number in numbers if number in self._orders]
