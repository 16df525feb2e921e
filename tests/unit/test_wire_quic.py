"""A server asked for its versions of QUIC, and what it may answer."""

import pytest

from stormline.wire import quic

DESTINATION, SOURCE = bytes(range(8)), bytes(range(8, 16))


def answer(*versions: int, first: int = 0x80, number: int = 0, ids: tuple[bytes, ...] = (SOURCE, DESTINATION)) -> bytes:
    text = b"".join(bytes((len(each),)) + each for each in ids)
    return bytes((first,)) + number.to_bytes(4) + text + b"".join(each.to_bytes(4) for each in versions)


def test_question_is_a_long_header_of_a_version_nobody_has_in_a_full_datagram() -> None:
    asked = quic.question(DESTINATION, SOURCE)
    assert asked[:23] == b"\xc0\x1a\x2a\x3a\x4a\x08" + DESTINATION + b"\x08" + SOURCE
    assert asked[23:] == bytes(1200 - 23)


@pytest.mark.parametrize("first", [0x80, 0xFF])
def test_answer_gives_the_versions_whatever_its_unused_bits_say(first: int) -> None:
    found = quic.read_answer(answer(1, 0x6B3343CF, 0x0A0A0A0A, first=first), DESTINATION, SOURCE)
    assert found == {1, 0x6B3343CF, 0x0A0A0A0A}


@pytest.mark.parametrize(
    "datagram",
    [
        b"",
        b"\x80\0\0\0",
        answer(),
        answer(1)[:-1],
        answer(1, first=0x40),
        answer(1, number=1),
        answer(1, ids=(DESTINATION, SOURCE)),
        answer(1, ids=(SOURCE, DESTINATION[:-1])),
        answer(1, ids=(SOURCE,)),
        quic.question(DESTINATION, SOURCE),
    ],
)
def test_anything_else_is_no_answer(datagram: bytes) -> None:
    assert quic.read_answer(datagram, DESTINATION, SOURCE) is None
