"""Echo requests and replies as bytes."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormline.net.icmp import checksum, read_reply, request

V4, V6 = socket.AF_INET, socket.AF_INET6
PAYLOAD = b"0123456789abcdef" + bytes(40)


@given(st.binary(max_size=64))
def test_checksum_of_a_message_with_its_checksum_is_zero(data: bytes) -> None:
    even = data + bytes(len(data) % 2)
    assert checksum(even + checksum(even).to_bytes(2, "big")) == 0


@pytest.mark.parametrize(("family", "kind"), [(V4, 0), (V6, 129)])
def test_reply_is_known_by_what_was_sent(family: socket.AddressFamily, kind: int) -> None:
    reply = bytes((kind,)) + request(family, 7, 3, PAYLOAD)[1:]
    assert read_reply(reply, family, PAYLOAD, raw=False) == 3
    assert read_reply(reply, family, b"another payload.", raw=False) is None
    assert read_reply(request(family, 7, 3, PAYLOAD), family, PAYLOAD, raw=False) is None, "our own question"


def test_reply_on_a_raw_socket_has_the_header_before_it() -> None:
    reply = bytes(1) + request(V4, 7, 3, PAYLOAD)[1:]
    assert read_reply(b"\x45" + bytes(19) + reply, V4, PAYLOAD, raw=True) == 3
    assert read_reply(b"\x46" + bytes(23) + reply, V4, PAYLOAD, raw=True) == 3


@given(st.binary(max_size=80), st.booleans(), st.sampled_from([V4, V6]))
def test_any_bytes_are_read_without_an_error(data: bytes, raw: bool, family: socket.AddressFamily) -> None:
    assert read_reply(data, family, PAYLOAD, raw=raw) in (None, *range(1 << 16))
