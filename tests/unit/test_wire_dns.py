"""DNS messages: questions as RFC 8484 shows them, and what is believed of an answer."""

import struct

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest

from stormline.core import limits_names
from stormline.core.errors import RemoteProtocolError
from stormline.wire.dns import RecordType, Reply, parse_reply, question

A, AAAA = RecordType.A, RecordType.AAAA
NAME = "shop.example"


def answer(*lines, name=NAME, kind="A", rcode=dns.rcode.NOERROR, authority=()):
    """Give the bytes of an answer; `lines` are records: `owner ttl IN TYPE data`."""
    query = dns.message.make_query(name, kind, id=0)
    made = dns.message.make_response(query, recursion_available=True)
    made.set_rcode(rcode)
    for section, records in ((made.answer, lines), (made.authority, authority)):
        for line in records:
            owner, ttl, of_class, of_type, data = line.split(None, 4)
            section.append(dns.rrset.from_text(f"{owner}.", int(ttl), of_class, of_type, data))
    return made.to_wire()


def test_question_is_that_of_the_rfc():
    # RFC 8484 section 4.1.1: www.example.com, A.
    shown = "00000100000100000000000003777777076578616d706c6503636f6d0000010001"
    assert question("www.example.com", A).hex() == shown


def test_answer_of_the_rfc_is_read():
    # RFC 8484 section 4.2.1: AAAA 2001:db8:abcd:12:1:2:3:4, TTL 3709.
    shown = bytes.fromhex(
        "000081800001000100000000037777770765"
        "78616d706c6503636f6d00001c0001c00c001c000100000e7d001020010db8abcd00120001000200030004"
    )
    assert parse_reply(shown, "www.example.com", AAAA) == Reply(0, ("2001:db8:abcd:12:1:2:3:4",), 3709)


@pytest.mark.parametrize("name", ["", ".", "a..b", "x" * 64 + ".example", "ä.example", "a." * 127 + "example"])
def test_question_of_a_name_that_cannot_be_is_refused(name):
    with pytest.raises(ValueError, match="no name for DNS"):
        question(name, A)


def test_addresses_come_once_in_their_order_with_the_least_ttl():
    data = answer(f"{NAME} 60 IN A 192.0.2.2", f"{NAME} 60 IN A 192.0.2.1")
    assert parse_reply(data, "SHOP.example.", A) == Reply(0, ("192.0.2.2", "192.0.2.1"), 60)


def test_aliases_are_followed_in_any_order_and_the_least_ttl_counts():
    data = answer("b.example 9 IN A 192.0.2.1", "a.example 5 IN CNAME b.example.", f"{NAME} 70 IN CNAME A.example.")
    assert parse_reply(data, NAME, A) == Reply(0, ("192.0.2.1",), 5)


def test_address_of_another_name_is_not_believed():
    assert parse_reply(answer("bank.example 60 IN A 192.0.2.9"), NAME, A).addresses == ()


def test_circle_of_aliases_ends():
    data = answer(f"{NAME} 5 IN CNAME a.example.", f"a.example 5 IN CNAME {NAME}.")
    assert parse_reply(data, NAME, A) == Reply(0, (), 0)


def test_more_aliases_than_are_followed_lead_nowhere():
    chain = [f"n{n}.example 5 IN CNAME n{n + 1}.example." for n in range(limits_names.DNS_ALIASES_MAX + 1)]
    last = f"n{len(chain)}.example 5 IN A 192.0.2.1"
    assert parse_reply(answer(*chain, last, name="n0.example"), "n0.example", A).addresses == ()
    assert parse_reply(answer(*chain[1:], last, name="n1.example"), "n1.example", A).addresses == ("192.0.2.1",)


def test_absent_name_may_be_believed_as_long_as_its_zone_says():
    soa = "example {} IN SOA ns.example. who.example. 1 2 3 4 {}"
    for ttl, minimum in ((300, 5), (5, 300)):
        data = answer(rcode=dns.rcode.NXDOMAIN, authority=[soa.format(ttl, minimum)])
        assert parse_reply(data, NAME, A) == Reply(3, (), 5)
    assert parse_reply(answer(rcode=dns.rcode.NXDOMAIN), NAME, A) == Reply(3, (), 0)


def test_failure_of_the_server_is_told():
    assert parse_reply(answer(rcode=dns.rcode.SERVFAIL), NAME, A).rcode == 2
    assert parse_reply(struct.pack("!HHHHHH", 0, 0x8181, 0, 0, 0, 0), NAME, A).rcode == 1


def test_ttl_with_its_highest_bit_set_is_none():
    data = bytearray(answer(f"{NAME} 60 IN A 192.0.2.1"))
    at = data.index(struct.pack("!I", 60))
    data[at : at + 4] = b"\x80\0\0\x01"
    assert parse_reply(bytes(data), NAME, A).ttl_s == 0


def test_addresses_beyond_the_bound_are_left_out():
    lines = [f"{NAME} 60 IN A 192.0.2.{n}" for n in range(limits_names.DNS_ADDRESSES_MAX + 9)]
    assert len(parse_reply(answer(*lines), NAME, A).addresses) == limits_names.DNS_ADDRESSES_MAX


GOOD = answer(f"{NAME} 60 IN A 192.0.2.1")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "0 bytes"),
        (bytes(65_536), "65536 bytes"),
        (question(NAME, A), "no answer"),
        (b"\0\1" + GOOD[2:], "no answer"),
        (GOOD[:2] + b"\x83" + GOOD[3:], "cut short"),
        (GOOD[:-1], "cut short"),
        (GOOD[:20], "cut short"),
        (answer("other.example 60 IN A 192.0.2.1", name="other.example"), "another question"),
        (answer(f"{NAME} 60 IN AAAA ::1", kind="AAAA"), "another question"),
        (GOOD[:4] + b"\0\2" + GOOD[6:], "2 questions"),
        (GOOD[:6] + b"\xff\xff" + GOOD[8:], "65535 records"),
        (GOOD[:12] + b"\xc0\x0c" + GOOD[26:], "points ahead"),
        (GOOD[:12] + b"\x80" + GOOD[13:], "unknown kind"),
    ],
)
def test_bytes_that_are_no_answer_are_refused(data, why):
    with pytest.raises(RemoteProtocolError, match=why):
        parse_reply(data, NAME, A)


def test_name_of_many_pointers_is_refused():
    # A chain of pointers, each to the one before: short to send, long to follow.
    chain = b"".join(struct.pack("!H", 0xC000 | (12 + 2 * n - 2)) for n in range(1, 60))
    data = struct.pack("!HHHHHH", 0, 0x8180, 1, 0, 0, 0) + b"\0\0" + chain
    inside = data[:12] + chain
    with pytest.raises(RemoteProtocolError):
        parse_reply(inside, NAME, A)
