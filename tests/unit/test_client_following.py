"""A body that breaks off goes on from another answer, if that one is the same."""

import asyncio
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormline.client.following import FollowedBody, MemoryBody
from stormline.client.lanes import Reply
from stormline.core import errors, limits
from stormline.core.phase import Phase


class Script:
    """A body that gives pieces, then ends or breaks off."""

    def __init__(self, *pieces, breaks=False):
        self.pieces = list(pieces)
        self.breaks = breaks
        self.closed = False

    @property
    def complete(self):
        return False

    def patience(self, silence_s):
        pass

    async def read(self):
        if self.pieces:
            return self.pieces.pop(0)
        if self.breaks:
            raise errors.ReadError("it broke off", phase=Phase.BODY, maybe_delivered=True)
        return b""

    async def aclose(self):
        self.closed = True


def reply(source, *, status=200, **fields):
    headers = tuple((name.replace("_", "-").encode(), value.encode()) for name, value in fields.items())
    return Reply(status, b"", "HTTP/1.1", headers, source, None, "h1", False)


def following(first, *later):
    """Give a body whose further answers are `later`, and what was asked for each."""
    asked, ended, answers = [], [], list(later)

    async def resume(error, fields):
        asked.append(dict(fields))
        if not answers:
            raise error
        return answers.pop(0)

    return FollowedBody(first, lambda size, whole: ended.append((size, whole)), resume), asked, ended


async def whole(body):
    pieces = []
    while piece := await body.read():
        pieces.append(piece)
    return b"".join(pieces)


async def test_body_that_comes_whole_is_handed_on_and_counted():
    body, asked, ended = following(reply(Script(b"abc", b"def")))
    assert await whole(body) == b"abcdef"
    assert (asked, ended) == ([], [(6, True)])


async def test_body_that_breaks_off_goes_on_where_the_same_answer_comes_again():
    body, asked, ended = following(reply(Script(b"abc", breaks=True)), reply(Script(b"ab", b"cdef")))
    assert await whole(body) == b"abcdef"
    assert (asked, ended) == ([{}], [(6, False)])  # the time it took says nothing of the link


async def test_answer_that_breaks_off_too_is_followed_by_another():
    broken = reply(Script(b"ab", breaks=True))
    body, asked, _ = following(reply(Script(b"abc", breaks=True)), broken, reply(Script(b"abcdef")))
    assert await whole(body) == b"abcdef"
    assert len(asked) == 2
    assert broken.source.closed


@pytest.mark.parametrize(
    "other",
    [
        reply(Script(b"aXcdef")),
        reply(Script(b"ab")),
        reply(Script(b"abcdef"), status=404),
        reply(Script(b"abcdef"), etag='"2"'),
        reply(Script(b"abcdef"), content_encoding="gzip"),
        reply(Script(b"def"), status=206, content_range="bytes 3-5/6"),
    ],
    ids=["other bytes", "shorter", "status", "validator", "coding", "a part nobody asked for"],
)
async def test_answer_that_is_not_the_same_fails_the_body_and_is_closed(other):
    body, _, _ = following(reply(Script(b"abc", breaks=True), etag='"1"'), other)
    assert await body.read() == b"abc"
    with pytest.raises(errors.ReadError, match="it broke off"):
        await body.read()
    assert other.source.closed


async def test_body_that_must_not_be_continued_fails_as_it_broke_off():
    ended = []
    body = FollowedBody(reply(Script(b"abc", breaks=True)), lambda *said: ended.append(said), None)
    assert await body.read() == b"abc"
    with pytest.raises(errors.ReadError):
        await body.read()
    assert ended == [(3, False)]


async def test_body_that_takes_long_is_measured_while_it_comes(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
    told = []
    piece = b"x" * limits.MEASURE_BODY_BYTES
    source = reply(Script(*[piece] * 8))
    body = FollowedBody(source, lambda *said: None, None, lambda size, seconds: told.append((size, seconds)))
    for _ in range(8):
        now[0] += 0.5
        await body.read()
    # At least a second in, and again each time that has doubled.
    assert told == [(2 * len(piece), 1.0), (4 * len(piece), 2.0), (8 * len(piece), 4.0)]


class TestRanges:
    START = b"x" * limits.RANGE_BYTES_MIN

    async def test_long_body_with_a_strong_validator_goes_on_by_range(self):
        size = len(self.START)
        rest = reply(Script(b"end"), status=206, content_range=f"bytes {size}-{size + 2}/{size + 3}", etag='"1"')
        body, asked, _ = following(reply(Script(self.START, breaks=True), etag='"1"'), rest)
        assert await whole(body) == self.START + b"end"
        assert asked == [{b"Range": b"bytes=%d-" % size, b"If-Range": b'"1"'}]

    async def test_server_that_ignores_the_range_is_compared(self):
        again = reply(Script(self.START + b"end"), etag='"1"')
        body, _, _ = following(reply(Script(self.START, breaks=True), etag='"1"'), again)
        assert await whole(body) == self.START + b"end"

    @pytest.mark.parametrize("tag", [None, 'W/"1"'])
    async def test_without_a_strong_validator_the_whole_is_asked_for(self, tag):
        fields = {} if tag is None else {"etag": tag}
        body, asked, _ = following(reply(Script(self.START, breaks=True), **fields), reply(Script(self.START, b"end")))
        assert await whole(body) == self.START + b"end"
        assert asked == [{}]

    async def test_range_that_begins_elsewhere_is_refused(self):
        rest = reply(Script(b"end"), status=206, content_range="bytes 7-9/10", etag='"1"')
        body, _, _ = following(reply(Script(self.START, breaks=True), etag='"1"'), rest)
        await body.read()
        with pytest.raises(errors.ReadError):
            await body.read()


@given(
    data=st.binary(min_size=1, max_size=300).map(lambda seed: hashlib.shake_128(seed).digest(len(seed) * 700)),
    cuts=st.lists(st.floats(0, 1), max_size=4),
    step=st.integers(1, 70_000),
)
async def test_whatever_breaks_where_the_caller_gets_the_body_once(data, cuts, step):
    def pieces(size):
        return [data[:size][at : at + step] for at in range(0, size, step)]

    broken = [reply(Script(*pieces(int(cut * len(data))), breaks=True)) for cut in cuts]
    first, *later = [*broken, reply(Script(*pieces(len(data))))]
    body, _, ended = following(first, *later)
    assert await whole(body) == data
    assert ended == [(len(data), not later)]


async def test_memory_body_gives_its_bytes_once():
    body = MemoryBody(b"abc")
    assert body.complete
    assert [await body.read(), await body.read()] == [b"abc", b""]
