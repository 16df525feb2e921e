"""What a server answers when it is asked for its versions of QUIC, of any content."""

from hypothesis import given
from hypothesis import strategies as st

from stormline.wire import quic


@given(datagram=st.binary(max_size=1500), ids=st.binary(min_size=16, max_size=16))
def test_no_datagram_breaks_the_reader_and_none_without_the_ids_is_believed(datagram: bytes, ids: bytes) -> None:
    assert quic.read_answer(datagram, ids[:8], ids[8:]) is None or (ids[:8] in datagram and ids[8:] in datagram)


@given(versions=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300), first=st.integers(0x80, 0xFF))
def test_every_answer_is_read_whole(versions: list[int], first: int) -> None:
    ids = b"\x08" + b"s" * 8 + b"\x08" + b"d" * 8
    datagram = bytes((first, 0, 0, 0, 0)) + ids + b"".join(each.to_bytes(4) for each in versions)
    assert quic.read_answer(datagram, b"d" * 8, b"s" * 8) == frozenset(versions)
