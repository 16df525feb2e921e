"""Names between two starts of an app: written whole, read with suspicion, and used at once."""

import asyncio
import json
import logging
import stat

import pytest

from stormline.client.config import Config
from stormline.client.names import NameService
from stormline.client.names_file import NamesFile, StoredName
from stormline.core import errors, limits_names
from stormline.core.values import Address
from stormline.net.resolve import Found
from stormline.outbound.doh_server import DohServer

SHOP, TRUE, OTHER, PRIVATE = "shop.example", "203.0.113.1", "203.0.113.2", "192.168.1.1"
DAY_S = 86_400.0


class Answers:
    """A system resolver that answers at once, or never."""

    def __init__(self, *addresses):
        self.addresses = addresses
        self.asked = []

    def ask(self, host, *, refresh):
        self.asked.append((host, refresh))
        future = asyncio.get_running_loop().create_future()
        if self.addresses:
            future.set_result(Found(self.addresses))
        return future

    def withdraw(self, host):
        pass


def service(folder, system, *, wall_s=1e9, network="home"):
    return NameService(Config(), system, wall_s=lambda: wall_s, network=lambda: network, file=NamesFile(folder, "shop"))


async def visit(folder, *addresses, host=SHOP, proven=True, **more):
    """Start, find a name, show its certificate, end."""
    names = service(folder, Answers(*addresses), **more)
    await names.find(host, 443)
    if proven:
        names.proved(host, Address(addresses[0], 443))
    await names.aclose()


async def found_at_once(names, host=SHOP):
    """Give the addresses that need no turn of the loop; None where somebody has to be asked."""
    finding = names.find(host, 443)
    try:
        finding.send(None)
    except StopIteration as done:
        return [each.host for each in done.value]
    finding.close()
    return None


@pytest.mark.parametrize("age_s", [0.0, 5.0, 3600.0, DAY_S - 1])
async def test_app_that_returns_has_its_addresses_at_once_and_renews_them_behind(tmp_path, age_s):
    await visit(tmp_path, TRUE, OTHER)
    system = Answers()
    names = service(tmp_path, system, wall_s=1e9 + age_s)
    assert await found_at_once(names) == [TRUE, OTHER]
    assert system.asked == [(SHOP, True)]
    names.close()


@pytest.mark.parametrize("step_s", [-3600.0, -6 * 365 * DAY_S])
async def test_clock_that_was_set_back_makes_nothing_younger_or_useless(tmp_path, step_s):
    await visit(tmp_path, TRUE)
    system = Answers()
    names = service(tmp_path, system, wall_s=1e9 + step_s)
    assert await found_at_once(names) == [TRUE]
    assert system.asked == [(SHOP, True)]
    names.close()


async def test_address_older_than_a_day_is_a_reserve_and_older_than_a_week_nothing(tmp_path):
    await visit(tmp_path, TRUE)
    for days, reserve in ((2, [TRUE]), (8, [])):
        names = service(tmp_path, Answers(OTHER), wall_s=1e9 + days * DAY_S)
        assert [each.host for each in await names.find(SHOP, 443)] == [OTHER]
        more = await names.more(SHOP, 443, [Address(OTHER, 443)], tls=True)
        assert [each.host for each in more] == reserve
        names.close()


async def test_private_address_learned_on_another_network_is_not_used(tmp_path):
    await visit(tmp_path, PRIVATE)
    names = service(tmp_path, Answers(), network="office")
    assert await found_at_once(names) is None
    names.close()
    names = service(tmp_path, Answers())
    assert await found_at_once(names) == [PRIVATE]
    names.close()


async def test_file_is_the_owners_alone_and_whole(tmp_path):
    folder = tmp_path / "store"
    await visit(folder, TRUE)
    (path,) = folder.iterdir()
    assert (path.name, stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(folder.stat().st_mode)) == (
        "shop.names", 0o600, 0o700,
    )  # fmt: skip
    kept = json.loads(path.read_text())
    assert kept["names"] == [
        {"host": SHOP, "addresses": [TRUE], "answered_at": 1e9, "source": "the system", "network": "home",
         "proven": [[TRUE, 1e9]]}
    ]  # fmt: skip


async def test_names_kept_are_bounded_and_the_last_used_stay(tmp_path):
    names = service(tmp_path, Answers(TRUE))
    for number in range(limits_names.NAMES_STORED_MAX + 5):
        await names.find(f"n{number}.example", 443)
    await names.find("n0.example", 443)
    await names.aclose()
    kept = [each.host for each in NamesFile(tmp_path, "shop").load()]
    assert len(kept) == limits_names.NAMES_STORED_MAX
    assert kept[-1] == "n0.example"
    assert "n1.example" not in kept
    assert (tmp_path / "shop.names").stat().st_size <= limits_names.NAMES_FILE_BYTES_MAX


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"[]", b'{"version": 2, "names": []}', b'{"version": 1, "names": [{"host": 5}]}',
     b"{" * 100_000, b" " * (limits_names.NAMES_FILE_BYTES_MAX + 1)],
    ids=["empty", "no-text", "list", "version", "type", "deep", "large"],
)  # fmt: skip
async def test_damaged_file_is_an_empty_one_with_one_note(tmp_path, caplog, content):
    (tmp_path / "shop.names").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        names = service(tmp_path, Answers(TRUE))
    assert [record.getMessage().split(": ")[0] for record in caplog.records] == [
        f"names are not kept in {tmp_path / 'shop.names'}"
    ]
    assert [each.host for each in await names.find(SHOP, 443)] == [TRUE]
    await names.aclose()
    assert [each.host for each in NamesFile(tmp_path, "shop").load()] == [SHOP]


def test_entries_that_make_no_sense_are_left_out(tmp_path):
    file = NamesFile(tmp_path, "shop")
    good = StoredName(host=SHOP, addresses=(TRUE, "fe80::1%eth0"))
    file.save([
        StoredName(host="", addresses=(TRUE,)),
        StoredName(host="x" * 300, addresses=(TRUE,)),
        StoredName(host="a.example", addresses=("b.example",)),
        StoredName(host="a.example", addresses=(TRUE,) * 100),
        StoredName(host="a.example", proven=(("no address", 1.0),)),
        StoredName(host="a.example", proven=((TRUE, 1.0),) * 100),
        good,
    ])  # fmt: skip
    assert file.load() == [good]


async def test_folder_that_cannot_be_used_keeps_nothing_and_nothing_fails(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        await visit(tmp_path / "file", TRUE)
    assert len(caplog.records) == 1


async def test_service_that_is_only_closed_writes_nothing(tmp_path):
    names = service(tmp_path, Answers(TRUE))
    await names.find(SHOP, 443)
    names.close()
    assert list(tmp_path.iterdir()) == []


# -- settings ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"doh": ("http://192.0.2.1/dns-query",)}, "https"),
        ({"doh": ("https://dns.example/dns-query",)}, "IP addresses"),
        ({"doh": ("https://192.0.2.1/dns-query",) * 9}, "at most 8"),
        ({"doh": "https://192.0.2.1/dns-query"}, "at most 8"),
        ({"pinned": {SHOP: ()}}, "pinned: shop.example: expected 1 to 16"),
        ({"pinned": {SHOP: ("other.example",)}}, "pinned: shop.example"),
        ({"pinned": {"https://a": (TRUE,)}}, "pinned: host"),
        ({"backup_addresses": {SHOP: ("nonsense!",)}}, "backup_addresses: host"),
        ({"private_hosts": {"*.example"}}, "private_hosts: host"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(setting, why):
    with pytest.raises(errors.ConfigError, match=why):
        Config(**setting)


@pytest.mark.parametrize(
    "url",
    ["https://u@192.0.2.1/q", "https://192.0.2.1/q?a=b", "https://192.0.2.1:0/q", "https://192.0.2.1:x/q", "ftp:"],
)
def test_doh_server_of_a_wrong_url_is_refused(url):
    with pytest.raises(errors.ConfigError):
        DohServer(url)


def test_doh_server_is_reached_by_address_and_checked_by_name():
    named = DohServer("https://Dns.Example:8443/q{?dns}", ("192.0.2.1", "2001:db8::1")).endpoint
    assert (named.host, named.port, named.path) == ("dns.example", 8443, "/q")
    assert named.addresses == (Address("192.0.2.1", 8443), Address("2001:db8::1", 8443))
    bare = DohServer("https://[2001:db8::1]/dns-query").endpoint
    assert (bare.host, bare.addresses) == ("2001:db8::1", (Address("2001:db8::1", 443),))
    assert Config(doh=("https://192.0.2.1/dns-query",)).doh == (DohServer("https://192.0.2.1/dns-query"),)
