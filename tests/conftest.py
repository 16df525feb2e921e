"""What every test gets: Hypothesis profiles, the seed in the summary, and a guard against leaks.

Fixtures of one level live in that level's own conftest; tools that tests share live in `stormline.testing`.
"""

import asyncio
import collections
import inspect
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

# No deadline per example: a busy machine is no bug. What hangs is ended by pytest's own time-out. A failure prints a
# blob that repeats it (`@reproduce_failure`).
_BASE = hypothesis.settings(deadline=None, print_blob=True)
hypothesis.settings.register_profile("dev", _BASE)
# The same inputs on every run: a red build is about the change it tests.
hypothesis.settings.register_profile("ci", _BASE, derandomize=True, database=None)
# `make soak`: many new inputs, one seed a round.
hypothesis.settings.register_profile(
    "soak", _BASE, max_examples=5000, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

# Proxies of whoever runs the tests are no way to 127.0.0.1. Taken away here, before anything is started.
for _name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
    os.environ.pop(_name, None)
    os.environ.pop(_name.lower(), None)

# Nor are the machine's router and name servers to be asked when a request fails on purpose.
os.environ.setdefault("STORMLINE_NETWORK_PROBES", "off")

LEVELS_WITH_REAL_IO = frozenset({"loopback", "platform"})
SETTLE_S = 3.0
"""How long a test's leftovers may take to go by themselves after its fixtures have ended: a closed transport gives its
socket back one turn of the loop later, a terminated child has to be reaped. Nothing waits this long unless it leaks."""
SETTLE_STEP_S = 0.01
SETTLE_STEPS = int(SETTLE_S / SETTLE_STEP_S)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the platform's files, which take minutes and wait most of them, else in the order that chance gave.

    Several processes share a run file by file; one that began such a file last would be alone with it.
    """
    items.sort(key=lambda item: "/tests/platform/" not in str(item.path))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print, also with -q, what repeats this run's order and its random numbers."""
    seed = config.getoption("randomly_seed", None)
    if isinstance(seed, int):
        terminalreporter.write_line(f"repeat this order and these random numbers with: --randomly-seed={seed}")


def _descriptors() -> collections.Counter[str]:
    """Count what this process holds open, by what it is (`socket:[4711]`, a path, ...).

    Shared libraries and files of the installation do not count: a library opens them at first use and keeps them.
    """
    held: collections.Counter[str] = collections.Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor of this very listing
            continue
        if not (target.startswith((sys.prefix, sys.base_prefix)) or ".so" in Path(target).suffixes):
            held[target] += 1
    return held


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


class _Snapshot:
    """What was open before a test, to be compared with what is open after it.

    Descriptors are compared by number: a fixture that outlives the test (one platform for a whole module) may replace
    a connection by another, but may not gather them.
    """

    def __init__(self) -> None:
        self._descriptors = _descriptors()
        self._children = _children()

    def leftovers(self) -> list[str]:
        """Name what is open now and was not before."""
        now = _descriptors()
        leaks = [f"child process {child.pid} {_command(child)}" for child in _children() - self._children]
        if now.total() > self._descriptors.total():
            leaks += [f"open descriptor {target}" for target in (now - self._descriptors).elements()]
        return leaks


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:4])
    except psutil.Error:
        return "(gone)"


def _fail_on(leaks: list[str]) -> None:
    if leaks:
        pytest.fail("the test left behind:\n  " + "\n  ".join(sorted(leaks)), pytrace=False)


@pytest.fixture
def leak_guard_sync() -> Iterator[None]:
    """Fail a plain test that leaves descriptors or child processes behind."""
    before = _Snapshot()
    yield
    for _ in range(SETTLE_STEPS):
        if not before.leftovers():
            return
        time.sleep(SETTLE_STEP_S)
    _fail_on(before.leftovers())


@pytest.fixture
async def leak_guard_async() -> AsyncIterator[None]:
    """Fail an async test that leaves tasks, descriptors or child processes behind.

    Runs in the test's own loop, so that what was closed can finish closing before it is counted.
    """
    before = _Snapshot()
    tasks_before = asyncio.all_tasks()
    yield

    def leftovers() -> list[str]:
        tasks = asyncio.all_tasks() - tasks_before - {asyncio.current_task()}
        return before.leftovers() + [f"task {task.get_name()}: {task.get_coro()!r}" for task in tasks]

    for _ in range(SETTLE_STEPS):
        if not leftovers():
            return
        await asyncio.sleep(SETTLE_STEP_S)
    _fail_on(leftovers())


@pytest.fixture(autouse=True)
def _leak_guard(request: pytest.FixtureRequest) -> None:
    """Guard the levels that do real I/O. It is set up before, and so ends after, the test's own fixtures."""
    level = request.path.relative_to(Path(__file__).parent).parts[0]
    if level not in LEVELS_WITH_REAL_IO:
        return
    function: Callable[..., object] = request.function
    guard = "leak_guard_async" if inspect.iscoroutinefunction(inspect.unwrap(function)) else "leak_guard_sync"
    request.getfixturevalue(guard)
