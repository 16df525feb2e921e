"""MaxMind databases, written here byte by byte (MaxMind DB file format 2.0) and read by `maxminddb`."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stormline.core import errors
from stormline.dispatch.geo import GeoDatabases
from stormline.dispatch.nearest import Found, Nearest
from stormline.dispatch.rules import Region, RuleSet, check


class Sized(NamedTuple):
    """A number of another size than 32 bits."""

    number: int
    head: bytes
    size: int


def _short(number: int) -> Sized:
    return Sized(number, bytes([5 << 5 | 2]), 2)


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        data = value.encode()
        assert len(data) < 285
        return bytes([2 << 5 | len(data)]) + data if len(data) < 29 else bytes([2 << 5 | 29, len(data) - 29]) + data
    if isinstance(value, dict):
        return bytes([7 << 5 | len(value)]) + b"".join(_value(key) + _value(each) for key, each in value.items())
    if isinstance(value, list):
        return bytes([len(value), 11 - 7]) + b"".join(map(_value, value))
    if isinstance(value, Sized):
        return value.head + value.number.to_bytes(value.size)
    return bytes([6 << 5 | 4]) + int(value).to_bytes(4)  # uint32


def database(path: Path, prefix: str, record: Any) -> Path:
    """Write an IPv4 database with one record, for the addresses that begin with the bits of `prefix`."""
    count = len(prefix)
    tree = b""
    for at, bit in enumerate(prefix):
        on = at + 1 if at + 1 < count else count + 16  # 16 zero bytes part the tree from the data
        pair = (on, count) if bit == "0" else (count, on)
        tree += b"".join(each.to_bytes(3) for each in pair)
    about = {
        "binary_format_major_version": _short(2), "binary_format_minor_version": _short(0),
        "build_epoch": Sized(1_800_000_000, bytes([8, 9 - 7]), 8),
        "database_type": "Test", "description": {"en": "Test"}, "ip_version": _short(4), "languages": ["en"],
        "node_count": count, "record_size": _short(24),
    }  # fmt: skip
    path.write_bytes(tree + bytes(16) + _value(record) + b"\xab\xcd\xefMaxMind.com" + _value(about))
    return path


def test_country_and_network_come_from_their_databases(tmp_path: Path) -> None:
    country = database(tmp_path / "country.mmdb", "11001011", {"country": {"iso_code": "DE"}})
    network = database(tmp_path / "asn.mmdb", "110", {"autonomous_system_number": 64500})
    geo = GeoDatabases((country, network))
    assert geo.find("203.0.113.1") == Found("DE", 64500)
    assert geo.find("192.0.2.1") == Found("", 64500)
    assert geo.find("10.0.0.1") == Found()
    assert geo.find("2001:db8::1") == Found()
    rules = check(
        RuleSet(
            version=1,
            regions={"eu": Region(unit="u1", countries=frozenset({"DE"}))},
            operators={"tele": frozenset({64500})},
        )
    )
    assert Nearest(rules, locate=geo.find).place("203.0.113.1")[:4] == ("203.0.113.0", "eu", "tele", "u1")
    geo.close()
    geo.close()


@pytest.mark.parametrize("record", ["text", {"country": "DE"}, {"country": {"iso_code": 7}}, {}])
def test_record_of_another_form_says_nothing(tmp_path: Path, record: Any) -> None:
    geo = GeoDatabases((database(tmp_path / "odd.mmdb", "1", record),))
    assert geo.find("203.0.113.1") == Found()
    geo.close()


def test_missing_or_broken_file_is_refused_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "bad.mmdb").write_bytes(b"no database")
    for name in ("bad.mmdb", "none.mmdb"):
        with pytest.raises(errors.ConfigError, match=name):
            GeoDatabases((tmp_path / name,))
