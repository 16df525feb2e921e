"""The first thing a QUIC server says, asked as a client asks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormline.lab import origin_quic
from stormline.wire import quic

DESTINATION, SOURCE = b"12345678", b"abcdefgh"


def test_question_is_answered_with_the_versions() -> None:
    answer = origin_quic.answer(quic.question(DESTINATION, SOURCE))
    assert answer is not None
    assert quic.read_answer(answer, DESTINATION, SOURCE) == quic.VERSIONS


@pytest.mark.parametrize(
    "datagram",
    [
        b"",
        quic.question(DESTINATION, SOURCE)[:-1],  # too small (RFC 9000 section 5.2.2)
        b"\x40" + bytes(1300),  # a short header
        b"\xc0\0\0\0\x01" + bytes(1300),  # a version that is spoken
        b"\xc0\0\0\0\0" + bytes(1300),  # itself such an answer
    ],
)
def test_anything_else_is_passed_over(datagram: bytes) -> None:
    assert origin_quic.answer(datagram) is None


@given(st.binary(max_size=600))
def test_no_datagram_harms(data: bytes) -> None:
    origin_quic.answer(data)
    answer = origin_quic.answer((b"\xff" + data).ljust(quic.DATAGRAM_BYTES, b"\xff"))
    assert answer is None or len(answer) <= 5 + 2 * 256 + 4 * len(quic.VERSIONS)
