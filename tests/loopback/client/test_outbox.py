"""Calls that an app leaves: made once each, in order, whatever breaks."""

import asyncio
import json
import subprocess
import sys

import pytest

from stormline.client.ledger import Entry, Ledger
from stormline.core import errors, limits_outbox
from stormline.core.codes import Code
from stormline.testing.gateway import answering
from stormline.testing.world import wait_until
from stormline.wire import bundle as bundles

pytestmark = pytest.mark.loopback


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(limits_outbox, "OUTBOX_PAUSE_FIRST_S", 0.02)
    monkeypatch.setattr(limits_outbox, "OUTBOX_LOOK_S", 0.2)


class Service:
    """Does the work of each key once, as services do, and notes every arrival.

    Attributes:
        arrivals: keys in the order in which they came.
        done: parameters by key.
        answer: says what becomes of a call: an answer, a code to fail with, or None to lose the connection.
    """

    def __init__(self, answer=lambda arrivals, key: True):
        self.arrivals = []
        self.done = {}
        self.answer = answer

    async def __call__(self, end, call):
        body = await end.body(call) if call.more else call.body
        key = dict(call.headers)["idempotency-key"]
        self.arrivals.append(key)
        verdict = self.answer(self.arrivals, key)
        if verdict is None:
            end.abort()
        elif isinstance(verdict, Code):
            end.machine.send_fail(call.call_id, verdict, "503 busy", maybe_delivered=verdict is Code.CALL_FAILED)
            end.flush()
        else:
            self.done.setdefault(key, json.loads(body))
            end.machine.send_reply(call.call_id, 0, body=json.dumps({"did": key}).encode())
            end.flush()


def told_to(channel):
    """Have outcomes gathered."""
    outcomes = []
    channel.on_outcome(outcomes.append)
    return outcomes


async def test_calls_left_offline_are_made_in_order_once_there_is_a_way(world, tmp_path):
    service, way = Service(), asyncio.Event()

    async def script(end):
        await way.wait()
        await answering(service)(end)

    here = await world(script)
    async with here.client(store=tmp_path) as client:
        channel = client.channel()
        outcomes = told_to(channel)
        async with channel:
            for n in range(5):
                assert await channel.enqueue("orders.create", {"n": n}, id=f"o{n}") == f"o{n}"
            assert [each.id for each in await channel.queued()] == ["o0", "o1", "o2", "o3", "o4"]
            assert outcomes == []
            way.set()
            await wait_until(lambda: len(outcomes) == 5)
            assert await channel.queued() == []
    assert service.arrivals == ["o0", "o1", "o2", "o3", "o4"]
    assert list(service.done.values()) == [{"n": n} for n in range(5)]
    assert [(each.id, each.state, each.answer) for each in outcomes] == [
        (f"o{n}", "answered", {"did": f"o{n}"}) for n in range(5)
    ]


async def test_call_whose_answer_was_lost_goes_again_under_its_key_and_later_ones_wait_for_it(world, tmp_path):
    service = Service(lambda arrivals, key: None if arrivals.count("a") == 1 and key == "a" else True)
    here = await world(answering(service))
    async with here.client(store=tmp_path) as client:
        channel = client.channel()
        outcomes = told_to(channel)
        async with channel:
            await channel.enqueue("orders.create", 1, id="a")
            await channel.enqueue("orders.create", 2, id="b")
            await wait_until(lambda: len(outcomes) == 2)
    assert service.arrivals == ["a", "a", "b"]
    assert service.done == {"a": 1, "b": 2}


async def test_lanes_do_not_wait_for_each_other(world, tmp_path):
    service = Service(lambda arrivals, key: Code.CALL_UNAVAILABLE if key == "stuck" else True)
    here = await world(answering(service))
    async with here.client(store=tmp_path) as client:
        channel = client.channel()
        outcomes = told_to(channel)
        async with channel:
            await channel.enqueue("orders.create", id="stuck", lane="one")
            await channel.enqueue("orders.create", id="behind", lane="one")
            await channel.enqueue("orders.create", id="free", lane="two")
            await wait_until(lambda: outcomes and service.arrivals.count("stuck") >= 3)
            assert [each.id for each in await channel.queued()] == ["stuck", "behind"]
    assert [each.id for each in outcomes] == ["free"]
    assert "behind" not in service.arrivals


async def test_service_that_fails_is_asked_again_and_after_a_while_given_up(world, tmp_path):
    service = Service(lambda arrivals, key: Code.CALL_FAILED if key == "bad" else True)
    here = await world(answering(service))
    async with here.client(store=tmp_path) as client:
        channel = client.channel()
        outcomes = told_to(channel)
        async with channel:
            await channel.enqueue("orders.create", id="bad")
            await channel.enqueue("orders.create", id="good")
            await wait_until(lambda: len(outcomes) == 2)
    assert service.arrivals == ["bad"] * limits_outbox.OUTBOX_ANSWERED_TRIES_MAX + ["good"]
    assert (outcomes[0].state, outcomes[0].code, outcomes[0].reason) == ("refused", Code.CALL_FAILED, "503 busy")


async def test_refusal_of_the_call_itself_ends_it_at_once(world, tmp_path):
    service = Service(lambda arrivals, key: Code.CALL_REFUSED)
    here = await world(answering(service))
    async with here.client(store=tmp_path) as client:
        channel = client.channel()
        outcomes = told_to(channel)
        async with channel:
            await channel.enqueue("orders.create", id="no")
            await wait_until(lambda: outcomes)
    assert (service.arrivals, outcomes[0].state, outcomes[0].code) == (["no"], "refused", Code.CALL_REFUSED)


async def test_call_that_waited_for_too_long_is_told_as_expired(world, tmp_path):
    here = await world(answering(Service(lambda arrivals, key: Code.CALL_UNAVAILABLE)))
    async with here.client(store=tmp_path) as client:
        channel = client.channel()
        outcomes = told_to(channel)
        async with channel:
            await channel.enqueue("orders.create", id="old", life_s=0.3)
            await wait_until(lambda: outcomes)
    assert (outcomes[0].id, outcomes[0].state) == ("old", "expired")


async def test_same_id_is_left_once_and_may_be_withdrawn(world, tmp_path):
    async def never(end):
        await end.read_hello()
        await asyncio.Event().wait()

    here = await world(never)
    async with here.client(store=tmp_path) as client, client.channel() as channel:
        await channel.enqueue("orders.create", 1, id="a")
        await channel.enqueue("orders.create", 2, id="a")
        assert [each.id for each in await channel.queued()] == ["a"]
        assert await channel.withdraw("a")
        assert not await channel.withdraw("a")
        assert await channel.queued() == []


async def test_call_waits_for_its_own_user(world, tmp_path):
    """Nothing of one user is ever sent in the name of the next."""
    service = Service()
    here = await world(
        answering(service, user="alice"), answering(service, user="bob"), answering(service, user="alice")
    )
    async with here.client(store=tmp_path) as client, client.channel() as channel:
        await channel.wait_connected()
        service.answer = lambda arrivals, key: None  # her call is under way and the connection is lost
        await channel.enqueue("orders.create", id="hers")
        await wait_until(lambda: service.arrivals)
        service.answer = lambda arrivals, key: True
        await wait_until(lambda: channel.user == "bob")
        await channel.enqueue("orders.create", id="his")
        await wait_until(lambda: "his" in service.done)
        assert [(each.id, each.user) for each in await channel.queued()] == [("hers", "alice")]
        here.gateway.ends[1].abort()
        await wait_until(lambda: "hers" in service.done)
    assert service.arrivals == ["hers", "his", "hers"]


async def test_outbox_without_a_store_lives_as_long_as_the_channel(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    service = Service()
    here = await world(answering(service))
    async with here.client() as client, client.channel() as channel:
        await channel.enqueue("orders.create", id="a")
        await wait_until(lambda: service.done)
    assert list(tmp_path.iterdir()) == []


async def test_full_outbox_says_so_and_keeps_what_it_has(world, tmp_path, monkeypatch):
    monkeypatch.setattr(limits_outbox, "OUTBOX_ENTRIES_MAX", 2)
    here = await world(answering(Service(lambda arrivals, key: Code.CALL_UNAVAILABLE)))
    async with here.client(store=tmp_path) as client, client.channel() as channel:
        await channel.enqueue("orders.create", id="a")
        await channel.enqueue("orders.create", id="b")
        with pytest.raises(errors.OutboxFull, match="holds 2 calls"):
            await channel.enqueue("orders.create", id="c")
        monkeypatch.setattr(limits_outbox, "OUTBOX_ENTRIES_MAX", 100)
        monkeypatch.setattr(limits_outbox, "OUTBOX_BYTES_MAX", 100)
        with pytest.raises(errors.OutboxFull, match="at most 100"):
            await channel.enqueue("orders.create", "x" * 100, id="d")
        assert [each.id for each in await channel.queued()] == ["a", "b"]


@pytest.mark.parametrize(
    ("change", "what"),
    [({"id": "a b"}, "id"), ({"id": "ä"}, "id"), ({"life_s": 0}, "life_s"), ({"lane": "x" * 129}, "lane")],
)
async def test_bad_names_are_refused(world, tmp_path, change, what):
    here = await world(answering(Service()))
    async with here.client(store=tmp_path) as client, client.channel() as channel:
        with pytest.raises(errors.ConfigError, match=what):
            await channel.enqueue("orders.create", **change)


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
import stormline

async def main():
    config = stormline.Config(store=Path(sys.argv[2]), report=False)
    async with stormline.AsyncClient(sys.argv[1], config=config) as client:
        channel = client.channel()
        channel.on_outcome(lambda outcome: os.kill(os.getpid(), signal.SIGKILL))
        async with channel:
            n = 0
            while True:
                print("left", await channel.enqueue("orders.create", {"n": n}, id=f"o{n}"), flush=True)
                n += 1
                if n == 40:
                    os.kill(os.getpid(), signal.SIGKILL) if sys.argv[3] == "while-waiting" else await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["while-waiting", "while-telling"])
async def test_killed_app_loses_no_call_it_was_told_is_kept(world, tmp_path, when):
    service = Service()

    async def first(end):
        if when == "while-waiting":
            await end.read_hello()
            await asyncio.Event().wait()
        await answering(service)(end)

    here = await world(first, answering(service))
    file = tmp_path / "bundle.json"
    file.write_bytes(bundles.encode(here.bundle))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED, str(file), str(tmp_path / "store"), when, stdout=subprocess.PIPE
    )
    said, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == -9
    left = [line.split()[1] for line in said.decode().splitlines() if line.startswith("left")]
    assert left
    if when == "while-waiting":
        assert len(left) == 40

    outcomes = {}
    async with here.client(store=tmp_path / "store") as client:
        channel = client.channel()
        channel.on_outcome(lambda outcome: outcomes.setdefault(outcome.id, outcome))
        async with channel:
            await wait_until(lambda: outcomes.keys() >= set(left))
            await wait_until(lambda: service.done.keys() >= set(left))
    assert [int(key[1:]) for key in service.done] == sorted(int(key[1:]) for key in service.done)
    assert all(outcome.state == "answered" for outcome in outcomes.values())


def entry(id_, *, lane="", user="u", life_ms=60_000, body=b"1"):
    return Entry(0, id_, user, lane, "a.b", body, 1_000_000 + life_ms, 0)


@pytest.fixture(name="ledger")
def _ledger(tmp_path):
    made = []

    def make(holder="one", path=tmp_path / "a.outbox", **options):
        made.append(Ledger(path, holder, **options))
        return made[-1]

    yield make
    for each in made:
        each._db.close()


class TestLedger:
    """Two processes at one file, clocks that jump, and files that are none."""

    def test_entry_is_held_by_one_and_taken_over_from_the_dead(self, ledger):
        one, two = ledger(), ledger("two")
        one.put(entry("a"))
        one.put(entry("b"))
        assert [each.id for each in one.claim("u", set(), 4, 1_000_000)] == ["a"]
        assert two.claim("u", set(), 4, 1_000_000) == []
        later = 1_000_000 + int(limits_outbox.OUTBOX_HOLD_S * 1000)
        assert [each.id for each in two.claim("u", set(), 4, later)] == ["a"]
        two.close()
        assert [each.id for each in one.claim("u", set(), 4, later)] == ["a"]

    def test_who_has_the_device_s_lock_waits_for_no_dead_holder(self, ledger):
        one = ledger()
        one.put(entry("a"))
        one.claim("u", set(), 4, 1_000_000)
        two = ledger("two", alone=True)
        assert [each.id for each in two.claim("u", set(), 4, 1_000_000)] == ["a"]

    def test_clock_set_back_by_years_frees_what_is_held(self, ledger):
        one, two = ledger(), ledger("two")
        one.put(entry("a"))
        one.claim("u", set(), 4, 900_000_000_000)
        assert [each.id for each in two.claim("u", set(), 4, 500_000)] == ["a"]

    def test_outcome_that_nobody_took_over_is_told_by_the_next(self, ledger):
        one = ledger()
        one.put(entry("a"))
        (taken,) = one.claim("u", set(), 4, 1_000_000)
        one.settle(taken, "answered", b"{}", 0, 1_000_000)
        two = ledger("two")
        assert two.untold(1_000_001) == []
        (untold,) = two.untold(1_000_000 + int(limits_outbox.OUTBOX_HOLD_S * 1000))
        assert (untold.entry.id, untold.state, untold.outcome) == ("a", "answered", b"{}")
        two.forget(untold.entry)
        assert one.waiting() == []

    def test_expired_entry_is_given_once(self, ledger):
        one = ledger()
        one.put(entry("a", life_ms=10))
        assert one.expire(1_000_009) == []
        assert [each.entry.id for each in one.expire(1_000_010)] == ["a"]
        assert one.expire(1_000_011) == []

    def test_file_that_is_no_database_is_put_aside(self, ledger, tmp_path):
        path = tmp_path / "a.outbox"
        path.write_bytes(b"not a database, and long enough to be looked at" * 40)
        one = ledger(path=path)
        assert one.set_aside
        one.put(entry("a"))
        assert (tmp_path / "a.outbox.damaged").read_bytes().startswith(b"not a database")

    def test_file_and_its_side_files_are_for_their_owner_alone(self, ledger, tmp_path):
        ledger(path=tmp_path / "deep" / "a.outbox").put(entry("a"))
        modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "deep").iterdir()}
        assert set(modes) >= {"a.outbox", "a.outbox-wal"}
        assert set(modes.values()) == {0o600}

    def test_folder_that_cannot_be_used_is_told(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(errors.OutboxError, match="file"):
            Ledger(tmp_path / "file" / "a.outbox", "one")

    def test_file_of_a_newer_version_is_left_alone(self, ledger, tmp_path):
        path = tmp_path / "a.outbox"
        one = ledger(path=path)
        one._db.execute("PRAGMA user_version=7")
        one.close()
        with pytest.raises(errors.OutboxError, match="newer version"):
            Ledger(path, "one")


def test_client_that_leaves_nothing_does_not_load_sqlite():
    code = "import stormline, sys; stormline.AsyncClient; stormline.Channel; print('sqlite3' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
