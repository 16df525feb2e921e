"""Seeded damage to valid inputs: the same seed and number give the same input, on every machine."""

import random
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

INPUT_BYTES_MAX: Final = 4096
"""Longer inputs find little that shorter ones do not, and cost time."""
DAMAGES_MAX: Final = 6
"""Changes to one input; more make noise of it that every parser refuses at its first byte."""
_TELLING: Final = (
    b"\x00", b"\xff", b"\x7f", b"\x80", b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"\x80\x00\x00\x00",
    b"\x00\x01\x00\x00",
    b"\xc0", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff", b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00", b"\xd6\xff\x00\x00\x00\x00",
    b"NaN", b"1e999", b"-1", b"18446744073709551616", b"null", b"true", b"\"\"", b"{}", b"[]", b",", b":", b".", b"=",
    b"\\ud800", b"\xed\xa0\x80", b"[" * 300, b"\x91" * 300, b" ", b"\n", b"65536", b"0", b"[", b"]", b"%",
)  # fmt: skip
"""Bytes that mean something to one of the parsers: bounds, lengths, types, signs of structure."""

Damage: TypeAlias = Callable[[random.Random, bytearray, Sequence[bytes]], None]


def _flip(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    data[rng.randrange(len(data))] = rng.randrange(256)


def _add(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    data[rng.randrange(len(data))] = (data[rng.randrange(len(data))] + rng.choice((-1, 1))) % 256


def _insert(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.choice(_TELLING)


def _overwrite(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at, piece = rng.randrange(len(data)), rng.choice(_TELLING)
    data[at : at + len(piece)] = piece


def _cut(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.randint(1, 8)]


def _end(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    del data[rng.randrange(len(data)) :]


def _repeat(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = rng.randrange(len(data))
    data[at:at] = data[at : at + rng.randint(1, 64)] * rng.randint(1, 4)


def _splice(rng: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    other = rng.choice(seeds)
    data[rng.randrange(len(data)) :] = other[rng.randrange(len(other) + 1) :]


_DAMAGES: Final[tuple[Damage, ...]] = (_flip, _set, _add, _insert, _overwrite, _cut, _end, _repeat, _splice)


def make(seed: int, number: int, seeds: Sequence[bytes]) -> bytes:
    """Make input `number` of the run with this seed: one of `seeds`, damaged; a few are noise or left as they are."""
    rng = random.Random(f"{seed}/{number}")
    if rng.random() < 0.02:
        return rng.randbytes(rng.randrange(64))
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(0, DAMAGES_MAX)):
        if data:
            rng.choice(_DAMAGES)(rng, data, seeds)
    return bytes(data[:INPUT_BYTES_MAX])
