"""Children that end with us: proven with real processes, grandchildren and a kill -9."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import uvloop

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.net.child import find_binary, start_child

pytestmark = pytest.mark.loopback

DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
SLEEP = "import time; print('ready', flush=True); time.sleep(600)"
STUBBORN = DEAF + SLEEP


@pytest.fixture(scope="module", autouse=True)
def _uvloop_once() -> None:
    """Let libuv open, once a process, the pipe for signals that it never closes: the guard against leaks counts it."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))


async def until_ready(log: Path) -> None:
    async with asyncio.timeout(20):
        while "ready" not in log.read_text():  # noqa: ASYNC110, ASYNC240 - another process writes it
            await asyncio.sleep(0.01)


async def test_child_that_ends_gives_its_status_and_log(tmp_path):
    log = tmp_path / "child.log"
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"
    child = start_child("seven", [sys.executable, "-c", code], log=log)
    assert await child.wait() == 7
    assert await child.wait() == 7
    assert child.returncode == 7
    assert sorted(child.tail().split()) == ["err", "out"]
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert await child.stop(1.0) == 7


async def test_child_ends_on_sigterm_within_its_grace(tmp_path):
    child = start_child("sleeper", [sys.executable, "-c", SLEEP], log=tmp_path / "log")
    await until_ready(tmp_path / "log")
    assert child.returncode is None
    assert await child.stop(20.0) == -signal.SIGTERM


async def test_child_deaf_to_sigterm_is_killed_after_its_grace(tmp_path):
    child = start_child("stubborn", [sys.executable, "-c", STUBBORN], log=tmp_path / "log")
    await until_ready(tmp_path / "log")
    assert await child.stop(0.05) == -signal.SIGKILL


async def test_stop_cancelled_kills_the_child(tmp_path):
    child = start_child("stubborn", [sys.executable, "-c", STUBBORN], log=tmp_path / "log")
    await until_ready(tmp_path / "log")
    task = asyncio.create_task(child.stop(600.0))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await child.wait() == -signal.SIGKILL


async def test_wait_cancelled_leaves_other_waiters(tmp_path):
    child = start_child("sleeper", [sys.executable, "-c", SLEEP], log=tmp_path / "log")
    first, second = asyncio.create_task(child.wait()), asyncio.create_task(child.wait())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    await child.stop(20.0)
    assert await second == child.returncode


async def test_child_has_a_session_of_its_own_and_no_descriptor_of_ours(tmp_path):
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    try:
        child = start_child("sleeper", [sys.executable, "-c", SLEEP], log=tmp_path / "log")
        await until_ready(tmp_path / "log")
        try:
            assert os.getsid(child.pid) == child.pid
            assert os.getpgid(child.pid) == child.pid
            targets = {os.readlink(f"/proc/{child.pid}/fd/{name}") for name in os.listdir(f"/proc/{child.pid}/fd")}
            assert targets == {"/dev/null", str(tmp_path / "log")}
        finally:
            await child.stop(20.0)
    finally:
        os.close(reading)
        os.close(writing)


async def test_environment_and_folder_are_as_given(tmp_path):
    code = "import os; print(os.getcwd(), os.environ['ONE'], 'HOME' in os.environ)"
    child = start_child("env", [sys.executable, "-c", code], log=tmp_path / "log", env={"ONE": "1"}, cwd=tmp_path)
    assert await child.wait() == 0
    assert child.tail() == f"{tmp_path} 1 False"


async def test_large_log_is_put_aside_at_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "CHILD_LOG_BYTES_MAX", 4)
    log = tmp_path / "log"
    for text in ("first", "second"):
        await start_child("writer", [sys.executable, "-c", f"print({text!r})"], log=log).wait()
    assert log.read_text() == "second\n"
    assert log.with_name("log.old").read_text() == "first\n"


async def test_program_that_cannot_start_is_one_platform_error(tmp_path):
    with pytest.raises(errors.PlatformError, match=r"^ghost: cannot start .*/nowhere: No such file"):
        start_child("ghost", [tmp_path / "nowhere"], log=tmp_path / "log")


async def test_log_that_cannot_be_written_is_one_platform_error(tmp_path):
    with pytest.raises(errors.PlatformError, match=r"^ghost: cannot write log"):
        start_child("ghost", [sys.executable], log=tmp_path / "none" / "log")


def test_binary_is_found_beside_the_interpreter_then_in_path(tmp_path, monkeypatch):
    assert find_binary("nats-server", install="x") == Path(sys.executable).parent / "nats-server"
    tool = tmp_path / "some-tool"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_binary("some-tool", install="x") == tool


def test_missing_binary_says_what_to_install():
    with pytest.raises(errors.PlatformError, match=r"'no-such-tool' not found .*: pip install no-such-tool"):
        find_binary("no-such-tool", install="pip install no-such-tool")


PARENT = """
import asyncio, sys
from pathlib import Path
from stormline.net.child import start_child

async def main():
    child = start_child("inner", [sys.executable, "-c", {code!r}], log=Path({log!r}))
    while "ready" not in Path({log!r}).read_text():
        await asyncio.sleep(0.01)
    print(child.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def gone(process: psutil.Process) -> bool:
    """Ended: not there, or a zombie that nobody reaps (in a container without a true init)."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_parent_killed_takes_even_a_stubborn_child_with_it(tmp_path, number):
    code = textwrap.dedent(PARENT.format(code=STUBBORN, log=str(tmp_path / "log")))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    try:
        inner = psutil.Process(int(parent.stdout.readline()))
        assert not gone(inner)
        parent.send_signal(number)
        parent.wait(20)
        for _ in range(2000):
            if gone(inner):
                break
            time.sleep(0.01)
        assert gone(inner)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def test_child_works_on_uvloop(tmp_path):
    async def main() -> int:
        child = start_child("sleeper", [sys.executable, "-c", SLEEP], log=tmp_path / "log")
        await until_ready(tmp_path / "log")
        return await child.stop(20.0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == -signal.SIGTERM
