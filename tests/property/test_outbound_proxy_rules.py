"""Any environment gives rules that hold for its good entries and show no credential; any URL a proxy or one error."""

import ipaddress
from urllib.parse import quote

from hypothesis import given
from hypothesis import strategies as st

from stormline.core import errors
from stormline.core.values import Address, Secret
from stormline.outbound.proxy_rules import Proxy, from_environment, parse_no_proxy, parse_proxy

_LABELS = st.from_regex(r"[a-z]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True).filter(lambda text: text[2:4] != "--")
_NAMES = st.lists(_LABELS, min_size=1, max_size=5).map(".".join)
_PORTS = st.integers(1, 65535)
_ADDRESSES = st.ip_addresses()
_NETWORKS = st.builds(
    lambda address, cut: ipaddress.ip_network((address, max(0, address.max_prefixlen - cut)), strict=False),
    _ADDRESSES,
    st.integers(0, 128),
)
_JUNK = st.text(st.characters(blacklist_categories=()), max_size=30)
_ENTRIES = st.one_of(
    _NAMES,
    _NAMES.map("*.{}".format),
    _ADDRESSES.map(str),
    _NETWORKS.map(str),
    st.tuples(_NAMES, _PORTS).map("{0[0]}:{0[1]}".format),
    _JUNK,
)
_SECRETS = st.text(st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=40).map("§{}§".format)


@given(
    _JUNK | st.builds("{}://{}@{}:{}".format, st.sampled_from(["http", "https", "socks5", "x"]), _JUNK, _NAMES, _JUNK)
)
def test_any_url_is_a_proxy_or_a_config_error(url):
    try:
        proxy = parse_proxy(url)
    except errors.ConfigError:
        return
    assert proxy.address.host
    assert 0 < proxy.address.port < 65536
    assert parse_proxy(f"{proxy.scheme}://{proxy.address}") == Proxy(proxy.scheme, proxy.address)


@given(st.sampled_from(["http", "https", "socks5", "socks5h"]), _SECRETS, _SECRETS, _NAMES, _PORTS)
def test_credentials_survive_percent_encoding_and_are_never_shown(scheme, username, password, host, port):
    username = username.replace(":", "")
    url = f"{scheme}://{quote(username, safe='')}:{quote(password, safe='')}@{host}:{port}"
    proxy = parse_proxy(url)
    assert proxy == Proxy(scheme, Address(host, port), Secret(username), Secret(password))
    assert proxy.credentials == (username.encode(), password.encode())
    assert "§" not in f"{proxy} {proxy!r}"


@given(
    st.sampled_from(["http", "https", "socks5", "socks4", "ftp"]),
    _SECRETS,
    _NAMES,
    st.sampled_from(["", ":0", ":x", "/@"]),
)
def test_bad_proxy_in_the_environment_is_told_without_credentials(scheme, password, host, end):
    url = f"{scheme}://{quote(password, safe='')}:{quote(password, safe='')}@{host}{end}"
    rules = from_environment({"HTTPS_PROXY": url})
    assert bool(rules) is not bool(rules.warnings)
    shown = repr(rules)
    assert "§" not in shown
    assert quote("§") not in shown


@given(st.lists(_ENTRIES, max_size=12), st.sampled_from([",", ", ", " ", ",,"]))
def test_any_list_is_read_and_its_entries_hold(entries, separator):
    entries = [entry for entry in entries if not set(entry) & set(", \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0")]
    text = separator.join(entries)
    exemptions, _ = parse_no_proxy(text)
    for entry in entries:
        alone, skipped = parse_no_proxy(entry)
        if not skipped:  # what one entry exempts, the list does
            for host in ("a.b", "10.0.0.1", "::1", entry, "x." + entry):
                if alone.cover("https", host, 443):
                    assert exemptions.cover("https", host, 443)


@given(_NAMES, _NAMES, _PORTS)
def test_name_covers_itself_and_what_is_under_it_alone(name, other, port):
    exemptions, skipped = parse_no_proxy(name)
    assert skipped == ""
    for host in (name, name.upper(), f"{name}.", f"{other}.{name}"):
        assert exemptions.cover("http", host, port)
    assert not exemptions.cover("http", f"x{name}", port)
    assert exemptions.cover("http", other, port) == (other == name or other.endswith("." + name))


@given(_NETWORKS, _ADDRESSES, _PORTS)
def test_network_covers_its_addresses_alone(network, address, port):
    exemptions, skipped = parse_no_proxy(str(network))
    assert skipped == ""
    assert exemptions.cover("https", str(network.network_address), port)
    assert exemptions.cover("https", str(network.broadcast_address), port)
    mapped = getattr(address, "ipv4_mapped", None)
    assert exemptions.cover("https", str(address), port) == (address in network or (mapped or address) in network)


@given(st.dictionaries(st.sampled_from(["HTTP_PROXY", "http_proxy", "ALL_PROXY", "NO_PROXY", "REQUEST_METHOD"]), _JUNK))
def test_any_environment_is_read(environ):
    rules = from_environment(environ)
    for scheme in ("http", "https"):
        rules.proxy_for(scheme, "shop.test", 443)
