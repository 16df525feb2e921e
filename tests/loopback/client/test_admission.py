"""Servers that take few requests at once, and requests with different urgencies, through real clients."""

import asyncio

import httpx2
import pytest

import stormline
from stormline.core import errors, limits
from stormline.testing.origin import plain

pytestmark = pytest.mark.loopback


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(limits, "RETRY_PAUSE_S", 0.001)


class Narrow:
    """An origin that answers 503 to whatever comes beyond `places` at once."""

    def __init__(self, places):
        self.places = places
        self.inside = self.most = self.refused = 0
        self.order = []

    async def __call__(self, request, writer):
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            self.order.append(request.target)
            if self.inside > self.places:
                self.refused += 1
                await asyncio.sleep(0.02)
                writer.write(plain(b"", "503 Service Unavailable"))
                return
            await asyncio.sleep(0.02)
            writer.write(plain(b"well"))
        finally:
            self.inside -= 1


def client_of(**settings):
    return httpx2.AsyncClient(transport=stormline.AsyncTransport(config=stormline.Config(**settings)), timeout=60)


async def statuses(client, url, number):
    return [each.status_code for each in await asyncio.gather(*(client.get(url) for _ in range(number)))]


async def test_server_that_takes_few_at_once_answers_a_crowd(origin):
    narrow = Narrow(4)
    there = await origin(narrow)
    async with client_of(deadline_s=30.0) as client:
        await statuses(client, there.url(), 10)  # it shows what it cannot take
        narrow.refused = 0
        assert (await statuses(client, there.url(), 60)).count(200) >= 58
        assert narrow.refused < 20


async def test_same_crowd_is_refused_where_nothing_is_bounded(origin):
    narrow = Narrow(4)
    there = await origin(narrow)
    async with client_of(deadline_s=30.0, admission=False) as client:
        await statuses(client, there.url(), 10)
        assert (await statuses(client, there.url(), 60)).count(503) > 20


async def test_server_that_takes_all_sees_the_whole_crowd_at_once(origin):
    narrow = Narrow(1000)
    there = await origin(narrow)
    async with client_of() as client:
        assert (await statuses(client, there.url(), 30)).count(200) == 30
    assert narrow.most == 30


async def test_key_request_is_sent_before_those_that_wait(origin):
    narrow = Narrow(1000)
    there = await origin(narrow)
    async with client_of() as client:
        client._transport.runtime()._executor.admission.policy.gate("127.0.0.1").bound(1)
        tasks = []
        for path, priority in (("/1", "normal"), ("/2", "background"), ("/3", "normal"), ("/4", "key"), ("/5", 1)):
            more = {"stormline.priority": priority}
            tasks.append(asyncio.create_task(client.get(there.url(path), extensions=more)))
            await asyncio.sleep(0.002)
        answers = await asyncio.gather(*tasks)
    assert narrow.order == ["/1", "/4", "/5", "/3", "/2"]
    assert answers[1].extensions["stormline"].record.stages_ms["queued"] > 40


@pytest.mark.parametrize("value", ["high", 8, -1, True, 1.5])
async def test_priority_that_is_none_is_refused_before_anything_is_sent(origin, value):
    there = await origin()
    async with client_of() as client:
        with pytest.raises(errors.LocalProtocolError, match=r"stormline\.priority"):
            await client.get(there.url(), extensions={"stormline.priority": value})
    assert not there.requests


async def test_deadline_ends_the_waiting_and_says_that_nothing_was_sent(origin):
    narrow = Narrow(1000)
    there = await origin(narrow)
    async with client_of() as client:
        gate = client._transport.runtime()._executor.admission.policy.gate("127.0.0.1")
        gate.bound(0)
        with pytest.raises(httpx2.PoolTimeout) as caught:
            await client.get(there.url(), extensions={"stormline.deadline_s": 0.1})
    assert isinstance(caught.value, errors.DeadlineExceeded)
    assert not caught.value.maybe_delivered
    assert not there.requests
    assert gate.waiting == 0


async def test_answer_being_read_slowly_holds_no_place(origin):
    there = await origin(lambda request, writer: asyncio.sleep(0, writer.write(plain(b"x" * 100_000))))
    async with client_of() as client:
        client._transport.runtime()._executor.admission.policy.gate("127.0.0.1").bound(1)
        async with client.stream("GET", there.url()) as first, client.stream("GET", there.url()) as second:
            assert (first.status_code, second.status_code) == (200, 200)


async def test_nothing_is_in_flight_when_all_is_over(origin):
    narrow = Narrow(2)
    there = await origin(narrow)
    async with client_of(deadline_s=1.0) as client:
        tasks = [asyncio.create_task(client.get(there.url())) for _ in range(40)]
        await asyncio.sleep(0.05)
        for task in tasks[::3]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        gate = client._transport.runtime()._executor.admission.policy.gate("127.0.0.1")
        assert (gate.in_flight, gate.waiting) == (0, 0)
