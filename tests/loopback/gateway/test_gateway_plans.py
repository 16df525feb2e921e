"""A changed plan from a real centre over the engine to every client, and what they ask through the long connection."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.assembly.authority import ensure_authority
from stormline.core import errors, limits, limits_platform
from stormline.core.codes import Code
from stormline.core.values import Address, Secret
from stormline.dispatch import service
from stormline.dispatch.config import DispatchConfig
from stormline.dispatch.health import HealthPolicy
from stormline.dispatch.probing import HealthConfig
from stormline.dispatch.rules import RuleSet
from stormline.dispatch.unit import HeldRules
from stormline.net.clock import SystemClock, SystemRng
from stormline.wire import events as e
from stormline.wire import jws, plan
from stormline.wire import messages as m
from stormline.wire.plan import Endpoint, HostPlan, PlanRequest

pytestmark = pytest.mark.loopback

A, B, C = (HostPlan(endpoints=(Endpoint(host=f"192.0.2.{number}", port=443),)) for number in (1, 2, 3))
RULES = RuleSet(
    version=5,
    hosts={"a.example": A, "b.example": B},
    apps={"demo": frozenset({"a.example", "b.example"}), "bank": frozenset({"b.example"})},
)
PLAN_KEY = jws.SigningKey(Ed25519PrivateKey.generate(), "p1")
TOKEN_KEY = jws.SigningKey(Ed25519PrivateKey.generate(), "t1")


def changed(version: int, **hosts: HostPlan) -> RuleSet:
    named = {name.replace("_", "."): each for name, each in hosts.items()}
    return msgspec.structs.replace(RULES, version=version, hosts={**RULES.hosts, **named})


class Centre:
    """A scheduling centre of the gateway's unit."""

    def __init__(self) -> None:
        self.rules = HeldRules(RULES)
        self.stop = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    async def start(self, connect: Callable[[], Awaitable[Any]], health: HealthConfig | None = None) -> None:
        up: asyncio.Future[Address] = asyncio.get_running_loop().create_future()
        config = DispatchConfig(
            host="127.0.0.1",
            port=0,
            tls=None,
            unit="u1",
            rules=RULES,
            plan_key=PLAN_KEY,
            token_key=TOKEN_KEY,
            admin_key=Secret("an-admin-key-0123456789"),
            health=health,
        )
        self.task = asyncio.create_task(
            service.run(
                config,
                clock=SystemClock(),
                rng=SystemRng(),
                started=up.set_result,
                stop=self.stop,
                source=self.rules,
                connect=connect,
            )
        )
        await asyncio.wait([self.task, up], return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            await self.task

    async def end(self) -> None:
        self.stop.set()
        if self.task is not None:
            await self.task


@pytest.fixture(name="centre")
async def _centre() -> AsyncIterator[Centre]:
    centre = Centre()
    yield centre
    await centre.end()


async def greet(gateway: Any, mint: Any, name: str, *, capabilities: tuple[str, ...] = (m.PLAN,)) -> Any:
    device = await gateway.open()
    await device.hello(app="demo", token=mint(name), capabilities=capabilities)
    return device


async def notice(device: Any, version: int, wait_s: float = 10.0) -> e.NoticeReceived:
    """Wait for a notice of this version or a newer one."""
    while (told := await device.next(e.NoticeReceived, wait_s=wait_s)).version < version:
        pass
    return told  # type: ignore[no-any-return]


async def ask(device: Any, *hosts: str, app: str = "demo", version_min: int = 0) -> plan.Plan:
    """Ask for a plan through the long connection, and verify it."""
    body = msgspec.json.encode(PlanRequest(app=app, hosts=hosts))
    answer = await device.call("dispatch", "plan", body=body)
    assert answer.status == 0
    keys = {PLAN_KEY.kid: PLAN_KEY.key.public_key()}
    return plan.verify(answer.body, keys=keys, app=app, hosts=hosts, version_min=version_min, wall=SystemClock().wall())


class TestChange:
    async def test_every_one_of_200_clients_is_told_within_two_seconds_and_what_it_asks_for_verifies(
        self, bus, gateway, centre, mint
    ):
        await gateway.start(connect=bus.connect)
        await centre.start(bus.connect)
        devices = [await greet(gateway, mint, f"d{number}") for number in range(200)]
        await asyncio.gather(*(notice(device, 5) for device in devices))
        loop = asyncio.get_running_loop()

        async def hear(device: Any) -> float:
            told = await notice(device, 6)
            assert told.hosts == ("a.example",)
            return loop.time()

        begin = loop.time()
        centre.rules.put(changed(6, a_example=C))
        moments = await asyncio.gather(*(hear(device) for device in devices))
        took = sorted(at - begin for at in moments)
        logging.getLogger("stormline.tests").info("told after %.3f to %.3f s", took[0], took[-1])
        assert took[-1] < 2.0
        assert took[-1] - took[0] > 0.3, "all at once: no jitter"
        answers = await asyncio.gather(*(ask(device, "a.example", version_min=6) for device in devices))
        assert all(answer.hosts == {"a.example": C} for answer in answers)
        assert all(device.events.empty() for device in devices), "told twice"

    async def test_client_that_comes_later_is_told_right_behind_its_welcome(self, bus, gateway, centre, mint):
        await gateway.start(connect=bus.connect)
        await centre.start(bus.connect)
        first = await greet(gateway, mint, "d1")
        await notice(first, 5)
        centre.rules.put(changed(6, a_example=C))
        await notice(first, 6)
        second = await greet(gateway, mint, "d2")
        assert m.PLAN in second.welcome.capabilities
        assert await notice(second, 6, wait_s=1.0) == e.NoticeReceived(6, ())

    async def test_client_without_the_capability_and_of_another_app_hear_nothing(self, bus, gateway, centre, mint):
        await gateway.start(connect=bus.connect)
        await centre.start(bus.connect)
        old = await greet(gateway, mint, "d1", capabilities=("compress",))
        new = await greet(gateway, mint, "d2")
        assert old.welcome.capabilities == ()
        await notice(new, 5)
        centre.rules.put(changed(6, b_example=C))
        await notice(new, 6)
        before = msgspec.structs.replace(changed(6, b_example=C), version=7, apps={**RULES.apps, "bank": frozenset()})
        centre.rules.put(before)  # concerns the other app alone
        centre.rules.put(changed(8, a_example=C))
        assert await notice(new, 7) == e.NoticeReceived(8, ("a.example", "b.example"))
        assert (await old.call("dispatch", "plan", body=b'{"app":"demo","hosts":[]}')).status == 0
        assert old.events.empty()
        assert old.broken is None

    async def test_two_nodes_tell_their_clients(self, bus, gateway, second, centre, mint):
        await gateway.start(connect=bus.connect)
        await second.start(connect=bus.connect, node="n2")
        await centre.start(bus.connect)
        devices = [await greet(gateway, mint, "d1"), await greet(second, mint, "d2")]
        for device in devices:
            await notice(device, 5)
        centre.rules.put(changed(6, a_example=C))
        assert [(await notice(device, 6)).hosts for device in devices] == [("a.example",)] * 2


class TestHealth:
    async def test_gateway_found_ill_is_told_to_those_whose_plan_names_it_and_taken_back(
        self, bus, gateway, second, centre, mint, tmp_path
    ):
        """A gateway dies; devices on the other one hear of it, each in its own moment, and none of another app."""
        ca = ensure_authority(tmp_path / "pki", clock=SystemClock(), rng=SystemRng())
        tls = ca.issue("gateway", names=["gateway.test"])
        gateway.authority = second.authority = second.authority._replace(files=tls, pem=ca.ca_pem)
        keys = gateway.config.apps["demo"]
        await gateway.start(connect=bus.connect, tls=tls)
        await second.start(connect=bus.connect, tls=tls, node="n2", apps={"demo": keys, "bank": keys})
        ill, well = (
            Endpoint(host=each.address.host, port=each.address.port, server_name="gateway.test")
            for each in (gateway, second)
        )
        centre.rules.put(msgspec.structs.replace(RULES, version=6, gateways={"demo": (ill, well), "bank": (well,)}))
        policy = HealthPolicy(interval_s=0.1, fall=2, rise=2)
        await centre.start(bus.connect, HealthConfig(policy=policy, ca_pem=ca.ca_pem.encode()))
        devices = [await greet(second, mint, f"d{number}") for number in range(20)]
        stranger = await second.open()
        await stranger.hello(app="bank", token=mint("d1", app="bank"), capabilities=(m.PLAN,))
        await asyncio.gather(*(notice(device, 6) for device in (*devices, stranger)))
        assert set((await ask(devices[0], version_min=6)).gateways) == {ill, well}
        await gateway.stop()
        loop = asyncio.get_running_loop()

        async def hear(device: Any) -> float:
            assert await device.next(e.NoticeReceived, wait_s=20.0) == e.NoticeReceived(6, (m.GATEWAYS,))
            return loop.time()

        moments = sorted(await asyncio.gather(*map(hear, devices)))
        assert moments[-1] - moments[0] > 0.1, "all at once: no jitter"
        assert (await ask(devices[0], version_min=6)).gateways == (well,)
        gateway.stop_event.clear()
        await gateway.start(connect=bus.connect, port=ill.port)
        await hear(devices[0])
        assert set((await ask(devices[0], version_min=6)).gateways) == {ill, well}
        assert stranger.events.empty()


class TestEngineAway:
    async def test_change_while_the_engine_is_away_is_told_when_it_is_back(
        self, bus, gateway, centre, mint, eventually
    ):
        await gateway.start(connect=bus.connect)
        await centre.start(bus.connect)
        device = await greet(gateway, mint, "d1")
        await notice(device, 5)
        await bus.cut()

        async def unavailable() -> bool:
            return (await gateway.admin.get("/healthz")).json()["engine"] == "unavailable"

        await eventually(unavailable)
        centre.rules.put(changed(6, a_example=C))
        with pytest.raises(errors.CallError) as raised:
            await ask(device, "a.example")
        assert raised.value.code == Code.CALL_UNAVAILABLE
        assert raised.value.retry_after_s is not None
        await bus.heal()
        assert (await notice(device, 6, wait_s=20.0)).version == 6
        assert (await ask(device, "a.example", version_min=6)).hosts == {"a.example": C}

    async def test_gateway_and_centre_that_start_without_the_engine_find_it(self, bus, gateway, centre, mint):
        await bus.cut()
        away = True

        async def connect() -> Any:
            if away:
                raise errors.EngineUnavailable("engine unavailable")
            return await bus.connect()

        await gateway.start(connect=connect)
        await centre.start(connect)
        device = await greet(gateway, mint, "d1")
        centre.rules.put(changed(6, a_example=C))
        away = False
        await bus.heal()
        assert await notice(device, 6, wait_s=20.0) == e.NoticeReceived(6, ())


class TestGate:
    async def test_questions_that_cannot_be_answered_each_get_their_code(self, bus, gateway, centre, mint):
        await gateway.start(connect=bus.connect)
        await centre.start(bus.connect)
        device = await greet(gateway, mint, "d1")
        await notice(device, 5)
        large = b" " * (limits_platform.PLAN_REQUEST_BYTES_MAX + 1)
        cases = [
            ("other", b"{}", Code.CALL_NOT_FOUND),
            ("plan", b"", Code.CALL_BAD_REQUEST),
            ("plan", b"{", Code.CALL_BAD_REQUEST),
            ("plan", b'{"app":"demo","hosts":["bad host"]}', Code.CALL_BAD_REQUEST),
            ("plan", msgspec.json.encode({"app": "demo", "hosts": ["a"] * 101}), Code.CALL_BAD_REQUEST),
            ("plan", b'{"app":"unknown","hosts":[]}', Code.CALL_REFUSED),
        ]
        for method, body, code in cases:
            with pytest.raises(errors.CallError) as raised:
                await device.call("dispatch", method, body=body)
            assert raised.value.code == code
            assert not raised.value.maybe_delivered
        call_id = device.open("dispatch", "plan", more=True)
        with contextlib.suppress(errors.LocalProtocolError):  # the answer may come before the last piece is sent
            await device.upload(call_id, [large[: limits.CHUNK_BYTES_MAX]] * 5)
        with pytest.raises(errors.CallError) as raised:
            await device.answer(call_id)
        assert raised.value.code == Code.CALL_TOO_LARGE

    async def test_question_in_pieces_is_answered(self, bus, gateway, centre, mint):
        await gateway.start(connect=bus.connect)
        await centre.start(bus.connect)
        device = await greet(gateway, mint, "d1")
        await notice(device, 5)
        call_id = device.open("dispatch", "plan", more=True)
        await device.upload(call_id, [b'{"app":"demo",', b'"hosts":["a.example"]}'])
        assert (await device.answer(call_id)).body.count(b".") == 2

    async def test_unit_without_a_centre_is_unavailable(self, bus, gateway, mint):
        await gateway.start(connect=bus.connect)
        device = await greet(gateway, mint, "d1")
        with pytest.raises(errors.CallError) as raised:
            await ask(device, "a.example")
        assert raised.value.code == Code.CALL_UNAVAILABLE
        assert not raised.value.maybe_delivered

    async def test_centre_learns_who_asks_and_from_where(self, gateway, mint, tmp_path: Path):
        from stormline.engine.memory import MemoryEngine
        from stormline.engine.port import Message, Reply

        asked: list[Message] = []

        async def answer(message: Message) -> Reply:
            asked.append(message)
            return Reply(bytes(limits.PLAN_BYTES_MAX + 1) if message.data == b"large" else b"text")

        engine = MemoryEngine(gateway.broker)
        await engine.serve("u.ouyq.plan.ask", answer, queue="dispatch")
        await gateway.start()
        device = await greet(gateway, mint, "d 1")
        assert (await device.call("dispatch", "plan", body=b"{}")).body == b"text"
        assert asked[0].headers == {
            "Stormline-App": "demo",
            "Stormline-Device": "d%201",
            "Stormline-Address": "127.0.0.1",
        }
        with pytest.raises(errors.CallError) as raised:
            await device.call("dispatch", "plan", body=b"large")
        assert raised.value.code == Code.CALL_FAILED
        await engine.close()
