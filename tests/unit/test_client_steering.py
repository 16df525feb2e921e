"""What a client tries out: rarely, never at a price that anybody notices; on a `VirtualLoop`."""

import asyncio

from stormline.client.steering import Steering
from stormline.core import limits_memory
from stormline.core.values import Address
from stormline.policy.shape import Network, RequestShape
from stormline.testing.simloop import SimClock, on_virtual_time

PLACES = [Address(f"192.0.2.{number}", 443) for number in range(3)]
SIX = Address("2001:db8::1", 443)


class Always:
    """Chance that says yes."""

    def random(self):
        return 0.0

    def token_bytes(self, size):
        return bytes(size)


class Call:
    queued = ipv4_first = False
    bytes_down = -1
    asked_at = first_byte_s = None
    shape = RequestShape(host="a.test")

    def __init__(self, *, key):
        self.key = key


async def settled(places=PLACES):
    """Give a client that is at home on a quick network, where the first place works."""
    steering = Steering(Network("wifi", "wifi"), rng=Always(), wall_s=SimClock(asyncio.get_running_loop()).wall)
    steering.order("a.test", places, ())
    steering.connected("a.test", places[0], connect_s=0.02, tls_s=0.03)
    await asyncio.sleep(limits_memory.EXPLORE_QUIET_S)
    return steering


@on_virtual_time
async def test_another_address_is_tried_once_a_minute_at_most():
    steering = await settled()
    firsts = []
    for _ in range(240):
        firsts.append(steering.order("a.test", PLACES, ())[0])
        await asyncio.sleep(1.0)
    assert len([each for each in firsts if each != PLACES[0]]) == 240 / limits_memory.EXPLORE_PAUSE_S


@on_virtual_time
async def test_nothing_is_tried_for_a_retry_nor_while_a_request_that_matters_is_under_way():
    steering = await settled()
    assert steering.order("a.test", PLACES, (PLACES[2],))[0] == PLACES[0]
    call = Call(key=True)
    steering.enter(call, "a.test")
    assert steering.order("b.test", PLACES, ())[0] == PLACES[0]
    steering.leave(call)
    steering.enter(Call(key=False), "a.test")
    assert steering.order("a.test", PLACES, ())[0] != PLACES[0]


@on_virtual_time
async def test_nothing_is_tried_on_a_weak_network():
    steering = await settled()
    for _ in range(10):
        steering.unanswered(Call(key=False), PLACES[0], waited_s=3.0)
    steering.connected("a.test", PLACES[0], connect_s=0.02, tls_s=0.03)
    assert steering.order("a.test", PLACES, ())[0] == PLACES[0]


@on_virtual_time
async def test_other_family_is_not_for_chance():
    steering = await settled([SIX, PLACES[0]])
    assert steering.order("a.test", [SIX, PLACES[0]], ())[0] == SIX


@on_virtual_time
async def test_protocol_that_was_left_is_tried_again_and_one_that_does_well_is_not_left():
    steering = await settled()
    assert list(steering.protocols("a.test", ("h2", "h1"))) == ["h2", "h1"]
    for _ in range(3):
        steering.unanswered(Call(key=False), None, waited_s=40.0, protocol="h2")
    steering.connected("a.test", PLACES[0], connect_s=0.02, tls_s=0.03)
    order = [list(steering.protocols("a.test", ("h2", "h1"))) for _ in range(3)]
    assert order == [["h1", "h2"]] * 3  # the network looks slow now
    for _ in range(9):
        steering.connected("a.test", PLACES[0], connect_s=0.02, tls_s=0.03)
    order = [list(steering.protocols("a.test", ("h2", "h1"))) for _ in range(3)]
    assert order == [["h2", "h1"], ["h1", "h2"], ["h1", "h2"]]


class Asking(Call):
    """A call under way, of a class of path of its own, and what it has failed on."""

    def __init__(self, path_class, *, left=(), ipv4_first=False):
        super().__init__(key=False)
        self.shape = RequestShape(host="a.test", path_class=path_class)
        self.request = None
        self.left = set(left)
        self.ipv4_first = ipv4_first


FOUR = PLACES[0]
SEVEN = Address("2001:db8::2", 443)


@on_virtual_time
async def test_dial_for_a_call_that_is_worse_over_ipv6_begins_with_ipv4_and_no_other_does():
    steering = await settled([SIX])
    assert steering.order("a.test", [SIX, FOUR], ())[0] == SIX
    call = Asking("GET /big", ipv4_first=True)
    steering.enter(call, "a.test")
    assert steering.order("a.test", [SIX, FOUR], ())[0] == FOUR
    assert steering.order("b.test", [SIX, FOUR], ())[0] == SIX
    steering.leave(call)
    assert steering.order("a.test", [SIX, FOUR], ())[0] == SIX


@on_virtual_time
async def test_repetition_of_a_call_that_is_worse_over_ipv6_leaves_all_of_it_where_ipv4_is_left():
    steering = await settled([SIX])
    steering.order("a.test", [SIX, SEVEN, FOUR], ())
    assert steering.left_of(Asking("GET /", left={SIX})) == {SIX}
    assert steering.left_of(Asking("GET /", left={SIX}, ipv4_first=True)) == {SIX, SEVEN}
    assert steering.left_of(Asking("GET /", left={SIX, FOUR}, ipv4_first=True)) == {SIX, FOUR}
    steering.order("a.test", [SIX, SEVEN], ())
    assert steering.left_of(Asking("GET /", left={SIX}, ipv4_first=True)) == {SIX}


@on_virtual_time
async def test_api_that_only_ipv4_answers_goes_ipv4_first_though_its_host_does_well_over_ipv6():
    steering = await settled([SIX])
    steering.order("a.test", [SIX, SEVEN, FOUR], ())
    big = Asking("GET /big", left={SIX})
    for _ in range(2):
        steering.unanswered(big, SIX, waited_s=2.0)
        answer(steering, Asking("GET /small"), SIX)
        answer(steering, big, FOUR)
    assert steering.left_of(big) == {SIX, SEVEN}
    assert steering.left_of(Asking("GET /small", left={SIX})) == {SIX}
    assert steering.order("a.test", [SIX, FOUR], ())[0] == SIX
    steering.enter(big, "a.test")
    assert steering.order("a.test", [SIX, FOUR], ())[0] == FOUR
    answer(steering, big, SIX)
    assert steering.left_of(big) == {SIX}


class Stream:
    def tcp_info(self):
        return None


def answer(steering, call, peer):
    steering.answered(
        call, Stream(), peer, first_byte_s=0.1, body_s=0.0, answer_bytes=100, server_timing=None, protocol="h2"
    )
