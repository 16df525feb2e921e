"""Rules of two real centres on a real NATS server: followed, survived, never overwritten by a late writer."""

import asyncio
import contextlib
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from stormline.assembly.authority import ensure_authority, ensure_signing_key
from stormline.core import errors
from stormline.core.values import Address, Secret
from stormline.dispatch import admin, ledger, rules, service
from stormline.dispatch import head as heads
from stormline.dispatch.book import Book
from stormline.dispatch.config import DispatchConfig
from stormline.dispatch.editor import Editor
from stormline.dispatch.head import Head, Note
from stormline.dispatch.health import HealthPolicy
from stormline.dispatch.ledger import Ledger
from stormline.dispatch.probing import HealthConfig, Prober
from stormline.dispatch.rules import RuleSet
from stormline.engine.nats import connect
from stormline.engine.port import Engine
from stormline.engine.server import RunningServer, start_server
from stormline.net.clock import SystemClock, SystemRng
from stormline.wire import jws, plan
from stormline.wire.plan import Endpoint, HostPlan

pytestmark = pytest.mark.loopback

NAME = "dispatch.stormline.test"
KEY = "an-admin-key-0123"
HOST = "api.shop.example"
TCP = HealthConfig(policy=HealthPolicy(interval_s=0.05, fall=2, rise=2), tcp=frozenset({"sl-tls"}))
"""Endpoints here only take connections."""
LATE_S = 10.0
"""Until a change must be seen; what is promised is a second, of a machine that does nothing else."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def rule_set(port: int, *, version: int = 1, more: int = 0) -> RuleSet:
    plans = {HOST: HostPlan(endpoints=(Endpoint(host="127.0.0.1", port=port),))}
    plans |= {f"h{n}.example": plans[HOST] for n in range(more)}
    return rules.check(RuleSet(version=version, unit="u1", hosts=plans, apps={"shop": frozenset({HOST})}))


def place(port: int) -> Endpoint:
    return Endpoint(host="127.0.0.1", port=port)


async def eventually(condition: Callable[[], Awaitable[bool]], wait_s: float = LATE_S) -> None:
    async with asyncio.timeout(wait_s):
        while not await condition():  # noqa: ASYNC110 - the other side is another process
            await asyncio.sleep(0.01)


class Centre:
    """A running scheduling centre, asked as clients and operators do."""

    def __init__(self, client: httpx2.AsyncClient, book: Book, keys: dict[str, Any], folder: Path) -> None:
        self.client = client
        self.book = book
        self.keys = keys
        self.copy = folder / "held.json"

    async def plan(self, device: str = "") -> plan.Plan:
        """Give the plan a client gets."""
        text = (await self.client.post("/v1/plan", json={"app": "shop", "hosts": [HOST], "device": device})).content
        return plan.verify(text, keys=self.keys, app="shop", hosts=[HOST], version_min=0, wall=SystemClock().wall())

    async def answer(self, device: str = "") -> tuple[int, int]:
        """Give version and port of the plan a client gets."""
        found = await self.plan(device)
        return found.version, found.hosts[HOST].endpoints[0].port

    async def until_ports(self, *ports: int, device: str = "") -> None:
        async def there() -> bool:
            return {each.port for each in (await self.plan(device)).hosts[HOST].endpoints} == set(ports)

        await eventually(there)

    async def until(self, version: int, port: int) -> None:
        async def there() -> bool:
            return await self.answer() == (version, port)

        await eventually(there)

    async def until_stale(self, stale: bool, wait_s: float = LATE_S) -> None:
        async def there() -> bool:
            return bool((await self.client.get("/healthz")).json()["stale"]) == stale

        await eventually(there, wait_s)

    async def call(self, method: str, path: str, **more: Any) -> httpx2.Response:
        headers = {"authorization": f"Bearer {KEY}", **more.pop("headers", {})}
        return await self.client.request(method, f"/v1/admin{path}", headers=headers, **more)

    async def set(self, new: RuleSet, *, match: str = "*", **query: str) -> httpx2.Response:
        return await self.call(
            "PUT",
            "/rules",
            content=rules.encode(new),
            params={"who": "ann", "why": "a test", "force": "true", **query},
            headers={"if-match": match},
        )


class Unit:
    """A NATS server and the centres on it."""

    def __init__(self, folder: Path, stack: contextlib.AsyncExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.port = free_port()
        self.server: RunningServer
        ca = ensure_authority(folder / "pki", clock=SystemClock(), rng=SystemRng())
        self.ca_pem = ca.ca_pem
        self.tls = ca.issue("dispatch", names=[NAME], ips=["127.0.0.1"])
        self.trust = ssl.create_default_context(cadata=ca.ca_pem)
        self.plan_key = ensure_signing_key(folder / "pki" / "plan.pem", "plan")
        self.token_key = ensure_signing_key(folder / "pki" / "token.pem", "token")

    async def start_nats(self) -> None:
        self.server = await start_server(self.folder / "nats", rng=SystemRng(), port=self.port)

    async def kill_nats(self) -> None:
        """As a power cut does."""
        os.kill(self.server.child.pid, signal.SIGKILL)
        await self.server.child.wait()

    async def engine(self) -> Engine:
        return await connect(self.server.core, rng=SystemRng(), wait_s=0)

    async def ledger(self) -> Ledger:
        engine = await self.engine()
        self.stack.push_async_callback(engine.close)
        return Ledger(await engine.kv(ledger.bucket("u1"), persistent=True), rng=SystemRng())

    async def centre(
        self,
        name: str,
        assembled: RuleSet,
        *,
        stack: contextlib.AsyncExitStack | None = None,
        health: HealthConfig | None = None,
        connect: Callable[[], Awaitable[Engine]] | None = None,
    ) -> Centre:
        """Run a centre; `connect` is its own way to the engine, over which it tells gateways of changes too."""
        stack = stack or self.stack
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        config = DispatchConfig(
            host="127.0.0.1",
            port=0,
            tls=self.tls,
            unit="u1",
            rules=assembled,
            plan_key=self.plan_key,
            token_key=self.token_key,
            admin_key=Secret(KEY),
            health=health,
        )
        clock, rng = SystemClock(), SystemRng()
        book = Book(
            assembled, unit="u1", path=folder / "held.json", clock=clock, rng=rng, connect=connect or self.engine
        )
        await stack.enter_async_context(book.following())
        stop, started = asyncio.Event(), asyncio.get_running_loop().create_future()
        task = asyncio.create_task(
            service.run(
                config,
                clock=clock,
                rng=rng,
                started=started.set_result,
                stop=stop,
                source=book,
                connect=connect,
                admin=admin.mount(
                    Editor(book, unit="u1", clock=clock, ill=Prober(TCP, rng=SystemRng()).ill), key=Secret(KEY)
                ),
            )
        )

        async def end() -> None:
            stop.set()
            await task

        stack.push_async_callback(end)
        address: Address = await started

        async def sni(request: httpx2.Request) -> None:
            request.extensions["sni_hostname"] = NAME

        client = httpx2.AsyncClient(
            base_url=f"https://{address}",
            verify=self.trust,
            trust_env=False,
            timeout=60.0,  # two megabytes of rules take a busy machine more than httpx2's five seconds
            event_hooks={"request": [sni]},
        )
        await stack.enter_async_context(client)
        keys = jws.load_public_keys({self.plan_key.kid: self.plan_key.public_text})
        return Centre(client, book, keys, folder)


@pytest.fixture(name="unit")
async def _unit(tmp_path: Path) -> AsyncIterator[Unit]:
    async with contextlib.AsyncExitStack() as stack:
        unit = Unit(tmp_path, stack)
        await unit.start_nats()
        try:
            yield unit
            await stack.aclose()
        finally:
            await unit.server.stop()


async def test_change_on_one_centre_reaches_the_answers_of_both(unit: Unit) -> None:
    one, two = await unit.centre("one", rule_set(1)), await unit.centre("two", rule_set(1))
    assert await one.answer() == await two.answer() == (1, 1)
    answer = await one.set(rule_set(2), match='"1"')
    assert (answer.status_code, answer.headers["etag"], answer.json()["served"]) == (200, '"2"', True)
    assert await one.answer() == (2, 2)
    await two.until(2, 2)


async def test_nats_killed_the_last_good_rules_serve_and_say_so_and_changes_go_on_after_it(unit: Unit) -> None:
    one, two = await unit.centre("one", rule_set(1)), await unit.centre("two", rule_set(1))
    await one.set(rule_set(2))
    await two.until(2, 2)
    await unit.kill_nats()
    for centre in (one, two):
        await centre.until_stale(True)
        assert await centre.answer() == (2, 2)
    answer = await one.set(rule_set(3))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert "retry-after" in answer.headers
    await unit.start_nats()
    for centre in (one, two):
        await centre.until_stale(False, 10 * LATE_S)
        assert await centre.answer() == (2, 2)
    assert (await two.set(rule_set(3), match='"2"')).status_code == 200
    await one.until(3, 3)


async def test_centre_that_starts_without_nats_serves_its_copy_and_then_follows(unit: Unit) -> None:
    async with contextlib.AsyncExitStack() as first:
        one = await unit.centre("one", rule_set(1), stack=first)
        await one.set(rule_set(2))
    await unit.kill_nats()
    one = await unit.centre("one", rule_set(1))
    assert await one.answer() == (2, 2)
    status = (await one.call("GET", "/status")).json()
    assert (status["stale"], status["version"]) == (True, 2)
    assert "unavailable" in status["problem"]
    await unit.start_nats()
    await one.until_stale(False, 10 * LATE_S)
    assert (await one.call("GET", "/status")).json()["problem"] == ""
    assert (await one.set(rule_set(3), match='"2"')).status_code == 200


async def test_delayed_writer_never_overwrites_a_newer_version(unit: Unit) -> None:
    """A writer that has read the record, written its chunks and then sleeps, wakes after another one was faster."""
    one = await unit.centre("one", rule_set(1))
    late = await unit.ledger()
    before = await late.find()
    assert before is not None
    packed = ledger.pack(b"late")
    body = await late.write(packed, version=2, size=4, content_digest=ledger.digest(b"late"))
    mine = heads.publish(before.head, body, Note(who="late", why="", at=1))
    assert (await one.set(rule_set(2))).status_code == 200
    with pytest.raises(errors.Conflict):
        await late.move(mine, before)
    with pytest.raises(errors.Conflict):  # and once more against the newest record: its body is for a version taken
        await late.commit(lambda head: heads.publish(head, body, Note(who="late", why="", at=1)))
    assert await one.answer() == (2, 2)
    found = await late.find()
    assert found is not None
    assert found.head.log[0].who == "ann"


async def test_writers_on_both_centres_make_one_history(unit: Unit) -> None:
    centres = [await unit.centre("one", rule_set(1)), await unit.centre("two", rule_set(1))]
    answers = await asyncio.gather(*(centres[n % 2].set(rule_set(10 + n)) for n in range(6)))
    assert {answer.status_code for answer in answers} == {200}
    assert sorted(answer.json()["version"] for answer in answers) == list(range(2, 8))
    last = await centres[0].answer()
    assert last[0] == 7
    await centres[1].until(*last)
    history = (await centres[0].call("GET", "/rules/history")).json()
    assert [each["version"] for each in history["log"]] == list(range(7, 0, -1))


async def test_large_rules_reach_the_other_centre_whole(unit: Unit) -> None:
    one, two = await unit.centre("one", rule_set(1)), await unit.centre("two", rule_set(1))
    large = rule_set(2, more=20_000)
    assert len(rules.encode(large)) > 2 * 1024 * 1024
    seen: set[tuple[int, int]] = set()
    write = asyncio.create_task(one.set(large))
    while not write.done():
        seen.add(await two.answer())
    assert write.result().status_code == 200
    await two.until(2, 2)
    assert seen <= {(1, 1), (2, 2)}
    assert len(two.book.current().hosts) == 20_001


@pytest.mark.parametrize("cut_after", [0, 1, 2])
async def test_writer_that_dies_in_the_middle_changes_nothing_and_is_swept(
    unit: Unit, cut_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger.limits, "RULES_CHUNK_BYTES", 64)
    async with contextlib.AsyncExitStack() as first:
        one = await unit.centre("one", rule_set(1), stack=first)
        source = await unit.ledger()
        keys = source.keys
        for number in range(cut_after):
            await keys.create(f"body.2-dead.{number}", b"x")
        assert await one.answer() == (1, 1)
        await one.set(rule_set(2))
    two = await unit.centre("two", rule_set(1))

    async def gone() -> bool:
        return not any([await keys.get(f"body.2-dead.{number}") for number in range(cut_after)])

    await eventually(gone)
    assert await two.answer() == (2, 2)


async def test_nats_that_lost_its_disk_is_given_the_rules_again(unit: Unit) -> None:
    one = await unit.centre("one", rule_set(1))
    for port in (2, 3):
        await one.set(rule_set(port))
    await unit.kill_nats()
    store = unit.folder / "nats" / "jetstream"
    assert store.is_dir()
    store.rename(unit.folder / "lost")
    await unit.start_nats()
    source = await unit.ledger()
    head: Head | None = None
    async with asyncio.timeout(10 * LATE_S):
        while head is None:
            found = await source.find()
            head = found.head if found is not None else None
            await asyncio.sleep(0.01)
    assert (head.version, head.current) == (3, 3)
    await one.until_stale(False)
    assert (await one.set(rule_set(4), match='"3"')).json()["version"] == 4


async def test_drain_changes_the_plans_of_centres_that_do_not_probe(unit: Unit) -> None:
    both = msgspec.structs.replace(rule_set(1), hosts={HOST: HostPlan(endpoints=(place(8701), place(8702)))})
    one, two = await unit.centre("one", both), await unit.centre("two", both)
    order = {"who": "ann", "host": "127.0.0.1", "port": 8701}
    await one.call("POST", "/drains", json=order)
    for centre in (one, two):
        await centre.until_ports(8702)
    await unit.kill_nats()
    again = await unit.centre("two", both)  # from its copy
    await again.until_ports(8702)
    await unit.start_nats()
    await one.until_stale(False)
    await one.call("POST", "/drains/end", json=order)
    for centre in (one, again):
        await centre.until_ports(8701, 8702)


async def test_centre_that_starts_in_a_roll_out_probes_what_is_rolled_out(unit: Unit) -> None:
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
        well = server.sockets[0].getsockname()[1]
        dead = free_port()
        one = await unit.centre("one", rule_set(well))
        both = msgspec.structs.replace(rule_set(1), hosts={HOST: HostPlan(endpoints=(place(well), place(dead)))})
        started = await one.call(
            "POST",
            "/rollout",
            content=rules.encode(both),
            params={"who": "ann", "steps": "99.999"},
            headers={"if-match": "*"},
        )
        assert started.status_code == 200, started.text
        two = await unit.centre("two", rule_set(well), health=TCP)
        assert two.book.for_device("d1").hosts[HOST].endpoints == (place(well), place(dead))
        await two.until_ports(well, device="d1")
        assert (await two.answer("d1"))[0] == 2


class TestAdmin:
    async def test_admin_needs_its_key_and_plans_do_not(self, unit: Unit) -> None:
        one = await unit.centre("one", rule_set(1))
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}):
            for path in ("/status", "/rules", "/nowhere"):
                answer = await one.client.get(f"/v1/admin{path}", headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")
        assert (await one.call("GET", "/nowhere")).status_code == 404
        assert (await one.call("DELETE", "/rules")).status_code == 405
        assert (await one.client.get("/v1/plan?app=shop&host=" + HOST)).status_code == 200

    async def test_tokens_are_minted_beside_it(self, unit: Unit) -> None:
        one = await unit.centre("one", rule_set(1))
        answer = await one.call("POST", "/tokens", json={"app": "shop", "device": "d1"})
        assert answer.status_code == 200

    async def test_rules_have_an_etag_and_need_if_match(self, unit: Unit) -> None:
        one = await unit.centre("one", rule_set(1))
        got = await one.call("GET", "/rules")
        assert got.headers["etag"] == '"1"'
        assert rules.decode(got.content) == rule_set(1)
        query = {"who": "ann", "force": "true"}
        without = await one.call("PUT", "/rules", content=rules.encode(rule_set(2)), params=query)
        assert (without.status_code, without.json()["error"]["code"]) == (428, "precondition-required")
        assert (await one.set(rule_set(2), match=got.headers["etag"])).status_code == 200
        late = await one.set(rule_set(3), match=got.headers["etag"])
        assert (late.status_code, late.json()["error"]["code"]) == (412, "changed")
        assert (await one.set(rule_set(3), match="nonsense")).status_code == 400

    @pytest.mark.parametrize(
        ("body", "status", "code"),
        [
            (b"{", 422, "rules-invalid"),
            (b'{"version": 1, "apps": {"shop": ["nowhere.example"]}}', 422, "rules-invalid"),
            (b"x" * (rules.limits.RULES_BYTES_MAX + 1), 413, "too-large"),
        ],
        ids=["half", "reference", "large"],
    )
    async def test_bad_rules_are_refused(self, unit: Unit, body: bytes, status: int, code: str) -> None:
        one = await unit.centre("one", rule_set(1))
        answer = await one.call("PUT", "/rules", content=body, params={"who": "ann"}, headers={"if-match": "*"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert await one.answer() == (1, 1)

    async def test_host_nobody_listens_for_is_refused(self, unit: Unit) -> None:
        one = await unit.centre("one", rule_set(1))
        dead = free_port()
        answer = await one.set(rule_set(dead), force="false")
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "no-live-endpoint")
        assert f"{HOST} (connect: connection refused)" in answer.json()["error"]["message"]
        async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
            alive = server.sockets[0].getsockname()[1]
            assert (await one.set(rule_set(alive), force="false")).status_code == 200

    async def test_small_orders_are_bounded_and_checked(self, unit: Unit) -> None:
        one = await unit.centre("one", rule_set(1))
        large = await one.call("POST", "/drains", json={"who": "a", "host": "x" * 9000})
        assert large.status_code == 413
        unknown = await one.call("POST", "/drains", json={"who": "a", "host": "192.0.2.1", "prot": 1})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (400, "bad-request")
        nameless = await one.call("POST", "/drains", json={"host": "192.0.2.1"})
        assert nameless.status_code == 400

    async def test_drain_holds_until_it_is_ended(self, unit: Unit) -> None:
        one, two = await unit.centre("one", rule_set(1)), await unit.centre("two", rule_set(1))
        order = {"who": "ann", "why": "new kernel", "host": "192.0.2.1", "port": 8702}
        assert (await one.call("POST", "/drains", json=order)).json()["drains"] == ["192.0.2.1:8702"]
        again = await one.call("POST", "/drains", json=order)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "unchanged")

        async def drained() -> bool:
            return bool(two.book.drains)

        await eventually(drained)
        assert (await two.call("POST", "/drains/end", json=order)).json()["drains"] == []
        assert (await two.call("GET", "/drains")).json() == {"drains": []}

    async def test_rollout_is_started_stepped_told_of_and_halted(self, unit: Unit) -> None:
        one = await unit.centre("one", rule_set(1))
        query = {"who": "ann", "force": "true", "steps": "10,50"}
        started = await one.call(
            "POST", "/rollout", content=rules.encode(rule_set(2)), params=query, headers={"if-match": '"1"'}
        )
        assert (started.status_code, started.json()["rollout"]["percent"]) == (200, 10.0)
        assert await one.answer() == (1, 1)  # a client that names no device takes no part
        stepped = await one.call("POST", "/rollout/step", json={"who": "ann"})
        assert stepped.json()["rollout"]["percent"] == 50.0
        told = {"version": 2, "new": {"calls": 900, "successes": 700}, "old": {"calls": 900, "successes": 899}}
        judged = await one.call("PUT", "/rollout/outcomes", json=told)
        assert (judged.json()["halted"], judged.json()["version"]) == (True, 3)
        assert await one.answer() == (3, 1)
        over = await one.call("POST", "/rollout/halt", json={"who": "ann"})
        assert (over.status_code, over.json()["error"]["code"]) == (404, "no-rollout")

    async def test_openapi_page_names_every_path_and_answer(self, unit: Unit) -> None:
        one = await unit.centre("one", rule_set(1))
        page = (await one.call("GET", "/openapi.json")).json()
        assert page["servers"] == [{"url": "/v1/admin"}]
        assert {"/rules", "/rules/history", "/rules/rollback", "/rollout", "/drains"} <= page["paths"].keys()
        for path, methods in page["paths"].items():
            for method, about in methods.items():
                schema = about["responses"]["200"]["content"]["application/json"]["schema"]
                assert schema or (path, method) == ("/rules", "get")
