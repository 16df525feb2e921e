"""What a client asks a real scheduling centre, and keeps: its user's home, only what changed, and as what it asks."""

import asyncio
import contextlib
import json

import msgspec
import pytest

import stormline
from stormline.client.acceptance import Acceptance
from stormline.client.api import AsyncClient
from stormline.client.config import Config
from stormline.core import limits_network
from stormline.core.values import Secret
from stormline.dispatch.config import DispatchConfig
from stormline.dispatch.rules import Homes, RuleSet
from stormline.dispatch.service import DispatchService
from stormline.dispatch.unit import HeldRules
from stormline.net.clock import SystemClock, SystemRng
from stormline.testing.origin import plain, running_origin
from stormline.testing.world import APP, GATEWAY_NAME, bundle_for, running_dispatch, wait_until
from stormline.wire import events as e
from stormline.wire import jws, tokens
from stormline.wire import messages as m
from stormline.wire import plan as wire_plan
from stormline.wire.bundle import Centre
from stormline.wire.plan import PUSH, Endpoint, HostPlan, PlanRequest, Policy

from .test_dispatch import server_context  # noqa: TID252 - the tests of one folder share what they play

pytestmark = pytest.mark.loopback
HOMES = Homes(epoch=3, units={"u1": 1, "u2": 1}, moved={"ann": "u2", "ben": "u1"})
HOSTS = {f"h{number}.test": HostPlan(dns=True, policy=Policy(deadline_s=5.0 + number)) for number in range(6)}
RULES = RuleSet(version=1, hosts=HOSTS, apps={APP: frozenset(HOSTS)}, homes=HOMES)


def token(pki, user="ann", device="d1"):
    now = int(SystemClock().wall())
    claims = tokens.DeviceToken(app=APP, device=device, user=user, iat=now, exp=now + 3600)
    return tokens.mint(claims, key=pki.token_key.key, kid=pki.token_key.kid)


class Asked:
    """A real centre behind a door that notes what went through."""

    def __init__(self, pki, rules, unit):
        self.source = HeldRules(rules)
        config = DispatchConfig(
            host="127.0.0.1",
            port=0,
            tls=None,
            unit=unit,
            rules=rules,
            plan_key=pki.plan_key,
            token_key=pki.token_key,
            admin_key=Secret("an-admin-key-0123456789"),
        )
        self.service = DispatchService(config, clock=SystemClock(), rng=SystemRng(), source=self.source)
        self.questions = []
        self.answers = []

    async def answer(self, request, writer):
        await self.play(request, writer)

    async def play(self, request, writer):
        if request.target == "/v1/devices":
            body = {"device": "d9", "token": "enrolled", "expires_at": 2**33}
            writer.write(plain(json.dumps(body).encode(), status="201 Created"))
        else:
            writer.write(plain(self.ask(request.body)))

    def ask(self, body):
        question = msgspec.json.decode(body, type=PlanRequest)
        self.questions.append(question)
        self.answers.append(self.service.answer(question, address="127.0.0.1"))
        return self.answers[-1]

    def put(self, **change):
        old = self.source.current()
        self.source.put(msgspec.structs.replace(old, version=old.version + 1, **change))

    def last(self):
        """Give the kind of the last answer, and of how many hosts it speaks."""
        signed, _ = wire_plan.split(self.answers[-1])
        said = json.loads(jws.b64url_decode(signed.split(b".")[1]))
        return jws.typ_of(signed), len(said.get("hosts", {}))


@pytest.fixture(name="centre")
async def _centre(pki):
    """Make centres: `await centre("u1")` gives one and its address."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(unit="u1", rules=RULES, *, clear=False):
            asked = Asked(pki, rules, unit)
            stack.callback(asked.service.close)
            context = None if clear else server_context(pki.dispatch)
            there = await stack.enter_async_context(running_origin(asked.answer, ssl=context))
            return asked, there.address

        yield make


@pytest.fixture(name="client")
async def _client(pki):
    """Make clients: `await client(bundle, **config)`."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(bundle, **config):
            settings = Config(**({"bundle": bundle, "report": False, "trust_env": False} | config))
            return await stack.enter_async_context(AsyncClient(config=settings))

        yield make


def scheduling_of(client):
    return client._storm.runtime().scheduling


class TestHome:
    async def test_user_s_home_is_asked_for_verified_and_shown(self, pki, client):
        async with running_dispatch(pki, RULES) as (address, _):
            here = await client(bundle_for(pki, address, token=token(pki)))
            assert here.home is None
            await scheduling_of(here).refresh()
            assert (here.home.user, here.home.unit, here.home.epoch) == ("ann", "u2", 3)
            assert scheduling_of(here).unit == "u2"

    @pytest.mark.parametrize("given", ["", "nobody"])
    async def test_device_without_a_user_asks_for_no_home_and_sends_no_token(self, pki, centre, client, given):
        asked, address = await centre()
        here = await client(bundle_for(pki, address, token=given and token(pki, user="")))
        await scheduling_of(here).refresh()
        assert here.home is None
        assert [each.token for each in asked.questions] == [""]

    async def test_centres_of_the_home_unit_are_asked_first_from_then_on(self, pki, centre, client):
        (one, at_one), (two, at_two) = await centre("u1"), await centre("u2")
        centres = tuple(Centre(host=at.host, port=at.port, unit=unit) for at, unit in ((at_one, "u1"), (at_two, "u2")))
        here = await client(bundle_for(pki, centres=centres, token=token(pki)))
        for _ in range(3):
            await scheduling_of(here).refresh()
        assert (len(one.questions), len(two.questions)) == (1, 2)

    async def test_token_goes_over_tls_alone(self, pki, centre, client):
        asked, address = await centre(clear=True)
        centres = (Centre(host="127.0.0.1", port=1, plain_port=address.port),)
        here = await client(bundle_for(pki, centres=centres, token=token(pki)))
        await scheduling_of(here).refresh()
        assert here.home is None
        assert [each.token for each in asked.questions] == [""]
        assert asked.questions[0].device == "d1"

    async def test_home_is_kept_between_starts_and_goes_with_its_user(self, pki, centre, client, tmp_path):
        asked, address = await centre()
        bundle = bundle_for(pki, address)
        async with AsyncClient(config=Config(bundle=bundle, store=tmp_path, token=Secret(token(pki)))) as first:
            await scheduling_of(first).refresh()
        async with AsyncClient(config=Config(bundle=bundle, store=tmp_path, token=Secret(token(pki)))) as again:
            scheduling = scheduling_of(again)
            assert (again.home.unit, scheduling.unit) == ("u2", "u2")
        assert len(asked.questions) == 1
        for user, unit in (("ben", "u1"), ("ann", "u2")):  # each begins without the other's
            other = Config(bundle=bundle, store=tmp_path, token=Secret(token(pki, user=user)))
            async with AsyncClient(config=other) as another:
                scheduling = scheduling_of(another)
                assert another.home is None
                await scheduling.refresh()
                assert another.home.unit == unit

    async def test_older_epoch_and_another_user_s_home_are_refused_and_the_plan_is_not(self, pki, centre, client):
        asked, address = await centre()
        here = await client(bundle_for(pki, address, token=token(pki)))
        await scheduling_of(here).refresh()
        asked.put(homes=Homes(epoch=2, units={"u1": 1}))
        assert (await scheduling_of(here).refresh()).version == 2
        assert (here.home.unit, here.home.epoch) == ("u2", 3)
        asked.put(homes=Homes(epoch=4, units={"u1": 1}))
        await scheduling_of(here).refresh()
        assert (here.home.unit, here.home.epoch) == ("u1", 4)
        foreign = token(pki, user="ben")
        ask = asked.ask
        asked.ask = lambda body: ask(msgspec.json.encode(json.loads(body) | {"token": foreign}))
        asked.put(homes=Homes(epoch=5, units={"u2": 1}))
        assert (await scheduling_of(here).refresh()).version == 4
        assert here.home.user == "ann"

    async def test_home_ends_when_its_time_is_over_or_nobody_is_logged_in(self, pki, centre, client):
        _, address = await centre()
        here = await client(bundle_for(pki, address, token=token(pki)))
        scheduling = scheduling_of(here)
        await scheduling.refresh()
        residence = scheduling._residence
        residence._until = 0.0
        assert here.home is None
        await scheduling.refresh()
        assert here.home.unit == "u2"
        scheduling._hold_token(token(pki, user=""))
        assert here.home is None

    def test_synchronous_client_shows_it_too(self, pki):
        with stormline.Client(config=Config(trust_env=False)) as client:
            assert client.home is None


class TestOnlyWhatChanged:
    async def test_one_new_host_comes_alone_and_so_does_a_changed_one(self, pki, centre, client):
        asked, address = await centre()
        here = await client(bundle_for(pki, address, preload=tuple(HOSTS)[:4]))
        scheduling = scheduling_of(here)
        await scheduling.refresh()
        assert asked.last() == (wire_plan.TYP, 4)
        assert (await scheduling.host_plan("h4.test")).policy.deadline_s == 9.0
        assert asked.last() == (wire_plan.TYP_CHANGES, 1)
        asked.put(hosts=HOSTS | {"h1.test": HostPlan(dns=True, policy=Policy(deadline_s=1.0))})
        assert (await scheduling.refresh()).hosts["h1.test"].policy.deadline_s == 1.0
        assert asked.last() == (wire_plan.TYP_CHANGES, 1)
        assert [scheduling.plan.hosts[f"h{number}.test"].policy.deadline_s for number in range(5)] == [
            5.0, 1.0, 7.0, 8.0, 9.0,
        ]  # fmt: skip
        await scheduling.refresh()
        assert asked.last()[0] == wire_plan.TYP_UNCHANGED

    async def test_after_a_notice_the_long_connection_brings_only_what_changed(self, pki, world):
        asked = None

        async def script(end):
            await end.welcome(capabilities=(m.PLAN,))
            while True:
                call = await end.next(e.CallReceived)
                if call.gate == "dispatch":
                    end.reply(call, asked.ask(call.body))
                else:
                    end.reply(call, b"x")
                    asked.put(hosts=asked.source.current().hosts | {"other.test": HostPlan(dns=True)})
                    end.machine.send_notice(asked.source.current().version, ("other.test",))
                    end.flush()

        here = await world(script)
        at = Endpoint(host="127.0.0.1", port=here.gateway.address.port, server_name=GATEWAY_NAME)
        hosts = {"other.test": HostPlan(endpoints=(at,)), "shop.test": HostPlan(endpoints=(at,))}
        rules = RuleSet(version=1, hosts=hosts, apps={APP: frozenset(hosts)}, gateways={APP: (at,)})
        asked = Asked(pki, rules, "u1")
        async with running_origin(asked.answer, ssl=server_context(pki.dispatch)) as centre:
            bundle = bundle_for(pki, centre.address, preload=tuple(hosts))
            async with here.client(bundle=bundle, disabled=frozenset({"direct"})) as client:
                await client.post("https://shop.test/", content=b"x")
                scheduling = scheduling_of(client)
                await wait_until(lambda: scheduling.plan.version == 2)
                assert scheduling.plan.hosts["other.test"].dns
                assert scheduling.plan.hosts["shop.test"].endpoints == (at,)
        assert asked.last() == (wire_plan.TYP_CHANGES, 1)
        asked.service.close()

    async def test_changed_plan_serves_after_a_restart(self, pki, centre, client, tmp_path):
        asked, address = await centre()
        bundle = bundle_for(pki, address, preload=tuple(HOSTS))
        changes = limits_network.PLAN_CHANGES_KEPT + 3
        for number in range(1, changes):
            async with AsyncClient(config=Config(bundle=bundle, store=tmp_path)) as here:
                scheduling = scheduling_of(here)
                if number > 1:
                    assert scheduling.plan.version == number - 1
                    assert scheduling.plan.hosts["h1.test"].policy.deadline_s == float(number - 1)
                asked.put(hosts=HOSTS | {"h1.test": HostPlan(dns=True, policy=Policy(deadline_s=float(number)))})
                asked.source.put(msgspec.structs.replace(asked.source.current(), version=number))
                await scheduling.refresh()
        kinds = [jws.typ_of(answer) for answer in asked.answers]
        assert kinds.count(wire_plan.TYP) == 2  # the first, and the one after as many changes as are kept
        assert len(asked.answers) == len(asked.questions) == changes - 1

    async def test_answer_to_another_base_is_refused_and_the_next_is_whole(self, pki, centre, client):
        asked, address = await centre()
        here = await client(bundle_for(pki, address, preload=tuple(HOSTS)))
        scheduling = scheduling_of(here)
        await scheduling.refresh()
        asked.put(hosts=HOSTS | {"h1.test": HostPlan(dns=True)})
        ask = asked.ask
        asked.ask = lambda body: _rebased(pki, ask(body))
        with pytest.raises(stormline.errors.AnswerRejected, match="another plan"):
            await scheduling.refresh()
        asked.ask = ask
        assert (await scheduling.refresh()).hosts["h1.test"].policy is None
        assert asked.last()[0] == wire_plan.TYP
        assert asked.questions[-1].held == ""

    async def test_slow_answer_is_applied_to_the_plan_that_its_question_named(self, pki, centre, client):
        asked, address = await centre()
        here = await client(bundle_for(pki, address, preload=tuple(HOSTS)))
        scheduling, ask, go, came = scheduling_of(here), asked.ask, asyncio.Event(), asyncio.Event()
        await scheduling.refresh()

        async def slow(request, writer):
            came.set()
            await go.wait()
            writer.write(plain(ask(request.body)))

        usual, asked.play = asked.play, slow
        first = asyncio.create_task(scheduling.refresh())
        await came.wait()
        asked.play = usual
        asked.put(hosts=HOSTS | {"h1.test": HostPlan(dns=True)})
        assert (await scheduling.refresh()).version == 2
        asked.put(hosts=HOSTS | {"h2.test": HostPlan(dns=True)})
        go.set()
        accepted = await first
        assert asked.last() == (wire_plan.TYP_CHANGES, 1)
        assert accepted.version == scheduling.plan.version == 3
        assert [accepted.hosts[name].policy is None for name in ("h1.test", "h2.test")] == [False, True]

    async def test_hosts_told_unasked_are_asked_for_so_that_what_confirms_them_serves_after_a_restart(
        self, pki, centre, client, tmp_path
    ):
        asked, address = await centre(rules=msgspec.structs.replace(RULES, preload={APP: ("h5.test",)}))
        bundle = bundle_for(pki, address, preload=("h1.test",))
        async with AsyncClient(config=Config(bundle=bundle, store=tmp_path)) as here:
            for _ in range(2):
                await scheduling_of(here).refresh()
            assert asked.last()[0] == wire_plan.TYP_UNCHANGED
        assert set(asked.questions[-1].hosts) == {"h1.test", "h5.test"}
        async with AsyncClient(config=Config(bundle=bundle, store=tmp_path)) as again:
            assert set(scheduling_of(again).plan.hosts) == {"h1.test", "h5.test"}


def _rebased(pki, answer):
    """Sign a `changes` answer anew, as one to another plan."""
    said = msgspec.json.decode(jws.b64url_decode(answer.split(b".")[1]), type=wire_plan.Plan)
    other = msgspec.structs.replace(said, base="another")
    return wire_plan.sign(other, key=pki.plan_key.key, kid=pki.plan_key.kid).encode()


class TestAsWhat:
    async def test_background_client_asks_as_one_and_gets_the_gateways_for_pushes(self, pki, centre, client):
        usual = Endpoint(host="192.0.2.1", port=443, server_name=GATEWAY_NAME)
        pushes = Endpoint(host="192.0.2.2", port=443, server_name=GATEWAY_NAME, role=PUSH)
        asked, address = await centre(rules=msgspec.structs.replace(RULES, gateways={APP: (usual, pushes)}))
        here = await client(bundle_for(pki, address, preload=tuple(HOSTS)), network="wifi")
        scheduling = scheduling_of(here)
        await scheduling.refresh()
        assert scheduling.plan.gateways == (usual,)
        for activity, gateways in (("background", (pushes,)), ("inactive", (pushes,)), ("foreground", (usual,))):
            here.set_activity(activity)
            await wait_until(lambda gateways=gateways: scheduling.plan.gateways == gateways)
        assert [each.role for each in asked.questions] == ["", PUSH, ""]
        assert {each.network for each in asked.questions} == {"wifi"}

    async def test_unknown_network_is_not_named(self, pki, centre, client):
        asked, address = await centre()
        here = await client(bundle_for(pki, address), network_watch="off")
        await scheduling_of(here).refresh()
        assert asked.questions[0].network == ""


def test_answers_are_told_apart_from_what_was_held_when_they_were_asked_for(pki):
    """The answer of a slow centre to an older question is applied to the plan that question named."""
    asked = Asked(pki, RULES, "u1")
    keys = {pki.plan_key.kid: pki.plan_key.public_text}
    bundle = bundle_for(pki, dispatch_keys=keys, dispatch=("127.0.0.1:1",))
    acceptance = Acceptance(bundle, SystemClock(), None)
    names = ("h1.test",)
    first = acceptance.take(asked.ask(msgspec.json.encode(PlanRequest(app=APP, hosts=names))), names)

    def changed(held):
        question = PlanRequest(app=APP, hosts=(*names, "h2.test"), held=held.digest, changes=True)
        return asked.ask(msgspec.json.encode(question)), question.hosts

    slow, hosts = changed(first)
    asked.put(hosts=HOSTS | {"h1.test": HostPlan(dns=True)})
    quick, _ = changed(first)
    assert acceptance.take(quick, hosts, held=first).version == 2
    with pytest.raises(stormline.errors.AnswerRejected, match="version 1"):
        acceptance.take(slow, hosts, held=first)
    asked.put(report=Endpoint(host="127.0.0.1", port=1, carrier="h1"))
    later, _ = changed(first)
    assert acceptance.take(later, hosts, held=first).hosts["h1.test"].dns
    asked.service.close()
