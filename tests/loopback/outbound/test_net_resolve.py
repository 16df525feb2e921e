"""Names by the system resolver: never blocking, never piling up threads."""

import asyncio
import socket
import subprocess
import sys
import threading

import pytest

from stormline.core import limits
from stormline.core.values import Address
from stormline.net.resolve import Resolver, SystemNames

pytestmark = pytest.mark.loopback


def _row(ip):
    return (socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 0))


class Hanging:
    """A resolver that answers when told, and counts."""

    def __init__(self):
        self.asked = []
        self.running = 0
        self.most = 0
        self.go = threading.Event()
        self.lock = threading.Lock()

    def __call__(self, host):
        with self.lock:
            self.asked.append(host)
            self.running += 1
            self.most = max(self.most, self.running)
        self.go.wait()
        with self.lock:
            self.running -= 1
        return [_row("127.0.0.9"), _row("127.0.0.1"), _row("127.0.0.9")]


@pytest.fixture(name="hanging")
def _hanging():
    hanging = Hanging()
    yield hanging
    hanging.go.set()


async def test_resolve_localhost_by_the_system():
    assert Address("127.0.0.1", 80) in await Resolver().resolve("localhost", 80)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "fe80::1%lo"])
async def test_resolve_literal_asks_nobody(host, hanging):
    assert await Resolver(SystemNames(lookup=hanging)).resolve(host, 1) == (Address(host, 1),)
    assert hanging.asked == []


async def test_resolve_order_stays_and_each_comes_once(hanging):
    hanging.go.set()
    found = await Resolver(SystemNames(lookup=hanging)).resolve("a.test", 7)
    assert found == (Address("127.0.0.9", 7), Address("127.0.0.1", 7))


async def test_resolve_same_name_is_asked_once(hanging):
    resolver = Resolver(SystemNames(lookup=hanging))
    tasks = [asyncio.create_task(resolver.resolve("a.test", port)) for port in range(20)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0)
    hanging.go.set()
    found = await asyncio.gather(*tasks[1:])
    assert [addresses[0].port for addresses in found] == list(range(1, 20))
    assert hanging.asked == ["a.test"]


async def test_resolve_many_names_use_few_threads_and_all_answer(hanging, until):
    resolver = Resolver(SystemNames(threads_max=3, lookup=hanging))
    tasks = [asyncio.create_task(resolver.resolve(f"n{number}.test", 1)) for number in range(30)]
    await until(lambda: len(hanging.asked) == 3)
    hanging.go.set()
    await asyncio.gather(*tasks)
    assert (hanging.most, len(hanging.asked)) == (3, 30)


async def test_resolve_hanging_name_times_out_and_is_joined_not_asked_again(hanging):
    resolver = Resolver(SystemNames(threads_max=1, lookup=hanging))
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await resolver.resolve("a.test", 1, timeout_s=0.01)
    assert hanging.asked == ["a.test"]


async def test_resolve_lookup_that_takes_long_is_begun_again_beside_itself_and_the_first_answer_counts(
    until, monkeypatch
):
    monkeypatch.setattr(limits, "RESOLVE_REPEAT_S", 0.0)
    lost = Hanging()

    def lookup(host):
        return lost(host) if not lost.asked else [_row("127.0.0.1")]

    resolver = Resolver(SystemNames(lookup=lookup))
    assert await resolver.resolve("a.test", 1) == (Address("127.0.0.1", 1),)
    lost.go.set()
    await until(lambda: not lost.running)


async def test_resolve_repeated_lookup_that_fails_leaves_the_first_alone(until, monkeypatch):
    monkeypatch.setattr(limits, "RESOLVE_REPEAT_S", 0.0)
    first, failed = Hanging(), []

    def lookup(host):
        if not first.asked:
            return first(host)
        failed.append(host)
        raise socket.gaierror(socket.EAI_AGAIN, "try again")

    task = asyncio.create_task(Resolver(SystemNames(lookup=lookup)).resolve("a.test", 1))
    await until(lambda: len(failed) == limits.RESOLVE_LOOKUPS_MAX - 1)
    assert not task.done()
    first.go.set()
    assert (await task)[0] == Address("127.0.0.9", 1)


async def test_resolve_waiting_lookup_nobody_wants_is_never_asked(hanging):
    resolver = Resolver(SystemNames(threads_max=1, lookup=hanging))
    first = asyncio.create_task(resolver.resolve("a.test", 1))
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        await resolver.resolve("b.test", 1, timeout_s=0.01)
    again = asyncio.create_task(resolver.resolve("c.test", 1))
    await asyncio.sleep(0)
    hanging.go.set()
    await asyncio.gather(first, again)
    assert hanging.asked == ["a.test", "c.test"]


async def test_resolve_lookup_that_outlives_its_caller_is_still_remembered(hanging, until):
    resolver = Resolver(SystemNames(lookup=hanging))
    with pytest.raises(TimeoutError):
        await resolver.resolve("a.test", 1, timeout_s=0.01)
    hanging.go.set()
    await until(lambda: resolver._known)
    assert (await resolver.resolve("a.test", 1))[0] == Address("127.0.0.9", 1)
    assert hanging.asked == ["a.test"]


async def test_resolve_known_name_while_the_system_hangs_is_given_and_renewed_later(hanging, until, monkeypatch):
    monkeypatch.setattr(limits, "RESOLVE_FRESH_S", 0.0)  # every answer is due to be asked again
    resolver = Resolver(SystemNames(lookup=hanging))
    hanging.go.set()
    first = await resolver.resolve("a.test", 1)
    hanging.go.clear()
    for _ in range(20):
        assert await resolver.resolve("a.test", 1) == first
    await until(lambda: hanging.running)
    assert hanging.asked == ["a.test"] * 2
    hanging.go.set()
    await until(lambda: not resolver._queries)
    resolver.close()


async def test_refresh_takes_at_most_half_of_the_threads_and_never_waits(hanging):
    names = SystemNames(threads_max=4, lookup=hanging)
    answers = [names.ask(f"n{number}.test", refresh=True) for number in range(2)]
    with pytest.raises(BlockingIOError):
        names.ask("n2.test", refresh=True)
    answers += [names.ask(f"m{number}.test", refresh=False) for number in range(3)]
    hanging.go.set()
    await asyncio.gather(*answers)
    assert (await names.ask("n2.test", refresh=True)).addresses[0] == "127.0.0.9"
    assert len(hanging.asked) == 6


async def test_close_while_a_lookup_hangs_ends_who_waits(hanging, until):
    resolver = Resolver(SystemNames(threads_max=1, lookup=hanging))
    tasks = [asyncio.create_task(resolver.resolve(host, 1)) for host in ("a.test", "b.test")]
    await until(lambda: hanging.asked)
    resolver.close()
    for task in tasks:
        with pytest.raises(ConnectionAbortedError):
            await task
    hanging.go.set()
    await until(lambda: not hanging.running)
    assert hanging.asked == ["a.test"]


async def test_resolve_beyond_the_queue_fails_at_once(hanging):
    resolver = Resolver(SystemNames(threads_max=1, lookup=hanging))
    tasks = [
        asyncio.create_task(resolver.resolve(f"n{number}.test", 1)) for number in range(limits.RESOLVE_WAITING_MAX + 1)
    ]
    await asyncio.sleep(0)
    with pytest.raises(BlockingIOError):
        await resolver.resolve("late.test", 1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("host", ["a" * 300, "a..b", "a\x00b", "\ud800", ""])
async def test_resolve_what_is_no_name_is_a_gaierror(host):
    with pytest.raises(socket.gaierror):
        await Resolver().resolve(host, 1)


async def test_resolve_name_without_address_is_a_gaierror():
    with pytest.raises(socket.gaierror):
        await Resolver(SystemNames(lookup=lambda host: [])).resolve("a.test", 1)


def test_resolve_hung_lookup_does_not_hold_the_exit():
    program = """
import asyncio, time
from stormline.net.resolve import Resolver, SystemNames
async def main():
    try:
        await Resolver(SystemNames(lookup=lambda host: time.sleep(3600))).resolve("a.test", 1, timeout_s=0.05)
    except TimeoutError:
        print("gave up", flush=True)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "gave up\n", "")
