"""Chance that can be repeated."""

import random


class SeededRng(random.Random):
    """`core.clock.Rng` from a seed: the same name and number give the same draws on every machine."""

    def __init__(self, name: str, seed: int) -> None:
        # A text is hashed by SHA-512, so that neighbouring seeds have nothing in common.
        super().__init__(f"{name}/{seed}")

    def token_bytes(self, size: int) -> bytes:
        """`size` bytes; predictable, so nothing that must stay secret may be made of them."""
        return self.randbytes(size)
