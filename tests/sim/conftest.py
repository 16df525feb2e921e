"""Fixtures of the simulation tests, and their base seed in the header."""

import os

import pytest

BASE_SEED = int(os.environ.get("STORMLINE_SIM_SEED", "1"))
"""The same seeds on every run, so that a red build is about the change it tests; soaks bring others."""


def pytest_report_header() -> str:
    return f"simulation: base seed {BASE_SEED} (STORMLINE_SIM_SEED)"


@pytest.fixture(name="base_seed", scope="session")
def _base_seed() -> int:
    """The first seed."""
    return BASE_SEED
