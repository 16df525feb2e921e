"""What the rules say in DNS, read back by another library."""

import dns.message
import dns.rcode
import dns.rdata
import pytest

from stormline.dispatch.rules import RuleSet
from stormline.dispatch.zone import ClientNetwork, Resolver, Zone
from stormline.wire import dns_server
from stormline.wire.plan import Endpoint, HostPlan

HOST = "shop.example"
NOWHERE = ClientNetwork()


def at(host, port=443, carrier="h1", **more):
    return Endpoint(host=host, port=port, carrier=carrier, **more)


def zone(*endpoints, **more):
    rules = RuleSet(version=7, hosts={HOST: HostPlan(endpoints=endpoints)}, apps={})
    return Zone(rules=rules, **more)


def told(zone, name, kind, place=NOWHERE):
    """Give an answer as dnspython reads it."""
    query = dns.message.make_query(name, kind)
    read = dns_server.read_query(query.to_wire())
    answer = zone.answer(read.name, read.kind, place)
    if answer is None:
        return None
    content = dns_server.sections(answer.answers, answer.authorities)
    return dns.message.from_wire(dns_server.answer(read, answer.rcode, content))


def records(found):
    return [str(each) for rrset in found.answer for each in rrset]


def test_addresses_of_both_families_in_order():
    known = zone(at("192.0.2.2"), at("2001:db8::1"), at("192.0.2.1"))
    assert records(told(known, HOST, "A")) == ["192.0.2.2", "192.0.2.1"]
    assert records(told(known, HOST, "AAAA")) == ["2001:db8::1"]


def test_endpoints_alike_are_one_record():
    known = zone(at("192.0.2.1"), at("192.0.2.1", carrier="h2"), at("192.0.2.1", carrier="h3"))
    assert records(told(known, HOST, "HTTPS")) == ['1 . alpn="h2,h3" ipv4hint="192.0.2.1"']
    assert records(told(zone(at("2001:db8::1", 8443, "h3")), HOST, "HTTPS")) == [
        '1 . alpn="h3" no-default-alpn port="8443" ipv6hint="2001:db8::1"'
    ]


def test_endpoints_that_differ_have_names_of_their_own_with_their_addresses():
    known = zone(at("192.0.2.1", carrier="h3"), at("192.0.2.2", 8443), at("192.0.2.3", weight=0))
    assert records(told(known, HOST, "HTTPS")) == [
        f'1 sl443-h3.{HOST}. alpn="h3" no-default-alpn ipv4hint="192.0.2.1"',
        f'2 sl8443-h1.{HOST}. port="8443" ipv4hint="192.0.2.2"',
        f'3 sl443-h1-spare.{HOST}. ipv4hint="192.0.2.3"',
    ]
    assert records(told(known, f"sl8443-h1.{HOST}", "A")) == ["192.0.2.2"]
    assert records(told(known, f"sl443-h1-spare.{HOST}", "A")) == ["192.0.2.3"]
    assert records(told(known, HOST, "A")) == ["192.0.2.1", "192.0.2.2"], "a last resort is not among them"
    assert told(known, f"sl1-h1.{HOST}", "A") is None


def test_another_port_is_answered_by_endpoints_on_it_alone():
    known = zone(at("192.0.2.1"), at("192.0.2.2", 8443, "h2"))
    assert records(told(known, f"_8443._https.{HOST}", "HTTPS")) == [
        f'1 sl8443-h2.{HOST}. alpn="h2" no-default-alpn ipv4hint="192.0.2.2"'
    ]
    for label in ("_8444", "_x", "_08443", "_99999999999999999999"):
        with_soa = told(known, f"{label}._https.{HOST}", "HTTPS")
        assert (with_soa.answer, [str(each.name) for each in with_soa.authority]) == ([], [f"{HOST}."])


def test_alias_where_another_name_is_all_that_is_known():
    assert records(told(zone(at("cdn.example")), HOST, "HTTPS")) == ["0 cdn.example."]
    assert records(told(zone(at("cdn.example")), HOST, "A")) == ["cdn.example."]
    assert records(told(zone(at("cdn.example", 8443, "h2")), HOST, "HTTPS")) == [
        '1 cdn.example. alpn="h2" no-default-alpn port="8443"'
    ]


def test_no_such_record_has_the_zones_authority_with_how_long_it_holds():
    for kind in ("AAAA", "SVCB", "MX"):
        found = told(zone(at("192.0.2.1")), HOST, kind)
        assert (found.rcode(), found.answer) == (dns.rcode.NOERROR, [])
        (soa,) = found.authority
        assert (str(soa.name), soa.ttl, soa[0].minimum, soa[0].serial) == (f"{HOST}.", 10, 10, 7)


def test_any_is_answered_with_one_small_record():
    assert records(told(zone(at("192.0.2.1")), HOST, "ANY")) == ['"RFC8482" ""']


def test_oblivious_http_is_told_and_mandatory_where_nothing_else_serves():
    end = at("192.0.2.1")
    assert records(told(zone(end, ohttp=frozenset({HOST})), HOST, "HTTPS")) == ['1 . ipv4hint="192.0.2.1" ohttp']
    only = zone(end, ohttp=frozenset({HOST}), ohttp_only=frozenset({HOST}))
    assert records(told(only, HOST, "HTTPS")) == ['1 . mandatory="ohttp" ipv4hint="192.0.2.1" ohttp']


@pytest.mark.parametrize(
    "endpoint",
    [at("192.0.2.1", carrier="sl-tls"), at("192.0.2.1", server_name="other.example"), at("192.0.2.1", carrier="new")],
    ids=["long", "other-certificate", "unknown"],
)
def test_host_without_an_endpoint_for_any_client_is_not_spoken_of(endpoint):
    assert told(zone(endpoint), HOST, "A") is None
    assert records(told(zone(endpoint, at("192.0.2.9")), HOST, "A")) == ["192.0.2.9"]


def test_standing_and_order_are_those_of_the_plans():
    class Down:
        revision = 1

        def __call__(self, endpoints):
            return tuple(each for each in endpoints if each.host != "192.0.2.2")

    def order(endpoints, place):
        return endpoints[::-1] if place.network == "198.51.100.0/24" else endpoints

    known = zone(at("192.0.2.1"), at("192.0.2.2"), at("192.0.2.3"), standing=Down(), order=order)
    assert records(told(known, HOST, "A")) == ["192.0.2.1", "192.0.2.3"]
    assert records(told(known, HOST, "A", ClientNetwork("198.51.100.0/24"))) == ["192.0.2.3", "192.0.2.1"]


def test_resolver_is_told_under_both_names():
    known = zone(resolver=Resolver(name="dns.example", port=8701, alpn=("h2",), addresses=("192.0.2.5", "2001:db8::5")))
    for name in ("_dns.resolver.arpa", "_dns.dns.example"):
        (said,) = records(told(known, name, "SVCB"))
        assert said.startswith('1 dns.example. alpn="h2" port="8701" ipv4hint="192.0.2.5" ipv6hint="2001:db8::5" ')
        assert said.endswith('="/dns-query{?dns}"')
    assert records(told(known, "dns.example", "AAAA")) == ["2001:db8::5"]
    assert told(known, "resolver.arpa", "A").authority
    assert told(zone(), "_dns.resolver.arpa", "SVCB").answer == []


def test_names_of_this_machine_or_of_no_network_are_never_asked_elsewhere():
    assert records(told(zone(), "localhost", "A")) == ["127.0.0.1"]
    for name in ("printer.local", "x.onion", "a.invalid", "_x._tcp.local"):
        assert told(zone(), name, "A").rcode() == dns.rcode.NXDOMAIN
    assert told(zone(), "other.example", "A") is None
    assert told(zone(), "_tcp.other.example", "A") is None
