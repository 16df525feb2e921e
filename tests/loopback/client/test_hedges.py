"""A second request beside a read that is later than most: where the plan wants it, there is room, and bytes allow."""

import asyncio

import httpx2
import pytest

import stormline
from stormline.core import limits, limits_means
from stormline.policy.shape import path_class
from stormline.testing.origin import plain
from stormline.testing.world import wait_until

pytestmark = pytest.mark.loopback

NAME = "site.test"


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """Look soon: how late is late is policy's, and its own tests hold it."""
    monkeypatch.setattr(limits, "LOOK_FIRST_S", 0.05)


@pytest.fixture(name="late")
async def _late(origin):
    """Two servers; the one that is asked first leaves its first request unanswered until the end."""
    asked, end = [], asyncio.Event()

    async def answer(request, writer):
        asked.append(request)
        if len(asked) == 1:
            await end.wait()
        writer.write(plain(b"ok"))

    servers = [await origin(answer) for _ in range(2)]
    yield asked, tuple(server.address for server in servers)
    end.set()


def transport_with(late, names, *, plan="key", learned=True, **settings):
    """Give a transport that knows the waits of this class of path, and has carried some megabytes."""
    _, addresses = late
    config = stormline.Config(trust_env=False, rules=(stormline.BusinessRule(plan=plan),), **settings)
    transport = stormline.AsyncTransport(config=config, outside=names({NAME: addresses}))
    steering = transport.runtime().steering
    for number in range(limits_means.HEDGE_SAMPLES_MIN if learned else 0):
        steering.hedges.observe(
            steering.network.id,
            NAME,
            path_class("GET", "/"),
            first_byte_s=0.001,
            carried_bytes=1_000_000,
            now=float(number),
        )
    return transport


async def test_late_read_has_a_second_request_beside_it_and_the_first_answer_counts(late, names, monkeypatch):
    monkeypatch.setattr(limits, "STALL_PROVE_S", 20.0)  # nor a lane for want of a first answer
    asked, _ = late
    transport = transport_with(late, names)
    async with httpx2.AsyncClient(transport=transport, timeout=20.0) as client:
        response = await client.get(f"http://{NAME}/")
        hedges = transport.runtime().steering.hedges
        assert (response.text, len(asked), hedges.begun) == ("ok", 2, 1)
        assert 0 < hedges.bytes_spent <= limits_means.HEDGE_BYTES_SHARE * hedges.bytes_carried
        assert any("later than most" in line for _, line in response.extensions["stormline"].timeline.story)


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("GET", {"plan": "ordinary"}),
        ("GET", {"disabled": frozenset({"hedge"})}),
        ("GET", {"learned": False}),
        ("POST", {}),
    ],
)
async def test_nothing_else_has(late, names, method, change, monkeypatch):
    asked, _ = late
    monkeypatch.setattr(limits, "ATTEMPTS_MAX", 1)  # nor a lane for silence
    transport = transport_with(late, names, **change)
    async with httpx2.AsyncClient(transport=transport, timeout=20.0) as client:
        request = asyncio.ensure_future(client.request(method, f"http://{NAME}/"))
        await wait_until(lambda: asked)
        looked = asyncio.get_running_loop().time() + 4 * limits.LOOK_FIRST_S
        await wait_until(lambda: asyncio.get_running_loop().time() > looked)
        assert len(asked) == 1
        assert transport.runtime().steering.hedges.begun == 0
        request.cancel()
        await asyncio.wait([request])
