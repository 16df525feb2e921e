"""The order book and pictures of the demo shop."""

import struct
import zlib

import pytest

from stormline.core import limits_platform as limits
from stormline.demo.orders import KeyReused, OrderBook
from stormline.demo.pages import ITEMS, OrderRefused, image, take_order


def test_orders_are_counted_from_one():
    book = OrderBook()
    assert [book.create(3, user="", via="http")[0].id for _ in range(3)] == [1, 2, 3]
    assert book.created == 3
    assert book.get(2) is not None
    assert book.get(4) is None


def test_repeated_key_gives_the_same_order_for_the_same_user_only():
    book = OrderBook()
    first, made = book.create(3, user="ann", via="http", key="k")
    assert made
    assert book.create(3, user="ann", via="rpc", key="k") == (first, False)
    other, made = book.create(3, user="bob", via="rpc", key="k")
    assert made
    assert other.id != first.id
    assert (book.created, book.repeated) == (2, 1)


def test_key_reused_for_another_item_is_refused_and_makes_nothing():
    book = OrderBook()
    book.create(3, user="ann", via="http", key="k")
    with pytest.raises(KeyReused):
        book.create(4, user="ann", via="http", key="k")
    assert book.created == 1


def test_book_forgets_the_oldest_beyond_its_bound(monkeypatch):
    monkeypatch.setattr(limits, "DEMO_ORDERS_MAX", 3)
    book = OrderBook()
    for number in range(5):
        book.create(1, user="", via="http", key=str(number))
    assert [order.id for order in book.newest()] == [5, 4, 3]
    assert book.get(1) is None
    assert book.created == 5


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"{}", 400),
        (b'{"item": "3"}', 400),
        (b'{"item": 1.5}', 400),
        (b'{"item": true}', 400),
        (b'{"item": null}', 400),
        (b"\xff\xfe", 400),
        (b"[" * 10_000, 400),
        (b'{"item": 0}', 404),
        (b'{"item": 41}', 404),
        (b'{"item": -9223372036854775808}', 404),
        (b'{"item": ' + b"9" * 100 + b"}", 404),
        (b'{"item": ' + b"9" * 5000 + b"}", 400),
        (b" " * 70_000, 413),
    ],
)
def test_bad_orders_are_refused_with_their_status_and_make_nothing(body, status):
    book = OrderBook()
    with pytest.raises(OrderRefused) as caught:
        take_order(book, body, user="", via="http", key="")
    assert caught.value.status == status
    assert book.created == 0


def test_every_item_can_be_ordered():
    book = OrderBook()
    for item in range(1, ITEMS + 1):
        take_order(book, b'{"item": %d}' % item, user="", via="http", key="")
    assert book.created == ITEMS


def test_images_are_valid_png_always_the_same_and_of_many_sizes():
    sizes = set()
    for number in range(30):
        body, tag = image(number)
        image.cache_clear()
        assert image(number) == (body, tag)
        assert body.startswith(b"\x89PNG\r\n\x1a\n")
        at, kinds, data = 8, [], b""
        while at < len(body):
            (length,) = struct.unpack(">I", body[at : at + 4])
            kind, chunk = body[at + 4 : at + 8], body[at + 8 : at + 8 + length]
            assert struct.unpack(">I", body[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + chunk)
            kinds.append(kind)
            data += chunk if kind == b"IDAT" else b""
            at += 12 + length
        assert kinds == [b"IHDR", b"IDAT", b"IEND"]
        side = struct.unpack(">I", body[16:20])[0]
        assert len(zlib.decompress(data)) == side * (side + 1)
        sizes.add(len(body))
    assert len(sizes) == 30
    assert min(sizes) < 3_000
    assert max(sizes) > 300_000
