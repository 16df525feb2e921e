"""Answers of the laboratory's DNS, without a network."""

from collections import Counter

import dns.flags
import dns.message
import dns.rcode
import pytest

from stormline.lab.chance import SeededRng
from stormline.lab.dns import Zone
from stormline.lab.specs import DnsSpec

TRUE = ["203.0.113.10", "203.0.113.11", "2001:db8:53::10"]
LIE = "203.0.113.66"


def zone(spec: DnsSpec | None = None, addresses: list[str] = TRUE) -> Zone:
    return Zone({"shop.lab.test": addresses}, [LIE], spec or DnsSpec(), SeededRng("test", 1))


def ask(zone: Zone, name: str = "shop.lab.test", kind: str = "A", *, udp: bool = True) -> dns.message.Message | None:
    answer = zone.answer_plain(dns.message.make_query(name, kind).to_wire(), udp=udp)
    return None if answer is None else dns.message.from_wire(answer)


def addresses(answer: dns.message.Message | None) -> list[str]:
    assert answer is not None
    return [str(record) for rrset in answer.answer for record in rrset]


def test_truthful_answer_has_all_addresses_of_the_family() -> None:
    known = zone(DnsSpec(ttl_s=7))
    answer = ask(known)
    assert answer is not None
    assert sorted(addresses(answer)) == TRUE[:2]
    assert answer.answer[0].ttl == 7
    assert answer.flags & dns.flags.RA
    assert addresses(ask(known, kind="AAAA")) == TRUE[2:]
    assert addresses(ask(known, "SHOP.lab.TEST")) != []


def test_first_address_changes_from_answer_to_answer() -> None:
    known = zone()
    assert {addresses(ask(known))[0] for _ in range(50)} == set(TRUE[:2])


def test_name_nobody_has_is_nxdomain_and_a_type_it_has_not_is_empty() -> None:
    unknown, other = ask(zone(), "other.test"), ask(zone(), kind="TXT")
    assert unknown is not None
    assert unknown.rcode() == dns.rcode.NXDOMAIN
    assert other is not None
    assert (other.rcode(), other.answer) == (dns.rcode.NOERROR, [])


def test_lie_gives_the_captive_address_and_https_tells_the_truth() -> None:
    lying = zone(DnsSpec(lie_pct=100))
    assert addresses(ask(lying)) == [LIE]
    question = dns.message.make_query("shop.lab.test", "A").to_wire()
    honest = lying.answer_https(question)
    assert honest is not None
    assert sorted(addresses(dns.message.from_wire(honest))) == TRUE[:2]
    lying.spec = DnsSpec(lie_pct=100, doh_honest=False)
    lied = lying.answer_https(question)
    assert lied is not None
    assert addresses(dns.message.from_wire(lied)) == [LIE]


@pytest.mark.parametrize(
    ("spec", "rcode"),
    [
        (DnsSpec(empty_pct=100), dns.rcode.NOERROR),
        (DnsSpec(nxdomain_pct=100), dns.rcode.NXDOMAIN),
        (DnsSpec(servfail_pct=100), dns.rcode.SERVFAIL),
    ],
)
def test_useless_answer_has_no_address(spec: DnsSpec, rcode: dns.rcode.Rcode) -> None:
    answer = ask(zone(spec))
    assert answer is not None
    assert (answer.rcode(), answer.answer) == (rcode, [])


def test_chances_share_the_questions_as_given() -> None:
    flaky = zone(DnsSpec(lie_pct=30, drop_pct=30))
    kinds: Counter[str] = Counter()
    for _ in range(2000):
        answer = ask(flaky)
        kinds["lost" if answer is None else "lie" if addresses(answer) == [LIE] else "truth"] += 1
    assert 500 < kinds["lost"] < 700
    assert 500 < kinds["lie"] < 700
    assert flaky.questions == 2000


@pytest.mark.parametrize("data", [b"", b"\0" * 11, b"\xff" * 40, b"\0" * 12])
def test_what_is_no_question_gets_no_answer(data: bytes) -> None:
    assert zone().answer_plain(data, udp=True) is None
    assert zone().answer_https(data) is None


def test_answer_too_large_for_a_datagram_is_truncated_and_whole_over_tcp() -> None:
    many = zone(addresses=[f"203.0.113.{number}" for number in range(60)])
    short, whole = ask(many), ask(many, udp=False)
    assert short is not None
    assert whole is not None
    assert short.flags & dns.flags.TC
    assert not whole.flags & dns.flags.TC
    assert len(addresses(whole)) == 60
