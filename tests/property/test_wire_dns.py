"""Answers of DNS as another library writes them, and any bytes at all."""

import contextlib
import itertools

import dns.message
import dns.name
import dns.rrset
from hypothesis import given
from hypothesis import strategies as st

from stormline.core import limits_names
from stormline.core.errors import RemoteProtocolError
from stormline.wire.dns import RecordType, parse_reply, question

LABEL = st.from_regex(r"[a-z0-9_]([a-z0-9_-]{0,20}[a-z0-9_])?", fullmatch=True)
NAME = st.lists(LABEL, min_size=1, max_size=5).map(".".join)
KIND = st.sampled_from([RecordType.A, RecordType.AAAA])
TTL = st.integers(0, 2**31 - 1)


@given(NAME, KIND)
def test_question_is_read_by_another_library(name, kind):
    read = dns.message.from_wire(question(name, kind))
    (asked,) = read.question
    assert (asked.name, asked.rdtype, read.id) == (dns.name.from_text(name), int(kind), 0)


@st.composite
def answers(draw):
    kind = draw(KIND)
    name = draw(NAME)
    owners = [name, *draw(st.lists(NAME, max_size=4, unique=True).filter(lambda more: name not in more))]
    ip = st.ip_addresses(v=4 if kind is RecordType.A else 6).map(str)
    found = draw(st.lists(ip, min_size=1, max_size=8, unique=True))
    records = [
        dns.rrset.from_text(f"{owner}.", draw(TTL), "IN", "CNAME", f"{target}.")
        for owner, target in itertools.pairwise(owners)
    ]
    records.append(dns.rrset.from_text_list(f"{owners[-1]}.", draw(TTL), "IN", kind.name, found))
    return name, kind, found, draw(st.permutations(records))


def message(name, kind, records):
    made = dns.message.make_response(dns.message.make_query(name, kind.name, id=0))
    made.answer += records
    return made.to_wire()


@given(answers())
def test_answer_of_another_library_says_the_same_here(made):
    name, kind, found, records = made
    reply = parse_reply(message(name, kind, records), name, kind)
    assert sorted(reply.addresses) == sorted(found)  # dnspython shuffles a set of records as it writes it
    assert reply.ttl_s == min(each.ttl for each in records)


@given(answers(), st.data())
def test_damaged_answer_is_refused_or_read_within_bounds(made, data):
    name, kind, _, records = made
    damaged = bytearray(message(name, kind, records))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    for each in (bytes(damaged), bytes(damaged[:cut])):
        with contextlib.suppress(RemoteProtocolError):
            reply = parse_reply(each, name, kind)
            assert len(reply.addresses) <= limits_names.DNS_ADDRESSES_MAX
            assert 0 <= reply.ttl_s < 2**31


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(data):
    with contextlib.suppress(RemoteProtocolError):
        parse_reply(data, "a.example", RecordType.A)
