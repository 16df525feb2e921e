"""Which proxy for whom: variables, `NO_PROXY` and URLs as people and host tools write them."""

import logging

import pytest

from stormline.core import errors, limits
from stormline.core.values import Address, Secret
from stormline.outbound.messages import HttpRequest
from stormline.outbound.proxy import forwarded
from stormline.outbound.proxy_rules import DIRECT, explicit, from_environment, parse_no_proxy, parse_proxy

PROXY = "http://u:p%40ss@proxy.test:3128"


def _names(rules, scheme="https", host="shop.test", port=443):
    proxy = rules.proxy_for(scheme, host, port)
    return None if proxy is None else proxy.address.host


def _exempt(no_proxy, host, port=443, scheme="https"):
    return parse_no_proxy(no_proxy)[0].cover(scheme, host, port)


@pytest.mark.parametrize(
    ("url", "scheme", "address", "credentials"),
    [
        ("http://proxy.test:3128", "http", Address("proxy.test", 3128), None),
        ("proxy.test:3128", "http", Address("proxy.test", 3128), None),
        ("  HTTP://Proxy.Test./some/path ", "http", Address("proxy.test", 80), None),
        ("http://proxy.test:", "http", Address("proxy.test", 80), None),
        ("https://u:p@proxy.test", "https", Address("proxy.test", 443), (b"u", b"p")),
        ("https://[::1]:8443", "https", Address("::1", 8443), None),
        ("http://[::1]:8080", "http", Address("::1", 8080), None),
        ("socks5://127.0.0.1", "socks5", Address("127.0.0.1", 1080), None),
        ("socks5h://localhost:9", "socks5h", Address("localhost", 9), None),
        ("socks://localhost:9/", "socks5h", Address("localhost", 9), None),
        (PROXY, "http", Address("proxy.test", 3128), (b"u", b"p@ss")),
        ("u:p@ss@proxy.test", "http", Address("proxy.test", 80), (b"u", b"p@ss")),
        ("http://u@proxy.test", "http", Address("proxy.test", 80), (b"u", b"")),
        ("socks5://:p%FFw@proxy.test", "socks5", Address("proxy.test", 1080), (b"", b"p\xffw")),
        ("http://@proxy.test", "http", Address("proxy.test", 80), None),
        ("http://a%2Fb:c%3Ad@proxy.test", "http", Address("proxy.test", 80), (b"a/b", b"c:d")),
    ],
)
def test_proxy_url_is_read_with_its_credentials_decoded(url, scheme, address, credentials):
    proxy = parse_proxy(url)
    assert (proxy.scheme, proxy.address, proxy.credentials) == (scheme, address, credentials)
    assert parse_proxy(Secret(url)) == proxy


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "neither a host name"),
        ("http://", "neither a host name"),
        ("http3://hush:hush@proxy.test", "scheme 'http3'"),
        ("socks4://hush@proxy.test", "scheme 'socks4'"),
        ("ftp://hush@proxy.test", "scheme 'ftp'"),
        ("http://hush:hush@proxy.test:0", "port is 1 to 65535"),
        ("http://hush:hush@proxy.test:70000", "port is 1 to 65535"),
        ("http://hush:hush@proxy.test:123456", "port is 1 to 65535"),
        ("http://hush:hush@proxy.test:hush", "host\\[:port\\]"),
        ("http://hush:hush@::1:80", "in brackets"),
        ("http://hush:hush@[::1", "in brackets"),
        ("http://hush:hush@[hush]", "in brackets"),
        ("http://hush:hush@[hush:hush]", "neither a host name"),
        ("http://hush:hush@pro xy.test", "neither a host name"),
        ("http://hush:hush@1.2.3", "neither a host name"),
        ("http://hush:hu/sh@proxy.test", "%2F"),
        ("http://hush:hu#sh@proxy.test", "%2F"),
        ("http://hush%3Ahush:x@proxy.test", "cannot hold ':'"),
        ("https://hush%3Ahush:x@proxy.test", "cannot hold ':'"),
        ("http://hush:\ud800@proxy.test", "no text"),
        ("http://u:" + "hush" * 64 + "@proxy.test", "at most 255 bytes"),
        ("http://proxy.test/" + "hush" * limits.PROXY_URL_CHARS_MAX, "characters"),
    ],
)
def test_proxy_url_that_is_none_is_refused_without_its_credentials(url, reason):
    with pytest.raises(errors.ConfigError, match=reason) as caught:
        parse_proxy(url)
    assert "hush" not in str(caught.value)


def test_proxy_credentials_are_shown_nowhere():
    rules = explicit("http://someone:p%40ss@proxy.test")
    proxy = rules.proxies["https"]
    assert proxy.authorization == b"Basic c29tZW9uZTpwQHNz"
    for shown in (repr(rules), str(rules), repr(proxy), str(proxy), f"{proxy}", repr(proxy.username)):
        assert "someone" not in shown
        assert "p@ss" not in shown
        assert "p%40ss" not in shown


@pytest.mark.parametrize(
    ("environ", "http", "https"),
    [
        ({}, None, None),
        ({"HTTP_PROXY": "http://a"}, "a", None),
        ({"HTTPS_PROXY": "http://a"}, None, "a"),
        ({"ALL_PROXY": "http://a"}, "a", "a"),
        ({"all_proxy": "http://a", "https_proxy": "http://b"}, "a", "b"),
        ({"HTTP_PROXY": "http://a", "http_proxy": "http://b"}, "b", None),
        ({"HTTP_PROXY": "http://a", "http_proxy": ""}, None, None),
        ({"HTTP_PROXY": "  "}, None, None),
        ({"HTTP_PROXY": "http://a", "REQUEST_METHOD": "GET"}, None, None),
        ({"HTTP_PROXY": "http://a", "ALL_PROXY": "http://c", "REQUEST_METHOD": "GET"}, "c", "c"),
        ({"http_proxy": "http://a", "REQUEST_METHOD": ""}, "a", None),
        ({"HTTPS_PROXY": "http://a", "REQUEST_METHOD": "GET"}, None, "a"),
        ({"HTTP_PROXY": "ftp://a", "ALL_PROXY": "http://c"}, "c", "c"),
        ({"ALL_PROXY": "http://a", "NO_PROXY": "shop.test"}, None, None),
        ({"ALL_PROXY": "http://a", "NO_PROXY": "shop.test", "no_proxy": "other.test"}, "a", "a"),
        ({"ALL_PROXY": "http://a", "NO_PROXY": "shop.test", "no_proxy": ""}, "a", "a"),
        ({"ALL_PROXY": "http://a", "NO_PROXY": "https://shop.test"}, "a", None),
        ({"ALL_PROXY": "http://a", "NO_PROXY": "*"}, None, None),
    ],
)
def test_environment_names_the_proxy_of_each_scheme(environ, http, https):
    rules = from_environment(environ)
    assert (_names(rules, "http", port=80), _names(rules, "https")) == (http, https)


def test_environment_without_proxies_is_no_rules():
    assert not from_environment({"NO_PROXY": "a.test"})
    assert from_environment({"HTTP_PROXY": "http://a"})
    assert not DIRECT


@pytest.mark.parametrize(
    ("no_proxy", "inside", "outside"),
    [
        ("a.test", "a.test A.TEST a.test. x.a.test y.x.a.test", "ba.test a.test.b test"),
        (".a.test", "x.a.test y.x.a.test", "a.test ba.test"),
        ("*.a.test", "x.a.test", "a.test"),
        ("a.test.", "a.test x.a.test a.test.", "b.test"),
        ("A.Test", "a.test", "b.test"),
        ("*", "a.test 10.0.0.1 ::1 x", ""),
        (" a.test ,, b.test\tc.test\n", "a.test b.test c.test", "d.test"),
        (".a.test, ,*", "anything", ""),
        ("bücher.test", "xn--bcher-kva.test x.xn--bcher-kva.test", "bucher.test"),
        ("10.0.0.0/8, localhost", "10.1.2.3 localhost", "11.0.0.1 host"),
        ("10.1.2.3/8", "10.255.0.1", "11.0.0.1"),
        ("10.0.0.0/255.0.0.0", "10.1.2.3", "11.0.0.1"),
        ("0.0.0.0/0", "10.1.2.3", "::1 a.test"),
        ("192.0.2.1", "192.0.2.1 ::ffff:192.0.2.1", "192.0.2.2 1.192.0.2.1.test"),
        ("fd00:1:2::/64", "fd00:1:2::5 [fd00:1:2::5] fd00:1:2:0:1::", "fd00:1:3::5"),
        ("[fd00::]/8", "fdff::1", "fe00::1"),
        ("[fd00::/8]", "fdff::1", "fe00::1"),
        ("[::1]", "::1 [::1] 0:0:0:0:0:0:0:1 ::1%lo", "::2"),
        ("::1", "::1", "::2"),
        ("FE80::/10", "fe80::1%eth0", "::1"),
    ],
)
def test_no_proxy_exempts(no_proxy, inside, outside):
    exemptions, skipped = parse_no_proxy(no_proxy)
    assert skipped == ""
    assert [host for host in inside.split() if not exemptions.cover("https", host, 443)] == []
    assert [host for host in outside.split() if exemptions.cover("https", host, 443)] == []


@pytest.mark.parametrize(
    ("no_proxy", "host"),
    [("a.test:443", "x.a.test"), ("192.0.2.1:443", "192.0.2.1"), ("[::1]:443", "::1"), ("*:443", "b.test")],
)
def test_no_proxy_with_a_port_exempts_that_port_only(no_proxy, host):
    assert _exempt(no_proxy, host, 443)
    assert not _exempt(no_proxy, host, 444)
    assert _exempt(f"{no_proxy},*:444", host, 444)


def test_no_proxy_with_a_scheme_exempts_that_scheme_only():
    assert _exempt("http://a.test", "a.test", 80, "http")
    assert not _exempt("http://a.test", "a.test", 443, "https")
    assert _exempt("all://a.test", "a.test", 443, "https")


@pytest.mark.parametrize(
    "item",
    [
        "a/b", "1.2.3", "300.1.1.1", "10.0.0.0/33", "fd00::/129", "[::1", "::1]", "a.test:0", "a.test:65536",
        "a.test:http", ".", "*.", "..a.test", "*a.test", "a..test", "-a.test", ".10.0.0.1", "[a.test]:x", "x" * 300,
        "fd00::/8:443", "10.0.0.0/x", "ü" * 100, "\x00", "ftp://a.test",
    ],
)  # fmt: skip
def test_no_proxy_item_that_is_none_is_skipped_and_named_and_the_others_hold(item):
    exemptions, skipped = parse_no_proxy(f"a.test,{item},b.test")
    assert exemptions.cover("https", "a.test", 1)
    assert exemptions.cover("https", "b.test", 1)
    assert not exemptions.cover("https", "c.test", 1)
    assert repr(item[:80])[:20] in skipped
    assert "more" not in skipped


def test_no_proxy_names_the_first_of_many_and_no_credential():
    _, skipped = parse_no_proxy("http://u:hush@a.test,b/c,d/e")
    assert "'***@a.test' and 2 more" in skipped
    assert "hush" not in skipped


def test_no_proxy_of_40_kb_holds_for_its_last_entry():
    entries = [f"h{number}.example.test" for number in range(1600)] + [f"10.0.{n}.0/24" for n in range(256)]
    entries += [f"[fd00:{number:x}::1]:{number + 1}" for number in range(500)]
    text = ",".join([*entries, "last.test"])
    assert len(text) > 40_000
    exemptions, skipped = parse_no_proxy(text)
    assert skipped == ""
    for host in ("last.test", "x.h1599.example.test", "10.0.255.9"):
        assert exemptions.cover("https", host, 443)
    assert exemptions.cover("https", "fd00:1f3::1", 500)
    assert not exemptions.cover("https", "h1600.example.test", 443)
    assert len(exemptions.networks) == 2  # what a look-up goes through


def test_no_proxy_beyond_its_limit_is_skipped_and_told():
    text = "first.test," + "x.test," * (limits.NO_PROXY_CHARS_MAX // 7) + "last.test"
    exemptions, skipped = parse_no_proxy(text)
    assert exemptions.cover("https", "first.test", 1)
    assert not exemptions.cover("https", "last.test", 1)
    assert f"all after {limits.NO_PROXY_CHARS_MAX} characters" in skipped


def test_environment_warns_once_per_variable_and_names_no_credential(caplog):
    environ = {
        "HTTP_PROXY": "socks4://hush:hush1@proxy.test",
        "ALL_PROXY": "http://hush:hush1@proxy.test",
        "NO_PROXY": "a/1,b/2",
    }
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            assert from_environment(dict(environ)).proxies.keys() == {"http", "https"}
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(texts) == 2
    assert "HTTP_PROXY" in texts[0]
    assert "'socks4'" in texts[0]
    assert "NO_PROXY: skipped 'a/1' and 1 more" in texts[1]
    assert "hush" not in caplog.text


def test_explicit_proxy_is_for_everything_whatever_no_proxy_says():
    rules = explicit("http://a")
    assert (_names(rules, "http"), _names(rules), _names(rules, host="localhost")) == ("a", "a", "a")
    assert rules.explicit


def test_explicit_mapping_names_proxies_by_scheme():
    rules = explicit({"http://": "http://a", "all": "http://b"})
    assert (_names(rules, "http"), _names(rules)) == ("a", "b")
    with pytest.raises(errors.ConfigError, match="'http', 'https' and 'all'"):
        explicit({"all://*.test": "http://a"})
    with pytest.raises(errors.ConfigError, match="scheme 'ftp'"):
        explicit({"all": "ftp://a"})


def _request(**change):
    fields = {"method": "GET", "scheme": "http", "host": "shop.test", "port": 80, "target": b"/x?y=1"}
    return HttpRequest(**fields | change)


@pytest.mark.parametrize(
    ("change", "target"),
    [
        ({}, b"http://shop.test/x?y=1"),
        ({"port": 8080}, b"http://shop.test:8080/x?y=1"),
        ({"host": "::1", "port": 443}, b"http://[::1]:443/x?y=1"),
        ({"method": "OPTIONS", "target": b"*"}, b"http://shop.test"),
    ],
)
def test_forwarded_request_names_its_origin(change, target):
    sent = forwarded(_request(headers=((b"A", b"b"),), **change), explicit(PROXY))
    assert sent.target == target
    assert sent.headers == ((b"A", b"b"), (b"Proxy-Authorization", b"Basic dTpwQHNz"))


def test_forwarded_request_keeps_what_is_not_for_an_http_proxy():
    for request, rules in (
        (_request(), DIRECT),
        (_request(), explicit("socks5://proxy.test")),
        (_request(), explicit({"https": "http://proxy.test"})),
        (_request(scheme="https", port=443), explicit(PROXY)),
        (_request(), from_environment({"HTTP_PROXY": PROXY, "NO_PROXY": "shop.test"})),
    ):
        assert forwarded(request, rules) is request
    own = ((b"proxy-authorization", b"Bearer x"),)
    assert forwarded(_request(headers=own), explicit(PROXY)).headers == own
    assert forwarded(_request(), explicit("http://proxy.test")).headers == ()
    assert forwarded(_request(), explicit("https://proxy.test")).target == b"http://shop.test/x?y=1"
