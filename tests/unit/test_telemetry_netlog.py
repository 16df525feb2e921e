"""The network log's file format: what is whole is read, in order and once, whatever happened to the rest."""

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from stormline.core import errors, limits_netlog
from stormline.telemetry import netlog
from stormline.telemetry.netlog import Failure, FileWriter, Finding, Line
from stormline.telemetry.timeline import AttemptRecord, CallRecord

KEY = X25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
OTHER = X25519PrivateKey.from_private_bytes(bytes(range(1, 33)))


def lines(first, count):
    return [netlog.encode(Line(at_ms=n, level=20, text=f"line {n}")) for n in range(first, first + count)]


def writer(instance=b"instance", *, sealed=False):
    return FileWriter(instance, 1000, public=PUBLIC if sealed else None, entropy=bytes(range(32)) if sealed else b"")


def file_of(*parts, sealed=False):
    """Make a file of blocks: each part is a first number and a count, and `single` for one record a block."""
    made = writer(sealed=sealed)
    data = [made.header]
    for first, count, *single in parts:
        records = lines(first, count)
        data += [made.record(r, first + i) for i, r in enumerate(records)] if single else [made.block(records, first)]
    return b"".join(data)


def texts(reading):
    return [entry.record.text for entry in reading.entries]


def expected(*numbers):
    return [f"line {n}" for n in numbers]


@pytest.mark.parametrize("sealed", [False, True])
def test_netlog_blocks_of_both_kinds_are_read_in_order(sealed):
    reading = netlog.read([file_of((0, 50), (50, 7, "single"), (57, 3), sealed=sealed)], KEY)
    assert texts(reading) == expected(*range(60))
    assert [entry.number for entry in reading.entries] == list(range(60))
    assert (reading.lost, reading.damaged_bytes, reading.malformed, reading.sealed) == (0, 0, 0, 0)


def test_netlog_files_in_any_order_and_twice_give_each_record_once():
    first, second = file_of((0, 10)), file_of((5, 5, "single"), (10, 5))
    assert texts(netlog.read([second, first, second])) == expected(*range(15))


def test_netlog_concatenated_files_are_one_file():
    one = netlog.read([file_of((0, 3)) + bytes(5000) + file_of((3, 3), sealed=True)], KEY)
    assert texts(one) == expected(*range(6))
    assert one.damaged_bytes == 0


def test_netlog_gap_between_records_is_counted_as_lost():
    reading = netlog.read([file_of((0, 3), (10, 2))])
    assert texts(reading) == expected(0, 1, 2, 10, 11)
    assert reading.lost == 7


def test_netlog_damaged_block_costs_only_itself():
    data = bytearray(file_of((0, 5), (5, 5), (10, 5)))
    whole = netlog.Reading()
    sizes = [len(block.data) for block in netlog.blocks(bytes(data), whole)]
    data[netlog.HEADER_BYTES + sizes[0] + sizes[1] // 2] ^= 1
    reading = netlog.read([bytes(data)])
    assert texts(reading) == expected(0, 1, 2, 3, 4, 10, 11, 12, 13, 14)
    assert reading.damaged_bytes == sizes[1]
    assert reading.lost == 5


def test_netlog_torn_end_is_passed_over_and_counted():
    data = file_of((0, 5), (5, 5))
    reading = netlog.read([data[:-3]])
    assert texts(reading) == expected(*range(5))
    assert reading.damaged_bytes > 0


def test_netlog_file_without_its_header_gives_nothing():
    data = file_of((0, 5))
    reading = netlog.read([data[netlog.HEADER_BYTES :]])
    assert reading.entries == []
    assert reading.damaged_bytes == len(data) - netlog.HEADER_BYTES


def test_netlog_unused_room_is_no_damage():
    reading = netlog.read([file_of((0, 2)) + bytes(100_000)])
    assert (len(reading.entries), reading.damaged_bytes) == (2, 0)


def test_netlog_sealed_records_stay_closed_without_the_key_and_name_it():
    data = file_of((0, 5), sealed=True)
    for key in (None, OTHER):
        reading = netlog.read([data], key)
        assert reading.entries == []
        assert (reading.sealed, reading.damaged_bytes) == (5, 0)
        assert reading.keys == {netlog.key_id(PUBLIC).hex()}
    assert b"line" not in data


def test_netlog_sealed_block_that_was_altered_is_damage():
    data = file_of((0, 3), sealed=True)
    (block,) = netlog.blocks(data, netlog.Reading())
    moved = FileWriter(b"instance", 1000, public=PUBLIC, entropy=bytes(32)).header + block.data
    reading = netlog.read([moved], KEY)
    assert reading.entries == []
    assert reading.damaged_bytes == len(block.data), "a block of one file is taken for another's"


def test_netlog_same_entropy_twice_is_the_same_file_and_fresh_entropy_another():
    first, again = writer(sealed=True), writer(sealed=True)
    fresh = FileWriter(b"instance", 1000, public=PUBLIC, entropy=bytes(32))
    assert first.record(b"x", 1) == again.record(b"x", 1)
    assert first.record(b"x", 1) != fresh.record(b"x", 1)


def test_netlog_record_of_a_later_version_is_counted_and_the_rest_read():
    unknown = msgspec.msgpack.encode({"type": "novelty", "at_ms": 1})
    made = writer()
    data = made.header + made.block([*lines(0, 2), unknown, *lines(3, 1)], 0)
    reading = netlog.read([data])
    assert texts(reading) == expected(0, 1, 3)
    assert (reading.malformed, reading.lost) == (1, 0)


def test_netlog_block_that_grows_beyond_its_bound_is_damage():
    from stormline.core import zstandard

    made = writer()
    payload = zstandard.zstd().compress(bytes(10 * limits_netlog.NETLOG_BLOCK_BYTES_MAX))
    data = made.header + made._block(payload, 1, 0, 1)
    reading = netlog.read([data])
    assert reading.entries == []
    assert reading.damaged_bytes == len(data) - netlog.HEADER_BYTES


def test_netlog_failure_survives_writing_in_full():
    call = CallRecord(
        call_id="c-1", started_at_ms=5, method="GET", host="api.example", path="/x", failure="timeout.connect",
        stages_ms={"connect": 12.5}, attempts=[AttemptRecord(means="direct", address="192.0.2.1:443")],
    )  # fmt: skip
    failure = Failure(
        at_ms=6,
        call=call,
        story=[(0.5, "try direct")],
        causes=["ConnectError: no"],
        network=netlog.Network(kind="wifi"),
    )
    finding = Finding(at_ms=7, call_id="c-1", content=msgspec.msgpack.encode({"verdict": "dns"}))
    made = writer()
    data = made.header + made.block([netlog.encode(failure), netlog.encode(finding)], 0)
    assert [entry.record for entry in netlog.read([data]).entries] == [failure, finding]
    assert netlog.shown(finding)["content"] == {"verdict": "dns"}
    assert netlog.shown(failure)["call"]["attempts"][0]["address"] == "192.0.2.1:443"


@pytest.mark.parametrize("public", [b"", bytes(31), bytes(32)])
def test_netlog_public_key_that_nobody_can_use_is_refused(public):
    with pytest.raises(errors.ConfigError, match="X25519"):
        netlog.check_public(public)
