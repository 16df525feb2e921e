"""What a forwarder keeps and for how long, on a clock that is moved and servers that do as they are told."""

import asyncio

import dns.message
import dns.rcode
import dns.rrset
import pytest

from stormline.core import limits_platform as limits
from stormline.dispatch.upstream import Forwarder, Question
from stormline.wire import dns_server

NAME = "shop.example"
QUESTION = Question(dns.message.make_query(NAME, "A").to_wire()[dns_server.HEADER_BYTES :])


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now

    def wall(self):
        return self.now


class Server:
    """Gives what `says` holds: an address with its TTL, an RCODE, or an error."""

    def __init__(self, says):
        self.says = says
        self.asked = 0

    async def ask(self, question):
        self.asked += 1
        await asyncio.sleep(0)
        if isinstance(self.says, Exception):
            raise self.says
        made = dns.message.make_response(dns.message.make_query(NAME, "A", id=0))
        if isinstance(self.says, tuple):
            made.answer.append(dns.rrset.from_text(f"{NAME}.", self.says[1], "IN", "A", self.says[0]))
        else:
            made.set_rcode(self.says)
            if self.says == dns.rcode.NXDOMAIN:
                made.authority.append(dns.rrset.from_text("example.", 900, "IN", "SOA", "a. b. 1 2 3 4 5"))
        return dns_server.read_relayed(made.to_wire(), 0, question.wire)

    def close(self):
        """Nothing is held."""


@pytest.fixture(name="clock")
def _clock():
    return Clock()


async def test_answer_is_kept_for_its_ttl_and_asked_once_by_many(clock):
    server = Server(("192.0.2.1", 30))
    forwarder = Forwarder([server], clock)
    await asyncio.gather(*(forwarder.ask(QUESTION) for _ in range(20)))
    clock.now += 29
    assert ((await forwarder.ask(QUESTION)).age_s, server.asked) == (29, 1)
    clock.now += 1
    assert ((await forwarder.ask(QUESTION)).age_s, server.asked) == (0, 2)


@pytest.mark.parametrize("failure", [dns.rcode.SERVFAIL, dns.rcode.REFUSED, OSError("away"), TimeoutError()])
async def test_failure_has_the_last_good_answer_stand_in_and_recovers_at_once(clock, failure):
    server = Server(("192.0.2.1", 30))
    forwarder = Forwarder([server], clock)
    await forwarder.ask(QUESTION)
    clock.now += 40
    server.says = failure
    told = await forwarder.ask(QUESTION)
    assert told.stale
    asked = server.asked
    assert (await forwarder.ask(QUESTION)).stale
    assert server.asked == asked, "a failure stands for a moment"
    server.says = ("192.0.2.2", 30)
    clock.now += limits.FORWARD_FAILURE_S
    assert not (await forwarder.ask(QUESTION)).stale


async def test_failure_without_an_answer_to_stand_in_is_told_and_held_for_seconds_only(clock):
    server = Server(dns.rcode.SERVFAIL)
    forwarder = Forwarder([server], clock)
    with pytest.raises(OSError, match="no upstream server"):
        await forwarder.ask(QUESTION)
    with pytest.raises(OSError, match="a moment ago"):
        await forwarder.ask(QUESTION)
    server.says = ("192.0.2.2", 30)
    clock.now += 5
    assert not (await forwarder.ask(QUESTION)).stale


async def test_name_that_is_gone_takes_the_place_of_its_address_for_what_its_zone_says(clock):
    server = Server(("192.0.2.1", 30))
    forwarder = Forwarder([server], clock)
    await forwarder.ask(QUESTION)
    clock.now += 31
    server.says = dns.rcode.NXDOMAIN
    assert (await forwarder.ask(QUESTION)).relayed.rcode == dns.rcode.NXDOMAIN
    server.says = ("192.0.2.2", 30)
    clock.now += 4
    assert (await forwarder.ask(QUESTION)).relayed.rcode == dns.rcode.NXDOMAIN
    clock.now += 1
    assert (await forwarder.ask(QUESTION)).relayed.rcode == dns.rcode.NOERROR


async def test_server_that_failed_is_asked_last_for_a_while(clock):
    bad, good = Server(OSError("away")), Server(("192.0.2.1", 1))
    forwarder = Forwarder([bad, good], clock)
    for _ in range(4):
        await forwarder.ask(QUESTION)
        clock.now += 2
    assert (bad.asked, good.asked) == (1, 4)
    clock.now += limits.FORWARD_BEHIND_S
    await forwarder.ask(QUESTION)
    assert bad.asked == 2


async def test_one_who_stops_waiting_leaves_the_answer_to_the_others(clock):
    server = Server(("192.0.2.1", 30))
    forwarder = Forwarder([server], clock)
    first, second = (asyncio.ensure_future(forwarder.ask(QUESTION)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).relayed.rcode == dns.rcode.NOERROR
    assert server.asked == 1
    await forwarder.close()
