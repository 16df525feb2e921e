"""Frames: every message survives the way, however its bytes are cut; nothing but the named error comes of damage."""

from hypothesis import given
from hypothesis import strategies as st

from stormline.core import limits
from stormline.core.errors import RemoteProtocolError
from stormline.testing.pair import byte_by_byte, random_pieces
from stormline.wire import frames
from stormline.wire import messages as m

UINTS = st.integers(0, 2**64 - 1)
INTS = st.integers(-(2**63), 2**64 - 1)
TEXTS = st.text(max_size=20)
HEADERS = st.lists(st.tuples(TEXTS, TEXTS), max_size=4).map(tuple)
BODIES = st.binary(max_size=300)
FLOATS = st.floats(allow_nan=False)
MAYBE = st.none() | INTS

MESSAGES: st.SearchStrategy[m.Message] = st.one_of(
    st.builds(
        m.Hello,
        versions=st.lists(UINTS, max_size=3).map(tuple),
        app=TEXTS,
        token=TEXTS,
        unit=TEXTS,
        resume=TEXTS,
        received=INTS,
        network=TEXTS,
        client=TEXTS,
        capabilities=st.lists(TEXTS, max_size=3).map(tuple),
    ),
    st.builds(
        m.Welcome,
        version=INTS,
        session=TEXTS,
        device=TEXTS,
        user=TEXTS,
        unit=TEXTS,
        unit_epoch=INTS,
        resume=TEXTS,
        resume_window_s=FLOATS,
        resumed=st.booleans(),
        heartbeat_s=FLOATS,
        time_ms=INTS,
        capabilities=st.lists(TEXTS, max_size=3).map(tuple),
    ),
    st.builds(m.Close, code=INTS, reason=TEXTS, retry_after_ms=MAYBE),
    st.builds(
        m.Call,
        id=INTS,
        gate=TEXTS,
        method=TEXTS,
        target=TEXTS,
        headers=HEADERS,
        body=BODIES,
        more=st.booleans(),
        deadline_ms=MAYBE,
    ),
    st.builds(m.Data, id=INTS, body=BODIES, end=st.booleans(), trailers=HEADERS),
    st.builds(m.Reply, id=INTS, status=INTS, headers=HEADERS, body=BODIES, more=st.booleans()),
    st.builds(m.Fail, id=INTS, code=INTS, reason=TEXTS, retry_after_ms=MAYBE, maybe_delivered=st.booleans()),
    st.builds(m.Cancel, id=INTS, code=INTS),
    st.builds(m.Credit, id=INTS, size=INTS),
    st.builds(m.Push, seq=INTS, id=TEXTS, topic=TEXTS, headers=HEADERS, body=BODIES, expires_ms=MAYBE),
    st.builds(m.Ack, seqs=st.lists(INTS, max_size=5).map(tuple)),
    st.builds(m.Ping, nonce=INTS),
    st.builds(m.Pong, nonce=INTS),
    st.builds(m.GoAway, code=INTS, last_call=INTS, reason=TEXTS, spread_ms=INTS, retry_after_ms=MAYBE),
    st.builds(m.Notice, version=INTS, hosts=st.lists(TEXTS, max_size=5).map(tuple)),
)


def read_all(pieces: list[bytes]) -> list[m.Message]:
    buffer = frames.FrameBuffer(limits.FRAME_BYTES_MAX)
    messages: list[m.Message] = []
    for piece in pieces:
        buffer.feed(piece)
        messages += iter(buffer.next_message, None)
    assert len(buffer) == 0
    return messages


@given(message=MESSAGES)
def test_message_any_survives_encoding(message: m.Message):
    data = frames.encode(message)
    assert int.from_bytes(data[:4], "big") == len(data) - 4
    assert frames.decode_payload(data[4:]) == message


@given(messages=st.lists(MESSAGES, max_size=6), seed=st.integers(0, 2**32))
def test_frames_however_cut_give_the_same_messages(messages: list[m.Message], seed: int):
    data = b"".join(frames.encode(message) for message in messages)
    assert read_all([data]) == messages
    assert read_all(list(byte_by_byte(data))) == messages
    assert read_all(list(random_pieces(seed)(data))) == messages


@given(payload=st.binary(max_size=200))
def test_payload_of_any_bytes_gives_a_message_or_the_named_error(payload: bytes):
    try:
        message = frames.decode_payload(payload)
    except RemoteProtocolError:
        return
    assert frames.decode_payload(frames.encode(message)[4:]) == message or "nan" in repr(message)


@given(message=MESSAGES, data=st.data())
def test_payload_with_one_byte_changed_gives_a_message_or_the_named_error(message: m.Message, data: st.DataObject):
    payload = bytearray(frames.encode(message)[4:])
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        frames.decode_payload(payload)
    except RemoteProtocolError:
        return
