"""Which origins a relay may fetch from, and at which addresses; requests that were seen before."""

from email.utils import formatdate

import pytest

from stormline.core import errors, limits_relay
from stormline.core.values import Address
from stormline.relay.replays import Replay, Replays
from stormline.relay.targets import Refused, Target, Targets, is_public, reachable
from stormline.wire import bhttp, ohttp

TARGETS = Targets(
    {
        "shop.test": (),
        "near.test": ("http://10.0.0.3", "http://10.0.0.4:8080"),
        "api.shop.test:8443": ("10.0.0.1", "10.0.0.2:9443"),
        "192.0.2.7": (),
        "[2001:db8::1]:444": (),
    }
)


def head(authority, *headers, method=b"GET", scheme=b"https"):
    return bhttp.RequestHead(method, scheme, authority, b"/", headers)


@pytest.mark.parametrize(
    ("authority", "target"),
    [
        (b"shop.test", Target("shop.test", 443)),
        (b"shop.test:443", Target("shop.test", 443)),
        (b"SHOP.test.", Target("shop.test", 443)),
        (b"api.shop.test:8443", Target("api.shop.test", 8443, (Address("10.0.0.1", 8443), Address("10.0.0.2", 9443)))),
        (b"near.test", Target("near.test", 443, (Address("10.0.0.3", 80), Address("10.0.0.4", 8080)), "http")),
        (b"192.0.2.7", Target("192.0.2.7", 443)),
        (b"[2001:db8:0::1]:444", Target("2001:db8::1", 444)),
    ],
)
def test_an_origin_is_found_in_every_spelling_of_its_name(authority, target):
    assert TARGETS.find(head(authority)) == target
    assert TARGETS.find(head(authority, (b"host", authority))) == target
    assert TARGETS.find(head(b"", (b"host", authority))) == target


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (head(b"shop.test:80"), 403),
        (head(b"evil.test"), 403),
        (head(b"shop.test.evil.test"), 403),
        (head(b"127.0.0.1"), 403),
        (head(b"2130706433"), 400),
        (head(b"0x7f.0.0.1"), 400),
        (head(b"127.1"), 400),
        (head(b"[::1]"), 403),
        (head(b"[::1%25lo]"), 400),
        (head(b"2001:db8::1"), 400),
        (head(b"shop.test:"), 400),
        (head(b"shop.test:99999"), 400),
        (head(b"shop.test:+443"), 400),
        (head(b""), 400),
        (head(b"shop.test", (b"host", b"evil.test")), 400),
        (head(b"shop.test", (b"host", b"shop.test"), (b"host", b"evil.test")), 400),
        (head(b"", (b"host", b"sh\xf6p.test")), 400),
        (head(b"shop.test", scheme=b"http"), 403),
        (head(b"shop.test", method=b"TRACE"), 405),
        (bhttp.RequestHead(b"CONNECT", b"", b"shop.test", b"", ()), 405),
    ],
)
def test_anything_else_is_refused(asked, status):
    with pytest.raises(Refused) as caught:
        TARGETS.find(asked)
    assert caught.value.status == status


@pytest.mark.parametrize(
    "origins",
    [
        {"https://shop.test": ()},
        {"shop test": ()},
        {"shop.test": ("other.test",)},
        {"shop.test": ("http://other.test",)},
        {"shop.test": ("http://10.0.0.1", "10.0.0.1")},
        {"shop.test": ("10.0.0.1",) * (limits_relay.RELAY_ADDRESSES_MAX + 1)},
        {f"h{number}.test": () for number in range(limits_relay.RELAY_ORIGINS_MAX + 1)},
    ],
)
def test_malformed_settings_are_refused(origins):
    with pytest.raises(errors.ConfigError):
        Targets(origins)


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "224.0.0.1",
        "255.255.255.255", "192.0.2.1", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "2001:db8::1",
        "::ffff:10.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "64:ff9b:1::7f00:1", "2002:0a00:0001::1",
        "2001:0:4136:e378:8000:63bf:f5ff:fffe", "shop.test", "",
    ],
)  # fmt: skip
def test_addresses_that_are_not_of_the_internet_are_told_apart(text):
    assert not is_public(text)


@pytest.mark.parametrize("text", ["9.9.9.9", "2620:fe::fe", "::ffff:9.9.9.9", "64:ff9b::909:909"])
def test_addresses_of_the_internet_are_public(text):
    assert is_public(text)


def test_of_a_names_addresses_only_the_public_ones_count():
    target = Target("shop.test", 443)
    found = (Address("127.0.0.1", 443), Address("9.9.9.9", 443), Address("fe80::1", 443))
    assert reachable(target, found) == (found[1],)
    with pytest.raises(Refused) as caught:
        reachable(target, found[:1])
    assert caught.value.error == "destination_ip_prohibited"


def test_the_origin_is_told_its_own_name():
    assert TARGETS.find(head(b"near.test")).authority == "near.test"
    assert TARGETS.find(head(b"api.shop.test:8443")).authority == "api.shop.test:8443"
    assert TARGETS.find(head(b"[2001:db8::1]:444")).authority == "[2001:db8::1]:444"


def posted(made_at):
    return head(b"shop.test", (b"date", formatdate(made_at, usegmt=True).encode()), method=b"POST")


def test_a_request_that_changes_something_passes_once_within_its_window():
    replays = Replays(window_s=60)
    replays.take(posted(1000), b"a", 1000)
    replays.take(posted(1000), b"b", 1001)
    for at in (1000, 1059):
        with pytest.raises(Replay) as caught:
            replays.take(posted(1000), b"a", at)
        assert caught.value.status == 409
    with pytest.raises(Replay) as caught:
        replays.take(posted(1000), b"a", 1061)
    assert caught.value.problem == ohttp.DATE_PROBLEM


def test_what_is_forgotten_can_pass_no_more():
    replays = Replays(window_s=60)
    replays.take(posted(1060), b"a", 1000)  # of a clock that goes before by as much as is borne
    with pytest.raises(Replay):
        replays.take(posted(1060), b"a", 1119)
    with pytest.raises(Replay) as caught:
        replays.take(posted(1060), b"a", 1121)
    assert caught.value.problem == ohttp.DATE_PROBLEM
    replays.take(posted(1200), b"c", 1200)
    assert len(replays) == 1


def test_no_more_are_remembered_than_there_is_room_for_and_none_is_forgotten_early():
    replays = Replays(window_s=60, remembered_max=2)
    replays.take(posted(0), b"a", 0)
    replays.take(posted(0), b"b", 0)
    with pytest.raises(Replay) as caught:
        replays.take(posted(0), b"c", 0)
    assert caught.value.status == 503
    with pytest.raises(Replay) as caught:
        replays.take(posted(0), b"a", 0)
    assert caught.value.status == 409
    replays.take(posted(121), b"c", 121)


@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"OPTIONS"])
def test_reads_need_no_date_and_are_not_remembered(method):
    replays = Replays()
    for _ in range(2):
        replays.take(head(b"shop.test", method=method), b"a", 0)
    assert len(replays) == 0


@pytest.mark.parametrize("value", [b"", b"soon", b"\xff", b"Thu, 99 Foo 0000", b"1" * 100])
def test_a_date_that_is_none_is_refused(value):
    with pytest.raises(Replay) as caught:
        Replays().take(head(b"shop.test", (b"date", value), method=b"POST"), b"a", 0)
    assert caught.value.problem == ohttp.DATE_PROBLEM
