"""Host names: the form, and what is none."""

import pytest

from stormline.core import errors
from stormline.wire import hostname


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("api.example.com", "api.example.com"),
        ("API.Example.COM.", "api.example.com"),
        ("localhost", "localhost"),
        ("my_service.internal", "my_service.internal"),
        ("xn--mnchen-3ya.de", "xn--mnchen-3ya.de"),
        ("XN--MNCHEN-3YA.de", "xn--mnchen-3ya.de"),
        ("3com.com", "3com.com"),
        ("127.0.0.1", "127.0.0.1"),
        ("2001:DB8:0::1", "2001:db8::1"),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.1"),
        ("a" * 63 + ".b", "a" * 63 + ".b"),
        (".".join(["a" * 49] * 5 + ["bcd"]), ".".join(["a" * 49] * 5 + ["bcd"])),
    ],
)
def test_host_is_brought_into_its_form(name: str, form: str) -> None:
    got = hostname.normalise(name)
    # Which text form an IPv4-mapped address has depends on the Python version; that it is one does not.
    assert got == form or hostname.is_address(got)


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "a..b", ".a", "a b", "a\n", "a/", "https://a.example", "a.example:443", "a.example/path",
        "user@a",
        "*.example.com", "-a.example", "a-.example", "a" * 64 + ".b", "a." * 127 + "aaa", "münchen.de", "a。b", "[::1]",
        "fe80::1%eth0", "1.2.3", "1.2.3.256", "01.2.3.4", "1.2.3.4.5", "0x7f.1", "0x7f000001", "a.0x1", ":::",
        "::1:443:x",
        "xn--", "xn--abc-", "xn--99999999999", "a.xn--a-.b", "%61", "a\x00", "a\\b",
    ],
)  # fmt: skip
def test_what_is_no_host_name_is_refused(name: str) -> None:
    with pytest.raises(errors.ConfigError, match="host"):
        hostname.normalise(name)


def test_addresses_are_told_from_names() -> None:
    assert [hostname.is_address(host) for host in ("127.0.0.1", "::1", "a.example", "3com.com", "localhost")] == [
        True, True, False, False, False,
    ]  # fmt: skip
