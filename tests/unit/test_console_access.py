import pytest

from stormline.console.access import Access, host_allowed, link
from stormline.core import errors
from stormline.core.values import Address, Secret

KEY = Secret("0123456789abcdef")


@pytest.mark.parametrize(
    "header", ["127.0.0.1:8080", "localhost", "LOCALHOST:1", "[::1]:8080", "10.1.2.3", "ops.example:443", "OPS.example"]
)
def test_host_that_cannot_be_rebound_is_allowed(header: str) -> None:
    assert host_allowed(header, ("ops.example",))


@pytest.mark.parametrize(
    "header",
    ["", "evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example", "[::1", ":80"],
)
def test_host_of_another_name_is_refused(header: str) -> None:
    assert not host_allowed(header, ("ops.example",))


def test_access_key_short_enough_to_guess_is_refused() -> None:
    with pytest.raises(errors.ConfigError, match="access_key"):
        Access(Secret("short"), tls=False)


def test_cookie_signs_in_only_where_it_was_made() -> None:
    access, other = Access(KEY, tls=False), Access(Secret("another-access-key"), tls=False)
    name, _, value = access.set_cookie().partition(";")[0].partition("=")
    assert access.signed_in({name: value})
    assert not other.signed_in({name: value})
    assert not access.signed_in({name: value[:-1]})
    assert not access.signed_in({name: KEY.reveal()})
    assert not access.signed_in({name: "\ud800"})
    assert not access.signed_in({})


def test_cookie_is_closed_to_scripts_and_other_sites_and_holds_no_key() -> None:
    plain, secure = Access(KEY, tls=False).set_cookie(), Access(KEY, tls=True).set_cookie()
    assert "HttpOnly" in plain
    assert "SameSite=Strict" in plain
    assert "Secure" not in plain
    assert "Secure" in secure
    assert KEY.reveal() not in plain


def test_key_matches_only_itself() -> None:
    access = Access(KEY, tls=False)
    assert access.key_matches("0123456789abcdef")
    assert not access.key_matches("0123456789abcdeF")
    assert not access.key_matches("\ud800")


def test_link_carries_the_key_and_the_scheme() -> None:
    address = Address("127.0.0.1", 8080)
    assert link(address, Secret("a key/with=signs"), tls=True) == "https://127.0.0.1:8080/?key=a+key%2Fwith%3Dsigns"
    assert link(address, KEY, tls=False).startswith("http://127.0.0.1:8080/?key=")
