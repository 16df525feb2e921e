"""Any bytes from the routing socket, a name server or a check page: sane values or nothing, within bounds."""

import ipaddress
import socket
import struct

from hypothesis import given
from hypothesis import strategies as st

from stormline.core import limits_network as limits
from stormline.net import rtnetlink
from stormline.net.probes import dns_question, read_captive_answer, read_dns_answer
from stormline.policy.verdict import Finding

KINDS = (2, 3, 16, 17, 20, 21, 24, 25, 28)


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def message(kind: int, body: bytes, sequence: int = 7) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, 0, sequence, 0) + body + bytes(-len(body) % 4)


attributes = st.lists(st.builds(attribute, st.integers(0, 0xFFFF), st.binary(max_size=40)), max_size=8).map(b"".join)
messages = st.builds(
    lambda kind, head, rest: message(kind, head + rest), st.sampled_from(KINDS), st.binary(max_size=20), attributes
)


@given(st.one_of(st.binary(max_size=600), st.lists(messages, max_size=6).map(b"".join)))
def test_parse_any_bytes_gives_bounded_values(data):
    found = list(rtnetlink.parse(data))
    assert len(found) <= min(limits.NETLINK_MESSAGES_MAX, len(data) // 16)
    for each in found:
        for address in (getattr(each, "address", ""), getattr(each, "gateway", "")):
            assert not address or ipaddress.ip_address(address)
        if isinstance(each, rtnetlink.Neighbour):
            assert each.confirmed_age_s is None or each.confirmed_age_s >= 0


@given(st.lists(messages, min_size=1, max_size=6), st.integers(0, 40))
def test_parse_of_a_datagram_that_is_cut_gives_what_is_whole(parts, cut):
    whole = b"".join(parts)
    full = list(rtnetlink.parse(whole))
    part = list(rtnetlink.parse(whole[: max(0, len(whole) - cut)]))
    assert part == full[: len(part)]


@given(messages, st.integers(0, 100))
def test_parse_takes_answers_to_another_question_for_nothing(data, sequence):
    found = list(rtnetlink.parse(data, sequence))
    assert not found or sequence == 7


ips = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)


@given(ips, st.integers(1, 2**31 - 1), st.integers(0, 128), st.integers(0, 2**32 - 1))
def test_parse_reads_what_the_kernel_writes(address, number, length, metric):
    packed = ipaddress.ip_address(address).packed
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    own = message(20, struct.pack("=BBBBI", family, length, 0, 0, number) + attribute(1, packed))
    route = message(
        24,
        struct.pack("=BBBBBBBBI", family, 0, 0, 0, 254, 3, 0, 1, 0)
        + attribute(4, struct.pack("=I", number))
        + attribute(5, packed)
        + attribute(6, struct.pack("=I", metric))
        + attribute(15, struct.pack("=I", 254)),
    )
    beside = message(
        28,
        struct.pack("=BxxxiHBB", family, number, 0x02, 0, 1)
        + attribute(1, packed)
        + attribute(2, bytes.fromhex("00005e005301"))
        + attribute(3, struct.pack("=IIII", 250, 0, 0, 0)),
    )
    link = message(
        16,
        struct.pack("=BxHiII", 0, 1, number, 0x41, 0)
        + attribute(3, b"eth0\0")
        + attribute(18, attribute(1, b"veth\0")),
    )
    shown = str(ipaddress.ip_address(packed))
    assert list(rtnetlink.parse(own + route + beside + link)) == [
        rtnetlink.OwnAddress(number, shown, length, False),
        rtnetlink.Route(number, shown, True, False, metric, rtnetlink.MAIN),
        rtnetlink.Neighbour(number, shown, "00005e005301", True, False, False, False, 2.5),
        rtnetlink.Link(number, "eth0", True, True, "veth", False),
    ]


@given(ips, st.integers(1, 2**31 - 1))
def test_questions_have_the_length_they_say(address, number):
    for question in (
        rtnetlink.ask_route(address, number),
        rtnetlink.ask_neighbour(3, address, number),
        rtnetlink.ask_link(3, number),
        rtnetlink.ask_addresses(number),
        rtnetlink.ask_routes(socket.AF_INET, number),
    ):
        size, _, flags, sequence, _ = struct.unpack_from("=IHHII", question)
        assert (size, sequence, flags & 1) == (len(question), number, 1)


# -- probes -----------------------------------------------------------------------------------------------------------
@given(st.text(max_size=300), st.integers(0, 0xFFFF))
def test_dns_question_of_any_name_fits_a_datagram_or_is_none(name, number):
    question = dns_question(name, number)
    assert not question or (17 < len(question) <= 12 + 255 + 4 and question[:2] == number.to_bytes(2, "big"))


@given(st.binary(max_size=64))
def test_dns_answer_that_is_not_to_the_question_says_nothing(data):
    question = dns_question("shop.test", 0x1234)
    found = read_dns_answer(data, question)
    if len(data) < 12 or data[:2] != b"\x12\x34" or not data[2] & 0x80:
        assert found is Finding.UNKNOWN
    else:
        assert found in (Finding.ANSWERED, Finding.FAILED)


@given(st.one_of(st.binary(max_size=300), st.binary(max_size=200).map(lambda rest: b"HTTP/1.1 200 OK\r\n" + rest)))
def test_check_answer_of_any_bytes_is_a_finding(data):
    found = read_captive_answer(data)
    assert (found is Finding.UNKNOWN) or data.startswith(b"HTTP/1.")
