"""Fixtures of the laboratory's tests: real namespaces and devices, skipped where they cannot be made."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stormline.core.errors import PlatformError
from stormline.lab import messages as m
from stormline.lab.control import Shaper
from stormline.lab.namespaces import CELL, WIFI, Topology, require_lab

StartShaper = Callable[..., Shaper]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run a test of real kernels once more where it fails, and say so in the summary.

    Its packets travel in real time: where the machine stops for a second, the network did too. What is wrong in the
    code fails twice.
    """
    for item in items:
        if item.get_closest_marker("lab") is not None:
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(scope="session", autouse=True)
def _needs_lab() -> None:
    """Skip, and say why, where there is no root, no TUN or a program is missing."""
    try:
        require_lab()
    except PlatformError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _nothing_left(leak_guard_sync: None) -> None:
    """Fail a test that leaves descriptors or child processes behind."""


@pytest.fixture(name="topology")
def _topology(_needs_lab: None, _nothing_left: None) -> Iterator[Topology]:
    """Namespaces of the test's own: a connection that lives on in the kernel would send into the next test's links."""
    with Topology() as topology:
        yield topology


@pytest.fixture(name="start_shaper")
def _start_shaper(topology: Topology) -> Iterator[StartShaper]:
    """Start a shaper that serves both uplinks; `wifi` and `cell` are parameters of both directions."""
    with contextlib.ExitStack() as stack:

        def start(
            wifi: dict[str, Any] | None = None,
            cell: dict[str, Any] | None = None,
            *,
            fades: dict[str, Any] | None = None,
            seed: int = 1,
        ) -> Shaper:
            links = [
                topology.link_setup(WIFI, up=wifi, down=wifi, fades=fades, seed=seed),
                topology.link_setup(CELL, up=cell, down=cell, seed=seed),
            ]
            return stack.enter_context(Shaper(m.Setup(links=links)))

        yield start
