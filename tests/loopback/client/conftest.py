"""Platforms and origins for the client's tests, and what they share."""

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from stormline.client import recorder
from stormline.core import limits
from stormline.telemetry.timeline import CallRecord
from stormline.testing.origin import Answer, Origin, answer_plainly, running_origin
from stormline.testing.world import Pki, World, make_pki, running_world


@pytest.fixture(scope="session", name="pki")
def _pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return make_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(name="world")
async def _world(pki: Pki) -> AsyncIterator[Callable[..., Awaitable[World]]]:
    """Make worlds: `await world(script, ...)`."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(*scripts, **rules):
            return await stack.enter_async_context(running_world(pki, *scripts, **rules))

        yield make


@pytest.fixture(name="origin")
async def _origin() -> AsyncIterator[Callable[..., Awaitable[Origin]]]:
    """Make origins: `await origin(answer)`."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(answer: Answer = answer_plainly, **options) -> Origin:
            return await stack.enter_async_context(running_origin(answer, **options))

        yield make


@pytest.fixture(name="records")
def _records(monkeypatch: pytest.MonkeyPatch) -> list[CallRecord]:
    """Catch every record that would be reported; ask for `report=True` in the client."""
    taken: list[CallRecord] = []
    monkeypatch.setattr(recorder.Recorder, "add", lambda self, record: taken.append(record))
    return taken


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Come back soon: the spans are policy's, and its own tests hold them."""
    monkeypatch.setattr(limits, "RECONNECT_FIRST_S", 0.05)
    monkeypatch.setattr(limits, "PLAN_RETRY_S", 0.2)


@pytest.fixture(name="all_logs")
def _all_logs(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Capture every log at DEBUG."""
    caplog.set_level(logging.DEBUG)
    return caplog
