"""The order in which addresses are raced."""

import pytest

from stormline.core import limits
from stormline.core.values import Address
from stormline.outbound.dial import interleave


def _addresses(text):
    return tuple(Address(host, 1) for host in text.split())


@pytest.mark.parametrize(
    ("given", "raced"),
    [
        ("", ""),
        ("1.1.1.1", "1.1.1.1"),
        ("::1 ::2 ::3 1.1.1.1 1.1.1.2", "::1 1.1.1.1 ::2 1.1.1.2 ::3"),
        ("1.1.1.1 1.1.1.2 ::1", "1.1.1.1 ::1 1.1.1.2"),
        ("1.1.1.1 1.1.1.1 1.1.1.2", "1.1.1.1 1.1.1.2"),
    ],
)
def test_interleave_families_alternate_from_the_first(given, raced):
    assert interleave(_addresses(given)) == _addresses(raced)


def test_interleave_long_list_is_cut():
    assert len(interleave(Address("1.1.1.1", port) for port in range(1, 100))) == limits.DIAL_CANDIDATES_MAX
