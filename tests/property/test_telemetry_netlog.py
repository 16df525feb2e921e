"""Any damage to network log files costs only what it touched; nothing is read twice, out of order or from nowhere."""

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from stormline.telemetry import netlog
from stormline.telemetry.netlog import FileWriter, Line

KEY = X25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()


def line(number):
    return netlog.encode(Line(at_ms=number, level=20, text=f"{number}"))


@st.composite
def files(draw):
    """Give a file, and for each of its blocks where it lies and what numbers it holds."""
    sealed = draw(st.booleans())
    made = FileWriter(b"instance", 1000, public=PUBLIC if sealed else None, entropy=bytes(range(32)) if sealed else b"")
    data, places, number = bytearray(made.header), [], 0
    for _ in range(draw(st.integers(1, 6))):
        count = draw(st.integers(1, 20))
        records = [line(number + each) for each in range(count)]
        block = made.record(records[0], number) if count == 1 else made.block(records, number)
        data += bytes(draw(st.integers(0, 50)))
        places.append((len(data), len(data) + len(block), range(number, number + count)))
        data += block
        number += count
    return bytes(data), places


def numbers(reading):
    found = [int(entry.record.text) for entry in reading.entries]
    assert found == [entry.number for entry in reading.entries], "a record is not what was written"
    return found


@given(files(), st.data())
def test_netlog_damage_costs_only_the_blocks_it_touched(file, data):
    content, places = file
    begin = data.draw(st.integers(netlog.HEADER_BYTES, len(content) - 1))
    end = min(len(content), begin + data.draw(st.integers(1, 40)))
    put = data.draw(st.binary(min_size=end - begin, max_size=end - begin))
    damaged = content[:begin] + put + content[end:]
    untouched = [number for low, high, held in places if high <= begin or low >= end for number in held]
    found = numbers(netlog.read([damaged], KEY))
    assert set(untouched) <= set(found)
    assert found == sorted(set(found))


@given(files(), st.data())
def test_netlog_cut_gives_every_block_before_the_cut(file, data):
    content, places = file
    end = data.draw(st.integers(netlog.HEADER_BYTES, len(content)))
    found = numbers(netlog.read([content[:end]], KEY))
    assert found == [number for _, high, held in places if high <= end for number in held]


@given(st.binary(max_size=2000))
@settings(max_examples=200)
def test_netlog_any_bytes_give_a_bounded_reading(data):
    made = FileWriter(b"instance", 1000)
    for content in (data, made.header + data, made.header + made.record(line(1), 1) + data):
        reading = netlog.read([content])
        assert reading.damaged_bytes <= len(content)
        assert len(reading.entries) <= len(content)


@given(st.lists(st.sampled_from(["a", "b", "c"]), max_size=8), files(), files())
def test_netlog_any_order_and_repetition_of_files_gives_the_same(order, first, second):
    content = {"a": first[0], "b": second[0], "c": first[0] + second[0]}
    reading = netlog.read([*(content[each] for each in order), first[0], second[0]], KEY)
    assert numbers(reading) == numbers(netlog.read([first[0], second[0]], KEY))
