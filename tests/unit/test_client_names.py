"""Where a client's addresses come from, and what becomes of those that turn out wrong.

On the simulator's VirtualLoop, with a system resolver and DNS over HTTPS that answer as they are told.
"""

import asyncio
import math
import socket

import pytest

from stormline.client.config import Config
from stormline.client.name_sources import is_private, is_public
from stormline.client.names import NameService
from stormline.core import limits, limits_names
from stormline.core.values import Address
from stormline.net.local import in_hosts_file
from stormline.net.resolve import SYSTEM, Found, no_name
from stormline.testing.simloop import on_virtual_time

SHOP = "shop.example"
TRUE, OTHER, LIE = "203.0.113.1", "203.0.113.2", "198.51.100.66"
PRIVATE = "192.168.1.1"
AGAIN = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
NO_NAME = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
DOH = "DoH dns.example"
NEVER = math.inf


class System:
    """A system resolver."""

    def __init__(self, answer=(TRUE,), delay_s=0.02):
        self.answer, self.delay_s, self.asked, self.running = answer, delay_s, [], {}

    def ask(self, host, *, refresh):
        self.asked.append(host)
        loop = asyncio.get_running_loop()
        if self.delay_s == NEVER:
            return loop.create_future()
        self.running[host] = loop.create_task(self._answer())
        return self.running[host]

    async def _answer(self):
        if self.delay_s == NEVER:
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(self.delay_s)
        if isinstance(self.answer, Exception):
            raise self.answer
        return Found(self.answer)

    def withdraw(self, host):
        task = self.running.pop(host, None)
        if task is not None:
            task.cancel()


class Doh(System):
    """DNS over HTTPS."""

    def __init__(self, answer=(TRUE,), delay_s=0.1, ttl_s=300.0, label=DOH):
        super().__init__(answer, delay_s)
        self.ttl_s, self.label = ttl_s, label
        self.shunned, self.doubted, self.closed = [], 0, False

    async def ask(self, host, *, avoid=(), on_note=lambda line: None):
        self.asked.append(host)
        if self.label in avoid:
            raise OSError("no other")
        return (await self._answer())._replace(ttl_s=self.ttl_s, source=self.label)

    def shun(self, source):
        self.shunned.append(source)

    def doubt(self):
        self.doubted += 1

    def close(self):
        self.closed = True


class Scene:
    """A name service, its sources, and its notes."""

    def __init__(self, system=None, doh=None, *, network="home", wall_s=lambda: 1e9, **config):
        self.system = System() if system is None else system
        self.doh = doh
        self.network = network
        self.notes = []
        self.names = NameService(Config(**config), self.system, doh=doh, network=lambda: self.network, wall_s=wall_s)

    async def find(self, host=SHOP):
        """Give the IPs, or the error, and the seconds it took."""
        began = now()
        try:
            found = await self.names.find(host, 443, on_note=self.notes.append)
        except OSError as error:
            return error, round(now() - began, 3)
        return [each.host for each in found], round(now() - began, 3)

    async def more(self, *seen, host=SHOP, tls=True):
        began = now()
        tried = [Address(each, 443) for each in seen]
        found = await self.names.more(host, 443, tried, tls=tls, on_note=self.notes.append)
        return [each.host for each in found], round(now() - began, 3)

    def proved(self, address=TRUE):
        self.names.proved(SHOP, Address(address, 443))

    def impostor(self, address=LIE):
        self.names.impostor(SHOP, Address(address, 443))

    def story(self):
        return "\n".join(self.notes)


def now():
    return asyncio.get_running_loop().time()


# -- who is asked -----------------------------------------------------------------------------------------------------
@on_virtual_time
async def test_pinned_host_asks_nobody():
    scene = Scene(doh=Doh(), pinned={"Shop.example": (OTHER, "2001:db8::1")})
    assert await scene.find("SHOP.example") == ([OTHER, "2001:db8::1"], 0)
    assert scene.system.asked == scene.doh.asked == []
    assert f"{OTHER}, 2001:db8::1" in scene.story()


@on_virtual_time
async def test_pinned_host_takes_no_other_address_but_its_backup():
    scene = Scene(doh=Doh(), pinned={SHOP: (OTHER,)}, backup_addresses={SHOP: (TRUE,)})
    await scene.find()
    scene.impostor(OTHER)
    scene.proved(LIE)
    assert await scene.more(OTHER) == ([TRUE], 0)
    assert scene.doh.asked == []


@on_virtual_time
async def test_ip_literal_gives_itself():
    assert await Scene().find("2001:db8::1") == (["2001:db8::1"], 0)


@on_virtual_time
async def test_system_that_answers_in_time_is_enough():
    scene = Scene(doh=Doh())
    assert await scene.find() == ([TRUE], 0.02)
    assert scene.doh.asked == []
    assert f"1 addresses from {SYSTEM} in 20 ms" in scene.story()


@on_virtual_time
async def test_system_that_is_silent_is_not_waited_for():
    scene = Scene(System(delay_s=NEVER), Doh())
    assert await scene.find() == ([TRUE], limits_names.NAMES_HEAD_START_S + 0.1)
    assert f"from {DOH}" in scene.story()


@on_virtual_time
async def test_system_that_fails_has_doh_asked_at_once():
    scene = Scene(System(AGAIN), Doh())
    assert await scene.find() == ([TRUE], 0.12)


@pytest.mark.parametrize("answer", [AGAIN, NO_NAME])
def test_doh_that_fails_leaves_the_word_to_the_system(answer):
    @on_virtual_time
    async def scene():
        scene = Scene(System((LIE,), delay_s=3), Doh(answer if answer is AGAIN else no_name("absent", 5.0)))
        assert await scene.find() == ([LIE], 3)

    scene()


@on_virtual_time
async def test_system_overtaken_twice_goes_second_for_a_while():
    scene = Scene(System(delay_s=3), Doh(delay_s=0.1))
    for host in ("a.example", "b.example"):
        assert (await scene.find(host))[1] == limits_names.NAMES_HEAD_START_S + 0.1
    assert (await scene.find("c.example"))[1] == 0.1
    assert "slow here" in scene.story()
    await asyncio.sleep(limits_names.NAMES_BEHIND_S)
    assert (await scene.find("d.example"))[1] == limits_names.NAMES_HEAD_START_S + 0.1


@on_virtual_time
async def test_system_that_is_known_to_take_its_time_gets_it():
    scene = Scene(System(delay_s=0.7), Doh())
    await scene.find("a.example")
    scene.system.delay_s = 1.3
    assert (await scene.find())[1] == 1.3
    assert scene.doh.asked == []


@on_virtual_time
async def test_doh_that_is_first_and_silent_has_the_system_beside_it():
    scene = Scene(System((LIE,)), Doh())
    await scene.find()
    scene.impostor()
    await scene.more(LIE)
    scene.doh.delay_s = NEVER
    scene.system.answer = (OTHER,)
    assert await scene.find("b.example") == ([OTHER], limits_names.DOH_STAGGER_S + 0.02)


@pytest.mark.parametrize("host", ["printer", "nas.local", "router.lan", "db.internal", "hidden.onion", "localhost"])
def test_local_name_never_leaves_the_network(host):
    @on_virtual_time
    async def scene():
        scene = Scene(System(AGAIN), Doh())
        error, _ = await scene.find(host)
        assert error.errno == socket.EAI_AGAIN
        assert scene.doh.asked == []

    scene()


@on_virtual_time
async def test_without_doh_nothing_is_doubted():
    scene = Scene(System((PRIVATE, "0.0.0.0")))
    assert await scene.find() == ([PRIVATE, "0.0.0.0"], 0.02)
    assert await scene.more(PRIVATE, "0.0.0.0") == ([], 0)


@on_virtual_time
async def test_nobody_answers_in_time_and_it_is_said_so():
    scene = Scene(System(delay_s=NEVER), Doh(delay_s=NEVER))
    error, took_s = await scene.find()
    assert (type(error), took_s) == (TimeoutError, limits.RESOLVE_TIMEOUT_S)
    scene.names.close()


# -- lies -------------------------------------------------------------------------------------------------------------
@on_virtual_time
async def test_wrong_certificate_brings_a_second_opinion_and_puts_the_liar_last_with_an_end():
    scene = Scene(System((LIE,)), Doh())
    assert await scene.find() == ([LIE], 0.02)
    scene.impostor()
    assert await scene.more(LIE) == ([TRUE], 0.1)
    assert await scene.find() == ([TRUE], 0)
    assert "another's address: asked last for 600 s" in scene.story()
    assert (await scene.find("b.example"))[1] == 0.1, "the resolver that lied is second for all names"
    await asyncio.sleep(limits_names.NAMES_REJECTED_S)
    assert (await scene.find("c.example"))[1] == 0.02, "and has its chance again"


@on_virtual_time
async def test_liar_that_lies_again_stays_last_for_longer():
    scene = Scene(System((LIE,)), Doh())
    for number in range(6):
        host = f"n{number}.example"
        assert await scene.find(host) == ([LIE], 0.02)
        scene.names.impostor(host, Address(LIE, 443))
        await scene.more(LIE, host=host)
        span_s = min(limits_names.NAMES_REJECTED_S * 2**number, limits_names.NAMES_REJECTED_S_MAX)
        assert f"asked last for {span_s:.0f} s" in scene.story()
        scene.notes.clear()
        await asyncio.sleep(span_s)


@on_virtual_time
async def test_address_that_lied_is_not_taken_from_the_system_again():
    scene = Scene(System((LIE,)), Doh())
    await scene.find()
    scene.impostor()
    await scene.more(LIE)
    scene.network = "office"
    assert (await scene.find("b.example"))[0] == [LIE], "another network, another judgement"
    scene.network = "home"
    scene.doh.answer = AGAIN
    await asyncio.sleep(limits_names.NAMES_TTL_S_MAX - 60)
    scene.names.doubt(SHOP)
    assert (await scene.find())[0] == [TRUE], "a lie known as such takes no good answer away"


@on_virtual_time
async def test_certificate_wrong_everywhere_is_the_servers_own_and_nobody_is_blamed():
    scene = Scene(System((TRUE,)), Doh((TRUE,)))
    await scene.find()
    scene.impostor(TRUE)
    assert await scene.more(TRUE) == ([], 0.1)
    assert "the certificate is the server's own" in scene.story()
    assert (await scene.find("b.example"))[1] == 0.02


@on_virtual_time
async def test_doh_that_lies_has_the_system_asked():
    scene = Scene(System(AGAIN), Doh((LIE,)))
    assert await scene.find() == ([LIE], 0.12)
    scene.system.answer = (TRUE,)
    scene.impostor()
    assert await scene.more(LIE) == ([TRUE], 0.02)
    assert scene.doh.shunned == [DOH]


@on_virtual_time
async def test_address_that_says_no_and_was_never_proven_brings_a_second_opinion_once_in_a_while():
    scene = Scene(System((LIE,)), Doh())
    await scene.find()
    assert await scene.more(LIE) == ([TRUE], 0.1)
    assert await scene.more(LIE) == ([TRUE], 0)
    assert await scene.more(LIE, TRUE) == ([], 0)
    assert scene.doh.asked == [SHOP]


@on_virtual_time
async def test_proven_address_that_fails_brings_none():
    scene = Scene(System((TRUE,)), Doh((OTHER,)))
    await scene.find()
    scene.proved()
    assert await scene.more(TRUE) == ([], 0)
    assert scene.doh.asked == []


@on_virtual_time
async def test_second_opinion_that_fails_leaves_the_reserve():
    scene = Scene(System((LIE,)), Doh(AGAIN), backup_addresses={SHOP: (OTHER,)})
    await scene.find()
    scene.impostor()
    assert await scene.more(LIE) == ([OTHER], 0.1)
    assert "no second opinion" in scene.story()


@on_virtual_time
async def test_second_opinion_that_hangs_does_not_keep_the_reserve_waiting():
    scene = Scene(System((LIE,)), Doh(delay_s=3), backup_addresses={SHOP: (OTHER,)})
    await scene.find()
    scene.impostor()
    assert await scene.more(LIE) == ([OTHER], limits_names.NAMES_PATIENCE_S)
    assert await scene.more(LIE, OTHER) == ([TRUE], 2)


@on_virtual_time
async def test_lie_without_doh_falls_back_on_what_was_proven():
    scene = Scene(System((TRUE,)))
    await scene.find()
    scene.proved()
    await asyncio.sleep(limits.RESOLVE_FRESH_S)
    scene.system.answer = (LIE,)
    await scene.find()
    await asyncio.sleep(1)
    assert await scene.find() == ([LIE], 0)
    scene.impostor()
    assert await scene.more(LIE) == ([TRUE], 0)


@on_virtual_time
async def test_proven_addresses_are_no_reserve_where_no_certificate_is_checked():
    scene = Scene(System((TRUE,)))
    await scene.find()
    scene.proved(OTHER)
    assert await scene.more(TRUE, tls=False) == ([], 0)
    assert await scene.more(TRUE) == ([OTHER], 0)


# -- private addresses ------------------------------------------------------------------------------------------------
@on_virtual_time
async def test_private_address_of_a_public_name_goes_behind_what_doh_says():
    scene = Scene(System((PRIVATE,)), Doh())
    assert await scene.find() == ([TRUE], 0.12)
    assert "doubtful" in scene.story()


@on_virtual_time
async def test_private_address_is_used_where_doh_has_nothing_else():
    for answer in (AGAIN, no_name("absent"), (PRIVATE,)):
        scene = Scene(System((PRIVATE,)), Doh(answer))
        assert (await scene.find())[0] == [PRIVATE]


@on_virtual_time
async def test_private_address_that_the_app_expects_is_taken():
    scene = Scene(System((PRIVATE,)), Doh(), private_hosts={"Example"})
    assert await scene.find() == ([PRIVATE], 0.02)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "172.31.0.1", "192.168.0.9", "169.254.1.1", "0.0.0.0", "224.0.0.1", "::1", "::",
     "fd00::1", "fe80::1%eth0", "::ffff:10.0.0.1"],
)  # fmt: skip
def test_addresses_of_no_use_elsewhere_are_private(address):
    assert is_private(address)


@pytest.mark.parametrize("address", ["203.0.113.1", "100.64.0.1", "8.8.8.8", "2001:db8::1", "172.32.0.1"])
def test_other_addresses_are_not(address):
    assert not is_private(address)


def test_public_names_have_a_dot_and_no_local_ending():
    assert [is_public(each) for each in ("a.example", "A.Local", "host", "host.", "x.home.arpa", "local.example")] == [
        True, False, False, False, False, True,
    ]  # fmt: skip


def test_hosts_file_is_read_by_words(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# 10.0.0.1 no.example\n10.0.0.2 a.example B.example # c.example\n\n")
    names = ("a.example", "b.EXAMPLE", "c.example", "no.example", "10.0.0.2")
    assert [in_hosts_file(name, path) for name in names] == [True, True, False, False, False]
    assert not in_hosts_file("a.example", tmp_path / "none")


# -- no waiting -------------------------------------------------------------------------------------------------------
@on_virtual_time
async def test_proven_name_never_waits_for_a_dead_name_server():
    scene = Scene(System((TRUE,)))
    await scene.find()
    scene.proved()
    scene.system.delay_s = NEVER
    for _ in range(200):
        await asyncio.sleep(60)
        scene.names.doubt(SHOP)
        assert await scene.find() == ([TRUE], 0)


@on_virtual_time
async def test_renewal_goes_on_behind_and_its_answer_is_used():
    scene = Scene(System((TRUE,)))
    await scene.find()
    scene.proved()
    await asyncio.sleep(limits.RESOLVE_OLD_S)
    scene.system.answer = (OTHER,)
    assert await scene.find() == ([TRUE], 0)
    await asyncio.sleep(0.1)
    assert await scene.find() == ([OTHER], 0)


@on_virtual_time
async def test_backup_addresses_come_where_nobody_answers():
    scene = Scene(System(delay_s=NEVER), Doh(delay_s=NEVER), backup_addresses={SHOP: (OTHER,)})
    assert await scene.find() == ([OTHER], limits_names.NAMES_PATIENCE_S)
    assert "in reserve" in scene.story()
    scene.names.close()


@on_virtual_time
async def test_answer_that_comes_after_the_backup_was_used_is_kept():
    scene = Scene(System(delay_s=3), Doh(delay_s=NEVER), backup_addresses={SHOP: (OTHER,)})
    await scene.find()
    await asyncio.sleep(3)
    assert await scene.find() == ([TRUE], 0)


@on_virtual_time
async def test_prefetched_names_wait_no_more():
    scene = Scene(System(delay_s=0.2))
    assert await scene.names.prefetch([SHOP, "b.example", SHOP]) == {SHOP: True, "b.example": True}
    assert now() == pytest.approx(0.2)
    assert await scene.find() == ([TRUE], 0)
    scene.system.answer = AGAIN
    assert await scene.names.prefetch(["c.example"]) == {"c.example": False}


# -- names that do not exist ------------------------------------------------------------------------------------------
@on_virtual_time
async def test_failure_serves_the_last_answer_and_is_over_within_seconds():
    # A record of 30 s expires, the server fails for 3 s, then answers again; asked once a second.
    scene = Scene(System((TRUE,)))
    await scene.find()
    await asyncio.sleep(limits.RESOLVE_FRESH_S)
    for failure in (AGAIN, socket.gaierror(socket.EAI_FAIL, "Non-recoverable failure"), TimeoutError()):
        scene.system.answer = failure
        for _ in range(3):
            assert await scene.find() == ([TRUE], 0)
            await asyncio.sleep(1)
        assert "stale" in scene.story()
        scene.system.answer = (OTHER,)
        for _ in range(5):
            await scene.find()
            await asyncio.sleep(1)
        assert await scene.find() == ([OTHER], 0)
        scene.system.answer = (TRUE,)
        await asyncio.sleep(limits.RESOLVE_FRESH_S)
        await scene.find()
        await asyncio.sleep(limits.RESOLVE_FRESH_S + 1)
        scene.notes.clear()


@on_virtual_time
async def test_absent_name_replaces_its_address_for_as_long_as_its_zone_says():
    scene = Scene(System((TRUE,)), Doh())
    await scene.find()
    scene.proved()
    await asyncio.sleep(limits.RESOLVE_FRESH_S)
    scene.system.answer, scene.doh.answer = NO_NAME, no_name("the name does not exist", 5.0)
    await scene.find()
    await asyncio.sleep(0.5)
    error, took_s = await scene.find()
    assert (error.errno, took_s) == (socket.EAI_NONAME, 0)
    scene.system.answer = (OTHER,)
    await asyncio.sleep(4)
    assert (await scene.find())[0].errno == socket.EAI_NONAME
    await asyncio.sleep(1)
    assert await scene.find() == ([OTHER], 0.02)


@on_virtual_time
async def test_absent_name_is_believed_for_a_minute_at_most():
    scene = Scene(System(NO_NAME), Doh(no_name("the name does not exist", 86_400.0)))
    await scene.find()
    await asyncio.sleep(limits_names.NAMES_ABSENT_S_MAX)
    scene.system.answer = (TRUE,)
    assert (await scene.find())[0] == [TRUE]


@on_virtual_time
async def test_system_that_denies_a_name_while_offline_takes_no_answer_away():
    scene = Scene(System((TRUE,)), Doh())
    await scene.find()
    await asyncio.sleep(limits.RESOLVE_OLD_S)
    scene.system.answer, scene.doh.answer = NO_NAME, OSError("unreachable")
    for _ in range(5):
        assert (await scene.find())[0] == [TRUE]
        await asyncio.sleep(60)


@on_virtual_time
async def test_system_that_denies_a_proven_name_is_doubted_for_a_minute():
    scene = Scene(System((TRUE,)))
    await scene.find()
    scene.proved()
    scene.system.answer = NO_NAME
    await asyncio.sleep(limits.RESOLVE_FRESH_S)
    await scene.find()
    await asyncio.sleep(1)
    assert (await scene.find())[0] == [TRUE]
    await asyncio.sleep(limits_names.NAMES_ABSENT_DOUBT_S)
    assert (await scene.find())[0].errno == socket.EAI_NONAME
    await asyncio.sleep(limits.RESOLVE_FAILED_S)
    scene.system.answer = (TRUE,)
    assert (await scene.find())[0] == [TRUE]


# -- networks and clocks ----------------------------------------------------------------------------------------------
@on_virtual_time
async def test_change_of_network_renews_answers_and_forgets_private_ones():
    scene = Scene(System((TRUE,)), Doh(), private_hosts={"nas.example"})
    await scene.find()
    scene.system.answer = (PRIVATE,)
    await scene.find("nas.example")
    scene.names.proved("nas.example", Address(PRIVATE, 443))
    scene.network = "office"
    scene.names.network_changed()
    scene.system.answer = (OTHER,)
    assert await scene.find("nas.example") == ([OTHER], 0.02)
    assert await scene.find() == ([OTHER], 0.02), "never proven: waits for what is true here"
    assert scene.doh.doubted == 1


@on_virtual_time
async def test_change_of_network_makes_nobody_wait_for_a_proven_name():
    scene = Scene(System((TRUE,)))
    await scene.find()
    scene.proved()
    scene.names.network_changed()
    scene.system.delay_s = NEVER
    assert await scene.find() == ([TRUE], 0)


@on_virtual_time
async def test_wall_clock_that_steps_changes_nothing():
    wall = [1e9]
    scene = Scene(System((LIE,)), Doh(), wall_s=lambda: wall[0])
    await scene.find()
    scene.impostor()
    await scene.more(LIE)
    scene.proved()
    for step_s in (3600.0, 90 * 86_400.0, -6 * 365 * 86_400.0, -1.0):
        wall[0] += step_s
        assert await scene.find() == ([TRUE], 0)
        assert (await scene.find(f"b{step_s}.example"))[1] == 0.1, "the liar is still last"
