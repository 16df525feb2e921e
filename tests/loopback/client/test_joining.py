"""Identical reads under way at once: sent once where that was asked for, and each caller has an answer of its own."""

import asyncio
import importlib

import pytest

import stormline
from stormline.core import limits
from stormline.testing.origin import plain
from stormline.testing.world import wait_until

pytestmark = pytest.mark.loopback
JOIN = {"stormline.join_reads": True}


class Held:
    """An origin that answers when it is told to."""

    def __init__(self, answer=None):
        self.open = asyncio.Event()
        self.count = 0
        self.answer = answer or (lambda number: plain(b"answer %d" % number))

    async def __call__(self, request, writer):
        self.count += 1
        number = self.count
        await self.open.wait()
        writer.write(self.answer(number))


@pytest.fixture(name="module", params=["httpx2", "httpx"])
def _module(request):
    return importlib.import_module(request.param)


def client_of(module, **settings):
    return module.AsyncClient(transport=stormline.AsyncTransport(config=stormline.Config(**settings)))


async def reached(held, number):
    await wait_until(lambda: held.count >= number)


async def ask(client, url, number, **options):
    tasks = [asyncio.create_task(client.get(url, **options)) for _ in range(number)]
    await asyncio.sleep(0)
    return tasks


async def test_reads_are_sent_once_and_each_caller_has_its_own_answer(module, origin):
    held = Held()
    there = await origin(held)
    async with client_of(module, join_reads=True) as client:
        tasks = await ask(client, there.url(), 20)
        await reached(held, 1)
        held.open.set()
        answers = await asyncio.gather(*tasks)
        assert {each.text for each in answers} == {"answer 1"}
        assert len({id(each) for each in answers}) == 20
        assert there.counts["GET"] == 1
        assert (await client.get(there.url())).text == "answer 2"  # it is over: nothing is kept
        assert client._transport.costs.joined == 19


async def test_reads_are_each_sent_where_nobody_asked_for_joining(module, origin):
    held = Held()
    held.open.set()
    there = await origin(held)
    async with client_of(module) as client:
        await asyncio.gather(*(client.get(there.url()) for _ in range(5)))
    assert there.counts["GET"] == 5


async def test_request_may_ask_for_joining_or_refuse_it(module, origin):
    held = Held()
    there = await origin(held)
    async with client_of(module) as client:
        tasks = await ask(client, there.url(), 3, extensions=JOIN)
        tasks += await ask(client, there.url(), 2)
        await reached(held, 3)
        held.open.set()
        await asyncio.gather(*tasks)
    assert there.counts["GET"] == 3


@pytest.mark.parametrize(
    ("first", "second", "sent"),
    [
        ({"authorization": "a"}, {"authorization": "b"}, 2),
        ({"cookie": "a=1"}, {"cookie": "a=2"}, 2),
        ({"cookie": "a=1"}, {}, 2),
        ({"range": "bytes=0-1"}, {}, 2),
        ({"accept": "text/html"}, {"accept": "application/json"}, 2),
        ({"accept-language": "de"}, {"accept-language": "en"}, 2),
        ({"x-tenant": "1"}, {"x-tenant": "2"}, 2),
        ({"cache-control": "no-cache"}, {"cache-control": "no-cache"}, 2),
        ({"pragma": "no-cache"}, {"pragma": "no-cache"}, 2),
        ({"traceparent": "00-1"}, {"traceparent": "00-2"}, 1),
        ({"x-request-id": "1"}, {"x-request-id": "2"}, 1),
        ({"X-Tenant": "1"}, {"x-tenant": "1"}, 1),
    ],
)
async def test_reads_are_the_same_only_with_the_same_fields(module, origin, first, second, sent):
    held = Held()
    there = await origin(held)
    async with client_of(module, join_reads=True) as client:
        tasks = [asyncio.create_task(client.get(there.url(), headers=each)) for each in (first, second)]
        await reached(held, sent)
        held.open.set()
        await asyncio.gather(*tasks)
    assert there.counts["GET"] == sent


async def test_other_targets_methods_and_bodies_are_not_joined(module, origin):
    held = Held(lambda number: plain(b""))
    there = await origin(held)
    async with client_of(module, join_reads=True) as client:
        tasks = [
            asyncio.create_task(client.request(method, there.url(target), **more))
            for method, target, more in (
                ("GET", "/a", {}),
                ("GET", "/a?b=1", {}),
                ("HEAD", "/a", {}),
                ("GET", "/a", {"content": b"x"}),
                ("POST", "/a", {}),
                ("POST", "/a", {}),
            )
        ]
        await reached(held, 6)
        held.open.set()
        await asyncio.gather(*tasks)
    assert sum(there.counts.values()) == 6


async def test_one_callers_cancel_does_not_cancel_the_others(module, origin):
    held = Held()
    there = await origin(held)
    async with client_of(module, join_reads=True) as client:
        tasks = await ask(client, there.url(), 4)
        await reached(held, 1)
        tasks[0].cancel()  # who began it
        tasks[2].cancel()
        await asyncio.gather(tasks[0], tasks[2], return_exceptions=True)
        held.open.set()
        answers = await asyncio.gather(tasks[1], tasks[3])
        assert {each.text for each in answers} == {"answer 1"}
        assert (tasks[0].cancelled(), tasks[2].cancelled()) == (True, True)
    assert there.counts["GET"] == 1


async def test_read_that_nobody_waits_for_any_more_is_given_up(module, origin):
    held = Held()
    there = await origin(held)
    async with client_of(module, join_reads=True) as client:
        tasks = await ask(client, there.url(), 3)
        await reached(held, 1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await wait_until(lambda: not client._transport.runtime().steering.busy())
        held.open.set()
        assert (await client.get(there.url())).text == "answer 2"


async def test_failure_is_everybodys_and_each_has_an_error_of_its_own(module, origin):
    held = Held(lambda number: b"nonsense\r\n\r\n")
    there = await origin(held)
    async with client_of(module, join_reads=True) as client:
        tasks = await ask(client, there.url(), 3, extensions={"stormline.retries": False})
        await reached(held, 1)
        held.open.set()
        failures = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, stormline.errors.ProtocolViolation) for each in failures)
    assert len({id(each) for each in failures}) == 3
    assert len({each.trace.record.call_id for each in failures}) == 3
    assert there.counts["GET"] == 1


async def test_impatient_caller_does_not_wait_for_a_patient_ones_read(module, origin):
    held = Held()
    there = await origin(held)
    async with client_of(module, join_reads=True) as client:
        patient = (await ask(client, there.url(), 1))[0]
        await reached(held, 1)
        with pytest.raises(stormline.errors.DeadlineExceeded):
            await client.get(there.url(), extensions={"stormline.deadline_s": 0.1})
        held.open.set()
        assert (await patient).text == "answer 1"


async def test_patient_caller_goes_on_where_an_impatient_ones_read_ended(module, origin):
    held = Held()
    there = await origin(held)
    async with client_of(module, join_reads=True) as client:
        brief = asyncio.create_task(client.get(there.url(), extensions={"stormline.deadline_s": 0.3}))
        await reached(held, 1)
        patient = (await ask(client, there.url(), 1))[0]
        with pytest.raises(stormline.errors.DeadlineExceeded):
            await brief
        held.open.set()
        assert (await patient).status_code == 200


async def test_answer_too_large_to_hold_is_the_first_callers_and_the_others_go_themselves(module, origin):
    size = limits.JOIN_BODY_BYTES_MAX + 100_000
    held = Held(lambda number: plain(bytes([number]) * size))
    there = await origin(held)
    async with client_of(module, join_reads=True) as client:
        tasks = await ask(client, there.url(), 3)
        await reached(held, 1)
        held.open.set()
        answers = await asyncio.gather(*tasks)
    assert [len(each.content) for each in answers] == [size] * 3
    assert len({each.content[:1] for each in answers}) == 3
    assert there.counts["GET"] == 3


async def test_coded_body_is_decoded_for_each_caller(module, origin):
    import gzip

    coded = gzip.compress(b"the same for all")
    held = Held(lambda number: plain(coded, content_encoding="gzip"))
    there = await origin(held)
    async with client_of(module, join_reads=True) as client:
        tasks = await ask(client, there.url(), 3)
        await reached(held, 1)
        held.open.set()
        assert [each.text for each in await asyncio.gather(*tasks)] == ["the same for all"] * 3
    assert there.counts["GET"] == 1


async def test_read_after_a_write_does_not_get_an_answer_from_before_it(module, origin):
    held = Held(lambda number: plain(b"%d" % number))
    there = await origin(held)
    async with client_of(module, join_reads=True) as client:
        before = (await ask(client, there.url("/cart"), 1))[0]
        await reached(held, 1)
        write = asyncio.create_task(client.post(there.url("/cart")))
        await reached(held, 2)
        meanwhile = (await ask(client, there.url("/cart"), 1))[0]
        await reached(held, 3)
        held.open.set()
        await write
        held.open.clear()
        after = (await ask(client, there.url("/cart"), 1))[0]
        await reached(held, 4)
        held.open.set()
        texts = [(await each).text for each in (before, meanwhile, after)]
    assert texts == ["1", "3", "4"]


async def test_event_streams_and_long_polls_are_not_joined(module, origin):
    held = Held(lambda number: plain(b"data: x\n\n", content_type="text/event-stream"))
    there = await origin(held)
    async with client_of(module, join_reads=True) as client:
        tasks = await ask(client, there.url(), 2, headers={"accept": "text/event-stream"})
        tasks += await ask(client, there.url(), 2, extensions={"stormline.pattern": "long-poll"})
        await reached(held, 4)
        held.open.set()
        await asyncio.gather(*tasks)
    assert there.counts["GET"] == 4
