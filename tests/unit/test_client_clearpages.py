"""Pages in clear HTTP: what they are held against, without a network."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormline.client.clearpages import is_inserted, leads_to, parse, related
from stormline.client.reaching import Origin, skew_of
from stormline.core import errors
from stormline.core import limits_diagnosis as limits
from stormline.net.clock import SystemClock
from stormline.net.webask import Asked


class Pieces:
    """A stream that gives what it is told, piece by piece."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = list(pieces)
        self.sent = b""

    async def send_all(self, data: bytes) -> None:
        self.sent += data

    async def receive(self, size_max: int = 0) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""


def ask(*pieces: bytes, **more: Any) -> Asked:
    asked = Asked("shop.test", **more)
    asyncio.run(asked.over(Pieces(*pieces)))  # type: ignore[arg-type]
    return asked


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("https://shop.test", Origin("https", "shop.test", 443, "/")),
        ("http://u:p@shop.test:8080/a?b=c#d", Origin("http", "shop.test", 8080, "/a?b=c")),
        ("https://[2001:db8::1]/", Origin("https", "2001:db8::1", 443, "/")),
        ("https://bücher.test/", Origin("https", "xn--bcher-kva.test", 443, "/")),
    ],
)
def test_url_is_taken_apart_without_user_and_fragment(url: str, origin: Origin) -> None:
    assert parse(url, "url") == origin


@given(st.text(max_size=60) | st.text(max_size=60).map("http://".__add__))
def test_any_text_is_an_origin_or_a_config_error(text: str) -> None:
    try:
        origin = parse(text, "url")
    except errors.ConfigError:
        return
    assert origin.scheme in ("http", "https")
    assert "\r" not in origin.target + origin.host
    assert " " not in origin.target + origin.host


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [("shop.test", "www.shop.test", True), ("a.shop.test", "shop.test", True), ("shop.test", "Shop.Test.", True),
     ("shop.test", "ads.test", False), ("shop.test", "myshop.test", False)],
)  # fmt: skip
def test_related_hosts(one: str, two: str, same: bool) -> None:
    assert related(one, two) is related(two, one) is same


@given(st.binary(min_size=1, max_size=300), st.binary(min_size=1, max_size=60), st.data())
def test_page_with_something_put_in_is_known_wherever_it_is(true: bytes, put: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(true)))
    assert is_inserted(true[:at] + put + true[at:], true)
    assert not is_inserted(true, true)
    assert not is_inserted(true[:-1], true)


def test_answer_is_told_as_far_as_it_came() -> None:
    whole = ask(b"HTTP/1.1 302 Found\r\nLocation: http://ads.test/x\r\nContent-", b"Length: 4\r\n\r\nab", b"cd")
    assert (whole.status, whole.body, whole.whole, whole.field("LOCATION")) == (302, b"abcd", True, "http://ads.test/x")
    assert whole.first_byte_s is not None
    assert leads_to(whole, "shop.test") == "ads.test"
    assert leads_to(whole, "ads.test") == ""
    cut = ask(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nab")
    assert (cut.status, cut.body, cut.whole) == (200, b"ab", False)
    head = ask(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", method="HEAD")
    assert (head.status, head.whole) == (200, True)
    chunked = ask(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n")
    assert chunked.whole


@settings(max_examples=100)  # each runs three event loops
@given(st.lists(st.binary(max_size=40), max_size=6))
def test_any_answer_is_read_without_an_error_and_within_bounds(pieces: list[bytes]) -> None:
    for start in (b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\n"):
        asked = ask(start, *pieces)
        assert asked.status in (0, *range(100, 1000))
        assert len(asked.body) <= limits.DIAGNOSIS_BODY_BYTES_MAX


@pytest.mark.parametrize("date", ["", "yesterday", "Mon, 99 Jan 2026 00:00:00 GMT", "\x00"])
def test_date_that_is_none_says_nothing_of_our_clock(date: str) -> None:
    assert skew_of(date, 0.1, SystemClock()) is None
