"""Messages of own protocols, cut anywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormline.core.errors import RemoteProtocolError
from stormline.wire.ownframes import Unpacker, pack


@given(messages=st.lists(st.binary(max_size=50), max_size=8), cuts=st.lists(st.integers(0, 500), max_size=12))
def test_messages_come_whole_and_in_order_however_they_are_cut(messages, cuts):
    data = b"".join(map(pack, messages))
    unpacker, found, begin = Unpacker(50), [], 0
    for end in (*sorted(min(cut, len(data)) for cut in cuts), len(data)):
        found += unpacker.feed(data[begin:end])
        begin = end
    assert found == messages
    assert not unpacker.partial


@given(data=st.binary(max_size=200))
def test_any_bytes_give_messages_within_the_bound_or_an_error(data):
    unpacker = Unpacker(10)
    try:
        found = unpacker.feed(data)
    except RemoteProtocolError:
        return
    assert all(len(message) <= 10 for message in found)
    assert unpacker.partial == (sum(len(message) + 4 for message in found) < len(data))


def test_message_too_large_is_refused_by_its_length_alone():
    with pytest.raises(RemoteProtocolError):
        Unpacker(10).feed(pack(bytes(11))[:4])
