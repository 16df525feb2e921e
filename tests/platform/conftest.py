"""Fixtures of the platform tests: the whole platform as real processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stormline.testing.platform import RunningPlatform, running_platform


@pytest.fixture(scope="session", name="platform")
def _platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPlatform]:
    """One running platform with its demo, shared by all tests of a session; a test leaves it as it found it.

    At the end it is stopped as with Ctrl-C, and no process of it may be left.
    """
    with running_platform(tmp_path_factory.mktemp("platform")) as platform:
        yield platform


@pytest.fixture(name="state")
def _state(tmp_path: Path) -> Path:
    """A state folder for a test that starts platforms of its own."""
    return tmp_path / "state"
