"""The loop on virtual time: what it gives, and all that makes a run fail."""

import asyncio
import logging
import socket

import pytest

from stormline.testing import simloop
from stormline.testing.simloop import SimClock, SimRng, SimulationFailed, VirtualLoop, on_virtual_time


async def hours() -> str:
    await asyncio.sleep(7200)
    return "later"


def failing(main, **bounds):
    with pytest.raises(SimulationFailed) as caught:
        simloop.run(main, **bounds)
    return "\n".join(caught.value.problems)


def test_run_gives_result_and_virtual_time() -> None:
    outcome = simloop.run(hours)
    assert (outcome.result, outcome.end_s) == ("later", 7200.0)
    assert outcome.steps < 20


def test_exception_of_the_coroutine_is_raised_as_it_is() -> None:
    async def main():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        simloop.run(main)


def test_run_that_waits_for_nothing_is_a_deadlock_with_the_tasks_named() -> None:
    async def main():
        waits = asyncio.create_task(asyncio.Event().wait(), name="the one who waits")
        await waits

    text = failing(main)
    assert "deadlock" in text
    assert "the one who waits" in text


def test_task_left_over_fails_the_run() -> None:
    async def main():
        asyncio.create_task(asyncio.sleep(50), name="forgotten")  # noqa: RUF006

    text = failing(main)
    assert "left over" in text
    assert "forgotten" in text


def test_task_that_ends_at_once_is_not_left_over() -> None:
    async def main():
        task = asyncio.create_task(asyncio.sleep(50))
        await asyncio.sleep(1)
        task.cancel()

    simloop.run(main)


def test_exception_nobody_took_fails_the_run() -> None:
    async def broken():
        raise ValueError("nobody looked")

    async def main():
        task = asyncio.create_task(broken())
        await asyncio.sleep(1)
        del task

    assert "nobody looked" in failing(main)


def test_exception_in_a_callback_fails_the_run() -> None:
    async def main():
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    assert "ZeroDivisionError" in failing(main)


def test_coroutine_nobody_awaited_fails_the_run() -> None:
    async def main():
        hours()

    assert "never awaited" in failing(main)


def test_error_line_in_our_log_fails_the_run() -> None:
    async def main():
        logging.getLogger("stormline.gateway").error("met a bug and went on")
        logging.getLogger("stormline.gateway").warning("that is no bug")

    text = failing(main)
    assert "met a bug" in text
    assert "that is no bug" not in text


def test_real_socket_is_refused() -> None:
    async def main():
        with socket.socket() as sock:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", 9))

    assert "real" in failing(main)


def test_real_reader_is_refused() -> None:
    async def main():
        asyncio.get_running_loop().add_reader(0, print)

    assert "real descriptor" in failing(main)


def test_thread_is_refused() -> None:
    async def main():
        await asyncio.to_thread(print)

    assert "thread" in failing(main)


def test_run_beyond_its_time_fails() -> None:
    assert "100 virtual seconds" in failing(hours, time_max_s=100)


def test_run_that_spins_fails() -> None:
    async def main():
        loop = asyncio.get_running_loop()

        def again():
            loop.call_soon(again)

        again()
        await asyncio.Event().wait()

    assert "1000 steps" in failing(main, steps_max=1000)


def test_trace_hash_tells_runs_apart() -> None:
    def told(*events):
        async def main():
            for event in events:
                asyncio.get_running_loop().trace(event)
                await asyncio.sleep(1)

        return simloop.run(main).trace_hash

    assert told("a", "b") == told("a", "b")
    assert len({told("a", "b"), told("b", "a"), told("a"), told()}) == 4


def test_next_run_is_not_touched_by_one_that_failed() -> None:
    failing(hours, time_max_s=1)
    assert simloop.run(hours).result == "later"


def test_loop_works_under_asyncio_runner() -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(hours()) == "later"


@pytest.fixture(name="pause_s")
def _pause_s() -> float:
    """A fixture, to see that decorated tests get theirs."""
    return 3600.0


@on_virtual_time
async def test_decorated_test_runs_on_virtual_time(pause_s) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(pause_s)
    assert loop.time() == pause_s


@on_virtual_time
async def test_clock_steps_its_wall_time_only() -> None:
    clock = SimClock(asyncio.get_running_loop(), wall_error_s=5)
    before = clock.wall()
    clock.step_wall(-3600)
    await asyncio.sleep(10)
    assert clock.monotonic() == 10
    assert clock.wall() == before - 3600 + 10


def test_rng_repeats_and_its_children_are_their_own() -> None:
    one, other = SimRng(7, "x"), SimRng(7, "x")
    assert [one.random() for _ in range(3)] == [other.random() for _ in range(3)]
    assert one.token_bytes(8) == other.token_bytes(8)
    assert one.child("a").random() == SimRng(7, "x").child("a").random() != one.child("b").random()
    assert all(1 <= one.integer(1, 3) <= 3 and 2 <= one.uniform(2, 4) < 4 for _ in range(50))
    assert {one.choice("ab") for _ in range(50)} == {"a", "b"}
