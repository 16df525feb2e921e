"""Addresses and secrets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormline.core import errors
from stormline.core.values import Address, Secret, parse_address


class TestParseAddress:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("127.0.0.1:443", Address("127.0.0.1", 443)),
            (" api.example.com:8443 ", Address("api.example.com", 8443)),
            ("[2001:db8::1]:443", Address("2001:db8::1", 443)),
            ("[fe80::1%eth0]:1", Address("fe80::1%eth0", 1)),
            ("localhost", Address("localhost", 99)),
            ("[::1]", Address("::1", 99)),
            ("::1", Address("::1", 99)),
            ("2001:db8::1", Address("2001:db8::1", 99)),
        ],
    )
    def test_address_is_read(self, text: str, expected: Address) -> None:
        assert parse_address(text, default_port=99) == expected

    @pytest.mark.parametrize(
        "text",
        ["", ":443", "a:", "a:0", "a:65536", "a:" + "9" * 5000, "a:-1", "a:٣", "[::1", "[::1]443", "[a]5", "[[a]:1",
         "a b:1", "a:1:2", "http://a:1", "u@a:1", "[]:1"],
    )  # fmt: skip
    def test_address_that_is_none_is_refused_and_quoted(self, text: str) -> None:
        with pytest.raises(errors.ConfigError, match="address"):
            parse_address(text)

    def test_address_without_port_needs_a_default(self) -> None:
        with pytest.raises(errors.ConfigError, match="no port"):
            parse_address("localhost")

    @given(st.text())
    def test_address_any_text_is_an_address_or_a_config_error(self, text: str) -> None:
        try:
            address = parse_address(text, default_port=1)
        except errors.ConfigError:
            return
        assert parse_address(str(address)) == address

    @pytest.mark.parametrize(("host", "is_ip"), [("127.0.0.1", True), ("::1", True), ("fe80::1%e", True), ("a", False)])
    def test_address_knows_an_ip_literal(self, host: str, *, is_ip: bool) -> None:
        assert Address(host, 1).is_ip is is_ip


class TestSecret:
    def test_secret_is_masked_wherever_text_is_made_of_it(self) -> None:
        secret = Secret("pw-SECRET")
        texts = [str(secret), f"{secret}", f"{secret:>20}", f"{secret!r}", "".join(["x", str(secret)]), f"{[secret]}"]
        shown = [repr(secret), *texts]
        assert not [text for text in shown if "SECRET" in text]

    def test_secret_is_given_by_reveal_alone(self) -> None:
        assert Secret("pw").reveal() == "pw"
        assert Secret("pw") == "pw"
