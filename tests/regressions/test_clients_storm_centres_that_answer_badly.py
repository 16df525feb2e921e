"""A value that may not be believed had every client ask for a better one, each time it was asked itself.

The story: clients that met an invalid value set out to repair it by asking the store, which so got the load of all
calls and could not recover (Facebook, 2010-09-23). Here twenty clients, whose apps ask for a host every second, meet
centres that answer badly in several ways for a quarter of an hour of virtual time. They serve by what they hold, ask
each centre at most once in their pause, which grows and differs from client to client, and are back within a minute.

Found by the same play: a device that had taken part in a roll-out and got another id was told the old rules by every
centre, refused them, and had no new plan until the roll-out was over; and a fault of ours while an answer was read had
every call ask anew.
"""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.client import acceptance, asking, fetch
from stormline.client.config import Config
from stormline.client.scheduling import Scheduling
from stormline.core import errors, limits, limits_network
from stormline.core.values import Address, Secret
from stormline.dispatch import rules
from stormline.dispatch.config import DispatchConfig
from stormline.dispatch.rules import RuleSet
from stormline.dispatch.service import DispatchService
from stormline.dispatch.unit import HeldRules
from stormline.testing.simloop import SimClock, SimRng, on_virtual_time
from stormline.wire import jws, plan, tokens
from stormline.wire.bundle import Bundle
from stormline.wire.plan import Endpoint, HostPlan

HOST, APP = "shop.example", "shop"
PLAN_KEY, TOKEN_KEY, STRANGER = (jws.SigningKey(Ed25519PrivateKey.generate(), kid) for kid in ("plan", "token", "plan"))
CENTRES, CLIENTS = 4, 20
LONG_S, ASK_EVERY_S, LIFE_S = 900.0, 1.0, 60


def rule_set(version: int, port: int = 1) -> RuleSet:
    hosts = {HOST: HostPlan(endpoints=(Endpoint(host="192.0.2.1", port=port),), ttl_s=LIFE_S)}
    return rules.check(RuleSet(version=version, unit="u1", hosts=hosts, apps={APP: frozenset(hosts)}))


class Canary(HeldRules):
    """Rules of which some devices get others."""

    def __init__(self, current: RuleSet, candidate: RuleSet, devices: set[str]) -> None:
        super().__init__(current)
        self._candidate, self._devices = candidate, devices

    def for_device(self, device: str, seen: int = 0) -> RuleSet:
        takes_part = device in self._devices or seen >= self._candidate.version
        return self._candidate if takes_part else self.current()


class Centres:
    """Real services behind addresses; takes the place of the pool.

    Attributes:
        spoils: makes a bad answer of a good one; None: they are well.
        asked: when which client asked which centre.
    """

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self.sources = [HeldRules(rule_set(1)) for _ in range(count)]
        self.services = [self._service(each) for each in self.sources]
        self.spoils: Callable[[bytes], fetch.Answer] | None = None
        self.asked: list[tuple[float, int, int]] = []
        self._loop = loop
        monkeypatch.setattr(asking.fetch, "post", self.post)

    def _service(self, source: HeldRules) -> DispatchService:
        config = DispatchConfig(
            host="127.0.0.1", port=0, tls=None, unit="u1", rules=source.current(), plan_key=PLAN_KEY,
            token_key=TOKEN_KEY, admin_key=Secret("an-admin-key-0123"),
        )  # fmt: skip
        return DispatchService(config, clock=SimClock(asyncio.get_running_loop()), rng=SimRng(1), source=source)

    def put(self, number: int, source: HeldRules) -> None:
        self.sources[number], self.services[number] = source, self._service(source)

    async def post(self, pool: Any, *, address: Address, body: bytes, **_: Any) -> fetch.Answer:
        number = int(address.host.rpartition(".")[2]) - 1
        self.asked.append((self._loop.time(), pool, number))
        await asyncio.sleep(0.05)
        good = self.services[number].answer(plan.decode_request(body))
        return fetch.Answer(200, (), good) if self.spoils is None else self.spoils(good)

    def addresses(self) -> tuple[str, ...]:
        return tuple(f"203.0.113.{number + 1}:443" for number in range(len(self.services)))


def client(centres: Centres, number: int, device: str = "") -> Scheduling:
    """Give a client's side of dispatch; its pool is its number, as nothing else is asked of it."""
    token = ""
    if device:
        claims = tokens.DeviceToken(app=APP, device=device, iat=0, exp=2**33)
        token = tokens.mint(claims, key=TOKEN_KEY.key, kid=TOKEN_KEY.kid)
    keys = {PLAN_KEY.kid: PLAN_KEY.public_text}
    bundle = Bundle(
        app=APP, dispatch=centres.addresses(), dispatch_name="dispatch.example", dispatch_keys=keys, token=token
    )
    clock = SimClock(asyncio.get_running_loop())
    return Scheduling(Config(bundle=bundle), bundle, number, clock, None, rng=SimRng(number))  # type: ignore[arg-type]


def spoiled() -> dict[str, Callable[[bytes], fetch.Answer]]:
    """Give ways to answer badly, by the reason for which a client refuses them."""

    def signed_by(key: jws.SigningKey, change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], fetch.Answer]:
        def spoil(good: bytes) -> fetch.Answer:
            payload = msgspec.json.decode(jws.b64url_decode(good.split(b".")[1]))
            payload = change(payload) or payload
            text = jws.sign(msgspec.json.encode(payload), key=key.key, kid=key.kid, typ=plan.TYP)
            return fetch.Answer(200, (), text if isinstance(text, bytes) else text.encode())

        return spoil

    def with_body(change: Callable[[bytes], bytes], status: int = 200) -> Callable[[bytes], fetch.Answer]:
        return lambda good: fetch.Answer(status, (), change(good))

    return {
        "signature": signed_by(STRANGER, lambda payload: None),
        "malformed": signed_by(PLAN_KEY, lambda payload: payload | {"hosts": []}),
        "empty": with_body(lambda _: b""),
        "too-large": with_body(lambda good: good + b"x" * limits.PLAN_BYTES_MAX),
        "stale-version": signed_by(PLAN_KEY, lambda payload: payload | {"version": 1}),
        "refused": with_body(lambda _: b'{"error":{"code":"app-unknown","message":"?"}}', 404),
    }


REASONS = {"empty": {"signature"}}


class TestStorm:
    @pytest.mark.parametrize("how", sorted(spoiled()))
    def test_clients_serve_by_what_they_hold_ask_rarely_and_are_back_within_a_minute(self, monkeypatch, how):
        @on_virtual_time
        async def story() -> None:
            centres = Centres(CENTRES, monkeypatch)
            for each in centres.sources:
                each.put(rule_set(2))
            clients = [client(centres, number) for number in range(CLIENTS)]

            async def use(scheduling: Scheduling, until_s: float) -> None:
                while loop.time() < until_s:
                    found = await scheduling.host_plan(HOST)
                    assert found is not None
                    assert scheduling.plan is not None
                    assert scheduling.plan.version >= 2
                    await asyncio.sleep(ASK_EVERY_S)

            loop = asyncio.get_running_loop()
            await asyncio.gather(*(use(each, 5.0) for each in clients))
            centres.spoils, began = spoiled()[how], loop.time()
            centres.asked.clear()
            await asyncio.gather(*(use(each, began + LONG_S) for each in clients))
            self._check_rates(centres, began)
            for each in clients:
                assert set(each.rejects) <= REASONS.get(how, {how})
                assert each.stale
                assert each.last_error is not None
            centres.spoils = None
            for each in centres.sources:
                each.put(rule_set(3, port=3))
            back = loop.time()
            await asyncio.gather(*(use(each, back + limits_network.PLAN_RETRY_S_MAX + 2) for each in clients))
            assert {each.plan.version for each in clients if each.plan} == {3}
            for each in clients:
                await each.aclose()

        story()

    @staticmethod
    def _check_rates(centres: Centres, began: float) -> None:
        by_pair: dict[tuple[int, int], list[float]] = {}
        for at, number, centre in centres.asked:
            by_pair.setdefault((number, centre), []).append(at)
        gaps = [b - a for times in by_pair.values() for a, b in itertools.pairwise(times)]
        assert min(gaps) >= 0.75 * limits.PLAN_RETRY_S
        most = LONG_S / (0.75 * limits_network.PLAN_RETRY_S_MAX) + 5  # five while the pause grows
        assert max(map(len, by_pair.values())) <= most
        begun = [at for at, _, centre in centres.asked if centre == 0 and at > began + LONG_S / 2]
        assert max(Counter(map(int, begun)).values()) <= CLIENTS / 2, "spread, not in step"


def test_fault_while_an_answer_is_read_costs_a_pause_and_not_a_question_with_every_call(monkeypatch):
    logged: list[str] = []

    def take_log(record: logging.LogRecord) -> bool:
        logged.append(record.getMessage())
        return False

    log = logging.getLogger("stormline.client")
    monkeypatch.setattr(log, "filters", [take_log])

    @on_virtual_time
    async def story() -> None:
        centres = Centres(1, monkeypatch)
        one = client(centres, 0)
        assert await one.host_plan(HOST) is not None

        def broken(*_: Any, **__: Any) -> None:
            raise ValueError("a fault of ours")

        monkeypatch.setattr(acceptance.Acceptance, "take", broken)
        centres.asked.clear()
        for _ in range(600):
            assert await one.host_plan(HOST) is not None
            await asyncio.sleep(1)
        assert 1 < len(centres.asked) == len(logged) <= 20
        assert isinstance(one.last_error, errors.DispatchError)
        await one.aclose()

    story()


def test_centre_that_is_behind_is_asked_last_and_has_its_place_back_once_it_has_caught_up(monkeypatch):
    @on_virtual_time
    async def story() -> None:
        centres = Centres(2, monkeypatch)
        centres.sources[1].put(rule_set(2))
        one = client(centres, 0)
        one._hosts[HOST] = None
        await one.refresh()
        centres.sources[0].put(rule_set(2))
        centres.sources[1].put(rule_set(3))
        assert (await one.refresh()).version == 2, "the first one answers, and may be believed"
        await asyncio.sleep(1)
        centres.sources[0].put(rule_set(1))
        for _ in range(3):
            centres.asked.clear()
            assert (await one.refresh()).version == 3
            await asyncio.sleep(1)
        assert [centre for *_, centre in centres.asked] == [1], "no time is lost with the one that is behind"
        centres.sources[0].put(rule_set(3))
        await asyncio.sleep(limits_network.SNIFF_PAUSE_S)
        await one.refresh()  # the one that was behind is tried beside it
        await asyncio.sleep(1)
        centres.asked.clear()
        assert (await one.refresh()).version == 3
        assert [centre for *_, centre in centres.asked] == [0]
        assert one.rejects == {"stale-version": 1}
        await one.aclose()

    story()


def test_device_of_a_roll_out_that_got_another_id_goes_on_with_what_it_has_seen(monkeypatch):
    @on_virtual_time
    async def story() -> None:
        centres = Centres(2, monkeypatch)
        for number in range(2):
            centres.put(number, Canary(rule_set(1), rule_set(2, port=2), {"before"}))
        one = client(centres, 0, "before")
        assert (await one.host_plan(HOST)).endpoints[0].port == 2
        claims = tokens.DeviceToken(app=APP, device="after", iat=0, exp=2**33)
        one._token = tokens.mint(claims, key=TOKEN_KEY.key, kid=TOKEN_KEY.kid)
        await asyncio.sleep(2 * LIFE_S)
        for _ in range(2):  # the expired plan serves at once, then the newer one
            assert (await one.host_plan(HOST)).endpoints[0].port == 2
            await asyncio.sleep(1)
        assert (one.rejects, one.stale) == ({}, False)
        newcomer = client(centres, 1, "another")
        assert (await newcomer.host_plan(HOST)).endpoints[0].port == 1
        for each in (one, newcomer):
            await each.aclose()

    story()
