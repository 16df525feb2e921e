"""What the service decides without a socket."""

import pytest
from starlette.requests import Request

from stormline.dispatch import service


@pytest.mark.parametrize(
    ("host", "key"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("a unix socket", "a unix socket"),
    ],
)
def test_rate_is_counted_per_ipv4_address_and_ipv6_line(host: str, key: str) -> None:
    assert service.peer_key(Request({"type": "http", "client": (host, 1)})) == key


def test_peer_without_address_has_a_key_too() -> None:
    assert service.peer_key(Request({"type": "http", "client": None})) == ""


def test_token_answer_shows_no_token() -> None:
    assert "secret" not in repr(service.TokenAnswer(device="d", token="secret", expires_at=1))
