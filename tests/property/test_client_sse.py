"""Event streams: the cut of the bytes changes nothing, and what is written is read."""

from hypothesis import given
from hypothesis import strategies as st

from stormline.client.sse import Event, EventParser
from stormline.core import errors

SIZE_MAX = 60
pieces = st.sampled_from(
    [b"data", b"event", b"id", b"retry", b":", b" ", b"\n", b"\r", b"\r\n", b"\n\n", b"\x00", b"7", b"\xef\xbb\xbf",
     "ü".encode(), "\u2028".encode(), b"\xff", b"x" * 20]
)  # fmt: skip
streams = st.lists(st.one_of(pieces, st.binary(max_size=5)), max_size=60).map(b"".join)
text = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)


def parse(stream, at):
    parser, events = EventParser(size_max=SIZE_MAX), []
    places = [0, *sorted(place for place in at if place < len(stream)), len(stream)]
    try:
        for start, end in zip(places, places[1:], strict=False):  # noqa: RUF007  (an iterator is harder to shrink)
            events += iter(parser.feed(stream[start:end]))
    except errors.ProtocolViolation:
        return events, "too large", None
    return events, parser.last_event_id, parser.retry_s


@given(streams, st.lists(st.integers(0, 400), max_size=30))
def test_cut_of_the_stream_changes_nothing(stream, at):
    assert parse(stream, at) == parse(stream, []) == parse(stream, range(len(stream)))


@given(
    st.lists(st.tuples(text.filter(bool), st.lists(text, min_size=1, max_size=4), text), max_size=6),
    st.sampled_from(["\n", "\r", "\r\n"]),
    st.booleans(),
)
def test_events_that_are_written_are_read(written, end, with_mark):
    lines, expected, last = [], [], ""
    for kind, data, ident in written:
        lines += [f"event: {kind}", *(f"data: {line}" for line in data), f"id: {ident}", ": more", ""]
        last = last if "\0" in ident else ident
        expected.append(Event(kind, "\n".join(data), last))
    stream = ("\ufeff" if with_mark else "") + "".join(line + end for line in lines)
    assert list(EventParser().feed(stream.encode())) == expected
