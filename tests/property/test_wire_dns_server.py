"""Questions as another library writes them, answers as it reads them, and any bytes at all."""

import contextlib
import ipaddress

import dns.edns
import dns.flags
import dns.message
import dns.name
import dns.rdatatype
import dns.rrset
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stormline.core import limits_platform as limits
from stormline.core.errors import RemoteProtocolError
from stormline.wire import dns_server, svcb
from stormline.wire.dns import Rcode

LABEL = st.from_regex(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,20}[A-Za-z0-9_])?", fullmatch=True)
NAME = st.lists(LABEL, min_size=1, max_size=5).map(".".join)
KIND = st.sampled_from(["A", "AAAA", "HTTPS", "SVCB", "TXT", "MX"])
SUBNETS = st.one_of(
    st.builds(lambda ip, bits: (str(ip), bits), st.ip_addresses(v=4), st.integers(0, 32)),
    st.builds(lambda ip, bits: (str(ip), bits), st.ip_addresses(v=6), st.integers(0, 128)),
)


@given(NAME, KIND, st.booleans(), st.none() | SUBNETS, st.integers(0, 300), st.integers(0, 24))
def test_question_of_another_library_says_the_same_here(name, kind, signed, subnet, padding, scope):
    options = [dns.edns.GenericOption(12, bytes(padding))] if padding else []
    if subnet:
        options.append(dns.edns.ECSOption(*subnet))
    query = dns.message.make_query(name, kind, want_dnssec=signed, use_edns=0, options=options)
    read = dns_server.read_query(query.to_wire())
    assert (read.name, read.kind, read.fault) == (name.lower(), dns.rdatatype.from_text(kind), Rcode.NOERROR)
    assert (read.edns.dnssec_ok, read.edns.padded) == (signed, padding > 0)
    if subnet and subnet[1]:
        told = ipaddress.ip_network(read.edns.subnet.network)
        assert ipaddress.ip_address(subnet[0]) in told
        assert told.prefixlen == min(subnet[1], 24 if told.version == 4 else 56)
    answer = dns_server.answer(read, Rcode.NOERROR, scope_bits=scope)
    found = dns.message.from_wire(answer)
    assert query.is_response(found)
    assert bool(found.ednsflags & dns.flags.DO) == signed
    if subnet:
        (echo,) = [each for each in found.options if isinstance(each, dns.edns.ECSOption)]
        assert (echo.srclen, echo.scopelen) == (subnet[1], scope)
    assert (len(answer) % limits.DOH_PAD_BYTES == 0) == (padding > 0) or not padding


@given(NAME, KIND)
def test_question_without_edns_has_an_answer_without(name, kind):
    query = dns.message.make_query(name, kind, use_edns=False)
    found = dns.message.from_wire(dns_server.answer(dns_server.read_query(query.to_wire()), Rcode.REFUSED))
    assert (found.edns, found.rcode(), query.is_response(found)) == (-1, dns.rcode.REFUSED, True)


def test_wrong_questions_are_told_so():
    query = dns.message.make_query("a.example", "A", use_edns=1)
    read = dns_server.read_query(query.to_wire())
    assert read.fault is Rcode.BADVERS
    assert dns.message.from_wire(dns_server.answer(read, read.fault)).rcode() == dns.rcode.BADVERS
    status = dns.message.make_query("a.example", "A")
    status.set_opcode(2)
    assert dns_server.read_query(status.to_wire()).fault is Rcode.NOTIMP
    chaos = dns.message.make_query("version.bind", "TXT", "CH")
    assert dns_server.read_query(chaos.to_wire()).fault is Rcode.REFUSED
    whole = dns.message.make_query("a.example", "A").to_wire()
    assert dns_server.read_query(whole + b"\0").fault is Rcode.FORMERR
    assert dns_server.read_query(whole[:4] + b"\0\2" + whole[6:]).fault is Rcode.FORMERR
    with pytest.raises(RemoteProtocolError):
        dns_server.read_query(dns.message.make_response(dns.message.make_query("a", "A")).to_wire())
    for data in (bytes((0, 1, 33, 0, 192, 0, 2, 1, 0)), b"\0\1\x18\1\xc0\0\2", b"\0\1\x19\0\xc0\0\2\1", b"\0\3\0\0"):
        option = dns.edns.GenericOption(8, data)
        asked = dns.message.make_query("a.example", "A", use_edns=0, options=[option])
        wire = asked.to_wire()
        assert dns_server.read_query(wire).fault is Rcode.FORMERR or data == b"\0\3\0\0"


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_a_question_or_refused(data, flagged):
    if flagged:
        data = b"\0\0\1\0\0\1\0\0\0\0\0\1" + data
    with contextlib.suppress(RemoteProtocolError):
        read = dns_server.read_query(data)
        answer = dns_server.answer(read, read.fault)
        assert len(answer) >= dns_server.HEADER_BYTES
        dns.message.from_wire(answer)


@given(NAME, st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1), st.integers(0, 100), st.booleans(), st.booleans())
def test_relayed_answer_is_the_same_with_its_age_taken_off(name, ttl, second, age, edns, negative):
    asked = dns.message.make_query(name, "A", id=77, use_edns=0 if edns else False)
    made = dns.message.make_response(asked)
    if negative:
        made.authority.append(dns.rrset.from_text(f"{name}.", ttl, "IN", "SOA", f"a.b. c.d. 1 2 3 4 {second}"))
        least = min(ttl, second)
    else:
        made.answer.append(dns.rrset.from_text(f"{name}.", ttl, "IN", "CNAME", "x.example."))
        made.answer.append(dns.rrset.from_text("x.example.", second, "IN", "A", "192.0.2.1", "192.0.2.2"))
        least = min(ttl, second)
    wire = asked.to_wire()
    question = wire[12 : 12 + len(dns.name.from_text(name).to_wire()) + 4]
    relayed = dns_server.read_relayed(made.to_wire(), 77, question)
    assert (relayed.ttl_s, relayed.rcode, relayed.truncated) == (least, 0, False)
    query = dns_server.read_query(dns.message.make_query(name.swapcase(), "A").to_wire())
    found = dns.message.from_wire(
        dns_server.answer(query, 0, relayed.aged(question, age, ttl_s_max=2**31 - 1)), ignore_trailing=False
    )
    for before, after in zip(made.answer + made.authority, found.answer + found.authority, strict=True):
        assert after.ttl == max(0, before.ttl - age)
        assert before.to_rdataset() == after.to_rdataset()


@given(st.binary(min_size=0, max_size=200), st.data())
def test_damaged_relayed_answer_is_refused_or_stays_in_bounds(junk, data):
    asked = dns.message.make_query("a.example", "A", id=0)
    made = dns.message.make_response(asked)
    made.answer.append(dns.rrset.from_text("a.example.", 5, "IN", "A", "192.0.2.1"))
    damaged = bytearray(made.to_wire() + junk[:20])
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    question = asked.to_wire()[12 : 12 + 15]
    with contextlib.suppress(RemoteProtocolError):
        relayed = dns_server.read_relayed(bytes(damaged), 0, question)
        assert 0 <= relayed.ttl_s < 2**31
        assert len(relayed.aged(question, 1, ttl_s_max=10).data) <= len(damaged)


@given(
    st.integers(1, 65535), st.none() | NAME, st.lists(st.sampled_from(["h2", "h3", "x"]), unique=True, max_size=3),
    st.none() | st.integers(0, 65535), st.lists(st.ip_addresses(v=4).map(str), max_size=3),
    st.lists(st.ip_addresses(v=6).map(str), max_size=3), st.booleans(), st.booleans(),
)  # fmt: skip
def test_service_record_is_read_by_another_library(priority, target, alpn, port, four, six, ohttp, default):
    assume(default or alpn)
    mandatory = tuple(key for key, there in ((svcb.Key.OHTTP, ohttp), (svcb.Key.PORT, port is not None)) if there)
    service = svcb.Service(
        priority, target or "", tuple(alpn), default, port, tuple(four), tuple(six), "/q{?dns}", ohttp, mandatory
    )
    data = svcb.encode(service)
    read = dns.rdata.from_wire("IN", "SVCB", data, 0, len(data))
    assert (read.priority, read.target) == (priority, dns.name.from_text(target or "."))
    assert read.to_wire() == data
    assert (3 in read.params, 2 in read.params, 8 in read.params) == (port is not None, not default, ohttp)


@pytest.mark.parametrize(
    "service",
    [
        svcb.Service(0, "a.example", port=1),
        svcb.Service(1, default_alpn=False),
        svcb.Service(1, alpn=("",)),
        svcb.Service(1, mandatory=(svcb.Key.PORT,)),
        svcb.Service(1, port=1, mandatory=(svcb.Key.MANDATORY,)),
        svcb.Service(1, "a..b"),
    ],
)
def test_malformed_service_record_is_never_written(service):
    with pytest.raises(ValueError, match=r"alias|protocol|ALPN|mandatory|DNS"):
        svcb.encode(service)
